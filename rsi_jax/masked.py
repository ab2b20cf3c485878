"""Means, variances and group statistics that hold for any mask.

Everything here selects with `where` and never multiplies by a mask, so NaN or infinity at a masked position changes
neither a value nor a gradient. A statistic of nothing is 0, never NaN. `axis_name` makes a statistic global over a
mapped axis (shard_map, pmap, vmap): the sharded call then equals the unsharded one, also where a shard is empty.

Group statistics take one value per rollout and give one per rollout: that of its group. They count the rows with
weight > 0 and a finite value; the weight tells membership, it does not scale.
"""

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

# A group or batch whose values spread no further than this has no signal: rewards are O(1) in float32.
SPREAD = 1e-6


def zero(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Sets masked entries to 0: x where mask, else 0. No gradient reaches a masked entry."""
    return jnp.where(mask, x, jnp.zeros_like(x))


def apply(fn: Callable[[jax.Array], jax.Array], x: jax.Array, mask: jax.Array, *, safe: float = 0.0) -> jax.Array:
    """Maps fn over the kept entries: fn(x) where mask, else 0, with a finite gradient whatever stands at the rest.

    The double `where`: fn never sees a masked entry (it sees `safe`), so exp, log and sqrt cannot leak inf * 0.

    Args:
      fn: elementwise function, finite with a finite derivative at `safe`.
      x: any shape.
      mask: bool, the shape of x; True = keep.
      safe: what fn is given at masked entries.
    """
    chex.assert_equal_shape([x, mask])
    return zero(fn(jnp.where(mask, x, safe)), mask)


def sum(x: jax.Array, mask: jax.Array, *, axis: int | None = None, axis_name: str | None = None) -> jax.Array:
    """Sums the kept entries in float32.

    Args:
      x: any shape and numeric or bool type.
      mask: bool, the shape of x; True = keep.
      axis: reduced axis; None = all.
      axis_name: mapped axis to sum over as well.
    """
    chex.assert_equal_shape([x, mask])
    chex.assert_type(mask, bool)
    total = jnp.sum(zero(x.astype(jnp.float32), mask), axis=axis)
    return total if axis_name is None else jax.lax.psum(total, axis_name)


def count(mask: jax.Array, *, axis: int | None = None, axis_name: str | None = None) -> jax.Array:
    """Counts the kept entries, as float32."""
    return sum(mask, mask, axis=axis, axis_name=axis_name)


def mean(x: jax.Array, mask: jax.Array, *, axis: int | None = None, axis_name: str | None = None) -> jax.Array:
    """Averages the kept entries: Σ x / n, and 0 when n = 0. Arguments as in `sum`."""
    total = sum(x, mask, axis=axis, axis_name=axis_name)
    return total / jnp.maximum(count(mask, axis=axis, axis_name=axis_name), 1.0)


def var(
    x: jax.Array,
    mask: jax.Array,
    *,
    bessel: bool = True,
    axis: int | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """Variance of the kept entries, in two passes: Σ (x - mean)² / (n - 1), and 0 when n < 2.

    Args:
      x, mask, axis, axis_name: as in `sum`.
      bessel: divide by n - 1 (unbiased); False divides by n.
    """
    centre = mean(x, mask, axis=axis, axis_name=axis_name)
    deviation = zero(x, mask) - (centre if axis is None else jnp.expand_dims(centre, axis))
    total = sum(jnp.square(deviation), mask, axis=axis, axis_name=axis_name)
    n = count(mask, axis=axis, axis_name=axis_name)
    return total / jnp.maximum(n - 1.0 if bessel else n, 1.0)


def whiten(
    x: jax.Array,
    mask: jax.Array,
    *,
    shift_mean: bool = True,
    floor: float = SPREAD,
    axis_name: str | None = None,
) -> jax.Array:
    """Scales the kept entries to unit variance: (x - mean) / std, or x / std when shift_mean is False.

    Std is the unbiased one over all kept entries (of all shards with axis_name): one affine map for the whole batch.
    Without signal (std <= floor) nothing is amplified: the deviation is 0, and x / std is x.

    Args:
      x: any shape.
      mask: bool, the shape of x; masked entries give 0.
      shift_mean: False keeps the mean and only scales; it does not add the mean back after centring.
      floor: std at or below which the entries count as constant, > 0.
      axis_name: mapped axis over which the statistics are global.

    Source: Andrychowicz et al. 2020 (https://arxiv.org/abs/2006.05990), C67 advantage normalisation.
    Differs: no epsilon beside the std, so constant entries give exactly 0 and others an exact unit variance.
    """
    variance = var(x, mask, axis_name=axis_name)
    signal = variance > floor**2
    scale = jnp.where(signal, jax.lax.rsqrt(jnp.where(signal, variance, 1.0)), 0.0 if shift_mean else 1.0)
    centre = mean(x, mask, axis_name=axis_name) if shift_mean else 0.0
    return zero((zero(x, mask) - centre) * scale, mask)


def counted(values_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """True for the rows that enter group statistics: weight > 0 and a finite value."""
    chex.assert_rank([values_B, weight_B], 1)
    chex.assert_equal_shape([values_B, weight_B])
    return (weight_B > 0) & jnp.isfinite(values_B)


def group_sum(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Sums the counted rows of each group; row b gets the sum of its group.

    Args:
      values_B: one value per rollout, e.g. its return; NaN and infinity are left out.
      group_B: int, group of each row, in [0, B).
      weight_B: rows with weight 0 are left out (but still receive their group's statistic).
    """
    chex.assert_equal_shape([values_B, group_B, weight_B])
    chex.assert_type(group_B, int)
    kept_B = zero(values_B.astype(jnp.float32), counted(values_B, weight_B))
    return jax.ops.segment_sum(kept_B, group_B, num_segments=group_B.shape[0])[group_B]


def group_size(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Counts the counted rows of each group, as float32. Arguments as in `group_sum`."""
    ones_B = jnp.where(jnp.isfinite(values_B), 1.0, jnp.nan)
    return group_sum(ones_B, group_B, weight_B)


def group_mean(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Averages the counted rows of each group; 0 for a group without any. Arguments as in `group_sum`."""
    size_B = group_size(values_B, group_B, weight_B)
    return group_sum(values_B, group_B, weight_B) / jnp.maximum(size_B, 1.0)


def group_std(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array, *, bessel: bool = True) -> jax.Array:
    """Standard deviation of the counted rows of each group; 0 below two rows. Arguments as in `group_sum`.

    The gradient at zero variance is 0, not infinite.
    """
    deviation_B = values_B - group_mean(values_B, group_B, weight_B)
    total_B = group_sum(jnp.square(deviation_B), group_B, weight_B)
    size_B = group_size(values_B, group_B, weight_B)
    variance_B = total_B / jnp.maximum(size_B - 1.0 if bessel else size_B, 1.0)
    return apply(jnp.sqrt, variance_B, variance_B > 0, safe=1.0)


def group_max(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Largest counted value of each group; 0 for a group without any. Arguments as in `group_sum`."""
    chex.assert_equal_shape([values_B, group_B, weight_B])
    chex.assert_type(group_B, int)
    kept_B = jnp.where(counted(values_B, weight_B), values_B.astype(jnp.float32), -jnp.inf)
    best_B = jax.ops.segment_max(kept_B, group_B, num_segments=group_B.shape[0])[group_B]
    return zero(best_B, jnp.isfinite(best_B))


def group_spread(values_B: jax.Array, group_B: jax.Array, weight_B: jax.Array) -> jax.Array:
    """Max - min over the counted rows of each group, >= 0. Arguments as in `group_sum`."""
    return group_max(values_B, group_B, weight_B) + group_max(-values_B, group_B, weight_B)


def count_groups(mask_B: jax.Array, group_B: jax.Array) -> jax.Array:
    """Counts the groups that have at least one row in the mask, as float32."""
    chex.assert_equal_shape([mask_B, group_B])
    found = jax.ops.segment_sum(mask_B.astype(jnp.int32), group_B, num_segments=group_B.shape[0])
    return jnp.sum(found > 0).astype(jnp.float32)


def segment_sum(x_BT: jax.Array, segment_BT: jax.Array, *, segments: int) -> jax.Array:
    """Sums tokens by segment, [B, T] to [B, S].

    Args:
      x_BT: one value per token.
      segment_BT: int, segment of each token; -1 leaves the token out.
      segments: S, the capacity of the segment table.
    """
    chex.assert_rank([x_BT, segment_BT], 2)
    chex.assert_equal_shape([x_BT, segment_BT])
    kept_BT = zero(x_BT.astype(jnp.float32), segment_BT >= 0)
    index_BT = jnp.where(segment_BT >= 0, segment_BT, segments)
    return jax.vmap(lambda x_T, index_T: jax.ops.segment_sum(x_T, index_T, num_segments=segments))(kept_BT, index_BT)


def segment_mean(x_BT: jax.Array, segment_BT: jax.Array, *, segments: int) -> jax.Array:
    """Averages tokens by segment; 0 for an empty segment. Arguments as in `segment_sum`."""
    size_BS = segment_sum(jnp.ones_like(x_BT, jnp.float32), segment_BT, segments=segments)
    return segment_sum(x_BT, segment_BT, segments=segments) / jnp.maximum(size_BS, 1.0)
