"""The training app: flags and their errors, the run folder, what a run shows, one tiny run stopped and continued."""

import functools
import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from configs import default
from experiments import cli
from rsi_jax import base, report, sharding, store, train
from rsi_jax.report import curves
from rsi_jax.train import evaluate, loop, present, rl, samples, setup

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "--config=configs/tool_calls.py"


def python(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120)


def app(*flags: str) -> subprocess.CompletedProcess:
    return python("-m", "experiments.train", *flags)


def test_the_commands_can_be_imported_together_and_import_no_jax_before_their_flags_are_read():
    files = sorted((ROOT / "experiments").glob("*.py"))
    apps = [f"experiments.{path.stem}" for path in files if "cli.run(main" in path.read_text()]
    assert "experiments.train" in apps
    done = python("-c", f"import sys, {', '.join(apps)}; assert not {{'jax', 'rsi_jax'}} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


def test_help_says_what_the_flags_are():
    done = app("--help")
    assert done.returncode == 0
    assert "--run_dir" in done.stdout and "--[no]fresh" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([CONFIG, "--config.rl.updatez=3"], ["--config.rl.updatez is no field", "did you mean --config.rl.updates?"]),
        ([CONFIG, "--config.rl.updates=many"], ["--config.rl.updates", "many"]),
        ([CONFIG, "--config.rl.updates=2.5"], ["--config.rl.updates", "2.5"]),
        ([CONFIG, "--run_dri=x"], ["run_dri", "run_dir"]),
        ([CONFIG, "updates=3"], ["unexpected argument 'updates=3'"]),
        (["--config=configs/no_such.py"], ["configs/no_such.py", "no such file"]),
        (["--config=README.md"], ["README.md", "SyntaxError"]),
        ([], ["--config is missing"]),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(flags, words):
    done = app(*flags)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rl.updatez", "rl.updates"),
        ("rl.lrr", "rl.lr"),
        ("horizon", "env.tool_calls.horizon"),
        ("feedback.hnt", "feedback.hint"),
        ("credit.grpo.std_flor", "credit.grpo.std_floor"),
        ("evaluate.episodes", "evaluation.episodes"),
        ("qqqqqqqq", None),
    ],
)
def test_the_nearest_field(name, near):
    assert cli.nearest(name, cli.fields_of(default.get_config().to_dict())) == near


@pytest.mark.parametrize(
    "argument", ["--config.rl.updates=3", "--config.rl.updates", "--noconfig.compute.offload", "--x=1"]
)
def test_what_is_spelt_right_passes(argument):
    assert cli.misspelt([CONFIG, argument], default.get_config()) is None


def test_exit_codes():
    codes = [
        (base.InputError("x"), 2),
        (train.Stopped("x"), 0),
        (FloatingPointError("x"), 1),
        (train.ParityError("x"), 1),
        (RuntimeError("x"), None),
        (ValueError("x"), None),
    ]
    assert [cli.code_of(error) for error, _ in codes] == [code for _, code in codes]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages", ("lm", "rll")),
        ("rl.groups", 0),
        ("rl.lr", -1.0),
        ("rl.surrogate", "pppo"),
        ("rl.micro_batch", 7),
        ("rl.minibatches", 3),
        ("credit.name", "grpoo"),
        ("credit.textual_feedback.inner", "drgrpo"),
        ("feedback.rules", ("long_anser",)),
        ("feedback.rules", (3,)),
        ("feedback.teacher", "emma"),
        ("archive.every", -1),
        ("feedback.watch_turns", -1),
        ("evaluation.samples", -1),
    ],
)
def test_bad_values_are_refused_before_any_compile(field, value):
    config = default.get_config()
    config.update_from_flattened_dict({field: value})
    with pytest.raises(base.InputError) as error:
        setup.check(config)
    assert (
        field.rpartition(".")[2] in str(error.value)
        or repr(value) in str(error.value)
        or str(value) in str(error.value)
    )
    assert len(str(error.value).splitlines()) == 1


def test_a_task_without_demonstrations_is_refused(tmp_path):
    config = default.get_config()
    config.env.name = "questions"
    with pytest.raises(base.InputError, match="demonstrates nothing"):
        setup.make_parts(config)


