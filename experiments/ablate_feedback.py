"""What each part of textual feedback does: one factor at a time around the default, on the tool-call task.

python -m experiments.ablate_feedback
python -m experiments.ablate_feedback --factors=divergence,control --seeds=0

The factors and their settings stand in experiments/feedback_factors.py. Every arm runs for the same CPU time at one
horizon, from the warm-up of its seed, sized as in experiments/ablate_horizon; `warm-up` and `names` vary what all
start from, with and without feedback: how well the model uses a hint, and how much is known once a call was wrong.
Rows are appended as runs end; an interrupted sweep continues. Beside success a row keeps what tells of a collapse, as
[first, last] 5 batches: entropy, tokens per response, and the probability of the right call at located turns, of the
teacher with the hint and of the student without.

stdout ends with one JSON line: rows [{arm, factor, horizon, seeds, tokens_to_0.9, success_at_tokens,
success_at_budget, low, high, tokens, wall_s, censored, gain, watched}] (gain: of the hint, before RL), equal_tokens,
failed, results.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments import ablate_horizon, cli, feedback_factors, horizon_arms, horizon_rows, pages, sweep
from experiments.feedback_factors import DEFAULT, FACTORS, TASKS

FLAGS = cli.Flags()
_FACTORS = FLAGS.list("factors", [], "factors to vary (default: all); the baseline always runs")
_SEEDS = FLAGS.list("seeds", ["0", "1"], "seeds of every arm")
_HORIZON = FLAGS.integer("horizon", 64, "turns per episode, one of the horizons of ablate_horizon")
_MINUTES = FLAGS.float("rl_minutes", 4.9, "CPU minutes of RL of a run", lower_bound=0.0)
_WRITE = FLAGS.boolean("write", False, "put the table into README.md")
_SWEEP = sweep.SweepFlags(FLAGS)


def unit(asked: sweep.Sweep, name: str, horizon: int, seed: int, rl_minutes: float) -> sweep.Unit:
    """One run of an arm."""
    setting = feedback_factors.settings()[name]
    size, shape = horizon_arms.SIZES[horizon], ablate_horizon.WHOLE.overrides
    warmed = (*size.overrides(horizon), *shape, *setting.task)
    label = f"warm_up{''.join(f'_{sweep.short(one)}' for one in setting.task)}/{horizon}/{seed}"
    after = sweep.Unit(label, feedback_factors.CONFIG, (*warmed, "stages=('lm',)"), seed, minutes=2)
    overrides = (
        *warmed,
        *ablate_horizon.MEASURE,
        *ablate_horizon.rl_from(asked, after, rl_minutes),
        *setting.overrides,
    )
    overrides += (f"rl.stop_at={horizon_arms.STOP}",)
    fields = {"arm": name, "factor": setting.factor, "horizon": horizon, "knobs": list(setting.overrides)}
    fields["budget_s"] = 60 * rl_minutes
    return sweep.Unit(f"{name}/{horizon}/{seed}", feedback_factors.CONFIG, overrides, seed, fields, 6, (after,))


def arms_of(factors: Sequence[str]) -> list[str]:
    """The arms of the asked factors, those of the baseline first."""
    wanted = {"baseline", *factors}
    return [name for name, setting in feedback_factors.settings().items() if setting.factor in wanted]


def rows_of(runs: Sequence[Mapping[str, Any]], arms: Sequence[str]) -> tuple[list[dict[str, Any]], dict[int, int]]:
    """A row for each arm, with what tells of a collapse averaged over its seeds."""
    rows, equal = horizon_rows.summarise(runs, arms)
    for row in rows:
        mine = [run for run in runs if run["arm"] == row["arm"] and "diverged" not in run]
        names = set.intersection(*(set(run["watched"]) for run in mine)) if mine else set()
        row["watched"] = {
            name: [sum(end) / len(mine) for end in zip(*(run["watched"][name] for run in mine), strict=True)]
            for name in sorted(names)
        }
        gains = [run["before"]["gain"] for run in mine if run["before"].get("gain") is not None]
        row["gain"] = sum(gains) / len(gains) if gains else None
        row["factor"] = feedback_factors.settings()[row["arm"]].factor
    return rows, equal


def cells(rows: Sequence[Mapping[str, Any]], style: horizon_rows.Style) -> horizon_rows.Table:
    """The table: each arm beside the default."""
    base = next((row["success_at_budget"] for row in rows if row["arm"] == DEFAULT), None)

    def ends(row, name: str) -> str:
        return " > ".join(pages.share(value) for value in row["watched"].get(name, ())) or "-"

    head = ("factor", "setting", "seeds", "hint gain", "tokens to .9", "success, equal tokens", "success, equal time")
    head += ("against default", "small talk right", "entropy", "teacher", "student", "updates")
    body = [
        (row["factor"], row["arm"], row["seeds"], style.share(row["gain"]))
        + (style.count(row["tokens_to_0.9"], row["censored"] > 0), style.share(row["success_at_tokens"]))
        + (style.share(row["success_at_budget"], row["low"], row["high"]),)
        + ("-" if base is None else f"{row['success_at_budget'] - base:+.2f}", style.share(row["small_talk"]))
        + (ends(row, "entropy"), ends(row, "teacher"), ends(row, "student"), style.count(row["updates"]))
        for row in rows
    ]
    return head, body


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table."""
    from rsi_jax import metrics

    title = "one factor at a time; first 5 batches > last 5; > before a number: a lower bound"
    metrics.table(title, *cells(rows, horizon_rows.CONSOLE))


def main(_) -> None:
    from rsi_jax import base, metrics

    names = arms_of(cli.chosen(_FACTORS.value, [*FACTORS, *TASKS], "factors"))
    if _HORIZON.value not in horizon_arms.SIZES:
        raise base.InputError(f"--horizon={_HORIZON.value} is none of {', '.join(map(str, horizon_arms.SIZES))}")
    asked = _SWEEP.sweep("ablate_feedback", read=horizon_rows.read)
    units = [unit(asked, name, _HORIZON.value, int(seed), _MINUTES.value) for seed in _SEEDS.value for name in names]
    failed = sweep.run(asked, units)
    rows, equal = rows_of(sweep.rows_of(asked.results, units), list(feedback_factors.settings()))
    show(rows)
    if rows:
        note = " a > b: over the first and the last 5 batches."
        text = horizon_rows.markdown(cells(rows, horizon_rows.PAGE), equal, note)
        pages.keep(asked.results, text, write=_WRITE.value)
    for line in failed:
        print("FAILED", line)
    metrics.finish({"rows": rows, "equal_tokens": equal, "failed": len(failed), "results": str(asked.results)})


if __name__ == "__main__":
    cli.run(main, FLAGS)
