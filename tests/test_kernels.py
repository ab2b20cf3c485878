"""Attention against its definition under the two-key-range rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import api, cpu, reference

FAR = 10**6


class Row:
    """A packed row as DESIGN section 5 lays it out: sequences, each a trunk and then its branches; padding last.

    Per token: sequence, branch (0 = trunk), position, insert_at (branches), and the index where its stream starts.
    """

    def __init__(self, rng: np.random.Generator, tokens: int):
        self.tokens = []
        while True:
            n, start = int(rng.integers(1, 12)), len(self.tokens)
            trunk = [(start, 0, p, 0, start) for p in range(n)]
            branches = []
            for b in range(1, int(rng.integers(1, 4))):
                at = int(rng.integers(0, n))
                length = int(rng.integers(0, 4)) + int(rng.integers(at + 1, n + 1)) - at  # hint, and up to the span end
                first = start + n + len(branches)
                branches += [(start, b, at + j, at, first) for j in range(length)]
            if start + n + len(branches) > tokens:
                break
            self.tokens += trunk + branches
        self.used = len(self.tokens)
        self.tokens += [(-1, 0, 0, 0, 0)] * (tokens - self.used)

    @property
    def positions(self):
        return np.array([p for _, _, p, _, _ in self.tokens])

    def ranges(self):
        """The rule, unwindowed, in row indices."""
        found = []
        for q, (sequence, branch, _, at, first) in enumerate(self.tokens):
            if sequence < 0:
                found.append((0, 0, 0, 0))
            elif branch:
                found.append((sequence, sequence + at, first, q + 1))
            else:
                found.append((sequence, sequence, sequence, q + 1))
        return [np.asarray(x, np.int32) for x in zip(*found, strict=True)]

    def mask(self, window: int = FAR):
        """Which tokens a query's own stream holds, and how many positions back: no ranges involved."""
        visible = np.zeros((len(self.tokens), len(self.tokens)), bool)
        for q, (sequence, branch, p, at, _) in enumerate(self.tokens):
            for k, (other, other_branch, position, _, _) in enumerate(self.tokens):
                own = other_branch == branch and position <= p
                trunk = other_branch == 0 and position < at
                visible[q, k] = 0 <= sequence == other and (own or trunk) and p - position < window
        return visible


