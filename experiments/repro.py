"""What the reproductions share that train a model: arms from the warm-up of their seed, rows, paired claims, a figure.

A reproduction is a `Study`: a config and the arms that differ in a few fields. `Command(...)` gives it flags, the
claims that it declares before it runs, a sweep that continues, and a last line of JSON. See
experiments/repro_gigpo.py.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import aggregate, claims, cli, horizon_rows, pages, sweep
from experiments.aggregate import Point


@dataclasses.dataclass(frozen=True)
class Arm:
    """What is compared. overrides: of its RL. task: overrides of its warm-up too; arms with the same ones share it.

    panel: of the figure. published: what others report, a line in the panel and a number in the row.
    """

    label: str
    overrides: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    panel: str = ""
    published: float | None = None


@dataclasses.dataclass(frozen=True)
class Study:
    """A reproduction.

    shared: overrides of warm-up and RL. rl: of RL alone, budget and schedule among them. quick: more of these for the
    quick form, which has `quick_seeds` seeds and the arms `quick_arms`. metric: of the evaluations before and
    after, what the rows are about; kept: what else of them a run's row keeps. curve: of the training batches, in the
    figure, a mean over `window` batches. minutes: of one run on one core.
    """

    name: str
    config: str
    arms: Mapping[str, Arm]
    shared: tuple[str, ...]
    rl: tuple[str, ...]
    quick: tuple[str, ...]
    quick_arms: tuple[str, ...]
    metric: str
    kept: tuple[str, ...]
    curve: str
    seeds: int
    quick_seeds: int
    minutes: float
    window: int = 5

    def unit(self, asked: sweep.Sweep, name: str, seed: int, *, quick: bool) -> sweep.Unit:
        """One run of an arm, after the warm-up of its seed."""
        arm, forms = self.arms[name], self.quick if quick else ()
        both = (*self.shared, *arm.task)
        task = "".join(f"_{sweep.short(one)}" for one in arm.task)
        warm = sweep.Unit(f"warm_up{task}/{seed}", self.config, (*both, "stages=('lm',)"), seed, minutes=2)
        own = ("compute.clock=cpu", "evaluation.every=0", f"init_from={asked.place(warm)}")
        overrides = (*both, *self.rl, *arm.overrides, *forms, *own)
        return sweep.Unit(f"{name}/{seed}", self.config, overrides, seed, {"arm": name}, self.minutes, (warm,))

    def claim(self, name: str, text: str, read: claims.Read, low: float, *arms: str, **told: Any) -> claims.Claim:
        """A claim of the quick form: the number that `read` reads is above `low`. told: source, minutes, budget."""
        given = {"command": f"experiments.{self.name} --quick", "config": self.config, "seeds": self.seeds}
        return claims.Claim(f"{self.name}/{name}", text, read=read, low=low, high=math.inf, arms=arms, **given, **told)

    def read(self, unit: sweep.Unit, folder: pathlib.Path) -> dict[str, Any] | None:
        """What a finished run measured; None when it did not come to its end."""
        knobs = {"measured": (self.metric, *self.kept), "metric": self.curve, "window": self.window}
        return horizon_rows.read(unit, folder, **knobs)


def row_of(study: Study, name: str, runs: Sequence[Mapping[str, Any]], tokens: int) -> dict[str, Any]:
    """Sums up the runs of an arm. tokens: sampled ones, as many as the arm that sampled fewest.

    Raises: FloatingPointError where a run diverged: not every metric has a worst value that could stand for it.
    """
    if bad := [run for run in runs if "diverged" in run]:
        raise FloatingPointError(f"{bad[0]['name']} diverged: {bad[0]['diverged']}")
    arm, metric = study.arms[name], study.metric
    value, low, high = aggregate.interval([[run["after"][metric] for run in runs]])
    curves = [[Point(*three) for three in run["curve"]] for run in runs]
    at = [aggregate.at_tokens(curve, tokens, before=curve[0].success) for curve in curves]

    def mean(found: Callable[[Mapping[str, Any]], float]) -> float:
        return sum(map(found, runs)) / len(runs)

    means = {
        "before": mean(lambda run: run["before"][metric]),
        "tokens": mean(lambda run: run["tokens"]["generated"]),
        "forward_tokens": mean(lambda run: sum(run["tokens"].values()) - run["tokens"]["generated"]),
        "wall_s": mean(lambda run: run["method_s"]),
        "updates": mean(lambda run: run["updates"]),
    } | {f"after/{one}": mean(lambda run, one=one: run["after"][one]) for one in study.kept}
    says = {"arm": name, "metric": metric, "seeds": len(runs), "value": value, "low": low, "high": high}
    equal = {"tokens_compared": tokens, f"{study.curve}_at_tokens": float(aggregate.iqm(at))}
    per_seed = {str(run["seed"]): run["after"][metric] for run in runs}
    curve_at = {str(run["seed"]): one for run, one in zip(runs, at, strict=True)}
    published = {} if arm.published is None else {"published": arm.published}
    return says | means | equal | published | {"per_seed": per_seed, "per_seed_at_tokens": curve_at}


def summarise(study: Study, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each arm that has runs, in the order of the study."""
    fewest = min((run["tokens"]["generated"] for run in runs if "diverged" not in run), default=0)
    by_arm = {name: [run for run in runs if run["arm"] == name] for name in study.arms}
    return [row_of(study, name, mine, fewest) for name, mine in by_arm.items() if mine]


