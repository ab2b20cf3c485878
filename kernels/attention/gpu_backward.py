"""The backward pass of the GPU's attention: a kernel for dq, and kernels for dk and dv that sum over a group of heads.

With p = exp(logit - lse) and ds = p (dout.v + shift) (1 - x^2 under a soft cap):

    dq = scale ds k        dv = p' dout        dk = scale ds' q

The warpgroups of dq hold queries and walk over keys; those of dk and dv hold keys and walk over the queries that see
them, for each head of the group. Nothing is held per pair of blocks. Source: Dao et al. 2022 (arXiv 2205.14135).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rsi_jax.kernels.attention import blocks, gpu_tile
from rsi_jax.kernels.attention.gpu_tile import BLOCK, LOG2E, ROWS, WARPGROUPS


def gradients(plan, q_BQHC, k_BSJC, v_BSJC, dout_BQHC, ranges_B4Q, lse_BHQ, shift_BHQ):
    """Pulls dout back, in whole tiles: dq, dk, dv.

    lse_BHQ: in powers of 2, 0 where nothing is seen. shift_BHQ: dlse - dout.out.
    """
    arrays = q_BQHC, k_BSJC, v_BSJC, dout_BQHC, ranges_B4Q, lse_BHQ, shift_BHQ
    wide = q_BQHC.shape[-1] > 128  # the sums of both do not fit the registers: a pass for each
    dk, dv = (x for parts in ((("dk",), ("dv",)) if wide else (("dk", "dv"),)) for x in _run_dkv(plan, arrays, parts))
    return _run_dq(plan, arrays), dk, dv


def _weights(plan, dots, lse, hide, axis: int):
    """The weights of a tile, and what the derivative of the logits by the dots is."""
    x, unit = gpu_tile.cap(plan, dots)
    slope = (1.0 - x * x) * plan.scale if plan.soft_cap else plan.scale
    return jnp.exp2(hide(x) * (unit * LOG2E) - gpu_tile.along(lse, x.shape, axis)), slope


def _scratch(tile: int, head_size: int, dtype):
    """Two arrays of rows that a warpgroup holds, the ring, and the barrier that the rows are there."""
    rows = plgpu.SMEM((WARPGROUPS, ROWS, head_size), dtype)
    ring = gpu_tile.ring(2 * BLOCK, tile, head_size, dtype)
    return (rows, rows), ring, plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS)


# --- dq ---------------------------------------------------------------------------------------------------------------


def _run_dq(plan, arrays):
    q_BQHC, k_BSJC, *_, ranges_B4Q, _, _ = arrays
    (B, Q, H, C), S, dtype = q_BQHC.shape, k_BSJC.shape[1], q_BQHC.dtype
    tables, out = gpu_tile.table(ranges_B4Q, S, BLOCK, plan.dq), (jax.ShapeDtypeStruct(q_BQHC.shape, dtype),)
    grid, scratch = (H, Q // BLOCK, B), _scratch(plan.dq, C, dtype)
    run = functools.partial(gpu_tile.call, _kernel_dq, plan, (*arrays, *tables), out, scratch)
    return run(grid=grid, products=3, logits=B * H * Q * S)[0]


def _kernel_dq(
    plan, q_ref, k_ref, v_ref, dout_ref, ranges_ref, lse_ref, shift_ref, summary_ref, bounds_ref, dq_ref, *scratch
):
    held, ring, ready = scratch
    b, h, warpgroup = (jax.lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    n = q_ref.shape[1] // BLOCK - 1 - jax.lax.axis_index("block")
    walk = gpu_tile.walk_of(bounds_ref, b, n)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")
        j = h // (q_ref.shape[2] // k_ref.shape[2])
        ring.fill_keys(walk, plan.dq, k_ref.at[b, :, j], v_ref.at[b, :, j])

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        rows, shape = pl.ds(n * BLOCK + warpgroup * ROWS, ROWS), (ROWS, plan.dq)
        q_mine, dout_mine = (x.at[warpgroup] for x in held)
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_mine, ready.at[warpgroup])
        plgpu.copy_gmem_to_smem(dout_ref.at[b, rows, h], dout_mine, ready.at[warpgroup])
        lse, shift = (gpu_tile.rows_of(ref.at[b, h, rows], 0) for ref in (lse_ref, shift_ref))
        bounds = gpu_tile.whole_of(summary_ref, b, n)
        plgpu.barrier_wait(ready.at[warpgroup])

        def step(i, dq):
            m = walk.at(i)
            k_tile = ring.take(2 * i)
            dots = gpu_tile.product(q_mine, k_tile.transpose((1, 0)), shape)
            dweight = gpu_tile.product(dout_mine, ring.take(2 * i + 1).transpose((1, 0)), shape)
            ring.release(2 * i + 1)

            def hide(x):
                whole = blocks.inside(bounds, m)
                return gpu_tile.hide(x, ranges_ref.at[b, :, rows], m * plan.dq, whole, 0)

            weight, slope = _weights(plan, dots, lse, hide, 0)
            ddots = weight * (dweight + gpu_tile.along(shift, shape, 0)) * slope
            dq = gpu_tile.add_product(dq, ddots.astype(q_mine.dtype), k_tile)
            ring.release(2 * i)
            return dq

        dq = jax.lax.fori_loop(0, walk.steps, step, gpu_tile.zeros((ROWS, q_mine.shape[-1])))
        q_mine[...] = dq.astype(q_mine.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, dq_ref.at[b, rows, h])
        plgpu.wait_smem_to_gmem(0)


# --- dk and dv --------------------------------------------------------------------------------------------------------


def _run_dkv(plan, arrays, parts: tuple[str, ...]):
    """Runs the kernel that makes `parts` of 'dk', 'dv'."""
    q_BQHC, k_BSJC, *_, ranges_B4Q, _, _ = arrays
    (B, Q, H, C), (_, S, J, _), dtype = q_BQHC.shape, k_BSJC.shape, k_BSJC.dtype
    summary_BN8, _ = gpu_tile.table(ranges_B4Q, S, plan.dkv, BLOCK)
    tables = summary_BN8, gpu_tile.turned(summary_BN8, S // BLOCK)
    grid, scratch = (J, S // BLOCK, B), _scratch(plan.dkv, C, dtype)
    out = (jax.ShapeDtypeStruct(k_BSJC.shape, dtype),) * len(parts)
    kernel = functools.partial(_kernel_dkv, parts)
    run = functools.partial(gpu_tile.call, kernel, plan, (*arrays, *tables), out, scratch)
    return run(grid=grid, products=1 + len(parts) + ("dk" in parts), logits=B * H * Q * S)


def _add(totals, weight, slope, shift, v_smem, q_tile, dout_tile) -> tuple[jax.Array, ...]:
    """Adds the parts of a tile to the sums of the same names."""
    if "dv" in totals:
        totals["dv"] = gpu_tile.add_product(totals["dv"], weight.astype(q_tile.dtype), dout_tile)
    if "dk" in totals:
        dweight = gpu_tile.product(v_smem, dout_tile.transpose((1, 0)), weight.shape)
        ddots = weight * (dweight + gpu_tile.along(shift, weight.shape, 1)) * slope
        totals["dk"] = gpu_tile.add_product(totals["dk"], ddots.astype(q_tile.dtype), q_tile)
    return tuple(totals.values())


def _kernel_dkv(
    parts, plan, q_ref, k_ref, v_ref, dout_ref, ranges_ref, lse_ref, shift_ref, summary_ref, bounds_ref, *refs
):
    outs, (held, ring, ready) = refs[: len(parts)], refs[len(parts) :]
    b, j, warpgroup = (jax.lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    m, group = jax.lax.axis_index("block"), q_ref.shape[2] // k_ref.shape[2]
    walk = gpu_tile.walk_of(bounds_ref, b, m)

    def place(step):
        """The head and the queries of a step: the whole walk for one head, then for the next."""
        return j * group + step // walk.steps, walk.at(step % walk.steps)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")

        def sources(step):
            h, n = place(step)
            rows = pl.ds(n * plan.dkv, plan.dkv)
            return q_ref.at[b, rows, h], dout_ref.at[b, rows, h]

        ring.fill(walk.steps * group, sources)

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        first = m * BLOCK + warpgroup * ROWS
        keys, mine = pl.ds(first, ROWS), [x.at[warpgroup] for x in held]
        for ref, smem in zip((k_ref, v_ref), mine, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[b, keys, j], smem, ready.at[warpgroup])
        plgpu.barrier_wait(ready.at[warpgroup])

        def step(i, totals):
            h, n = place(i)
            rows = pl.ds(n * plan.dkv, plan.dkv)
            lse, shift = (gpu_tile.rows_of(ref.at[b, h, rows], 1) for ref in (lse_ref, shift_ref))
            whole = blocks.inside(gpu_tile.whole_of(summary_ref, b, n), m)

            def hide(x):
                return gpu_tile.hide(x, ranges_ref.at[b, :, rows], first, whole, 1)

            q_tile = ring.take(2 * i)
            dots = gpu_tile.product(mine[0], q_tile.transpose((1, 0)), (ROWS, plan.dkv))
            weight, slope = _weights(plan, dots, lse, hide, 1)
            found, dout_tile = dict(zip(parts, totals, strict=True)), ring.take(2 * i + 1)
            totals = _add(found, weight, slope, shift, mine[1], q_tile, dout_tile)
            ring.release(2 * i + 1)
            ring.release(2 * i)
            return totals

        start = (gpu_tile.zeros((ROWS, mine[0].shape[-1])),) * len(parts)
        totals = jax.lax.fori_loop(0, walk.steps * group, step, start)
        for total, smem, ref in zip(totals, mine, outs, strict=False):
            smem[...] = total.astype(smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, ref.at[b, keys, j])
        plgpu.wait_smem_to_gmem(0)
