"""Metrics survive kills and resumes line for line; progress, ledger, tables and the JSON line say what happened."""

import io
import json
import signal
import subprocess
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, metrics

RUN = """
import os, signal, sys
from rsi_jax import metrics
folder, resume, kill_at = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3])
tracker = metrics.Tracker(folder, resume_step=resume)
for step in range(0 if resume is None else resume + 1, 12):
    kl = float("nan") if step == 3 else 0.0
    tracker.log("rl", step, {"loss": 1 / (step + 1), "kl": kl, "time/step": os.getpid()})
    if step % 4 == 0:
        tracker.log("eval", step, {"success": step / 12})
    if step == kill_at:
        with open(os.path.join(folder, metrics.METRICS_FILE), "ab") as file:
            file.write(b'{"step": 9, "stage": "rl", "lo')
        os.kill(os.getpid(), signal.SIGKILL)
tracker.close()
"""


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def lines_of(folder):
    return [metrics.without_time(line) for line in metrics.read_lines(folder / metrics.METRICS_FILE)[0]]


def test_a_line_is_flat_json_and_null_where_not_finite(tmp_path):
    with metrics.Tracker(tmp_path, clock=lambda: 7.5) as tracker:
        scalars = {"a": jnp.float32(0.5), "b": np.int64(3), "c": float("inf"), "d": True, "e": np.array([2.0])[0]}
        tracker.log("rl", 0, scalars)
    text = (tmp_path / metrics.METRICS_FILE).read_text()
    expected = (
        '{"step": 0, "stage": "rl", "a": 0.5, "b": 3, "c": null, "d": 1, "e": 2.0, "nonfinite": 1, "time/unix": 7.5}\n'
    )
    assert text == expected
    assert tracker.nonfinite == 1
    assert list((tmp_path / metrics.EVENTS_FOLDER).glob("events*"))


def test_the_step_increases_within_a_stage_and_never_falls(tmp_path):
    with metrics.Tracker(tmp_path) as tracker:
        tracker.log("rl", 5, {})
        tracker.log("eval", 5, {})
        for stage, step in (("rl", 5), ("eval", 5), ("rl", 4), ("sft", 4)):
            with pytest.raises(ValueError, match="the step must increase"):
                tracker.log(stage, step, {})
        tracker.log("rl", 6, {})
    assert [(line["stage"], line["step"]) for line in lines_of(tmp_path)] == [("rl", 5), ("eval", 5), ("rl", 6)]


@pytest.mark.parametrize(
    "name, value, error",
    [("a", np.zeros(3), ValueError), ("a", "0.5", TypeError), ("step", 1, ValueError), ("a", None, ValueError)],
)
def test_what_is_not_a_scalar_is_named(tmp_path, name, value, error):
    with metrics.Tracker(tmp_path) as tracker, pytest.raises(error, match=f"metric.*{name}"):
        tracker.log("rl", 0, {name: value})
    assert lines_of(tmp_path) == []


def test_killed_and_resumed_equals_uninterrupted(tmp_path):
    def run(folder, resume, kill_at):
        command = [sys.executable, "-W", "ignore", "-c", RUN, str(folder), repr(resume), str(kill_at)]
        return subprocess.Popen(command, stderr=subprocess.PIPE)

    whole, killed = run(tmp_path / "whole", None, -1), run(tmp_path / "killed", None, 8)
    assert (whole.wait(), killed.wait()) == (0, -signal.SIGKILL)
    assert metrics.read_lines(tmp_path / "killed" / metrics.METRICS_FILE)[1] == 1
    with metrics.Tracker(tmp_path / "killed", resume_step=6) as tracker:
        assert tracker.resumed == metrics.Resumed(kept=9, dropped=3, torn=1)
        assert (tracker.last_step, tracker.nonfinite) == (6, 1)
        for step in range(7, 12):
            tracker.log("rl", step, {"loss": 1 / (step + 1), "kl": 0.0, "time/step": -1})
            if step % 4 == 0:
                tracker.log("eval", step, {"success": step / 12})
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    for process in (whole, killed):
        process.stderr.close()


