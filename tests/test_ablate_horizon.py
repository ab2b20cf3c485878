"""The horizon experiment: its arms and their budgets, rows of made-up runs worked out by hand, the figure."""

import json

import pytest

from experiments import ablate_horizon, horizon_arms, horizon_figure, horizon_rows, sweep
from experiments.horizon_arms import ARMS, HEADLINE, SIZES


def asked(tmp_path) -> sweep.Sweep:
    return sweep.Sweep(tmp_path / "rows.jsonl", tmp_path / "runs")


def test_every_arm_at_every_horizon_is_a_config_that_differs_in_its_own_fields(tmp_path):
    for horizon, size in SIZES.items():
        shared = {}
        for name, arm in ARMS.items():
            made = [ablate_horizon.unit(asked(tmp_path), name, horizon, 0, i, ablate_horizon.WHOLE) for i in range(3)]
            assert len({one.digest for one in made}) == 3 == len(arm.trials)  # as many trials for every arm
            config = sweep.effective(made[0].config, made[0].overrides)
            assert config["env"]["tool_calls"]["horizon"] == horizon == 4 * config["env"]["tool_calls"]["goals"]
            assert config["rollout"]["capacity"] == size.capacity
            if arm.sft:
                assert config["rl"]["updates"] == 0 and config["lm"]["updates"] == size.sft and made[0].after == ()
                continue
            (after,) = made[0].after
            assert config["init_from"] == str(asked(tmp_path).place(after))
            warm = sweep.effective(after.config, after.overrides)
            assert warm["lm"] == config["lm"] and warm["env"] == config["env"] and warm["model"] == config["model"]
            assert config["rl"]["max_minutes"] == size.rl_minutes < size.minutes
            assert (config["rl"]["groups"], config["rl"]["group_size"]) == (16, 4)
            shared[name] = after.digest
        assert shared.pop("turn_ppo") not in shared.values() and len(set(shared.values())) == 1


def test_a_run_waits_for_its_programs_and_its_warm_up(tmp_path):
    first, later = (ablate_horizon.unit(asked(tmp_path), "grpo", 64, s, 0, ablate_horizon.WHOLE) for s in (0, 3))
    one = ablate_horizon.compiled(later, first)
    warm, primer = one.after
    assert one.digest == later.digest and warm.seed == 3 and primer.seed == 0 and primer.after == first.after
    ours, theirs = (sweep.effective(x.config, x.overrides) for x in (first, primer))
    assert theirs["rl"].pop("updates") == 2 < ours["rl"].pop("updates")
    assert theirs["rl"] == ours["rl"] and theirs["credit"] == ours["credit"]  # the same programs
    sft = ablate_horizon.unit(asked(tmp_path), "more_sft", 64, 0, 0, ablate_horizon.WHOLE)
    assert ablate_horizon.compiled(sft, sft).after == ()


def test_arms_are_what_their_names_say(tmp_path):
    def config(name):
        made = ablate_horizon.unit(asked(tmp_path), name, 64, 0, 0, ablate_horizon.WHOLE)
        return sweep.effective(made.config, made.overrides)

    credit = {name: config(name)["credit"]["name"] for name in ARMS}
    assert credit.pop("turn_ppo") == "turn_gae" and credit.pop("irrelevant") == "textual_feedback"
    credit.pop("more_sft")
    assert all(name == found for name, found in credit.items())
    columns = config("vineppo")["columns"]
    assert (columns["continuations"], columns["every"]) == (3, 8)
    assert config("irrelevant")["feedback"]["hint"] == "irrelevant" != config("textual_feedback")["feedback"]["hint"]


