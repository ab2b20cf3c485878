"""Attention on a Hopper GPU: Pallas kernels on Mosaic GPU with linear memory that read no key block that nobody sees.

Products take in bfloat16 or float16 (wgmma), sums and the softmax are float32; what is multiplied with them is rounded
to the dtype of the input, as in 'chunked'. A block of 128 queries walks over the key blocks that any of them sees, by a
table of a few integers per block; tiles that are seen whole take no mask. The heads of a group read their kv head where
it lies, as no copy.

Source: Dao et al. 2022 (arXiv 2205.14135), the two passes; Shah et al. 2024 (arXiv 2407.08608), one warpgroup that
copies, and two that compute by turns.
"""

import functools

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from rsi_jax.kernels.attention import blocks, chunked, gpu_backward, gpu_device, gpu_tile, passes
from rsi_jax.kernels.attention.gpu_tile import BLOCK, LOG2E, ROWS, WARPGROUPS

DTYPES = ("bfloat16", "float16")


def attention(q_BQHC, k_BJSC, v_BJSC, ranges, *, scale: float, soft_cap: float) -> tuple[jax.Array, jax.Array]:
    """Same results as the reference, keys major over time: (out_BQHC, lse_BQH).

    Any sizes: queries, keys and heads that fill no whole tile are filled up with what nobody sees.
    Raises: ValueError where the mesh names a device other than sm90, for dtypes other than one of DTYPES, for heads
      above 256, and where scale <= 0.
    """
    (B, Q, H, C), S = q_BQHC.shape, k_BJSC.shape[2]
    mend = "wgmma multiplies no float32; set dtype=bfloat16, or compute.attention=chunked"
    passes.check_dtypes("mosaic_gpu", DTYPES, mend, q_BQHC, k_BJSC, v_BJSC)
    if scale <= 0:
        raise ValueError(f"attention 'mosaic_gpu' takes a scale > 0, got {scale}: set compute.attention=chunked")
    if kind := gpu_tile.traced_kind():
        gpu_device.check(kind)
    plan = gpu_tile.plan_of(gpu_tile.padded_head(C), scale=scale, soft_cap=soft_cap)
    if not B * Q * S:
        return jnp.zeros_like(q_BQHC), jnp.full((B, Q, H), -jnp.inf, jnp.float32)
    ranges_B4Q = jnp.stack([jnp.clip(x, 0, S).astype(jnp.int32) for x in ranges], axis=1)
    return _attend(plan, q_BQHC, *(jnp.swapaxes(x, 1, 2) for x in (k_BJSC, v_BJSC)), ranges_B4Q)


def _tiled(x_BQHC):
    return passes.pad(passes.pad(x_BQHC, 1, BLOCK), 3, 64)


def _rows(x_BQH):
    """[B, Q, H] -> [B, H, Q], in whole tiles."""
    return passes.pad(jnp.swapaxes(x_BQH, 1, 2), 2, BLOCK)


def _forward(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q):
    q, k, v = (_tiled(x) for x in (q_BQHC, k_BSJC, v_BSJC))
    out_BQHC, lse_BHQ = forward(plan, q, k, v, passes.pad(ranges_B4Q, 2, BLOCK))
    Q, C = q_BQHC.shape[1], q_BQHC.shape[3]
    return out_BQHC[:, :Q, :, :C], jnp.swapaxes(lse_BHQ, 1, 2)[:, :Q]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q):
    return _forward(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q)


def _attend_fwd(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q):
    out, lse = passes.named(*_forward(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q))
    return (out, lse), (q_BQHC, k_BSJC, v_BSJC, ranges_B4Q, out, lse)


def _attend_bwd(plan, saved, cotangents):
    """Gradients in the dtypes of q, k and v."""

    @sequential_vmap  # a map over several cotangents, as over the terms of a loss
    def gradients(saved, cotangents):
        q_BQHC, k_BSJC, v_BSJC, ranges_B4Q, out_BQHC, lse_BQH = saved
        dout_BQHC, lse_BQH, shift_BQH = passes.cotangents(out_BQHC, lse_BQH, *cotangents)
        lse_BHQ, shift_BHQ = _rows(lse_BQH * LOG2E), _rows(shift_BQH)
        q, k, v, dout = (_tiled(x) for x in (q_BQHC, k_BSJC, v_BSJC, dout_BQHC))
        found = gpu_backward.gradients(plan, q, k, v, dout, passes.pad(ranges_B4Q, 2, BLOCK), lse_BHQ, shift_BHQ)
        C = q_BQHC.shape[3]
        return tuple(grad[:, : x.shape[1], :, :C] for grad, x in zip(found, saved[:3], strict=True))

    return *gradients(saved, cotangents), None


_attend.defvjp(_attend_fwd, _attend_bwd)


# --- the forward pass -------------------------------------------------------------------------------------------------


