"""The loop that every stage shares: resume, step, log, evaluate, save, stop.

Everything a step draws comes from (seed, stage, step), and everything it changes is in the checkpoint: a run killed at
any moment and started again does the lost steps to the same bits.
"""

import dataclasses
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax
import numpy as np

from rsi_jax import base, checkpoint, metrics
from rsi_jax.train.setup import Parts


class Stopped(Exception):
    """A signal asked to stop; the state is saved."""


class Profile:
    """Traces a few steps of each stage with jax.profiler, after those that compile; a folder of None: nothing.

    Use as a context: a stage that ends early ends the trace too.
    """

    SKIP, STEPS = 2, 3

    def __init__(self, folder: pathlib.Path | None):
        self.folder, self._open, self._seen = folder, False, 0

    def stage(self) -> None:
        """Begins a stage."""
        self.close()
        self._seen = 0

    def step(self) -> None:
        """Says that a step begins."""
        if self.folder is not None and self._seen == self.SKIP:
            jax.profiler.start_trace(str(self.folder))
            self._open = True
        elif self._seen == self.SKIP + self.STEPS:
            self.close()
        self._seen += 1

    def close(self) -> None:
        """Ends a trace that is open."""
        if self._open:
            self._open = False
            jax.profiler.stop_trace()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclasses.dataclass
class Run:
    """One run and its effects. offset: global step at which the stage began. results: what evaluations found."""

    folder: pathlib.Path
    parts: Parts
    tracker: metrics.Tracker = dataclasses.field(init=False, repr=False)
    ledger: metrics.Ledger
    progress: metrics.Progress
    stop: checkpoint.Stop
    profile: Profile
    offset: int = 0
    results: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def config(self):
        return self.parts.config

    def check_stop(self, during: str) -> None:
        """Leaves a measurement when a signal came: nothing is lost, the same command makes it anew. Raises: Stopped."""
        if self.stop.requested:
            raise Stopped(f"{self.stop.name}: stopped during {during}; the same command continues")


@dataclasses.dataclass
class Stage:
    """One stage as the loop sees it.

    step(state, i) -> (state, scalars): one batch. enough(state) -> bool: end early after a batch.
    before(state): measurements at the start. evaluate(state, i): measure and log every `every` batches. Both return the
      state, which may remember what was measured.
    leave(state): called after the last batch, of the stage or before a stop.
    cursor / seek: the data position as JSON.
    """

    name: str
    index: int
    total: int
    state: base.TrainState
    step: Callable[[base.TrainState, int], tuple[base.TrainState, Mapping[str, Any]]]
    enough: Callable[[base.TrainState], bool] = lambda state: False
    before: Callable[[base.TrainState], base.TrainState] = lambda state: state
    evaluate: Callable[[base.TrainState, int], base.TrainState] = lambda state, i: state
    leave: Callable[[base.TrainState], None] = lambda state: None
    every: int = 0
    cursor: Callable[[], Any] = lambda: None
    seek: Callable[[Any], None] = lambda cursor: None


def checkpoints(folder: pathlib.Path, index: int, name: str, keep: int) -> checkpoint.Checkpoints:
    """The checkpoints of one stage."""
    return checkpoint.Checkpoints(folder / "checkpoints" / f"{index}_{name}", keep=keep)


def last_params(folder: pathlib.Path, like: Any) -> Any:
    """Reads the parameters that a run saved last, whatever the stage; `like` gives their shapes.

    Raises: base.InputError when the folder holds no checkpoint, or one of another model.
    """
    stages = [path.name.split("_", 1) for path in (folder / "checkpoints").glob("*_*")]
    for index, name in sorted(((int(index), name) for index, name in stages), reverse=True):
        found = checkpoints(folder, index, name, 1).restore(like, only="params")
        if found is not None:
            return found[1]
    raise base.InputError(f"{str(folder)!r} holds no checkpoint of a run")


def check_finite(scalars: Mapping[str, Any], state: base.TrainState, stage: str, i: int) -> None:
    """Stops the run when a loss, a gradient norm or a parameter is not finite, naming the tensor and the sample.

    Raises: FloatingPointError.
    """
    bad = [name for name, value in scalars.items() if name.endswith(("loss", "norm")) or "grad_norm" in name]
    bad = [name for name in bad if not math.isfinite(float(scalars[name]))]
    row = int(scalars.get("bad_row", -1))
    if not bad and row < 0:
        return
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    broken = [jax.tree_util.keystr(path) for path, leaf in leaves if not bool(np.all(np.isfinite(np.asarray(leaf))))]
    where = f"; rollout {row} of the batch has log-probs that are not finite" if row >= 0 else ""
    tensors = f"; parameters not finite: {', '.join(broken[:3])} ({len(broken)} in all)" if broken else ""
    raise FloatingPointError(
        f"{stage} step {i}: {', '.join(bad) or 'a log-prob'} is not finite{where}{tensors}; the last checkpoint is "
        "intact: lower the learning rate or look at that sample"
    )


Restored = tuple[int, base.TrainState, dict[str, Any]]


def run_stage(run: Run, stage: Stage, found: Restored | None = None) -> base.TrainState:
    """Runs a stage to its end, from `found` (what its checkpoints restored) or from its start.

    Raises: Stopped after a signal, with the state saved.
    """
    every, keep = run.config.checkpoint.every, run.config.checkpoint.keep
    saved = checkpoints(run.folder, stage.index, stage.name, keep)
    state, i, done = stage.state, 0, stage.total == 0

    def save(done: bool) -> None:
        run.tracker.flush()
        meta = {"results": run.results, "done": done, "cursor": stage.cursor(), "offset": run.offset}
        with run.ledger.phase("checkpoint"):
            saved.save(i, state, meta | {"ledger": run.ledger.state()})

    if found is None:
        state = stage.before(state)
        save(done)
    else:
        i, state, meta = found
        done = meta["done"]
        stage.seek(meta["cursor"])
    run.progress.stage(stage.name, stage.total, start=i)
    run.profile.stage()
    while not done:
        if run.stop.requested:
            stage.leave(state)
            if i != saved.latest_step():
                save(False)
            raise Stopped(f"{run.stop.name}: saved at {stage.name} step {i}; the same command continues")
        state, done = _advance(run, stage, state, i)
        i += 1
        if done:
            stage.leave(state)
        elif stage.every and i % stage.every == 0:
            state = stage.evaluate(state, i)
        if i % every == 0 or done:
            save(done)
    run.offset += i
    return state


def _advance(run: Run, stage: Stage, state: base.TrainState, i: int) -> tuple[base.TrainState, bool]:
    """Does batch i and logs it: (state, whether the stage is done)."""
    began = time.perf_counter()
    run.profile.step()
    state, scalars = stage.step(state, i)
    scalars = {name: np.asarray(value).item() for name, value in jax.device_get(dict(scalars)).items()}
    check_finite(scalars, state, stage.name, i)
    scalars.pop("bad_row", None)
    scalars |= run.ledger.scalars() | {"time/step": time.perf_counter() - began}
    run.tracker.log(stage.name, run.offset + i + 1, scalars)
    run.progress.update(i + 1, reward=scalars.get("reward"), tokens=int(scalars.get("tokens", 0)))
    return state, i + 1 == stage.total or stage.enough(state)
