"""One jitted forward that adds scored columns: values, reference log-probs, teacher log-probs, entropies."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base, packing
from rsi_jax.feedback import views as views_lib
from rsi_jax.kernels import attention, divergence, token_logprob
from rsi_jax.model import hindsight, transformer


def hidden_states(
    params, config: transformer.Config, rollout: base.Rollout, *, remat: transformer.Remat = transformer.KEEP_ALL
) -> jax.Array:
    """Reads every rollout, in its layout: final hidden states [R, P, D]; a position predicts the token after it."""
    return transformer.hidden_states(params, config, packing.trunk_rows(rollout), remat=remat)


def token_logp(
    params,
    config: transformer.Config,
    hidden_RPD: jax.Array,
    rollout: base.Rollout,
    *,
    temperature: float,
    chunk: int,
    unembedding: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Scores each token given those before it: (logp_BT, entropy_BT), nats; column 0 is 0.

    hidden_RPD: of `hidden_states`, in the layout of the rollout.

    unembedding: [D, V], None = that of `params`.

    With a truncated sampling support the stored log-prob is on that support; here the kept mass of the sampler is
    divided out, so that old and new agree at the first update (a replay of the support's mass, not of its ids).
    """
    R, P, D = hidden_RPD.shape
    scores = token_logprob.token_logprob(
        hidden_RPD[:, :-1].reshape(-1, D),
        transformer.unembedding(params) if unembedding is None else unembedding,
        packing.trunk_rows(rollout).tokens_BT[:, 1:].reshape(-1),
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    )
    each = (scores.logp_N, scores.entropy_N)
    logp_BT, entropy_BT = (_per_token(x.reshape(R, P - 1), rollout) for x in each)
    return logp_BT - jnp.log(rollout.kept_mass_BT), entropy_BT


def _per_token(x_RP: jax.Array, rollout: base.Rollout) -> jax.Array:
    """Brings what the states before the last say of the tokens after them to the rollouts [B, T]; column 0 is 0."""
    x_BT = packing.to_tokens(jnp.pad(x_RP, ((0, 0), (1, 0))), rollout)
    return jnp.where(jnp.arange(x_BT.shape[1]) > 0, x_BT, 0.0)


def shifted_values(params, hidden_RPD: jax.Array, rollout: base.Rollout) -> jax.Array:
    """The critic's value before each token [B, T]: read at the position that predicts it; column 0 is 0."""
    return _per_token(transformer.values(params, hidden_RPD)[:, :-1], rollout)


@functools.partial(jax.jit, static_argnames=("config", "columns", "temperature", "chunk", "span"))
def annotate(
    params,
    rollout: base.Rollout,
    *,
    config: transformer.Config,
    columns: tuple[str, ...],
    ref: Any = None,
    teacher: Any = None,
    readings: Mapping[str, Any] | None = None,
    outcome_model: Any = None,
    temperature: float = 1.0,
    chunk: int = 0,
    span: int = 0,
) -> base.Rollout:
    """Adds the named columns (base.Rollout says what each is), with one forward for all that the policy itself scores.

    Args:
      columns: of value_BT, end_value_B, policy_logp_BT, collision_BT, outcome_logp_BTM (needs `outcome_model`),
        ref_logp_BT (needs `ref`), view_logp_KU and view_kl_KU (need views), wrong_logp_KU (needs views and
        readings['wrong']), hindsight_logp_BT (readings['hindsight']), answer_logp_BS (readings['answer']).
      teacher: weights that read the views, None = live.
      readings: views beside the rollout's own: 'wrong' a tuple of them, with wrong hints on the same spans;
        'hindsight' one per turn; 'answer' of `views.probe`.
      span: scored tokens of a view at most (U).
    """
    voice = params if teacher is None else teacher
    bound: dict[str, Any] = {"temperature": temperature, "chunk": chunk}
    add = _own_columns(params, config, rollout, columns, outcome_model, bound)
    if "ref_logp_BT" in columns:
        logp_BT, _ = token_logp(ref, config, hidden_states(ref, config, rollout), rollout, **bound)
        add["ref_logp_BT"] = jnp.where(rollout.mask_BT, logp_BT, 0.0)
    if {"view_logp_KU", "view_kl_KU"} & set(columns):
        states_KUD = views_lib.teacher_states(voice, config, rollout, span)
        if "view_logp_KU" in columns:
            add["view_logp_KU"] = span_logp(voice, config, states_KUD, rollout, **bound)
        if "view_kl_KU" in columns:
            add["view_kl_KU"] = _view_kl(params, voice, config, states_KUD, rollout, **bound)
    read = readings or {}
    if "wrong_logp_KU" in columns:
        each = [_view_logp(voice, config, rollout.replace(views=views), span, **bound) for views in read["wrong"]]
        mean_KU = jax.nn.logsumexp(jnp.stack(each), axis=0) - jnp.log(len(each))
        add["wrong_logp_KU"] = jnp.where(views_lib.span_mask(read["wrong"][0], span), mean_KU, 0.0)
    if "hindsight_logp_BT" in columns:
        views = read["hindsight"]
        logp_KU = _view_logp(params, config, rollout.replace(views=views), span, **bound)
        add["hindsight_logp_BT"] = _on_tokens(rollout, views, logp_KU)
    if "answer_logp_BS" in columns:
        add["answer_logp_BS"] = _answer_logp(params, config, rollout, read["answer"], **bound)
    return rollout.replace(**add)


