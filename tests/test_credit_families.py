"""Hand-computed credit of the families that read more than returns: recurring states, the hinted reading."""

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import credit
from tests import builders
from tests.builders import action, observation, prompt
from tests.test_credit_cases import DR_GRPO, jitted, of, with_views

# --- recurring states ------------------------------------------------------------------------------------------------


def test_turns_from_one_state_are_compared_whenever_they_come():
    """Hand-computed: state 7 is met at turn 0 of all and again at turn 1 of the first; group 1 has its own state 7."""
    rows = [[prompt(1), action(1, 0.0), observation(1), action(2, r)] for r in (1.0, 0.0, 1.0, 0.0)]
    anchors = [[-1, 7, -1, 7], [-1, 7, -1, 8], [-1, 7, -1, 9], [-1, 7, -1, -1]]
    rollout = builders.with_anchors(builders.rollout(rows, group=[0, 0, 1, 1]), anchors)
    got = of(rollout, "gigpo", inner=DR_GRPO, omega=2.0, discount=0.5)
    # group 0, state 7: G = .5 (row 0, turn 0), 1 (row 0, turn 1), 0 (row 1): mean .5; group 1, state 7: .5, 0: mean .25
    want = [[0.5 + 0, 0.5 + 1.0], [-0.5 - 1.0, -0.5], [0.5 + 0.5, 0.5], [-0.5 - 0.5, -0.5]]
    np.testing.assert_allclose(np.asarray(got.adv_BT)[:, [1, 3]], want, atol=1e-6)
    np.testing.assert_allclose(np.asarray(got.adv_BT)[:, 4], np.asarray(got.adv_BT)[:, 3])
    np.testing.assert_allclose(got.metrics["recurring"], 5 / 7)
    plain = of(rollout, "gigpo", inner=DR_GRPO, omega=0.0)
    np.testing.assert_array_equal(plain.adv_BT, of(rollout, "dr_grpo").adv_BT)


def test_the_state_group_does_not_mind_one_that_does_not_count():
    rows = [[prompt(1), action(1, r)] for r in (1.0, 0.0, np.nan)]
    rollout = builders.with_anchors(builders.rollout(rows), [[-1, 3]] * 3)
    got = np.asarray(of(rollout, "gigpo", inner=DR_GRPO).adv_BT)
    np.testing.assert_allclose(got[:, 1], [1.0, -1.0, 0.0], atol=1e-6)


# --- the hinted reading ----------------------------------------------------------------------------------------------


def test_delta_is_the_mean_over_the_views_of_a_token_and_lands_on_the_span():
    rows = [[prompt(1), action(3, 1.0)], [prompt(1), action(3, 0.0)]]
    rollout = with_views(builders.rollout(rows), [(0, 1, 2), (0, 2, 2), (1, 2, 1)], weight=[1, 1, 1])
    rollout = rollout.replace(logp_BT=jnp.full((2, 4), -1.0), view_logp_KU=jnp.asarray([[-0.5, -2], [-4, -1], [-3, 9]]))
    knobs = {"inner": DR_GRPO}
    opd = np.asarray(jitted("opd", **knobs)(rollout).adv_BT)
    np.testing.assert_allclose(opd, [[0, 0.5 + 0.5, 0.5 - 2, 0.5 + 0], [0, -0.5, -0.5 - 2, -0.5]], atol=1e-6)
    clipped = np.asarray(jitted("opd", **knobs, clip=1.0, weight=2.0)(rollout).adv_BT)
    np.testing.assert_allclose(clipped, [[0, 0.5 + 1, 0.5 - 2, 0.5], [0, -0.5, -0.5 - 2, -0.5]], atol=1e-6)
    rlsd = np.asarray(jitted("rlsd", **knobs, mix=1.0)(rollout).adv_BT)
    np.testing.assert_allclose(rlsd, [[0, 0.6, 0.4, 0.5], [0, -0.5, -0.6, -0.5]], atol=1e-6)


def test_the_first_token_of_all_has_no_hinted_reading():
    rollout = with_views(builders.rollout([[action(3, 1.0)], [action(3, 0.0)]]), [(0, 0, 2), (1, 0, 3)], weight=[1, 0])
    rollout = rollout.replace(logp_BT=jnp.full((2, 3), -1.0), view_logp_KU=jnp.asarray([[-4.0, -3.0, 0], [0, 0, 0]]))
    opd = np.asarray(jitted("opd", inner=DR_GRPO)(rollout).adv_BT)
    np.testing.assert_allclose(opd, [[0.5, 0.5 - 2, 0.5], [-0.5, -0.5, -0.5]], atol=1e-6)


def test_no_gradient_reaches_a_traced_knob():
    rollout = with_views(builders.bandit([1.0, 0.0]), [(0, 1, 2), (1, 1, 2)])
    rollout = rollout.replace(view_logp_KU=jnp.asarray([[-0.1, -0.2], [-0.3, -3.0]]))
    knobs = {"rlsd": "mix", "opd": "weight", "textual_feedback": "weight", "locator_penalty": "penalty"}
    for name, knob in knobs.items():

        def total(x, name=name, knob=knob):
            found = credit.find(name)[0](rollout, inner=DR_GRPO, **{knob: x})
            views = 0.0 if found.view_weight_K is None else jnp.sum(found.view_weight_K)
            return jnp.sum(jnp.square(found.adv_BT)) + views

        assert total(0.5) != total(0.25), name  # the knob is read
        assert jax.grad(total)(0.5) == 0.0, name
