"""Weights that carry the denominator of a loss, and the sum they weigh."""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked

AGGREGATIONS = ("token_mean", "sequence_mean", "prompt_mean", "constant")


def aggregate_weights(
    mask_BT: jax.Array,
    weight_B: jax.Array,
    group_B: jax.Array,
    *,
    how: str = "token_mean",
    constant: float = 0.0,
    signal_B: jax.Array | None = None,
) -> jax.Array:
    """Weighs each token so that a loss is Σ weight_BT * loss_BT, over the whole optimizer batch.

    With w the row weight, n its tokens; rows without tokens or with w = 0 enter no denominator:
      token_mean     w / Σ_b w n                    DAPO: every token counts the same
      sequence_mean  w / (n Σ_b w)                  GRPO, GSPO: every rollout counts the same
      prompt_mean    w / (Σ_{b in group} w n) / #groups   every prompt counts the same, its tokens within
      constant       w / (constant Σ_b w)           Dr. GRPO: the tokens of a rollout are summed, over a fixed length

    Args:
      mask_BT: bool, tokens sampled by the policy.
      weight_B: row weights >= 0; 0 = not trained on.
      group_B: int, prompt of each row, in [0, B); read by prompt_mean only.
      how: one of AGGREGATIONS.
      constant: tokens, > 0; required by, and read by, `constant` only (1 = mean over rollouts of token sums).
      signal_B: bool, rows left out of numerator and denominator where False, e.g. the rows of zero-variance groups
        (credit.rewards.dynamic_sampling_keep); None keeps all.

    Returns: weight_BT float32, 0 off-mask; all 0 when nothing is trained on.

    Raises: base.InputError for an unknown name or a constant that is not positive.

    Source: Yu et al. 2025, DAPO (https://arxiv.org/abs/2503.14476), eq. 8; Liu et al. 2025, Dr. GRPO
      (https://arxiv.org/abs/2503.20783), section 3.
    """
    chex.assert_rank(mask_BT, 2)
    chex.assert_type(mask_BT, bool)
    chex.assert_shape([weight_B, group_B], mask_BT.shape[:1])
    choose(how, AGGREGATIONS, "loss aggregation")
    if how == "constant" and not constant > 0:
        raise base.InputError(f"loss aggregation 'constant' needs constant > 0 tokens, got {constant}")
    kept_B = weight_B > 0 if signal_B is None else (weight_B > 0) & signal_B
    n_B = jnp.sum(mask_BT, axis=1).astype(jnp.float32)
    w_B = masked.zero(weight_B.astype(jnp.float32), kept_B & (n_B > 0))
    if how == "token_mean":
        scale_B = reciprocal(jnp.sum(w_B * n_B))
    elif how == "sequence_mean":
        scale_B = reciprocal(n_B * jnp.sum(w_B))
    elif how == "prompt_mean":
        scale_B = reciprocal(masked.group_sum(w_B * n_B, group_B, w_B) * masked.count_groups(w_B > 0, group_B))
    else:
        scale_B = reciprocal(constant * jnp.sum(w_B))
    return jnp.where(mask_BT, (w_B * scale_B)[:, None], 0.0)


def weighted_sum(x_BT: jax.Array, mask_BT: jax.Array, weight_BT: jax.Array) -> jax.Array:
    """Sums Σ weight_BT * x_BT over the mask: what turns a per-token loss into a loss."""
    chex.assert_rank([x_BT, mask_BT, weight_BT], 2)
    chex.assert_equal_shape([x_BT, mask_BT, weight_BT])
    return jnp.sum(masked.zero(x_BT, mask_BT) * masked.zero(weight_BT, mask_BT))


def reciprocal(x: jax.Array) -> jax.Array:
    """1 / x, and 0 where x is 0: the scale of an empty sum."""
    return jnp.where(x > 0, 1.0 / jnp.where(x > 0, x, 1.0), 0.0)


def choose(name: str, names: tuple[str, ...], what: str) -> None:
    if name not in names:
        mend = base.did_you_mean(name, names)
        raise base.InputError(f"unknown {what} '{name}': one of {', '.join(names)}{mend}")
