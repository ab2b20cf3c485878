"""Hinted re-readings: from hints to views, and the teacher's and the student's states on their spans.

A rollout and its views are one packed row: the trunk, and a branch per view (see packing.py), so that a hint costs its
own tokens and its span's, not its prefix. `reread` is the definition that packing is held to: each view in a row of its
own, prefix, hint, span.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base, packing
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
    first: bool = False,
) -> base.Views:
    """Lays findings and their hint ids out as host columns, K = rollouts * per_rollout.

    The capacities are fixed over a stage, so that one shape is compiled; nothing is ever cut to fit them.
    branch: tokens that the branches of a rollout may hold together; 0 = what these need, rounded up to a power of two.
    first: hints stand where one of the row's first turn would: a branch then copies all from there to its span, and
    shares no more than the prompt with the rollout.

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
        turns = transcripts[finding.row].turns
        turn, place = turns[finding.turn], turns[0 if first else finding.turn].insert_at
        values = dict(insert_at=place, span_start=turn.start, span_length=turn.length, hint_length=len(ids))
        for name, value in values.items():
            ints[name][k] = value
        hint_KN[k, : len(ids)], source[k], weight[k] = ids, list(rules).index(finding.rule), 1.0
    columns: dict[str, Any] = {f"{name}_K": array for name, array in ints.items()}
    columns |= dict(
        rollout_K=np.repeat(np.arange(len(transcripts), dtype=np.int32), per_rollout),
        hint_KN=hint_KN,
        source_K=source,
        weight_K=weight,
        polarity_K=np.ones(K, np.float32),
    )
    views = base.Views(branch=branch, **columns)
    needed = _needed(views, len(transcripts))
    if branch and needed > branch:
        raise base.InputError(f"the branches of a rollout have {needed} tokens: raise feedback.branch_tokens={branch}")
    return views if branch else views.replace(branch=packing.power_of_two(needed))


def _needed(views: base.Views, rollouts: int) -> int:
    """Tokens of the branches of the rollout that has the most."""
    return int(np.asarray(packing.branch_length(views)).reshape(rollouts, -1).sum(axis=1).max(initial=0))


def rehint(views: base.Views, hints: Sequence[Sequence[int]], *, field: str = "feedback.hint_tokens") -> base.Views:
    """Gives the used views other hints, in order: the same spans, read with other words; the row grows when it must.

    Raises: base.InputError when a hint does not fit.
    """
    used_K = np.flatnonzero(np.asarray(views.span_length_K) > 0)
    capacity = views.hint_KN.shape[1]
    hint_KN, length_K = np.zeros_like(np.asarray(views.hint_KN)), np.zeros_like(np.asarray(views.hint_length_K))
    for k, ids in zip(used_K, hints, strict=True):
        if len(ids) > capacity:
            raise base.InputError(f"a hint has {len(ids)} tokens: raise {field}={capacity}")
        hint_KN[k, : len(ids)], length_K[k] = ids, len(ids)
    views = views.replace(hint_KN=hint_KN, hint_length_K=length_K)
    needed = _needed(views, int(np.max(views.rollout_K, initial=0)) + 1)
    return views.replace(branch=packing.power_of_two(needed)) if 0 < views.branch < needed else views


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
    return base.Views(branch=per_rollout * (capacity + 1), **named)


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


def _take(states_RPD: jax.Array, row_K: jax.Array | None, first_K: jax.Array, count: int) -> jax.Array:
    """States at `count` places from `first` on, in a row of each view [K, count, D].

    row_K: None = the views are those of row 0, row 1, ..., as many of each: rows split over devices then stay so.
    """
    R, P, *rest = states_RPD.shape
    at_KU = jnp.clip(first_K[:, None] + jnp.arange(count), 0, P - 1)
    if row_K is not None:
        return states_RPD[row_K[:, None], at_KU]
    taken = jnp.take_along_axis(states_RPD, at_KU.reshape(R, -1, *[1] * len(rest)), axis=1)
    return taken.reshape(*at_KU.shape, *rest)


