"""Worlds of one early choice, of stopping, and of branching."""

from rsi_jax import base
from rsi_jax.envs.exact import world as worlds
from rsi_jax.envs.exact.world import Branch, World


def umbrella_chain(horizon: int = 20) -> World:
    """Umbrella chain: only the first action matters, and coin flips pay in between.

    The forecast says rain or sun; action 1 takes the umbrella, action 0 leaves it. The `horizon` >= 2 turns all pay a
    coin flip of ±1, whatever is done, but the last, which pays +1 if the umbrella suits the weather, else -1.

    Source: bsuite, umbrella_length (https://github.com/google-deepmind/bsuite).
    Differs: no distractor features, which a table would never see.
    """
    worlds.at_least("umbrella_chain", horizon, 2)

    def step(t, state, action):
        taken = state if t else (state[0], bool(action))
        if t == horizon - 1:
            right = taken[1] == (taken[0] == "rain")
            return [Branch(1.0, "dry" if right else "sorry", 1.0 if right else -1.0, over=True)]
        return [Branch(0.5, taken, 1.0), Branch(0.5, taken, -1.0)]

    return worlds.build(horizon, 2, {("rain", False): 0.5, ("sun", False): 0.5}, step, unit=1.0)


def discounting_chain(horizon: int = 20) -> World:
    """Discounting chain: the first action chooses which of five chains pays, and so when.

    Chain a pays 1 at its turn, the last one 1.1; the pay turns are 1, 3, 10, 30 and 100 of 100, scaled to a horizon
    of `horizon` >= 5 turns after the first (each later than the one before). Later actions do nothing.

    Source: bsuite, discounting_chain (https://github.com/google-deepmind/bsuite).
    Differs: the horizon scales; the bonus is on the last chain, the one that a discount likes least.
    """
    worlds.at_least("discounting_chain", horizon, 5)
    pays = []
    for share in (1, 3, 10, 30, 100):
        pays.append(max(round(share * horizon / 100), pays[-1] + 1 if pays else 1))

    def step(t, state, action):
        chain = action if state == "start" else state
        return [Branch(1.0, chain, (1.1 if chain == 4 else 1.0) if pays[chain] == t else 0.0)]

    return worlds.build(horizon + 1, 5, {"start": 1.0}, step, unit=0.1)


def stopping(horizon: int = 8) -> World:
    """A game of variable length: at each turn stop (action 0) or go on (action 1); each turn after the first pays 0.5.

    At most `horizon` >= 2 turns. All who are at turn t earn the same there, whatever they do: what going on earns comes
    with the next turn, which a comparison among those who are there cannot see. Going on is always better.

    Source: none; the smallest case in which a baseline per turn index erases the signal for going on.
    """
    worlds.at_least("stopping", horizon, 2)

    def step(t, state, action):
        return [Branch(1.0, "playing" if action else "stopped", 0.5 if t else 0.0, over=not action)]

    return worlds.build(horizon, 2, {"playing": 1.0}, step, unit=0.5)


def noisy_tree(horizon: int = 5, actions: int = 2, noise: float = 1.0) -> World:
    """A tree in which no state is met twice in an episode, and every step's reward is noisy.

    A node is the actions that led to it. Each step pays a number of its own in {-1, -0.5, ..., 1}, fixed by the node,
    plus a coin flip of ±noise (a multiple of 0.5). `horizon` in 1..8, `actions` >= 2.

    Source: none.
    """
    worlds.at_least("noisy_tree", horizon, 1)
    worlds.at_least("noisy_tree: actions", actions, 2)
    if horizon > 8:
        raise base.InputError(f"noisy_tree has actions ** horizon nodes: horizon at most 8, got {horizon}")

    def step(t, state, action):
        node = (*state, action)
        # A fixed scramble of the node's number, so that neighbours differ.
        number = sum((a + 1) * (actions + 1) ** i for i, a in enumerate(node))
        mean = (number * 2654435761 % 2**32 * 5 // 2**32 - 2) / 2
        return [Branch(0.5, node, mean + noise), Branch(0.5, node, mean - noise)]

    return worlds.build(horizon, actions, {(): 1.0}, step, unit=0.5)
