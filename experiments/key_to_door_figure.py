"""Draws the figure of `experiments.repro_key_to_door` from the rows of its runs; nothing is drawn that is not a row."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import key_to_door_run, plots

# Colours as in the figure of credit_fidelity; exact hindsight solid, counted hindsight dashed.
LOOKS = {
    "reinforce": ("#9aa0a6", "-"),
    "grpo": ("#222222", "-"),
    "turn_gae": ("#7b5ea7", "-"),
    "vineppo": ("#1b6ca8", "-"),
    "hca": ("#c9a13b", "-"),
    "hca_counted": ("#c9a13b", "--"),
    "cocoa": ("#c1502e", "-"),
    "cocoa_counted": ("#c1502e", "--"),
}
COLUMNS = {2: "P(treasure)", 3: "expected return over the best"}  # of a curve


def draw(rows: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Draws P(treasure) and the return's share by episodes, a column per horizon; bands: 95% over seeds."""
    plt = plots.pyplot()
    horizons = sorted({row["horizon"] for row in rows})
    size = (3.1 * len(horizons) + 1.9, 4.8)
    figure, grid = plt.subplots(2, len(horizons), figsize=size, layout="constrained", squeeze=False, sharex=True)
    for down, (column, name) in enumerate(COLUMNS.items()):
        for across, horizon in enumerate(horizons):
            axes = grid[down][across]
            _curves(axes, [row for row in rows if row["horizon"] == horizon], column)
            axes.set_ylim(-0.03 if column == 2 else 0.45, 1.03)
            axes.set_title(f"{name}, L = {horizon}", fontsize=9, loc="left")
            plots.tidy(axes)
            if down:
                axes.set_xlabel("episodes", fontsize=plots.SMALL)
    plots.legend_beside(grid[0][-1])
    plots.save(figure, out)


def _curves(axes, rows, column: int) -> None:
    for arm, (colour, style) in LOOKS.items():
        if mine := [row for row in rows if row["arm"] == arm]:
            at, mean, low, high = zip(*key_to_door_run.band(mine, column), strict=True)
            axes.fill_between(at, low, high, color=colour, alpha=0.12, lw=0)
            axes.plot(at, mean, color=colour, ls=style, lw=1.3, label=key_to_door_run.ARMS[arm].label)
