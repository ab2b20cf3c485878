"""Optimizers (optax): AdamW or Muon under a schedule counted in optimizer updates."""

import math

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from rsi_jax import base

NAMES = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(peak: float, *, updates: int, warmup: int, schedule: str) -> optax.Schedule:
    """Rises linearly from 0 over `warmup` updates (the first update already moves), then stays or decays to 0.

    Raises: base.InputError for an unknown schedule.
    """
    rest = max(1, updates - warmup)
    shapes = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, 0.0, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest),
    }
    if schedule not in shapes:
        raise base.InputError(f"schedule={schedule!r} is no schedule (known: {', '.join(SCHEDULES)})")
    rise = optax.linear_schedule(peak / max(1, warmup), peak, max(1, warmup - 1))
    return optax.join_schedules([rise, shapes[schedule]()], [warmup]) if warmup else shapes[schedule]()


def decayed(schedule: str, share: float) -> float:
    """The part of the peak learning rate that is left when a share of a budget, in [0, 1], is spent."""
    return {"constant": 1.0, "linear": 1.0 - share, "cosine": (1.0 + math.cos(math.pi * share)) / 2}[schedule]


def _muon_dimensions(params):
    """Which axes are input and output of each matrix: attention projections are matrices in disguise."""

    def one(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if "embed" in name or "head" in name or leaf.ndim < 2:
            return None  # embeddings, unembedding, heads and vectors take AdamW
        if leaf.ndim == 2:
            return contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)
        if name.endswith("/o"):
            return contrib.MuonDimensionNumbers(reduction_axis=(0, 1), output_axis=2)
        return contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=(1, 2))

    return jax.tree_util.tree_map_with_path(one, params)


def make(
    name: str, schedule: optax.Schedule, *, b1: float = 0.9, b2: float = 0.95, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Makes the optimizer. Gradients come in already clipped (`clip`).

    Raises: base.InputError for an unknown name.
    """
    if name == "adamw":
        return optax.adamw(schedule, b1=b1, b2=b2, weight_decay=weight_decay)
    if name == "muon":
        return contrib.muon(
            schedule,
            adam_b1=b1,
            adam_b2=b2,
            weight_decay=weight_decay,
            adam_weight_decay=weight_decay,
            consistent_rms=0.2,  # update RMS of AdamW, so that one learning rate serves both
            muon_weight_dimension_numbers=_muon_dimensions,
        )
    raise base.InputError(f"optimizer={name!r} is no optimizer (known: {', '.join(NAMES)})")


def clip(grads, limit: float):
    """Scales a gradient to global norm <= limit (0 = no limit). Returns: (gradient, norm before)."""
    norm = optax.tree.norm(grads)
    factor = jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-12)) if limit else 1.0
    return jax.tree.map(lambda g: g * factor, grads), norm
