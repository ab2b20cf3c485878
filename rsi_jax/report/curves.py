"""Metric lines as small multiples: which series stand together, and each chart as SVG."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import markupsafe
import numpy as np

from rsi_jax import metrics

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 10, 24
MAX_POINTS, MAX_SERIES, MAX_SPREAD, LOG_SPREAD = 400, 5, 10.0, 300.0

# A panel takes the metrics that its pattern finds and no panel above it took. The order is the order on the page.
PANELS = (
    ("Success and reward", r"success|filler_correct|(?<!nonfinite_)reward|return|accuracy|solved|pass_rate"),
    ("Probability of the right action", r"(^|[/_])right(_|$)"),
    ("Loss terms", r"loss|diverg|distil"),
    ("Invalid and truncated", r"invalid|malformed|truncat|overlong|parse|skipped|masked_rows"),
    ("Located turns and their hints", r"gain|hint|located|left_out|views|delta"),
    ("Entropy", r"entropy"),
    ("Policy drift", r"(^|[/_])kl|ratio|clip_frac|ess\b|stale|kept_mass|correction"),
    ("Gradient and update norms", r"grad|update_norm|param_norm"),
    ("Lengths", r"length|turns|tokens|chains"),
    ("Credit", r"adv|credit|groups|dynamic_rounds|without_signal"),
    ("Throughput", r"per_second|mfu|seconds"),
    ("Schedules", r"learning_rate|(^|/)lr$|temperature|weight|scale"),
)
OTHER = "Other"


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric of one stage: steps ascending, values with nan where the run logged a non-finite number."""

    name: str
    stage: str
    steps: Sequence[int]
    values: Sequence[float]


def from_lines(lines: Iterable[Mapping[str, Any]]) -> list[Series]:
    """Collects metric lines into series, in the order in which names first appear; wall-clock fields are left out."""
    columns: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for line in lines:
        for name, value in metrics.without_time(line).items():
            if name in ("step", "stage", "nonfinite") or name.startswith(("ledger/", "dropped/")):
                continue
            steps, values = columns.setdefault((name, line["stage"]), ([], []))
            steps.append(line["step"])
            values.append(math.nan if value is None else float(value))
    return [Series(name, stage, *column) for (name, stage), column in columns.items()]


def panels(series: Sequence[Series]) -> list[tuple[str, list[list[Series]]]]:
    """Groups series into panels of charts; a series stands in exactly one chart.

    A panel's series share a chart while they are few and of one size; else every metric gets its own.
    """
    taken: dict[str, list[Series]] = {}
    for one in series:
        title = next((title for title, pattern in PANELS if re.search(pattern, one.name)), OTHER)
        taken.setdefault(title, []).append(one)
    order = [title for title, _ in PANELS] + [OTHER]
    return [(title, _charts(taken[title])) for title in order if title in taken]


def _charts(group: Sequence[Series]) -> list[list[Series]]:
    sizes = [size for one in group if (size := _size(one)) > 0]
    if len(group) <= MAX_SERIES and (not sizes or max(sizes) <= MAX_SPREAD * min(sizes)):
        return [list(group)]
    by_name: dict[str, list[Series]] = {}
    for one in sorted(group, key=lambda one: one.name != "loss"):
        by_name.setdefault(one.name, []).append(one)
    return list(by_name.values())


def _size(one: Series) -> float:
    finite = np.abs([value for value in one.values if math.isfinite(value)])
    return float(np.percentile(finite, 90)) if finite.size else 0.0


def thin(one: Series) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values with at most MAX_POINTS points: means over equal runs of points (nan only where all are nan)."""
    steps, values = np.asarray(one.steps, float), np.asarray(one.values, float)
    if len(steps) <= MAX_POINTS:
        return steps, values
    parts = np.array_split(np.arange(len(steps)), MAX_POINTS)
    means = [np.mean(good) if (good := values[part][np.isfinite(values[part])]).size else math.nan for part in parts]
    return np.array([steps[part[-1]] for part in parts]), np.array(means)


def smooth(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Centred running mean over about a twentieth of the points (window 1: too few points to smooth)."""
    half = len(values) // 40
    means = [
        np.mean(good) if (good := part[np.isfinite(part)]).size else math.nan
        for part in (values[max(i - half, 0) : i + half + 1] for i in range(len(values)))
    ]
    return np.where(np.isfinite(values), np.array(means, float), math.nan), 2 * half + 1


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers inside [low, high]."""
    raw = (high - low) / max(count, 1)
    size = 10.0 ** math.floor(math.log10(raw))
    size = next(size * step for step in (1, 2, 2.5, 5, 10) if size * step >= raw * 0.999)
    first, last = math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9)
    return [round(k * size, 12) for k in range(first, last + 1)]


@dataclasses.dataclass(frozen=True)
class Axis:
    """Maps values to pixels from `start` to `stop`, linear or logarithmic."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            part = (math.log10(value) - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low))
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)


