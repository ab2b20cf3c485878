"""The laws of credit assignment, measured over random rollouts; rows.py says which variant keeps which.

A law gives, for each variant, how far it is from holding: the largest difference over the rollouts it tries, 0 =
exactly; a variant that it says nothing of is left out. Where a variant does not keep a law its row says so, and the
measured deviation is the counter-example. All variants run as one program, so a law costs one compilation a shape.

A new variant adds a row: what it wraps, the knobs at which it is a simpler variant, the laws it does not keep.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base, credit
from rsi_jax.credit import examples
from rsi_jax.credit.rows import ROWS

B, T, TURNS, SEEDS = 8, 32, 3, (0, 1, 2, 11)
WIDER = 14  # tokens by which rollouts are padded
TOLERANCE = 2e-5
Found = Mapping[str, base.Credit]
Run = Callable[[base.Rollout], Found]
Deviations = dict[str, float]


def bound(name: str, **knobs: Any) -> base.CreditFn:
    """Binds a variant at its published knobs, what it wraps as its row says, and `knobs`."""
    function = credit.variants()[name]
    if "inner" in inspect.signature(function).parameters:
        knobs = {"inner": bound(ROWS[name].inner)} | knobs
    return functools.partial(function, **knobs)


def names() -> list[str]:
    """The variants under test: all, or those of the environment variable RSI_JAX_VARIANTS=a,b."""
    wanted = os.environ.get("RSI_JAX_VARIANTS", "")
    return [name for name in credit.variants() if not wanted or name in wanted.split(",")]


def eager(rollout: base.Rollout) -> dict[str, base.Credit]:
    """Every variant's credit."""
    return {name: bound(name)(rollout) for name in names()}


run = jax.jit(eager)


def random(seed: int, **knobs: Any) -> base.Rollout:
    """A random rollout with every column; the same shapes for every seed."""
    return examples.complete(examples.random_rollout(seed, B=B, T=T, turns=TURNS, **knobs), seed)


def outputs(found: base.Credit) -> dict[str, np.ndarray]:
    """What a credit says per token and per view."""
    named = {"adv": found.adv_BT, "target": found.value_target_BT, "views": found.view_weight_K}
    return {key: np.asarray(x, np.float64) for key, x in named.items() if x is not None}


