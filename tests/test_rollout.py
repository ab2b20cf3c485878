"""The host loop: one exact stream per episode, every sampled token masked once, and nothing depends on the slots."""

import dataclasses

import jax
import numpy as np
import pytest

from rsi_jax import annotate, base, rollout
from rsi_jax.envs import Reply
from tests import tiny

CAPACITY = 25
WORDS = tiny.ENV.words()


@dataclasses.dataclass(frozen=True)
class Talk:
    """Talks back for 1 to 4 turns, in words drawn from the seed; 0.25 for every turn, and 1 for the last."""

    opening: int = 0  # words added to the prompt

    max_turns = 4

    def _words(self, seed, turn, count):
        rng = np.random.default_rng([seed, turn])
        return " ".join(rng.choice(WORDS, count))

    def reset(self, seed):
        first = base.Message(role="system", content=self._words(seed, 10, 3 + seed % 2 + self.opening))
        return (seed, 0), (first, base.Message(role="user", content=self._words(seed, 11, 2)))

    def step(self, state, text, finish):
        seed, turn = state
        done = turn == seed % 4
        info = {"heard": text, "finish": finish}
        shown = () if done else (base.Message(role="tool", content=self._words(seed, turn, 4 + turn % 2)),)
        return (seed, turn + 1), Reply(shown, 1.0 if done else 0.25, done, 1000 * seed + turn, info)


