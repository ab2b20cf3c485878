"""What the GPU kernels share: the plan of a call, the walk of a block over what it visits, and the logits of a tile.

A thread block has two warpgroups that compute, 64 rows of a tile each, and one that copies the tiles of the other axis
ahead of them, into a ring in shared memory.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rsi_jax.kernels.attention import blocks

ROWS, WARPGROUPS = 64, 2  # rows of a warpgroup, those that compute
BLOCK = ROWS * WARPGROUPS
SLOTS = 4  # tiles of the ring at most: two pairs
HEAD_SIZES = (64, 128, 192, 256)
SMEM = 227 * 1024 - 2560  # bytes of shared memory of a thread block of sm90, less what barriers and reductions take
LOG2E = math.log2(math.e)


class Plan(NamedTuple):
    """What is static besides the shapes: keys of a tile in the forward pass and for dq, queries of one for dk, dv."""

    scale: float
    soft_cap: float
    forward: int
    dq: int
    dkv: int


# By head size: the largest tiles whose sums stay in registers; wgmma sums over 64 at least.
TILES = {64: (128, 128, 64), 128: (128, 64, 64), 192: (64, 64, 64), 256: (64, 64, 64)}


def traced_kind() -> str | None:
    """The device kind of the mesh that is traced under; None where there is no mesh, or it names none."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device and device.device_kind


def plan_of(head_size: int, *, scale: float, soft_cap: float) -> Plan:
    """Chooses the tiles for a padded head size, one of HEAD_SIZES."""
    return Plan(float(scale), float(soft_cap), *TILES[head_size])


def padded_head(head_size: int) -> int:
    """The least of HEAD_SIZES that holds a head.

    Raises: ValueError where none does.
    """
    if head_size > HEAD_SIZES[-1]:
        raise ValueError(
            f"attention 'mosaic_gpu' takes heads of at most {HEAD_SIZES[-1]}, got {head_size}: the sums of a wider one "
            "do not fit the registers; set compute.attention=chunked"
        )
    return -(-head_size // 64) * 64


def table(ranges_B4Q: jax.Array, keys: int, query_block: int, key_block: int) -> tuple[jax.Array, jax.Array]:
    """Which tiles query blocks see, and see whole: (summary [B, N, 8], what their walks visit [B, N, 4])."""
    B, _, Q = ranges_B4Q.shape
    ranges_B4NI = ranges_B4Q.reshape(B, 4, Q // query_block, query_block)
    summary_BN8 = blocks.summary([ranges_B4NI[:, i] for i in range(4)], keys, key_block)
    return summary_BN8, stacked(blocks.disjoint(*(summary_BN8[..., i] for i in range(4))))


def turned(summary_BN8: jax.Array, key_blocks: int) -> jax.Array:
    """The walk of each key block over the query blocks that see it: [B, M, 4]."""
    return stacked(blocks.disjoint(*blocks.turned(summary_BN8, key_blocks)))


def stacked(bounds_BN) -> jax.Array:
    return jnp.stack(bounds_BN, axis=-1).astype(jnp.int32)


class Walk(NamedTuple):
    """The steps of a block: two intervals of blocks of the other axis, one behind the other; scalars."""

    start1: jax.Array
    first: jax.Array
    start2: jax.Array
    steps: jax.Array

    def at(self, step):
        """The block that a step visits."""
        return jnp.where(step < self.first, self.start1 + step, self.start2 + step - self.first)


def walk_of(bounds_ref, b, block) -> Walk:
    """Reads the walk of a block."""
    start1, end1, start2, end2 = (bounds_ref[b, block, i] for i in range(4))
    return Walk(start1, end1 - start1, start2, end1 - start1 + end2 - start2)


def whole_of(summary_ref, b, n):
    """Reads between which key blocks every query of block n sees every key, by each range."""
    return tuple(summary_ref[b, n, 4 + i] for i in range(4))


class Ring(NamedTuple):
    """Tiles that one warpgroup copies in and the others read, item after item; a step of a walk is two items."""

    tiles: Any
    full: Any
    used: Any

    def slot(self, item):
        return jax.lax.rem(item, jnp.asarray(self.tiles.shape[0], item.dtype))

    def fill(self, steps, sources: Callable) -> None:
        """Copies in both tiles of each step, sources(step), as soon as there is room."""

        @pl.loop(0, steps)
        def _(step):
            for item, source in zip((2 * step, 2 * step + 1), sources(step), strict=True):
                slot = self.slot(item)
                pl.when(item >= self.tiles.shape[0])(functools.partial(plgpu.barrier_wait, self.used.at[slot]))
                plgpu.copy_gmem_to_smem(source, self.tiles.at[slot], self.full.at[slot])

    def fill_keys(self, walk: Walk, tile: int, k_ref, v_ref) -> None:
        """Copies in the keys and the values, [S, C], of each step of a walk."""

        def sources(step):
            keys = pl.ds(walk.at(step) * tile, tile)
            return k_ref.at[keys], v_ref.at[keys]

        self.fill(walk.steps, sources)

    def take(self, item):
        """Waits for an item: its tile."""
        plgpu.barrier_wait(self.full.at[self.slot(item)])
        return self.tiles.at[self.slot(item)]

    def release(self, item) -> None:
        """Gives the room of an item back."""
        plgpu.barrier_arrive(self.used.at[self.slot(item)])


def ring(held: int, tile: int, head_size: int, dtype) -> Ring:
    """Allocates a ring of as many tiles as fit beside `held` rows."""
    row = head_size * jnp.dtype(dtype).itemsize
    slots = min(SLOTS, (SMEM - held * row) // (tile * row))
    return Ring(
        plgpu.SMEM((slots, tile, head_size), dtype),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=slots),
    )


def rows_of(ref, axis: int) -> jax.Array:
    """Loads a number per query from device memory; they lie along `axis` of the tile of logits."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def along(x, shape, axis: int) -> jax.Array:
    """Repeats a number per query over a tile."""
    return jax.lax.broadcast_in_dim(x, shape, (axis,))


def zeros(shape) -> jax.Array:
    """A sum that nothing is added to yet, where a matrix product can add to it."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def product(a, b, shape) -> jax.Array:
    """a b in float32; operands lie in shared memory."""

    def run(acc_ref):
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def add_product(total, a, b) -> Any:
    """total + a b in float32; a lies in registers or in shared memory."""
    start = plgpu.ACC.init(total)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, a, b))(start)