def _own_columns(params, config, rollout: base.Rollout, columns, outcome_model, bound) -> dict[str, jax.Array]:
    """What one forward of the policy says of its own rollout."""
    wanted = {"value_BT", "end_value_B", "policy_logp_BT", "collision_BT", "outcome_logp_BTM"} & set(columns)
    if not wanted:
        return {}
    mask_BT, hidden_BTD, add = rollout.mask_BT, hidden_states(params, config, rollout), {}
    if "value_BT" in wanted:
        add["value_BT"] = jnp.where(mask_BT, shifted_values(params, hidden_BTD, rollout), 0.0)
    if "end_value_B" in wanted:
        last_B1 = jnp.maximum(rollout.length_B - 1, 0)[:, None]
        add["end_value_B"] = jnp.take_along_axis(transformer.values(params, hidden_BTD), last_B1, axis=1)[:, 0]
    if {"policy_logp_BT", "collision_BT"} & wanted:
        logp_BT, _ = token_logp(params, config, hidden_BTD, rollout, **bound)
        add["policy_logp_BT"] = jnp.where(mask_BT, logp_BT, 0.0)
    if "collision_BT" in wanted:
        # At temperature τ/2 the logits double: log Σ π² = lse(2z) - 2 lse(z) = 2 log π(y) - log π_{τ/2}(y).
        cold = bound | {"temperature": bound["temperature"] / 2}
        cold_BT, _ = token_logp(params, config, hidden_BTD, rollout, **cold)
        log_BT = 2.0 * logp_BT - cold_BT + jnp.log(rollout.kept_mass_BT)  # of the whole vocabulary's distribution
        add["collision_BT"] = jnp.where(mask_BT, jnp.exp(jnp.minimum(log_BT, 0.0)), 0.0)
    if "outcome_logp_BTM" in wanted:
        kernels_MDV = hindsight.unembeddings(outcome_model, transformer.unembedding(params))
        scored = functools.partial(token_logp, params, config, hidden_BTD, rollout, **bound)
        each = [scored(unembedding=kernel_DV)[0] for kernel_DV in kernels_MDV]
        add["outcome_logp_BTM"] = jnp.where(mask_BT[..., None], jnp.stack(each, axis=2), 0.0)
    return {name: add[name] for name in add if name in wanted}


def _view_logp(voice, config, rollout: base.Rollout, span: int, *, temperature: float, chunk: int) -> jax.Array:
    states_KUD = views_lib.teacher_states(voice, config, rollout, span)
    return span_logp(voice, config, states_KUD, rollout, temperature=temperature, chunk=chunk)


def _view_kl(params, voice, config, states_KUD, rollout: base.Rollout, *, temperature: float, chunk: int) -> jax.Array:
    """KL(student || teacher) over the whole vocabulary at each span token."""
    views = base.given(rollout.views, "views")
    K, U, D = states_KUD.shape
    student_KUD = views_lib.student_states(hidden_states(params, config, rollout), rollout, U)
    value_N = divergence.divergence(
        student_KUD.reshape(-1, D),
        transformer.unembedding(params),
        states_KUD.reshape(-1, D),
        transformer.unembedding(voice),
        views_lib.span_tokens(rollout.tokens_BT, views, U).reshape(-1),
        name="reverse_kl",
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    )
    return jnp.where(views_lib.span_mask(views, U), value_N.reshape(K, U), 0.0)


