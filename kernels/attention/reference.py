"""Reference attention: O(T^2) memory, the definition that every kernel is held to."""

import jax
import jax.numpy as jnp


def visible(ranges, keys: int) -> jax.Array:
    """Materialises visible(q, k) as a boolean [B, T, keys]."""
    lo1, hi1, lo2, hi2 = (x[..., None] for x in ranges)
    k = jnp.arange(keys)
    return ((lo1 <= k) & (k < hi1)) | ((lo2 <= k) & (k < hi2))


def attention(q_BTHC, k_BJSC, v_BJSC, ranges, *, scale: float, soft_cap: float) -> jax.Array:
    """softmax over the visible keys in float32; a query that sees nothing returns exactly 0."""
    B, T, H, C = q_BTHC.shape
    J, S = k_BJSC.shape[1:3]
    if H % J:
        raise ValueError(f"{H} query heads do not divide into {J} kv heads")
    q_BJMC = q_BTHC.reshape(B, T, J, H // J, C).transpose(0, 2, 3, 1, 4).reshape(B, J, (H // J) * T, C)
    logit_BJMS = jnp.einsum("bjmc,bjsc->bjms", q_BJMC, k_BJSC, preferred_element_type=jnp.float32) * scale
    if soft_cap:
        logit_BJMS = soft_cap * jnp.tanh(logit_BJMS / soft_cap)
    mask_BTS = visible(ranges, S)
    logit_BJGTS = logit_BJMS.reshape(B, J, H // J, T, S)
    logit_BJGTS = jnp.where(mask_BTS[:, None, None], logit_BJGTS, -1e30)
    weight_BJGTS = jax.nn.softmax(logit_BJGTS, axis=-1)
    out_BJMC = jnp.einsum("bjms,bjsc->bjmc", weight_BJGTS.reshape(B, J, -1, S).astype(v_BJSC.dtype), v_BJSC)
    out_BTHC = out_BJMC.reshape(B, J, H // J, T, C).transpose(0, 3, 1, 2, 4).reshape(B, T, H, C)
    seen_BT = jnp.any(mask_BTS, axis=-1)
    return jnp.where(seen_BT[:, :, None, None], out_BTHC, 0).astype(q_BTHC.dtype)
