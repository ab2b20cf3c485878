"""Measures how true the credit of each variant is, in worlds whose advantages and gradients are known exactly.

python -m experiments.credit_fidelity --quick
python -m experiments.credit_fidelity --worlds=key_to_door,stopping --variants=grpo,cocoa --seeds=4
python -m experiments.credit_fidelity

For each world, horizon and seed: draws a policy and groups of 8 rollouts, asks every variant for its credit, and
compares it with the true advantage of each sampled token: cosine, sign accuracy, rank correlation (Spearman), bias,
variance, signal-to-noise; and the policy gradient it makes with the exact one, by rollouts and by sampled tokens, those
of continuations and of learning hindsight counted. Seeds are the unit of every interval (Student, 95%). The knobs of
every arm stand in experiments/fidelity_arms.py: γ = 1, no division by a std but in reinforce_pp, mt_grpo without its
outcome term. No arm: gae (a turn is one token, so it is turn_gae), dr_grpo (it is grpo without the std), igpo (there is
no answer to expect) and what reads hinted views (there are no hints).

The claims of experiments/fidelity_claims.py were written before the run; one that fails is printed as failed.
A variant that this build does not have is left out, and named. Rows go to --results, anew every run; --figure is drawn
from them. stdout ends with one JSON line: rows, claims, absent, results, figure.
"""

import concurrent.futures
import functools
import json
import pathlib
import time

from experiments import cli

FLAGS = cli.Flags()
_QUICK = FLAGS.boolean("quick", False, "8 seeds, fewer horizons and arms, a few minutes; else 20 seeds and all of them")
_WORLDS = FLAGS.list("worlds", [], "worlds to run (default: all)")
_VARIANTS = FLAGS.list("variants", [], "variants to run, with all their arms (default: all)")
_SEEDS = FLAGS.integer("seeds", 0, "seeds, 2 or more (default: 8 with --quick, else 20)", lower_bound=0)
_FIRST_SEED = FLAGS.integer("first_seed", 0, "the first of them; others confirm what was seen", lower_bound=0)
_GROUPS = FLAGS.integer("groups", 16, "groups of 8 rollouts of each seed, at least 2", lower_bound=2)
_RESULTS = FLAGS.string("results", "experiments/results/credit_fidelity.jsonl", "rows")
_FIGURE = FLAGS.string("figure", "experiments/results/credit_fidelity.svg", "the figure; '' draws none")

COLUMNS = ("world", "horizon", "variant", "cosine", "95%", "gradient", "sign", "rank", "bias", "variance", "SNR")


def row_of(case, arm: str, per_seed: list[dict], seeds: int) -> dict:
    """Sums up the readings of an arm in a case over seeds."""
    from rsi_jax.evals import fidelity

    mean, low, high = fidelity.interval([one["cosine"] for one in per_seed])
    row = {"world": case.world, "variant": arm, "horizon": case.horizon, "cosine": mean, "low": low, "high": high}
    for name in ("gradient_cosine", "sign_accuracy", "spearman", "bias", "variance", "snr", "confidence"):
        known = [one[name] for one in per_seed if one[name] is not None]
        row[name] = sum(known) / len(known) if known else None
    curve = []
    for points in zip(*(one["curve"] for one in per_seed), strict=True):
        mean, low, high = fidelity.interval([point["gradient_cosine"] for point in points])
        tokens = sum(point["tokens"] for point in points) / len(points)
        curve.append(
            {"rollouts": points[0]["rollouts"], "tokens": tokens, "gradient_cosine": mean, "low": low, "high": high}
        )
    return row | {"curve": curve, "seeds": seeds}


def rounded(value):
    """Rounds the numbers of a row to 6 significant digits, which is more than the intervals know."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def show(rows: list[dict], claims: list[dict]) -> None:
    """Prints the tables of the rows and of the claims."""
    from rsi_jax import metrics

    metrics.table(
        "credit against the true advantage",
        COLUMNS,
        [
            (row["world"], row["horizon"], row["variant"], row["cosine"], f"{row['low']:.2f}..{row['high']:.2f}")
            + tuple(row[k] for k in ("gradient_cosine", "sign_accuracy", "spearman", "bias", "variance", "snr"))
            for row in rows
        ],
    )
    metrics.table(
        "claims, written before the run",
        ("", "claim", "where", "difference", "95%"),
        [
            (
                "holds" if claim["holds"] else "FAILED",
                claim["claim"],
                f"{claim['left']} {claim['relation']} {claim['right']}",
                claim["difference"][0],
                "{1:.3f}..{2:.3f}".format(*claim["difference"]),
            )
            for claim in claims
        ],
    )


def main(_) -> None:
    from experiments import fidelity_arms, fidelity_claims, fidelity_figure, fidelity_run
    from rsi_jax import base, credit, metrics

    worlds = cli.chosen(_WORLDS.value, fidelity_arms.CASES, "worlds")
    wanted = cli.chosen(_VARIANTS.value, {arm.variant for arm in fidelity_arms.ARMS.values()}, "variants")
    seeds = _SEEDS.value or (8 if _QUICK.value else 20)
    if seeds < 2:
        raise base.InputError(f"--seeds={seeds}: an interval needs 2 or more")
    drawn = range(_FIRST_SEED.value, _FIRST_SEED.value + seeds)
    arms = {name: arm for name, arm in fidelity_arms.ARMS.items() if arm.variant in wanted}
    if _QUICK.value and not _VARIANTS.value:
        arms = {name: arm for name, arm in arms.items() if arm.quick}
    absent = sorted({arm.variant for arm in arms.values()} - set(credit.variants()))
    arms = {name: arm for name, arm in arms.items() if arm.variant not in absent}
    cases = [case for case in fidelity_arms.cases(_QUICK.value) if case.world in worlds]
    started, readings, rows = time.monotonic(), {}, []
    measure = functools.partial(fidelity_run.measure, arms=arms, seeds=drawn, groups=_GROUPS.value)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # one world compiles while another is traced
        for case, found in zip(cases, pool.map(measure, cases), strict=True):
            for arm, per_seed in found.items():
                readings[case.world, case.horizon, arm] = per_seed
                rows.append(row_of(case, arm, per_seed, seeds))
            print(f"{case.world} at {case.horizon}: {metrics.duration(time.monotonic() - started)}", flush=True)

    def read(reading: fidelity_claims.Reading):
        found = readings.get((reading.world, reading.horizon, reading.arm))
        return found and [one[reading.measure] for one in found]

    judged = [fidelity_claims.judge(claim, read) for claim in fidelity_claims.CLAIMS]
    claims = [claim for claim in judged if claim]
    results = pathlib.Path(_RESULTS.value)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text("".join(json.dumps(rounded(metrics.jsonable(row))) + "\n" for row in [*rows, *claims]))
    if _FIGURE.value:
        fidelity_figure.draw(rows, pathlib.Path(_FIGURE.value))
    show(rows, claims)
    if absent:
        print(f"not in this build, left out: {', '.join(absent)}")
    if len(claims) < len(judged):
        print(f"{len(judged) - len(claims)} of {len(judged)} claims were not put to the test: their arms did not run")
    keys = ("world", "variant", "horizon", "cosine", "low", "high", "gradient_cosine", "sign_accuracy", "snr", "seeds")
    metrics.finish(
        {
            "rows": [{key: row[key] for key in keys} for row in rows],
            "claims": claims,
            "absent": absent,
            "results": str(results),
            "figure": _FIGURE.value,
        }
    )


if __name__ == "__main__":
    cli.run(main, FLAGS)
