"""How a quantity is spread over tokens, as sums: histograms merge by addition, quantiles and tails are read off them.

A histogram keeps, for each bin, how many values fell into it and their sum. So what is read off is made of means of
bins: exact where the values of a bin agree, else within the width of one bin, and the same for any micro-batching.
"""

import jax
import jax.numpy as jnp

from rsi_jax import masked

BINS = 512
LOG_RATIO = (-2.555, 2.565)  # nats: bins of 0.01, the one around 0 holds what is on-policy up to rounding
ENTROPY = (0.0, 12.8)  # nats: bins of 0.025, up to a vocabulary of 360,000


def histogram(x_BT: jax.Array, mask_BT: jax.Array, low: float, high: float) -> jax.Array:
    """Counts and sums the kept entries by bin, BINS of equal width over [low, high); the end bins take what is beyond.

    Args:
      x_BT: any shape; NaN at a kept entry makes the sums NaN.
      mask_BT: bool, the shape of x_BT.
      low, high: edges, low < high.

    Returns: float32 [2, BINS]: counts, and sums of the values. Add those of micro-batches.
    """
    kept_BT = masked.zero(jax.lax.stop_gradient(x_BT.astype(jnp.float32)), mask_BT)
    bin_BT = jnp.floor((jnp.clip(kept_BT, low, high) - low) / (high - low) * BINS).astype(jnp.int32)
    add_2BT = jnp.stack([mask_BT.astype(jnp.float32), kept_BT])
    return jnp.zeros((2, BINS)).at[:, jnp.clip(bin_BT, 0, BINS - 1)].add(add_2BT)


def quantile(histogram_2N: jax.Array, share: float) -> jax.Array:
    """Reads the smallest value that at least `share` of the values do not exceed; 0 of nothing.

    Args:
      histogram_2N: from `histogram`, summed over micro-batches.
      share: in (0, 1]; 0.5 = the (lower) median.

    Returns: the mean of the bin that holds it.
    """
    count_N, sum_N = histogram_2N
    upto_N = jnp.cumsum(count_N)
    place = jnp.argmax(upto_N >= share * upto_N[-1] * (1 - 1e-6))  # 1e-6: rounding of the product must not skip a bin
    return sum_N[place] / jnp.maximum(count_N[place], 1.0)


def top_mean(histogram_2N: jax.Array, share: float) -> jax.Array:
    """Averages the largest `share` of the values: whole bins from the top, the last one at its mean; 0 of nothing.

    Args:
      histogram_2N: from `histogram`, summed over micro-batches.
      share: in (0, 1]; 1 = the mean of all.
    """
    count_N, sum_N = histogram_2N
    wanted = share * jnp.sum(count_N)
    above_N = jnp.cumsum(count_N[::-1])[::-1] - count_N
    taken_N = jnp.clip(wanted - above_N, 0.0, count_N)
    total = jnp.sum(taken_N * sum_N / jnp.maximum(count_N, 1.0))
    return total / jnp.where(wanted > 0, wanted, 1.0)
