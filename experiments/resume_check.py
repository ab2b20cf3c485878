"""Kills a training run at random moments, starts it again, and compares it bit by bit with runs left alone.

python -m experiments.resume_check --config=configs/resume_check.py --kills=20

Three uninterrupted runs come first: one that compiles, then two side by side, as trials are, that read what it has
compiled. They must agree, and the time of the two is what the kills are drawn from, uniformly, start-up included. Of
every five trials three take one kill -9, one takes two to four of them, and one takes a SIGTERM (after which the run
must end with code 0) and a kill -9. Each trial starts the same command again until it
ends. Compared: the digest of the final state, the newest checkpoint of every stage, metrics.jsonl but its `time/`
fields, and the archived rollouts with their transcripts. Flags that begin with --config go to every run as they stand.

The last line of stdout is JSON: kills (trials that were struck), bitwise_equal (those that ended as the uninterrupted
run), signals (delivered in all), sigterms, in_startup (signals before the first line of metrics.jsonl), alone_s
(seconds of an uninterrupted run), differences (by trial).
Exit code 0 when all are equal, 1 when not.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import cli

FLAGS = cli.Flags()
KILLS = FLAGS.integer("kills", 20, "Trials; each is struck at least once.", lower_bound=1)
SEED = FLAGS.integer("seed", 0, "Seed of the moments of the kills; the run's own is --config.seed.")
PARALLEL = FLAGS.integer("parallel", 2, "Trials at a time.", lower_bound=1)
cli.config_file()

# Fresh attempts of a trial whose run ended before its first kill.
ATTEMPTS = 8
# Seconds that an uninterrupted run may take; the others may take 20 times what it took.
LONGEST = 4 * 3600.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished run leaves.

    digest: of the final state. checkpoints: {stage: 'step digest' of its newest}. metrics: lines without wall-clock
    fields. rollouts: {step: digest of its columns and transcripts}.
    """

    digest: str
    checkpoints: Mapping[Any, str]
    metrics: Sequence[Mapping[str, Any]]
    rollouts: Mapping[Any, str]


def differences(wanted: Outcome, found: Outcome) -> list[str]:
    """Names what differs between two outcomes, a short line each; empty = bitwise equal."""
    lines = []
    if wanted.digest != found.digest:
        lines.append("final state")
    for name, ours, theirs in (
        ("checkpoints", wanted.checkpoints, found.checkpoints),
        ("rollouts of step", wanted.rollouts, found.rollouts),
    ):
        lines += [f"{name} {key}" for key in [*ours, *theirs] if ours.get(key) != theirs.get(key)]
    if len(wanted.metrics) != len(found.metrics):
        lines.append(f"metrics.jsonl has {len(found.metrics)} lines, not {len(wanted.metrics)}")
    for number, (ours, theirs) in enumerate(zip(wanted.metrics, found.metrics, strict=False), 1):
        fields = [name for name in [*ours, *theirs] if _text(ours.get(name)) != _text(theirs.get(name))]
        if fields:
            lines.append(f"metrics.jsonl line {number}: {', '.join(dict.fromkeys(fields))}")
            break
    return list(dict.fromkeys(lines))


def _text(value: Any) -> str:
    """JSON text, so that NaN equals NaN and 1 differs from 1.0."""
    return json.dumps(value, sort_keys=True)


def read_outcome(folder: pathlib.Path, digest: str) -> Outcome:
    """Reads what a finished run left in its folder."""
    from rsi_jax import checkpoint, metrics, store

    checkpoints = {}
    for stage in sorted((folder / "checkpoints").iterdir()):
        saved = checkpoint.Checkpoints(stage)
        if (step := saved.latest_step()) is not None:
            checkpoints[stage.name] = f"{step} {saved.digest(step)}"
    lines, _ = metrics.read_lines(folder / "metrics.jsonl")
    archive = store.Archive(folder / "rollouts")
    rollouts = {step: _rollouts_digest(archive, step) for step in archive.steps()}
    return Outcome(digest, checkpoints, [metrics.without_time(line) for line in lines], rollouts)


def _rollouts_digest(archive: Any, step: int) -> str:
    total = hashlib.sha256()
    for name, column in sorted(archive.read(archive.columns(step), step).items()):
        total.update(f"{name} {column.dtype} {column.shape}".encode() + column.tobytes())
    total.update(_text(archive.transcripts(step)).encode())
    return total.hexdigest()


