"""A world as tables, and what dynamic programming says of a policy in it: exact, in float64 on the host.

Dimension key of this package, beside that of base.py:
  H turns of an episode at most    N states    A actions    J branches of one (turn, state, action)
  R places of the lattice of returns    M classes of outcomes

Every random thing that follows an action is a finite list of branches (probability, next state, reward), and every
reward is a whole multiple of `unit`. So sums over all futures are finite, returns live on a lattice, and "how likely
was this action, given what came of it" has an exact answer.

The policy is a softmax over tables: logits [N, A], the same at every turn, or [H, N, A].
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rsi_jax import base


class Branch(NamedTuple):
    """What may follow an action: probability in (0, 1], state after it, reward, and whether the episode ends there."""

    probability: float
    state: Hashable
    reward: float = 0.0
    over: bool = False


class World(NamedTuple):
    """A finite-horizon decision process. Where play never leads, a branch stays and pays nothing.

    start_N        probability of each first state.
    prob_HNAJ      probability of each branch; sums to 1 over J.
    next_HNAJ      state after the branch.
    reward_HNAJ    reward of the branch, in units of the return.
    terminal_N     True where the episode is over.
    states         what the state numbers stand for.
    unit           every reward is a whole multiple of it, > 0.
    """

    start_N: np.ndarray
    prob_HNAJ: np.ndarray
    next_HNAJ: np.ndarray
    reward_HNAJ: np.ndarray
    terminal_N: np.ndarray
    states: tuple[Hashable, ...]
    unit: float

    @property
    def horizon(self) -> int:
        return self.prob_HNAJ.shape[0]

    @property
    def units_HNAJ(self) -> np.ndarray:
        """Rewards as whole numbers of `unit`."""
        return np.rint(self.reward_HNAJ / self.unit).astype(np.int64)


class Values(NamedTuple):
    """v_HN has one row more than turns (nothing comes after the last); q_HNA; adv_HNA = q - v."""

    v_HN: np.ndarray
    q_HNA: np.ndarray
    adv_HNA: np.ndarray


Step = Callable[[int, Hashable, int], Sequence[Branch]]


def build(horizon: int, actions: int, start: Mapping[Any, float], step: Step, *, unit: float) -> World:
    """Makes the tables of a world from its rule, finding the states that play can reach.

    Args:
      horizon: most turns of an episode, >= 1; after the last one it is over whatever the branch says.
      actions: >= 1; all of them are open in every state.
      start: state -> probability.
      step: (turn from 0, state, action) -> the branches that may follow, one at least.
      unit: every reward is a whole multiple of it, > 0.

    Raises: base.InputError for sizes below 1, probabilities that do not sum to 1, or a reward off the lattice.
    """
    if horizon < 1 or actions < 1:
        raise base.InputError(f"a world needs a turn and an action at least, got {horizon} and {actions}")
    found, over = _explore(horizon, actions, start, step)
    number = {
        state: n for n, state in enumerate(dict.fromkeys([*start, *(b.state for r in found.values() for b in r)]))
    }
    H, N, A, J = horizon, len(number), actions, max(map(len, found.values()))
    prob_HNAJ, reward_HNAJ = np.zeros((H, N, A, J)), np.zeros((H, N, A, J))
    prob_HNAJ[..., 0] = 1.0
    next_HNAJ = np.broadcast_to(np.arange(N)[:, None, None], (H, N, A, J)).copy()
    for (t, state, action), branches in found.items():
        place = (t, number[state], action, slice(len(branches)))
        prob_HNAJ[place] = [branch.probability for branch in branches]
        next_HNAJ[place] = [number[branch.state] for branch in branches]
        reward_HNAJ[place] = [branch.reward for branch in branches]
    start_N = np.array([start.get(state, 0.0) for state in number])
    terminal_N = np.array([state in over for state in number])
    world = World(start_N, prob_HNAJ, next_HNAJ, reward_HNAJ, terminal_N, tuple(number), unit)
    _check(world)
    return world


def _explore(horizon: int, actions: int, start: Mapping[Any, float], step: Step):
    """Branches of every (turn, state, action) that can be reached, and the states in which the episode is over."""
    found: dict[tuple[int, Hashable, int], Sequence[Branch]] = {}
    over: set[Hashable] = set()
    frontier = list(start)
    for t in range(horizon):
        after = []
        for state in frontier:
            for action in range(actions):
                found[t, state, action] = branches = step(t, state, action)
                over.update(branch.state for branch in branches if branch.over)
                after += [branch.state for branch in branches if not branch.over]
        frontier = list(dict.fromkeys(after))
    both = over & {state for _, state, _ in found}
    if both:
        raise base.InputError(f"state {next(iter(both))} ends the episode and is also acted in: name it apart")
    return found, over


def _check(world: World) -> None:
    if not np.allclose(world.prob_HNAJ.sum(-1), 1.0) or not np.isclose(world.start_N.sum(), 1.0):
        raise base.InputError("probabilities of the branches of an action, and of the first states, must sum to 1")
    if not np.allclose(world.units_HNAJ * world.unit, world.reward_HNAJ):
        raise base.InputError(f"every reward must be a whole multiple of unit={world.unit}")


def policy(world: World, logits: np.ndarray) -> np.ndarray:
    """Softmax policy π(a | t, s), float64 [H, N, A], from logits [N, A] or [H, N, A].

    Raises: base.InputError for another shape.
    """
    H, N, A, _ = world.prob_HNAJ.shape
    logits = np.asarray(logits, np.float64)
    if logits.shape not in ((N, A), (H, N, A)):
        raise base.InputError(f"logits must be [{N}, {A}] or [{H}, {N}, {A}], got {list(logits.shape)}")
    weight = np.exp(logits - logits.max(-1, keepdims=True))
    return np.broadcast_to(weight / weight.sum(-1, keepdims=True), (H, N, A))


def values(world: World, logits: np.ndarray, discount: float = 1.0) -> Values:
    """Solves Q_t(s, a) = E[r + γ V_{t+1}(s')],  V_t(s) = Σ_a π(a|s) Q_t(s, a),  A = Q - V.

    Args:
      logits: [N, A] or [H, N, A].
      discount: γ per turn, in [0, 1].

    Raises: base.InputError for a discount out of range.

    Source: Sutton & Barto (2018), sections 3.5 and 4.1.
    """
    if not 0 <= discount <= 1:
        raise base.InputError(f"discount must be in [0, 1], got {discount}")
    pi_HNA = policy(world, logits)
    H, N, _ = pi_HNA.shape
    v_HN, q_HNA = np.zeros((H + 1, N)), np.zeros(pi_HNA.shape)
    for t in reversed(range(H)):
        after_NAJ = world.reward_HNAJ[t] + discount * v_HN[t + 1][world.next_HNAJ[t]]
        q_HNA[t] = np.sum(world.prob_HNAJ[t] * after_NAJ, -1)
        v_HN[t] = np.sum(pi_HNA[t] * q_HNA[t], -1)
    return Values(v_HN, q_HNA, q_HNA - v_HN[:H, :, None])


def occupancy(world: World, logits: np.ndarray) -> np.ndarray:
    """Probability that turn t is played, and in state s: d_t(s), float64 [H, N]. Sums to 1 at t = 0, less once over."""
    pi_HNA = policy(world, logits)
    alive_N = ~world.terminal_N
    d_HN = np.zeros(pi_HNA.shape[:2])
    d_HN[0] = world.start_N * alive_N
    for t in range(world.horizon - 1):
        mass_NAJ = d_HN[t][:, None, None] * pi_HNA[t][..., None] * world.prob_HNAJ[t]
        d_HN[t + 1] = np.bincount(world.next_HNAJ[t].ravel(), mass_NAJ.ravel(), len(alive_N)) * alive_N
    return d_HN


def expected_return(world: World, logits: np.ndarray, discount: float = 1.0) -> float:
    """J = Σ_s p(s) V_0(s)."""
    return float(world.start_N @ values(world, logits, discount).v_HN[0])


def policy_gradient(world: World, logits: np.ndarray) -> np.ndarray:
    """Gradient of the undiscounted J by the logits, in their shape: Σ over turns that share a logit of d π A.

      ∂J / ∂logit_t(s, a) = d_t(s) π(a | t, s) A_t(s, a)

    Source: Sutton et al. 2000, policy gradient theorem, for a softmax of logits per (turn, state).
    """
    pi_HNA = policy(world, logits)
    gradient_HNA = occupancy(world, logits)[..., None] * pi_HNA * values(world, logits).adv_HNA
    return gradient_HNA if np.ndim(logits) == 3 else gradient_HNA.sum(0)


class Returns(NamedTuple):
    """Distribution of the undiscounted rewards from turn t on: prob_HNAR of the returns `at_R`, given (t, s, a)."""

    prob_HNAR: np.ndarray
    at_R: np.ndarray


def returns(world: World, logits: np.ndarray) -> Returns:
    """Convolves the rewards backwards: P(Z_t = z | s, a) = Σ_j p_j P(Z_{t+1} = z - r_j | s').

    Cost: H N A J R, R the range of possible returns in units.
    """
    pi_HNA, units_HNAJ = policy(world, logits), world.units_HNAJ
    H, N, A = pi_HNA.shape
    low = min(0, int(np.minimum(units_HNAJ.min((1, 2, 3)), 0).sum()))
    high = int(np.maximum(units_HNAJ.max((1, 2, 3)), 0).sum())
    prob_HNAR = np.zeros((H, N, A, high - low + 1))
    state_NR = np.zeros((N, high - low + 1))
    state_NR[:, -low] = 1.0
    for t in reversed(range(H)):
        for u in np.unique(units_HNAJ[t]):
            weight_NAJ = np.where(units_HNAJ[t] == u, world.prob_HNAJ[t], 0.0)
            # No mass wraps round: the lattice holds every possible sum.
            prob_HNAR[t] += np.roll(np.einsum("naj,najr->nar", weight_NAJ, state_NR[world.next_HNAJ[t]]), u, -1)
        state_NR = np.einsum("na,nar->nr", pi_HNA[t], prob_HNAR[t])
    return Returns(prob_HNAR, np.arange(low, high + 1) * world.unit)


def draw_logits(world: World, seed: int, *, scale: float = 1.0, lean: float = 0.0) -> np.ndarray:
    """Draws a policy: scale · normal per (turn, state, action), plus `lean` on the best actions; float32 [H, N, A].

    lean 0: a policy that knows nothing; large: the best one. In between: a policy that is learning.
    Same seed, same policy.
    """
    drawn_HNA = scale * np.random.default_rng(seed).normal(size=world.prob_HNAJ.shape[:3])
    best_N, best_HNA = np.zeros(len(world.states)), np.zeros(drawn_HNA.shape, bool)
    for t in reversed(range(world.horizon)):
        q_NA = np.sum(world.prob_HNAJ[t] * (world.reward_HNAJ[t] + best_N[world.next_HNAJ[t]]), -1)
        best_N = q_NA.max(-1)
        best_HNA[t] = np.isclose(q_NA, best_N[:, None])
    return (drawn_HNA + lean * best_HNA).astype(np.float32)


def at_least(name: str, value: int, least: int) -> None:
    """Raises base.InputError when a size of a world is too small."""
    if value < least:
        raise base.InputError(f"{name} needs at least {least}, got {value}")