def cap(plan: Plan, dots) -> tuple[jax.Array, float]:
    """Logits as x and c > 0, logit = c x: with a soft cap x = tanh(scale dots / soft_cap), else x = dots.

    The tanh by exp2: the hardware's own is right to 3 digits only, its exp2 to 6.
    """
    if not plan.soft_cap:
        return dots, plan.scale
    return 1.0 - 2.0 / (jnp.exp2(dots * (2 * LOG2E * plan.scale / plan.soft_cap)) + 1.0), plan.soft_cap


def hide(x, ranges_ref, first_key, whole, axis: int) -> jax.Array:
    """Puts -inf where a query does not see a key; where all see all of the tile, nothing is compared.

    ranges_ref: lo1, hi1, lo2, hi2 [4, queries], the queries along `axis`.
    """

    def compare(x):
        key = first_key + plgpu.broadcasted_iota(jnp.int32, x.shape, 1 - axis, layout=plgpu.Layout.WGMMA)
        lo1, hi1, lo2, hi2 = (along(rows_of(ranges_ref.at[i], axis), x.shape, axis) for i in range(4))
        return jnp.where(((lo1 <= key) & (key < hi1)) | ((lo2 <= key) & (key < hi2)), x, -jnp.inf)

    return jax.lax.cond(whole, lambda x: x, compare, x)


def call(kernel, plan: Plan, arrays, out, scratch, *, grid, products: int, logits: int):
    """Calls kernel(plan, *refs) in a grid of (heads, blocks, rows of the batch) thread blocks.

    products: matrix products of a tile; logits: all there are, B H Q S. The cost is an upper bound: what is skipped is
    not known when it is compiled.
    """
    cost = pl.CostEstimate(
        flops=2 * products * logits * arrays[0].shape[-1],
        transcendentals=logits,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*arrays, *out)),
    )
    takes_cost = "cost_estimate" in inspect.signature(plgpu.kernel).parameters  # that of jax 0.11 does not
    told: dict[str, Any] = {"cost_estimate": cost} if takes_cost else {}
    return plgpu.kernel(
        functools.partial(kernel, plan),
        out_type=out,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "block", "row"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        **told,
    )(*arrays)
