"""What every run logs beside its losses: each number on a case worked out by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit, losses
from rsi_jax.credit import examples, rewards
from rsi_jax.credit.examples import action, observation, prompt
from rsi_jax.feedback.locate import Finding
from rsi_jax.losses import spread
from rsi_jax.train import diagnostics
from tests.test_credit_cases import with_views

# --- how values are spread -------------------------------------------------------------------------------------------


def test_quantiles_are_exact_where_a_bin_holds_one_value():
    x = jnp.arange(-50, 50).reshape(4, 25) * 0.02
    made = losses.histogram(x, jnp.ones_like(x, bool), *spread.LOG_RATIO)
    for share in (0.01, 0.25, 0.5, 0.99, 1.0):
        want = np.quantile(np.asarray(x), share, method="inverted_cdf")
        np.testing.assert_allclose(losses.quantile(made, share), want, atol=1e-6)


def test_quantiles_of_any_values_are_within_a_bin_and_of_any_split_the_same():
    x = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    mask = np.random.default_rng(1).random((6, 50)) < 0.7
    poisoned = jnp.asarray(np.where(mask, x, np.nan))
    whole = losses.histogram(poisoned, jnp.asarray(mask), *spread.LOG_RATIO)
    parts = sum(
        losses.histogram(poisoned[i : i + 2], jnp.asarray(mask[i : i + 2]), *spread.LOG_RATIO) for i in (0, 2, 4)
    )
    np.testing.assert_array_equal(parts[0], whole[0])
    for share in (0.01, 0.5, 0.99):
        want = np.quantile(x[mask], share, method="inverted_cdf")
        np.testing.assert_allclose(losses.quantile(whole, share), want, atol=0.01)
        np.testing.assert_allclose(losses.quantile(parts, share), losses.quantile(whole, share), atol=1e-6)


def test_the_end_bins_take_what_is_beyond():
    x = jnp.asarray([[-20.0, 0.0, 20.0]])
    made = losses.histogram(x, jnp.ones_like(x, bool), *spread.LOG_RATIO)
    assert [float(losses.quantile(made, share)) for share in (0.01, 0.5, 0.99)] == [-20.0, 0.0, 20.0]
    low, high = spread.LOG_RATIO
    lowest = jnp.asarray([[low + (i + 0.5) * (high - low) / spread.BINS for i in (0, 1)]])
    made = losses.histogram(lowest, jnp.ones_like(lowest, bool), low, high)
    np.testing.assert_allclose(losses.quantile(made, 0.5), lowest[0, 0], rtol=1e-6)


@pytest.mark.parametrize(("share", "mean"), [(0.2, 9.5), (0.25, 9.2), (0.1, 10.0), (1.0, 5.5)])
def test_the_mean_of_the_largest_share(share, mean):
    x = jnp.asarray([[1.0, 2.0, 3.0, 4.0, 5.0, jnp.nan], [10.0, 9.0, 8.0, 7.0, 6.0, jnp.nan]])
    for twice in (x, jnp.concatenate([x, x])):  # also where a bin holds several
        made = losses.histogram(twice, jnp.isfinite(twice), *losses.ENTROPY)
        np.testing.assert_allclose(losses.top_mean(made, share), mean, rtol=1e-6)


def test_nothing_has_no_quantile_and_no_top():
    none = losses.histogram(jnp.full((1, 2), jnp.nan), jnp.zeros((1, 2), bool), *losses.ENTROPY)
    assert losses.quantile(none, 0.5) == losses.top_mean(none, 0.2) == 0.0


def test_what_is_logged_of_values_trains_nothing():
    def logged(x):
        made = losses.histogram(x, jnp.ones_like(x, bool), *losses.ENTROPY)
        return losses.top_mean(made, 0.5) + losses.quantile(made, 0.5)

    np.testing.assert_array_equal(jax.grad(logged)(jnp.asarray([[1.0, 2.0, 3.0]])), 0.0)


# --- policy drift ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("surrogate", "fraction", "high"),
    [("ppo", 0.5, 0.25), ("gspo", 0.5, 0.25), ("gmpo", 0.5, 0.25), ("cispo", 1.0, 0.5), ("sapo", 0.0, 0.0)],
)
def test_a_ratio_beyond_a_bound_is_clipped_where_the_sign_makes_the_bound_bind(surrogate, fraction, high):
    """One-token rollouts, ratios 2, 2, 1/2, 1/2: raising a good one and lowering a bad one further is cut."""
    log_ratio = jnp.log(jnp.asarray([[2.0], [2.0], [0.5], [0.5]]))
    adv = jnp.asarray([[1.0], [-1.0], [1.0], [-1.0]])
    rest = (jnp.ones((4, 1), bool), jnp.full((4, 1), 0.25))
    _, sums = losses.policy_loss(log_ratio - 1, jnp.full((4, 1), -1.0), adv, *rest, surrogate=surrogate)
    found = losses.summarise(sums)
    assert (found["clip_fraction"], found["clip_fraction_high"]) == (fraction, high)
    np.testing.assert_allclose([found[f"ratio_p{q}"] for q in ("01", "50", "99")], [0.5, 0.5, 2.0], rtol=1e-6)
    silent = losses.policy_loss(log_ratio - 1, jnp.full((4, 1), -1.0), 0 * adv, *rest, surrogate=surrogate)[1]
    assert losses.summarise(silent)["clip_fraction"] == 0.0


# --- credit ----------------------------------------------------------------------------------------------------------


def test_groups_whose_std_is_below_the_floor_are_counted_unless_they_agree():
    """Stds of the groups: .071, .71, 0, .035, and one row alone."""
    rollout = examples.bandit([0, 0.1, 0, 1, 0.5, 0.5, 0, 0.05, 1], group=[0, 0, 1, 1, 2, 2, 3, 3, 4])
    silent = jnp.zeros_like(rollout.logp_BT)
    for floor, count in ((0.0, 0), (0.05, 1), (0.1, 2), (1.0, 3)):
        assert rewards.report(rollout, silent, std_floor=floor)["std_floor_groups"] == count
    grpo = functools.partial(credit.find("grpo")[0], std_floor=0.1)
    hinted = with_views(rollout, [(0, 1, 2)], weight=[1])
    for found in (grpo(rollout), credit.find("locator_penalty")[0](hinted, inner=grpo)):
        assert found.metrics["std_floor_groups"] == 2
    assert grpo(rollout, scale="none").metrics["std_floor_groups"] == 0


def test_rows_of_weight_zero_are_a_share_of_the_batch():
    rollout = examples.bandit([1, 0, 1, 0], weight=[1, 1, 0, 1])
    assert rewards.report(rollout, jnp.zeros_like(rollout.logp_BT))["masked_rows"] == 0.25


def test_hint_coverage_is_the_share_of_trained_tokens_in_used_spans():
    """8 trained tokens and 4 of weight 0; spans of 2, of 1 within it, of 4 in the dead row, of 1 of weight 0."""
    rows = [[prompt(1), action(4, r)] for r in (1.0, 0.0, 0.0)]
    views = [(0, 1, 2), (0, 2, 1), (2, 1, 4), (1, 1, 1)]
    rollout = with_views(examples.rollout(rows, weight=[1, 1, 0]), views, weight=[1, 1, 1, 0])
    rollout = rollout.replace(view_logp_KU=jnp.full((4, 4), -1.0))
    inner = credit.find("dr_grpo")[0]
    for name in ("textual_feedback", "locator_penalty", "rlsd", "opd"):
        assert credit.find(name)[0](rollout, inner=inner).metrics["hint_coverage"] == 2 / 8, name


# --- what was sampled ------------------------------------------------------------------------------------------------


def transcript(*turns: tuple[int, dict]) -> base.Transcript:
    made = [base.TurnRecord([], "", 0, length, 0, base.STOP, info=info) for length, info in turns]
    return base.Transcript(0, 0, turns=made)


def test_lengths_per_turn_and_per_rollout_and_the_mass_that_the_support_kept():
    rollout = examples.rollout([[prompt(1), action(2), observation(1), action(4)], [prompt(2), action(6)]])
    kept = np.where(np.asarray(rollout.mask_BT), [[0.5], [1.0]], 0.0)
    found = diagnostics.sampled(
        rollout.replace(kept_mass_BT=jnp.asarray(kept)), [transcript((2, {}), (4, {})), transcript((6, {}))]
    )
    assert found == {"response_tokens": 4.0, "rollout_tokens": 6.0, "kept_mass": 0.75}


def test_precision_is_the_share_of_located_turns_that_were_wrong():
    right, wrong, unknown = {"right": "ls", "correct": True}, {"right": "ls", "correct": False}, {"line": 3}
    texts = [transcript((1, right), (1, wrong), (1, wrong)), transcript((1, right), (1, unknown))]

    def precision(*places):
        return diagnostics.located(texts, [Finding(row, turn, "failed_tool_call") for row, turn in places])

    assert precision((0, 1), (0, 2), (1, 0)) == {"feedback/located_precision": pytest.approx(2 / 3)}
    assert precision((0, 1), (1, 1)) == {"feedback/located_precision": 1.0}
    assert precision((1, 1)) == precision() == {}
