"""Reproduces COCOA's ordering in linear key-to-door: which credit estimate finds the treasure, by length.

python -m experiments.repro_key_to_door --quick
python -m experiments.repro_key_to_door
python -m experiments.repro_key_to_door --arms=cocoa,reinforce --horizons=103 --seeds=10

Meulemans et al. 2023 (https://arxiv.org/abs/2306.16803, section 4.1): in a corridor the agent takes a key, then apples
whose noisy rewards are nearly all of its return, and gets a small treasure at the far end if it has the key. The
longer the corridor, the fewer learners find the treasure, but COCOA with rewards as outcomes does at L = 103; HCA and
REINFORCE hardly do. Batches of 8, 10,000 episodes, learning rates tuned per method and the same at all lengths.

Here the same world is a table (envs.exact.key_to_door says what differs; also, the paper's apples lie at fixed places)
and the policy a softmax over logits of a turn, from 0, i.e. uniform: with and without the key alike, as a network that
shares does it. --policy=state: logits of a turn and a state, see below. Adam, no entropy term, no epsilon of
exploration. Credit is of the sampled action; the paper's COCOA sums over all actions. P(treasure) and the expected
return over the best one are read off the table, exactly, not estimated from episodes. Arms
(experiments/key_to_door_run.py):
  reinforce       the return, no baseline
  grpo            the return minus the mean of the batch
  turn_gae        advantage with an exact critic, lambda 0.95, where the paper learned one
  vineppo         value differences from 3 continuations per turn, whose tokens are counted
  hca, cocoa      exact hindsight: of the return, in 32 even classes, and of the reward. The paper's HCA+ is of states
  hca_counted, cocoa_counted   hindsight counted in the run's last 64 batches (512 episodes) before the one that is
                  credited, with a prior of 4 episodes for the policy: no further episodes, but older policies
Rates: 3 trials per arm (Adam 0.01, 0.03, 0.1) at the longest horizon on seeds 100, 101, chosen by P(treasure), used at
every horizon. The claims of experiments/key_to_door_claims.py were written before the first run; one that fails is
printed as FAILED. Intervals: Student, 95%, over seeds; claims pair seeds, which share their first batch.

The first runs had logits of a state, and failed three of the five claims. What such a table adds to the paper's
problem: states with and without the key learn the apples apart. Who by luck leaves the key a little more often learns
the apples there first, and then it truly pays to leave it: 0.8 against a treasure of 0.045 at L = 103. So a run that
begins with noise ends at 0 or at 1, and even a true gradient may end at 0.

Rows, trials among them, are appended to --results as runs finish; a run that has a row is not done again. stdout ends
with one JSON line: rows [{arm, horizon, seeds, treasure_at_budget, low, high, treasure_along, return_share, episodes,
tokens, wall_s, cpu_s, knobs, by_seed}], claims, failed, results, figure.
"""

import dataclasses
import pathlib
import time

from experiments import cli

FLAGS = cli.Flags()
_QUICK = FLAGS.boolean("quick", False, "two horizons, four arms, 2,000 episodes, 1 trial seed; 3 minutes on a core")
_ARMS = FLAGS.list("arms", [], "arms (default: all of the form)")
_HORIZONS = FLAGS.list("horizons", [], "lengths L (default: 13, 33 and 103; without 33 with --quick)")
_SEEDS = FLAGS.integer("seeds", 0, "seeds of each arm and horizon, 2 or more (default: 5)", lower_bound=0)
_EPISODES = FLAGS.integer("episodes", 0, "episodes of a run (default: 10,000; 2,000 with --quick)", lower_bound=0)
_POLICY = FLAGS.enum("policy", "turn", ["turn", "state"], "what the policy's logits belong to: see above")
_RESULTS = FLAGS.string("results", "experiments/results/repro_key_to_door.jsonl", "rows; '' keeps none")
_FIGURE = FLAGS.string("figure", "experiments/results/repro_key_to_door.svg", "the figure; '' draws none")

COLUMNS = ("arm", "L", "P(treasure)", "95%", "along the run", "return / best", "episodes", "tokens", "CPU s", "rate")


