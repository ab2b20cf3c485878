"""The backward kernels on a TPU: dq over the key blocks of a row block; dk and dv over the row blocks of a key block.

Each of the two computes the weights again from the log-sum-exp, so that neither stores partial sums in HBM:

    p = exp(logit - lse),  ds = p (dout.v + shift),  shift = dlse - dout.out
    dq = scale ds k,       dv = p' dout,             dk = scale ds' q
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rsi_jax.kernels.attention import blocks, tpu_tile


def gradients(plan: tpu_tile.Plan, ranges_B4R, lse_BJ1R, shift_BJ1R, q_BJRC, dout_BJRC, k_BJSC, v_BJSC):
    """Makes (dq_BJCR, dk_BJSC, dv_BJSC) in the dtypes of q, k, v. Where a row sees nothing, lse and shift are 0."""
    (B, J, rows, C), S = q_BJRC.shape, k_BJSC.shape[2]
    N, M = rows // plan.rows, S // plan.keys
    arrays = ranges_B4R, lse_BJ1R, shift_BJ1R, q_BJRC, dout_BJRC, k_BJSC, v_BJSC
    summary_BN8 = tpu_tile.summary(plan, ranges_B4R, S)

    def run(kernel, place, bounds, results, scratch, products):
        at = tpu_tile.specs(plan, C, place)
        specs_in = [at.ranges, at.lines, at.lines, at.rows, at.rows, at.keys, at.keys]
        out = [(getattr(at, name), shape) for name, shape in results]
        return tpu_tile.call(plan, kernel, place, bounds, summary_BN8, arrays, specs_in, out, scratch, products)

    seen = [summary_BN8[..., i] for i in range(4)]
    dq = "turned", jax.ShapeDtypeStruct((B, J, C, rows), q_BJRC.dtype)
    dk, dv = (("keys", jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k_BJSC, v_BJSC))
    (dq_BJCR,) = run(_dq_kernel, tpu_tile.by_rows(N), seen, [dq], [(C, plan.rows)], 3)
    seen_by = blocks.turned(summary_BN8, M)
    dk_BJSC, dv_BJSC = run(_dkv_kernel, tpu_tile.by_keys(M, N), seen_by, [dk, dv], [(plan.keys, C)] * 2, 4)
    return dq_BJCR, dk_BJSC, dv_BJSC


def _weights(plan, hide, lse_ref, shift_ref, q_ref, dout_ref, k_ref, v_ref):
    """p and ds of a tile [K, R], float32; ds without the scale."""
    logit_KR = tpu_tile.scores(plan, q_ref, k_ref)
    weight_KR = jnp.exp(hide(logit_KR) - lse_ref[...])
    dlogit_KR = weight_KR * (tpu_tile.dot(v_ref[...], dout_ref[...], 1, 1) + shift_ref[...])
    if plan.soft_cap:
        dlogit_KR = dlogit_KR * (1 - (logit_KR / plan.soft_cap) ** 2)
    return weight_KR, dlogit_KR


def _dq_kernel(plan, place, walk_ref, summary_ref, ranges_ref, *refs):
    *tile_refs, dq_ref, sum_ref = refs
    k_ref = tile_refs[-2]
    step = blocks.step_of(walk_ref, pl.program_id(1), pl.program_id(2))

    @pl.when(step.first)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(hide):
        _, dlogit_KR = _weights(plan, hide, *tile_refs)
        k_KC = k_ref[...]
        sum_ref[...] += tpu_tile.dot(k_KC, dlogit_KR.astype(k_KC.dtype), 0, 0)

    tpu_tile.visit(step.visits, place(step), summary_ref, ranges_ref, add)

    @pl.when(step.last)
    def _():
        dq_ref[...] = (sum_ref[...] * plan.scale).astype(dq_ref.dtype)


def _dkv_kernel(plan, place, walk_ref, summary_ref, ranges_ref, *refs):
    *tile_refs, dk_ref, dv_ref, dk_sum_ref, dv_sum_ref = refs
    q_ref, dout_ref = tile_refs[2:4]
    step = blocks.step_of(walk_ref, pl.program_id(1), pl.program_id(2))

    @pl.when(step.first)
    def _():
        dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
        dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

    def add(hide):
        weight_KR, dlogit_KR = _weights(plan, hide, *tile_refs)
        q_RC, dout_RC = q_ref[...], dout_ref[...]
        dk_sum_ref[...] += tpu_tile.dot(dlogit_KR.astype(q_RC.dtype), q_RC, 1, 0)
        dv_sum_ref[...] += tpu_tile.dot(weight_KR.astype(dout_RC.dtype), dout_RC, 1, 0)

    tpu_tile.visit(step.visits, place(step), summary_ref, ranges_ref, add)

    @pl.when(step.last)
    def _():
        dk_ref[...] = (dk_sum_ref[...] * plan.scale).astype(dk_ref.dtype)
        dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)
