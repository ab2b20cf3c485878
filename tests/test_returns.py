"""Recursions on one trajectory, against plain loops over the compacted trajectory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import returns

NAN = jnp.nan


def loop_gae(reward, discount, value, lambda_, bootstrap):
    following, adv, out = bootstrap, 0.0, []
    for r, g, v, keep in list(zip(reward, discount, value, lambda_, strict=True))[::-1]:
        adv = r + g * following - v + g * keep * adv
        following = v
        out.append(adv)
    return np.asarray(out[::-1], np.float32)


def loop_returns(reward, discount, bootstrap):
    total, out = bootstrap, []
    for r, g in list(zip(reward, discount, strict=True))[::-1]:
        total = r + g * total
        out.append(total)
    return np.asarray(out[::-1], np.float32)


def test_T18_observation_tokens_do_not_advance_time():
    mask = jnp.asarray([True, True, False, False, True])
    reward = jnp.asarray([0.0, 0, 0, 0, 1])
    value = jnp.asarray([0.2, 0.4, 9.0, 9.0, 0.6])
    discount = jnp.asarray([1.0, 1, 1, 1, 0])
    adv = returns.gae(reward, discount, value, mask, lambda_=0.5)
    np.testing.assert_allclose(adv, [0.4, 0.4, 0, 0, 0.4], atol=1e-6)
    np.testing.assert_allclose((adv + value)[mask], [0.6, 0.8, 1.0], atol=1e-6)
    compact = returns.gae(jnp.asarray([0.0, 0, 1]), jnp.asarray([1.0, 1, 0]), jnp.asarray([0.2, 0.4, 0.6]), lambda_=0.5)
    np.testing.assert_allclose(adv[mask], compact, atol=1e-6)


def test_T22_masked_steps_add_nothing_to_returns():
    difference = jnp.asarray([1.5, 1.0, 2.0, 2.0])
    mask = jnp.asarray([True, True, False, False])
    np.testing.assert_allclose(returns.discounted_returns(difference, jnp.ones(4), mask), [2.5, 1, 0, 0])


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_recursions_equal_loops_over_the_compacted_trajectory(seed):
    rng = np.random.default_rng(seed)
    T = 13
    mask = rng.random(T) < 0.6
    reward, value = rng.normal(size=(2, T)).astype(np.float32)
    discount, lambda_ = rng.choice([0.0, 0.5, 0.9, 1.0], (2, T)).astype(np.float32)
    bootstrap = np.float32(rng.normal())
    kept = [x[mask] for x in (reward, discount, value, lambda_)]
    want_adv = loop_gae(*kept, bootstrap)
    want_returns = loop_returns(*kept[:2], bootstrap)
    poison = rng.choice([np.nan, np.inf, -np.inf])
    reward, value = (np.where(mask, x, poison) for x in (reward, value))
    adv, togo, target = jax.jit(_all)(reward, discount, value, mask, lambda_, bootstrap)
    np.testing.assert_allclose(adv[mask], want_adv, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(togo[mask], want_returns, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target[mask], want_adv + kept[2], rtol=1e-4, atol=1e-5)
    for x in (adv, togo, target):
        np.testing.assert_array_equal(x[~mask], 0.0)


def _all(reward, discount, value, mask, lambda_, bootstrap):
    knobs = {"lambda_": lambda_, "bootstrap": bootstrap}
    return (
        returns.gae(reward, discount, value, mask, **knobs),
        returns.discounted_returns(reward, discount, mask, bootstrap=bootstrap),
        returns.lambda_returns(reward, discount, value, mask, **knobs),
    )


def test_gae_limits():
    key = jax.random.key(3)
    reward, value = jax.random.normal(key, (2, 6))
    discount = jnp.full(6, 0.9)
    togo = returns.discounted_returns(reward, discount, bootstrap=0.7)
    np.testing.assert_allclose(
        returns.gae(reward, discount, value, lambda_=1.0, bootstrap=0.7), togo - value, atol=1e-5
    )
    error = reward + 0.9 * jnp.append(value[1:], 0.7) - value
    np.testing.assert_allclose(returns.gae(reward, discount, value, lambda_=0.0, bootstrap=0.7), error, atol=1e-6)
    np.testing.assert_allclose(
        returns.lambda_returns(reward, discount, value, lambda_=1.0, bootstrap=0.7), togo, atol=1e-6
    )


def test_a_terminal_discount_reads_no_bootstrap():
    reward, value = jnp.asarray([0.0, 1.0]), jnp.asarray([0.3, 0.4])
    ended = returns.gae(reward, jnp.asarray([1.0, 0.0]), value, bootstrap=5.0)
    np.testing.assert_allclose(ended, [0.7, 0.6], atol=1e-6)
    truncated = returns.gae(reward, jnp.asarray([1.0, 1.0]), value, bootstrap=5.0)
    np.testing.assert_allclose(truncated, [5.7, 5.6], atol=1e-6)


def test_no_step_at_all():
    adv = returns.gae(jnp.full(3, NAN), jnp.ones(3), jnp.full(3, NAN), jnp.zeros(3, bool), bootstrap=1.0)
    np.testing.assert_array_equal(adv, 0.0)


def test_returns_vmap_and_jit():
    reward, value = jax.random.normal(jax.random.key(4), (2, 3, 5))
    discount = jnp.full((3, 5), 0.9)
    batched = jax.jit(jax.vmap(returns.gae))(reward, discount, value)
    rows = [returns.gae(reward[b], discount[b], value[b]) for b in range(3)]
    np.testing.assert_allclose(batched, jnp.stack(rows), atol=1e-6)


def test_leave_one_out_averages_the_others():
    np.testing.assert_allclose(returns.leave_one_out(jnp.asarray([1.0, 0, 0, 0])), [0, 1 / 3, 1 / 3, 1 / 3], atol=1e-7)
    mask = jnp.asarray([True, False, True, False])
    np.testing.assert_allclose(returns.leave_one_out(jnp.asarray([1.0, NAN, 3.0, NAN]), mask), [3, 0, 1, 0])
    np.testing.assert_array_equal(returns.leave_one_out(jnp.asarray([0.7])), 0.0)


def test_misuse_fails_at_trace_time():
    with pytest.raises(AssertionError):
        returns.gae(jnp.ones(3), jnp.ones(3), jnp.ones(4))
    with pytest.raises(AssertionError):
        returns.gae(jnp.ones((2, 3)), jnp.ones((2, 3)), jnp.ones((2, 3)))
