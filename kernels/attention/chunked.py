"""Attention in blocks, by plain XLA ops: linear memory, and key blocks that no query of a block sees are skipped.

The queries go in blocks. The ranges of the queries of a block (of all rows) span at most two intervals of key blocks; a
loop of that many steps keeps a running softmax in float32. The backward pass recomputes the weights from the saved
log-sum-exp: per query block it adds up dq, and adds to dk and dv in place.

Source: Milakov & Gimelshein 2018 (arXiv 1805.02867), the running softmax; Rabe & Staats 2021 (arXiv 2112.05682), linear
memory; Dao et al. 2022 (arXiv 2205.14135), the backward pass.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rsi_jax.kernels.attention import blocks, passes, reference

HIDDEN = -1e30  # the logit of a hidden key
FLOOR = -1e29  # where the running maximum starts: exp(HIDDEN - maximum) is exactly 0, also when nothing was seen yet

# Measured on CPU: with the logits of a block in the cache the backward pass takes up to half of the time.
BLOCK, CACHED = 128, 2**19

dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


class Plan(NamedTuple):
    """What is static besides the shapes."""

    scale: float
    soft_cap: float
    query_block: int
    key_block: int


def attention(
    q_BQHC,
    k_BJSC,
    v_BJSC,
    ranges,
    *,
    scale: float,
    soft_cap: float,
    query_block: int | None = None,
    key_block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Same results as the reference, keys major over time: (out_BQHC, lse_BQH).

    query_block, key_block: most queries and keys of a block; None = BLOCK, or half of it where the logits of a block
      would fill more than CACHED. A row of one block has nothing to skip: that is the reference.
    """
    B, Q, H, _ = q_BQHC.shape
    S = k_BJSC.shape[2]
    if not B * Q * S:
        return jnp.zeros_like(q_BQHC), jnp.full((B, Q, H), -jnp.inf, jnp.float32)
    if Q <= (query_block or BLOCK) and S <= (key_block or BLOCK):
        return reference.attention(q_BQHC, k_BJSC, v_BJSC, ranges, scale=scale, soft_cap=soft_cap)
    most = BLOCK if B * H * BLOCK**2 < CACHED else BLOCK // 2
    sizes = even_block(Q, query_block or most), even_block(S, key_block or most)
    plan = Plan(float(scale), float(soft_cap), *sizes)
    ranges = tuple(jnp.clip(x, 0, S).astype(jnp.int32) for x in ranges)
    return _attend(plan, q_BQHC, k_BJSC, v_BJSC, ranges)