def test_resume_keeps_the_bytes_before_and_nothing_after(tmp_path):
    with metrics.Tracker(tmp_path) as tracker:
        for step in range(6):
            tracker.log("rl", step, {"x": 0.1 * step})
    before = (tmp_path / metrics.METRICS_FILE).read_bytes().splitlines(keepends=True)
    with metrics.Tracker(tmp_path, resume_step=3) as tracker, pytest.raises(ValueError, match="must increase"):
        tracker.log("rl", 3, {})
    assert (tmp_path / metrics.METRICS_FILE).read_bytes() == b"".join(before[:4])
    with metrics.Tracker(tmp_path, resume_step=-1) as tracker:
        assert tracker.resumed.dropped == 4
        tracker.log("rl", 0, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [metrics.METRICS_FILE, metrics.EVENTS_FOLDER]


def test_a_new_run_never_writes_over_an_old_one(tmp_path):
    with metrics.Tracker(tmp_path) as tracker:
        tracker.log("rl", 0, {})
    with pytest.raises(base.InputError, match="already holds metrics"):
        metrics.Tracker(tmp_path)


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / metrics.METRICS_FILE
    path.write_text('{"step": 0, "stage": "rl"}\nnonsense\n{"step": 2, "stage": "rl"}\n')
    with pytest.raises(base.InputError, match="line 2"):
        metrics.read_lines(path)
    path.write_bytes(b'{"step": 0, "stage": "rl"}\n\x00\x00\xff')
    assert metrics.read_lines(path) == ([{"step": 0, "stage": "rl"}], 1)
    path.write_bytes(b'{"step": 0, "stage": "rl"}')
    assert metrics.read_lines(path) == ([{"step": 0, "stage": "rl"}], 0)
    with pytest.raises(base.InputError, match="does not exist"):
        metrics.read_lines(tmp_path / "none.jsonl")


def fake_module(name, calls):
    run = types.SimpleNamespace(define_metric=lambda *a, **k: calls.append(("define", a, k)))
    module = types.ModuleType(name)
    module.init = lambda **k: calls.append(("init", k)) or run
    module.log = lambda scalars, **k: calls.append(("log", scalars, k))
    module.finish = lambda: calls.append(("finish",))
    return module


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_adapters_speak_to_a_module_of_that_name(tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setitem(sys.modules, name, fake_module(name, calls))
    other = metrics.adapter(name, project="p", run="r", config={"seed": 1}, tags=["x"])
    with metrics.Tracker(tmp_path, adapters=[other]) as tracker:
        tracker.log("rl", 4, {"a": 1.5, "b": float("nan")})
    init = calls[0][1]
    assert (init["project"], init["name"], init["resume"], init["tags"]) == ("p", "r", "allow", ["x"])
    scalars = {"rl/a": 1.5, "rl/nonfinite": 1}
    sent = ("log", {"global_step": 4, **scalars}, {}) if name == "wandb" else ("log", scalars, {"step": 4})
    assert calls[-2:] == [sent, ("finish",)]


def test_an_adapter_that_is_missing_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(base.InputError, match="pip install wandb"):
        metrics.adapter("wandb", project="p", run="r")
    with pytest.raises(base.InputError, match="choose wandb or trackio"):
        metrics.adapter("mlflow", project="p", run="r")


def test_progress_without_a_terminal_is_a_line_every_interval():
    clock, out = Clock(), io.StringIO()
    with metrics.Progress(interval=15, file=out, clock=clock) as progress:
        progress.stage("rl", 100, start=40)
        for step in range(41, 101):
            clock.now += 1
            progress.update(step, reward=0.5, tokens=2000, note="[x]")
        progress.say("done [bold]")
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["41/100", "56/100", "71/100", "86/100", "100/100"]
    assert lines[1] == "rl 56/100  reward 0.500  2000 tok/s  ETA 44s  [x]"
    assert lines[-1] == "done [bold]"


def test_progress_on_a_terminal_shows_the_numbers(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    out = io.StringIO()
    out.isatty = lambda: True
    with metrics.Progress(file=out) as progress:
        progress.stage("rl", 10)
        progress.update(10, reward=0.25)
    assert "10/10" in out.getvalue() and "reward 0.250" in out.getvalue()


def test_ledger_phases_never_count_time_twice_and_survive_a_resume():
    clock = Clock()
    ledger = metrics.Ledger(clock=clock)
    with ledger.phase("step"):
        clock.now += 2
        with ledger.phase("generate"):
            clock.now += 3
            assert ledger.state()["seconds"] == {"step": 2.0, "generate": 3.0}
            clock.now += 1
        clock.now += 5
    clock.now += 100
    ledger.add(generated=7, hint=2)
    ledger.drop("zero variance", 3)
    ledger.drop("zero variance")
    ledger.drop("infrastructure", 0)
    assert ledger.seconds == {"step": 7.0, "generate": 4.0}
    with pytest.raises(ValueError, match="no token count 'prompt'"):
        ledger.add(prompt=1)
    restored = metrics.Ledger(clock=clock)
    restored.restore(json.loads(json.dumps(ledger.state())))
    restored.add(generated=1)
    assert restored.tokens == {"generated": 8, "scored": 0, "trained": 0, "hint": 2}
    assert restored.scalars()["dropped/zero variance"] == 4
    assert restored.scalars()["dropped/infrastructure"] == 0
    assert restored.scalars()["time/generate"] == 4.0


def test_the_phase_closes_when_its_block_fails():
    clock = Clock()
    ledger = metrics.Ledger(clock=clock)
    with pytest.raises(RuntimeError), ledger.phase("step"):
        clock.now += 1
        raise RuntimeError
    clock.now += 10
    assert ledger.state()["seconds"] == {"step": 1.0}


def test_table_then_one_json_line(capsys):
    metrics.table("Results", ["task", "score"], [["[bold]x[/bold]", 0.123456], ["y", None], ["z", 123456]])
    metrics.finish({"score": np.float32(0.5), "bad": float("nan"), "n": np.int64(3), "list": jnp.arange(2)})
    out, err = capsys.readouterr()
    assert err == ""
    assert "[bold]x[/bold]" in out and "0.1235" in out and "123,456" in out and "Results" in out
    last = out.splitlines()[-1]
    assert json.loads(last) == {"score": 0.5, "bad": None, "n": 3, "list": [0, 1]}
    assert out.endswith("\n")


def test_json_of_something_else_is_an_error():
    with pytest.raises(TypeError, match="object"):
        metrics.jsonable({"a": object()})


@pytest.mark.parametrize(
    "seconds, text",
    [(0.42, "0.42s"), (12, "12s"), (59.7, "1m00s"), (185, "3m05s"), (7620, "2h07m"), (273600, "3d04h")],
)
def test_duration(seconds, text):
    assert metrics.duration(seconds) == text
    assert metrics.duration(float("inf")) == "-"


def test_numbers_for_people():
    values = [None, float("nan"), np.float32("nan"), 3, 1234567, 0.123456, 12345.6, float("inf"), True, "x"]
    assert " ".join(metrics.number(value) for value in values) == "- - - 3 1,234,567 0.1235 12,346 inf True x"
