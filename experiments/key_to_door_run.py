"""Trains logits in `key_to_door` with one credit estimate, for `experiments.repro_key_to_door`."""

import collections
import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from experiments import fidelity_arms
from experiments.fidelity_arms import Case, Drawn
from rsi_jax.envs import exact
from rsi_jax.evals import fidelity

BATCH = 8  # episodes, one group
POINTS = 50  # of a learning curve
RATES = (0.01, 0.03, 0.1)  # of Adam, the knob trials of every arm
TRIAL_SEED = 100  # and on; at the longest horizon
LAST = 64  # batches in which hindsight is counted: 512 episodes, as in credit_fidelity
POLICIES = ("turn", "state")  # what logits belong to
ADAM = optax.scale_by_adam()


@dataclasses.dataclass(frozen=True)
class Learner:
    """An arm. estimate: of fidelity_arms.ARMS. last: it counts hindsight in so many of the run's batches before the one
    that it credits, so that these cost nothing more; 0: it reads no other batch."""

    label: str
    estimate: str
    last: int = 0


ARMS = {
    "reinforce": Learner("REINFORCE, no baseline", "reinforce"),
    "grpo": Learner("GRPO, no std", "grpo"),
    "turn_gae": Learner("advantage, exact critic", "turn_gae, exact critic"),
    "vineppo": Learner("VinePPO, K = 3", "vineppo, K = 3"),
    "hca": Learner("HCA (return), exact", "hca"),
    "hca_counted": Learner("HCA (return), counted", "hca, counted", LAST),
    "cocoa": Learner("COCOA (reward), exact", "cocoa"),
    "cocoa_counted": Learner("COCOA (reward), counted", "cocoa, counted", LAST),
}


@dataclasses.dataclass(frozen=True)
class Form:
    """What a command runs: seeds 0, 1, ... of every arm at every horizon; knob trials on seeds of their own."""

    arms: tuple[str, ...]
    horizons: tuple[int, ...]
    seeds: int
    trial_seeds: int
    episodes: int
    policy: str = POLICIES[0]


WHOLE = Form(tuple(ARMS), (13, 33, 103), seeds=5, trial_seeds=2, episodes=10_000)
QUICK = Form(("reinforce", "hca", "cocoa", "cocoa_counted"), (13, 103), seeds=5, trial_seeds=1, episodes=2_000)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training. episodes: a multiple of the batch is played. policy: one of POLICIES."""

    arm: str
    horizon: int
    seed: int
    rate: float
    episodes: int
    policy: str = POLICIES[0]

    @property
    def digest(self) -> str:
        """Names all that the numbers depend on: 16 hex digits."""
        given = dataclasses.asdict(self) | dataclasses.asdict(ARMS[self.arm]) | {"batch": BATCH, "optimizer": "adam"}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()[:16]


class EvenReturns(Case):
    """A case whose classes of returns are as wide as each other: they must suit the first policy and the best one."""

    @functools.cached_property
    def return_edges(self) -> tuple[float, ...]:
        """From 0 to what the best policy exceeds once in a thousand episodes."""
        made = exact.returns(self.tables, best_policy(self.tables))
        below_R = np.cumsum(np.einsum("n,nar->r", self.tables.start_N, made.prob_HNAR[0]))
        top = np.searchsorted(below_R / below_R[-1], 0.999)
        at = np.unique(np.linspace(0, top, fidelity_arms.CLASSES - 1).round().astype(int))
        return tuple(float(x) for x in made.at_R[at] + self.tables.unit / 2)


@functools.cache
def case_of(horizon: int) -> Case:
    """The world at a horizon."""
    return EvenReturns("key_to_door", horizon, lean=0.0)


@functools.cache
def credit_of(arm: str, horizon: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """The compiled credit of an arm: rollout -> (adv_BT, mask_BT)."""
    function, _ = fidelity_arms.ARMS[ARMS[arm].estimate].bind(case_of(horizon))

    # It takes longer to compile than to run: it is not optimised.
    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def credit(rollout):
        return function(rollout).adv_BT, rollout.mask_BT

    return credit


def gradient_of(arm: str, drawn: Drawn) -> tuple[np.ndarray, int]:
    """The policy gradient [H, N, A] that an arm's credit makes of a batch, and the tokens that its columns cost."""
    rollout, tokens = fidelity_arms.ARMS[ARMS[arm].estimate].columns(drawn)
    adv_BT, mask_BT = credit_of(arm, drawn.case.horizon)(rollout)
    path, group_B = drawn.sample.path, np.asarray(drawn.sample.rollout.group_B)
    played_BH = np.asarray(path.played_BH)
    adv_BH = np.zeros(played_BH.shape)
    adv_BH[played_BH] = np.asarray(adv_BT)[np.asarray(mask_BT)]
    pi_HNA = exact.policy(drawn.case.tables, drawn.logits)
    estimate_GHNA = fidelity.gradients(adv_BH, np.asarray(path.state_BH), np.asarray(path.action_BH), pi_HNA, group_B)
    return estimate_GHNA.mean(0), 0 if ARMS[arm].last else tokens


