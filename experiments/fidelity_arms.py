"""What `experiments.credit_fidelity` compares: the worlds, and credit variants with the columns that they read."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rsi_jax import base, credit
from rsi_jax.envs import exact
from rsi_jax.envs.exact import columns

CLASSES = 32  # of returns, at most
SIZE = 8  # rollouts of a group
LEARN = 4  # hindsight is counted in so many batches
PRIOR = 4.0  # weight of the policy against these counts, in episodes


@dataclasses.dataclass(frozen=True)
class Case:
    """A world at a horizon. lean: how far the policies lean to the best actions (logits, beside normal ones)."""

    world: str
    horizon: int
    lean: float

    @functools.cached_property
    def tables(self) -> exact.World:
        return exact.make(self.world, horizon=self.horizon)

    @functools.cached_property
    def return_edges(self) -> tuple[float, ...]:
        """Classes of returns, about as likely as each other under the leaning policy; the same for every seed."""
        made = exact.returns(self.tables, exact.draw_logits(self.tables, 0, scale=0.0, lean=self.lean))
        first_R = np.einsum("n,nar->r", self.tables.start_N, made.prob_HNAR[0])
        below_R = np.cumsum(first_R) / first_R.sum()
        at = np.unique(np.searchsorted(below_R, np.arange(1, CLASSES) / CLASSES))
        return tuple(float(x) for x in made.at_R[at] + self.tables.unit / 2)

    @functools.cached_property
    def reward_edges(self) -> tuple[float, ...]:
        """Every reward that the world pays is a class of its own."""
        return columns.edges_between(self.tables.reward_HNAJ)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One seed of a case: a policy, a batch, other batches to count hindsight in, and a key for what is sampled yet."""

    case: Case
    logits: np.ndarray
    sample: exact.Sample
    others: tuple[exact.Sample, ...]
    key: jax.Array


Made = tuple[base.Rollout, int]  # with the columns, and the tokens that they cost


@dataclasses.dataclass(frozen=True)
class Arm:
    """A variant with its knobs, and how its columns are made.

    forked: it reads a batch with forks. changed: columns that `columns` changes beside those that the variant needs.
    longest: horizons beyond it would take too long. quick: whether a quick run has it without being asked.
    """

    variant: str
    knobs: Callable[[Case], dict[str, Any]] = lambda case: {}
    columns: Callable[[Drawn], Made] = lambda drawn: (drawn.sample.rollout, 0)
    forked: bool = False
    changed: tuple[str, ...] = ()
    longest: int = 10**9
    quick: bool = True

    def bind(self, case: Case) -> tuple[base.CreditFn, tuple[str, ...]]:
        """The credit function, and the columns that `columns` makes for it."""
        function, needs = credit.find(self.variant)
        return functools.partial(function, **self.knobs(case)), (*needs, *self.changed)


def _critic(noise: float):
    def made(drawn: Drawn) -> Made:
        return columns.with_values(drawn.sample, drawn.case.tables, drawn.logits, noise=noise), 0

    return made


def _continuations(count: int):
    def made(drawn: Drawn) -> Made:
        return columns.with_continuations(drawn.sample, drawn.case.tables, drawn.logits, drawn.key, count=count)

    return made


def _judge(drawn: Drawn) -> Made:
    return columns.with_judge(drawn.sample, drawn.case.tables, drawn.logits), 0


def _expected(drawn: Drawn) -> Made:
    return columns.with_baseline(drawn.sample, drawn.case.tables, drawn.logits), 0


def _collisions(drawn: Drawn) -> Made:
    return columns.with_collisions(drawn.sample, drawn.case.tables, drawn.logits), 0


def _outcomes(of: str, counted: bool):
    def made(drawn: Drawn) -> Made:
        world, edges = drawn.case.tables, getattr(drawn.case, f"{of}_edges")
        if not counted:
            return columns.with_outcomes(
                drawn.sample, getattr(columns, f"{of}_hindsight")(world, drawn.logits, edges)
            ), 0
        path = exact.Path(*(np.concatenate(parts) for parts in zip(*(one.path for one in drawn.others), strict=True)))
        log_h = columns.counted_hindsight(world, drawn.logits, path, edges, of=of, prior=PRIOR)
        return columns.with_outcomes(drawn.sample, log_h), int(np.sum(path.played_BH))

    return made


def _hindsight(drawn: Drawn) -> Made:
    return columns.with_hindsight(drawn.sample, drawn.case.tables, drawn.logits), 0


def _no_hint(drawn: Drawn) -> Made:
    return columns.without_hint(drawn.sample), 0


def _nothing_recurs(drawn: Drawn) -> Made:
    """Gives every turn of every rollout an anchor of its own, as where no state is met twice."""
    segments = drawn.sample.rollout.segments
    anchor_BS = np.where(
        np.asarray(segments.anchor_BS) == base.NO_ANCHOR,
        base.NO_ANCHOR,
        np.arange(segments.anchor_BS.size, dtype=np.int32).reshape(segments.anchor_BS.shape),
    )
    return drawn.sample.rollout.replace(segments=segments.replace(anchor_BS=anchor_BS)), 0


