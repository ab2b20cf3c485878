"""Fills the columns of a rollout that a stage would sample, score or learn, from the world itself.

Exact ones come from dynamic programming in `world` and here; noisy and counted ones are what a stage would have.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base
from rsi_jax.envs.exact import play
from rsi_jax.envs.exact import world as worlds
from rsi_jax.envs.exact.play import Path, Sample
from rsi_jax.envs.exact.world import World

FLOOR = 1e-30  # a hindsight probability of 0 (an outcome that cannot follow the action) has this one's logarithm


def looked_up(path: Path, table_HNA) -> np.ndarray:
    """Reads a table [H, N, A, ...] at the turns of a path: [B, H, ...]."""
    h = np.arange(np.shape(table_HNA)[0])
    return np.asarray(table_HNA)[h, np.asarray(path.state_BH), np.asarray(path.action_BH)]


def with_values(sample: Sample, world: World, logits, *, noise: float = 0.0, seed: int = 0) -> base.Rollout:
    """Adds a critic: value_BT = V_t(s) plus noise, and end_value_B (0 plus noise: every episode is over).

    Args:
      noise: standard deviation of a critic's error, in units of the return, >= 0: one draw per (turn, state), so that
        the same state is misjudged in the same way every time.
      seed: of that draw.
    """
    v_HN = worlds.values(world, logits).v_HN
    v_HN = v_HN + noise * np.random.default_rng(seed).normal(size=v_HN.shape)
    state_BH = np.asarray(sample.path.state_BH)
    H = state_BH.shape[1]
    value_BT = play.on_tokens(sample.rollout, sample.path, v_HN[np.arange(H), state_BH])
    end_B = noise * np.random.default_rng([seed, 1]).normal(size=len(state_BH))
    return sample.rollout.replace(value_BT=value_BT, end_value_B=jnp.asarray(end_B, jnp.float32))


def with_judge(sample: Sample, world: World, logits) -> base.Rollout:
    """Adds judge_BS: a judge who knows the value V_{t+1}(s) of the state that each turn led to; 0 after the last."""
    v_HN = worlds.values(world, logits).v_HN
    played_BH, state_BH = np.asarray(sample.path.played_BH), np.asarray(sample.path.state_BH)
    H = state_BH.shape[1]
    judge_BS = np.zeros(sample.rollout.segments.length_BS.shape, np.float32)
    judge_BS[:, : H - 1] = np.where(played_BH, v_HN[np.arange(H), state_BH], 0.0)[:, 1:]
    return sample.rollout.replace(judge_BS=jnp.asarray(judge_BS))


def with_baseline(sample: Sample, world: World, logits) -> base.Rollout:
    """Adds baseline_B: what a running mean of returns comes to under this policy, its expected return."""
    expected = float(world.start_N @ worlds.values(world, logits).v_HN[0])
    return sample.rollout.replace(baseline_B=jnp.full(len(sample.path.state_BH), expected, jnp.float32))


def with_continuations(
    sample: Sample, world: World, logits, key: jax.Array, *, count: int, asked_BH=None
) -> tuple[base.Rollout, int]:
    """Adds mc_value_BT: the mean return of `count` fresh continuations from the state before each turn.

    Args:
      key: the key is consumed.
      count: K >= 1.
      asked_BH: bool, the turns to ask at; None = all. The others are NaN, as are tokens that were not sampled.

    Returns: (rollout, tokens that the continuations cost).
    """
    path = sample.path
    if asked_BH is not None:
        path = path._replace(played_BH=path.played_BH & asked_BH)
    mean_BH, tokens = play.continuations(play.tables(world, logits), path, key, count)
    return sample.rollout.replace(mc_value_BT=play.on_tokens(sample.rollout, path, mean_BH, jnp.nan)), int(tokens)


def with_collisions(sample: Sample, world: World, logits) -> base.Rollout:
    """Adds collision_BT = Σ_v π(v)² of the policy in each state."""
    pi_HNA = worlds.policy(world, logits)
    square_HNA = np.broadcast_to(np.sum(pi_HNA**2, -1, keepdims=True), pi_HNA.shape)
    found_BT = play.on_tokens(sample.rollout, sample.path, looked_up(sample.path, square_HNA))
    return sample.rollout.replace(collision_BT=found_BT)


def with_outcomes(sample: Sample, log_h_HNAM) -> base.Rollout:
    """Adds outcome_logp_BTM, from `return_hindsight`, `reward_hindsight` or `counted_hindsight`."""
    return sample.rollout.replace(
        outcome_logp_BTM=play.on_tokens(sample.rollout, sample.path, looked_up(sample.path, log_h_HNAM))
    )


def with_hindsight(sample: Sample, world: World, logits) -> base.Rollout:
    """Adds hindsight_logp_BT: log-prob of each action for one who knows the state in which the episode ended.

    h(a | t, s, f) = π(a | t, s) P(ends in f | t, s, a) / P(ends in f | t, s)
    """
    h_HNAN = final_hindsight(world, logits)
    path = sample.path
    known_BH = np.take_along_axis(looked_up(path, h_HNAN), np.asarray(path.final_B)[:, None, None], axis=2)[..., 0]
    return sample.rollout.replace(hindsight_logp_BT=play.on_tokens(sample.rollout, path, known_BH))


def without_hint(sample: Sample) -> base.Rollout:
    """Adds the hindsight_logp_BT of a hint that says nothing: the policy's own log-probs."""
    return sample.rollout.replace(hindsight_logp_BT=sample.rollout.logp_BT)


