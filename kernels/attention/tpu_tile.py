"""What the TPU kernels share: the plan of a call, the tiles it reads, and the logits of a tile.

A tile of logits is [keys, rows]: what belongs to a row (its ranges, its log-sum-exp) then lies along the 128 lanes, a
number per lane; as a column it would be padded to 512 bytes per row. The rows of a block are I queries of each of the G
heads that share a kv head, head by head, so that its keys and values are read once for all of them; the kernels know no
groups.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rsi_jax.kernels.attention import blocks, chunked

LANES, MIB = 128, 2**20
# Rows and keys of a tile at most, by preference.
TILES = ((1024, 1024), (512, 1024), (512, 512), (256, 512), (256, 256), (128, 256), (128, 128))
SMALLEST_VMEM = 16 * MIB  # of every kind of TPU core, and what a program may take by default
MOST_SMEM = 3 * MIB // 4  # of the 1 MiB of a core, for tables


class Plan(NamedTuple):
    """What is static besides the shapes: rows and keys of a tile, and the bytes of VMEM that a kernel may take."""

    scale: float
    soft_cap: float
    rows: int
    keys: int
    vmem: int


def tile_bytes(rows: int, keys: int, head_size: int, itemsize: int) -> int:
    """Estimates the VMEM of the kernel that needs most (dk and dv): blocks in flight twice, sums, tiles of logits."""
    lanes = -(-head_size // LANES) * LANES
    in_flight = 2 * lanes * itemsize * (2 * rows + 4 * keys)  # q, dout; k, v, dk, dv
    return in_flight + 2 * keys * lanes * 4 + rows * keys * (4 * 4 + 2 * itemsize)


def vmem() -> int:
    """The VMEM that a kernel may take on the TPU that is traced for: half of a core's, and no less than any core has.

    Raises: ValueError where that is no TPU.
    """
    try:
        return max(SMALLEST_VMEM, pltpu.get_tpu_info().vmem_capacity_bytes // 2)
    except ValueError as error:
        raise ValueError(
            "attention implementation 'tpu' is traced for a device that is no TPU: set compute.attention=chunked, or "
            "name a TPU by jax.sharding.use_abstract_mesh to lower it, or to interpret it in a test"
        ) from error


def plan_of(queries: int, group: int, keys: int, head_size: int, dtype, *, scale: float, soft_cap: float) -> Plan:
    """Chooses the tiles: the first of TILES whose estimate fits the VMEM, cut to the queries and keys there are.

    group: query heads of a kv head. Their rows share a block, which is at least 128 queries of each.
    Raises: ValueError where none fits.
    """
    most, itemsize = vmem(), jnp.dtype(dtype).itemsize
    for rows, tile_keys in TILES:
        R = group * even_tile(queries, max(LANES, rows // group // LANES * LANES))
        K = even_tile(keys, tile_keys)
        if tile_bytes(R, K, head_size, itemsize) <= most * 3 // 4:
            return Plan(float(scale), float(soft_cap), R, K, most)
    raise ValueError(
        f"attention 'tpu' has no tile for heads of size {head_size} in groups of {group}: the least one takes "
        f"{tile_bytes(R, K, head_size, itemsize) / MIB:.1f} MiB of VMEM, of {most // MIB}"
    )


def even_tile(length: int, most: int) -> int:
    """Chooses the size, a multiple of the lanes, of tiles that cover `length` in as few as tiles of `most` do."""
    count = -(-length // most)
    return -(-length // (count * LANES)) * LANES


def summary(plan: Plan, ranges_B4R, keys: int) -> jax.Array:
    """Sums up the blocks of rows (see `blocks.summary`): int32 [B, N, 8]."""
    B, _, rows = ranges_B4R.shape
    ranges_B4NR = ranges_B4R.reshape(B, 4, rows // plan.rows, plan.rows)
    return blocks.summary([ranges_B4NR[:, i] for i in range(4)], keys, plan.keys)


def dot(a, b, a_axis: int, b_axis: int) -> jax.Array:
    """Contracts an axis of two tiles into float32; float32 is multiplied as such, not in one bfloat16 pass."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    axes = ((a_axis,), (b_axis,)), ((), ())
    return jax.lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def scores(plan: Plan, q_ref, k_ref) -> jax.Array:
    """Capped logits of a tile [K, R], nothing hidden yet."""
    logit_KR = dot(k_ref[...], q_ref[...], 1, 1) * plan.scale
    return plan.soft_cap * jnp.tanh(logit_KR / plan.soft_cap) if plan.soft_cap else logit_KR


