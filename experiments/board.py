"""What a sweep shows while it runs: units done, those running with their last success, the time left; on stderr."""

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

import rich.console
import rich.live
import rich.progress
import rich.table

TAIL = 65_536  # bytes of a metrics file in which the last success is looked for
SUCCESS = ("train/success", "success", "reward")


def last_success(folder: pathlib.Path) -> float | None:
    """The last success that a run has logged (its reward, where the task has no success); None before the first."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return None
    with file.open("rb") as lines:
        lines.seek(max(0, lines.seek(0, os.SEEK_END) - TAIL))
        whole = lines.read().split(b"\n")[:-1]
    for line in reversed(whole):
        if line.startswith(b"{") and line.endswith(b"}"):
            found = json.loads(line)
            for name in SUCCESS:
                if found.get(name) is not None:
                    return float(found[name])
    return None


class Board:
    """A bar over all units and a line for each that runs; without a terminal a plain line now and then.

    Args: interval: seconds between plain lines. file, clock: for tests.
    """

    def __init__(
        self,
        total: int,
        *,
        interval: float = 60.0,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._interval, self._clock, self._shown = total, interval, clock, clock()
        self._file = sys.stderr if file is None else file
        self._console = rich.console.Console(file=self._file, highlight=False)
        live = self._file.isatty() and os.environ.get("TERM") != "dumb"
        self._live = rich.live.Live(console=self._console, auto_refresh=False) if live else None

    def show(self, done: int, running: Sequence[tuple[str, float, float | None]], left: float) -> None:
        """Shows done units, running ones (name, seconds, last success) and seconds left."""
        from rsi_jax import metrics

        texts = [
            f"{name} {metrics.duration(seconds)}" + ("" if success is None else f" success {success:.3f}")
            for name, seconds, success in running
        ]
        head = f"{done}/{self._total} runs  ETA {metrics.duration(left)}"
        if self._live is not None:
            grid = rich.table.Table.grid(padding=(0, 2))
            grid.add_row(rich.progress.ProgressBar(self._total, done, width=24), head)
            for text in texts:
                grid.add_row("", rich.text.Text(text))
            self._live.update(grid, refresh=True)
        elif self._clock() - self._shown >= self._interval:
            self._shown = self._clock()
            self.say("  |  ".join([head, *texts]))

    def say(self, text: str) -> None:
        """Prints a line above what is shown."""
        self._console.print(rich.text.Text(text), soft_wrap=True)

    def __enter__(self):
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
