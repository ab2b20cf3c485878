"""Rollouts that laws and tests are held to: written out span by span, or random with every column a variant reads."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base


@dataclasses.dataclass(frozen=True)
class Span:
    """One segment: kind, length, and what lands when it ends."""

    kind: int
    length: int
    reward: float = 0.0
    discount: float = 1.0
    finish: int = base.NOT_SAMPLED


def prompt(length: int) -> Span:
    return Span(base.PROMPT, length)


def action(length: int, reward: float = 0.0, *, discount: float = 1.0, finish: int = base.STOP) -> Span:
    return Span(base.ACTION, length, reward, discount, finish)


def observation(length: int, reward: float = 0.0, *, discount: float = 1.0) -> Span:
    return Span(base.OBSERVATION, length, reward, discount)


def rollout(
    rows: Sequence[Sequence[Span]],
    *,
    group: Sequence[int] | None = None,
    weight: Sequence[float] | None = None,
    value: Sequence[Sequence[float]] | None = None,
    T: int | None = None,
    S: int | None = None,
    seed: int = 0,
) -> base.Rollout:
    """Lays rows of spans out as a Rollout, with random tokens, log-probs and references.

    Args:
      rows: spans of each rollout, in time order from token 0.
      group: group ids in [0, B); None = one group.
      weight: row weights; None = 1.
      value: critic of each row's SAMPLED tokens in time order; None = no value column.
      T, S: capacities; None = what the longest row needs.
    """
    rng = np.random.default_rng(seed)
    B = len(rows)
    T = T or max(sum(span.length for span in row) for row in rows)
    table, mask_BT = _lay_out(rows, T, S or max(len(row) for row in rows))
    logp_BT, ref_logp_BT = -rng.exponential(1.0, (2, B, T)).astype(np.float32)
    value_BT = None
    if value is not None:
        value_BT = np.zeros((B, T), np.float32)
        value_BT[mask_BT] = np.concatenate([np.asarray(row, np.float32) for row in value])
        value_BT = jnp.asarray(value_BT)
    return base.Rollout(
        tokens_BT=jnp.asarray(rng.integers(0, 50, (B, T), np.int32)),
        logp_BT=jnp.asarray(np.where(mask_BT, logp_BT, 0.0)),
        kept_mass_BT=jnp.ones((B, T)),
        group_B=jnp.asarray(np.zeros(B, np.int32) if group is None else np.asarray(group, np.int32)),
        segments=base.Segments(**{f"{name}_BS": jnp.asarray(x) for name, x in table.items()}),
        weight_B=jnp.asarray(np.ones(B, np.float32) if weight is None else np.asarray(weight, np.float32)),
        chain_B=jnp.arange(B, dtype=jnp.int32),
        ref_logp_BT=jnp.asarray(np.where(mask_BT, ref_logp_BT, 0.0)),
        value_BT=value_BT,
    )


def _lay_out(rows: Sequence[Sequence[Span]], T: int, S: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Gives the segment table and the mask of sampled tokens."""
    B = len(rows)
    ints = dict(start=0, length=0, kind=0, finish=0, anchor=base.NO_ANCHOR, parent=base.NO_PARENT)
    table = {name: np.full((B, S), fill, np.int32) for name, fill in ints.items()}
    table |= {"reward": np.zeros((B, S), np.float32), "discount": np.ones((B, S), np.float32)}
    mask_BT = np.zeros((B, T), bool)
    for b, row in enumerate(rows):
        start = 0
        for s, span in enumerate(row):
            table["start"][b, s] = start
            for name in ("length", "kind", "reward", "discount", "finish"):
                table[name][b, s] = getattr(span, name)
            mask_BT[b, start : start + span.length] = span.kind == base.ACTION
            start += span.length
        if start > T:
            raise ValueError(f"row {b} has {start} tokens, T = {T}")
    return table, mask_BT


