"""Transcripts kept for the report, in <run>/samples: evaluations before and after, first batch with hints, last batch.

A file is written when its rollouts exist, by one rename, so a run that was killed and continued still has them.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rsi_jax import base, metrics, report
from rsi_jax.feedback.locate import Finding
from rsi_jax.model import chat as chat_lib
from rsi_jax.model import tokenizer
from rsi_jax.train import evaluate

FOLDER = "samples"
BEFORE, AFTER, FIRST_HINTED, LAST = "before", "after", "first_hinted", "last"


@dataclasses.dataclass(frozen=True)
class Batch:
    """A scored batch: written are the findings with their hint texts, in the order in which views were built."""

    step: int
    rollout: base.Rollout
    credit: base.Credit
    transcripts: list[base.Transcript]
    written: list[tuple[Finding, str]]


def telling(batch: Batch, count: int) -> np.ndarray:
    """Chooses the rows that say most: those with hints first, then those with the most credit; in row order."""
    views = batch.rollout.views
    hinted_B = np.zeros(len(batch.transcripts), bool)
    if views is not None:
        hinted_B[np.asarray(views.rollout_K)[np.asarray(views.span_length_K) > 0]] = True
    size_B = np.abs(np.asarray(batch.credit.adv_BT)).sum(axis=1)
    used_B = np.array([bool(transcript.turns) for transcript in batch.transcripts])
    order = np.lexsort((-size_B, ~hinted_B))
    return np.sort(order[used_B[order]][:count])


def of_batch(
    batch: Batch,
    rows: Sequence[int],
    chat: chat_lib.Chat,
    rules: Sequence[str],
    *,
    title: str,
    entropy_BT: np.ndarray | None = None,
) -> list[report.TraceTokens]:
    """Makes the traces of a batch that was cut to `rows`: its rollout and credit; transcripts and hints are whole.

    title: of each, its `seed` is appended.
    """
    rollout, credit, views = batch.rollout, batch.credit, batch.rollout.views
    hints: dict[int, str] = {}
    if views is not None:
        per = len(views.rollout_K) // len(rows)
        for i, row in enumerate(rows):
            texts = [text for finding, text in batch.written if finding.row == row and text]
            hints |= {i * per + n: text for n, text in enumerate(texts)}
        if credit.view_weight_K is not None:  # what the variant's gate let through
            open_K = np.asarray(credit.view_weight_K) != 0
            weight_K = np.where(open_K, np.asarray(views.weight_K), 0.0)
            rollout = rollout.replace(views=views.replace(weight_K=weight_K))
    return [
        report.trace(
            rollout,
            i,
            chat.tokenizer.token_strings(batch.transcripts[row].tokens),
            credit.adv_BT,
            title=f"{title} {_named(batch.transcripts[row])}",
            hints=hints,
            entropy_BT=entropy_BT,
            sources=list(rules),
            separator=separator(chat),
            meta={"group": batch.transcripts[row].group},
        )
        for i, row in enumerate(rows)
    ]


def of_evaluation(result: evaluate.Result, chat: chat_lib.Chat, count: int, when: str) -> list[report.TraceTokens]:
    """Makes the traces of the first `count` rows of an evaluation; no credit is assigned there."""
    used = [(row, transcript) for row, transcript in enumerate(result.transcripts) if transcript.turns]
    zero_BT = np.zeros_like(np.asarray(result.rollout.logp_BT))
    return [
        report.trace(
            result.rollout,
            row,
            chat.tokenizer.token_strings(transcript.tokens),
            zero_BT,
            title=f"{when}: task {_named(transcript)}",
            separator=separator(chat),
        )
        for row, transcript in used[:count]
    ]


def _named(transcript: base.Transcript) -> str:
    """The task of a row and, of a later row of a chain, its number there."""
    return f"{transcript.seed}, row {transcript.part + 1}" if transcript.part else str(transcript.seed)


def separator(chat: chat_lib.Chat) -> str:
    """What stands between the tokens of a stream when people read it."""
    return " " if isinstance(chat.tokenizer, tokenizer.WordTokenizer) else ""


def write(run: pathlib.Path, name: str, traces: Sequence[report.TraceTokens]) -> None:
    """Writes <run>/samples/<name>.json, all of it or nothing."""
    path = run / FOLDER / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(metrics.jsonable(list(traces))), encoding="utf-8")
    os.replace(beside, path)


def exists(run: pathlib.Path, name: str) -> bool:
    """Tells whether samples of that name were written."""
    return (run / FOLDER / f"{name}.json").is_file()


def read(run: pathlib.Path, name: str) -> list[report.TraceTokens]:
    """Reads the traces of `write`; none when there is no such file."""
    if not exists(run, name):
        return []
    return [_trace(record) for record in json.loads((run / FOLDER / f"{name}.json").read_text(encoding="utf-8"))]


def _trace(record: dict[str, Any]) -> report.TraceTokens:
    columns = ("adv", "student_prob", "teacher_prob", "entropy")
    fields: dict[str, Any] = record | {
        name: [math.nan if value is None else value for value in record[name]] for name in columns
    }
    segments = [report.TraceSegment(**segment) for segment in record["segments"]]
    inserts = [report.TraceInsert(**insert) for insert in record["inserts"]]
    return report.TraceTokens(**fields | {"segments": segments, "inserts": inserts})