def definition(q, k, v, mask, *, scale, soft_cap=0.0):
    """softmax(scale q.k) v over the visible keys, in float64 and one query and head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[1] // k.shape[1]
    for t, h in np.ndindex(q.shape[:2]):
        keys = np.flatnonzero(mask[t])
        if not keys.size:
            continue
        logit = k[keys, h // group] @ q[t, h] * scale
        logit = soft_cap * np.tanh(logit / soft_cap) if soft_cap else logit
        weight = np.exp(logit - logit.max())
        out[t, h] = weight / weight.sum() @ v[keys, h // group]
    return out


def draw(seed, B, T, H, J, C, *, spread=1.0):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=(B, T, n, C)) * spread, jnp.float32) for n in (H, J, J))


def narrowed(ranges, positions, window):
    return ranges.window(positions, window) if window else ranges


def rows_of(seed, count, tokens):
    rng = np.random.default_rng(seed)
    rows = [Row(rng, tokens) for _ in range(count)]
    ranges = attention_op.Ranges(*(np.stack(x) for x in zip(*(row.ranges() for row in rows), strict=True)))
    return rows, ranges, np.stack([row.positions for row in rows])


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 50])
def test_windows_narrow_packed_and_branched_rows_to_what_a_query_may_see(window):
    rows, ranges, positions = rows_of(window or 0, 4, 45)
    assert any(branch for row in rows for _, branch, _, _, _ in row.tokens) and any(row.used < 45 for row in rows)
    got = api.visible(narrowed(ranges, positions, window), 45)
    np.testing.assert_array_equal(got, np.stack([row.mask(window or FAR) for row in rows]))


def test_causal_ranges_see_the_past_of_their_row_and_padding_sees_nothing():
    got = np.asarray(api.visible(attention_op.causal_ranges(jnp.asarray([3, 0, 5]), 5), 5))
    for row, length in enumerate((3, 0, 5)):
        want = np.tril(np.ones((5, 5), bool)) & (np.arange(5)[:, None] < length)
        np.testing.assert_array_equal(got[row], want)


def both(q, k, v, ranges, cotangent, *, scale, soft_cap, chunk):
    """(out, gradients) of the reference and of the cpu implementation."""

    def one(attend):
        def fn(q, k, v):
            k, v = (jnp.swapaxes(x, 1, 2) for x in (k, v))
            return attend(q, k, v, ranges, scale=scale, soft_cap=soft_cap)

        out, pull = jax.vjp(fn, q, k, v)
        return out, pull(cotangent)

    return one(reference.attention), one(functools.partial(cpu.attention, chunk=chunk))


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "soft_cap", "window", "chunk"),
    [
        (1, 1, 1, 2, 0.0, None, 128),
        (29, 4, 2, 6, 0.0, 4, 16),
        (23, 3, 1, 5, 2.0, None, 16),
        (131, 2, 2, 4, 0.0, 40, 128),
    ],
)
def test_cpu_attention_is_the_reference_is_the_definition(tokens, heads, kv_heads, size, soft_cap, window, chunk):
    q, k, v = draw(tokens, 2, tokens, heads, kv_heads, size)
    rows, ranges, positions = rows_of(tokens + 1, 2, tokens)
    ranges = narrowed(ranges, positions, window)
    cotangent = draw(1, 2, tokens, heads, 1, size)[0]
    knobs = {"scale": size**-0.5, "soft_cap": soft_cap}
    run = jax.jit(functools.partial(both, chunk=chunk, **knobs))
    (want, want_grads), (got, got_grads) = run(q, k, v, ranges, cotangent)
    np.testing.assert_allclose(got, want, atol=2e-6)
    for name, a, b in zip("qkv", got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-6, err_msg=name)
    for b in range(2):
        exact = definition(q[b], k[b], v[b], rows[b].mask(window or FAR), **knobs)
        np.testing.assert_allclose(want[b], exact, atol=2e-6)


def test_a_query_that_sees_nothing_gives_exactly_zero_and_no_gradient():
    q, k, v = draw(3, 2, 7, 2, 1, 4, spread=1e3)
    ranges = attention_op.causal_ranges(jnp.asarray([4, 0]), 7)
    run = jax.jit(functools.partial(both, scale=1.0, soft_cap=0.0, chunk=4))
    for out, grads in run(q, k, v, ranges, jnp.ones_like(q)):
        assert not np.asarray(out[0, 4:]).any() and not np.asarray(out[1]).any()
        assert np.isfinite(out).all() and all(np.isfinite(g).all() for g in grads)
        for grad in grads:
            assert not np.asarray(grad[0, 4:]).any() and not np.asarray(grad[1]).any()


def test_decode_attention_is_a_row_of_attention():
    T = 23
    q, k, v = draw(5, 2, T, 4, 2, 6)
    _, ranges, positions = rows_of(6, 2, T)
    ranges = ranges.window(positions, 7)
    knobs = {"scale": 0.3, "soft_cap": 3.0}
    whole = jax.jit(functools.partial(attention_op.attention, **knobs))(q, k, v, ranges)
    major = [jnp.swapaxes(x, 1, 2) for x in (k, v)]
    few = attention_op.Ranges(*(x[:, 9:14] for x in ranges))
    got = jax.jit(functools.partial(attention_op.decode_attention, **knobs))(q[:, 9:14], *major, few)
    np.testing.assert_allclose(got, whole[:, 9:14], atol=2e-6)


def test_attention_in_bfloat16_stays_near_float32():
    T = 33
    q, k, v = draw(7, 1, T, 2, 1, 8)
    rows, ranges, _ = rows_of(8, 1, T)
    low = [x.astype(jnp.bfloat16) for x in (q, k, v)]
    want = definition(*(x[0].astype(jnp.float32) for x in low), rows[0].mask(), scale=0.35)[None]
    names = ("reference", "cpu")
    run = jax.jit(lambda *x: [attention_op.attention(*x, scale=0.35, implementation=name) for name in names])
    for got in run(*low, ranges):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=0.03)


def test_misuse_of_attention_is_named():
    q, k, v = draw(9, 1, 4, 3, 2, 2)
    ranges = attention_op.causal_ranges(jnp.asarray([4]), 4)
    with pytest.raises(ValueError, match="known: reference, cpu"):
        attention_op.attention(q, k, v, ranges, scale=1.0, implementation="flash")
    for name in ("reference", "cpu"):
        with pytest.raises(ValueError, match="3 query heads do not divide into 2 kv heads"):
            attention_op.attention(q, k, v, ranges, scale=1.0, implementation=name)
