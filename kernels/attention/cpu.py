"""CPU attention: chunks of queries, each against the keys up to its own end, normalised after the product.

The rule never shows a query a key behind it (hi <= q + 1 for trunks, branches, packed and windowed rows alike), so the
keys after a chunk are skipped statically: about half of the work, and scores of [chunk, keys] instead of [T, T].
"""

import jax
import jax.numpy as jnp

from rsi_jax.kernels.attention import reference


def attention(q_BTHC, k_BJSC, v_BJSC, ranges, *, scale: float, soft_cap: float, chunk: int = 128) -> jax.Array:
    """Same result as the reference for rows whose ranges look back only; T queries on T keys."""
    B, T, H, C = q_BTHC.shape
    J, S = k_BJSC.shape[1:3]
    if H % J:
        raise ValueError(f"{H} query heads do not divide into {J} kv heads")
    q_BJGTC = q_BTHC.reshape(B, T, J, H // J, C).transpose(0, 2, 3, 1, 4) * scale
    out = []
    for start in range(0, T, chunk):
        end = min(start + chunk, T)
        seen = min(end + S - T, S)  # the queries are those of the last T keys
        mask_BTS = reference.visible(type(ranges)(*(x[:, start:end] for x in ranges)), seen)
        out.append(_chunk(q_BJGTC[:, :, :, start:end], k_BJSC[:, :, :seen], v_BJSC[:, :, :seen], mask_BTS, soft_cap))
    out_BJGTC = jnp.concatenate(out, axis=3)
    return out_BJGTC.transpose(0, 3, 1, 2, 4).reshape(B, T, H, C).astype(q_BTHC.dtype)


def _chunk(q_BJGTC, k_BJSC, v_BJSC, mask_BTS, soft_cap: float) -> jax.Array:
    B, J, G, T, C = q_BJGTC.shape
    logit = jnp.einsum("bjmc,bjsc->bjms", q_BJGTC.reshape(B, J, G * T, C), k_BJSC, preferred_element_type=jnp.float32)
    logit = logit.reshape(B, J, G, T, -1)
    if soft_cap:
        logit = soft_cap * jnp.tanh(logit / soft_cap)
    logit = jnp.where(mask_BTS[:, None, None], logit, -1e30)
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logit, axis=-1, keepdims=True), -1e29))
    weight = jnp.exp(logit - top)  # exactly 0 where masked, also in a row that sees nothing
    total = jnp.sum(weight, axis=-1, keepdims=True)
    out = jnp.einsum("bjms,bjsc->bjmc", weight.reshape(B, J, G * T, -1).astype(v_BJSC.dtype), v_BJSC)
    return out.reshape(B, J, G, T, C) / jnp.where(total > 0, total, 1.0)
