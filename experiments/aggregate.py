"""How experiments sum up runs over seeds: interquartile mean and stratified bootstrap, readings at equal budgets.

Source: Agarwal et al. 2021, Deep RL at the edge of the statistical precipice (https://arxiv.org/abs/2108.13264).
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import stats

SAMPLES = 5000  # of the bootstrap


@dataclasses.dataclass(frozen=True)
class Point:
    """A run after one of its batches: tokens sampled so far, wall seconds of the method, success lately."""

    tokens: int
    seconds: float
    success: float


def iqm(values: npt.ArrayLike, axis: int = -1) -> np.ndarray:
    """Interquartile mean: that of the middle half, a quarter of the values (rounded down) left out at either end.

    Of three seeds it is the mean, of five the mean of the middle three.
    """
    return stats.trim_mean(np.asarray(values, np.float64), 0.25, axis=axis)


def interval(
    strata: Sequence[Sequence[float]], statistic: Callable[..., np.ndarray] = iqm, *, seed: int = 0
) -> tuple[float, float, float]:
    """The statistic over all values, and its 95% interval by a bootstrap within each stratum (task).

    Returns: (value, low, high), percentiles of SAMPLES resamples. With as few as 2 or 3 seeds the interval is too
      narrow; with 1 it has no width.
    """
    rng = np.random.default_rng(seed)
    parts = [np.asarray(values, np.float64) for values in strata]
    drawn = [part[rng.integers(0, len(part), (SAMPLES, len(part)))] for part in parts]
    low, high = np.quantile(statistic(np.concatenate(drawn, axis=1), axis=1), (0.025, 0.975))
    return float(statistic(np.concatenate(parts), axis=0)), float(low), float(high)


def smooth(successes: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` at most."""
    return [float(np.mean(successes[max(0, i + 1 - window) : i + 1])) for i in range(len(successes))]


def reached(curve: Sequence[Point], target: float, *, after: int = 1) -> Point | None:
    """The first point of at least `target` success, not before the `after`-th; None: censored."""
    return next((point for point in curve[after - 1 :] if point.success >= target), None)


def at_tokens(curve: Sequence[Point], tokens: float, *, before: float) -> float:
    """Success when the run had sampled so many tokens: of the last point within them; `before` when there is none."""
    within = [point.success for point in curve if point.tokens <= tokens]
    return within[-1] if within else before


def thin(curve: Sequence[Point], count: int) -> list[Point]:
    """At most `count` of the points, evenly, the first and the last among them."""
    if len(curve) <= count:
        return list(curve)
    return [curve[i] for i in np.linspace(0, len(curve) - 1, count).round().astype(int)]
