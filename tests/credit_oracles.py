"""Credit written a second time, from the definitions, in NumPy loops over rollouts, turns and tokens: returns alone.

An oracle takes a Batch (host columns of one Rollout) and the knobs of its variant and gives what credit should be.
`inner` is another oracle. The other families stand in credit_oracles_turns and credit_oracles_views.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from rsi_jax import base

AGREE = 1e-6  # values that spread no further than this have no signal


@dataclasses.dataclass
class Turn:
    """An action, the places of its tokens, and what was earned until the next action."""

    tokens: list[int]
    anchor: int
    reward: float = 0.0
    discount: float = 1.0
    ran_out: bool = False


@dataclasses.dataclass
class Row:
    """One rollout: `earned` is the sum of all rewards; one that does not count gets no credit and moves no baseline."""

    group: int
    earned: float
    counts: bool
    turns: list[Turn]

    @property
    def tokens(self) -> list[int]:
        return [t for turn in self.turns for t in turn.tokens]


@dataclasses.dataclass
class Batch:
    """All rows, and the columns of the rollout in float64 by their name, e.g. `column['logp_BT']`."""

    rows: list[Row]
    T: int
    column: dict[str, np.ndarray]
    views: dict[str, np.ndarray]


@dataclasses.dataclass
class Expected:
    """What a variant should give; None where it has no such output."""

    adv: np.ndarray
    target: np.ndarray | None = None
    views: np.ndarray | None = None
    divergence: base.Divergence | None = None


def read(rollout: base.Rollout) -> Batch:
    """Walks the segments of each rollout in time order."""
    segments = {name: np.asarray(x) for name, x in vars(rollout.segments).items()}
    B, S = segments["kind_BS"].shape
    rows = []
    for b in range(B):
        turns, earned = [], 0.0
        for s in range(S):
            length, reward = int(segments["length_BS"][b, s]), float(segments["reward_BS"][b, s])
            if length == 0:
                continue
            earned += reward
            if segments["kind_BS"][b, s] == base.ACTION:
                start = int(segments["start_BS"][b, s])
                turns.append(Turn(list(range(start, start + length)), int(segments["anchor_BS"][b, s])))
            if turns:  # what comes before the first action belongs to no turn
                turns[-1].reward += reward
                turns[-1].discount *= float(segments["discount_BS"][b, s])
                turns[-1].ran_out |= segments["finish_BS"][b, s] == base.LENGTH
        if turns and not turns[-1].ran_out:
            turns[-1].discount = 0.0
        counts = float(rollout.weight_B[b]) > 0 and math.isfinite(earned)
        rows.append(Row(int(rollout.group_B[b]), earned, counts, turns))
    named = {name: x for name, x in vars(rollout).items() if x is not None and name not in ("segments", "views")}
    column = {name: np.asarray(x, np.float64) for name, x in named.items()}
    views = {name: np.asarray(x) for name, x in vars(rollout.views).items() if name.endswith("_K")}
    return Batch(rows, rollout.tokens_BT.shape[1], column, views)


# --- what definitions share ------------------------------------------------------------------------------------------


def spread_out(batch: Batch, value: Callable[[int, int, int], float]) -> np.ndarray:
    """A column [B, T]: value(row, turn, token) on the sampled tokens of the rows that count, 0 elsewhere."""
    adv = np.zeros((len(batch.rows), batch.T))
    for b, row in enumerate(batch.rows):
        for k, turn in enumerate(row.turns if row.counts else []):
            for t in turn.tokens:
                adv[b, t] = value(b, k, t)
    return adv


def siblings(batch: Batch, b: int) -> list[int]:
    """The rows of b's group that count, b among them."""
    return [i for i, row in enumerate(batch.rows) if row.counts and row.group == batch.rows[b].group]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    """With n - 1 below the sum of squares; 0 for one value."""
    centre = mean(values)
    return math.sqrt(sum((x - centre) ** 2 for x in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def agree(values: list[float]) -> bool:
    return max(values) - min(values) <= AGREE


def compared(x: float, values: list[float], scale: str, floor: float) -> float:
    """x less the mean of the values, over their std with scale 'std'; 0 where they agree."""
    if agree(values):
        return 0.0
    return (x - mean(values)) / (std(values) + floor if scale == "std" else 1.0)


def to_go(row: Row, discount: float = 1.0, rewards: list[float] | None = None) -> list[float]:
    """G_k = Σ_{j >= k} r_j times the discounts between them, γ d of each turn."""
    rewards = [turn.reward for turn in row.turns] if rewards is None else rewards
    found = []
    for k in range(len(rewards)):
        total, factor = 0.0, 1.0
        for j in range(k, len(rewards)):
            total += factor * rewards[j]
            factor *= discount * row.turns[j].discount
        found.append(total)
    return found


def per_rollout(batch: Batch, value: Callable[[int], float]) -> Expected:
    return Expected(spread_out(batch, lambda b, k, t: value(b)))


def earned(batch: Batch, rows: list[int]) -> list[float]:
    return [batch.rows[i].earned for i in rows]


# --- group.py --------------------------------------------------------------------------------------------------------


def reinforce(batch, *, baseline="none"):
    everyone = [row.earned for row in batch.rows if row.counts]
    centre = mean(everyone) if baseline == "batch" and everyone else 0.0
    return per_rollout(batch, lambda b: batch.rows[b].earned - centre)


def rloo(batch):
    def value(b):
        group = siblings(batch, b)
        if agree(earned(batch, group)):
            return 0.0
        return batch.rows[b].earned - mean(earned(batch, [i for i in group if i != b]))

    return per_rollout(batch, value)


def grpo(batch, *, scale="std", std_floor=1e-6, per="rollout"):
    def value(b):
        group = siblings(batch, b)
        times = [len(batch.rows[i].turns) if per == "turn" else 1 for i in group]
        values = [batch.rows[i].earned for i, n in zip(group, times, strict=True) for _ in range(n)]
        return compared(batch.rows[b].earned, values, scale, std_floor)

    return per_rollout(batch, value)


def dr_grpo(batch):
    return grpo(batch, scale="none")


def maxrl(batch, *, floor=1e-6):
    def value(b):
        returns = earned(batch, siblings(batch, b))
        centre = mean(returns)
        return (batch.rows[b].earned - centre) / centre if centre > floor and not agree(returns) else 0.0

    return per_rollout(batch, value)


def opo(batch):
    def value(b):
        group = siblings(batch, b)
        returns, lengths = earned(batch, group), [len(batch.rows[i].tokens) for i in group]
        if agree(returns):
            return 0.0
        return batch.rows[b].earned - sum(n * r for n, r in zip(lengths, returns, strict=True)) / sum(lengths)

    return per_rollout(batch, value)


def rae(batch, *, decay=0.95):
    batch_mean = mean([row.earned for row in batch.rows if row.counts])
    past = batch.column["baseline_B"]
    return per_rollout(batch, lambda b: batch.rows[b].earned - (decay * past[b] + (1 - decay) * batch_mean))


def otb(batch):
    """(W, G) of each sampled token in time order; b_n is a mean over the group of the n-th ones."""
    logp, collision = batch.column["logp_BT"], batch.column["collision_BT"]
    walks = []
    for b, row in enumerate(batch.rows):
        walk, energy = [], 0.0
        for turn, togo in zip(row.turns, to_go(row), strict=True):
            for t in turn.tokens:
                energy += 1.0 - 2.0 * math.exp(logp[b, t]) + collision[b, t]
                walk.append((energy, togo))
        walks.append(walk)

    def value(b, k, t):
        group, n = siblings(batch, b), batch.rows[b].tokens.index(t)
        if agree(earned(batch, group)):
            return 0.0
        at = [walks[i][n] if n < len(walks[i]) else (walks[i][-1][0], 0.0) for i in group]  # ended: G = 0
        return walks[b][n][1] - sum(w * g for w, g in at) / sum(w for w, _ in at)

    return Expected(spread_out(batch, value))


def reinforce_pp(batch):
    every = [g for row in batch.rows if row.counts for k, g in enumerate(to_go(row)) for _ in row.turns[k].tokens]
    centre, width = mean(every), std(every)
    found = [to_go(row) for row in batch.rows]
    return Expected(spread_out(batch, lambda b, k, t: (found[b][k] - centre) / width if width > AGREE else 0.0))


def reinforce_pp_baseline(batch):
    centred = dr_grpo(batch).adv
    width = std([centred[b, t] for b, row in enumerate(batch.rows) if row.counts for t in row.tokens])
    return Expected(centred / width if width > AGREE else centred)


def centred_return_to_go(batch, *, discount=1.0):
    found = [to_go(row, discount) for row in batch.rows]

    def value(b, k, t):
        first = [found[i][0] for i in siblings(batch, b)]
        return 0.0 if agree(first) else found[b][k] - mean(first)

    return Expected(spread_out(batch, value))
