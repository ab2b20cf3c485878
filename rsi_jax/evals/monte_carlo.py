"""Monte Carlo values and advantages of a model along one of its episodes, with intervals.

The state before turn t is the transcript of the turns before it. V(t) is the mean reward still to come over `count`
continuations that the model samples from there; the environment is deterministic given its seed, so

    Q(t) = reward of turn t + V(t + 1),   A(t) = Q(t) - V(t),   return = V(0) + Σ_t A(t)

the last line exactly, for the estimates too. `exact.py` has the same numbers without error for a policy that is known
on the abstract state of the tool-call task.
"""

import math
from typing import NamedTuple

import jax
from scipy import stats

from rsi_jax import base, continuations, rollout


class Estimate(NamedTuple):
    """A mean and its 95% interval, in units of the reward."""

    mean: float
    low: float
    high: float


class Turn(NamedTuple):
    """Estimates of one turn: before it, of what was done in it, and the difference."""

    value: Estimate
    q: Estimate
    adv: Estimate


def _estimate(mean: float, variance: float, count: int) -> Estimate:
    """Student's interval of a mean whose squared standard error is `variance`; exact where that is 0."""
    half = float(stats.t.ppf(0.975, count - 1)) * math.sqrt(variance) if variance else 0.0
    return Estimate(mean, mean - half, mean + half)


def along(
    params, transcript: base.Transcript, key: jax.Array, sampler: rollout.Sampler, *, count: int, every: int = 1
) -> dict[int, Turn]:
    """Estimates value, Q and advantage of every `every`-th turn of an episode: {turn: Turn}.

    The advantage's interval takes the two values as independent, as they are: each has continuations of its own.
    Raises: ValueError for fewer than 2 continuations, or a truncated episode (what follows its last turn is unknown).
    """
    if count < 2 or transcript.truncated:
        raise ValueError("an interval needs at least 2 continuations, of an episode that was not truncated")
    asked = range(0, len(transcript.turns), every)
    places = sorted({t + step for t in asked for step in (0, 1)})
    from_places = [continuations.Place(transcript, t) for t in places]
    sampled, _ = continuations.returns_from(params, from_places, key, sampler, count=count)
    mean = dict(zip(places, sampled.mean(axis=1).tolist(), strict=True))
    variance = dict(zip(places, (sampled.var(axis=1, ddof=1) / count).tolist(), strict=True))
    found = {}
    for t in asked:
        q, error = transcript.turns[t].reward + mean[t + 1], variance[t] + variance[t + 1]
        found[t] = Turn(
            _estimate(mean[t], variance[t], count),
            _estimate(q, variance[t + 1], count),
            _estimate(q - mean[t], error, count),
        )
    return found
