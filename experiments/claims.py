"""What experiments claim: written down before they run, held against the JSON line with which their command ends.

An experiment declares its claims as `Claim`s before it first runs. When it has run, they join those that are checked
again and again (experiments/registry.py).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Reading = tuple[float, float, float]  # a number and its 95% interval; the number three times where there is none
Line = Mapping[str, Any]  # the JSON line of a command
Read = Callable[[Line], Reading | None]  # reads a number off it, None where it was not measured


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim. It holds when the whole interval of the number lies within (low, high].

    text, source: what is claimed, and where the expectation comes from. command: of the quick form, after 'python -m'.
    read: the number in its JSON line, None where the run did not measure it. arms: what is compared. seeds: of each.
    minutes: budget of the command on an idle machine. budget: that of a run, where runs are limited, in words.
    """

    name: str
    text: str
    source: str
    command: str
    read: Read
    low: float
    high: float
    minutes: float
    config: str = "-"
    arms: tuple[str, ...] = ()
    seeds: int = 1
    budget: str = "-"

    @property
    def tolerance(self) -> str:
        """The range in which the number must lie, for people."""
        if math.isinf(self.high):
            return f"above {self.low:g}"
        return f"below {self.high:g}" if math.isinf(self.low) else f"{self.low:g} to {self.high:g}"


def declare(claims: Sequence[Claim], judged: Sequence[Mapping[str, Any]] = ()) -> None:
    """Prints claims as they stand before a run, and how they fared where `judge` has seen them."""
    from rsi_jax import metrics

    fared = {one["name"]: (number_of(one), "yes" if one["held"] else "FAILED") for one in judged}
    head = ("claim", "source", "tolerance", "arms", "seeds", "budget of a run", "minutes", "number", "holds")
    rows = [
        (c.text, c.source, c.tolerance, ", ".join(c.arms), c.seeds, c.budget, c.minutes, *fared.get(c.name, ("-", "-")))
        for c in claims
    ]
    metrics.table("claims, written before the run", head, rows)


def number_of(row: Mapping[str, Any]) -> str:
    """The number of a row, with its interval where it has one."""
    from rsi_jax import metrics

    if row.get("number") is None or math.isnan(row["number"]):
        return row.get("fault") or "not measured"
    number, low, high = (metrics.number(row[name]) for name in ("number", "low", "high"))
    return number if low == high else f"{number} [{low}, {high}]"


def judge(claim: Claim, line: Line) -> dict[str, Any]:
    """Holds a claim against what a command measured: name, claim, tolerance, number, low, high, held.

    What was not measured does not hold.
    """
    number, low, high = claim.read(line) or (math.nan,) * 3
    held = claim.low < low <= high <= claim.high
    said = {"name": claim.name, "claim": claim.text, "tolerance": claim.tolerance}
    return said | {"number": number, "low": low, "high": high, "held": held}


def judge_all(claimed: Sequence[Claim], line: Line) -> list[dict[str, Any]]:
    """Judges the claims whose numbers a run measured, as part of the arms may do, and prints how they fared."""
    measured = [claim for claim in claimed if claim.read(line)]
    judged = [judge(claim, line) for claim in measured]
    if judged:
        declare(measured, judged)
    return judged


def at(*path: str) -> Read:
    """Reads a number without an interval: at('arms', 'grpo') is line['arms']['grpo']."""

    def read(line: Line) -> Reading | None:
        value = functools.reduce(lambda part, key: part.get(key) if isinstance(part, Mapping) else None, path, line)
        return None if value is None else (float(value),) * 3

    return read


def of_row(name: str) -> Read:
    """Reads a number of the first row of a benchmark."""
    return lambda line: at(name)(line["rows"][0]) if line.get("rows") else None
