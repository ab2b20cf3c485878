"""Worlds in which what was done or seen early pays late."""

import functools

from rsi_jax.envs.exact import world as worlds
from rsi_jax.envs.exact.world import Branch, World


def key_to_door(horizon: int = 103) -> World:
    """Linear key-to-door: a key at the first turn, a door at the last, apples in between.

    `horizon` = L turns after the first, >= 2. Action 1 takes, action 0 leaves. At turn 0 it takes the key; at turn L
    the door, of whom has the key, gives the treasure, 0.2 · 23 / L, without an action. In between an apple lies there
    with probability 0.8, and taking it pays 0.1 or 0.9 (even odds), times 23 / L. The key is one of many decisions
    that pay, and the noise of the apples grows with L as its own share of the return stays.

    Source: Meulemans et al. 2023, COCOA (https://arxiv.org/abs/2306.16803), section 4.
    Differs: one kind of apple and two actions (there four actions and an apple on either side); the treasure needs no
    last action.
    """
    worlds.at_least("key_to_door", horizon, 2)
    scale, apple = 23.0 / horizon, {True: 0.8, False: 0.2}

    def shown(key: bool, probability: float = 1.0, reward: float = 0.0) -> list[Branch]:
        return [Branch(probability * p, ("apple" if here else "empty", key), reward) for here, p in apple.items()]

    def step(t, state, action):
        here, key = state
        if t == 0:
            return shown(bool(action))
        if t == horizon:
            return [Branch(1.0, ("end", key), 0.2 * scale if key else 0.0, over=True)]
        if here == "apple" and action:
            return [*shown(key, 0.5, 0.1 * scale), *shown(key, 0.5, 0.9 * scale)]
        return shown(key)

    return worlds.build(horizon + 1, 2, {("key", False): 1.0}, step, unit=0.1 * scale)


def passive_tmaze(horizon: int = 20) -> World:
    """Passive T-maze: the goal's side is told at the first turn, the choice comes `horizon` turns later.

    A corridor of `horizon` >= 1 steps. Actions: 0 waits, 1 goes on, 2 left, 3 right (0, 2 and 3 wait in the corridor).
    Whoever is behind the fastest schedule after a turn pays 1 / horizon. At the junction 2 or 3 ends the episode, and
    the right side pays 1; the episode has horizon + 1 turns.

    Source: Ni et al. 2023 (https://arxiv.org/abs/2307.03864), section 4.1.
    Differs: the state holds the side that was told, as a perfect memory would: what is measured here is credit.
    """
    worlds.at_least("passive_tmaze", horizon, 1)
    start = {(0, side): 0.5 for side in ("left", "right")}
    return worlds.build(horizon + 1, 4, start, functools.partial(_corridor, horizon, False), unit=1.0 / horizon)


def active_tmaze(horizon: int = 20) -> World:
    """Active T-maze: the goal's side is told only to whom first takes one step back, which pays late.

    As `passive_tmaze`, with one turn more: the walk begins one step right of the oracle, action 0 steps back to it, and
    a turn counts as behind only when it is so after that detour. Who never asked has to guess.

    Source: Ni et al. 2023 (https://arxiv.org/abs/2307.03864), section 4.2.
    Differs: as in `passive_tmaze`.
    """
    worlds.at_least("active_tmaze", horizon, 1)
    return worlds.build(
        horizon + 3, 4, {(1, "unknown"): 1.0}, functools.partial(_corridor, horizon + 1, True), unit=1.0 / horizon
    )


def _corridor(junction: int, oracle: bool, t: int, state, action: int) -> list[Branch]:
    """One turn in a corridor of places 0 .. junction; the oracle, if there is one, stands at 0."""
    place, side = state
    length = junction - oracle
    if place == junction and action >= 2:
        chosen = "left" if action == 2 else "right"
        if side == "unknown":
            return [Branch(0.5, "right side", 1.0, over=True), Branch(0.5, "wrong side", over=True)]
        won = chosen == side
        return [Branch(1.0, "right side" if won else "wrong side", float(won), over=True)]
    place = min(place + 1, junction) if action == 1 else max(place - 1, 0) if oracle and action == 0 else place
    fastest = min(t + 1, junction) if not oracle else min(t, junction)
    penalty = -1.0 / length if place < fastest else 0.0
    if oracle and place == 0 and side == "unknown":
        return [Branch(0.5, (place, told), penalty) for told in ("left", "right")]
    return [Branch(1.0, (place, side), penalty)]


def tool_not_found(horizon: int = 32, tools: int = 3) -> World:
    """A session in which tools must be called at given turns; a wrong call is answered "tool not found".

    `horizon` >= 4 turns, one request at a time: every fourth is for a tool, one of `tools` >= 2 in turn (action
    1 .. tools), the others are small talk (any action will do). A wrong call wastes the turn: the same request comes
    again, and the state says that a call just failed. One turn in eight may be wasted, one at least. Success = all
    requests met within the horizon, and is the only reward: 1, when the last is met.

    Source: none; the recoverable error of an agent that calls a tool which is not there.
    """
    worlds.at_least("tool_not_found", horizon, 4)
    worlds.at_least("tool_not_found: tools", tools, 2)
    requests = horizon - max(1, horizon // 8)

    def step(t, state, action):
        met, _ = state
        wanted = met // 4 % tools + 1 if met % 4 == 3 else None
        if wanted is not None and action != wanted:
            return [Branch(1.0, (met, "tool not found"))]
        if met + 1 == requests:
            return [Branch(1.0, "all met", 1.0, over=True)]
        return [Branch(1.0, (met + 1, "ok"))]

    return worlds.build(horizon, tools + 1, {(0, "ok"): 1.0}, step, unit=1.0)
