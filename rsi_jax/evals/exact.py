"""Exact values and advantages of the tool-call task, for a policy that is known on its abstract state.

The state before turn t is (t, f): f sub-goals were missed and come back after the first round of n requests, one a
turn and in turn. A policy on it is two tables: r(t, f), the probability of the right call when a sub-goal is asked
for, and c(t, f), the probability of a needless call when it is not. With H the horizon and p the penalty of a needless
call, the reward still to come is

    V(t, 0) = 1  for t >= n                                all are met
    V(H, f) = 0  for f > 0
    V(t, f) = V(t+1, f) - p c(t, f)                        t < n, small talk
    V(t, f) = r V(t+1, f) + (1 - r) V(t+1, f+1)            t < n, a sub-goal is asked for
    V(t, f) = r V(t+1, f-1) + (1 - r) V(t+1, f)            t >= n, a missed one is asked for again

The task is deterministic, so Q(t, f, a) = reward of a + V(next state), A = Q - V, and along every episode
return = V(0, 0) + Σ_t A_t. What a credit variant says of a turn is compared with A_t.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rsi_jax.envs import tool_calls


@dataclasses.dataclass(frozen=True)
class Policy:
    """right_TF, needless_TF: r and c above, in [0, 1]; scalars or arrays that broadcast to [horizon, requests + 1]."""

    right_TF: Any
    needless_TF: Any = 0.0


class Turns(NamedTuple):
    """Values along one episode, each [turns]: V before the turn, Q of what was done in it, A = Q - V."""

    value: np.ndarray
    q: np.ndarray
    adv: np.ndarray


def goals_of(env: tool_calls.ToolCalls, seed: int) -> np.ndarray:
    """Which requests of the first round ask for a sub-goal, bool [requests]."""
    state, _ = env.reset(seed)
    return np.array([request in tool_calls.TOOLS for request in state.queue])


def values(env: tool_calls.ToolCalls, seed: int, policy: Policy) -> np.ndarray:
    """Computes V(t, f) of the task `seed`, float64 [horizon + 1, requests + 1]; NaN where no play leads."""
    goal, H, n = goals_of(env, seed), env.horizon, env.requests
    right, needless = (np.broadcast_to(x, (H, n + 1)) for x in (policy.right_TF, policy.needless_TF))
    value = np.full((H + 1, n + 1), np.nan)
    value[H], value[n:, 0] = 0.0, 1.0
    for t in reversed(range(H)):
        r = right[t]
        if t >= n:
            value[t, 1:] = r[1:] * value[t + 1, :-1] + (1 - r[1:]) * value[t + 1, 1:]
        elif goal[t]:
            value[t, : t + 1] = r[: t + 1] * value[t + 1, : t + 1] + (1 - r[: t + 1]) * value[t + 1, 1 : t + 2]
        else:
            value[t, : t + 1] = value[t + 1, : t + 1] - env.penalty * needless[t, : t + 1]
    return value


def along(env: tool_calls.ToolCalls, value: np.ndarray, infos: Sequence[Mapping[str, Any]]) -> Turns:
    """Reads V, Q and A off an episode. infos: what the environment noted of each turn (goal, correct, call)."""
    missed, found = 0, []
    for t, info in enumerate(infos):
        before = value[t, missed]
        if info["goal"] and info["correct"] == (t >= env.requests):  # missed anew, or a missed one met
            missed += 1 if t < env.requests else -1
        q = value[t + 1, missed] - env.penalty * (info["call"] and not info["goal"])
        found.append((before, q, q - before))
    return Turns(*np.array(found, np.float64).reshape(-1, 3).T)
