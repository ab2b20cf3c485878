"""Truncated importance sampling: the weights of trainer against sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, losses

LN2 = np.log(2.0)
ONES = jnp.ones((1, 3), bool)
OFF = jnp.asarray([[LN2, LN2, -LN2]])


def weights(log_ratio=OFF, mask=ONES, **knobs):
    """Of a sampler whose log-probs are -1: the trainer's differ by `log_ratio`."""
    found, metrics = losses.correction_weights(log_ratio - 1.0, jnp.full(log_ratio.shape, -1.0), mask, **knobs)
    return np.asarray(found), {name: float(x) for name, x in metrics.items()}


def test_T29_token_truncation_caps_each_token():
    found, metrics = weights(high=1.5)
    np.testing.assert_allclose(found, [[1.5, 1.5, 0.5]], rtol=1e-6)
    assert metrics == pytest.approx({"ess": 3.5**2 / (3 * 4.75), "cut": 2 / 3, "max": 2.0}, rel=1e-5)


def test_T29_icepop_drops_what_is_outside():
    found, metrics = weights(how="mask", low=0.6, high=1.5)
    np.testing.assert_array_equal(found, 0.0)
    assert metrics == pytest.approx({"ess": 0.0, "cut": 1.0, "max": 2.0})
    np.testing.assert_allclose(weights(how="mask", low=0.5 - 1e-6, high=5.0)[0], [[2, 2, 0.5]], rtol=1e-6)


def test_T29_the_product_and_the_geometric_mean_are_shared_by_the_rollout():
    np.testing.assert_allclose(weights(level="product", high=3.0)[0], [[2.0] * 3], rtol=1e-6)
    np.testing.assert_allclose(weights(level="sequence", high=3.0)[0], [[1.2599] * 3], rtol=1e-4)


def test_T29_a_thousand_tokens_are_dropped_by_their_product_and_kept_by_their_geometric_mean():
    long = jnp.full((1, 1000), 0.002)
    knobs = {"log_ratio": long, "mask": jnp.ones((1, 1000), bool), "how": "mask", "high": 3.0}
    found, metrics = weights(level="product", **knobs)
    assert not found.any() and metrics["max"] == pytest.approx(7.39, rel=1e-3) and metrics["cut"] == 1.0
    found, metrics = weights(level="sequence", **knobs)
    np.testing.assert_allclose(found, 1.002, rtol=1e-5)
    assert metrics["cut"] == 0.0 and metrics["ess"] == pytest.approx(1.0, rel=1e-5)


def test_T54_a_cap_of_two_on_log_ratios_two_and_zero():
    found, metrics = weights(jnp.asarray([[2.0, 0.0]]), jnp.ones((1, 2), bool), high=2.0)
    np.testing.assert_allclose(found, [[2.0, 1.0]], rtol=1e-6)
    assert metrics["max"] == pytest.approx(np.exp(2.0), rel=1e-5)


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
def test_a_sampler_that_is_the_trainer_has_weights_of_exactly_one(how, level):
    found, metrics = weights(jnp.zeros((1, 3)), how=how, level=level)
    np.testing.assert_array_equal(found, 1.0)
    assert metrics == {"ess": 1.0, "cut": 0.0, "max": 1.0}


def test_nothing_off_mask_is_read():
    poisoned = jnp.asarray([[LN2, jnp.nan, -LN2]])
    found, metrics = weights(poisoned, jnp.asarray([[True, False, True]]), level="product")
    np.testing.assert_allclose(found, [[1, 0, 1]], rtol=1e-6)
    assert metrics["ess"] == pytest.approx(1.0)
    found, metrics = weights(poisoned, jnp.zeros((1, 3), bool))
    assert not found.any() and metrics == {"ess": 0.0, "cut": 0.0, "max": 0.0}


@pytest.mark.parametrize("knobs", [{"how": "trunc"}, {"level": "turn"}, {"low": 1.1}, {"high": 0.9}, {"low": -0.1}])
def test_misuse_names_the_knob(knobs):
    with pytest.raises(base.InputError, match="correction"):
        weights(**knobs)


@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
def test_the_weights_train_nothing(level):
    def total(logp):
        found, metrics = losses.correction_weights(logp, OFF, ONES, level=level)
        return found.sum() + sum(metrics.values())

    np.testing.assert_array_equal(jax.grad(total)(OFF + 0.1), 0.0)
