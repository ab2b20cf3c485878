"""Losses: goldens, closed-form gradients, and the laws of sums over pre-scaled weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import base, losses
from rsi_jax.credit import examples
from rsi_jax.losses import policy

ONE_GROUP = functools.partial(jnp.zeros, dtype=jnp.int32)
T50_RATIOS = jnp.asarray([[2.0, 0.5, 5.0, 1.1]])

# One compilation a call instead of one an operation.
BOUNDS = ("clip_low", "clip_high", "dual_clip")
aggregate_weights = jax.jit(losses.aggregate_weights, static_argnames=("how", "constant"))
log_ratio_of = jax.jit(losses.log_ratio, static_argnames="level")
policy_loss = jax.jit(losses.policy_loss, static_argnames=("surrogate", "ratio_level", *BOUNDS))
ppo_clip = jax.jit(losses.ppo_clip, static_argnames=BOUNDS)
summarise = jax.jit(losses.summarise)
weighted_sum = jax.jit(losses.weighted_sum)


def mask_of(*lengths, T=None):
    return jnp.asarray(np.arange(T or max(lengths)) < np.asarray(lengths)[:, None])


# --- T50: surrogates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("surrogate", "adv", "loss", "grad"),
    [
        ("ppo", 1.0, -1.0, [0, -0.125, 0, -0.275]),
        ("gspo", 1.0, -1.2, [0, 0, 0, 0]),
        ("cispo", 1.0, 0.496644, [-0.3, -0.2, -0.3, -0.275]),
        ("ppo", -1.0, 1.725, [0.5, 0, 0, 0.275]),
        ("gspo", -1.0, 1.531407, [0.382852] * 4),
        ("sapo", 1.0, -2.615592, None),
        ("sapo", -1.0, 2.498963, None),
        ("gmpo", 1.0, -0.951744, [0, -0.237936, 0, -0.237936]),
        ("gmpo", -1.0, 1.732341, [0.433085, 0, 0.433085, 0.433085]),
        ("dppo", 1.0, 0.460433, [0, -0.125, 0, -0.275]),
        ("dppo", -1.0, -0.156781, [0.5, 0.125, 0.75, 0.275]),
    ],
)
def test_T50_surrogates(surrogate, adv, loss, grad):
    old = jnp.full((1, 4), -1.0)
    mask = mask_of(4)
    weight = aggregate_weights(mask, jnp.ones(1), ONE_GROUP(1))
    dual_clip = 3.0 if surrogate in ("ppo", "gspo", "dppo") else 0.0

    def total(logp):
        knobs = {"surrogate": surrogate, "dual_clip": dual_clip}
        return policy_loss(logp, old, jnp.full((1, 4), adv), mask, weight, **knobs)

    (got, _), got_grad = jax.jit(jax.value_and_grad(total, has_aux=True))(old + jnp.log(T50_RATIOS))
    np.testing.assert_allclose(got, loss, atol=1e-6)
    if grad is not None:
        np.testing.assert_allclose(got_grad, [grad], atol=1e-6)


def test_soft_gates_fade_on_both_sides_and_the_quadratic_penalty_pulls_back():
    log_ratio = jnp.log(jnp.asarray([[0.25, 0.9, 1.1, 4.0]]))
    slope = jax.grad(lambda x, tau: -jnp.sum(losses.sapo(x, jnp.ones((1, 4)), tau_pos=tau)[0]))
    np.testing.assert_allclose(
        slope(log_ratio, 2.0), np.exp(log_ratio) / np.cosh(np.exp(log_ratio) - 1.0) ** 2, rtol=1e-4
    )
    assert (slope(log_ratio, 4.0) < slope(log_ratio, 1.0)).all()
    logp, adv = log_ratio - 1.0, jnp.asarray([[1.0, -1.0, 0.5, 0.0]])
    grad = jax.grad(lambda x: jnp.sum(losses.dro(x + 1.0, x, adv, beta=0.2)[0]))(logp)
    np.testing.assert_allclose(grad, -adv + 0.2 * log_ratio, rtol=1e-6)


def test_gspo_is_ppo_at_the_sequence_level_and_needs_no_other():
    keys = jax.random.split(jax.random.key(0), 3)
    logp, old, adv = (jax.random.normal(k, (3, 5)) for k in keys)
    mask = mask_of(5, 2, 4)
    weight = aggregate_weights(mask, jnp.ones(3), ONE_GROUP(3), how="sequence_mean")
    gspo, _ = policy_loss(logp, old, adv, mask, weight, surrogate="gspo")
    ppo, _ = policy_loss(logp, old, adv, mask, weight, surrogate="ppo", ratio_level="sequence")
    assert gspo == ppo
    with pytest.raises(base.InputError, match="sequence"):
        policy_loss(logp, old, adv, mask, weight, surrogate="gspo", ratio_level="token")


def test_sequence_ratio_keeps_each_token_its_own_advantage():
    adv = jnp.asarray([[1.0, 0.0, -1.0]])
    old = jnp.full((1, 3), -1.0)
    mask = mask_of(3)

    def total(logp):
        return policy_loss(logp, old, adv, mask, jnp.full((1, 3), 1 / 3), surrogate="gspo")[0]

    np.testing.assert_allclose(jax.grad(total)(old), [[-1 / 3, 0, 1 / 3]], atol=1e-6)


def test_dual_clip_bounds_the_loss_of_a_negative_advantage():
    log_ratio = jnp.log(jnp.asarray([[10.0, 0.1, 10.0]]))
    adv = jnp.asarray([[-1.0, -1.0, 1.0]])
    loss, clipped = ppo_clip(log_ratio, adv, dual_clip=3.0)
    np.testing.assert_allclose(loss, [[3.0, 0.8, -1.2]], atol=1e-6)
    np.testing.assert_array_equal(clipped, [[True, True, True]])
    loss, _ = ppo_clip(log_ratio, adv)
    np.testing.assert_allclose(loss, [[10.0, 0.8, -1.2]], atol=1e-5)


def test_clip_higher_raises_the_upper_bound_only():
    log_ratio = jnp.log(jnp.asarray([[1.25, 0.75]]))
    adv = jnp.asarray([[1.0, -1.0]])
    _, clipped = ppo_clip(log_ratio, adv, clip_low=0.2, clip_high=0.28)
    np.testing.assert_array_equal(clipped, [[False, True]])


def test_T30_before_an_update_the_ratio_is_one_and_the_gradient_is_that_of_the_policy():
    logp = jax.random.normal(jax.random.key(1), (3, 6)) - 2.0
    adv = jax.random.normal(jax.random.key(2), (3, 6))
    mask = mask_of(6, 1, 3)
    weight = aggregate_weights(mask, jnp.ones(3), ONE_GROUP(3))
    for surrogate in losses.SURROGATES:
        total = functools.partial(_loss, old=logp, adv=adv, mask=mask, weight=weight, surrogate=surrogate)
        (_, sums), grad = jax.value_and_grad(total, has_aux=True)(logp)
        metrics = summarise(sums)
        assert metrics["ratio_max"] == 1.0 and metrics["ess"] == 1.0 and metrics["clip_fraction"] == 0.0
        np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-9)
        np.testing.assert_allclose(grad, -weight * adv, atol=1e-7)


def _loss(logp, *, old, adv, mask, weight, **knobs):
    return policy_loss(logp, old, adv, mask, weight, **knobs)


def test_T24_the_last_policy_token_has_a_gradient():
    rollout = examples.rollout(
        [[examples.prompt(2), examples.action(3, 1.0), examples.observation(2), examples.action(2)]]
    )
    weight = aggregate_weights(rollout.mask_BT, rollout.weight_B, rollout.group_B)
    grad = jax.grad(lambda x: _loss(x, old=x, adv=jnp.ones((1, 9)), mask=rollout.mask_BT, weight=weight)[0])(
        rollout.logp_BT
    )
    np.testing.assert_array_equal(grad != 0, [[False, False, True, True, True, False, False, True, True]])


def test_T39_first_completion_token_aligned_after_prompts_of_different_lengths():
    rows = [[examples.prompt(3), examples.action(2)], [examples.prompt(7), examples.action(2)]]
    rollout = examples.rollout(rows)
    old = rollout.logp_BT
    logp = old.at[0, 3].add(0.1).at[1, 7].add(0.1)
    log_ratio = log_ratio_of(logp, old, rollout.mask_BT)
    np.testing.assert_allclose(log_ratio[0, 3], log_ratio[1, 7], atol=1e-6)
    assert jnp.sum(log_ratio != 0) == 2


# --- aggregation -----------------------------------------------------------------------------------------------------

T14_LOSS = jnp.asarray([[1.0, 1, 1, 1], [3.0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("how", "constant", "want"),
    [("token_mean", 0, 1.4), ("sequence_mean", 0, 2.0), ("constant", 1, 3.5), ("constant", 4, 0.875)],
)
def test_T14_aggregations_and_an_all_masked_row_changes_none(how, constant, want):
    mask = mask_of(4, 1)
    for rows in (0, 1):
        padded = jnp.pad(mask, ((0, rows), (0, 0)))
        loss = jnp.pad(T14_LOSS, ((0, rows), (0, 0)), constant_values=jnp.nan)
        weight = aggregate_weights(padded, jnp.ones(2 + rows), ONE_GROUP(2 + rows), how=how, constant=constant)
        np.testing.assert_allclose(weighted_sum(loss, padded, weight), want, rtol=1e-6)


def test_T14_prompt_mean():
    mask = mask_of(4, 1, 4, 4)
    weight = aggregate_weights(mask, jnp.ones(4), jnp.asarray([0, 0, 3, 3]), how="prompt_mean")
    loss = jnp.concatenate([T14_LOSS, T14_LOSS])
    np.testing.assert_allclose(weighted_sum(loss, mask, weight), 1.1375, rtol=1e-6)


def test_T14_token_mean_is_of_the_batch_and_not_the_mean_of_parts():
    mask = mask_of(100, 900)
    weight = aggregate_weights(mask, jnp.ones(2), ONE_GROUP(2))
    loss = jnp.where(jnp.arange(2)[:, None] == 0, 0.5, 0.3) * jnp.ones((2, 900))
    whole = weighted_sum(loss, mask, weight)
    parts = [weighted_sum(loss[b : b + 1], mask[b : b + 1], weight[b : b + 1]) for b in range(2)]
    np.testing.assert_allclose([whole, sum(parts)], 0.32, rtol=1e-5)


def test_T14_micro_batches_of_one_and_two_agree():
    mask, adv = mask_of(1, 3), jnp.asarray([[1.0], [-1.0]]) * jnp.ones((2, 3))
    logp = jnp.zeros((2, 3))
    weight = aggregate_weights(mask, jnp.ones(2), ONE_GROUP(2))
    whole, _ = policy_loss(logp, logp, adv, mask, weight)
    parts = [policy_loss(*(x[b : b + 1] for x in (logp, logp, adv, mask, weight)))[0] for b in range(2)]
    np.testing.assert_allclose([whole, sum(parts)], 0.5, rtol=1e-6)


def test_T12_masked_rows_are_in_no_denominator_but_in_the_logged_length():
    mask = mask_of(2, 8)
    loss = jnp.ones((2, 8))
    for how in losses.AGGREGATIONS:
        weight = aggregate_weights(mask, jnp.asarray([1.0, 0.0]), ONE_GROUP(2), how=how, constant=2.0)
        np.testing.assert_allclose(weighted_sum(loss, mask, weight), 1.0)
        nothing = aggregate_weights(mask, jnp.zeros(2), ONE_GROUP(2), how=how, constant=2.0)
        total = functools.partial(_loss, old=loss, adv=loss, mask=mask, weight=nothing)
        (value, sums), grad = jax.value_and_grad(total, has_aux=True)(loss)
        assert value == 0.0 and summarise(sums)["tokens"] == 0 and summarise(sums)["ess"] == 0
        np.testing.assert_array_equal(grad, 0.0)
    assert jnp.mean(jnp.sum(mask, axis=1)) == 5


def test_T15_a_short_sequence_weighs_the_same_alone_and_beside_a_long_one():
    alone = aggregate_weights(mask_of(10), jnp.ones(1), ONE_GROUP(1), how="sequence_mean")
    beside = aggregate_weights(mask_of(10, 100), jnp.ones(2), ONE_GROUP(2), how="sequence_mean")
    np.testing.assert_allclose(2 * beside[0, :10], alone[0], rtol=1e-6)
    padded = aggregate_weights(mask_of(10, T=100), jnp.ones(1), ONE_GROUP(1), how="sequence_mean")
    np.testing.assert_array_equal(padded[0, :10], alone[0])


def test_T16_groups_without_signal_can_leave_the_denominator():
    mask, group = mask_of(3, 3, 3, 3), jnp.asarray([0, 0, 1, 1])
    signal = jnp.asarray([True, True, False, False])
    for how in losses.AGGREGATIONS:
        knobs = {"how": how, "constant": 3.0}
        diluted = aggregate_weights(mask, jnp.ones(4), group, **knobs)
        kept = aggregate_weights(mask, jnp.ones(4), group, signal_B=signal, **knobs)
        np.testing.assert_allclose(kept[:2], 2 * diluted[:2], rtol=1e-6)
        np.testing.assert_array_equal(kept[2:], 0.0)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_T13_any_partition_sums_to_the_whole_in_loss_and_gradient(seed):
    rollout = examples.random_rollout(seed, B=6, T=14, groups=3, masked=0.2)
    rng = np.random.default_rng(seed)
    logp = rollout.logp_BT + rng.normal(size=(6, 14)).astype(np.float32) * 0.3
    adv = rng.normal(size=(6, 14)).astype(np.float32)
    for (whole, grad), (part, part_grad) in _whole_and_parts(rollout, logp, adv, rng.integers(0, 3, 6)):
        np.testing.assert_allclose(np.sum(part), whole, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(np.sum(part_grad, axis=0), grad, rtol=1e-4, atol=1e-6)


def _rows_loss(logp, rollout, adv, keep_B, how, surrogate):
    """Loss of the rows in keep_B, with weights made over all rows: what a micro-batch computes."""
    weight = aggregate_weights(rollout.mask_BT, rollout.weight_B, rollout.group_B, how=how, constant=7.0)
    mask = rollout.mask_BT & keep_B[:, None]
    return policy_loss(logp, rollout.logp_BT, adv, mask, weight, surrogate=surrogate)[0]


@jax.jit
def _whole_and_parts(rollout, logp, adv, part_of_row):
    """(loss, gradient) of all rows, and of each of 3 micro-batches; for every aggregation and every surrogate."""
    found = []
    for how, surrogate in zip(losses.AGGREGATIONS, ("ppo", "gspo", "cispo", "ppo"), strict=True):

        def one(keep_B, how=how, surrogate=surrogate):
            return jax.value_and_grad(_rows_loss)(logp, rollout, adv, keep_B, how, surrogate)

        parts = jax.vmap(lambda part, one=one: one(part_of_row == part))(jnp.arange(3))
        found.append((one(jnp.ones(6, bool)), parts))
    return found


def test_metrics_of_micro_batches_merge_into_those_of_the_whole():
    keys = jax.random.split(jax.random.key(5), 3)
    logp, old, adv = (jax.random.normal(k, (4, 6)) for k in keys)
    mask = mask_of(6, 1, 3, 4)
    weight = aggregate_weights(mask, jnp.ones(4), ONE_GROUP(4))
    _, whole = policy_loss(logp, old, adv, mask, weight)
    halves = [policy_loss(*(x[i : i + 2] for x in (logp, old, adv, mask, weight)))[1] for i in (0, 2)]
    merged = summarise(losses.combine(*halves))
    for name, value in summarise(whole).items():
        np.testing.assert_allclose(merged[name], value, rtol=1e-5, err_msg=name)
    ratio = np.exp(np.asarray(logp - old))[np.asarray(mask)]
    np.testing.assert_allclose(merged["ess"], ratio.sum() ** 2 / (14 * (ratio**2).sum()), rtol=1e-5)
    np.testing.assert_allclose(merged["ratio_max"], ratio.max(), rtol=1e-5)
    np.testing.assert_allclose(merged["approx_kl"], np.mean(ratio - 1 - np.log(ratio)), rtol=1e-5)


@pytest.mark.parametrize("surrogate", losses.SURROGATES)
def test_losses_read_nothing_off_mask_and_padding_changes_nothing(surrogate):
    keys = jax.random.split(jax.random.key(6), 3)
    logp, old, adv = (jax.random.normal(k, (3, 5)) for k in keys)
    mask = mask_of(5, 2, 3)

    @jax.jit
    def run(logp, old, adv, mask):
        weight = aggregate_weights(mask, jnp.ones(3), ONE_GROUP(3))
        total = functools.partial(_loss, old=old, adv=adv, mask=mask, weight=weight, surrogate=surrogate)
        (loss, sums), grad = jax.value_and_grad(total, has_aux=True)(logp)
        return loss, summarise(sums), grad

    clean = run(*(jnp.where(mask, x, 0.0) for x in (logp, old, adv)), mask)
    for poison in (jnp.nan, -jnp.inf, 1e4):
        dirty = run(*(jnp.where(mask, x, poison) for x in (logp, old, adv)), mask)
        jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    wide = [jnp.pad(jnp.where(mask, x, 0.0), ((0, 0), (0, 4)), constant_values=jnp.nan) for x in (logp, old, adv)]
    padded = run(*wide, jnp.pad(mask, ((0, 0), (0, 4))))
    np.testing.assert_allclose(padded[0], clean[0], rtol=1e-6)
    np.testing.assert_allclose(padded[2][:, :5], clean[2], rtol=1e-6)
    assert jnp.all(padded[2][:, 5:] == 0)


@pytest.mark.parametrize("level", losses.RATIO_LEVELS)
@pytest.mark.parametrize("surrogate", ["ppo", "cispo", "sapo", "gmpo", "dppo", "dro"])
def test_far_off_policy_stays_finite(surrogate, level):
    logp = jnp.asarray([[-200.0, -1e-3, -300.0], [0.0, -50.0, -1.0]])
    old = jnp.asarray([[-1e-3, -200.0, -1.0], [-90.0, -1.0, -1.0]])
    mask = jnp.ones((2, 3), bool)
    total = functools.partial(
        _loss, old=old, adv=jnp.asarray([[1.0], [-1.0]]) * jnp.ones((2, 3)), mask=mask, weight=jnp.full((2, 3), 1 / 6)
    )
    if level not in policy.LEVELS.get(surrogate, losses.RATIO_LEVELS):
        with pytest.raises(base.InputError, match=f"'{surrogate}' has ratio_level"):
            total(logp, surrogate=surrogate, ratio_level=level)
        return
    (loss, sums), grad = jax.value_and_grad(total, has_aux=True)(logp, surrogate=surrogate, ratio_level=level)
    assert np.isfinite(loss) and np.isfinite(grad).all()
    assert all(np.isfinite(x) for x in summarise(sums).values())


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, w: aggregate_weights(m, w, ONE_GROUP(1), how="tokenmean"), "token_mean"),
        (lambda m, w: aggregate_weights(m, w, ONE_GROUP(1), how="constant"), "constant > 0"),
        (lambda m, w: policy_loss(*[m * 1.0] * 3, m, m * 1.0, surrogate="pppo"), "did you mean 'ppo'"),
        (lambda m, w: policy_loss(*[m * 1.0] * 3, m, m * 1.0, ratio_level="turn"), "token, sequence, product"),
        (lambda m, w: policy_loss(*[m * 1.0] * 3, m, m * 1.0, dual_clip=0.5), "dual_clip"),
        (lambda m, w: policy_loss(*[m * 1.0] * 3, m, m * 1.0, clip_low=-1.0), "clip_low"),
        (lambda m, w: policy_loss(*[m * 1.0] * 3, m, m * 1.0, surrogate="cispo", dual_clip=3.0), "dual"),
        (lambda m, w: losses.kl_penalty_BT(m * 1.0, m * 1.0, m, estimator="k4"), "k1, k2, k3"),
        (lambda m, w: losses.importance_weights(m * 1.0, m, high=0.5), "bounds"),
    ],
)
def test_misuse_names_the_mend(call, says):
    with pytest.raises(base.InputError, match=says):
        call(mask_of(3), jnp.ones(1))
