"""The claims whose quick form `experiments.check_claims` runs again; it keeps the table in experiments/README.md."""

import functools
import math

from experiments import fidelity_claims, key_to_door_claims
from experiments.claims import Claim, Line, Reading, at, of_row


def _benchmark(name: str, text: str, command: str, low: float, high: float) -> Claim:
    """A claim on a number of a benchmark's row, asked for by the issue that built it."""
    named = f"{command.split()[0].removeprefix('experiments.')}/{name}"
    return Claim(named, text, "our own requirement", command, of_row(name), low=low, high=high, minutes=6)


_RESCORE = "experiments.bench_rescore --tokens=8192 --hints=32 --repeats=1"
_LOGPROB = "experiments.bench_logprob --repeats=1"


def _fidelity() -> tuple[Claim, ...]:
    """The claims of `experiments.credit_fidelity`: the number is the paired difference of two arms."""

    def read(line: Line, left: str, right: str) -> Reading | None:
        found = [one for one in line["claims"] if (one["left"], one["right"]) == (left, right)]
        return tuple(found[0]["difference"]) if found else None

    return tuple(
        Claim(
            name=f"credit_fidelity/{i:02d}",
            text=f"{claim.text}: {left} {'=' if claim.equal else '>'} {right}",
            source="experiments/fidelity_claims.py",
            command="experiments.credit_fidelity --quick --figure= --results=runs/check_claims/credit_fidelity.jsonl",
            read=functools.partial(read, left=left, right=right),
            low=-1e-5 if claim.equal else 0.0,
            high=1e-5 if claim.equal else math.inf,
            minutes=10,
            arms=tuple(x.arm for x in (claim.left, claim.right) if isinstance(x, fidelity_claims.Reading)),
            seeds=8,
        )
        for i, claim in enumerate(fidelity_claims.CLAIMS)
        for left, right in [(fidelity_claims.said(claim.left), fidelity_claims.said(claim.right))]
    )


REGISTERED: tuple[Claim, ...] = (
    Claim(
        name="bench_returns/gae_ms",
        text="GAE over 131,072 tokens takes less than 50 ms",
        source="our own requirement; 4 to 8 ms measured on 2026-12-01",
        command="experiments.bench_returns",
        read=at("gae_ms"),
        low=-math.inf,
        high=50.0,
        minutes=3,
    ),
    Claim(
        name="bench_returns/max_difference",
        text="and the three recursions agree with a loop over tokens, relative to the largest number",
        source="float32 rounding over 131,072 steps",
        command="experiments.bench_returns",
        read=at("max_difference"),
        low=-math.inf,
        high=1e-5,
        minutes=3,
    ),
    _benchmark("share", "32 hints in 8,192 tokens: at least 80% of the speed-up in FLOPs", _RESCORE, 0.8, math.inf),
    _benchmark("max_abs_diff", "and every state is that of a separate reading", _RESCORE, 0.0, 1e-5),
    _benchmark("memory_ratio", "log-probs of 32,768 words in a twentieth of the memory", _LOGPROB, 0.0, 0.05),
    _benchmark("divergence_ratio", "the full KL costs at most 2.2 log-probs", _LOGPROB, 0.0, 2.2),
    *_fidelity(),
    *key_to_door_claims.CLAIMS,
)
