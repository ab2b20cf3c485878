"""The comparison behind `experiments.resume_check`, and the check on small programs, one of which resumes wrongly."""

import dataclasses
import pathlib
import signal
import sys
import textwrap

import pytest

from experiments import resume_check

LINES = [{"step": 1, "stage": "lm", "loss": float("nan")}, {"step": 2, "stage": "rl", "loss": 0.5}]
WANTED = resume_check.Outcome("abc", {"0_lm": "5 x", "1_rl": "9 y"}, LINES, {1: "r", 2: "s"})


def test_equal_outcomes_do_not_differ():
    again = resume_check.Outcome(
        "abc", {"0_lm": "5 x", "1_rl": "9 y"}, [dict(line) for line in LINES], {1: "r", 2: "s"}
    )
    again.metrics[0]["loss"] = float("nan") * 2
    assert resume_check.differences(WANTED, again) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"digest": "abd"}, ["final state"]),
        ({"checkpoints": {"0_lm": "5 x", "1_rl": "8 y"}}, ["checkpoints 1_rl"]),
        ({"checkpoints": {"0_lm": "5 x"}}, ["checkpoints 1_rl"]),
        ({"rollouts": {1: "r", 2: "t", 3: "u"}}, ["rollouts of step 2", "rollouts of step 3"]),
        ({"metrics": LINES[:1]}, ["metrics.jsonl has 1 lines, not 2"]),
        ({"metrics": [LINES[0], LINES[1] | {"loss": 0.5000001, "new": 1}]}, ["metrics.jsonl line 2: loss, new"]),
        ({"metrics": [LINES[0], LINES[1] | {"step": 2.0}]}, ["metrics.jsonl line 2: step"]),
    ],
)
def test_every_difference_is_named(change, words):
    assert resume_check.differences(WANTED, dataclasses.replace(WANTED, **change)) == words


def test_plans_are_drawn_from_the_seed_and_cover_every_sort():
    plans = [resume_check.plan(0, trial, 0, 10.0) for trial in range(50)]
    assert plans == [resume_check.plan(0, trial, 0, 10.0) for trial in range(50)]
    assert plans[0] != resume_check.plan(0, 0, 1, 10.0) and plans[0] != resume_check.plan(1, 0, 0, 10.0)
    assert all(0 <= delay <= 10 for plan in plans for _, delay in plan)
    assert {len(plan) for plan in plans} == {1, 2, 3, 4}
    assert [plan[0][0] for plan in plans].count(signal.SIGTERM) == 10


FAKE = """
    import json, pathlib, sys, time
    import numpy as np
    from rsi_jax import checkpoint, metrics, store
    resume_wrongly = sys.argv[1] == "wrong"
    folder = pathlib.Path(sys.argv[2].removeprefix("--run_dir="))
    saved, archive = checkpoint.Checkpoints(folder / "checkpoints" / "0_rl"), store.Archive(folder / "rollouts")
    with checkpoint.Stop() as stop:
        step, tree, meta = saved.restore({"x": np.zeros(3)}) or (0, {"x": np.zeros(3)}, {})
        archive.truncate(step)
        shift = step if resume_wrongly else 0
        with metrics.Tracker(folder, resume_step=step) as tracker:
            while step < 12:
                step += 1
                tree = {"x": tree["x"] + np.random.default_rng(step + shift).normal(size=3)}
                archive.append(step, {"x_B": tree["x"]}, [{"step": step}])
                tracker.log("rl", step, {"x": tree["x"][0], "time/now": time.time()})
                tracker.flush()
                time.sleep(0.05)
                if step % 3 == 0 or stop.requested:
                    saved.save(step, tree, {})
                if stop.requested:
                    sys.exit(0)
    print(json.dumps({"digest": checkpoint.digest(tree)}))
"""


def make_runner(folder: pathlib.Path, sort: str) -> resume_check.Runner:
    return resume_check.Runner([sys.executable, "-c", textwrap.dedent(FAKE), sort], folder)


@pytest.mark.slow
def test_a_right_resume_is_bitwise_equal(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).resolve().parent.parent))
    trials, control = resume_check.check(make_runner(tmp_path, "right"), kills=5, seed=0, parallel=2)
    assert control == [] and [trial.number for trial in trials] == [0, 1, 2, 3, 4]
    assert all(trial.strikes and trial.differences == [] for trial in trials)


@pytest.mark.slow
def test_a_wrong_resume_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).resolve().parent.parent))
    runner = make_runner(tmp_path, "wrong")
    wanted, _ = runner.alone("alone")
    folder = tmp_path / "killed"
    process = runner.start(folder)
    while not (folder / "checkpoints" / "0_rl" / "6").exists():
        assert runner.wait(process, 0.01) is None
    runner.kill(process)
    found = runner.read(folder, runner.wait(runner.start(folder)))
    told = resume_check.differences(wanted, found)
    assert "final state" in told and "checkpoints 0_rl" in told and "rollouts of step 12" in told
    assert any(line.startswith("metrics.jsonl line ") for line in told)
