"""The questions environment: the file, the split, the judge of answers."""

import json

import pytest

from rsi_jax import base
from rsi_jax.envs import questions


def judged(question: str, text: str, **knobs) -> base.TurnRecord:
    env = questions.make(split="all", **knobs)
    state = next(q for q in questions.load() if q.text == question)
    _, reply = env.step(state, text, base.STOP)
    assert reply.done and reply.messages == () and reply.reward == float(reply.info["correct"])
    return reply.info


def test_the_file_is_valid():
    rows = [json.loads(line) for line in questions.FILE.read_text(encoding="utf-8").splitlines()]
    assert len(rows) >= 150
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        assert set(row) == {"question", "answers"}
        assert row["question"].endswith("?") and row["question"].strip() == row["question"]
        assert row["answers"] and all(isinstance(a, str) and a.strip() == a and a for a in row["answers"])
        assert not questions.names(row["question"], tuple(row["answers"])), f"{row['question']} gives its answer away"


def test_the_splits_share_nothing_and_make_the_whole():
    train, held_out = map(set, (questions.split("train"), questions.split("held_out")))
    assert not train & held_out and train | held_out == set(questions.load())
    assert questions.load()[3] in held_out and questions.load()[4] in train
    assert len(held_out) == len(questions.load()) // 4


def test_evaluation_asks_only_held_out_questions():
    env = questions.make().held_out()
    asked = {env.reset(1_000_003 + i)[0] for i in range(len(questions.split("held_out")))}
    assert asked == set(questions.split("held_out"))
    assert not asked & {questions.make().reset(seed)[0] for seed in range(1000)}
    assert questions.make(split="all").held_out().split == "all"


def test_a_seed_names_one_task():
    env = questions.make()
    assert env.reset(2**40 - 1) == env.reset(2**40 - 1)
    _, messages = env.reset(0)
    assert messages == ({"role": "user", "content": questions.load()[0].text},)


@pytest.mark.parametrize(
    "question, text, right",
    [
        ("What is the capital of France?", "The capital is PARIS.", True),
        ("What is the capital of France?", "Pärís, of course", True),
        ("What is the capital of France?", "The Parisians know.", False),
        ("What is the capital of France?", "", False),
        ("What is the capital of Mexico?", "Mexico", False),
        ("What is the capital of Mexico?", "It is Mexico City", True),
        ("What is the chemical formula of water?", "H₂O", True),
        ("What gas do plants take in from the air?", "CO₂", True),
        ("How many legs does a dog have?", "Four.", True),
        ("How many legs does a dog have?", "It has 14 legs.", False),
        ("At what temperature in degrees Celsius does water boil?", "At 100°C.", True),
    ],
)
def test_answers_are_whole_words_whatever_their_case_and_accents(question, text, right):
    assert judged(question, text)["correct"] is right


def test_a_list_of_candidates_is_no_answer():
    guess = "Paris, Berlin, Tokyo, Cairo"
    assert judged("What is the capital of France?", guess)["correct"]
    assert judged("What is the capital of France?", guess + ", Moscow") == {
        "question": "What is the capital of France?",
        "correct": False,
        "named": 4,
        "words": 5,
        "ended": True,
    }
    assert judged("What is the capital of France?", guess + ", Moscow", max_named=4)["correct"]
    assert not judged("What is the capital of France?", "Paris or Berlin", max_named=0)["correct"]


def test_reward_does_not_read_the_length():
    for text in ("Paris", "Paris " + "and so on " * 200):
        assert judged("What is the capital of France?", text)["correct"]


def test_the_summary_is_of_all_messages():
    env, transcripts = questions.make(split="all"), []
    for i, (text, finish) in enumerate([("It is Paris", base.STOP), ("well well", base.LENGTH)]):
        state, shown = env.reset(i)
        _, reply = env.step(state, text, finish)
        turn = base.TurnRecord(list(shown), text, 0, 1, 0, finish, [], reply.reward, reply.info)
        transcripts.append(base.Transcript(i, i, turns=[turn]))
    assert questions.summary(transcripts) == {"success": 0.5, "ended": 0.5, "words": 2.5}


@pytest.mark.parametrize("knobs", [{"split": "test"}, {"max_named": -1}])
def test_bad_knobs_are_named(knobs):
    with pytest.raises(base.InputError, match=f"env.questions.{next(iter(knobs))}="):
        questions.make(**knobs)