@pytest.mark.parametrize(("name", "device"), [("tpu", "TPU"), ("mosaic_gpu", "H100 or H200")])
def test_the_attention_of_another_device_is_refused(name, device):
    config = default.get_config()
    config.compute.attention = name
    with pytest.raises(base.InputError, match=f"='{name}' needs a mesh of one {device}.* this is one of 8 cpu"):
        setup.make_parts(config)


def test_the_run_folder_is_named_by_the_effective_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = default.get_config()
    folder = present.open_folder(config, name="tool_calls")
    assert folder == pathlib.Path("runs") / f"tool_calls-{present.digest(config)}"
    assert json.loads((folder / "config.json").read_text())["rl"]["lr"] == config.rl.lr
    assert present.open_folder(config, name="tool_calls") == folder
    config.seed = 1
    assert present.open_folder(config, name="tool_calls") != folder
    config.seed, config.run_dir = 0, "elsewhere"
    assert f"tool_calls-{present.digest(config)}" == folder.name


def test_a_run_is_not_continued_with_another_config(tmp_path):
    config = default.get_config()
    config.run_dir = str(tmp_path / "run")
    folder = present.open_folder(config, name="x")
    config.rl.lr = 1.0
    present.open_folder(config, name="x")  # nothing is saved yet: nothing to protect
    (folder / "checkpoints").mkdir()
    config.rl.lr = 2.0
    with pytest.raises(base.InputError, match=r"another config \(rl.lr: 1.0 -> 2.0\)"):
        present.open_folder(config, name="x")
    assert not (present.open_folder(config, name="x", fresh=True) / "checkpoints").exists()


def test_one_process_writes_a_run_and_a_killed_one_holds_nothing(tmp_path):
    config = default.get_config()
    config.run_dir = str(tmp_path / "run")
    folder = present.open_folder(config, name="x")
    code = "import pathlib, sys, time; from rsi_jax.train import present\n"
    code += "with present.lock(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, folder], stdout=subprocess.PIPE, text=True, cwd=ROOT) as other:
        assert other.stdout.readline() == "held\n"
        kept = (folder / present.CONFIG_FILE).read_bytes()
        config.rl.lr = 1.0
        for fresh in (False, True):
            refused = pytest.raises(base.InputError, match=f"is being written by process {other.pid}: wait for it")
            with refused, present.lock(present.open_folder(config, name="x", fresh=fresh)):
                pass
        assert (folder / present.CONFIG_FILE).read_bytes() == kept
        other.kill()
    with present.lock(folder):
        pass


def test_compiled_programs_are_kept_beside_the_run_unless_jax_is_told_otherwise(tmp_path):
    code = "import pathlib, sys, jax; from rsi_jax.train import present\n"
    code += "present.keep_compiled(pathlib.Path(sys.argv[1])); print(jax.config.jax_compilation_cache_dir)"
    for told, want in (("", str(tmp_path / present.COMPILED_FOLDER)), (str(tmp_path / "mine"), str(tmp_path / "mine"))):
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": told}
        argv = [sys.executable, "-c", code, str(tmp_path / "run")]
        assert subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=env).stdout == f"{want}\n"


