"""Chains as they are sampled: rows that replay, one environment, rewards once; and a run that trains on them."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from configs import default
from rsi_jax import annotate, base, chains, rollout, sharding, store, train
from rsi_jax.envs import Reply
from rsi_jax.train import present, samples, setup
from tests import tiny
from tests.test_train_app import assert_diagnosed
from tests.test_train_app import tiny as tiny_config

CAPACITY, ROWS, ASK = 30, 3, "reminder tools"
WORDS = tiny.ENV.words()


@dataclasses.dataclass(frozen=True)
class Talk:
    """Counts its turns: 2 to 9 of them, in words drawn from the seed; 0.25 for each, and 1 for the last."""

    max_turns = 9

    def _words(self, seed, turn, count):
        rng = np.random.default_rng([seed, turn])
        return " ".join(rng.choice(WORDS, count))

    def reset(self, seed):
        first = base.Message(role="system", content=self._words(seed, 10, 3))
        return (seed, 0), (first, base.Message(role="user", content=self._words(seed, 11, 2)))

    def step(self, state, text, finish):
        seed, turn = state
        done = turn == 1 + seed % 8
        long = 15 * (seed == 9 and turn == 1)  # fits a new context only
        shown = () if done else (base.Message(role="tool", content=self._words(seed, turn, 3 + turn % 2 + long)),)
        return (seed, turn + 1), Reply(shown, 1.0 if done else 0.25, done, 1000 * seed + turn, {"turn": turn})


SAMPLER = dataclasses.replace(
    tiny.sampler(Talk(), capacity=CAPACITY, slots=4, max_tokens=2),
    chains=rollout.Chains(rows=ROWS, at=20, prompt=ASK, tokens=4, shown="noted {summary}"),
)
TASKS = [rollout.Task(seed, seed % 3) for seed in (7, 0, 1, 9, 5, 15, 4, 2)]
PARAMS = tiny.talker(SAMPLER.config)
KEY = jax.random.key(1)


def play(**changes):
    return rollout.collect(PARAMS, TASKS, KEY, dataclasses.replace(SAMPLER, **changes))


@pytest.fixture(scope="module")
def played():
    made, texts = play()
    used = [sum(bool(one.turns) for one in texts[i : i + ROWS]) for i in range(0, len(texts), ROWS)]
    assert set(used) == {1, 2, 3} and {one.truncated for one in chains.episodes(texts)} == {False, True}
    return made, texts


def summaries(texts):
    return [(row, turn) for row, one in enumerate(texts) for turn in one.turns if turn.summary]


def test_the_environment_goes_on_and_its_rewards_land_once(played):
    made, texts = played
    whole = chains.episodes(texts)
    assert [one.seed for one in whole] == [task.seed for task in TASKS]
    for chain, (one, task) in enumerate(zip(whole, TASKS, strict=True)):
        assert [turn.info["turn"] for turn in one.turns] == list(range(len(one.turns)))
        assert one.truncated != (len(one.turns) == 2 + task.seed % 8)
        rewards = [0.25] * len(one.turns)
        if not one.truncated:
            rewards[-1] = 1.0
        np.testing.assert_allclose(np.asarray(made.return_B)[chain * ROWS : (chain + 1) * ROWS].sum(), sum(rewards))
    joined = chains.join(made, ROWS)
    np.testing.assert_allclose(joined.return_B, [one.score for one in whole])
    s = jax.tree.map(np.array, joined.segments)
    ended = np.array([not one.truncated for one in whole])
    last = [np.flatnonzero((k == base.ACTION) & (n > 0))[-1] for k, n in zip(s.kind_BS, s.length_BS, strict=True)]
    last_B = (np.arange(len(last)), last)
    np.testing.assert_array_equal(s.discount_BS[last_B], np.where(ended, 0.0, 1.0))
    assert (s.finish_BS[last_B][~ended] == base.LENGTH).all()
    s.discount_BS[last_B] = 1.0
    assert (s.discount_BS == 1).all()  # the end of a row is not the end of its episode


def test_rows_are_laid_out_chain_by_chain(played):
    made, texts = played
    B = len(TASKS) * ROWS
    assert made.tokens_BT.shape == (B, CAPACITY) and len(texts) == B
    np.testing.assert_array_equal(made.chain_B, np.arange(B) // ROWS)
    np.testing.assert_array_equal(made.group_B, np.repeat([task.group for task in TASKS], ROWS))
    np.testing.assert_array_equal(made.weight_B, [float(bool(one.tokens)) for one in texts])
    np.testing.assert_array_equal(made.length_B, [len(one.tokens) for one in texts])
    assert [one.part for one in texts] == list(range(ROWS)) * len(TASKS)
    s = jax.tree.map(np.asarray, made.segments)
    for row, one in enumerate(texts):
        n = len(one.turns)
        kinds = [base.PROMPT, base.ACTION, *[base.OBSERVATION, base.ACTION] * (n - 1)] if n else []
        assert s.kind_BS[row, : 2 * n].tolist() == kinds and not s.length_BS[row, 2 * n :].any()
        assert [turn.summary for turn in one.turns[:-1]] == [False] * max(0, n - 1)  # a summary ends its row
        for k, turn in enumerate(one.turns):
            assert (s.start_BS[row, 2 * k + 1], s.length_BS[row, 2 * k + 1]) == (turn.start, turn.length)
            assert s.reward_BS[row, 2 * k + 1] == turn.reward and s.finish_BS[row, 2 * k + 1] == turn.finish
            assert np.asarray(made.mask_BT)[row, turn.start : turn.start + turn.length].all()
    assert np.asarray(made.mask_BT).sum() == sum(turn.length for one in texts for turn in one.turns)


def test_when_a_summary_is_asked_for_and_what_the_next_row_shows(played):
    _, texts = played
    chat, asked = tiny.CHAT, summaries(texts)
    assert {turn.length for _, turn in asked} >= {4} and {turn.finish for _, turn in asked} == {base.STOP, base.LENGTH}
    carried = 0
    for one in texts:
        for before, turn in zip(one.turns, one.turns[1:], strict=False):
            due = chat.continue_(before.reply, last_id=one.tokens[before.start + before.length - 1])
            full = before.start + before.length + len(due.ids) >= SAMPLER.chains.at
            assert turn.summary == (full and one.part < ROWS - 1)
    for row, turn in asked:
        one, after = texts[row], texts[row + 1]
        acted = one.turns[-2]
        ask = base.Message(role="user", content=ASK)
        assert turn.shown in ([*acted.reply, ask], [ask]) and turn.reply == [] and turn.info == {} and turn.reward == 0
        carried += turn.shown == [ask]
        _, opening = Talk().reset(one.seed)
        special = {*chat.tokenizer.SPECIALS}
        said = " ".join(word for word in turn.text.split() if word not in special)
        told = base.Message(role="user", content=f"noted {said}")
        messages = [*opening, told, *acted.reply]
        assert after.turns[0].shown == messages
        assert after.tokens[: after.turns[0].start] == chat.start(messages).ids
    assert carried  # an observation that does not fit is shown by the next row alone


def test_every_row_replays_under_the_policy_and_its_log_probs_are_as_sampled(played):
    made, _ = played
    logp_BT, _ = annotate.score_rollout(PARAMS, made, config=SAMPLER.config)
    np.testing.assert_allclose(logp_BT, made.logp_BT, atol=1e-4)
    assert (made.logp_BT[np.asarray(made.mask_BT)] < 0).all()


def test_any_number_of_slots_gives_the_same_chains_and_rows_have_keys_of_their_own(played):
    made, texts = played
    other, again = play(slots=1)
    assert again == texts
    tiny.assert_close(made.replace(logp_BT=0), other.replace(logp_BT=0))
    np.testing.assert_allclose(other.logp_BT, made.logp_BT, atol=1e-5)
    firsts = [[texts[i + part] for i in range(0, len(texts), ROWS)] for part in range(2)]
    for part, found in enumerate(firsts):  # what the key of the first row draws after the prompt of each
        used = [one if one.turns else firsts[0][i] for i, one in enumerate(found)]
        turns = [(one.tokens[: one.turns[0].start], one.turns[0]) for one in used]
        drawn = rollout.complete(PARAMS, [prompt for prompt, _ in turns], KEY, SAMPLER)
        said = [tiny.CHAT.text(ids) for ids, _ in drawn]
        assert (said == [turn.text for _, turn in turns]) == (part == 0)
    two = dataclasses.replace(SAMPLER.chains, rows=2)
    _, again = play(chains=two)
    assert again[::2] == texts[::ROWS]
    same = rollout.Chains(rows=ROWS, at=20, prompt=ASK, tokens=SAMPLER.sampling.max_tokens)
    assert any(turn.summary for one in play(chains=same)[1] for turn in one.turns)  # sampled with the actions


def test_without_chains_nothing_is_summarised():
    alone, texts = play(chains=rollout.Chains())
    never, again = play(chains=dataclasses.replace(SAMPLER.chains, rows=1))
    assert texts == again and not summaries(texts) and len(texts) == len(TASKS)
    tiny.assert_close(alone, never)


def test_a_summary_that_leaves_no_room_truncates_its_episode():
    wordy = dataclasses.replace(SAMPLER.chains, shown="noted {summary} " + " ".join([WORDS[0]] * 30))
    made, texts = play(chains=wordy)
    cut = [(row, turn) for row, turn in summaries(texts)]
    assert cut
    for row, turn in cut:
        assert texts[row].truncated and turn.finish == base.LENGTH and not texts[row + 1].turns
    lasts = [one.turns[-1].info["turn"] for one in chains.episodes(texts)]
    assert len(lasts) == len(TASKS)


def test_an_episode_in_rows_is_not_played_on():
    with pytest.raises(base.InputError, match="rollout.summarise_at"):
        rollout.collect(PARAMS, [rollout.Task(0, 0, base.Transcript(0, 0))], KEY, SAMPLER)


# --- a run -----------------------------------------------------------------------------------------------------------


def chained(folder):
    config = tiny_config(folder)
    config.rollout.update(capacity=64, summarise_at=40, chain_rows=3, summary_prompt=ASK, summary_tokens=6)
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.chain_rows": 1}, "rollout.chain_rows=1 leaves no row"),
        ({"rollout.summarise_at": 64}, "rollout.summarise_at=64 must be below rollout.capacity=64"),
        ({"rollout.summary_shown": "noted"}, "rollout.summary_shown='noted' does not show {summary}"),
        ({"credit.name": "vineppo"}, "credit.name='vineppo' plays on from the middle"),
        ({"credit.name": "tree_grpo"}, "credit.name='tree_grpo' plays on from the middle"),
        ({"rl.micro_batch": 4}, "rl.micro_batch=4 is no multiple of rollout.chain_rows=3"),
        ({"rollout.summary_prompt": "pray sum up"}, "rollout.summary_prompt: the model cannot read it"),
    ],
)
def test_what_does_not_go_with_chains_is_refused_by_name(tmp_path, changes, words):
    config = chained(tmp_path)
    config.update_from_flattened_dict(changes)
    with pytest.raises(base.InputError) as error:
        setup.make_parts(config)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_run_trains_on_chains(tmp_path, monkeypatch):
    config = chained(tmp_path / "run")
    config.stages = ("rl",)
    config.rl.update(updates=2, minibatches=2, micro_batch=6, dynamic_rounds=1, overlong_buffer=2, overlong_length=400)
    config.evaluation.update(every=0, gain_turns=0)
    one_device = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(setup.sharding, "make_mesh", one_device)
    folder = present.open_folder(config, name="tiny")
    results = train.run(config, folder, defaults=default.get_config())
    assert results["parity"] < 1e-3 and np.isfinite(results["after"]["return"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "rl"]
    assert len(steps) == 2
    assert_diagnosed(steps)
    for line in steps:
        assert 1 < line["chains/rows"] <= 3 and 1 <= line["chains/summary_tokens"] <= 6
        assert 0 <= line["chains/truncated"] <= 8 and line["credit/masked_rows"] == 0
    archive = store.Archive(folder / "rollouts")
    (step,) = archive.steps()
    columns = archive.read(["chain_B", "weight_B"], step)
    assert columns["chain_B"].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    kept = archive.transcripts(step)
    assert [one["part"] for one in kept] == [0, 1, 2] * 3
    assert any(turn["summary"] for one in kept for turn in one["turns"])
    assert len(samples.read(folder, samples.LAST)) == 2 and "chains/rows" in (folder / "report.html").read_text()
