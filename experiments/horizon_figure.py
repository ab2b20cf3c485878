"""Draws the figure of `experiments.ablate_horizon` from its rows; nothing is drawn that is not a row."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import plots
from experiments.horizon_arms import ARMS

# The method, its controls, the rest: apart for the colour-blind too, and by marker.
LOOKS = {
    "textual_feedback": ("#1b6ca8", "o"),
    "grpo": ("#c1502e", "s"),
    "irrelevant": ("#5f6b7a", "X"),
    "locator_penalty": ("#c9a13b", "D"),
    "turn_ppo": ("#7b5ea7", "^"),
    "vineppo": ("#3b8f6b", "v"),
    "gigpo": ("#b5739d", "<"),
    "hcapo": ("#8a6d3b", ">"),
    "sdpo": ("#4fa3c7", "P"),
    "rlsd": ("#9aa0a6", "h"),
    "more_sft": ("#222222", "*"),
}


def draw(rows: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Draws tokens to 0.9 by horizon (hollow with an arrow: a lower bound), and success after equal time."""
    plt = plots.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    horizons = sorted({row["horizon"] for row in rows})
    for index, name in enumerate(ARMS):
        mine = [row for row in rows if row["arm"] == name]
        shift = 1.0 + 0.025 * (index - len(ARMS) / 2)  # so that arms at the same place can be told apart
        _to_target(left, [row for row in mine if row["tokens_to_0.9"] is not None], name, shift)
        _success(right, mine, name, shift)
    left.set_yscale("log")
    if tokens := [row["tokens_to_0.9"] for row in rows if row["tokens_to_0.9"] is not None]:
        left.set_ylim(10.0 ** math.floor(math.log10(min(tokens))), 10.0 ** math.ceil(math.log10(1.5 * max(tokens))))
    left.set_title("sampled tokens to 0.9 success (hollow: a lower bound)", fontsize=9, loc="left")
    right.set_ylim(-0.03, 1.03)
    right.set_title("success after equal time on one core (bars: 95% over seeds)", fontsize=9, loc="left")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlim(horizons[0] / 1.3, horizons[-1] * 1.3)
        axes.set_xticks(horizons, [str(horizon) for horizon in horizons])
        axes.minorticks_off()
        axes.set_xlabel("horizon, turns", fontsize=plots.SMALL)
        plots.tidy(axes)
    plots.legend_beside(right)
    plots.save(figure, out)


def _to_target(axes, mine: Sequence[Mapping[str, Any]], name: str, shift: float) -> None:
    colour, marker = LOOKS[name]
    at, tokens = [row["horizon"] * shift for row in mine], [row["tokens_to_0.9"] for row in mine]
    axes.plot(at, tokens, color=colour, lw=1.2, alpha=0.6)
    for x, y, row in zip(at, tokens, mine, strict=True):
        face = "white" if row["censored"] else colour
        axes.plot(x, y, marker=marker, markersize=6, color=colour, markerfacecolor=face, lw=0)
        if row["censored"]:
            style = {"arrowstyle": "-|>", "color": colour, "lw": 0.9, "shrinkA": 4}
            axes.annotate("", (x, y * 1.4), (x, y), arrowprops=style)


def _success(axes, mine: Sequence[Mapping[str, Any]], name: str, shift: float) -> None:
    colour, marker = LOOKS[name]
    at, value = [row["horizon"] * shift for row in mine], [row["success_at_budget"] for row in mine]
    below = [max(0.0, row["success_at_budget"] - row["low"]) for row in mine]
    above = [max(0.0, row["high"] - row["success_at_budget"]) for row in mine]
    look = {"color": colour, "marker": marker, "markersize": 5, "lw": 1.2, "elinewidth": 0.8}
    if mine:
        axes.errorbar(at, value, yerr=(below, above), label=ARMS[name].label, **look)
