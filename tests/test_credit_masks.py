"""Credit of one small batch at a time: where a gradient is stopped, and what a rollout without a return may not do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import credit
from rsi_jax.credit import examples, rewards
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