def bandit(
    returns: Sequence[float],
    *,
    group: Sequence[int] | None = None,
    weight: Sequence[float] | None = None,
    tokens: int = 2,
) -> base.Rollout:
    """One-turn rollouts with the given returns: a prompt of 1 token and an action of `tokens`."""
    rows = [[prompt(1), action(tokens, r, discount=0.0)] for r in returns]
    return rollout(rows, group=group, weight=weight)


def random_rollout(
    seed: int,
    *,
    B: int = 8,
    T: int = 32,
    turns: int = 3,
    groups: int = 2,
    truncated: float = 0.3,
    masked: float = 0.0,
    terminal_reward: bool = False,
) -> base.Rollout:
    """Draws multi-turn rollouts with every scored column (reference log-probs and values), same shapes for all seeds.

    Args:
      seed: same seed, same rollout.
      B, T: rollouts, token capacity (T >= 4 * turns + 2).
      turns: most turns; each rollout has 1 to `turns`.
      groups: ids 0 .. groups - 1, as even as they go, in random order.
      truncated: share of turns that end for lack of tokens (finish LENGTH); as the last one, the rollout is truncated.
      masked: share of rollouts with weight 0.
      terminal_reward: reward at the end only, in {0, 1}; otherwise normal, on actions and observations.
    """
    if T < 4 * turns + 2:
        raise ValueError(f"T = {T} cannot hold {turns} turns")
    rng = np.random.default_rng(seed)
    most = (T - 2) // (2 * turns)

    def row() -> list[Span]:
        n = int(rng.integers(1, turns + 1))
        spans = [prompt(int(rng.integers(1, 3)))]
        for k in range(n):
            last, cut = k == n - 1, rng.random() < truncated
            reward = float(rng.integers(0, 2)) if terminal_reward and last else 0.0
            reward = reward if terminal_reward else float(rng.normal())
            finish = base.LENGTH if cut else base.ENV if last else base.STOP
            discount = 0.0 if last and not cut else 1.0
            spans.append(action(int(rng.integers(1, most + 1)), reward, discount=discount, finish=finish))
            if not last:
                given = 0.0 if terminal_reward else float(rng.normal())
                spans.append(observation(int(rng.integers(1, most + 1)), given))
        return spans

    rows = [row() for _ in range(B)]
    group = rng.permutation(np.arange(B) % groups)
    weight = (rng.random(B) >= masked).astype(np.float32)
    made = rollout(rows, group=group.tolist(), weight=weight.tolist(), T=T, S=2 * turns + 1, seed=seed)
    value_BT = rng.normal(size=(B, T)).astype(np.float32)  # log-probs are < 0 exactly on the mask
    made = made.replace(value_BT=jnp.asarray(np.where(made.logp_BT < 0, value_BT, 0.0)))
    return with_anchors(made, np.random.default_rng([seed, 1]).integers(-1, 3, (B, 2 * turns + 1)))


def with_anchors(rollout: base.Rollout, anchor_BS) -> base.Rollout:
    """Names the state before each action; -1 = not known."""
    acts_BS = np.asarray(rollout.segments.kind_BS) == base.ACTION
    anchor_BS = np.where(acts_BS, anchor_BS, base.NO_ANCHOR).astype(np.int32)
    return rollout.replace(segments=rollout.segments.replace(anchor_BS=jnp.asarray(anchor_BS)))


