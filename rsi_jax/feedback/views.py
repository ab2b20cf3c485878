"""Hinted re-readings: from hints to views, and the teacher's and the student's states on their spans.

A rollout and its views are one packed row: the trunk, then a branch per view (DESIGN section 5), so that a hint costs
its own tokens and its span's, not its prefix. `reread` is the definition that packing is held to: each view in a row of
its own, prefix, hint, span.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base
from rsi_jax.feedback.locate import Finding
from rsi_jax.kernels import attention
from rsi_jax.model import transformer


def build(
    findings: Sequence[Finding],
    hints: Sequence[Sequence[int]],
    transcripts: Sequence[base.Transcript],
    rules: Sequence[str],
    *,
    per_rollout: int,
    hint_capacity: int,
    branch: int,
) -> base.Views:
    """Lays findings and their hint ids out as host columns, K = rollouts * per_rollout.

    The capacities are fixed over a stage, so that one shape is compiled; nothing is ever cut to fit them.

    An empty hint makes no view: with a live teacher its term is exactly 0, and with another teacher it would be a pull
    to the lagged self that has nothing to do with feedback. `feedback.add` counts them.
    Raises: ValueError when a rollout has more findings than `per_rollout`; base.InputError when a hint or a branch does
      not fit.
    """
    K = len(transcripts) * per_rollout
    ints = {name: np.zeros(K, np.int32) for name in ("insert_at", "span_start", "span_length", "hint_length")}
    source, weight = np.full(K, -1, np.int32), np.zeros(K, np.float32)
    hint_KN, used = np.zeros((K, hint_capacity), np.int32), [0] * len(transcripts)
    for finding, ids in zip(findings, hints, strict=True):
        if not ids:
            continue
        if used[finding.row] == per_rollout:
            raise ValueError(f"rollout {finding.row} has more than {per_rollout} views")
        if len(ids) > hint_capacity:
            raise base.InputError(
                f"the hint of rule {finding.rule!r} has {len(ids)} tokens: raise feedback.hint_tokens={hint_capacity}"
            )
        k = finding.row * per_rollout + used[finding.row]
        used[finding.row] += 1
        turn = transcripts[finding.row].turns[finding.turn]
        values = dict(insert_at=turn.insert_at, span_start=turn.start, span_length=turn.length, hint_length=len(ids))
        for name, value in values.items():
            ints[name][k] = value
        hint_KN[k, : len(ids)], source[k], weight[k] = ids, list(rules).index(finding.rule), 1.0
    needed_K = ints["hint_length"] + ints["span_start"] + ints["span_length"] - ints["insert_at"]
    if needed_K.max() > branch:
        raise base.InputError(f"a branch has {needed_K.max()} tokens: raise feedback.branch_tokens={branch}")
    columns: dict[str, Any] = {f"{name}_K": array for name, array in ints.items()}
    columns |= dict(
        rollout_K=np.repeat(np.arange(len(transcripts), dtype=np.int32), per_rollout),
        hint_KN=hint_KN,
        source_K=source,
        weight_K=weight,
        polarity_K=np.ones(K, np.float32),
    )
    return base.Views(branch=branch, **columns)


def rehint(views: base.Views, hints: Sequence[Sequence[int]], *, field: str = "feedback.hint_tokens") -> base.Views:
    """Gives the used views other hints, in order: the same spans, read with other words.

    Raises: base.InputError when a hint or a branch does not fit.
    """
    used_K = np.flatnonzero(np.asarray(views.span_length_K) > 0)
    capacity = views.hint_KN.shape[1]
    hint_KN, length_K = np.zeros_like(np.asarray(views.hint_KN)), np.zeros_like(np.asarray(views.hint_length_K))
    for k, ids in zip(used_K, hints, strict=True):
        if len(ids) > capacity:
            raise base.InputError(f"a hint has {len(ids)} tokens: raise {field}={capacity}")
        hint_KN[k, : len(ids)], length_K[k] = ids, len(ids)
    longest = int(np.max((length_K + views.span_start_K + views.span_length_K - views.insert_at_K)[used_K], initial=0))
    if views.branch and longest > views.branch:
        raise base.InputError(f"a branch has {longest} tokens: raise feedback.branch_tokens={views.branch}")
    return views.replace(hint_KN=hint_KN, hint_length_K=length_K)


def probe(
    transcripts: Sequence[base.Transcript], answers: Sequence[Sequence[int]], *, per_rollout: int, capacity: int
) -> base.Views:
    """Views that ask, before every turn, for the row's answer instead of what was said: the answer is the hint.

    A row without an answer has none. Read by `hint_states`; K = rollouts * per_rollout.
    """
    asked = [(b, t, ids) for b, ids in enumerate(answers) if ids for t in range(len(transcripts[b].turns))]
    K = len(transcripts) * per_rollout
    columns = {name: np.zeros(K, np.int32) for name in ("insert_at", "span_start", "span_length", "hint_length")}
    hint_KN, weight_K = np.zeros((K, capacity), np.int32), np.zeros(K, np.float32)
    for b, t, ids in asked:
        k, start = b * per_rollout + t, transcripts[b].turns[t].start
        columns["insert_at"][k] = columns["span_start"][k] = start
        columns["span_length"][k], columns["hint_length"][k], weight_K[k] = 1, len(ids), 1.0
        hint_KN[k, : len(ids)] = ids
    named: dict[str, Any] = {f"{name}_K": array for name, array in columns.items()}
    named |= dict(
        rollout_K=np.repeat(np.arange(len(transcripts), dtype=np.int32), per_rollout),
        hint_KN=hint_KN,
        source_K=np.full(K, -1, np.int32),
        weight_K=weight_K,
        polarity_K=np.ones(K, np.float32),
    )
    return base.Views(branch=capacity + 1, **named)


def reread(tokens_BT: jax.Array, views: base.Views) -> tuple[jax.Array, jax.Array]:
    """Makes the rows that the teacher reads: trunk[:insert_at], hint, trunk[insert_at : span end].

    Returns: (tokens_KW with W = T + N, length_K; 0 for unused views).
    """
    K, N = views.hint_KN.shape
    T = tokens_BT.shape[1]
    at_K1, n_K1 = views.insert_at_K[:, None], views.hint_length_K[:, None]
    place_KW = jnp.broadcast_to(jnp.arange(T + N), (K, T + N))
    trunk_KW = jnp.where(place_KW < at_K1, place_KW, place_KW - n_K1)
    from_trunk_KW = jnp.take_along_axis(tokens_BT[views.rollout_K], jnp.clip(trunk_KW, 0, T - 1), axis=1)
    from_hint_KW = jnp.take_along_axis(views.hint_KN, jnp.clip(place_KW - at_K1, 0, N - 1), axis=1)
    in_hint_KW = (place_KW >= at_K1) & (place_KW < at_K1 + n_K1)
    length_K = views.span_start_K + views.span_length_K + views.hint_length_K
    length_K = jnp.where(views.span_length_K > 0, length_K, 0)
    tokens_KW = jnp.where(in_hint_KW, from_hint_KW, from_trunk_KW)
    return jnp.where(place_KW < length_K[:, None], tokens_KW, 0), length_K


def span_mask(views: base.Views, span: int) -> jax.Array:
    """True on the scored tokens of each view [K, U]; U = `span`.

    A span token at trunk index 0 has no prediction; it is masked.
    """
    offset_U = jnp.arange(span)
    first_K = views.span_start_K[:, None] + offset_U
    return (offset_U < views.span_length_K[:, None]) & (first_K > 0)


def _take(states_RTD: jax.Array, row_K: jax.Array, at_KU: jax.Array) -> jax.Array:
    return states_RTD[row_K[:, None], jnp.clip(at_KU, 0, states_RTD.shape[1] - 1)]


def _take_span(states_RTD: jax.Array, row_K: jax.Array, first_K: jax.Array, span: int) -> jax.Array:
    return _take(states_RTD, row_K, first_K[:, None] + jnp.arange(span))


def span_tokens(tokens_BT: jax.Array, views: base.Views, span: int) -> jax.Array:
    """The sampled tokens of each span [K, U]."""
    return _take_span(tokens_BT[..., None], views.rollout_K, views.span_start_K, span)[..., 0]


def student_states(hidden_BTD: jax.Array, views: base.Views, span: int) -> jax.Array:
    """The states on the trunk that predict each span token, without the hint [K, U, D]."""
    return _take_span(hidden_BTD, views.rollout_K, views.span_start_K - 1, span)


def pack(tokens_BT: jax.Array, length_B: jax.Array, views: base.Views):
    """Packs every rollout and its views into one row: the trunk, then a branch per view.

    A branch is the hint and a copy of trunk[insert_at : span end]; its positions run on from insert_at. It sees the
    trunk before insert_at and itself; the trunk sees itself. Rows: T + (views per rollout) * views.branch tokens.
    Returns: (tokens_BR, positions_BR, ranges).
    """
    B, T = tokens_BT.shape
    K, N = views.hint_KN.shape
    W, per = views.branch, K // B
    offset_W = jnp.arange(W)
    at_K1, n_K1 = views.insert_at_K[:, None], views.hint_length_K[:, None]
    used_K1 = (views.span_length_K > 0)[:, None]
    copied_KW = jnp.clip(at_K1 + offset_W - n_K1, 0, T - 1)
    from_trunk_KW = jnp.take_along_axis(tokens_BT[views.rollout_K], copied_KW, axis=1)
    from_hint_KW = views.hint_KN[:, jnp.clip(offset_W, 0, N - 1)]
    end_K1 = n_K1 + (views.span_start_K + views.span_length_K)[:, None] - at_K1
    valid_KW = used_K1 & (offset_W < end_K1)
    tokens_KW = jnp.where(valid_KW, jnp.where(offset_W < n_K1, from_hint_KW, from_trunk_KW), 0)
    first_K1 = (T + W * (jnp.arange(K) % per))[:, None]
    trunk = attention.causal_ranges(length_B, T)
    zero_KW = jnp.zeros((K, W), jnp.int32)
    branch = attention.Ranges(
        zero_KW,
        jnp.where(valid_KW, at_K1, 0),
        jnp.where(valid_KW, first_K1, 0),
        jnp.where(valid_KW, first_K1 + offset_W + 1, 0),
    )

    def row(trunk_BT, branch_KW):
        return jnp.concatenate([trunk_BT, branch_KW.reshape(B, per * W)], axis=1)

    positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    ranges = attention.Ranges(*(row(x, y) for x, y in zip(trunk, branch, strict=True)))
    return row(tokens_BT, tokens_KW), row(positions_BT, jnp.broadcast_to(at_K1 + offset_W, (K, W))), ranges


def teacher_states(params, config: transformer.Config, rollout: base.Rollout, span: int) -> jax.Array:
    """The teacher's states that predict each span token, with the hint before it [K, U, D]; no gradient.

    One packed row per rollout (views.branch > 0), equal to reading each view on its own.
    """
    params, views = jax.lax.stop_gradient(params), base.given(rollout.views, "views")
    if views.branch:
        before_K = views.hint_length_K + views.span_start_K - views.insert_at_K - 1
        states_KUD = _branch_states(params, config, rollout, before_K[:, None] + jnp.arange(span))
    else:
        tokens_KW, length_K = reread(rollout.tokens_BT, views)
        positions_KW = jnp.broadcast_to(jnp.arange(tokens_KW.shape[1]), tokens_KW.shape)
        ranges = attention.causal_ranges(length_K, tokens_KW.shape[1])
        hidden_RTD = transformer.hidden_states(params, config, tokens_KW, positions_KW, ranges)
        first_K = views.span_start_K + views.hint_length_K - 1
        states_KUD = _take_span(hidden_RTD, jnp.arange(tokens_KW.shape[0]), first_K, span)
    return jax.lax.stop_gradient(states_KUD)


def hint_states(params, config: transformer.Config, rollout: base.Rollout) -> jax.Array:
    """The states that predict each token of the hints of packed views [K, N, D]; no gradient."""
    shape = base.given(rollout.views, "views").hint_KN.shape
    offset_KN = jnp.broadcast_to(jnp.arange(shape[1]) - 1, shape)
    return jax.lax.stop_gradient(_branch_states(jax.lax.stop_gradient(params), config, rollout, offset_KN))


def _branch_states(params, config: transformer.Config, rollout: base.Rollout, offset_KU: jax.Array) -> jax.Array:
    """States at places of the branches, counted from their starts; -1 is the trunk's token before the branch."""
    views = base.given(rollout.views, "views")
    rows_BR = pack(rollout.tokens_BT, rollout.length_B, views)
    hidden_RTD = transformer.hidden_states(params, config, *rows_BR)
    per = views.rollout_K.shape[0] // rollout.tokens_BT.shape[0]
    branch_K = rollout.tokens_BT.shape[1] + views.branch * (jnp.arange(views.rollout_K.shape[0]) % per)
    # An empty hint right at its span (offset -1): the last token of the trunk before it predicts.
    at_KU = jnp.where(offset_KU < 0, views.insert_at_K[:, None] - 1, branch_K[:, None] + offset_KU)
    return _take(hidden_RTD, views.rollout_K, at_KU)


def extra_tokens(views: base.Views) -> int:
    """Forward tokens that the branches add to the trunk (host arithmetic, for the ledger)."""
    used = np.asarray(views.span_length_K) > 0
    ends = views.span_start_K + views.span_length_K - views.insert_at_K + views.hint_length_K
    return int(np.asarray(ends)[used].sum())
