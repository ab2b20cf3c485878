"""The `rl` stage: collect, feedback, annotate, credit, update.

rollout, transcripts = collect(params, tasks, key)      # host: sample <-> env; rewards per segment
rollout = feedback.add(rollout, transcripts)            # host: locate, write hints -> Views
rollout = annotate(params, aux, rollout)                # jit: columns
credit  = credit_fn(rollout)                            # jit, pure: CreditFn
for mb in minibatches: state, metrics = update(state, mb)
"""

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import (
    annotate,
    base,
    chains,
    continuations,
    feedback,
    losses,
    masked,
    metrics,
    optim,
    packing,
    sharding,
    store,
)
from rsi_jax import rollout as rollout_lib
from rsi_jax.credit import rewards
from rsi_jax.feedback import schedule, teacher, views
from rsi_jax.model import transformer
from rsi_jax.train import budget, diagnostics, evaluate, lm, loop, samples, setup, update, writer


class ParityError(RuntimeError):
    """The sampler's log-probs are not the trainer's."""


def tasks(config, step: int, attempt: int = 0) -> list[rollout_lib.Task]:
    """Draws the tasks of a batch from (seed, step): `groups` seeds, `group_size` rollouts each."""
    rng = random.Random(f"rl/{config.seed}/{step}/{attempt}")
    seeds = [rng.getrandbits(40) for _ in range(config.rl.groups)]
    return [rollout_lib.Task(seed, g) for g, seed in enumerate(seeds) for _ in range(config.rl.group_size)]


