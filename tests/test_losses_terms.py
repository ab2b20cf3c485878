"""The terms beside the policy loss: importance weights, KL, entropy, critic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, losses
from rsi_jax.credit import examples


def mask_of(*lengths, T=None):
    return jnp.asarray(np.arange(T or max(lengths)) < np.asarray(lengths)[:, None])


def test_T29_importance_weights():
    log_ratio = jnp.log(jnp.asarray([[2.0, 2.0, 0.5]]))
    mask, zero = mask_of(3), jnp.zeros((1, 3))
    np.testing.assert_allclose(losses.importance_weights(log_ratio, mask, high=1.5), [[1.5, 1.5, 0.5]], rtol=1e-6)
    icepop = losses.importance_weights(log_ratio, mask, low=0.6, high=1.5, outside="mask")
    np.testing.assert_array_equal(icepop, 0.0)
    product = jnp.exp(losses.log_ratio(log_ratio, zero, mask, level="product"))
    np.testing.assert_allclose(product, 2.0, rtol=1e-6)
    geometric = jnp.exp(losses.log_ratio(log_ratio, zero, mask, level="sequence"))
    np.testing.assert_allclose(geometric, 1.2599, rtol=1e-4)
    kl = {name: jnp.mean(losses.kl_penalty_BT(zero, log_ratio, mask, estimator=name)) for name in ("k1", "k2", "k3")}
    np.testing.assert_allclose([kl["k1"], kl["k2"], kl["k3"]], [-0.2310, 0.2402, 0.2690], atol=5e-5)


def test_T29_a_long_rollout_is_masked_by_its_product_and_kept_by_its_geometric_mean():
    log_ratio, mask = jnp.full((1, 1000), 0.002), mask_of(1000)
    for level, ratio, kept in (("product", 7.39, 0.0), ("sequence", 1.002, 1.002)):
        pooled = losses.log_ratio(log_ratio, jnp.zeros((1, 1000)), mask, level=level)
        np.testing.assert_allclose(jnp.exp(pooled), ratio, rtol=1e-3)
        weight = losses.importance_weights(pooled, mask, high=3.0, outside="mask")
        np.testing.assert_allclose(weight, kept, rtol=1e-3)


@pytest.mark.parametrize(
    ("estimator", "value", "grad"),
    [("k1", 1.0, 1.0), ("k2", 0.5, 1.0), ("k3", 0.367879, 0.632121), ("k3+", 0.367879, 1.0)],
)
def test_T32_kl_values_and_gradients(estimator, value, grad):
    def kl(logp):
        return losses.kl_penalty_BT(logp, jnp.full((1, 1), -2.0), mask_of(1), estimator=estimator)[0, 0]

    got = jax.value_and_grad(kl)(jnp.full((1, 1), -1.0))
    np.testing.assert_allclose(got[0], value, atol=1e-6)
    np.testing.assert_allclose(got[1], [[grad]], atol=1e-6)


def test_T32_expected_gradients_over_a_categorical():
    logits = jnp.asarray([0.3, -1.2, 0.8])
    ref = jax.nn.log_softmax(jnp.asarray([-0.5, 0.4, 0.1]))
    probs = jax.lax.stop_gradient(jax.nn.softmax(logits))

    def expected(logits, estimator):
        """Σ_v sg(π_v) kl_v: the gradient of a loss on sampled tokens, in expectation."""
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(probs * losses.kl_penalty_BT(logp[None], ref[None], mask_of(3), estimator=estimator)[0])

    def reverse(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - ref))

    def forward(logits):
        return jnp.sum(jnp.exp(ref) * (ref - jax.nn.log_softmax(logits)))

    def gradient(name):
        return jax.grad(expected)(logits, name)

    np.testing.assert_allclose(gradient("k1"), 0.0, atol=1e-7)
    np.testing.assert_allclose(gradient("k2"), jax.grad(reverse)(logits), atol=1e-6)
    np.testing.assert_allclose(gradient("k3+"), jax.grad(reverse)(logits), atol=1e-6)
    np.testing.assert_allclose(gradient("k3"), jax.grad(forward)(logits), atol=1e-6)
    for name in ("k1", "k3", "k3+"):
        np.testing.assert_allclose(expected(logits, name), reverse(logits), rtol=1e-5)


@pytest.mark.parametrize("estimator", losses.KL_ESTIMATORS)
def test_kl_stays_finite_far_away_and_always_pulls_back(estimator):
    logp, ref = jnp.asarray([[-1.0, -300.0, -1.0]]), jnp.asarray([[-300.0, -1.0, -jnp.inf]])
    mask = mask_of(2, T=3)
    kl, grad = jax.value_and_grad(lambda x: jnp.sum(losses.kl_penalty_BT(x, ref, mask, estimator=estimator)))(logp)
    assert np.isfinite(kl) and np.isfinite(grad).all()
    assert grad[0, 0] > 0 and grad[0, 2] == 0
    if estimator in ("k2", "k3+"):
        assert grad[0, 1] < 0


def test_T19_kl_in_reward_reads_nothing_off_mask():
    rollout = examples.random_rollout(0)
    charged = losses.kl_in_reward(rollout, coef=0.1)
    want = rollout.return_B - 0.1 * jnp.sum(rollout.logp_BT - rollout.ref_logp_BT, axis=1)
    np.testing.assert_allclose(charged.return_B, want, atol=1e-5)
    for poison in (-1e4, jnp.nan):
        dirty = rollout.replace(ref_logp_BT=jnp.where(rollout.mask_BT, rollout.ref_logp_BT, poison))
        again = losses.kl_in_reward(dirty, coef=0.1)
        np.testing.assert_array_equal(again.segments.reward_BS, charged.segments.reward_BS)
    is_action = rollout.segments.kind_BS == base.ACTION
    changed = charged.segments.reward_BS != rollout.segments.reward_BS
    assert jnp.all(is_action | ~changed)
    with pytest.raises(ValueError, match="ref_logp_BT"):
        losses.kl_in_reward(rollout.replace(ref_logp_BT=None), coef=0.1)


def test_value_loss_and_its_clip():
    value, old, target = jnp.asarray([[1.0, 1.0, 5.0]]), jnp.asarray([[0.0, 0.9, 0.0]]), jnp.asarray([[2.0, 2.0, 0.0]])
    mask = mask_of(2, T=3)
    weight = losses.aggregate_weights(mask, jnp.ones(1), jnp.zeros(1, jnp.int32))
    plain, sums = losses.value_loss(value, old, target, mask, weight)
    np.testing.assert_allclose(plain, 0.5)
    assert sums["value_clipped"] == 0 and sums["value_tokens"] == 2

    def clipped_loss(value):
        return losses.value_loss(value, old, target, mask, weight, clip=0.2)

    (clipped, sums), grad = jax.value_and_grad(clipped_loss, has_aux=True)(value)
    np.testing.assert_allclose(clipped, 0.25 * (1.8**2 + 1.0), rtol=1e-6)
    assert sums["value_clipped"] == 1
    _, ratios = losses.policy_loss(value, old, target, mask, weight)
    assert losses.summarise(ratios | sums)["value_clip_fraction"] == 0.5
    assert "value_clip_fraction" not in losses.summarise(ratios)
    np.testing.assert_allclose(grad, [[0.0, -0.5, 0.0]], atol=1e-6)


def test_entropy_bonus_rewards_entropy():
    mask = mask_of(2, T=3)
    weight = losses.aggregate_weights(mask, jnp.ones(1), jnp.zeros(1, jnp.int32))
    np.testing.assert_allclose(losses.entropy_bonus(jnp.asarray([[1.0, 2.0, jnp.nan]]), mask, weight, coef=0.1), -0.15)
