"""The recursions over 131,072 tokens are those of a plain loop in float64, and so are the loops to time them by."""

import jax
import numpy as np
import pytest

from experiments import bench_returns
from rsi_jax import returns

T = 131_072


def in_float64(reward_T, discount_T, value_T, mask_T, lambda_):
    """Loops backwards over the tokens that exist: returns, lambda-returns and GAE by name, 0 off-mask."""
    found = {name: np.zeros(len(reward_T)) for name in ("returns", "lambda-returns", "gae")}
    total = target = adv = following = 0.0
    for t in np.flatnonzero(mask_T)[::-1]:
        r, g, v = float(reward_T[t]), float(discount_T[t]), float(value_T[t])
        total = r + g * total
        target = r + g * ((1 - lambda_) * following + lambda_ * target)
        adv = r + g * following - v + g * lambda_ * adv
        following = v
        found["returns"][t], found["lambda-returns"][t], found["gae"][t] = total, target, adv
    return found


def assert_close(found, want, name):
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.max(np.abs(want)), err_msg=name)


def test_long_recursions_equal_a_loop_in_float64():
    columns = bench_returns.trajectory(T)
    want = in_float64(*columns, bench_returns.LAMBDA)
    for functions in (bench_returns.scans(), bench_returns.loops()):
        for name, function in functions.items():
            assert_close(jax.jit(function)(*columns), want[name], name)


@pytest.mark.parametrize("lambda_", [1.0, 0.95])
def test_undiscounted_sums_over_a_long_trajectory_lose_nothing(lambda_):
    """One reward at the very end reaches the first token whole; the sums of the others stay within 1e-5."""
    reward_T, _, value_T, mask_T = bench_returns.trajectory(T, seed=1)
    discount_T = np.ones(T, np.float32)
    want = in_float64(reward_T, discount_T, value_T, mask_T, lambda_)
    gae = jax.jit(lambda *x: returns.gae(*x, lambda_=lambda_))
    assert_close(gae(reward_T, discount_T, value_T, mask_T), want["gae"], "gae")
    end_T = np.zeros(T, np.float32)
    end_T[np.flatnonzero(mask_T)[-1]] = 1.0
    togo_T = np.asarray(jax.jit(returns.discounted_returns)(end_T, discount_T, mask_T))
    np.testing.assert_array_equal(togo_T, mask_T.astype(np.float32))


def test_the_trajectory_is_half_observations():
    assert 0.49 < bench_returns.trajectory(T)[3].mean() < 0.51
