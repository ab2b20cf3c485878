"""What a claim of an experiment is; experiments/claims.py holds those that are checked again and again."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

Reading = tuple[float, float, float]  # a number and its 95% interval; the number three times where there is none
Line = Mapping[str, Any]  # the JSON line of a command


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
    read: Callable[[Line], Reading | None]
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
