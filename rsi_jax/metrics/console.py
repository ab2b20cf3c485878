"""What people see while a command runs and when it ends.

Everything for people goes to stderr; stdout carries only the final table and, as its last line, one JSON object.
"""

import collections
import dataclasses
import json
import math
import numbers
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TextIO

import numpy as np
import rich.box
import rich.console
import rich.progress
import rich.table
import rich.text


def duration(seconds: float) -> str:
    """Writes a time span for people: 0.42s, 12s, 3m05s, 2h07m, 3d04h."""
    if not math.isfinite(seconds):
        return "-"
    if seconds < 10:
        return f"{seconds:.2g}s"
    whole = round(seconds)
    for size, small, unit in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= size:
            return f"{whole // size}{unit[0]}{whole % size // small:02d}{unit[1]}"
    return f"{whole}s"


def number(value: Any) -> str:
    """Writes a value for people: four significant digits, thousands separated, '-' for what is missing."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real | None):
        return str(value)
    if value is None or math.isnan(value):
        return "-"
    if isinstance(value, numbers.Integral):
        return f"{int(value):,}"
    real = float(value)
    return f"{real:,.0f}" if 1e4 <= abs(real) < 1e15 else f"{real:.4g}"


class Progress:
    """Shows stage, step, reward, tokens/s and time left on stderr: a live bar, or plain lines without a terminal.

    Rates and the time left come from the last 32 updates, so a compile or a resume does not distort them for long.

    Args: interval: seconds between plain lines. file, clock: for tests.
    """

    def __init__(
        self, *, interval: float = 15.0, file: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self._file = sys.stderr if file is None else file
        self._live = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._console = rich.console.Console(file=self._file, highlight=False)
        self._interval, self._clock = interval, clock
        self._bar: rich.progress.Progress | None = None
        self.stage("", 0)

    def stage(self, name: str, total: int, *, start: int = 0) -> None:
        """Begins a stage of `total` steps, `start` of them already done (a resumed run)."""
        self._name, self._total, self._shown = name, total, -math.inf
        self._recent: collections.deque = collections.deque([(self._clock(), start, 0)], maxlen=32)
        if self._bar is not None:
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._task = self._bar.add_task(name, total=total, completed=start, text="")

    def update(self, step: int, *, reward: float | None = None, tokens: int = 0, note: str = "") -> None:
        """Says that `step` steps of the stage are done. tokens: processed since the last update; note: a short text."""
        now = self._clock()
        self._recent.append((now, step, self._recent[-1][2] + tokens))
        text = self._text(reward, note)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif now - self._shown >= self._interval or step >= self._total:
            self._shown = now
            self._file.write(f"{self._name} {step}/{self._total}  {text}\n")
            self._file.flush()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(rich.text.Text(text), soft_wrap=True)

    def _text(self, reward: float | None, note: str) -> str:
        (t0, s0, k0), (t1, s1, k1) = self._recent[0], self._recent[-1]
        passed = max(t1 - t0, 1e-9)
        left = (self._total - s1) * passed / (s1 - s0) if s1 > s0 else math.inf
        parts = [] if reward is None else [f"reward {reward:.3f}"]
        parts += [f"{number((k1 - k0) / passed)} tok/s"] if k1 > k0 else []
        return "  ".join([*parts, f"ETA {duration(left)}", *([note] if note else [])])

    def __enter__(self) -> Self:
        if self._live:
            columns = [
                rich.progress.TextColumn("{task.description}", style="bold", markup=False),
                rich.progress.BarColumn(bar_width=24),
                rich.progress.MofNCompleteColumn(),
                rich.progress.TextColumn("{task.fields[text]}", markup=False),
            ]
            self._bar = rich.progress.Progress(*columns, console=self._console)
            self._task = self._bar.add_task(self._name, total=self._total, text="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, file: TextIO | None = None) -> None:
    """Prints a table for people on stdout; numbers stand right with four significant digits; text is never markup."""
    out: TextIO = sys.stdout if file is None else file
    grid = rich.table.Table(title=rich.text.Text(title), box=rich.box.SIMPLE_HEAD, title_justify="left")
    for place, column in enumerate(columns):
        right = any(isinstance(row[place], numbers.Real) for row in rows)
        grid.add_column(rich.text.Text(column), justify="right" if right else "left")
    for row in rows:
        grid.add_row(*(rich.text.Text(number(cell)) for cell in row))
    console = rich.console.Console(file=out, highlight=False, width=None if out.isatty() else 200)
    console.print(grid)


def finish(result: Mapping[str, Any], *, file: TextIO | None = None) -> None:
    """Prints the result as ONE line of JSON, the last line of stdout. Non-finite numbers become null."""
    out: TextIO = sys.stdout if file is None else file
    sys.stderr.flush()
    out.write(json.dumps(jsonable(result), allow_nan=False, separators=(", ", ": ")) + "\n")
    out.flush()


def jsonable(value: Any) -> Any:
    """Turns mappings, sequences, dataclasses, paths, numpy and jax numbers into plain JSON; non-finite becomes None.

    Raises: TypeError naming the type for anything else.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [jsonable(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return jsonable(dataclasses.asdict(value))
    if (tolist := getattr(value, "tolist", None)) is not None:
        return jsonable(tolist())
    raise TypeError(f"cannot write {type(value).__name__} as JSON")
