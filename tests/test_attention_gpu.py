"""The GPU's attention, interpreted and lowered on this machine: it is the reference's, and faults are caught."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from rsi_jax import base
from rsi_jax.credit import examples
from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import blocks, gpu, gpu_device, gpu_tile, reference
from rsi_jax.train import update
from tests import no_gpu, tiny
from tests.attention_oracles import any_ranges, cotangents_of, draw, pulled, rows_of


def rounded(arrays, dtype=jnp.bfloat16):
    """q, k, v and the cotangent of out in the dtype of the kernels."""
    q, k, v, ranges, (dout, dlse) = arrays
    return *(x.astype(dtype) for x in (q, k, v)), ranges, (dout.astype(dtype), dlse)


def near(got, want, *, atol):
    """Values and gradients agree to `atol` of the largest; lse, which sums in float32, to 2e-5."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    for name, (a, b) in zip(("out", "lse", "dq", "dk", "dv"), pairs, strict=False):
        error, most = np.abs(np.asarray(a, np.float32) - np.asarray(b)).max(), np.abs(b).max()
        assert error <= (2e-5 if name == "lse" else atol * most), (name, error, most)


def held(arrays, *, dtype=jnp.bfloat16, atol=0.01, interpret=None, **knobs):
    """The kernels give what the reference gives of the same rounded numbers in float32."""
    low = rounded(arrays, dtype)
    with no_gpu.interpreted(**interpret or {}):
        got = jax.block_until_ready(jax.jit(functools.partial(pulled, gpu.attention, **knobs))(*low))
    assert {x.dtype for x in (got[0][0], *got[1])} == {jnp.dtype(dtype)} and got[0][1].dtype == jnp.float32
    want = jax.jit(functools.partial(pulled, reference.attention, **knobs))(*rounded(low, jnp.float32))
    near(got, want, atol=atol)
    return got


def forward_of(arrays, **interpret):
    q, k, v, ranges, _ = rounded(arrays)
    run = functools.partial(gpu.attention, scale=0.4, soft_cap=0.0)
    with no_gpu.interpreted(**interpret):
        return jax.block_until_ready(jax.jit(run)(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), ranges))


def wanted(arrays):
    q, k, v, ranges, _ = rounded(rounded(arrays), jnp.float32)
    return reference.attention(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), ranges, scale=0.4, soft_cap=0.0)


def few(seed, queries=40, keys=40):
    return (
        *draw(seed, 1, queries, keys, 1, 1, 4),
        any_ranges(seed, 1, queries, keys),
        cotangents_of(4, 1, queries, 1, 4),
    )


# --- values and gradients ---------------------------------------------------------------------------------------------


def test_a_packed_row_with_branches_in_a_group_with_a_soft_cap():
    T, H, C = 70, 2, 6
    rows, ranges, positions = rows_of(46, 1, T)
    assert any(branch for _, branch, _, _, _ in rows[0].tokens) and rows[0].used < T
    ranges = ranges.window(positions, 7)
    (out, lse), (dq, *_) = held(
        (*draw(1, 1, T, T, H, 1, C), ranges, cotangents_of(2, 1, T, H, C)), scale=C**-0.5, soft_cap=1.5
    )
    unseen = slice(rows[0].used, None)
    assert not np.asarray(out[:, unseen]).any() and not np.asarray(dq[:, unseen]).any()


def test_more_keys_than_the_ring_holds():
    arrays = few(3, 20, 330)
    assert -(-330 // gpu_tile.BLOCK) * 2 > gpu_tile.SLOTS
    (out, lse), (want, want_lse) = forward_of(arrays), wanted(arrays)
    near((out, jnp.where(jnp.isfinite(lse), lse, 0)), (want, jnp.where(jnp.isfinite(want_lse), want_lse, 0)), atol=0.01)
    np.testing.assert_array_equal(lse == -np.inf, want_lse == -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "size", "soft_cap", "dtype"),
    [
        (150, 300, 3, 1, 6, 0.0, jnp.bfloat16),
        (300, 130, 4, 2, 70, 2.0, jnp.bfloat16),
        (140, 140, 1, 1, 130, 0.0, jnp.bfloat16),
        (60, 60, 2, 1, 200, 3.0, jnp.bfloat16),
        (130, 60, 1, 1, 8, 0.0, jnp.float16),
    ],
)
def test_any_queries_over_any_keys(queries, keys, heads, kv_heads, size, soft_cap, dtype):
    """Sizes of head that fill 64, 128, 192 and 256."""
    arrays = draw(queries, 2, queries, keys, heads, kv_heads, size), any_ranges(keys, 2, queries, keys)
    cotangents = cotangents_of(2, 2, queries, heads, size)
    held((*arrays[0], arrays[1], cotangents), dtype=dtype, scale=size**-0.5, soft_cap=soft_cap)


