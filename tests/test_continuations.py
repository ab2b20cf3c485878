"""Continuations from any state of a rollout, and trees of rollouts: what is replayed is what was, the rest is new."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from rsi_jax import annotate, base, continuations, rollout
from rsi_jax.credit import sampled
from rsi_jax.envs import Reply
from tests import tiny
from tests.test_rollout import CAPACITY, KEY, PARAMS, SAMPLER, TASKS, WORDS, Talk, play

OTHER = jax.random.key(7)
BUDGET = SAMPLER.sampling.max_tokens
FOREST = [rollout.Task(seed, group) for group, seed in enumerate((3, 2, 0)) for _ in range(5)]  # 4 turns, 3, and 1
NARROW = dataclasses.replace(SAMPLER, sampling=dataclasses.replace(SAMPLER.sampling, top_k=9), slots=4)
GREEDY = dataclasses.replace(SAMPLER, sampling=dataclasses.replace(SAMPLER.sampling, top_k=1), slots=6)


@dataclasses.dataclass(frozen=True)
class Pay(Talk):
    """Talks like Talk, and pays for what was said: 1 / 100 for each letter of a message."""

    def step(self, state, text, finish):
        state, reply = super().step(state, text, finish)
        return state, dataclasses.replace(reply, reward=len(text) / 100)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two turns; the second one pays 0.5 for a first and 1 for a second word that is one of `words`."""

    words: frozenset[str]
    max_turns = 2

    def reset(self, seed):
        return 0, (base.Message(role="user", content="start"),)

    def step(self, state, text, finish):
        said = text.split(" ")
        reward = sum(pay * (word in self.words) for pay, word in zip((0.5, 1.0), said, strict=False))
        shown = () if state else (base.Message(role="user", content="noted"),)
        return state + 1, Reply(shown, reward * state, state == 1)


@pytest.fixture(scope="module")
def played():
    return play()


@pytest.fixture(scope="module")
def trees():
    return continuations.grow_trees(PARAMS, FOREST, KEY, NARROW, roots=2)


# --- replaying a part of a turn --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2])
def test_a_turn_that_is_begun_goes_on_as_it_did(played, tokens):
    made, transcripts = played
    tasks, begun = list(TASKS), {}
    for row, transcript in enumerate(transcripts):
        long = [k for k, turn in enumerate(transcript.turns) if turn.length > tokens]
        if long:
            tasks[row], begun[row] = dataclasses.replace(TASKS[row], prefix=transcript, turns=long[-1]), long[-1]
            tasks[row] = dataclasses.replace(tasks[row], tokens=tokens)
    assert len(begun) > 3 and any(begun.values())
    again, texts = play(tasks=tasks)  # the same row draws with the same key at the same place
    assert texts == transcripts
    lengths = {texts[row].turns[k].length for row, k in begun.items()}
    assert BUDGET in lengths  # cut at the budget of the turn, which counts what was replayed
    for row, k in begun.items():
        new_T = np.arange(CAPACITY) >= texts[row].turns[k].start + tokens
        mask_T = np.asarray(made.mask_BT)[row] & new_T
        np.testing.assert_array_equal(np.asarray(again.mask_BT)[row], mask_T)  # only what was sampled now
        np.testing.assert_allclose(again.logp_BT[row][mask_T], made.logp_BT[row][mask_T], atol=1e-5)
        assert not again.logp_BT[row][~mask_T].any()
    np.testing.assert_array_equal(again.return_B, made.return_B)
    np.testing.assert_array_equal(again.length_B, made.length_B)


def test_a_turn_that_is_over_cannot_be_begun(played):
    turns = [(t, k, turn) for t in played[1] for k, turn in enumerate(t.turns)]
    whole, k, turn = next(one for one in turns if one[2].length < BUDGET and one[2].info["finish"] == base.STOP)
    full, last, _ = next(one for one in turns if one[2].length == BUDGET)
    for prefix, turns, tokens in ((whole, k, turn.length), (whole, k, turn.length + 1), (full, last, BUDGET)):
        with pytest.raises(ValueError, match=f"task {prefix.seed}: turn {turns} is over within {tokens} tokens"):
            play(tasks=[rollout.Task(prefix.seed, 0, prefix, turns, tokens)])


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_policy_that_always_does_the_same_has_the_value_of_what_followed_at_every_token():
    greedy = dataclasses.replace(GREEDY, env=Pay())
    made, transcripts = rollout.collect(PARAMS, TASKS[:6], KEY, greedy)
    made = made.replace(weight_B=np.array([1, 0, 1, 1, 1, 1], np.float32))
    places_BT = np.asarray(made.mask_BT)
    value_BT, scalars = continuations.value_column(
        PARAMS, made, transcripts, OTHER, greedy, places_BT=places_BT, count=2
    )
    inside = 0
    for row in (0, 2, 3, 4, 5):
        for k, turn in enumerate(transcripts[row].turns):
            follows = sum(later.reward for later in transcripts[row].turns[k:])
            np.testing.assert_allclose(value_BT[row, turn.start : turn.start + turn.length], follows, rtol=1e-6)
            inside += turn.length - 1
    assert inside > 5 and np.isnan(value_BT[~places_BT]).all() and np.isnan(value_BT[1]).all()
    assert scalars["continuations/places"] == places_BT.sum() - places_BT[1].sum()
    made = made.replace(mc_value_BT=value_BT)
    credit = jax.jit(functools.partial(sampled.spo, prob_max=1.0))(made)
    np.testing.assert_allclose(credit.adv_BT, 0.0, atol=1e-6)  # nothing it did was better than itself


