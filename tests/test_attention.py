"""The attention op against its definition in float64, and the laws of the chunked one: any ranges, linear memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import api, chunked, reference
from tests.attention_oracles import (
    FAR,
    any_ranges,
    both,
    cotangents_of,
    definition,
    draw,
    hold,
    narrowed,
    pick,
    pulled,
    rows_of,
)

# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
def test_windows_narrow_packed_and_branched_rows_to_what_a_query_may_see(window):
    rows, ranges, positions = rows_of(window or 0, 4, 45)
    assert any(branch for row in rows for _, branch, _, _, _ in row.tokens) and any(row.used < 45 for row in rows)
    want = np.stack([row.mask(window or FAR) for row in rows])
    np.testing.assert_array_equal(api.visible(narrowed(ranges, positions, window), 45), want)
    alone = np.flatnonzero(
        [branch for _, branch, _, _, _ in rows[0].tokens]
    )  # branch queries over trunk ++ branch keys
    got = api.visible(narrowed(pick(ranges, alone), positions[:, alone], window), 45)
    np.testing.assert_array_equal(got, want[:, alone])


def test_causal_ranges_see_the_past_of_their_row_and_padding_sees_nothing():
    got = np.asarray(api.visible(attention_op.causal_ranges(jnp.asarray([3, 0, 5]), 5), 5))
    for row, length in enumerate((3, 0, 5)):
        want = np.tril(np.ones((5, 5), bool)) & (np.arange(5)[:, None] < length)
        np.testing.assert_array_equal(got[row], want)


@pytest.mark.parametrize(("soft_cap", "heads", "kv_heads"), [(0.0, 2, 2), (2.0, 6, 2), (0.0, 3, 1)])
def test_the_reference_is_the_definition(soft_cap, heads, kv_heads):
    q, k, v = draw(heads, 2, 9, 31, heads, kv_heads, 5, spread=2.0)
    ranges = any_ranges(heads, 2, 9, 31)
    knobs = {"scale": 0.4, "soft_cap": soft_cap}
    run = functools.partial(attention_op.attention, implementation="reference", return_lse=True, **knobs)
    out, lse = jax.jit(run)(q, k, v, ranges)
    mask = np.asarray(api.visible(ranges, 31))
    for b in range(2):
        want_out, want_lse = definition(q[b], k[b], v[b], mask[b], **knobs)
        np.testing.assert_allclose(out[b], want_out, atol=2e-6)
        np.testing.assert_allclose(lse[b], want_lse, atol=2e-6)


# --- chunked is the reference -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "soft_cap", "window", "blocks"),
    [
        (1, 1, 1, 2, 0.0, None, (128, 128)),
        (45, 4, 2, 6, 0.0, 4, (16, 8)),
        (53, 3, 1, 5, 2.0, None, (8, 16)),
        (131, 2, 2, 4, 0.0, 40, (128, 128)),
    ],
)
def test_packed_rows_with_branches(tokens, heads, kv_heads, size, soft_cap, window, blocks):
    q, k, v = draw(tokens, 2, tokens, tokens, heads, kv_heads, size)
    rows, ranges, positions = rows_of(tokens + 1, 2, tokens)
    ranges = narrowed(ranges, positions, window)
    knobs = {"scale": size**-0.5, "soft_cap": soft_cap}
    run = jax.jit(functools.partial(both, blocks=blocks, **knobs))
    want, got = run(q, k, v, ranges, cotangents_of(1, 2, tokens, heads, size))
    hold(got, want)
    for b in range(2):
        exact, _ = definition(q[b], k[b], v[b], rows[b].mask(window or FAR), **knobs)
        np.testing.assert_allclose(got[0][0][b], exact, atol=2e-6)


@pytest.mark.parametrize(
    ("queries", "keys", "heads", "kv_heads", "soft_cap", "blocks"),
    [
        (7, 50, 2, 1, 0.0, (3, 4)),
        (50, 7, 4, 2, 0.0, (8, 5)),
        (37, 41, 3, 3, 1.5, (37, 1)),
        (41, 37, 6, 2, 0.0, (1, 37)),
        (1, 200, 1, 1, 0.0, (128, 128)),
        (150, 300, 2, 1, 3.0, (128, 128)),
    ],
)
def test_any_ranges_of_any_queries_over_any_keys(queries, keys, heads, kv_heads, soft_cap, blocks):
    q, k, v = draw(queries, 3, queries, keys, heads, kv_heads, 4)
    ranges = any_ranges(keys, 3, queries, keys)
    run = jax.jit(functools.partial(both, blocks=blocks, scale=0.7, soft_cap=soft_cap))
    want, got = run(q, k, v, ranges, cotangents_of(2, 3, queries, heads, 4))
    hold(got, want)


def test_keys_in_both_ranges_count_once_and_ranges_beyond_the_keys_end_there():
    q, k, v = draw(4, 1, 12, 20, 2, 2, 4)
    lo = np.arange(12, dtype=np.int32)[None]
    ranges = attention_op.Ranges(lo - 5, lo + 4, lo, lo + 30)
    run = jax.jit(functools.partial(both, blocks=(5, 6), scale=0.5, soft_cap=0.0))
    want, got = run(q, k, v, ranges, cotangents_of(3, 1, 12, 2, 4))
    hold(got, want)
    mask = np.arange(20) >= lo[0][:, None] - 5
    np.testing.assert_allclose(got[0][1][0], definition(q[0], k[0], v[0], mask, scale=0.5)[1], atol=2e-6)


@pytest.mark.parametrize("blocks", [(4, 4), (128, 128)])
def test_a_query_that_sees_nothing_gives_exactly_zero_and_no_gradient(blocks):
    """Also where its cotangents are not a number, as they are after a merge of parts that are all empty."""
    q, k, v = draw(3, 2, 7, 7, 2, 1, 4, spread=1e3)
    length = np.array([4, 0])
    ranges = attention_op.causal_ranges(jnp.asarray(length), 7)
    seen = np.arange(7) < length[:, None]
    cotangents = np.broadcast_to(np.where(seen, 1.0, np.nan)[..., None], (2, 7, 2)).astype(np.float32)
    tiled = functools.partial(chunked.attention, query_block=blocks[0], key_block=blocks[1])

    def run(q, k, v, *cotangents):
        keys_first = [jnp.swapaxes(x, 1, 2) for x in (k, v)]
        found = []
        for attend in (reference.attention, tiled):
            fn = functools.partial(attend, ranges=ranges, scale=1.0, soft_cap=0.0)
            out, pull = jax.vjp(fn, q, *keys_first)
            dq, *rest = pull(cotangents)
            found.append((out, (dq, *(jnp.swapaxes(x, 1, 2) for x in rest))))
        return found

    for (out, lse), grads in jax.jit(run)(q, k, v, np.repeat(cotangents[..., None], 4, -1), cotangents):
        assert not np.asarray(out)[~seen].any() and (np.asarray(lse)[~seen] == -np.inf).all()
        assert np.isfinite(out).all() and np.isfinite(np.asarray(lse)[seen]).all()
        for grad in grads:
            assert not np.asarray(grad)[~seen].any()
            assert np.isfinite(grad).all() and np.asarray(grad)[seen].any()


def test_products_of_bfloat16_take_it_in_and_give_float32():
    x, ranges = jnp.zeros((1, 40, 2, 4), jnp.bfloat16), attention_op.causal_ranges(jnp.asarray([40]), 40)
    tiled = functools.partial(chunked.attention, query_block=8, key_block=8)
    run = functools.partial(pulled, tiled, scale=1.0, soft_cap=0.0)
    text = jax.jit(run).lower(x, x, x, ranges, (x, x[..., 0].astype(jnp.float32))).as_text()
    products = re.findall(r"dot_general .*: \(tensor<.*x(\w+)>, tensor<.*x(\w+)>\) -> tensor<.*x(\w+)>", text)
    assert len(products) == text.count("stablehlo.dot_general") >= 7 and set(products) == {("bf16", "bf16", "f32")}


def test_rows_without_keys_or_queries():
    for queries, keys in ((3, 0), (0, 3)):
        q, k, v = draw(0, 2, queries, keys, 2, 1, 4)
        zero = np.zeros((2, queries), np.int32)
        ranges = attention_op.Ranges(zero, zero, zero, zero)
        run = functools.partial(attention_op.attention, scale=1.0, implementation="chunked", return_lse=True)
        out, lse = run(q, k, v, ranges)
        assert out.shape == q.shape and not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()


def test_attention_over_parts_of_the_keys_merges_by_its_lse():
    q, k, v = draw(11, 2, 10, 24, 2, 1, 4)
    ranges, cotangent = any_ranges(12, 2, 10, 24), draw(13, 2, 10, 1, 2, 1, 4)[0]
    run = functools.partial(chunked.attention, scale=0.6, soft_cap=0.0, query_block=4, key_block=5)

    def whole(q, k, v):
        return run(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), ranges)[0]

    def merged(q, k, v):
        parts = []
        for start in (0, 9):
            end = 9 if start == 0 else 24
            inside = attention_op.Ranges(*(jnp.clip(x, start, end) - start for x in ranges))
            parts.append(run(q, *(jnp.swapaxes(x[:, start:end], 1, 2) for x in (k, v)), inside))
        (left, a), (right, b) = parts
        top = jnp.maximum(jnp.maximum(a, b), -1e30)
        a, b = jnp.exp(a - top)[..., None], jnp.exp(b - top)[..., None]
        return (a * left + b * right) / jnp.maximum(a + b, 1e-30)

    def both_ways(q, k, v):
        return [(f(q, k, v), *jax.vjp(f, q, k, v)[1](cotangent)) for f in (whole, merged)]

    for a, b in zip(*jax.jit(both_ways)(q, k, v), strict=True):
        np.testing.assert_allclose(a, b, atol=5e-6)


def test_attention_in_bfloat16_stays_near_float32():
    T = 60
    q, k, v = draw(7, 1, T, T, 2, 1, 8)
    _, ranges, _ = rows_of(8, 1, T)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    exact = [x.astype(jnp.float32) for x in low]
    cotangents = cotangents_of(9, 1, T, 2, 8)
    low_cotangents = cotangents[0].astype(jnp.bfloat16), cotangents[1]
    run = jax.jit(functools.partial(both, blocks=(16, 8), scale=0.35, soft_cap=0.0))
    want = run(*exact, ranges, (low_cotangents[0].astype(jnp.float32), cotangents[1]))[0]
    for (out, lse), grads in run(*low, ranges, low_cotangents):
        assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32 and {g.dtype for g in grads} == {out.dtype}
        np.testing.assert_allclose(lse, want[0][1], atol=2e-5)  # sums in float32
        for got, exact in zip((out, *grads), (want[0][0], *want[1]), strict=True):
            error = np.abs(np.asarray(got, np.float32) - np.asarray(exact)).max()
            assert error < 0.02 * np.abs(exact).max()


# --- long rows: what is skipped, and memory ---------------------------------------------------------------------------


def test_positions_beyond_65536():
    """Windowed queries, and six that look far back: one range at the very start, one before it, or everything."""
    T, few = 70_001, np.array([0, 1, 40_000, 65_535, 65_536, 66_001, 69_998, 70_000])
    q, k, v = draw(21, 1, T, T, 2, 1, 2)
    lo1, hi1, lo2, hi2 = (np.array(x) for x in attention_op.causal_ranges(jnp.asarray([T]), T).window(0, 40))
    hi1[:, 65_536], lo2[:, 66_001], hi1[:, 69_998] = 3, 66_000, 68_000
    lo2[:, 70_000] = 0
    ranges = attention_op.Ranges(lo1, hi1, lo2, hi2)
    narrow, knobs = pick(ranges, few), {"scale": 0.5, "soft_cap": 0.0}
    out, lse = cotangents_of(22, 1, len(few), 2, 2)
    spread = [jnp.zeros((1, T, *x.shape[2:])).at[:, few].set(x) for x in (out, lse)]
    got, (dq, dk, dv) = jax.jit(functools.partial(pulled, chunked.attention, **knobs))(q, k, v, ranges, tuple(spread))
    want = jax.jit(functools.partial(pulled, reference.attention, **knobs))(q[:, few], k, v, narrow, (out, lse))
    hold(([x[:, few] for x in got], (dq[:, few], dk, dv)), want)
    exact = definition(q[0, few], k[0], v[0], np.asarray(api.visible(narrow, T))[0], scale=0.5)
    for a, b in zip(got, exact, strict=True):
        np.testing.assert_allclose(a[0, few], b, atol=5e-6)


def blocked(ranges, block):
    """Ranges [B, Q] as [B, N, I]; Q a multiple of I."""
    return [jnp.asarray(x).reshape(x.shape[0], -1, block) for x in ranges]


@pytest.mark.parametrize(("queries", "keys", "block", "key_block"), [(24, 50, 4, 7), (24, 50, 24, 1), (24, 9, 1, 4)])
def test_every_visible_pair_is_visited_once(queries, keys, block, key_block):
    for seed in range(40):
        ranges = any_ranges(seed, 2, queries, keys) if seed % 2 else rows_of(seed, 2, queries)[1]
        ranges = attention_op.Ranges(*(np.clip(x, 0, keys) for x in ranges))
        bounds = np.asarray(chunked.block_bounds(blocked(ranges, block), keys, key_block))
        mask = np.asarray(api.visible(ranges, keys))
        for n, (start1, end1, start2, end2) in enumerate(bounds):
            visited = [*range(start1, end1), *range(start2, end2)]
            assert len(set(visited)) == len(visited) and start1 <= end1 and start2 <= end2
            seen = np.flatnonzero(mask[:, n * block : (n + 1) * block].any((0, 1)))
            assert {key // key_block for key in seen} <= set(visited)


@pytest.mark.parametrize("window", [64, 256])
def test_windowed_rows_visit_few_blocks_and_causal_ones_half(window):
    T, block = 8192, 64

    def visited(ranges):
        bounds = np.asarray(chunked.block_bounds(blocked(ranges, block), T, block))
        return int((bounds[:, 1::2] - bounds[:, ::2]).sum())

    causal, n = attention_op.causal_ranges(jnp.asarray([T]), T), T // block
    assert visited(causal) == n * (n + 1) // 2
    assert visited(causal.window(jnp.arange(T)[None], window)) <= n * (window // block + 1)
    padded = attention_op.causal_ranges(jnp.asarray([T - 5]), T).window(jnp.arange(T)[None], window)
    assert visited(padded) <= n * (window // block + 1)  # padding beside them draws no block to key 0
    branch = np.arange(n * block)[None] % block  # each block of queries is one branch, inserted at 1,000
    far = attention_op.Ranges(0 * branch, 0 * branch + 1000, 0 * branch + T - 64, T - 63 + branch)
    assert visited(far.window(1000 + branch, window)) <= n * (window // block + 2)
    assert visited(attention_op.causal_ranges(jnp.asarray([0]), T)) == 0


def test_memory_of_the_gradient_is_linear_in_tokens():
    def temp(tokens):
        x = jax.ShapeDtypeStruct((1, tokens, 2, 4), jnp.float32)
        ranges = attention_op.Ranges(*[jax.ShapeDtypeStruct((1, tokens), jnp.int32)] * 4)

        def total(q, k, v, ranges):
            run = functools.partial(attention_op.attention, scale=0.5, implementation="chunked", return_lse=True)
            out, lse = run(q, k, v, ranges)
            return jnp.sum(out) + jnp.sum(lse)

        compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(x, x, x, ranges).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = temp(65_536), temp(131_072)
    assert large < 2.1 * small, (small, large)
    assert large < 131_072 * 2 * 4 * 4 * 12, large  # a dozen arrays of the size of q


def test_rows_split_over_devices_stay_where_they_are():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    q, k, v = draw(31, 4, 300, 300, 2, 1, 4)
    ranges, cotangents = any_ranges(32, 4, 300, 300), cotangents_of(33, 4, 300, 2, 4)
    knobs = {"scale": 0.5, "soft_cap": 0.0}
    run = jax.jit(functools.partial(pulled, chunked.attention, **knobs), in_shardings=split)
    text = run.lower(q, k, v, ranges, cotangents).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    want = jax.jit(functools.partial(pulled, reference.attention, **knobs))(q, k, v, ranges, cotangents)
    hold(run(q, k, v, ranges, cotangents), want)


# --- decode, and the surface ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", [5, api.FEW + 1])
def test_decode_attention_is_a_row_of_attention(queries):
    T = api.CACHE_BLOCK + 38
    q, k, v = draw(5, 2, T, T, 4, 2, 6)
    _, ranges, positions = rows_of(6, 2, T)
    ranges = ranges.window(positions, 7)
    knobs = {"scale": 0.3, "soft_cap": 3.0, "return_lse": True}
    run = functools.partial(attention_op.attention, implementation="reference", **knobs)
    whole = jax.jit(run)(q, k, v, ranges)
    major, few = [jnp.swapaxes(x, 1, 2) for x in (k, v)], slice(9, 9 + queries)
    got = jax.jit(functools.partial(attention_op.decode_attention, **knobs))(q[:, few], *major, pick(ranges, few))
    for a, b in zip(got, whole, strict=True):
        np.testing.assert_allclose(a, b[:, few], atol=2e-6)


def test_a_long_prompt_over_a_long_cache_takes_linear_memory():
    O, S = 1024, 8192
    shapes = (1, O, 2, 4), (1, 1, S, 4), (1, 1, S, 4)
    ranges = attention_op.Ranges(*[jax.ShapeDtypeStruct((1, O), jnp.int32)] * 4)
    run = jax.jit(functools.partial(attention_op.decode_attention, scale=0.5))
    compiled = run.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes), ranges).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < O * S * 2 * 4 / 32


def test_every_platform_has_a_default_that_is_linear():
    for platform in ("cpu", "gpu", "cuda", "tpu"):
        for devices in (1, 8):
            assert attention_op.resolve(platform, devices) in set(api.IMPLEMENTATIONS) - {"reference"}
    assert [attention_op.resolve("tpu", devices) for devices in (1, 4)] == ["tpu", "chunked"]
    with pytest.raises(ValueError, match="'rocm'; known: cpu, gpu, cuda, tpu"):
        attention_op.resolve("rocm", 1)


def test_misuse_of_attention_is_named():
    q, k, v = draw(9, 1, 4, 4, 3, 2, 2)
    ranges = attention_op.causal_ranges(jnp.asarray([4]), 4)
    with pytest.raises(ValueError, match="known: reference, chunked, tpu"):
        attention_op.attention(q, k, v, ranges, scale=1.0, implementation="flash")
    for name in ("reference", "chunked"):
        with pytest.raises(ValueError, match="3 query heads do not divide into 2 kv heads"):
            attention_op.attention(q, k, v, ranges, scale=1.0, implementation=name)
    with pytest.raises(AssertionError):
        attention_op.decode_attention(q, k, v[:, :, :, :1], ranges, scale=1.0)
    with pytest.raises(AssertionError):
        attention_op.attention(q, k, v, pick(ranges, [0, 1]), scale=1.0, implementation="chunked")
