"""What the two passes of the implementations share around their kernels: dtypes, tiles, names, cotangents."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


def check_dtypes(name: str, dtypes: Sequence[str], mend: str, *arrays) -> None:
    """Refuses q, k and v that are not of one dtype of `dtypes`. Raises: ValueError, with the mend."""
    if len({x.dtype for x in arrays}) > 1 or arrays[0].dtype not in dtypes:
        found = ", ".join(str(x.dtype) for x in arrays)
        raise ValueError(f"attention {name!r} takes q, k, v of one dtype of {dtypes}, got {found}: {mend}")


def pad(x, axis: int, tile: int) -> jax.Array:
    """Fills an axis up to whole tiles with zeros."""
    more = -x.shape[axis] % tile
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)]) if more else x


def named(out_BQHC, lse_BQH) -> tuple[jax.Array, jax.Array]:
    """Names both, so that a remat policy can keep them: a layer that is computed again computes no attention again."""
    return checkpoint_name(out_BQHC, "attention"), checkpoint_name(lse_BQH, "attention")


def cotangents(out_BQHC, lse_BQH, dout_BQHC, dlse_BQH) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Prepares the backward pass, ds = p (dout.v + shift): (dout, lse, shift), 0 for queries that see nothing.

    shift = dlse - dout.out: the cotangent of lse joins the row sum.
    """
    seen_BQH = lse_BQH > -jnp.inf
    dout_BQHC = jnp.where(seen_BQH[..., None], dout_BQHC, 0).astype(out_BQHC.dtype)
    along_BQH = jnp.sum(dout_BQHC.astype(jnp.float32) * out_BQHC.astype(jnp.float32), axis=-1)
    return dout_BQHC, jnp.where(seen_BQH, lse_BQH, 0), jnp.where(seen_BQH, dlse_BQH, 0) - along_BQH
