"""Every credit variant equals what its definition says, written out in loops (credit_oracles), on random rollouts.

The rollouts have every column, and what real batches have: masked rows, truncated rollouts, a reward that is not
finite, a group of one, a group that agrees, states that recur, discounts of the environment, scores that are missing,
views that overlap and cross turns. RSI_JAX_VARIANTS=a,b tests these variants only.
"""

import functools
import os

import jax
import numpy as np
import pytest

from rsi_jax import credit
from rsi_jax.credit import examples
from tests import credit_oracles, credit_oracles_turns, credit_oracles_views

B, T, TURNS, VIEWS, SPAN = 14, 32, 3, 2, 5
SEEDS = range(8)
GROUP = [0] * 4 + [1] * 3 + [2] * 3 + [3] + [4] * 3  # 3: alone; 2: made to agree
TOLERANCE = 2e-5
DISCOUNTED = {"lambda_": 0.5, "scale": "std"}
# The published knobs stand first; after them a setting for every other branch. `inner` names the wrapped variant.
SETTINGS: dict[str, list[dict]] = {
    "reinforce": [{}, {"baseline": "batch"}],
    "rloo": [{}],
    "grpo": [{}, {"scale": "none"}, {"std_floor": 0.3, "per": "turn"}, {"scale": "none", "per": "turn"}],
    "dr_grpo": [{}],
    "maxrl": [{}, {"floor": 0.4}],
    "opo": [{}],
    "rae": [{}, {"decay": 0.0}],
    "otb": [{}],
    "reinforce_pp": [{}],
    "reinforce_pp_baseline": [{}],
    "centred_return_to_go": [{}, {"discount": 0.7}],
    "turn_rloo": [{}, {"discount": 0.7}],
    "mt_grpo": [{}, {"turn_weight": 0.5, "outcome_weight": 2.0, "scale": "none"}, {"std_floor": 0.5}],
    "prm": [{"inner": "grpo"}, {"inner": "rloo", "form": "sum", "weight": 0.5}, {"inner": "grpo", "form": "min"}],
    "pbrs": [{"inner": "centred_return_to_go"}, {"inner": "turn_rloo", "weight": 0.5, "discount": 0.7}],
    "igpo": [{}, {"weight": 0.5, "discount": 0.7, "std_floor": 0.2}],
    "gigpo": [
        {"inner": "grpo"},
        {"inner": "rloo", "omega": 2.0, "discount": 1.0, "scale": "std"},
        {"inner": "dr_grpo", "scale": "std", "std_floor": 0.4},
    ],
    "gae": [{}, {**DISCOUNTED, "discount": 0.9}],
    "vapo": [{}, {"alpha": 0.5, "discount": 0.9, "scale": "std"}],
    "turn_gae": [{}, {**DISCOUNTED, "discount": 0.8}],
    "vineppo": [{}],
    "spo": [{}, {"prob_max": 0.3}],
    "tree_grpo": [{}, {"scale": "none"}, {"std_floor": 0.3}],
    "hcapo": [
        {"inner": "grpo"},
        {"inner": "rloo", "denominator": "policy", "temperature": 2.0, "clip_low": 0.5, "clip_high": 1.5},
        {"inner": "grpo", "smooth": True, "omega": 0.5, "discount": 0.7, "success_return": 0.0, "std_floor": 0.1},
    ],
    "hca": [{}, {"edges": (-0.7, 0.1, 0.8), "clip": 2.0}],
    "cocoa": [{}, {"edges": (-0.7, 0.1, 0.8), "clip": 2.0}],
    "textual_feedback": [
        {"inner": "grpo"},
        {
            "inner": "gae",
            "failed_only": True,
            "weight": 0.3,
            "divergence": "jsd",
            "alpha": 0.2,
            "top_k": 9,
            "entry_clip": 0.5,
        },
        {
            "inner": "rloo",
            "failed_only": True,
            "success_return": 0.5,
            "divergence": "sampled",
            "clip": 2.0,
            "temperature": 0.7,
        },
    ],
    "sdpo": [
        {"inner": "grpo"},
        {"inner": "rloo", "weight": 0.5, "outcome_weight": 0.7, "alpha": 1.0, "success_return": 0.0, "top_k": 7},
        {"inner": "rloo", "alpha": 0.0, "is_clip": 0.0},
    ],
    "locator_penalty": [
        {"inner": "grpo"},
        {"inner": "rloo", "penalty": 0.4, "failed_only": True},
        {"inner": "rloo", "failed_only": True, "success_return": 0.2},
    ],
    "rlsd": [{"inner": "grpo"}, {"inner": "rloo", "mix": 0.8, "clip": 0.9}],
    "opd": [{"inner": "grpo"}, {"inner": "rloo", "weight": 0.5, "clip": 0.7}],
    "vopd": [{"inner": "grpo"}, {"inner": "rloo", "weight": 0.5, "clip": 0.7}],
    "agent_opsd": [
        {"inner": "grpo"},
        {"inner": "rloo", "mix": 0.9, "clip": 0.7, "discount": 0.5, "success_return": 0.0, "prior_clip": 0.3},
    ],
    "rlcsd": [
        {"inner": "grpo"},
        {"inner": "rloo", "temperature": 2.0, "beta": 3.0, "mix": 0.7, "bound": 0.6, "threshold": 0.3},
    ],
}
WANTED = [name for name in os.environ.get("RSI_JAX_VARIANTS", "").split(",") if name] or list(SETTINGS)
CASES = {
    f"{name}{i}": (name, knobs) for name in WANTED for i, knobs in enumerate(SETTINGS[name])
}  # a name that is not known raises KeyError