def minibatches(rollout: base.Rollout, credit: base.Credit, config, step: int, chain_rows: int = 1):
    """Yields epochs * minibatches parts, each with the rows of the batch that it holds; a chain is in one of them.

    Rows are shuffled between epochs only when there is more than one part.
    """
    B, parts = rollout.tokens_BT.shape[0], config.rl.minibatches
    for epoch in range(config.rl.epochs):
        if parts == 1:
            yield rollout, credit, np.arange(B)
            continue
        order = np.random.default_rng([config.seed, step, epoch]).permutation(B // chain_rows)
        for some in np.split(order, parts):
            rows = chains.rows_of(np.sort(some), chain_rows)
            part, scores = packing.take((rollout, credit), rows, B)
            ids = {  # in [0, rows)
                name: np.unique(np.asarray(getattr(part, name)), return_inverse=True)[1].astype(np.int32)
                for name in ("group_B", "chain_B")
            }
            yield part.replace(**ids), scores, rows


class Trainer:
    """The bound parts of the stage (functions and constants; the state is passed through)."""

    def __init__(self, run: loop.Run, env_module, policy_writer=None):
        config, parts = run.config, run.parts
        self.run, self.config, self.parts = run, config, parts
        self.summary = getattr(env_module, "summary", lambda transcripts: {})
        self.credit_fn, self.needs = setup.bind_credit(config.credit)
        self.rows = parts.sampler.chains.rows
        self.credit = jax.jit(chains.over(self.credit_fn, self.rows))
        self.text = evaluate.read_text(config.evaluation.perplexity_text)
        self.writing = setup.make_writing(config, policy_writer)
        self.maker = setup.make_maker(config, parts, self.writing)
        self.objective = setup.make_objective(config)
        updates = config.rl.updates * config.rl.epochs * config.rl.minibatches
        rate = optim.learning_rate(
            config.rl.lr, updates=updates, warmup=config.rl.warmup, schedule=budget.schedule(config.rl)
        )
        moments = {"b1": config.adam.b1, "b2": config.adam.b2}
        self.optimizer = optim.make(config.rl.optimizer, rate, **moments, weight_decay=config.rl.weight_decay)
        self.places = sharding.param_shardings(
            jax.eval_shape(self._fresh, parts.start), transformer.LOGICAL_AXES, parts.mesh
        )
        self.update = update.make_update(parts.model, self.objective, self.optimizer, self.places)
        self.key = jax.random.fold_in(jax.random.key(config.seed), 2)
        self.archive = store.Archive(run.folder / "rollouts")
        self.last: samples.Batch | None = None  # the batch of the latest step, for the report

    def _fresh(self, params) -> base.TrainState:
        hinted = "views" in self.needs
        with_ref = self.config.rl.kl_coef > 0 or self.config.rl.kl_in_reward > 0
        return base.TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt=self.optimizer.init(params),
            teacher=teacher.init(self.config.feedback.teacher, params) if hinted else None,
            ref=jax.tree.map(jnp.copy, params) if with_ref else None,
            aux=schedule.init() | self.maker.init(params, jax.random.key(self.config.seed)),
        )

    def start(self, params) -> base.TrainState:
        """The state at the first step of the stage; parameters and optimizer state placed by the sharding table."""
        return jax.device_put(self._fresh(params), self.places)

    def collect(self, state: base.TrainState, step: int):
        """Plays a batch; with dynamic sampling, groups without signal are played again, a bounded number of rounds."""
        key, batch, attempt = jax.random.fold_in(self.key, step), tasks(self.config, step), 0
        rollout, transcripts, scalars = self._play(state.params, batch, jax.random.fold_in(key, attempt))
        silent = _silent_groups(rollout, self.rows)
        while silent and attempt < self.config.rl.dynamic_rounds:
            attempt += 1
            dull = [row for row, task in enumerate(batch) if task.group in silent]
            drawn = tasks(self.config, step, attempt)
            redo = [drawn[row] for row in dull]
            again, texts, _ = self._play(state.params, redo, jax.random.fold_in(key, attempt))
            rows = chains.rows_of(np.array(dull), self.rows)
            rollout = _put_rows(rollout, again, rows)
            for row, text in zip(rows, texts, strict=True):
                transcripts[row] = text
            silent = _silent_groups(rollout, self.rows)
        scalars |= {"silent_groups": float(len(silent)), "dynamic_rounds": float(attempt)}
        rollout, more = self.maker.sample(
            state, rollout_lib.trim(rollout), transcripts, jax.random.fold_in(key, 2**31 - 2)
        )
        drawn, read = (int(more.get(f"continuations/{name}", 0)) for name in ("sampled_tokens", "read_tokens"))
        self.run.ledger.add(generated=drawn, scored=read)
        return rollout, transcripts, scalars | more

    def _play(self, params, batch, key):
        words = self.parts.chat.tokenizer
        odd = words.replaced
        if "tree_B" in self.needs:
            roots = self.config.columns.roots
            rollout, transcripts, scalars = continuations.grow_trees(
                params, batch, key, self.parts.sampler, roots=roots
            )
            sampled = int(scalars["trees/sampled_tokens"])
        else:
            rollout, transcripts = rollout_lib.collect(params, batch, key, self.parts.sampler)
            sampled, scalars = sum(turn.length for transcript in transcripts for turn in transcript.turns), {}
        self.run.ledger.drop("characters that the vocabulary cannot spell", words.replaced - odd)
        self.run.ledger.add(generated=sampled)
        self.run.ledger.drop("rollouts truncated by the context", sum(t.truncated for t in transcripts))
        return rollout, transcripts, scalars

    def annotate(self, state: base.TrainState, rollout: base.Rollout, readings=None) -> base.Rollout:
        """Adds the scored columns that the variant and the loss need."""
        columns = [name for name in self.needs if name != "views" and getattr(rollout, name) is None]
        if state.ref is not None:
            columns.append("ref_logp_BT")
        if self.objective.correction != "none":
            columns.append("policy_logp_BT")
        if not columns:
            return rollout
        self.run.ledger.add(scored=int(np.sum(rollout.length_B)) * len(columns))
        if {"view_logp_KU", "view_kl_KU"} & set(columns):
            self.run.ledger.add(hint=views.extra_tokens(base.given(rollout.views, "views")))
        return self._annotate(state, rollout, columns, readings)

    def _annotate(self, state: base.TrainState, rollout: base.Rollout, columns: list[str], readings=None):
        def score(part):
            scored = annotate.annotate(
                state.params,
                part[0],
                config=self.parts.model,
                columns=tuple(columns),
                ref=state.ref,
                teacher=state.teacher,
                readings=part[1],
                outcome_model=state.aux.get("outcome_model"),
                temperature=self.objective.temperature,
                chunk=self.objective.chunk,
                span=self.objective.span,
            )
            return {name: getattr(scored, name) for name in columns}

        return rollout.replace(**self._in_parts(score, (rollout, readings)))

    def _in_parts(self, score, tree):
        """Scores as many rollouts at a time as a forward of the update reads."""
        B, T = jax.tree.leaves(tree)[0].shape
        row = self.config.rl.row_tokens
        return packing.in_parts(score, tree, B, max(1, row // T) if row else self.config.rl.micro_batch)

    def shape(self, rollout: base.Rollout) -> base.Rollout:
        """Scales the rewards; takes the KL to the reference and DAPO's soft length penalty off, where they are on."""
        rl = self.config.rl
        if rl.reward_scale != 1:
            scaled_BS = rollout.segments.reward_BS * rl.reward_scale
            rollout = rollout.replace(segments=rollout.segments.replace(reward_BS=scaled_BS))
        if rl.kl_in_reward:
            rollout = losses.kl_in_reward(rollout, coef=rl.kl_in_reward, estimator="k1")
        if rl.overlong_buffer:
            whole = chains.join(rollout, self.rows)
            whole = rewards.overlong_shaping(whole, max_length=rl.overlong_length, buffer=rl.overlong_buffer)
            reward_BS = whole.segments.reward_BS.reshape(rollout.segments.reward_BS.shape)
            rollout = rollout.replace(segments=rollout.segments.replace(reward_BS=reward_BS))
        return rollout

    def keep_rollouts(self, rollout: base.Rollout, transcripts, step: int) -> None:
        """Archives the first rollouts of every n-th batch, under the step of its line in the metrics."""
        knobs, at = self.config.archive, self.run.offset + step + 1
        if not knobs.every or step % knobs.every:
            return
        with self.run.ledger.phase("archive"):
            self.archive.truncate(at - 1)  # what a killed run did beyond its last checkpoint is done again
            few = np.arange(min(knobs.rollouts * self.rows, len(transcripts)))
            columns = store.columns_of(packing.take(rollout, few, len(transcripts)))
            texts = [dataclasses.asdict(transcripts[row]) for row in few]
            texts = [metrics.jsonable(text | {"tokens": len(text["tokens"])}) for text in texts]
            self.archive.append(at, columns, texts)

    def keep_batch(self, name: str, batch: samples.Batch, state: base.TrainState) -> None:
        """Keeps the most telling rollouts of a batch for the report, scored by the teacher where they are hinted."""
        count = self.config.evaluation.samples
        if not count:
            return
        with self.run.ledger.phase("report"):
            rows = samples.telling(batch, count)
            rollout, credit = jax.device_get(packing.take((batch.rollout, batch.credit), rows, len(batch.transcripts)))
            if rollout.views is not None:
                rollout = self._annotate(state, rollout, ["view_logp_KU"])
            batch = dataclasses.replace(batch, rollout=rollout, credit=credit)
            title = f"training batch {batch.step + 1}, task"
            rules = list(self.writing.rules)
            traces = samples.of_batch(batch, rows.tolist(), self.parts.chat, rules, title=title)
            samples.write(self.run.folder, name, traces)

    def leave(self, state: base.TrainState) -> None:
        """Keeps the last batch for the report (a teacher that moves has moved once more by now)."""
        if self.last is not None:
            self.keep_batch(samples.LAST, self.last, state)

    def add_feedback(self, state: base.TrainState, rollout: base.Rollout, transcripts, step: int):
        """Adds the views, and measures what the teacher thinks of the right action."""
        seed = f"feedback/{self.config.seed}/{step}"
        writing, f = self.writing, self.config.feedback
        if f.hint == "policy" and writing.policy is None:
            bound = dict(prompt=f.policy_prompt, faults=f.faults, tokens=f.hint_tokens)
            key = jax.random.fold_in(jax.random.fold_in(self.key, step), 2**31 - 1)
            ask = functools.partial(writer.write, state.params, self.parts.sampler, key=key, **bound)
            writing = dataclasses.replace(writing, policy=ask)
        rollout, written, counts = feedback.add(rollout, transcripts, self.parts.chat, writing, seed=seed)
        self.run.ledger.drop("located turns beyond feedback.per_rollout", int(counts["feedback/left_out"]))
        self.run.ledger.drop("located turns with an empty hint", int(counts["feedback/empty_hints"]))
        counts |= diagnostics.located(transcripts, [finding for finding, _ in written])
        if written and f.watch_turns and "right" in transcripts[0].turns[0].info:
            some = written[:: max(1, len(written) // f.watch_turns)][: f.watch_turns]
            findings, texts = [finding for finding, _ in some], [text for _, text in some]
            bound = functools.partial(
                evaluate.right_action_probability, config=self.parts.model, chat=self.parts.chat,
                transcripts=transcripts, findings=findings, chunk=self.objective.chunk,
            )  # fmt: skip
            voice = state.params if state.teacher is None else state.teacher
            counts["feedback/teacher_right"] = bound(voice, texts=texts)
            counts["feedback/student_right"] = bound(state.params, texts=[""] * len(texts))
        return rollout, written, counts

    def plan(self, part: base.Rollout) -> packing.Plan | None:
        """Packs a minibatch into rows of rl.row_tokens, where that is on."""
        tokens = self.config.rl.row_tokens
        return packing.plan(part, tokens=tokens, chain_rows=self.rows) if tokens else None

    def step(self, state: base.TrainState, step: int) -> tuple[base.TrainState, dict[str, Any]]:
        """One batch, from tasks to updated parameters."""
        ledger = self.run.ledger
        with ledger.phase("generate"):
            rollout, transcripts, scalars = self.collect(state, step)
        if step == 0:
            self.check_parity(state.params, rollout)
        episodes = chains.episodes(transcripts)
        scalars |= {f"train/{name}": value for name, value in self.summary(episodes).items()}
        scalars["reward"] = float(np.mean([episode.score for episode in episodes]))
        scalars["tokens"] = float(np.sum(rollout.mask_BT))
        scalars |= diagnostics.sampled(rollout, transcripts)
        if self.rows > 1:
            scalars |= diagnostics.chained(transcripts)
        written = []
        if "views" in self.needs:
            with ledger.phase("feedback"):
                rollout, written, counts = self.add_feedback(state, rollout, transcripts, step)
                scalars |= counts
        with ledger.phase("annotate"):
            rollout = self.maker.tell(state, rollout, transcripts)
            readings = self.maker.readings(rollout, transcripts, written, f"readings/{self.config.seed}/{step}")
            self.run.ledger.add(hint=sum(map(views.extra_tokens, jax.tree.leaves(readings, is_leaf=packing.is_views))))
            rollout = self.shape(self.annotate(state, rollout, readings))
            credit = self.credit(rollout)
            learned = self.maker.learn(state, rollout)
            scalars |= {f"credit/{name}": value for name, value in credit.metrics.items()}
        credit = credit.replace(metrics={})
        self.last = samples.Batch(step, rollout, credit, transcripts, written)
        self.keep_rollouts(rollout, transcripts, step)
        if any(text for _, text in written) and not samples.exists(self.run.folder, samples.FIRST_HINTED):
            self.keep_batch(samples.FIRST_HINTED, self.last, state)
        measured, read = [], []
        scalars["learning_rate/share"] = rate = budget.rate(self.config.rl, ledger)
        with ledger.phase("train"):
            for part, scores, rows in minibatches(rollout, credit, self.config, step, self.rows):
                ledger.add(trained=int(np.sum(part.length_B)))
                if scores.view_weight_K is not None:
                    ledger.add(hint=views.extra_tokens(base.given(part.views, "views")))
                plan = self.plan(part)
                part, scores = sharding.put_rows((part, scores), self.parts.mesh)
                state, found = self.update(state, part, scores, plan, rate)
                measured.append(found)
                read.append(rows)
            scalars |= diagnostics.over_updates(jax.device_get(measured), read)
        success = scalars.get("train/success", scalars["reward"])
        aux = schedule.learn(state.aux, jnp.float32(success)) | learned
        return state.replace(aux=aux), scalars

    def check_parity(self, params, rollout: base.Rollout) -> None:
        """Refuses to train when the sampler's log-probs are not the trainer's.

        Raises: ParityError naming the worst difference and its place.
        """
        knobs = dict(temperature=self.objective.temperature, chunk=self.objective.chunk)
        bound = functools.partial(annotate.score_rollout, params, config=self.parts.model, **knobs)
        logp_BT, _ = self._in_parts(bound, rollout)
        gap_BT = np.abs(np.asarray(logp_BT) - np.asarray(rollout.logp_BT))
        worst = float(gap_BT.max())
        self.run.results["parity"] = worst
        if not worst <= self.config.rl.parity_tol:
            row, column = np.unravel_index(gap_BT.argmax(), gap_BT.shape)
            raise ParityError(
                f"the sampler's log-probs differ from the trainer's by {worst:.2g} nats (rollout {row}, token "
                f"{column}; rl.parity_tol={self.config.rl.parity_tol}): refusing to train. A sampler that is meant to "
                "differ needs a higher rl.parity_tol and an rl.correction"
            )

    def enough(self, state: base.TrainState) -> bool:
        """Whether a budget of the stage is spent, or the running success is where it should be."""
        rl = self.config.rl
        return budget.spent(rl, self.run.ledger) >= 1 or float(state.aux["success"]) >= rl.stop_at


def _silent_groups(rollout: base.Rollout, rows: int) -> set[int]:
    """Groups whose returns agree, a chain of `rows` rows counted once: no gradient comes from them."""
    score_B = np.asarray(chains.join(rollout, rows).return_B)
    group_B = np.asarray(rollout.group_B)[::rows]
    return {int(g) for g in np.unique(group_B) if np.ptp(score_B[group_B == g]) <= masked.SPREAD}


def _put_rows(rollout: base.Rollout, other: base.Rollout, rows: np.ndarray) -> base.Rollout:
    def put(old, new):
        old = np.array(old)
        old[rows] = new
        return old

    return jax.tree.map(put, rollout, other).replace(group_B=rollout.group_B, chain_B=rollout.chain_B)


def measure(
    trainer: Trainer, state: base.TrainState, *, episodes: int, when: str, final: bool = False
) -> evaluate.Result:
    """Evaluates the policy without hints, and the hint gain (teacher's weights) at the turns the rules locate.

    Keeps the first transcripts for the report as `samples.BEFORE` ('before') or `samples.AFTER`. when: said of them.
    final: before or after the stage, where a signal may end it: nothing is lost.
    Raises: Stopped.
    """
    config, parts, run = trainer.config, trainer.parts, trainer.run
    if final:
        run.progress.say(f"measuring {when} on {episodes} episodes")
    with trainer.run.ledger.phase("evaluate"):
        result = evaluate.evaluate(
            state.params, parts.evaluator, trainer.summary, seed=config.evaluation.seed, episodes=episodes,
            tick=lambda tokens: run.check_stop(f"the evaluation {when}") if final else None,
        )  # fmt: skip
        voice = state.params if state.teacher is None else state.teacher
        gain = evaluate.hint_gain(
            voice, parts.evaluator, result.transcripts, trainer.writing.rules, trainer.writing.templates,
            hint="template", limit=config.evaluation.gain_turns, seed="evaluation", chunk=config.compute.chunk,
        )  # fmt: skip
        if trainer.text:
            ids = parts.chat.encode(trainer.text)
            gain["perplexity"] = lm.perplexity(state.params, ids, config=parts.model, chunk=config.compute.chunk)
    with run.ledger.phase("report"):
        traces = samples.of_evaluation(result, parts.chat, config.evaluation.samples, when)
        samples.write(run.folder, samples.BEFORE if when == "before" else samples.AFTER, traces)
    return evaluate.Result(result.scalars | gain, result.rollout, result.transcripts)
