"""Chains: episodes that went on in another row after the policy had summarised its context.

A batch of them has `rows` rows for every episode, one after the other and in time order; those that an episode does not
use are empty. What is said of trajectories (credit, returns, the weights of the loss) is said of whole chains: `join`
makes one trajectory of the rows of each, so that a function of trajectories holds for chains unchanged, and `split`
gives its credit back to the rows. Columns of tokens and of segments keep their order, so that reshaping them to
[rows of the batch, -1] is the way back. With one row to a chain nothing is changed.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base


def join(rollout: base.Rollout, rows: int) -> base.Rollout:
    """Makes one trajectory of the rows of each chain: [B / rows, rows * T] with a gap where a row is not full.

    The prompt of a later row (the task again, the summary) becomes an observation. weight_B, group_B, baseline_B and
    tree_B are those of the first row, end_value_B that of the last one in use; groups are numbered anew.

    Args:
      rollout: B a multiple of `rows`; any columns.
      rows: of each chain, >= 1; 1 = the rollout as it is.
    """
    if rows == 1:
        return rollout
    s, (B, T) = rollout.segments, rollout.tokens_BT.shape
    part_B = jnp.arange(B) % rows
    acts_BS = (s.kind_BS == base.ACTION) & (s.length_BS > 0)
    own_BS = jnp.arange(acts_BS.shape[1]) < jnp.sum(acts_BS, axis=1, keepdims=True)
    order_BS = jnp.argsort(~by_chain(own_BS, rows), axis=1, stable=True)  # the turns of the chain, then what is beyond

    def of_chain(name: str, x):
        match name.rpartition("_")[2]:
            case "BT" | "BTM":
                return by_chain(x, rows)
            case "BS":
                return jnp.take_along_axis(by_chain(x, rows), order_BS, axis=1)
            case "B":
                return x[::rows]
        return x

    names = [field.name for field in dataclasses.fields(rollout) if field.name not in ("segments", "views")]
    columns = {name: of_chain(name, x) for name in names if (x := getattr(rollout, name)) is not None}
    columns["group_B"] = jnp.unique(columns["group_B"], return_inverse=True, size=B // rows)[1].astype(jnp.int32)
    columns["chain_B"] = jnp.arange(B // rows, dtype=jnp.int32)
    if rollout.end_value_B is not None:
        last_C = jnp.sum(by_chain(rollout.length_B[:, None] > 0, rows), axis=1) - 1
        columns["end_value_B"] = by_chain(rollout.end_value_B[:, None], rows)[jnp.arange(B // rows), last_C]
    later_BS = (part_B[:, None] > 0) & (s.kind_BS == base.PROMPT)
    kind_BS = jnp.where(later_BS, base.OBSERVATION, s.kind_BS)
    segments = s.replace(start_BS=s.start_BS + T * part_B[:, None], kind_BS=kind_BS)
    segments = jax.tree.map(lambda x: by_chain(x, rows), segments)
    return rollout.replace(segments=segments, views=_shifted(rollout.views, rows, T), **columns)


def _shifted(views: base.Views | None, rows: int, T: int) -> base.Views | None:
    """The views of the rows as views of their chains."""
    if views is None:
        return None
    shift_K = T * (views.rollout_K % rows)
    return views.replace(
        rollout_K=views.rollout_K // rows,
        insert_at_K=views.insert_at_K + shift_K,
        span_start_K=views.span_start_K + shift_K,
    )


def by_chain(x, rows: int):
    """Puts the columns of the rows of each chain side by side: [B, N, ...] to [B / rows, rows * N, ...]."""
    return x.reshape(x.shape[0] // rows, rows * x.shape[1], *x.shape[2:])


def split(credit: base.Credit, rows: int) -> base.Credit:
    """Gives the credit of joined trajectories back to the rows of their chains; that of views stays as it is."""

    def by_row(x):
        return x.reshape(x.shape[0] * rows, x.shape[1] // rows)

    target = credit.value_target_BT
    return credit.replace(adv_BT=by_row(credit.adv_BT), value_target_BT=None if target is None else by_row(target))


def over(credit_fn: base.CreditFn, rows: int) -> base.CreditFn:
    """Makes a credit function that sees whole chains, and speaks of their rows."""
    return lambda rollout: split(credit_fn(join(rollout, rows)), rows)


def rows_of(chains: np.ndarray, rows: int) -> np.ndarray:
    """The rows of the batch that hold the given chains, in order."""
    return (np.asarray(chains, int)[:, None] * rows + np.arange(rows)).reshape(-1)


def episode_of(transcripts: Sequence[base.Transcript]) -> list[int]:
    """The number of each row's episode in `episodes`."""
    return [count - 1 for count in itertools.accumulate(int(one.part == 0) for one in transcripts)]


def episodes(transcripts: Sequence[base.Transcript]) -> list[base.Transcript]:
    """Joins the rows of each chain: the turns of the environment, in time order; no summaries, no tokens.

    The places of a joined turn are those in its row. An episode of one row is left as it is.
    """
    chains: list[list[base.Transcript]] = []
    for one in transcripts:
        if one.part == 0:
            chains.append([])
        chains[-1].append(one)
    return [_joined(parts) if len(parts) > 1 else parts[0] for parts in chains]


def _joined(parts: Sequence[base.Transcript]) -> base.Transcript:
    turns = [turn for part in parts for turn in part.turns if not turn.summary]
    truncated = any(part.truncated for part in parts)
    return base.Transcript(parts[0].seed, parts[0].group, turns=turns, truncated=truncated)


def turn_in_episode(transcripts: Sequence[base.Transcript], row: int, turn: int) -> int:
    """The place of a row's turn among the turns of its episode (of a summary: the turn that follows it)."""
    before = [one for part in transcripts[row - transcripts[row].part : row] for one in part.turns]
    return sum(not one.summary for one in [*before, *transcripts[row].turns[:turn]])
