"""How much: the share of feedback over time, remembered in TrainState.aux and advanced beside the variant."""

import math

import jax
import jax.numpy as jnp

from rsi_jax import base


def init() -> dict[str, jax.Array]:
    """Starts the memory: success (a running mean of the outcome), gain (the hint gain last measured; NaN = never)."""
    return {"success": jnp.zeros(()), "gain": jnp.full((), jnp.nan)}


def learn(aux, success: jax.Array, *, rate: float = 0.3):
    """Advances the running mean of success with the share of successes of a batch."""
    return dict(aux) | {"success": aux["success"] + rate * (success - aux["success"])}


def remember_gain(state: base.TrainState, gain: float) -> base.TrainState:
    """Keeps the hint gain last measured; a NaN (no turn was located) leaves the one before."""
    if math.isnan(gain):
        return state
    return state.replace(aux=dict(state.aux) | {"gain": jnp.asarray(gain, jnp.float32)})


def scale(
    aux, step, *, warmup: int = 1, decay: int = 0, off_at: float = 2.0, fade: float = 0.2, min_gain: float = -1.0
) -> jax.Array:
    """Computes the factor on the feedback gradient, in [0, 1].

    Rises linearly over `warmup` updates; falls linearly to 0 over `decay` updates (0 = never); falls to 0 as the
    running success goes from off_at - fade to off_at (off_at - fade >= 1 = never: success cannot pass 1); 0 while the
    measured hint gain is not above `min_gain` (NaN gain = not measured: open).
    """
    step = jnp.asarray(step, jnp.float32)
    rise = jnp.clip((step + 1.0) / max(1, warmup), 0.0, 1.0)
    fall = jnp.clip(1.0 - step / decay, 0.0, 1.0) if decay else 1.0
    wane = jnp.clip((off_at - aux["success"]) / max(fade, 1e-6), 0.0, 1.0)
    useful = jnp.where(jnp.isnan(aux["gain"]) | (aux["gain"] > min_gain), 1.0, 0.0)
    return rise * fall * wane * useful
