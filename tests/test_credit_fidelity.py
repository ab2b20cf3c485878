"""Credit fidelity: the measures on hand-made numbers, arms against laws, the claims, the figure, the command."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from experiments import credit_fidelity, fidelity_arms, fidelity_claims, fidelity_figure, fidelity_run
from rsi_jax import base, credit
from rsi_jax.envs import exact
from rsi_jax.evals import fidelity


def test_measures_on_numbers_worked_out_by_hand():
    assert math.isclose(fidelity.cosine([3.0, 4.0], [4.0, 3.0]), 24 / 25)
    assert fidelity.cosine([0.0, 0.0], [1.0, 2.0]) == 0.0
    truth_N = np.array([1.0, -1.0, 0.0, 2.0])
    assert fidelity.sign_accuracy([5.0, 1.0, 9.0, 0.0], truth_N) == 1 / 3  # a 0 where there is truth is no sign
    assert fidelity.sign_accuracy(7 * truth_N, truth_N) == 1.0
    assert math.isclose(fidelity.rank_correlation([1.0, 2.0, 3.0, 10.0], [0.1, 0.2, 0.3, 0.4]), 1.0)
    assert fidelity.rank_correlation([1.0, 1.0], [0.0, 1.0]) == 0.0
    mean, low, high = fidelity.interval([1.0, 2.0, 3.0])
    assert math.isclose(mean, 2.0) and math.isclose(high - mean, 4.302653 / math.sqrt(3), rel_tol=1e-5)
    assert math.isclose(mean - low, high - mean) and fidelity.interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


def test_noise_splits_bias_from_variance():
    rng = np.random.default_rng(0)
    cell_N = np.repeat([3, 8], 4000)
    truth_N = np.where(cell_N == 3, 1.0, -1.0)
    found = fidelity.noise(truth_N + 0.5 + rng.normal(scale=2.0, size=8000), truth_N, cell_N)
    assert abs(found["bias"] - 0.5) < 0.1 and abs(found["variance"] - 4.0) < 0.3
    assert abs(found["snr"] - (1.5**2 + 0.5**2) / 2 / 4.0) < 0.1
    assert fidelity.noise(truth_N, truth_N, cell_N) == {"bias": 0.0, "variance": 0.0, "snr": None}
    assert fidelity.noise([1.0, 2.0], [1.0, 2.0], [0, 1])["variance"] is None  # nothing was met twice


def test_confidence_sees_what_rises_with_the_log_prob_within_a_rollout():
    logp_BH = np.log([[0.9, 0.1, 0.5], [0.2, 0.8, 0.5]])
    played_BH = np.array([[True, True, True], [True, True, False]])
    assert math.isclose(fidelity.confidence(2 * logp_BH + 7, logp_BH, played_BH), 1.0)
    assert math.isclose(fidelity.confidence(-logp_BH, logp_BH, played_BH), -1.0)
    assert fidelity.confidence(np.array([[3.0] * 3, [-2.0] * 3]), logp_BH, played_BH) == 0.0


def test_the_gradient_of_many_true_credits_is_the_exact_one():
    case = fidelity_arms.Case("stopping", 4, 1.0)
    logits = exact.draw_logits(case.tables, 0)
    drawn = fidelity_arms.draw(case, 0, groups=512)
    path = drawn.sample.path
    adv_HNA = exact.values(case.tables, drawn.logits).adv_HNA
    state_BH, action_BH = np.asarray(path.state_BH), np.asarray(path.action_BH)
    adv_BH = np.where(path.played_BH, adv_HNA[np.arange(4), state_BH, action_BH], 0.0)
    group_B = np.asarray(drawn.sample.rollout.group_B)
    found = fidelity.gradients(adv_BH, state_BH, action_BH, exact.policy(case.tables, drawn.logits), group_B)
    expected = exact.policy_gradient(case.tables, drawn.logits)
    error = found.std(0, ddof=1) / math.sqrt(512)
    assert found.shape == (512, *expected.shape) and np.all(abs(found.mean(0) - expected) < 4.5 * error + 1e-9)
    assert fidelity.gradient_cosine(found, expected, 512) > 0.99 > fidelity.gradient_cosine(found, expected, 1)
    assert not np.array_equal(drawn.logits, logits)  # the case leans


@pytest.fixture(scope="module")
def measured():
    """A few arms of one small world, three seeds."""
    case = fidelity_arms.Case("stopping", 4, 1.0)
    names = ("grpo", "turn_gae, exact critic", "turn_rloo", "mt_grpo", "gigpo, nothing recurs", "vineppo, K = 3")
    hcapo = ("hcapo, no hint, by trajectory", "hcapo, no hint, by policy")
    arms = {name: fidelity_arms.ARMS[name] for name in (*names, "cocoa", "tree_grpo", *hcapo)}
    return case, fidelity_run.measure(case, arms, range(3), groups=8)


def test_arms_are_as_far_from_the_truth_as_they_must_be(measured):
    _, found = measured
    read = {arm: np.array([one["cosine"] for one in seeds]) for arm, seeds in found.items()}
    assert np.allclose(read["gigpo, nothing recurs"], read["grpo"], atol=1e-6)
    assert np.all(read["mt_grpo"] == 0) and np.all(read["turn_rloo"] > 0)
    assert np.all(read["turn_gae, exact critic"] > read["grpo"])
    assert all(one["confidence"] == 0 for one in found["hcapo, no hint, by policy"])
    assert all(one["confidence"] > 0 for one in found["hcapo, no hint, by trajectory"])
    for seeds in found.values():
        for one in seeds:
            assert [point["rollouts"] for point in one["curve"]] == [8, 16, 32, 64]
            assert math.isclose(one["curve"][-1]["gradient_cosine"], one["gradient_cosine"])
            assert -1 <= one["cosine"] <= 1 and 0 <= one["sign_accuracy"] <= 1
    tokens = {arm: seeds[0]["curve"][-1]["tokens"] for arm, seeds in found.items()}
    assert tokens["vineppo, K = 3"] > 2 * tokens["grpo"] == 2 * tokens["cocoa"]  # continuations are paid for


def test_a_row_sums_up_the_seeds_and_the_figure_draws_the_rows(measured, tmp_path):
    case, found = measured
    rows = [credit_fidelity.row_of(case, arm, seeds, 3) for arm, seeds in found.items()]
    (grpo,) = [row for row in rows if row["variant"] == "grpo"]
    cosines = [one["cosine"] for one in found["grpo"]]
    assert math.isclose(grpo["cosine"], np.mean(cosines)) and grpo["low"] < grpo["cosine"] < grpo["high"]
    assert (grpo["world"], grpo["horizon"], grpo["seeds"]) == ("stopping", 4, 3)
    fidelity_figure.draw(rows, tmp_path / "a.svg")
    fidelity_figure.draw(rows, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert all(arm in text for arm in found) and f"{grpo['cosine']:.2f}" in text


def test_every_arm_names_a_variant_and_knobs_that_it_takes():
    case = fidelity_arms.Case("stopping", 4, 1.0)
    known = credit.variants()
    for arm in fidelity_arms.ARMS.values():
        assert arm.variant in known
        credit_fn, made = arm.bind(case)
        assert callable(credit_fn) and set(made) <= set(base.Rollout.__dataclass_fields__)


def test_every_claim_reads_what_a_quick_run_measures():
    quick = {(case.world, case.horizon) for case in fidelity_arms.cases(quick=True)}
    assert quick < {(case.world, case.horizon) for case in fidelity_arms.cases(quick=False)}
    for claim in fidelity_claims.CLAIMS:
        for reading in (claim.left, claim.right):
            if isinstance(reading, fidelity_claims.Reading):
                assert (reading.world, reading.horizon) in quick
                assert reading.horizon <= fidelity_arms.ARMS[reading.arm].longest


def test_a_claim_holds_fails_or_is_not_put_to_the_test():
    left, right = fidelity_claims.Reading("a", "w", 1), fidelity_claims.Reading("b", "w", 1)
    readings = {"a": [0.5, 0.6, 0.7], "b": [0.1, 0.3, 0.2]}
    above, below = fidelity_claims.Claim("", left, right), fidelity_claims.Claim("", right, left)
    equal = fidelity_claims.Claim("", left, right, equal=True)

    def read(reading):
        return readings.get(reading.arm)

    judged = fidelity_claims.judge(above, read)
    assert judged["holds"] and math.isclose(judged["difference"][0], 0.4) and judged["seeds"] == 3
    assert judged["left"] == "cosine of a in w at 1" and judged["relation"] == ">"
    assert not fidelity_claims.judge(below, read)["holds"] and not fidelity_claims.judge(equal, read)["holds"]
    assert fidelity_claims.judge(fidelity_claims.Claim("", left, left, equal=True), read)["holds"]
    assert fidelity_claims.judge(fidelity_claims.Claim("", left, 0.2), read)["holds"]
    assert fidelity_claims.judge(fidelity_claims.Claim("", left, 0.9), read)["holds"] is False
    missing = fidelity_claims.Reading("c", "w", 1)
    assert fidelity_claims.judge(fidelity_claims.Claim("", left, missing), read) is None


def test_return_classes_hold_no_possible_return_on_their_edge():
    case = fidelity_arms.Case("key_to_door", 13, 1.0)
    at_R = exact.returns(case.tables, np.zeros((len(case.tables.states), 2))).at_R
    edges = np.array(case.return_edges)
    assert 1 < len(edges) < fidelity_arms.CLASSES and np.all(np.diff(edges) > 0)
    assert np.abs(edges[:, None] - at_R).min() > 0.4 * case.tables.unit


def test_the_command_ends_with_a_json_line_and_a_misspelt_name_is_bad_input(tmp_path):
    command = [sys.executable, "-m", "experiments.credit_fidelity", f"--results={tmp_path}/rows.jsonl"]
    flags = ["--quick", "--worlds=stopping", "--variants=grpo,mt_grpo,turn_rloo", "--seeds=3", "--groups=4"]
    done = subprocess.run([*command, *flags, f"--figure={tmp_path}/f.svg"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [row["variant"] for row in last["rows"]] == ["grpo", "turn_rloo", "mt_grpo"]
    assert [claim["holds"] for claim in last["claims"]] == [True, True] and last["absent"] == []
    kept = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(kept) == 5 and kept[0]["curve"][0]["rollouts"] == 8
    assert (tmp_path / "f.svg").read_text().startswith("<?xml")
    wrong = subprocess.run([*command, "--worlds=stoping"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "did you mean 'stopping'" in wrong.stderr