def forward(plan, q_BQHC, k_BSJC, v_BSJC, ranges_B4Q) -> tuple[jax.Array, jax.Array]:
    """Attends, in whole tiles: (out_BQHC, lse_BHQ)."""
    (B, Q, H, C), S, dtype = q_BQHC.shape, k_BSJC.shape[1], q_BQHC.dtype
    summary_BN8, bounds_BN4 = gpu_tile.table(ranges_B4Q, S, BLOCK, plan.forward)
    scratch = (
        plgpu.SMEM((WARPGROUPS, ROWS, C), dtype),
        plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        gpu_tile.ring(BLOCK, plan.forward, C, dtype),
        plgpu.Barrier(num_barriers=WARPGROUPS),
        plgpu.Barrier(num_barriers=WARPGROUPS),
    )
    out = jax.ShapeDtypeStruct(q_BQHC.shape, dtype), jax.ShapeDtypeStruct((B, H, Q), jnp.float32)
    arrays = q_BQHC, k_BSJC, v_BSJC, ranges_B4Q, summary_BN8, bounds_BN4
    grid = H, Q // BLOCK, B
    return gpu_tile.call(_kernel, plan, arrays, out, scratch, grid=grid, products=2, logits=B * H * Q * S)


def _kernel(plan, q_ref, k_ref, v_ref, ranges_ref, summary_ref, bounds_ref, out_ref, lse_ref, *scratch):
    q_smem, lse_smem, ring, ready, turn = scratch
    b, h, warpgroup = (jax.lax.axis_index(name) for name in ("row", "head", "warpgroup"))
    n = q_ref.shape[1] // BLOCK - 1 - jax.lax.axis_index("block")  # the longest of a causal row come first
    walk = gpu_tile.walk_of(bounds_ref, b, n)

    @pl.when(warpgroup == WARPGROUPS)
    def _copy():
        plgpu.set_max_registers(40, action="decrease")
        j = h // (q_ref.shape[2] // k_ref.shape[2])
        ring.fill_keys(walk, plan.forward, k_ref.at[b, :, j], v_ref.at[b, :, j])

    @pl.when(warpgroup < WARPGROUPS)
    def _compute():
        plgpu.set_max_registers(232, action="increase")
        rows = pl.ds(n * BLOCK + warpgroup * ROWS, ROWS)
        q_mine, lse_mine = q_smem.at[warpgroup], lse_smem.at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[b, rows, h], q_mine, ready.at[warpgroup])
        bounds = gpu_tile.whole_of(summary_ref, b, n)
        plgpu.barrier_wait(ready.at[warpgroup])

        def hide(x, m):
            whole = blocks.inside(bounds, m)
            return gpu_tile.hide(x, ranges_ref.at[b, :, rows], m * plan.forward, whole, 0)

        out, lse = _softmax(plan, walk, hide, q_mine, ring, turn)
        q_mine[...] = out.astype(q_mine.dtype)
        lse_mine[...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_mine, out_ref.at[b, rows, h])
        plgpu.copy_smem_to_gmem(lse_mine, lse_ref.at[b, h, rows])
        plgpu.wait_smem_to_gmem(0)


def _softmax(plan, walk, hide, q_smem, ring, turn):
    """Runs the softmax of a warpgroup over its walk: (out, lse).

    The two warpgroups take turns on the tensor cores: one multiplies while the other takes exponentials.
    """
    shape, C = (ROWS, plan.forward), q_smem.shape[-1]
    mine = jax.lax.axis_index("warpgroup")
    pl.when(mine == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))  # the first one begins
    plgpu.barrier_wait(turn.at[mine])

    def step(i, carry):
        top, total, out = carry
        dots = gpu_tile.product(q_smem, ring.take(2 * i).transpose((1, 0)), shape)
        ring.release(2 * i)
        plgpu.barrier_arrive(turn.at[1 - mine])
        x, unit = gpu_tile.cap(plan, dots)
        x = hide(x, walk.at(i))
        new_top = jnp.maximum(top, jnp.max(x, axis=1) * (unit * LOG2E))
        weight, shrink = jnp.exp2(x * (unit * LOG2E) - gpu_tile.along(new_top, shape, 0)), jnp.exp2(top - new_top)
        total, out = total * shrink + jnp.sum(weight, axis=1), out * gpu_tile.along(shrink, out.shape, 0)
        weight, v_tile = weight.astype(q_smem.dtype), ring.take(2 * i + 1)
        plgpu.barrier_wait(turn.at[mine])
        out = gpu_tile.add_product(out, weight, v_tile)
        ring.release(2 * i + 1)
        return new_top, total, out

    start = gpu_tile.zeros((ROWS,)) + chunked.FLOOR, gpu_tile.zeros((ROWS,)), gpu_tile.zeros((ROWS, C))
    top, total, out = jax.lax.fori_loop(0, walk.steps, step, start)
    pl.when(mine == 0)(lambda: plgpu.barrier_arrive(turn.at[1]))
    some = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top / LOG2E + jnp.log(some), -jnp.inf)
    return out * gpu_tile.along(1.0 / some, out.shape, 0), lse