def test_fresh_deletes_only_runs(tmp_path):
    config = default.get_config()
    config.run_dir = str(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(base.InputError, match="no run folder"):
        present.open_folder(config, name="x", fresh=True)
    assert (tmp_path / "thesis.tex").exists()


SCORES = {"success": 0.25, "invalid": 0.5, "response_tokens": 3.0, "gain": 0.4, "gain_turns": 9.0, "perplexity": 8.0}
RESULTS = {
    "before": SCORES | {"filler_correct": float("nan")},
    "after": SCORES | {"success": 0.75, "perplexity": 10.0, "filler_correct": 1.0},
    "intervals": {"before": {"success": [0.2, 0.3]}, "after": {"success": [0.7, float("nan")]}},
    "ledger": {"tokens": {"generated": 70}, "seconds": {"generate": 1.5, "train": 2.0}},
    "digest": "abc",
}


def test_the_json_line(tmp_path):
    line = present.line(present.store(tmp_path, RESULTS), tmp_path)
    keys = "success_before success_after return_before return_after invalid_before invalid_after filler_correct_after "
    keys += "length_before length_after perplexity_ratio hint_gain generated_tokens wall_s run_dir digest"
    assert list(line) == keys.split()
    assert line["success_after"] == 0.75 and line["hint_gain"] == 0.4 and line["wall_s"] == 3.5
    assert line["perplexity_ratio"] == 1.25 and line["generated_tokens"] == 70
    assert present.finished(tmp_path)["digest"] == "abc"
    bare = present.line({"ledger": RESULTS["ledger"]}, tmp_path)
    assert bare["success_before"] is None and bare["perplexity_ratio"] is None


def test_the_headline(tmp_path, capsys):
    rows = {row.name: row for row in present.headline(present.store(tmp_path, RESULTS), 64)}
    assert rows["success"].before_interval == (0.2, 0.3) and rows["success"].after_interval is None
    assert rows["success"].samples == 64 and rows["hint gain"].samples == 9
    assert rows["filler turns answered correctly"].before is None
    assert "words per response" not in rows
    present.table(list(rows.values()), "t")
    assert "0.2 to 0.3" in capsys.readouterr().out


def test_a_stopped_run_shows_its_latest_evaluation():
    rows = present.headline({"before": SCORES, "latest": SCORES | {"success": 0.5}}, 64)
    assert (rows[0].name, rows[0].before, rows[0].after) == ("success", 0.25, 0.5)


def transcript(score: float, length: int) -> base.Transcript:
    return base.Transcript(0, 0, turns=[base.TurnRecord([], "", 0, length, 0, base.STOP, reward=score)])


def test_intervals_are_the_textbook_ones_for_one_turn_per_episode():
    lengths = np.random.default_rng(0).integers(1, 50, evaluate.BLOCKS)
    found = evaluate.intervals([transcript(0.0, int(n)) for n in lengths], lambda _: {"success": 0.0})
    half = 1.959964 * lengths.std(ddof=1) / np.sqrt(len(lengths))
    assert np.allclose(found["response_tokens"], (lengths.mean() - half, lengths.mean() + half))
    assert np.allclose(found["success"], evaluate.interval(0.0, len(lengths)))
    assert evaluate.intervals([transcript(0.0, 1)], lambda _: {}) == {}


def test_the_interval_of_a_share_is_wilsons():
    scores = [1.0] * 150 + [0.0] * 50
    np.random.default_rng(1).shuffle(scores)
    made = [transcript(score, 1) for score in scores]
    low, high = evaluate.intervals(made, lambda t: {"success": float(np.mean([x.score for x in t]))})["success"]
    assert np.allclose((low, high), evaluate.interval(0.75, 200), atol=0.02)


def test_samples_read_back_as_written(tmp_path):
    segments = [report.TraceSegment(0, 1, "prompt"), report.TraceSegment(1, 2, "action", 0.5, "env")]
    insert = report.TraceInsert(1, "say less", "long_answer", 1, 2, 0.0)
    nan = float("nan")
    one = report.TraceTokens(
        "t", ["a", "b", "c"], segments, [0.0, 1.0, nan], [nan, 0.5, 0.25], (), (), [insert], " ", {"g": 1}
    )
    samples.write(tmp_path, "x", [one])
    (back,) = samples.read(tmp_path, "x")
    assert repr(back) == repr(one).replace("teacher_prob=()", "teacher_prob=[]").replace("entropy=()", "entropy=[]")
    assert samples.read(tmp_path, "y") == []


def test_the_profile_traces_a_few_steps_of_each_stage(monkeypatch):
    calls = []
    monkeypatch.setattr(loop.jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(loop.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    with loop.Profile(pathlib.Path("x")) as profile:
        for steps in (1, 4, 9):
            profile.stage()
            for _ in range(steps):
                profile.step()
        assert calls == ["start", "stop", "start", "stop"]
    with loop.Profile(None) as off:
        for _ in range(9):
            off.step()
    assert calls == ["start", "stop", "start", "stop"]


def tiny(folder: pathlib.Path):
    config = default.get_config()
    config.run_dir = str(folder)
    config.env.tool_calls.horizon = 8
    config.rollout.update(capacity=96, slots=8)
    config.lm.update(updates=2, batch_rows=8, row_tokens=128)
    config.rl.update(updates=3, groups=4, group_size=2)
    config.evaluation.update(episodes=8, final_episodes=8, every=2, samples=2)
    config.archive.update(every=2, rollouts=3)
    config.model.update(width=16, layers=1, heads=2, kv_heads=2, head_size=8, ffn=16)
    return config


DIAGNOSTICS = """
    credit/frac_zero_adv credit/zero_variance_groups credit/singleton_groups credit/std_floor_groups credit/masked_rows
    credit/hint_coverage clip_fraction clip_fraction_high ratio_p01 ratio_p50 ratio_p99 ratio_max ess approx_kl entropy
    entropy_top feedback/delta response_tokens rollout_tokens kept_mass
"""


def assert_diagnosed(lines):
    """Every RL step logs what a run is judged by, and every metric stands in a panel that says what it is about."""
    for line in lines:
        assert all(np.isfinite(line[name]) for name in DIAGNOSTICS.split())
        assert line["ratio_p01"] <= line["ratio_p50"] <= line["ratio_p99"] <= line["ratio_max"] * (1 + 1e-6)
        assert line["entropy_top"] >= line["entropy"] > 0 and line["kept_mass"] == 1
        assert 1 <= line["response_tokens"] <= line["rollout_tokens"]
        assert "feedback/located_precision" in line or not line["feedback/located"]
    assert any("feedback/located_precision" in line for line in lines)
    titles = [title for title, _ in curves.panels(curves.from_lines(lines))]
    assert curves.OTHER not in titles


@pytest.fixture
def kept_programs(tmp_path):
    """What a test compiles twice is compiled once."""

    def configure(values):
        compilation_cache.reset_cache()  # jax asks only once whether there is a cache
        for name, value in values.items():
            jax.config.update(name, value)

    wanted = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path / "programs")}
    wanted["jax_persistent_cache_min_compile_time_secs"] = 0.1
    before = {name: getattr(jax.config, name) for name in wanted}
    configure(wanted)
    yield
    configure(before)


@pytest.mark.usefixtures("kept_programs")
def test_T47_a_tiny_run_is_stopped_and_continued_to_the_same_bits(tmp_path, monkeypatch):
    config = tiny(tmp_path / "struck")
    one_device = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(setup.sharding, "make_mesh", one_device)  # eight virtual ones take turns on the cores
    folder = present.open_folder(config, name="tiny")
    step = rl.Trainer.step

    def struck(self, state, i):
        if i == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, state, i)

    monkeypatch.setattr(rl.Trainer, "step", struck)
    with pytest.raises(train.Stopped, match="SIGTERM: saved at rl step 2"):
        train.run(config, folder, defaults=default.get_config())
    assert "Not finished: SIGTERM" in (folder / "report.html").read_text()
    assert {file.name for file in (folder / "samples").iterdir()} == {
        "before.json", "after.json", "first_hinted.json", "last.json"
    }  # fmt: skip
    assert "updates: task" in samples.read(folder, samples.AFTER)[0].title
    monkeypatch.setattr(rl.Trainer, "step", step)
    results = train.run(config, folder, defaults=default.get_config())
    assert {"before", "after", "intervals", "ledger", "digest", "parity"} <= set(results)
    line = present.line(present.store(folder, results), folder)
    assert line["success_before"] is not None and line["generated_tokens"] > 0 and len(line["digest"]) == 64
    assert present.finished(folder)["digest"] == line["digest"]
    alone = tiny(tmp_path / "alone")
    unbroken = train.run(alone, present.open_folder(alone, name="tiny"), defaults=default.get_config())
    assert unbroken["digest"] == line["digest"]
    page = (folder / "report.html").read_text()
    assert "Not finished" not in page and "reminder tools" in page
    before, after = (samples.read(folder, name) for name in (samples.BEFORE, samples.AFTER))
    assert [one.title for one in before] == ["before: task 1000003", "before: task 1000004"]
    assert [one.title for one in after] == ["after: task 1000003", "after: task 1000004"]
    (hinted, *_) = samples.read(folder, samples.FIRST_HINTED)
    insert = hinted.inserts[0]
    assert insert.text.startswith("reminder tools")
    teacher = hinted.teacher_prob[insert.span_start : insert.span_start + insert.span_length]
    assert all(0 < value <= 1 for value in teacher)
    assert samples.read(folder, samples.LAST)[0].title.startswith("training batch 3,")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    heard = [line for line in lines if line.get("feedback/located")]
    names = ("feedback/teacher_right", "feedback/student_right")
    assert heard and all(0 <= line[name] <= 1 for line in heard for name in names)
    assert_diagnosed([line for line in lines if line["stage"] == "rl"])
    archive = store.Archive(folder / "rollouts")
    assert archive.steps() == [3, 5] and archive.read(["tokens_BT"], 5)["tokens_BT"].shape[0] == 3
    assert archive.transcripts(3)[0]["turns"][0]["text"] is not None
