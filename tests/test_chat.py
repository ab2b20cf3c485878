"""Chat templates. The law: start + sampled + continue_ == full render; templates that break it are refused."""

import hypothesis
import hypothesis.strategies as st
import pytest

from rsi_jax import base
from rsi_jax.model import chat as chat_lib
from rsi_jax.model import tokenizer as tokenizer_lib
from tests import tiny_files

# Trims contents and writes its own BOS, as Llama 3 does.
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{% generation %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}"
    "<|im_end|>{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS_THOUGHTS = tiny_files.CHATML.replace(
    "message['content'] +", "(message['content'] if loop.last else message['content'].split('</think>')[-1]) +"
)
WORDS = ["ok", "search", "call", "rg", "use"]
CONTENT = st.text(st.sampled_from("hello usr  \n012é日."), max_size=12)
# Sampled text that starts at a token boundary: after the header's newline, no further whitespace.
REPLY = st.text(st.sampled_from("hello usr \n012é日."), min_size=1, max_size=12).filter(lambda t: not t[0].isspace())


def conversations(content, reply, roles=("user", "tool", "system")):
    """Lists of (observations, reply); the stream ends before the last reply."""
    message = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": content})
    return st.lists(st.tuples(st.lists(message, min_size=1, max_size=3), reply), min_size=1, max_size=4)


def play(chat, tok, turns, sampled):
    """The stream of ids, the assistant turns given as ids without their stop token, and the whole conversation."""
    ids, messages = [], []
    for i, (observations, reply) in enumerate(turns):
        chunk = chat.continue_(observations) if i else chat.start(observations)
        ids += chunk.ids
        messages += observations
        if i + 1 < len(turns):
            ids += [*sampled(reply), chat.stop_id]
            messages += [{"role": "assistant", "content": reply}]
    return ids, messages


def chat_of(template=tiny_files.CHATML, **changes):
    tok = tiny_files.tokenizer(**changes)
    return chat_lib.Chat(tok, template), tok


CHATML, CHATML_TOKENIZER = chat_of()
LLAMA, LLAMA_TOKENIZER = chat_of(LLAMA3)


@hypothesis.given(conversations(CONTENT, REPLY))
def test_law_chatml_ids(turns):
    ids, messages = play(CHATML, CHATML_TOKENIZER, turns, CHATML_TOKENIZER.encode)
    assert ids == CHATML.start(messages).ids
    assert ids == CHATML_TOKENIZER.encode(CHATML._render(messages, header=True))


@hypothesis.given(conversations(CONTENT, st.binary(max_size=6)))
def test_law_chatml_text_for_any_sampled_ids(turns):
    """Whatever ids are sampled, the stream holds them untouched and reads as the full render of their text."""
    turns = [(observations, list(sampled)) for observations, sampled in turns]
    letters = [[4 + byte for byte in reply] for _, reply in turns]  # the ids of single bytes
    text = [(o, CHATML_TOKENIZER.decode(ids)) for (o, _), ids in zip(turns, letters, strict=True)]
    replies = iter(letters)
    ids, messages = play(CHATML, CHATML_TOKENIZER, text, lambda _: next(replies))
    assert CHATML_TOKENIZER.decode(ids) == CHATML._render(messages, header=True)


@hypothesis.given(conversations(CONTENT.map(str.strip), REPLY.map(str.strip)))
def test_law_with_bos_and_trim(turns):
    ids, messages = play(LLAMA, LLAMA_TOKENIZER, turns, LLAMA_TOKENIZER.encode)
    assert ids == LLAMA_TOKENIZER.encode(LLAMA._render(messages, header=True))
    assert ids.count(LLAMA_TOKENIZER.bos_id) == 1 and ids[0] == LLAMA_TOKENIZER.bos_id


WORD_TEXT = st.lists(st.sampled_from(WORDS), max_size=4).map(" ".join)


