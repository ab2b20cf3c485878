"""What the figures of experiments share: a reproducible backend, plain axes, files without a date."""

import pathlib
from typing import Any

SMALL = 8
COLOURS = ("#1b6ca8", "#c1502e", "#3b8f6b", "#c9a13b", "#7b5ea7", "#5f6b7a")  # told apart by the colour-blind too


def pyplot() -> Any:
    """Sets matplotlib up to draw the same bytes from the same rows, and returns its pyplot."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "rsi_jax", "svg.fonttype": "none", "font.family": "sans-serif"}
    from matplotlib import pyplot as plt

    return plt


def tidy(axes: Any) -> None:
    """Leaves two spines, a faint grid across, and small ticks."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.2)
    axes.tick_params(labelsize=SMALL)


def legend_beside(axes: Any) -> None:
    """Puts the legend to the right of the axes."""
    axes.legend(frameon=False, fontsize=SMALL, loc="center left", bbox_to_anchor=(1.0, 0.5))


def save(figure: Any, out: pathlib.Path) -> None:
    """Writes a figure, its ending names the format, and closes it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)
    pyplot().close(figure)
