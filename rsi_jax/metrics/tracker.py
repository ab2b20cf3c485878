"""The tracker: metrics.jsonl, TensorBoard events, other services. One explicit step that only ever goes up.

A line of metrics.jsonl is one flat object: `step`, `stage`, the scalars, `nonfinite` (how many of them are null), and
wall-clock readings under names that start with `time/`. Two runs of the same seed agree on everything else.
"""

import dataclasses
import importlib
import json
import math
import numbers
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import tensorboardX

from rsi_jax import base

METRICS_FILE = "metrics.jsonl"
EVENTS_FOLDER = "tensorboard"
TIME_PREFIX = "time/"
RESERVED = ("step", "stage", "nonfinite", TIME_PREFIX + "unix")


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a resume found in metrics.jsonl: lines kept, whole lines beyond the restored step, half-written lines."""

    kept: int = 0
    dropped: int = 0
    torn: int = 0


class Adapter(Protocol):
    """Another place that metrics go to. Receives finite scalars under `stage/name`."""

    def log(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


class Tracker:
    """Writes scalars to metrics.jsonl, TensorBoard events and the adapters.

    The step is explicit and global over stages: it never decreases, and within one stage it strictly increases (so an
    evaluation may be logged at the step of the update before it). Each line reaches the operating system before `log`
    returns, so a killed process loses at most a half-written line.

    Args:
      run_dir: folder of the run; made if missing.
      adapters: see `adapter`.
      resume_step: None for a new run (a metrics file already there is an error); n >= 0 to go on from a checkpoint of
        step n, which drops the lines beyond n; -1 to go on from the very beginning. Save the checkpoint of step n
        after everything of step n was logged and `flush()` was called.
      clock: seconds since the epoch.
    Attributes: resumed (Resumed), nonfinite (scalars written as null so far, over the whole file), last_step.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        adapters: Sequence[Adapter] = (),
        resume_step: int | None = None,
        clock: Callable[[], float] = time.time,
    ):
        run_dir = pathlib.Path(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        self._clock, self._adapters, self._closed = clock, tuple(adapters), False
        self._last: dict[str, int] = {}
        self.last_step, self.nonfinite, self.resumed = -1, 0, Resumed()
        if resume_step is None and path.exists() and path.stat().st_size:
            raise base.InputError(f"{path} already holds metrics: resume the run or choose another run folder")
        if resume_step is not None and path.exists():
            kept, self.resumed = _cut(path, resume_step)
            for line in kept:
                self._last[line["stage"]] = line["step"]
                self.nonfinite += line.get("nonfinite", 0)
        if resume_step is not None:
            self.last_step = max(resume_step, -1)
        self._file = path.open("ab")
        purge_step = None if resume_step is None else max(resume_step + 1, 0)
        self._events = tensorboardX.SummaryWriter(str(run_dir / EVENTS_FOLDER), purge_step=purge_step, flush_secs=15)

    def log(self, stage: str, step: int, scalars: Mapping[str, Any]) -> None:
        """Writes one line of scalars (python, numpy or one-element jax numbers; bools become 0 or 1).

        Raises: ValueError when the step does not increase, a name is reserved, or a value is not a scalar.
        """
        step = int(step)
        if step < self.last_step or step <= self._last.get(stage, -1):
            last = max(self.last_step, self._last.get(stage, -1))
            raise ValueError(f"metrics of {stage!r} at step {step} after step {last}: the step must increase")
        clean = {name: _scalar(name, value) for name, value in scalars.items()}
        finite = {name: value for name, value in clean.items() if value is not None}
        bad = len(clean) - len(finite)
        line = {"step": step, "stage": stage, **clean}
        if bad:
            line["nonfinite"] = bad
        now = self._clock()
        line[TIME_PREFIX + "unix"] = round(now, 3)
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        self._file.flush()
        self.nonfinite += bad
        self.last_step = self._last[stage] = step
        tagged = {f"{stage}/{name}": value for name, value in finite.items()}
        if bad:
            tagged[f"{stage}/nonfinite"] = bad
        for name, value in tagged.items():
            self._events.add_scalar(name, value, step, walltime=now)
        for other in self._adapters:
            other.log(step, tagged)

    def flush(self) -> None:
        """Forces what was logged to disk; call before a checkpoint is saved."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Flushes and closes everything; the second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.flush()
        self._file.close()
        self._events.close()
        for other in self._adapters:
            other.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: str | os.PathLike) -> tuple[list[dict[str, Any]], int]:
    """Reads a metrics file: its lines in order, and how many half-written ones its end held (0 or 1).

    Raises: InputError when the file is missing, or a line before the last is not a metrics object.
    """
    pairs, torn = _parse(pathlib.Path(path))
    return [line for _, line in pairs], torn


def without_time(line: Mapping[str, Any]) -> dict[str, Any]:
    """A metrics line without its wall-clock fields: what two runs of one seed must agree on."""
    return {name: value for name, value in line.items() if not name.startswith(TIME_PREFIX)}


def _parse(path: pathlib.Path) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    if not path.exists():
        raise base.InputError(f"{path} does not exist: is this the folder of a run?")
    raw = path.read_bytes().split(b"\n")
    raw = raw[:-1] if raw[-1] == b"" else raw
    pairs = []
    for number, text in enumerate(raw, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line["step"], int) or not isinstance(line["stage"], str):
                raise TypeError
        except (ValueError, TypeError, KeyError):
            if number == len(raw):
                return pairs, 1
            raise base.InputError(
                f"{path} line {number} is not a metrics line: the file was edited or damaged"
            ) from None
        pairs.append((text, line))
    return pairs, 0


def _cut(path: pathlib.Path, step: int) -> tuple[list[dict[str, Any]], Resumed]:
    pairs, torn = _parse(path)
    kept = [(text, line) for text, line in pairs if line["step"] <= step]
    data = b"".join(text + b"\n" for text, _ in kept)
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return [line for _, line in kept], Resumed(len(kept), len(pairs) - len(kept), torn)


def _scalar(name: str, value: Any) -> int | float | None:
    if name in RESERVED:
        raise ValueError(f"metric name {name!r} is reserved")
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, str):
        raise TypeError(f"metric {name!r} is text: {value[:60]!r}")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"metric {name!r} is not a scalar: {type(value).__name__} {str(value)[:60]!r}") from None
    return number if math.isfinite(number) else None


def adapter(name: str, *, project: str, run: str, config: Mapping[str, Any] | None = None, **init: Any) -> Adapter:
    """Opens 'wandb' or 'trackio', imported here and nowhere else; a resumed run goes on under the same name.

    wandb drops values whose step is not beyond its own counter, which a resumed run hits at once. So our step goes
    there as the metric `global_step`, declared as the axis of all others.

    Args: project and run names; config to show beside the run; init: further arguments of the module's `init`.
    Raises: InputError for an unknown name or a package that is not installed.
    """
    if name not in ("wandb", "trackio"):
        raise base.InputError(f"no metrics adapter {name!r}: choose wandb or trackio")
    try:
        module = importlib.import_module(name)
    except ImportError:
        raise base.InputError(
            f"metrics adapter {name!r} is not installed: pip install {name}, or leave it out"
        ) from None
    return (
        _Wandb(module, project, run, config, init) if name == "wandb" else _Trackio(module, project, run, config, init)
    )


class _Wandb:
    def __init__(self, module: Any, project: str, run: str, config: Mapping | None, init: Mapping):
        self._module = module
        self._run = module.init(project=project, id=run, name=run, config=dict(config or {}), resume="allow", **init)
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log({"global_step": step, **scalars})

    def finish(self) -> None:
        self._module.finish()


class _Trackio:
    def __init__(self, module: Any, project: str, run: str, config: Mapping | None, init: Mapping):
        self._module = module
        module.init(project=project, name=run, config=dict(config or {}), resume="allow", **init)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._module.log(dict(scalars), step=step)

    def finish(self) -> None:
        self._module.finish()
