"""Sweeps: which units there are, what is run again and what is not, and that no death of the launcher loses a row."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import board, cli, launch, processes, sweep
from rsi_jax import base

CONFIG = "configs/tool_calls.py"
ROOT = pathlib.Path(__file__).parents[1]

# A run in miniature: resumes its folder, logs, may be told to fail; says what it was given.
FAKE = """
import json, os, pathlib, sys, time
folder, ways = pathlib.Path(sys.argv[1]), dict(word.split("=") for word in sys.argv[2:])
folder.mkdir(parents=True, exist_ok=True)
tries = folder / "tries"
tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
count = len(tries.read_text())
steps = folder / "metrics.jsonl"
for i in range(len(steps.read_text().splitlines()) if steps.exists() else 0, int(ways.get("steps", 1))):
    with steps.open("a") as out:
        out.write(json.dumps({"step": i, "stage": "rl", "train/success": i / 10}) + chr(10))
    time.sleep(float(ways.get("sleep", 0)))
room = bytearray(int(float(ways.get("gib", 0)) * 2**30))
code = int(ways.get("code", 0))
if code and count <= int(ways.get("times", 99)):
    print(ways.get("says", "error:"), "as told", file=sys.stderr)
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)
print(json.dumps({"digest": "its own", "value": len(steps.read_text()), "cores": sorted(os.sched_getaffinity(0)),
                  "threads": os.environ["OMP_NUM_THREADS"]}))
"""


def fake(ways):
    """The command of a unit: the miniature, told by the unit's name how to behave."""

    def command(unit: sweep.Unit, folder: pathlib.Path) -> list[str]:
        return [sys.executable, "-c", FAKE, str(folder), *ways.get(unit.name, [])]

    return command


def make(folder: pathlib.Path, ways=None, **knobs) -> sweep.Sweep:
    knobs = {"poll": 0.02, "unit_gib": 0.01, "command": fake(ways or {})} | knobs
    return sweep.Sweep(folder / "rows.jsonl", folder / "runs", **knobs)


def units(*names: str) -> list[sweep.Unit]:
    return [sweep.Unit(name, CONFIG, (), seed, {"arm": name}) for seed, name in enumerate(names)]


def test_a_grid_has_every_point_once_and_its_digest_is_that_of_the_effective_config():
    made = launch.grid(CONFIG, ["rl.updates=3"], ["credit.name=grpo,rloo", "stages=('lm', 'rl'),('rl',)"], [0, 1])
    assert len(made) == 8 == len({unit.digest for unit in made}) == len({unit.name for unit in made})
    assert made[0].overrides == ("rl.updates=3", "credit.name=grpo", "stages=('lm', 'rl')")
    assert sweep.effective(CONFIG, made[2].overrides)["stages"] == ("rl",)
    same = sweep.Unit("other name", CONFIG, ("credit.name=grpo", "rl.updates=3", "rl.lr=0.004"), 0)
    assert same.digest == made[0].digest  # the order, and a value that is the config's own, change nothing
    assert sweep.Unit("", CONFIG, (), 1).digest != sweep.Unit("", CONFIG, (), 2).digest
    argv = sweep.train_command(sweep.Unit("", CONFIG, ("seed=9",), 2, late=lambda: ["rl.max_minutes=1"]), ROOT)
    assert argv[-3:] == ["--config.seed=9", "--config.rl.max_minutes=1", "--config.seed=2"]


def test_a_misspelt_field_or_a_wrong_value_is_found_before_anything_runs():
    with pytest.raises(base.InputError, match=r"did you mean --config\.credit\.name"):
        sweep.effective(CONFIG, ["credit.nam=grpo"])
    with pytest.raises(base.InputError, match="rl.lr=fast"):
        sweep.effective(CONFIG, ["rl.lr=fast"])


def test_finished_units_are_skipped_by_digest_and_a_changed_one_is_not(tmp_path):
    first = units("a", "b")
    assert sweep.run(make(tmp_path), first) == []
    renamed = [sweep.Unit("z", CONFIG, (), 0), sweep.Unit("b", CONFIG, ("rl.updates=7",), 1)]
    assert sweep.run(make(tmp_path), [*first, *renamed]) == []
    rows = cli.read_rows(tmp_path / "rows.jsonl")
    assert [row["name"] for row in rows] == ["a", "b", "b"]
    assert rows[2]["overrides"] == ["rl.updates=7"] and rows[0]["arm"] == "a"
    assert [row["name"] for row in sweep.rows_of(tmp_path / "rows.jsonl", renamed)] == ["a", "b"]


def test_a_sweep_that_may_not_run_sums_up_what_is_there(tmp_path):
    a, b = units("a", "b")
    assert sweep.run(make(tmp_path), [a]) == []
    shown = make(tmp_path, runs=False)
    assert sweep.run(shown, [a, b]) == [] and not shown.place(b).exists()
    assert [row["arm"] for row in sweep.rows_of(shown.results, [a, b])] == ["a"]


