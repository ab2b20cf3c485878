"""Compares textual feedback with its controls on one config, over seeds, at equal tokens and at equal wall time.

python -m experiments.ablate_arms --config=configs/tool_calls.py
python -m experiments.ablate_arms --config=configs/tool_calls.py --arms=textual_feedback,grpo --seeds=0,1
python -m experiments.ablate_arms --config=configs/tool_calls.py --config.env.tool_calls.names=16

Arms: textual_feedback (the config as it is); grpo (terminal reward only, once per learning rate of --rates);
locator_penalty (the same located spans get advantage -1, no words); irrelevant and empty hints; where the config warms
up: more_lm (more warm-up on the same mix, no RL) and long_lm (the reference that needs what feedback does not: long
un-hinted demonstrations). Every seed warms up once; its RL arms start from that. Each run has cores of its own, so that
wall times compare. Rows are kept as `experiments.launch` says; an interrupted sweep continues. Rows of before digests
(2026-12-01) stand for the arm and seed that they name.

Equal tokens: after as many batches as the config trains. Arms that score no hints have cheaper batches: they are given
--longer times as many at most, and end at equal wall time, over which their learning rate decays, no later than the
method time of textual_feedback on that seed (if that comes before equal tokens, both are read there; see `batches` of
the row). stdout ends with one JSON line: arms {name: {metric: [mean, low, high]}}, runs, failed, diverged, results.
"""

import dataclasses
import functools
import json
import pathlib

import numpy as np
from absl import flags
from ml_collections import config_flags

from experiments import aggregate, cli, sweep

_CONFIG = cli.config_file("configs/tool_calls.py")
FLAGS = cli.Flags()
_ARMS = FLAGS.list("arms", [], "arms to run (default: all)")
_SEEDS = FLAGS.list("seeds", ["0", "1", "2"], "seeds")
_RATES = FLAGS.list("rates", ["4e-3", "1e-3", "2.5e-4"], "learning rates of the grpo arm")
_LONGER = FLAGS.float("longer", 1.4, "batches of the arms that score no hints, as a multiple of the config's")
_LM_FACTOR = FLAGS.float("lm_factor", 4.0, "more_lm and long_lm: warm-up updates, as a multiple of the config's")

_EPISODES = FLAGS.integer("episodes", 512, "episodes per evaluation")
_SWEEP = sweep.SweepFlags(FLAGS)

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


def read_run(unit: sweep.Unit, folder: pathlib.Path, *, batches: int) -> dict | None:
    """Reads a finished run: before, at equal tokens (after `batches`), and at its end (equal wall time)."""
    if not (folder / "results.json").is_file():
        return None
    results = json.loads((folder / "results.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["stage"] == "rl"]
    first = trained[0]["step"] - 1 if trained else 0
    equal = next((x for x in lines if x["stage"] == "eval" and x["step"] == first + batches), results["after"])
    seconds = results["ledger"]["seconds"]
    names = [name for name in METRICS if name in results["before"]]
    return {
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
    }


def summarise(rows: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Mean and bootstrap 95% interval over seeds of every metric of every arm."""
    out: dict[str, dict[str, list[float]]] = {}
    names = [name for name in METRICS if all(name in row["before"] for row in rows)]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]
        out[arm] = {}
        for when in ("before", "equal_tokens", "equal_wall"):
            for name in names:
                out[arm][f"{when}/{name}"] = list(aggregate.interval([[row[when][name] for row in mine]], np.mean))
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
    given = [f"{field}={value}" for field, value in changed.items()]
    suffix = "".join(f"-{field.rpartition('.')[2]}={value}" for field, value in changed.items())
    batches, warms_up = config.rl.updates, "lm" in config.stages
    asked = _SWEEP.sweep(
        f"ablate_{pathlib.Path(file).stem}{suffix}".replace("/", "_"),
        read=functools.partial(read_run, batches=batches),
    )
    arms = make_arms(_RATES.value, batches, _LONGER.value, warms_up * config.lm.updates, _LM_FACTOR.value)
    arms, seeds = chosen(arms, _ARMS.value), [int(seed) for seed in _SEEDS.value]
    have = {(row["arm"], row["seed"]) for row in cli.read_rows(asked.results) if "digest" not in row}
    episodes = [f"evaluation.{name}={_EPISODES.value}" for name in ("episodes", "final_episodes")]
    every = [*given, "evaluation.every=0", *episodes]

    def warm_up(seed: int) -> sweep.Unit:
        return sweep.Unit(f"warm_up/{seed}", file, (*every, "stages=('lm',)"), seed)

    def limit(seed: int) -> list[str]:
        """The method time of textual feedback on a seed, for the arms that are to end with it."""
        rows = [row for row in cli.read_rows(asked.results) if (row["arm"], row["seed"]) == ("textual_feedback", seed)]
        spent = [row["method_s"] for row in rows if "method_s" in row]
        return [f"rl.max_minutes={spent[-1] / 60:.3f}"] if spent else []

    def unit(arm: Arm, seed: int) -> sweep.Unit:
        after = (warm_up(seed),) if arm.rl and warms_up else ()
        start = [f"init_from={asked.place(one)}" for one in after]
        late = functools.partial(limit, seed) if arm.cheaper else tuple
        name, overrides = f"{arm.name}/{seed}", (*every, *arm.overrides, *start)
        return sweep.Unit(name, file, overrides, seed, {"arm": arm.name}, after=after, late=late)

    units = [unit(arm, seed) for arm in arms for seed in seeds if (arm.name, seed) not in have]
    failed = sweep.run(asked, units)
    current = {None, *(one.digest for one in units)}
    rows = [row for row in cli.read_rows(asked.results) if row["seed"] in seeds and row.get("digest") in current]
    diverged = [f"{row['name']} diverged: {row['diverged']}" for row in rows if "diverged" in row]
    rows = [row for row in rows if "diverged" not in row]
    if rows:
        show(rows, batches)
    for line in [*diverged, *failed]:
        print("FAILED", line)
    counts = {"runs": len(rows), "failed": len(failed), "diverged": len(diverged), "results": str(asked.results)}
    metrics.finish({"arms": summarise(rows)} | counts)


if __name__ == "__main__":
    cli.run(main, FLAGS)
