"""The TPU's attention, interpreted on this machine: values and gradients are the reference's, and faults are caught."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rsi_jax import base
from rsi_jax.credit import examples
from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import api, blocks, reference, tpu, tpu_tile
from rsi_jax.train import update
from tests import no_tpu, tiny
from tests.attention_oracles import any_ranges, cotangents_of, draw, hold, narrowed, pulled, rows_of

WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows of 8 keys, so that few tokens make many blocks; only a real TPU needs 128 lanes."""
    monkeypatch.setattr(tpu_tile, "LANES", 8)
    monkeypatch.setattr(tpu_tile, "TILES", ((16, 8),))


def run(attend, *arrays, **knobs):
    return jax.jit(functools.partial(pulled, attend, **knobs))(*arrays)


def held(arrays, *, atol=1e-5, params=no_tpu.AS_XLA, **knobs):
    """The kernels give what the reference gives: (out, lse) and the gradients of both."""
    with no_tpu.interpreted(params):
        got = jax.block_until_ready(run(tpu.attention, *arrays, **knobs))
    hold(got, run(reference.attention, *arrays, **knobs), atol=atol)


# --- values and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "soft_cap", "window"),
    [(45, 4, 2, 6, 0.0, 4), (53, 3, 1, 5, 2.0, None), (33, 2, 2, 4, 0.0, 11)],
)
def test_packed_rows_with_branches(small_tiles, tokens, heads, kv_heads, size, soft_cap, window):
    _, ranges, positions = rows_of(tokens + 1, 2, tokens)
    ranges, cotangents = narrowed(ranges, positions, window), cotangents_of(1, 2, tokens, heads, size)
    arrays = *draw(tokens, 2, tokens, tokens, heads, kv_heads, size), ranges, cotangents
    held(arrays, scale=size**-0.5, soft_cap=soft_cap)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "soft_cap"),
    [(7, 50, 2, 1, 0.0), (50, 7, 4, 2, 0.0), (37, 41, 6, 2, 1.5), (1, 100, 1, 1, 0.0)],
)
def test_any_ranges_of_any_queries_over_any_keys(small_tiles, queries, keys, heads, kv_heads, soft_cap):
    arrays = *draw(queries, 3, queries, keys, heads, kv_heads, 4), any_ranges(keys, 3, queries, keys)
    held((*arrays, cotangents_of(2, 3, queries, heads, 4)), scale=0.7, soft_cap=soft_cap)


def test_a_query_that_sees_nothing_gives_exactly_zero_and_no_gradient(small_tiles):
    """Also where its cotangents are not a number, as they are after a merge of parts that are all empty."""
    q, k, v = draw(3, 2, 21, 21, 2, 1, 4, spread=1e3)
    length = np.array([14, 0])
    ranges, seen = attention_op.causal_ranges(jnp.asarray(length), 21), np.arange(21) < length[:, None]
    cotangent = np.broadcast_to(np.where(seen, 1.0, np.nan)[..., None], (2, 21, 2)).astype(np.float32)

    def both(q, k, v):
        fn = functools.partial(tpu.attention, ranges=ranges, scale=1.0, soft_cap=0.0)
        found, pull = jax.vjp(fn, q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)))
        dq, *rest = pull((np.repeat(cotangent[..., None], 4, -1), cotangent))
        return found, (dq, *(jnp.swapaxes(x, 1, 2) for x in rest))

    with no_tpu.interpreted():
        (out, lse), grads = jax.jit(both)(q, k, v)
    assert not np.asarray(out)[~seen].any() and (np.asarray(lse)[~seen] == -np.inf).all()
    assert np.isfinite(out).all() and np.isfinite(np.asarray(lse)[seen]).all()
    for grad in grads:
        assert not np.asarray(grad)[~seen].any()
        assert np.isfinite(grad).all() and np.asarray(grad)[seen].any()


