"""A sweep: units (a config, overrides, a seed), each run once as a process; their rows. See `experiments.launch`."""

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from absl import flags
from ml_collections.config_flags import config_flags

from experiments import board, cli, processes

PATIENCE = 120.0  # seconds in which a run that is asked to stop must have saved


@dataclasses.dataclass(frozen=True, eq=False)
class Unit:
    """One run. fields: of its row, besides those of every row. minutes: it may take, for the time left; 0 = not said.

    after: units that must be done before it starts, such as its warm-up. late: more overrides, asked for when it
    starts, since they depend on the rows of others; the digest holds none of them.
    """

    name: str
    config: str
    overrides: tuple[str, ...]
    seed: int
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    minutes: float = 0.0
    after: "tuple[Unit, ...]" = ()
    late: Callable[[], Sequence[str]] = tuple

    @functools.cached_property
    def digest(self) -> str:
        """Names the effective config, the seed in it: 16 hex digits."""
        return digest(self.config, (*self.overrides, f"seed={self.seed}"))


@dataclasses.dataclass(frozen=True)
class Sweep:
    """How units are run. results: the file of rows. folder: of the runs and their logs.

    jobs: at a time, `cores` each. memory_gib: of all together. unit_gib: what one may take. retries: after a failure
    that is no result. command(unit, folder) -> argv. read(unit, folder) -> the fields of its row that it measured, or
    None when the run did not come to its end. poll: seconds between looks. runs: whether anything is started.
    """

    results: pathlib.Path
    folder: pathlib.Path
    jobs: int = 1
    cores: int = 1
    memory_gib: float = 4.0
    unit_gib: float = 2.0
    retries: int = 2
    command: Callable[[Unit, pathlib.Path], list[str]] = lambda unit, folder: train_command(unit, folder)
    read: Callable[[Unit, pathlib.Path], Mapping[str, Any] | None] = lambda unit, folder: printed(folder)
    poll: float = 0.5
    runs: bool = True

    def place(self, unit: Unit) -> pathlib.Path:
        """The run folder of a unit."""
        return self.folder / f"{unit.name.replace('/', '-')}-{unit.digest[:8]}"


