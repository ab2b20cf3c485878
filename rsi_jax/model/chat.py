"""Chat templates, token-in/token-out: ids that are appended to a stream, never a text rendered again.

A stream is start(messages), sampled ids, continue_(messages), sampled ids, ... and for every conversation it equals
the full render. Templates for which that cannot hold are refused when the Chat is built.
"""

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from rsi_jax import base
from rsi_jax.model import tokenizer as tokenizer_lib

Message = Mapping[str, Any]

# Template of the tiny word models: the words of a message as they are; `<end>` ends an assistant message, and nothing
# opens one, so the last word of a request itself predicts the answer.
WORD_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ m['content'] }} <end> "
    "{% elif m['role'] == 'hint' %}<hint> {{ m['content'] }} </hint> "
    "{% else %}{{ m['content'] }} {% endif %}"
    "{% endfor %}"
)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Ids to append to a stream; they end with the assistant header, so sampling starts right after them.

    insert_at: offset in `ids` where a hint message may stand: before the last message, or before the assistant header.
    header: offset of the assistant header, which may be empty.
    """

    ids: list[int]
    insert_at: int
    header: int


class Chat:
    """Renders one conversation in increments with a model's own chat template.

    tokenizer  Tokenizer or WordTokenizer; readable, for heat maps and counts.
    template   jinja2 source in the HF conventions.
    hint_role  role of a hint message; None = 'hint' where the template names that role, else 'system'.
    hint_place 'message': a hint stands before the message that the turn answers, so that the request stays next to the
               answer; 'header': after it, before the assistant header.

    stop_id    the token that ends an assistant turn in the template. stop_ids: all ids that end generation.

    Raises: base.InputError when the template does not parse, or when increments cannot equal the full render: former
    turns change as the conversation goes on, the text between header and stop token is not the message, a turn ends
    with no special token, or a seam falls inside a token.
    """

    def __init__(
        self,
        tokenizer: "tokenizer_lib.Tokenizer | tokenizer_lib.WordTokenizer",
        template: str,
        *,
        hint_role: str | None = None,
        hint_place: str = "message",
    ):
        if hint_place not in ("message", "header"):
            raise base.InputError(f"feedback.hint_place={hint_place!r} is neither 'message' nor 'header'")
        self.hint_place = hint_place
        self.tokenizer = tokenizer
        self._template = _compile(template)
        longest_first = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(re.escape(token) for token in longest_first) + ")")
        self.hint_role = hint_role or ("hint" if "'hint'" in template or '"hint"' in template else "system")
        user, _, reply = tokenizer.probes
        self._asked = [{"role": "user", "content": user}]
        self._answered = [*self._asked, {"role": "assistant", "content": reply}]
        self._answered_text = self._render(self._answered)
        self._after_stop, self.stop_id = self._find_stop(reply)
        self.stop_ids = tokenizer.stop_ids | {self.stop_id}
        self._check_law()
        self._hint_problem = self._find_hint_problem()

    def start(self, messages: Sequence[Message]) -> Chunk:
        """Renders the messages before the first turn, the template's own opening (BOS, default system) included."""
        guarded, guard = self._guard(messages)
        body, header = self._body_and_header(guarded)
        ids = self._encode(body, guard)
        if self.tokenizer.add_bos and ids[:1] != [self.tokenizer.bos_id]:
            ids = [self.tokenizer.bos_id, *ids]
        return Chunk(ids + self._encode(header, guard), len(ids) - self._after_hint(guarded, guard), len(ids))

    def continue_(self, messages: Sequence[Message], *, last_id: int | None = None) -> Chunk:
        """Renders the messages that follow a sampled turn, from the end of that turn's stop token on.

        last_id: the last id sampled in that turn. A turn cut before its stop token gets it here, as a token that was
        not sampled; None = the stop token was sampled.
        """
        guarded, guard = self._guard(messages)
        body, header = self._continuation(guarded)
        ids = self._encode(body, guard)
        if last_id is not None and last_id != self.stop_id:
            ids = [self.stop_id, *ids]
        return Chunk(ids + self._encode(header, guard), len(ids) - self._after_hint(guarded, guard), len(ids))

    def action(self, text: str) -> list[int]:
        """Returns the ids of an assistant message as if it had been sampled, its stop token included."""
        return [*self.encode(text), self.stop_id]

    def encode(self, text: str) -> list[int]:
        """Turns plain text into ids."""
        return self.tokenizer.encode_plain(text)

    def hint(self, text: str) -> list[int]:
        """Renders a hint as one message that may stand at a chunk's `insert_at`; an empty hint has no tokens.

        Raises: base.InputError when the template refuses a message of `hint_role` there.
        """
        if self._hint_problem:
            raise base.InputError(f"chat template takes no hint of role {self.hint_role!r}: {self._hint_problem}")
        if not text:
            return []
        guarded, guard = self._guard([{"role": self.hint_role, "content": text}])
        return self._encode(self._appended(self._asked, guarded), guard)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of one sampled turn, without the stop token that ends it."""
        ended = len(ids) > 0 and int(ids[-1]) in self.stop_ids
        return self.tokenizer.decode([int(id_) for id_ in ids[: len(ids) - ended]])

    def _render(self, messages: Sequence[Message], header: bool = False) -> str:
        context = dict(self.tokenizer.named_tokens, tools=None, documents=None, add_generation_prompt=header)
        try:
            return self._template.render(messages=[dict(m) for m in messages], **context)
        except jinja2.exceptions.TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise base.InputError(f"chat template refuses the roles [{roles}]: {error}") from error

    def _guard(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """Breaks special tokens that a message's content spells (a file, a web page), so they open and end no turn."""
        if not messages:
            raise base.InputError("chat: no messages to render; give at least one")
        for message in messages:
            if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
                raise base.InputError(f"chat: a message needs 'role' and 'content' as text, got {dict(message)!r:.200}")
        contents = "".join(message["content"] for message in messages)
        guard = next(c for c in map(chr, range(0xFDD0, 0xFDF0)) if c not in contents)  # Unicode noncharacters

        def broken(match: re.Match) -> str:
            return match[0][0] + guard + match[0][1:]

        return [{**message, "content": self._special.sub(broken, message["content"])} for message in messages], guard

    def _encode(self, text: str, guard: str = "") -> list[int]:
        if not guard or guard not in text:
            return self.tokenizer.encode(text)
        special, ids = self.tokenizer.special_tokens, []
        for piece in self._special.split(text):
            ids += [special[piece]] if piece in special else self.tokenizer.encode_plain(piece.replace(guard, ""))
        return ids

    def _body_and_header(self, messages: Sequence[Message]) -> tuple[str, str]:
        body = self._render(messages)
        return body, _after(self._render(messages, header=True), body, "the assistant header rewrites the messages")

    def _continuation(self, messages: Sequence[Message]) -> tuple[str, str]:
        body, header = self._body_and_header([*self._answered, *messages])
        _after(body, self._answered_text, "a later message rewrites former turns (does it strip '<think>'?)")
        return body[self._after_stop :], header

    def _after_hint(self, messages: Sequence[Message], guard: str) -> int:
        """Counts the ids between the place of a hint and the assistant header: the last message, or none."""
        if self.hint_place == "header":
            return 0
        return len(self._encode(self._appended(self._answered, messages[-1:]), guard))

    def _appended(self, history: Sequence[Message], messages: Sequence[Message]) -> str:
        later = self._render([*history, *messages])
        return _after(later, self._render(history), "a later message rewrites former ones")

    def _find_stop(self, reply: str) -> tuple[int, int]:
        """Returns the offset behind the stop token in `_answered_text`, and the token."""
        asked = self._render(self._asked, header=True)
        rest = _after(self._answered_text, asked, "a reply does not follow the assistant header")
        ending = _after(rest, reply, "a reply does not stand right after the assistant header")
        ids = self._encode(ending)
        stop = self.tokenizer.token_strings(ids[:1])
        if not stop or stop[0] not in self.tokenizer.special_tokens:
            raise _refused("no special token ends an assistant message")
        return len(asked + reply) + ending.index(stop[0]) + len(stop[0]), ids[0]

    def _check_law(self) -> None:
        """Holds start + sampled + continue_ == full render, in text and in ids, for probe conversations."""
        first, thought, reply = self.tokenizer.probes
        turns = [("user", first), ("assistant", thought), ("user", reply), ("assistant", reply), ("user", first)]
        opened = [("system", reply), *turns]
        used = [*turns[:2], ("tool", reply), *turns[1:2], ("tool", first), *turns[3:]]
        for number, roles in enumerate((turns, opened, used)):
            messages = [{"role": role, "content": content} for role, content in roles]
            try:
                full = self._render(messages, header=True)
            except base.InputError:
                if number == 0:
                    raise
                continue  # the template has no system or no tool role
            text, ids = self._stream(messages)
            if text != full:
                raise _refused("the turns do not add up to the full render (does it strip '<think>' or former turns?)")
            encoded = self._encode(full)
            bos = self.tokenizer.add_bos and encoded[:1] != [self.tokenizer.bos_id]
            if ids != [self.tokenizer.bos_id] * bos + encoded:
                raise _refused("a turn begins or ends inside a token")
            if self.tokenizer.bos_id is not None and ids[:2] == [self.tokenizer.bos_id] * 2:
                raise _refused("it opens with two BOS tokens")

    def _stream(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Plays a conversation in increments, the assistant messages as if sampled."""
        ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        text = "".join(self._body_and_header(messages[: ends[0]]))
        ids = self.start(messages[: ends[0]]).ids
        stop = self.tokenizer.token_strings([self.stop_id])[0]
        ending = self._answered_text[: self._after_stop]
        gap = ending[len(self._render(self._asked, header=True) + self._answered[-1]["content"]) : -len(stop)]
        for i, end in zip(ends, [*ends[1:], len(messages)], strict=True):
            content = messages[i]["content"]
            text += content + gap + stop + "".join(self._continuation(messages[i + 1 : end]))
            ids += self._encode(content) + [self.stop_id] + self.continue_(messages[i + 1 : end]).ids
        return text, ids

    def _find_hint_problem(self) -> str | None:
        """Says why a hint cannot stand before the assistant header, or None."""
        message = {"role": self.hint_role, "content": self.tokenizer.probes[0]}
        try:
            hint = self._appended(self._asked, [message])
            for history in (self._asked, [*self._answered, *self._asked]):
                body, header = self._body_and_header(history)
                last = self._appended(self._answered, history[-1:]) if self.hint_place == "message" else ""
                first, place = body[: len(body) - len(last)], len(history) - bool(last)
                full = self._render([*history[:place], message, *history[place:]], header=True)
                if place and (first + last != body or full != first + hint + last + header):
                    return "it renders otherwise there; choose another hint_role or hint_place"
                pieces = [first, hint, last, header]
                if [id_ for piece in pieces for id_ in self._encode(piece)] != self._encode("".join(pieces)):
                    return "it begins or ends inside a token there; choose another hint_role or hint_place"
        except base.InputError as error:
            return f"{error}; choose another hint_role"
        return None


def word_chat(tokenizer: "tokenizer_lib.WordTokenizer", *, hint_place: str = "message") -> Chat:
    """Makes the chat of the tiny word models."""
    return Chat(tokenizer, WORD_TEMPLATE, hint_place=hint_place)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text in some templates; here it renders its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(template)
    except jinja2.exceptions.TemplateError as error:
        raise base.InputError(f"chat template does not parse: {error}") from error


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _after(text: str, prefix: str, problem: str) -> str:
    if not text.startswith(prefix):
        raise _refused(problem)
    return text[len(prefix) :]


def _refused(problem: str) -> base.InputError:
    return base.InputError(
        f"chat template breaks the exact prefix between turns: {problem}; give a template that keeps former turns whole"
    )
