"""The key-to-door reproduction: its gradient and readings against the exact world, its rows, claims and command."""

import json
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from experiments import (
    claims,
    fidelity_arms,
    key_to_door_claims,
    key_to_door_figure,
    key_to_door_run,
    registry,
    repro_key_to_door,
)
from experiments.key_to_door_run import ARMS, QUICK, WHOLE, Run
from rsi_jax.envs import exact
from rsi_jax.evals import fidelity


def drawn(logits, horizon: int, groups: int, others: int = 0) -> fidelity_arms.Drawn:
    """A batch of a policy, and others of it."""
    case = key_to_door_run.case_of(horizon)
    first, *rest = jax.random.split(jax.random.key(3), others + 1)
    batch, *more = (exact.sample(case.tables, logits, key, groups=groups) for key in (first, *rest))
    return fidelity_arms.Drawn(case, logits, batch, tuple(more), first)


def test_a_step_with_an_exact_critic_goes_up_the_exact_gradient():
    world = key_to_door_run.case_of(3).tables
    logits = exact.draw_logits(world, 0)
    gradient, tokens = key_to_door_run.gradient_of("turn_gae", drawn(logits, 3, groups=1024))
    expected = exact.policy_gradient(world, logits)
    assert fidelity.cosine(gradient, expected) > 0.99 and tokens == 0
    assert np.linalg.norm(gradient) == pytest.approx(np.linalg.norm(expected), rel=0.1)
    moved, _ = key_to_door_run.climb(logits, key_to_door_run.ADAM.init(logits), gradient.astype(np.float32), 0.01)
    sure = abs(expected) > 0.2 * abs(expected).max()
    assert np.allclose((np.asarray(moved) - logits)[sure], 0.01 * np.sign(expected[sure]), atol=1e-4)  # Adam's first
    assert exact.expected_return(world, moved) > exact.expected_return(world, logits)


def test_the_readings_of_a_policy_are_those_of_its_episodes():
    world = key_to_door_run.case_of(4).tables
    logits = exact.draw_logits(world, 1)
    found = key_to_door_run.treasure(world, logits)
    keys = [n for n, state in enumerate(world.states) if state in (("apple", True), ("empty", True))]
    assert found == pytest.approx(exact.occupancy(world, logits)[-1, keys].sum())
    path = exact.sample(world, logits, jax.random.key(0), groups=512).path
    won_B = np.isclose(np.asarray(path.reward_BH)[:, -1], 0.2 * 23 / 4)
    assert abs(won_B.mean() - found) < 4 * math.sqrt(found * (1 - found) / len(won_B))
    apples = (world.horizon - 2) * 0.8 * 0.5 * 23 / 4  # between the key and the door
    assert key_to_door_run.best_return(world) == pytest.approx(apples + 0.2 * 23 / 4)


def test_counting_hindsight_needs_a_batch_before_and_costs_none():
    one, two = (key_to_door_run.train(Run("cocoa_counted", 3, 0, 0.1, episodes)) for episodes in (8, 16))
    half = pytest.approx(0.5, abs=1e-12)  # of the keys and of the apples: it only sampled
    assert one["curve"] == [[0, 0, half, half], [8, 32, half, half]]
    assert abs(two["treasure"] - 0.5) > 1e-3 and two["tokens"] == 64  # of both batches, and no others
    again = key_to_door_run.train(Run("cocoa_counted", 3, 0, 0.1, 16))
    assert again["curve"] == two["curve"]
    zeros = np.zeros(key_to_door_run.case_of(3).tables.prob_HNAJ.shape[:3], np.float32)
    _, tokens = key_to_door_run.gradient_of("vineppo", drawn(zeros, 3, groups=1))
    assert tokens == 8 * 3 * (4 + 3 + 2 + 1)  # 3 continuations from each of 4 turns to the end


def test_exact_hindsight_learns_the_key():
    row = key_to_door_run.train(Run("cocoa", 3, 0, 0.1, 400))
    assert row["treasure"] > 0.9 and row["return_share"] > 0.9 and len(row["curve"]) == 51
    assert [point[0] for point in row["curve"]] == list(range(0, 401, 8))


def test_every_arm_has_as_many_trials_on_seeds_that_no_run_has():
    for form in (WHOLE, QUICK):
        trials = {arm: key_to_door_run.trials_of(form, arm) for arm in form.arms}
        assert all(len(found) == 3 for found in trials.values())
        runs = [run for found in trials.values() for rate in found.values() for run in rate]
        assert {run.horizon for run in runs} == {max(form.horizons)}
        assert not {run.seed for run in runs} & set(range(form.seeds))
        assert len({run.digest for run in runs}) == len(runs) == 3 * form.trial_seeds * len(form.arms)
    assert key_to_door_run.best_rate({0.01: 0.5, 0.03: 0.9, 0.1: 0.8}) == 0.03
    assert key_to_door_run.best_rate({0.1: 1.0, 0.01: 1.0}) == 0.01
    assert len({Run("cocoa", 3, 0, rate, episodes).digest for rate in (0.1, 0.2) for episodes in (8, 16)}) == 4


