"""Exact values of policies on the cells of the maze, by backward recursion over the steps of an episode.

    Q_t(s, a) = r(s, a) + V_{t+1}(s'),   V_t(s) = Σ_a π(a | s) Q_t(s, a)   or   max_a Q_t(s, a),   A = Q - V

The transitions are those of the environment's own `step`. It is deterministic and an episode starts uniformly on
`maze.STARTS`, so the mean of V_0 over them is the mean return of the policy.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from rsi_jax import base
from rsi_jax.envs import Reply, maze

TEXTS = (*maze.ACTIONS, "")  # "" stands for every illegal action
INDEX = {cell: n for n, cell in enumerate(maze.CELLS)}


class Values(NamedTuple):
    """value: [turns + 1, cells]; q: [turns, cells, actions of TEXTS]; 0 at the goal, where nobody acts."""

    value: np.ndarray
    q: np.ndarray

    @property
    def mean(self) -> float:
        """The mean over uniform starts."""
        return float(np.mean([self.value[0, INDEX[cell]] for cell in maze.STARTS]))


def wandering(share: float) -> np.ndarray:
    """The policy of demonstrations, [cells, actions of TEXTS]: uniform with probability `share`, else shortest."""
    policy = np.tile([share / len(maze.ACTIONS)] * len(maze.ACTIONS) + [0.0], (len(INDEX), 1))
    for cell, action in maze.best_actions().items():
        policy[INDEX[cell], TEXTS.index(action)] += 1 - share
    return policy


def values(
    env: maze.Maze, policy: np.ndarray | None = None, *, earns: Callable[[Reply], float] = lambda reply: reply.reward
) -> Values:
    """Computes V and Q of a policy.

    policy: probabilities [cells, actions of TEXTS] whose rows add up to 1; None = the best one.
    earns: what a reply is worth; `succeeds` makes V the probability of reaching the goal.
    """
    value = np.zeros((env.max_turns + 1, len(INDEX)))
    q = np.zeros((env.max_turns, len(INDEX), len(TEXTS)))
    for t in reversed(range(env.max_turns)):
        for cell in maze.STARTS:
            n = INDEX[cell]
            for a, text in enumerate(TEXTS):
                after, reply = env.step(maze.State(cell, t), text, base.STOP)
                q[t, n, a] = earns(reply) + (0.0 if reply.done else value[t + 1, INDEX[after.cell]])
            value[t, n] = np.max(q[t, n]) if policy is None else policy[n] @ q[t, n]
    return Values(value, q)


def succeeds(reply: Reply) -> float:
    """1 for the reply that ends an episode at the goal."""
    return float(reply.info.get("success", False))
