"""Makes the columns that a credit variant names in its NEEDS, each where it comes from:

  sampled   mc_value_BT (fresh continuations), tree_B (made with the rollouts, by `rl.Trainer.collect`)
  told      judge_BS (a callable, or the locating rules), baseline_B (remembered in aux)
  scored    what a forward of the policy, the teacher or the hindsight model says; views of their own where it re-reads
  learned   outcome_logp_BTM, from a hindsight model in aux that learns after each batch

Views and what the teacher says of them are made by `feedback.add` and `annotate`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rsi_jax import anchors, annotate, base, chains, continuations, feedback, masked
from rsi_jax import rollout as rollout_lib
from rsi_jax.credit import rewards
from rsi_jax.feedback import hints, locate, views
from rsi_jax.model import hindsight, transformer
from rsi_jax.model.chat import Chat

Judge = Callable[[Sequence[base.Transcript]], Sequence[Sequence[float]]]
VALUED = {"vineppo": "turns", "spo": "cuts"}  # where each variant wants values by continuation
LEARNS = {"hca": "returns", "cocoa": "rewards"}  # which outcomes each variant's hindsight model is told


@dataclasses.dataclass(frozen=True)
class Maker:
    """How columns are made, fixed over a stage.

    needs: columns of the variant and of what it wraps; names: these variants. knobs, credit: parts of the config.
    """

    needs: tuple[str, ...]
    names: tuple[str, ...]
    knobs: Any
    credit: Any
    chat: Chat
    model: transformer.Config
    sampler: rollout_lib.Sampler
    writing: feedback.Writing
    temperature: float
    chunk: int

    def init(self, params, key: jax.Array) -> dict[str, Any]:
        """Starts what the variant learns or remembers, for TrainState.aux."""
        aux: dict[str, Any] = {}
        if "baseline_B" in self.needs:
            aux["baseline"] = jnp.zeros(())
        if "outcome_logp_BTM" in self.needs:
            D, V = transformer.unembedding(params).shape
            head = hindsight.init(key, classes=self._classes, width=D, vocab=V, rank=self.knobs.outcome_rank)
            aux["outcome_model"], aux["outcome_opt"] = head, optax.adam(self.knobs.outcome_lr).init(head)
        return aux

    @property
    def _learner(self) -> str:
        return next(name for name in self.names if name in LEARNS)

    @property
    def _classes(self) -> int:
        return len(self.credit[self._learner].edges) + 1

    def sample(self, state: base.TrainState, rollout: base.Rollout, transcripts, key: jax.Array):
        """Adds what is sampled besides the rollouts: (rollout, scalars to log)."""
        scalars: dict[str, float] = {}
        if self.knobs.anchor_similarity:
            made = anchors.similar_anchors(transcripts, rollout.segments, threshold=self.knobs.anchor_similarity)
            rollout = rollout.replace(segments=rollout.segments.replace(anchor_BS=made))
        if "mc_value_BT" in self.needs:
            kind = next(VALUED[name] for name in self.names if name in VALUED)
            if kind == "turns":
                places_BT = continuations.turn_starts(rollout, self.knobs.every)
            else:
                cuts = {"prob_max": self.credit.spo.prob_max, "interval": self.knobs.cut_interval}
                places_BT = continuations.cut_points(rollout, **cuts)
            bound = {"places_BT": places_BT, "count": self.knobs.continuations}
            args = (state.params, rollout, transcripts, key, self.sampler)
            value_BT, scalars = continuations.value_column(*args, **bound)
            rollout = rollout.replace(mc_value_BT=value_BT)
        return rollout, scalars

    def tell(self, state: base.TrainState, rollout: base.Rollout, transcripts) -> base.Rollout:
        """Adds what a judge or the memory says."""
        if "judge_BS" in self.needs:
            name = self.knobs.judge
            judge = find_judge(name) if name else functools.partial(_by_rules, self.writing.rules)
            judge_BS = judged(judge, transcripts, capacity=rollout.segments.kind_BS.shape[1], name=name)
            rollout = rollout.replace(judge_BS=judge_BS)
        if "baseline_B" in self.needs:
            rollout = rollout.replace(baseline_B=np.full(len(transcripts), state.aux["baseline"], np.float32))
        return rollout

    def readings(self, rollout: base.Rollout, transcripts, written, seed: str) -> dict[str, Any]:
        """Makes the views that the scored columns want beside the rollout's own."""
        made: dict[str, Any] = {}
        if "wrong_logp_KU" in self.needs:
            findings, own = [f for f, text in written if text], base.given(rollout.views, "views")
            args = (findings, transcripts, self.writing.templates)
            drawn = [hints.write("wrong", *args, seed=seed)]
            drawn += [hints.write("shuffled", *args, seed=f"{seed}/{i}") for i in range(1, self.knobs.wrong_hints)]
            made["wrong"] = tuple(views.rehint(own, [self._ids(text) for text in texts]) for texts in drawn)
        if "hindsight_logp_BT" in self.needs:
            made["hindsight"] = self._hindsight(transcripts)
        if "answer_logp_BS" in self.needs:
            ids = best_answers(rollout, transcripts)
            sizes = {"per_rollout": self.sampler.env.max_turns, "capacity": self.sampler.sampling.max_tokens}
            made["answer"] = views.probe(transcripts, ids, **sizes)
        return made

    def _ids(self, text: str) -> list[int]:
        return self.chat.hint(text) if text else []

    def _hindsight(self, transcripts: Sequence[base.Transcript]) -> base.Views:
        """A view on every turn, whose hint says how the rollout ended."""
        texts = []
        for episode in chains.episodes(transcripts):
            last = episode.turns[-1]
            values = {"shown": " ".join(message["content"] for message in last.shown), "said": last.text}
            texts.append(hints.fill(self.knobs.hindsight, values, "columns.hindsight", list(values)))
        findings = [locate.Finding(b, t, "hindsight") for b, x in enumerate(transcripts) for t in range(len(x.turns))]
        ids = [self._ids(texts[episode]) for episode in chains.episode_of(transcripts)]
        capacity = self.knobs.hindsight_tokens
        made = views.build(
            findings,
            [[0]] * len(findings),  # a place; an empty text must be read as well
            transcripts,
            ["hindsight"],
            per_rollout=self.sampler.env.max_turns,
            hint_capacity=capacity,
            branch=0,
        )
        return views.rehint(made, [ids[finding.row] for finding in findings], field="columns.hindsight_tokens")

    def learn(self, state: base.TrainState, rollout: base.Rollout) -> dict[str, Any]:
        """Advances what the variant learns by a batch, after its credit was made: the new parts of aux."""
        new: dict[str, Any] = {}
        whole = chains.join(rollout, self.sampler.chains.rows)
        if "baseline_B" in self.needs:
            decay = self.credit.rae.decay
            new["baseline"] = rewards.running_baseline(state.aux["baseline"], whole, decay=decay)
        if "outcome_logp_BTM" in self.needs:
            name = self._learner
            weight_BTM = rewards.hindsight_weights(whole, tuple(self.credit[name].edges), LEARNS[name])
            weight_BTM = weight_BTM.reshape(*rollout.tokens_BT.shape, -1)
            head, opt = state.aux["outcome_model"], state.aux["outcome_opt"]
            steps = {"steps": self.knobs.outcome_steps, "lr": self.knobs.outcome_lr}
            new["outcome_model"], new["outcome_opt"] = _fit(
                state.params, rollout, weight_BTM, head, opt, config=self.model,
                temperature=self.temperature, chunk=self.chunk, **steps,
            )  # fmt: skip
        return new


