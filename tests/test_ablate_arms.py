"""The comparison of arms: which rows it makes of runs, how it sums them up, and the figure drawn from them."""

import json
import subprocess
import sys

import pytest

from experiments import ablate_arms, figures, sweep
from rsi_jax import base

ARMS = ablate_arms.make_arms(["4e-3", "1e-3"], batches=30, longer=1.4, lm_updates=120, factor=4.0)


def row(arm: str, seed: int, after: float, before: float = 0.05) -> dict:
    whole = {"success": after, "invalid": 1 - after, "filler_correct": 1.0}
    return {
        "arm": arm,
        "seed": seed,
        "before": whole | {"success": before},
        "equal_tokens": whole,
        "equal_wall": whole,
        "generated_tokens": 1000,
        "method_s": 2.0,
    }


def test_every_control_differs_from_the_method_in_what_its_name_says():
    overrides = {arm.name: dict(item.split("=", 1) for item in arm.overrides) for arm in ARMS}
    assert overrides["textual_feedback"] == {}
    cheaper = {"rl.updates": "42", "evaluation.every": "30"}
    assert overrides["grpo_1e-3"] == {"credit.name": "grpo", "rl.lr": "1e-3"} | cheaper
    assert overrides["locator_penalty"] == {"credit.name": "locator_penalty"} | cheaper
    assert {arm.name for arm in ARMS if arm.cheaper} == {"grpo_4e-3", "grpo_1e-3", "locator_penalty"}
    no_warm_up = ablate_arms.make_arms(["1e-3"], batches=30, longer=1.4, lm_updates=0, factor=4.0)
    assert {arm.name for arm in ARMS} - {arm.name for arm in no_warm_up} == {"grpo_4e-3", "more_lm", "long_lm"}
    assert overrides["irrelevant"] == {"feedback.hint": "irrelevant"}
    assert overrides["more_lm"] == {"lm.updates": "480", "rl.updates": "0"}
    assert overrides["long_lm"] == overrides["more_lm"] | {"lm.long_recall": "True"}
    assert [arm.name for arm in ARMS if not arm.rl] == ["more_lm", "long_lm"]
    assert len({arm.name for arm in ARMS}) == len(ARMS)


def test_arms_are_chosen_by_name_and_a_misspelt_one_is_named():
    assert ablate_arms.chosen(ARMS, []) == ARMS
    assert [arm.name for arm in ablate_arms.chosen(ARMS, ["more_lm", "grpo"])] == ["grpo_4e-3", "more_lm", "grpo_1e-3"]
    with pytest.raises(base.InputError, match="'irelevant', which is no arm; did you mean 'irrelevant'"):
        ablate_arms.chosen(ARMS, ["grpo", "irelevant"])


@pytest.mark.parametrize("at, expected", [(30, 0.5), (99, 0.7)])
def test_equal_tokens_is_the_evaluation_after_as_many_batches_or_the_end_if_it_came_first(tmp_path, at, expected):
    scalars = {"success": 0.5, "invalid": 0.2, "filler_correct": 1.0}
    lines = [{"step": 121, "stage": "rl"}, {"step": 122, "stage": "rl"}, {"step": 150, "stage": "eval"} | scalars]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    ledger = {
        "tokens": {"generated": 9, "trained": 8, "hint": 7},
        "seconds": {"generate": 1.0, "train": 2.0, "evaluate": 50.0},
    }
    after = {"success": 0.7, "invalid": 0.1, "filler_correct": 1.0}
    results = {"before": scalars | {"success": 0.0, "gain": 0.6}, "after": after, "ledger": ledger}
    (tmp_path / "results.json").write_text(json.dumps(results))
    unit = sweep.Unit("grpo_1e-3/2", "configs/tool_calls.py", (), 2)
    found = ablate_arms.read_run(unit, tmp_path, batches=at)
    assert found["equal_tokens"]["success"] == expected and found["equal_wall"]["success"] == 0.7
    assert (found["batches"], found["method_s"]) == (2, 3.0)  # evaluation is not the method's time
    (tmp_path / "results.json").unlink()
    assert ablate_arms.read_run(unit, tmp_path, batches=at) is None  # stopped, not finished


def test_the_interval_over_seeds_holds_the_mean_and_lies_within_the_seeds():
    rows = [row("textual_feedback", seed, after) for seed, after in enumerate((0.90, 0.95, 0.97))]
    mean, low, high = ablate_arms.summarise(rows)["textual_feedback"]["equal_wall/success"]
    assert 0.90 - 1e-9 <= low < mean < high <= 0.97 + 1e-9
    assert mean == pytest.approx(0.94)


def test_the_figure_names_every_arm_and_needs_rows(tmp_path):
    names = [arm.name for arm in ARMS]
    assert sorted(figures.order_of(set(names))) == sorted(names)
    assert figures.order_of(set(names))[:3] == ["textual_feedback", "grpo_1e-3", "grpo_4e-3"]
    figures.draw([row(arm, seed, 0.5) for arm in names for seed in (0, 1)], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert all(figures.label_of(name).split("\n")[0] in text for name in names)
    argv = [sys.executable, "-m", "experiments.figures", f"--rows={tmp_path / 'none.jsonl'}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "no rows; run experiments.ablate_arms first" in done.stderr