def even_block(length: int, most: int) -> int:
    """Chooses the size of blocks that cover `length` in as few as blocks of `most` do, with the least left over."""
    return -(-length // -(-length // most))


def block_bounds(ranges_BNI: Sequence[jax.Array], keys: int, key_block: int) -> jax.Array:
    """Finds the key blocks that each of N query blocks visits: [N, 4], two disjoint intervals (start, end, start, end).

    ranges_BNI: lo1, hi1, lo2, hi2 of query i of block n, within [0, keys]. All keys that a query sees lie in the blocks
    of its query block: those from the smallest lo to the largest hi over the rows, for each of the two ranges.
    """

    lo1, hi1, lo2, hi2 = ranges_BNI
    first, second = (blocks.covers(lo, hi, keys, key_block, axis=(0, 2)) for lo, hi in ((lo1, hi1), (lo2, hi2)))
    return jnp.stack(blocks.disjoint(*first, *second), axis=1)


def _cut(x_BQX, block: int):
    """Cuts [B, Q, ...] into [B, N, I, ...]: N blocks of I queries, the last one filled up with zeros."""
    B, Q = x_BQX.shape[:2]
    count = -(-Q // block)
    x_BQX = jnp.pad(x_BQX, [(0, 0), (0, count * block - Q)] + [(0, 0)] * (x_BQX.ndim - 2))
    return x_BQX.reshape(B, count, block, *x_BQX.shape[2:])


def _query_blocks(plan: Plan, k_BJSC, ranges, *columns_BQHX):
    """Makes what the loop over query blocks reads: bounds [N, 4], ranges [N, B, I], columns [N, B, J, G, I, ...]."""
    ranges_BNI = [_cut(x, plan.query_block) for x in ranges]
    bounds_N4 = block_bounds(ranges_BNI, k_BJSC.shape[2], plan.key_block)

    def heads_first(x_BQHX):
        x = _cut(x_BQHX, plan.query_block)
        B, N, I, H = x.shape[:4]
        J = k_BJSC.shape[1]
        return jnp.moveaxis(x.reshape(B, N, I, J, H // J, *x.shape[4:]), (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))

    columns = [heads_first(x) for x in columns_BQHX]
    return bounds_N4, [jnp.moveaxis(x, 1, 0) for x in ranges_BNI], *columns


def _join(x_NBJGIX, queries: int):
    """Joins the blocks of a result: [N, B, J, G, I, ...] -> [B, Q, H, ...]."""
    N, B, J, G, I = x_NBJGIX.shape[:5]
    x = jnp.moveaxis(x_NBJGIX, (1, 0, 4, 2, 3), (0, 1, 2, 3, 4))
    return x.reshape(B, N * I, J * G, *x.shape[5:])[:, :queries]


def _visit(bounds_4, body, carry):
    """Runs carry = body(key block, carry) over the two intervals."""
    start1, end1, start2, end2 = bounds_4
    first = end1 - start1

    def step(i, carry):
        return body(jnp.where(i < first, start1 + i, start2 + i - first), carry)

    return jax.lax.fori_loop(0, first + end2 - start2, step, carry)


def _start(plan: Plan, k_BJSC, index):
    """First key of a block. The last block of a ragged S starts early; `_scores` hides what the one before it had."""
    return jnp.minimum(index * plan.key_block, k_BJSC.shape[2] - plan.key_block)


def _scores(plan: Plan, q_BJGIC, k_BJKC, ranges, start, index):
    """Capped logits [B, J, G, I, K], and where they are visible, [B, 1, 1, I, K]."""
    logit = dot("bjgic,bjkc->bjgik", q_BJGIC, k_BJKC) * plan.scale
    if plan.soft_cap:
        logit = plan.soft_cap * jnp.tanh(logit / plan.soft_cap)
    key_K = start + jnp.arange(plan.key_block, dtype=jnp.int32)
    mask_BIK = reference.shown(ranges, key_K) & (key_K >= index * plan.key_block)
    mask_BIK = jax.lax.optimization_barrier(mask_BIK)  # made once, not again for each head and each use
    return logit, mask_BIK[:, None, None]


def _take(plan: Plan, x_BJSC, start):
    return jax.lax.dynamic_slice_in_dim(x_BJSC, start, plan.key_block, 2)


def _forward(plan: Plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    def block(x):
        bounds_4, ranges_BI, q_BJGIC = x

        def visit(index, carry):
            top, total, out = carry
            start = _start(plan, k_BJSC, index)
            logit, mask = _scores(plan, q_BJGIC, _take(plan, k_BJSC, start), ranges_BI, start, index)
            logit = jnp.where(mask, logit, HIDDEN)
            new_top = jnp.maximum(top, jnp.max(logit, axis=-1))
            weight, shrink = jnp.exp(logit - new_top[..., None]), jnp.exp(top - new_top)
            more = dot("bjgik,bjkc->bjgic", weight.astype(v_BJSC.dtype), _take(plan, v_BJSC, start))
            return new_top, total * shrink + jnp.sum(weight, axis=-1), out * shrink[..., None] + more

        nothing = jnp.zeros(q_BJGIC.shape[:-1], jnp.float32)
        carry = jnp.full_like(nothing, FLOOR), nothing, jnp.zeros(q_BJGIC.shape, jnp.float32)
        top, total, out = _visit(bounds_4, visit, carry)
        seen, some = total > 0, jnp.where(total > 0, total, 1.0)
        return (out / some[..., None]).astype(q_BJGIC.dtype), jnp.where(seen, top + jnp.log(some), -jnp.inf)

    out, lse = jax.lax.map(block, _query_blocks(plan, k_BJSC, ranges, q_BQHC))
    return _join(out, q_BQHC.shape[1]), _join(lse, q_BQHC.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    return _forward(plan, q_BQHC, k_BJSC, v_BJSC, ranges)


def _attend_fwd(plan: Plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    out, lse = passes.named(*_forward(plan, q_BQHC, k_BJSC, v_BJSC, ranges))
    return (out, lse), (q_BQHC, k_BJSC, v_BJSC, ranges, out, lse)


def _attend_bwd(plan: Plan, saved, cotangents):
    """p = exp(logit - lse), ds = p (dout.v - dout.out + dlse), dv = p' dout, dq = scale ds k, dk = scale ds' q."""
    q_BQHC, k_BJSC, v_BJSC, ranges, out_BQHC, lse_BQH = saved
    dout_BQHC, dlse_BQH = cotangents
    seen_BQH = lse_BQH > -jnp.inf
    dout_BQHC = jnp.where(seen_BQH[..., None], dout_BQHC, 0)
    shift_BQH = jnp.where(seen_BQH, dlse_BQH, 0) - dot("bqhc,bqhc->bqh", dout_BQHC, out_BQHC)

    def block(carry, x):
        bounds_4, ranges_BI, q_BJGIC, dout_BJGIC, lse_BJGI, shift_BJGI = x

        def visit(index, carry):
            dq_BJGIC, dk_BJSC, dv_BJSC = carry
            start = _start(plan, k_BJSC, index)
            k_BJKC, v_BJKC = _take(plan, k_BJSC, start), _take(plan, v_BJSC, start)
            logit, mask = _scores(plan, q_BJGIC, k_BJKC, ranges_BI, start, index)
            weight = jnp.exp(jnp.where(mask, logit, HIDDEN) - lse_BJGI[..., None])
            dlogit = weight * (dot("bjgic,bjkc->bjgik", dout_BJGIC, v_BJKC) + shift_BJGI[..., None])
            if plan.soft_cap:
                dlogit = dlogit * (1 - (logit / plan.soft_cap) ** 2)
            weight, dlogit = weight.astype(v_BJSC.dtype), dlogit.astype(k_BJSC.dtype)
            dk_BJSC = _add(dk_BJSC, dot("bjgik,bjgic->bjkc", dlogit, q_BJGIC), start)
            dv_BJSC = _add(dv_BJSC, dot("bjgik,bjgic->bjkc", weight, dout_BJGIC), start)
            return dq_BJGIC + dot("bjgik,bjkc->bjgic", dlogit, k_BJKC), dk_BJSC, dv_BJSC

        dq_BJGIC, *carry = _visit(bounds_4, visit, (jnp.zeros(q_BJGIC.shape, jnp.float32), *carry))
        return tuple(carry), dq_BJGIC

    columns = q_BQHC, dout_BQHC, jnp.where(seen_BQH, lse_BQH, 0), shift_BQH
    zero_BJSC = jnp.zeros(k_BJSC.shape, jnp.float32)
    (dk, dv), dq = jax.lax.scan(block, (zero_BJSC, zero_BJSC), _query_blocks(plan, k_BJSC, ranges, *columns))
    dq, dk = _join(dq, q_BQHC.shape[1]) * plan.scale, dk * plan.scale
    return dq.astype(q_BQHC.dtype), dk.astype(k_BJSC.dtype), dv.astype(v_BJSC.dtype), None


def _add(total_BJSC, more_BJKC, start):
    old = jax.lax.dynamic_slice_in_dim(total_BJSC, start, more_BJKC.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total_BJSC, old + more_BJKC, start, 2)


_attend.defvjp(_attend_fwd, _attend_bwd)