def test_what_is_waited_for_runs_first_and_only_for_what_is_not_done(tmp_path):
    warm, sick = units("warm", "sick")
    pairs = [("a", warm), ("b", sick), ("c", warm)]
    made = [sweep.Unit(name, CONFIG, (), 7 + i, after=(after,)) for i, (name, after) in enumerate(pairs)]
    asked = make(tmp_path, {"sick": ["code=1"]})
    assert sweep.run(asked, made) == ["b: what it waits for failed"]
    assert [row["name"] for row in cli.read_rows(tmp_path / "rows.jsonl")] == ["a", "c"]
    first = tmp_path / "runs" / "prepared.jsonl"
    assert [row["name"] for row in cli.read_rows(first)] == ["warm", "sick"]
    middle = sweep.Unit("middle", CONFIG, (), 20, after=(warm,))
    assert sweep.run(asked, [sweep.Unit("last", CONFIG, (), 21, after=(warm, middle))]) == []
    assert [row["name"] for row in cli.read_rows(first)] == ["warm", "sick", "middle"]
    first.unlink()  # the run folders went the way of all run folders
    assert sweep.run(asked, [made[0], made[2]]) == [] and not first.exists()


def test_runs_have_cores_of_their_own(tmp_path):
    mine = sorted(os.sched_getaffinity(0))
    jobs = min(2, len(mine))
    sweep.run(make(tmp_path, {name: ["sleep=0.5"] for name in "ab"}, jobs=jobs), units("a", "b"))
    rows = cli.read_rows(tmp_path / "rows.jsonl")
    assert {tuple(row["cores"]) for row in rows} == {(core,) for core in mine[:jobs]}
    assert {row["threads"] for row in rows} == {"1"}


def test_exit_codes(tmp_path):
    ways = {
        "diverges": ["code=1"],
        "dies": ["code=-9"],
        "dies once": ["code=-9", "times=1"],
        "crashes": ["code=1", "says=Traceback"],
        "stopped": ["code=0"],
    }
    read = {"stopped": None}
    asked = make(tmp_path, ways, retries=2, read=lambda unit, folder: read.get(unit.name, {"value": 1}))
    failed = sweep.run(asked, units(*ways))
    rows = {row["name"]: row for row in cli.read_rows(tmp_path / "rows.jsonl")}
    assert set(rows) == {"diverges", "dies once"} and rows["diverges"]["diverged"] == "as told"
    assert "diverged" not in rows["dies once"]
    assert sorted(line.partition(":")[0] for line in failed) == ["crashes", "dies", "stopped"] and "exit -9" in "".join(
        failed
    )
    tries = {unit.name: len((asked.place(unit) / "tries").read_text()) for unit in units(*ways)}
    assert tries == {"diverges": 1, "dies": 3, "dies once": 2, "crashes": 3, "stopped": 3}
    sweep.run(asked, units(*ways))
    assert len((asked.place(units("diverges")[0]) / "tries").read_text()) == 1  # a result, not tried again


def test_bad_input_ends_the_sweep_and_the_others_are_stopped(tmp_path):
    ways = {"long": ["steps=1000", "sleep=0.05"], "bad": ["code=2"]}
    jobs = min(2, len(os.sched_getaffinity(0)))
    order = units("long", "bad", "later") if jobs == 2 else units("bad", "later")
    with pytest.raises(base.InputError, match="bad: as told"):
        sweep.run(make(tmp_path, ways, jobs=jobs), order)
    assert cli.read_rows(tmp_path / "rows.jsonl") == []
    assert not [place for place in (tmp_path / "runs").glob("later*") if place.is_dir()]


def test_a_run_waits_for_memory_and_one_that_never_fits_is_refused(tmp_path):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two runs at a time need two cores")
    ways = {name: ["gib=0.1", "sleep=0.3", "steps=1"] for name in "abc"}
    asked = make(tmp_path, ways, jobs=2, unit_gib=0.3, memory_gib=0.5)
    asked.folder.mkdir()
    runner, together = sweep.Runner(asked, units("a", "b", "c")), []
    start = runner.start
    runner.start = lambda unit, shown: (start(unit, shown), together.append(len(runner.running)))[0]
    runner.run()
    assert together == [1, 1, 1]
    rows = cli.read_rows(tmp_path / "rows.jsonl")
    assert all(0.1 < row["peak_gib"] < 0.3 for row in rows)
    with pytest.raises(base.InputError, match=r"a run takes 2\.00 GiB, --memory_gib=0\.50"):
        sweep.run(make(tmp_path, unit_gib=2.0, memory_gib=0.5), units("a", "b", "c", "d"))


def test_a_torn_row_is_cut_off_and_no_other_is_lost(tmp_path):
    file = tmp_path / "deep" / "rows.jsonl"
    sweep.append(file, {"a": 1, "b": float("nan")})
    with file.open("a") as out:
        out.write('{"a": 2, "to')
    sweep.append(file, {"a": 3})
    assert cli.read_rows(file) == [{"a": 1, "b": None}, {"a": 3}]