def _answer_logp(params, config, rollout: base.Rollout, views: base.Views, *, temperature: float, chunk: int):
    """Mean log-prob of the answer's tokens before each turn [B, S]; NaN where there is no answer."""
    B, S = rollout.segments.kind_BS.shape
    states_KND = views_lib.hint_states(params, config, rollout.replace(views=views))
    K, N, D = states_KND.shape
    logp_N = token_logprob.token_logprob(
        states_KND.reshape(-1, D),
        transformer.unembedding(params),
        jnp.asarray(views.hint_KN).reshape(-1),
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    ).logp_N
    inside_KN = jnp.arange(N) < views.hint_length_K[:, None]
    mean_K = jnp.sum(jnp.where(inside_KN, logp_N.reshape(K, N), 0.0), axis=1) / jnp.maximum(views.hint_length_K, 1)
    mean_BS = jnp.where(views.weight_K > 0, mean_K, jnp.nan).reshape(B, K // B)
    return jnp.pad(mean_BS, ((0, 0), (0, S)))[:, :S]


def _on_tokens(rollout: base.Rollout, views: base.Views, x_KU: jax.Array) -> jax.Array:
    """Puts a column of span tokens, of one view per turn at most, on the tokens themselves."""
    T, U = rollout.tokens_BT.shape[1], x_KU.shape[1]
    at_KU = jnp.where(views_lib.span_mask(views, U), views.span_start_K[:, None] + jnp.arange(U), T)
    return jnp.zeros(rollout.tokens_BT.shape).at[views.rollout_K[:, None], at_KU].set(x_KU, mode="drop")


def span_logp(
    teacher, config: transformer.Config, states_KUD: jax.Array, rollout: base.Rollout, *, temperature: float, chunk: int
) -> jax.Array:
    """Scores the sampled tokens of each view's span from the teacher's states there: nats [K, U], 0 off-span."""
    views = base.given(rollout.views, "views")
    K, U, D = states_KUD.shape
    logp_N = token_logprob.token_logprob(
        states_KUD.reshape(-1, D),
        transformer.unembedding(teacher),
        views_lib.span_tokens(rollout.tokens_BT, views, U).reshape(-1),
        temperature=temperature,
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    ).logp_N
    return jnp.where(views_lib.span_mask(views, U), logp_N.reshape(K, U), 0.0)


@functools.partial(jax.jit, static_argnames=("config", "temperature", "chunk"))
def score_rollout(params, rollout: base.Rollout, *, config, temperature: float = 1.0, chunk: int = 0):
    """Scores a rollout under `params`: (logp_BT, entropy_BT), 0 off-mask. The parity gate and the heat map read it."""
    hidden_BTD = hidden_states(params, config, rollout)
    scores = token_logp(params, config, hidden_BTD, rollout, temperature=temperature, chunk=chunk)
    return tuple(jnp.where(rollout.mask_BT, x, 0.0) for x in scores)


@functools.partial(jax.jit, static_argnames=("config", "chunk"))
def _continuation_logp(params, tokens_BT, prefix_B, length_B, *, config, chunk: int):
    T = tokens_BT.shape[1]
    positions_BT = jnp.broadcast_to(jnp.arange(T), tokens_BT.shape)
    ranges = attention.causal_ranges(length_B, T)
    hidden_BTD = transformer.hidden_states(params, config, transformer.Rows(tokens_BT, positions_BT, ranges))
    logp_N = token_logprob.token_logprob(
        hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1]),
        transformer.unembedding(params),
        tokens_BT[:, 1:].reshape(-1),
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    ).logp_N
    place_T = jnp.arange(1, T)
    keep_BT = (place_T >= prefix_B[:, None]) & (place_T < length_B[:, None])
    return jnp.sum(jnp.where(keep_BT, logp_N.reshape(len(prefix_B), T - 1), 0.0), axis=1)


def continuation_logp(params, config: transformer.Config, prefixes, continuations, *, chunk: int = 0) -> np.ndarray:
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
