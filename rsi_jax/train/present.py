"""How a run presents itself: its folder, the headline before and after, the JSON line, the report."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from rsi_jax import base, metrics, report
from rsi_jax.report import page
from rsi_jax.train import samples

CONFIG_FILE, RESULTS_FILE, LOCK_FILE = "config.json", "results.json", "lock"
COMPILED_FOLDER = ".compiled"
# Fields of config.lm that say how to train; the others say on what demonstrations.
LM_KNOBS = ("updates", "batch_rows", "row_tokens", "lr", "warmup", "schedule", "clip", "weight_decay", "data", "path")


@dataclasses.dataclass(frozen=True)
class Measure:
    """One line of the headline: the scalar of an evaluation, its name for people, which direction is better."""

    key: str
    name: str
    better: str = ""
    note: str = ""


MEASURES = (
    Measure("success", "success", "higher", "share of episodes"),
    Measure("score", "benchmark score", "higher", "0 = its minimum, 50 = the mean of its data, 100 = its maximum"),
    Measure("illegal", "illegal actions", "lower", "share of the actions"),
    Measure("invalid", "invalid calls", "lower", "share of the turns that need a tool"),
    Measure("filler_correct", "filler turns answered correctly", "higher", "collateral damage shows here"),
    Measure("return", "return", "higher"),
    Measure("response_tokens", "tokens per response"),
    Measure("words", "words per response"),
    Measure("ended", "responses that end within their budget", "higher"),
    Measure("perplexity", "perplexity of the watched text", "lower"),
    Measure("gain", "hint gain", "", "hinted less irrelevant hint of the same length, at located turns"),
)


def digest(config: Any) -> str:
    """Names an effective config: 8 hex digits over every field but run_dir."""
    fields = metrics.jsonable(config.to_dict()) | {"run_dir": ""}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


@contextlib.contextmanager
def lock(folder: pathlib.Path) -> Iterator[None]:
    """Holds the run folder: one process writes a run. The lock goes with the process, however it ends.

    Raises: base.InputError when another process holds it.
    """
    with (folder / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise base.InputError(
                f"{folder} is being written by process {file.read().strip()}: wait for it or stop it, or choose "
                "another --run_dir"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def open_folder(config: Any, *, name: str, fresh: bool = False) -> pathlib.Path:
    """Makes or finds the run's folder and writes the effective config into it.

    name: of the config, for the default folder runs/<name>-<digest>. fresh: delete what is there.
    Raises: base.InputError when the folder holds a run of another config, is being written by another process, or is
      none of a run and would be deleted.
    """
    folder = pathlib.Path(config.run_dir or f"runs/{name}-{digest(config)}")
    if folder.exists() and not folder.is_dir():
        raise base.InputError(f"run_dir={str(folder)!r} is a file: choose a folder")
    if fresh and folder.is_dir():
        if not (folder / CONFIG_FILE).is_file() and any(folder.iterdir()):
            raise base.InputError(f"--fresh: {folder} is no run folder (it has no {CONFIG_FILE}); delete it yourself")
        with lock(folder):
            shutil.rmtree(folder)
    effective = metrics.jsonable(config.to_dict())
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder):
        if (folder / "checkpoints").is_dir() or (folder / RESULTS_FILE).is_file():
            changed = _changed(_read_json(folder / CONFIG_FILE), effective)
            if changed:
                raise base.InputError(
                    f"{folder} holds a run of another config ({', '.join(changed[:3])}): choose another --run_dir, "
                    "or --fresh to start anew"
                )
        _write_json(folder / CONFIG_FILE, effective)
    return folder


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names the fields in which two configs differ, run_dir aside."""
    before, after = page.flatten(old), page.flatten(new)
    names = [name for name in before | after if name != "run_dir" and before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}" for name in names]


def keep_compiled(folder: pathlib.Path) -> None:
    """Keeps compiled programs beside the run folder, for a run that continues and for others of the same shapes.

    JAX's own setting (JAX_COMPILATION_CACHE_DIR) wins. A program read back is the same program: the same bits.
    """
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(folder.absolute().parent / COMPILED_FOLDER))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def finished(folder: pathlib.Path) -> dict[str, Any] | None:
    """Reads the results of a run that came to its end; None before."""
    return _read_json(folder / RESULTS_FILE) if (folder / RESULTS_FILE).is_file() else None


