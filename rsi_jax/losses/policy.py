"""Policy loss: ratio level x surrogate, entropy, and how far off-policy the batch is.

The ratio is of the policy to the one that sampled, r = π(y) / μ(y), from log-probs in float32; whatever is
exponentiated is clamped at +-20 nats first.
"""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.losses import aggregate, spread, surrogates

LOG_RATIO_MAX = 20.0
RATIO_LEVELS = ("token", "sequence", "product")
SURROGATES = ("ppo", "gspo", "cispo", "sapo", "gmpo", "dppo", "dro")
LEVELS = {"gspo": ("sequence",), "gmpo": ("sequence",), "sapo": ("token",), "dppo": ("token",), "dro": ("token",)}
DUAL_CLIP = ("ppo", "gspo", "dppo")  # the others have no bound of that kind


def log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array, *, level: str = "token") -> jax.Array:
    """Log-ratio of policy to sampler at each token, in nats, clamped at +-20.

      token     log π(y_t) - log μ(y_t)
      sequence  the mean over the rollout's tokens: the geometric mean ratio of GSPO
      product   the sum over the rollout's tokens: exact importance sampling of the rollout

    Above the token level the value is shared by the rollout while the gradient of token t flows through its own
    log-prob only (GSPO-token), so that per-token advantages keep their place; with one advantage per rollout this is
    the gradient of GSPO.

    Args:
      logp_BT: nats, of the policy being trained.
      old_logp_BT: nats, as sampled; no gradient.
      mask_BT: bool, tokens sampled by the policy.
      level: one of RATIO_LEVELS.

    Returns: float32, 0 off-mask.

    Source: Zheng et al. 2025, GSPO (https://arxiv.org/abs/2507.18071), eq. 7 and 13.
    """
    chex.assert_rank([logp_BT, old_logp_BT, mask_BT], 2)
    chex.assert_equal_shape([logp_BT, old_logp_BT, mask_BT])
    chex.assert_type(mask_BT, bool)
    aggregate.choose(level, RATIO_LEVELS, "ratio level")
    logp_BT = masked.zero(logp_BT.astype(jnp.float32), mask_BT)
    old_BT = jax.lax.stop_gradient(masked.zero(old_logp_BT.astype(jnp.float32), mask_BT))
    token_BT = jnp.clip(logp_BT - old_BT, -LOG_RATIO_MAX, LOG_RATIO_MAX)
    if level == "token":
        return token_BT
    pool = masked.mean if level == "sequence" else masked.sum
    pooled_B = jnp.clip(pool(token_BT, mask_BT, axis=1), -LOG_RATIO_MAX, LOG_RATIO_MAX)
    own_BT = token_BT - jax.lax.stop_gradient(token_BT)  # 0, with the gradient of the token's own log-prob
    return masked.zero(jax.lax.stop_gradient(pooled_B)[:, None] + own_BT, mask_BT)


