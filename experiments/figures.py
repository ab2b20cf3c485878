"""Draws the comparison of arms from the rows of `experiments.ablate_arms`.

python -m experiments.figures

Every dot is a seed, every bar the mean over seeds: success without hints in the context, after equal wall time. The
hollow dots are the same seeds before RL. Nothing is drawn that is not a row of --rows.
stdout ends with one JSON line: figure, rows.
"""

import pathlib

from experiments import cli, plots

FLAGS = cli.Flags()
_ROWS = FLAGS.string("rows", "experiments/results/ablate_tool_calls.jsonl", "rows of experiments.ablate_arms")
_FIGURE = FLAGS.string("figure", "experiments/results/ablate_tool_calls.svg", "the figure; the ending names the format")

# In the order of the figure: how a reader would call the arm. Those of learning rates are added as they are found.
LABELS = {
    "textual_feedback": "textual feedback",
    "irrelevant": "irrelevant hint",
    "empty": "empty hint",
    "locator_penalty": "penalty at located turns",
    "more_lm": "more SFT, same mix",
    "long_lm": "SFT on long un-hinted\ndemonstrations (reference)",
}
OURS, OTHER, REFERENCE = "#1b6ca8", "#8a8f98", "#c9a13b"


def label_of(arm: str) -> str:
    """The arm's name for readers."""
    return f"GRPO, rate {arm.removeprefix('grpo_')}" if arm.startswith("grpo_") else LABELS[arm]


def order_of(arms: set[str]) -> list[str]:
    """The method, then GRPO by learning rate, then the other controls, then the reference."""
    grpo = sorted((arm for arm in arms if arm.startswith("grpo_")), key=lambda arm: float(arm.removeprefix("grpo_")))
    rest = [arm for arm in LABELS if arm in arms]
    return [*rest[:1], *grpo, *rest[1:]]


def draw(rows: list[dict], out: pathlib.Path) -> None:
    """Draws success per arm, a dot per seed."""
    plt = plots.pyplot()
    arms = order_of({row["arm"] for row in rows})
    figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(arms) + 0.9), layout="constrained")
    for place, arm in enumerate(arms):
        mine = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["seed"])
        after, before = ([row[when]["success"] for row in mine] for when in ("equal_wall", "before"))
        colour = OURS if arm == "textual_feedback" else REFERENCE if arm == "long_lm" else OTHER
        axes.barh(place, sum(after) / len(after), height=0.6, color=colour, alpha=0.3)
        heights = [place + 0.14 * (i - (len(mine) - 1) / 2) for i in range(len(mine))]
        axes.scatter(before, heights, s=16, facecolors="none", edgecolors=colour, linewidths=0.9, zorder=3)
        axes.scatter(after, heights, s=20, color=colour, zorder=4)
        axes.text(1.02, place, f"{sum(after) / len(after):.2f}", va="center", fontsize=9, clip_on=False)
    axes.set_yticks(range(len(arms)), [label_of(arm) for arm in arms], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("success without hints: filled after equal wall time, hollow before RL, a dot per seed", fontsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    plots.save(figure, out)


def main(_) -> None:
    from rsi_jax import base, metrics

    rows = cli.read_rows(pathlib.Path(_ROWS.value))
    if not rows:
        raise base.InputError(f"--rows={_ROWS.value}: no rows; run experiments.ablate_arms first")
    draw(rows, pathlib.Path(_FIGURE.value))
    metrics.finish({"figure": _FIGURE.value, "rows": len(rows)})


if __name__ == "__main__":
    cli.run(main, FLAGS)
