"""Turns a TraceTokens into what the transcript template needs: rows, margins, chips and the numbers behind a hover."""

import bisect
import math
from collections.abc import Sequence
from typing import Any

from rsi_jax.report import heatmap

OPEN_UP_TO = 700  # transcripts with more tokens start closed


def view(one: heatmap.TraceTokens, name: str, scale: float, *, open_: bool = True) -> dict[str, Any]:
    """Everything the template shows of one transcript. name: unique in the page; scale: see heatmap.credit_scale."""
    kinds = one.kinds
    acted = [i for i, kind in enumerate(kinds) if kind == "action"]
    credits = [one.adv[i] for i in acted] if one.adv else []
    rows = _rows(one, name, scale)
    count = max(len(one.tokens), 1)
    marks = [
        {"left": 100 * (row["end"] - 0.5) / count, "kind": "paid", "text": f"reward {row['reward']:+.3g}"}
        for row in rows
        if row["reward"]
    ]
    marks += [
        {"left": 100 * insert.index / count, "kind": "hinted", "text": f"hint: {insert.source}"}
        for insert in one.inserts
    ]
    return {
        "id": name,
        "title": one.title,
        "meta": list(one.meta.items()),
        "reward": one.reward,
        "tokens": len(one.tokens),
        "acted": len(acted),
        "credit": math.fsum(value for value in credits if math.isfinite(value)),
        "bad": sum(not math.isfinite(value) for value in credits),
        "hints": len(one.inserts),
        "gated": sum(insert.weight == 0 for insert in one.inserts),
        "strip": heatmap.strip(one, scale),
        "marks": marks,
        "rows": rows,
        "open": open_ and len(one.tokens) <= OPEN_UP_TO,
        "data": _hover(one, acted, rows),
    }


def _rows(one: heatmap.TraceTokens, name: str, scale: float) -> list[dict[str, Any]]:
    rows, turn = [], 0
    for segment in _covering(one):
        turn += segment.kind == "action"
        end = segment.start + segment.length
        credits = one.adv[segment.start : end] if segment.kind == "action" else []
        rows.append(
            {
                "id": f"{name}-{len(rows)}",
                "kind": segment.kind,
                "label": segment.label or (f"turn {turn}" if segment.kind == "action" else segment.kind),
                "start": segment.start,
                "end": end,
                "reward": segment.reward,
                "finish": segment.finish if segment.finish != "stop" else "",
                "credit": math.fsum(value for value in credits if math.isfinite(value)),
                "pieces": _pieces(one, segment, scale),
            }
        )
    return rows


def _covering(one: heatmap.TraceTokens) -> list[heatmap.TraceSegment]:
    """The segments, with tokens that belong to none shown as prompt segments of their own."""
    covering, end = [], 0
    for segment in [*one.segments, heatmap.TraceSegment(len(one.tokens), 0, "prompt")]:
        if segment.start > end:
            covering.append(heatmap.TraceSegment(end, segment.start - end, "prompt"))
        if segment.length:
            covering.append(segment)
        end = segment.start + segment.length
    return covering


def _pieces(one: heatmap.TraceTokens, segment: heatmap.TraceSegment, scale: float) -> list[dict[str, Any]]:
    """The segment's tokens as HTML, cut where hints stand; a hint after the very last token closes the last segment."""
    low, end, pieces = segment.start, segment.start + segment.length, []
    last = end == len(one.tokens)
    for insert in sorted(one.inserts, key=lambda insert: insert.index):
        if not segment.start <= insert.index < end + last:
            continue
        if insert.index > low:
            pieces.append({"html": heatmap.span_html(one, low, insert.index, segment.kind, scale)})
            low = insert.index
        pieces.append({"insert": insert})
    if end > low:
        pieces.append({"html": heatmap.span_html(one, low, end, segment.kind, scale)})
    return pieces


def _hover(one: heatmap.TraceTokens, acted: Sequence[int], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns over the sampled tokens, in page order: what the script shows on hover and recolours by."""
    starts = [row["start"] for row in rows]

    def column(values: Sequence[float]) -> list[float | None]:
        picked = [values[i] for i in acted] if len(values) else []
        if not any(math.isfinite(value) for value in picked):
            return []
        return [float(f"{value:.4g}") if math.isfinite(value) else None for value in picked]

    return {
        "pos": list(acted),
        "labels": [row["label"] for row in rows],
        "row": [bisect.bisect_right(starts, i) - 1 for i in acted],
        "adv": column(one.adv),
        "student": column(one.student_prob),
        "teacher": column(one.teacher_prob),
        "entropy": column(one.entropy),
    }