def classes(edges: Sequence[float], x) -> np.ndarray:
    """Class of each outcome: m counts the edges that are <= x. M = len(edges) + 1."""
    return np.searchsorted(np.asarray(edges, np.float64), x, side="right")


def _logs(weight_HNAM: np.ndarray, pi_HNA: np.ndarray) -> np.ndarray:
    """log h = log(π w(a) / Σ π w), and log π where nothing is known (an outcome that cannot follow)."""
    joint_HNAM = pi_HNA[..., None] * weight_HNAM
    total_HN1M = joint_HNAM.sum(2, keepdims=True)
    known = total_HN1M > 0
    h_HNAM = np.where(known, joint_HNAM / np.where(known, total_HN1M, 1.0), pi_HNA[..., None])
    return np.log(np.maximum(h_HNAM, FLOOR))


def return_hindsight(world: World, logits, edges: Sequence[float]) -> np.ndarray:
    """log h(a | t, s, the rewards from t on sum to class m), exact: [H, N, A, M]. For hca.

    h = π(a) P(class m | a) / P(class m), by Bayes.

    Args:
      edges: ascending, in units of the return; none of them may be a possible return (rounding would decide).

    Source: Harutyunyan et al. 2019 (https://arxiv.org/abs/1912.02503), return-conditional.
    """
    found = worlds.returns(world, logits)
    M_RM = np.eye(len(edges) + 1)[classes(edges, found.at_R)]
    return _logs(found.prob_HNAR @ M_RM, worlds.policy(world, logits))


def reward_hindsight(world: World, logits, edges: Sequence[float]) -> np.ndarray:
    """log h(a | t, s, some turn from t on pays a reward of class m), exact: [H, N, A, M]. For cocoa.

    h = π(a) n(m | a) / n(m), n the expected number of turns from t on whose reward is of class m.

    Args:
      edges: as in `return_hindsight`, for the reward of a turn.

    Source: Meulemans et al. 2023 (https://arxiv.org/abs/2306.16803), the reward as outcome.
    Differs: the turn itself counts among those that pay.
    """
    pi_HNA = worlds.policy(world, logits)
    H, N, A = pi_HNA.shape
    pays_NM, count_HNAM = np.zeros((N, len(edges) + 1)), np.zeros((H, N, A, len(edges) + 1))
    now_HNAJM = np.eye(len(edges) + 1)[classes(edges, world.reward_HNAJ)]
    for t in reversed(range(H)):
        # Where the episode is over there are no turns, hence no rewards, not even of 0.
        after_NAJM = now_HNAJM[t] + np.where(world.terminal_N[:, None], 0.0, pays_NM)[world.next_HNAJ[t]]
        count_HNAM[t] = np.einsum("naj,najm->nam", world.prob_HNAJ[t], after_NAJM)
        pays_NM = np.einsum("na,nam->nm", pi_HNA[t], count_HNAM[t])
    return _logs(count_HNAM, pi_HNA)


