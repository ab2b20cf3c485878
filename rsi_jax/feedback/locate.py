"""Where: rules that find the turn that went wrong, from what was said and what came back.

A rule is a function (transcript, turn index) -> bool. It reads messages and lengths, never `info`: whatever it sees, a
user of the real system sees too. Adding one = one function here and its template in the config.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Callable, Mapping, Sequence

from rsi_jax import base

Rule = Callable[[base.Transcript, int], bool]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One located turn: the row of the rollout, the turn's index, the name of the rule."""

    row: int
    turn: int
    rule: str


_NOT_FOUND = r"\btool not found\b"


def _replied(transcript: base.Transcript, turn: int, pattern: str) -> bool:
    return any(re.search(pattern, message["content"], re.IGNORECASE) for message in transcript.turns[turn].reply)


def failed_tool_call(transcript: base.Transcript, turn: int) -> bool:
    """The answer says that there is no such tool, for the first time for this call (a repeat copies it)."""
    if not _replied(transcript, turn, _NOT_FOUND):
        return False
    said = transcript.turns[turn].text
    return not any(transcript.turns[t].text == said and _replied(transcript, t, _NOT_FOUND) for t in range(turn))


def malformed_call(transcript: base.Transcript, turn: int) -> bool:
    """The answer to this turn says that the call could not be read."""
    return _replied(transcript, turn, r"\bmalformed call\b")


def long_answer(transcript: base.Transcript, turn: int, *, max_words: int = 25) -> bool:
    """A style rule: the message runs over `max_words` words, or over its token budget."""
    record = transcript.turns[turn]
    return record.finish == base.LENGTH or len(record.text.split()) > max_words


RULES = {rule.__name__: rule for rule in (failed_tool_call, malformed_call, long_answer)}


def find(names: Sequence[str], knobs: Mapping[str, Mapping] | None = None) -> dict[str, Rule]:
    """Binds rules by name to their knobs.

    Raises: base.InputError naming the nearest rule.
    """
    rules = {}
    for name in names:
        if name not in RULES:
            mend = base.did_you_mean(name, RULES)
            raise base.InputError(f"feedback.rules names {name!r}, which is no rule (known: {', '.join(RULES)}){mend}")
        rules[name] = functools.partial(RULES[name], **dict((knobs or {}).get(name, {})))
    return rules


def locate(
    transcripts: Sequence[base.Transcript],
    rules: Mapping[str, Rule],
    *,
    per_rollout: int,
    seed: str,
    pick: str = "first",
) -> tuple[list[Finding], int]:
    """Finds the turns at fault: at most `per_rollout` of each rollout.

    pick: which ones when there are more: 'first' (where it began to go wrong; later faults often repeat it) | 'random'.

    A turn is named once, by the first rule that fires; a summary never is. With chains a rollout is a row of one.

    Returns: (findings by row and turn, turns found but left out).
    """
    findings, left_out = [], 0
    for row, transcript in enumerate(transcripts):
        found = []
        for turn in (t for t, record in enumerate(transcript.turns) if not record.summary):
            rule = next((name for name, rule in rules.items() if rule(transcript, turn)), None)
            if rule is not None:
                found.append(Finding(row, turn, rule))
        if len(found) > per_rollout:
            left_out += len(found) - per_rollout
            chosen = range(per_rollout)
            if pick == "random":
                chosen = sorted(random.Random(f"{seed}/{row}").sample(range(len(found)), per_rollout))
            found = [found[i] for i in chosen]
        findings += found
    return findings, left_out


def elsewhere(
    findings: Sequence[Finding], transcripts: Sequence[base.Transcript], rules: Mapping[str, Rule], *, seed: str
) -> list[Finding | None]:
    """Draws for each finding another turn of its rollout, at which no rule fires: the control of where a hint stands.

    No turn is drawn twice. None where a rollout has no such turn left.
    """
    free: dict[int, list[int]] = {}
    for row in {finding.row for finding in findings}:
        turns = transcripts[row].turns
        fine = [
            t
            for t, one in enumerate(turns)
            if not one.summary and not any(r(transcripts[row], t) for r in rules.values())
        ]
        random.Random(f"{seed}/{row}").shuffle(fine)
        free[row] = fine
    return [
        dataclasses.replace(finding, turn=free[finding.row].pop()) if free[finding.row] else None
        for finding in findings
    ]
