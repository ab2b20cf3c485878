"""Anchors by similarity: greedy clusters of what turns were shown, within a group."""

import difflib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsi_jax import anchors, base


def batch(groups, shown):
    """Transcripts whose turns were shown these texts, each action one token long, and their segments."""
    S = 2 * max(map(len, shown))
    transcripts, columns = [], {}
    for group, texts in zip(groups, shown, strict=True):
        turns = [
            base.TurnRecord([base.Message(role="user", content=text)], "", 2 * k + 1, 1, 0, base.STOP)
            for k, text in enumerate(texts)
        ]
        transcripts.append(base.Transcript(0, group, turns=turns))
    used = np.arange(S) < 2 * np.array([[len(texts)] for texts in shown])
    columns["start_BS"] = np.where(used, np.arange(S), 0)
    columns["length_BS"] = used.astype(np.int32)
    columns["kind_BS"] = np.where(used & (np.arange(S) % 2 == 1), base.ACTION, base.OBSERVATION)
    rest = ("reward_BS", "discount_BS", "finish_BS", "anchor_BS", "parent_BS")
    return transcripts, base.Segments(**columns, **{name: np.zeros_like(used, float) for name in rest})


def test_similar_texts_of_a_group_share_an_anchor():
    shown = [["the door is red", "the door is blue"], ["the door is red.", "go"], ["the door is red"]]
    transcripts, segments = batch([0, 0, 1], shown)
    n = base.NO_ANCHOR
    loose = anchors.similar_anchors(transcripts, segments, threshold=0.9)
    assert loose.dtype == np.int32
    assert loose.tolist() == [[n, 0, n, 1], [n, 0, n, 2], [n, 3, n, n]]  # another group, another state
    equal = anchors.similar_anchors(transcripts, segments, threshold=1.0)
    assert equal.tolist() == [[n, 0, n, 1], [n, 2, n, 3], [n, 4, n, n]]
    one = anchors.similar_anchors(transcripts, segments, threshold=0.5)
    assert one.tolist() == [[n, 0, n, 0], [n, 0, n, 1], [n, 2, n, n]]  # "go" has too little in common with a door


def test_a_cluster_is_known_by_its_first_member():
    transcripts, segments = batch([0], [["aaaa", "aaab", "aabb", "aaaa"]])  # each is like the one before it
    assert anchors.similar_anchors(transcripts, segments, threshold=0.7)[0, 1::2].tolist() == [0, 0, 1, 0]


def test_the_frequent_letters_of_long_texts_count():
    first, second = "x" + "ab" * 150, "y" + "ab" * 150
    transcripts, segments = batch([0, 0], [[first], [second]])
    assert difflib.SequenceMatcher(None, first, second).ratio() < 0.5  # as difflib would have it
    assert anchors.similar_anchors(transcripts, segments, threshold=0.95)[:, 1].tolist() == [0, 0]


def test_all_messages_of_a_turn_count_and_replayed_turns_have_no_anchor():
    transcripts, segments = batch([0, 0], [["a", "b"], ["a", "b"]])
    transcripts[1].turns[0].shown.append(base.Message(role="tool", content="more"))
    segments.kind_BS[0, 1] = base.OBSERVATION
    n = base.NO_ANCHOR
    assert anchors.similar_anchors(transcripts, segments, threshold=1.0).tolist() == [[n, n, n, 1], [n, 2, n, 1]]


@given(st.lists(st.lists(st.text("ab", max_size=4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_with_threshold_one_anchors_are_the_texts(shown):
    transcripts, segments = batch([0] * len(shown), shown)
    anchor_BS = anchors.similar_anchors(transcripts, segments, threshold=1.0)
    found = [(text, anchor_BS[b, 2 * k + 1]) for b, texts in enumerate(shown) for k, text in enumerate(texts)]
    assert len(set(found)) == len({text for text, _ in found}) == len({anchor for _, anchor in found})


@pytest.mark.parametrize("threshold", [0.0, 1.1, float("nan")])
def test_a_threshold_out_of_range_is_refused(threshold):
    transcripts, segments = batch([0], [["a"]])
    with pytest.raises(base.InputError, match="threshold must be in"):
        anchors.similar_anchors(transcripts, segments, threshold=threshold)