@pytest.mark.slow
def test_a_query_that_sees_nothing_has_no_gradient_also_where_its_cotangents_are_no_number():
    T, length = 12, np.array([5, 0])
    ranges, seen = attention_op.causal_ranges(jnp.asarray(length), T), np.arange(T) < length[:, None]
    nan = np.broadcast_to(np.where(seen, 1.0, np.nan)[..., None], (2, T, 2)).astype(np.float32)
    q, k, v = (x.astype(jnp.bfloat16) for x in draw(3, 2, T, T, 2, 1, 4))

    def run(q, k, v):
        out, pull = jax.vjp(lambda q, *kv: gpu.attention(q, *kv, ranges, scale=1.0, soft_cap=0.0), q, k, v)
        return out, pull((jnp.repeat(nan[..., None], 4, -1).astype(q.dtype), nan))

    with no_gpu.interpreted():
        (out, lse), (dq, *rest) = jax.jit(run)(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)))
    assert not np.asarray(out)[~seen].any() and (np.asarray(lse)[~seen] == -np.inf).all()
    for grad in (dq, *(jnp.swapaxes(x, 1, 2) for x in rest)):
        assert not np.asarray(grad)[~seen].any() and np.isfinite(np.asarray(grad, np.float32)).all()
        assert np.asarray(grad)[seen].any()


@pytest.mark.slow
def test_positions_beyond_the_range_of_16_bits():
    Q, S = 10, 2**16 + 300
    query = np.arange(S - Q, S, dtype=np.int32)[None]
    ranges = attention_op.Ranges(0 * query + 5, 0 * query + 9, query - 200, query + 1)
    arrays = *draw(1, 1, Q, S, 1, 1, 2), ranges, None
    low = [x.astype(jnp.bfloat16) for x in arrays[:3]]
    (out, lse), (want, want_lse) = forward_of((*low, ranges, (low[0], None))), wanted((*low, ranges, (low[0], None)))
    near((out, lse), (want, want_lse), atol=0.01)


@pytest.mark.slow
def test_a_training_step_is_that_of_the_reference():
    """Loss and gradients of a batch in bfloat16; the pullback of the states is mapped over the terms of the loss."""
    rollout = examples.random_rollout(0, B=1, T=20, turns=2)
    credit = base.Credit(rollout.logp_BT + 1.0, rollout.value_BT)
    weights = tiny.params(tiny.config(value_head=True))

    def step(implementation):
        config = tiny.config(window=7, value_head=True, attention=implementation, dtype="bfloat16")
        fn = functools.partial(update.gradients, weights, None, config, o=update.Objective())
        return jax.jit(fn)(rollout, credit)[:2]

    want = step("reference")
    with no_gpu.interpreted():
        got = step("mosaic_gpu")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max() <= 0.03 * np.abs(b).max() + 1e-3


def test_rows_without_keys_or_queries():
    for queries, keys in ((3, 0), (0, 3)):
        zero = np.zeros((2, queries), np.int32)
        ranges = attention_op.Ranges(zero, zero, zero, zero)
        knobs = {"scale": 1.0, "implementation": "mosaic_gpu", "return_lse": True}
        low = [x.astype(jnp.bfloat16) for x in draw(0, 2, queries, keys, 2, 1, 4)]
        out, lse = attention_op.attention(*low, ranges, **knobs)
        assert out.shape == (2, queries, 2, 4) and not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()


# --- under watch, and broken ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_race_and_no_read_of_what_was_not_written():
    held(few(1, 130, 300), interpret={"detect_races": True}, scale=0.4, soft_cap=2.0)


def test_a_wait_that_is_left_out_is_caught(monkeypatch):
    monkeypatch.setattr(gpu_tile.Ring, "take", lambda self, item: self.tiles.at[self.slot(item)])
    with pytest.raises(Exception, match="(?i)race"):
        forward_of(few(1), detect_races=True)


@pytest.mark.slow
def test_a_tile_whose_room_is_given_back_before_it_is_read_is_caught(monkeypatch):
    take = gpu_tile.Ring.take

    def early(self, item):
        tile = take(self, item)
        plgpu.barrier_arrive(self.used.at[self.slot(item)])
        return tile

    monkeypatch.setattr(gpu_tile.Ring, "take", early)
    monkeypatch.setattr(gpu_tile.Ring, "release", lambda *_: None)
    with pytest.raises(Exception, match="(?i)race"):
        forward_of(few(1, 20, 330), detect_races=True)


def test_a_mask_too_wide_is_caught(monkeypatch):
    monkeypatch.setattr(blocks, "inside", lambda *_: jnp.bool_(True))
    assert np.abs(np.asarray(forward_of(few(1))[0], np.float32) - wanted(few(1))[0]).max() > 0.1


