"""The log-prob op: token chunks against the whole unembedding, recomputed in the backward pass.

Per token, with z the logits, p = softmax(z), y the target, H the entropy, and g the three cotangents:

  dz = g_logp (1[v = y] - p) + g_lse p - g_H p (log p + H)
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rsi_jax.kernels import vocabulary
from rsi_jax.kernels.vocabulary import Head


class Scores(NamedTuple):
    """What the logits of N tokens say, float32, nats.

    logp_N <= 0 of the target. entropy_N >= 0. lse_N: log sum exp of the logits. top_logp_NK, top_id_NK: the K most
    likely tokens, likeliest first (of equals the smallest id), or None when not asked for.
    """

    logp_N: jax.Array
    entropy_N: jax.Array
    lse_N: jax.Array
    top_logp_NK: jax.Array | None = None
    top_id_NK: jax.Array | None = None


def token_logprob(
    hidden_ND: jax.Array,
    unembed_DV: jax.Array,
    target_N: jax.Array,
    *,
    temperature: float = 1.0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    top_k: int = 0,
    vocab_axis: str | None = None,
    implementation: str = "chunked",
) -> Scores:
    """Scores target tokens: log softmax(h W / temperature)[target], the entropy and the normaliser.

    target_N: ids in [0, V); one outside scores NaN.
    temperature, soft_cap: see `vocabulary.Head`.
    chunk: tokens scored at a time, 0 = automatic from V; memory is a few times chunk * V * 4 bytes, forward and
      backward, and the gradient of W in float32.
    top_k: also the K most likely tokens; no gradient passes through them.
    vocab_axis: mesh axis over which V is split, in `jax.shard_map`: unembed_DV is this shard's, targets and top ids are
      of the whole vocabulary.
    implementation: 'chunked' (every platform) | 'reference' (holds [N, V]; the definition).
    """
    chex.assert_rank([hidden_ND, unembed_DV, target_N], [2, 2, 1])
    chex.assert_equal_shape_prefix([hidden_ND, target_N], 1)
    head = Head(temperature, soft_cap, chunk, vocab_axis)
    vocabulary.check("token_logprob", head, implementation, unembed_DV)
    if implementation == "reference":
        return reference(head, top_k, hidden_ND, unembed_DV, target_N)
    return _chunked(head, top_k, hidden_ND, unembed_DV, target_N)


def reference(head: Head, top_k: int, hidden_ND, unembed_DV, target_N) -> Scores:
    """The definition, on [N, V]."""
    logit_NV = vocabulary.head_logits(head, hidden_ND, unembed_DV)
    logp_NV = jax.nn.log_softmax(logit_NV)
    entropy_N = -jnp.sum(jnp.exp(logp_NV) * logp_NV, axis=1)
    lse_N = jax.nn.logsumexp(logit_NV, axis=1)
    best = jax.lax.top_k(jax.lax.stop_gradient(logp_NV), top_k) if top_k else (None, None)
    return Scores(vocabulary.picked(head, logp_NV, target_N), entropy_N, lse_N, *best)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(head: Head, top_k: int, hidden_ND, unembed_DV, target_N) -> Scores:
    return _forward(head, top_k, hidden_ND, unembed_DV, target_N)[0]


def _forward(head: Head, top_k: int, hidden_ND, unembed_DV, target_N):
    def score(hidden_CD, target_C):
        logit_CV = vocabulary.head_logits(head, hidden_CD, unembed_DV)
        norm = vocabulary.log_sum(head, logit_CV)
        x_CV = logit_CV - norm.top_N[:, None]  # <= 0: so are logp and minus the entropy
        mean_C = vocabulary.total(head, jnp.sum(jnp.exp(x_CV) * x_CV, axis=1)) / jnp.exp(norm.log_total_N)
        logp_C = vocabulary.picked(head, logit_CV, target_C) - norm.top_N - norm.log_total_N
        best = (None, None)
        if top_k:
            value_CK, id_CK = vocabulary.top(head, logit_CV, top_k)
            best = vocabulary.log_softmax(value_CK, norm), id_CK
        return Scores(logp_C, norm.log_total_N - mean_C, norm.top_N + norm.log_total_N, *best), norm

    scores, norm = vocabulary.over_chunks(head, unembed_DV.shape[1], score, hidden_ND, target_N)
    return scores, (hidden_ND, unembed_DV, target_N, norm, scores.entropy_N)


def _backward(head: Head, top_k: int, kept, slopes: Scores):
    hidden_ND, unembed_DV, target_N, norm, entropy_N = kept

    def slope(logit_CV, target_C, norm, entropy_C, to_logp_C, to_entropy_C, to_lse_C):
        size = logit_CV.shape[1]
        logp_CV = vocabulary.log_softmax(logit_CV, norm)
        level_C = to_lse_C - to_logp_C - to_entropy_C * entropy_C
        slope_CV = jnp.exp(logp_CV) * (level_C[:, None] - to_entropy_C[:, None] * logp_CV)
        is_target_CV = jnp.arange(size) == vocabulary.own_columns(head, target_C, size)[:, None]
        return slope_CV + jnp.where(is_target_CV, to_logp_C[:, None], 0.0)

    columns = (target_N, norm, entropy_N, slopes.logp_N, slopes.entropy_N, slopes.lse_N)
    return *vocabulary.pull(head, slope, hidden_ND, unembed_DV, *columns), None


_chunked.defvjp(_forward, _backward)
