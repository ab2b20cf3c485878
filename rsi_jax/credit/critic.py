"""Credit from a learned critic (PPO): generalised advantage estimation per token and per turn.

All need value_BT, the critic before each sampled token, and give the critic its regression target. Observation tokens
do not advance time. A rollout that its environment ended has nothing after it; one that ran out of tokens (finish
LENGTH) bootstraps from end_value_B, the critic after its last token.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked, returns
from rsi_jax.credit import rewards, turns

NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("gae", "turn_gae", "vapo"), ("value_BT", "end_value_B"))


def gae(rollout: base.Rollout, *, discount: float = 1.0, lambda_: float = 0.95, scale: str = "none") -> base.Credit:
    """GAE with one time step per sampled token: A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t.

    A turn's rewards land on the last token of its action; γ there is also multiplied by the environment's discounts.
    With λ = 1: G - V; with λ = 0: the TD error; with V = 0 and γ = λ = 1: REINFORCE with return-to-go.

    Args:
      rollout: needs value_BT and end_value_B.
      discount: γ per sampled token, in [0, 1].
      lambda_: in [0, 1].
      scale: 'none' | 'std': whiten the advantages over the trained tokens of the batch (the targets stay).

    Returns: advantages, and value_target_BT = A + V before scaling (the λ-return).

    Raises: ValueError without these columns; base.InputError for an unknown scale or a knob outside [0, 1].

    Source: Schulman et al. 2016 (https://arxiv.org/abs/1506.02438), eq. 16; Ouyang et al. 2022
      (https://arxiv.org/abs/2203.02155) for language models.
    Differs: time runs over sampled tokens only; a truncated rollout bootstraps.
    """
    rewards.check(rollout, "value_BT", "end_value_B")
    _check_knobs("gae", discount, lambda_, scale)
    table = rewards.counted_turns(rollout)
    adv_BT = _token_gae(rollout, table, discount, jnp.full(rollout.group_B.shape, lambda_))
    return _credit(rollout, table, adv_BT, adv_BT + _values(rollout), scale)


def vapo(rollout: base.Rollout, *, alpha: float = 0.05, discount: float = 1.0, scale: str = "none") -> base.Credit:
    """GAE whose λ grows with the length of the rollout, and a critic that learns with λ = 1.

      λ = 1 - 1 / (α l), l the sampled tokens of the rollout (0 where α l < 1);   target = the return-to-go

    Over l tokens the share of the final reward that reaches the first one, λ^l, stays near exp(-1/α) instead of falling
    to 0. With α large: `gae` at λ = 1.

    Args:
      rollout: needs value_BT and end_value_B.
      alpha: > 0.
      discount, scale: as in `gae`.

    Returns: advantages, and value_target_BT = the return-to-go (with bootstrap where truncated).

    Raises: as in `gae`.

    Source: Yue et al. 2025, VAPO (https://arxiv.org/abs/2504.05118), decoupled and length-adaptive GAE.
    """
    rewards.check(rollout, "value_BT", "end_value_B")
    _check_knobs("vapo", discount, 1.0, scale)
    if not alpha > 0:
        raise base.InputError(f"credit.vapo.alpha must be > 0, got {alpha}")
    table = rewards.counted_turns(rollout)
    length_B = jnp.maximum(masked.count(rollout.mask_BT, axis=1), 1.0)
    adv_BT = _token_gae(rollout, table, discount, jnp.clip(1.0 - 1.0 / (alpha * length_B), 0.0, 1.0))
    target_BT = _token_gae(rollout, table, discount, jnp.ones_like(length_B)) + _values(rollout)
    return _credit(rollout, table, adv_BT, target_BT, scale)


def turn_gae(
    rollout: base.Rollout, *, discount: float = 0.99, lambda_: float = 0.9, scale: str = "none"
) -> base.Credit:
    """GAE with one time step per turn, given to every token of the turn's action.

    V_k is the critic before the first token of action k; γ and λ count turns, so neither a long answer nor a long
    observation fades the credit of an earlier turn. With one turn: R - V_0 for every token (response-level PPO).

    Args:
      rollout: needs value_BT and end_value_B.
      discount: γ per turn, in [0, 1].
      lambda_: in [0, 1].
      scale: as in `gae`.

    Returns: advantages, and value_target_BT = A_k + V_k on all tokens of the turn.

    Raises: as in `gae`.

    Source: turn-PPO (https://arxiv.org/abs/2512.17008).
    Differs: the critic is trained at every sampled token of the turn, not at its first token only.
    """
    rewards.check(rollout, "value_BT", "end_value_B")
    _check_knobs("turn_gae", discount, lambda_, scale)
    table = rewards.counted_turns(rollout)

    def one(table, value_T, turn_T, end):
        value_S = jnp.where(table.used_S, value_T[table.first_S], 0.0)
        adv_S = returns.gae(
            table.reward_S,
            discount * table.discount_S,
            value_S,
            table.used_S,
            lambda_=lambda_,
            bootstrap=end,
        )
        return turns.to_tokens(adv_S, turn_T), turns.to_tokens(adv_S + value_S, turn_T)

    adv_BT, target_BT = jax.vmap(one)(table, _values(rollout), rollout.turn_BT, _ends(rollout))
    return _credit(rollout, table, adv_BT, target_BT, scale)


def _check_knobs(name: str, discount: float, lambda_: float, scale: str) -> None:
    if scale not in ("none", "std"):
        raise base.InputError(f"credit.{name}.scale is 'none' or 'std', got '{scale}'")
    if not (0 <= discount <= 1 and 0 <= lambda_ <= 1):
        raise base.InputError(f"credit.{name}: discount and lambda_ must be in [0, 1], got {discount} and {lambda_}")


def _values(rollout: base.Rollout) -> jax.Array:
    return jax.lax.stop_gradient(masked.zero(base.given(rollout.value_BT, "value_BT"), rollout.mask_BT))


def _ends(rollout: base.Rollout) -> jax.Array:
    return base.given(rollout.end_value_B, "end_value_B")


def _token_gae(rollout: base.Rollout, table: turns.Turns, discount: float, lambda_B: jax.Array) -> jax.Array:
    def one(table, value_T, mask_T, lambda_, end):
        T = value_T.shape[0]
        last_S = jnp.where(table.used_S, table.last_S, T)
        reward_T = jnp.zeros(T).at[last_S].add(table.reward_S, mode="drop")
        discount_T = jnp.full(T, discount, jnp.float32).at[last_S].multiply(table.discount_S, mode="drop")
        return returns.gae(reward_T, discount_T, value_T, mask_T, lambda_=lambda_, bootstrap=end)

    return jax.vmap(one)(table, _values(rollout), rollout.mask_BT, lambda_B, _ends(rollout))


def _credit(
    rollout: base.Rollout, table: turns.Turns, adv_BT: jax.Array, target_BT: jax.Array, scale: str
) -> base.Credit:
    """Masks, scales and reports. A rollout that does not count has the critic itself as target: no error to learn."""
    kept_BT = rewards.counted_BT(rollout)
    value_BT = _values(rollout)
    target_BT = masked.zero(jnp.where(kept_BT, target_BT, value_BT), rollout.mask_BT)
    adv_BT = masked.whiten(adv_BT, kept_BT) if scale == "std" else masked.zero(adv_BT, kept_BT)
    adv_BT, target_BT = jax.lax.stop_gradient((adv_BT, target_BT))
    residual = masked.var(target_BT - value_BT, kept_BT)
    total = masked.var(target_BT, kept_BT)
    metrics = rewards.report(rollout, adv_BT)
    metrics["value_explained"] = jnp.where(total > 0, 1.0 - residual / jnp.where(total > 0, total, 1.0), 0.0)
    metrics["bootstrapped"] = masked.count(turns.final(table.used_S) & (table.discount_S > 0))
    return base.Credit(adv_BT=adv_BT, value_target_BT=target_BT, metrics=metrics)