def oracle(name):
    family = [m for m in (credit_oracles, credit_oracles_turns, credit_oracles_views) if hasattr(m, name)]
    return getattr(family[0], name)


def bound(find, name, knobs):
    """A variant, or its oracle, with its knobs, and its inner found by the same means."""
    inner = {"inner": find(knobs["inner"])} if "inner" in knobs else {}
    return functools.partial(find(name), **{**knobs, **inner})


@jax.jit
def credits(rollout):
    """One program for all."""
    return {key: bound(lambda n: credit.find(n)[0], name, knobs)(rollout) for key, (name, knobs) in CASES.items()}


@functools.cache
def random(seed):
    """Host columns of a rollout that has all there is to get wrong."""
    rng = np.random.default_rng([seed, 9])
    rollout = examples.random_rollout(seed, B=B, T=T, turns=TURNS, truncated=0.4, terminal_reward=seed % 2 == 1)
    group_B = rng.permutation(GROUP).astype(np.int32)
    rollout = jax.tree.map(np.array, examples.complete(rollout.replace(group_B=group_B), seed, per_rollout=VIEWS))
    weight_B, segments = np.ones(B, np.float32), rollout.segments
    used_BS = segments.length_BS > 0
    weight_B[rng.choice(np.flatnonzero(group_B == 4))] = 0.0
    weight_B[rng.choice(np.flatnonzero(group_B == 0))] = 0.0
    middle_BS = used_BS & (segments.discount_BS > 0)
    discount_BS = np.where(middle_BS, rng.choice([1.0, 0.9, 0.5], used_BS.shape), segments.discount_BS)
    reward_BS = np.where(used_BS, segments.reward_BS, 7.0)  # what stands in unused rows is not read
    reward_BS[:, 0] = np.where(rng.random(B) < 0.3, 0.25, 0.0)  # before the first action: no turn's
    for b in np.flatnonzero(group_B == 2):  # the same return, earned at different times
        reward_BS[b] = 0.0
        reward_BS[b, rng.integers(1, used_BS[b].sum())] = 0.5
    counted = np.flatnonzero(group_B == 1)
    reward_BS[counted[0], 1] = np.nan
    if seed >= 6:  # all begin in one state, as in a bandit
        rollout = examples.with_anchors(rollout, 5)
        segments = segments.replace(anchor_BS=np.asarray(rollout.segments.anchor_BS))
    segments = segments.replace(reward_BS=reward_BS.astype(np.float32), discount_BS=discount_BS.astype(np.float32))
    missing_BS = rng.random(used_BS.shape) < 0.2
    # what is known of a policy: Σ π² lies between π(y)² and π(y)² + (1 - π(y))²
    chance_BT = np.exp(rollout.logp_BT)
    collision_BT = chance_BT**2 + rng.random((B, T)) * (1 - chance_BT) ** 2
    rollout = rollout.replace(
        weight_B=weight_B,
        segments=segments,
        collision_BT=np.where(rollout.mask_BT, collision_BT, np.nan).astype(np.float32),
        judge_BS=np.where(missing_BS, np.nan, rollout.judge_BS),
        answer_logp_BS=np.where(missing_BS[:, ::-1], np.nan, rollout.answer_logp_BS),
    )
    return with_wider_views(rollout, rng)


