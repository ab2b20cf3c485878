"""The forward kernel on a TPU: a running softmax over the key blocks that a block of rows sees."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from rsi_jax.kernels.attention import blocks, chunked, tpu_tile


def forward(plan: tpu_tile.Plan, ranges_B4R, q_BJRC, k_BJSC, v_BJSC) -> tuple[jax.Array, jax.Array]:
    """Attends: (out_BJCR in the dtype of q, lse_BJ1R float32). Rows and keys fill whole tiles."""
    B, J, rows, C = q_BJRC.shape
    place = tpu_tile.by_rows(rows // plan.rows)
    at = tpu_tile.specs(plan, C, place)
    summary_BN8 = tpu_tile.summary(plan, ranges_B4R, k_BJSC.shape[2])
    out = at.turned, jax.ShapeDtypeStruct((B, J, C, rows), q_BJRC.dtype)
    lse = at.lines, jax.ShapeDtypeStruct((B, J, 1, rows), jnp.float32)
    return tpu_tile.call(
        plan,
        _kernel,
        place,
        [summary_BN8[..., i] for i in range(4)],
        summary_BN8,
        arrays=(ranges_B4R, q_BJRC, k_BJSC, v_BJSC),
        specs_in=[at.ranges, at.rows, at.keys, at.keys],
        out=[out, lse],
        scratch=[(1, plan.rows), (1, plan.rows), (C, plan.rows)],
        products=2,
    )


def _kernel(
    plan, place, walk_ref, summary_ref, ranges_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, top_ref, total_ref, sum_ref
):
    step = blocks.step_of(walk_ref, pl.program_id(1), pl.program_id(2))

    @pl.when(step.first)
    def _():
        top_ref[...] = jnp.full_like(top_ref, chunked.FLOOR)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(hide):
        logit_KR = hide(tpu_tile.scores(plan, q_ref, k_ref))
        top_1R, v_KC = top_ref[...], v_ref[...]
        new_1R = jnp.maximum(top_1R, jnp.max(logit_KR, axis=0, keepdims=True))
        weight_KR, shrink_1R = jnp.exp(logit_KR - new_1R), jnp.exp(top_1R - new_1R)
        top_ref[...] = new_1R
        total_ref[...] = total_ref[...] * shrink_1R + jnp.sum(weight_KR, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * shrink_1R + tpu_tile.dot(v_KC, weight_KR.astype(v_KC.dtype), 0, 0)

    tpu_tile.visit(step.visits, place(step), summary_ref, ranges_ref, add)

    @pl.when(step.last)
    def _():
        total_1R = total_ref[...]
        seen_1R = total_1R > 0
        some_1R = jnp.where(seen_1R, total_1R, 1.0)
        out_ref[...] = (sum_ref[...] / some_1R).astype(out_ref.dtype)
        lse_ref[...] = jnp.where(seen_1R, top_ref[...] + jnp.log(some_1R), -jnp.inf)
