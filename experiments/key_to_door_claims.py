"""The claims of `experiments.repro_key_to_door`: written down before it first ran, read off its JSON line."""

import functools
import math
from collections.abc import Callable

from experiments.claims import Claim, Line, Reading

SHORT, LONG = 13, 103


def treasure(line: Line, arm: str, horizon: int) -> dict[int, float] | None:
    """P(treasure) of an arm at a horizon after the last episode, by seed; None when it did not run."""
    found = [row for row in line["rows"] if (row["arm"], row["horizon"]) == (arm, horizon)]
    return dict(found[0]["by_seed"]) if found else None


def above(line: Line, left: str, right: str, horizons: tuple[int, ...]) -> Reading | None:
    """How far `left` is above `right` in P(treasure): the mean of differences paired by seed, and their 95% interval.

    With two horizons: how much farther at the second than at the first.
    """
    from rsi_jax.evals import fidelity

    gaps = []
    for horizon in horizons:
        one, other = treasure(line, left, horizon), treasure(line, right, horizon)
        if one is None or other is None:
            return None
        gaps.append({seed: one[seed] - other[seed] for seed in one.keys() & other.keys()})
    if len(gaps) == 2:
        gaps = [{seed: gaps[1][seed] - gaps[0][seed] for seed in gaps[0].keys() & gaps[1].keys()}]
    return fidelity.interval([gaps[0][seed] for seed in sorted(gaps[0])])


def _claim(
    name: str, text: str, read: Callable[[Line], Reading | None], *arms: str, low: float = 0.0, high: float = math.inf
) -> Claim:
    return Claim(
        name=f"repro_key_to_door/{name}",
        text=text,
        source="Meulemans et al. 2023 (arXiv 2306.16803), section 4.1: figures, no table",
        command="experiments.repro_key_to_door --quick --results= --figure=",
        read=read,
        low=low,
        high=high,
        minutes=4,
        arms=arms,
        seeds=5,
        budget="2,000 episodes in batches of 8 (10,000, as in the paper, without --quick)",
    )


def _above(name: str, text: str, left: str, right: str) -> Claim:
    return _claim(name, text, functools.partial(above, left=left, right=right, horizons=(LONG,)), left, right)


CLAIMS: tuple[Claim, ...] = (
    _above("cocoa_reinforce", "P(treasure) at L = 103: cocoa above reinforce", "cocoa", "reinforce"),
    _above("cocoa_hca", "P(treasure) at L = 103: cocoa above hca", "cocoa", "hca"),
    _above(
        "counted_reinforce",
        "P(treasure) at L = 103: cocoa with counted hindsight above reinforce",
        "cocoa_counted",
        "reinforce",
    ),
    _claim(
        "hca_not_better",
        "P(treasure) at L = 103: hca above cocoa by nothing that matters",
        functools.partial(above, left="hca", right="cocoa", horizons=(LONG,)),
        "hca",
        "cocoa",
        low=-math.inf,
        high=0.02,
    ),
    _claim(
        "gap_grows",
        "cocoa is farther above reinforce at L = 103 than at L = 13",
        functools.partial(above, left="cocoa", right="reinforce", horizons=(SHORT, LONG)),
        "cocoa",
        "reinforce",
    ),
)