def y_axis(values: np.ndarray) -> tuple[Axis, list[float]]:
    """Axis and ticks for finite values: [0, 1] for fractions, logarithmic for positives that spread over LOG_SPREAD."""
    if values.size == 0:
        values = np.array([0.0, 1.0])
    low, high = float(values.min()), float(values.max())
    bottom = HEIGHT - BOTTOM
    if low > 0 and high / low > LOG_SPREAD:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        every = max(1, math.ceil((last - first) / 4))
        return Axis(10.0**first, 10.0**last, bottom, TOP, True), [10.0**k for k in range(first, last + 1, every)]
    if low >= 0 and high <= 1 and high > 0.3:
        low, high = 0.0, 1.0
    elif 0 < low < 0.4 * high:
        low = 0.0
    if high - low < 1e-9 * max(abs(high), 1.0):
        low, high = low - max(abs(low), 1e-3) * 0.5, high + max(abs(high), 1e-3) * 0.5
    pad = 0.04 * (high - low)
    low, high = (low if low == 0 else low - pad), (high if high == 1 else high + pad)
    return Axis(low, high, bottom, TOP), ticks(low, high)


def path(xs: Sequence[float], ys: Sequence[float]) -> str:
    """SVG path through the points, broken where y is nan."""
    parts, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        if not math.isfinite(y):
            pen = "M"
            continue
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return "".join(parts)


def chart(group: Sequence[Series], x_range: tuple[int, int]) -> dict[str, Any]:
    """One chart for the template: `svg`, `legend` rows, `data` for the cross-hair, `window` of the smoothing, `bad`."""
    thinned = [thin(one) for one in group]
    finite = np.concatenate([values[np.isfinite(values)] for _, values in thinned])
    y, marks = y_axis(finite)
    low, high = x_range
    x = Axis(low, max(high, low + 1), LEFT, WIDTH - RIGHT)
    body, rows, window = [_grid(x, y, marks, x_range)], [], 1
    for place, (one, (steps, values)) in enumerate(zip(group, thinned, strict=True)):
        soft, used = smooth(np.log(values)) if y.log else smooth(values)
        soft = np.exp(soft) if y.log else soft
        window = max(window, used)
        body.append(_lines(place, x, y, steps, values, soft, dots=len(steps) <= 25))
        last = next((value for value in values[::-1] if math.isfinite(value)), math.nan)
        rows.append({"name": one.name, "stage": one.stage, "last": metrics.number(last)})
    svg = markupsafe.Markup(
        '<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}<line class="cross" y1="{}" y2="{}"/></svg>'
    ).format(
        WIDTH, HEIGHT, ", ".join(one.name for one in group), markupsafe.Markup("".join(body)), TOP, HEIGHT - BOTTOM
    )
    data = {
        "x": [x.low, x.high, x.start, x.stop],
        "series": [
            {"steps": [int(step) for step in steps], "values": metrics.jsonable([float(f"{v:.5g}") for v in values])}
            for steps, values in thinned
        ],
    }
    bad = sum(not math.isfinite(value) for one in group for value in one.values)
    return {"svg": svg, "legend": rows, "data": data, "window": window, "bad": bad, "log": y.log}


def _grid(x: Axis, y: Axis, marks: Sequence[float], x_range: tuple[int, int]) -> str:
    parts = []
    for mark in marks:
        row = y(mark)
        kind = ' class="zero"' if mark == 0 else ""
        parts.append(f'<line{kind} x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{row + 3.5:.1f}">{_tick(mark)}</text>')
    low, high = x_range
    steps = [step for step in ticks(low, high, 5) if step == int(step)] if high > low else [low]
    for step in steps:
        parts.append(f'<text class="x" x="{x(step):.1f}" y="{HEIGHT - 7}">{_tick(step)}</text>')
    return f'<g class="grid">{"".join(parts)}</g>'


def _tick(value: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return re.sub(r"e-0*", "e−", f"{value:.4g}").replace("-", "−")


def _lines(place: int, x: Axis, y: Axis, steps: np.ndarray, values: np.ndarray, soft: np.ndarray, *, dots: bool) -> str:
    xs = [x(step) for step in steps]
    raw, mean = ([y(v) if math.isfinite(v) else math.nan for v in column] for column in (values, soft))
    parts = [f'<path d="{path(xs, mean)}"/>']
    if not np.array_equal(values, soft, equal_nan=True):
        parts.insert(0, f'<path class="raw" d="{path(xs, raw)}"/>')
    if dots:
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.4"/>' for a, b in zip(xs, raw, strict=True) if math.isfinite(b)
        ]
    bad = [a for a, b in zip(xs, raw, strict=True) if not math.isfinite(b)]
    parts += [f'<text class="bad" x="{a:.1f}" y="{HEIGHT - BOTTOM - 2}">×</text>' for a in bad]
    return f'<g class="s{place % MAX_SERIES}">{"".join(parts)}</g>'