@jax.jit
def climb(logits, adam, gradient, rate) -> tuple[jax.Array, optax.OptState]:
    """One step of Adam up the gradient."""
    step, adam = ADAM.update(gradient, adam)
    return optax.apply_updates(logits, rate * step), adam


def treasure(world: exact.World, logits: np.ndarray) -> float:
    """P(treasure), exact: whoever takes the key at turn 0 gets it, and nobody else."""
    return float(exact.policy(world, logits)[0, world.states.index(("key", False)), 1])


def best_policy(world: exact.World) -> np.ndarray:
    """Logits of the best policy; of actions that are equally good, all."""
    return exact.draw_logits(world, 0, scale=0.0, lean=100.0)


def best_return(world: exact.World) -> float:
    """The expected return of the best policy."""
    return exact.expected_return(world, best_policy(world))


def train(run: Run) -> dict[str, Any]:
    """Trains from the uniform policy: the row of a run. curve: [episodes, tokens, P(treasure), return over the best].

    An arm that counts hindsight has nothing to count in at its first batch, and only samples there.
    """
    began, case, last = (time.monotonic(), time.process_time()), case_of(run.horizon), ARMS[run.arm].last
    world, best, updates = case.tables, best_return(case.tables), max(1, run.episodes // BATCH)
    logits, tokens, curve = np.zeros(world.prob_HNAJ.shape[:3], np.float32), 0, []
    adam, key, past = ADAM.init(logits), jax.random.key(run.seed), collections.deque(maxlen=last)
    shown = set(np.linspace(0, updates, min(POINTS, updates) + 1).round().astype(int).tolist())
    for i in range(updates + 1):
        if i in shown:
            share = exact.expected_return(world, logits) / best
            curve.append([i * BATCH, tokens, treasure(world, logits), share])
        if i == updates:
            break
        key_sample, key_columns = jax.random.split(jax.random.fold_in(key, i))
        sample = exact.sample(world, logits, key_sample, groups=1, size=BATCH)
        sample = sample._replace(path=exact.Path(*map(np.asarray, sample.path)))
        tokens += int(np.sum(sample.path.played_BH))
        if past or not last:
            gradient, extra = gradient_of(run.arm, Drawn(case, logits, sample, tuple(past), key_columns))
            if run.policy == "turn":  # one logit for all states of a turn: its gradient is the sum of theirs
                gradient = np.broadcast_to(gradient.sum(1, keepdims=True), gradient.shape)
            moved, adam = climb(logits, adam, gradient.astype(np.float32), run.rate)
            logits, tokens = np.asarray(moved), tokens + extra
        past.append(sample)
    _, _, found, share = curve[-1]
    measured = {"treasure": found, "return_share": share, "tokens": tokens, "curve": curve}
    spent = {"wall_s": time.monotonic() - began[0], "cpu_s": time.process_time() - began[1]}
    return dataclasses.asdict(run) | measured | spent | {"digest": run.digest}


def trials_of(form: Form, arm: str) -> dict[float, list[Run]]:
    """The knob trials of an arm: as many for every arm, at the longest horizon."""
    seeds = range(TRIAL_SEED, TRIAL_SEED + form.trial_seeds)
    return {
        rate: [Run(arm, max(form.horizons), seed, rate, form.episodes, form.policy) for seed in seeds] for rate in RATES
    }


def best_rate(trials: Mapping[float, float]) -> float:
    """The rate whose trials found the treasure most often; of equals the smaller."""
    return max(sorted(trials), key=lambda rate: trials[rate])


def summarise(rows: Sequence[Mapping[str, Any]], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Sums up the runs of one arm at one horizon over seeds: means, with Student's 95% interval of P(treasure)."""
    mean, low, high = fidelity.interval([row["treasure"] for row in rows])
    named = {"arm": rows[0]["arm"], "horizon": rows[0]["horizon"], "seeds": len(rows)}
    found = {"treasure_at_budget": mean, "low": low, "high": high}
    along = float(np.mean([point[2] for row in rows for point in row["curve"]]))
    rest = {name: float(np.mean([row[name] for row in rows])) for name in ("return_share", "tokens", "wall_s", "cpu_s")}
    by_seed = [[row["seed"], row["treasure"]] for row in rows]
    budget = {"episodes": rows[0]["curve"][-1][0], "knobs": dict(knobs), "by_seed": by_seed}
    return named | found | {"treasure_along": along} | rest | budget


def band(rows: Sequence[Mapping[str, Any]], column: int) -> list[tuple[float, float, float, float]]:
    """A learning curve over seeds: (episodes, mean, low, high) of a column of the curves."""
    points = zip(*(row["curve"] for row in rows), strict=True)
    return [(at[0][0], *fidelity.interval([one[column] for one in at])) for at in points]
