"""The host loop over turns: sample <-> environment, token-in token-out, continuous batching over slots.

A rollout's tokens are only ever appended: what the sampler drew, then the ids of the new messages. The cache of a slot
holds its stream; when an episode ends, the slot takes the next task. Every row has its own key, so a batch of tasks
gives the same rollouts for any number of slots.
"""

import dataclasses
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
class Sampler:
    """Everything that turns tasks into rollouts, fixed over a stage.

    capacity: tokens of context per rollout. slots: streams decoded at a time.
    """

    env: envs.Env
    chat: Chat
    config: transformer.Config
    sampling: sample.Sampling
    capacity: int
    slots: int


class _Episode:
    """One stream in flight."""

    def __init__(self, sampler: Sampler, row: int, task: Task):
        self.row, self.env, self.chat, self.capacity = row, sampler.env, sampler.chat, sampler.capacity
        self.budget = sampler.sampling.max_tokens
        self.state, messages = sampler.env.reset(task.seed)
        self.transcript = base.Transcript(task.seed, task.group)
        self.logp: list[float] = []
        self.kept: list[float] = []
        self.segments: list[dict[str, Any]] = []
        self.opening: list[int] = []  # replayed tokens of the turn that is about to be sampled
        self.cached = 0
        self.done = False
        chunk = self.chat.start(messages)
        if len(chunk.ids) >= self.capacity:
            raise base.InputError(
                f"task {task.seed}: its prompt has {len(chunk.ids)} tokens, the context holds {self.capacity}; "
                "raise rollout.capacity or shorten the prompt"
            )
        self._append(chunk, messages, base.PROMPT)
        if task.prefix is not None:
            self._replay(task.prefix, task.turns)
            self._open(task.prefix, task.turns, task.tokens)

    def _replay(self, prefix: base.Transcript, turns: int) -> None:
        """Plays the first turns of a transcript again; the cache holds none of it yet."""
        for record in prefix.turns[:turns]:
            ids, place = prefix.tokens[record.start : record.start + record.length], len(self.segments)
            finish = base.STOP if ids[-1] in self.chat.stop_ids else base.LENGTH
            self.act(ids, [0.0] * len(ids), [1.0] * len(ids), finish)
            self.segments[place] |= dict(kind=base.OBSERVATION, finish=base.NOT_SAMPLED)
        tokens, self.cached = self.transcript.tokens, 0
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
        full = count >= self.budget or len(self.transcript.tokens) + count >= self.capacity
        if len(ids) < count or ids[-1] in self.chat.stop_ids or full:
            raise ValueError(
                f"task {prefix.seed}: turn {turns} is over within {count} tokens, nothing can follow in it"
            )
        self.opening = ids
        self.segments[-1]["length"] += count
        self._extend(ids, [0.0] * count, [1.0] * count)

    def _append(self, chunk, messages, kind: int) -> None:
        start = len(self.transcript.tokens)
        self.shown, self.insert_at = list(messages), start + chunk.insert_at
        self._grow(chunk.ids, [0.0] * len(chunk.ids), [1.0] * len(chunk.ids), kind)

    def _grow(self, ids, logp, kept, kind: int) -> None:
        self.segments.append(dict(start=len(self.transcript.tokens), length=len(ids), kind=kind))
        self._extend(ids, logp, kept)

    def _extend(self, ids, logp, kept) -> None:
        self.transcript.tokens += ids
        self.logp += logp
        self.kept += kept

    def pending(self) -> list[int]:
        return self.transcript.tokens[self.cached :]

    def act(self, ids: list[int], logp: list[float], kept: list[float], finish: int) -> None:
        """Takes a sampled turn, steps the environment, appends the observation."""
        self._grow(ids, logp, kept, base.ACTION)
        ids, self.opening = self.opening + ids, []
        end = len(self.transcript.tokens)
        start, self.cached = end - len(ids), end - 1
        text = self.chat.text(ids)
        self.state, reply = self.env.step(self.state, text, finish)
        self.done = reply.done
        if reply.done and finish == base.STOP:
            finish = base.ENV
        self.segments[-1] |= dict(
            reward=reply.reward, discount=0.0 if reply.done else 1.0, finish=finish, anchor=reply.anchor
        )
        record = base.TurnRecord(self.shown, text, start, len(ids), self.insert_at, finish, list(reply.messages))
        record.reward, record.info = reply.reward, reply.info
        self.transcript.turns.append(record)
        if reply.done:
            return
        chunk = self.chat.continue_(reply.messages, last_id=ids[-1])
        if end + len(chunk.ids) >= self.capacity:  # no room to act again: truncated, not terminal
            self.transcript.truncated = self.done = True
            self.segments[-1]["finish"] = record.finish = base.LENGTH
            return
        self._append(chunk, reply.messages, base.OBSERVATION)


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

    key: consumed; row i samples with fold_in(key, i). tick: called with the tokens sampled after each turn.
    Raises: base.InputError when a prompt does not fit the context, or a prefix cannot be replayed.
    """
    key_B = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(tasks)))
    waiting = list(enumerate(tasks))[::-1]
    slots: list[_Episode | None] = [None] * min(sampler.slots, len(tasks))
    finished: dict[int, _Episode] = {}
    cache = transformer.new_cache(sampler.config, len(slots), sampler.capacity)
    while True:
        for i, episode in enumerate(slots):
            if episode is not None and episode.done:
                finished[episode.row] = episode
                slots[i] = None
            if slots[i] is None and waiting:
                slots[i] = _Episode(sampler, *waiting.pop())
        if not any(slots):
            break
        cache, sampled = _sample_turn(params, cache, slots, key_B, sampler)
        tick(sampled)
    episodes = [finished[row] for row in range(len(tasks))]
    rollout = to_rollout(episodes, capacity=sampler.capacity, segments=2 * sampler.env.max_turns)
    return rollout, [episode.transcript for episode in episodes]


def _sample_turn(params, cache, slots, key_B, sampler: Sampler):
    width = _bucket(max(len(e.pending()) for e in slots if e))
    chunk = np.zeros((len(slots), width), np.int32)
    chunk_length, cached, row = (np.zeros(len(slots), np.int32) for _ in range(3))
    for i, episode in enumerate(slots):
        if episode:
            pending = episode.pending()
            chunk[i, : len(pending)], chunk_length[i] = pending, len(pending)
            cached[i], row[i] = episode.cached, episode.row
    cache, out = sample.turn(
        params, cache, chunk, chunk_length, cached, key_B[row], config=sampler.config, sampling=sampler.sampling
    )
    out = jax.device_get(out)
    for i, episode in enumerate(slots):
        if episode:
            n = min(int(out.length_B[i]), sampler.sampling.max_tokens - len(episode.opening))
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


def to_rollout(episodes, *, capacity: int, segments: int) -> base.Rollout:
    """Lays episodes (transcript, logp, kept, segments) out as columns: T = the capacity, S = `segments`."""
    B, T, S = len(episodes), capacity, segments
    tokens, logp = np.zeros((B, T), np.int32), np.zeros((B, T), np.float32)
    kept = np.ones((B, T), np.float32)
    fill = dict(start=0, length=0, kind=base.PROMPT, reward=0.0, discount=1.0, finish=base.NOT_SAMPLED)
    fill |= dict(anchor=base.NO_ANCHOR, parent=base.NO_PARENT)
    table: dict[str, Any] = {
        f"{k}_BS": np.full((B, S), v, np.float32 if isinstance(v, float) else np.int32) for k, v in fill.items()
    }
    for b, episode in enumerate(episodes):
        n = len(episode.transcript.tokens)
        tokens[b, :n], logp[b, :n], kept[b, :n] = episode.transcript.tokens, episode.logp, episode.kept
        for s, segment in enumerate(episode.segments):
            for name, value in segment.items():
                table[f"{name}_BS"][b, s] = value
    columns: dict[str, Any] = dict(
        tokens_BT=tokens,
        logp_BT=logp,
        kept_mass_BT=kept,
        group_B=np.array([episode.transcript.group for episode in episodes], np.int32),
        weight_B=np.ones(B, np.float32),
        chain_B=np.arange(B, dtype=np.int32),
    )
    return base.Rollout(segments=base.Segments(**table), **columns)


def trim(rollout: base.Rollout, multiple: int = 64) -> base.Rollout:
    """Cuts the padding of host columns to the longest rollout, rounded up so that few shapes are compiled."""
    s = rollout.segments
    used = int(np.max(np.asarray(s.start_BS) + np.asarray(s.length_BS)))
    width = min(rollout.tokens_BT.shape[1], -(-used // multiple) * multiple)
    cut = {name: getattr(rollout, name)[:, :width] for name in ("tokens_BT", "logp_BT", "kept_mass_BT")}
    return rollout.replace(**cut)
