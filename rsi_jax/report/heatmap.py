"""Transcripts as credit heat maps: one rollout as data on the host, and its tokens as HTML.

Every token sampled by the policy is one element coloured by its credit on a diverging scale centred at 0; prompt and
observation tokens carry no credit and are written as muted text. Token texts are untrusted and always escaped.
"""

import dataclasses
import math
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import markupsafe
import numpy as np

from rsi_jax import base

KINDS = ("prompt", "action", "observation")  # places are base.PROMPT, base.ACTION, base.OBSERVATION
FINISHES = ("", "stop", "length", "env")  # places are base.NOT_SAMPLED, base.STOP, base.LENGTH, base.ENV
STRIP_BINS = 240
FOLD_OVER, FOLD_HEAD, FOLD_TAIL = 900, 420, 180  # characters of a masked span


@dataclasses.dataclass(frozen=True)
class TraceSegment:
    """A span of tokens of one kind.

    start, length: tokens. kind: one of KINDS. reward: lands when the span ends. finish: one of FINISHES.
    label: shown in the margin; '' = 'turn n' for actions, the kind for others.
    """

    start: int
    length: int
    kind: str
    reward: float = 0.0
    finish: str = ""
    label: str = ""


@dataclasses.dataclass(frozen=True)
class TraceInsert:
    """A hint and where the hinted re-reading inserted it.

    index: the token before which the hint stands (the number of tokens = after the last). text: the hint.
    source: the rule that located it. span_start, span_length: the tokens that were re-read and scored.
    weight: of the view in the loss; 0 = gated off. note: a short text, such as why it was gated.
    """

    index: int
    text: str
    source: str = ""
    span_start: int = 0
    span_length: int = 0
    weight: float = 1.0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TraceTokens:
    """One rollout for people, as lists on the host, all of the length of `tokens` (columns may also be empty).

    title: of the transcript. tokens: display text of each token.
    segments: in time order, without overlap; tokens outside all segments count as prompt.
    adv: advantage (credit) of each token; 0 or nan where there is none.
    student_prob, teacher_prob: probability of the sampled token without and with the hint, in [0, 1]; nan where none.
    entropy: of the student before the token, nats; nan where none.
    inserts: hints. separator: written between tokens ('' for subwords, ' ' for a vocabulary of whole words).
    meta: small facts shown under the title.
    Raises: ValueError naming the column, segment or insert that does not fit.
    """

    title: str
    tokens: Sequence[str]
    segments: Sequence[TraceSegment]
    adv: Sequence[float]
    student_prob: Sequence[float] = ()
    teacher_prob: Sequence[float] = ()
    entropy: Sequence[float] = ()
    inserts: Sequence[TraceInsert] = ()
    separator: str = ""
    meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        count = len(self.tokens)
        for name in ("adv", "student_prob", "teacher_prob", "entropy"):
            if len(getattr(self, name)) not in (0, count):
                raise ValueError(f"trace {self.title!r}: {name} has {len(getattr(self, name))} entries, tokens {count}")
        end = 0
        for place, segment in enumerate(self.segments):
            if segment.kind not in KINDS or segment.start < end or segment.start + segment.length > count:
                raise ValueError(f"trace {self.title!r}: segment {place} overlaps, leaves the tokens or has no kind")
            end = segment.start + segment.length
        for place, insert in enumerate(self.inserts):
            inside = 0 <= insert.index <= count and 0 <= insert.span_start <= count - insert.span_length
            if not inside:
                raise ValueError(f"trace {self.title!r}: insert {place} lies outside the {count} tokens")

    @property
    def kinds(self) -> list[str]:
        """Kind of each token."""
        kinds = ["prompt"] * len(self.tokens)
        for segment in self.segments:
            kinds[segment.start : segment.start + segment.length] = [segment.kind] * segment.length
        return kinds

    @property
    def reward(self) -> float:
        """Sum of the rewards."""
        return sum(segment.reward for segment in self.segments)


def trace(
    rollout: base.Rollout,
    row: int,
    strings: Sequence[str],
    adv_BT: Any,
    *,
    title: str,
    hints: Mapping[int, str] | None = None,
    sources: tuple[str, ...] | list[str] = (),
    entropy_BT: Any = None,
    separator: str = "",
    meta: Mapping[str, Any] | None = None,
) -> TraceTokens:
    """Reads one row of a rollout (host or device arrays) into a TraceTokens.

    strings: display text of the row's tokens in use. adv_BT: the credit. hints: text of view k.
    sources: names of the locating rules, by `Views.source_K`. Where views overlap, the last one's teacher is shown.
    """
    count = len(strings)
    column = {name: np.asarray(getattr(rollout.segments, name))[row].tolist() for name in _SEGMENT_COLUMNS}
    segments = [
        TraceSegment(start, length, KINDS[kind], reward, FINISHES[finish])
        for start, length, kind, reward, finish in zip(*column.values(), strict=True)
        if length > 0
    ]
    mask_T = np.zeros(count, bool)
    for segment in segments:
        mask_T[segment.start : segment.start + segment.length] = segment.kind == "action"

    def on_mask(column_BT: Any) -> list[float]:
        return np.where(mask_T, np.asarray(column_BT, np.float64)[row, :count], np.nan).tolist()

    teacher_T = np.full(count, np.nan)
    inserts = []
    for k in _views_of(rollout, row):
        view = {name: np.asarray(getattr(rollout.views, name))[k].item() for name in _VIEW_COLUMNS}
        start, length = view["span_start_K"], view["span_length_K"]
        if rollout.view_logp_KU is not None:
            teacher_T[start : start + length] = np.exp(np.asarray(rollout.view_logp_KU, np.float64)[k, :length])
        rule = view["source_K"]
        name = sources[rule] if 0 <= rule < len(sources) else f"rule {rule}"
        text = (hints or {}).get(k, "(hint text not kept)")
        inserts.append(TraceInsert(view["insert_at_K"], text, name, start, length, view["weight_K"]))
    return TraceTokens(
        title,
        list(strings),
        segments,
        np.asarray(adv_BT, np.float64)[row, :count].tolist(),
        on_mask(np.exp(np.asarray(rollout.logp_BT, np.float64))),
        teacher_T.tolist(),
        () if entropy_BT is None else on_mask(entropy_BT),
        inserts,
        separator,
        dict(meta or {}),
    )


