"""What the ops over a vocabulary share: logits, their normaliser, chunks of tokens, and the gradient of a chunk.

No array is [N, V]. Tokens pass in chunks against the whole unembedding; a chunk's logits live for that chunk only and
the backward pass computes them again. Logits, sums and the gradient of the unembedding are float32 whatever the inputs
are; as an operand of a product, the gradient of the logits has the dtype of the other operand.

Vocab-parallel: inside `jax.shard_map` (with its check_vma) the unembedding may hold this shard's columns, equally many
on every shard, in the order of the mesh axis `axis`. Sums over the vocabulary are then sums over the shards too.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOGITS = 2**21  # of a chunk, when its size is automatic: 8 MiB, which still fits the caches of a CPU
ROWS = 128  # of a chunk at least, when its size is automatic: fewer make the products slow


class Head(NamedTuple):
    """How logits are made and summed, all static.

    temperature: > 0, inside the softmax. soft_cap: logits become soft_cap * tanh(logits / soft_cap), 0 = none.
    chunk: tokens at a time, 0 = automatic (`rows_of`). axis: mesh axis that the vocabulary is split over, or None.
    """

    temperature: float = 1.0
    soft_cap: float = 0.0
    chunk: int = 0
    axis: str | None = None


class Normaliser(NamedTuple):
    """Of each row of logits: the largest, and log sum exp(logit - largest) >= 0; apart, so a large offset is exact."""

    top_N: jax.Array
    log_total_N: jax.Array


def logits_of(hidden_ND: jax.Array, unembed_DV: jax.Array, *, temperature: float = 1.0, soft_cap: float = 0.0):
    """Computes float32 logits [N, V] with the soft cap and the temperature applied (temperature inside the softmax)."""
    logit_NV = jnp.einsum("nd,dv->nv", hidden_ND, unembed_DV, preferred_element_type=jnp.float32)
    if soft_cap:
        logit_NV = soft_cap * jnp.tanh(logit_NV / soft_cap)
    return logit_NV if temperature == 1.0 else logit_NV / temperature


def head_logits(head: Head, hidden_ND: jax.Array, unembed_DV: jax.Array) -> jax.Array:
    """Computes the logits of `head` on this shard's columns."""
    return logits_of(hidden_ND, unembed_DV, temperature=head.temperature, soft_cap=head.soft_cap)


# --- sums over the vocabulary ----------------------------------------------------------------------------------------


def total(head: Head, x: Any) -> Any:
    """Adds up what each shard summed over its columns."""
    return x if head.axis is None else jax.lax.psum(x, head.axis)


def log_sum(head: Head, x_NV: jax.Array) -> Normaliser:
    """Computes log sum exp over the vocabulary, in two parts."""
    top_N = jax.lax.stop_gradient(jnp.max(x_NV, axis=1))
    top_N = top_N if head.axis is None else jax.lax.pmax(top_N, head.axis)
    return Normaliser(top_N, jnp.log(total(head, jnp.sum(jnp.exp(x_NV - top_N[:, None]), axis=1))))


def log_softmax(logit_NV: jax.Array, norm: Normaliser) -> jax.Array:
    """Normalises logits by what `log_sum` found."""
    return logit_NV - norm.top_N[:, None] - norm.log_total_N[:, None]


def size(head: Head, x_NV: jax.Array) -> int:
    """Counts the words of the whole vocabulary."""
    return x_NV.shape[1] * (1 if head.axis is None else jax.lax.axis_size(head.axis))


def own_columns(head: Head, ids: jax.Array, size: int) -> jax.Array:
    """Turns ids of the whole vocabulary into columns of this shard; out of [0, size) = another shard's."""
    return ids if head.axis is None else ids - jax.lax.axis_index(head.axis) * size


def picked(head: Head, x_NV: jax.Array, target_N: jax.Array) -> jax.Array:
    """Reads x at each target [N]; NaN for a target outside the vocabulary."""
    column_N = own_columns(head, target_N, x_NV.shape[1])
    own_N = (column_N >= 0) & (column_N < x_NV.shape[1])
    x_N = jnp.take_along_axis(x_NV, jnp.where(own_N, column_N, 0)[:, None], axis=1)[:, 0]
    x_N, owners_N = total(head, (jnp.where(own_N, x_N, 0.0), own_N.astype(jnp.int32)))
    return jnp.where(owners_N > 0, x_N, jnp.nan)


