"""Runs tests against mutants in one long-lived process: jax is imported once and every test module once.

Not a command for people: experiments.mutate_credit starts it. Tests run without jit, so every operation is compiled
once for all mutants, no compiled program can hide a mutant, and each test that reaches a function does so visibly. The
mutant becomes the function's code, so every name that stands for the function, wherever it was imported, stands for
the mutant.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import time
import types
from collections.abc import Iterator

TOOL = 4  # of sys.monitoring: one that no debugger or profiler takes


class Watch:
    """Pytest plugin: which tests pass, how long each takes, and which of the watched functions each reaches."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self.reached: dict[str, set[types.CodeType]] = {}
        self._now: set[types.CodeType] = set()

    def pytest_configure(self) -> None:
        """Takes the house's examples, but does not shrink a failing one: that it fails is enough."""
        import hypothesis

        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        house = hypothesis.settings.get_profile("house")
        hypothesis.settings.register_profile("mutants", house, phases=phases, report_multiple_bugs=False)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtest_logreport(self, report) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "teardown":
            self.reached[report.nodeid] = self._now
            self._now = set()

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def start(self, code: types.CodeType, _: int) -> None:
        self._now.add(code)


def run(tests: list[str], watched: list[types.CodeType] | None = None) -> Watch:
    """Runs tests in this process; stops at the first failure."""
    import pytest

    watch, quiet = Watch(), ["-q", "-x", "--tb=no", "--no-header", "--no-summary", "-p", "no:cacheprovider"]
    monitoring, starts = sys.monitoring, sys.monitoring.events.PY_START
    if watched:
        monitoring.use_tool_id(TOOL, "mutants")
        monitoring.register_callback(TOOL, starts, watch.start)
        for code in watched:
            monitoring.set_local_events(TOOL, code, starts)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        pytest.main([*quiet, *tests], plugins=[watch])
    if watched:
        monitoring.free_tool_id(TOOL)
    return watch


def function_of(module: str, function: str) -> types.FunctionType:
    """Finds a function or method by its names below rsi_jax."""
    import importlib

    found = importlib.import_module(f"rsi_jax.{module}")
    for name in function.split("."):
        found = getattr(found, name)
    assert isinstance(found, types.FunctionType)
    return found


def code_of(source: str, function: str, file: str = "<mutant>") -> types.CodeType:
    """Compiles a module's source and takes the code of one of its functions out."""
    stack = [compile(source, file, "exec")]
    while stack:
        code = stack.pop()
        if code.co_qualname == function:
            return code
        stack += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    raise ValueError(f"the source has no function {function}")


@contextlib.contextmanager
def applied(module: str, function: str, source: str) -> Iterator[None]:
    """Gives a function the code that it has in another source of its module, for a while."""
    target = function_of(module, function)
    before, after = target.__code__, code_of(source, function)
    if (before.co_code, before.co_consts, before.co_names) == (after.co_code, after.co_consts, after.co_names):
        raise ValueError(f"the mutant of {module}.{function} has the code of the original")
    target.__code__ = after
    try:
        yield
    finally:
        target.__code__ = before


class Tests:
    """What the unmutated code does in each test file: every test's time, and the functions that it reaches."""

    def __init__(self, functions: list[tuple[str, str]]) -> None:
        self.names = {function_of(*name).__code__: name for name in functions}
        self.seconds: dict[str, dict[str, float]] = {}
        self.reached: dict[str, set[tuple[str, str]]] = {}
        self.catchers: dict[tuple[str, str], list[str]] = {}  # by function, the latest first

    def learn(self, file: str) -> str | None:
        """Runs a file once; the first test that fails without any mutant, or None."""
        if file not in self.seconds:
            watch = run([file], list(self.names))
            if watch.failed or not watch.reached:
                return watch.failed[0] if watch.failed else file
            self.seconds[file] = watch.seconds
            self.reached |= {test: {self.names[code] for code in codes} for test, codes in watch.reached.items()}
        return None

    def of(self, name: tuple[str, str], file: str) -> list[str]:
        """The tests of a file that reach a function, the quickest first."""
        seconds = self.seconds[file]
        return sorted((test for test in seconds if name in self.reached[test]), key=lambda test: seconds[test])

    def caught(self, name: tuple[str, str], test: str) -> None:
        """Keeps the test in mind for the next mutants of the function."""
        known = self.catchers.setdefault(name, [])
        self.catchers[name] = [test, *(one for one in known if one != test)]


def answer(tests: Tests, job: dict) -> dict:
    """Tries one mutant: caught by which test, or survived all tests that reach its function.

    First come the tests that have caught a mutant of the function before, then all others, file by file.
    """
    name, began = (job["module"], job["function"]), time.monotonic()
    first = tests.catchers.get(name, [])
    count, failed = len(first), tried(name, job["source"], first, job["timeout"]) if first else []
    for file in () if failed else job["files"]:
        if broken := tests.learn(file):
            return {"broken": broken}
        if reaching := [test for test in tests.of(name, file) if test not in first]:
            count += len(reaching)
            failed = tried(name, job["source"], reaching, job["timeout"])
        if failed:
            break
    if failed and failed[0] in tests.reached:
        tests.caught(name, failed[0])
    return {"caught": failed[0] if failed else None, "tests": count, "seconds": time.monotonic() - began}


def tried(name: tuple[str, str], source: str, tests: list[str], timeout: float) -> list[str]:
    """Runs tests with a mutant in place: those that failed, or that it takes too long."""

    def late(*_: object) -> None:
        raise TimeoutError("the mutant takes too long")

    signal.signal(signal.SIGPROF, late)
    with applied(*name, source):
        signal.setitimer(signal.ITIMER_PROF, timeout, 5.0)  # again and again: a test may swallow one
        try:
            return run(tests).failed
        except TimeoutError as error:
            return [str(error)]
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


def main() -> None:
    """Reads one job a line from stdin and writes one answer a line to stdout, until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path.insert(0, str(pathlib.Path.cwd()))
    import jax

    jax.config.update("jax_disable_jit", True)
    tests = Tests([tuple(name) for name in json.loads(sys.stdin.readline())])
    for line in sys.stdin:
        print(json.dumps(answer(tests, json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
