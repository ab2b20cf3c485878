"""Mutation test of the credit variants and the losses: does a test fail for every small mistake in them?

python -m experiments.mutate_credit
python -m experiments.mutate_credit --only=credit.group.grpo
python -m experiments.mutate_credit --sample=20 --seed=1

Each mutant is one change to one function (experiments.mutants): a flipped sign, a dropped mask, an index shifted by
one, mean and sum exchanged, a dropped stop-gradient. It is caught if one of the tests that reach the function fails, of
the test files that TESTS names for its module. The code without a change must pass them all first. Mutants that change
nothing that anybody can see stand in experiments.equivalent_mutants, each with the reason; they are listed and left
out of the count. Finished mutants are kept in --out, each as long as the tests that it rests on stay the same: the same
command continues.

stdout ends with one JSON line: mutants, caught, survivors (each `file:line kind: line -> mutated line`).
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import queue
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

from experiments import cli, equivalent_mutants, mutants

FLAGS = cli.Flags()
_ONLY = FLAGS.string("only", "", "module, or module.function, below rsi_jax: credit.group.grpo (default: all)")
_SAMPLE = FLAGS.integer("sample", 0, "draw so many mutants (0 = all)", lower_bound=0)
_SEED = FLAGS.integer("seed", 0, "of the draw")
_JOBS = FLAGS.integer("jobs", os.cpu_count() or 1, "processes that run tests", lower_bound=1)
_TIMEOUT = FLAGS.float(
    "timeout", 300.0, "seconds of processor time after which a mutant counts as caught", lower_bound=1.0
)
_OUT = FLAGS.string("out", "runs/mutate_credit/mutants.jsonl", "file of finished mutants")

ROOT = pathlib.Path(__file__).parents[1]
CREDIT = ("tests/test_turn_table.py",) + tuple(
    f"tests/test_credit_{name}.py" for name in ("turns", "masks", "families", "cases", "limits", "oracles")
)
LOSSES = tuple(f"tests/test_losses{name}.py" for name in ("_masks", "_terms", ""))
# The laws are left out: without jit they take an hour, so what only they would catch counts as survived.
# module, or package: the test files that cover it, the quick ones first: the next is run if none before it fails.
TESTS = {
    "masked": ("tests/test_masked.py",),
    "returns": ("tests/test_returns.py",),
    "losses": LOSSES,
    "losses.correction": ("tests/test_losses_correction.py", *LOSSES),
    "losses.spread": ("tests/test_diagnostics.py", *LOSSES),
    "credit": CREDIT,
}
SHARED = ("rsi_jax/credit/examples.py", "tests/conftest.py")  # what all of them import
TEST_MATERIAL = ("credit.examples", "credit.laws", "credit.rows")  # what tests are made of: not mutated
# Functions that only make metrics: their numbers are reported and never trained on.
METRICS = (
    "credit.rewards.report",
    "credit.rewards.frac_zero_adv",
    "credit.feedback._view_metrics",
    "losses.policy._off_policy_sums",
    "losses.policy.summarise",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A mutant, the source it was made from, and what became of it."""

    mutant: mutants.Mutant
    source: str
    files: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of the mutated source."""
        return hashlib.sha256(f"{self.mutant.name}\n{self.mutant.apply(self.source)}".encode()).hexdigest()[:20]

    def proof(self, caught: str | None) -> str:
        """Digest of the tests that a result rests on: the file that caught the mutant, or all of its files."""
        caught_by = (caught or "").partition("::")[0]
        files = (caught_by,) if caught_by in self.files else self.files
        return hashlib.sha256("".join(map(digest_of, (*SHARED, *files))).encode()).hexdigest()[:20]

    @property
    def path(self) -> str:
        return path_of(self.mutant.module)

    @property
    def shown(self) -> str:
        before, after = self.mutant.lines(self.source)
        return f"{self.path}:{self.mutant.line} {self.mutant.kind}: {before} -> {after}"


def path_of(module: str) -> str:
    return f"rsi_jax/{module.replace('.', '/')}.py"


@functools.cache
def digest_of(file: str) -> str:
    """Digest of a test file when this run began: later edits are not what the tests of this run are."""
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()


def modules() -> list[str]:
    """Lists the modules that are mutated."""
    paths = [path for name in TESTS for path in sorted((ROOT / "rsi_jax").glob(f"{name}.py"))]
    paths += [path for name in TESTS for path in sorted((ROOT / "rsi_jax" / name).glob("[!_]*.py"))]
    names = [".".join(path.relative_to(ROOT / "rsi_jax").with_suffix("").parts) for path in paths]
    return [name for name in names if name not in TEST_MATERIAL]


def files_of(module: str) -> tuple[str, ...]:
    """The test files of a module: its own row of TESTS, or that of its package."""
    return TESTS.get(module) or TESTS[module.partition(".")[0]]


def all_jobs() -> list[Job]:
    """Makes every mutant."""
    made = []
    for module in modules():
        source = (ROOT / path_of(module)).read_text()
        found = mutants.of_module(module, source, skip=METRICS)
        made += [Job(mutant, source, files_of(module)) for mutant in found]
    return made


def without_equivalents(jobs: list[Job]) -> tuple[list[Job], list[tuple[Job, str]]]:
    """Takes out the mutants that are known to change nothing.

    Raises: base.InputError if one of the list is no mutant of the code any more.
    """
    from rsi_jax import base

    of_key = {(job.mutant.name, *job.mutant.lines(job.source)): job for job in jobs}
    for name, before, after, _ in equivalent_mutants.EQUIVALENT:
        if (name, before, after) not in of_key:
            raise base.InputError(f"equivalent_mutants lists what is no mutant of {name}: {before} -> {after}")
    known = [(of_key[name, before, after], why) for name, before, after, why in equivalent_mutants.EQUIVALENT]
    out = {job.digest for job, _ in known}
    return [job for job in jobs if job.digest not in out], known


def chosen(jobs: list[Job]) -> list[Job]:
    """The mutants that the flags ask for."""
    from rsi_jax import base

    only = _ONLY.value
    found = [job for job in jobs if not only or job.mutant.name == only or job.mutant.name.startswith(f"{only}.")]
    if not found:
        raise base.InputError(f"--only={only}: no mutant there; modules are {', '.join(modules())}")
    if _SAMPLE.value and _SAMPLE.value < len(found):
        found = random.Random(_SEED.value).sample(found, _SAMPLE.value)
    return found


class Worker:
    """A process of experiments.mutant_worker; a mutant counts as caught after `timeout` seconds of processor time."""

    def __init__(self, functions: list[tuple[str, str]], timeout: float) -> None:
        self._timeout = timeout
        command = [sys.executable, "-m", "experiments.mutant_worker"]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"},
        )
        self._send(functions)

    def _send(self, message: object) -> None:
        assert self._process.stdin
        print(json.dumps(message), file=self._process.stdin, flush=True)

    def run(self, job: Job) -> dict:
        assert self._process.stdout
        source = job.mutant.apply(job.source)
        named = {"module": job.mutant.module, "function": job.mutant.function}
        self._send(named | {"source": source, "files": job.files, "timeout": self._timeout})
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"the test process ended at {job.shown}")
        return json.loads(line)

    def stop(self) -> None:
        with self._process:  # closes its pipes and waits
            self._process.kill()


def results(jobs: list[Job], functions: list[tuple[str, str]], count: int) -> Iterator[tuple[Job, dict]]:
    """Runs the jobs in `count` processes; yields each as it is finished."""
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)

    def serve(worker: Worker) -> None:
        try:
            while True:
                job = waiting.get_nowait()
                done.put((job, worker.run(job)))
        except queue.Empty:
            pass
        except (OSError, RuntimeError) as error:
            done.put((None, error))

    workers = [Worker(functions, _TIMEOUT.value) for _ in range(min(count, len(jobs)))]
    try:
        for worker in workers:
            threading.Thread(target=serve, args=(worker,), daemon=True).start()
        for _ in jobs:
            job, found = done.get()
            if job is None:
                raise found
            yield job, found
    finally:
        for worker in workers:
            worker.stop()


def run_all(jobs: list[Job], functions: list[tuple[str, str]], path: pathlib.Path) -> dict[str, str | None]:
    """Tries every mutant that the file does not hold yet; digest: the test that caught it, or None."""
    from rich import progress

    from rsi_jax import base

    for file in {file for job in jobs for file in (*SHARED, *job.files)}:
        digest_of(file)
    wanted, caught = {job.digest: job for job in jobs}, {}
    for row in cli.read_rows(path):
        job = wanted.get(row["digest"])
        if job and row["proof"] == job.proof(row["caught"]):
            caught[job.digest] = row["caught"]
    left = [job for job in jobs if job.digest not in caught]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file, progress.Progress() as bar:
        task = bar.add_task(f"{len(jobs)} mutants", total=len(jobs), completed=len(jobs) - len(left))
        for job, found in results(left, functions, _JOBS.value) if left else ():
            if "broken" in found:
                raise base.InputError(f"{found['broken']} fails without any mutant: mend it first")
            caught[job.digest] = found["caught"]
            row = {"digest": job.digest, "proof": job.proof(found["caught"]), "mutant": job.shown, **found}
            file.write(json.dumps(row) + "\n")
            file.flush()
            bar.advance(task)
    return caught


def main(_) -> None:
    from rsi_jax import metrics

    jobs, equivalent = without_equivalents(all_jobs())
    functions = sorted({(job.mutant.module, job.mutant.function) for job in jobs})
    wanted = chosen(jobs)
    try:
        caught = run_all(wanted, functions, pathlib.Path(_OUT.value))
    except KeyboardInterrupt:
        print(f"stopped: {_OUT.value} keeps what is finished; the same command continues", file=sys.stderr)
        return
    rows = []
    for module in sorted({job.mutant.module for job in wanted}):
        here = [job for job in wanted if job.mutant.module == module]
        ended = sum(caught[job.digest] is not None for job in here)
        same = sum(job.mutant.module == module for job, _ in equivalent)
        rows.append((module, len(here), ended, len(here) - ended, ended / len(here), same))
    metrics.table("mutants", ("module", "mutants", "caught", "survived", "share", "equivalent"), rows)
    for job, why in equivalent:
        print(f"equivalent  {job.shown}\n            {why}")
    survivors = [job.shown for job in wanted if caught[job.digest] is None]
    for line in survivors:
        print(f"survived    {line}")
    metrics.finish({"mutants": len(wanted), "caught": len(wanted) - len(survivors), "survivors": survivors})


if __name__ == "__main__":
    cli.run(main, FLAGS)
