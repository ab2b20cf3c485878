"""The rows of `experiments.ablate_horizon`: of a run from its folder, of an arm at a horizon from its runs."""

import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments import aggregate, pages, sweep
from experiments.aggregate import Point
from experiments.horizon_arms import ARMS, TARGET, WINDOW

METHOD = ("generate", "feedback", "annotate", "train")  # phases that are the method's time
MEASURED = ("success", "invalid", "filler_correct", "gain")
WATCHED = {  # of collapse: what a row keeps of the first and the last batches, and its name in the metrics
    "entropy": "entropy",
    "length": "response_tokens",
    "teacher": "feedback/teacher_right",
    "student": "feedback/student_right",
    "divergence": "divergence",
}
POINTS = 64  # of a curve that a row keeps


def curve_of(lines: Sequence[Mapping[str, Any]], metric: str = "train/success", window: int = WINDOW) -> list[Point]:
    """The curve of a run from the lines of its metrics: success (or another metric), the mean of the last batches."""
    trained = [line for line in lines if line["stage"] == "rl"]
    success = aggregate.smooth([line[metric] for line in trained], window)
    seconds = [sum(line.get(f"time/{phase}", 0.0) for phase in METHOD) for line in trained]
    tokens = [line["ledger/generated"] for line in trained]
    return [Point(*three) for three in zip(tokens, seconds, success, strict=True)]


def compile_s(lines: Sequence[Mapping[str, Any]]) -> float:
    """Seconds that steps took beyond twice the median step: mostly compiling, which the first run of a shape pays."""
    steps = [line["time/step"] for line in lines if line["stage"] == "rl"]
    usual = statistics.median(steps) if steps else 0.0
    return round(sum(step - usual for step in steps if step > 2 * usual), 1)


