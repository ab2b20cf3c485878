"""What a batch of rollouts says before any loss: lengths, the sampler's support, and whether the rules found faults."""

from collections.abc import Sequence

import numpy as np

from rsi_jax import base
from rsi_jax.feedback import locate


def sampled(rollout: base.Rollout, transcripts: Sequence[base.Transcript]) -> dict[str, float]:
    """Describes what was sampled, rollouts of weight 0 included.

    Returns:
      response_tokens  mean sampled tokens per turn
      rollout_tokens   mean sampled tokens per rollout
      kept_mass        mean over the sampled tokens of the probability that top-k and top-p left, in (0, 1]
    """
    lengths = [turn.length for transcript in transcripts for turn in transcript.turns]
    kept = np.asarray(rollout.kept_mass_BT)[np.asarray(rollout.mask_BT)]
    return {
        "response_tokens": float(np.mean(lengths)),
        "rollout_tokens": sum(lengths) / len(transcripts),
        "kept_mass": float(np.mean(kept)),
    }


def located(transcripts: Sequence[base.Transcript], findings: Sequence[locate.Finding]) -> dict[str, float]:
    """Precision of the locating rules: the share of the located turns whose action the environment knows was wrong.

    Returns: feedback/located_precision; nothing without findings, or where the environment names no right action.
    """
    infos = [transcripts[finding.row].turns[finding.turn].info for finding in findings]
    known = [not info["correct"] for info in infos if "right" in info]
    return {"feedback/located_precision": float(np.mean(known))} if known else {}
