"""Recorded conversations as rollouts: rendered by a model's chat, scored by its weights, credited; nothing is trained.

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", "content": "..", "reward": 1}], "group": "a"}

Assistant messages are the actions; all others are the prompt or observations. A message's `reward` lands where the
message ends (0 when absent). Lines of one `group` share a baseline; lines without it do when their prompts are equal.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rsi_jax import annotate, base, feedback, packing
from rsi_jax import rollout as rollout_lib
from rsi_jax.model.chat import Chat
from rsi_jax.train import samples, setup


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One line: its number, messages and their rewards, and what names its group."""

    number: int
    messages: list[base.Message]
    rewards: list[float]
    group: str


def read(path: str) -> list[Conversation]:
    """Reads the conversations of a JSONL file.

    Raises: base.InputError naming the file and the line.
    """
    try:
        texts = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise base.InputError(f"--trace={path!r} cannot be read: {error}") from error
    found = []
    for number, text in enumerate(texts, 1):
        if text.strip():
            try:
                found.append(_conversation(number, text))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                why = f"no {error} in it" if isinstance(error, KeyError) else error
                raise base.InputError(f"{path} line {number}: {why}") from error
    if not found:
        raise base.InputError(f"{path} holds no conversations")
    return found


def _conversation(number: int, text: str) -> Conversation:
    record = json.loads(text)
    if not isinstance(record, dict) or not isinstance(record["messages"], list):
        raise ValueError('not {"messages": [{"role", "content", "reward"?}, ...]}')
    messages, rewards = [], []
    for place, message in enumerate(record["messages"], 1):
        role, content, reward = message["role"], message["content"], message.get("reward", 0.0)
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(f"message {place} needs 'role' and 'content' as text")
        if isinstance(reward, bool | str) or reward is None or not math.isfinite(reward):
            raise ValueError(f"the reward of message {place} is {reward!r}, no finite number")
        if role == "assistant" and (not messages or messages[-1]["role"] == "assistant"):
            raise ValueError(f"message {place} is the assistant's, with nothing before it to answer")
        messages.append(base.Message(role=role, content=content))
        rewards.append(float(reward))
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError("no assistant message to score")
    named = record.get("group")
    key = messages[: roles.index("assistant")] if named is None else {"group": named}
    return Conversation(number, messages, rewards, json.dumps(key, sort_keys=True))


class _Stream:
    """One conversation as the ids that the model would have seen and said."""

    def __init__(self, conversation: Conversation, chat: Chat, group: int):
        self.chat = chat
        self.transcript = base.Transcript(conversation.number, group)
        self.segments: list[dict[str, Any]] = []
        shown, reward = [], 0.0
        for message, value in zip(conversation.messages, conversation.rewards, strict=True):
            if message["role"] != "assistant":
                shown, reward = [*shown, message], reward + value
                continue
            insert_at = self._show(shown, reward)
            start, ids = len(self.transcript.tokens), chat.action(message["content"])
            self._grow(ids, base.ACTION, value, base.STOP)
            record = base.TurnRecord(shown, message["content"], start, len(ids), insert_at, base.STOP, reward=value)
            self.transcript.turns.append(record)
            shown, reward = [], 0.0
        if shown:
            self._show(shown, reward, header=False)
        last = next(segment for segment in reversed(self.segments) if segment["kind"] == base.ACTION)
        last["finish"] = self.transcript.turns[-1].finish = base.ENV
        self.segments[-1]["discount"] = 0.0
        self.logp, self.kept = ([fill] * len(self.transcript.tokens) for fill in (0.0, 1.0))

    def _show(self, messages: list[base.Message], reward: float, *, header: bool = True) -> int:
        """Appends the prompt or an observation; returns where a hint may stand."""
        turns, start = self.transcript.turns, len(self.transcript.tokens)
        chunk = self.chat.continue_(messages) if turns else self.chat.start(messages)
        ids = chunk.ids if header else chunk.ids[: chunk.header]
        self._grow(ids, base.OBSERVATION if turns else base.PROMPT, reward, base.NOT_SAMPLED)
        if turns:
            turns[-1].reply, turns[-1].reward = messages, turns[-1].reward + reward
        return start + chunk.insert_at

    def _grow(self, ids: list[int], kind: int, reward: float, finish: int) -> None:
        start = len(self.transcript.tokens)
        self.segments.append(dict(start=start, length=len(ids), kind=kind, reward=reward, finish=finish))
        self.transcript.tokens += ids


def render(
    conversations: Sequence[Conversation], chat: Chat, *, capacity: int, path: str
) -> tuple[base.Rollout, list[base.Transcript]]:
    """Lays conversations out as a rollout, not scored yet (log-probs 0), and its transcripts; `seed` is the line.

    Raises: base.InputError naming the file and the line of one that is longer than `capacity` tokens, or that the chat
    template refuses.
    """
    groups = {key: i for i, key in enumerate(dict.fromkeys(c.group for c in conversations))}
    streams = []
    for conversation in conversations:
        try:
            stream = _Stream(conversation, chat, groups[conversation.group])
        except base.InputError as error:
            raise base.InputError(f"{path} line {conversation.number}: {error}") from error
        if len(stream.transcript.tokens) > capacity:
            raise base.InputError(
                f"{path} line {conversation.number}: {len(stream.transcript.tokens)} tokens, the context holds "
                f"{capacity}; raise rollout.capacity or shorten the conversation"
            )
        streams.append(stream)
    segments = max(len(stream.segments) for stream in streams)
    rollout = rollout_lib.to_rollout(streams, capacity=capacity, segments=segments)
    return rollout_lib.trim(rollout), [stream.transcript for stream in streams]


SCORED = ("value_BT", "end_value_B", "collision_BT", "view_logp_KU", "view_kl_KU")  # what one forward makes


def score(
    config, params, model, chat: Chat, rollout: base.Rollout, transcripts: list[base.Transcript]
) -> tuple[samples.Batch, np.ndarray]:
    """Scores a rendered rollout under `params`: log-probs, hints and what the hinted model says, credit; and entropies.

    The model is its own teacher and its own reference. Rows are read `rl.micro_batch` at a time (0: 8).
    """
    credit_fn, needs = setup.bind_credit(config.credit)
    if beyond := [name for name in needs if name not in ("views", *SCORED)]:
        raise base.InputError(
            f"credit.name={config.credit.name!r} needs {', '.join(beyond)}, which cannot be made of recorded traces"
        )
    turns = [turn for transcript in transcripts for turn in transcript.turns]
    writing = setup.make_writing(config)
    writing = dataclasses.replace(writing, branch_tokens=0)
    rollout, written, _ = feedback.add(rollout, transcripts, chat, writing, seed="explain")
    columns = tuple(dict.fromkeys(("view_logp_KU", *(name for name in needs if name != "views"))))
    span = packing.power_of_two(max(turn.length for turn in turns))
    how = dict(config=model, temperature=config.sample.temperature, chunk=config.compute.chunk)

    def read(part):
        logp_BT, entropy_BT = annotate.score_rollout(params, part, **how)
        part = part.replace(logp_BT=logp_BT)
        scored = annotate.annotate(params, part, columns=columns, span=span, ref=params, **how)
        return {name: getattr(scored, name) for name in ("logp_BT", *columns)}, entropy_BT

    found, entropy_BT = packing.in_parts(read, rollout, len(transcripts), config.rl.micro_batch or 8)
    whole = rollout.replace(**found)
    credit = jax.device_get(jax.jit(credit_fn)(whole))
    return samples.Batch(0, whole, credit, transcripts, written), entropy_BT
