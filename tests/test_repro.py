"""The reproductions: what their arms share and where they differ, rows of made-up runs worked out by hand."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments import claims, repro, repro_gigpo, repro_maze, repro_vineppo, sweep

MODULES = (repro_gigpo, repro_maze, repro_vineppo)


def asked(tmp_path) -> sweep.Sweep:
    return sweep.Sweep(tmp_path / "rows.jsonl", tmp_path / "runs")


def differing(one: dict, other: dict, path: str = "") -> set[str]:
    found = set()
    for key in one.keys() | other.keys():
        here = f"{path}.{key}".lstrip(".")
        if isinstance(one.get(key), dict):
            found |= differing(one[key], other[key], here)
        elif one.get(key) != other.get(key):
            found.add(here)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.STUDY.name)
def test_arms_differ_in_their_own_fields_and_share_the_warm_up_of_their_task(module, tmp_path):
    study, warm = module.STUDY, {}
    for quick in (False, True):
        for name, arm in study.arms.items():
            one = study.unit(asked(tmp_path), name, 3, quick=quick)
            config = sweep.effective(one.config, one.overrides)
            (after,) = one.after
            before = sweep.effective(after.config, after.overrides)
            assert config["init_from"] == str(asked(tmp_path).place(after)) and before["stages"] == ("lm",)
            assert config["env"] == before["env"] and config["lm"] == before["lm"]
            assert config["compute"]["clock"] == "cpu"
            assert warm.setdefault(arm.task, after.digest) == after.digest
            told = [text.partition("=")[0] for text in (*arm.overrides, *arm.task)]
            peer = next(iter(study.arms))
            other = study.unit(asked(tmp_path), peer, 3, quick=quick)
            theirs = [text.partition("=")[0] for text in (*study.arms[peer].overrides, *study.arms[peer].task)]
            changed = differing(config, sweep.effective(other.config, other.overrides))
            assert changed <= {*told, *theirs, "init_from"}
    assert len(set(warm.values())) == len(warm)
    assert set(study.quick_arms) <= set(study.arms) and study.quick_seeds <= study.seeds


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.STUDY.name)
def test_claims_name_arms_of_the_study_and_its_quick_command(module):
    assert module.CLAIMS and len({one.name for one in module.CLAIMS}) == len(module.CLAIMS)
    for claim in module.CLAIMS:
        assert claim.name.startswith(f"{module.STUDY.name}/") and set(claim.arms) <= set(module.STUDY.arms)
        assert claim.command == f"experiments.{module.STUDY.name} --quick" and claim.seeds == module.STUDY.seeds
        assert "http" in module.__doc__ and claim.source


def made_run(arm: str, seed: int, after: float, curve: list) -> dict:
    return {
        "arm": arm, "seed": seed, "name": f"{arm}/{seed}", "before": {"success": 0.25},
        "after": {"success": after, "return": -seed, "turns": 4.0, "shortest": 0.5},
        "tokens": {"generated": curve[-1][0], "trained": 10, "hint": 1}, "method_s": 2.0, "updates": 4, "curve": curve,
    }  # fmt: skip


def reading(read, line) -> claims.Reading:
    found = read(line)
    assert found is not None
    return found


def test_rows_by_hand_and_differences_are_of_the_same_seeds():
    study = dataclasses.replace(repro_gigpo.STUDY, metric="success", kept=("return",), curve="train/success")
    short, long = [[100, 1.0, 0.3], [200, 2.0, 0.5]], [[150, 1.0, 0.4], [300, 2.0, 0.8]]
    runs = [made_run("grpo", seed, 0.5 + seed / 10, short) for seed in range(3)]
    runs += [made_run("gigpo", seed, 0.6 + seed / 5, long) for seed in range(2)]
    grpo, gigpo = repro.summarise(study, runs)
    assert (grpo["arm"], grpo["seeds"], grpo["tokens"], grpo["forward_tokens"]) == ("grpo", 3, 200, 11)
    assert grpo["value"] == pytest.approx(0.6) and grpo["low"] <= 0.6 <= grpo["high"]
    assert grpo["tokens_compared"] == 200 and grpo["train/success_at_tokens"] == 0.5
    assert gigpo["train/success_at_tokens"] == 0.4  # its last point within 200 tokens
    line = json.loads(json.dumps({"rows": [grpo, gigpo]}))
    mean, low, high = reading(repro.difference("gigpo", "grpo"), line)
    assert mean == pytest.approx(0.15)  # .1 and .2: seed 2 has no pair
    assert high - mean == pytest.approx(12.706 * np.std([0.1, 0.2], ddof=1) / math.sqrt(2), rel=1e-3)
    assert low == pytest.approx(2 * mean - high)
    assert repro.difference("gigpo", "turn_rloo")(line) is None
    assert reading(repro.difference("gigpo", "grpo", "per_seed_at_tokens"), line)[0] == pytest.approx(-0.1)
    assert reading(repro.value("grpo"), line)[0] == pytest.approx(0.6) and repro.value("nobody")(line) is None
    judged = claims.judge(repro_gigpo.CLAIMS[0], line)
    assert not judged["held"] and judged["number"] == pytest.approx(0.15)  # two seeds say nothing


def test_a_run_that_diverged_is_named():
    with pytest.raises(FloatingPointError, match="grpo/7 diverged: loss is nan"):
        repro.summarise(repro_gigpo.STUDY, [{"arm": "grpo", "name": "grpo/7", "diverged": "loss is nan"}])


def test_the_figure_draws_every_run(tmp_path):
    runs = [made_run("grpo", seed, 0.5, [[100, 1.0, 0.3], [200, 2.0, 0.5]]) for seed in range(3)]
    repro.draw(repro_gigpo.STUDY, runs, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert text.count("GRPO") >= 1 and "tokens sampled" in text
    repro.draw(repro_gigpo.STUDY, runs, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "figure.svg").read_bytes()
