"""One jitted forward that adds scored columns: values, reference log-probs, teacher log-probs, entropies."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base
from rsi_jax.feedback import views as views_lib
from rsi_jax.kernels import attention, token_logprob
from rsi_jax.model import transformer


def hidden_states(params, config: transformer.Config, rollout: base.Rollout, *, remat: bool = False) -> jax.Array:
    """Reads every rollout: final hidden states [B, T, D]; position t predicts token t + 1."""
    B, T = rollout.tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    ranges = attention.causal_ranges(rollout.length_B, T)
    return transformer.hidden_states(params, config, rollout.tokens_BT, positions_BT, ranges, remat=remat)


def token_logp(
    params, config: transformer.Config, hidden_BTD: jax.Array, rollout: base.Rollout, *, temperature: float, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Scores each token given those before it: (logp_BT, entropy_BT), nats; column 0 is 0.

    With a truncated sampling support the stored log-prob is on that support; here the kept mass of the sampler is
    divided out, so that old and new agree at the first update (a replay of the support's mass, not of its ids).
    """
    B, T, D = hidden_BTD.shape
    logp_N, entropy_N = token_logprob.token_logprob(
        hidden_BTD[:, :-1].reshape(-1, D),
        transformer.unembedding(params),
        rollout.tokens_BT[:, 1:].reshape(-1),
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    )
    logp_BT, entropy_BT = (jnp.pad(x.reshape(B, T - 1), ((0, 0), (1, 0))) for x in (logp_N, entropy_N))
    return logp_BT - jnp.log(rollout.kept_mass_BT), entropy_BT


def shifted_values(params, hidden_BTD: jax.Array) -> jax.Array:
    """The critic's value before each token [B, T]: read at the position that predicts it; column 0 is 0."""
    return jnp.pad(transformer.values(params, hidden_BTD)[:, :-1], ((0, 0), (1, 0)))


@functools.partial(jax.jit, static_argnames=("config", "columns", "temperature", "chunk", "span"))
def annotate(
    params,
    rollout: base.Rollout,
    *,
    config: transformer.Config,
    columns: tuple[str, ...],
    ref: Any = None,
    teacher: Any = None,
    temperature: float = 1.0,
    chunk: int = 512,
    span: int = 0,
) -> base.Rollout:
    """Adds the named columns: 'value_BT', 'policy_logp_BT', 'ref_logp_BT' (needs `ref`), 'view_logp_KU' (needs views;
    U = `span`).

    teacher: its weights, None = live.
    """
    add = {}
    mask_BT = rollout.mask_BT
    if "value_BT" in columns:
        add["value_BT"] = jnp.where(mask_BT, shifted_values(params, hidden_states(params, config, rollout)), 0.0)
    for name, weights in (("policy_logp_BT", params), ("ref_logp_BT", ref)):
        if name in columns:
            hidden_BTD = hidden_states(weights, config, rollout)
            logp_BT, _ = token_logp(weights, config, hidden_BTD, rollout, temperature=temperature, chunk=chunk)
            add[name] = jnp.where(mask_BT, logp_BT, 0.0)
    if "view_logp_KU" in columns:
        add["view_logp_KU"] = _view_logp(
            params if teacher is None else teacher, config, rollout, span, temperature, chunk
        )
    return rollout.replace(**add)


def _view_logp(teacher, config, rollout: base.Rollout, span: int, temperature: float, chunk: int) -> jax.Array:
    states_KUD = views_lib.teacher_states(teacher, config, rollout, span)
    return span_logp(teacher, config, states_KUD, rollout, temperature=temperature, chunk=chunk)


def span_logp(
    teacher, config: transformer.Config, states_KUD: jax.Array, rollout: base.Rollout, *, temperature: float, chunk: int
) -> jax.Array:
    """Scores the sampled tokens of each view's span from the teacher's states there: nats [K, U], 0 off-span."""
    views = base.given(rollout.views, "views")
    K, U, D = states_KUD.shape
    logp_N, _ = token_logprob.token_logprob(
        states_KUD.reshape(-1, D),
        transformer.unembedding(teacher),
        views_lib.span_tokens(rollout.tokens_BT, views, U).reshape(-1),
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    )
    return jnp.where(views_lib.span_mask(views, U), logp_N.reshape(K, U), 0.0)


@functools.partial(jax.jit, static_argnames=("config", "temperature", "chunk"))
def score_rollout(params, rollout: base.Rollout, *, config, temperature: float = 1.0, chunk: int = 512):
    """Scores a rollout under `params`: (logp_BT, entropy_BT), 0 off-mask. The parity gate and the heat map read it."""
    hidden_BTD = hidden_states(params, config, rollout)
    scores = token_logp(params, config, hidden_BTD, rollout, temperature=temperature, chunk=chunk)
    return tuple(jnp.where(rollout.mask_BT, x, 0.0) for x in scores)


@functools.partial(jax.jit, static_argnames=("config", "chunk"))
def _continuation_logp(params, tokens_BT, prefix_B, length_B, *, config, chunk: int):
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
    ranges = attention.causal_ranges(length_B, T)
    hidden_BTD = transformer.hidden_states(params, config, tokens_BT, positions_BT, ranges)
    logp_N, _ = token_logprob.token_logprob(
        hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1]),
        transformer.unembedding(params),
        tokens_BT[:, 1:].reshape(-1),
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    )
    place_T = jnp.arange(1, T)
    keep_BT = (place_T >= prefix_B[:, None]) & (place_T < length_B[:, None])
    return jnp.sum(jnp.where(keep_BT, logp_N.reshape(len(prefix_B), T - 1), 0.0), axis=1)


def continuation_logp(params, config: transformer.Config, prefixes, continuations, *, chunk: int = 512) -> np.ndarray:
    """Scores whole continuations given their prefixes (lists of ids): log-prob of each, nats [B], on the host.

    Raises: ValueError for an empty prefix.
    """
    if not all(prefixes):
        raise ValueError("a continuation needs at least one token before it")
    rows = [list(p) + list(c) for p, c in zip(prefixes, continuations, strict=True)]
    shape = -(-len(rows) // 16) * 16, -(-max(map(len, rows)) // 128) * 128  # rounded up: few shapes are compiled
    tokens, prefix, length = np.zeros(shape, np.int32), np.zeros(shape[0], np.int32), np.zeros(shape[0], np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)], prefix[i], length[i] = row, len(prefixes[i]), len(row)
    return np.asarray(_continuation_logp(params, tokens, prefix, length, config=config, chunk=chunk))[: len(rows)]