SAMPLER = tiny.sampler(Talk(), capacity=CAPACITY, slots=2)
TASKS = [rollout.Task(seed, seed // 2 % 4) for seed in (3, 3, 0, 1, 2, 7, 6, 4, 8, 12, 5, 0)]
PARAMS = tiny.talker(SAMPLER.config)
KEY = jax.random.key(1)


def play(slots=2, params=PARAMS, tasks=TASKS, **knobs):
    return rollout.collect(params, tasks, KEY, dataclasses.replace(SAMPLER, slots=slots), **knobs)


@pytest.fixture(scope="module")
def played():
    ticks = []
    made, transcripts = play(tick=ticks.append)
    kinds = {turn.finish for transcript in transcripts for turn in transcript.turns}
    assert kinds == {base.STOP, base.LENGTH, base.ENV} and {t.truncated for t in transcripts} == {True, False}
    assert sum(ticks) == sum(turn.length for transcript in transcripts for turn in transcript.turns)
    return made, transcripts


def turns_of(transcripts):
    return [(row, turn) for row, transcript in enumerate(transcripts) for turn in transcript.turns]


def test_T36_the_stream_is_the_full_render_of_what_was_said(played):
    for transcript in played[1]:
        messages = []
        for turn in transcript.turns:
            messages += [*turn.shown, base.Message(role="assistant", content=turn.text)]
        full = tiny.CHAT.tokenizer.encode(tiny.CHAT._render(messages))
        assert transcript.tokens == full[: len(transcript.tokens)]
        assert len(full) - len(transcript.tokens) in (0, 1)  # a last message that was cut has no stop token
        for before, after in zip(transcript.turns, transcript.turns[1:], strict=False):
            assert after.shown == before.reply
            assert before.start + before.length <= after.insert_at < after.start


def test_T36_every_sampled_token_is_masked_exactly_once(played):
    made, transcripts = played
    want = np.zeros((len(TASKS), CAPACITY), int)
    for row, turn in turns_of(transcripts):
        want[row, turn.start : turn.start + turn.length] += 1
    assert want.max() == 1
    np.testing.assert_array_equal(np.asarray(made.mask_BT), want == 1)
    assert (made.logp_BT[want == 1] < 0).all() and not made.logp_BT[want == 0].any()
    assert (made.kept_mass_BT == 1).all()
    lengths = [len(transcript.tokens) for transcript in transcripts]
    np.testing.assert_array_equal(made.length_B, lengths)
    for row, transcript in enumerate(transcripts):
        np.testing.assert_array_equal(made.tokens_BT[row, : lengths[row]], transcript.tokens)


def test_T24_the_stop_token_is_sampled_and_masked_and_where_the_hint_may_stand(played):
    made, transcripts = played
    for row, turn in turns_of(transcripts):
        last = made.tokens_BT[row, turn.start + turn.length - 1]
        assert (last == tiny.CHAT.stop_id) == (turn.info["finish"] == base.STOP)
        full = turn.length == 3 or turn.start + turn.length == CAPACITY  # the budget of the turn, or of the context
        assert turn.text == turn.info["heard"] and (full or turn.info["finish"] == base.STOP)
        answered = made.tokens_BT[row, turn.insert_at : turn.start].tolist()
        assert answered == tiny.CHAT.encode(turn.shown[-1]["content"])  # the word template has no assistant header


def test_T21_the_reward_hears_what_the_policy_sampled_and_nothing_else(played):
    made, transcripts = played
    mask_BT = np.asarray(made.mask_BT)
    for row, turn in turns_of(transcripts):
        at = np.arange(CAPACITY)
        own = mask_BT[row] & (at >= turn.start) & (at < turn.start + turn.length)
        said = [token for token in made.tokens_BT[row, own].tolist() if token != tiny.CHAT.stop_id]
        assert turn.info["heard"] == tiny.CHAT.tokenizer.decode(said)


def test_T33_sampled_log_probs_are_those_of_whole_rows_after_an_update_too():
    for seed in (0, 5):  # every batch starts from an empty cache
        params = tiny.talker(SAMPLER.config, seed)
        made, _ = play(params=params)
        logp, entropy = annotate.score_rollout(params, made, config=SAMPLER.config)
        np.testing.assert_allclose(logp, made.logp_BT, atol=1e-4)
        mask = np.asarray(made.mask_BT)
        assert (np.asarray(entropy)[mask] > 0).all() and not np.asarray(entropy)[~mask].any()
    halved = made.replace(kept_mass_BT=np.where(mask, 0.5, 1.0).astype(np.float32))  # T28: half of the mass was kept
    again, _ = annotate.score_rollout(params, halved, config=SAMPLER.config)
    np.testing.assert_allclose(np.asarray(again - logp)[mask], np.log(2), atol=1e-5)


def test_segments_tell_kinds_rewards_and_how_it_ended(played):
    made, transcripts = played
    s = jax.tree.map(np.asarray, made.segments)
    assert s.kind_BS.shape == (len(TASKS), 2 * SAMPLER.env.max_turns)
    for row, transcript in enumerate(transcripts):
        used = s.length_BS[row] > 0
        n = len(transcript.turns)
        assert used.sum() == 2 * n and used[: 2 * n].all()
        assert s.kind_BS[row, : 2 * n].tolist() == [base.PROMPT, base.ACTION] + [base.OBSERVATION, base.ACTION] * (
            n - 1
        )
        assert (s.start_BS[row, 1 : 2 * n] == np.cumsum(s.length_BS[row])[: 2 * n - 1]).all()
        actions = slice(1, 2 * n, 2)
        assert s.reward_BS[row, actions].tolist() == [turn.reward for turn in transcript.turns]
        assert s.finish_BS[row, actions].tolist() == [turn.finish for turn in transcript.turns]
        assert s.anchor_BS[row, actions].tolist() == [1000 * transcript.seed + k for k in range(n)]
        ended = n == transcript.seed % 4 + 1
        assert transcript.truncated != ended
        assert s.discount_BS[row, 2 * n - 1] == (0.0 if ended else 1.0)  # cut by the context is not terminal
        assert s.finish_BS[row, 2 * n - 1] in ((base.ENV, base.LENGTH) if ended else (base.LENGTH,))
    np.testing.assert_allclose(made.return_B, [transcript.score for transcript in transcripts])
    np.testing.assert_array_equal(made.group_B, [task.group for task in TASKS])
    assert (made.weight_B == 1).all()
    assert [(t.seed, t.group) for t in transcripts] == [(task.seed, task.group) for task in TASKS]


def test_the_same_again_and_for_any_number_of_slots(played):
    made, transcripts = played
    again, texts = play()
    tiny.assert_close(made, again)
    assert texts == transcripts
    other, texts = play(slots=50)  # as many as there are tasks
    assert texts == transcripts
    tiny.assert_close(made.replace(logp_BT=0), other.replace(logp_BT=0))
    np.testing.assert_allclose(other.logp_BT, made.logp_BT, atol=1e-5)


def test_a_prompt_that_fills_the_context_names_the_task():
    sampler = dataclasses.replace(SAMPLER, env=Talk(opening=25))
    with pytest.raises(base.InputError, match=rf"task 3: its prompt has 31 tokens, the context holds {CAPACITY}"):
        rollout.collect(PARAMS, TASKS, KEY, sampler)


def test_trim_cuts_padding_only(played):
    made, _ = played
    used = int(np.max(made.length_B))
    for multiple in (1, 4, 64):
        cut = rollout.trim(made, multiple)
        width = cut.tokens_BT.shape[1]
        assert used <= width <= min(CAPACITY, used + multiple - 1)
        for name in ("tokens_BT", "logp_BT", "kept_mass_BT"):
            np.testing.assert_array_equal(getattr(cut, name), getattr(made, name)[:, :width])
        assert not made.tokens_BT[:, width:].any()
        np.testing.assert_array_equal(cut.mask_BT, np.asarray(made.mask_BT)[:, :width])


def test_complete_samples_one_turn_after_each_prompt_in_order(played):
    made, transcripts = played
    prompts = [transcript.tokens[: transcript.turns[0].start] for transcript in transcripts[:3]]  # two at a time
    found = rollout.complete(PARAMS, prompts, KEY, SAMPLER)
    assert len(found) == 3
    for row, (ids, finish) in enumerate(found):  # the rows of `collect` drew with the same keys at the same places
        first = transcripts[row].turns[0]
        assert ids == made.tokens_BT[row, first.start : first.start + first.length].tolist()
        assert finish == first.info["finish"]