def _group(case: Case) -> base.CreditFn:
    return functools.partial(credit.find("grpo")[0], scale="none")


def _hcapo(denominator: str):
    return lambda case: {"inner": _group(case), "discount": 1.0, "denominator": denominator}


def _edges(of: str):
    return lambda case: {"edges": getattr(case, f"{of}_edges")}


# No std: credit in units of the return, so that its bias means something. γ = 1, as the truth has it.
ARMS = {
    "reinforce": Arm("reinforce"),
    "grpo": Arm("grpo", lambda case: {"scale": "none"}),
    "rloo": Arm("rloo"),
    "rae": Arm("rae", columns=_expected, quick=False),
    "maxrl": Arm("maxrl", quick=False),
    "opo": Arm("opo", quick=False),
    "reinforce_pp": Arm("reinforce_pp", quick=False),
    "reinforce_pp_baseline": Arm("reinforce_pp_baseline", quick=False),
    "otb": Arm("otb", columns=_collisions),
    "centred_return_to_go": Arm("centred_return_to_go"),
    "turn_rloo": Arm("turn_rloo"),
    "mt_grpo": Arm("mt_grpo", lambda case: {"outcome_weight": 0.0, "scale": "none"}),
    "gigpo": Arm("gigpo", lambda case: {"inner": _group(case), "discount": 1.0}),
    "gigpo, nothing recurs": Arm(
        "gigpo", lambda case: {"inner": _group(case), "discount": 1.0}, _nothing_recurs, changed=("segments",)
    ),
    "prm, exact judge": Arm("prm", lambda case: {"inner": _group(case)}, _judge, quick=False),
    "pbrs, exact judge": Arm(
        "pbrs", lambda case: {"inner": credit.find("centred_return_to_go")[0]}, _judge, quick=False
    ),
    "tree_grpo": Arm("tree_grpo", lambda case: {"scale": "none"}, forked=True),
    "turn_gae, exact critic": Arm("turn_gae", lambda case: {"discount": 1.0, "lambda_": 0.95}, _critic(0.0)),
    "turn_gae, critic off by 0.3": Arm("turn_gae", lambda case: {"discount": 1.0, "lambda_": 0.95}, _critic(0.3)),
    "vapo, critic off by 0.3": Arm("vapo", columns=_critic(0.3), quick=False),
    "vineppo, K = 1": Arm("vineppo", columns=_continuations(1)),
    "vineppo, K = 3": Arm("vineppo", columns=_continuations(3)),
    "vineppo, K = 9": Arm("vineppo", columns=_continuations(9)),
    "vineppo, K = 1024": Arm("vineppo", columns=_continuations(1024), longest=20),
    "spo, K = 9": Arm("spo", columns=_continuations(9), longest=40),
    "hca": Arm("hca", _edges("return"), _outcomes("return", counted=False)),
    "hca, counted": Arm("hca", _edges("return"), _outcomes("return", counted=True)),
    "cocoa": Arm("cocoa", _edges("reward"), _outcomes("reward", counted=False)),
    "cocoa, counted": Arm("cocoa", _edges("reward"), _outcomes("reward", counted=True)),
    "hcapo, by trajectory": Arm("hcapo", _hcapo("trajectory"), _hindsight),
    "hcapo, by policy": Arm("hcapo", _hcapo("policy"), _hindsight),
    "hcapo, no hint, by trajectory": Arm("hcapo", _hcapo("trajectory"), _no_hint),
    "hcapo, no hint, by policy": Arm("hcapo", _hcapo("policy"), _no_hint),
}

# Horizons, shortest first. The quick ones are the first `quick` of each.
CASES = {
    "key_to_door": (1.0, (13, 33, 103)),
    "umbrella_chain": (1.0, (10, 40)),
    "discounting_chain": (1.0, (20, 100)),
    "passive_tmaze": (3.0, (10, 50)),
    "active_tmaze": (3.0, (10, 20)),
    "tool_not_found": (3.0, (16, 32, 64)),
    "stopping": (1.0, (8, 32)),
    "noisy_tree": (1.0, (5, 7)),
}
QUICK = {"key_to_door": 3, "umbrella_chain": 2, "tool_not_found": 2}  # horizons of a quick run; 1 for the others


def cases(quick: bool) -> list[Case]:
    """Lists the worlds at their horizons."""
    return [
        Case(world, horizon, lean)
        for world, (lean, horizons) in CASES.items()
        for horizon in (horizons[: QUICK.get(world, 1)] if quick else horizons)
    ]


def draw(case: Case, seed: int, *, groups: int, forked: bool = False) -> Drawn:
    """Draws the policy and the batches of a seed."""
    logits = exact.draw_logits(case.tables, seed, lean=case.lean)
    key_sample, key_others, key_columns = jax.random.split(jax.random.key(seed), 3)
    sample = exact.sample(case.tables, logits, key_sample, groups=groups, size=SIZE, forked=forked)
    others = (
        ()
        if forked
        else tuple(
            exact.sample(case.tables, logits, key, groups=groups, size=SIZE)
            for key in jax.random.split(key_others, LEARN)
        )
    )
    return Drawn(case, logits, sample, others, key_columns)
