"""SmolLM2-135M-Instruct from its GGUF file against torch and transformers (tests/goldens/make_smollm2.py)."""

import hashlib
import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base
from rsi_jax.kernels import attention as attention_op
from rsi_jax.model import chat as chat_lib
from rsi_jax.model import gguf_file, transformer
from rsi_jax.model import tokenizer as tokenizer_lib

GOLDENS = Path(__file__).parent / "goldens" / "smollm2.json"
GOLDEN = json.loads(GOLDENS.read_text())
TOLERANCE = 1e-3  # of logits up to about 30, float32 on both sides


@pytest.fixture(scope="module")
def path():
    try:
        return gguf_file.find_smollm2()
    except base.InputError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def spoken(path):
    """The tokenizer and the chat, without the weights."""
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    tokenizer = tokenizer_lib.from_gguf(metadata, str(path))
    return tokenizer, chat_lib.Chat(tokenizer, metadata["tokenizer.chat_template"])


@pytest.fixture(scope="module")
def model(path):
    config, params, _, _ = gguf_file.load(path)
    return config, jax.tree.map(jnp.asarray, params)


def logits_BTV(model, rows):
    """All rows in one padded batch."""
    config, params = model
    longest = max(map(len, rows))
    tokens_BT = jnp.asarray([[*ids, *[0] * (longest - len(ids))] for ids in rows])
    positions_BT = jnp.broadcast_to(jnp.arange(longest), tokens_BT.shape)
    zero_BT = jnp.zeros_like(tokens_BT)
    ranges = attention_op.Ranges(zero_BT, zero_BT, zero_BT, positions_BT + 1)
    hidden_BTD = jax.jit(transformer.hidden_states, static_argnums=1)(params, config, tokens_BT, positions_BT, ranges)
    return np.asarray(hidden_BTD @ transformer.unembedding(params))


def test_goldens_are_of_this_file(path):
    assert hashlib.sha256(path.read_bytes()).hexdigest() == GOLDEN["file"]["sha256"]


def test_token_ids_of_texts(spoken):
    tokenizer, _ = spoken
    for name, golden in GOLDEN["texts"].items():
        assert tokenizer.encode(golden["text"]) == golden["ids"], name
        assert tokenizer.decode(golden["ids"]) == golden["text"], name
    assert tokenizer.replaced == 0
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.bos_id, tokenizer.add_bos) == (49152, 2, 1, False)
    assert tokenizer.stop_ids == {0, 2}  # <|endoftext|>, <|im_end|>


def test_token_ids_of_chats(spoken):
    """The default system prompt included; in one render, and in increments with the reply as sampled ids."""
    tokenizer, chat = spoken
    for name, golden in GOLDEN["chats"].items():
        assert chat.start(golden["messages"]).ids == golden["ids"], name
        assert tokenizer.decode(golden["ids"]) == golden["text"], name
    system, user, reply, tool = GOLDEN["chats"]["turns"]["messages"]
    stream = chat.start([system, user]).ids + tokenizer.encode(reply["content"]) + [chat.stop_id]
    assert stream + chat.continue_([tool]).ids == GOLDEN["chats"]["turns"]["ids"]


def test_hint_and_text(spoken):
    tokenizer, chat = spoken
    assert tokenizer.decode(chat.hint("Use rg.")) == "<|im_start|>system\nUse rg.<|im_end|>\n"
    assert chat.text(GOLDEN["greedy"]["ids"]) == GOLDEN["greedy"]["text"] == "The capital of France is Paris."


def test_control_bytes_that_the_vocabulary_lacks_are_counted(spoken):
    tokenizer, _ = spoken
    before = tokenizer.replaced
    assert tokenizer.decode(tokenizer.encode("a\x04b\x1dc\x1bd")) == "a\ufffdb\ufffdc\x1bd"
    assert tokenizer.replaced == before + 2


@pytest.mark.slow
def test_logits(model):
    rows = GOLDEN["rows"]
    found = dict(zip(rows, logits_BTV(model, list(rows.values())), strict=True))
    with np.load(GOLDENS.with_suffix(".npz")) as golden:
        for name, ids in rows.items():
            logits = found[name][: len(ids)]
            top = np.take_along_axis(logits, golden[f"{name}_top_ids"], axis=1)
            np.testing.assert_allclose(top, golden[f"{name}_top_logits"], atol=TOLERANCE, rtol=0, err_msg=name)
            columns = logits[:, golden["columns"]]
            np.testing.assert_allclose(columns, golden[f"{name}_column_logits"], atol=TOLERANCE, rtol=0, err_msg=name)
        last = found["france"][len(GOLDEN["chats"]["france"]["ids"]) - 1]
        np.testing.assert_allclose(last, golden["france_last_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_greedy_text(model, spoken):
    """Prefill and decode through the cache say what torch says, up to the stop token."""
    config, params = model
    _, chat = spoken
    prompt = chat.start(GOLDEN["chats"]["france"]["messages"]).ids
    extend = jax.jit(transformer.extend, static_argnums=1)
    cache, cached, chunk, found = transformer.new_cache(config, 1, 64), 0, prompt, []
    while len(found) < 20:
        hidden, cache = extend(
            params, config, jnp.asarray([chunk]), jnp.array([cached]), jnp.array([len(chunk)]), cache
        )
        cached += len(chunk)
        chunk = [int(jnp.argmax(hidden[0, -1] @ transformer.unembedding(params)))]
        found += chunk
        if found[-1] in chat.stop_ids:
            break
    assert found == GOLDEN["greedy"]["ids"]
    assert chat.text(found) == "The capital of France is Paris."
