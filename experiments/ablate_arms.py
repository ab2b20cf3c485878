"""Compares textual feedback with its controls on one config, over seeds, at equal tokens and at equal wall time.

python -m experiments.ablate_arms --config=configs/tool_calls.py
python -m experiments.ablate_arms --config=configs/tool_calls.py --arms=textual_feedback,grpo --seeds=0,1
python -m experiments.ablate_arms --config=configs/tool_calls.py --config.env.tool_calls.names=16

Arms: textual_feedback (the config as it is); grpo (terminal reward only, once per learning rate of --rates);
locator_penalty (the same located spans get advantage -1, no words); irrelevant and empty hints; where the config warms
up: more_lm (more warm-up on the same mix, no RL) and long_lm (the reference that needs what feedback does not: long
un-hinted demonstrations). Every seed warms up once; its RL arms start from that. Runs go two at a time, one core each,
so that wall times compare. A finished row is appended to --results; an interrupted sweep continues.

Equal tokens: after as many batches as the config trains. Arms that score no hints have cheaper batches: they are given
--longer times as many, with their schedule sized to that, and end at equal wall time, no later than the method time of
textual_feedback on that seed (if that comes before equal tokens, both are read there; see `batches` of the row).
stdout ends with one JSON line: arms {name: {metric: [mean, low, high]}}, runs, results.
"""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from absl import flags
from ml_collections import config_flags

from experiments import cli

_CONFIG = cli.config_file("configs/tool_calls.py")
FLAGS = cli.Flags()
_ARMS = FLAGS.list("arms", [], "arms to run (default: all)")
_SEEDS = FLAGS.list("seeds", ["0", "1", "2"], "seeds")
_RATES = FLAGS.list("rates", ["4e-3", "1e-3", "2.5e-4"], "learning rates of the grpo arm")
_LONGER = FLAGS.float("longer", 1.4, "batches of the arms that score no hints, as a multiple of the config's")
_RESULTS = FLAGS.string(
    "results", "", "rows, appended as they finish (default: experiments/results/ablate_<config and fields set>.jsonl)"
)
_FOLDER = FLAGS.string("folder", "", "where the runs go (default: runs/ablate_<same>)")
_JOBS = FLAGS.integer("jobs", 2, "runs at a time, one core each")
_LM_FACTOR = FLAGS.float("lm_factor", 4.0, "more_lm and long_lm: warm-up updates, as a multiple of the config's")

_EPISODES = FLAGS.integer("episodes", 512, "episodes per evaluation")

