"""Runs the quick form of every registered claim again, and fails when one leaves its tolerance.

python -m experiments.check_claims
python -m experiments.check_claims --only=bench_returns
python -m experiments.check_claims --write

Claims of one command are read off one run of it. A command that fails, or takes twice its budget, fails its claims.
--write: puts what was measured into experiments/results/claims.jsonl, a row per claim, and makes the table of
experiments/README.md from them anew: the rows of what did not run stay as they were.

The last line of stdout is JSON: claims, held, failed (counts), names (of those that failed), wall_s. Exit code 1 when
one failed.
"""

import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import claims, cli, registry, sweep

FLAGS = cli.Flags()
_ONLY = FLAGS.list("only", [], "claims to check, by the beginning of their names (default: all)")
_WRITE = FLAGS.boolean("write", False, "keep the rows and make the table anew")
_ROWS = FLAGS.string("rows", "experiments/results/claims.jsonl", "the rows")
_TABLE = FLAGS.string("table", "experiments/README.md", "the table")

HEAD = """# Claims, and what was measured last

Made by `python -m experiments.check_claims --write` from results/claims.jsonl; do not edit. Each row is remade by
its script; `--only=<beginning of a name>` keeps to some. A claim holds when its number, with its 95% interval where it
has one, lies within the tolerance; claims and tolerances were written before the run (experiments/registry.py).

How an experiment becomes a row: before it runs it declares its claims, their source, tolerance, arms, seeds, budgets;
its rows are kept under results/; interquartile means and bootstrap intervals come from experiments/aggregate.py.

A survey of 41 credit-assignment methods (arXiv 2604.09459) found none that reports its compute or compares at equal
compute, and two that report a variance. What every comparison of arms here reports, and where:

| what | where |
|---|---|
| compute | tokens sampled (continuations included), tokens of other forwards, seconds of one core; each in the table |
| equal compute | success after equal time, and after equal sampled tokens, side by side; what ended early is marked |
| variance | seeds by arm; interquartile mean, 95% stratified bootstrap; paired differences with Student's interval |
| tuning | as many knob trials for every arm, on a seed of their own, their rows kept (results/*_trials.jsonl) |
| controls | irrelevant words as a hint, a penalty at the same places, more supervised training on the same mix |
| side effects | small talk, entropy, the right action with and without a hint, at the start and the end |
| censoring | a run that misses the target is a lower bound, marked `>`; one that diverged counts as success 0 |
| how to do it again | the command; in each row the overrides, a digest of the effective config, the commit, the date |
| what failed | LOG.md, with dates; a claim that fails stays in the table as **no** |

| claim | script | config | number | tolerance | holds | hardware | commit | date |
|---|---|---|---|---|---|---|---|---|
"""


def select(names: Sequence[str], known: Sequence[claims.Claim] = registry.REGISTERED) -> list[claims.Claim]:
    """The claims whose names begin so, all without names. Raises: base.InputError for a beginning of none."""
    from rsi_jax import base

    for name in names:
        if not any(claim.name.startswith(name) for claim in known):
            mend = base.did_you_mean(name, [claim.name for claim in known])
            raise base.InputError(f"--only={name}: no claim's name begins so{mend}")
    return [claim for claim in known if not names or claim.name.startswith(tuple(names))]


def measure(command: str, minutes: float) -> tuple[Mapping[str, Any], str]:
    """Runs a command: (its JSON line, '' or what went wrong). Its stderr is shown as it comes."""
    argv = [sys.executable, "-m", *shlex.split(command)]
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=2 * 60 * minutes)
    except subprocess.TimeoutExpired:
        return {}, f"not done in {2 * minutes:g} minutes"
    if done.returncode:
        return {}, f"exit code {done.returncode}"
    last = done.stdout.strip().rpartition("\n")[2]
    return (json.loads(last), "") if last.startswith("{") else ({}, "no JSON line")


def hardware() -> str:
    """The machine in a few words: cores that this process may use, and accelerators."""
    import jax

    cores = f"{len(os.sched_getaffinity(0))} {platform.machine()} cores"
    kinds = [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    return f"{cores}, {len(kinds)} x {kinds[0]}" if kinds else cores


def check(chosen: Sequence[claims.Claim]) -> list[dict[str, Any]]:
    """Runs each command once and judges its claims."""
    commit, rows = sweep.commit(), []
    for command in dict.fromkeys(claim.command for claim in chosen):
        mine = [claim for claim in chosen if claim.command == command]
        print(f"running python -m {command}", file=sys.stderr, flush=True)
        line, fault = measure(command, max(claim.minutes for claim in mine))
        origin = {"fault": fault, "commit": commit, "date": time.strftime("%Y-%m-%d"), "hardware": hardware()}
        for claim in mine:
            given = {"script": f"python -m {command}", "config": claim.config, "source": claim.source}
            judged = (
                claims.judge(claim, line) if not fault else {"name": claim.name, "claim": claim.text, "held": False}
            )
            rows.append(judged | given | origin)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of all claims, as Markdown; a claim may hold a | of its own."""
    lines = []
    for row in rows:
        cells = [row["claim"], f"`{row['script']}`", row["config"], claims.number_of(row), row.get("tolerance", "")]
        cells += ["yes" if row["held"] else "**no**", row["hardware"], row["commit"], row["date"]]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return HEAD + "".join(lines)


def keep(rows: Sequence[Mapping[str, Any]], file: pathlib.Path, page: pathlib.Path) -> None:
    """Puts rows in the place of those of the same names, in the order of the registry, and makes the table anew."""
    from rsi_jax import metrics

    known = {claim.name: {"tolerance": claim.tolerance} for claim in registry.REGISTERED}
    all_rows = {row["name"]: row for row in [*cli.read_rows(file), *rows]}
    kept = [metrics.jsonable(all_rows[name] | now) for name, now in known.items() if name in all_rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((file, "".join(json.dumps(row) + "\n" for row in kept)), (page, table(kept))):
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text)
        os.replace(fresh, path)


def main(_) -> None:
    from rsi_jax import metrics

    began, chosen = time.monotonic(), select(_ONLY.value)
    rows = check(chosen)
    if _WRITE.value:
        keep(rows, pathlib.Path(_ROWS.value), pathlib.Path(_TABLE.value))
    claims.declare(chosen, rows)
    failed = [row["name"] for row in rows if not row["held"]]
    wall_s = round(time.monotonic() - began, 1)
    counts = {"claims": len(rows), "held": len(rows) - len(failed), "failed": len(failed)}
    metrics.finish(counts | {"names": failed, "wall_s": wall_s})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    cli.run(main, FLAGS)
