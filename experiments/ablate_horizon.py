"""How far credit carries as the horizon grows: tokens and time to 0.9 success on the tool-call task, by arm.

python -m experiments.ablate_horizon
python -m experiments.ablate_horizon --arms=textual_feedback,grpo --horizons=16,64
python -m experiments.ablate_horizon --quick

At each horizon L the number of sub-goals is L / 4, so success by chance goes to 0. A seed warms up once per horizon,
on short un-hinted and long hinted demonstrations; all its arms start from that (but `more_sft`, which goes on with
it). Every arm then has the same time on one core (experiments/horizon_arms.py: SIZES), in seconds of CPU, so that
whatever else the machine does costs no arm anything; RL alone is timed, without evaluations, after its programs were
compiled by a run of two batches. The learning rate decays over that time; a run whose running success reaches 0.95 is
done and stops. First come the knob trials (not compiled beforehand, never stopped): three per arm, at L = 64, on seed
100, one run each; the arm's best (success after, then fewer invalid calls) is what it runs with. Rows of trials and
runs are appended as they finish; an interrupted sweep continues. --quick: L = 16, one seed, the headline arms, half a
minute of RL each, no trials; its rows stay in the run folder.

Solved: the mean success of the last 5 batches (64 episodes each, no hints in the context) reaches 0.9. A run that does
not reach it is right-censored: its tokens are a lower bound. Tokens are those that the policy sampled, continuations
included; the forward tokens of hints, of rescoring and of training stand beside them in the rows. Success at equal
tokens: when each run had sampled as many as the one that sampled fewest in its whole time at that horizon, or was
done. Success at the budget: 256 new episodes after equal time, or when it was done. Intervals: 95%, bootstrap over
seeds. A run that diverged counts as success 0.

stdout ends with one JSON line: rows [{arm, horizon, seeds, tokens_to_0.9, wall_s_to_0.9, success_at_tokens,
success_at_budget, low, high, tokens, wall_s, censored, diverged, knobs}] (low, high: of success_at_budget; tokens,
wall_s: mean of a run, seconds of one core), equal_tokens {horizon: tokens}, claims, failed, results, figure.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence

from experiments import claims, cli, horizon_arms, horizon_rows, pages, sweep
from experiments.horizon_arms import ARMS, SIZES

FLAGS = cli.Flags()
_ARMS = FLAGS.list("arms", [], "arms to run (default: all)")
_HORIZONS = FLAGS.list("horizons", [], "horizons to run (default: all)")
_SEEDS = FLAGS.integer("seeds", 0, "seeds of every arm (default: 3, 5 of the headline arms, 2 at 512)", lower_bound=0)
_QUICK = FLAGS.boolean("quick", False, "a few minutes: see above")
_TRIALS = FLAGS.boolean("trials", True, "run the knob trials that have no row yet; else the rows there are decide")
_WRITE = FLAGS.boolean("write", False, "put the table into README.md")
_FIGURE = FLAGS.string("figure", "", "the figure (default: beside the rows)")
_SWEEP = sweep.SweepFlags(FLAGS)

EPISODES = 256  # of the evaluations before and after


@dataclasses.dataclass(frozen=True)
class Shape:
    """What differs between the whole sweep and the quick one. rl_minutes: 0 = those of the size."""

    overrides: tuple[str, ...] = ("lm.updates=120",)
    rl_minutes: float = 0.0
    sft_share: float = 1.0


WHOLE = Shape()
QUICK = Shape(("lm.updates=60",), rl_minutes=0.5, sft_share=0.25)


def warm_up(arm: str, horizon: int, seed: int, shape: Shape) -> sweep.Unit:
    """The warm-up that an arm starts from, that of a seed for all arms that can share it."""
    own = ARMS[arm].warm_up
    overrides = (*SIZES[horizon].overrides(horizon), *shape.overrides, "stages=('lm',)", *own)
    return sweep.Unit(
        f"warm_up{f'_{arm}' if own else ''}/{horizon}/{seed}", horizon_arms.CONFIG, overrides, seed, minutes=2
    )


def rl_from(asked: sweep.Sweep, after: sweep.Unit, rl_minutes: float) -> tuple[str, ...]:
    """RL from a warm-up for a time, over which the learning rate decays."""
    return (
        "rl.updates=100000",
        "rl.schedule=cosine",
        f"rl.max_minutes={rl_minutes}",
        f"init_from={asked.place(after)}",
    )


# Evaluated before and after, not in between; timed by CPU.
MEASURE = ("evaluation.every=0", f"evaluation.final_episodes={EPISODES}", "compute.clock=cpu")


def unit(
    asked: sweep.Sweep, name: str, horizon: int, seed: int, trial: int, shape: Shape, *, tried=False
) -> sweep.Unit:
    """One run of an arm with the knobs of its trial."""
    arm, size = ARMS[name], SIZES[horizon]
    rl_minutes = shape.rl_minutes or size.rl_minutes
    overrides = [
        *size.overrides(horizon),
        *shape.overrides,
        *MEASURE,
    ]
    if arm.sft:  # the warm-up alone, a longer one
        overrides.append(f"lm.updates={round(size.sft * shape.sft_share)}")
        after = ()
    else:
        after = (warm_up(name, horizon, seed, shape),)
        overrides += rl_from(asked, after[0], rl_minutes)
    knobs = arm.trials[trial]
    overrides += () if tried else (f"rl.stop_at={horizon_arms.STOP}",)
    fields = {"arm": name, "horizon": horizon, "knobs": list(knobs), "trial": trial, "budget_s": 60 * rl_minutes}
    label = f"{name}/{horizon}/{seed}" + (f"/trial {trial}" if tried else "")
    overrides += [*arm.overrides, *knobs]
    return sweep.Unit(label, horizon_arms.CONFIG, tuple(overrides), seed, fields, size.minutes, after)


def compiled(one: sweep.Unit, first: sweep.Unit) -> sweep.Unit:
    """The same run, after two batches of `first` (the arm at that horizon, its first seed) have compiled its programs.

    They are kept beside the run folders, so that a run's time is not that of compiling.
    """
    if ARMS[one.fields["arm"]].sft:
        return one
    short = ("rl.updates=2", "evaluation.final_episodes=2")
    name = f"compile {first.fields['arm']}/{first.fields['horizon']}"
    primer = sweep.Unit(name, first.config, (*first.overrides, *short), first.seed, minutes=1, after=first.after)
    return dataclasses.replace(one, after=(*one.after, primer))


def best_trials(rows: Sequence[Mapping]) -> dict[str, int]:
    """The trial of each arm that did best, where all three have a row."""
    best = {}
    for name, arm in ARMS.items():
        mine = {row["trial"]: row["after"] for row in rows if row["arm"] == name and "diverged" not in row}
        if len([row for row in rows if row["arm"] == name]) == len(arm.trials) and mine:
            best[name] = max(mine, key=lambda trial: (mine[trial]["success"], -mine[trial]["invalid"]))
    return best


def main(_) -> None:
    from experiments import horizon_figure
    from rsi_jax import metrics

    names = cli.chosen(_ARMS.value, horizon_arms.HEADLINE if _QUICK.value and not _ARMS.value else ARMS, "arms")
    known = ["16"] if _QUICK.value else [str(horizon) for horizon in SIZES]
    horizons = [int(horizon) for horizon in cli.chosen(_HORIZONS.value, known, "horizons")]
    shape, label = (QUICK, "ablate_horizon_quick") if _QUICK.value else (WHOLE, "ablate_horizon")
    asked = _SWEEP.sweep(label, read=horizon_rows.read)
    if _QUICK.value:
        asked = dataclasses.replace(asked, results=asked.folder / "rows.jsonl")
    trials = dataclasses.replace(asked, results=asked.results.with_name(f"{label}_trials.jsonl"))
    failed, tried = [], []
    if not _QUICK.value:
        claims.declare(horizon_arms.CLAIMS)
        tried = [
            unit(trials, name, horizon_arms.TRIAL_HORIZON, horizon_arms.TRIAL_SEED, trial, shape, tried=True)
            for trial in range(3)
            for name in names
        ]
        if _TRIALS.value:
            failed += sweep.run(trials, tried)
    best = best_trials(sweep.rows_of(trials.results, tried))
    wanted = {(name, horizon): horizon_arms.seeds_of(name, horizon) for horizon in horizons for name in names}
    if _QUICK.value or _SEEDS.value:
        wanted = dict.fromkeys(wanted, range(_SEEDS.value or 1))
    runs_of = functools.partial(unit, asked, shape=shape)
    units = [
        compiled(*(runs_of(name, horizon, s, best.get(name, 0)) for s in (seed, seeds[0])))
        for seed in range(max(map(len, wanted.values())))
        for (name, horizon), seeds in wanted.items()
        if seed in seeds
    ]
    failed += sweep.run(asked, units)
    runs = sweep.rows_of(asked.results, units)
    rows, equal = horizon_rows.summarise(runs)
    figure = pathlib.Path(_FIGURE.value or asked.results.with_suffix(".svg"))
    if rows:
        horizon_figure.draw(rows, figure)
        text = horizon_rows.markdown(horizon_rows.cells(rows, horizon_rows.PAGE), equal)
        pages.keep(asked.results, text, write=_WRITE.value)
    horizon_rows.show(rows, equal, [name for name in names if name not in best])
    judged = horizon_arms.judge(rows)
    for line in failed:
        print("FAILED", line)
    counts = {"equal_tokens": equal, "claims": judged, "failed": len(failed)}
    metrics.finish({"rows": rows} | counts | {"results": str(asked.results), "figure": str(figure)})


if __name__ == "__main__":
    cli.run(main, FLAGS)