def test_values_telescope_to_the_return(played):
    made, transcripts = played
    places_BT = continuations.turn_starts(made, 2)
    value_BT, scalars = continuations.value_column(
        PARAMS, made, transcripts, OTHER, SAMPLER, places_BT=places_BT, count=3
    )
    np.testing.assert_array_equal(np.isfinite(value_BT), places_BT)
    adv_BT = np.asarray(jax.jit(sampled.vineppo)(made.replace(mc_value_BT=value_BT)).adv_BT)
    for row, transcript in enumerate(transcripts):
        starts = [turn.start for turn in transcript.turns]
        np.testing.assert_allclose(
            adv_BT[row, starts[::2]].sum(), transcript.score - value_BT[row, starts[0]], atol=1e-5
        )
    again, _ = continuations.value_column(
        PARAMS, made, transcripts, OTHER, dataclasses.replace(SAMPLER, slots=50), places_BT=places_BT, count=3
    )
    np.testing.assert_array_equal(again, value_BT)  # the slots do not matter
    assert scalars["continuations/places"] == places_BT.sum()
    assert scalars["continuations/read_tokens"] == 3 * np.sum(np.nonzero(places_BT)[1])
    assert 0 < scalars["continuations/truncated"] < 3 * places_BT.sum()
    none, scalars = continuations.value_column(
        PARAMS, made, transcripts, OTHER, SAMPLER, places_BT=np.zeros_like(places_BT), count=3
    )
    assert np.isnan(none).all() and not any(scalars.values())


def test_a_value_inside_a_turn_agrees_with_the_probabilities_of_the_model():
    words, count = WORDS[::2], 512
    sampler = dataclasses.replace(SAMPLER, env=Pair(frozenset(words)), slots=64)
    made, transcripts = rollout.collect(PARAMS, [rollout.Task(0, 0)] * 64, KEY, sampler)
    row, turn = next((b, t.turns[1]) for b, t in enumerate(transcripts) if t.turns[1].length > 1)
    places_BT = np.zeros(made.tokens_BT.shape, bool)
    places_BT[row, turn.start + 1] = True
    value_BT, scalars = continuations.value_column(
        PARAMS, made, transcripts, OTHER, sampler, places_BT=places_BT, count=count
    )
    before, ids = transcripts[row].tokens[: turn.start + 1], [sampler.chat.encode(word) for word in words]
    second = np.exp(annotate.continuation_logp(PARAMS, sampler.config, [before] * len(ids), ids, chunk=64)).sum()
    assert 0.1 < second < 0.9
    exact = 0.5 * (turn.text.split(" ")[0] in words) + second  # one text: what was replayed is paid for as well
    assert abs(value_BT[row, turn.start + 1] - exact) < 4 * np.sqrt(second * (1 - second) / count)
    assert count <= scalars["continuations/sampled_tokens"] <= BUDGET * count


def test_every_sampled_token_is_counted(played):
    made, transcripts = played
    places = [
        continuations.Place(t, k, n) for t in transcripts for k, turn in enumerate(t.turns) for n in range(turn.length)
    ]
    drawn = []
    tasks = [rollout.Task(p.transcript.seed, i, p.transcript, p.turns, p.tokens) for i, p in enumerate(places)]
    _, texts = rollout.collect(PARAMS, tasks, OTHER, SAMPLER, tick=drawn.append)
    returns, scalars = continuations.returns_from(PARAMS, places, OTHER, SAMPLER, count=1)
    assert returns.shape == (len(places), 1)
    assert scalars["sampled_tokens"] == sum(drawn)
    own = sum(
        sum(turn.length for turn in text.turns[place.turns :]) - place.tokens
        for text, place in zip(texts, places, strict=True)
    )
    assert own < scalars["sampled_tokens"]  # what the budget of a turn cut was drawn too
    whole = [place for place in places if not place.tokens]
    drawn.clear()
    tasks = [rollout.Task(p.transcript.seed, i, p.transcript, p.turns) for i, p in enumerate(whole)]
    _, texts = rollout.collect(PARAMS, tasks, OTHER, SAMPLER, tick=drawn.append)
    own = sum(turn.length for text, place in zip(texts, whole, strict=True) for turn in text.turns[place.turns :])
    assert own == sum(drawn)


