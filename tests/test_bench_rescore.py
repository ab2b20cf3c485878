"""The benchmarks of re-reading and of one long update: what they compare is the same, and what they count is right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench, bench_context, bench_rescore
from rsi_jax import base
from rsi_jax.kernels import attention
from rsi_jax.model import transformer


def test_a_long_rollout_has_its_turns_where_its_views_are():
    rollout = bench.rollout(1000, 5, vocab=50, hint=3, span=20)
    s, v = rollout.segments, rollout.views
    assert s.start_BS[0, 0] == 0 and (s.start_BS[0, 1:] == (s.start_BS + s.length_BS)[0, :-1]).all()
    assert (s.start_BS + s.length_BS)[0, -1] == 1000
    acted = s.kind_BS[0] == base.ACTION
    np.testing.assert_array_equal(s.start_BS[0, acted], v.span_start_K)
    assert (s.length_BS[0, acted] == 20).all() and len(set(np.diff(v.span_start_K))) <= 2
    assert np.asarray(rollout.mask_BT).sum() == 100


def test_flops_are_those_of_the_compiled_products():
    config, T = dataclasses.replace(bench_rescore.model_of(64), attention="reference"), 48
    row = jax.ShapeDtypeStruct((1, T), jnp.int32)
    rows = transformer.Rows(row, row, attention.Ranges(row, row, row, row))
    params = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    compiled = jax.jit(transformer.hidden_states, static_argnums=1).lower(params, config, rows).compile()
    hidden = (
        config.layers * 4 * config.heads * config.head_size * T * (T - 1) / 2
    )  # the reference hides, but multiplies
    assert 1.0 <= compiled.cost_analysis()["flops"] / (bench_rescore.flops(config, T, 0) + hidden) < 1.1
    a, b = bench_rescore.flops(config, T, 0), bench_rescore.flops(config, 30, 0)
    np.testing.assert_allclose(b + bench_rescore.flops(config, T - 30, 30), a)


def test_packed_per_hint_and_cached_states_agree():
    row = bench_rescore.measure_row(tokens=320, hints=2, width=64, every=1, repeats=1)
    assert row["max_abs_diff"] < 2e-5
    assert row["speedup"] > 0 and row["share"] == row["speedup"] / row["flop_bound"]
    trunk, branches, each_K, behind_K = bench_rescore.bound(bench_rescore.model_of(64), 320, 2)
    assert row["flop_bound"] == (trunk + each_K.sum()) / (trunk + branches) and branches == behind_K.sum()


def test_the_bounds_are_those_that_were_estimated():
    for tokens, hints, low, high in ((8192, 32, 7, 9), (32768, 64, 16, 19)):
        trunk, branches, each_K, _ = bench_rescore.bound(bench_rescore.model_of(256), tokens, hints)
        assert low < (trunk + each_K.sum()) / (trunk + branches) < high


def test_a_line_is_fitted_and_its_error_found():
    tokens = np.array([1.0, 2.0, 4.0]) * 1e5
    line = bench_context.fit(tokens, 7e4 * tokens + bench_context.GIB)
    np.testing.assert_allclose([line["bytes_per_token"], line["intercept_gib"]], [7e4, 1.0], rtol=1e-6)
    assert line["error"] < 1e-6
    assert bench_context.fit(tokens, tokens**2)["error"] > 0.1


def test_a_long_update_is_made_and_measured():
    row = bench_context.run(1024, 3, 64, "attention")
    assert row["hints"] == 3 and row["peak_gib"] > 0 and row["temp_gib"] > 0
    assert abs(row["metrics/ratio_max"] - 1) < 1e-4 and row["metrics/divergence"] > 0


def test_the_model_of_the_long_update_has_global_and_windowed_layers():
    config, _, _ = bench_context.program(64, "layer")
    assert [config.windowed(layer) for layer in range(config.layers)] == [True, False, True, False]
    assert isinstance(config, transformer.Config) and config.heads == 2 and config.head_size == 64
