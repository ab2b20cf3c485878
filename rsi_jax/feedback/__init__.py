"""Textual feedback: locate.py (where), hints.py (what to say), views.py (re-read), teacher.py (whose weights),
schedule.py (how much). `add` runs the host part: transcripts -> views."""

import dataclasses
from collections.abc import Mapping, Sequence

from rsi_jax import base
from rsi_jax.feedback import hints, locate, views
from rsi_jax.model.chat import Chat

TURNS = ("located", "other")  # where hints stand: at the located turns; at others, drawn (a control)
INSERTS = ("turn", "first")  # before the message that the turn answers; before the first one of the row


@dataclasses.dataclass(frozen=True)
class Writing:
    """How feedback is written, fixed over a stage.

    rules: bound rules by name. hint: a writer's name. per_rollout: views of one rollout at most.
    hint_tokens, branch_tokens: capacities of a hint, and of the branches of a rollout together (0 = as they need).
    turn: one of TURNS. insert: one of INSERTS.
    """

    rules: Mapping[str, locate.Rule]
    hint: str
    templates: hints.Templates
    per_rollout: int
    hint_tokens: int
    branch_tokens: int
    turn: str = "located"
    insert: str = "turn"
    policy: hints.PolicyWriter | None = None


def add(
    rollout: base.Rollout, transcripts: Sequence[base.Transcript], chat: Chat, writing: Writing, *, seed: str
) -> tuple[base.Rollout, list[tuple[locate.Finding, str]], dict[str, float]]:
    """Locates, writes hints, and adds the column `views`.

    Returns: (rollout, the findings with their hint texts, counts to log).
    """
    findings, left_out = locate.locate(transcripts, writing.rules, per_rollout=writing.per_rollout, seed=seed)
    texts = hints.write(writing.hint, findings, transcripts, writing.templates, seed=seed, policy=writing.policy)
    if writing.turn == "other":
        moved = locate.elsewhere(findings, transcripts, writing.rules, seed=seed)
        kept = [(finding, text) for finding, text in zip(moved, texts, strict=True) if finding]
        left_out += len(findings) - len(kept)
        findings, texts = [finding for finding, _ in kept], [text for _, text in kept]
    ids = [chat.hint(text) if text else [] for text in texts]
    built = views.build(
        findings,
        ids,
        transcripts,
        list(writing.rules),
        per_rollout=writing.per_rollout,
        hint_capacity=writing.hint_tokens,
        branch=writing.branch_tokens,
        first=writing.insert == "first",
    )
    counts = {
        "feedback/located": float(len(findings) + left_out),
        "feedback/left_out": float(left_out),
        "feedback/empty_hints": float(sum(not i for i in ids)),
        "feedback/hint_tokens": float(sum(len(i) for i in ids)),
    }
    return rollout.replace(views=built), list(zip(findings, texts, strict=True)), counts