@functools.partial(jax.jit, static_argnames=("config", "temperature", "chunk", "steps", "lr"))
def _fit(params, rollout, weight_BTM, head, opt, *, config, temperature, chunk, steps, lr):
    """A few steps of maximum likelihood of the sampled tokens, given the classes that came after them."""
    hidden_BTD = jax.lax.stop_gradient(annotate.hidden_states(params, config, rollout))
    unembedding_DV = jax.lax.stop_gradient(transformer.unembedding(params))
    share_BTM, optimizer = weight_BTM / jnp.maximum(jnp.sum(weight_BTM), 1.0), optax.adam(lr)

    def loss(head):
        total = 0.0
        for m, kernel_DV in enumerate(hindsight.unembeddings(head, unembedding_DV)):
            scored = {"temperature": temperature, "chunk": chunk, "unembedding": kernel_DV}
            logp_BT, _ = annotate.token_logp(params, config, hidden_BTD, rollout, **scored)
            total -= jnp.sum(jnp.where(share_BTM[..., m] > 0, share_BTM[..., m] * logp_BT, 0.0))
        return total

    def step(carry, _):
        head, opt = carry
        change, opt = optimizer.update(jax.grad(loss)(head), opt, head)
        return (optax.apply_updates(head, change), opt), None

    (head, opt), _ = jax.lax.scan(step, (head, opt), None, length=steps)
    return head, opt