def value(arm: str, key: str = "value") -> claims.Read:
    """Reads a number of an arm's row, with its interval where it is the metric."""

    def read(line: claims.Line) -> claims.Reading | None:
        found = [row for row in line["rows"] if row["arm"] == arm]
        if not found:
            return None
        return tuple(found[0][one] for one in ((key, "low", "high") if key == "value" else (key,) * 3))

    return read


def difference(left: str, right: str, key: str = "per_seed") -> claims.Read:
    """Reads the mean difference of two arms over the seeds that both have, with Student's 95% interval."""

    def read(line: claims.Line) -> claims.Reading | None:
        from rsi_jax.evals import fidelity

        found = {row["arm"]: row[key] for row in line["rows"]}
        if not {left, right} <= set(found):
            return None
        seeds = sorted(set(found[left]) & set(found[right]))
        return fidelity.interval([found[left][seed] - found[right][seed] for seed in seeds])

    return read


def draw(study: Study, runs: Sequence[Mapping[str, Any]], out: pathlib.Path) -> None:
    """Draws the curve of every run over the tokens that it sampled, those of an arm in one colour, panels apart."""
    from experiments import plots

    plt = plots.pyplot()
    panels = list(dict.fromkeys(study.arms[run["arm"]].panel for run in runs))
    size = (1.2 + 4.6 * len(panels), 3.6)
    figure, all_axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", sharey=True, squeeze=False)
    for panel, axes in zip(panels, all_axes[0], strict=True):
        arms = [(i, name) for i, (name, arm) in enumerate(study.arms.items()) if arm.panel == panel]
        for index, name in arms:
            colour, label = plots.COLOURS[index % len(plots.COLOURS)], study.arms[name].label
            for run in (run for run in runs if run["arm"] == name and "diverged" not in run):
                tokens, _, success = zip(*run["curve"], strict=True)
                axes.plot(tokens, success, color=colour, lw=1.1, alpha=0.85, label=label)
                label = None
        axes.set_title(panel, fontsize=9, loc="left")
        axes.set_xlabel("tokens sampled", fontsize=plots.SMALL)
        plots.tidy(axes)
        axes.legend(frameon=False, fontsize=plots.SMALL)
    all_axes[0][0].set_ylabel(f"{study.curve}, mean of {study.window} batches", fontsize=plots.SMALL)
    plots.save(figure, out)


class Command:
    """The command of a study: its flags, and what `main` does with them."""

    def __init__(self, flags: cli.Flags, study: Study, claimed: Sequence[claims.Claim]):
        self.study, self.claimed = study, claimed
        self._arms = flags.list("arms", [], "arms to run (default: all)")
        self._seeds = flags.integer("seeds", 0, f"seeds of every arm (default: {study.seeds})", lower_bound=0)
        self._quick = flags.boolean("quick", False, "the quick form, whose rows stay in the run folder")
        self._figure = flags.string("figure", "", "the figure (default: beside the rows)")
        self._sweep = sweep.SweepFlags(flags)

    def main(self, _) -> None:
        """Declares the claims, runs what has no row yet, judges, draws, and prints the line of JSON."""
        from rsi_jax import metrics

        study, quick = self.study, self._quick.value
        names = cli.chosen(self._arms.value, study.quick_arms if quick and not self._arms.value else study.arms, "arms")
        asked = self._sweep.sweep(f"{study.name}_quick" if quick else study.name, read=study.read)
        if quick:
            asked = dataclasses.replace(asked, results=asked.folder / "rows.jsonl")
        claims.declare(self.claimed)
        seeds = range(self._seeds.value or (study.quick_seeds if quick else study.seeds))
        made = functools.partial(study.unit, asked, quick=quick)
        units = [made(name, seed) for seed in seeds for name in names]
        failed = sweep.run(asked, units)
        runs = sweep.rows_of(asked.results, units)
        rows, judged = summarise(study, runs), []
        figure = pathlib.Path(self._figure.value or asked.results.with_suffix(".svg"))
        if rows:
            draw(study, runs, figure)
            pages.keep(asked.results, pages.table(*self.cells(rows, horizon_rows.PAGE)), write=False)
            title = "interquartile means over seeds [95% bootstrap]; seconds of one core"
            metrics.table(title, *self.cells(rows, horizon_rows.CONSOLE))
            judged = claims.judge_all(self.claimed, {"rows": rows})
        for line in failed:
            print("FAILED", line)
        counts = {"claims": judged, "failed": len(failed), "results": str(asked.results), "figure": str(figure)}
        metrics.finish({"rows": rows} | counts)

    def cells(self, rows: Sequence[Mapping[str, Any]], style: horizon_rows.Style) -> horizon_rows.Table:
        """The table."""
        study = self.study
        head = ("arm", "seeds", "before", study.metric, *study.kept, f"{study.curve}, equal tokens", "published")
        head += ("tokens sampled", "other tokens", "seconds", "updates")
        body = [
            (study.arms[row["arm"]].label, row["seeds"], row["before"])
            + (f"{row['value']:.3g} [{row['low']:.3g}, {row['high']:.3g}]",)
            + tuple(row[f"after/{one}"] for one in study.kept)
            + (row[f"{study.curve}_at_tokens"], row.get("published"))
            + tuple(style.count(row[key]) for key in ("tokens", "forward_tokens", "wall_s", "updates"))
            for row in rows
        ]
        return head, body