class Place(NamedTuple):
    """Where a step is: row of the batch, its block of rows, its block of keys, and the block of rows in the summary."""

    b: jax.Array
    n: jax.Array
    m: jax.Array
    entry: jax.Array


def by_rows(row_blocks: int) -> Callable[[blocks.Step], Place]:
    """Places the steps of a walk over the blocks of rows of a whole batch."""

    def place(step):
        b, n = jax.lax.div(step.block, row_blocks), jax.lax.rem(step.block, row_blocks)
        return Place(b, n, step.other, step.block)

    return place


def by_keys(key_blocks: int, row_blocks: int) -> Callable[[blocks.Step], Place]:
    """Places the steps of a walk over the blocks of keys of a whole batch."""

    def place(step):
        b, m = jax.lax.div(step.block, key_blocks), jax.lax.rem(step.block, key_blocks)
        return Place(b, step.other, m, b * row_blocks + step.other)

    return place


def visit(visits, place: Place, summary_ref, ranges_ref, body: Callable) -> None:
    """Runs body(hide) where anything of a tile is seen; hide(logit_KR) puts HIDDEN where a row does not see a key."""
    some = visits & blocks.sees(summary_ref, place.entry, place.m)
    whole = blocks.sees_all(summary_ref, place.entry, place.m)

    def hide(logit_KR):
        key_KR = place.m * logit_KR.shape[0] + jax.lax.broadcasted_iota(jnp.int32, logit_KR.shape, 0)
        lo1, hi1, lo2, hi2 = (ranges_ref[i : i + 1, :] for i in range(4))
        shown = ((lo1 <= key_KR) & (key_KR < hi1)) | ((lo2 <= key_KR) & (key_KR < hi2))
        return jnp.where(shown, logit_KR, chunked.HIDDEN)

    pl.when(some & whole)(functools.partial(body, lambda logit_KR: logit_KR))
    pl.when(some & ~whole)(functools.partial(body, hide))


class Specs(NamedTuple):
    """Block specs of arrays by what they hold per row or key; their indices come off the walk."""

    rows: pl.BlockSpec  # [B, J, rows, C]
    turned: pl.BlockSpec  # [B, J, C, rows]
    lines: pl.BlockSpec  # [B, J, 1, rows]
    ranges: pl.BlockSpec  # [B, 4, rows]
    keys: pl.BlockSpec  # [B, J, keys, C]


def specs(plan: Plan, head_size: int, place: Callable) -> Specs:
    """Makes the specs of a walk whose steps `place` places."""

    def spec(shape, index):
        def index_map(head, program, i, walk_ref, _):
            return index(head, *place(blocks.step_of(walk_ref, program, i))[:3])

        return pl.BlockSpec(shape, index_map)

    R, K, C = plan.rows, plan.keys, head_size
    return Specs(
        rows=spec((None, None, R, C), lambda j, b, n, m: (b, j, n, 0)),
        turned=spec((None, None, C, R), lambda j, b, n, m: (b, j, 0, n)),
        lines=spec((None, None, 1, R), lambda j, b, n, m: (b, j, 0, n)),
        ranges=spec((None, 4, R), lambda j, b, n, m: (b, 0, n)),
        keys=spec((None, None, K, C), lambda j, b, n, m: (b, j, m, 0)),
    )


def call(plan: Plan, kernel: Callable, place: Callable, bounds, summary_BN8, arrays, specs_in, out, scratch, products):
    """Calls kernel(plan, place, *refs) over (kv heads, programs, steps), with the tables in scalar memory.

    bounds: what each block of the walk visits. arrays: ranges first, v last. out: (spec, shape) of each result.
    scratch: shapes, float32. products: matrix products of a tile. The cost is an upper bound: the ranges are no
    constants of the program, so all tiles count.
    Raises: ValueError where the tables do not fit.
    """
    walk, steps = blocks.walk(bounds)
    tables = walk, summary_BN8.reshape(-1)
    if (size := sum(table.size * 4 for table in tables)) > MOST_SMEM:
        raise ValueError(
            f"the tables of attention 'tpu' take {size} bytes, its scalar memory holds {MOST_SMEM}: "
            "give it fewer rows at a time (rl.micro_batch)"
        )
    (B, J, S, C), rows = arrays[-1].shape, arrays[0].shape[2]
    out_specs, out_shape = zip(*out, strict=True)
    return pl.pallas_call(
        functools.partial(kernel, plan, place),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(J, walk.size // (2 * blocks.ENTRY), steps),
            in_specs=specs_in,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=plan.vmem
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * B * J * rows * S * C,
            transcendentals=B * J * rows * S,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *out_shape)),
        ),
    )(*tables, *arrays)
