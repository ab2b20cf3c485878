"""Credit from returns alone: the baseline is the group, the batch, the past, or nothing.

Shared rules: a rollout counts if its weight is > 0 and its return finite, others get 0 and shift no baseline. A group
whose returns agree to 1e-6, or with one counted rollout, gives exactly 0. R is the undiscounted sum of rewards, the
return-to-go G_k = r_k + γ d_k G_{k+1} has the environment's discounts d_k (and γ = 1 where there is no such knob), and
every sampled token of every turn gets its rollout's advantage, unless said otherwise.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards, turns

NEEDS: dict[str, tuple[str, ...]] = {"rae": ("baseline_B",), "otb": ("collision_BT",)}


def reinforce(rollout: base.Rollout, *, baseline: str = "none") -> base.Credit:
    """REINFORCE on the return of the whole rollout: A = R, or R minus the mean over the batch.

    With baseline 'batch' and one group in the batch: dr_grpo, up to its rule for returns that agree.

    Args:
      rollout: rewards and weights are read.
      baseline: 'none' | 'batch' (mean over counted rollouts).

    Raises: base.InputError for an unknown baseline.

    Source: Williams 1992 (https://doi.org/10.1007/BF00992696).
    """
    rewards.check(rollout)
    if baseline not in ("none", "batch"):
        raise base.InputError(f"credit.reinforce.baseline is 'none' or 'batch', got '{baseline}'")
    return_B, counted_B = rollout.return_B, rewards.counted_B(rollout)
    centre = masked.mean(return_B, counted_B) if baseline == "batch" else 0.0
    return _credit(rollout, masked.zero(return_B - centre, counted_B))


def rloo(rollout: base.Rollout) -> base.Credit:
    """REINFORCE with a leave-one-out baseline: A_i = R_i - mean_{j != i} R_j = n / (n - 1) (R_i - mean R).

    Unbiased, since the baseline never contains the return it is subtracted from.

    Args:
      rollout: rewards, groups and weights are read.

    Source: Ahmadian et al. 2024 (https://arxiv.org/abs/2402.14740), RLOO.
    """
    rewards.check(rollout)
    size_B = masked.group_size(rollout.return_B, rollout.group_B, rollout.weight_B)
    return _credit(rollout, _centred(rollout) * size_B / jnp.maximum(size_B - 1.0, 1.0))


def grpo(rollout: base.Rollout, *, scale: str = "std", std_floor: float = 1e-6, per: str = "rollout") -> base.Credit:
    """Group-relative advantage: A = (R - mean R) / (std R + std_floor), or R - mean R with scale 'none'.

    The std weighs a group by how rare its outcomes are: one success of eight gives the winner more than one of two.
    With scale 'none': dr_grpo, and rloo times (n - 1) / n.

    Args:
      rollout: rewards, groups and weights are read.
      scale: 'std' (n - 1 in its denominator) | 'none'.
      std_floor: in units of the return, > 0; bounds the amplification of groups that nearly agree.
      per: 'rollout' | 'turn': mean and std in which a rollout counts once for each of its turns (long ones weigh more).

    Raises: base.InputError for an unknown scale or unit, or a floor that is not positive.

    Source: Shao et al. 2024, DeepSeekMath (https://arxiv.org/abs/2402.03300), section 4.1.2.
    Differs: a group whose returns agree to 1e-6 gives exactly 0, not rounding over epsilon; a singleton gives 0.
    """
    rewards.check(rollout)
    rewards.check_scale("grpo", scale, std_floor)
    if per not in ("rollout", "turn"):
        raise base.InputError(f"credit.grpo.per is 'rollout' or 'turn', got '{per}'")
    knobs = {"scale": scale, "floor": std_floor}
    if per == "rollout":
        adv_B = rewards.relative(rollout.return_B, rollout.group_B, rollout.weight_B, **knobs)
        return _credit(rollout, adv_B, std_floor=std_floor if scale == "std" else 0.0)
    used_BS = rewards.counted_turns(rollout).used_S
    columns = [jnp.broadcast_to(x[:, None], used_BS.shape) for x in (rollout.return_B, rollout.group_B)]
    weight_BS = jnp.where(used_BS, rollout.weight_B[:, None], 0.0)
    adv_N = rewards.relative(*(x.reshape(-1) for x in (*columns, weight_BS)), **knobs)
    return _credit(rollout, adv_N.reshape(used_BS.shape)[:, 0])


def dr_grpo(rollout: base.Rollout) -> base.Credit:
    """Group-relative advantage without the std: A = R - mean R.

    The other half of Dr. GRPO is in the loss: losses.aggregate_weights(how='constant').

    Args:
      rollout: rewards, groups and weights are read.

    Source: Liu et al. 2025 (https://arxiv.org/abs/2503.20783), section 3.
    """
    rewards.check(rollout)
    return _credit(rollout, _centred(rollout))


def maxrl(rollout: base.Rollout, *, floor: float = 1e-6) -> base.Credit:
    """Maximum-likelihood RL: A = (R - mean R) / mean R over the group.

    For rewards in {0, 1} the sum over a group is 1/K Σ_{right} ∇ log π - 1/n Σ ∇ log π, K the number of right ones: up
    to its baseline the gradient of log p(right), of which the expected reward is the first term. A hard task, with
    few right answers, weighs more: one success of eight gives the winner 7, four of eight give each winner 1.

    Args:
      rollout: rewards (not negative), groups and weights are read.
      floor: in units of the return, > 0; a group whose mean is not above it gives 0 (`maxrl_excluded` counts its rows).

    Raises: base.InputError for a floor that is not positive.

    Source: Tajwar et al. 2026 (https://arxiv.org/abs/2602.02710), the estimator with a baseline.
    Differs: rewards may be any that are not negative.
    """
    rewards.check(rollout)
    if not floor > 0:
        raise base.InputError(f"credit.maxrl.floor must be > 0, got {floor}")
    mean_B = masked.group_mean(rollout.return_B, rollout.group_B, rollout.weight_B)
    usable_B = mean_B > floor
    found = _credit(rollout, jnp.where(usable_B, _centred(rollout) / jnp.where(usable_B, mean_B, 1.0), 0.0))
    excluded = masked.count(~usable_B & rewards.dynamic_sampling_keep(rollout))
    return found.replace(metrics={**found.metrics, "maxrl_excluded": excluded})


def opo(rollout: base.Rollout) -> base.Credit:
    """Optimal reward baseline: A = R - Σ n_j R_j / Σ n_j over the group, n the sampled tokens.

    The baseline of least variance weighs every return by the squared norm of its gradient, here taken to grow with the
    length. With equal lengths: dr_grpo.

    Args:
      rollout: rewards, lengths, groups and weights are read.

    Source: Hao et al. 2025 (https://arxiv.org/abs/2505.23585), the length-weighted baseline.
    Differs: a group whose returns agree to 1e-6 gives exactly 0; a singleton gives 0.
    """
    rewards.check(rollout)
    kept_B = rewards.dynamic_sampling_keep(rollout)
    return_B = masked.zero(rollout.return_B, kept_B)
    length_B = jnp.where(kept_B, masked.count(rollout.mask_BT, axis=1), 0).astype(jnp.float32)
    tokens_B = masked.group_sum(length_B, rollout.group_B, rollout.weight_B)
    earned_B = masked.group_sum(length_B * return_B, rollout.group_B, rollout.weight_B)
    return _credit(rollout, masked.zero(return_B - earned_B / jnp.maximum(tokens_B, 1.0), kept_B))


def rae(rollout: base.Rollout, *, decay: float = 0.95) -> base.Credit:
    """REINFORCE against a running mean of returns: A = R - b', b' = decay b + (1 - decay) mean R of the batch.

    b is baseline_B, what earlier batches left; b' (`rewards.running_baseline`) is left to the next. It works with one
    rollout per task, and lags when the policy improves fast. With decay = 0: reinforce with baseline 'batch'.

    Args:
      rollout: needs baseline_B.
      decay: share of the past, in [0, 1).

    Raises: ValueError without baseline_B; base.InputError for a decay out of range.

    Source: Liu et al. 2025, SPIRAL (https://arxiv.org/abs/2506.24119), role-conditioned advantage estimation.
    Differs: one role; the mean is updated once per batch, not after every game.
    """
    rewards.check(rollout, "baseline_B")
    centre_B = rewards.running_baseline(base.given(rollout.baseline_B, "baseline_B"), rollout, decay=decay)
    return _credit(rollout, rollout.return_B - centre_B)


def otb(rollout: base.Rollout) -> base.Credit:
    """Optimal token baseline: A_n = G_n - b_n for the n-th sampled token, b_n a mean of the group weighted by W_n.

      b_n = Σ_i W_in G_in / Σ_i W_in,   W_n = Σ_{j <= n} (1 - 2 π(y_j) + Σ_v π(v)²)

    W is the squared norm of the log-prob's gradient down to the logits, summed over the tokens so far: the baseline of
    least variance weighs returns by it. G is the return-to-go of the token's turn. A rollout that has ended stays in
    the sum with G = 0, so that the baseline does not depend on who is still there.

    Args:
      rollout: needs collision_BT.

    Raises: ValueError without collision_BT.

    Source: optimal token baseline (https://arxiv.org/abs/2602.07078).
    Differs: a group whose returns agree to 1e-6 gives exactly 0; a singleton gives 0.
    """
    rewards.check(rollout, "collision_BT")
    mask_BT, kept_BT = rollout.mask_BT, rewards.counted_BT(rollout)
    energy_BT = 1.0 - 2.0 * jnp.exp(rollout.logp_BT) + base.given(rollout.collision_BT, "collision_BT")
    togo_BS = rewards.returns_to_go(rewards.counted_turns(rollout))
    togo_BT = jax.vmap(turns.to_tokens)(togo_BS, rollout.turn_BT)
    nth_BT = jnp.cumsum(mask_BT, axis=1) - 1
    place_BT = jnp.where(mask_BT, nth_BT, mask_BT.shape[1])

    def pack(x_T, place_T):
        return jnp.zeros_like(x_T).at[place_T].set(x_T, mode="drop")

    weight_BN = jnp.cumsum(jax.vmap(pack)(energy_BT, place_BT), axis=1)
    togo_BN = jax.vmap(pack)(togo_BT, place_BT)
    signal_B = rewards.dynamic_sampling_keep(rollout)
    total = jax.vmap(lambda x_B: masked.group_sum(x_B, rollout.group_B, signal_B.astype(jnp.float32)), 1, 1)
    mass_BN = total(weight_BN)
    best_BN = total(weight_BN * togo_BN) / jnp.where(mass_BN > 0, mass_BN, 1.0)
    centre_BT = jnp.take_along_axis(best_BN, jnp.maximum(nth_BT, 0), axis=1)
    adv_BT = jax.lax.stop_gradient(masked.zero(togo_BT - centre_BT, kept_BT & signal_B[:, None]))
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))


def reinforce_pp(rollout: base.Rollout) -> base.Credit:
    """REINFORCE++: the return-to-go of each turn, whitened over all trained tokens of the batch.

    A = (G_k - mean) / std with G_k the rewards from turn k on. One affine map for the whole batch: unlike a std per
    group it does not depend on the return that it scales, and it works with one rollout per task. A penalty per token
    (rl.kl_in_reward) stands in the rewards.

    Args:
      rollout: rewards and weights are read; groups are not.

    Source: Hu et al. 2025 (https://arxiv.org/abs/2501.03262v9), the form for one response per prompt.
    Differs: turns are the steps over which rewards are summed; a batch whose tokens agree gives 0.
    """
    rewards.check(rollout)
    togo_BS = rewards.returns_to_go(rewards.counted_turns(rollout))
    adv_BT = jax.vmap(turns.to_tokens)(togo_BS, rollout.turn_BT)
    return _whitened(rollout, adv_BT, shift_mean=True)


def reinforce_pp_baseline(rollout: base.Rollout) -> base.Credit:
    """REINFORCE++ with a group baseline: A = (R - mean of the group) / std over all trained tokens of the batch.

    grpo with one std for the batch: a group that nearly agrees is not amplified.

    Args:
      rollout: rewards, groups and weights are read.

    Source: Hu et al. 2025 (https://arxiv.org/abs/2501.03262v9), the form with several responses per prompt.
    Differs: divided by the std, not centred a second time, so that a group without signal stays exactly 0.
    """
    rewards.check(rollout)
    return _whitened(rollout, rewards.to_tokens(rollout, _centred(rollout)), shift_mean=False)


def _whitened(rollout: base.Rollout, adv_BT: jax.Array, *, shift_mean: bool) -> base.Credit:
    adv_BT = jax.lax.stop_gradient(masked.whiten(adv_BT, rewards.counted_BT(rollout), shift_mean=shift_mean))
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))


def centred_return_to_go(rollout: base.Rollout, *, discount: float = 1.0) -> base.Credit:
    """Return-to-go of each turn, discounted first, then centred by the group: A_k = G_k - mean over the group of G_0.

    G_k = r_k + γ d_k G_{k+1}, d_k the environment's discounts. The baseline is one number per group: a baseline per
    turn index is an average over those that got so far, depends on the policy's choice to stop, and erases the signal
    for continuing. With a single reward at the end and γ = 1: dr_grpo.

    Args:
      rollout: rewards, discounts, groups and weights are read.
      discount: γ per turn, in [0, 1].

    Source: Sutton & Barto (2018), section 13.4 (REINFORCE with baseline).
    Differs: a group whose G_0 agree to 1e-6 gives exactly 0 for every turn.
    """
    rewards.check(rollout)
    togo_BS = rewards.returns_to_go(rewards.counted_turns(rollout), discount)
    first_B = jnp.where(rewards.counted_B(rollout), togo_BS[:, 0], jnp.nan)
    centre_B = masked.group_mean(first_B, rollout.group_B, rollout.weight_B)
    signal_B = masked.group_spread(first_B, rollout.group_B, rollout.weight_B) > masked.SPREAD
    adv_BT = rewards.turns_to_tokens(rollout, jnp.where(signal_B[:, None], togo_BS - centre_B[:, None], 0.0))
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))


def _centred(rollout: base.Rollout) -> jax.Array:
    """R - mean R over the group; exactly 0 for rows, groups and singletons without signal."""
    return rewards.relative(rollout.return_B, rollout.group_B, rollout.weight_B, scale="none", floor=1.0)


def _credit(rollout: base.Rollout, adv_B: jax.Array, *, std_floor: float = 0.0) -> base.Credit:
    adv_BT = rewards.to_tokens(rollout, adv_B)
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT, std_floor=std_floor))
