"""Laws that every credit variant keeps, over random rollouts of one shape. A new variant adds a row to VARIANTS."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit
from rsi_jax.credit import critic, feedback, group
from tests import builders

B, T, TURNS = 8, 32, 3
VARIANTS = {
    "reinforce": group.reinforce,
    "reinforce_batch": functools.partial(group.reinforce, baseline="batch"),
    "rloo": group.rloo,
    "grpo": group.grpo,
    "grpo_none": functools.partial(group.grpo, scale="none"),
    "dr_grpo": group.dr_grpo,
    "centred_return_to_go": group.centred_return_to_go,
    "gae": functools.partial(critic.gae, discount=0.98, lambda_=0.9),
    "gae_std": functools.partial(critic.gae, scale="std"),
    "turn_gae": critic.turn_gae,
    "textual_feedback": functools.partial(feedback.textual_feedback, inner=group.grpo),
    "textual_feedback_failed": functools.partial(
        feedback.textual_feedback, inner=critic.turn_gae, failed_only=True, weight=0.3, divergence="jsd"
    ),
    "locator_penalty": functools.partial(feedback.locator_penalty, inner=group.rloo, penalty=0.5),
}
GROUP_BASELINES = ("rloo", "grpo", "grpo_none", "dr_grpo", "centred_return_to_go", "textual_feedback")
JITTED = {name: jax.jit(variant) for name, variant in VARIANTS.items()}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def random(seed, **knobs):
    rollout = builders.random_rollout(seed, B=B, T=T, turns=TURNS, **knobs)
    return rollout.replace(views=builders.random_views(seed, rollout))


def columns(found):
    """The per-token and per-view outputs of a credit, as numpy."""
    named = {"adv": found.adv_BT, "target": found.value_target_BT, "views": found.view_weight_K}
    return {key: np.asarray(x) for key, x in named.items() if x is not None}


def assert_same(a, b, **tolerance):
    a, b = columns(a), columns(b)
    assert a.keys() == b.keys()
    for key in a:
        if tolerance:
            np.testing.assert_allclose(a[key], b[key], err_msg=key, **tolerance)
        else:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)


def test_every_variant_stands_in_the_table():
    tried = {getattr(variant, "func", variant).__name__ for variant in VARIANTS.values()}
    assert tried == set(credit.variants())


@every_variant
def test_shape_type_finite_zero_off_mask_and_reported(name):
    for seed in range(3):
        rollout = random(seed, masked=0.2)
        found = JITTED[name](rollout)
        assert found.adv_BT.shape == (B, T) and found.adv_BT.dtype == jnp.float32
        for x in columns(found).values():
            assert np.isfinite(x).all() and x.dtype == np.float32
        off = ~np.asarray(rollout.mask_BT)
        assert not np.asarray(found.adv_BT)[off].any()
        assert not np.asarray(found.adv_BT)[np.asarray(rollout.weight_B) == 0].any() or name == "locator_penalty"
        if found.value_target_BT is not None:
            assert not np.asarray(found.value_target_BT)[off].any()
        if found.view_weight_K is not None:
            assert found.view_weight_K.shape == rollout.views.weight_K.shape
        assert {"frac_zero_adv", "zero_variance_groups", "nonfinite_rewards"} <= set(found.metrics)
        assert all(np.isfinite(x) and np.shape(x) == () for x in found.metrics.values())


@every_variant
def test_jit_equals_eager(name):
    rollout = random(0)
    assert_same(JITTED[name](rollout), VARIANTS[name](rollout), atol=1e-5, rtol=1e-5)


def poisoned(rollout):
    """NaN or -inf wherever nothing may read: off-mask columns, unused segments and their tables."""
    mask_BT = np.asarray(rollout.mask_BT)
    segments = rollout.segments
    unused_BS = np.asarray(segments.length_BS) == 0
    return rollout.replace(
        logp_BT=jnp.where(mask_BT, rollout.logp_BT, -jnp.inf),
        ref_logp_BT=jnp.where(mask_BT, rollout.ref_logp_BT, jnp.nan),
        value_BT=jnp.where(mask_BT, rollout.value_BT, jnp.nan),
        segments=segments.replace(
            reward_BS=jnp.where(unused_BS, jnp.nan, segments.reward_BS),
            discount_BS=jnp.where(unused_BS, jnp.nan, segments.discount_BS),
        ),
    )


@every_variant
def test_what_stands_off_mask_is_never_read(name):
    rollout = random(1)
    assert_same(JITTED[name](rollout), JITTED[name](poisoned(rollout)))


@every_variant
def test_token_ids_are_never_read(name):
    rollout = random(2)
    assert_same(JITTED[name](rollout), JITTED[name](rollout.replace(tokens_BT=jnp.zeros_like(rollout.tokens_BT))))


@every_variant
def test_padding_changes_nothing(name):
    rollout = random(3)

    def wider(x):
        return jnp.pad(x, ((0, 0), (0, 3)))

    padded = rollout.replace(
        **{key: wider(getattr(rollout, key)) for key in ("tokens_BT", "logp_BT", "ref_logp_BT", "value_BT")},
        kept_mass_BT=wider(rollout.kept_mass_BT),
        segments=jax.tree.map(wider, rollout.segments),
    )
    want, got = JITTED[name](rollout), JITTED[name](padded)
    cut = {key: x[:, :T] for key in ("adv_BT", "value_target_BT") if (x := getattr(got, key)) is not None}
    assert not np.asarray(got.adv_BT)[:, T:].any()
    assert_same(want, got.replace(**cut), atol=1e-5, rtol=1e-5)


@every_variant
def test_a_masked_row_changes_no_other_row(name):
    rollout = random(4, masked=0.4)
    masked_B1 = np.asarray(rollout.weight_B)[:, None] == 0
    segments = rollout.segments
    wild = segments.replace(reward_BS=jnp.where(masked_B1, 1e3, segments.reward_BS))
    a, b = JITTED[name](rollout), JITTED[name](rollout.replace(segments=wild))
    np.testing.assert_array_equal(a.adv_BT, b.adv_BT)
    if a.view_weight_K is not None:
        np.testing.assert_array_equal(a.view_weight_K, b.view_weight_K)


@every_variant
def test_permuting_rows_permutes_credit(name):
    rollout = random(5)
    order = np.random.default_rng(0).permutation(B)
    per = rollout.views.rollout_K.shape[0] // B
    views_order = (order[:, None] * per + np.arange(per)).reshape(-1)
    place = np.argsort(order)
    views = jax.tree.map(lambda x: x[views_order], rollout.views)
    views = views.replace(rollout_K=jnp.asarray(place[np.asarray(views.rollout_K)], jnp.int32))
    moved = jax.tree.map(lambda x: x[order], rollout.replace(views=None)).replace(views=views)
    want, got = columns(JITTED[name](rollout)), columns(JITTED[name](moved))
    for key in want:
        rows = views_order if key == "views" else order
        np.testing.assert_allclose(got[key], want[key][rows], atol=1e-5, rtol=1e-5)


@every_variant
def test_group_ids_are_labels(name):
    rollout = random(6)
    relabelled = rollout.replace(group_B=7 - rollout.group_B)
    assert_same(JITTED[name](rollout), JITTED[name](relabelled), atol=1e-6, rtol=1e-6)


@every_variant
def test_no_gradient_flows_through_credit(name):
    rollout = random(7)

    def total(value_BT, reward_BS, logp_BT):
        changed = rollout.replace(
            value_BT=value_BT, logp_BT=logp_BT, segments=rollout.segments.replace(reward_BS=reward_BS)
        )
        return sum(jnp.sum(x) for x in (VARIANTS[name](changed).adv_BT, *_optional(VARIANTS[name](changed))))

    grads = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(rollout.value_BT, rollout.segments.reward_BS, rollout.logp_BT)
    for grad in grads:
        np.testing.assert_array_equal(grad, 0.0)


def _optional(found):
    return [x for x in (found.value_target_BT, found.view_weight_K) if x is not None]


@every_variant
def test_a_reward_that_is_not_finite_excludes_its_rollout_only(name):
    rollout = random(8)
    segments = rollout.segments
    for bad in (jnp.nan, jnp.inf):
        broken = rollout.replace(segments=segments.replace(reward_BS=segments.reward_BS.at[2, 1].set(bad)))
        found = JITTED[name](broken)
        assert all(np.isfinite(x).all() for x in columns(found).values())
        assert found.metrics["nonfinite_rewards"] == 1
        without = JITTED[name](rollout.replace(weight_B=rollout.weight_B.at[2].set(0.0)))
        others = np.arange(B) != 2
        np.testing.assert_array_equal(found.adv_BT[others], without.adv_BT[others])
        if name != "locator_penalty":
            np.testing.assert_array_equal(found.adv_BT[2], 0.0)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_adding_a_constant_to_every_return_changes_nothing(name):
    rollout = random(9)
    segments = rollout.segments
    last_BS = np.asarray(segments.kind_BS == base.ACTION) & (
        np.asarray(rollout.turn_BS) == np.asarray(rollout.turn_BS).max(axis=1, keepdims=True)
    )
    last_BS &= np.asarray(segments.length_BS) > 0
    shifted = segments.replace(reward_BS=jnp.where(last_BS, segments.reward_BS + 3.0, segments.reward_BS))
    assert_same(JITTED[name](rollout), JITTED[name](rollout.replace(segments=shifted)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", GROUP_BASELINES)
def test_agreeing_groups_and_singletons_give_exactly_zero(name):
    rollout = random(10, terminal_reward=True)
    segments = rollout.segments
    agreed = rollout.replace(segments=segments.replace(reward_BS=jnp.where(segments.reward_BS > 0, 0.0, 0.0) + 0.1))
    alone = rollout.replace(group_B=jnp.arange(B, dtype=jnp.int32))
    even = agreed.segments.replace(reward_BS=jnp.zeros_like(segments.reward_BS).at[:, 1].set(0.1))
    for silent, metric in ((rollout.replace(segments=even), "zero_variance_groups"), (alone, "singleton_groups")):
        found = JITTED[name](silent)
        np.testing.assert_array_equal(found.adv_BT, 0.0)
        assert found.metrics["frac_zero_adv"] == 1 and found.metrics[metric] >= 1


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_critic_limits(name):
    """λ = 1: return-to-go - V; λ = 0: the TD error; on the tokens where time advances, with γ = 1 and no truncation."""
    rollout = random(11, truncated=0.0)
    mask_BT, value_BT = np.asarray(rollout.mask_BT), np.asarray(rollout.value_BT)
    turn_BT, turn_BS = np.asarray(rollout.turn_BT), np.asarray(rollout.turn_BS)
    reward_BS = np.where(np.asarray(rollout.segments.length_BS) > 0, rollout.segments.reward_BS, 0.0)
    function = credit.find(name)[0]
    one = jax.jit(functools.partial(function, discount=1.0, lambda_=1.0))(rollout).adv_BT
    zero = jax.jit(functools.partial(function, discount=1.0, lambda_=0.0))(rollout).adv_BT
    for b in range(B):
        for t in np.flatnonzero(mask_BT[b]):
            turn = turn_BT[b, t]
            togo = reward_BS[b][turn_BS[b] >= turn].sum()
            same = np.flatnonzero(mask_BT[b] & (turn_BT[b] == turn))
            later = np.flatnonzero(mask_BT[b] & (turn_BT[b] > turn))
            here = same[0] if name == "turn_gae" else t
            following = later[:1] if name == "turn_gae" or t == same[-1] else [t + 1]
            earned = reward_BS[b][turn_BS[b] == turn].sum() if name == "turn_gae" or t == same[-1] else 0.0
            np.testing.assert_allclose(one[b, t], togo - value_BT[b, here], atol=1e-4)
            error = earned + value_BT[b][following].sum() - value_BT[b, here]
            np.testing.assert_allclose(zero[b, t], error, atol=1e-4)


def test_turn_gae_of_one_turn_is_response_level():
    rollout = random(12, truncated=0.0)
    single = builders.random_rollout(12, B=B, T=T, turns=1, truncated=0.0)
    found = jax.jit(credit.find("turn_gae")[0])(single)
    first_B = np.asarray(single.segments.start_BS)[:, 1]
    want_B = np.asarray(single.return_B) - np.asarray(single.value_BT)[np.arange(B), first_B]
    np.testing.assert_allclose(found.adv_BT, np.where(single.mask_BT, want_B[:, None], 0.0), atol=1e-5)
    assert rollout.segments.start_BS.shape != single.segments.start_BS.shape


@pytest.mark.parametrize("name", ["gae", "gae_std", "turn_gae", "grpo", "centred_return_to_go"])
def test_the_length_of_observations_changes_no_credit(name):
    def row(gap, reward):
        spans = [builders.prompt(gap), builders.action(2, 0.3), builders.observation(gap)]
        return [*spans, builders.action(3, reward, discount=0.0, finish=base.ENV)]

    values = [[0.1, 0.2, 0.3, 0.4, 0.5], [0.5, 0.4, 0.3, 0.2, 0.1]]
    short, long = (builders.rollout([row(gap, 1.0), row(gap, 0.0)], value=values, T=26) for gap in (1, 9))
    a, b = (np.asarray(JITTED[name](x).adv_BT)[np.asarray(x.mask_BT)] for x in (short, long))
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_feedback_of_weight_zero_is_its_inner():
    rollout = random(13)
    inner = JITTED["grpo"](rollout)
    found = jax.jit(functools.partial(feedback.textual_feedback, inner=group.grpo, weight=0.0))(rollout)
    np.testing.assert_array_equal(found.adv_BT, inner.adv_BT)
    np.testing.assert_array_equal(found.view_weight_K, 0.0)
    penalty = jax.jit(functools.partial(feedback.locator_penalty, inner=group.grpo, penalty=0.0))(rollout)
    np.testing.assert_array_equal(penalty.adv_BT, inner.adv_BT)


def test_the_weight_of_feedback_may_be_traced():
    rollout = random(14)

    @jax.jit
    def scheduled(weight):
        return feedback.textual_feedback(rollout, inner=group.grpo, weight=weight).view_weight_K

    np.testing.assert_allclose(scheduled(0.5), 0.5 * scheduled(1.0), atol=1e-7)