def test_an_episode_that_is_over_has_nothing_to_come(played):
    over = [continuations.Place(t, len(t.turns)) for t in played[1] if not t.truncated]
    returns, scalars = continuations.returns_from(PARAMS, over, OTHER, SAMPLER, count=2)
    assert over and not returns.any() and not scalars["sampled_tokens"]


def test_what_cannot_be_valued_is_refused(played):
    made, transcripts = played
    ask = dict(key=OTHER, sampler=SAMPLER)
    with pytest.raises(ValueError, match="a token that was not sampled"):
        everywhere = np.ones(made.tokens_BT.shape, bool)
        continuations.value_column(PARAMS, made, transcripts, **ask, places_BT=everywhere, count=1)
    with pytest.raises(base.InputError, match="at least 1, got 0"):
        continuations.value_column(PARAMS, made, transcripts, **ask, places_BT=~everywhere, count=0)


# --- places ----------------------------------------------------------------------------------------------------------


def test_turn_starts_are_the_first_tokens_of_every_nth_turn(played):
    made, transcripts = played
    for every in (1, 2, 3):
        want_BT = np.zeros(made.tokens_BT.shape, bool)
        for row, transcript in enumerate(transcripts):
            want_BT[row, [turn.start for turn in transcript.turns[::every]]] = True
        np.testing.assert_array_equal(continuations.turn_starts(made, every), want_BT)
    with pytest.raises(base.InputError, match="every must be at least 1"):
        continuations.turn_starts(made, 0)


def test_cut_points_leave_as_many_improbable_tokens_in_every_segment(played):
    made, _ = played
    mask_BT = np.asarray(made.mask_BT)
    probs_BT = np.where(mask_BT, np.random.default_rng(0).choice([0.2, 0.95], mask_BT.shape), 1.0)
    made = made.replace(logp_BT=np.log(probs_BT).astype(np.float32))
    for interval in (1, 2, 3):
        cuts_BT = continuations.cut_points(made, prob_max=0.9, interval=interval)
        assert not (cuts_BT & ~mask_BT).any()
        for cuts_T, mask_T, prob_T in zip(cuts_BT, mask_BT, probs_BT, strict=True):
            first, *later = np.flatnonzero(cuts_T)
            assert first == np.flatnonzero(mask_T)[0] and (prob_T[later] < 0.9).all()
            held = [int((part < 0.9).sum()) for part in np.split(prob_T, [first, *later])][1:]
            assert set(held[:-1]) <= {interval} and held[-1] <= interval
    everything = continuations.cut_points(made, prob_max=1.0, interval=1)
    np.testing.assert_array_equal(everything, mask_BT)
    for knobs in (dict(prob_max=0.0, interval=1), dict(prob_max=0.9, interval=0)):
        with pytest.raises(base.InputError, match="cut points: prob_max"):
            continuations.cut_points(made, **knobs)


# --- trees -----------------------------------------------------------------------------------------------------------


def test_a_forked_row_is_a_whole_rollout_of_the_policy(trees):
    made, transcripts, _ = trees
    logp_BT, _ = annotate.score_rollout(PARAMS, made, config=NARROW.config)
    np.testing.assert_allclose(logp_BT, made.logp_BT, atol=1e-4)  # of the prefix and of what followed
    mask_BT, s = np.asarray(made.mask_BT), jax.tree.map(np.asarray, made.segments)
    assert (made.logp_BT[mask_BT] < 0).all() and (made.kept_mass_BT[mask_BT] < 1).all()
    assert not made.logp_BT[~mask_BT].any() and (made.kept_mass_BT[~mask_BT] == 1).all()
    for row, transcript in enumerate(transcripts):
        n = len(transcript.turns)
        spans = [np.arange(turn.start, turn.start + turn.length) for turn in transcript.turns]
        np.testing.assert_array_equal(np.flatnonzero(mask_BT[row]), np.concatenate(spans))
        assert s.reward_BS[row, 1 : 2 * n : 2].tolist() == [turn.reward for turn in transcript.turns]
        assert s.finish_BS[row, 1 : 2 * n : 2].tolist() == [turn.finish for turn in transcript.turns]
        assert made.tokens_BT[row, : len(transcript.tokens)].tolist() == transcript.tokens
    np.testing.assert_array_equal(made.group_B, [task.group for task in FOREST])
    np.testing.assert_array_equal(made.chain_B, np.arange(len(FOREST)))


