"""Policy, KL, entropy and critic losses as orthogonal functions: ratio level x surrogate x aggregation.

Every loss is a sum: loss = Σ_bt weight_BT * loss_BT. The weights carry the denominator, and `aggregate_weights` makes
them ONCE over the whole optimizer batch; any split of its rows into micro-batches or devices, any packing and any
padding then sum to the same number. Metrics are sums for the same reason; `combine` adds and `summarise` finishes them.

    weight_BT = aggregate_weights(mask_BT, weight_B, group_B, how="token_mean")          # once per optimizer batch
    loss, sums = policy_loss(logp_BT, old_logp_BT, adv_BT, mask_BT, weight_BT)           # per micro-batch: add them up
    loss += coef * weighted_sum(kl_penalty_BT(logp_BT, ref_logp_BT, mask_BT), mask_BT, weight_BT)
    metrics = summarise(sums)                                                            # once; `combine` adds sums

To weight tokens further (`correction_weights`), multiply weight_BT.
"""

from rsi_jax.losses.aggregate import AGGREGATIONS, aggregate_weights, weighted_sum
from rsi_jax.losses.correction import CORRECTIONS, check_correction, correction_weights
from rsi_jax.losses.critic import value_loss
from rsi_jax.losses.kl import KL_ESTIMATORS, kl_in_reward, kl_penalty_BT
from rsi_jax.losses.policy import (
    LOG_RATIO_MAX,
    RATIO_LEVELS,
    SURROGATES,
    combine,
    entropy_bonus,
    importance_weights,
    log_ratio,
    policy_loss,
    summarise,
)
from rsi_jax.losses.spread import ENTROPY, histogram, quantile, top_mean
from rsi_jax.losses.surrogates import cispo, dppo, dro, gmpo, ppo_clip, sapo

__all__ = [
    "AGGREGATIONS",
    "CORRECTIONS",
    "ENTROPY",
    "KL_ESTIMATORS",
    "LOG_RATIO_MAX",
    "RATIO_LEVELS",
    "SURROGATES",
    "aggregate_weights",
    "check_correction",
    "cispo",
    "combine",
    "correction_weights",
    "dppo",
    "dro",
    "entropy_bonus",
    "gmpo",
    "histogram",
    "importance_weights",
    "kl_in_reward",
    "kl_penalty_BT",
    "log_ratio",
    "policy_loss",
    "ppo_clip",
    "quantile",
    "sapo",
    "summarise",
    "top_mean",
    "value_loss",
    "weighted_sum",
]
