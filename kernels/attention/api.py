"""The attention op: one mask rule, chosen implementation.

Every query q carries two half-open key ranges in row indices:

    visible(q, k) = lo1 <= k < hi1  or  lo2 <= k < hi2

A plain causal row uses range 2 only. Both ranges empty (padding): the output is exactly 0.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rsi_jax.kernels.attention import cpu, reference


class Ranges(NamedTuple):
    """Key ranges of each query, int32 [B, T], in row indices of the keys. lo >= hi means empty."""

    lo1: jax.Array
    hi1: jax.Array
    lo2: jax.Array
    hi2: jax.Array

    def window(self, positions_BT: jax.Array, width: int) -> "Ranges":
        """Narrows both ranges to the last `width` positions, the query's own included (a sliding window).

        positions_BT: position of each query inside its sequence; on a branch it runs on from the insertion point.
        Range 1 must begin at the start of the query's sequence, range 2 must end at the query.
        """
        lo1 = self.lo1 + jnp.maximum(0, positions_BT - width + 1)
        return Ranges(lo1, self.hi1, jnp.maximum(self.lo2, self.hi2 - width), self.hi2)


def causal_ranges(length_B: jax.Array, tokens: int) -> Ranges:
    """Makes the ranges of right-padded causal rows: query t < length sees keys [0, t]; padding sees nothing."""
    query_BT = jnp.broadcast_to(jnp.arange(tokens), (length_B.shape[0], tokens))
    used_BT = query_BT < length_B[:, None]
    zero_BT = jnp.zeros_like(query_BT)
    return Ranges(zero_BT, zero_BT, zero_BT, jnp.where(used_BT, query_BT + 1, 0))


def attention(
    q_BTHC: jax.Array,
    k_BTJC: jax.Array,
    v_BTJC: jax.Array,
    ranges: Ranges,
    *,
    scale: float,
    soft_cap: float = 0.0,
    implementation: str = "cpu",
) -> jax.Array:
    """Attends over a whole row: softmax(scale q.k, capped, masked by `ranges`) v, grouped heads.

    soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 = none.
    implementation: 'reference' (O(T^2) memory) | 'cpu' (chunks of queries, keys behind a query skipped; runs on every
      platform). Another name raises ValueError.
    Returns: [B, T, H, C] in the dtype of q; rows with empty ranges are exactly 0.
    """
    chex.assert_rank([q_BTHC, k_BTJC, v_BTJC], 4)
    chex.assert_equal_shape([k_BTJC, v_BTJC])
    known = {"reference": reference.attention, "cpu": cpu.attention}
    if implementation not in known:
        raise ValueError(f"attention has no implementation {implementation!r}; known: {', '.join(known)}")
    k_BJTC, v_BJTC = (jnp.swapaxes(x, 1, 2) for x in (k_BTJC, v_BTJC))
    return known[implementation](q_BTHC, k_BJTC, v_BJTC, ranges, scale=scale, soft_cap=soft_cap)


def decode_attention(
    q_BOHC: jax.Array,
    k_BJSC: jax.Array,
    v_BJSC: jax.Array,
    ranges: Ranges,
    *,
    scale: float,
    soft_cap: float = 0.0,
) -> jax.Array:
    """Attends from a few new queries over the KV cache (keys major over time, so that no copy is made on a step).

    ranges: [B, O] per query, in cache indices.
    Returns: [B, O, H, C].
    """
    chex.assert_rank([q_BOHC, k_BJSC, v_BJSC], 4)
    return reference.attention(q_BOHC, k_BJSC, v_BJSC, ranges, scale=scale, soft_cap=soft_cap)


def visible(ranges: Ranges, keys: int) -> jax.Array:
    """Materialises the rule as a boolean [B, T, keys]; for the reference and for tests."""
    return reference.visible(ranges, keys)