class SweepFlags:
    """The flags of every command that runs a sweep, beside its own; `.sweep(...)` makes what they ask for."""

    def __init__(self, own: cli.Flags):
        self._results = own.string(
            "results", "", "rows, appended as runs end (default: experiments/results/<name>.jsonl)"
        )
        self._folder = own.string("folder", "", "where the runs go (default: runs/<name>)")
        self._jobs = own.integer("jobs", 0, "runs at a time; 0 = as many as there are cores for", lower_bound=0)
        self._cores = own.integer("cores", 1, "cores of a run", lower_bound=1)
        self._memory = own.float("memory_gib", 0.0, "memory of all runs together; 0 = what is free at the start")
        self._unit = own.float("unit_gib", 2.0, "memory that a run may take, until one has shown more")
        self._run = own.boolean("run", True, "run what has no row yet; --norun: sum up the rows there are")
        self._retries = own.integer("retries", 2, "tries of a run after a failure that is no result", lower_bound=0)

    def sweep(self, name: str, **parts: Any) -> Sweep:
        """The sweep of this name, its folders made. parts: further fields. Raises: base.InputError."""
        from rsi_jax import base

        mine = len(os.sched_getaffinity(0))
        jobs = self._jobs.value or max(1, mine // self._cores.value)
        if jobs * self._cores.value > mine:
            raise base.InputError(
                f"--jobs={jobs} with --cores={self._cores.value} each: this process may use {mine} cores"
            )
        results = pathlib.Path(self._results.value or f"experiments/results/{name}.jsonl")
        folder = pathlib.Path(self._folder.value or f"runs/{name}")
        budget = {"jobs": jobs, "cores": self._cores.value, "retries": self._retries.value, "runs": self._run.value}
        memory = {"memory_gib": self._memory.value or processes.available_gib(), "unit_gib": self._unit.value}
        return Sweep(results, folder, **budget, **memory, **parts)


def effective(config: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The config of a file with overrides 'x.y=value', as its run will see it. Raises: base.InputError."""
    from rsi_jax import base

    argv, values = ["", f"--config={config}", *(f"--config.{one}" for one in overrides)], flags.FlagValues()
    try:
        fault = cli.misspelt(argv, config_flags.ConfigFileFlagParser("config").parse(config))
        if not fault:
            config_flags.DEFINE_config_file("config", lock_config=True, flag_values=values, sys_argv=argv)
            values(argv)
            return values["config"].value.to_dict()
    except (flags.Error, AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise base.InputError(f"{config} with {' '.join(overrides)}: {error}") from error
    raise base.InputError(fault)


def digest(config: str, overrides: Sequence[str]) -> str:
    """Names an effective config: 16 hex digits over every field but run_dir."""
    from rsi_jax import metrics

    fields = metrics.jsonable(effective(config, overrides)) | {"run_dir": ""}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def short(override: str) -> str:
    """An override by the last part of its field: 'rl.lr=0.5' is 'lr=0.5'."""
    field, equals, value = override.partition("=")
    return field.rpartition(".")[2] + equals + value


def train_command(unit: Unit, folder: pathlib.Path) -> list[str]:
    """The training of a unit in its folder; the seed is the sweep's, whatever fields are set."""
    app = [sys.executable, "-m", "experiments.train", f"--config={unit.config}", f"--run_dir={folder}"]
    return [*app, *(f"--config.{one}" for one in (*unit.overrides, *unit.late(), f"seed={unit.seed}"))]


def beside(folder: pathlib.Path, ending: str) -> pathlib.Path:
    """The file of a run's output: 'out' its stdout of the last try, 'log' its stderr of all."""
    return folder.with_name(f"{folder.name}.{ending}")


def printed(folder: pathlib.Path) -> Mapping[str, Any] | None:
    """The JSON line that ends a run's stdout; None without one (it was stopped)."""
    lines = beside(folder, "out").read_text().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None


def append(results: pathlib.Path, row: Mapping[str, Any]) -> None:
    """Adds a row: one write, on disk when this returns. A torn line that a full disk left before it is cut off."""
    from rsi_jax import metrics

    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(metrics.jsonable(row)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def commit() -> str:
    """The revision that runs now, 8 digits, with a '+' where files have changed since; 'none' without git."""
    from rsi_jax import report

    about = report.environment(packages=())
    return (about["revision"] or "none")[:8] + ("+" if about["changed_files"] else "")


def rows_of(results: pathlib.Path, units: Sequence[Unit]) -> list[dict[str, Any]]:
    """The rows of these units, in their order."""
    found = {row["digest"]: row for row in cli.read_rows(results) if "digest" in row}
    return [found[unit.digest] for unit in units if unit.digest in found]


def complaint(log: pathlib.Path) -> str:
    """What was wrong, as a run said in the last line that it wrote; '' when it crashed instead (a traceback)."""
    last = log.read_text(errors="replace").strip().rpartition("\n")[2]
    return last.removeprefix("error: ") if last.startswith("error: ") else ""


@contextmanager
def _alone(folder: pathlib.Path) -> Iterator[None]:
    """Holds the folder of a sweep; the lock goes with the process. Raises: base.InputError when another holds it."""
    from rsi_jax import base

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise base.InputError(
                f"another process runs a sweep in {folder}: wait for it, or choose another --folder"
            ) from error
        yield


class Runner:
    """A sweep while it runs."""

    def __init__(self, sweep: Sweep, units: Sequence[Unit], done: int = 0):
        finished = {row.get("digest") for row in cli.read_rows(sweep.results)}
        cores = sorted(os.sched_getaffinity(0))
        self.waiting = [unit for unit in units if unit.digest not in finished]
        self.sweep, self.total, self.done = sweep, done + len(units), done + len(units) - len(self.waiting)
        self.free = [cores[i * sweep.cores : (i + 1) * sweep.cores] for i in range(sweep.jobs)]
        self.running: dict[Unit, tuple[processes.Child, list[int]]] = {}
        self.tries = dict.fromkeys(units, 0)
        self.failed: list[str] = []
        self.commit = commit()
        self.need = max([sweep.unit_gib, *(row.get("peak_gib", 0.0) for row in cli.read_rows(sweep.results))])
        self.spent: list[tuple[float, float]] = []  # (seconds, minutes said) of each run that ended here

    def run(self) -> None:
        """Runs what has no row yet. Raises: base.InputError as soon as a run says that its input is bad."""
        with board.Board(self.total) as shown:
            try:
                while self.waiting or self.running:
                    while self.waiting and self.free and self.fits():
                        self.start(self.waiting.pop(0), shown)
                    for unit, (child, cores) in list(self.running.items()):
                        if ended := child.poll():
                            del self.running[unit]
                            self.free.append(cores)
                            self.end(unit, ended, shown)
                    looks = [
                        (unit.name, child.seconds, board.last_success(self.sweep.place(unit)))
                        for unit, (child, _) in self.running.items()
                    ]
                    shown.show(self.done, looks, self.left())
                    time.sleep(self.sweep.poll)
            finally:
                for child, _ in self.running.values():
                    child.ask_to_stop()
                for child, _ in self.running.values():
                    child.stop(PATIENCE)

    def fits(self) -> bool:
        """Whether one more run fits into the budget of memory and into what the machine can give.

        A run that is still growing will take what it may take. Raises: base.InputError when not even one run fits.
        """
        from rsi_jax import base

        sweep, need = self.sweep, self.need
        if need > sweep.memory_gib:
            raise base.InputError(f"a run takes {need:.2f} GiB, --memory_gib={sweep.memory_gib:.2f} holds none")
        holds = [child.resident_gib() for child, _ in self.running.values()]
        reserved = sum(max(need, now) for now in holds)
        growing = sum(max(need - now, 0.0) for now in holds)
        return reserved + need <= sweep.memory_gib and growing + need <= processes.available_gib()

    def start(self, unit: Unit, shown: board.Board) -> None:
        """Starts a unit on the first free cores."""
        place, cores = self.sweep.place(unit), self.free.pop(0)
        shown.say(f"start {unit.name}")
        self.tries[unit] += 1
        argv = self.sweep.command(unit, place)
        self.running[unit] = (processes.Child(argv, cores, out=beside(place, "out"), log=beside(place, "log")), cores)

    def end(self, unit: Unit, ended: processes.Ended, shown: board.Board) -> None:
        """Writes the row of a unit that ended, or has it tried again. Raises: base.InputError for bad input."""
        from rsi_jax import base

        place = self.sweep.place(unit)
        self.need = max(self.need, ended.peak_gib)
        if ended.code == 2:
            raise base.InputError(f"{unit.name}: {complaint(beside(place, 'log')) or 'exit code 2'}")
        measured: Mapping[str, Any] | None = None
        if ended.code == 1 and (said := complaint(beside(place, "log"))):
            measured = {"diverged": said}
        elif ended.code == 0:
            measured = self.sweep.read(unit, place)
        if measured is None:
            text = f"{unit.name}: exit {ended.code}, see {beside(place, 'log')}"
            if self.tries[unit] <= self.sweep.retries:
                shown.say(f"{text}; again")
                self.waiting.insert(0, unit)
            else:
                self.failed.append(text)
                shown.say(text)
            return
        self.done += 1
        self.spent.append((ended.seconds, unit.minutes or 1.0))
        cost = {"wall_s": round(ended.seconds, 1), "peak_gib": round(ended.peak_gib, 3)}
        made = {"name": unit.name, "seed": unit.seed, "digest": unit.digest, "overrides": list(unit.overrides)}
        # What a run says of itself under these names (its own digest, its own wall time) gives way.
        origin = {"commit": self.commit, "date": time.strftime("%Y-%m-%d")}
        row = dict(unit.fields) | dict(measured) | made | cost | origin
        append(self.sweep.results, row)
        shown.say(f"done {unit.name}" + (f": diverged, {measured['diverged']}" if "diverged" in measured else ""))

    def left(self) -> float:
        """Seconds left, if runs go on taking the same share of the minutes that they may take; inf before the first."""
        if not self.spent:
            return float("inf")
        pace = sum(seconds for seconds, _ in self.spent) / sum(minutes for _, minutes in self.spent)
        waiting = sum(pace * (unit.minutes or 1.0) for unit in self.waiting)
        running = sum(
            max(0.0, pace * (unit.minutes or 1.0) - child.seconds) for unit, (child, _) in self.running.items()
        )
        return (waiting + running) / self.sweep.jobs


def run(sweep: Sweep, units: Sequence[Unit]) -> list[str]:
    """Runs the units that have no row yet, after those that they wait for; returns what failed. A digest runs once.

    Rows of what is waited for stay with the run folders, as these are what counts. Raises: base.InputError for bad
    input, in the sweep or said by a run; train.Stopped after a signal, once the runs have ended.
    """
    if not sweep.runs:
        return []
    with _alone(sweep.folder):
        return _in_order(sweep, units)


def _in_order(sweep: Sweep, units: Sequence[Unit]) -> list[str]:
    finished = {row.get("digest") for row in cli.read_rows(sweep.results)}
    waiting = list({unit.digest: unit for unit in units if unit.digest not in finished}.values())
    first = list({one.digest: one for unit in waiting for one in unit.after}.values())
    beside = dataclasses.replace(
        sweep, results=sweep.folder / "prepared.jsonl", read=lambda unit, folder: printed(folder)
    )
    failed = _in_order(beside, first) if first else []
    prepared = {row["digest"] for row in rows_of(beside.results, first) if "diverged" not in row}
    ready = [unit for unit in waiting if all(one.digest in prepared for one in unit.after)]
    failed += [f"{unit.name}: what it waits for failed" for unit in waiting if unit not in ready]
    return failed + _run(sweep, ready, done=len(units) - len(waiting))


def _run(sweep: Sweep, units: Sequence[Unit], done: int = 0) -> list[str]:
    runner = Runner(sweep, units, done)
    try:
        runner.run()
    except KeyboardInterrupt as error:
        from rsi_jax import train

        raise train.Stopped("stopped, and its runs have saved; the same command continues") from error
    return runner.failed
