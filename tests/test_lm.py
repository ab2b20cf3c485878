"""The lm stage: packing is as good as rows apart, a resumed cursor reads the same, and bad files name their line."""

import json
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rsi_jax import base
from rsi_jax.envs import tool_calls
from rsi_jax.train import lm
from tests import tiny

CONFIG = tiny.config(vocab=tiny.CHAT.tokenizer.vocab_size, window=9)
ROW = 100
KNOBS = dict(data="demonstrations", path="", batch_rows=3, row_tokens=ROW, short_horizon=3, hinted_horizon=4)
KNOBS |= dict(short_share=0.5, long_recall=False)


def batches(seed=0, **changes):
    env = {None: tool_calls.make(horizon=8, listed=4)}
    make_env = lambda horizon: env.get(horizon) or tool_calls.make(horizon=horizon, listed=4)  # noqa: E731
    return lm.batches(types.SimpleNamespace(**(KNOBS | changes)), make_env, tiny.CHAT, seed)


def nats(params, batch):
    loss, count = lm.packed_loss(params, batch, config=CONFIG, chunk=16)
    return float(loss) * int(count), int(count)


def alone(ids, train):
    """A batch of one row that holds one document, and padding."""
    row = np.full((1, ROW), 7, np.int64)
    row[0, : len(ids)] = ids
    used = np.arange(ROW)[None] < len(ids)
    mask = np.zeros((1, ROW), bool)
    mask[0, : len(ids)] = train
    place = np.arange(ROW)[None] * used
    return {"tokens": row, "train": mask, "tokens_segment_ids": used.astype(int), "tokens_positions": place}


def documents(batch):
    """The documents of a packed batch: (ids, train) each."""
    found = []
    for row, segments in enumerate(batch["tokens_segment_ids"]):
        for segment in range(1, segments.max() + 1):
            here = segments == segment
            np.testing.assert_array_equal(batch["tokens_positions"][row][here], np.arange(here.sum()))
            found.append((batch["tokens"][row][here], batch["train"][row][here].astype(bool)))
    return found


def test_a_packed_batch_has_the_loss_of_its_documents_apart():
    params, batch = tiny.params(CONFIG), next(batches())
    docs = documents(batch)
    assert len(docs) > 4 and (batch["tokens_segment_ids"] == 0).any()
    total, count = nats(params, batch)
    apart = [nats(params, alone(*doc)) for doc in docs]
    assert count == sum(n for _, n in apart) == sum(int(train[1:].sum()) for _, train in docs)
    np.testing.assert_allclose(total, sum(x for x, _ in apart), rtol=1e-5)
    every = batch | {"train": np.ones_like(batch["train"])}  # the first word of a document has nothing before it
    total, count = nats(params, every)
    apart = [nats(params, alone(ids, np.ones(len(ids), bool))) for ids, _ in docs]
    assert count == sum(len(ids) - 1 for ids, _ in docs)
    np.testing.assert_allclose(total, sum(x for x, _ in apart), rtol=1e-5)
    nothing = batch | {"train": np.zeros_like(batch["train"])}
    assert nats(params, nothing) == (0.0, 0)


def test_long_demonstrations_have_hints_unless_they_are_to_teach_recall():
    (reminder,) = tiny.CHAT.encode("reminder")
    short = max(len(ids) for ids, _ in documents(next(batches(short_share=1.0))))

    def hinted(**changes):
        reader = batches(short_share=0.5, **changes)
        docs = [ids for _ in range(4) for ids, _ in documents(next(reader)) if len(ids) > short]
        assert len(docs) > 8
        return {bool((ids == reminder).any()) for ids in docs}

    assert hinted() == {True}
    assert hinted(long_recall=True) == {True, False}


def test_a_document_predicts_the_actions_that_are_to_be_learnt():
    env = tool_calls.make(horizon=8, listed=4)
    for hinted, bare in ((False, True), (True, False), (True, True)):
        steps = env.demonstration(5, hinted=hinted, train_bare=bare)
        doc = lm.demonstration(env, tiny.CHAT, 5, hinted=hinted, train_bare=bare)
        wanted = sum((tiny.CHAT.action(step.action) for step in steps if step.train), [])
        assert doc.ids[doc.train].tolist() == wanted and doc.ids.dtype == np.int32
        text = tiny.CHAT.tokenizer.decode(doc.ids)
        assert text.count("<hint> reminder tools") == sum(bool(step.hint) for step in steps)
        words = []
        for step in steps:  # a reminder stands before the message that the action answers
            *before, last = (message["content"] for message in step.shown)
            words += [*before, *([f"<hint> {step.hint} </hint>"] if step.hint else []), last, step.action, "<end>"]
        assert text == " ".join(words)


