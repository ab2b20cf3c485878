"""What is sampled besides the rollouts themselves: continuations from their states, and trees of rollouts.

A state is a place in a transcript: its first turns, and the first sampled tokens of the turn after them. The
environment is deterministic given its seed, so a state is reached again by playing the transcript, and only what comes
after it is sampled. The columns made here are read by credit/sampled.py.
"""

import bisect
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from rsi_jax import base
from rsi_jax import rollout as rollout_lib


class Place(NamedTuple):
    """A state of a rollout: after its first `turns` turns and the first `tokens` sampled tokens of the next one."""

    transcript: base.Transcript
    turns: int
    tokens: int = 0

    @property
    def over(self) -> bool:
        """True when the episode ended before this place (a truncated one never ended)."""
        return self.turns >= len(self.transcript.turns) and not self.transcript.truncated


def returns_from(
    params, places: Sequence[Place], key: jax.Array, sampler: rollout_lib.Sampler, *, count: int
) -> tuple[np.ndarray, dict[str, float]]:
    """Plays on from each place: the rewards still to come, float64 [len(places), count], and scalars to log.

    Rewards that landed before the place are not counted, γ = 1. Zeros where the episode is over by then.

    Args:
      key: consumed; not the one that the transcripts were sampled with.
      count: continuations of each place, >= 1.

    Returns: (returns, scalars): sampled_tokens counts all that the sampler drew, what the budget of a turn cut as well;
      read_tokens what was read again before it; truncated the continuations that ran out of context.

    Raises: ValueError for a place after which nothing can be sampled (as rollout.collect).
    """
    tasks = [
        rollout_lib.Task(place.transcript.seed, i, place.transcript, place.turns, place.tokens)
        for i, place in enumerate(places)
        if not place.over
        for _ in range(count)
    ]
    found, drawn, played = np.zeros((len(places), count)), [0], []
    if tasks:
        played = rollout_lib.collect(params, tasks, key, sampler, tick=drawn.append)[1]
        rewards = [sum(turn.reward for turn in p.turns[task.turns :]) for task, p in zip(tasks, played, strict=True)]
        found[[not place.over for place in places]] = np.reshape(rewards, (-1, count))
    read = sum(p.turns[task.turns].start + task.tokens for task, p in zip(tasks, played, strict=True))
    truncated = sum(p.truncated for p in played)
    return found, {"sampled_tokens": float(sum(drawn)), "read_tokens": float(read), "truncated": float(truncated)}


def value_column(
    params,
    rollout: base.Rollout,
    transcripts: Sequence[base.Transcript],
    key: jax.Array,
    sampler: rollout_lib.Sampler,
    *,
    places_BT: np.ndarray,
    count: int,
) -> tuple[np.ndarray, dict[str, float]]:
    """Estimates values by continuation: V(s) = mean over `count` fresh continuations of the reward still to come.

    An unbiased value of each state under the policy that is sampled here (γ = 1); one that always does the same gives
    what really followed.

    Args:
      rollout, transcripts: of one batch; the rollout may be trimmed.
      key: consumed; not the one that the rollout was sampled with.
      places_BT: bool, True at the sampled tokens before which a value is wanted. Rows of weight 0 are skipped.
      count: continuations of each place, >= 1.

    Returns: (mc_value_BT float32, NaN where no value was wanted; scalars to log: `continuations/places` and those of
      returns_from).

    Raises: base.InputError for a count below 1; ValueError for a place at a token that was not sampled.

    Source: Kazemnejad et al. 2024, VinePPO (https://arxiv.org/abs/2410.01679), eq. 5.
    """
    if count < 1:
        raise base.InputError(f"continuations: count must be at least 1, got {count}")
    wanted_BT = np.asarray(places_BT) & (np.asarray(rollout.weight_B) > 0)[:, None]
    if (wanted_BT & ~np.asarray(rollout.mask_BT)).any():
        raise ValueError("places_BT asks for a value before a token that was not sampled")
    places = [_place(transcripts[b], int(t)) for b, t in np.argwhere(wanted_BT)]
    returns, scalars = returns_from(params, places, key, sampler, count=count)
    value_BT = np.full(wanted_BT.shape, np.nan, np.float32)
    value_BT[wanted_BT] = returns.mean(axis=1)
    scalars = {"places": float(len(places)), **scalars}
    return value_BT, {f"continuations/{name}": value for name, value in scalars.items()}


def _place(transcript: base.Transcript, token: int) -> Place:
    """The state before a sampled token."""
    turn = bisect.bisect_right(transcript.turns, token, key=lambda record: record.start) - 1
    return Place(transcript, turn, token - transcript.turns[turn].start)


def turn_starts(rollout: base.Rollout, every: int) -> np.ndarray:
    """Marks the first token of every `every`-th turn, turn 0 included: bool [B, T]; the places of vineppo.

    Raises: base.InputError for every < 1.
    """
    if every < 1:
        raise base.InputError(f"turn starts: every must be at least 1, got {every}")
    s = jax.tree.map(np.asarray, rollout.segments)
    acts_BS = (s.kind_BS == base.ACTION) & (s.length_BS > 0)
    rows, places = np.nonzero(acts_BS & (np.asarray(rollout.turn_BS) % every == 0))
    starts_BT = np.zeros(rollout.tokens_BT.shape, bool)
    starts_BT[rows, s.start_BS[rows, places]] = True
    return starts_BT


