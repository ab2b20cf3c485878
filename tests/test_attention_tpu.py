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
from rsi_jax.kernels.attention import blocks, reference, tpu, tpu_tile
from rsi_jax.train import update
from tests import no_tpu, tiny
from tests.attention_oracles import any_ranges, cotangents_of, draw, hold, pulled, rows_of

WATCHED = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows of 8 keys, so that few tokens make many blocks; only a real TPU needs 128 lanes."""
    monkeypatch.setattr(tpu_tile, "LANES", 8)
    monkeypatch.setattr(tpu_tile, "TILES", ((16, 8),))


@functools.cache  # a program is compiled once for all ranges of its shapes
def program(attend, scale, soft_cap):
    """(out, lse) and the gradients of both; a cotangent of what sees nothing comes as it is."""

    def fn(q, k, v, ranges, cotangents):
        found, pull = jax.vjp(
            lambda q, *kv: attend(q, *(jnp.swapaxes(x, 1, 2) for x in kv), ranges, scale=scale, soft_cap=soft_cap),
            q, k, v,
        )  # fmt: skip
        return found, pull(cotangents)

    return jax.jit(fn)


def held(arrays, *, atol=1e-5, params=no_tpu.AS_XLA, **knobs):
    """The kernels give what the reference gives."""
    with no_tpu.interpreted(params):
        got = jax.block_until_ready(program(tpu.attention, **knobs)(*arrays))
    want = jax.jit(functools.partial(pulled, reference.attention, **knobs))(*arrays)
    (out, lse), grads = got
    seen = np.isfinite(lse)
    assert (np.asarray(lse)[~seen] == -np.inf).all() and not np.asarray(out)[~seen].any()
    hold(((out, np.where(seen, lse, 0)), grads), want, atol=atol)
    return got


# --- values and gradients ---------------------------------------------------------------------------------------------


def test_rows_packed_branched_windowed_and_any(small_tiles):
    B, T, H, C = 2, 45, 4, 6
    rows, ranges, positions = rows_of(46, B, T)
    assert any(branch for row in rows for _, branch, _, _, _ in row.tokens) and any(row.used < T for row in rows)
    arrays, cotangents = draw(1, B, T, T, H, 2, C), cotangents_of(2, B, T, H, C)
    causal = attention_op.causal_ranges(jnp.asarray([T, 20]), T)
    for found in (ranges, ranges.window(positions, 4), ranges.window(positions, 11), causal, any_ranges(3, B, T, T)):
        held((*arrays, found, cotangents), scale=C**-0.5, soft_cap=0.0)
    beyond = attention_op.Ranges(*(np.asarray(x) + shift for x, shift in zip(ranges, (-5, 4, -9, 40), strict=True)))
    held((*arrays, beyond, cotangents), scale=C**-0.5, soft_cap=0.0)  # they overlap, and end where the keys do

    # A query that sees nothing has no gradient, also where its cotangents are not a number, as after a merge of parts
    # that are all empty.
    length = np.array([T, 20])
    seen = np.arange(T) < length[:, None]
    nan = np.broadcast_to(np.where(seen, 1.0, np.nan)[..., None], (B, T, H)).astype(np.float32)
    with no_tpu.interpreted():
        (out, _), grads = program(tpu.attention, C**-0.5, 0.0)(*arrays, causal, (np.repeat(nan[..., None], C, -1), nan))
    assert not np.asarray(out)[~seen].any()
    for grad in grads:
        assert not np.asarray(grad)[~seen].any() and np.isfinite(grad).all() and np.asarray(grad)[seen].any()


def test_any_queries_over_any_keys_with_a_soft_cap_in_groups_of_three(small_tiles):
    Q, S, H = 37, 21, 6
    arrays = *draw(4, 3, Q, S, H, 2, 4), any_ranges(5, 3, Q, S), cotangents_of(6, 3, Q, H, 4)
    held(arrays, scale=0.7, soft_cap=1.5)


def test_positions_beyond_the_range_of_16_bits():
    Q, S = 130, 2**16 + 300
    query = np.arange(S - Q, S, dtype=np.int32)[None]
    ranges = attention_op.Ranges(0 * query + 5, 0 * query + 9, query - 200, query + 1)
    held((*draw(1, 1, Q, S, 1, 1, 2), ranges, cotangents_of(2, 1, Q, 1, 2)), scale=0.7, soft_cap=0.0)


def test_bfloat16_stays_near_the_reference_of_the_same_rounded_inputs(small_tiles):
    T = 60
    low = [x.astype(jnp.bfloat16) for x in draw(7, 1, T, T, 2, 1, 8)]
    exact = [x.astype(jnp.float32) for x in low]
    ranges, (cotangent, on_lse) = rows_of(8, 1, T)[1], cotangents_of(9, 1, T, 2, 8)
    cotangent, knobs = cotangent.astype(jnp.bfloat16), {"scale": 0.35, "soft_cap": 0.0}
    with no_tpu.interpreted():
        (out, lse), grads = program(tpu.attention, **knobs)(*low, ranges, (cotangent, on_lse))
    want = jax.jit(functools.partial(pulled, reference.attention, **knobs))(
        *exact, ranges, (cotangent.astype(jnp.float32), on_lse)
    )
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32 and {g.dtype for g in grads} == {out.dtype}
    np.testing.assert_allclose(np.where(np.isfinite(lse), lse, 0), want[0][1], atol=2e-5)  # sums in float32
    for got, exact in zip((out, *grads), (want[0][0], *want[1]), strict=True):
        assert np.abs(np.asarray(got, np.float32) - np.asarray(exact)).max() < 0.02 * np.abs(exact).max()


def test_rows_without_keys_or_queries():
    for queries, keys in ((3, 0), (0, 3)):
        zero = np.zeros((2, queries), np.int32)
        ranges = attention_op.Ranges(zero, zero, zero, zero)
        knobs = {"scale": 1.0, "implementation": "tpu", "return_lse": True}
        out, lse = attention_op.attention(*draw(0, 2, queries, keys, 2, 1, 4), ranges, **knobs)
        assert out.shape == (2, queries, 2, 4) and not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()


def test_a_training_step_is_that_of_the_reference(small_tiles):
    """Loss and gradients of a batch; the pullback of the states is mapped over the terms of the loss."""
    rollout = examples.random_rollout(0, B=2, T=20, turns=2)
    credit = base.Credit(rollout.logp_BT + 1.0, rollout.value_BT)
    weights = tiny.params(tiny.config(value_head=True))

    def step(implementation):
        config = tiny.config(window=7, value_head=True, attention=implementation)
        fn = functools.partial(update.gradients, weights, None, config, o=update.Objective())
        return jax.jit(fn)(rollout, credit)[:2]

    want = step("reference")
    with no_tpu.interpreted():
        tiny.assert_close(step("tpu"), want, rtol=1e-4, atol=1e-4)
    tiny.assert_close(step("chunked"), want, rtol=1e-4, atol=1e-4)
    assert np.abs(tiny.leaves(want[0][0])["layers/0/attention/k"]).max() > 1e-3


# --- under watch, and broken ------------------------------------------------------------------------------------------


def watched():
    Q, S = 130, 140
    return *draw(1, 1, Q, S, 1, 1, 4), any_ranges(3, 1, Q, S), cotangents_of(4, 1, Q, 1, 4)


def test_no_race_no_read_of_what_was_not_written_and_none_out_of_bounds(monkeypatch):
    monkeypatch.setattr(tpu_tile, "TILES", ((128, 128),))
    held(watched(), params=WATCHED, scale=0.4, soft_cap=2.0)


def forward_of(arrays, params):
    with no_tpu.interpreted(params):
        q, k, v, ranges, _ = arrays
        keys_first = [jnp.swapaxes(x, 1, 2) for x in (k, v)]
        out = jax.jit(functools.partial(tpu.attention, scale=0.4, soft_cap=0.0))(q, *keys_first, ranges)[0]
        return np.asarray(out)


def test_a_sum_that_never_starts_is_caught(monkeypatch):
    """What is read unwritten is no number under watch."""
    monkeypatch.setattr(tpu_tile, "TILES", ((128, 128),))
    step_of = blocks.step_of
    monkeypatch.setattr(blocks, "step_of", lambda *x: step_of(*x)._replace(first=False))
    assert np.isnan(forward_of(watched(), WATCHED)).any()


def test_a_block_beyond_the_last_is_caught(monkeypatch):
    monkeypatch.setattr(tpu_tile, "TILES", ((128, 128),))
    step_of = blocks.step_of
    monkeypatch.setattr(blocks, "step_of", lambda *x: (s := step_of(*x))._replace(other=s.other + 1))
    with pytest.raises(Exception, match="Out-of-bounds"):
        forward_of(watched(), WATCHED)


@pytest.mark.parametrize(
    ("name", "fault"),
    [("sees_all", lambda *_: jnp.bool_(True)), ("sees", lambda _, block, other: other != block)],
)
def test_a_mask_too_wide_and_a_skipped_block_are_caught(small_tiles, monkeypatch, name, fault):
    arrays = *draw(1, 1, 40, 40, 1, 1, 4), rows_of(5, 1, 40)[1], cotangents_of(4, 1, 40, 1, 4)
    monkeypatch.setattr(blocks, name, fault)
    q, k, v, ranges, _ = arrays
    want = reference.attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), ranges, scale=0.4, soft_cap=0.0)[0]
    assert np.abs(forward_of(arrays, no_tpu.AS_XLA) - want).max() > 1e-2
