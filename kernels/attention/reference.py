"""Reference attention: O(Q S) memory, the definition that every implementation is held to."""

import jax
import jax.numpy as jnp


def shown(ranges, key_K) -> jax.Array:
    """Says which of the keys with these indices each query sees: boolean [B, Q, K]."""
    lo1, hi1, lo2, hi2 = (x[..., None] for x in ranges)
    return ((lo1 <= key_K) & (key_K < hi1)) | ((lo2 <= key_K) & (key_K < hi2))


def attention(q_BQHC, k_BJSC, v_BJSC, ranges, *, scale: float, soft_cap: float) -> tuple[jax.Array, jax.Array]:
    """Attends over all the keys at once: (out_BQHC, lse_BQH float32); keys major over time."""
    B, Q, H, C = q_BQHC.shape
    J, S = k_BJSC.shape[1:3]
    q_BJMC = q_BQHC.reshape(B, Q, J, H // J, C).transpose(0, 2, 3, 1, 4).reshape(B, J, (H // J) * Q, C)
    logit_BJMS = jnp.einsum("bjmc,bjsc->bjms", q_BJMC, k_BJSC, preferred_element_type=jnp.float32) * scale
    if soft_cap:
        logit_BJMS = soft_cap * jnp.tanh(logit_BJMS / soft_cap)
    mask_BQS = shown(ranges, jnp.arange(S))
    logit_BJGQS = logit_BJMS.reshape(B, J, H // J, Q, S)
    logit_BJGQS = jnp.where(mask_BQS[:, None, None], logit_BJGQS, -1e30)
    weight_BJGQS = jax.nn.softmax(logit_BJGQS, axis=-1)
    out_BJMC = jnp.einsum("bjms,bjsc->bjmc", weight_BJGQS.reshape(B, J, -1, S).astype(v_BJSC.dtype), v_BJSC)
    out_BQHC = out_BJMC.reshape(B, J, H // J, Q, C).transpose(0, 3, 1, 2, 4).reshape(B, Q, H, C)
    seen_BQ1 = jnp.any(mask_BQS, axis=-1)[..., None]
    lse_BQH = jax.nn.logsumexp(logit_BJGQS, axis=-1).transpose(0, 3, 1, 2).reshape(B, Q, H)
    out_BQHC = jnp.where(seen_BQ1[..., None], out_BQHC, 0).astype(q_BQHC.dtype)
    return out_BQHC, jnp.where(seen_BQ1, lse_BQH, -jnp.inf)
