"""Corrects a batch for a sampler that is not quite the trainer: other kernels, another precision, older weights.

The policy ratio is taken against the trainer's own log-probs at the weights that sampled, and each token is weighed by
trainer over sampler, bounded.
"""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.losses import aggregate, policy

CORRECTIONS = ("none", "truncate", "mask")


def check_correction(how: str, level: str, low: float, high: float) -> None:
    """Refuses knobs of `correction_weights` that are out of range.

    Raises: base.InputError.
    """
    aggregate.choose(how, CORRECTIONS, "correction")
    aggregate.choose(level, policy.RATIO_LEVELS, "correction level")
    if not 0 <= low <= 1 <= high:
        raise base.InputError(f"rl.correction needs 0 <= correction_low <= 1 <= correction_high, got {low} and {high}")


def correction_weights(
    policy_logp_BT: jax.Array,
    logp_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    how: str = "truncate",
    level: str = "token",
    low: float = 0.0,
    high: float = 2.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Importance weights of trainer against sampler: w = clip(r, low, high), or r where low <= r <= high and else 0.

      r = π_trainer(y) / μ_sampler(y), both at the weights that sampled; of the token, the geometric mean over the
      rollout ('sequence') or the product over it ('product')

    truncate at the token level with low = 0, high = 2: TIS; mask at the token level with 0.5 and 5: IcePop. Where the
    two agree every weight is exactly 1.

    Args:
      policy_logp_BT: nats, the trainer's log-prob of each sampled token at the weights that sampled it.
      logp_BT: nats, as sampled (same temperature and support).
      mask_BT: bool, tokens that are trained on.
      how: 'truncate' | 'mask'.
      level: one of policy.RATIO_LEVELS.
      low, high: bounds of r, 0 <= low <= 1 <= high.

    Returns: w, float32 [B, T], 0 off-mask, no gradient; and over the mask
      ess   (Σ w)² / (n Σ w²): effective share of the tokens; 0 when nothing is left
      cut   share of the tokens whose r was outside the bounds
      max   the largest r, before its bound

    Raises: base.InputError for an unknown name or bounds out of range.

    Source: Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl), TIS, cap 2; Ling team 2025, IcePop
      (https://arxiv.org/abs/2510.18855), bounds 0.5 and 5; Zheng et al. 2025, GSPO (https://arxiv.org/abs/2507.18071)
      for the geometric mean.
    """
    chex.assert_equal_shape([policy_logp_BT, logp_BT, mask_BT])
    check_correction(how, level, low, high)
    log_ratio_BT = policy.log_ratio(policy_logp_BT, logp_BT, mask_BT, level=level)
    weight_BT = policy.importance_weights(log_ratio_BT, mask_BT, low=low, high=high, outside=how)
    ratio_BT = jax.lax.stop_gradient(jnp.exp(log_ratio_BT))
    per_token = aggregate.reciprocal(masked.count(mask_BT))
    total, squares = jnp.sum(weight_BT), jnp.sum(jnp.square(weight_BT))
    return weight_BT, {
        "ess": total * per_token * total * aggregate.reciprocal(squares),
        "cut": masked.sum((ratio_BT < low) | (ratio_BT > high), mask_BT) * per_token,
        "max": jnp.max(masked.zero(ratio_BT, mask_BT)),
    }