def gap(a: base.Credit, b: base.Credit, keep_B: np.ndarray | None = None) -> float:
    """Largest difference of two credits, over the rows of a mask."""
    worst = 0.0
    for key, x in outputs(a).items():
        y = outputs(b)[key]
        if keep_B is not None:
            rows = np.repeat(keep_B, x.shape[0] // keep_B.shape[0])
            x, y = x[rows], y[rows]
        worst = max(worst, float(np.max(np.abs(x - y), initial=0.0)) if np.isfinite(x - y).all() else np.inf)
    return worst


def gaps(a: Found, b: Found, keep_B: np.ndarray | None = None) -> Deviations:
    """Differences of all variants."""
    return {name: gap(a[name], b[name], keep_B) for name in a}


def with_rewards(rollout: base.Rollout, reward_BS) -> base.Rollout:
    """Other rewards."""
    return rollout.replace(segments=rollout.segments.replace(reward_BS=jnp.asarray(reward_BS, jnp.float32)))


def acts(rollout: base.Rollout) -> np.ndarray:
    """True at the segments that are actions."""
    return (np.asarray(rollout.segments.kind_BS) == base.ACTION) & (np.asarray(rollout.segments.length_BS) > 0)


def columns(rollout: base.Rollout) -> Iterator[tuple[str, jax.Array]]:
    """The columns of a rollout that are there, by name; without segments and views."""
    for name in sorted(vars(rollout)):
        value = getattr(rollout, name)
        if value is not None and name not in ("segments", "views"):
            yield name, value


# --- values and what they may depend on ------------------------------------------------------------------------------


def masked(seed: int) -> Deviations:
    """Finite float32, 0 off the mask and on rollouts of weight 0, with the common counts."""
    rollout = random(seed, masked=0.3)
    zero_BT = ~np.asarray(rollout.mask_BT) | (np.asarray(rollout.weight_B) == 0)[:, None]
    worst = {}
    for name, found in run(rollout).items():
        shaped = found.adv_BT.shape == zero_BT.shape and found.adv_BT.dtype == jnp.float32
        numbers = [*outputs(found).values(), *(np.asarray(x) for x in found.metrics.values())]
        sound = shaped and all(np.isfinite(x).all() for x in numbers) and "frac_zero_adv" in found.metrics
        worst[name] = float(np.abs(np.asarray(found.adv_BT)[zero_BT]).max()) if sound else np.inf
    return worst


def jit(seed: int) -> Deviations:
    """Compiled and uncompiled agree."""
    rollout = random(seed)
    return gaps(run(rollout), eager(rollout)) if seed == SEEDS[0] else {}


def unread(seed: int) -> Deviations:
    """What stands off the mask and in unused segments is never read: NaN and -inf there change nothing."""
    rollout = random(seed)
    mask_BT, segments, changed = rollout.mask_BT, rollout.segments, {}
    for name, x in columns(rollout):
        if name.endswith("_BT") and jnp.issubdtype(x.dtype, jnp.floating):
            changed[name] = jnp.where(mask_BT, x, -jnp.inf if name == "logp_BT" else jnp.nan)
    unused_BS = segments.length_BS == 0
    spoilt = {name: jnp.where(unused_BS, jnp.nan, getattr(segments, name)) for name in ("reward_BS", "discount_BS")}
    return gaps(run(rollout), run(rollout.replace(segments=segments.replace(**spoilt), **changed)))


def ids(seed: int) -> Deviations:
    """Token ids are never read."""
    rollout = random(seed)
    return gaps(run(rollout), run(rollout.replace(tokens_BT=jnp.zeros_like(rollout.tokens_BT))))


def padding(seed: int) -> Deviations:
    """More padding, of tokens and of segments, changes nothing."""
    rollout = random(seed)
    return _on_sampled_tokens(rollout, examples.pad(rollout, tokens=WIDER, segments=3))


def packing(seed: int) -> Deviations:
    """Longer prompts and observations change nothing: only sampled tokens are time."""
    rollout = random(seed)
    return _on_sampled_tokens(rollout, examples.stretch(rollout, by=2, tokens=WIDER, segments=3))


def _on_sampled_tokens(rollout: base.Rollout, other: base.Rollout) -> Deviations:
    """Differences at the sampled tokens, in their order, of two layouts of the same rollouts."""
    want, got, worst = run(rollout), run(other), {}
    for name, found in want.items():
        worst[name] = 0.0
        for key, x in outputs(found).items():
            y = outputs(got[name])[key]
            if key != "views":
                x, y = x[np.asarray(rollout.mask_BT)], y[np.asarray(other.mask_BT)]
            worst[name] = max(worst[name], float(np.abs(x - y).max(initial=0.0)))
    return worst


def order(seed: int) -> Deviations:
    """Permuting the rollouts permutes the credit."""
    rollout = random(seed)
    order_B = np.random.default_rng(seed).permutation(B)
    views = base.given(rollout.views, "views")
    per = views.rollout_K.shape[0] // B
    order_K = (order_B[:, None] * per + np.arange(per)).reshape(-1)
    moved_views = jax.tree.map(lambda x: x[order_K], views).replace(rollout_K=views.rollout_K)
    changed = {name: x[order_K if name.endswith("_KU") else order_B] for name, x in columns(rollout)}
    segments = jax.tree.map(lambda x: x[order_B], rollout.segments)
    got, want = run(rollout.replace(segments=segments, views=moved_views, **changed)), {}
    for name, found in run(rollout).items():
        rows = {"adv_BT": order_B, "value_target_BT": order_B, "view_weight_K": order_K}
        moved = {key: x[at] for key, at in rows.items() if (x := getattr(found, key)) is not None}
        want[name] = found.replace(**moved)
    return gaps(want, got)


def labels(seed: int) -> Deviations:
    """Group and tree ids are labels."""
    rollout = random(seed)
    tree_B = B - 1 - base.given(rollout.tree_B, "tree_B")
    return gaps(run(rollout), run(rollout.replace(group_B=B - 1 - rollout.group_B, tree_B=tree_B)))


def weight(seed: int) -> Deviations:
    """A rollout of weight 0 changes no other."""
    rollout = random(seed, masked=0.4)
    masked_B1 = np.asarray(rollout.weight_B)[:, None] == 0
    return gaps(run(rollout), run(with_rewards(rollout, jnp.where(masked_B1, 1e3, rollout.segments.reward_BS))))


def bad_reward(seed: int) -> Deviations:
    """A reward that is not finite excludes its rollout, and nothing else, as if its weight were 0."""
    rollout, others_B = random(seed), np.arange(B) != 2
    without = run(rollout.replace(weight_B=rollout.weight_B.at[2].set(0.0)))
    worst: Deviations = {}
    for bad in (jnp.nan, jnp.inf):
        broken = run(with_rewards(rollout, rollout.segments.reward_BS.at[2, 1].set(bad)))
        for name, deviation in gaps(without, broken, others_B).items():
            own = float(np.abs(np.asarray(broken[name].adv_BT)[2]).max())
            counted = float(broken[name].metrics["nonfinite_rewards"]) == 1
            worst[name] = max(worst.get(name, 0.0), deviation, own if counted else np.inf)
    return worst


def gradient(seed: int) -> Deviations:
    """No gradient flows through credit into what it reads."""
    rollout = random(seed)
    floats = {name: x for name, x in columns(rollout) if jnp.issubdtype(x.dtype, jnp.floating)}
    floats = {name: jnp.where(jnp.isfinite(x), x, 0.0) for name, x in floats.items()}  # the law is of gradients

    @jax.jit
    def sensitivity(floats, reward_BS):
        def totals(floats, reward_BS):
            found = eager(with_rewards(rollout.replace(**floats), reward_BS))
            parts = {name: (c.adv_BT, c.value_target_BT, c.view_weight_K) for name, c in found.items()}
            return {name: sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(part)) for name, part in parts.items()}

        return jax.jacrev(totals, argnums=(0, 1))(floats, reward_BS)

    if seed != SEEDS[0]:
        return {}
    found = sensitivity(floats, rollout.segments.reward_BS)
    return {name: max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(part)) for name, part in found.items()}


