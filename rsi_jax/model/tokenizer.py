"""Text <-> token ids: `Tokenizer` for model files (byte-level BPE), `WordTokenizer` for the tiny built-in models.

Both have the same face: `encode` adds nothing, special tokens written in the text become their ids, `decode` keeps
them visible. What a vocabulary cannot spell is replaced by U+FFFD and counted, never dropped.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rsi_jax import base

# Texts that any vocabulary here can encode, for the self-check of a chat template; the second has a thought to strip.
PROBES = ("Hi there", "<think>\nWhy 12?\n</think>\n\nI see.", "ok")

# GGUF token types.
_CONTROL, _USER_DEFINED = 3, 4
# End-of-turn ids of GGUF metadata; `<|endoftext|>` ends a document and stops generation too.
_STOP_KEYS = ("eos", "eot", "eom")
_STOP_NAMES = ("<|endoftext|>",)


class Tokenizer:
    """Token ids of one model file.

    vocab_size        ids are in [0, vocab_size).
    stop_ids          ids that end generation.
    pad_id            fills unused positions; may equal a stop id, so it never tells what a token is.
    bos_id, add_bos   the begin token, if any, and whether the model wants one before the first token of a stream.
    special_tokens    string -> id of the control tokens.
    named_tokens      bos_token, eos_token, ... as a chat template reads them.
    replaced          characters replaced by U+FFFD so far, since the vocabulary lacks one of their bytes.
    """

    probes = PROBES

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        stop_ids: Iterable[int],
        pad_id: int,
        bos_id: int | None = None,
        add_bos: bool = False,
        named_tokens: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.stop_ids = frozenset(stop_ids)
        self.pad_id, self.bos_id, self.add_bos = pad_id, bos_id, add_bos
        self.named_tokens = dict(named_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.special_tokens = {token.content: id_ for id_, token in added.items() if token.special}
        self._added_ids = frozenset(added)
        self._byte_level = backend.decoder is not None and "ByteLevel" in repr(backend.decoder)
        self._missing = _missing_bytes(backend) if self._byte_level else frozenset()
        self.replaced = 0

    def encode(self, text: str) -> list[int]:
        """Turns text into ids and adds nothing; special tokens written in it are recognised."""
        return self._backend.encode(self._spellable(text), add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Turns text into ids as ordinary text: a special token written in it is spelled out, not obeyed."""
        return self._plain_backend.encode(self._spellable(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turns ids into text; special tokens stay visible, bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns what each token shows (for a heat map); a token that is part of a character shows its bytes."""
        return [self._display(id_) for id_ in ids]

    def token_id(self, token: str) -> int | None:
        """Returns the id of a token by its exact vocabulary string, or None."""
        return self._backend.token_to_id(token)

    @functools.cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def _display(self, id_: int) -> str:
        token = self._backend.id_to_token(id_)
        if token is None:
            raise base.InputError(f"token id {id_} is not in the vocabulary of {self.vocab_size} tokens")
        if id_ in self._added_ids:
            return token
        if not self._byte_level:
            return token.replace("\u2581", " ")
        return bytes(_byte_of_character()[c] for c in token).decode("utf-8", errors="backslashreplace")

    def _spellable(self, text: str) -> str:
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError:
            return self._replace(text)
        return text if self._missing.isdisjoint(data) else self._replace(text)

    def _replace(self, text: str) -> str:
        def spelled(character: str) -> bool:
            surrogate = "\ud800" <= character <= "\udfff"
            return not surrogate and self._missing.isdisjoint(character.encode("utf-8"))

        characters = [character if spelled(character) else "\ufffd" for character in text]
        self.replaced += sum(1 for old, new in zip(text, characters, strict=True) if old != new)
        return "".join(characters)


class WordTokenizer:
    """Whitespace-separated words as tokens, for tiny built-in models; the same face as `Tokenizer`.

    Ids: `<pad>` 0, `<end>` 1 (the stop token), `<a>` 2, `<hint>` 3, `</hint>` 4, then the words in their order.

    Raises: base.InputError when a word is empty, holds whitespace, repeats, or is one of the special tokens.
    """

    SPECIALS = ("<pad>", "<end>", "<a>", "<hint>", "</hint>")

    def __init__(self, words: Collection[str]):
        self._words = (*self.SPECIALS, *words)
        for word in words:
            if word.split() != [word]:
                raise base.InputError(f"WordTokenizer: {word!r} is not one word; give words without whitespace")
        self._ids = {word: id_ for id_, word in enumerate(self._words)}
        if len(self._ids) < len(self._words):
            repeated = next(word for id_, word in enumerate(self._words) if self._ids[word] != id_)
            raise base.InputError(f"WordTokenizer: {repeated!r} is given twice; give each word once")
        if not words:
            raise base.InputError("WordTokenizer: no words; give at least one")
        self.vocab_size = len(self._words)
        self.pad_id, self.stop_ids = 0, frozenset({1})
        self.bos_id, self.add_bos, self.replaced = None, False, 0
        self.special_tokens = {word: id_ for id_, word in enumerate(self.SPECIALS)}
        self._plain_ids = {word: id_ for word, id_ in self._ids.items() if word not in self.SPECIALS}
        self.named_tokens = {"pad_token": "<pad>", "eos_token": "<end>"}
        self.probes = (self._words[5], f"{self._words[-1]} {self._words[5]}", self._words[-1])

    def encode(self, text: str) -> list[int]:
        """Turns whitespace-separated words into ids. Raises: base.InputError naming an unknown word."""
        return [self._id(word, self._ids) for word in text.split()]

    def encode_plain(self, text: str) -> list[int]:
        """Turns words into ids where a special token counts as an unknown word."""
        return [self._id(word, self._plain_ids) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        """Joins the words of `ids` with single spaces."""
        return " ".join(self.token_strings(ids))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Returns the word of each id."""
        for id_ in ids:
            if not 0 <= id_ < self.vocab_size:
                raise base.InputError(f"token id {id_} is not in the vocabulary of {self.vocab_size} words")
        return [self._words[id_] for id_ in ids]

    def token_id(self, token: str) -> int | None:
        """Returns the id of a word, or None."""
        return self._ids.get(token)

    def _id(self, word: str, ids: Mapping[str, int]) -> int:
        if word not in ids:
            raise base.InputError(f"unknown word {word!r}: not among the {len(self._ids)} words of this tokenizer")
        return ids[word]


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    metadata: plain values by key (`tokenizer.ggml.*`). source: the file, for error messages.

    Raises: base.InputError for another tokenizer model or pre-tokenizer than the ones built here, or bad entries.
    """

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    if get("model") != "gpt2":
        raise base.InputError(f"{source}: tokenizer.ggml.model {get('model')!r} is not supported (only 'gpt2')")
    tokens, merges = get("tokens"), get("merges")
    if not tokens or not merges:
        raise base.InputError(f"{source}: tokenizer.ggml.tokens or .merges is missing; get the file again")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        bpe = models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=pairs)
    except Exception as error:  # the library raises bare Exceptions
        raise base.InputError(f"{source}: tokenizer.ggml.merges does not fit the tokens ({error})") from error
    backend = tokenizers.Tokenizer(bpe)
    backend.pre_tokenizer = _pre_tokenizer(get("pre", "gpt-2"), source)
    backend.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [token for token, type_ in zip(tokens, get("token_type", []), strict=False) if type_ == kind]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    eos_id, bos_id = get("eos_token_id"), get("bos_token_id")
    stop_ids = {get(f"{key}_token_id") for key in _STOP_KEYS} | {backend.token_to_id(name) for name in _STOP_NAMES}
    named = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": get("unknown_token_id")}
    named["pad_token"] = get("padding_token_id", eos_id)
    if eos_id is None:
        raise base.InputError(f"{source}: tokenizer.ggml.eos_token_id is missing, so nothing would end a turn")
    return Tokenizer(
        backend,
        stop_ids={id_ for id_ in stop_ids if id_ is not None},
        pad_id=named["pad_token"],
        bos_id=bos_id,
        add_bos=bool(get("add_bos_token", False)),
        named_tokens={name: tokens[id_] for name, id_ in named.items() if id_ is not None},
    )


def from_json(
    path: Path, *, named_tokens: Mapping[str, str], stop_ids: Iterable[int] = (), add_bos: bool = False
) -> Tokenizer:
    """Builds a tokenizer from a `tokenizer.json` file.

    named_tokens: bos_token, eos_token, pad_token, ... as strings. stop_ids: more ids that end generation.

    Raises: base.InputError when the file is absent or unreadable, or a named token is not in its vocabulary.
    """
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise base.InputError(f"{path}: not a readable tokenizer.json ({error}); get the file again") from error
    backend.no_padding()
    backend.no_truncation()
    ids = {name: backend.token_to_id(token) for name, token in named_tokens.items()}
    unknown = [named_tokens[name] for name, id_ in ids.items() if id_ is None]
    if unknown:
        raise base.InputError(f"{path}: {unknown[0]!r} is named in tokenizer_config.json but is not in the vocabulary")
    more = [ids.get("eos_token"), *(backend.token_to_id(name) for name in _STOP_NAMES)]
    stops = {*stop_ids, *(id_ for id_ in more if id_ is not None)}
    if not stops:
        raise base.InputError(f"{path}: no eos_token is named, so nothing would end a turn")
    pad_id = ids.get("pad_token")
    return Tokenizer(
        backend,
        stop_ids=stops,
        pad_id=min(stops) if pad_id is None else pad_id,
        bos_id=ids.get("bos_token"),
        add_bos=add_bos,
        named_tokens=named_tokens,
    )


def _pre_tokenizer(name: str, source: str) -> pre_tokenizers.PreTokenizer:
    """Splits text before BPE; `smollm` isolates each digit before the GPT-2 rule sees the text."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return gpt2
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    raise base.InputError(
        f"{source}: pre-tokenizer {name!r} is not supported (gpt-2, smollm); load the model's HF folder instead"
    )


@functools.cache
def _byte_of_character() -> dict[str, int]:
    """Inverse of GPT-2's byte alphabet: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _missing_bytes(backend: tokenizers.Tokenizer) -> frozenset[int]:
    return frozenset(byte for character, byte in _byte_of_character().items() if backend.token_to_id(character) is None)
