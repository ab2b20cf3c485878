"""Which key blocks each query block visits, as tables of a few integers per block, and the walk of a grid over them.

A block of queries sees, by each of the two ranges, keys between its smallest lo and its largest hi: at most two
intervals of key blocks. Turned round, a key block is seen by query blocks of at most two covering intervals. The tables
are O(blocks): they fit the 1 MiB of scalar memory of a TPU core where a list of (query block, key block) pairs,
O(blocks^2), would not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

ENTRY = 6  # integers of a block in a walk: block, steps, start1, end1, start2, end2
WIDTH = 8  # integers of a query block in `summary`


def covers(lo_NI, hi_NI, keys: int, key_block: int, axis: int | tuple[int, ...] = -1) -> tuple[jax.Array, jax.Array]:
    """Covers the ranges along `axis`, within [0, keys], by an interval of key blocks: start and end, start <= end."""
    some = lo_NI < hi_NI
    start_N = jnp.min(jnp.where(some, lo_NI, keys), axis=axis) // key_block
    end_N = (jnp.max(jnp.where(some, hi_NI, 0), axis=axis) + key_block - 1) // key_block
    return start_N, jnp.maximum(start_N, end_N)


def within(lo_NI, hi_NI, key_block: int) -> tuple[jax.Array, jax.Array]:
    """The interval of key blocks of which every query of a block sees every key, by one range: start and end [...]."""
    return -(-jnp.max(lo_NI, axis=-1) // key_block), jnp.min(hi_NI, axis=-1) // key_block


def disjoint(start1, end1, start2, end2) -> tuple[jax.Array, ...]:
    """Joins two intervals that meet into one; the other is empty then."""
    meet = (start1 < end1) & (start2 < end2) & (start1 <= end2) & (start2 <= end1)
    start1 = jnp.where(meet, jnp.minimum(start1, start2), start1)
    end1 = jnp.where(meet, jnp.maximum(end1, end2), end1)
    return start1, end1, jnp.where(meet, end2, start2), end2


def summary(ranges_BNI: Sequence[jax.Array], keys: int, key_block: int) -> jax.Array:
    """Sums up N query blocks in key blocks, int32 [B, N, 8]: per range what covers it, then what lies within it."""
    lo1, hi1, lo2, hi2 = ranges_BNI
    covered = (*covers(lo1, hi1, keys, key_block), *covers(lo2, hi2, keys, key_block))
    inner = (*within(lo1, hi1, key_block), *within(lo2, hi2, key_block))
    return jnp.stack([*covered, *inner], axis=-1).astype(jnp.int32)


def turned(summary_BN8: jax.Array, key_blocks: int) -> tuple[jax.Array, ...]:
    """Covers the query blocks that see each key block by an interval per range: start1, end1, start2, end2 [B, M].

    With branches, query blocks between the ends may not see it: those holes cost a step of the grid, and no product.
    """
    N, block_M1 = summary_BN8.shape[1], jnp.arange(key_blocks)[:, None]
    found = []
    for i in (0, 2):
        start_B1N, end_B1N = summary_BN8[:, None, :, i], summary_BN8[:, None, :, i + 1]
        sees_BMN = (start_B1N <= block_M1) & (block_M1 < end_B1N)
        start_BM = jnp.min(jnp.where(sees_BMN, jnp.arange(N), N), axis=-1)
        end_BM = jnp.max(jnp.where(sees_BMN, jnp.arange(N) + 1, 0), axis=-1)
        found += [start_BM, jnp.maximum(start_BM, end_BM)]
    return tuple(found)


def walk(bounds_BN: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Plans a grid of (programs, steps) over all blocks, and over what each visits: (table int32 [...], most steps).

    bounds_BN: start1, end1, start2, end2 of each block: what it visits.
    A grid is as wide as its longest program. Two blocks make a program, the longest with the shortest, so that the
    programs of a causal row are all of a length: it has no more steps than visits. A block that visits nothing has one
    step, in which it is written.
    """
    start1, end1, start2, end2 = (x.reshape(-1) for x in disjoint(*bounds_BN))
    count = (end1 - start1) + (end2 - start2)
    bounds = [jnp.where(count > 0, x, 0) for x in (start1, end1, start2, end2)]
    entry = jnp.stack([jnp.arange(count.size), jnp.maximum(count, 1), *bounds], axis=1).astype(jnp.int32)
    entry = entry[jnp.argsort(-count)]
    half = -(-count.size // 2)
    none = jnp.zeros((2 * half - count.size, ENTRY), jnp.int32)  # an odd one stands alone
    table = jnp.concatenate([entry[:half], jnp.concatenate([entry[half:][::-1], none])], axis=1)
    return table.reshape(-1), jnp.max(table[:, 1] + table[:, 1 + ENTRY])


class Step(NamedTuple):
    """What a step of a walk does; scalars.

    block: of all rows. other: the block it visits. visits: whether it does. first, last: of the block's steps.
    """

    block: jax.Array
    other: jax.Array
    visits: jax.Array
    first: jax.Array
    last: jax.Array


def step_of(table_ref, program, index) -> Step:
    """Reads a step off the table; beyond the last one, that one again (nothing is fetched), without a visit."""
    at = program * (2 * ENTRY)
    steps = table_ref[at + 1]
    second = (index >= steps) & (table_ref[at + ENTRY + 1] > 0)
    at = jnp.where(second, at + ENTRY, at)
    index = jnp.where(second, index - steps, index)
    block, steps, start1, end1, start2, end2 = (table_ref[at + i] for i in range(ENTRY))
    j, first = jnp.minimum(index, steps - 1), end1 - start1
    other = jnp.where(j < first, start1 + j, start2 + j - first)
    visits = (index < steps) & (first + end2 - start2 > 0)
    return Step(block, other, visits, index == 0, index == steps - 1)


def inside(bounds, other):
    """Whether a block lies in one of two intervals: start1, end1, start2, end2."""
    start1, end1, start2, end2 = bounds
    return ((start1 <= other) & (other < end1)) | ((start2 <= other) & (other < end2))


def sees(summary_ref, block, other):
    """Whether any query of a block may see a key of another block, by the ranges that cover it."""
    return inside((summary_ref[block * WIDTH + i] for i in range(4)), other)


def sees_all(summary_ref, block, other):
    """Whether every query of a block sees every key of another block, by one range."""
    return inside((summary_ref[block * WIDTH + 4 + i] for i in range(4)), other)