# --- lowered, and refused ---------------------------------------------------------------------------------------------


def specs(tokens, *, heads=8, kv_heads=2, size=128, dtype=jnp.bfloat16, rows=1):
    """q, k, v, ranges and the cotangents of out and lse."""
    q = jax.ShapeDtypeStruct((rows, tokens, heads, size), dtype)
    k = jax.ShapeDtypeStruct((rows, tokens, kv_heads, size), dtype)
    ranges = [jax.ShapeDtypeStruct((rows, tokens), jnp.int32)] * 4
    return q, k, k, ranges, (q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32))


@pytest.mark.parametrize("kind", [no_gpu.H100, "NVIDIA H200"])
def test_both_passes_lower_for_every_kind(kind):
    text = no_gpu.lowered(kind, functools.partial(pulled, gpu.attention, scale=0.1, soft_cap=0.0), *specs(1000, rows=2))
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA L40S", "TPU v5 lite", "cpu"])
def test_a_device_without_wgmma_is_refused(kind):
    with pytest.raises(ValueError, match=f"sm90.*not for '{kind}': set compute.attention=chunked"):
        gpu_device.check(kind)
    with no_gpu.traced(kind), pytest.raises(ValueError, match=f"not for '{kind}'"):
        jax.eval_shape(functools.partial(pulled, gpu.attention, scale=0.1, soft_cap=0.0), *specs(128))


def test_the_devices_with_wgmma_are_taken():
    for kind in (no_gpu.H100, "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe"):
        gpu_device.check(kind)


def test_what_the_kernels_do_not_take_is_named():
    run = functools.partial(pulled, gpu.attention, soft_cap=0.0)
    with pytest.raises(ValueError, match="one dtype of .*float32.* wgmma multiplies no float32; set dtype=bfloat16"):
        jax.eval_shape(functools.partial(run, scale=1.0), *specs(8, dtype=jnp.float32))
    with pytest.raises(ValueError, match="heads of at most 256, got 257"):
        jax.eval_shape(functools.partial(run, scale=1.0), *specs(8, size=257))
    with pytest.raises(ValueError, match="a scale > 0, got -1.0"):
        jax.eval_shape(functools.partial(run, scale=-1.0), *specs(8))


def shared_bytes(size, held_blocks, tile):
    """What a kernel holds in shared memory, and its ring."""
    held = held_blocks * gpu_tile.BLOCK
    return (held + tile * gpu_tile.ring(held, tile, size, jnp.bfloat16).tiles.shape[0]) * size * 2


@pytest.mark.parametrize("size", gpu_tile.HEAD_SIZES)
def test_tiles_are_copied_ahead_in_every_kernel(size):
    plan = gpu_tile.plan_of(size, scale=1.0, soft_cap=0.0)
    for held_blocks, tile in ((1, plan.forward), (2, plan.dq), (2, plan.dkv)):
        assert gpu_tile.ring(held_blocks * gpu_tile.BLOCK, tile, size, jnp.bfloat16).tiles.shape[0] >= 3
        assert shared_bytes(size, held_blocks, tile) <= gpu_tile.SMEM


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
def test_memory_is_linear_in_tokens(size, capsys):
    rows, temp, plan = [], {}, gpu_tile.plan_of(size, scale=1.0, soft_cap=0.0)
    shared = [shared_bytes(size, *x) // 1024 for x in ((1, plan.forward), (2, plan.dq), (2, plan.dkv))]
    for tokens in (32_768, 262_144):
        start = time.perf_counter()
        done = no_gpu.compiled(
            functools.partial(pulled, gpu.attention, scale=0.1, soft_cap=0.0), *specs(tokens, size=size)
        )
        temp[tokens] = done.memory_analysis().temp_size_in_bytes
        rows.append(f"{size:>4} {tokens:>8} {temp[tokens]:>14,} {time.perf_counter() - start:>8.1f}  {shared}")
        assert temp[tokens] <= 4 * tokens * 8 * size * 2, temp  # four arrays like q
    assert temp[262_144] <= 8 * temp[32_768] * 1.5, temp
    with capsys.disabled():
        print("\nhead   tokens     temp bytes  seconds  shared KiB (forward, dq, dkv)", *rows, sep="\n")


@pytest.mark.slow
def test_too_much_shared_memory_is_refused_by_the_compiler(monkeypatch):
    monkeypatch.setattr(gpu_tile, "SMEM", 2**20)
    monkeypatch.setattr(gpu_tile, "SLOTS", 8)
    with pytest.raises(Exception, match="smem_bytes|shared memory"):
        no_gpu.compiled(functools.partial(pulled, gpu.attention, scale=0.1, soft_cap=0.0), *specs(1024))
