"""Packed rows: which rollouts share a row of the model, and what a row with its branches is (DESIGN section 5).

A row is read in two streams. The trunk stream holds rollouts one behind the other; the branch stream holds, for each
view, its hint and a copy of trunk[insert_at : span end], whose positions run on from insert_at. Two key ranges per
query say who sees whom, in indices of the row's keys: the trunk's P, then the branches' Q.

    trunk, rollout from s on     [s, q + 1)
    branch, from P + b on        [s, s + insert_at)  and  [P + b, q + 1)
    padding                      nothing
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base
from rsi_jax.kernels import attention
from rsi_jax.model.transformer import Rows


def branch_length(views: base.Views):
    """Tokens of each view's branch [K]: its hint and trunk[insert_at : span end]; 0 for an unused view."""
    length_K = views.hint_length_K + views.span_start_K + views.span_length_K - views.insert_at_K
    return length_K * (views.span_length_K > 0)


def layout_of(rollout: base.Rollout) -> base.Layout:
    """The layout of the rollout: its own, or else a row for each rollout, its branches one behind the other."""
    if rollout.layout is not None:
        return rollout.layout
    B, T = rollout.tokens_BT.shape
    branch, at_K = 0, jnp.zeros(0, jnp.int32)
    if rollout.views is not None:
        length_BK = branch_length(rollout.views).reshape(B, -1)
        branch, at_K = rollout.views.branch, (jnp.cumsum(length_BK, axis=1) - length_BK).reshape(-1)
    return base.Layout(jnp.arange(B), jnp.zeros(B, jnp.int32), at_K, rows=B, trunk=T, branch=branch)


def trunk_rows(rollout: base.Rollout) -> Rows:
    """The rollouts as rows [R, P]."""
    B, T = rollout.tokens_BT.shape
    if rollout.layout is None:
        positions_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        return Rows(rollout.tokens_BT, positions_BT, attention.causal_ranges(rollout.length_B, T))
    layout = rollout.layout
    offset_T, shape = jnp.arange(T), (layout.rows, layout.trunk)
    index_BT = layout.start_B[:, None] + offset_T
    row_BT = jnp.where(offset_T < rollout.length_B[:, None], layout.row_B[:, None], layout.rows)

    def put(x_BT):
        return jnp.zeros(shape, jnp.int32).at[row_BT, index_BT].set(x_BT, mode="drop")

    start_RP, end_RP = put(jnp.broadcast_to(layout.start_B[:, None], (B, T))), put(index_BT + 1)
    zero_RP = jnp.zeros(shape, jnp.int32)
    positions_RP = put(jnp.broadcast_to(offset_T, (B, T)))
    return Rows(put(rollout.tokens_BT), positions_RP, attention.Ranges(zero_RP, zero_RP, start_RP, end_RP))


def branch_rows(rollout: base.Rollout) -> Rows:
    """The branches as rows [R, Q]; their ranges are in indices of the trunk's keys, then their own."""
    views, layout = base.given(rollout.views, "views"), layout_of(rollout)
    K, N = views.hint_KN.shape
    T, Q = rollout.tokens_BT.shape[1], layout.branch
    length_K, row_K = branch_length(views), layout.row_B[views.rollout_K]
    # The view of each token: views are in the order of their branches, so the last that has begun.
    begun_RQ = jnp.full((layout.rows, Q), -1)
    begun_RQ = begun_RQ.at[jnp.where(length_K > 0, row_K, layout.rows), layout.at_K].max(jnp.arange(K), mode="drop")
    view_RQ = jax.lax.cummax(begun_RQ, axis=1)
    view_RQ, any_RQ = jnp.maximum(view_RQ, 0), view_RQ >= 0
    offset_RQ = jnp.arange(Q) - layout.at_K[view_RQ]
    used_RQ = any_RQ & (offset_RQ < length_K[view_RQ])
    hint_RQ, insert_RQ, rollout_RQ = views.hint_length_K[view_RQ], views.insert_at_K[view_RQ], views.rollout_K[view_RQ]
    copied_RQ = rollout.tokens_BT[rollout_RQ, jnp.clip(insert_RQ + offset_RQ - hint_RQ, 0, T - 1)]
    hinted_RQ = views.hint_KN[view_RQ, jnp.clip(offset_RQ, 0, N - 1)]
    start_RQ, first_Q = layout.start_B[rollout_RQ], layout.trunk + jnp.arange(Q)
    ranges = (start_RQ, start_RQ + insert_RQ, layout.trunk + layout.at_K[view_RQ], first_Q + 1)
    return Rows(
        jnp.where(used_RQ, jnp.where(offset_RQ < hint_RQ, hinted_RQ, copied_RQ), 0),
        jnp.where(used_RQ, insert_RQ + offset_RQ, 0),
        attention.Ranges(*(jnp.where(used_RQ, x, 0) for x in ranges)),
    )


