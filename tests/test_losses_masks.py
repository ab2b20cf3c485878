"""What no loss reads, on its own functions: whatever stands off-mask, and whatever must not be trained."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import losses
from rsi_jax.credit import examples
from rsi_jax.losses import aggregate

MASK = jnp.asarray([[True, True, False], [True, False, False]])
WEIGHT = jnp.asarray([[0.5, 0.25, 0.0], [0.25, 0.0, 0.0]])
LOGP = jnp.asarray([[-1.0, -2.0, -3.0], [-0.5, -1.0, -1.0]])
OLD = jnp.asarray([[-1.5, -1.0, -1.0], [-0.7, -2.0, -1.0]])
ADV = jnp.asarray([[1.0, -1.0, 2.0], [0.5, 1.0, 1.0]])
POISONS = (jnp.nan, jnp.inf, -jnp.inf, 1e4)


def poisoned(poison, *columns):
    return [jnp.where(MASK, x, poison) for x in columns]


@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
def test_a_log_ratio_is_zero_off_mask_whatever_stands_there(level):
    @jax.jit
    def both(logp, old):
        def total(x):
            ratio = losses.log_ratio(x, old, MASK, level=level)
            return jnp.sum(ratio), ratio

        (_, ratio), grad = jax.value_and_grad(total, has_aux=True)(logp)
        return ratio, grad

    clean = both(LOGP, OLD)
    difference = np.where(MASK, LOGP - OLD, 0.0)
    pooled = {"token": difference, "sequence": [[-0.25], [0.2]], "product": [[-0.5], [0.2]]}[level]
    np.testing.assert_allclose(clean[0], np.where(MASK, pooled, 0.0), atol=1e-6)
    np.testing.assert_array_equal(clean[1], MASK.astype(jnp.float32))
    for poison in POISONS:
        jax.tree.map(np.testing.assert_array_equal, both(*poisoned(poison, LOGP, OLD)), clean)


@pytest.mark.parametrize("clip", [0.0, 0.2])
def test_the_critic_is_trained_on_the_mask_and_only_the_critic(clip):
    value, old, target = jnp.asarray([[1.0, -1.0, 0], [1.0, 0, 0]]), jnp.full((2, 3), 0.9), jnp.full((2, 3), -2.0)
    old = old.at[0, 1].set(0.0)
    target = target.at[1, 0].set(0.0)

    @jax.jit
    def run(*columns):
        def total(*columns):
            return losses.value_loss(*columns, MASK, WEIGHT, clip=clip)

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*columns)

    (loss, sums), grads = run(value, old, target)
    # the second token has moved by -1: with the clip it is held at -.2, where the error is (1.8)² and not 1
    want = 0.5 * (0.5 * 9.0 + 0.25 * (1.8**2 if clip else 1.0) + 0.25 * 1.0)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    assert sums["value_clipped"] == (1 if clip else 0) and sums["value_tokens"] == 3
    np.testing.assert_allclose(grads[0], [[1.5, 0.0 if clip else 0.25, 0], [0.25, 0, 0]], atol=1e-6)
    np.testing.assert_array_equal(grads[1], 0.0)
    np.testing.assert_array_equal(grads[2], 0.0)
    for poison in POISONS:
        for dirty in (poisoned(poison, value, old, target), [value, *poisoned(poison, old), target]):
            jax.tree.map(np.testing.assert_array_equal, run(*dirty), ((loss, sums), grads))


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_the_reference_is_not_trained(estimator):
    def total(logp, ref):
        return jnp.sum(losses.kl_penalty_BT(logp, ref, MASK, estimator=estimator))

    policy, reference = jax.grad(total, argnums=(0, 1))(LOGP, OLD)
    assert jnp.all((policy != 0) == MASK)
    np.testing.assert_array_equal(reference, 0.0)


def test_a_reward_that_is_charged_carries_no_gradient():
    rollout = examples.random_rollout(0, B=2, T=14)

    def total(logp_BT):
        return jnp.sum(losses.kl_in_reward(rollout.replace(logp_BT=logp_BT), coef=0.1).segments.reward_BS)

    np.testing.assert_array_equal(jax.grad(total)(rollout.logp_BT), 0.0)


def test_a_weighted_sum_reads_no_weight_off_mask():
    for poison in POISONS:
        np.testing.assert_allclose(losses.weighted_sum(ADV, MASK, *poisoned(poison, WEIGHT)), 0.5 - 0.25 + 0.125)


def test_the_reciprocal_of_nothing_is_zero_and_so_is_its_slope():
    values, slopes = jax.vmap(jax.value_and_grad(aggregate.reciprocal))(jnp.asarray([0.0, 4.0]))
    np.testing.assert_allclose(values, [0.0, 0.25])
    np.testing.assert_allclose(slopes, [0.0, -1 / 16])


@pytest.mark.parametrize("outside", ["truncate", "mask"])
def test_importance_weights_read_nothing_off_mask_and_train_nothing(outside):
    weigh = functools.partial(losses.importance_weights, mask_BT=MASK, high=1.5, low=0.5, outside=outside)
    ratio = jnp.log(jnp.asarray([[1.2, 3.0, 1.0], [0.25, 1.0, 1.0]]))
    want = [[1.2, 1.5, 0], [0.5, 0, 0]] if outside == "truncate" else [[1.2, 0, 0], [0, 0, 0]]
    for poison in (0.0, *POISONS):
        np.testing.assert_allclose(weigh(*poisoned(poison, ratio)), want, rtol=1e-6)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(weigh(x)))(ratio), 0.0)


@pytest.mark.parametrize("surrogate", losses.SURROGATES)
def test_advantages_and_sampled_log_probs_are_not_trained(surrogate):
    def total(logp, old, adv):
        return losses.policy_loss(logp, old, adv, MASK, WEIGHT, surrogate=surrogate)[0]

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(LOGP, LOGP + 0.05, ADV)
    np.testing.assert_array_equal(grads[0] != 0, MASK)
    np.testing.assert_array_equal(grads[1], 0.0)
    np.testing.assert_array_equal(grads[2], 0.0)


def test_a_bound_cuts_on_the_side_of_the_advantage_and_nothing_where_it_is_zero():
    log_ratio, adv = (
        x.reshape(1, -1) for x in jnp.meshgrid(jnp.log(jnp.asarray([0.5, 1.0, 5.0])), jnp.arange(-1.0, 2))
    )
    low, high, zero = np.asarray(log_ratio < -0.1), np.asarray(log_ratio > 0.1), np.asarray(adv == 0)
    worse, better = np.asarray(adv < 0), np.asarray(adv > 0)
    by_side = (low & worse) | (high & better)
    np.testing.assert_array_equal(losses.ppo_clip(log_ratio, adv)[1], by_side)
    np.testing.assert_array_equal(losses.ppo_clip(log_ratio, adv, dual_clip=3.0)[1], by_side | (high & worse))
    np.testing.assert_array_equal(losses.cispo(log_ratio, log_ratio, adv)[1], (low | high) & ~zero)
    np.testing.assert_array_equal(losses.gmpo(log_ratio, adv, jnp.ones((1, 9), bool))[1], by_side)
    old = jnp.full((1, 9), jnp.log(0.19))
    probability = losses.dppo(log_ratio, old + log_ratio, old, adv, clip_low=0.05)[1]
    np.testing.assert_array_equal(probability, by_side)
