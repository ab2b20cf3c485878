"""The trainer: a list of stages, run to their end, resumable at any moment.

setup.py (config -> parts) -> loop.py (resume, step, log, save) -> lm.py | rl.py (a batch) -> update.py (the gradient).
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from rsi_jax import base, checkpoint, envs, metrics, optim, sharding
from rsi_jax.feedback import schedule
from rsi_jax.model import transformer
from rsi_jax.train import evaluate as evaluate_lib
from rsi_jax.train import lm, loop, present, rl, setup, writer
from rsi_jax.train.loop import Stopped
from rsi_jax.train.rl import ParityError

__all__ = ["ParityError", "Stopped", "run"]


def _lm_stage(run: loop.Run, index: int, params) -> loop.Stage:
    config, parts, knobs = run.config, run.parts, run.config.lm
    rate = optim.learning_rate(knobs.lr, updates=knobs.updates, warmup=knobs.warmup, schedule=knobs.schedule)
    optimizer = optim.make(knobs.optimizer, rate, b1=config.adam.b1, b2=config.adam.b2, weight_decay=knobs.weight_decay)
    data = lm.batches(knobs, lambda horizon: setup.make_env(config, horizon), parts.chat, config.seed)
    state = base.TrainState(step=jnp.zeros((), jnp.int32), params=params, opt=optimizer.init(params))
    places = sharding.param_shardings(state, transformer.LOGICAL_AXES, parts.mesh)
    state, compute = jax.device_put(state, places), config.compute
    update = lm.make_update(
        parts.model, optimizer, clip=knobs.clip, chunk=compute.chunk, remat=setup.remat(config), places=places
    )

    def step(state, i):
        with run.ledger.phase("read"):
            batch = dict(next(data))
        with run.ledger.phase("warm up"):
            state, scalars = update(state, sharding.put_rows(batch, parts.mesh))
            scalars = jax.device_get(scalars)
        run.ledger.add(trained=int((batch["tokens_segment_ids"] > 0).sum()))
        return state, scalars

    return loop.Stage(
        "lm", index, knobs.updates, state, step, cursor=lambda: _text(data), seek=lambda c: _seek(data, c)
    )


def _text(data) -> Any:
    state = data.get_state()
    return state.decode() if isinstance(state, bytes) else state


def _seek(data, cursor) -> None:
    data.set_state(cursor)


def _rl_stage(run: loop.Run, index: int, params, policy_writer) -> tuple[loop.Stage, rl.Trainer]:
    config = run.config
    trainer = rl.Trainer(run, envs.find(config.env.name), policy_writer)

    def before(state) -> base.TrainState:
        return schedule.remember_gain(state, _measure(run, trainer, state, "before")["gain"])

    def evaluate(state, i: int) -> base.TrainState:
        result = rl.measure(trainer, state, episodes=config.evaluation.episodes, when=f"after {i} updates")
        run.results["latest"] = result.scalars
        run.tracker.log("eval", run.offset + i, result.scalars)
        return schedule.remember_gain(state, result.scalars["gain"])

    stage = loop.Stage(
        "rl",
        index,
        config.rl.updates,
        trainer.start(params),
        trainer.step,
        enough=trainer.enough,
        before=before,
        evaluate=evaluate,
        leave=trainer.leave,
        every=config.evaluation.every,
    )
    return stage, trainer


def _measure(run: loop.Run, trainer: rl.Trainer, state: base.TrainState, when: str) -> dict[str, Any]:
    """Measures 'before' or 'after' RL, with intervals, into the results; returns the scalars."""
    found = rl.measure(trainer, state, episodes=run.config.evaluation.final_episodes, when=when, final=True)
    run.results[when] = found.scalars
    known = run.results.get("intervals", {})
    run.results["intervals"] = known | {when: evaluate_lib.intervals(found.transcripts, trainer.summary)}
    return found.scalars


def _make_stage(run: loop.Run, index: int, params, policy_writer):
    if run.config.stages[index] == "lm":
        return _lm_stage(run, index, params), None
    return _rl_stage(run, index, params, policy_writer)


def _restore(run: loop.Run, policy_writer) -> tuple[int, loop.Restored | None]:
    """Finds the last stage that has a checkpoint: (its index, what was restored)."""
    for index in reversed(range(len(run.config.stages))):
        saved = loop.checkpoints(run.folder, index, run.config.stages[index], run.config.checkpoint.keep)
        if saved.latest_step() is None:
            continue
        stage, _ = _make_stage(run, index, run.parts.start, policy_writer)
        found = saved.restore(stage.state)
        if found is not None:
            run.results, run.offset = found[2]["results"], found[2]["offset"]
            run.ledger.restore(found[2]["ledger"])
            if saved.skipped:
                run.ledger.drop("damaged checkpoints skipped", saved.skipped)
        return index, found
    return 0, None


def _take_over(run: loop.Run) -> tuple[int, Any]:
    """Takes the stages before `rl` from another run: (index of the first stage to run, parameters)."""
    source, stages = pathlib.Path(run.config.init_from), run.config.stages
    if "rl" not in stages or stages.index("rl") == 0:
        raise base.InputError("init_from takes over the stages before 'rl'; stages has none")
    index = stages.index("rl") - 1
    found = loop.checkpoints(source, index, stages[index], 1).restore(run.parts.start, only="params")
    if found is None or not found[2]["done"]:
        raise base.InputError(
            f"init_from={str(source)!r} holds no finished {stages[index]!r} stage; run it there first"
        )
    run.ledger.restore(found[2]["ledger"])
    return index + 1, found[1]


def run(config, folder: pathlib.Path, *, policy_writer=None, defaults=None, profile: bool = False) -> dict[str, Any]:
    """Runs every stage of the config in `folder`, measures before and after, writes the report; returns the results.

    policy_writer: a feedback.hints.PolicyWriter for feedback.hint = 'policy', None = the policy itself. defaults: the
    config whose values the report does not mark. profile: also write a jax.profiler trace of a few steps of each stage
    into <folder>/profile.
    Raises: base.InputError; Stopped after SIGTERM or Ctrl-C, saved; FloatingPointError when training diverges.
    """
    parts, f = setup.make_parts(config), config.feedback
    if f.hint == "policy" and policy_writer is None:
        writer.check_prompt(f.policy_prompt, f.faults, f.rules, parts.chat)
    with (
        checkpoint.Stop() as stop,
        metrics.Progress() as progress,
        loop.Profile(folder / "profile" if profile else None) as tracer,
    ):
        state = loop.Run(
            folder, parts, metrics.Ledger(clock=metrics.Ledger.CLOCKS[config.compute.clock]), progress, stop, tracer
        )
        devices = parts.mesh.devices
        progress.say(f"attention: {parts.model.attention}, on {devices.size} x {devices.flat[0].device_kind}")
        status = ""
        try:
            _run_stages(state, policy_writer)
        except (Stopped, FloatingPointError) as error:
            status = f"Not finished: {error}."
            raise
        finally:
            if status or "ledger" in state.results:
                ledger = state.ledger.state()
                present.write_report(folder, config, state.results, ledger, defaults=defaults, status=status)
    return state.results


def _run_stages(state: loop.Run, policy_writer) -> None:
    """Runs the stages that are left, and measures after the last."""
    config = state.config
    index, found = _restore(state, policy_writer)
    adapters = [
        metrics.adapter(name, project="rsi_jax", run=state.folder.name, config=config.to_dict())
        for name in config.track
    ]
    position = state.offset + found[0] if found else -1
    with metrics.Tracker(state.folder, adapters=adapters, resume_step=position) as state.tracker:
        params, trainer, final = state.parts.start, None, None
        if found is None and config.init_from:
            index, params = _take_over(state)
        for number in range(index, len(config.stages)):
            stage, trainer = _make_stage(state, number, params, policy_writer)
            final = loop.run_stage(state, stage, found)
            params, found = final.params, None
        if trainer is not None and final is not None:
            _measure(state, trainer, final, "after")
    state.results["ledger"] = state.ledger.state()
    state.results["digest"] = checkpoint.digest(final.replace(ref=None)) if final is not None else None
