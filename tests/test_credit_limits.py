"""Limits of credit variants that other columns bring, rather than other knobs; laws.py has the latter."""

import functools

import jax
import numpy as np

from rsi_jax import credit
from rsi_jax.credit import anchor, examples, feedback, group, laws, modulate


def test_modulators_are_what_they_wrap_where_teacher_and_student_agree():
    rollout = laws.random(14)
    views = rollout.views
    at_KU = np.asarray(views.span_start_K)[:, None] + np.arange(rollout.view_logp_KU.shape[1])
    said_KU = np.asarray(rollout.logp_BT)[np.asarray(views.rollout_K)[:, None], np.minimum(at_KU, laws.T - 1)]
    agreed = rollout.replace(view_logp_KU=said_KU, wrong_logp_KU=said_KU, view_kl_KU=np.zeros_like(said_KU))
    inner = jax.jit(group.grpo)(agreed)
    for name in ("rlsd", "opd", "vopd", "agent_opsd", "rlcsd"):
        found = jax.jit(functools.partial(credit.find(name)[0], inner=group.grpo))(agreed)
        np.testing.assert_allclose(found.adv_BT, inner.adv_BT, atol=1e-5, err_msg=name)
        assert found.metrics["delta_tokens"] > 0
    differing = jax.jit(functools.partial(modulate.rlsd, inner=group.grpo))(rollout)
    change_BT = np.abs(differing.adv_BT - inner.adv_BT)
    assert change_BT.any() and (change_BT <= 0.1 * np.abs(inner.adv_BT) + 1e-6).all()  # λ ε = .5 * .2


def test_recurring_states_teach_where_their_group_agrees_and_without_them_it_is_the_inner():
    rollout = laws.random(10)
    agreeing = laws.with_rewards(rollout, np.zeros(rollout.segments.reward_BS.shape) + 0.1 * (np.arange(7) == 1))
    gigpo = jax.jit(functools.partial(anchor.gigpo, inner=group.grpo))
    assert np.asarray(gigpo(agreeing).adv_BT).any() and not np.asarray(jax.jit(group.grpo)(agreeing).adv_BT).any()
    unique = np.arange(rollout.segments.kind_BS.size).reshape(laws.B, -1)
    for blind in (examples.with_anchors(rollout, -1), examples.with_anchors(rollout, unique)):
        np.testing.assert_array_equal(gigpo(blind).adv_BT, jax.jit(group.grpo)(blind).adv_BT)


def test_critics_at_lambda_one_and_zero():
    """λ = 1: return-to-go - V; λ = 0: the TD error; wherever time stands, with γ = 1 and no truncation."""
    rollout = laws.random(11, truncated=0.0)

    @jax.jit
    def limits(rollout):
        knobs = [{"discount": 1.0, "lambda_": lambda_} for lambda_ in (1.0, 0.0)]
        return {name: [credit.find(name)[0](rollout, **k).adv_BT for k in knobs] for name in ("gae", "turn_gae")}

    found = limits(rollout)
    value_BT, turn_BT, turn_BS = (np.asarray(x) for x in (rollout.value_BT, rollout.turn_BT, rollout.turn_BS))
    mask_BT = np.asarray(rollout.mask_BT)
    reward_BS = np.where(np.asarray(rollout.segments.length_BS) > 0, rollout.segments.reward_BS, 0.0)
    for b, t in zip(*np.nonzero(mask_BT), strict=True):
        turn = turn_BT[b, t]
        same = np.flatnonzero(mask_BT[b] & (turn_BT[b] == turn))
        following = np.flatnonzero(mask_BT[b] & (turn_BT[b] > turn))[:1]  # first token of the next action, if any
        earned, togo = reward_BS[b][turn_BS[b] == turn].sum(), reward_BS[b][turn_BS[b] >= turn].sum()
        after = value_BT[b][following].sum()
        per_turn = (togo - value_BT[b, same[0]], earned + after - value_BT[b, same[0]])
        inside = value_BT[b, t + 1] if t < same[-1] else earned + after
        per_token = (togo - value_BT[b, t], inside - value_BT[b, t])
        np.testing.assert_allclose([x[b, t] for x in found["turn_gae"]], per_turn, atol=1e-4)
        np.testing.assert_allclose([x[b, t] for x in found["gae"]], per_token, atol=1e-4)


def test_turn_gae_of_one_turn_is_response_level():
    single = examples.complete(examples.random_rollout(12, B=8, T=32, turns=1, truncated=0.0), 12)
    found = jax.jit(credit.find("turn_gae")[0])(single)
    first_B = np.asarray(single.segments.start_BS)[:, 1]
    want_B = np.asarray(single.return_B) - np.asarray(single.value_BT)[np.arange(8), first_B]
    np.testing.assert_allclose(found.adv_BT, np.where(single.mask_BT, want_B[:, None], 0.0), atol=1e-5)


def test_feedback_of_weight_zero_is_its_inner_and_the_weight_may_be_traced():
    rollout = laws.random(13)

    @jax.jit
    def scheduled(weight):
        knobs = {"rollout": rollout, "inner": group.grpo}
        return (
            group.grpo(rollout),
            feedback.textual_feedback(**knobs, weight=weight),
            feedback.locator_penalty(**knobs, penalty=weight),
        )

    inner, hinted, penalised = scheduled(0.0)
    np.testing.assert_array_equal(hinted.adv_BT, inner.adv_BT)
    np.testing.assert_array_equal(hinted.view_weight_K, 0.0)
    np.testing.assert_array_equal(penalised.adv_BT, inner.adv_BT)
    half, whole = scheduled(0.5)[1], scheduled(1.0)[1]
    assert np.asarray(whole.view_weight_K).any()
    np.testing.assert_allclose(half.view_weight_K, 0.5 * whole.view_weight_K, atol=1e-7)
