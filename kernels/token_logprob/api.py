"""The log-prob op: token chunks against the whole unembedding, recomputed in the backward pass."""

import chex
import jax
import jax.numpy as jnp


def logits_of(hidden_ND: jax.Array, unembed_DV: jax.Array, *, temperature: float = 1.0, soft_cap: float = 0.0):
    """Computes float32 logits [N, V] with the soft cap and the temperature applied (temperature inside the softmax)."""
    logit_NV = jnp.einsum("nd,dv->nv", hidden_ND, unembed_DV, preferred_element_type=jnp.float32)
    if soft_cap:
        logit_NV = soft_cap * jnp.tanh(logit_NV / soft_cap)
    return logit_NV / temperature


def token_logprob(
    hidden_ND: jax.Array,
    unembed_DV: jax.Array,
    target_N: jax.Array,
    *,
    temperature: float = 1.0,
    soft_cap: float = 0.0,
    chunk: int = 512,
) -> tuple[jax.Array, jax.Array]:
    """Scores target tokens: log softmax(h W / temperature)[target] and the entropy, in nats, float32.

    chunk: tokens scored at a time; memory is chunk * V * 4 bytes, forward and backward.
    Returns: (logp_N, entropy_N).
    """
    chex.assert_rank([hidden_ND, unembed_DV, target_N], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden_ND, target_N], 1)

    def score(hidden_CD, target_C):
        logp_CV = jax.nn.log_softmax(logits_of(hidden_CD, unembed_DV, temperature=temperature, soft_cap=soft_cap))
        logp_C = jnp.take_along_axis(logp_CV, target_C[:, None], axis=1)[:, 0]
        return logp_C, -jnp.sum(jnp.exp(logp_CV) * logp_CV, axis=1)

    return over_chunks(score, chunk, hidden_ND, target_N)


def over_chunks(fn, chunk: int, *arrays: jax.Array):
    """Maps `fn` over chunks of the leading axis, one at a time, with recomputation in the backward pass."""
    count = arrays[0].shape[0]
    if count <= chunk:
        return fn(*arrays)
    pad = -count % chunk
    split = [jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:]) for x in arrays]
    out = jax.lax.map(lambda xs: jax.checkpoint(fn)(*xs), tuple(split))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], out)
