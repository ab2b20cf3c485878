"""Values of a model by continuation: prefixes are replayed to the bit, and estimates agree with exact probabilities."""

import dataclasses

import jax
import numpy as np
import pytest

from rsi_jax import annotate, base, continuations, rollout
from rsi_jax.envs import Reply
from rsi_jax.evals import monte_carlo
from tests.test_rollout import KEY, PARAMS, SAMPLER, TASKS, WORDS, play


@dataclasses.dataclass(frozen=True)
class Guess:
    """Two turns; 1 for beginning the second with one of the words, 0.5 for the first."""

    words: frozenset[str]
    max_turns = 2

    def reset(self, seed):
        return 0, (base.Message(role="user", content="start"),)

    def step(self, state, text, finish):
        reward = (0.5, 1.0)[state] * (text.split(" ")[0] in self.words)
        return state + 1, Reply(() if state else (base.Message(role="user", content="noted"),), reward, state == 1)


def test_a_replayed_prefix_goes_on_as_the_episode_did():
    made, transcripts = play()
    rows = [row for row, transcript in enumerate(transcripts) if len(transcript.turns) > 1]
    tasks = [
        dataclasses.replace(task, prefix=transcripts[row], turns=len(transcripts[row].turns) - 1)
        if row in rows
        else task
        for row, task in enumerate(TASKS)
    ]
    again, played = play(tasks=tasks)  # the same row draws with the same key at the same place
    assert rows and [one.tokens for one in played] == [one.tokens for one in transcripts]
    assert [one.score for one in played] == [one.score for one in transcripts]
    for row in rows:
        first = transcripts[row].turns[-1].start
        mask = np.asarray(made.mask_BT)[row] & (np.arange(made.mask_BT.shape[1]) >= first)
        np.testing.assert_array_equal(np.asarray(again.mask_BT)[row], mask)  # only what was sampled now is trained on
        np.testing.assert_allclose(again.logp_BT[row][mask], made.logp_BT[row][mask], atol=1e-5)
    np.testing.assert_array_equal(again.return_B, made.return_B)


def test_what_cannot_be_replayed_is_refused():
    transcripts = play()[1]
    whole = next(one for one in transcripts if not one.truncated and len(one.turns) > 1)
    with pytest.raises(ValueError, match="the episode is over after"):
        play(tasks=[rollout.Task(whole.seed, 0, whole, len(whole.turns))])
    other = dataclasses.replace(whole, tokens=[whole.tokens[0] + 1, *whole.tokens[1:]])  # another prompt
    with pytest.raises(base.InputError, match=f"task {whole.seed}: its environment answers otherwise"):
        play(tasks=[rollout.Task(whole.seed, 0, other, 1)])


def test_estimates_agree_with_the_probabilities_of_the_model_and_add_up_to_the_return():
    words = WORDS[::2]
    sampler = dataclasses.replace(SAMPLER, env=Guess(frozenset(words)), slots=64)
    (transcript,) = rollout.collect(PARAMS, [rollout.Task(0, 0)], KEY, sampler)[1]
    turns = monte_carlo.along(PARAMS, transcript, jax.random.key(5), sampler, count=512)
    before = transcript.tokens[: transcript.turns[1].start]
    ids = [sampler.chat.encode(word) for word in words]
    logp = annotate.continuation_logp(PARAMS, sampler.config, [before] * len(ids), ids, chunk=64)
    exact = float(np.exp(logp).sum())
    assert 0.1 < exact < 0.9
    error = np.sqrt(exact * (1 - exact) / 512)
    assert abs(turns[1].value.mean - exact) < 4 * error
    width = turns[1].value.high - turns[1].value.low
    assert width == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert turns[1].q == (transcript.turns[1].reward,) * 3  # nothing follows the last turn
    total = turns[0].value.mean + sum(turn.adv.mean for turn in turns.values())
    assert total == pytest.approx(transcript.score, abs=1e-12)
    for turn in turns.values():
        assert turn.adv.high - turn.adv.low >= turn.value.high - turn.value.low - 1e-12
    with pytest.raises(ValueError, match="at least 2 continuations"):
        monte_carlo.along(PARAMS, transcript, KEY, sampler, count=1)


def test_every_second_turn_asks_for_the_values_around_it_only(monkeypatch):
    asked = []

    def fake(params, places, key, sampler, *, count):
        asked.extend(place.turns for place in places)
        return np.zeros((len(places), count)), {}

    monkeypatch.setattr(continuations, "returns_from", fake)
    transcript = base.Transcript(0, 0, turns=[base.TurnRecord([], "", 0, 1, 0, base.STOP)] * 5)
    assert list(monte_carlo.along(None, transcript, KEY, SAMPLER, count=4, every=2)) == [0, 2, 4]
    assert asked == [0, 1, 2, 3, 4, 5]
