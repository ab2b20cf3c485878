"""Assembles report.html: one self-contained file that says what a run did, with which code, at what cost."""

import dataclasses
import importlib.resources
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import markupsafe

from rsi_jax import metrics
from rsi_jax.report import curves as curves_lib
from rsi_jax.report import heatmap
from rsi_jax.report import transcripts as transcripts_lib

REPORT_FILE = "report.html"


@dataclasses.dataclass(frozen=True)
class SummaryRow:
    """One line of the headline table.

    name, before, after: the metric and its two values (None or nan: not measured). better: 'higher', 'lower' or ''.
    before_interval, after_interval: confidence intervals (low, high). samples: how many episodes or problems per value.
    note: what the number means or how it was measured.
    """

    name: str
    before: float | None
    after: float | None
    better: str = "higher"
    before_interval: tuple[float, float] | None = None
    after_interval: tuple[float, float] | None = None
    samples: int | None = None
    note: str = ""


def write_report(
    run_dir: str | os.PathLike,
    *,
    title: str,
    intro: str = "",
    summary: Sequence[SummaryRow] = (),
    curves: Sequence[curves_lib.Series] | None = None,
    transcripts: Sequence[heatmap.TraceTokens] = (),
    pairs: Sequence[tuple[heatmap.TraceTokens, heatmap.TraceTokens]] = (),
    config: Mapping[str, Any] | Any = None,
    defaults: Mapping[str, Any] | Any = None,
    environment: Mapping[str, Any] | None = None,
    ledger: Mapping[str, Mapping[str, Any]] | None = None,
) -> pathlib.Path:
    """Writes run_dir/report.html and returns its path. The file loads nothing from anywhere.

    Args:
      title, intro: heading, and a paragraph of plain text under it.
      summary: headline rows.
      curves: None reads run_dir/metrics.jsonl.
      transcripts: shown as credit heat maps; all share one colour scale.
      pairs: (before, after) transcripts of the same task, shown side by side.
      config, defaults: effective config (a mapping or ConfigDict); fields that differ from `defaults` are marked.
      environment: see provenance.environment. ledger: see metrics.Ledger.state.
    Raises: InputError when the metrics file is damaged or missing.
    """
    run_dir = pathlib.Path(run_dir)
    lines, torn = ([], 0) if curves is not None else metrics.read_lines(run_dir / metrics.METRICS_FILE)
    curves = curves_lib.from_lines(lines) if curves is None else curves
    every = [*transcripts, *(one for pair in pairs for one in pair)]
    scale = heatmap.credit_scale(every)
    traces = [transcripts_lib.view(one, f"t{i}", scale, open_=i < 3) for i, one in enumerate(transcripts)]
    sides = [
        [transcripts_lib.view(one, f"p{i}{side}", scale) for one, side in zip(pair, "ab", strict=True)]
        for i, pair in enumerate(pairs)
    ]
    for pair in sides:
        pair[0]["open"] = pair[1]["open"] = pair[0]["open"] and pair[1]["open"]
    shown = [*traces, *(one for pair in sides for one in pair)]
    page = _template("report.html.j2").render(
        title=title,
        intro=intro,
        summary=[_summary(row) for row in summary],
        panels=_panels(curves),
        transcripts=traces,
        pairs=sides,
        scale=scale,
        modes=_modes(shown),
        config=_config(config, defaults),
        environment=_provenance(environment),
        ledger=_ledger(ledger),
        counts=_counts(ledger, curves, torn, shown),
        css=_asset("report.css"),
        js=_asset("report.js"),
    )
    return _write(run_dir / REPORT_FILE, page)


def _write(path: pathlib.Path, text: str) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(beside, path)
    return path


def _asset(name: str) -> markupsafe.Markup:
    return markupsafe.Markup(importlib.resources.files("rsi_jax.report").joinpath(name).read_text(encoding="utf-8"))


def _signed(value: float) -> str:
    return f"{value:+.3g}".replace("-", "−") if value else "0"


def _template(name: str) -> jinja2.Template:
    loader = jinja2.FunctionLoader(lambda wanted: str(_asset(wanted)))
    house = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    house.filters.update(number=metrics.number, duration=metrics.duration, signed=_signed, visible=heatmap.visible)
    house.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return house.get_template(name)


