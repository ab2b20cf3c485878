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

from rsi_jax.kernels.attention import gpu_tile
from rsi_jax.kernels.attention.gpu_tile import BLOCK, LOG2E, ROWS, STAGES, WARPGROUPS


def gradients(plan, q_BQHC, k_BSJC, v_BSJC, dout_BQHC, ranges_B4Q, lse_BHQ, shift_BHQ):
    """Pulls dout back, in whole tiles: dq, dk, dv.

    lse_BHQ: in powers of 2, 0 where nothing is seen. shift_BHQ: dlse - dout.out.
    """
    arrays = q_BQHC, k_BSJC, v_BSJC, dout_BQHC, ranges_B4Q, lse_BHQ, shift_BHQ
    wide = q_BQHC.shape[-1] > 128  # the sums of both do not fit the registers: a pass for each
    parts = ((_kernel_dv, 1), (_kernel_dk, 1)) if wide else ((_kernel_dk_dv, 2),)
    found = [_run_dkv(plan, arrays, kernel, sums) for kernel, sums in parts]
    dv, dk = (x for part in found for x in part)
    return _run_dq(plan, arrays), dk, dv


def _weights(plan, dots, lse, ranges, first_key, whole, axis: int):
    """The weights of a tile, and what the derivative of the logits by the dots is."""
    x, unit = gpu_tile.cap(plan, dots)
    slope = (1.0 - x * x) * plan.scale if plan.soft_cap else plan.scale
    x = gpu_tile.hide(x, ranges, first_key, whole, axis)
    return jnp.exp2(x * (unit * LOG2E) - gpu_tile.along(lse, x.shape, axis)), slope


# --- dq ---------------------------------------------------------------------------------------------------------------


def _run_dq(plan, arrays):
    q_BQHC, k_BSJC, *_, ranges_B4Q, _, _ = arrays
    (B, Q, H, C), S, dtype = q_BQHC.shape, k_BSJC.shape[1], q_BQHC.dtype
    tables = gpu_tile.table(ranges_B4Q, S, BLOCK, plan.dq)
    rows, tiles = plgpu.SMEM((WARPGROUPS, ROWS, C), dtype), plgpu.SMEM((STAGES, plan.dq, C), dtype)
    scratch = (
        (rows, rows),
        (tiles, tiles),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    )
    out = (jax.ShapeDtypeStruct(q_BQHC.shape, dtype),)
    grid, logits = (H, Q // BLOCK, B), B * H * Q * S
    return gpu_tile.call(_kernel_dq, plan, (*arrays, *tables), out, scratch, grid=grid, products=3, logits=logits)[0]


def _kernel_dq(
    plan, q_ref, k_ref, v_ref, dout_ref, ranges_ref, lse_ref, shift_ref, summary_ref, bounds_ref, dq_ref, *scratch
):
    (q_smem, dout_smem), tiles, full, used, ready = scratch
    b, h, warpgroup = (jax.lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    n = q_ref.shape[1] // BLOCK - 1 - jax.lax.axis_index("block")
    walk = gpu_tile.walk_of(bounds_ref, b, n)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")
        j = h // (q_ref.shape[2] // k_ref.shape[2])

        @pl.loop(0, walk.steps)
        def _(step):
            slot, keys = gpu_tile.slot_of(step), pl.ds(walk.at(step) * plan.dq, plan.dq)
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(used.at[slot]))
            for ref, smem in zip((k_ref, v_ref), tiles, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[b, keys, j], smem.at[slot], full.at[slot])

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(n * BLOCK + warpgroup * ROWS, ROWS)
        q_mine, dout_mine = q_smem.at[warpgroup], dout_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_mine, ready.at[warpgroup])
        plgpu.copy_gmem_to_smem(dout_ref.at[b, rows, h], dout_mine, ready.at[warpgroup])
        ranges = [gpu_tile.rows_of(ranges_ref.at[b, i, rows], 0) for i in range(4)]
        lse, shift = (gpu_tile.rows_of(ref.at[b, h, rows], 0) for ref in (lse_ref, shift_ref))
        plgpu.barrier_wait(ready.at[warpgroup])
        shape, (k_tiles, v_tiles) = (ROWS, plan.dq), tiles

        def step(i, dq):
            slot, m = gpu_tile.slot_of(i), walk.at(i)
            whole = gpu_tile.sees_all(summary_ref, b, n, m)
            plgpu.barrier_wait(full.at[slot])
            dots = gpu_tile.product(q_mine, k_tiles.at[slot].transpose((1, 0)), shape)
            weight, slope = _weights(plan, dots, lse, ranges, m * plan.dq, whole, 0)
            dweight = gpu_tile.product(dout_mine, v_tiles.at[slot].transpose((1, 0)), shape)
            ddots = weight * (dweight + gpu_tile.along(shift, shape, 0)) * slope
            dq = gpu_tile.add_product(dq, ddots.astype(k_tiles.dtype), k_tiles.at[slot])
            plgpu.barrier_arrive(used.at[slot])
            return dq

        dq = jax.lax.fori_loop(0, walk.steps, step, gpu_tile.zeros((ROWS, q_mine.shape[-1])))
        q_mine[...] = dq.astype(q_mine.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, dq_ref.at[b, rows, h])
        plgpu.wait_smem_to_gmem(0)


# --- dk and dv --------------------------------------------------------------------------------------------------------