def final_hindsight(world: World, logits) -> np.ndarray:
    """log h(a | t, s, the episode ends in state f), exact: [H, N, A, N]."""
    pi_HNA = worlds.policy(world, logits)
    H, N, A = pi_HNA.shape
    ends_NN, after_HNAN = np.eye(N), np.zeros((H, N, A, N))
    for t in reversed(range(H)):
        after_HNAN[t] = np.einsum("naj,najf->naf", world.prob_HNAJ[t], ends_NN[world.next_HNAJ[t]])
        ends_NN = np.where(world.terminal_N[:, None], np.eye(N), np.einsum("na,naf->nf", pi_HNA[t], after_HNAN[t]))
    return _logs(after_HNAN, pi_HNA)


def counted_hindsight(
    world: World, logits, path: Path, edges: Sequence[float], *, of: str, prior: float = 1.0
) -> np.ndarray:
    """Estimates `return_hindsight` or `reward_hindsight` from episodes: counts, smoothed towards the policy.

      h = (n(t, s, a, m) + prior · π(a)) / (n(t, s, m) + prior);   without data h = π, which gives no credit

    Args:
      path: the episodes to count in; others than those that are credited, or the estimate knows its own noise.
      edges: as there.
      of: 'return' | 'reward'.
      prior: weight of the policy, in episodes, > 0.

    Returns: log h [H, N, A, M].

    Raises: base.InputError for an unknown `of` or a prior that is not positive.
    """
    if of not in ("return", "reward"):
        raise base.InputError(f"hindsight is counted of 'return' or 'reward', got '{of}'")
    if not prior > 0:
        raise base.InputError(f"prior must be > 0, got {prior}")
    pi_HNA = worlds.policy(world, logits)
    played_BH, reward_BH = np.asarray(path.played_BH), np.asarray(path.reward_BH, np.float64)
    H, N, A = pi_HNA.shape
    M, h_BH = len(edges) + 1, np.broadcast_to(np.arange(H), played_BH.shape)
    # Every turn adds to the classes that followed it: one of returns, or so many turns of each class of rewards.
    place_BH = ((h_BH * N + np.asarray(path.state_BH)) * A + np.asarray(path.action_BH)) * M
    if of == "return":
        place_BH = place_BH + classes(edges, np.cumsum(reward_BH[:, ::-1], 1)[:, ::-1])
        count = np.bincount(place_BH[played_BH], minlength=H * N * A * M)
    else:
        now_BHM = np.eye(M)[classes(edges, reward_BH)] * played_BH[..., None]
        seen_BHM = np.cumsum(now_BHM[:, ::-1], 1)[:, ::-1]
        place_BHM = place_BH[..., None] + np.arange(M)
        count = np.bincount(place_BHM[played_BH].ravel(), seen_BHM[played_BH].ravel(), H * N * A * M)
    count_HNAM = count.reshape(H, N, A, M)
    h_HNAM = (count_HNAM + prior * pi_HNA[..., None]) / (count_HNAM.sum(2, keepdims=True) + prior)
    return np.log(np.maximum(h_HNAM, FLOOR))


def edges_between(values) -> tuple[float, ...]:
    """Edges half-way between neighbouring distinct values, so that each value is a class of its own."""
    distinct = np.unique(np.round(np.asarray(values, np.float64), 9))
    return tuple(float(x) for x in (distinct[1:] + distinct[:-1]) / 2)
