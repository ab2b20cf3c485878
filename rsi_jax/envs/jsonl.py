"""A user's own single-turn task: prompts from a JSONL file, the reward from a function.

    {"prompt": "Name a prime above 10.", "above": 10}
    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}], "answer": "11"}

The prompt (a text, or the list of messages as the line gives it), the model's message and the line's other fields go
to the function: `reward(prompt, completion, **fields) -> float`.
"""

import dataclasses
import functools
import json
import math
import pathlib
from collections.abc import Callable
from typing import Any

from rsi_jax import base
from rsi_jax.envs import Reply

FORM = '{"prompt": text} or {"messages": [{"role", "content"}, ...]}'


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the file: its number, what the function gets as prompt, the messages shown, the other fields."""

    number: int
    prompt: Any
    messages: tuple[base.Message, ...]
    fields: dict[str, Any]


@functools.cache
def read(path: str) -> tuple[Line, ...]:
    """Reads the prompts of a file.

    Raises: base.InputError naming the file and the line.
    """
    if not path:
        raise base.InputError("data.path is empty: give a JSONL of prompts, such as --config.data.path=prompts.jsonl")
    file = pathlib.Path(path)
    if not file.is_file():
        raise base.InputError(f"data.path={path!r}: no such file")
    try:
        texts = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise base.InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    lines = [_line(path, number, text) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise base.InputError(f"{path} holds no prompts; each line is {FORM}")
    return tuple(lines)


def _line(path: str, number: int, text: str) -> Line:
    def bad(why: str) -> base.InputError:
        return base.InputError(f"{path} line {number}: {why}; a line is {FORM}")

    try:
        record = json.loads(text)
    except ValueError as error:
        raise bad(f"not JSON ({error})") from error
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise bad("needs either 'prompt' or 'messages'")
    fields = {name: value for name, value in record.items() if name not in ("prompt", "messages")}
    if "prompt" in record:
        if not isinstance(record["prompt"], str) or not record["prompt"].strip():
            raise bad("'prompt' is no text")
        return Line(number, record["prompt"], (base.Message(role="user", content=record["prompt"]),), fields)
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise bad("'messages' is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise bad("a message needs 'role' and 'content' as text")
    if messages[-1]["role"] == "assistant":
        raise bad("the last message is the assistant's: there is nothing to answer")
    return Line(number, messages, tuple(base.Message(role=m["role"], content=m["content"]) for m in messages), fields)


@functools.cache
def find_reward(name: str) -> Callable[..., Any]:
    """Imports the reward function 'module:function'.

    Raises: base.InputError when it cannot be imported.
    """
    return base.find_function(name, field="reward", example="my_module:reward_fn")


@dataclasses.dataclass(frozen=True)
class Jsonl:
    """The task. path: the prompts. reward: 'module:function'. held_out_path: prompts of evaluation, '' = the same.

    Raises: base.InputError for a bad file, a bad line, or a function that cannot be imported.
    """

    path: str
    reward: str
    held_out_path: str = ""

    max_turns = 1

    def __post_init__(self):
        read(self.path)
        find_reward(self.reward)
        if self.held_out_path:
            read(self.held_out_path)

    def held_out(self) -> "Jsonl":
        """The same task on the prompts of evaluation."""
        return Jsonl(self.held_out_path, self.reward) if self.held_out_path else self

    def reset(self, seed: int) -> tuple[Line, tuple[base.Message, ...]]:
        """Shows line `seed` of the file, modulo their number."""
        lines = read(self.path)
        line = lines[seed % len(lines)]
        return line, line.messages

    def step(self, state: Line, text: str, finish: int) -> tuple[Line, Reply]:
        """Asks the reward function.

        Raises: base.InputError when it raises, or returns what is no finite number.
        """
        where = f"reward {self.reward} on {self.path} line {state.number}"
        try:
            value = find_reward(self.reward)(state.prompt, text, **state.fields)
        except Exception as error:
            raise base.InputError(f"{where} raised {base.say(error)}; the last checkpoint is intact") from error
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise base.InputError(f"{where} returned {value!r:.80}, no finite number; the last checkpoint is intact")
        return state, Reply((), number, done=True, info={"line": state.number})


def make(**knobs) -> Jsonl:
    """Builds the environment from its knobs."""
    return Jsonl(**knobs)


def summary(transcripts: list[base.Transcript]) -> dict[str, float]:
    """Nothing beside what is measured for every environment: what counts as success is the user's to say."""
    return {}
