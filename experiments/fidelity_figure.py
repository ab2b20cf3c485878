"""Draws the figure of `experiments.credit_fidelity` from its rows; nothing is drawn that is not a row."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import plots

# Colours of the lines, apart for the colour-blind too.
LINES = {
    "reinforce": "#9aa0a6",
    "grpo": "#5f6b7a",
    "gigpo": "#c9a13b",
    "turn_gae, critic off by 0.3": "#7b5ea7",
    "vineppo, K = 9": "#1b6ca8",
    "cocoa": "#c1502e",
    "cocoa, counted": "#e39a80",
}


def heading(world: str, horizon: int) -> str:
    """A world's name on two lines if it has as many words, and its horizon below."""
    name = world.replace("_", "\n", 1).replace("_", " ")
    return f"{name}\n{horizon} turns"


def written(row: Mapping[str, Any]) -> str:
    """Mean and half of the interval of a cosine, as short as they go; no half where it rounds to 0."""
    half = f"{(row['high'] - row['low']) / 2:.2f}"
    mean = f"{round(row['cosine'], 2) + 0.0:.2f}"
    return mean if half == "0.00" else f"{mean} ±{half.removeprefix('0')}"


def draw(rows: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Draws the cosine of every variant in every world, then cosine by horizon and gradient cosine by tokens."""
    plt = plots.pyplot()
    places = list(dict.fromkeys((row["world"], row["horizon"]) for row in rows))
    arms = list(dict.fromkeys(row["variant"] for row in rows))
    figure = plt.figure(figsize=(10, 3.9 + 0.24 * len(arms)), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(0.24 * len(arms) + 0.9, 3.0))
    _cosines(top.subplots(), rows, arms, places)
    left, right = bottom.subplots(1, 2)
    world = max(dict.fromkeys(world for world, _ in places), key=lambda w: sum(w == place[0] for place in places))
    longest = max(horizon for name, horizon in places if name == world)
    _by_horizon(left, rows, world)
    _by_tokens(right, rows, world, longest)
    for axes in (left, right):
        plots.tidy(axes)
    plots.legend_beside(right)
    plots.save(figure, out)


def _cosines(axes, rows, arms, places) -> None:
    """A cell per variant and world: the mean cosine with the true advantage, as colour and number."""
    found = {(row["variant"], row["world"], row["horizon"]): row for row in rows}
    table = [
        [found[arm, *place]["cosine"] if (arm, *place) in found else float("nan") for place in places] for arm in arms
    ]
    axes.imshow(table, cmap="RdBu", vmin=-1, vmax=1, aspect="auto")
    for y, arm in enumerate(arms):
        for x, place in enumerate(places):
            if (row := found.get((arm, *place))) is not None:
                colour = "white" if abs(row["cosine"]) > 0.6 else "#222222"
                axes.text(x, y, written(row), ha="center", va="center", fontsize=7, color=colour)
    axes.set_yticks(range(len(arms)), arms, fontsize=plots.SMALL)
    axes.set_xticks(range(len(places)), [heading(*place) for place in places], fontsize=7)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        "cosine of the credit with the true advantage, per sampled token (mean over seeds ± 95%)",
        fontsize=9,
        loc="left",
        pad=8,
    )


def _by_horizon(axes, rows, world) -> None:
    for arm, colour in LINES.items():
        mine = sorted((r for r in rows if r["variant"] == arm and r["world"] == world), key=lambda r: r["horizon"])
        if mine:
            at = [row["horizon"] for row in mine]
            axes.fill_between(at, [r["low"] for r in mine], [r["high"] for r in mine], color=colour, alpha=0.15, lw=0)
            axes.plot(at, [r["cosine"] for r in mine], color=colour, marker="o", markersize=4)
    axes.set_xscale("log")
    ticks = sorted({row["horizon"] for row in rows if row["world"] == world})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("horizon, turns", fontsize=plots.SMALL)
    axes.set_title(f"{world.replace('_', ' ')}: cosine with the true advantage", fontsize=9, loc="left")


def _by_tokens(axes, rows, world, horizon) -> None:
    for arm, colour in LINES.items():
        for row in (r for r in rows if (r["variant"], r["world"], r["horizon"]) == (arm, world, horizon)):
            at = [point["tokens"] for point in row["curve"]]
            low, high = ([point[k] for point in row["curve"]] for k in ("low", "high"))
            axes.fill_between(at, low, high, color=colour, alpha=0.15, lw=0)
            means = [point["gradient_cosine"] for point in row["curve"]]
            axes.plot(at, means, color=colour, marker="o", markersize=3, label=arm)
    axes.set_xscale("log")
    axes.set_xlabel("sampled tokens, those of continuations and of learning hindsight included", fontsize=plots.SMALL)
    axes.set_title(
        f"{world.replace('_', ' ')}, {horizon} turns: cosine with the exact gradient", fontsize=9, loc="left"
    )
