"""The arms of `experiments.ablate_horizon`, their knob trials, the sizes by horizon, and what is claimed beforehand."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import claims

CONFIG = "configs/tool_calls.py"
TRIAL_SEED, TRIAL_HORIZON = 100, 64
STOP = 0.95  # running success at which a run is done
TARGET, WINDOW = 0.9, 5  # solved: mean success of the last WINDOW batches (64 episodes each) reaches TARGET


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm. trials: three sets of overrides; the best at TRIAL_HORIZON, on a seed of its own, is used throughout.

    sft: no RL: its warm-up goes on for as long as RL may take. warm_up: overrides of the warm-up that it starts
    from, where it cannot share that of the others.
    """

    label: str
    overrides: tuple[str, ...]
    trials: tuple[tuple[str, ...], ...]
    sft: bool = False
    warm_up: tuple[str, ...] = ()


def _rates(*rates: str) -> tuple[tuple[str, ...], ...]:
    return tuple((f"rl.lr={rate}",) for rate in rates)


_DIVERGENCES = tuple((f"credit.textual_feedback.divergence={name}",) for name in ("forward_kl", "reverse_kl", "jsd"))
_CRITIC = ("credit.name=turn_gae",)  # a model with a value head from the start
_HIGH = _rates("4e-3", "1e-3", "2e-3")
_LOW = _rates("1e-3", "2.5e-4", "4e-3")  # without the feedback's steady gradient 4e-3 drifts (LOG.md)

ARMS = {
    "textual_feedback": Arm("textual feedback", (), _DIVERGENCES),
    "grpo": Arm("GRPO, terminal reward", ("credit.name=grpo",), _LOW),
    "irrelevant": Arm("irrelevant hint", ("feedback.hint=irrelevant",), _DIVERGENCES),
    "locator_penalty": Arm("penalty at located turns", ("credit.name=locator_penalty",), _HIGH),
    "turn_ppo": Arm("turn-level PPO", (*_CRITIC, "rl.minibatches=4"), _LOW, warm_up=_CRITIC),
    "vineppo": Arm(
        "VinePPO, K = 3", ("credit.name=vineppo", "columns.continuations=3", "columns.every=8"), _LOW
    ),
    "gigpo": Arm("GiGPO", ("credit.name=gigpo",), _LOW),
    "hcapo": Arm("HCAPO", ("credit.name=hcapo",), _LOW),
    "sdpo": Arm(
        "SDPO",
        ("credit.name=sdpo",),
        (("rl.lr=4e-3",), ("rl.lr=1e-3",), ("rl.lr=4e-3", "credit.sdpo.outcome_weight=1.0")),
    ),
    "rlsd": Arm("RLSD", ("credit.name=rlsd",), _LOW),
    "more_sft": Arm(
        "more SFT, same mix", ("rl.updates=0",), (("lm.lr=5e-3",), ("lm.lr=2.5e-3",), ("lm.lr=1e-2",)), sft=True
    ),
}  # fmt: skip
HEADLINE = ("textual_feedback", "grpo", "irrelevant")  # more seeds, and the longest horizon


@dataclasses.dataclass(frozen=True)
class Size:
    """A horizon. minutes: a run may take on one core, its start and its evaluations included; rl_minutes: the part of
    them that RL has. capacity: tokens of context. sft: updates of the arm that goes on with SFT, as many as fit into
    the time of a warm-up (120 updates) and of RL."""

    minutes: float
    rl_minutes: float
    capacity: int
    row_tokens: int
    sft: int

    def overrides(self, horizon: int) -> tuple[str, ...]:
        """The sizes as config fields; sub-goals are a quarter of the turns, slack 1/32 of them. The warm-up reads as
        many tokens per update at every horizon."""
        rows = round(12 * 832 / self.row_tokens)
        return (
            f"env.tool_calls.horizon={horizon}",
            f"env.tool_calls.goals={horizon // 4}",
            f"rollout.capacity={self.capacity}",
            f"lm.row_tokens={self.row_tokens}",
            f"lm.batch_rows={rows}",
        )


SIZES = {
    16: Size(2, 1.4, 112, 208, 260),
    64: Size(6, 4.9, 336, 528, 580),
    128: Size(12, 10, 640, 832, 1080),
    512: Size(30, 24, 2560, 2752, 2400),
}


def seeds_of(arm: str, horizon: int) -> range:
    """Three seeds, five of the headline arms; at the longest horizon two, of the headline arms only."""
    if horizon == max(SIZES):
        return range(2 if arm in HEADLINE else 0)
    return range(5 if arm in HEADLINE else 3)


def _read(arm: str, horizon: int, made: Callable[[Mapping[str, Any]], claims.Reading | None]):
    """Reads a number of the row of an arm at a horizon; None when it did not run."""

    def read(line: claims.Line) -> claims.Reading | None:
        found = [row for row in line["rows"] if (row["arm"], row["horizon"]) == (arm, horizon)]
        return made(found[0]) if found else None

    return read


def _success(row: Mapping[str, Any]) -> claims.Reading:
    return row["success_at_budget"], row["low"], row["high"]


def _gained(row: Mapping[str, Any]) -> claims.Reading:
    return tuple(value - row["before"] for value in _success(row))


def _ratio(line: claims.Line) -> claims.Reading | None:
    """Tokens to 0.9 of GRPO over those of textual feedback, at 64: a lower bound where GRPO is censored."""
    row = {row["arm"]: row for row in line["rows"] if row["horizon"] == TRIAL_HORIZON}
    if not {"grpo", "textual_feedback"} <= set(row) or row["textual_feedback"]["censored"]:
        return None
    return (row["grpo"]["tokens_to_0.9"] / row["textual_feedback"]["tokens_to_0.9"],) * 3


def _claim(name: str, text: str, read, low: float, high: float) -> claims.Claim:
    """A claim of this experiment, expected of one seed by a prototype."""
    source = "a prototype on a smaller model, mostly one seed"
    budget = "; ".join(f"L = {horizon}: {size.minutes:g} min" for horizon, size in SIZES.items())
    common = {
        "budget": budget,
        "command": "experiments.ablate_horizon",
        "config": CONFIG,
        "minutes": 540,
        "arms": tuple(ARMS),
        "seeds": 3,
    }
    return claims.Claim(f"ablate_horizon/{name}", text, source, read=read, low=low, high=high, **common)


CLAIMS = (
    _claim("ratio_64", "textual feedback needs a tenth of the tokens of GRPO at L = 64", _ratio, 10, math.inf),
    _claim(
        "solved_128", "at L = 128 textual feedback succeeds", _read("textual_feedback", 128, _success), TARGET, math.inf
    ),
    _claim("grpo_128", "where GRPO has not left 0", _read("grpo", 128, _success), -math.inf, 0.1),
    _claim("irrelevant_64", "irrelevant hints gain nothing, L = 64", _read("irrelevant", 64, _gained), -math.inf, 0.1),
    _claim("penalty_128", "the penalty alone is in between", _read("locator_penalty", 128, _success), 0.1, TARGET),
)  # fmt: skip


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Holds the claims whose arms ran against the rows, and prints how they fared."""
    return claims.judge_all(CLAIMS, {"rows": rows})
