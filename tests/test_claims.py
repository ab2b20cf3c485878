"""Claims and how runs are summed up: on numbers worked out by hand, and the commands that keep the table."""

import json
import math

import numpy as np
import pytest

from experiments import aggregate, check_claims, claims, cli, credit_fidelity, fidelity_claims, registry
from experiments.aggregate import Point
from rsi_jax import base


def claim(name: str, low: float, high: float, command: str = "a", **fields) -> claims.Claim:
    return claims.Claim(name, f"of {name} | x", "nobody", command, claims.at("x", "y"), low, high, minutes=1, **fields)


def test_interquartile_mean_and_its_interval():
    assert aggregate.iqm([1.0, 2.0, 6.0]) == 3.0 and aggregate.iqm([0.0, 1.0, 2.0, 3.0, 100.0]) == 2.0
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    value, low, high = aggregate.interval([values], np.mean)
    assert value == pytest.approx(values.mean())
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.06)
    assert aggregate.interval([values], np.mean) == (value, low, high)  # the same bootstrap again
    assert aggregate.interval([[0.25]]) == (0.25, 0.25, 0.25)


def test_the_bootstrap_stays_within_strata():
    """Tasks that differ, without noise within each: the interval has no width; drawn over both it would have."""
    value, low, high = aggregate.interval([[0.0] * 8, [1.0] * 8], np.mean)
    assert (value, low, high) == (0.5, 0.5, 0.5)
    _, low, high = aggregate.interval([[0.0] * 8 + [1.0] * 8], np.mean)
    assert low < 0.4 and high > 0.6


def test_readings_of_a_curve():
    success = aggregate.smooth([0.0, 1.0, 1.0, 0.5], window=2)
    assert success == [0.0, 0.5, 1.0, 0.75]
    curve = [Point(10 * (i + 1), float(i), one) for i, one in enumerate(success)]
    assert aggregate.reached(curve, 0.9) == curve[2] and aggregate.reached(curve, 0.5, after=3) == curve[2]
    assert aggregate.reached(curve, 1.1) is None
    assert aggregate.at_tokens(curve, 25, before=0.3) == 0.5 and aggregate.at_tokens(curve, 30, before=0.3) == 1.0
    assert aggregate.at_tokens(curve, 9, before=0.3) == 0.3
    assert aggregate.thin(curve, 4) == curve and aggregate.thin(curve, 2) == [curve[0], curve[-1]]


@pytest.mark.parametrize(
    "line, held",
    [
        ({"x": {"y": 2}}, True),
        ({"x": {"y": 1}}, False),
        ({"x": {"y": 2.5}}, False),
        ({"x": {}}, False),
        ({"x": None}, False),
    ],
)
def test_a_claim_holds_within_its_tolerance_and_not_unmeasured(line, held):
    assert claims.judge(claim("a", 1.0, 2.0), line)["held"] is held


def test_the_whole_interval_must_lie_within():
    one = claims.Claim("a", "", "", "a", lambda line: line["it"], 0.0, math.inf, minutes=1)
    assert one.tolerance == "above 0" and claim("b", -math.inf, 2.0).tolerance == "below 2"
    assert (
        claims.judge(one, {"it": (0.5, 0.1, 0.9)})["held"] and not claims.judge(one, {"it": (0.5, -0.1, 0.9)})["held"]
    )


def test_every_claim_of_credit_fidelity_is_registered_and_judged_as_its_script_does():
    assert len({one.name for one in registry.REGISTERED}) == len(registry.REGISTERED)
    mine = [one for one in registry.REGISTERED if one.name.startswith("credit_fidelity/")]
    rng = np.random.default_rng(0)

    def read(reading):
        level = {"vineppo, K = 1024": 0.97, "cocoa": 0.98, "mt_grpo": 0.0}.get(reading.arm, 0.5)
        return list(level + (0.01 * rng.normal(size=8) if level else np.zeros(8)))

    judged = [fidelity_claims.judge(one, read) for one in fidelity_claims.CLAIMS]
    line = {"claims": json.loads(json.dumps(judged))}
    held = [claims.judge(one, line)["held"] for one in mine]
    assert held == [one["holds"] for one in judged] and {True, False} == set(held)
    (command,) = {one.command for one in mine}
    module, *given = command.split()
    assert module == credit_fidelity.__name__ and given[0] == "--quick"


def test_a_command_is_run_once_and_its_failure_fails_its_claims(monkeypatch):
    asked = []

    def measure(command, minutes):
        asked.append(command)
        return ({"x": {"y": 1.5}}, "") if command == "a" else ({}, "exit code 1")

    monkeypatch.setattr(check_claims, "measure", measure)
    rows = check_claims.check([claim("a/1", 1, 2), claim("a/2", 2, 3), claim("b", 0, 9, "b")])
    assert asked == ["a", "b"] and [row["held"] for row in rows] == [True, False, False]
    assert rows[2]["fault"] == "exit code 1" and claims.number_of(rows[2]) == "exit code 1"


def test_measure_reads_the_last_line_of_stdout_or_says_what_went_wrong(tmp_path, monkeypatch):
    (tmp_path / "probe.py").write_text(
        "import json, sys, time\nprint('a table')\nif 'sleep' in sys.argv: time.sleep(60)\n"
        "if 'quiet' not in sys.argv: print(json.dumps({'x': sys.argv[1]}))\nsys.exit('fail' in sys.argv)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert check_claims.measure("probe 'two words'", 1.0) == ({"x": "two words"}, "")
    assert check_claims.measure("probe fail", 1.0) == ({}, "exit code 1")
    assert check_claims.measure("probe sleep", 0.01) == ({}, "not done in 0.02 minutes")
    assert check_claims.measure("probe quiet", 1.0) == ({}, "no JSON line")


def test_the_table_keeps_what_did_not_run_and_escapes_what_would_break_it(tmp_path, monkeypatch):
    known = (claim("a", 0, 9, config="configs/x.py"), claim("b", 0, 9), claim("c", 0, 9))
    monkeypatch.setattr(registry, "REGISTERED", known)
    origin = {"fault": "", "commit": "abc", "date": "2026-12-01", "hardware": "2 cores"}

    def row(one, value):
        given = {"script": f"python -m {one.command}", "config": one.config}
        return claims.judge(one, {"x": {"y": value}}) | given | origin

    file, page = tmp_path / "rows.jsonl", tmp_path / "README.md"
    check_claims.keep([row(known[1], 1.0), row(known[0], 10.0)], file, page)
    check_claims.keep([row(known[1], 2.0)], file, page)
    assert [(one["name"], one["number"]) for one in cli.read_rows(file)] == [("a", 10.0), ("b", 2.0)]
    lines = page.read_text().splitlines()[-2:]
    assert lines[0] == (
        "| of a \\| x | `python -m a` | configs/x.py | 10 | 0 to 9 | **no** | 2 cores | abc | 2026-12-01 |"
    )
    assert "| yes |" in lines[1]


def test_claims_are_chosen_by_the_beginning_of_their_names():
    known = [claim("a/1", 0, 1), claim("b", 0, 1)]
    assert check_claims.select(["a"], known) == known[:1] and check_claims.select([], known) == known
    with pytest.raises(base.InputError, match="--only=c: no claim's name begins so"):
        check_claims.select(["c"], known)


def test_the_committed_table_is_that_of_its_rows():
    root = check_claims.pathlib.Path(__file__).parents[1] / "experiments"
    assert (root / "README.md").read_text() == check_claims.table(cli.read_rows(root / "results" / "claims.jsonl"))
