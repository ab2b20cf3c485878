"""Truncated importance sampling: what an update makes of the weights of trainer against sampler."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rsi_jax import annotate
from rsi_jax.train import update
from tests import tiny
from tests.test_update import CONFIG, OBJECTIVE, PARAMS, draw, state_of

LN2 = np.log(2.0)
PLAIN = dataclasses.replace(OBJECTIVE, kl_coef=0.0, entropy_coef=0.0, outcome_clip=0.0)
CUT = dataclasses.replace(PLAIN, correction="truncate", correction_high=1.5, micro_batch=2)
none = update.make_update(CONFIG, PLAIN, optax.sgd(1.0))
truncated = update.make_update(CONFIG, CUT, optax.sgd(1.0))


def sampled(mismatch_B=(0.0, 0.0, 0.0, 0.0)):
    """Rollouts whose sampler differs from the trainer (PARAMS) by so many nats, and credit without a critic."""
    rollout, scores = draw(0)
    rollout = annotate.annotate(PARAMS, rollout, config=CONFIG, columns=("policy_logp_BT",))
    logp = rollout.policy_logp_BT - jnp.asarray(mismatch_B)[:, None]
    rollout = rollout.replace(logp_BT=jnp.where(rollout.mask_BT, logp, 0.0))
    return rollout, scores.replace(value_target_BT=None, view_weight_K=None)


def test_the_annotated_column_is_the_trainers_own_score():
    rollout, _ = sampled()
    np.testing.assert_allclose(
        rollout.policy_logp_BT, annotate.score_rollout(PARAMS, rollout, config=CONFIG)[0], atol=1e-6
    )
    assert np.any(rollout.policy_logp_BT != 0) and not np.any(rollout.policy_logp_BT[~rollout.mask_BT])


def test_with_the_trainer_as_sampler_the_update_is_that_without_correction():
    rollout, scores = sampled()
    (a, found), (b, bare) = truncated(state_of(), rollout, scores), none(state_of(), rollout, scores)
    assert (found["correction/ess"], found["correction/cut"], found["correction/max"]) == (1.0, 0.0, 1.0)
    assert not any(name.startswith("correction") for name in bare)
    tiny.assert_close(a.params, b.params, rtol=1e-5, atol=1e-6)
    tiny.assert_close(found["policy_loss"], bare["policy_loss"], rtol=1e-4, atol=1e-6)


def test_a_mismatch_weighs_each_token_and_leaves_the_ratio_to_the_trainer():
    """The trainer gives the tokens of row 0 twice the sampler's probability, of row 1 half: weights 1.5 and .5."""
    rollout, scores = sampled((LN2, -LN2, 0.0, 0.0))
    a, found = truncated(state_of(), rollout, scores)
    np.testing.assert_allclose([found["ratio_mean"], found["ratio_max"], found["ess"]], 1.0, rtol=1e-5)
    n_B = np.asarray(jnp.sum(rollout.mask_BT, axis=1))
    factor_B = np.asarray([1.5, 0.5, 1.0, 1.0])
    ess = (factor_B @ n_B) ** 2 / (n_B.sum() * (factor_B**2 @ n_B))
    np.testing.assert_allclose(found["correction/ess"], ess, rtol=1e-5)
    np.testing.assert_allclose(found["correction/cut"], n_B[0] / n_B.sum(), rtol=1e-5)
    np.testing.assert_allclose(found["correction/max"], 2.0, rtol=1e-5)
    # at ratio 1 the gradient is Σ weight A ∇ log π: the factor may as well stand at the advantage
    weighed = scores.replace(adv_BT=scores.adv_BT * factor_B[:, None])
    b, _ = none(state_of(), rollout.replace(logp_BT=rollout.policy_logp_BT), weighed)
    tiny.assert_close(a.params, b.params, rtol=1e-5, atol=1e-6)
    moved = [float(jnp.max(jnp.abs(x - y))) for x, y in zip(*map(jax.tree.leaves, (a.params, PARAMS)), strict=True)]
    assert max(moved) > 1e-3


def test_without_correction_the_column_is_never_read_and_with_it_it_must_be_there():
    rollout, scores = sampled((LN2, -LN2, 0.0, 0.0))
    poisoned = rollout.replace(policy_logp_BT=jnp.full_like(rollout.logp_BT, jnp.nan))
    tiny.assert_close(none(state_of(), rollout, scores)[0].params, none(state_of(), poisoned, scores)[0].params)
    with pytest.raises(ValueError, match="no column policy_logp_BT"):
        update.correct(rollout.replace(policy_logp_BT=None), rollout.logp_BT, CUT)