def plan(seed: int, trial: int, attempt: int, seconds: float) -> list[tuple[signal.Signals, float]]:
    """Draws the strikes of a trial: (signal, seconds after the start), each uniform over an uninterrupted run."""
    rng = random.Random(f"resume/{seed}/{trial}/{attempt}")
    signals = [signal.SIGKILL]
    if trial % 5 == 3:
        signals *= rng.randint(2, 4)
    if trial % 5 == 4:
        signals = [signal.SIGTERM, signal.SIGKILL]
    return [(number, rng.uniform(0, seconds)) for number in signals]


class Strike(NamedTuple):
    """A delivered signal, seconds after its start, and the lines of metrics.jsonl by then (0: in start-up)."""

    signal: signal.Signals
    seconds: float
    lines: int


@dataclasses.dataclass
class Trial:
    """What happened in one trial."""

    number: int
    strikes: list[Strike]
    seconds: float
    differences: list[str]


class Runner:
    """Starts the command and, whatever happens, leaves none of its processes behind."""

    def __init__(self, command: Sequence[str], root: pathlib.Path):
        self.command, self.root = list(command), root
        self.seconds = 0.0
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._closed = False

    def start(self, folder: pathlib.Path) -> subprocess.Popen:
        """Starts the run in its own process group, its output beside its folder."""
        with self._lock, folder.with_suffix(".out").open("w") as out, folder.with_suffix(".err").open("a") as err:
            if self._closed:
                raise RuntimeError("the check was stopped")
            process = subprocess.Popen(
                [*self.command, f"--run_dir={folder}"], stdout=out, stderr=err, start_new_session=True
            )
            self._running.add(process)
        return process

    def wait(self, process: subprocess.Popen, seconds: float | None = None) -> int | None:
        """Waits for the end; returns the exit code, or None when it is still running after `seconds`."""
        limit = LONGEST if not self.seconds else max(60.0, 20 * self.seconds)
        try:
            code = process.wait(limit if seconds is None else seconds)
        except subprocess.TimeoutExpired:
            if seconds is None:
                self.kill(process)
                raise RuntimeError(f"a run did not end in {limit:.0f} s") from None
            return None
        with self._lock:
            self._running.discard(process)
        return code

    def kill(self, process: subprocess.Popen) -> None:
        """kill -9 of the run and its helpers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._running.discard(process)

    def close(self) -> None:
        """Kills what still runs; nothing starts any more."""
        with self._lock:
            self._closed, running = True, list(self._running)
        for process in running:
            self.kill(process)

    def read(self, folder: pathlib.Path, code: int | None) -> Outcome | None:
        """The outcome of a run that exited with a code; None when it stopped before its end.

        Raises: RuntimeError with the end of its messages when it failed.
        """
        if code:
            tail = folder.with_suffix(".err").read_text(errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"a run ended with code {code}: {' | '.join(tail)}")
        lines = folder.with_suffix(".out").read_text().splitlines()
        try:
            digest = json.loads(lines[-1])["digest"]
        except (IndexError, ValueError, KeyError, TypeError):
            return None
        return read_outcome(folder, digest)

    def alone(self, name: str) -> tuple[Outcome, float]:
        """An uninterrupted run: (outcome, seconds)."""
        began = time.monotonic()
        outcome = self.read(self.root / name, self.wait(self.start(self.root / name)))
        if outcome is None:
            raise RuntimeError("an uninterrupted run printed no JSON line with `digest`")
        return outcome, time.monotonic() - began

    def strike(self, folder: pathlib.Path, number: signal.Signals, delay: float) -> int | None:
        """Starts the run and strikes it after `delay` seconds: None, or the exit code when it had ended by then."""
        process = self.start(folder)
        code = self.wait(process, delay)
        if code is not None:
            return code
        if number == signal.SIGKILL:
            self.kill(process)
            return None
        process.send_signal(number)
        code = self.wait(process)
        if code not in (0, -number):  # before Python handles signals, SIGTERM just ends it
            raise RuntimeError(f"a run ended with code {code} after {number.name}, not 0")
        return None

    def pursue(self, seed: int, number: int, folder: pathlib.Path, strikes: list[Strike]) -> Outcome | None:
        """Strikes a run from an empty folder and starts it again to its end; fills `strikes`.

        A run that ends before its first strike is done again with other moments.
        """
        for attempt in range(ATTEMPTS):
            shutil.rmtree(folder, ignore_errors=True)
            for name, delay in plan(seed, number, attempt, self.seconds):
                code = self.strike(folder, name, delay)
                if code is not None:
                    break
                strikes.append(Strike(name, delay, _lines(folder)))
            else:
                return self.read(folder, self.wait(self.start(folder)))
            if strikes or code:
                return self.read(folder, code)
        raise RuntimeError(f"{ATTEMPTS} runs ended before they could be struck")

    def trial(self, seed: int, number: int, wanted: Outcome) -> Trial:
        """One trial, judged."""
        began, strikes, folder = time.monotonic(), [], self.root / f"trial{number}"
        try:
            found = self.pursue(seed, number, folder, strikes)
            faults = ["it printed no digest"] if found is None else differences(wanted, found)
        except (RuntimeError, ValueError, OSError) as error:
            faults = [cli.one_line(error)]
        if not faults:
            shutil.rmtree(folder, ignore_errors=True)
        return Trial(number, strikes, time.monotonic() - began, faults)


def _lines(folder: pathlib.Path) -> int:
    """Whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def check(runner: Runner, kills: int, seed: int, parallel: int) -> tuple[list[Trial], list[str]]:
    """Runs it all: (the trials, what differs between the uninterrupted runs)."""
    from rsi_jax import metrics

    with concurrent.futures.ThreadPoolExecutor(max(2, parallel)) as pool, metrics.Progress() as progress:
        try:
            progress.stage("uninterrupted", 3)
            wanted, _ = runner.alone("alone0")
            (again, first), (more, second) = pool.map(runner.alone, ("alone1", "alone2"))
            runner.seconds = (first + second) / 2
            progress.stage("trials", kills)
            slots = threading.Semaphore(parallel)

            def one(number: int) -> Trial:
                with slots:
                    return runner.trial(seed, number, wanted)

            trials = []
            for future in concurrent.futures.as_completed([pool.submit(one, number) for number in range(kills)]):
                trials.append(future.result())
                bad = sum(bool(trial.differences) for trial in trials)
                progress.update(len(trials), note=f"{bad} differ")
        finally:
            runner.close()
    return sorted(trials, key=lambda trial: trial.number), differences(wanted, again) or differences(wanted, more)