def watched(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """[Mean over the first WINDOW batches, over the last] of what tells of a collapse, where it was measured."""
    trained, found = [line for line in lines if line["stage"] == "rl"], {}
    for name, metric in WATCHED.items():
        ends = [[line[metric] for line in part if line.get(metric) is not None] for part in _ends(trained)]
        if all(ends):
            found[name] = [round(statistics.mean(end), 4) for end in ends]
    return found


def _ends(lines: Sequence) -> tuple[Sequence, Sequence]:
    return lines[:WINDOW], lines[-WINDOW:]


def read(
    unit: sweep.Unit,
    folder: pathlib.Path,
    *,
    measured: Sequence[str] = MEASURED,
    metric: str = "train/success",
    window: int = WINDOW,
) -> dict[str, Any] | None:
    """What a finished run measured; None when it did not come to its end (a signal stopped it, saved).

    measured: what is kept of the evaluations. metric, window: of the curve.
    """
    if not (folder / "results.json").is_file():
        return None
    results = json.loads((folder / "results.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curve, ledger = curve_of(lines, metric, window), results["ledger"]
    solved = aggregate.reached(curve, TARGET, after=WINDOW)
    seconds = ledger["seconds"]
    return {
        "before": {name: results["before"].get(name) for name in measured},
        "after": {name: results["after"].get(name) for name in measured},
        "tokens_to_0.9": solved and solved.tokens,
        "method_s_to_0.9": solved and round(solved.seconds, 1),
        "tokens": ledger["tokens"],
        "method_s": round(sum(seconds.get(phase, 0.0) for phase in METHOD), 1),
        "lm_s": round(seconds.get("warm up", 0.0) + seconds.get("read", 0.0), 1),
        "evaluate_s": round(seconds.get("evaluate", 0.0), 1),
        "compile_s": compile_s(lines),
        "updates": len(curve),
        "watched": watched(lines),
        "curve": [[p.tokens, round(p.seconds, 1), round(p.success, 4)] for p in aggregate.thin(curve, POINTS)],
        "dropped": {name: count for name, count in ledger["dropped"].items() if count},
    }


def equal_tokens(runs: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """By horizon, the tokens at which RL runs are compared: those of the run that sampled fewest in its whole time.

    A run that was done before its time counts only where all were: then the one that sampled most.
    """
    whole: dict[int, list[int]] = {}
    done: dict[int, list[int]] = {}
    for run in runs:
        if "diverged" not in run and run["curve"]:
            kind = whole if run["method_s"] >= run["budget_s"] else done
            kind.setdefault(run["horizon"], []).append(run["tokens"]["generated"])
    return {horizon: min(whole[horizon]) if horizon in whole else max(done[horizon]) for horizon in {*done, *whole}}


def _success_at(run: Mapping[str, Any], tokens: int | None) -> float | None:
    """Success when a run had sampled so many tokens; None for one that samples none."""
    if "diverged" in run:
        return 0.0
    if not run["curve"] or tokens is None:
        return None
    return aggregate.at_tokens([Point(*three) for three in run["curve"]], tokens, before=run["before"]["success"])


def row_of(runs: Sequence[Mapping[str, Any]], tokens: int | None) -> dict[str, Any]:
    """Sums up the runs of an arm at a horizon. Tokens and seconds to 0.9 take a censored run at all that it spent."""
    whole = [run for run in runs if "diverged" not in run]
    solved = [run for run in whole if run["tokens_to_0.9"] is not None]
    value, low, high = aggregate.interval([[0.0 if "diverged" in r else r["after"]["success"] for r in runs]])
    at = [found for run in runs if (found := _success_at(run, tokens)) is not None]
    equal = aggregate.interval([at]) if at else (None, None, None)
    rl = [run for run in whole if run["curve"]]

    def mean(values: Sequence[float]) -> float | None:
        return sum(values) / len(values) if values else None

    def to_target(spent, reached: str) -> float | None:
        values = [run[reached] if run[reached] is not None else spent(run) for run in rl]
        return float(aggregate.iqm(values)) if values else None

    return {
        "arm": runs[0]["arm"],
        "horizon": runs[0]["horizon"],
        "seeds": len(runs),
        "tokens_to_0.9": to_target(lambda run: run["tokens"]["generated"], "tokens_to_0.9"),
        "wall_s_to_0.9": to_target(lambda run: run["method_s"], "method_s_to_0.9"),
        "censored": len(runs) - len(solved),
        "success_at_tokens": equal[0],
        "low_at_tokens": equal[1],
        "high_at_tokens": equal[2],
        "success_at_budget": value,
        "low": low,
        "high": high,
        "before": mean([run["before"]["success"] for run in whole]),
        "small_talk": mean([run["after"]["filler_correct"] for run in whole]),
        "tokens": mean([run["tokens"]["generated"] for run in whole]),
        "forward_tokens": mean([sum(run["tokens"].values()) - run["tokens"]["generated"] for run in whole]),
        "wall_s": mean([run["method_s"] + (0 if run["curve"] else run["lm_s"]) for run in whole]),
        "updates": mean([run["updates"] for run in whole]),
        "diverged": len(runs) - len(whole),
        "knobs": runs[0]["knobs"],
    }


def summarise(
    runs: Sequence[Mapping[str, Any]], arms: Sequence[str] = tuple(ARMS)
) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """A row for each arm at each horizon, in the order of `arms`, and the tokens at which they are compared there."""
    equal = equal_tokens(runs)
    places = sorted({(run["horizon"], arms.index(run["arm"])) for run in runs})
    rows = []
    for horizon, index in places:
        mine = [run for run in runs if (run["horizon"], run["arm"]) == (horizon, arms[index])]
        rows.append(row_of(mine, equal.get(horizon)))
    return rows, equal


def said(value: float | None, censored: bool = False) -> str:
    """A number to the target for people; a lower bound is marked as such."""
    return "-" if value is None else f"{'>' if censored else ''}{value:,.0f}"


def span(value: float | None, low: float | None, high: float | None) -> str:
    """A share with its interval for people."""
    return "-" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


class Style(NamedTuple):
    """How cells are written: share(value), share(value, low, high); count(value), count(value, is a lower bound)."""

    share: Callable[..., Any]
    count: Callable[..., Any]


CONSOLE = Style(lambda value, *interval: span(value, *interval) if interval else value, said)
PAGE = Style(pages.share, pages.count)
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # the head, and the rows under it


def cells(rows: Sequence[Mapping[str, Any]], style: Style) -> Table:
    """The table: horizons one after the other, the arms in each."""
    head = ("L", "arm", "seeds", "before", "tokens to .9", "seconds to .9", "censored", "success, equal tokens")
    head += ("success, equal time", "small talk right", "tokens sampled", "other tokens", "seconds", "updates")
    body = [
        (row["horizon"], ARMS[row["arm"]].label, row["seeds"], style.share(row["before"]))
        + tuple(style.count(row[key], row["censored"] > 0) for key in ("tokens_to_0.9", "wall_s_to_0.9"))
        + (f"{row['censored']} of {row['seeds']}",)
        + (style.share(*(row[key] for key in ("success_at_tokens", "low_at_tokens", "high_at_tokens"))),)
        + (style.share(row["success_at_budget"], row["low"], row["high"]), style.share(row["small_talk"]))
        + tuple(style.count(row[key]) for key in ("tokens", "forward_tokens", "wall_s", "updates"))
        for row in rows
    ]
    return head, body


def show(rows: Sequence[Mapping[str, Any]], equal: Mapping[int, int], untried: Sequence[str]) -> None:
    """Prints the table. untried: arms that run with the first of their knobs, since not all trials have a row."""
    from rsi_jax import metrics

    title = "interquartile means over seeds [95% bootstrap]; > a lower bound, some runs censored"
    metrics.table(title, *cells(rows, CONSOLE))
    for horizon, tokens in equal.items():
        print(f"equal tokens at horizon {horizon}: {tokens:,}")
    if untried:
        print(f"the first of their knobs, trials not complete: {', '.join(untried)}")


def markdown(table: Table, equal: Mapping[int, int], note: str = "") -> str:
    """A table for a page, and at how many tokens its rows are compared."""
    compared = "; ".join(f"{pages.count(tokens)} at L = {horizon}" for horizon, tokens in equal.items())
    return pages.table(*table) + f"\nEqual tokens: {compared}.{note}\n"