# --- what the rewards of a batch can teach ---------------------------------------------------------------------------


def shift(seed: int) -> Deviations:
    """Adding a constant to the last reward of every rollout changes no advantage."""
    rollout = random(seed)
    turn_BS = np.asarray(rollout.turn_BS)
    last_BS = acts(rollout) & (turn_BS == turn_BS.max(axis=1, keepdims=True))
    reward_BS = np.asarray(rollout.segments.reward_BS)
    before, after = run(rollout), run(with_rewards(rollout, np.where(last_BS, reward_BS + 3.0, reward_BS)))
    return {name: gap(_advantages(before[name]), _advantages(after[name])) for name in before}


def silent(seed: int) -> Deviations:
    """Where all rollouts of a group earn the same, the advantage is exactly 0, and the group is counted."""
    rollout = random(seed)
    reward_BS = jnp.zeros_like(rollout.segments.reward_BS).at[:, 1].set(0.1)
    return _zero(run(with_rewards(rollout, reward_BS)), "zero_variance_groups", 2)


def alone(seed: int) -> Deviations:
    """A rollout without company (the one of its group and tree) gets exactly 0, and is counted."""
    ids_B = jnp.arange(B, dtype=jnp.int32)
    return _zero(run(random(seed).replace(group_B=ids_B, tree_B=ids_B)), "singleton_groups", B)


def split(seed: int) -> Deviations:
    """A group's credit is the same without the other groups: batches may be cut between groups."""
    rollout, worst = random(seed), {}
    whole, group_B = run(rollout), np.asarray(rollout.group_B)
    for group in np.unique(group_B):
        own_B = group_B == group
        part = run(rollout.replace(weight_B=jnp.asarray(np.where(own_B, rollout.weight_B, 0.0))))
        worst = {name: max(worst.get(name, 0.0), deviation) for name, deviation in gaps(whole, part, own_B).items()}
    return worst


def causal(seed: int) -> Deviations:
    """What was earned before a turn does not change the turn's advantage."""
    rollout = random(seed)
    early_BS = acts(rollout) & (np.asarray(rollout.turn_BS) == 0)
    noise_BS = np.random.default_rng(seed).normal(size=early_BS.shape)
    before, after = run(rollout), run(with_rewards(rollout, rollout.segments.reward_BS + early_BS * noise_BS))
    later_BT = np.asarray(rollout.turn_BT) > 0
    return {
        name: float(np.abs(np.where(later_BT, before[name].adv_BT - after[name].adv_BT, 0.0)).max()) for name in before
    }


