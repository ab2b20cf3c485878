"""A user's own task: prompts from a JSONL file, the reward from a function."""

import json

import numpy as np
import pytest

from configs import jsonl as jsonl_config
from rsi_jax import base
from rsi_jax.envs import jsonl
from rsi_jax.train import setup

REWARDS = """
import math

calls = []

def exact(prompt, completion, answer=None, **fields):
    calls.append((prompt, completion, answer, fields))
    return float(completion == answer)

def near(prompt, completion): return True
def array(prompt, completion): import numpy; return numpy.float32(0.5)
def raises(prompt, completion): raise KeyError("lost")
def nan(prompt, completion): return math.nan
def text(prompt, completion): return "0.5"
def nothing(prompt, completion): pass
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Makes the environment on some lines; the module of rewards has a name of its own in each test."""
    module = f"rewards_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)

    def make(*lines: object, reward: str = "exact", **knobs) -> jsonl.Jsonl:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return jsonl.make(path=str(path), reward=f"{module}:{reward}", **knobs)

    make.module = module
    return make


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2 + 2?"}]


def test_prompts_messages_and_fields_reach_the_function(task):
    import importlib

    env = task({"prompt": "1 + 1?", "answer": "2", "level": 3}, "", {"messages": CHAT, "answer": "4"})
    state, shown = env.reset(0)
    assert shown == ({"role": "user", "content": "1 + 1?"},)
    _, reply = env.step(state, "2", base.STOP)
    assert reply.done and reply.reward == 1.0 and reply.messages == () and reply.info == {"line": 1}
    state, shown = env.reset(3)  # modulo the lines
    assert list(shown) == CHAT
    assert env.step(state, "5", base.STOP)[1].reward == 0.0
    calls = importlib.import_module(task.module).calls
    assert calls == [("1 + 1?", "2", "2", {"level": 3}), (CHAT, "5", "4", {})]


@pytest.mark.parametrize(("reward", "value"), [("near", 1.0), ("array", 0.5)])
def test_whatever_is_a_number_is_a_reward(task, reward, value):
    env = task({"prompt": "a"}, reward=reward)
    assert env.step(env.reset(0)[0], "b", base.STOP)[1].reward == value


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("raises", "raised KeyError: 'lost'"),
        ("nan", "returned nan, no finite number"),
        ("text", "returned '0.5', no finite number"),
        ("nothing", "returned None, no finite number"),
    ],
)
def test_a_bad_reward_names_function_and_line(task, reward, words):
    env = task({"prompt": "a"}, {"prompt": "b"}, reward=reward)
    with pytest.raises(base.InputError) as error:
        env.step(env.reset(1)[0], "c", base.STOP)
    message = str(error.value)
    assert f"{task.module}:{reward}" in message and "prompts.jsonl line 2" in message and words in message
    assert "the last checkpoint is intact" in message and len(message.splitlines()) == 1


def test_a_field_that_the_function_does_not_take_is_named(task):
    env = task({"prompt": "a", "colour": "red"}, reward="near")
    with pytest.raises(base.InputError, match="line 1 raised TypeError.*colour"):
        env.step(env.reset(0)[0], "c", base.STOP)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{oops", "not JSON"),
        ("[1]", "either 'prompt' or 'messages'"),
        ({"question": "a"}, "either 'prompt' or 'messages'"),
        ({"prompt": "a", "messages": CHAT}, "either 'prompt' or 'messages'"),
        ({"prompt": 3}, "'prompt' is no text"),
        ({"prompt": " "}, "'prompt' is no text"),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user"}]}, "'role' and 'content'"),
        ({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, "nothing to answer"),
    ],
)
def test_a_bad_line_names_file_and_line(task, line, why):
    with pytest.raises(base.InputError) as error:
        task({"prompt": "fine"}, "", line)
    assert "prompts.jsonl line 3: " in str(error.value) and why in str(error.value)


def test_files_that_hold_nothing(task, tmp_path):
    with pytest.raises(base.InputError, match="holds no prompts"):
        task("", " ")
    with pytest.raises(base.InputError, match="no such file"):
        jsonl.make(path=str(tmp_path / "nowhere.jsonl"), reward="math:sqrt")
    with pytest.raises(base.InputError, match="data.path is empty"):
        jsonl.make(path="", reward="math:sqrt")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(base.InputError, match="not UTF-8"):
        jsonl.make(path=str(tmp_path / "latin.jsonl"), reward="math:sqrt")


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ("", "must be 'module:function'"),
        ("math.sqrt", "must be 'module:function'"),
        ("no_such_module:f", "cannot import no_such_module .ModuleNotFoundError"),
        ("math:sqqrt", "no function 'sqqrt'; did you mean 'sqrt'"),
        ("math:pi", "no function 'pi'"),
    ],
)
def test_a_function_that_cannot_be_imported(reward, why):
    with pytest.raises(base.InputError, match=why):
        jsonl.find_reward(reward)


def test_a_module_that_fails_to_load(tmp_path, monkeypatch):
    (tmp_path / "broken_rewards.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(base.InputError, match="cannot import broken_rewards .ZeroDivisionError"):
        jsonl.find_reward("broken_rewards:f")


def test_evaluation_reads_the_prompts_held_out(task, tmp_path):
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "unseen"}\n')
    env = task({"prompt": "seen"}, held_out_path=str(tmp_path / "held_out.jsonl"))
    assert env.held_out().reset(0)[1][0]["content"] == "unseen"
    assert env.held_out().held_out().reset(0)[1][0]["content"] == "unseen"
    plain = task({"prompt": "seen"})
    assert plain.held_out() is plain


def test_the_config_names_file_and_function(task, tmp_path):
    task({"prompt": "a"})
    config = jsonl_config.get_config()
    config.data.path, config.reward = str(tmp_path / "prompts.jsonl"), f"{task.module}:near"
    setup.check(config)
    env = setup.make_env(config)
    assert env.reset(0)[1][0]["content"] == "a" and env.max_turns == 1
    assert jsonl.summary([]) == {} and np.isfinite(env.step(env.reset(0)[0], "x", base.STOP)[1].reward)
