"""Regression of the critic."""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import masked
from rsi_jax.losses import aggregate


def value_loss(
    value_BT: jax.Array,
    old_value_BT: jax.Array,
    target_BT: jax.Array,
    mask_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    clip: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Regression of the critic: Σ weight_BT * ½ max((V - G)², (clip(V, V_old +- c) - G)²).

    With c = 0: the plain squared error ½ (V - G)².

    Args:
      value_BT: critic being trained; the only input that gets a gradient.
      old_value_BT: critic when the rollout was annotated.
      target_BT: regression target, from a credit function.
      mask_BT, weight_BT: as in `policy_loss`.
      clip: c >= 0 in units of the return (0 = none).

    Returns: the loss, and sums: value_clipped (tokens whose gradient was cut), value_tokens.

    Source: Schulman et al., baselines PPO2; kept for reproductions (Andrychowicz et al. 2020,
      https://arxiv.org/abs/2006.05990, find no gain).
    """
    chex.assert_rank([value_BT, old_value_BT, target_BT, mask_BT, weight_BT], 2)
    chex.assert_equal_shape([value_BT, old_value_BT, target_BT, mask_BT, weight_BT])
    value_BT = masked.zero(value_BT.astype(jnp.float32), mask_BT)
    old_BT, target_BT = jax.lax.stop_gradient((masked.zero(old_value_BT, mask_BT), masked.zero(target_BT, mask_BT)))
    error_BT = jnp.square(value_BT - target_BT)
    clipped_BT = jnp.zeros_like(mask_BT)
    if clip:
        near_BT = jnp.square(old_BT + jnp.clip(value_BT - old_BT, -clip, clip) - target_BT)
        clipped_BT = near_BT > error_BT
        error_BT = jnp.maximum(error_BT, near_BT)
    trained_BT = mask_BT & (weight_BT > 0)
    sums = {"value_clipped": masked.sum(clipped_BT, trained_BT), "value_tokens": masked.count(trained_BT)}
    return 0.5 * aggregate.weighted_sum(error_BT, mask_BT, weight_BT), sums
