"""The host loop over turns: sample <-> environment, token-in token-out, continuous batching over slots.

A rollout's tokens are only ever appended: what the sampler drew, then the ids of the new messages. The cache of a slot
holds its stream; when an episode ends, the slot takes the next task. Every row has its own key, so a batch of tasks
gives the same rollouts for any number of slots.

With `Chains` an episode whose context fills up goes on in another row: the policy summarises what was, and the new row
begins with the task and the summary. The environment does not notice.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base, envs, sample
from rsi_jax.model import transformer
from rsi_jax.model.chat import Chat


@dataclasses.dataclass(frozen=True)
class Task:
    """One rollout to collect: the environment's seed and the group that shares its baseline.

    prefix, turns, tokens: play on from the first `turns` turns of this transcript of the same seed and the first
    `tokens` sampled tokens of the turn after them; what it said there counts as observation (it is not trained on), and
    its rewards stay where they landed. A turn that begins with such tokens is one turn: one text to the environment,
    and one budget, so what is sampled beyond it is cut (each token depends on those before it only).
    """

    seed: int
    group: int
    prefix: base.Transcript | None = None
    turns: int = 0
    tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Chains:
    """How an episode whose context fills up goes on in another row, after the policy has summarised it.

    rows: of an episode at most; 1 = it never goes on. at: tokens in the context from which on the policy is asked for a
    summary. prompt: what the user message says that asks. tokens: budget of a summary, the stop token included.
    shown: text of the user message that holds the `{summary}` in the new row.

    Source: Composer 2 (https://arxiv.org/abs/2603.24477), self-summarisation.
    """

    rows: int = 1
    at: int = 0
    prompt: str = ""
    tokens: int = 1
    shown: str = "{summary}"


@dataclasses.dataclass(frozen=True)
class Sampler:
    """Everything that turns tasks into rollouts, fixed over a stage.

    capacity: tokens of context per row. slots: streams decoded at a time.
    """

    env: envs.Env
    chat: Chat
    config: transformer.Config
    sampling: sample.Sampling
    capacity: int
    slots: int
    chains: Chains = Chains()


@dataclasses.dataclass
class _Row:
    """One stream: its text and its columns so far."""

    transcript: base.Transcript
    logp: list[float] = dataclasses.field(default_factory=list)
    kept: list[float] = dataclasses.field(default_factory=list)
    segments: list[dict[str, Any]] = dataclasses.field(default_factory=list)


class _Episode:
    """One task in flight: the row that it is in, and those before it."""

    def __init__(self, sampler: Sampler, index: int, task: Task):
        self.index, self.env, self.chat, self.capacity = index, sampler.env, sampler.chat, sampler.capacity
        self.chains, self.sampling = sampler.chains, sampler.sampling
        self.summing = dataclasses.replace(self.sampling, max_tokens=self.chains.tokens)
        self.state, messages = sampler.env.reset(task.seed)
        self.task, self.messages = task, list(messages)
        self.rows: list[_Row] = []
        self.opening: list[int] = []  # replayed tokens of the turn that is about to be sampled
        self.due: list[base.Message] | None = None  # while a summary is sampled: what the new row must show
        self.done = False
        chunk = self.chat.start(messages)
        if len(chunk.ids) >= self.capacity:
            raise base.InputError(
                f"task {task.seed}: its prompt has {len(chunk.ids)} tokens, the context holds {self.capacity}; "
                "raise rollout.capacity or shorten the prompt"
            )
        self._begin(chunk, messages)
        if task.prefix is not None:
            if self.chains.rows > 1:
                raise base.InputError("rollout.summarise_at: an episode in several rows is not played on; set it to 0")
            self._replay(task.prefix, task.turns)
            self._open(task.prefix, task.turns, task.tokens)

    def _replay(self, prefix: base.Transcript, turns: int) -> None:
        """Plays the first turns of a transcript again; the cache holds none of it yet."""
        for record in prefix.turns[:turns]:
            ids, place = prefix.tokens[record.start : record.start + record.length], len(self.row.segments)
            finish = base.STOP if ids[-1] in self.chat.stop_ids else base.LENGTH
            self.act(ids, [0.0] * len(ids), [1.0] * len(ids), finish)
            self.row.segments[place] |= dict(kind=base.OBSERVATION, finish=base.NOT_SAMPLED)
        tokens, self.cached = self.tokens, 0
        if tokens != prefix.tokens[: len(tokens)]:
            raise base.InputError(f"task {prefix.seed}: its environment answers otherwise when it is played again")
        if self.done:
            raise ValueError(f"task {prefix.seed}: the episode is over after {turns} turns, nothing can follow")

    def _open(self, prefix: base.Transcript, turns: int, count: int) -> None:
        """Plays the first `count` tokens of a turn again; they lengthen the segment before the action."""
        if not count:
            return
        ids: list[int] = []
        for turn in prefix.turns[turns : turns + 1]:  # none when the transcript ends here
            ids = prefix.tokens[turn.start : turn.start + min(count, turn.length)]
        full = count >= self.sampling.max_tokens or len(self.tokens) + count >= self.capacity
        if len(ids) < count or ids[-1] in self.chat.stop_ids or full:
            raise ValueError(
                f"task {prefix.seed}: turn {turns} is over within {count} tokens, nothing can follow in it"
            )
        self.opening = ids
        self.row.segments[-1]["length"] += count
        self._extend(ids, [0.0] * count, [1.0] * count)

    @property
    def tokens(self) -> list[int]:
        """The stream of the row."""
        return self.row.transcript.tokens

    @property
    def budget(self) -> sample.Sampling:
        """How the next turn is sampled."""
        return self.sampling if self.due is None else self.summing

    def _begin(self, chunk, messages) -> None:
        """Begins a row; nothing of it is in the cache."""
        self.row = _Row(base.Transcript(self.task.seed, self.task.group, part=len(self.rows)))
        self.rows.append(self.row)
        self.cached = 0
        self._append(chunk, messages, base.PROMPT)

    def _append(self, chunk, messages, kind: int) -> None:
        start = len(self.tokens)
        self.shown, self.insert_at = list(messages), start + chunk.insert_at
        self._grow(chunk.ids, [0.0] * len(chunk.ids), [1.0] * len(chunk.ids), kind)

    def _grow(self, ids, logp, kept, kind: int) -> None:
        self.row.segments.append(dict(start=len(self.tokens), length=len(ids), kind=kind))
        self._extend(ids, logp, kept)

    def _extend(self, ids, logp, kept) -> None:
        self.row.transcript.tokens += ids
        self.row.logp += logp
        self.row.kept += kept

    def pending(self) -> list[int]:
        return self.tokens[self.cached :]

    def act(self, ids: list[int], logp: list[float], kept: list[float], finish: int) -> None:
        """Takes a sampled turn: an action, which the environment answers, or a summary, after which a row begins."""
        self._grow(ids, logp, kept, base.ACTION)
        ids, self.opening = self.opening + ids, []
        end = len(self.tokens)
        start, self.cached = end - len(ids), end - 1
        record = base.TurnRecord(self.shown, self.chat.text(ids), start, len(ids), self.insert_at, finish)
        self.row.transcript.turns.append(record)
        if self.due is None:
            self._step(record, ids[-1])
        else:
            self._go_on(record, ids)

    def _step(self, record: base.TurnRecord, last_id: int) -> None:
        """Steps the environment by an action and appends the observation."""
        self.state, reply = self.env.step(self.state, record.text, record.finish)
        self.done = reply.done
        if reply.done and record.finish == base.STOP:
            record.finish = base.ENV
        record.reply, record.reward, record.info = list(reply.messages), reply.reward, reply.info
        self.row.segments[-1] |= dict(
            reward=reply.reward, discount=0.0 if reply.done else 1.0, finish=record.finish, anchor=reply.anchor
        )
        if not reply.done:
            self._answer(record.reply, last_id)

    def _answer(self, messages: list[base.Message], last_id: int) -> None:
        """Appends the observation; where the context fills up, asks for a summary of it, if a row is left.

        An observation that does not fit is left to the next row; the summary is then one of what was before it.
        """
        end, ask = len(self.tokens), [base.Message(role="user", content=self.chains.prompt)]
        offers = [messages]
        left = len(self.rows) < self.chains.rows
        if left and end + len(self.chat.continue_(messages, last_id=last_id).ids) >= self.chains.at:
            offers = [messages + ask, ask, messages]
        for shown in offers:
            chunk = self.chat.continue_(shown, last_id=last_id)
            if end + len(chunk.ids) < self.capacity:
                self.due = None if shown is messages else messages
                self._append(chunk, shown, base.OBSERVATION)
                return
        self._truncate()

    def _truncate(self) -> None:
        """Ends the episode where no room is left to act again: truncated, not terminal."""
        self.row.transcript.truncated = self.done = True
        self.row.segments[-1]["finish"] = self.row.transcript.turns[-1].finish = base.LENGTH

    def _go_on(self, record: base.TurnRecord, ids: list[int]) -> None:
        """Ends the row with its summary; the next one shows the task, the summary and what is due.

        Special tokens that were sampled within the summary are no part of its text there.
        """
        record.summary, due, self.due = True, base.given(self.due, "due"), None
        self.row.segments[-1] |= dict(reward=0.0, discount=1.0, finish=record.finish)
        special = set(self.chat.tokenizer.special_tokens.values())
        text = self.chains.shown.replace("{summary}", self.chat.text([id_ for id_ in ids if id_ not in special]))
        messages = [*self.messages, base.Message(role="user", content=text), *due]
        chunk = self.chat.start(messages)
        if len(chunk.ids) >= self.capacity:
            self._truncate()
        else:
            self._begin(chunk, messages)


def _bucket(length: int) -> int:
    size = 4
    while size < length:
        size *= 2
    return size


def collect(
    params,
    tasks: Sequence[Task],
    key: jax.Array,
    sampler: Sampler,
    *,
    tick: Callable[[int], None] = lambda tokens: None,
) -> tuple[base.Rollout, list[base.Transcript]]:
    """Plays one episode per task: (rollout as host arrays, transcripts), both in the order of `tasks`.

    With chains every task has `sampler.chains.rows` rows, one after the other; those that it does not use are empty.

    key: consumed; row i samples with fold_in(key, i), a later row of its chain with its own. tick: called with the
      tokens sampled after each turn.
    Raises: base.InputError when a prompt does not fit the context, or a prefix cannot be replayed.
    """
    rows = sampler.chains.rows
    keys = [key, *(jax.random.fold_in(key, 2**31 - part) for part in range(1, rows))]
    key_PB = jnp.stack([jax.vmap(functools.partial(jax.random.fold_in, k))(jnp.arange(len(tasks))) for k in keys])
    waiting = list(enumerate(tasks))[::-1]
    slots: list[_Episode | None] = [None] * min(sampler.slots, len(tasks))
    finished: dict[int, _Episode] = {}
    cache = transformer.new_cache(sampler.config, len(slots), sampler.capacity)
    while True:
        for i, episode in enumerate(slots):
            if episode is not None and episode.done:
                finished[episode.index] = episode
                slots[i] = None
            if slots[i] is None and waiting:
                slots[i] = _Episode(sampler, *waiting.pop())
        if not any(slots):
            break
        budgets = [episode.budget if episode else None for episode in slots]
        for sampling in filter(None, dict.fromkeys(budgets)):
            acting = [e if budget == sampling else None for e, budget in zip(slots, budgets, strict=True)]
            cache, sampled = _sample_turn(params, cache, acting, key_PB, sampler.config, sampling)
            tick(sampled)
    played = [row for index, task in enumerate(tasks) for row in _padded(finished[index].rows, task, rows)]
    segments = 2 * sampler.env.max_turns  # of a row: one that ends with a summary has not had the last turn
    rollout = to_rollout(played, capacity=sampler.capacity, segments=segments, rows=rows)
    return rollout, [row.transcript for row in played]


def _padded(used: list[_Row], task: Task, rows: int) -> list[_Row]:
    """The rows of a chain and, after them, those that it did not use."""
    unused = range(len(used), rows)
    return [*used, *(_Row(base.Transcript(task.seed, task.group, part=part)) for part in unused)]


def _sample_turn(params, cache, slots, key_PB, config: transformer.Config, sampling: sample.Sampling):
    """Samples one turn of the slots that are given; the others are left as they are."""
    width = _bucket(max(len(e.pending()) for e in slots if e))
    chunk = np.zeros((len(slots), width), np.int32)
    chunk_length, cached, index, part = (np.zeros(len(slots), np.int32) for _ in range(4))
    for i, episode in enumerate(slots):
        if episode:
            pending = episode.pending()
            chunk[i, : len(pending)], chunk_length[i] = pending, len(pending)
            cached[i], index[i], part[i] = episode.cached, episode.index, episode.row.transcript.part
    cache, out = sample.turn(
        params, cache, chunk, chunk_length, cached, key_PB[part, index], config=config, sampling=sampling
    )
    out = jax.device_get(out)
    for i, episode in enumerate(slots):
        if episode:
            n = min(int(out.length_B[i]), sampling.max_tokens - len(episode.opening))
            columns = (out.tokens_BA[i, :n], out.logp_BA[i, :n], out.kept_mass_BA[i, :n])
            finish = int(out.finish_B[i]) if n == out.length_B[i] else base.LENGTH
            episode.act(*(column.tolist() for column in columns), finish)
    return cache, int(out.length_B.sum())


def complete(params, prompts: Sequence[list[int]], key: jax.Array, sampler: Sampler) -> list[tuple[list[int], int]]:
    """Samples one turn after each prompt (ids): (sampled ids, finish reason) of each, in order."""
    key_B = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(prompts)))
    out = []
    for first in range(0, len(prompts), sampler.slots):
        part = prompts[first : first + sampler.slots]
        width = _bucket(max(map(len, part)))
        chunk, length = np.zeros((sampler.slots, width), np.int32), np.zeros(sampler.slots, np.int32)
        for i, ids in enumerate(part):
            chunk[i, : len(ids)], length[i] = ids, len(ids)
        cache = transformer.new_cache(sampler.config, sampler.slots, width + sampler.sampling.max_tokens)
        rows = np.minimum(np.arange(first, first + sampler.slots), len(prompts) - 1)
        _, turn = sample.turn(
            params,
            cache,
            chunk,
            length,
            np.zeros_like(length),
            key_B[rows],
            config=sampler.config,
            sampling=sampler.sampling,
        )
        turn = jax.device_get(turn)
        for i in range(len(part)):
            out.append((turn.tokens_BA[i, : turn.length_B[i]].tolist(), int(turn.finish_B[i])))
    return out


def to_rollout(played, *, capacity: int, segments: int, rows: int = 1) -> base.Rollout:
    """Lays streams (transcript, logp, kept, segments) out as columns: T = the capacity, S = `segments`.

    rows: of each chain, one after the other; those without a token get weight 0.
    """
    B, T, S = len(played), capacity, segments
    tokens, logp = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
    kept = np.ones((B, T), np.float32)
    fill = dict(start=0, length=0, kind=base.PROMPT, reward=0.0, discount=1.0, finish=base.NOT_SAMPLED)
    fill |= dict(anchor=base.NO_ANCHOR, parent=base.NO_PARENT)
    table: dict[str, Any] = {
        f"{k}_BS": np.full((B, S), v, np.float32 if isinstance(v, float) else np.int32) for k, v in fill.items()
    }
    for b, row in enumerate(played):
        n = len(row.transcript.tokens)
        tokens[b, :n], logp[b, :n], kept[b, :n] = row.transcript.tokens, row.logp, row.kept
        for s, segment in enumerate(row.segments):
            for name, value in segment.items():
                table[f"{name}_BS"][b, s] = value
    columns: dict[str, Any] = dict(
        tokens_BT=tokens,
        logp_BT=logp,
        kept_mass_BT=kept,
        group_B=np.array([row.transcript.group for row in played], np.int32),
        weight_B=np.array([bool(row.transcript.tokens) for row in played], np.float32),
        chain_B=np.arange(B, dtype=np.int32) // rows,
    )
    return base.Rollout(segments=base.Segments(**table), **columns)


def trim(rollout: base.Rollout, multiple: int = 64) -> base.Rollout:
    """Cuts the padding of host columns to the longest rollout, rounded up so that few shapes are compiled."""
    s = rollout.segments
    used = int(np.max(np.asarray(s.start_BS) + np.asarray(s.length_BS)))
    width = min(rollout.tokens_BT.shape[1], -(-used // multiple) * multiple)
    cut = {name: getattr(rollout, name)[:, :width] for name in ("tokens_BT", "logp_BT", "kept_mass_BT")}
    return rollout.replace(**cut)
