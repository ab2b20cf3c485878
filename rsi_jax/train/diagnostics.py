"""What is logged of a batch: its lengths, the sampler's support, whether the rules found faults; and its updates."""

from collections.abc import Mapping, Sequence

import numpy as np

from rsi_jax import base, chains
from rsi_jax.feedback import locate


def sampled(rollout: base.Rollout, transcripts: Sequence[base.Transcript]) -> dict[str, float]:
    """Describes what was sampled, rollouts of weight 0 included.

    Returns:
      response_tokens  mean sampled tokens per turn
      rollout_tokens   mean sampled tokens per rollout, over all rows of a chain
      kept_mass        mean over the sampled tokens of the probability that top-k and top-p left, in (0, 1]
    """
    lengths = [turn.length for transcript in transcripts for turn in transcript.turns]
    kept = np.asarray(rollout.kept_mass_BT)[np.asarray(rollout.mask_BT)]
    return {
        "response_tokens": float(np.mean(lengths)),
        "rollout_tokens": sum(lengths) / len(chains.episodes(transcripts)),
        "kept_mass": float(np.mean(kept)),
    }


def chained(transcripts: Sequence[base.Transcript]) -> dict[str, float]:
    """Describes the chains of a batch.

    Returns:
      chains/rows            mean rows in use per chain
      chains/summary_tokens  mean sampled tokens per summary; 0 without any
      chains/truncated       chains that the context cut off: out of rows, or a summary left no room
    """
    lengths = [turn.length for transcript in transcripts for turn in transcript.turns if turn.summary]
    whole = chains.episodes(transcripts)
    return {
        "chains/rows": sum(bool(one.turns) for one in transcripts) / len(whole),
        "chains/summary_tokens": float(np.mean(lengths)) if lengths else 0.0,
        "chains/truncated": float(sum(one.truncated for one in whole)),
    }


def located(transcripts: Sequence[base.Transcript], findings: Sequence[locate.Finding]) -> dict[str, float]:
    """Precision of the locating rules: the share of the located turns whose action the environment knows was wrong.

    Returns: feedback/located_precision; nothing without findings, or where the environment names no right action.
    """
    infos = [transcripts[finding.row].turns[finding.turn].info for finding in findings]
    known = [not info["correct"] for info in infos if "right" in info]
    return {"feedback/located_precision": float(np.mean(known))} if known else {}


def over_updates(measured: Sequence[Mapping[str, float]], rows: Sequence[np.ndarray]) -> dict[str, float]:
    """Joins the metrics of all updates on one batch: their mean, of `ratio_max` the largest.

    `bad_row`, the first rollout whose loss was not finite, becomes a row of the batch (-1 = none). `tokens` is left
    out: an epoch or a part of the batch says nothing of how many the batch has.

    Args:
      measured: what each update returned.
      rows: the rollouts of the batch that each update read.
    """
    found = {name: float(np.mean([one[name] for one in measured])) for name in measured[0] if name != "tokens"}
    found["ratio_max"] = max(float(one["ratio_max"]) for one in measured)
    bad = [read[int(one["bad_row"])] for one, read in zip(measured, rows, strict=True) if one["bad_row"] >= 0]
    return found | {"bad_row": float(bad[0]) if bad else -1.0}