def find_judge(name: str) -> Judge:
    """Imports the judge 'module:function': transcripts -> a score in [0, 1] for each turn of each.

    Raises: base.InputError.
    """
    return base.find_function(name, field="columns.judge", example="my_module:judge")


def _by_rules(rules: Mapping[str, locate.Rule], transcripts: Sequence[base.Transcript]) -> list[list[float]]:
    """The judge that needs none: a turn at which a locating rule fires is worth 0, any other and a summary 1."""
    return [
        [
            float(record.summary or not any(rule(transcript, turn) for rule in rules.values()))
            for turn, record in enumerate(transcript.turns)
        ]
        for transcript in transcripts
    ]


def judged(judge: Judge, transcripts: Sequence[base.Transcript], *, capacity: int, name: str) -> np.ndarray:
    """Asks a judge: judge_BS float32 [B, capacity], NaN beyond the turns; it is not shown rows without a turn.

    Raises: base.InputError naming the task whose scores are too few or out of range.
    """
    judge_BS = np.full((len(transcripts), capacity), np.nan, np.float32)
    asked = [(row, transcript) for row, transcript in enumerate(transcripts) if transcript.turns]
    scores = judge([transcript for _, transcript in asked])
    if len(scores) != len(asked):
        raise base.InputError(f"columns.judge={name!r} scored {len(scores)} of {len(asked)} rollouts")
    for (row, transcript), own in zip(asked, scores, strict=True):
        sound = all(isinstance(x, int | float) and math.isfinite(x) and 0 <= x <= 1 for x in own)
        if len(own) != len(transcript.turns) or not sound:
            raise base.InputError(
                f"columns.judge={name!r}: task {transcript.seed} has {len(transcript.turns)} turns, each needs a score "
                f"in [0, 1], got {list(own)[:8]}"
            )
        judge_BS[row, : len(own)] = own
    return judge_BS


def best_answers(rollout: base.Rollout, transcripts: Sequence[base.Transcript]) -> list[list[int]]:
    """The answer that each row's group knows: the last action of its best episode; none where all earn the same.

    It stands for the answer of a data set, where there is none.
    """
    episode_of = chains.episode_of(transcripts)
    rows = len(transcripts) // (episode_of[-1] + 1)
    return_B = np.asarray(rollout.return_B).reshape(-1, rows).sum(axis=1)
    group_B, weight_B = np.asarray(rollout.group_B)[::rows], np.asarray(rollout.weight_B)[::rows]
    answers: dict[int, list[int]] = {}
    for group in np.unique(group_B).tolist():
        own = np.flatnonzero((group_B == group) & np.isfinite(return_B) & (weight_B > 0))
        if own.size and np.ptp(return_B[own]) > masked.SPREAD:
            best = int(own[np.argmax(return_B[own])])
            answers[group] = _last_action(transcripts[best * rows : (best + 1) * rows])
    return [answers.get(group, []) for group in np.repeat(group_B, rows).tolist()]


def _last_action(parts: Sequence[base.Transcript]) -> list[int]:
    acts = [(part, turn) for part in parts for turn in part.turns if not turn.summary]
    part, turn = acts[-1]
    return part.tokens[turn.start : turn.start + turn.length]
