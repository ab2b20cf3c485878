"""The claims of `experiments.credit_fidelity`: written down before it runs, and held against what it measured."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Reading:
    """A measure of an arm in a world at a horizon, one number per seed."""

    arm: str
    world: str
    horizon: int
    measure: str = "cosine"


@dataclasses.dataclass(frozen=True)
class Claim:
    """`left` is above `right`: of the paired differences over seeds, the 95% interval lies above 0.

    With equal: no seed differs by more than 1e-5. right: another reading, or a number.
    """

    text: str
    left: Reading
    right: Reading | float
    equal: bool = False


def _versus(text: str, left: str, right: str, world: str, horizon: int, measure: str = "cosine", equal=False) -> Claim:
    return Claim(text, Reading(left, world, horizon, measure), Reading(right, world, horizon, measure), equal)


def _falls(arm: str, world: str, horizons: Sequence[int]) -> list[Claim]:
    return [
        Claim(f"{arm} falls from horizon {short} to {long}", Reading(arm, world, short), Reading(arm, world, long))
        for short, long in zip(horizons, horizons[1:], strict=False)
    ]


FEW, SOME, MANY, MOST = (f"vineppo, K = {k}" for k in (1, 3, 9, 1024))
SILENT = "hcapo, no hint, by trajectory"

CLAIMS: tuple[Claim, ...] = (
    *(
        Claim(
            "many continuations are near the truth where only the policy is random", Reading(MOST, world, horizon), 0.95
        )
        for world, horizon in (("tool_not_found", 16), ("discounting_chain", 20), ("stopping", 8))
    ),
    _versus("and keep the luck of the environment, which cocoa does not", "cocoa", MOST, "key_to_door", 13),
    *_falls("grpo", "key_to_door", (13, 33, 103)),
    *_falls("grpo", "umbrella_chain", (10, 40)),
    *_falls("grpo", "tool_not_found", (16, 32)),
    _versus("cocoa beats reinforce at L = 103", "cocoa", "reinforce", "key_to_door", 103),
    _versus("and in the gradient", "cocoa", "reinforce", "key_to_door", 103, "gradient_cosine"),
    _versus("and when it counted its hindsight", "cocoa, counted", "reinforce", "key_to_door", 103),
    *(
        _versus(f"{more} beats {less}", more, less, world, horizon)
        for world, horizon in (("tool_not_found", 32), ("key_to_door", 103))
        for less, more in ((FEW, SOME), (SOME, MANY))
    ),
    # The state that recurs tells how the episode will go. Where it tells little (tool_not_found, umbrella_chain) a run
    # found no difference: LOG.md, 2026-12-01.
    *(
        _versus("gigpo beats grpo where telling states recur", "gigpo", "grpo", world, horizon)
        for world, horizon in (("stopping", 8), ("passive_tmaze", 10), ("active_tmaze", 10))
    ),
    _versus("gigpo is grpo where none does", "gigpo, nothing recurs", "grpo", "tool_not_found", 32, equal=True),
    Claim(
        "hcapo over the trajectory's mean: a hint that says nothing rewards being sure",
        Reading(SILENT, "tool_not_found", 32, "confidence"),
        0.0,
    ),
    Claim(
        "hcapo over the policy: it does not",
        Reading("hcapo, no hint, by policy", "tool_not_found", 32, "confidence"),
        0.0,
        equal=True,
    ),
    _versus("the unbiased turn baseline beats that of the turn index", "turn_rloo", "mt_grpo", "stopping", 8),
    Claim("that of the turn index erases the signal", Reading("mt_grpo", "stopping", 8), 0.0, equal=True),
)

Read = Callable[[Reading], Sequence[float] | None]


def judge(claim: Claim, read: Read) -> dict[str, Any] | None:
    """Holds a claim against the readings: its row, or None where a reading was not made.

    Row: claim, left, right (in words), difference [mean, low, high], seeds, holds.
    """
    from rsi_jax.evals.fidelity import interval

    left = read(claim.left)
    right = read(claim.right) if isinstance(claim.right, Reading) else [claim.right] * len(left or ())
    if left is None or right is None:
        return None
    differences = [x - y for x, y in zip(left, right, strict=True)]
    mean, low, high = interval(differences)
    holds = max(map(abs, differences)) <= 1e-5 if claim.equal else low > 0
    return {
        "claim": claim.text,
        "left": said(claim.left),
        "relation": "=" if claim.equal else ">",
        "right": said(claim.right),
        "difference": [mean, low, high],
        "seeds": len(differences),
        "holds": bool(holds),
    }


def said(reading: Reading | float) -> str:
    """Names a reading, or the number, in words."""
    if not isinstance(reading, Reading):
        return str(reading)
    return f"{reading.measure} of {reading.arm} in {reading.world} at {reading.horizon}"
