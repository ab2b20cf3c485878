"""Credit from rollouts that were sampled for it: continuations from states of a rollout, and trees of rollouts.

mc_value_BT holds, before some sampled tokens, the mean return of fresh continuations from there: an unbiased value
without a critic. Between two such places a < b the credit is r_a + ... + V_b - V_a, and after the last one V = 0, also
where a budget cut the rollout off.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards, turns

NEEDS: dict[str, tuple[str, ...]] = {
    "vineppo": ("mc_value_BT",),
    "spo": ("mc_value_BT",),
    "tree_grpo": ("tree_B",),
}


def vineppo(rollout: base.Rollout) -> base.Credit:
    """Monte Carlo advantages of turns: A_k = r_k + V_{k+1} - V_k, V_k the mean over continuations from before turn k.

    Turns whose value was not drawn belong to the stretch of the last one before them that was. Over a rollout whose
    first turn has a value, the stretches sum to R - V_0.

    Args:
      rollout: needs mc_value_BT, read at the first token of each turn; NaN where none was drawn.

    Returns: advantages; 0 before the first value. `valued` in the metrics is the share of turns with a value.

    Raises: ValueError without mc_value_BT.

    Source: Kazemnejad et al. 2024, VinePPO (https://arxiv.org/abs/2410.01679), eq. 5-6, γ = 1.
    Differs: steps are turns; values may be drawn at some turns only.
    """
    rewards.check(rollout, "mc_value_BT")
    table = rewards.counted_turns(rollout)
    return _between(rollout, table, jax.vmap(_at_first)(table, rollout.tokens_BT))


def spo(rollout: base.Rollout, *, prob_max: float = 0.9) -> base.Credit:
    """Segment advantages: A = r + V(end) - V(start) between cut points, on the tokens that were no matter of course.

    Tokens sampled with probability above `prob_max` get 0: where the policy had no choice there is nothing to credit.
    With prob_max = 1 and cuts at turns: vineppo.

    Args:
      rollout: needs mc_value_BT, whose places are the cut points (the authors cut at every fifth token below 0.9).
      prob_max: in (0, 1].

    Raises: ValueError without mc_value_BT; base.InputError for prob_max out of range.

    Source: Guo et al. 2025, SPO-chain (https://arxiv.org/abs/2505.23564), eq. 4-6.
    """
    rewards.check(rollout, "mc_value_BT")
    if not 0 < prob_max <= 1:
        raise base.InputError(f"credit.spo.prob_max must be in (0, 1], got {prob_max}")
    credit = _between(rollout, rewards.counted_turns(rollout), rollout.mask_BT)
    chosen_BT = jnp.exp(rollout.logp_BT) <= prob_max
    adv_BT = masked.zero(credit.adv_BT, chosen_BT)
    return credit.replace(adv_BT=adv_BT, metrics={**credit.metrics, **rewards.report(rollout, adv_BT)})


def tree_grpo(rollout: base.Rollout, *, scale: str = "std", std_floor: float = 1e-6) -> base.Credit:
    """Sum of two group-relative advantages: among the leaves of one tree, and among all leaves of the task.

      A = (R - mean of the tree) / (std of the tree + floor) + (R - mean of the group) / (std of the group + floor)

    Leaves of a tree share a prefix, so what tells them apart was decided after the fork. A tree of one leaf, or whose
    leaves agree to 1e-6, has no inner term; without forks: grpo.

    Args:
      rollout: needs tree_B; each leaf is a whole rollout, its prefix included.
      scale: 'std' | 'none'.
      std_floor: in units of the return, > 0.

    Raises: ValueError without tree_B; base.InputError for an unknown scale or a floor that is not positive.

    Source: Ji et al. 2025, Tree-GRPO (https://arxiv.org/abs/2509.21240), eq. 5-7.
    """
    rewards.check(rollout, "tree_B")
    rewards.check_scale("tree_grpo", scale, std_floor)

    def relative(group_B):
        return rewards.relative(rollout.return_B, group_B, rollout.weight_B, scale=scale, floor=std_floor)

    tree_B = base.given(rollout.tree_B, "tree_B")
    adv_BT = rewards.to_tokens(rollout, relative(tree_B) + relative(rollout.group_B))
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))


def _at_first(table: turns.Turns, tokens_T: jax.Array) -> jax.Array:
    """True at the first token of each turn."""
    T = tokens_T.shape[0]
    return jnp.zeros(T, bool).at[jnp.where(table.used_S, table.first_S, T)].set(True, mode="drop")


def _between(rollout: base.Rollout, table: turns.Turns, place_BT: jax.Array) -> base.Credit:
    """Credit of the stretches between the valued ones of the places."""
    value_BT = base.given(rollout.mc_value_BT, "mc_value_BT")
    known_BT = place_BT & jnp.isfinite(value_BT)

    def one(table, value_T, known_T):
        T = value_T.shape[0]
        reward_T = jnp.zeros(T).at[table.last_S].add(table.reward_S)  # that of an unused turn is 0
        earned_T = jnp.cumsum(reward_T) - reward_T  # before each token
        index_T = jnp.arange(T)
        start_T = jax.lax.cummax(jnp.where(known_T, index_T, -1))
        end_T = jax.lax.cummin(jnp.where(known_T, index_T, T), reverse=True)
        end_T = jnp.append(end_T[1:], T)
        height_T = jnp.append(earned_T + value_T, jnp.sum(reward_T))
        return jnp.where(start_T >= 0, height_T[end_T] - height_T[jnp.maximum(start_T, 0)], 0.0)

    adv_BT = jax.lax.stop_gradient(masked.zero(jax.vmap(one)(table, value_BT, known_BT), rewards.counted_BT(rollout)))
    metrics = rewards.report(rollout, adv_BT)
    metrics["valued"] = masked.count(known_BT) / jnp.maximum(masked.count(place_BT & rollout.mask_BT), 1.0)
    return base.Credit(adv_BT=adv_BT, metrics=metrics)
