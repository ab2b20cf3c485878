"""The TPU's attention without a TPU: what a walk visits, what it lowers and compiles to, and what is refused."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import api, blocks, tpu, tpu_tile
from tests import no_tpu
from tests.attention_oracles import any_ranges, draw, rows_of


def specs(tokens, *, heads=8, kv_heads=2, size=128, dtype=jnp.bfloat16, rows=1):
    """q, k, v, ranges and the cotangents of out and lse."""
    q = jax.ShapeDtypeStruct((rows, tokens, heads, size), dtype)
    k = jax.ShapeDtypeStruct((rows, kv_heads, tokens, size), dtype)
    ranges = [jax.ShapeDtypeStruct((rows, tokens), jnp.int32)] * 4
    return q, k, k, ranges, q, jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)


def both_passes(q, k, v, ranges, dout, dlse):
    fn = functools.partial(tpu.attention, ranges=ranges, scale=0.1, soft_cap=0.0)
    out, pull = jax.vjp(fn, q, k, v)
    return out, pull((dout, dlse))


# --- the walk ---------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def walks(ranges, block, keys, key_block):
    """The summary, and the walks over the query blocks and over the key blocks."""
    clipped = [jnp.clip(x, 0, keys).reshape(x.shape[0], -1, block) for x in ranges]
    summary = blocks.summary(clipped, keys, key_block)
    bounds = [summary[..., i] for i in range(4)], blocks.turned(summary, -(-keys // key_block))
    return summary, *(blocks.walk(x) for x in bounds)


step_at = jax.jit(jax.vmap(blocks.step_of, (None, 0, 0)))


def steps_of(table, most, bound):
    """Takes `bound` steps of each program: [(block, other), ...] of those that visit, and the steps of the grid."""
    programs = table.size // (2 * blocks.ENTRY)
    step = jax.tree.map(np.asarray, step_at(table, *np.indices((programs, bound)).reshape(2, -1)))
    for flag in (step.first, step.last):  # every block starts once and is written once
        assert sorted(step.block[flag]) == list(range(step.block.max() + 1))
    assert most <= bound
    visited = zip(step.block[step.visits].tolist(), step.other[step.visits].tolist(), strict=True)
    return list(visited), programs * int(most)


@pytest.mark.parametrize(("queries", "keys", "block", "key_block"), [(24, 50, 4, 7), (24, 9, 8, 4)])
def test_every_visible_pair_is_visited_once_in_both_directions(queries, keys, block, key_block):
    N, M = queries // block, -(-keys // key_block)
    sees, sees_all = (jax.jit(jax.vmap(fn, (None, 0, 0))) for fn in (blocks.sees, blocks.sees_all))
    for seed in range(6):
        ranges = any_ranges(seed, 2, queries, keys) if seed % 2 else rows_of(seed, 2, queries)[1]
        mask = np.array(api.visible(attention_op.Ranges(*ranges), M * key_block))
        mask[..., keys:] = False
        mask = mask.reshape(2 * N, block, M, key_block)
        summary, rows, turned = walks(ranges, block, keys, key_block)
        seen = set(zip(*(x.tolist() for x in mask.any((1, 3)).nonzero()), strict=True))
        visited, _ = steps_of(*rows, 2 * M + 2)
        assert len(set(visited)) == len(visited) and seen <= set(visited)
        found, _ = steps_of(*turned, 2 * N + 2)
        assert len(set(found)) == len(found)
        assert seen <= {(at // M * N + other, at % M) for at, other in found}
        entry, m = (x.reshape(-1) for x in np.indices((2 * N, M)))
        some, whole = (fn(summary.reshape(-1), entry, m).reshape(2 * N, M) for fn in (sees, sees_all))
        assert (some >= mask.any((1, 3))).all() and (whole <= mask.all((1, 3))).all()


def test_causal_rows_take_as_many_steps_as_visits_and_windows_few():
    T, block = 4096, 64
    causal, n = attention_op.causal_ranges(jnp.asarray([T]), T), T // block
    summary, *both = walks(causal, block, T, block)
    for walk in both:
        visited, steps = steps_of(*walk, n + 2)
        assert len(visited) == steps == n * (n + 1) // 2
    inner = np.asarray(summary)[0, :, 6:]
    np.testing.assert_array_equal(inner, [[0, i] for i in range(n)])  # below the diagonal no tile takes a mask
    for walk in walks(causal.window(jnp.arange(T)[None], 128), block, T, block)[1:]:
        visited, steps = steps_of(*walk, n + 2)
        assert len(visited) <= steps <= n * 3


# --- lowered, and refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", no_tpu.KINDS)
def test_both_passes_lower_for_every_kind(kind):
    text = no_tpu.lowered(kind, both_passes, *specs(1000, rows=2))
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3


def test_tiles_grow_with_the_memory_of_the_device_and_shrink_with_the_row():
    def plan(kind, **changes):
        sizes = dict(queries=2**15, group=4, keys=2**15, head_size=128, dtype=jnp.bfloat16, scale=1.0, soft_cap=0.0)
        with no_tpu.traced(kind):
            return tpu_tile.plan_of(**(sizes | changes))

    assert plan("v5e")[2:4] == (1024, 1024) and plan("v5e").vmem == 64 * tpu_tile.MIB
    assert plan("v5e", head_size=256)[2:4] == (1024, 1024) and plan("v5p", head_size=256)[2:4] == (512, 1024)
    assert plan("v5e", head_size=512, dtype=jnp.float32)[2] < 1024
    assert plan("v5e", queries=130, keys=1100)[2:4] == (4 * 256, 640)
    assert plan("v5e", group=16)[2] == 16 * 128


def test_what_the_kernels_do_not_take_is_named():
    q, k, v = draw(1, 1, 8, 8, 2, 1, 4)
    ranges = attention_op.causal_ranges(jnp.asarray([8]), 8)
    run = functools.partial(attention_op.attention, scale=1.0, implementation="tpu")
    with pytest.raises(ValueError, match="no TPU: set compute.attention=chunked"):
        jax.jit(run)(q, k, v, ranges)
    with no_tpu.traced():
        with pytest.raises(ValueError, match="one dtype of .* float16, float32, float32: set model.dtype"):
            jax.eval_shape(run, q.astype(jnp.float16), k, v, ranges)
        with pytest.raises(ValueError, match="no tile for heads of size 32768 in groups of 8"):
            jax.eval_shape(both_passes, *specs(128, kv_heads=1, size=2**15))
        with pytest.raises(ValueError, match="scalar memory holds .*rl.micro_batch"):
            jax.eval_shape(both_passes, *specs(2**20, rows=16))


def test_a_tile_that_no_tpu_has_is_refused_at_lowering(monkeypatch):
    monkeypatch.setattr(tpu_tile, "LANES", 100)
    monkeypatch.setattr(tpu_tile, "TILES", ((100, 100),))
    with pytest.raises(ValueError, match="divisible by 8 and 128"):
        no_tpu.lowered("v5e", both_passes, *specs(1000))


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_is_linear_in_tokens_on_devices(capsys):
    rows = []
    for kind in no_tpu.TOPOLOGIES:
        temp = {}
        for tokens in (32_768, 262_144):
            start = time.perf_counter()
            memory = no_tpu.compiled(kind, both_passes, *specs(tokens)).memory_analysis()
            temp[tokens] = memory.temp_size_in_bytes
            rows.append(f"{kind:>6} {tokens:>8} {temp[tokens]:>14,} {time.perf_counter() - start:>8.1f}")
        least = 262_144 * 8 * 128 * 2  # of one array like q
        assert temp[262_144] <= 6 * least, temp
        assert temp[262_144] <= 8 * temp[32_768] * 1.5, temp
    with capsys.disabled():
        print("\ndevice   tokens     temp bytes  seconds", *rows, sep="\n")


@pytest.mark.slow
def test_too_much_memory_is_refused_by_the_compiler(monkeypatch):
    monkeypatch.setattr(tpu_tile, "plan_of", lambda *_, **__: tpu_tile.Plan(1.0, 0.0, 1024, 1024, 4 * tpu_tile.MIB))
    with pytest.raises(jax.errors.JaxRuntimeError, match="(?i)vmem"):
        no_tpu.compiled("v5e", both_passes, *specs(4096))
