"""Returns and advantages of ONE trajectory; vmap outside.

Time: step t in [0, T) takes an action, then receives reward[t]; discount[t] multiplies everything after step t
(0 = the episode ends there). value[t] is the critic before step t; `bootstrap` is the critic after the last step.

Only steps of the mask exist. The rest (observation and padding tokens, unused turns) are transparent: they do not
advance time, earn nothing, and what stands in their columns is never read. So a trajectory of tokens that alternates
between actions and observations, the compacted one, and one padded at will give the same numbers.
"""

import chex
import jax
import jax.numpy as jnp

Scalar = jax.Array | float


def discounted_returns(
    reward_T: jax.Array,
    discount_T: jax.Array,
    mask_T: jax.Array | None = None,
    *,
    bootstrap: Scalar = 0.0,
) -> jax.Array:
    """Sums the rewards to come: Gₜ = rₜ + γₜ Gₜ₊₁, with G_T = bootstrap.

    With γ = 1: return-to-go; with γ = 0: the rewards themselves.

    Args:
      reward_T: reward after each step t in [0, T).
      discount_T: discount after each step, in [0, 1].
      mask_T: bool, steps that exist; None = all.
      bootstrap: value after the last step (a truncated episode); 0 for one that ended.

    Returns: G for each step, 0 off-mask.

    Source: Sutton & Barto, Reinforcement Learning (2018), eq. 3.9.
    """
    mask_T = _check(mask_T, reward_T, discount_T)
    return _keep(_backward(reward_T, discount_T, mask_T, bootstrap), mask_T)


def lambda_returns(
    reward_T: jax.Array,
    discount_T: jax.Array,
    value_T: jax.Array,
    mask_T: jax.Array | None = None,
    *,
    lambda_: Scalar = 1.0,
    bootstrap: Scalar = 0.0,
) -> jax.Array:
    """Mixes n-step returns: Gₜ = rₜ + γₜ [(1 - λₜ) Vₜ₊₁ + λₜ Gₜ₊₁], with G_T = V_T = bootstrap.

    With λ = 1: discounted returns; with λ = 0: the one-step target rₜ + γₜ Vₜ₊₁.

    Args:
      reward_T, discount_T, mask_T, bootstrap: as in `discounted_returns`.
      value_T: critic before each step t in [0, T).
      lambda_: scalar or one per step, in [0, 1].

    Returns: G for each step, 0 off-mask; the regression target of the critic.

    Source: Sutton & Barto (2018), eq. 12.2 in its recursive form; rlax.lambda_returns.
    Differs: rlax takes the values after each step; here they stand before it, as everywhere in this module.
    """
    mask_T = _check(mask_T, reward_T, discount_T, value_T)
    lambda_T = jnp.broadcast_to(jnp.asarray(lambda_, jnp.float32), reward_T.shape)
    target_T = reward_T + discount_T * (1.0 - lambda_T) * _next(value_T, mask_T, bootstrap)
    return _keep(_backward(target_T, discount_T * lambda_T, mask_T, bootstrap), mask_T)


def gae(
    reward_T: jax.Array,
    discount_T: jax.Array,
    value_T: jax.Array,
    mask_T: jax.Array | None = None,
    *,
    lambda_: Scalar = 1.0,
    bootstrap: Scalar = 0.0,
) -> jax.Array:
    """Generalised advantage estimation: Aₜ = δₜ + γₜ λₜ Aₜ₊₁ with δₜ = rₜ + γₜ Vₜ₊₁ - Vₜ.

    With λ = 1: Gₜ - Vₜ; with λ = 0: the TD error δₜ; A + V is the λ-return. Over one step per turn instead of one
    per token, the same recursion is turn-level PPO.

    Args:
      reward_T, discount_T, mask_T: as in `discounted_returns`.
      value_T: critic before each step t in [0, T).
      lambda_: scalar or one per step, in [0, 1].
      bootstrap: critic after the last step; it counts only as far as the last discount is not 0.

    Returns: A for each step, 0 off-mask.

    Source: Schulman et al. 2016 (https://arxiv.org/abs/1506.02438), eq. 16, as an associative scan (log T depth).
    """
    mask_T = _check(mask_T, reward_T, discount_T, value_T)
    lambda_T = jnp.broadcast_to(jnp.asarray(lambda_, jnp.float32), reward_T.shape)
    error_T = reward_T + discount_T * _next(value_T, mask_T, bootstrap) - value_T
    return _keep(_backward(error_T, discount_T * lambda_T, mask_T, 0.0), mask_T)


def leave_one_out(value_G: jax.Array, mask_G: jax.Array | None = None) -> jax.Array:
    """Averages the others: bᵢ = mean of vⱼ over j ≠ i; 0 where there is no other.

    v - b is the RLOO advantage; it equals G / (G - 1) times the deviation from the mean of all.

    Args:
      value_G: one value per member of one group, finite where the mask holds.
      mask_G: bool, members that exist; None = all.

    Returns: b for each member, 0 off-mask.

    Source: Kool et al. 2019 (https://openreview.net/forum?id=r1lgTGL5DE); Ahmadian et al. 2024
      (https://arxiv.org/abs/2402.14740), RLOO.
    """
    mask_G = _check(mask_G, value_G)
    kept_G = _keep(value_G, mask_G)
    others = jnp.sum(mask_G) - 1
    return _keep((jnp.sum(kept_G) - kept_G) / jnp.maximum(others, 1), mask_G & (others > 0))


def _keep(x_T: jax.Array, mask_T: jax.Array) -> jax.Array:
    return jnp.where(mask_T, x_T, 0.0)


def _check(mask_T: jax.Array | None, *columns: jax.Array) -> jax.Array:
    chex.assert_rank(columns, 1)
    chex.assert_equal_shape(columns)
    chex.assert_type(columns, float)
    if mask_T is None:
        return jnp.ones(columns[0].shape, bool)
    chex.assert_equal_shape([mask_T, columns[0]])
    chex.assert_type(mask_T, bool)
    return mask_T


def _backward(add_T: jax.Array, carry_T: jax.Array, mask_T: jax.Array, last: Scalar) -> jax.Array:
    """Solves xₜ = addₜ + carryₜ xₜ₊₁ backwards from x_T = last; off-mask xₜ = xₜ₊₁."""
    add_T = _keep(add_T, mask_T)
    carry_T = jnp.where(mask_T, carry_T, 1.0)

    def compose(later, earlier):
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    carried_T, added_T = jax.lax.associative_scan(compose, (carry_T, add_T), reverse=True)
    return added_T + carried_T * last


def _next(value_T: jax.Array, mask_T: jax.Array, last: Scalar) -> jax.Array:
    """Value of the next existing step after t; `last` after the last one."""
    first_T = _backward(value_T, jnp.zeros_like(value_T), mask_T, last)
    return jnp.append(first_T[1:], jnp.asarray(last, first_T.dtype))