def cut_points(rollout: base.Rollout, *, prob_max: float, interval: int) -> np.ndarray:
    """Marks where the segments of spo begin: bool [B, T].

    At the first sampled token of a rollout, and then such that each segment but the last holds `interval` tokens that
    were sampled with a probability below `prob_max`, as sampled; a later segment begins with one of them.

    Args:
      rollout: logp_BT is read, over all its turns.
      prob_max: in (0, 1]; 0.9 in the paper.
      interval: >= 1; 5 in the paper.

    Raises: base.InputError for a knob out of range.

    Source: Guo et al. 2025, SPO-chain (https://arxiv.org/abs/2505.23564), cut points by probability.
    Differs: the first segment begins with the rollout, so the first improbable token begins no segment of its own.
    """
    if not 0 < prob_max <= 1 or interval < 1:
        raise base.InputError(f"cut points: prob_max in (0, 1], interval >= 1, got {prob_max} and {interval}")
    mask_BT = np.asarray(rollout.mask_BT)
    first_BT = mask_BT & (np.cumsum(mask_BT, axis=1) == 1)
    open_BT = mask_BT & (np.exp(np.asarray(rollout.logp_BT)) < prob_max)
    before_BT = np.cumsum(open_BT, axis=1) - 1  # at an improbable token: how many came before it
    return first_BT | (open_BT & (before_BT > 0) & (before_BT % interval == 0))


def grow_trees(
    params, tasks: Sequence[rollout_lib.Task], key: jax.Array, sampler: rollout_lib.Sampler, *, roots: int
) -> tuple[base.Rollout, list[base.Transcript], dict[str, float]]:
    """Plays the tasks of each group as `roots` trees: the first ones from the start, the others from turns of these.

    The other rows take the roots in turn. Each forks before a turn of its root, drawn uniformly from all but the first
    (before turn 0 where the root has no other), and plays on by itself. What it shares with the root is a full part of
    it: sampled by this policy, with the root's columns. So each row is a whole rollout, trained on as any other; with
    roots >= the size of the groups this is rollout.collect.

    Args:
      tasks: one per row; those of a group share a seed.
      key: consumed.
      roots: trees of each group, >= 1.

    Returns: (rollout, transcripts, scalars to log), both in the order of `tasks`. tree_B is the row of the root. In the
      other rows parent_BS of the first segment of their own names the last shared one: row of the root * S + segment.
      trees/sampled_tokens counts what the sampler drew, trees/shared_tokens the sampled tokens that rows share with
      their root, which were drawn once; trees/unforked the rows that share nothing but the prompt.

    Raises: base.InputError for roots < 1; ValueError where the seeds of a group differ.

    Source: Ji et al. 2025, Tree-GRPO (https://arxiv.org/abs/2509.21240), section 3.2.
    Differs: all forks are made in one round, from the roots.
    """
    root_of = _roots(tasks, roots)
    rows = range(len(tasks))
    first, later = [b for b in rows if root_of[b] == b], [b for b in rows if root_of[b] != b]
    first_key, later_key, turn_key = jax.random.split(key, 3)
    share_B = np.asarray(jax.random.uniform(turn_key, (len(tasks),)), np.float64)
    drawn = [0]
    made, texts = rollout_lib.collect(params, [tasks[b] for b in first], first_key, sampler, tick=drawn.append)
    grown = dict(zip(first, texts, strict=True))
    forks = [_fork(tasks[b], grown[root_of[b]], share_B[b]) for b in later]
    if forks:
        leaves, texts = rollout_lib.collect(params, forks, later_key, sampler, tick=drawn.append)
        order = np.argsort(np.array(first + later))
        made = jax.tree.map(lambda root, leaf: np.concatenate([root, leaf])[order], made, leaves)
        grown |= dict(zip(later, texts, strict=True))
    shared = sum(_graft(made, b, root_of[b], fork.turns) for b, fork in zip(later, forks, strict=True))
    made = made.replace(tree_B=np.array(root_of, np.int32), chain_B=np.arange(len(tasks), dtype=np.int32))
    scalars = dict(roots=len(first), unforked=sum(not fork.turns for fork in forks))
    scalars |= dict(sampled_tokens=sum(drawn), shared_tokens=shared)
    return made, [grown[b] for b in rows], {f"trees/{name}": float(value) for name, value in scalars.items()}


def _roots(tasks: Sequence[rollout_lib.Task], roots: int) -> list[int]:
    """The row of each row's root: itself for the first `roots` rows of a group, these in turn for the others."""
    if roots < 1:
        raise base.InputError(f"trees: roots must be at least 1, got {roots}")
    root_of, members = list(range(len(tasks))), {}
    for row, task in enumerate(tasks):
        rows = members.setdefault(task.group, [])
        if rows and tasks[rows[0]].seed != task.seed:
            raise ValueError(f"trees: group {task.group} has the seeds {tasks[rows[0]].seed} and {task.seed}")
        if len(rows) >= roots:
            root_of[row] = rows[len(rows) % roots]
        rows.append(row)
    return root_of


def _fork(task: rollout_lib.Task, root: base.Transcript, share: float) -> rollout_lib.Task:
    """The task that plays on before a turn of `root`, picked by `share` in [0, 1)."""
    later = len(root.turns) - 1
    return dataclasses.replace(task, prefix=root, turns=1 + int(share * later) if later else 0, tokens=0)


def _graft(made: base.Rollout, leaf: int, root: int, turns: int) -> int:
    """Gives a forked row the root's columns of what they share, in place: the sampled tokens in it.

    Segments alternate: what came in before turn k is segment 2k, and its action segment 2k + 1.
    """
    s, own = made.segments, 2 * turns + 1
    for column in jax.tree.leaves(s):
        column[leaf, : own - 1] = column[root, : own - 1]
    shared = s.start_BS[leaf, own]
    for column in (made.logp_BT, made.kept_mass_BT):
        column[leaf, :shared] = column[root, :shared]
    s.parent_BS[leaf, own] = root * s.start_BS.shape[1] + own - 1
    return int(s.length_BS[leaf, 1 : own - 1 : 2].sum())