def _edited() -> float:
    """When the sources that a run imports were last changed."""
    here = pathlib.Path(__file__).resolve().parents[1]
    folders = ("rsi_jax", "kernels", "configs", "experiments")
    return max(path.stat().st_mtime for folder in folders for path in (here / folder).rglob("*.py"))


def main(argv: list[str]) -> None:
    """Runs the check and reports."""
    del argv
    from rsi_jax import metrics

    root = pathlib.Path(tempfile.mkdtemp(prefix="resume_check_"))
    arguments = [argument for argument in sys.argv[1:] if argument.startswith(("--config", "-config"))]
    runner = Runner([sys.executable, "-m", "experiments.train", *arguments], root)
    edited = _edited()
    try:
        trials, control = check(runner, KILLS.value, SEED.value, PARALLEL.value)
    except RuntimeError as error:
        cli.fail(f"{error}; its output is in {root}", 1)
    rows = [
        [
            trial.number,
            ", ".join(f"{s.signal.name} at {s.seconds:.1f} s, line {s.lines}" for s in trial.strikes) or "none",
            f"{trial.seconds:.0f} s",
            "; ".join(trial.differences) or "bitwise equal",
        ]
        for trial in trials
    ]
    metrics.table(
        f"Runs killed and resumed ({runner.seconds:.0f} s uninterrupted)", ["trial", "struck", "took", "result"], rows
    )
    struck = [trial for trial in trials if trial.strikes]
    faults = {str(trial.number): trial.differences for trial in trials if trial.differences}
    faults |= {"uninterrupted": control} if control else {}
    faults |= {"sources": ["edited during the check: run it again"]} if _edited() != edited else {}
    if not faults:
        shutil.rmtree(root)
    else:
        print(f"folders of the trials that differ: {root}", file=sys.stderr)
    strikes = [strike for trial in trials for strike in trial.strikes]
    metrics.finish(
        {
            "kills": len(struck),
            "bitwise_equal": sum(not trial.differences for trial in struck),
            "signals": len(strikes),
            "sigterms": sum(strike.signal == signal.SIGTERM for strike in strikes),
            "in_startup": sum(strike.lines == 0 for strike in strikes),
            "alone_s": round(runner.seconds, 1),
            "differences": faults,
        }
    )
    if faults:
        sys.exit(1)


if __name__ == "__main__":
    cli.run(main, FLAGS)
