"""Hand-computed credit from recurring states and from the hinted reading, distilled or modulating."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit
from rsi_jax.credit import examples
from rsi_jax.credit.examples import action, observation, prompt
from tests.test_credit_cases import DR_GRPO, jitted, of, with_views

# --- recurring states ------------------------------------------------------------------------------------------------


def test_turns_from_one_state_are_compared_whenever_they_come():
    """Hand-computed: state 7 is met at turn 0 of all and again at turn 1 of the first; group 1 has its own state 7."""
    rows = [[prompt(1), action(1, 0.0), observation(1), action(2, r)] for r in (1.0, 0.0, 1.0, 0.0)]
    anchors = [[-1, 7, -1, 7], [-1, 7, -1, 8], [-1, 7, -1, 9], [-1, 7, -1, -1]]
    rollout = examples.with_anchors(examples.rollout(rows, group=[0, 0, 1, 1]), anchors)
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
    rollout = examples.with_anchors(examples.rollout(rows), [[-1, 3]] * 3)
    got = np.asarray(of(rollout, "gigpo", inner=DR_GRPO).adv_BT)
    np.testing.assert_allclose(got[:, 1], [1.0, -1.0, 0.0], atol=1e-6)


# --- a critic per turn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [(0.5, 0.75, 0.25), (0.5, 0.25), (0.5,)])
def test_T52_differences_of_values_telescope_for_any_segmentation(values):
    """One step with γ = 1, λ = 0: A_k = V_k+1 - V_k and V after the end is the return; only a first token is read."""
    turns = [span for _ in values for span in (action(2), observation(1))][:-2]
    rollout = examples.rollout(
        [[prompt(1), *turns, action(2, 1.0, discount=0.0)]], value=[[x for v in values for x in (v, 9.0)]]
    )
    adv_T = np.asarray(of(rollout, "turn_gae", discount=1.0, lambda_=0.0).adv_BT)[0]
    got = adv_T[1::3]
    np.testing.assert_allclose(got, np.diff([*values, 1.0]), atol=1e-6)
    np.testing.assert_allclose(got.sum(), 1.0 - values[0], atol=1e-6)
    if len(values) == 3:
        np.testing.assert_allclose(got, [0.25, -0.5, 0.75], atol=1e-6)


# --- the hinted reading ----------------------------------------------------------------------------------------------


def test_delta_is_the_mean_over_the_views_of_a_token_and_lands_on_the_span():
    rows = [[prompt(1), action(3, 1.0)], [prompt(1), action(3, 0.0)]]
    rollout = with_views(examples.rollout(rows), [(0, 1, 2), (0, 2, 2), (1, 2, 1)], weight=[1, 1, 1])
    rollout = rollout.replace(logp_BT=jnp.full((2, 4), -1.0), view_logp_KU=jnp.asarray([[-0.5, -2], [-4, -1], [-3, 9]]))
    knobs = {"inner": DR_GRPO}
    opd = np.asarray(jitted("opd", **knobs)(rollout).adv_BT)
    np.testing.assert_allclose(opd, [[0, 0.5 + 0.5, 0.5 - 2, 0.5 + 0], [0, -0.5, -0.5 - 2, -0.5]], atol=1e-6)
    clipped = np.asarray(jitted("opd", **knobs, clip=1.0, weight=2.0)(rollout).adv_BT)
    np.testing.assert_allclose(clipped, [[0, 0.5 + 1, 0.5 - 2, 0.5], [0, -0.5, -0.5 - 2, -0.5]], atol=1e-6)
    contrast = rollout.replace(views=rollout.views.replace(polarity_K=jnp.asarray([-1.0, 1.0, 1.0])))
    opd = np.asarray(jitted("opd", **knobs)(contrast).adv_BT)
    np.testing.assert_allclose(opd, [[0, 0.5 - 0.5, 0.5 - 1, 0.5 + 0], [0, -0.5, -0.5 - 2, -0.5]], atol=1e-6)
    rlsd = np.asarray(jitted("rlsd", **knobs, mix=1.0)(rollout).adv_BT)
    np.testing.assert_allclose(rlsd, [[0, 0.6, 0.4, 0.5], [0, -0.5, -0.6, -0.5]], atol=1e-6)


def test_a_token_that_nothing_stands_before_has_no_reading():
    rollout = with_views(examples.rollout([[action(2, 1.0)], [action(2, 0.0)]]), [(0, 0, 2)])
    rollout = rollout.replace(logp_BT=jnp.full((2, 2), -1.0), view_logp_KU=jnp.asarray([[-0.5, -0.5]]))
    got = of(rollout, "opd", inner=DR_GRPO)
    np.testing.assert_allclose(got.adv_BT, [[0.5, 0.5 + 0.5], [-0.5, -0.5]], atol=1e-6)
    assert got.metrics["delta_tokens"] == 1


def readings(logp, right, spans, **columns):
    """Two rollouts of one action of two tokens that return 1 and 0, sampled with log-prob `logp`, and read by views."""
    rows = [[prompt(1), action(2, r)] for r in (1.0, 0.0)]
    rollout = with_views(examples.rollout(rows), spans)
    named = {name: jnp.asarray(x) for name, x in columns.items()}
    return rollout.replace(logp_BT=jnp.full((2, 3), logp), view_logp_KU=jnp.asarray(right), **named)


def test_vopd_adds_what_delta_is_above_its_expectation():
    """Row 0: token 1 is in two views, δ = .5, -.7 and KL .2, .4: -.1 + .3; token 2 in one: -1 + .3. Row 1 in none."""
    rollout = readings(-1.0, [[-0.5, -2.0], [-1.7, 0.0]], [(0, 1, 2), (0, 1, 1)], view_kl_KU=[[0.2, 0.3], [0.4, 0.0]])
    want = [[0, 0.5 + 2 * 0.2, 0.5 - 2 * 0.7], [0, -0.5, -0.5]]
    np.testing.assert_allclose(of(rollout, "vopd", inner=DR_GRPO, weight=2.0).adv_BT, want, atol=1e-6)
    clipped = of(rollout, "vopd", inner=DR_GRPO, weight=2.0, clip=0.5).adv_BT  # of δ + KL, before the weight
    np.testing.assert_allclose(clipped[0, 1:], [0.5 + 2 * 0.2, 0.5 - 2 * 0.5], atol=1e-6)


def test_rlcsd_moves_an_advantage_but_not_over_zero():
    """e = ±1 of a temperature .02: c = ±β λ. Praise grows or falls to 0, blame falls to 0 or grows."""
    right, wrong = [[-1.0, -2.0], [-1.0, -2.0]], [[-2.0, -1.0], [-2.0, -1.0]]
    rollout = readings(-1.0, right, [(0, 1, 2), (1, 1, 2)], wrong_logp_KU=wrong)
    got = of(rollout, "rlcsd", inner=DR_GRPO, beta=1.6).adv_BT
    np.testing.assert_allclose(got, [[0, 0.5 + 0.8, 0], [0, 0, -0.5 - 0.8]], atol=1e-6)
    bounded = of(rollout, "rlcsd", inner=DR_GRPO, beta=1.6, bound=0.4).adv_BT
    np.testing.assert_allclose(bounded, [[0, 0.9, 0.1], [0, -0.1, -0.9]], atol=1e-6)
    same = rollout.replace(wrong_logp_KU=rollout.view_logp_KU)
    nearly = rollout.replace(wrong_logp_KU=rollout.view_logp_KU - 0.0006)  # .5 tanh(.03) = .015, under the threshold
    for silent in (same, nearly):
        np.testing.assert_array_equal(of(silent, "rlcsd", inner=DR_GRPO).adv_BT, of(rollout, "dr_grpo").adv_BT)
    nothing = rollout.replace(segments=rollout.segments.replace(reward_BS=jnp.ones((2, 2))))
    np.testing.assert_array_equal(of(nothing, "rlcsd", inner=DR_GRPO).adv_BT, 0.0)


def test_agent_opsd_weighs_the_turns_that_moved_the_belief_the_way_it_went():
    """Row 0: e = ln 3, 0, ln 3 and γ = 1: B = .5 -> .75 -> .75 -> .9, moves .25, 0, .15: mean .13333, std .125831.

    z = .927173, -1.059626, .132453 and with b = .5: 1.463587, .470187 (held at .5), 1.066227. Row 1 failed: the same
    moves count the other way round: 1 - .463587, 1.5, 1 - .066227.
    """
    turns = [action(1), observation(1), action(2), observation(1)]
    rollout = examples.rollout([[prompt(1), *turns, action(1, r)] for r in (1.0, 0.0)])
    rollout = with_views(rollout, [(0, 1, 1), (0, 3, 2), (0, 6, 1), (1, 1, 1), (1, 3, 2), (1, 6, 1)])
    up = -2.0 + np.log(3.0)
    said = [[up, 0.0], [-2.5, -1.5], [up, 0.0]] * 2
    rollout = rollout.replace(logp_BT=jnp.full((2, 7), -2.0), view_logp_KU=jnp.asarray(said, jnp.float32))
    got = of(rollout, "agent_opsd", inner=DR_GRPO, discount=1.0, clip=0.5, mix=1.0).adv_BT
    praise, blame = [1.463587, 0.5, 0.5, 1.066227], [0.536413, 1.5, 1.5, 0.933773]
    want = np.array([praise, blame]) * [[0.5], [-0.5]]
    np.testing.assert_allclose(np.asarray(got)[:, [1, 3, 4, 6]], want, atol=1e-5)
    half = of(rollout, "agent_opsd", inner=DR_GRPO, discount=1.0, clip=0.5, mix=0.5).adv_BT
    np.testing.assert_allclose(np.asarray(half)[0, [1, 3]], [0.5 * 1.2317935, 0.5 * 0.75], atol=1e-5)
    # γ = 0: B = .75, .5, .75 -> moves .25, -.25, .25: z = .57735, -1.154701, .57735
    forgetful = of(rollout, "agent_opsd", inner=DR_GRPO, discount=0.0, clip=0.5, mix=1.0).adv_BT
    np.testing.assert_allclose(np.asarray(forgetful)[0, [1, 3, 6]], [0.644338, 0.25, 0.644338], atol=1e-5)


def test_sdpo_counts_tokens_of_the_views_that_can_teach():
    """Row 0 succeeded alone in its group: closed. 1 failed, 2 and 3 both succeeded, 4 failed alone: 1 + 3 + 1 + 3."""
    rollout = examples.bandit([1.0, 0.0, 1.0, 1.0, 0.0], group=[0, 0, 1, 1, 2], tokens=3)
    rollout = with_views(rollout, [(0, 1, 2), (1, 1, 1), (2, 1, 3), (3, 2, 1), (4, 1, 3)], polarity=[1, 1, 1, -1, 1])
    got = of(rollout, "sdpo", inner=DR_GRPO, weight=0.8)
    np.testing.assert_allclose(got.view_weight_K, [0, 0.1, 0.3, -0.1, 0.3], atol=1e-7)
    np.testing.assert_array_equal(got.adv_BT, 0.0)
    assert got.divergence == base.Divergence(name="jsd", alpha=0.5, top_k=100, is_clip=2.0)
    assert got.metrics["views_gated"] == 1
    beside = of(rollout, "sdpo", inner=DR_GRPO, outcome_weight=0.5, success_return=2.0)  # now all failed
    np.testing.assert_allclose(beside.view_weight_K, [0.2, 0.1, 0.3, -0.1, 0.3], atol=1e-7)
    np.testing.assert_allclose(beside.adv_BT, 0.5 * of(rollout, "dr_grpo").adv_BT)


def test_no_gradient_reaches_a_traced_knob():
    rollout = with_views(examples.bandit([1.0, 0.0]), [(0, 1, 2), (1, 1, 2)])
    rollout = rollout.replace(view_logp_KU=jnp.asarray([[-0.1, -0.2], [-0.3, -3.0]]))
    knobs = {"rlsd": "mix", "opd": "weight", "textual_feedback": "weight", "locator_penalty": "penalty"}
    for name, knob in knobs.items():

        def total(x, name=name, knob=knob):
            found = credit.find(name)[0](rollout, inner=DR_GRPO, **{knob: x})
            views = 0.0 if found.view_weight_K is None else jnp.sum(found.view_weight_K)
            return jnp.sum(jnp.square(found.adv_BT)) + views

        assert total(0.5) != total(0.25), name  # the knob is read
        assert jax.grad(total)(0.5) == 0.0, name
