"""Rows, ranges and the definition that attention is held to: numpy, float64, one query at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax.kernels import attention as attention_op
from rsi_jax.kernels.attention import chunked, reference

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
    """softmax(scale q.k) v over the visible keys and its log-sum-exp, in float64, one query and head at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, lse, group = np.zeros(q.shape), np.full(q.shape[:2], -np.inf), q.shape[1] // k.shape[1]
    for t, h in np.ndindex(q.shape[:2]):
        keys = np.flatnonzero(mask[t])
        if not keys.size:
            continue
        logit = k[keys, h // group] @ q[t, h] * scale
        logit = soft_cap * np.tanh(logit / soft_cap) if soft_cap else logit
        weight = np.exp(logit - logit.max())
        out[t, h] = weight / weight.sum() @ v[keys, h // group]
        lse[t, h] = logit.max() + np.log(weight.sum())
    return out, lse


def draw(seed, B, Q, S, H, J, C, *, spread=1.0):
    rng = np.random.default_rng(seed)
    shapes = (Q, H), (S, J), (S, J)
    return tuple(jnp.asarray(rng.normal(size=(B, *shape, C)) * spread, jnp.float32) for shape in shapes)


def narrowed(ranges, positions, window):
    return ranges.window(positions, window) if window else ranges


def rows_of(seed, count, tokens):
    rng = np.random.default_rng(seed)
    rows = [Row(rng, tokens) for _ in range(count)]
    ranges = attention_op.Ranges(*(np.stack(x) for x in zip(*(row.ranges() for row in rows), strict=True)))
    return rows, ranges, np.stack([row.positions for row in rows])


def any_ranges(seed, B, Q, S):
    """Two disjoint ranges anywhere, in either order, ahead of the query or behind it; a fifth of each is empty."""
    rng = np.random.default_rng(seed)
    cut = np.sort(rng.integers(0, S + 1, (4, B, Q)), axis=0)
    cut[1] = np.where(rng.random((B, Q)) < 0.2, cut[0] - 1, cut[1])
    cut[3] = np.where(rng.random((B, Q)) < 0.2, cut[2], cut[3])
    swap = rng.random((B, Q)) < 0.5
    return attention_op.Ranges(*(np.where(swap, cut[(i + 2) % 4], cut[i]).astype(np.int32) for i in range(4)))


def pick(ranges, queries):
    return attention_op.Ranges(*(x[:, queries] for x in ranges))


def pulled(attend, q, k, v, ranges, cotangents, **knobs):
    """(out, lse) of an implementation, and the gradients of both together; keys as the op takes them."""

    def fn(q, k, v):
        out, lse = attend(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), ranges, **knobs)
        return out, jnp.where(lse > -jnp.inf, lse, 0.0)

    found, pull = jax.vjp(fn, q, k, v)
    return found, pull(cotangents)


def hold(got, want, *, atol=5e-6):
    """Values and gradients agree."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=atol, err_msg=name)


def both(q, k, v, ranges, cotangents, *, blocks, **knobs):
    return [
        pulled(attend, q, k, v, ranges, cotangents, **knobs)
        for attend in (
            reference.attention,
            functools.partial(chunked.attention, query_block=blocks[0], key_block=blocks[1]),
        )
    ]


def cotangents_of(seed, B, Q, H, C):
    out, lse = draw(seed, B, Q, Q, H, H, C)[0], draw(seed + 1, B, Q, Q, H, H, 1)[0][..., 0]
    return out, lse