def random_views(
    seed: int, rollout: base.Rollout, *, per_rollout: int = 2, hint_tokens: int = 4, unused: float = 0.3
) -> base.Views:
    """Draws views on whole actions of a rollout, hints of 1 to `hint_tokens` tokens standing just before or at it.

    Args:
      seed: same seed, same views.
      per_rollout: K = B * per_rollout.
      unused: share of rows left unused.
    """
    rng = np.random.default_rng(seed)
    segments = rollout.segments
    K = segments.start_BS.shape[0] * per_rollout
    columns = {name: np.zeros(K, np.int32) for name in ("insert_at", "span_start", "span_length", "hint_length")}
    columns["rollout"] = np.arange(K, dtype=np.int32) // per_rollout
    columns["source"] = np.full(K, -1, np.int32)
    weight_K, polarity_K = np.zeros(K, np.float32), np.ones(K, np.float32)
    start_BS, length_BS, kind_BS = map(np.asarray, (segments.start_BS, segments.length_BS, segments.kind_BS))
    for k, b in enumerate(columns["rollout"]):
        actions = np.flatnonzero((kind_BS[b] == base.ACTION) & (length_BS[b] > 0))
        if rng.random() < unused or not actions.size:
            continue
        s = rng.choice(actions)
        columns["span_start"][k], columns["span_length"][k] = start_BS[b, s], length_BS[b, s]
        columns["insert_at"][k] = rng.integers(max(start_BS[b, s] - 1, 0), start_BS[b, s] + 1)
        columns["hint_length"][k] = rng.integers(1, hint_tokens + 1)
        columns["source"][k] = rng.integers(0, 2)
        weight_K[k], polarity_K[k] = rng.choice([0.5, 1.0]), rng.choice([1.0, 1.0, -1.0])
    columns_K: dict[str, Any] = {f"{name}_K": jnp.asarray(x) for name, x in columns.items()}
    return base.Views(
        hint_KN=jnp.asarray(rng.integers(0, 50, (K, hint_tokens), np.int32)),
        weight_K=jnp.asarray(weight_K),
        polarity_K=jnp.asarray(polarity_K),
        **columns_K,
    )


def complete(rollout: base.Rollout, seed: int, *, per_rollout: int = 2, classes: int = 4) -> base.Rollout:
    """Adds every column that a credit variant may read, random, to a rollout with values; NaN where none is read.

    Args:
      rollout: of `random_rollout`.
      seed: same seed, same columns.
      per_rollout: views per rollout.
      classes: M of outcome_logp_BTM.
    """
    rng = np.random.default_rng([seed, 3])
    mask_BT, segments = np.asarray(rollout.mask_BT), rollout.segments
    (B, T), S = mask_BT.shape, segments.kind_BS.shape[1]
    views = random_views(seed, rollout, per_rollout=per_rollout)
    lengths_K = np.asarray(views.span_length_K)
    U = max(1, int(np.max(np.where(np.asarray(segments.kind_BS) == base.ACTION, segments.length_BS, 0))))
    beyond_KU = np.arange(U) >= lengths_K[:, None]
    acts_BS = (np.asarray(segments.kind_BS) == base.ACTION) & (np.asarray(segments.length_BS) > 0)
    turns_BS = np.arange(S) < acts_BS.sum(axis=1, keepdims=True)

    def logp(*shape):
        return -rng.exponential(1.0, shape).astype(np.float32)

    valued_BT = np.where(first_tokens(rollout), rng.random((B, T)) < 0.8, rng.random((B, T)) < 0.2) & mask_BT
    group_B, tree_B = np.asarray(rollout.group_B), np.zeros(B, np.int32)
    for i, members in enumerate(np.flatnonzero(group_B == g) for g in np.unique(group_B)):
        tree_B[members] = 2 * i + np.arange(len(members)) % 2
    columns = dict(
        end_value_B=rng.normal(size=B).astype(np.float32),
        collision_BT=np.where(mask_BT, rng.uniform(0.1, 1.0, (B, T)), np.nan).astype(np.float32),
        view_logp_KU=np.where(beyond_KU, np.nan, logp(*beyond_KU.shape)),
        wrong_logp_KU=np.where(beyond_KU, np.nan, logp(*beyond_KU.shape)),
        view_kl_KU=np.where(beyond_KU, np.nan, -logp(*beyond_KU.shape)),
        hindsight_logp_BT=np.where(mask_BT, logp(B, T), np.nan),
        outcome_logp_BTM=np.where(mask_BT[..., None], logp(B, T, classes), np.nan),
        answer_logp_BS=np.where(turns_BS, logp(B, S), np.nan),
        judge_BS=np.where(turns_BS, rng.random((B, S)), np.nan).astype(np.float32),
        mc_value_BT=np.where(valued_BT, rng.normal(size=(B, T)), np.nan).astype(np.float32),
        tree_B=tree_B,
        baseline_B=np.full(B, rng.normal(), np.float32),
    )
    return rollout.replace(views=views, **{name: jnp.asarray(x) for name, x in columns.items()})