METRICS = {  # what a row keeps, where the task has it, and its heading
    "success": "success",
    "invalid": "invalid",
    "filler_correct": "small talk ok",
    "response_tokens": "tokens per response",
    "perplexity": "perplexity",
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm: its name, its config overrides, whether it does RL from the seed's warm-up, and whether its batches are
    cheaper than the method's (then it has more of them, up to equal wall time)."""

    name: str
    overrides: tuple[str, ...] = ()
    rl: bool = True
    cheaper: bool = False


def make_arms(rates, batches: int, longer: float, lm_updates: int, factor: float) -> list[Arm]:
    """Lists the arms, the first learning rate of GRPO before the others: an interrupted sweep has every kind.

    lm_updates: of the config's warm-up, 0 = it has none.
    """
    more_batches = (f"rl.updates={round(longer * batches)}", f"evaluation.every={batches}")
    more = (f"lm.updates={round(lm_updates * factor)}", "rl.updates=0")
    penalty = ("credit.name=locator_penalty", *more_batches)
    grpo = [Arm(f"grpo_{rate}", ("credit.name=grpo", f"rl.lr={rate}", *more_batches), cheaper=True) for rate in rates]
    arms = [
        Arm("textual_feedback"),
        *grpo[:1],
        Arm("irrelevant", ("feedback.hint=irrelevant",)),
        Arm("locator_penalty", penalty, cheaper=True),
        Arm("more_lm", more, rl=False),
        Arm("empty", ("feedback.hint=empty",)),
        Arm("long_lm", (*more, "lm.long_recall=True"), rl=False),
        *grpo[1:],
    ]
    return [arm for arm in arms if arm.rl or lm_updates]


def chosen(arms: list[Arm], names: list[str]) -> list[Arm]:
    """Takes the arms of these names ('grpo' = at every learning rate); all without names.

    Raises: base.InputError naming the nearest arm.
    """
    from rsi_jax import base

    known = {name: [arm for arm in arms if name in (arm.name, arm.name.partition("_")[0])] for name in names}
    for name, found in known.items():
        if not found:
            mend = base.did_you_mean(name, [arm.name for arm in arms])
            raise base.InputError(f"--arms names {name!r}, which is no arm{mend}")
    return [arm for arm in arms if not names or any(arm in found for found in known.values())]


def command(file: str, folder: pathlib.Path, seed: str, overrides) -> list[str]:
    """The train command of one run."""
    app = [sys.executable, "-m", "experiments.train", f"--config={file}", f"--run_dir={folder}"]
    return [*app, *(f"--config.{override}" for override in (*overrides, f"seed={seed}"))]


def start(argv: list[str], core: int, log: pathlib.Path) -> subprocess.Popen:
    """Starts a run on one core; its output goes to a log file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        return subprocess.Popen(argv, stdout=out, stderr=out, preexec_fn=lambda: os.sched_setaffinity(0, {core}))


def run_all(jobs: list[tuple[str, Callable[[], list[str]], pathlib.Path]], at_once: int, done) -> list[str]:
    """Runs (name, argv, log) jobs, `at_once` at a time; calls done(name) after each success; returns what failed.

    argv: called when the job starts; it may read the rows of the jobs that are done.
    """
    cores = sorted(os.sched_getaffinity(0))
    waiting, running, failed = list(jobs), {}, []
    while waiting or running:
        for slot in range(at_once):
            if slot not in running and waiting:
                name, argv, log = waiting.pop(0)
                print(f"start {name}", file=sys.stderr, flush=True)
                running[slot] = name, start(argv(), cores[slot % len(cores)], log), log
        for slot, (name, process, log) in list(running.items()):
            if process.poll() is None:
                continue
            del running[slot]
            if process.returncode:
                failed.append(f"{name}: exit {process.returncode}, see {log}")
                print(failed[-1], file=sys.stderr, flush=True)
            else:
                done(name)
        time.sleep(0.5)
    return failed


def row_of(arm: str, seed: str, folder: pathlib.Path, batches: int) -> dict:
    """Reads a finished run: before, at equal tokens (after `batches`), and at its end (equal wall time)."""
    results = json.loads((folder / "results.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["stage"] == "rl"]
    first = trained[0]["step"] - 1 if trained else 0
    equal = next((x for x in lines if x["stage"] == "eval" and x["step"] == first + batches), results["after"])
    seconds = results["ledger"]["seconds"]
    names = [name for name in METRICS if name in results["before"]]
    return {
        "arm": arm,
        "seed": int(seed),
        "before": {name: results["before"][name] for name in names},
        "equal_tokens": {name: equal[name] for name in names},
        "equal_wall": {name: results["after"][name] for name in names},
        "hint_gain": results["before"]["gain"],
        "batches": len(trained),
        "generated_tokens": results["ledger"]["tokens"]["generated"],
        "trained_tokens": results["ledger"]["tokens"]["trained"],
        "hint_tokens": results["ledger"]["tokens"]["hint"],
        "method_s": sum(seconds.get(name, 0.0) for name in ("generate", "feedback", "annotate", "train")),
        "lm_s": seconds.get("warm up", 0.0) + seconds.get("read", 0.0),
        "date": time.strftime("%Y-%m-%d"),
    }


def summarise(rows: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Mean and bootstrap 95% interval over seeds of every metric of every arm."""
    import numpy as np

    out: dict[str, dict[str, list[float]]] = {}
    names = [name for name in METRICS if all(name in row["before"] for row in rows)]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        rng = np.random.default_rng(0)
        picks = rng.integers(0, len(mine), (2000, len(mine)))
        out[arm] = {}
        for when in ("before", "equal_tokens", "equal_wall"):
            for name in names:
                values = np.array([row[when][name] for row in mine])
                low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
                out[arm][f"{when}/{name}"] = [float(values.mean()), float(low), float(high)]
    return out


def show(rows: list[dict], batches: int) -> None:
    """Prints the table: success before, at equal tokens and at equal wall time, and the rest at equal wall time."""
    from rsi_jax import metrics

    summary = summarise(rows)
    others = [name for name in METRICS if name != "success" and f"before/{name}" in next(iter(summary.values()))]
    columns = ["arm", "seeds", "before", f"{batches} batches", "equal wall"]
    columns += [*(METRICS[name] for name in others), "sampled tokens", "seconds"]
    keys = [f"{when}/success" for when in ("before", "equal_tokens", "equal_wall")]
    keys += [f"equal_wall/{name}" for name in others]
    table = []
    for arm, values in summary.items():
        mine = [row for row in rows if row["arm"] == arm]
        cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*values[key]) for key in keys]
        cost = [sum(row[key] for row in mine) / len(mine) for key in ("generated_tokens", "method_s")]
        table.append([arm, len(mine), *cells, f"{cost[0]:,.0f}", f"{cost[1]:.0f}"])
    metrics.table("Arms, without hints: mean over seeds [95% bootstrap]", columns, table)


