"""Attention on a TPU: Pallas kernels with linear memory that fetch no key block that no query of a block sees.

The forward pass and the two of the backward pass (dq; dk and dv) walk over the blocks by tables of a few integers per
block (blocks.py). Tiles that are seen whole take no mask. Products take in bfloat16 or float32, sums and the softmax
are float32; what is multiplied with them is rounded to the dtype of the input, as in 'chunked'.

Source: Dao et al. 2022 (arXiv 2205.14135), the two passes.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from rsi_jax.kernels.attention import passes, tpu_backward, tpu_forward, tpu_tile

DTYPES = ("bfloat16", "float32")


def attention(q_BQHC, k_BJSC, v_BJSC, ranges, *, scale: float, soft_cap: float) -> tuple[jax.Array, jax.Array]:
    """Same results as the reference, keys major over time: (out_BQHC, lse_BQH).

    Any sizes: rows and keys that fill no whole tile are filled up with what nobody sees.
    Raises: ValueError where it is traced for another device than a TPU, for dtypes other than one of DTYPES, and where
      no tile fits the device's memory.
    """
    (B, Q, H, C), (_, J, S, _) = q_BQHC.shape, k_BJSC.shape
    passes.check_dtypes("tpu", DTYPES, "set model.dtype", q_BQHC, k_BJSC, v_BJSC)
    if not B * Q * S:
        return jnp.zeros_like(q_BQHC), jnp.full((B, Q, H), -jnp.inf, jnp.float32)
    plan = tpu_tile.plan_of(Q, H // J, S, C, q_BQHC.dtype, scale=scale, soft_cap=soft_cap)
    ranges = tuple(jnp.clip(x, 0, S).astype(jnp.int32) for x in ranges)
    return _attend(plan, q_BQHC, k_BJSC, v_BJSC, ranges)


def _rows(plan, x_BQHC, kv_heads: int):
    """[B, Q, H, C] -> [B, J, rows, C]: block by block, of the queries of each head of the group."""
    B, _, H, C = x_BQHC.shape
    G = H // kv_heads
    x_BQHC = passes.pad(x_BQHC, 1, plan.rows // G)
    x_BJNGIC = x_BQHC.reshape(B, -1, plan.rows // G, kv_heads, G, C).transpose(0, 3, 1, 4, 2, 5)
    return x_BJNGIC.reshape(B, kv_heads, -1, C)


def _lines(plan, x_BQH, kv_heads: int):
    """[B, Q, H] -> [B, J, 1, rows]."""
    return _rows(plan, x_BQH[..., None], kv_heads).reshape(x_BQH.shape[0], kv_heads, 1, -1)


def _queries(plan, x_BJCR, queries: int, heads: int):
    """[B, J, C, rows] -> [B, Q, H, C]."""
    B, J, C, _ = x_BJCR.shape
    G = heads // J
    x_BNIJGC = x_BJCR.reshape(B, J, C, -1, G, plan.rows // G).transpose(0, 3, 5, 1, 4, 2)
    return x_BNIJGC.reshape(B, -1, heads, C)[:, :queries]


def _tiled(plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    """What both passes read: ranges_B4R, q_BJRC, k_BJSC, v_BJSC in whole tiles."""
    B, _, H, _ = q_BQHC.shape
    J = k_BJSC.shape[1]
    G = H // J
    ranges_B4Q = passes.pad(jnp.stack(ranges, axis=1), 2, plan.rows // G)
    ranges_B4N1I = ranges_B4Q.reshape(B, 4, -1, 1, plan.rows // G)
    ranges_B4R = jnp.broadcast_to(ranges_B4N1I, (*ranges_B4N1I.shape[:3], G, plan.rows // G)).reshape(B, 4, -1)
    return ranges_B4R, _rows(plan, q_BQHC, J), passes.pad(k_BJSC, 2, plan.keys), passes.pad(v_BJSC, 2, plan.keys)


def _forward(plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    out_BJCR, lse_BJ1R = tpu_forward.forward(plan, *_tiled(plan, q_BQHC, k_BJSC, v_BJSC, ranges))
    out_BQHC, lse_BQH1 = (_queries(plan, x, *q_BQHC.shape[1:3]) for x in (out_BJCR, lse_BJ1R))
    return out_BQHC, lse_BQH1[..., 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    return _forward(plan, q_BQHC, k_BJSC, v_BJSC, ranges)


def _attend_fwd(plan, q_BQHC, k_BJSC, v_BJSC, ranges):
    out, lse = passes.named(*_forward(plan, q_BQHC, k_BJSC, v_BJSC, ranges))
    return (out, lse), (q_BQHC, k_BJSC, v_BJSC, ranges, out, lse)


def _attend_bwd(plan, saved, cotangents):
    """Gradients in the dtypes of q, k and v."""

    @sequential_vmap  # a map over several cotangents: the tables in scalar memory take no batch axis
    def gradients(saved, cotangents):
        q_BQHC, k_BJSC, v_BJSC, ranges, out_BQHC, lse_BQH = saved
        (_, Q, H, _), J = q_BQHC.shape, k_BJSC.shape[1]
        dout_BQHC, lse_BQH, shift_BQH = passes.cotangents(out_BQHC, lse_BQH, *cotangents)
        ranges_B4R, q_BJRC, k, v = _tiled(plan, q_BQHC, k_BJSC, v_BJSC, ranges)
        lse_BJ1R, shift_BJ1R = (_lines(plan, x, J) for x in (lse_BQH, shift_BQH))
        dout_BJRC = _rows(plan, dout_BQHC, J)
        dq_BJCR, dk, dv = tpu_backward.gradients(plan, ranges_B4R, lse_BJ1R, shift_BJ1R, q_BJRC, dout_BJRC, k, v)
        S = k_BJSC.shape[2]
        return _queries(plan, dq_BJCR, Q, H), dk[:, :, :S], dv[:, :, :S]

    return *gradients(saved, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)