def asked():
    """The form that the flags ask for. Raises: base.InputError."""
    from experiments import key_to_door_run
    from rsi_jax import base

    form = key_to_door_run.QUICK if _QUICK.value else key_to_door_run.WHOLE
    if not all(horizon.isdecimal() and int(horizon) >= 2 for horizon in _HORIZONS.value):
        raise base.InputError(f"--horizons={','.join(_HORIZONS.value)}: whole numbers of at least 2")
    if _SEEDS.value == 1:
        raise base.InputError("--seeds=1: an interval needs 2 or more")
    arms = cli.chosen(_ARMS.value, key_to_door_run.ARMS, "arms") if _ARMS.value else form.arms
    return dataclasses.replace(
        form,
        arms=tuple(arms),
        horizons=tuple(map(int, _HORIZONS.value)) or form.horizons,
        seeds=_SEEDS.value or form.seeds,
        episodes=_EPISODES.value or form.episodes,
        policy=_POLICY.value,
    )


class Rows:
    """Runs, each done once: kept in a file as they finish, if there is one."""

    def __init__(self, results: str):
        from experiments import sweep

        self.path = pathlib.Path(results) if results else None
        self.found = {row["digest"]: row for row in cli.read_rows(self.path)} if self.path else {}
        self.origin = {"commit": sweep.commit(), "date": time.strftime("%Y-%m-%d")}

    def of(self, run) -> dict:
        """The row of a run, which is trained unless it has one."""
        from experiments import key_to_door_run, sweep

        if run.digest not in self.found:
            row = key_to_door_run.train(run) | self.origin
            row["curve"] = [[*point[:2], *(round(x, 6) for x in point[2:])] for point in row["curve"]]
            if self.path:
                sweep.append(self.path, row)
            self.found[run.digest] = row
            said = f"{run.arm} at {run.horizon}, seed {run.seed}, rate {run.rate:g}"
            print(f"{said}: P(treasure) {row['treasure']:.3f} in {row['wall_s']:.1f} s", flush=True)
        return self.found[run.digest]


def show(rows: list[dict]) -> None:
    """Prints the table of the rows."""
    from rsi_jax import metrics

    metrics.table(
        "key-to-door: what was learned",
        COLUMNS,
        [
            (row["arm"], row["horizon"], row["treasure_at_budget"], f"{row['low']:.3f}..{row['high']:.3f}")
            + tuple(row[name] for name in ("treasure_along", "return_share", "episodes", "tokens", "cpu_s"))
            + (row["knobs"]["rate"],)
            for row in rows
        ],
    )


def main(_) -> None:
    import numpy as np

    from experiments import claims, key_to_door_claims, key_to_door_figure, key_to_door_run
    from rsi_jax import metrics

    form, kept = asked(), Rows(_RESULTS.value)
    claims.declare(key_to_door_claims.CLAIMS)
    knobs = {}
    for arm in form.arms:
        trials = {
            rate: float(np.mean([kept.of(run)["treasure"] for run in runs]))
            for rate, runs in key_to_door_run.trials_of(form, arm).items()
        }
        said = [[rate, round(value, 4)] for rate, value in trials.items()]
        knobs[arm] = {"rate": key_to_door_run.best_rate(trials), "trials": said}
    done: dict[tuple[int, str], list[dict]] = {}
    for seed in range(form.seeds):
        for horizon in form.horizons:
            for arm in form.arms:
                run = key_to_door_run.Run(arm, horizon, seed, knobs[arm]["rate"], form.episodes, form.policy)
                done.setdefault((horizon, arm), []).append(kept.of(run))
    rows = [key_to_door_run.summarise(runs, knobs[arm]) for (_, arm), runs in done.items()]
    line = {"rows": rows}
    if _FIGURE.value:
        key_to_door_figure.draw([row for runs in done.values() for row in runs], pathlib.Path(_FIGURE.value))
    show(rows)
    judged = claims.judge_all(key_to_door_claims.CLAIMS, line)
    failed = [one["name"] for one in judged if not one["held"]]
    metrics.finish(line | {"claims": judged, "failed": failed, "results": _RESULTS.value, "figure": _FIGURE.value})


if __name__ == "__main__":
    cli.run(main, FLAGS)
