"""Whose weights re-read with the hint: live, EMA, frozen or a periodic snapshot of the policy."""

import jax
import jax.numpy as jnp

from rsi_jax import base

KINDS = ("live", "ema", "frozen", "snapshot")


def init(kind: str, params):
    """Starts the teacher: None for a live one (the policy itself), else a copy of the policy.

    Raises: base.InputError for an unknown kind.
    """
    if kind not in KINDS:
        raise base.InputError(f"feedback.teacher={kind!r} is no teacher (known: {', '.join(KINDS)})")
    return None if kind == "live" else jax.tree.map(jnp.copy, params)


def advance(kind: str, teacher, params, step, *, rate: float, every: int):
    """Moves the teacher after an update.

    ema: teacher + rate (params - teacher); rate 1 is live, 0 frozen. snapshot: a copy every `every` updates.
    Source: SDPO (arXiv 2601.20802) uses rate 0.05 after each update.
    """
    if teacher is None:  # live, or of a variant that asks none
        return None
    if kind == "ema":
        return jax.tree.map(lambda old, new: old + rate * (new - old), teacher, params)
    if kind == "snapshot":
        due = step % every == 0
        return jax.tree.map(lambda old, new: jnp.where(due, new, old), teacher, params)
    return teacher
