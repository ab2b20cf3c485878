"""Anchors by similarity: turns that were shown almost the same text count as the same state."""

import difflib
from collections.abc import Sequence

import jax
import numpy as np

from rsi_jax import base


def similar_anchors(transcripts: Sequence[base.Transcript], segments: base.Segments, *, threshold: float) -> np.ndarray:
    """Numbers the turns of a batch so that those of one group that were shown similar texts share an anchor.

    In the order of rows and turns, a turn joins the first cluster of its group whose first text a and its own text b
    have a ratio 2 M / (|a| + |b|) >= threshold, M = characters in matching blocks; else it begins a cluster. A turn's
    text is what came just before it, all messages since the action before.

    Args:
      transcripts, segments: of one batch, in the same order.
      threshold: in (0, 1]; 1 = equal texts only.

    Returns: anchor_BS int32, the number of the cluster at each ACTION segment, NO_ANCHOR elsewhere.

    Raises: base.InputError for a threshold out of range.

    Source: Feng et al. 2025, GiGPO (https://arxiv.org/abs/2505.10978), grouping by similarity (0.95).
    Differs: every character is compared; difflib by itself leaves out the frequent ones of texts of 200 and more.
    """
    if not 0 < threshold <= 1:
        raise base.InputError(f"similar anchors: threshold must be in (0, 1], got {threshold}")
    s = jax.tree.map(np.asarray, segments)
    anchor_BS = np.full(s.start_BS.shape, base.NO_ANCHOR, np.int32)
    clusters: dict[int, list[tuple[int, difflib.SequenceMatcher]]] = {}
    known: dict[tuple[int, str], int] = {}  # a text seen before joins the same cluster again
    count = 0
    for row, transcript in enumerate(transcripts):
        mine = clusters.setdefault(transcript.group, [])
        for turn in transcript.turns:
            text = "\n".join(message["content"] for message in turn.shown)
            place = (transcript.group, text)
            if place not in known:
                known[place] = next((anchor for anchor, first in mine if _alike(first, text, threshold)), count)
            if known[place] == count:
                mine.append((count, difflib.SequenceMatcher(None, "", text, autojunk=False)))
                count += 1
            inside_S = (s.start_BS[row] >= turn.start) & (s.start_BS[row] < turn.start + turn.length)
            anchor_BS[row, inside_S & (s.kind_BS[row] == base.ACTION) & (s.length_BS[row] > 0)] = known[place]
    return anchor_BS


def _alike(first: difflib.SequenceMatcher, text: str, threshold: float) -> bool:
    """Whether the ratio reaches the threshold; its two cheap upper bounds are asked first."""
    first.set_seq1(text)
    return all(ratio() >= threshold for ratio in (first.real_quick_ratio, first.quick_ratio, first.ratio))