def top(head: Head, x_NV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Finds the k largest of each row and their ids [N, k], largest first; of equals the smallest id first."""
    size = x_NV.shape[1]
    if head.axis is None:
        return jax.lax.top_k(x_NV, k)
    value_NK, id_NK = jax.lax.top_k(x_NV, min(k, size))
    shard, shards = jax.lax.axis_index(head.axis), jax.lax.axis_size(head.axis)
    found = []
    for x_NK in (value_NK, id_NK + shard * size):  # every shard's best, side by side in the order of their ids
        x_SNK = jnp.where(jnp.arange(shards)[:, None, None] == shard, x_NK, jnp.zeros_like(x_NK))
        found.append(jnp.concatenate(list(total(head, x_SNK)), axis=1))
    value_NK, at_NK = jax.lax.top_k(found[0], k)
    return value_NK, jnp.take_along_axis(found[1], at_NK, axis=1)


# --- chunks of tokens ------------------------------------------------------------------------------------------------


def rows_of(chunk: int, tokens: int, vocab: int) -> int:
    """Says how many tokens a chunk has: `chunk`; if that is 0, LOGITS / vocab, at least ROWS. Then chunks are evened.

    vocab: columns here (of this shard).
    """
    rows = chunk or max(ROWS, LOGITS // vocab)
    return -(-tokens // max(1, -(-tokens // rows)))


def split(x: jax.Array, rows: int) -> jax.Array:
    """Deals the leading axis into chunks [count, rows, ...], every count-th row to one: a sharded axis stays so."""
    count = -(-x.shape[0] // rows)
    x = jnp.pad(x, [(0, count * rows - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(rows, count, *x.shape[1:]).swapaxes(0, 1)


def join(x: jax.Array, tokens: int) -> jax.Array:
    """Undoes `split`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[:tokens]


def over_chunks(head: Head, vocab: int, fn: Callable, *columns: Any) -> Any:
    """Maps fn over chunks of the leading axis of the columns (trees), one at a time. Not to be differentiated."""
    tokens = columns[0].shape[0]
    rows = rows_of(head.chunk, tokens, vocab)
    if tokens <= rows:
        return fn(*columns)
    out = jax.lax.map(lambda chunk: fn(*chunk), jax.tree.map(lambda x: split(x, rows), columns))
    return jax.tree.map(lambda x: join(x, tokens), out)


def pull(head: Head, slope: Callable, hidden_ND: jax.Array, unembed_DV: jax.Array, *columns: Any):
    """Computes the gradient of hidden states and unembedding from that of the logits, chunk by chunk.

    slope(logit_CV, *columns): d loss / d logit [C, V], from a chunk's logits and its part of the columns (trees); 0 in
      rows whose columns are all 0.
    """
    tokens, vocab = hidden_ND.shape[0], unembed_DV.shape[1]
    rows = rows_of(head.chunk, tokens, vocab)

    def one(sum_DV, chunk):
        hidden_CD, *chunk = chunk
        logit_CV = head_logits(head, hidden_CD, unembed_DV)
        raw_CV = _through_cap(head, slope(logit_CV, *chunk), logit_CV)
        raw_CV = raw_CV.astype(jnp.promote_types(hidden_ND.dtype, unembed_DV.dtype))
        to_CD = jnp.einsum("cv,dv->cd", raw_CV, unembed_DV, preferred_element_type=jnp.float32)
        return sum_DV + jnp.einsum("cd,cv->dv", hidden_CD, raw_CV, preferred_element_type=jnp.float32), to_CD

    columns = (hidden_ND, *columns)
    zero_DV = _varying_like(jnp.zeros(unembed_DV.shape, jnp.float32), unembed_DV, *jax.tree.leaves(columns))
    if tokens <= rows:
        to_DV, to_ND = one(zero_DV, columns)
    else:
        to_DV, to_ND = jax.lax.scan(one, zero_DV, jax.tree.map(lambda x: split(x, rows), columns))
        to_ND = join(to_ND, tokens)
    return _like(to_ND, hidden_ND), _like(to_DV, unembed_DV)


def _through_cap(head: Head, slope_CV: jax.Array, logit_CV: jax.Array) -> jax.Array:
    """Turns the slope on the logits into that on hidden @ unembed."""
    if head.soft_cap:
        slope_CV *= 1.0 - jnp.square(logit_CV * (head.temperature / head.soft_cap))
    return slope_CV if head.temperature == 1.0 else slope_CV / head.temperature


def _axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes that x varies over, inside shard_map; none outside."""
    kind: Any = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.mat.varying  # jax 0.11; jax 0.12


def _varying_like(x: jax.Array, *others: jax.Array) -> jax.Array:
    axes = frozenset[str]().union(*(_axes(other) for other in others))
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying")


def _like(slope: jax.Array, x: jax.Array) -> jax.Array:
    """Adds up a gradient over the shards that hold one and the same x, and gives it x's dtype."""
    shared = tuple(sorted(_axes(slope) - _axes(x)))
    return (jax.lax.psum(slope, shared) if shared else slope).astype(x.dtype)


def check(op: str, head: Head, implementation: str, *unembeds: jax.Array) -> None:
    """Raises ValueError, naming the argument, for what no op over a vocabulary can do."""
    if implementation not in ("reference", "chunked"):
        raise ValueError(f"{op} has no implementation {implementation!r}; known: reference, chunked")
    if head.temperature <= 0.0 or head.soft_cap < 0.0 or head.chunk < 0:
        raise ValueError(f"{op} needs temperature > 0, soft_cap >= 0 and chunk >= 0, got {head}")
    if head.axis is None:
        return
    if implementation == "reference":
        raise ValueError(f"{op}: the reference holds the whole vocabulary; vocab_axis needs implementation='chunked'")
    if not all(head.axis in _axes(unembed_DV) for unembed_DV in unembeds):
        raise ValueError(
            f"{op}: vocab_axis={head.axis!r} needs an unembedding split over that axis inside jax.shard_map, "
            "with check_vma=True (its default)"
        )