def first_tokens(rollout: base.Rollout) -> np.ndarray:
    """True at the first token of every action [B, T]."""
    segments = rollout.segments
    acts_BS = (np.asarray(segments.kind_BS) == base.ACTION) & (np.asarray(segments.length_BS) > 0)
    first_BT = np.zeros(rollout.tokens_BT.shape, bool)
    rows, places = np.nonzero(acts_BS)
    first_BT[rows, np.asarray(segments.start_BS)[rows, places]] = True
    return first_BT


def pad(rollout: base.Rollout, *, tokens: int, segments: int) -> base.Rollout:
    """Adds unused capacity: columns of tokens and of segments."""

    def wider(x, more):
        return jnp.pad(x, [(0, 0), (0, more), *[(0, 0)] * (x.ndim - 2)])

    sizes = {"_BT": tokens, "_BTM": tokens, "_BS": segments}
    changed = {
        name: wider(x, sizes[name[name.rindex("_") :]])
        for name, x in vars(rollout).items()
        if x is not None and name.endswith(tuple(sizes))
    }
    return rollout.replace(segments=jax.tree.map(lambda x: wider(x, segments), rollout.segments), **changed)


def stretch(rollout: base.Rollout, *, by: int, tokens: int, segments: int) -> base.Rollout:
    """Makes every prompt and observation `by` tokens longer; what belongs to sampled tokens moves with them.

    tokens, segments: capacity added, as by `pad`.

    Raises: ValueError where the capacity does not hold it.
    """
    s, given_BS = rollout.segments, np.asarray(rollout.segments.kind_BS) != base.ACTION
    given_BS &= np.asarray(s.length_BS) > 0
    before_BS = by * (np.cumsum(given_BS, axis=1) - given_BS)
    segment_BT = np.asarray(rollout.segment_BT)
    place_BT = np.arange(segment_BT.shape[1]) + np.take_along_axis(before_BS, np.maximum(segment_BT, 0), axis=1)
    rows, old = np.nonzero(segment_BT >= 0)
    new = place_BT[rows, old]
    wide = pad(rollout, tokens=tokens, segments=segments)
    if new.max(initial=0) >= wide.tokens_BT.shape[1]:
        raise ValueError(f"{wide.tokens_BT.shape[1]} tokens do not hold the longer rollouts")

    def move(x):
        moved = np.full(x.shape, np.nan if x.dtype.kind == "f" else 0, x.dtype)
        moved[rows, new] = x[rows, old]
        return jnp.asarray(moved)

    changed = {
        name: move(np.asarray(x)) for name, x in vars(wide).items() if x is not None and name[-2:] in ("BT", "TM")
    }
    views = base.given(rollout.views, "views")
    at_K = np.minimum(np.asarray(views.span_start_K), segment_BT.shape[1] - 1)
    added_K = np.where(np.asarray(views.span_length_K) > 0, place_BT[np.asarray(views.rollout_K), at_K] - at_K, 0)
    views = views.replace(span_start_K=views.span_start_K + added_K, insert_at_K=views.insert_at_K + added_K)
    spans = dict(start_BS=np.asarray(s.start_BS) + before_BS, length_BS=np.asarray(s.length_BS) + by * given_BS)
    spans = {name: jnp.pad(jnp.asarray(x), ((0, 0), (0, segments))) for name, x in spans.items()}
    return wide.replace(segments=wide.segments.replace(**spans), views=views, **changed)