def _run_dkv(plan, arrays, kernel, sums: int):
    """Runs a kernel that walks over queries, and makes `sums` results of the shape of k."""
    q_BQHC, k_BSJC, *_, ranges_B4Q, lse_BHQ, shift_BHQ = arrays
    (B, Q, H, C), (_, S, J, _), dtype = q_BQHC.shape, k_BSJC.shape, k_BSJC.dtype
    summary_BN8, _ = gpu_tile.table(ranges_B4Q, S, plan.dkv, BLOCK)
    bounds_BM4 = gpu_tile.turned(summary_BN8, S // BLOCK)
    lines_BH2Q = jnp.stack([lse_BHQ, shift_BHQ], axis=2)
    rows, tiles = plgpu.SMEM((WARPGROUPS, ROWS, C), dtype), plgpu.SMEM((STAGES, plan.dkv, C), dtype)
    scratch = (
        (rows, rows),
        (tiles, tiles),
        plgpu.SMEM((STAGES, 4, plan.dkv), jnp.int32),
        plgpu.SMEM((STAGES, 2, plan.dkv), jnp.float32),
        plgpu.Barrier(num_arrivals=4, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
    )
    out = (jax.ShapeDtypeStruct(k_BSJC.shape, dtype),) * sums
    arrays = (*arrays[:5], lines_BH2Q, summary_BN8, bounds_BM4)
    grid, logits = (J, S // BLOCK, B), B * H * Q * S
    return gpu_tile.call(kernel, plan, arrays, out, scratch, grid=grid, products=1 + 3 * sums // 2, logits=logits)


def _walk_queries(add, sums, plan, q_ref, k_ref, v_ref, dout_ref, ranges_ref, lines_ref, summary_ref, bounds_ref, *refs):
    """Runs total = add(tile, total) over the queries that see a block of keys, and writes the totals to `sums` refs."""
    outs, (held, tiles, ranges_smem, lines_smem, full, used, ready) = refs[:sums], refs[sums:]
    b, j, warpgroup = (jax.lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    m, group = jax.lax.axis_index("block"), q_ref.shape[2] // k_ref.shape[2]
    walk = gpu_tile.walk_of(bounds_ref, b, m)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")

        @pl.loop(0, walk.steps * group)
        def _(step):
            slot, h = gpu_tile.slot_of(step), j * group + step // walk.steps
            rows = pl.ds(walk.at(step % walk.steps) * plan.dkv, plan.dkv)
            pl.when(step >= STAGES)(lambda: plgpu.barrier_wait(used.at[slot]))
            for ref, smem in zip((q_ref, dout_ref), tiles, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[b, rows, h], smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(ranges_ref.at[b, :, rows], ranges_smem.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(lines_ref.at[b, h, :, rows], lines_smem.at[slot], full.at[slot])

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        keys = pl.ds(m * BLOCK + warpgroup * ROWS, ROWS)
        mine = [x.at[warpgroup] for x in held]
        for ref, smem in zip((k_ref, v_ref), mine, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[b, keys, j], smem, ready.at[warpgroup])
        plgpu.barrier_wait(ready.at[warpgroup])
        first = m * BLOCK + warpgroup * ROWS

        def step(i, totals):
            slot = gpu_tile.slot_of(i)
            whole = gpu_tile.sees_all(summary_ref, b, walk.at(i % walk.steps), m)
            plgpu.barrier_wait(full.at[slot])
            ranges = [gpu_tile.rows_of(ranges_smem.at[slot, r], 1) for r in range(4)]
            lse, shift = (gpu_tile.rows_of(lines_smem.at[slot, r], 1) for r in range(2))
            q_tile, dout_tile = (x.at[slot] for x in tiles)
            dots = gpu_tile.product(mine[0], q_tile.transpose((1, 0)), (ROWS, plan.dkv))
            weight, slope = _weights(plan, dots, lse, ranges, first, whole, 1)
            totals = add(totals, weight, slope, shift, mine[1], q_tile, dout_tile)
            plgpu.barrier_arrive(used.at[slot])
            return totals

        start = (gpu_tile.zeros((ROWS, mine[0].shape[-1])),) * sums
        totals = jax.lax.fori_loop(0, walk.steps * group, step, start)
        for total, smem, ref in zip(totals, mine, outs, strict=False):
            smem[...] = total.astype(smem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, ref.at[b, keys, j])
        plgpu.wait_smem_to_gmem(0)


def _add_dv(dv, weight, dout_tile):
    return gpu_tile.add_product(dv, weight.astype(dout_tile.dtype), dout_tile)


def _add_dk(dk, weight, slope, shift, v_mine, q_tile, dout_tile):
    dweight = gpu_tile.product(v_mine, dout_tile.transpose((1, 0)), weight.shape)
    ddots = weight * (dweight + gpu_tile.along(shift, weight.shape, 1)) * slope
    return gpu_tile.add_product(dk, ddots.astype(q_tile.dtype), q_tile)


def _dv(totals, weight, slope, shift, v_mine, q_tile, dout_tile):
    return (_add_dv(totals[0], weight, dout_tile),)


def _dk(totals, weight, slope, shift, v_mine, q_tile, dout_tile):
    return (_add_dk(totals[0], weight, slope, shift, v_mine, q_tile, dout_tile),)


def _dv_dk(totals, weight, slope, shift, v_mine, q_tile, dout_tile):
    dv = _add_dv(totals[0], weight, dout_tile)
    return dv, _add_dk(totals[1], weight, slope, shift, v_mine, q_tile, dout_tile)


def _kernel_dv(plan, *refs):
    _walk_queries(_dv, 1, plan, *refs)


def _kernel_dk(plan, *refs):
    _walk_queries(_dk, 1, plan, *refs)


def _kernel_dk_dv(plan, *refs):
    _walk_queries(_dv_dk, 2, plan, *refs)