_SEGMENT_COLUMNS = ("start_BS", "length_BS", "kind_BS", "reward_BS", "finish_BS")
_VIEW_COLUMNS = ("insert_at_K", "span_start_K", "span_length_K", "source_K", "weight_K")


def _views_of(rollout: base.Rollout, row: int) -> list[int]:
    if rollout.views is None:
        return []
    mine_K = (np.asarray(rollout.views.rollout_K) == row) & (np.asarray(rollout.views.span_length_K) > 0)
    return np.flatnonzero(mine_K).tolist()


def credit_scale(traces: Iterable[TraceTokens]) -> float:
    """Credit at which the colour saturates: the 98th percentile of |credit| over all credited tokens; 1 if none."""
    sizes = [abs(value) for one in traces for value in one.adv if math.isfinite(value) and value != 0]
    return float(np.percentile(sizes, 98)) if sizes else 1.0


def strength(credit: float, scale: float) -> float:
    """Opacity of a credit's colour: min(|credit| / scale, 1). Even in the credit, linear up to the scale, 0 at 0."""
    return min(abs(credit) / scale, 1.0) if math.isfinite(credit) else 0.0


def visible(text: str, *, newline: str = "\n") -> str:
    """Makes every character of a token visible: control and direction characters become escapes, '' becomes ∅."""
    if not text:
        return "∅"
    shown = [
        newline if char == "\n" else char if _plain(char) else char.encode("unicode_escape").decode() for char in text
    ]
    return "".join(shown)


def _plain(char: str) -> bool:
    return char == "\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Cn") or char == "\u200d"


def token_html(text: str, credit: float, scale: float, *, view: str = "") -> str:
    """One sampled token as an element: class p or n and its opacity by credit, x when the credit is not finite.

    view: 'h' when a hinted re-reading scores the token, 'g' when one does that was gated off.
    """
    sign = "x" if not math.isfinite(credit) else "p" if credit > 0 else "n" if credit < 0 else ""
    names = " ".join(name for name in ("t", sign, view) if name)
    style = f' style="--a:{strength(credit, scale):.3g}"' if sign in ("p", "n") else ""
    return f'<span class="{names}"{style}>{markupsafe.escape(visible(text, newline="↵\n"))}</span>'


def span_html(one: TraceTokens, start: int, end: int, kind: str, scale: float) -> markupsafe.Markup:
    """Tokens [start, end) of one kind: elements for actions, muted text (folded when long) for everything else."""
    if kind != "action":
        return _muted(one, start, end)
    views: dict[int, str] = {}
    for insert in sorted(one.inserts, key=lambda insert: insert.weight > 0):
        span = range(insert.span_start, insert.span_start + insert.span_length)
        views.update(dict.fromkeys(span, "h" if insert.weight > 0 else "g"))
    parts = [
        token_html(one.tokens[i], one.adv[i] if one.adv else 0.0, scale, view=views.get(i, ""))
        for i in range(start, end)
    ]
    return markupsafe.Markup(str(markupsafe.escape(one.separator)).join(parts))


def _muted(one: TraceTokens, start: int, end: int) -> markupsafe.Markup:
    def text(low: int, high: int) -> markupsafe.Markup:
        return markupsafe.escape(one.separator.join(visible(token) for token in one.tokens[low:high]))

    widths = np.cumsum([len(token) + len(one.separator) for token in one.tokens[start:end]])
    if widths[-1] <= FOLD_OVER:
        return markupsafe.Markup('<span class="o">{}</span>').format(text(start, end))
    low = start + int(np.searchsorted(widths, FOLD_HEAD))
    high = max(start + int(np.searchsorted(widths, widths[-1] - FOLD_TAIL)), low)
    return markupsafe.Markup(
        '<span class="o">{}</span><details class="fold"><summary>{:,} more tokens</summary>'
        '<span class="o">{}</span></details><span class="o">{}</span>'
    ).format(text(start, low), high - low, text(low, high), text(high, end))


def strip(one: TraceTokens, scale: float) -> list[dict[str, Any]]:
    """The whole rollout as a strip: runs of equal look with `left` and `width` in percent, `sign` and `a` (opacity).

    A bin of several tokens shows the credit that is largest in size, so that one decisive token stays visible.
    """
    count = max(len(one.tokens), 1)
    edges = np.linspace(0, count, min(count, STRIP_BINS) + 1).round().astype(int)
    kinds = one.kinds
    runs: list[dict[str, Any]] = []
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        acted = [i for i in range(low, high) if i < len(kinds) and kinds[i] == "action"]
        credits = [one.adv[i] for i in acted if one.adv and math.isfinite(one.adv[i])]
        peak = max(credits, key=abs, default=0.0)
        sign = ("p" if peak > 0 else "n" if peak < 0 else "z") if acted else "o"
        look = {"sign": sign, "a": round(strength(peak, scale), 2)}
        width = 100 * (high - low) / count
        if runs and runs[-1]["sign"] == sign and runs[-1]["a"] == look["a"]:
            runs[-1]["width"] += width
        else:
            runs.append({"left": 100 * low / count, "width": width, **look})
    return runs