def test_seeds_and_the_time_that_the_whole_table_may_take():
    assert [len(horizon_arms.seeds_of("grpo", horizon)) for horizon in SIZES] == [5, 5, 5, 2]
    assert [len(horizon_arms.seeds_of("gigpo", horizon)) for horizon in SIZES] == [3, 3, 3, 0]
    minutes = sum(len(horizon_arms.seeds_of(arm, h)) * size.minutes for arm in ARMS for h, size in SIZES.items())
    assert minutes / 2 < 9 * 60 and 3 * len(ARMS) * SIZES[64].minutes / 2 < 2 * 60
    assert horizon_arms.TRIAL_SEED not in range(5) and set(HEADLINE) <= set(ARMS)


def made_run(arm: str, seed: int, after: float, solved: tuple[int, float] | None, tokens: int = 1000, **fields) -> dict:
    """A row of one run, whose success rises to `after` in two steps."""
    return {
        "arm": arm,
        "horizon": 16,
        "seed": seed,
        "knobs": ["rl.lr=1"],
        "before": {"success": 0.1},
        "after": {"success": after, "invalid": 0.5, "filler_correct": after},
        "tokens_to_0.9": solved and solved[0],
        "method_s_to_0.9": solved and solved[1],
        "tokens": {"generated": tokens, "scored": 5, "trained": 20, "hint": 3},
        "method_s": 60.0,
        "budget_s": 60.0,
        "lm_s": 70.0,
        "updates": 2,
        "curve": [[tokens // 2, 30.0, after / 2], [tokens, 60.0, after]],
    } | fields


RUNS = [
    made_run("grpo", 0, 0.2, None),
    made_run("grpo", 1, 0.4, None, tokens=400),
    made_run("textual_feedback", 0, 0.9, (300, 20.0)),
    made_run("textual_feedback", 1, 1.0, (500, 40.0)),
    made_run("more_sft", 0, 0.5, None, tokens=0, curve=[], updates=0, method_s=0.0),
    {"arm": "sdpo", "horizon": 16, "seed": 0, "knobs": [], "diverged": "loss is not finite"},
]


def test_rows_by_hand():
    rows, equal = horizon_rows.summarise(RUNS)
    by = {row["arm"]: row for row in rows}
    assert list(by) == ["textual_feedback", "grpo", "sdpo", "more_sft"] and equal == {16: 400}
    method, grpo = by["textual_feedback"], by["grpo"]
    assert (method["tokens_to_0.9"], method["wall_s_to_0.9"], method["censored"]) == (400.0, 30.0, 0)
    assert (grpo["tokens_to_0.9"], grpo["censored"]) == (700.0, 2)  # a lower bound: what both spent
    assert grpo["success_at_budget"] == pytest.approx(0.3) and (grpo["low"], grpo["high"]) == pytest.approx((0.2, 0.4))
    assert grpo["success_at_tokens"] == pytest.approx((0.1 + 0.4) / 2)  # 400 tokens: before the first point; at the end
    assert (grpo["tokens"], grpo["forward_tokens"], grpo["wall_s"]) == (700.0, 28.0, 60.0)
    assert (by["more_sft"]["wall_s"], by["more_sft"]["tokens_to_0.9"], by["more_sft"]["success_at_tokens"]) == (
        70.0,
        None,
        None,
    )
    assert (by["sdpo"]["success_at_budget"], by["sdpo"]["diverged"], by["sdpo"]["censored"]) == (0.0, 1, 1)
    assert horizon_rows.said(700.0, True) == ">700" and horizon_rows.said(None, True) == "-"


def test_a_run_that_was_done_early_is_compared_as_it_was_left():
    early = made_run("textual_feedback", 2, 0.96, (100, 5.0), tokens=200, method_s=20.0)
    rows, equal = horizon_rows.summarise([*RUNS, early])
    assert equal == {16: 400}  # not its 200
    assert rows[0]["success_at_tokens"] == pytest.approx((0.1 + 0.1 + 0.96) / 3)
    _, equal = horizon_rows.summarise([early, early | {"tokens": {"generated": 300}}])
    assert equal == {16: 300}


def test_a_run_is_read_from_its_folder(tmp_path):
    unit = ablate_horizon.unit(asked(tmp_path), "grpo", 16, 0, 0, ablate_horizon.WHOLE)
    assert horizon_rows.read(unit, tmp_path) is None
    successes = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    lines = [{"stage": "lm", "step": 1}, {"stage": "eval", "step": 1}]
    for i, success in enumerate(successes):
        seconds = {"time/generate": 1.0 * i, "time/train": 2.0 * i, "time/evaluate": 100.0, "time/warm up": 50.0}
        seconds["time/step"] = 9.0 if i == 0 else 3.0
        lines.append({"stage": "rl", "step": i, "train/success": success, "ledger/generated": 10 * i} | seconds)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ledger = {
        "tokens": {"generated": 60, "scored": 0, "trained": 1, "hint": 2},
        "seconds": {"generate": 6.0, "train": 12.0, "warm up": 50.0, "evaluate": 100.0},
        "dropped": {"a": 0, "b": 3},
    }
    measured = {"success": 0.5, "invalid": 0.1, "filler_correct": 1.0, "gain": None}
    results = {"before": measured, "after": measured, "ledger": ledger}
    (tmp_path / "results.json").write_text(json.dumps(results))
    row = horizon_rows.read(unit, tmp_path)
    assert (row["tokens_to_0.9"], row["method_s_to_0.9"]) == (50, 15.0)  # five batches of 1.0, the sixth line
    assert (row["method_s"], row["lm_s"], row["evaluate_s"], row["updates"]) == (18.0, 50.0, 100.0, 7)
    assert row["compile_s"] == 6.0
    assert row["curve"][-1] == [60, 18.0, 0.8] and row["dropped"] == {"b": 3}


def test_the_best_trial_is_chosen_when_all_have_a_row():
    rows = [made_run("grpo", 100, 0.0, None, trial=i) for i in range(3)]
    rows[1]["after"]["invalid"] = 0.2  # none succeeds: fewer invalid calls decide
    assert ablate_horizon.best_trials(rows) == {"grpo": 1}
    rows[2]["after"]["success"] = 0.1
    assert ablate_horizon.best_trials(rows) == {"grpo": 2}
    assert ablate_horizon.best_trials(rows[:2]) == {}
    rows[2] = {"arm": "grpo", "trial": 2, "diverged": "it"}
    assert ablate_horizon.best_trials(rows) == {"grpo": 1}


def test_claims_are_held_against_rows_that_measured_them():
    def row(arm, horizon, success, tokens, censored=0):
        share = {"success_at_budget": success, "low": success, "high": success, "before": 0.01}
        return share | {"arm": arm, "horizon": horizon, "tokens_to_0.9": tokens, "censored": censored}

    rows = [
        row("textual_feedback", 64, 0.95, 50.0),
        row("grpo", 64, 0.0, 1000.0, 5),
        row("irrelevant", 64, 0.3, 1e3, 3),
    ]
    held = {one["name"].partition("/")[2]: one["held"] for one in horizon_arms.judge(rows)}
    assert held == {"ratio_64": True, "irrelevant_64": False}
    assert "ratio_64" not in {one["name"].partition("/")[2] for one in horizon_arms.judge(rows[1:])}
    rows[0]["censored"] = 1
    assert "ablate_horizon/ratio_64" not in {one["name"] for one in horizon_arms.judge(rows)}


def test_the_figure_names_every_arm_with_rows_and_is_the_same_again(tmp_path):
    rows, _ = horizon_rows.summarise(RUNS + [run | {"horizon": 64} for run in RUNS])
    horizon_figure.draw(rows, tmp_path / "a.svg")
    horizon_figure.draw(rows, tmp_path / "b.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    named = {name for name, arm in ARMS.items() if arm.label in text}
    assert named == {"grpo", "textual_feedback", "more_sft", "sdpo"}
    assert set(horizon_figure.LOOKS) == set(ARMS)