@hypothesis.given(conversations(WORD_TEXT, WORD_TEXT))
def test_law_words(turns):
    tok = tokenizer_lib.WordTokenizer(WORDS)
    chat = chat_lib.word_chat(tok)
    ids, messages = play(chat, tok, turns, tok.encode)
    assert ids == tok.encode(chat._render(messages, header=True))


@pytest.mark.parametrize("template", [tiny_files.CHATML, LLAMA3])
@pytest.mark.parametrize("add_bos", [False, True])
def test_exactly_one_bos_opens_a_stream(template, add_bos):
    chat, tok = chat_of(template, add_bos_token=add_bos)
    message = [{"role": "user", "content": "hello"}]
    first, later = chat.start(message), chat.continue_(message)
    assert first.ids.count(tok.bos_id) == (1 if add_bos or template == LLAMA3 else 0)
    assert tok.bos_id not in later.ids
    assert first.ids[first.header :] == tok.encode("<|im_start|>assistant\n")


def test_two_bos_are_refused():
    with pytest.raises(base.InputError, match="two BOS"):
        chat_of("{{ bos_token }}" + LLAMA3)


def test_chunks_of_chatml():
    tok = CHATML_TOKENIZER
    chunk = CHATML.start([{"role": "user", "content": "hello"}])
    assert tok.decode(chunk.ids[: chunk.insert_at]) == "<|im_start|>system\nYou help<|im_end|>\n"
    assert tok.decode(chunk.ids[chunk.insert_at : chunk.header]) == "<|im_start|>user\nhello<|im_end|>\n"
    assert tok.decode(chunk.ids[chunk.header :]) == "<|im_start|>assistant\n"
    later = CHATML.continue_([{"role": "tool", "content": "ok"}])
    assert tok.decode(later.ids) == "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML.continue_([{"role": "tool", "content": "ok"}], last_id=CHATML.stop_id) == later
    cut = CHATML.continue_([{"role": "tool", "content": "ok"}], last_id=50)
    assert cut.ids == [CHATML.stop_id, *later.ids] and cut.insert_at == later.insert_at + 1


