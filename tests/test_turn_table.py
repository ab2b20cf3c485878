"""The turn table against one written out by hand, and what reads it: shaping, states that recur."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base, credit
from rsi_jax.credit import examples, rewards, turns
from rsi_jax.credit.examples import Span, action, observation, prompt


def tables(rollout):
    return jax.vmap(turns.table)(rollout.segments)


def with_junk(rollout):
    """Fills the rows of the segment table that nothing uses: they look like actions, with rewards and discounts."""
    segments = rollout.segments
    unused_BS = segments.length_BS == 0
    junk = {"kind": base.ACTION, "reward": 50.0, "discount": 0.3, "finish": base.LENGTH, "start": 1}
    columns = {f"{name}_BS": getattr(segments, f"{name}_BS") for name in junk}
    filled = {key: jnp.where(unused_BS, junk[key[:-3]], x).astype(x.dtype) for key, x in columns.items()}
    return rollout.replace(segments=segments.replace(**filled))


def test_the_table_of_a_rollout_that_ran_out_of_tokens():
    early = Span(base.PROMPT, 2, 5.0)  # a reward before the first action is nobody's
    late = [observation(2, 0.25, discount=0.5), action(2, 1.0, discount=0.9, finish=base.LENGTH), observation(1, 0.5)]
    rollout = examples.rollout([[early, action(3, 0.5), *late]], S=8)
    rollout = with_junk(examples.with_anchors(rollout, [[-1, 4, -1, 6, -1, -1, -1, -1]]))
    table = tables(rollout)
    np.testing.assert_array_equal(table.used_S[0], [True, True] + 6 * [False])
    np.testing.assert_array_equal(table.first_S[0, :2], [2, 7])
    np.testing.assert_array_equal(table.last_S[0, :2], [4, 8])
    np.testing.assert_array_equal(table.anchor_S[0], [4, 6] + 6 * [base.NO_ANCHOR])
    np.testing.assert_allclose(table.reward_S[0], [0.75, 1.5] + 6 * [0.0])
    np.testing.assert_allclose(table.discount_S[0, :2], [0.5, 0.9])


def test_only_the_last_turn_ends_a_rollout():
    cut = action(1, 1.0, discount=0.8, finish=base.LENGTH)
    rows = [[prompt(1), cut, observation(1), action(2, 2.0)], [prompt(1), action(1), observation(1), cut]]
    table = tables(examples.rollout(rows))
    np.testing.assert_allclose(table.discount_S[:, :2], [[0.8, 0.0], [1.0, 0.8]])
    np.testing.assert_array_equal(table.used_S[:, :3], [[True, True, False]] * 2)


def test_tokens_get_the_value_of_their_turn():
    np.testing.assert_array_equal(turns.to_tokens(jnp.asarray([3.0, 5.0]), jnp.asarray([-1, 0, 1, 0])), [3, 3, 5, 3])


def test_dynamic_sampling_leaves_out_what_does_not_count():
    rollout = examples.bandit([1.0, 0.0, 0.5, np.nan], weight=[1, 1, 0, 1])
    np.testing.assert_array_equal(rewards.dynamic_sampling_keep(rollout), [True, True, False, False])


def test_overlong_shaping_takes_from_the_last_action_only():
    rollout = with_junk(examples.rollout([[prompt(1), action(4, 1.0), observation(1), action(4), observation(2)]], S=7))
    shaped = rewards.overlong_shaping(rollout, max_length=8, buffer=2, penalty=0.5)
    np.testing.assert_allclose(shaped.segments.reward_BS, [[0, 1.0, 0, -0.5, 0, 50, 50]])


# --- recurring states ------------------------------------------------------------------------------------------------


def step_advantages(returns, group, anchors, **knobs):
    """A_step of one-turn rollouts that begin with their action, with a segment table of just one row."""
    rollout = examples.rollout([[action(1, r)] for r in returns], group=group)
    rollout = examples.with_anchors(rollout, np.asarray(anchors)[:, None])
    silent = functools.partial(credit.find("reinforce")[0], baseline="none")
    found = credit.find("gigpo")[0](rollout, inner=silent, **knobs)
    return np.asarray(found.adv_BT)[:, 0] - np.asarray(returns, np.float32)


def test_a_state_is_a_pair_of_group_and_anchor():
    got = step_advantages([1.0, 0.0, 1.0, 3.0, 1.0], [0, 0, 0, 1, 1], [3, 7, 7, 7, 7])
    np.testing.assert_allclose(got, [0, -0.5, 0.5, 1.0, -1.0], atol=1e-6)


def test_the_std_of_a_state_is_bounded_by_its_floor():
    got = step_advantages([1.0, 0.0], [0, 0], [7, 7], scale="std", std_floor=0.5)
    np.testing.assert_allclose(got, np.asarray([0.5, -0.5]) / (np.sqrt(0.5) + 0.5), rtol=1e-5)


def test_a_state_whose_returns_agree_teaches_nothing():
    rounding = [0.3, 0.3 + 5e-7, 0.3]
    np.testing.assert_array_equal(step_advantages(rounding, [0, 0, 0], [7, 7, 7], scale="std"), 0.0)