def to_tokens(x_RP: jax.Array, rollout: base.Rollout) -> jax.Array:
    """Brings a number per token of the rows back to the rollouts [B, T]; what stands on padding is arbitrary."""
    if rollout.layout is None:
        return x_RP
    T, layout = rollout.tokens_BT.shape[1], rollout.layout
    index_BT = jnp.minimum(layout.start_B[:, None] + jnp.arange(T), layout.trunk - 1)
    return x_RP[layout.row_B[:, None], index_BT]


# --- rows by a budget of tokens --------------------------------------------------------------------------------------


class Plan(flax.struct.PyTreeNode):
    """Which rollouts each forward of an update reads, and where; made on the host.

    member_MC        int32  rollouts of forward m, a row behind the other; -1 = none.
    row_MC, start_MC, at_MK  int32  see Layout; K: the views of the C members.
    used             int32  forwards that read anything: the first ones.
    rows, trunk, branch  int, static: see Layout.
    """

    member_MC: Any
    row_MC: Any
    start_MC: Any
    at_MK: Any
    used: Any
    rows: int = flax.struct.field(pytree_node=False)
    trunk: int = flax.struct.field(pytree_node=False)
    branch: int = flax.struct.field(pytree_node=False)


def first_fit(length_B: np.ndarray, tokens: int) -> list[list[int]]:
    """Packs rollouts into rows of at most `tokens`, the longest first, each into the first row with room.

    At most 11/9 of the fewest rows, and one (Johnson 1973). Rollouts without tokens are in no row.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for b in sorted(np.flatnonzero(length_B).tolist(), key=lambda b: -length_B[b]):
        fits = next((i for i, left in enumerate(room) if left >= length_B[b]), len(rows))
        if fits == len(rows):
            rows.append([])
            room.append(tokens)
        rows[fits].append(b)
        room[fits] -= int(length_B[b])
    return rows


def plan(rollout: base.Rollout, *, tokens: int, rows: int = 1, chain_rows: int = 1) -> Plan:
    """Plans the forwards of a batch of host columns: `rows` rows of `tokens` at a time, as few as first fit finds.

    The rollouts of a chain of `chain_rows` stand one behind the other in a row. Branches come on top of the tokens, in
    a second stream. Its width and the number of members are rounded up to powers of two: few shapes are compiled.
    Raises: base.InputError when a chain is longer than a row.
    """
    length_B, B = np.asarray(rollout.length_B), rollout.tokens_BT.shape[0]
    chain_N = length_B.reshape(-1, chain_rows).sum(axis=1)
    if chain_N.max(initial=0) > tokens:
        first = int(chain_N.argmax()) * chain_rows
        raise base.InputError(f"rollout {first} has {chain_N.max()} tokens: raise rl.row_tokens={tokens}")
    branch_BV = np.zeros((B, 0), np.int32)
    if rollout.views is not None:
        branch_BV = np.asarray(branch_length(rollout.views)).reshape(B, -1)
    packed = [[n * chain_rows + i for n in row for i in range(chain_rows)] for row in first_fit(chain_N, tokens)]
    forwards = [packed[i : i + rows] for i in range(0, len(packed), rows)]
    most = max((sum(map(len, forward)) for forward in forwards), default=chain_rows)
    M, C = -(-B // rows), power_of_two(most // chain_rows) * chain_rows
    member_MC, row_MC, start_MC = np.full((M, C), -1, np.int32), np.zeros((M, C), np.int32), np.zeros((M, C), np.int32)
    at_MCV = np.zeros((M, C, branch_BV.shape[1]), np.int32)
    for m, forward in enumerate(forwards):
        n = sum(map(len, forward))
        member_MC[m, :n], row_MC[m, :n], start_MC[m, :n], at_MCV[m, :n] = _places(forward, length_B, branch_BV)
    branch = max((int(branch_BV[row].sum()) for row in packed), default=0)
    return Plan(
        member_MC, row_MC, start_MC, at_MCV.reshape(M, -1), np.int32(len(forwards)),
        rows=rows, trunk=tokens, branch=power_of_two(branch) if branch else 0,
    )  # fmt: skip


def _places(forward: list[list[int]], length_B: np.ndarray, branch_BV: np.ndarray) -> tuple[np.ndarray, ...]:
    """The members of a forward, the row of each, and where its tokens (C) and its branches (C, V) begin there."""

    def begins(count_B):
        return np.concatenate([np.cumsum(count_B[row]) - count_B[row] for row in forward])

    member_C = np.concatenate(forward)
    row_C = np.repeat(np.arange(len(forward)), [len(row) for row in forward])
    at_CV = begins(branch_BV.sum(axis=1))[:, None] + np.cumsum(branch_BV[member_C], axis=1) - branch_BV[member_C]
    return member_C, row_C, begins(length_B), at_CV


def power_of_two(count: int) -> int:
    """The least power of two that is not below `count`: a shape that few batches need another one for."""
    return 1 << max(0, count - 1).bit_length()


def forward(plan: Plan, rollout: base.Rollout, credit: base.Credit, weight_BT: jax.Array, m: jax.Array):
    """What forward `m` reads: ((rollouts in their layout, credit, weight_CT), their rows in the batch).

    Where there is no rollout stands one without a token, a view or a weight, whose row is beyond the batch.
    """
    used_C, B = plan.member_MC[m] >= 0, rollout.tokens_BT.shape[0]
    part, credit, weight_CT = take((rollout, credit, weight_BT), jnp.maximum(plan.member_MC[m], 0), B)
    layout = base.Layout(
        plan.row_MC[m], plan.start_MC[m], plan.at_MK[m], rows=plan.rows, trunk=plan.trunk, branch=plan.branch
    )
    length_CS = jnp.where(used_C[:, None], part.segments.length_BS, 0)
    part = part.replace(segments=part.segments.replace(length_BS=length_CS), layout=layout)
    if part.views is not None:
        views = part.views.replace(rollout_K=jnp.asarray(part.views.rollout_K))
        used_K = used_C[views.rollout_K]
        part = part.replace(views=views.replace(span_length_K=jnp.where(used_K, views.span_length_K, 0)))
        if credit.view_weight_K is not None:
            credit = credit.replace(view_weight_K=jnp.where(used_K, credit.view_weight_K, 0.0))
    return (part, credit, jnp.where(used_C[:, None], weight_CT, 0.0)), jnp.where(used_C, plan.member_MC[m], B)


def strided(micro: int, chain_rows: int, rollout: base.Rollout, credit: base.Credit, weight_BT: jax.Array):
    """Forwards of every count-th chain, a row each, so that shards stay busy: (`forward` as a function of m, count).

    micro: rollouts of a forward, whole chains of `chain_rows`.
    Raises: base.InputError when `micro` does not divide the rollouts, or splits chains.
    """
    B = rollout.tokens_BT.shape[0]
    count, some = B // micro, micro // chain_rows
    if B % micro:
        raise base.InputError(f"rl.micro_batch={micro} does not divide the {B} rollouts of a minibatch")
    if micro % chain_rows:
        raise base.InputError(f"rl.micro_batch={micro} is no multiple of rollout.chain_rows={chain_rows}")

    def split(x):
        x = x.reshape(some, count, x.shape[0] * chain_rows // B, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(count, some * x.shape[2], *x.shape[3:])

    micros = jax.tree.map(split, (rollout, credit, weight_BT))

    def part(m):
        part, credit, weight_CT = jax.tree.map(lambda x: x[m], micros)
        if part.views is not None:
            chain_K, row_K = jnp.divmod(part.views.rollout_K, chain_rows)
            part = part.replace(views=part.views.replace(rollout_K=chain_K // count * chain_rows + row_K))
        rows_CR = (m + count * jnp.arange(some))[:, None] * chain_rows + jnp.arange(chain_rows)
        return (part, credit, weight_CT), rows_CR.reshape(-1)

    return part, count


def take(tree, rows, total: int):
    """Takes rollouts `rows` of a batch of `total`: their columns, and their views, which count the rollouts anew.

    tree: any columns whose leading axis is of rollouts, or of as many of each; scalars are left as they are.
    """

    def cut(x):
        if np.ndim(x) == 0:
            return x
        per = x.shape[0] // total
        return x.reshape(total, per, *x.shape[1:])[rows].reshape(len(rows) * per, *x.shape[1:])

    def one(x):
        if not is_views(x):
            return cut(x)
        per = x.rollout_K.shape[0] // total
        return jax.tree.map(cut, x).replace(rollout_K=np.repeat(np.arange(len(rows), dtype=np.int32), per))

    return jax.tree.map(one, tree, is_leaf=is_views)


def is_views(x: object) -> bool:
    """Whether a leaf of a tree is a table of views."""
    return isinstance(x, base.Views)


def in_parts(function: Callable[[Any], Any], tree, total: int, most: int):
    """Applies a function of columns to at most `most` of `total` rollouts at a time; its columns, joined on the host.

    most: 0 = all at once.
    """
    if not most or most >= total:
        return jax.device_get(function(tree))
    parts = np.array_split(np.arange(total), -(-total // most))
    found = [jax.device_get(function(take(tree, rows, total))) for rows in parts]
    return jax.tree.map(lambda *x: np.concatenate(x), *found)