def with_wider_views(rollout, rng):
    """Spans that begin before or inside an action and cross what follows, some on token 0, read anew."""
    views, K = rollout.views, B * VIEWS
    used_K = views.span_length_K > 0
    start_K = np.where(rng.random(K) < 0.1, 0, np.maximum(views.span_start_K + rng.integers(-1, 2, K), 0))
    length_K = np.where(
        used_K, np.minimum(rng.integers(1, SPAN + 1, K), np.asarray(rollout.length_B)[views.rollout_K] - start_K), 0
    )
    beyond_KU = np.arange(SPAN) >= length_K[:, None]
    said = {
        name: np.where(beyond_KU, np.nan, rng.exponential(1.0, (K, SPAN)) * scale).astype(np.float32)
        for name, scale in (("view_logp_KU", -1.0), ("wrong_logp_KU", -1.0), ("view_kl_KU", 1.0))
    }
    length_K = np.where(rng.random(K) < 0.1, 0, length_K)
    views = views.replace(
        span_start_K=start_K.astype(np.int32),
        span_length_K=length_K.astype(np.int32),
        weight_K=np.where(rng.random(K) < 0.15, np.float32(0), views.weight_K),  # gated off
    )
    return rollout.replace(views=views, **said)


@functools.cache
def found_together(seed):
    return credits(random(seed))


def found(seed, key):
    """Credit of one case; without jit (experiments.mutate_credit) of that case alone, and anew each time."""
    if jax.config.jax_disable_jit:
        return bound(lambda name: credit.find(name)[0], *CASES[key])(random(seed))
    return found_together(seed)[key]


@functools.cache
def batch(seed):
    return credit_oracles.read(random(seed))


def test_every_variant_has_an_oracle_and_two_settings_if_it_has_knobs():
    variants = credit.variants()
    assert set(SETTINGS) == set(variants)
    for name, function in variants.items():
        knobs = set(function.__kwdefaults__ or {})
        assert function.__kwdefaults__ == oracle(name).__kwdefaults__, name  # the published ones
        assert SETTINGS[name][0].keys() <= {"inner"} and len(SETTINGS[name]) > bool(knobs), name
        tried = {key for setting in SETTINGS[name] for key in setting}
        assert tried - {"inner"} == knobs, name


def test_the_rollouts_have_what_real_batches_have():
    rollouts = [random(seed) for seed in SEEDS]
    for seed, rollout in zip(SEEDS, rollouts, strict=True):
        rows = batch(seed).rows
        counts_B = np.array([row.counts for row in rows])
        assert (rollout.weight_B == 0).sum() == 2 and counts_B.sum() == B - 3
        agreeing = {row.earned for row in rows if row.group == 2}
        assert agreeing == {0.5} and sum(row.group == 3 for row in rows) == 1
        anchors = [(row.group, turn.anchor) for row in rows for turn in row.turns if turn.anchor >= 0]
        assert len(set(anchors)) < len(anchors)
    ends = [row.turns[-1].discount for seed in SEEDS for row in batch(seed).rows]
    assert 0.0 in ends and max(ends) > 0.0
    seen = [
        place
        for seed in SEEDS
        for b, start, n in credit_oracles_views.spans(batch(seed))
        for place in [(seed, b, t) for t in range(start, start + n)]
    ]
    assert len(set(seen)) < len(seen)


@pytest.mark.parametrize("key", CASES)
def test_variant_equals_its_definition(key):
    name, knobs = CASES[key]
    spoke = False
    for seed in SEEDS:
        want, got = bound(oracle, name, knobs)(batch(seed)), found(seed, key)
        spoke |= bool(want.adv.any()) or want.views is not None and bool(want.views.any())
        pairs = {"adv": (got.adv_BT, want.adv), "target": (got.value_target_BT, want.target)}
        for column, (x, expected) in (pairs | {"views": (got.view_weight_K, want.views)}).items():
            assert (x is None) == (expected is None), (column, seed)
            if x is not None:
                np.testing.assert_allclose(x, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{column} {seed}")
        assert want.divergence is None or got.divergence == want.divergence
    assert spoke, "nothing was credited: the test tells nothing"