def main(_) -> None:
    from rsi_jax import metrics

    config, file = _CONFIG.value, flags.FLAGS["config"].config_filename
    changed = config_flags.get_override_values(flags.FLAGS["config"])  # fields set on the command line, for every run
    suffix = "".join(f"-{field.rpartition('.')[2]}={value}" for field, value in changed.items())
    name = f"ablate_{pathlib.Path(file).stem}{suffix}".replace("/", "_")
    folder = pathlib.Path(_FOLDER.value or f"runs/{name}")
    results = pathlib.Path(_RESULTS.value or f"experiments/results/{name}.jsonl")
    results.parent.mkdir(parents=True, exist_ok=True)
    batches = config.rl.updates
    warms_up = "lm" in config.stages
    arms = make_arms(_RATES.value, batches, _LONGER.value, warms_up * config.lm.updates, _LM_FACTOR.value)
    arms = chosen(arms, _ARMS.value)
    have = {(row["arm"], row["seed"]) for row in cli.read_rows(results)}
    episodes = [f"evaluation.{name}={_EPISODES.value}" for name in ("episodes", "final_episodes")]

    def argv_of(arm: Arm, seed: str) -> list[str]:
        given = [f"{field}={value}" for field, value in changed.items()]
        overrides = [*given, "evaluation.every=0", *episodes, *arm.overrides]
        if arm.rl and warms_up:
            overrides.append(f"init_from={folder / f'warm_up-{seed}'}")
        if arm.cheaper:
            spent = {row["seed"]: row["method_s"] for row in cli.read_rows(results) if row["arm"] == "textual_feedback"}
            if int(seed) in spent:
                overrides.append(f"rl.max_minutes={spent[int(seed)] / 60:.3f}")
        return command(file, folder / f"{arm.name}-{seed}", seed, overrides)

    def runs_of(pairs) -> list:
        return [
            (f"{arm.name}/{seed}", functools.partial(argv_of, arm, seed), folder / f"{arm.name}-{seed}.log")
            for arm, seed in pairs
        ]

    def keep(name: str) -> None:
        arm, seed = name.rsplit("/", 1)
        if arm != "warm_up":
            with results.open("a") as out:
                out.write(json.dumps(row_of(arm, seed, folder / f"{arm}-{seed}", batches)) + "\n")

    todo = [(arm, seed) for arm in arms for seed in _SEEDS.value if (arm.name, int(seed)) not in have]
    warm = Arm("warm_up", ("stages=('lm',)",), rl=False)
    warm_ups = [(warm, seed) for seed in dict.fromkeys(seed for arm, seed in todo if arm.rl and warms_up)]
    failed = run_all(runs_of(warm_ups), _JOBS.value, keep) + run_all(runs_of(todo), _JOBS.value, keep)
    rows = [row for row in cli.read_rows(results) if str(row["seed"]) in _SEEDS.value]
    show(rows, batches)
    for line in failed:
        print("FAILED", line)
    metrics.finish({"arms": summarise(rows), "runs": len(rows), "failed": len(failed), "results": str(results)})


if __name__ == "__main__":
    cli.run(main, FLAGS)