def conserves(seed: int) -> Deviations:
    """The credit of a rollout's turns sums to its return less the value it began with."""
    rollout = random(seed)
    first_BT = examples.first_tokens(rollout)
    value_BT = np.where(first_BT, np.random.default_rng(seed).normal(size=(B, T)), np.nan).astype(np.float32)
    start_B = np.nansum(np.where(np.asarray(rollout.turn_BT) == 0, value_BT, np.nan), axis=1)
    due_B = np.asarray(rollout.return_B) - start_B
    found = run(rollout.replace(mc_value_BT=jnp.asarray(value_BT)))
    return {
        name: float(np.abs(np.where(first_BT, c.adv_BT, 0.0).sum(axis=1) - due_B).max()) for name, c in found.items()
    }


# --- variants that wrap another --------------------------------------------------------------------------------------


def sign(seed: int) -> Deviations:
    """The sign of what it wraps is kept, and 0 stays 0."""
    rollout, worst = random(seed), {}
    all_found = run(rollout)
    for name, found in all_found.items():
        if ROWS[name].inner:
            adv_BT, inner_BT = np.asarray(found.adv_BT), np.asarray(_wrapped(name, all_found, rollout).adv_BT)
            against_BT = np.where(inner_BT == 0, np.abs(adv_BT), np.maximum(-adv_BT * np.sign(inner_BT), 0.0))
            worst[name] = float(against_BT.max())
    return worst


def unhinted(seed: int) -> Deviations:
    """Without a view it is what it wraps, to the bit."""
    rollout, worst = random(seed), {}
    views = base.given(rollout.views, "views")
    bare = rollout.replace(views=views.replace(weight_K=jnp.zeros_like(views.weight_K)))
    all_found = run(bare)
    for name, found in all_found.items():
        if "views" in credit.find(name)[1]:
            pulled = 0.0 if found.view_weight_K is None else float(jnp.abs(found.view_weight_K).max())
            inner = _wrapped(name, all_found, bare)
            worst[name] = max(pulled, gap(_advantages(inner), _advantages(found)))
    return worst


def limit(seed: int) -> Deviations:
    """At its neutral knobs it is a simpler variant, where one reward comes at the end."""
    rollout = random(seed, terminal_reward=True, truncated=0.0)
    value_BT = base.given(rollout.mc_value_BT, "mc_value_BT")
    value_BT = jnp.where(examples.first_tokens(rollout), value_BT, jnp.nan)
    rollout = rollout.replace(mc_value_BT=value_BT, tree_B=jnp.arange(B, dtype=jnp.int32))
    return {name: gap(_advantages(a), _advantages(b)) for name, (a, b) in _with_limits(rollout).items()}


@jax.jit
def _with_limits(rollout: base.Rollout) -> dict[str, tuple[base.Credit, base.Credit]]:
    """Each variant at its neutral knobs, and what it is then."""
    pairs = {}
    for name, row in ((name, ROWS[name]) for name in names()):
        if row.limit:
            simpler = bound(row.inner if row.limit == "inner" else row.limit, **row.limit_knobs)
            pairs[name] = bound(name, **row.neutral)(rollout), simpler(rollout)
    return pairs


def _wrapped(name: str, found: Found, rollout: base.Rollout) -> base.Credit:
    """The credit of what a variant wraps."""
    inner = ROWS[name].inner
    return found[inner] if inner in found else jax.jit(bound(inner))(rollout)


def _advantages(found: base.Credit) -> base.Credit:
    return base.Credit(adv_BT=found.adv_BT)


def _zero(found: Found, metric: str, count: int) -> Deviations:
    counted = {name: float(c.metrics[metric]) == count for name, c in found.items()}
    return {name: float(np.abs(c.adv_BT).max()) if counted[name] else np.inf for name, c in found.items()}


LAWS: dict[str, Callable[[int], Deviations]] = {
    law.__name__: law
    for law in (
        masked, jit, unread, ids, padding, packing, order, labels, weight, bad_reward, gradient, shift, silent, alone,
        split, causal, conserves, sign, unhinted, limit,
    )
}  # fmt: skip


def measure(law: str) -> dict[str, tuple[float, int]]:
    """Measures one law over SEEDS: for each variant that it speaks of, the worst deviation and its seed."""
    worst: dict[str, tuple[float, int]] = {}
    for seed in SEEDS:
        for name, deviation in LAWS[law](seed).items():
            worst[name] = max(worst.get(name, (0.0, seed)), (deviation, seed))
    return worst
