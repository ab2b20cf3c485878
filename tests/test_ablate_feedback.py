"""The feedback experiment: every arm is a valid config that differs in its factor only; rows worked out by hand."""

import pytest

from configs import default
from experiments import ablate_feedback, feedback_factors, horizon_rows, sweep
from rsi_jax.train import setup


def asked(tmp_path) -> sweep.Sweep:
    return sweep.Sweep(tmp_path / "rows.jsonl", tmp_path / "runs")


def flat(tree, prefix=""):
    for name, value in tree.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


def test_every_arm_is_a_config_that_differs_in_its_own_fields(tmp_path):
    arms, seen = feedback_factors.settings(), set()
    plain = ablate_feedback.unit(asked(tmp_path), feedback_factors.DEFAULT, 64, 0, 4.9)
    base = dict(flat(sweep.effective(plain.config, plain.overrides)))
    for name, setting in arms.items():
        made = ablate_feedback.unit(asked(tmp_path), name, 64, 0, 4.9)
        config = dict(flat(sweep.effective(made.config, made.overrides)))
        changed = {field for field in base if config[field] != base[field]}
        allowed = {knob.partition("=")[0] for knob in (*setting.overrides, *setting.task)}
        allowed |= {"init_from"} if setting.task else set()
        assert changed <= allowed and (changed or name == feedback_factors.DEFAULT), name
        (after,) = made.after
        assert config["init_from"] == str(asked(tmp_path).place(after)) and after.seed == 0
        seen.add(made.digest)
    assert len(seen) == len(arms)


def test_every_arm_passes_the_checks_of_the_trainer(tmp_path):
    for name, setting in feedback_factors.settings().items():
        made = ablate_feedback.unit(asked(tmp_path), name, 64, 0, 4.9)
        config = default.get_config()
        config.update(sweep.effective(made.config, made.overrides))
        setup.check(config)
        assert all(knob.count("=") == 1 for knob in setting.overrides)


def test_the_baseline_runs_beside_any_factor():
    assert ablate_feedback.arms_of(["teacher"])[:3] == ["default", "grpo", "penalty"]
    assert {"live", "ema_.05"} < set(ablate_feedback.arms_of(["teacher"])) and "empty" not in ablate_feedback.arms_of(
        []
    )
    assert {"penalty_of_16_names", "default_of_16_names"} < set(ablate_feedback.arms_of(["names"]))
    assert "grpo_after_30" in ablate_feedback.arms_of(["warm-up"])


def run(arm, seed, success, teacher, gain):
    return {
        "arm": arm, "horizon": 64, "seed": seed, "knobs": [], "updates": 9, "tokens_to_0.9": None,
        "method_s": 290.0, "budget_s": 290.0,
        "before": {"success": 0.25, "gain": gain}, "after": {"success": success, "filler_correct": 1.0},
        "method_s_to_0.9": None, "lm_s": 20.0,
        "tokens": {"generated": 1000, "hint": 50}, "curve": [[500, 100.0, 0.3], [1000, 290.0, success]],
        "watched": {"teacher": [0.9, teacher], "entropy": [0.1, 0.2]},
    }  # fmt: skip


def test_a_row_says_how_far_the_teacher_drifted():
    runs = [run("default", 0, 0.8, 0.7, 0.5), run("default", 1, 0.6, 0.5, 0.7), run("grpo", 0, 0.4, 0.1, 0.5)]
    del runs[2]["watched"]["teacher"]
    rows, equal = ablate_feedback.rows_of(runs, list(feedback_factors.settings()))
    assert [row["arm"] for row in rows] == ["default", "grpo"] and equal == {64: 1000}
    assert rows[0]["watched"]["teacher"] == pytest.approx([0.9, 0.6]) and rows[0]["gain"] == pytest.approx(0.6)
    assert rows[0]["success_at_budget"] == pytest.approx(0.7) and rows[0]["censored"] == 2
    assert set(rows[1]["watched"]) == {"entropy"} and rows[1]["factor"] == "baseline"
    ablate_feedback.show(rows)


def test_what_is_watched_is_the_mean_of_the_first_and_the_last_batches():
    lines = [{"stage": "rl", "entropy": float(i), "response_tokens": 2.0} for i in range(12)] + [{"stage": "lm"}]
    assert horizon_rows.watched(lines) == {"entropy": [2.0, 9.0], "length": [2.0, 2.0]}
    assert horizon_rows.watched([]) == {}