def test_a_batch_comes_from_the_seed_and_a_cursor_resumes_it():
    data, same, other = batches(), batches(), batches(seed=1)
    first = [next(data) for _ in range(4)]
    for batch in first:
        tiny.assert_close(batch, next(same))
    assert not np.array_equal(first[0]["tokens"], next(other)["tokens"])
    data = batches()
    next(data), next(data)
    state = data.get_state()
    cursor = json.loads(json.dumps(state.decode() if isinstance(state, bytes) else state))  # as a checkpoint keeps it
    resumed = batches()
    resumed.set_state(cursor.encode() if isinstance(state, bytes) else cursor)
    for batch in first[2:]:
        tiny.assert_close(batch, next(resumed))


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def said(*pairs):
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_conversations_predict_every_assistant_message_and_shuffle_by_the_seed(tmp_path):
    lines = [said(("system", "tools"), ("user", f"start {w}"), ("assistant", f"ok {w}"), ("user", "done"),
                  ("assistant", "ok")) for w in tool_calls.SMALL_TALK]  # fmt: skip
    path = write(tmp_path / "chats.jsonl", *lines, "", "  ")
    docs = sum((documents(batch) for batch, _ in zip(batches(data="jsonl", path=path), range(2), strict=False)), [])
    texts = {tiny.CHAT.tokenizer.decode(ids) for ids, _ in docs}
    assert texts == {f"tools start {w} ok {w} <end> done ok <end>" for w in tool_calls.SMALL_TALK}
    for ids, train in docs:
        assert tiny.CHAT.tokenizer.decode(ids[train]).split()[1:] == [
            tiny.CHAT.tokenizer.decode(ids[4:5]),
            "<end>",
            "ok",
            "<end>",
        ]
    for order in (0, 1):
        data = batches(seed=order, data="jsonl", path=path)
        tiny.assert_close(next(data), next(batches(seed=order, data="jsonl", path=path)))


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{"], "line 1: not"),
        ([said(("assistant", "ok")), {"message": []}], "line 2: not .*'messages'"),
        ([said(("assistant", "ok")), "", {"messages": [{"role": "user"}]}], "line 3: not .*'content'"),
        ([said(("assistant", "ok")), {"messages": [3]}], "line 2: not"),
        ([{"messages": 3}], "line 1: not"),
        (["[1]"], "line 1: not"),
        ([said(("user", "ok"))], "line 1: no assistant message"),
        ([""], "chats.jsonl: no conversations"),
    ],
)
def test_a_bad_line_is_named(tmp_path, lines, says):
    with pytest.raises(base.InputError, match=says):
        lm.read_conversations(write(tmp_path / "chats.jsonl", *lines))


def test_what_cannot_be_read_is_named(tmp_path):
    for kind in ("jsonl", "text"):
        with pytest.raises(base.InputError, match="lm.path='nowhere': no such file"):
            batches(data=kind, path="nowhere")
    with pytest.raises(base.InputError, match="lm.data='csv' is none of"):
        batches(data="csv")
    with pytest.raises(base.InputError, match="a document has .* tokens, a row holds lm.row_tokens=8: raise it"):
        next(batches(row_tokens=8))


def test_plain_text_is_cut_into_rows(tmp_path):
    words = (list(tool_calls.SMALL_TALK) * 50)[: 3 * ROW + 1]
    path = write(tmp_path / "text.txt", " ".join(words))
    batch = next(batches(data="text", path=path))
    assert sorted(len(ids) for ids, _ in documents(batch)) == [ROW] * 3  # the last word alone predicts nothing
    assert all(train.all() for _, train in documents(batch))


def test_perplexity_is_of_the_mean_nats_over_rows_that_start_afresh():
    params, ids = tiny.params(CONFIG), np.random.default_rng(0).integers(5, 40, 2 * ROW + 10).tolist()
    pieces = [ids[:ROW], ids[ROW : 2 * ROW], ids[2 * ROW :]]
    total, count = np.sum([nats(params, alone(piece, [True] * len(piece))) for piece in pieces], axis=0)
    assert count == len(ids) - 3
    found = lm.perplexity(params, ids, config=CONFIG, chunk=16, row_tokens=ROW)
    np.testing.assert_allclose(found, np.exp(total / count), rtol=1e-5)


def test_updates_lower_the_loss_and_leave_the_rest_alone():
    optimizer = optax.adam(0.01)
    step = lm.make_update(CONFIG, optimizer, clip=1.0, chunk=64)
    params, batch = tiny.params(CONFIG), next(batches())
    state = base.TrainState(jnp.int32(0), tiny.copy(params), optimizer.init(params))
    losses = []
    for _ in range(15):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0] and state.step == 15
    np.testing.assert_allclose(losses[0] * int(metrics["tokens"]), nats(params, batch)[0], rtol=1e-4)
