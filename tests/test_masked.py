"""Masked and group statistics: hand values, numpy as oracle, and what no masked entry may change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import masked

MASK = jnp.asarray([True, False, True, True, False, True])
CLEAN = jnp.asarray([1.0, 0.0, 1.0, 1.0, 0.0, -1.0])
POISONED = jnp.asarray([1.0, jnp.nan, 1.0, 1.0, -jnp.inf, -1.0])
STATISTICS = {
    "sum": masked.sum,
    "mean": masked.mean,
    "var": masked.var,
    "whiten": lambda x, m: masked.whiten(x, m) ** 3,
    "scale": lambda x, m: masked.whiten(x, m, shift_mean=False) ** 3,
    "exp": lambda x, m: masked.apply(jnp.exp, x, m),
    "log": lambda x, m: masked.apply(jnp.log, x + 2.0, m, safe=1.0),
}


@pytest.mark.parametrize("name", STATISTICS)
def test_masked_nan_and_inf_change_neither_value_nor_gradient(name):
    def total(x):
        return jnp.sum(STATISTICS[name](x, MASK))

    value, grad = jax.jit(jax.value_and_grad(total))(CLEAN)
    poisoned_value, poisoned_grad = jax.jit(jax.value_and_grad(total))(POISONED)
    assert np.isfinite(value) and value == poisoned_value
    np.testing.assert_array_equal(grad, poisoned_grad)
    np.testing.assert_array_equal(poisoned_grad[~MASK], 0.0)


@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_of_nothing_is_zero_with_zero_gradient(name):
    nothing = jnp.zeros_like(MASK)
    value, grad = jax.value_and_grad(lambda x: jnp.sum(STATISTICS[name](x, nothing)))(POISONED)
    assert value == 0.0
    np.testing.assert_array_equal(grad, 0.0)


def test_mean_and_var_equal_numpy():
    x = jax.random.normal(jax.random.key(0), (5, 7))
    m = jax.random.bernoulli(jax.random.key(1), 0.6, (5, 7))
    kept = np.asarray(x)[np.asarray(m)]
    np.testing.assert_allclose(masked.mean(x, m), kept.mean(), rtol=1e-6)
    np.testing.assert_allclose(masked.var(x, m), kept.var(ddof=1), rtol=1e-6)
    np.testing.assert_allclose(masked.var(x, m, bessel=False), kept.var(), rtol=1e-6)
    by_row = [np.asarray(x)[b][np.asarray(m)[b]].var(ddof=1) for b in range(5)]
    np.testing.assert_allclose(masked.var(x, m, axis=1), by_row, rtol=1e-5)
    assert masked.var(jnp.asarray([3.0]), jnp.asarray([True])) == 0.0


def test_T6_whiten_centres_or_only_scales():
    x, m = jnp.asarray([1.0, 1.0, 1.0, -1.0]), jnp.ones(4, bool)
    np.testing.assert_allclose(masked.whiten(x, m), [0.5, 0.5, 0.5, -1.5], atol=1e-6)
    np.testing.assert_allclose(masked.whiten(x, m, shift_mean=False), [1.0, 1.0, 1.0, -1.0], atol=1e-6)
    y = jnp.asarray([2.0, 4.0])  # std sqrt(2): scaling does not add the mean back
    np.testing.assert_allclose(masked.whiten(y, m[:2], shift_mean=False), y / np.sqrt(2.0), rtol=1e-6)


def test_whitened_constant_is_exactly_zero_or_itself():
    x, m = jnp.full(6, 0.3), jnp.ones(6, bool)
    np.testing.assert_array_equal(masked.whiten(x, m), 0.0)
    np.testing.assert_array_equal(masked.whiten(x, m, shift_mean=False), x)


@pytest.mark.parametrize("shift_mean", [True, False])
def test_whiten_gives_zero_off_mask_and_a_finite_gradient_without_signal(shift_mean):
    x, m = jnp.asarray([3.0, 9.0, 5.0, 4.0]), jnp.asarray([True, False, True, False])
    whitened = masked.whiten(x, m, shift_mean=shift_mean)
    want = np.asarray([-1.0, 1.0] if shift_mean else [3.0, 5.0]) / np.sqrt(2.0)
    np.testing.assert_allclose(whitened, [want[0], 0.0, want[1], 0.0], rtol=1e-5)
    constant = jnp.asarray([3.0, 9.0, 3.0, 4.0])
    grad = jax.grad(lambda x: jnp.sum(masked.whiten(x, m, shift_mean=shift_mean)))(constant)
    np.testing.assert_array_equal(grad, jnp.zeros(4) if shift_mean else m.astype(jnp.float32))


@pytest.mark.parametrize("valid", [11, 3], ids=["uneven", "with shards that have no valid token"])
def test_T7_sharded_whiten_equals_unsharded(valid):
    x = jax.random.normal(jax.random.key(2), (16,)) * 3.0 + 1.0
    m = jnp.arange(16) < valid

    def one(x, m, axis_name=None):
        return masked.whiten(x, m, axis_name=axis_name), masked.whiten(x, m, shift_mean=False, axis_name=axis_name)

    @jax.jit
    def every_way(x, m):
        mapped = jax.vmap(functools.partial(one, axis_name="shards"), axis_name="shards")
        found = [one(x, m)] + [mapped(x.reshape(n, -1), m.reshape(n, -1)) for n in (2, 4, 8)]
        if jax.device_count() >= 8:
            mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:8]), ("shards",))
            spec = jax.sharding.PartitionSpec("shards")
            over_devices = functools.partial(one, axis_name="shards")
            found.append(jax.shard_map(over_devices, mesh=mesh, in_specs=(spec, spec), out_specs=(spec, spec))(x, m))
        return found

    whole, *split = every_way(x, m)
    for pair in split:
        for part, want in zip(pair, whole, strict=True):
            np.testing.assert_allclose(part.reshape(-1), want, atol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_group_statistics_equal_numpy(seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=9).astype(np.float32)
    values[rng.random(9) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    group = rng.integers(0, 4, 9).astype(np.int32)
    weight = rng.choice([0.0, 0.5, 1.0], 9).astype(np.float32)
    got = jax.jit(_all_group_statistics)(values, group, weight)
    for b in range(9):
        kept = values[(group == group[b]) & (weight > 0) & np.isfinite(values)]
        want = {
            "size": kept.size,
            "mean": kept.mean() if kept.size else 0.0,
            "std": kept.std(ddof=1) if kept.size > 1 else 0.0,
            "max": kept.max() if kept.size else 0.0,
            "spread": np.ptp(kept) if kept.size else 0.0,
        }
        for name, x in want.items():
            np.testing.assert_allclose(got[name][b], x, rtol=2e-5, atol=1e-6, err_msg=name)


def _all_group_statistics(values, group, weight):
    return {
        "size": masked.group_size(values, group, weight),
        "mean": masked.group_mean(values, group, weight),
        "std": masked.group_std(values, group, weight),
        "max": masked.group_max(values, group, weight),
        "spread": masked.group_spread(values, group, weight),
    }


def test_group_std_has_a_finite_gradient_at_zero_variance():
    def total(x):
        return jnp.sum(masked.group_std(x, jnp.zeros(3, jnp.int32), jnp.ones(3)))

    np.testing.assert_array_equal(jax.grad(total)(jnp.full(3, 0.7)), 0.0)


def test_count_groups_counts_each_group_once():
    group_B = jnp.asarray([0, 2, 2, 3, 0])
    assert masked.count_groups(jnp.asarray([True, True, True, False, False]), group_B) == 2


def test_segment_sums_leave_out_tokens_without_a_segment():
    x_BT = jnp.asarray([[1.0, 2.0, 4.0, jnp.nan], [8.0, 16.0, 32.0, 64.0]])
    segment_BT = jnp.asarray([[0, 1, 1, -1], [2, -1, 0, 0]])
    np.testing.assert_array_equal(masked.segment_sum(x_BT, segment_BT, segments=3), [[1, 6, 0], [96, 0, 8]])
    np.testing.assert_array_equal(masked.segment_mean(x_BT, segment_BT, segments=3), [[1, 3, 0], [48, 0, 8]])


def test_misuse_fails_at_trace_time():
    with pytest.raises(AssertionError):
        masked.mean(jnp.ones(3), jnp.ones(4, bool))
    with pytest.raises(AssertionError):
        masked.mean(jnp.ones(3), jnp.ones(3))
    with pytest.raises(AssertionError):
        masked.group_mean(jnp.ones(3), jnp.zeros(3), jnp.ones(3))
