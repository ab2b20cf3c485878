"""Worlds small enough to be known exactly: what credit assignment says of a token is compared with the truth.

    world = exact.make("key_to_door", horizon=103)
    logits = exact.draw_logits(world, seed=0)
    truth = exact.values(world, logits).adv_HNA
    rollout, path = exact.sample(world, logits, key, groups=16)

These are no environments in the sense of `envs.find`: a policy here is a table, not a language model.
"""

import inspect

from rsi_jax import base
from rsi_jax.envs.exact import chains, columns, memory
from rsi_jax.envs.exact.play import Path, Sample, on_tokens, sample
from rsi_jax.envs.exact.world import (
    Branch,
    Returns,
    Values,
    World,
    build,
    draw_logits,
    expected_return,
    occupancy,
    policy,
    policy_gradient,
    returns,
    values,
)

__all__ = [
    "Branch",
    "Path",
    "Returns",
    "Sample",
    "Values",
    "World",
    "build",
    "columns",
    "draw_logits",
    "expected_return",
    "make",
    "names",
    "occupancy",
    "on_tokens",
    "policy",
    "policy_gradient",
    "returns",
    "sample",
    "values",
]


def names() -> dict:
    """Lists the worlds by name: the public functions of their files."""
    return {
        name: function
        for module in (memory, chains)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


def make(name: str, **knobs) -> World:
    """Builds the world of that name; `horizon` is a knob of all.

    Raises: base.InputError for an unknown name, with the nearest one, or a knob out of range.
    """
    known = names()
    if name not in known:
        raise base.InputError(f"unknown world '{name}': one of {', '.join(known)}{base.did_you_mean(name, known)}")
    return known[name](**knobs)
