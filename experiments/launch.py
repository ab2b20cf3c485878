"""Runs a sweep: config x overrides x seeds, each run a process on cores of its own, under a budget of memory.

python -m experiments.launch --config=configs/tool_calls.py --sweep=credit.name=grpo,gigpo --seeds=0,1

A run is named by a digest of its effective config, seed and all. Its row (a JSON line) is appended to --results when it
ends; a run that has a row is not done again, and one whose config has changed is. However the sweep ends, kill -9
included, its runs end with it, and the same command continues: their folders resume.

A run starts when cores are free and so is the memory that it may take: --unit_gib, or the highest peak of a run of this
sweep if that is more. How it ends: with exit code 0 and a JSON line on its stdout, it is done. 1: training went wrong
(it diverged); that is a result, in its row as `diverged`, and not tried again. 2: bad input; the sweep ends with that
line, and the other runs save. Anything else (killed, a traceback): tried again --retries times, then left without a
row, and the sweep ends with exit code 1.

The last line of stdout is JSON: rows, done (runs with a row), diverged, failed, results.
"""

import itertools
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from experiments import cli, sweep
from experiments.sweep import Unit


def grid(config: str, given: Sequence[str], axes: Sequence[str], seeds: Sequence[int]) -> list[Unit]:
    """The units of config x axes x seeds; an axis is 'x.y=a,b,...' (commas within brackets are part of a value)."""
    split = [
        (name, re.split(r",(?![^(\[]*[)\]])", values)) for name, _, values in (axis.partition("=") for axis in axes)
    ]
    points = itertools.product(*([f"{name}={value}" for value in values] for name, values in split))
    stem = pathlib.Path(config.partition(":")[0]).stem
    return [
        Unit(
            "/".join([stem, *map(sweep.short, point), str(seed)]),
            config,
            (*given, *point),
            seed,
        )
        for point in points
        for seed in seeds
    ]


FLAGS = cli.Flags()
_CONFIG = cli.config_file()
_AXES = FLAGS.multi_string("sweep", [], "an axis, 'x.y=a,b,...'; several make a grid")
_SEEDS = FLAGS.list("seeds", ["0"], "seeds")
_SWEEP = sweep.SweepFlags(FLAGS)


def main(_) -> None:
    from rsi_jax import metrics

    config = flags.FLAGS["config"]
    given = [f"{field}={value}" for field, value in config_flags.get_override_values(config).items()]
    seeds = [int(seed) for seed in _SEEDS.value]
    units = grid(config.config_filename, given, _AXES.value, seeds)
    asked = _SWEEP.sweep(f"launch_{pathlib.Path(config.config_filename.partition(':')[0]).stem}")
    failed = sweep.run(asked, units)
    rows = sweep.rows_of(asked.results, units)
    names = ("success_before", "success_after", "return_after", "generated_tokens", "wall_s", "peak_gib")
    table = [(row["name"], *(row.get(name) for name in names), row.get("diverged", "")) for row in rows]
    metrics.table(f"{len(rows)} of {len(units)} runs", ("run", *names, "diverged"), table)
    for line in failed:
        print("FAILED", line)
    diverged = sum("diverged" in row for row in rows)
    counts = {"done": len(rows), "diverged": diverged, "failed": len(failed), "results": str(asked.results)}
    metrics.finish({"rows": rows} | counts)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    cli.run(main, FLAGS)
