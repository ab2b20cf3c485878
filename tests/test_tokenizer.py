"""Tokenizers: round trips, special tokens, what a vocabulary cannot spell, stop ids, word models."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from rsi_jax import base
from rsi_jax.model import tokenizer as tokenizer_lib
from tests import tiny_files

TEXT = st.text(st.sampled_from("hello useryst  \n\n\t0129.,'s!?éñ日🙂½\u00a0\r"), max_size=40)


@hypothesis.given(TEXT)
def test_text_survives_a_round_trip(text):
    tok = tiny_files.tokenizer()
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert tok.encode_plain(text) == ids
    assert all(0 <= id_ < tok.vocab_size for id_ in ids) and tok.replaced == 0


def test_digits_stand_alone_before_the_split_sees_the_text():
    tok = tiny_files.tokenizer()
    assert tok.token_strings(tok.encode("hello\n 12 hello")) == ["hello", "\n ", "1", "2", " hello"]
    gpt2 = tiny_files.tokenizer(pre="gpt-2")
    assert gpt2.token_strings(gpt2.encode("hello\n 12 hello")) == ["hello", "\n", " ", "1", "2", " hello"]


def test_special_tokens_in_text_are_recognised_or_spelled_out():
    tok = tiny_files.tokenizer()
    text = "<|im_start|>user\nhello<|im_end|>"
    assert tok.token_strings(tok.encode(text)) == ["<|im_start|>", "user", "\n", "hello", "<|im_end|>"]
    plain = tok.encode_plain(text)
    assert not set(plain) & set(tok.special_tokens.values())
    assert tok.decode(tok.encode(text)) == tok.decode(plain) == text


def test_encode_adds_nothing_even_where_the_model_wants_bos():
    tok = tiny_files.tokenizer(add_bos_token=True)
    assert tok.encode("") == [] and tok.token_strings(tok.encode("hello")) == ["hello"]
    assert (tok.add_bos, tok.bos_id, tok.token_id("<|bos|>"), tok.token_id("nope")) == (True, 3, 3, None)


def test_stop_pad_and_named_tokens():
    tok = tiny_files.tokenizer()
    assert tok.stop_ids == {0, 2} and tok.pad_id == 2  # pad equals a stop id: ids tell nothing
    assert tok.named_tokens == {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    assert tiny_files.tokenizer(eot_token_id=3, padding_token_id=0).stop_ids == {0, 2, 3}


def test_what_cannot_be_spelled_is_replaced_and_counted():
    tok = tiny_files.tokenizer(without_bytes=b"\x04\xf1")
    assert tok.decode(tok.encode("a\x04b\U00040000\ud800")) == "a\ufffdb\ufffd\ufffd"
    assert tok.replaced == 3
    assert tok.decode(tok.encode_plain("\x04")) == "\ufffd" and tok.replaced == 4


def test_token_strings_show_parts_of_characters_as_bytes():
    tok = tiny_files.tokenizer()
    assert tok.token_strings(tok.encode("é ")) == ["\\xc3", "\\xa9", " "]
    with pytest.raises(base.InputError, match="token id 9999"):
        tok.token_strings([9999])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model 'llama' is not supported"),
        ({"pre": "odd"}, "pre-tokenizer 'odd' is not supported"),
        ({"merges": ["h zzz"]}, "merges does not fit the tokens"),
        ({"merges": []}, "tokens or .merges is missing"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
    ],
)
def test_bad_entries_are_named(changes, message):
    with pytest.raises(base.InputError, match=message):
        tiny_files.tokenizer(**changes)


def test_tokenizer_json(tmp_path):
    tok = tiny_files.tokenizer()
    path = tmp_path / "tokenizer.json"
    tok._backend.save(str(path))
    again = tokenizer_lib.from_json(path, named_tokens={"eos_token": "<|im_end|>", "bos_token": "<|bos|>"})
    text = "<|im_start|>hello 12\n"
    assert again.encode(text) == tok.encode(text) and again.stop_ids == tok.stop_ids and again.bos_id == 3
    with pytest.raises(base.InputError, match="'nope' is named"):
        tokenizer_lib.from_json(path, named_tokens={"eos_token": "nope"})
    path.write_text(json.dumps({"model": 3}))
    with pytest.raises(base.InputError, match="not a readable tokenizer.json"):
        tokenizer_lib.from_json(path, named_tokens={})


def test_words():
    tok = tokenizer_lib.WordTokenizer(["search", "call", "rg"])
    ids = tok.encode(" search <a>\ncall rg <end>")
    assert ids == [5, 2, 6, 7, 1] and tok.decode(ids) == "search <a> call rg <end>"
    assert (tok.vocab_size, tok.pad_id, tok.stop_ids, tok.encode("")) == (8, 0, {1}, [])
    assert tok.token_strings(ids) == ["search", "<a>", "call", "rg", "<end>"] and tok.token_id("rg") == 7


def test_a_word_that_is_unknown_or_special_is_named():
    tok = tokenizer_lib.WordTokenizer(["search"])
    with pytest.raises(base.InputError, match="unknown word 'grep'"):
        tok.encode("search grep")
    with pytest.raises(base.InputError, match="unknown word '<end>'"):
        tok.encode_plain("search <end>")
    with pytest.raises(base.InputError, match="token id 6"):
        tok.decode([6])


@pytest.mark.parametrize(
    ("words", "message"), [(["a b"], "'a b'"), ([""], "''"), (["x", "x"], "twice"), ([], "no words")]
)
def test_bad_word_lists_are_named(words, message):
    with pytest.raises(base.InputError, match=message):
        tokenizer_lib.WordTokenizer(words)


def test_a_word_list_may_not_hold_a_special_token():
    with pytest.raises(base.InputError, match="'<end>' is given twice"):
        tokenizer_lib.WordTokenizer(["<end>"])