# A sweep as a command: `run()` and then what the test does with it.
SCRIPT = """
import os, pathlib
from tests import test_launch as t
def run(_=None):
    ways = {name: ["steps=6", "sleep=0.1"] for name in "abcd"}
    t.sweep.run(t.make(pathlib.Path(os.environ["FOLDER"]), ways, jobs=1), t.units(*"abcd"))
"""


def test_the_launcher_may_be_killed_at_any_time(tmp_path):
    """kill -9 mid-sweep: the running unit dies with it; the rows are those of a sweep left alone."""
    command = {"args": [sys.executable, "-c", SCRIPT + "run()"], "cwd": ROOT}
    command["env"] = os.environ | {"FOLDER": str(tmp_path)}
    begun = subprocess.Popen(**command)
    deadline = time.monotonic() + 60
    while not (tmp_path / "rows.jsonl").exists() or not list((tmp_path / "runs").glob("b-*/metrics.jsonl")):
        assert time.monotonic() < deadline and begun.poll() is None
        time.sleep(0.02)
    (child,) = [int(x) for x in pathlib.Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()]
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline, "the unit outlived its launcher"
        time.sleep(0.02)
    (cut,) = (tmp_path / "runs").glob("b-*/metrics.jsonl")
    assert len(cut.read_text().splitlines()) < 6
    subprocess.run(**command, check=True)
    calm = tmp_path / "calm"
    sweep.run(make(calm, {name: ["steps=6"] for name in "abcd"}), units(*"abcd"))

    def told(file: pathlib.Path) -> list[dict]:
        return [{k: v for k, v in row.items() if k not in ("wall_s", "peak_gib")} for row in cli.read_rows(file)]

    assert told(tmp_path / "rows.jsonl") == told(calm / "rows.jsonl") and len(told(calm / "rows.jsonl")) == 4
    tries = {
        place.name[0]: len((place / "tries").read_text()) for place in (tmp_path / "runs").glob("?-*") if place.is_dir()
    }
    assert tries == {"a": 1, "b": 2, "c": 1, "d": 1}


def test_a_signal_stops_the_runs_and_the_same_command_continues(tmp_path):
    argv = [sys.executable, "-c", SCRIPT + "t.cli.run(run, t.cli.Flags())", f"--config={CONFIG}"]
    environ = os.environ | {"FOLDER": str(tmp_path)}
    begun = subprocess.Popen(argv, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "runs").glob("a-*/metrics.jsonl")):
        assert time.monotonic() < deadline and begun.poll() is None
        time.sleep(0.02)
    begun.send_signal(signal.SIGTERM)
    told = begun.communicate(timeout=60)[1]
    assert begun.returncode == 0 and "its runs have saved; the same command continues" in told
    assert not (tmp_path / "rows.jsonl").exists()


def test_two_launchers_do_not_share_a_folder(tmp_path):
    with sweep._alone(tmp_path / "runs"), pytest.raises(base.InputError, match="another process runs a sweep"):
        sweep.run(make(tmp_path), units("a"))


def test_more_cores_than_there_are_are_refused_by_name():
    many = len(os.sched_getaffinity(0)) + 1
    argv = [sys.executable, "-m", "experiments.launch", f"--config={CONFIG}", f"--jobs={many}"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and f"--jobs={many} with --cores=1 each: this process may use" in done.stderr


def test_the_board_shows_the_last_success_and_the_time_left(tmp_path):
    assert board.last_success(tmp_path) is None
    lines = [{"stage": "lm", "loss": 1.0}, {"stage": "rl", "train/success": 0.25}, {"stage": "rl", "loss": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"stage": "rl", "tr')
    assert board.last_success(tmp_path) == 0.25
    with (tmp_path / "out").open("w") as out, board.Board(4, interval=0.0, file=out) as shown:
        shown.show(1, [("grpo/0", 90.0, 0.25), ("warm", 3.0, None)], 120.0)
    assert (tmp_path / "out").read_text() == "1/4 runs  ETA 2m00s  |  grpo/0 1m30s success 0.250  |  warm 3s\n"


def test_a_child_that_ignores_the_signal_is_killed(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    core = sorted(os.sched_getaffinity(0))[:1]
    child = processes.Child([sys.executable, "-c", code], core, out=tmp_path / "out", log=tmp_path / "log")
    while not (tmp_path / "out").read_text():
        time.sleep(0.02)
    child.ask_to_stop()
    child.stop(0.2)
    assert child.seconds < 30 and not os.path.exists(f"/proc/{child.pid}")
    assert processes.available_gib() > 0


def test_the_peak_of_a_run_is_its_own_not_that_of_who_started_it(tmp_path):
    held = bytearray(400 * 2**20)  # touched: resident in this process
    sweep.run(make(tmp_path, {"a": ["gib=0.1", "sleep=0.3", "steps=1"]}), units("a"))
    (row,) = cli.read_rows(tmp_path / "rows.jsonl")
    assert len(held) > 0 and 0.1 < row["peak_gib"] < 0.3
