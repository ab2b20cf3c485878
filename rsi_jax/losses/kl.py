"""KL to the reference policy, in the loss or in the reward."""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.losses import aggregate

LOG_RATIO_MAX = 20.0
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")


def kl_penalty_BT(
    logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array, *, estimator: str = "k3+"
) -> jax.Array:
    """Estimates KL(π || ref) at each sampled token, with d = log π - log ref:

      k1   d                    unbiased value; its gradient is 0 in expectation: for rewards, not for a loss
      k2   d² / 2               biased value; gradient d ∇log π: in expectation that of KL(π || ref)
      k3   exp(-d) - 1 + d      unbiased, >= 0; its gradient descends KL(ref || π) instead
      k3+  the value of k3 with the gradient of k2: report and descend the same KL

    Only what k3 exponentiates is clamped (d >= -20): elsewhere a clamp would cut the pull where the policy is farthest.

    Args:
      logp_BT: nats, of the policy.
      ref_logp_BT: nats, of the reference; no gradient.
      mask_BT: bool; whatever stands off-mask is not read.
      estimator: one of KL_ESTIMATORS.

    Returns: float32 nats, 0 off-mask.

    Source: Schulman 2020 (http://joschu.net/blog/kl-approx.html); Tang & Munos 2025
      (https://arxiv.org/abs/2506.09477) on the gradients.
    """
    chex.assert_rank([logp_BT, ref_logp_BT, mask_BT], 2)
    chex.assert_equal_shape([logp_BT, ref_logp_BT, mask_BT])
    aggregate.choose(estimator, KL_ESTIMATORS, "KL estimator")
    ref_BT = jax.lax.stop_gradient(masked.zero(ref_logp_BT.astype(jnp.float32), mask_BT))
    d_BT = masked.zero(logp_BT.astype(jnp.float32), mask_BT) - ref_BT
    if estimator == "k1":
        return d_BT
    k2_BT = 0.5 * jnp.square(d_BT)
    if estimator == "k2":
        return k2_BT
    bounded_BT = jnp.maximum(d_BT, -LOG_RATIO_MAX)
    k3_BT = jnp.expm1(-bounded_BT) + bounded_BT
    return k3_BT if estimator == "k3" else jax.lax.stop_gradient(k3_BT - k2_BT) + k2_BT


def kl_in_reward(rollout: base.Rollout, *, coef: float, estimator: str = "k1") -> base.Rollout:
    """Charges the KL to the reward of the action that incurred it: r_s - coef * Σ_{t in s} kl_t.

    Any credit function then works on the penalised returns. Log rewards and pick successes before this.

    Args:
      rollout: needs ref_logp_BT; the KL is that of the policy that sampled.
      coef: >= 0, reward per nat.
      estimator: one of KL_ESTIMATORS (k1 is unbiased, and only values matter here).

    Source: Ouyang et al. 2022 (https://arxiv.org/abs/2203.02155), eq. 2.
    Differs: the charge lands at the end of the action, where every reward lands, not at each token.
    """
    ref_logp_BT = base.given(rollout.ref_logp_BT, "ref_logp_BT")
    mask_BT = rollout.mask_BT
    kl_BT = kl_penalty_BT(rollout.logp_BT, ref_logp_BT, mask_BT, estimator=estimator)
    segments = rollout.segments
    kl_BS = masked.segment_sum(kl_BT, rollout.segment_BT, segments=segments.start_BS.shape[1])
    charged = segments.replace(reward_BS=segments.reward_BS - coef * jax.lax.stop_gradient(kl_BS))
    return rollout.replace(segments=charged)