def _rows(rollout: base.Rollout, views: base.Views) -> tuple[jax.Array | None, base.Layout]:
    """The row of each view, None where every rollout has its own; and the layout."""
    layout = packing.layout_of(rollout)
    return None if rollout.layout is None else layout.row_B[views.rollout_K], layout


def span_tokens(tokens_BT: jax.Array, views: base.Views, span: int) -> jax.Array:
    """The sampled tokens of each span [K, U]."""
    return _take(tokens_BT, None, views.span_start_K, span)


def student_states(hidden_RPD: jax.Array, rollout: base.Rollout, span: int) -> jax.Array:
    """The states on the trunk that predict each span token, without the hint [K, U, D]."""
    views = base.given(rollout.views, "views")
    row_K, layout = _rows(rollout, views)
    return _take(hidden_RPD, row_K, layout.start_B[views.rollout_K] + views.span_start_K - 1, span)


def read(
    params, config: transformer.Config, rollout: base.Rollout, *, remat: transformer.Remat = transformer.KEEP_ALL
) -> tuple[jax.Array, jax.Array]:
    """Reads the rollouts and their branches in one forward: hidden states [R, P, D] and [R, Q, D].

    No gradient flows through the branches: the policy is its own (live) teacher.
    """
    trunk, branch = packing.trunk_rows(rollout), packing.branch_rows(rollout)
    return transformer.branched_states(params, config, trunk, branch, remat=remat)


def teacher_states(params, config: transformer.Config, rollout: base.Rollout, span: int) -> jax.Array:
    """The teacher's states that predict each span token, with the hint before it [K, U, D]; no gradient.

    One packed row per rollout (views.branch > 0), equal to reading each view on its own.
    """
    params, views = jax.lax.stop_gradient(params), base.given(rollout.views, "views")
    if views.branch:
        return span_states(*read(params, config, rollout), rollout, span)
    tokens_KW, length_K = reread(rollout.tokens_BT, views)
    positions_KW = jnp.broadcast_to(jnp.arange(tokens_KW.shape[1]), tokens_KW.shape)
    rows = transformer.Rows(tokens_KW, positions_KW, attention.causal_ranges(length_K, tokens_KW.shape[1]))
    hidden_KWD = transformer.hidden_states(params, config, rows)
    first_K = views.span_start_K + views.hint_length_K - 1
    return jax.lax.stop_gradient(_take(hidden_KWD, None, first_K, span))


def span_states(hidden_RPD: jax.Array, branch_RQD: jax.Array, rollout: base.Rollout, span: int) -> jax.Array:
    """Picks the teacher's states that predict each span token from what `read` gave [K, U, D]; no gradient."""
    views = base.given(rollout.views, "views")
    before_K = views.hint_length_K + views.span_start_K - views.insert_at_K - 1
    return _branch_states(hidden_RPD, branch_RQD, rollout, before_K, span)


def hint_states(params, config: transformer.Config, rollout: base.Rollout) -> jax.Array:
    """The states that predict each token of the hints of packed views [K, N, D]; no gradient."""
    K, N = base.given(rollout.views, "views").hint_KN.shape
    hidden = read(jax.lax.stop_gradient(params), config, rollout)
    return _branch_states(*hidden, rollout, jnp.full(K, -1), N)


def _branch_states(hidden_RPD, branch_RQD, rollout: base.Rollout, first_K: jax.Array, count: int) -> jax.Array:
    """States at `count` places of each branch, counted from its start; -1 is the trunk's token before the branch."""
    views = base.given(rollout.views, "views")
    row_K, layout = _rows(rollout, views)
    on_branch_KUD = _take(branch_RQD, row_K, layout.at_K + first_K, count)
    # An empty hint right at its span (-1): the last token of the trunk before it predicts.
    on_trunk_K1D = _take(hidden_RPD, row_K, layout.start_B[views.rollout_K] + views.insert_at_K - 1, 1)
    forked_KU = first_K[:, None] + jnp.arange(count) >= 0
    return jax.lax.stop_gradient(jnp.where(forked_KU[..., None], on_branch_KUD, on_trunk_K1D))


def extra_tokens(views: base.Views) -> int:
    """Forward tokens that the branches add to the trunk (host arithmetic, for the ledger)."""
    return int(np.asarray(packing.branch_length(views)).sum())