@pytest.mark.parametrize("place", ["message", "header"])
def test_a_hinted_stream_is_the_render_with_the_hint_as_a_message(place):
    tok = CHATML_TOKENIZER
    chat = chat_lib.Chat(tok, tiny_files.CHATML, hint_place=place)
    hint, said = chat.hint("use rg"), {"role": "system", "content": "use rg"}
    assert tok.decode(hint) == "<|im_start|>system\nuse rg<|im_end|>\n" and chat.hint("") == []
    first, last = {"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}
    chunk = chat.start([first, last])
    hinted = chat.start([first, said, last] if place == "message" else [first, last, said])
    assert chunk.ids[: chunk.insert_at] + hint + chunk.ids[chunk.insert_at :] == hinted.ids
    later = chat.continue_([last])
    hinted = chat.continue_([said, last] if place == "message" else [last, said])
    assert later.ids[: later.insert_at] + hint + later.ids[later.insert_at :] == hinted.ids


def test_an_unknown_hint_place_is_refused():
    with pytest.raises(base.InputError, match="hint_place='behind' is neither 'message' nor 'header'"):
        chat_lib.Chat(CHATML_TOKENIZER, tiny_files.CHATML, hint_place="behind")


def test_hint_of_words():
    tok = tokenizer_lib.WordTokenizer(WORDS)
    chat = chat_lib.word_chat(tok)
    chunk = chat.continue_([{"role": "tool", "content": "ok search"}])
    assert tok.decode(chunk.ids) == "ok search" and chunk.insert_at == 0 and chunk.header == 2
    assert tok.decode(chat.hint("use rg")) == "<hint> use rg </hint>"
    assert chat.text(tok.encode("call rg <end>")) == "call rg" and chat.stop_ids == {1}


def test_hint_role_is_a_choice_and_a_refused_one_says_so():
    template = "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('late') }}"
    template += "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    chat, tok = chat_of(template)
    with pytest.raises(base.InputError, match="no hint of role 'system'.*late.*choose another hint_role"):
        chat.hint("use rg")
    user = chat_lib.Chat(tok, template, hint_role="user")
    assert tok.decode(user.hint("use rg")) == "<|im_start|>user\nuse rg<|im_end|>"


def test_an_action_is_the_message_as_if_sampled():
    messages = [{"role": "user", "content": "hello"}]
    stream = CHATML.start(messages).ids + CHATML.action("ok: 12") + CHATML.continue_(messages).ids
    assert stream == CHATML.start([*messages, {"role": "assistant", "content": "ok: 12"}, *messages]).ids
    assert CHATML.action("<|im_end|>").count(CHATML.stop_id) == 1  # spelled out, then the stop token
    assert CHATML.encode("<|im_end|>") == CHATML_TOKENIZER.encode_plain("<|im_end|>")


def test_text_strips_only_the_stop_token():
    tok = CHATML_TOKENIZER
    assert CHATML.text(tok.encode("hello\n<|im_end|>")) == "hello\n"
    assert CHATML.text(tok.encode("hello<|endoftext|>")) == "hello" and CHATML.text([]) == ""
    assert CHATML.text(tok.encode("a<|im_end|>b")) == "a<|im_end|>b"


@hypothesis.given(st.lists(st.sampled_from([*tiny_files.SPECIALS, "hello", "\n", "\ufdd0", "<"])).map("".join))
def test_special_tokens_in_a_message_open_and_end_no_turn(content):
    tok = CHATML_TOKENIZER
    plain = CHATML.start([{"role": "user", "content": "x"}])
    chunk = CHATML.start([{"role": "user", "content": content}])
    assert tok.decode(chunk.ids) == tok.decode(plain.ids).replace("user\nx<", f"user\n{content}<")
    specials = set(tok.special_tokens.values())
    assert [id_ for id_ in chunk.ids if id_ in specials] == [id_ for id_ in plain.ids if id_ in specials]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (STRIPS_THOUGHTS, "former turns"),
        (
            tiny_files.CHATML.replace("assistant\n' }}", "assistant\n<think>' }}"),
            "does not follow the assistant header",
        ),
        (tiny_files.CHATML.replace("assistant\n' }}", "assistant' }}"), "does not stand right after"),
        (tiny_files.CHATML.replace("+ '<|im_end|>' + '\n'", "+ '\n'"), "no special token ends"),
        (tiny_files.CHATML.replace("for message in messages", "for message in messages[-2:]"), "rewrites"),
        (tiny_files.CHATML.replace("message['content'] +", "message['content'] | upper +"), "right after"),
        ("{% for m in messages %}", "does not parse"),
        ("{{ raise_exception('no user') }}", r"refuses the roles \[user"),
        ("{{ messages[0].__class__.__mro__ }}", "refuses"),
    ],
)
def test_templates_that_drift_are_refused_when_built(template, message):
    with pytest.raises(base.InputError, match=message):
        chat_of(template)


def test_a_seam_inside_a_token_is_refused():
    """Alone, the header's two newlines are one token; before a reply, the GPT-2 split cuts between them."""
    with pytest.raises(base.InputError, match="a turn begins or ends inside a token"):
        chat_of(LLAMA3.replace("\n", "\n\n"))


@pytest.mark.parametrize("messages", [[], [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "x"}]])
def test_bad_messages_are_named(messages):
    with pytest.raises(base.InputError, match="chat: "):
        CHATML.start(messages)


def test_a_template_without_system_or_tool_roles_is_still_held_to_the_law():
    template = tiny_files.CHATML.replace(
        "{{'<|im_start|>'",
        "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('role') }}{% endif %}{{'<|im_start|>'",
    )
    chat, _ = chat_of(template)
    with pytest.raises(base.InputError, match=r"refuses the roles \[.*tool\]: role"):
        chat.continue_([{"role": "tool", "content": "x"}])