def _summary(row: SummaryRow) -> dict[str, Any]:
    """A headline row with its change, a verdict in words, and its positions on a small axis in percent."""
    known = {"before": row.before, "after": row.after}
    known = {kind: value for kind, value in known.items() if value is not None and value == value}
    intervals = {"before": row.before_interval, "after": row.after_interval}
    bounds = [*known.values(), *(row.before_interval or ()), *(row.after_interval or ())]
    low, high = min([0.0, *bounds]), max(bounds, default=1.0)
    high = 1.0 if low >= 0 and high <= 1 else high

    def place(value: float) -> float:
        return round(100 * (value - low) / ((high - low) or 1.0), 2)

    change = known["after"] - known["before"] if len(known) == 2 else None
    verdict = ""
    if change is not None and row.better and change != 0:
        verdict = "better" if (change > 0) == (row.better == "higher") else "worse"
    overlap = False
    if row.before_interval and row.after_interval:
        overlap = row.before_interval[0] <= row.after_interval[1] and row.after_interval[0] <= row.before_interval[1]
    return {
        **dataclasses.asdict(row),
        "change": change,
        "verdict": verdict,
        "overlap": overlap,
        "dots": [
            {
                "kind": kind,
                "at": place(value),
                "interval": [place(end) for end in found] if (found := intervals[kind]) else None,
            }
            for kind, value in known.items()
        ],
    }


def _panels(series: Sequence[curves_lib.Series]) -> list[dict[str, Any]]:
    steps = [step for one in series for step in one.steps]
    if not steps:
        return []
    span = (min(steps), max(steps))
    return [{"title": title, "charts": _titled(charts, span)} for title, charts in curves_lib.panels(series)]


def _titled(charts: Sequence[Sequence[curves_lib.Series]], span: tuple[int, int]) -> list[dict[str, Any]]:
    """The charts of one panel; where the panel was split, each says which metric it shows."""
    return [{**curves_lib.chart(group, span), "name": group[0].name if len(charts) > 1 else ""} for group in charts]


def _modes(shown: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What tokens can be coloured by, given the columns that exist."""
    have = {name for one in shown for name in ("student", "teacher", "entropy") if one["data"][name]}
    modes = [("credit", "credit (advantage)")]
    if {"student", "teacher"} <= have:
        modes.append(("gain", "teacher − student, nats"))
    if "student" in have:
        modes.append(("surprise", "surprise, −log p(student)"))
    if "entropy" in have:
        modes.append(("entropy", "entropy"))
    return modes


def flatten(config: Any, prefix: str = "") -> dict[str, str]:
    """A nested config as dotted names and JSON values, in order."""
    config = config.to_dict() if hasattr(config, "to_dict") else config
    flat = {}
    for name, value in (config or {}).items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = json.dumps(metrics.jsonable(value), ensure_ascii=False)
    return flat


def _config(config: Any, defaults: Any) -> list[dict[str, Any]]:
    usual = None if defaults is None else flatten(defaults)
    return [
        {
            "name": name,
            "value": value,
            "usual": None if usual is None else usual.get(name, "absent"),
            "changed": usual is not None and usual.get(name) != value,
        }
        for name, value in flatten(config).items()
    ]


def _provenance(environment: Mapping[str, Any] | None) -> dict[str, Any]:
    blank = {"revision": None, "changed_files": None, "devices": [], "packages": {}}
    return {**blank, **environment} if environment else {}


def _ledger(ledger: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Any]:
    if not ledger:
        return {}
    tokens, seconds = dict(ledger.get("tokens", {})), dict(ledger.get("seconds", {}))
    total = sum(seconds.values())
    phases = [
        {"name": name, "seconds": spent, "share": 100 * spent / total if total else 0.0}
        for name, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    read = tokens.get("scored", 0) + tokens.get("trained", 0)
    hint_share = tokens.get("hint", 0) / read if read else None
    return {"tokens": tokens, "phases": phases, "total": total, "hint_share": hint_share}


def _counts(
    ledger: Mapping[str, Mapping[str, Any]] | None,
    series: Sequence[curves_lib.Series],
    torn: int,
    shown: Sequence[Mapping[str, Any]],
) -> list[tuple[str, int]]:
    """Everything that was dropped, gated or not a number: what the ledger counted, and what this page found."""
    found = {
        "metric values that were not finite": sum(value != value for one in series for value in one.values),
        "half-written metric lines": torn,
        "sampled tokens on this page whose credit is not finite": sum(one["bad"] for one in shown),
        "hints on this page that were gated off": sum(one["gated"] for one in shown),
    }
    return [*(ledger or {}).get("dropped", {}).items(), *found.items()]
