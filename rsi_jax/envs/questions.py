"""Short questions with checkable answers, asked one at a time; the reward is correctness alone, whatever the style.

    reward = 1[an accepted answer occurs in the message, and the message does not list candidates]

Answers are compared as whole words, blind to case, accents and typography. A message lists candidates when it names
more than `max_named` answers to other questions of the same kind (their first four words agree: every "What is the
capital of ..." is of one kind), so naming ten capitals is no way to be right.

Every fourth question of `data/questions.jsonl` is held out; `held_out()` is the environment of evaluation.
"""

import dataclasses
import functools
import json
import pathlib
import re
import unicodedata

from rsi_jax import base
from rsi_jax.envs import Reply

FILE = pathlib.Path(__file__).parents[1] / "data" / "questions.jsonl"
SPLITS = ("train", "held_out", "all")


@dataclasses.dataclass(frozen=True)
class Question:
    """A question and the answers that count as right."""

    text: str
    answers: tuple[str, ...]

    @property
    def kind(self) -> tuple[str, ...]:
        return tuple(self.text.split()[:4])


@functools.cache
def load() -> tuple[Question, ...]:
    """Reads the shipped questions, in the order of the file."""
    rows = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return tuple(Question(row["question"], tuple(row["answers"])) for row in rows)


def split(name: str) -> tuple[Question, ...]:
    """Takes the questions of a split: 'held_out' every fourth, 'train' the others, 'all'."""
    return tuple(q for i, q in enumerate(load()) if name == "all" or (i % 4 == 3) == (name == "held_out"))


def plain(text: str) -> str:
    """Folds case, accents and typography: 'H₂O' -> 'h2o', 'São' -> 'sao'."""
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).casefold()


def names(text: str, answers: tuple[str, ...]) -> bool:
    """Tells whether one of the answers occurs in the text as whole words."""
    return re.search(rf"(?<!\w)(?:{'|'.join(re.escape(plain(a)) for a in answers)})(?!\w)", plain(text)) is not None


@dataclasses.dataclass(frozen=True)
class Questions:
    """The knobs. split: one of SPLITS. max_named: other answers of the same kind that a right message may name."""

    split: str = "train"
    max_named: int = 3

    max_turns = 1

    def __post_init__(self):
        if self.split not in SPLITS:
            raise base.InputError(f"env.questions.split={self.split!r} is none of {', '.join(SPLITS)}")
        if self.max_named < 0:
            raise base.InputError(f"env.questions.max_named={self.max_named} must not be negative")

    def held_out(self) -> "Questions":
        """The same task on the questions that are never trained on."""
        return dataclasses.replace(self, split="held_out") if self.split == "train" else self

    def reset(self, seed: int) -> tuple[Question, tuple[base.Message, ...]]:
        """Asks question `seed` of the split, modulo their number."""
        questions = split(self.split)
        question = questions[seed % len(questions)]
        return question, (base.Message(role="user", content=question.text),)

    def step(self, state: Question, text: str, finish: int) -> tuple[Question, Reply]:
        """Judges the message; the episode ends."""
        named = [q.answers for q in _others(state) if names(text, q.answers)]
        correct = names(text, state.answers) and len(set(named)) <= self.max_named
        info = {"question": state.text, "correct": correct, "named": len(set(named)), "words": len(text.split())}
        info["ended"] = finish == base.STOP
        return state, Reply((), float(correct), True, info=info)


@functools.cache
def _others(question: Question) -> tuple[Question, ...]:
    """Questions of the same kind with another answer."""
    return tuple(q for q in load() if q.kind == question.kind and not set(q.answers) & set(question.answers))


def make(**knobs) -> Questions:
    """Builds the environment from its knobs."""
    return Questions(**knobs)


def summary(transcripts: list[base.Transcript]) -> dict[str, float]:
    """Success (correct answers), the share of messages that end within their budget, mean words of a message."""
    infos = [turn.info for transcript in transcripts for turn in transcript.turns]
    count = max(1, len(infos))
    return {
        "success": sum(info["correct"] for info in infos) / count,
        "ended": sum(info["ended"] for info in infos) / count,
        "words": sum(info["words"] for info in infos) / count,
    }
