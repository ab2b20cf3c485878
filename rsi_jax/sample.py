"""Jitted prefill and decode over a KV cache that is kept across turns.

One call = one turn of every slot: append the tokens that are not in the cache yet (a prompt, or the last sampled
token and the new observation), then sample until a stop token or a budget. Rows are independent: the key of a token
is folded from the row's key and the token's position, so a rollout does not depend on its slot or its neighbours.
"""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp

from rsi_jax import base
from rsi_jax.kernels import token_logprob
from rsi_jax.model import transformer


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature > 0, inside the softmax. top_k: 0 = off. top_p in (0, 1]: 1 = off. greedy: take the mode (log-prob
    still of the full softmax). max_tokens: budget of one turn, the stop token included. stop_ids: the stop set.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    greedy: bool = False
    max_tokens: int = 8
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self):
        if not self.temperature > 0:
            raise base.InputError(f"sample.temperature={self.temperature} must be > 0 (use sample.greedy for the mode)")
        if not 0 < self.top_p <= 1:
            raise base.InputError(f"sample.top_p={self.top_p} must be in (0, 1]")
        if self.top_k < 0 or self.max_tokens < 1:
            raise base.InputError("sample.top_k must be >= 0 and sample.max_tokens >= 1")


class Turn(flax.struct.PyTreeNode):
    """What one turn sampled: tokens_BA int32, logp_BA, kept_mass_BA float32, length_B, finish_B int32 (base.STOP |
    base.LENGTH; NOT_SAMPLED for rows that were not active)."""

    tokens_BA: jax.Array
    logp_BA: jax.Array
    kept_mass_BA: jax.Array
    length_B: jax.Array
    finish_B: jax.Array


def restrict(logit_NV: jax.Array, top_k: int, top_p: float) -> tuple[jax.Array, jax.Array]:
    """Renormalises on the sampling support: top-k first, then the smallest set of mass >= top_p within it.

    Returns: (logp_NV on the support, -inf off it; kept_mass_N of the full softmax).
    """
    logp_NV = jax.nn.log_softmax(logit_NV)
    keep_NV = jnp.ones(logp_NV.shape, bool)
    if top_k and top_k < logp_NV.shape[1]:
        keep_NV = logp_NV >= jax.lax.top_k(logp_NV, top_k)[0][:, -1:]
    if top_p < 1.0:
        order_NV = jnp.argsort(-jnp.where(keep_NV, logp_NV, -jnp.inf), axis=1)
        p_NV = jnp.exp(jnp.take_along_axis(jax.nn.log_softmax(jnp.where(keep_NV, logp_NV, -jnp.inf)), order_NV, axis=1))
        before_NV = jnp.cumsum(p_NV, axis=1) - p_NV
        rank_NV = jnp.argsort(order_NV, axis=1)
        keep_NV &= jnp.take_along_axis(before_NV < top_p, rank_NV, axis=1)
    kept_NV = jnp.where(keep_NV, logp_NV, -jnp.inf)
    mass_N = jnp.exp(jax.nn.logsumexp(kept_NV, axis=1))
    return jax.nn.log_softmax(kept_NV), mass_N


def _draw(logit_BV, key_B, position_B, sampling: Sampling):
    logit_BV = logit_BV / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        logp_BV, mass_B = restrict(logit_BV, sampling.top_k, sampling.top_p)
    else:
        logp_BV, mass_B = jax.nn.log_softmax(logit_BV), jnp.ones(logit_BV.shape[0])
    if sampling.greedy:
        token_B = jnp.argmax(logp_BV, axis=1)
    else:
        token_B = jax.vmap(lambda k, p, x: jax.random.categorical(jax.random.fold_in(k, p), x))(
            key_B, position_B, logp_BV
        )
    return token_B.astype(jnp.int32), jnp.take_along_axis(logp_BV, token_B[:, None], axis=1)[:, 0], mass_B


def _record(out: Turn, step, hidden_BD, position_B, open_B, key_B, unembed_DV, capacity: int, cap: float, s: Sampling):
    """Samples one token of every open row and notes it: (out, token_B, rows still open)."""
    logit_BV = token_logprob.logits_of(hidden_BD, unembed_DV, soft_cap=cap)
    token_B, logp_B, mass_B = _draw(logit_BV, key_B, position_B, s)
    stopped_B = open_B & jnp.any(token_B[:, None] == jnp.asarray(s.stop_ids or (-1,), jnp.int32), axis=1)
    out = Turn(
        tokens_BA=out.tokens_BA.at[:, step].set(jnp.where(open_B, token_B, 0)),
        logp_BA=out.logp_BA.at[:, step].set(jnp.where(open_B, logp_B, 0.0)),
        kept_mass_BA=out.kept_mass_BA.at[:, step].set(jnp.where(open_B, mass_B, 1.0)),
        length_B=out.length_B + open_B,
        finish_B=jnp.where(stopped_B, base.STOP, out.finish_B),
    )
    return out, token_B, open_B & ~stopped_B & (position_B + 1 < capacity)


@functools.partial(jax.jit, static_argnames=("config", "sampling"), donate_argnames=("cache",))
def turn(
    params,
    cache: transformer.Cache,
    chunk_BO: jax.Array,
    chunk_length_B: jax.Array,
    cached_B: jax.Array,
    key_B: jax.Array,
    *,
    config: transformer.Config,
    sampling: Sampling,
) -> tuple[transformer.Cache, Turn]:
    """Appends each row's chunk to the cache and samples one turn; rows with an empty chunk are left as they are.

    chunk_BO: the tokens not in the cache yet. cached_B: tokens in the cache; afterwards it is
    cached_B + chunk_length_B + max(length_B - 1, 0): the last sampled token is the first of the next chunk.
    The cache is donated. Returns: (cache, Turn).
    """
    B, A = chunk_BO.shape[0], sampling.max_tokens
    active_B = chunk_length_B > 0
    record = functools.partial(
        _record,
        key_B=key_B,
        unembed_DV=jax.lax.optimization_barrier(transformer.unembedding(params)),  # transposed once, not per token
        capacity=cache[0][0].shape[2],
        cap=config.logit_soft_cap,
        s=sampling,
    )
    hidden_BOD, cache = transformer.extend(params, config, chunk_BO, cached_B, chunk_length_B, cache)
    last_BD = jnp.take_along_axis(hidden_BOD, jnp.maximum(chunk_length_B - 1, 0)[:, None, None], axis=1)[:, 0]
    cached_B = cached_B + chunk_length_B
    nothing = Turn(
        tokens_BA=jnp.zeros((B, A), jnp.int32),
        logp_BA=jnp.zeros((B, A)),
        kept_mass_BA=jnp.ones((B, A)),
        length_B=jnp.zeros(B, jnp.int32),
        finish_B=jnp.where(active_B, base.LENGTH, base.NOT_SAMPLED),
    )
    out, token_B, open_B = record(nothing, 0, last_BD, cached_B, active_B)

    def more(carry):
        step, _, _, open_B, _, _ = carry
        return (step < A) & jnp.any(open_B)

    def one(carry):
        step, out, token_B, open_B, cached_B, cache = carry
        hidden_B1D, cache = transformer.extend(
            params, config, token_B[:, None], cached_B, open_B.astype(jnp.int32), cache
        )
        cached_B = cached_B + open_B
        out, token_B, open_B = record(out, step, hidden_B1D[:, 0], cached_B, open_B)
        return step + 1, out, token_B, open_B, cached_B, cache

    _, out, _, _, _, cache = jax.lax.while_loop(more, one, (1, out, token_B, open_B, cached_B, cache))
    return cache, out
