"""The compute ledger: what a run spent, on what, and what it dropped."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rsi_jax.metrics import tracker


class Ledger:
    """The compute ledger: tokens by use, wall time by phase, and everything that was dropped, by reason.

    tokens: generated (sampled by the policy), scored (read by a forward without gradient), trained (read by a forward
      with gradient), hint (extra forward tokens that hinted re-readings cost: hints and copies of spans).
    seconds: time by phase, by a clock of CLOCKS (cpu: of this process, whatever else the machine runs). A phase inside
      another stops the outer clock, so the phases never count time twice.
    dropped: counts of whatever was masked, gated, truncated, skipped or retried.
    """

    TOKENS = ("generated", "scored", "trained", "hint")
    CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter):
        self.tokens: dict[str, int] = dict.fromkeys(self.TOKENS, 0)
        self.seconds: dict[str, float] = {}
        self.dropped: dict[str, int] = {}
        self._clock, self._open, self._since = clock, [], 0.0

    def add(self, **tokens: int) -> None:
        """Adds token counts: ledger.add(generated=512, hint=40)."""
        for name, count in tokens.items():
            if name not in self.tokens:
                raise ValueError(f"the ledger has no token count {name!r}: it has {', '.join(self.TOKENS)}")
            self.tokens[name] += int(count)

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts things that were dropped; a count of 0 makes the reason visible in the report."""
        self.dropped[reason] = self.dropped.get(reason, 0) + int(count)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charges the time of the `with` block to a phase (jax works asynchronously: block on results inside)."""
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = self._clock()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._since
        self._since = now

    def state(self) -> dict[str, dict[str, Any]]:
        """A JSON-able copy for a checkpoint, charged up to now."""
        self._charge()
        return {"tokens": dict(self.tokens), "seconds": dict(self.seconds), "dropped": dict(self.dropped)}

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Goes on from a saved state. Work that a killed run lost after its checkpoint is not in the ledger."""
        self.tokens = {**dict.fromkeys(self.TOKENS, 0), **state["tokens"]}
        self.seconds, self.dropped = dict(state["seconds"]), dict(state["dropped"])

    def scalars(self) -> dict[str, float]:
        """The ledger as metrics: ledger/..., dropped/..., and the phases as time/...."""
        state = self.state()
        return {
            **{f"ledger/{name}": count for name, count in state["tokens"].items()},
            **{f"dropped/{name}": count for name, count in state["dropped"].items()},
            **{f"{tracker.TIME_PREFIX}{name}": round(seconds, 4) for name, seconds in state["seconds"].items()},
        }
