"""Environments: one file each, found by module name.

An environment module defines `make(**knobs) -> Env`. States are immutable values, so a step can be retried on a copy.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence
from typing import Any, Protocol

from rsi_jax import base


@dataclasses.dataclass(frozen=True)
class Reply:
    """What the environment answers to an action.

    messages: the observation (empty when done). reward: lands when the action ends. anchor: hash of the state the
    action was taken in. info: facts for metrics and reports (never read by locating rules).
    """

    messages: tuple[base.Message, ...]
    reward: float = 0.0
    done: bool = False
    anchor: int = base.NO_ANCHOR
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


class Env(Protocol):
    """The protocol. Optional: `words()` (vocabulary of a word tokenizer), `held_out()` (the same on tasks kept for
    evaluation), and that of `Demonstrator`. The module has `summary(transcripts)`."""

    max_turns: int

    def reset(self, seed: int) -> tuple[Any, tuple[base.Message, ...]]:
        """Starts the task named by `seed`: (state, prompt messages)."""
        ...

    def step(self, state: Any, text: str, finish: int) -> tuple[Any, Reply]:
        """Acts: `text` is the sampled message without its stop token, `finish` says why it ended."""
        ...


class Demonstrator(Env, Protocol):
    """An environment that can show how it is done, for the `lm` stage."""

    def demonstration(self, seed: int, *, hinted: bool, train_bare: bool) -> Sequence[Any]:
        """Plays a task: per turn what is `shown`, the `hint` before it or None, the `action`, whether to `train`."""
        ...


def find(name: str):
    """Imports the environment module of that name.

    Raises: base.InputError naming the nearest environment.
    """
    known = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]  # one file each
    if name not in known:
        mend = base.did_you_mean(name, known)
        raise base.InputError(f"env.name={name!r} is no environment (known: {', '.join(known)}){mend}")
    return importlib.import_module(f"rsi_jax.envs.{name}")
