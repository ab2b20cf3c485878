"""The attention op: one mask rule, chosen implementation.

Every query q carries two half-open ranges of keys:

    visible(q, k) = lo1 <= k < hi1  or  lo2 <= k < hi2

The ranges are in key indices: there may be more keys than queries, and query i need not be key i. Any ranges are valid;
those of a plain causal row are (empty, [0, q + 1)). A query that sees nothing (padding) gives exactly 0, log-sum-exp
-inf, and no gradient.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rsi_jax.kernels.attention import chunked, gpu_device, reference


def _tpu(*arrays, **knobs):
    from rsi_jax.kernels.attention import tpu  # Pallas takes a second to import

    return tpu.attention(*arrays, **knobs)


def _mosaic_gpu(*arrays, **knobs):
    from rsi_jax.kernels.attention import gpu

    return gpu.attention(*arrays, **knobs)


IMPLEMENTATIONS = {
    "reference": reference.attention,
    "chunked": chunked.attention,
    "tpu": _tpu,
    "mosaic_gpu": _mosaic_gpu,
}
DEFAULTS = {"cpu": "chunked", "gpu": "chunked", "cuda": "chunked", "tpu": "tpu"}  # platform: implementation
ONE_DEVICE = {  # XLA splits no Pallas kernel: what it runs on, and whether a device kind is that
    "tpu": ("TPU", lambda kind: kind.startswith("TPU")),
    "mosaic_gpu": (" or ".join(gpu_device.KINDS), gpu_device.fits),
}
FEW = 32  # queries that score the whole cache at once: faster on a decode step than the loop over blocks
CACHE_BLOCK = 512  # keys of a block for more of them; a chunk of a prompt has few query blocks, so long key blocks win


class Ranges(NamedTuple):
    """Key ranges of each query, int32 [B, Q], in key indices. lo >= hi means empty.

    The two ranges of a query are disjoint, or one is empty. (Keys in both would still count once: the rule is an or.)
    """

    lo1: jax.Array
    hi1: jax.Array
    lo2: jax.Array
    hi2: jax.Array

    def window(self, positions_BQ: jax.Array, width: int) -> "Ranges":
        """Narrows both ranges to the last `width` positions, the query's own included (a sliding window).

        positions_BQ: position of each query inside its sequence; on a branch it runs on from the insertion point.
        Range 1 must begin at the start of the query's sequence, range 2 must end at the query: hi2 - 1 is the key that
        the query itself is.
        """
        lo1 = self.lo1 + jnp.maximum(0, positions_BQ - width + 1)
        return Ranges(lo1, self.hi1, jnp.maximum(self.lo2, self.hi2 - width), self.hi2)


def causal_ranges(length_B: jax.Array, tokens: int) -> Ranges:
    """Makes the ranges of right-padded causal rows: query t < length sees keys [0, t]; padding sees nothing."""
    query_BT = jnp.broadcast_to(jnp.arange(tokens), (length_B.shape[0], tokens))
    used_BT = query_BT < length_B[:, None]
    zero_BT = jnp.zeros_like(query_BT)
    return Ranges(zero_BT, zero_BT, zero_BT, jnp.where(used_BT, query_BT + 1, 0))


def resolve(platform: str, devices: int) -> str:
    """Names the implementation that is the default of a platform: 'cpu', 'gpu', 'cuda' or 'tpu'; never the reference.

    devices: those of the mesh. XLA splits no Pallas kernel, so that of the TPU is the default of one device only.
    Raises: ValueError for another platform.
    """
    if platform not in DEFAULTS:
        raise ValueError(f"attention has no default implementation on {platform!r}; known: {', '.join(DEFAULTS)}")
    return DEFAULTS[platform] if devices == 1 else "chunked"


def misfit(implementation: str, kind: str, devices: int) -> str:
    """Says why an implementation is not for a mesh of so many devices of a kind, as jax names it; '' where it is."""
    if implementation not in ONE_DEVICE or (devices == 1 and ONE_DEVICE[implementation][1](kind)):
        return ""
    wanted, _ = ONE_DEVICE[implementation]
    return f"{implementation!r} needs a mesh of one {wanted}, this is one of {devices} {kind}: use 'chunked'"


def attention(
    q_BQHC: jax.Array,
    k_BSJC: jax.Array,
    v_BSJC: jax.Array,
    ranges: Ranges,
    *,
    scale: float,
    soft_cap: float = 0.0,
    implementation: str,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends: out = softmax(scale q.k, capped, masked by `ranges`) v, in float32; kv heads are shared by groups.

    soft_cap: logits become soft_cap * tanh(logits / soft_cap); 0 = none.
    implementation: 'reference' (O(Q S) memory, the definition) | 'chunked' (linear memory, skips the key blocks that no
      query sees; runs on every platform) | 'tpu' (the same by Pallas kernels, on one TPU) | 'mosaic_gpu' (the
      same on one H100 or H200, of bfloat16 or float16). `resolve` names the default.
    return_lse: also return lse = log sum over the visible keys of exp(logit), nats, float32 [B, Q, H], differentiable:
      parts of the keys attended apart merge as out = sum_i exp(lse_i - lse) out_i, lse = logsumexp_i lse_i.
    Returns: out [B, Q, H, C] in the dtype of q, or (out, lse). A query that sees nothing: 0 and -inf, no gradient.
    Raises: ValueError for another implementation, where H is no multiple of J, and what 'tpu' and
      'mosaic_gpu' do not take.
    """
    if implementation not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"attention has no implementation {implementation!r}; known: {known}")
    k_BJSC, v_BJSC = (jnp.swapaxes(x, 1, 2) for x in (k_BSJC, v_BSJC))
    _check(q_BQHC, k_BJSC, v_BJSC, ranges)
    out, lse = IMPLEMENTATIONS[implementation](q_BQHC, k_BJSC, v_BJSC, ranges, scale=scale, soft_cap=soft_cap)
    return (out, lse) if return_lse else out


def decode_attention(
    q_BOHC: jax.Array,
    k_BJSC: jax.Array,
    v_BJSC: jax.Array,
    ranges: Ranges,
    *,
    scale: float,
    soft_cap: float = 0.0,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends from new queries over the KV cache (keys major over time, so that no copy is made on a step).

    Up to FEW queries score the whole cache at once, [B, H, FEW, S] at most; more (a prompt) go through 'chunked'.
    ranges: [B, O] per query, in cache indices. The rest is as in `attention`.
    """
    _check(q_BOHC, k_BJSC, v_BJSC, ranges)
    few = q_BOHC.shape[1] <= FEW
    attend = reference.attention if few else functools.partial(chunked.attention, key_block=CACHE_BLOCK)
    out, lse = attend(q_BOHC, k_BJSC, v_BJSC, ranges, scale=scale, soft_cap=soft_cap)
    return (out, lse) if return_lse else out


def _check(q_BQHC, k_BJSC, v_BJSC, ranges) -> None:
    chex.assert_rank([q_BQHC, k_BJSC, v_BJSC], 4)
    chex.assert_equal_shape([k_BJSC, v_BJSC])
    (B, Q, H, C), J = q_BQHC.shape, k_BJSC.shape[1]
    chex.assert_shape(k_BJSC, (B, J, None, C))
    chex.assert_shape(list(ranges), (B, Q))
    if H % J:
        raise ValueError(f"{H} query heads do not divide into {J} kv heads")


def visible(ranges: Ranges, keys: int) -> jax.Array:
    """Materialises the rule as a boolean [B, Q, keys]; for tests."""
    return reference.shown(ranges, jnp.arange(keys))