def test_trees_say_where_they_fork(trees):
    made, transcripts, scalars = trees
    s = jax.tree.map(np.asarray, made.segments)
    S, shared, unforked = s.start_BS.shape[1], 0, 0
    np.testing.assert_array_equal(made.tree_B, [0, 1, 0, 1, 0, 5, 6, 5, 6, 5, 10, 11, 10, 11, 10])
    for row, root in enumerate(made.tree_B):
        (own,) = np.flatnonzero(s.parent_BS[row] != base.NO_PARENT) if row != root else (None,)
        if own is None:
            assert (s.parent_BS[row] == base.NO_PARENT).all()
            continue
        source, last = divmod(int(s.parent_BS[row, own]), S)
        turns, n = own // 2, len(transcripts[root].turns)
        assert (source, last) == (root, own - 1) and s.kind_BS[row, own] == base.ACTION
        assert 1 <= turns < n or (turns == 0 and n == 1)
        assert transcripts[row].turns[:turns] == transcripts[root].turns[:turns]
        end = s.start_BS[row, own]
        for column in (made.tokens_BT, made.logp_BT, made.kept_mass_BT, np.asarray(made.mask_BT)):
            np.testing.assert_array_equal(column[row, :end], column[root, :end])
        for column in jax.tree.leaves(s.replace(parent_BS=s.kind_BS)):
            np.testing.assert_array_equal(column[row, :own], column[root, :own])
        shared += sum(turn.length for turn in transcripts[root].turns[:turns])
        unforked += turns == 0
    sampled_here = np.sum(made.mask_BT) - shared
    assert shared > 0 and unforked > 0
    assert scalars == {
        "trees/roots": 6.0,
        "trees/unforked": unforked,
        "trees/sampled_tokens": sampled_here,
        "trees/shared_tokens": shared,
    }
    assert len({tuple(t.tokens) for t in transcripts[:5]}) > 2  # two roots, and some went another way from there


def test_the_same_key_grows_the_same_trees_for_any_number_of_slots(trees):
    made, transcripts, scalars = trees
    again, texts, counts = continuations.grow_trees(PARAMS, FOREST, KEY, dataclasses.replace(NARROW, slots=3), roots=2)
    assert texts == transcripts and counts == scalars
    tiny.assert_close(*(x.replace(logp_BT=0, kept_mass_BT=0) for x in (made, again)))
    np.testing.assert_allclose(again.logp_BT, made.logp_BT, atol=1e-5)
    np.testing.assert_allclose(again.kept_mass_BT, made.kept_mass_BT, atol=1e-5)
    other, _, _ = continuations.grow_trees(PARAMS, FOREST, OTHER, NARROW, roots=2)
    assert (other.tokens_BT != made.tokens_BT).any()


def test_forks_are_spread_over_the_later_turns_of_the_root():
    root = base.Transcript(0, 0, turns=[base.TurnRecord([], "", 0, 1, 0, base.STOP)] * 4)
    shares = (np.arange(300) + 0.5) / 300
    turns = [continuations._fork(FOREST[0], root, share).turns for share in shares]
    assert np.bincount(turns).tolist() == [0, 100, 100, 100]


def test_without_forks_trees_are_rollouts():
    tasks = [rollout.Task(seed, group) for group, seed in enumerate((3, 2))]
    made, transcripts, scalars = continuations.grow_trees(PARAMS, tasks, KEY, SAMPLER, roots=3)
    assert made.tree_B.tolist() == [0, 1] and (made.segments.parent_BS == base.NO_PARENT).all()
    assert scalars["trees/sampled_tokens"] == np.sum(made.mask_BT) and scalars["trees/shared_tokens"] == 0
    assert [t.seed for t in transcripts] == [3, 2]
    with pytest.raises(base.InputError, match="roots must be at least 1"):
        continuations.grow_trees(PARAMS, tasks, KEY, SAMPLER, roots=0)
    with pytest.raises(ValueError, match="group 0 has the seeds 3 and 2"):
        continuations.grow_trees(PARAMS, [rollout.Task(3, 0), rollout.Task(2, 0)], KEY, SAMPLER, roots=1)