def policy_loss(
    logp_BT: jax.Array,
    old_logp_BT: jax.Array,
    adv_BT: jax.Array,
    mask_BT: jax.Array,
    weight_BT: jax.Array,
    *,
    surrogate: str = "ppo",
    ratio_level: str = "",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
    dro_beta: float = 0.05,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Policy loss of a micro-batch: Σ weight_BT * surrogate(log-ratio at the level, advantage).

    Args:
      logp_BT: nats, of the policy being trained; the only input that gets a gradient.
      old_logp_BT: nats, as sampled (same temperature and support as logp_BT).
      adv_BT: advantages, from a credit function.
      mask_BT: bool, tokens sampled by the policy.
      weight_BT: from `aggregate_weights` over the optimizer batch.
      surrogate: one of SURROGATES; 'gspo' = 'ppo' at level 'sequence', the others as in `losses.surrogates`.
      ratio_level: one of RATIO_LEVELS; '' = the surrogate's own ('sequence' for gspo and gmpo, else 'token').
      clip_low, clip_high: as in `surrogates.ppo_clip`; for gmpo distances in log space, for dppo of probabilities.
      dual_clip: as in `surrogates.ppo_clip`; for dppo the bound of the importance weight. 0 = none.
      sapo_tau_pos, sapo_tau_neg, dro_beta: as in `surrogates.sapo` and `surrogates.dro`.

    Returns: the loss, and sums for `summarise`.

    Raises: base.InputError for an unknown name, a bound out of range, or a combination that names no method.
    """
    chex.assert_rank([logp_BT, old_logp_BT, adv_BT, mask_BT, weight_BT], 2)
    chex.assert_equal_shape([logp_BT, old_logp_BT, adv_BT, mask_BT, weight_BT])
    aggregate.choose(surrogate, SURROGATES, "surrogate")
    level = _level(surrogate, ratio_level)
    if dual_clip and surrogate not in DUAL_CLIP:
        raise base.InputError(f"surrogate '{surrogate}' has no dual clip: set dual_clip to 0, got {dual_clip}")
    log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT, level="token" if surrogate == "gmpo" else level)
    adv_BT = jax.lax.stop_gradient(masked.zero(adv_BT, mask_BT))
    logp_BT, old_logp_BT = masked.zero(logp_BT, mask_BT), masked.zero(old_logp_BT, mask_BT)
    bounds = {"clip_low": clip_low, "clip_high": clip_high}
    if surrogate == "cispo":
        found = surrogates.cispo(log_ratio_BT, logp_BT, adv_BT, **bounds)
    elif surrogate == "sapo":
        found = surrogates.sapo(log_ratio_BT, adv_BT, tau_pos=sapo_tau_pos, tau_neg=sapo_tau_neg)
    elif surrogate == "gmpo":
        found = surrogates.gmpo(log_ratio_BT, adv_BT, mask_BT, **bounds)
    elif surrogate == "dppo":
        bounds["weight_max"] = dual_clip or float("inf")
        found = surrogates.dppo(log_ratio_BT, logp_BT, old_logp_BT, adv_BT, **bounds)
    elif surrogate == "dro":
        found = surrogates.dro(log_ratio_BT, logp_BT, adv_BT, beta=dro_beta)
    else:
        found = surrogates.ppo_clip(log_ratio_BT, adv_BT, dual_clip=dual_clip, **bounds)
    loss_BT, clipped_BT = found
    sums = _off_policy_sums(log_ratio_BT, clipped_BT, mask_BT & (weight_BT > 0))
    return aggregate.weighted_sum(loss_BT, mask_BT, weight_BT), sums


def _level(surrogate: str, ratio_level: str) -> str:
    levels = LEVELS.get(surrogate, RATIO_LEVELS)
    level = ratio_level or levels[0]
    aggregate.choose(level, RATIO_LEVELS, "ratio level")
    if level not in levels:
        raise base.InputError(f"surrogate '{surrogate}' has ratio_level '{levels[0]}' only, got '{level}'")
    return level


def _off_policy_sums(log_ratio_BT: jax.Array, clipped_BT: jax.Array, mask_BT: jax.Array) -> dict[str, jax.Array]:
    log_ratio_BT = jax.lax.stop_gradient(log_ratio_BT)
    ratio_BT = jnp.exp(log_ratio_BT)
    return {
        "tokens": masked.count(mask_BT),
        "clipped": masked.sum(clipped_BT, mask_BT),
        "clipped_high": masked.sum(clipped_BT & (ratio_BT > 1.0), mask_BT),
        "kl_sum": masked.sum(ratio_BT - 1.0 - log_ratio_BT, mask_BT),
        "ratio_sum": masked.sum(ratio_BT, mask_BT),
        "ratio_square_sum": masked.sum(jnp.square(ratio_BT), mask_BT),
        "ratio_max": jnp.max(masked.zero(ratio_BT, mask_BT)),
        "log_ratio_histogram": spread.histogram(log_ratio_BT, mask_BT, *spread.LOG_RATIO),
    }


def combine(a: Mapping[str, jax.Array], b: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds the sums of two parts of a batch: what `policy_loss` and `value_loss` return for the whole."""
    return {name: jnp.maximum(a[name], b[name]) if name == "ratio_max" else a[name] + b[name] for name in a}


def summarise(sums: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Finishes the sums of `policy_loss`, and of `value_loss` where there is one, into metrics over all micro-batches.

    Args:
      sums: of the whole batch (see `combine`).

    Returns: over the trained tokens,
      tokens              how many
      clip_fraction       share whose gradient was cut (ppo, gspo) or weight bounded (cispo); a ratio beyond a bound
                          counts only where the sign of the advantage makes that bound bind
      clip_fraction_high  the part of it above the upper bounds
      approx_kl           mean of r - 1 - log r, nats: estimates KL(sampler || policy), >= 0
      ratio_mean, ratio_max
      ratio_p01, ratio_p50, ratio_p99  quantiles, to 1% of their value within [0.08, 13] (see `spread`)
      ess                 (Σ r)² / (n Σ r²), in (0, 1]: effective share of the samples; 1 on-policy, 0 of nothing
      value_clip_fraction share of the critic's tokens whose gradient was cut; only with a critic
    """
    total = dict(sums)
    spread_2N = total.pop("log_ratio_histogram")
    quantiles = {f"ratio_p{q:02}": jnp.exp(spread.quantile(spread_2N, q / 100)) for q in (1, 50, 99)}
    per_token = aggregate.reciprocal(total["tokens"])
    critic = {}
    if "value_tokens" in total:
        critic["value_clip_fraction"] = total["value_clipped"] * aggregate.reciprocal(total["value_tokens"])
    return critic | {
        "tokens": total["tokens"],
        "clip_fraction": total["clipped"] * per_token,
        "clip_fraction_high": total["clipped_high"] * per_token,
        "approx_kl": total["kl_sum"] * per_token,
        "ratio_mean": total["ratio_sum"] * per_token,
        "ratio_max": total["ratio_max"],
        **{name: jnp.where(total["tokens"] > 0, x, 0.0) for name, x in quantiles.items()},
        "ess": total["ratio_sum"] * per_token * total["ratio_sum"] * aggregate.reciprocal(total["ratio_square_sum"]),
    }


def importance_weights(
    log_ratio_BT: jax.Array, mask_BT: jax.Array, *, high: float, low: float = 0.0, outside: str = "truncate"
) -> jax.Array:
    """Weights that correct for a sampler that differs from the policy (its engine, or its age); no gradient.

    truncate: clip(r, low, high), TIS; mask: r where low <= r <= high, else 0, IcePop. Multiply weight_BT by them.

    Args:
      log_ratio_BT: log π_trainer - log μ_sampler from `log_ratio`, at any level.
      mask_BT: bool, tokens sampled by the policy.
      high, low: bounds of the ratio, 0 <= low <= 1 <= high.
      outside: 'truncate' | 'mask'.

    Returns: float32, 0 off-mask.

    Source: Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl); Ling team 2025, IcePop
      (https://arxiv.org/abs/2510.18855).
    """
    chex.assert_rank([log_ratio_BT, mask_BT], 2)
    chex.assert_equal_shape([log_ratio_BT, mask_BT])
    aggregate.choose(outside, ("truncate", "mask"), "importance weights outside the bounds")
    if not 0 <= low <= 1 <= high:
        raise base.InputError(f"importance weight bounds must hold 0 <= low <= 1 <= high, got {low}, {high}")
    ratio_BT = jnp.exp(jnp.clip(masked.zero(log_ratio_BT, mask_BT), -LOG_RATIO_MAX, LOG_RATIO_MAX))
    kept_BT = jnp.clip(ratio_BT, low, high)
    if outside == "mask":
        kept_BT = jnp.where(kept_BT == ratio_BT, ratio_BT, 0.0)
    return jax.lax.stop_gradient(masked.zero(kept_BT, mask_BT))


def entropy_bonus(entropy_BT: jax.Array, mask_BT: jax.Array, weight_BT: jax.Array, *, coef: float) -> jax.Array:
    """Loss that rewards entropy: -coef Σ weight_BT * H_BT, with H in nats and coef >= 0."""
    return -coef * aggregate.weighted_sum(entropy_BT, mask_BT, weight_BT)
