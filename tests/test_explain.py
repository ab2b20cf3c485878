"""Recorded conversations: read, rendered as the chat renders them, scored and credited, shown."""

import json

import numpy as np
import pytest

from configs import default
from experiments import explain
from rsi_jax import base
from rsi_jax.model import chat as chat_lib
from rsi_jax.model import tokenizer
from rsi_jax.train import loop, recorded, samples, setup
from tests import tiny_files

SYSTEM = {"role": "system", "content": "tools edit sed list ls"}
FAILED = [
    SYSTEM,
    {"role": "user", "content": "start list"},
    {"role": "assistant", "content": "call dir"},
    {"role": "user", "content": "tool not found list", "reward": -0.5},
]
GOOD = [*FAILED[:2], {"role": "assistant", "content": "call ls", "reward": 1}]
WON = [*FAILED, {"role": "assistant", "content": "call ls", "reward": 1}]


def write(path, *lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def words() -> chat_lib.Chat:
    config = default.get_config()
    return chat_lib.word_chat(tokenizer.WordTokenizer(setup.make_env(config).words()))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "Expecting property name"),
        ("3", "not {"),
        ({"prompt": "a"}, "no 'messages' in it"),
        ({"messages": [{"role": "user"}]}, "no 'content' in it"),
        ({"messages": [{"role": "user", "content": None}]}, "message 1 needs 'role' and 'content' as text"),
        ({"messages": ["hello"]}, "must be|indices"),
        ({"messages": [SYSTEM]}, "no assistant message"),
        ({"messages": GOOD[2:]}, "message 1 is the assistant's"),
        ({"messages": [*GOOD, GOOD[-1]]}, "message 4 is the assistant's"),
        ({"messages": [*GOOD[:2], GOOD[2] | {"reward": "1"}]}, "reward of message 3 is '1'"),
        ('{"messages": [{"role": "user", "content": "a", "reward": NaN}]}', "reward of message 1 is nan"),
    ],
)
def test_a_bad_line_names_file_and_line(tmp_path, line, why):
    path = write(tmp_path / "t.jsonl", {"messages": GOOD}, "", line)
    with pytest.raises(base.InputError, match=f"t.jsonl line 3: .*({why})"):
        recorded.read(path)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(base.InputError, match="cannot be read"):
        recorded.read(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(base.InputError, match="holds no conversations"):
        recorded.read(write(tmp_path / "t.jsonl", ""))


def test_groups_are_named_or_of_one_prompt(tmp_path):
    lines = [{"messages": GOOD}, {"messages": GOOD, "group": 7}, {"messages": WON}, {"messages": WON, "group": 7}]
    conversations = recorded.read(write(tmp_path / "t.jsonl", *lines))
    rollout, transcripts = recorded.render(conversations, words(), capacity=64, path="t.jsonl")
    assert rollout.group_B.tolist() == [0, 1, 0, 1] and [t.seed for t in transcripts] == [1, 2, 3, 4]


def test_a_conversation_is_rendered_as_the_model_would_have_seen_it(tmp_path):
    chat = words()
    path = write(tmp_path / "t.jsonl", {"messages": [*WON, {"role": "user", "content": "done"}]})
    (conversation,) = recorded.read(path)
    rollout, (transcript,) = recorded.render([conversation], chat, capacity=64, path="t.jsonl")
    text = chat.tokenizer.decode(transcript.tokens)
    assert text == "tools edit sed list ls start list call dir <end> tool not found list call ls <end> done"
    s = rollout.segments
    assert s.kind_BS[0].tolist() == [base.PROMPT, base.ACTION, base.OBSERVATION, base.ACTION, base.OBSERVATION]
    assert s.reward_BS[0].tolist() == [0, 0, -0.5, 1, 0] and s.discount_BS[0].tolist() == [1, 1, 1, 1, 0]
    assert s.finish_BS[0].tolist() == [base.NOT_SAMPLED, base.STOP, base.NOT_SAMPLED, base.ENV, base.NOT_SAMPLED]
    first, second = transcript.turns
    assert transcript.tokens[second.start : second.start + second.length] == chat.action("call ls")
    assert chat.tokenizer.decode(transcript.tokens[second.insert_at : second.start]) == "tool not found list"
    assert first.reply[0]["content"] == "tool not found list" and transcript.score == 0.5


def test_ids_are_those_of_a_real_chat_template(tmp_path):
    chat = chat_lib.Chat(tiny_files.tokenizer(), tiny_files.CHATML)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hey"}]
    messages += [{"role": "user", "content": "sys"}, {"role": "assistant", "content": "user"}]
    (conversation,) = recorded.read(write(tmp_path / "t.jsonl", {"messages": messages}))
    _, (transcript,) = recorded.render([conversation], chat, capacity=512, path="t.jsonl")
    turns = [("system", "You help"), ("user", "hello"), ("assistant", "hey"), ("user", "sys"), ("assistant", "user")]
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    assert chat.tokenizer.decode(transcript.tokens) == text.removesuffix("\n")


def test_what_does_not_fit_names_its_line(tmp_path):
    conversations = recorded.read(write(tmp_path / "t.jsonl", {"messages": GOOD}, {"messages": WON}))
    with pytest.raises(base.InputError, match="line 2: 17 tokens, the context holds 12; raise rollout.capacity"):
        recorded.render(conversations, words(), capacity=12, path="t.jsonl")
    unknown = [*GOOD[:2], {"role": "assistant", "content": "soup"}]
    odd = recorded.read(write(tmp_path / "t.jsonl", {"messages": unknown}))
    with pytest.raises(base.InputError, match="t.jsonl line 1: unknown word 'soup'"):
        recorded.render(odd, words(), capacity=64, path="t.jsonl")


def test_traces_are_scored_hinted_and_credited(tmp_path):
    config = default.get_config()
    config.model.update(width=16, layers=1, heads=2, kv_heads=2, head_size=8, ffn=16)
    config.rl.micro_batch = 2
    model, params, chat = setup.make_model(config, setup.make_env(config), value_head=False)
    conversations = recorded.read(write(tmp_path / "t.jsonl", *({"messages": m} for m in (GOOD, WON, WON, FAILED))))
    rollout, transcripts = recorded.render(conversations, chat, capacity=64, path="t.jsonl")
    batch, entropy_BT = recorded.score(config, params, model, chat, rollout, transcripts)
    rules = list(config.feedback.rules)
    traces = samples.of_batch(batch, range(4), chat, rules, title="line", entropy_BT=entropy_BT)
    assert [one.title for one in traces] == ["line 1", "line 2", "line 3", "line 4"]
    assert [len(one.inserts) for one in traces] == [0, 1, 1, 1]
    (insert,) = traces[1].inserts
    assert (insert.text, insert.source) == ("reminder tools edit sed list ls", "failed_tool_call")
    span = range(insert.span_start, insert.span_start + insert.span_length)
    assert [traces[1].tokens[i] for i in span] == ["call", "dir", "<end>"]
    assert all(0 < traces[1].teacher_prob[i] < 1 and 0 < traces[1].student_prob[i] < 1 for i in span)
    assert all(0 < traces[1].entropy[i] < np.log(chat.tokenizer.vocab_size) + 1e-5 for i in span)
    returns = np.array([1.0, 0.5, 0.5, -0.5])
    credit = [one.adv[one.kinds.index("action")] for one in traces]
    assert np.allclose(credit, returns - returns.mean(), atol=1e-6)  # dr_grpo: one group, of one prompt
    title, group, turns, tokens, reward, total, logp, hints, gain = explain.row_of(traces[1])
    assert (title, group, turns, reward, hints) == ("line 2", 0, 2, 0.5, 1)
    assert logp < 0 and gain is not None and explain.row_of(traces[0])[-1] is None


def test_the_parameters_of_a_run_are_those_of_its_last_stage(tmp_path):
    params = {"kernel": np.arange(3.0, dtype=np.float32)}
    with pytest.raises(base.InputError, match="holds no checkpoint of a run"):
        loop.last_params(tmp_path, params)
    for index, name, step in ((0, "lm", 8), (2, "rl", 1), (10, "rl", 4), (11, "rl", None)):
        saved = loop.checkpoints(tmp_path, index, name, 2)
        saved.folder.mkdir(parents=True)
        if step is not None:
            saved.save(step, {"params": {"kernel": params["kernel"] + index}, "opt": np.zeros(2)}, {})
    assert loop.last_params(tmp_path, params)["kernel"].tolist() == [10, 11, 12]
    with pytest.raises(base.InputError, match="params/kernel saved float32\\[3\\], wanted float32\\[4\\]"):
        loop.last_params(tmp_path, {"kernel": np.zeros(4, np.float32)})