def test_bfloat16_stays_near_the_reference_of_the_same_rounded_inputs(small_tiles):
    T = 60
    low = [x.astype(jnp.bfloat16) for x in draw(7, 1, T, T, 2, 1, 8)]
    exact = [x.astype(jnp.float32) for x in low]
    ranges, (cotangent, on_lse) = rows_of(8, 1, T)[1], cotangents_of(9, 1, T, 2, 8)
    cotangent = cotangent.astype(jnp.bfloat16)
    knobs = {"scale": 0.35, "soft_cap": 0.0}
    with no_tpu.interpreted():
        (out, lse), grads = run(tpu.attention, *low, ranges, (cotangent, on_lse), **knobs)
    want = run(reference.attention, *exact, ranges, (cotangent.astype(jnp.float32), on_lse), **knobs)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32 and {g.dtype for g in grads} == {out.dtype}
    np.testing.assert_allclose(lse, want[0][1], atol=2e-5)  # sums in float32
    for got, exact in zip((out, *grads), (want[0][0], *want[1]), strict=True):
        assert np.abs(np.asarray(got, np.float32) - np.asarray(exact)).max() < 0.02 * np.abs(exact).max()


def test_positions_beyond_the_range_of_16_bits():
    Q, S = 130, 2**16 + 300
    query = np.arange(S - Q, S, dtype=np.int32)[None]
    ranges = attention_op.Ranges(0 * query + 5, 0 * query + 9, query - 200, query + 1)
    held((*draw(1, 1, Q, S, 1, 1, 2), ranges, cotangents_of(2, 1, Q, 1, 2)), scale=0.7, soft_cap=0.0)


def test_several_cotangents_are_pulled_back_by_vmap(small_tiles):
    q, k, v = draw(5, 2, 20, 20, 2, 1, 4)
    ranges, many = any_ranges(6, 2, 20, 20), jnp.stack([cotangents_of(i, 2, 20, 2, 4)[0] for i in (1, 2)])

    def pull_all(attend):
        keys_first = [jnp.swapaxes(x, 1, 2) for x in (k, v)]
        pull = jax.vjp(lambda *x: attend(*x, ranges, scale=0.5, soft_cap=0.0)[0], q, *keys_first)[1]
        return jax.vmap(pull)(many)

    with no_tpu.interpreted():
        got = jax.jit(functools.partial(pull_all, tpu.attention))()
    for a, b in zip(got, jax.jit(functools.partial(pull_all, reference.attention))(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_without_keys_or_queries():
    for queries, keys in ((3, 0), (0, 3)):
        zero = np.zeros((2, queries), np.int32)
        ranges = attention_op.Ranges(zero, zero, zero, zero)
        knobs = {"scale": 1.0, "implementation": "tpu", "return_lse": True}
        with no_tpu.traced():
            out, lse = attention_op.attention(*draw(0, 2, queries, keys, 2, 1, 4), ranges, **knobs)
        assert out.shape == (2, queries, 2, 4) and not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()


@pytest.mark.parametrize("implementation", ["chunked", "tpu"])
def test_a_training_step_is_that_of_the_reference(small_tiles, implementation):
    """Loss and gradients of a batch with live branches, packed beside their trunks."""
    config = tiny.config(window=7, global_every=2, layers=2)
    rollout = examples.random_rollout(0, B=2, T=24, turns=3)
    views = examples.random_views(0, rollout, per_rollout=2).replace(branch=32)
    credit = base.Credit(rollout.logp_BT + 1.0, rollout.value_BT, views.weight_K, base.Divergence("forward_kl"))
    objective = update.Objective(span=4, teacher="live")

    def step(config):
        fn = functools.partial(update.gradients, tiny.params(config), None, config)
        return jax.jit(fn, static_argnums=2)(rollout.replace(views=views), credit, objective)[:2]

    with no_tpu.interpreted():
        got = step(tiny.config(window=7, global_every=2, layers=2, attention=implementation))
    want = step(tiny.config(window=7, global_every=2, layers=2, attention="reference"))
    assert config.windowed(0) and not config.windowed(1) and any(np.abs(x).max() > 1e-3 for x in tiny.leaves(want[0]).values())
    tiny.assert_close(got, want, rtol=1e-4, atol=1e-4)