def store(folder: pathlib.Path, results: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the results, so that the same command prints them again; returns them as they read back."""
    _write_json(folder / RESULTS_FILE, metrics.jsonable(results))
    return _read_json(folder / RESULTS_FILE)


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise base.InputError(f"{path} cannot be read ({error}): put back a copy, or use --fresh") from error


def _write_json(path: pathlib.Path, value: Any) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def headline(results: Mapping[str, Any], episodes: int) -> list[report.SummaryRow]:
    """Lists what was measured before and after RL, with 95% intervals where there are some.

    A run that was stopped has its latest evaluation during training as `latest`, and no interval for it.
    """
    before, after = results.get("before") or {}, results.get("after") or results.get("latest") or {}
    intervals = results.get("intervals") or {}
    rows = []
    for measure in MEASURES:
        pair = [scores.get(measure.key) for scores in (before, after)]
        if all(value is None or value != value for value in pair):
            continue
        counts = [scores.get("gain_turns") or 0 for scores in (before, after) if measure.key == "gain"]
        rows.append(
            report.SummaryRow(
                measure.name,
                *pair,
                better=measure.better,
                before_interval=_interval(intervals, "before", measure.key),
                after_interval=_interval(intervals, "after", measure.key) if results.get("after") else None,
                samples=int(min(counts, default=episodes)) if measure.key != "perplexity" else None,
                note=measure.note,
            )
        )
    return rows


def _interval(intervals: Mapping[str, Any], when: str, key: str) -> tuple[float, float] | None:
    found = intervals.get(when, {}).get(key)
    return None if found is None or None in found else (found[0], found[1])


def table(rows: list[report.SummaryRow], title: str) -> None:
    """Prints the headline for people."""

    def span(interval: tuple[float, float] | None) -> str:
        return "" if interval is None else f"{metrics.number(interval[0])} to {metrics.number(interval[1])}"

    cells = [(r.name, r.before, span(r.before_interval), r.after, span(r.after_interval), r.samples) for r in rows]
    metrics.table(title, ("measure", "before", "95% interval", "after", "95% interval", "n"), cells)


def line(results: Mapping[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """The JSON line of experiments.train; null where a task has no such measure."""
    before, after = results.get("before") or {}, results.get("after") or {}
    ledger = results["ledger"]
    first, last = (scores.get("perplexity") for scores in (before, after))
    return {
        "success_before": before.get("success"),
        "success_after": after.get("success"),
        "return_before": before.get("return"),
        "return_after": after.get("return"),
        "invalid_before": before.get("invalid"),
        "invalid_after": after.get("invalid"),
        "filler_correct_after": after.get("filler_correct"),
        "length_before": before.get("response_tokens"),
        "length_after": after.get("response_tokens"),
        "perplexity_ratio": last / first if first and last else None,
        "hint_gain": before.get("gain"),
        "generated_tokens": ledger["tokens"]["generated"],
        "wall_s": round(sum(ledger["seconds"].values()), 1),
        "run_dir": str(folder),
        "digest": results.get("digest"),
    }


def intro(config: Any, status: str = "") -> str:
    """Says in a paragraph what was run, the warm-up's demonstrations included."""
    parts = [status] if status else []
    if "lm" in config.stages:
        k = config.lm
        parts.append(f"Warm-up: {k.updates} updates of {k.batch_rows} x {k.row_tokens} tokens.")
        if k.data == "demonstrations":
            knobs = ", ".join(f"{name} = {value}" for name, value in k.items() if name not in LM_KNOBS)
            wander = config.env[config.env.name].get("wander", 0.0)
            kind = f"a share {wander:g} of whose actions is random" if wander else "all of them correct"
            parts.append(f"Its data are demonstrations, {kind}; of lengths and kinds ({knobs}).")
        else:
            parts.append(f"Its data: {k.path}.")
    if "rl" in config.stages:
        hint = f", hint '{config.feedback.hint}', teacher '{config.feedback.teacher}'" if config.feedback.rules else ""
        parts.append(
            f"RL: at most {config.rl.updates} batches of {config.rl.groups} x {config.rl.group_size} rollouts, "
            f"credit '{config.credit.name}'{hint}."
        )
        parts.append("Before and after are measured without hints, on the same tasks.")
    return " ".join(parts)


def write_report(
    folder: pathlib.Path,
    config: Any,
    results: Mapping[str, Any],
    ledger: Mapping[str, Any],
    *,
    defaults: Any = None,
    status: str = "",
) -> pathlib.Path:
    """Writes <folder>/report.html from the results so far, the metrics file and the kept samples.

    defaults: the config whose values are usual. status: how the run ended, unless well.
    """
    before, after = (samples.read(folder, name) for name in (samples.BEFORE, samples.AFTER))
    return report.write_report(
        folder,
        title=f"{folder.name}: {config.env.name}",
        intro=intro(config, status),
        summary=headline(results, config.evaluation.final_episodes),
        transcripts=[*samples.read(folder, samples.LAST), *samples.read(folder, samples.FIRST_HINTED)],
        pairs=list(zip(before, after, strict=False)),
        config=config,
        defaults=defaults,
        environment=report.environment(devices=jax.devices()),
        ledger=ledger,
    )