def made(arm: str, horizon: int, *treasures: float) -> dict:
    runs = [
        {"arm": arm, "horizon": horizon, "seed": seed, "treasure": found, "return_share": 0.5, "tokens": 4.0}
        | {"wall_s": 1.0, "cpu_s": 1.0, "curve": [[0, 0, 0.5, 0.5], [8, 4, found, 0.5]]}
        for seed, found in enumerate(treasures)
    ]
    return key_to_door_run.summarise(runs, {"rate": 0.1, "trials": []})


def test_claims_pair_seeds_and_are_registered():
    rows = [made("cocoa", 103, 0.9, 1.0, 0.8), made("reinforce", 103, 0.5, 0.7, 0.3)]
    assert rows[0]["treasure_at_budget"] == pytest.approx(0.9) and rows[0]["episodes"] == 8
    assert rows[0]["treasure_along"] == pytest.approx(0.7)
    line = json.loads(json.dumps({"rows": rows}))
    by_name = {claim.name.partition("/")[2]: claim for claim in key_to_door_claims.CLAIMS}
    mean, low, high = by_name["cocoa_reinforce"].read(line)  # 0.4, 0.3, 0.5
    assert mean == pytest.approx(0.4) and high - mean == pytest.approx(4.302653 * 0.1 / math.sqrt(3)) == mean - low
    assert claims.judge(by_name["cocoa_reinforce"], line)["held"]
    assert by_name["gap_grows"].read(line) is None and by_name["cocoa_hca"].read(line) is None
    line["rows"] += [made("cocoa", 13, 1.0, 1.0, 1.0), made("reinforce", 13, 1.0, 0.8, 1.0)]
    assert by_name["gap_grows"].read(line)[0] == pytest.approx((0.4 + 0.1 + 0.5) / 3)
    line["rows"].append(made("hca", 103, 0.9, 1.0, 0.9))
    assert not claims.judge(by_name["hca_not_better"], line)["held"]  # 0, 0, 0.1: maybe better
    assert set(key_to_door_claims.CLAIMS) <= set(registry.REGISTERED)
    assert {arm for claim in key_to_door_claims.CLAIMS for arm in claim.arms} <= set(QUICK.arms) <= set(WHOLE.arms)
    assert {key_to_door_claims.SHORT, key_to_door_claims.LONG} <= set(QUICK.horizons) <= set(WHOLE.horizons)


def test_the_figure_draws_the_arms_that_ran_and_the_same_again(tmp_path):
    rows = [
        {"arm": arm, "horizon": horizon, "curve": [[0, 0, 0.5, 0.5], [8, 9, 0.1 * seed, 0.6]]}
        for arm in ("cocoa", "grpo")
        for horizon in (13, 103)
        for seed in range(3)
    ]
    for name in ("a.svg", "b.svg"):
        key_to_door_figure.draw(rows, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text() and set(key_to_door_figure.LOOKS) == set(ARMS)
    assert {arm for arm in ARMS if ARMS[arm].label in text} == {"cocoa", "grpo"}
    assert key_to_door_run.band(rows[:3], 2)[1][:2] == (8, pytest.approx(0.1))


def test_the_command_ends_with_a_json_line_and_a_run_that_has_a_row_is_not_done_again(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "experiments.repro_key_to_door", "--quick", f"--results={rows}", "--figure="]
    command += ["--arms=reinforce", "--horizons=2", "--seeds=2", "--episodes=16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert [(row["arm"], row["horizon"], row["seeds"]) for row in last["rows"]] == [("reinforce", 2, 2)]
    assert last["claims"] == last["failed"] == [] and len(last["rows"][0]["knobs"]["trials"]) == 3
    text, kept = rows.read_text(), repro_key_to_door.Rows(str(rows))
    assert len(text.splitlines()) == 3 + 2
    trained, made_row = [], {"curve": [], "treasure": 0.0, "wall_s": 0.0}
    monkeypatch.setattr(key_to_door_run, "train", lambda run: trained.append(run) or made_row)
    rate = last["rows"][0]["knobs"]["rate"]
    by_seed = [[seed, kept.of(Run("reinforce", 2, seed, rate, 16))["treasure"]] for seed in range(2)]
    assert by_seed == last["rows"][0]["by_seed"] and not trained and rows.read_text() == text
    kept.of(Run("reinforce", 2, 2, rate, 16))  # one without a row is trained
    assert [run.seed for run in trained] == [2] and len(rows.read_text().splitlines()) == 3 + 2 + 1
