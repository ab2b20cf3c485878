"""Credit of one small batch at a time: where a gradient is stopped, and what a rollout without a return may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit
from rsi_jax.credit import examples, laws, rewards
from rsi_jax.credit.examples import action, observation, prompt
from tests.test_credit_cases import with_views

ROWS = [[prompt(1), action(2, a), observation(1), action(1, b)] for a, b in ((1.0, 2.0), (0.0, 0.5))]


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("dr_grpo", {}),
        ("reinforce_pp", {}),
        ("centred_return_to_go", {}),
        ("gae", {"discount": 0.9, "lambda_": 0.5}),
        ("turn_gae", {}),
        ("gigpo", {"inner": credit.find("dr_grpo")[0]}),
    ],
)
def test_no_gradient_reaches_rewards_or_values(name, knobs):
    rollout = examples.rollout(ROWS, value=[[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]])
    rollout = examples.with_anchors(rollout, [[-1, 5, -1, 6]] * 2).replace(end_value_B=jnp.zeros(2))

    def total(reward_BS, value_BT):
        segments = rollout.segments.replace(reward_BS=reward_BS)
        found = credit.find(name)[0](rollout.replace(segments=segments, value_BT=value_BT), **knobs)
        return sum(jnp.sum(jnp.square(x)) for x in (found.adv_BT, found.value_target_BT) if x is not None)

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(rollout.segments.reward_BS, rollout.value_BT)
    assert value != 0
    for grad in grads:
        np.testing.assert_array_equal(grad, 0.0)


@pytest.mark.parametrize("name", ["otb", "sdpo", "hca", "cocoa", "vineppo", "hcapo", "pbrs", "opd", "gae"])
def test_no_gradient_reaches_the_columns_of_a_variant(name):
    rollout = laws.random(0)
    columns = {field: getattr(rollout, field) for field in (*credit.find(name)[1], "logp_BT") if field != "views"}
    columns = {field: jnp.where(jnp.isfinite(x), x, 0.5) for field, x in columns.items()}

    def total(columns, weight_K):
        views = rollout.views.replace(weight_K=weight_K)
        found = laws.bound(name)(rollout.replace(views=views, **columns))
        parts = (found.adv_BT, found.value_target_BT, found.view_weight_K)
        return sum(jnp.sum(jnp.square(x)) for x in parts if x is not None)

    value, grads = jax.value_and_grad(total, argnums=(0, 1))(columns, rollout.views.weight_K)
    assert value != 0
    for grad in jax.tree.leaves(grads):
        np.testing.assert_array_equal(grad, 0.0)


def test_the_advantages_that_sdpo_carries_on_are_not_trained():
    rollout = laws.random(0)

    def total(scale):
        def inner(rollout):
            found = credit.find("dr_grpo")[0](rollout)
            return found.replace(adv_BT=scale * found.adv_BT)

        return jnp.sum(jnp.square(credit.find("sdpo")[0](rollout, inner=inner, outcome_weight=1.0).adv_BT))

    value, grad = jax.value_and_grad(total)(1.0)
    assert value > 0 and grad == 0


def test_a_value_off_the_sampled_tokens_is_none():
    """Beyond the turns there, too: a rollout has fewer turns than the table has columns."""
    rollout = examples.rollout([[prompt(2), action(2, 1.0), observation(1), action(1)]] * 2)
    value_BT = np.where(np.asarray(rollout.mask_BT), [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], np.nan).astype(np.float32)
    bare, full = (rollout.replace(mc_value_BT=jnp.asarray(np.nan_to_num(value_BT, nan=x))) for x in (np.nan, 9.0))
    for name in ("vineppo", "spo"):
        got, want = (np.asarray(credit.find(name)[0](one).adv_BT) for one in (full, bare))
        np.testing.assert_array_equal(got, want)
        assert want.any()


def test_a_rollout_without_a_return_is_in_no_mean_of_a_turn():
    rows = [[prompt(1), action(1, a), observation(1), action(1, b)] for a, b in ((1.0, 0.0), (0.0, 0.0), (8.0, np.nan))]
    adv_BT = np.asarray(credit.find("mt_grpo")[0](examples.rollout(rows), scale="none").adv_BT)
    np.testing.assert_allclose(adv_BT[:, 1], [0.5, -0.5, 0.0], atol=1e-6)


def test_a_segment_of_no_length_is_not_shaped():
    rollout = examples.rollout([[prompt(1), action(1, 1.0), observation(1), action(1)], [prompt(1), action(3)]])
    segments = rollout.segments.replace(
        kind_BS=jnp.where(rollout.segments.length_BS > 0, rollout.segments.kind_BS, base.ACTION)
    )
    judge_BS = jnp.asarray(np.random.default_rng(0).random(segments.length_BS.shape), jnp.float32)
    knobs = {"inner": credit.find("dr_grpo")[0]}  # reads the sum of all rewards
    got, want = (
        credit.find("pbrs")[0](one.replace(judge_BS=judge_BS), **knobs).adv_BT
        for one in (rollout.replace(segments=segments), rollout)
    )
    np.testing.assert_array_equal(got, want)


def test_a_batch_in_which_nothing_counts_moves_no_running_mean():
    rollout = examples.bandit([1.0, np.nan], weight=[0, 1])
    assert rewards.running_baseline(jnp.float32(0.25), rollout) == 0.25
    np.testing.assert_allclose(rewards.running_baseline(0.25, examples.bandit([1.0, 0.0]), decay=0.5), 0.375)


def test_what_a_hindsight_model_learns_from():
    """Two turns of reward 0 and 1, classes below and from .5: the return to come, and how many turns ahead pay."""
    rows = [[prompt(1), action(1, 0.0), observation(1), action(1, 1.0)], [prompt(1), action(1, 1.0)]]
    rollout = examples.rollout(rows, weight=[1, 0])
    returns, paid = (np.asarray(rewards.hindsight_weights(rollout, (0.5,), of)) for of in ("returns", "rewards"))
    np.testing.assert_array_equal(returns[0], [[0, 0], [0, 1], [0, 0], [0, 1]])
    np.testing.assert_array_equal(paid[0], [[0, 0], [1, 1], [0, 0], [0, 1]])
    assert not returns[1].any() and not paid[1].any()


def test_the_length_of_a_rollout_without_a_return_is_in_no_baseline():
    rows = [[prompt(1), action(n, r)] for n, r in ((1, 1.0), (3, 0.0), (9, np.nan))]
    adv_BT = np.asarray(credit.find("opo")[0](examples.rollout(rows)).adv_BT)
    np.testing.assert_allclose(adv_BT[:, 1], [0.75, -0.25, 0.0], atol=1e-6)


def test_a_rollout_without_a_return_is_in_no_mean_of_first_turns():
    adv_BT = np.asarray(credit.find("centred_return_to_go")[0](examples.bandit([1.0, 0.0, np.nan])).adv_BT)
    np.testing.assert_allclose(adv_BT[:, 1], [0.5, -0.5, 0.0], atol=1e-6)


def test_a_rollout_that_does_not_count_earns_nothing_in_any_turn():
    table = rewards.counted_turns(examples.bandit([1.0, 2.0, np.nan], weight=[1, 0, 1]))
    np.testing.assert_array_equal(table.reward_S[:, 0], [1.0, 0.0, 0.0])


def test_a_rollout_that_does_not_count_is_not_taught_by_its_hinted_reading():
    rollout = with_views(examples.bandit([1.0, 0.0, 0.0], weight=[1, 1, 0]), [(0, 1, 2), (2, 1, 2)])
    rollout = rollout.replace(view_logp_KU=rollout.logp_BT[jnp.asarray([0, 2]), 1:3] - 1.0)
    adv_BT = np.asarray(credit.find("opd")[0](rollout, inner=credit.find("dr_grpo")[0]).adv_BT)
    np.testing.assert_allclose(adv_BT[:, 1:], [[-0.5, -0.5], [-0.5, -0.5], [0, 0]], atol=1e-6)
