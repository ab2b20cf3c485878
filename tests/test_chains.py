"""Chains: credit, weights and ratios of rows are those of the whole trajectory that they are cut from."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, chains
from rsi_jax.credit import critic, examples, group, laws, rewards
from rsi_jax.feedback import hints, locate
from rsi_jax.train import columns, diagnostics, evaluate, rl, update
from tests import tiny

ROWS = 3


def places_of(whole: base.Rollout, seed: int, rows: int) -> dict[str, np.ndarray]:
    """Draws what each row holds of its trajectory: [B, 2], from and to, in segments (S), tokens (T) and turns (A)."""
    rng, s, bounds = np.random.default_rng(seed), jax.tree.map(np.asarray, whole.segments), []
    for kind_S, length_S in zip(s.kind_BS, s.length_BS, strict=True):
        observed = np.flatnonzero((kind_S == base.OBSERVATION) & (length_S > 0))
        count = rng.integers(0, min(rows - 1, len(observed)) + 1)
        starts = np.sort(rng.choice(observed, count, replace=False))
        ends = [*starts, *[np.sum(length_S > 0)] * (rows - count)]
        bounds.append(np.stack([[0, *ends[:-1]], ends], axis=1))
    place_B2 = np.concatenate(bounds).astype(int)

    def passed(x_BS):
        before = np.concatenate([np.zeros((len(x_BS), 1), int), np.cumsum(x_BS, axis=1)], axis=1)
        return np.take_along_axis(np.repeat(before, rows, axis=0), place_B2, axis=1)

    acts_BS = (s.kind_BS == base.ACTION) & (s.length_BS > 0)
    return {"S": place_B2, "T": passed(s.length_BS), "A": passed(acts_BS)}


def cut(whole: base.Rollout, seed: int, rows: int = ROWS) -> base.Rollout:
    """Cuts trajectories before some of their observations into chains; what no row holds is NaN or 0."""
    places = places_of(whole, seed, rows)
    B, used_B = len(places["S"]), places["S"][:, 1] > places["S"][:, 0]
    last_B = used_B & (np.append(~used_B[1:], True) | (np.arange(B) % rows == rows - 1))

    def move(x, axis):
        x = np.asarray(x)
        moved = np.full((B, *x.shape[1:]), np.nan if x.dtype.kind == "f" else 0, x.dtype)
        for b, (low, high) in enumerate(places[axis]):
            moved[b, : high - low] = x[b // rows, low:high]
        return moved

    s = {name: move(x, "S") for name, x in vars(whole.segments).items()}
    s["start_BS"] -= np.where(s["length_BS"] > 0, places["T"][:, :1], 0)
    s["kind_BS"][:, 0] = base.PROMPT
    axes = {"BT": "T", "BTM": "T", "BS": "A"}
    made = {}
    for name, x in laws.columns(whole):
        axis = axes.get(name.rpartition("_")[2])
        made[name] = move(x, axis) if axis else x if name.endswith("_KU") else np.repeat(x, rows)
    made["weight_B"] = np.where(used_B, made["weight_B"], 0).astype(np.float32)
    made["chain_B"] = np.arange(B, dtype=np.int32) // rows
    if whole.end_value_B is not None:
        made["end_value_B"] = np.where(last_B, made["end_value_B"], np.nan).astype(np.float32)
    whole = whole.replace(segments=base.Segments(**s), **made)
    return jax.tree.map(jnp.asarray, whole if whole.views is None else _with_views(whole, places["T"], rows))


def _with_views(made: base.Rollout, place_B2: np.ndarray, rows: int) -> base.Rollout:
    """Gives every row as many places for views as a trajectory had; hints and the columns of views go along."""
    old = jax.tree.map(np.asarray, base.given(made.views, "views"))
    B, per = len(place_B2), len(old.rollout_K) // (len(place_B2) // rows)
    inside = (old.span_start_K[:, None] >= place_B2[:, 0]) & (old.span_start_K[:, None] < place_B2[:, 1])
    mine = inside & (np.arange(B) // rows == old.rollout_K[:, None])
    row_K = np.where(mine.any(axis=1), np.argmax(mine, axis=1), old.rollout_K * rows)
    at_K = row_K * per + np.arange(len(row_K)) % per

    def spread(x, fill=0):
        moved = np.full((B * per, *x.shape[1:]), fill, x.dtype)
        moved[at_K] = x
        return moved

    used_K, low_K = old.span_length_K > 0, place_B2[row_K, 0]
    shifted = {name: np.where(used_K, getattr(old, name) - low_K, 0) for name in ("insert_at_K", "span_start_K")}
    views = jax.tree.map(spread, old.replace(**shifted)).replace(
        rollout_K=np.arange(B * per, dtype=np.int32) // per, source_K=spread(old.source_K, -1)
    )
    more = {name: spread(np.asarray(x), np.nan) for name, x in laws.columns(made) if name.endswith("_KU")}
    return made.replace(views=views, **more)


def outputs(found: base.Credit, rollout: base.Rollout) -> dict[str, np.ndarray]:
    """What a credit says of the sampled tokens and of the used views, in the order of their trajectories."""
    mask_BT, said = np.asarray(rollout.mask_BT), laws.outputs(found)
    used_K = np.asarray(rollout.views.span_length_K) > 0
    by_place = {key: x[mask_BT] for key, x in said.items() if key != "views"}
    if "views" in said:
        v = jax.tree.map(np.asarray, rollout.views)
        own = used_K & (np.asarray(rollout.weight_B)[v.rollout_K] > 0)
        by_place["views"] = said["views"][own][np.argsort(v.hint_KN[own].sum(axis=1), kind="stable")]
    return by_place


over_chains = jax.jit(lambda rollout: {name: chains.over(laws.bound(name), ROWS)(rollout) for name in laws.names()})


@pytest.mark.parametrize("seed", laws.SEEDS[:3])
def test_the_credit_of_the_rows_of_a_chain_is_that_of_the_trajectory(seed):
    whole = laws.random(seed, masked=0.2 if seed else 0.0)
    rows = cut(whole, seed)
    per_chain = np.asarray(rows.length_B).reshape(-1, ROWS)
    assert {1, 2, 3} >= set((per_chain > 0).sum(axis=1)) and (per_chain[:, 1:] > 0).any()
    np.testing.assert_array_equal(np.asarray(rows.tokens_BT)[rows.mask_BT], np.asarray(whole.tokens_BT)[whole.mask_BT])
    want, got = laws.run(whole), over_chains(rows)
    for name, found in want.items():
        a, b = outputs(found, whole), outputs(got[name], rows)
        assert a.keys() == b.keys()
        for key, x in a.items():
            np.testing.assert_allclose(x, b[key], atol=laws.TOLERANCE, err_msg=f"{name} {key}")
        off_BT = ~np.asarray(rows.mask_BT)
        assert not np.asarray(got[name].adv_BT)[off_BT].any(), name
        for key, value in found.metrics.items():
            np.testing.assert_allclose(value, got[name].metrics[key], atol=1e-5, err_msg=f"{name} {key}")
