"""The `lm` stage: next-token prediction and supervised fine-tuning on packed rows, through grain.

A document is ids and a flag per id that says whether it is predicted. Documents are packed first-fit into rows; a token
sees its own document only (the two-key-range rule with one range). The data cursor is grain's iterator state, so a
resumed run reads the same batches.
"""

import functools
import json
import pathlib
import random
from typing import Any, NamedTuple

import grain.python as grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rsi_jax import base, envs, optim
from rsi_jax.kernels import attention, token_logprob
from rsi_jax.model import transformer
from rsi_jax.model.chat import Chat


class Document(NamedTuple):
    """ids int32 [n]; train bool [n]: the id is predicted."""

    ids: np.ndarray
    train: np.ndarray


def demonstration(env: envs.Demonstrator, chat: Chat, seed: int, *, hinted: bool, train_bare: bool) -> Document:
    """Renders one demonstration of the environment: the chosen actions are predicted, all else is context."""
    ids, train = [], []
    for i, step in enumerate(env.demonstration(seed, hinted=hinted, train_bare=train_bare)):
        chunk = chat.start(step.shown) if i == 0 else chat.continue_(step.shown)
        shown = (
            chunk.ids[: chunk.insert_at] + (chat.hint(step.hint) if step.hint else []) + chunk.ids[chunk.insert_at :]
        )
        action = chat.action(step.action)
        ids += shown + action
        train += [False] * len(shown) + [step.train] * len(action)
    return Document(np.array(ids, np.int32), np.array(train, bool))


def conversation(chat: Chat, messages: list[dict[str, str]]) -> Document:
    """Renders chat messages: every assistant message is predicted."""
    ids, train, shown, first = [], [], [], True
    for message in messages:
        if message["role"] != "assistant":
            shown.append(message)
            continue
        chunk, action = (chat.start if first else chat.continue_)(shown), chat.action(message["content"])
        ids += chunk.ids + action
        train += [False] * len(chunk.ids) + [True] * len(action)
        shown, first = [], False
    return Document(np.array(ids, np.int32), np.array(train, bool))


def read_conversations(path: str) -> list[list[dict[str, str]]]:
    """Reads a JSONL of {"messages": [{"role", "content"}, ...]}.

    Raises: base.InputError naming the file and the line.
    """
    file, found = pathlib.Path(path), []
    if not file.is_file():
        raise base.InputError(f"lm.path={path!r}: no such file; give a JSONL of chat messages")
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in json.loads(line)["messages"]]
        except (ValueError, KeyError, TypeError) as error:
            raise base.InputError(
                f'{path} line {number}: not {{"messages": [{{"role", "content"}}]}} ({error})'
            ) from error
        if not any(m["role"] == "assistant" for m in messages):
            raise base.InputError(f"{path} line {number}: no assistant message to learn from")
        found.append(messages)
    if not found:
        raise base.InputError(f"{path}: no conversations")
    return found


def _demonstrations(knobs, make_env, chat: Chat, seed: int):
    """Mixes short un-hinted demonstrations with hinted ones, whose horizons double up to that of the task.

    long_recall: half of the long ones have no hints either (a hinted one shows each tool before it is asked for again).
    """
    short_env, longest = make_env(knobs.short_horizon), make_env(None).max_turns
    horizons = [longest]
    while horizons[-1] // 2 >= knobs.hinted_horizon:
        horizons.append(horizons[-1] // 2)
    long_envs = [make_env(horizon if horizon < longest else None) for horizon in horizons]

    def document(index: int) -> Document:
        rng = random.Random(f"lm/{seed}/{index}")
        task = rng.getrandbits(48)
        if rng.random() < knobs.short_share:
            return demonstration(short_env, chat, task, hinted=False, train_bare=True)
        long_env = rng.choice(long_envs)
        hinted = not knobs.long_recall or rng.random() < 0.5
        return demonstration(long_env, chat, task, hinted=hinted, train_bare=knobs.long_recall)

    return grain.MapDataset.range(2**31 - 1).map(document)


def _text(path: str, chat: Chat, row_tokens: int) -> list[Document]:
    file = pathlib.Path(path)
    if not file.is_file():
        raise base.InputError(f"lm.path={path!r}: no such file; give a text file")
    ids = np.array(chat.encode(file.read_text(encoding="utf-8")), np.int32)
    pieces = [ids[i : i + row_tokens] for i in range(0, len(ids), row_tokens)]
    return [Document(piece, np.ones(len(piece), bool)) for piece in pieces if len(piece) > 1]


def batches(knobs, make_env, chat: Chat, seed: int):
    """Makes the iterator of packed batches: dicts of tokens, train, segment_ids, positions, each [rows, row_tokens].

    make_env(horizon): the environment of demonstrations (None: its own horizon).
    Raises: base.InputError when a document does not fit a row.
    """
    if knobs.data == "demonstrations":
        source = _demonstrations(knobs, make_env, chat, seed)
    elif knobs.data in ("jsonl", "text"):
        if knobs.data == "jsonl":
            documents = [conversation(chat, messages) for messages in read_conversations(knobs.path)]
        else:
            documents = _text(knobs.path, chat, knobs.row_tokens)
        source = grain.MapDataset.source(documents).seed(seed).shuffle().repeat(None)
    else:
        raise base.InputError(f"lm.data={knobs.data!r} is none of 'demonstrations', 'jsonl', 'text'")

    def columns(document: Document) -> dict[str, np.ndarray]:
        if len(document.ids) > knobs.row_tokens:
            raise base.InputError(
                f"a document has {len(document.ids)} tokens, a row holds lm.row_tokens={knobs.row_tokens}: raise it"
            )
        return {"tokens": document.ids, "train": document.train}

    lengths = {"tokens": knobs.row_tokens, "train": knobs.row_tokens}
    packed = grain.experimental.FirstFitPackIterDataset(
        source.map(columns).to_iter_dataset(), length_struct=lengths, num_packing_bins=knobs.batch_rows
    )
    return iter(packed.batch(knobs.batch_rows, drop_remainder=True))


@functools.partial(jax.jit, static_argnames=("config", "chunk", "remat"))
def packed_loss(
    params,
    batch: dict[str, jax.Array],
    *,
    config: transformer.Config,
    chunk: int,
    remat: transformer.Remat = transformer.KEEP_ALL,
):
    """Mean negative log-prob of the predicted tokens over the whole batch, nats, and their number."""
    tokens_BT, segment_BT, positions_BT = batch["tokens"], batch["tokens_segment_ids"], batch["tokens_positions"]
    B, T = tokens_BT.shape
    place_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    zero_BT, used_BT = jnp.zeros_like(place_BT), segment_BT > 0
    start_BT, end_BT = jnp.where(used_BT, place_BT - positions_BT, 0), jnp.where(used_BT, place_BT + 1, 0)
    ranges = attention.Ranges(zero_BT, zero_BT, start_BT, end_BT)
    rows = transformer.Rows(tokens_BT, positions_BT, ranges)
    hidden_BTD = transformer.hidden_states(params, config, rows, remat=remat)
    logp_N = token_logprob.token_logprob(
        hidden_BTD[:, :-1].reshape(-1, hidden_BTD.shape[-1]),
        transformer.unembedding(params),
        tokens_BT[:, 1:].reshape(-1),
        soft_cap=config.logit_soft_cap,
        chunk=chunk,
    ).logp_N
    keep_N = (batch["train"][:, 1:].astype(bool) & (positions_BT[:, 1:] > 0) & used_BT[:, 1:]).reshape(-1)
    count = jnp.sum(keep_N)
    return -jnp.sum(jnp.where(keep_N, logp_N, 0.0)) / jnp.maximum(1, count), count


def make_update(
    config: transformer.Config,
    optimizer: optax.GradientTransformation,
    *,
    clip: float,
    chunk: int,
    remat: transformer.Remat = transformer.KEEP_ALL,
    places: Any = None,
):
    """Binds the static parts and jits: update(state, batch) -> (state, metrics). The state is donated.

    places: shardings of the state, which the new one keeps; None = as XLA likes (then a second step may compile again).
    """

    def update(state: base.TrainState, batch) -> tuple[base.TrainState, dict[str, Any]]:
        fn = functools.partial(packed_loss, batch=batch, config=config, chunk=chunk, remat=remat)
        (loss, count), grads = jax.value_and_grad(fn, has_aux=True)(state.params)
        grads, norm = optim.clip(grads, clip)
        changes, opt = optimizer.update(grads, state.opt, state.params)
        state = state.replace(step=state.step + 1, params=optax.apply_updates(state.params, changes), opt=opt)
        return state, {"loss": loss, "grad_norm": norm, "tokens": count}

    return jax.jit(update, donate_argnums=0, out_shardings=(places, None))


def perplexity(params, ids: list[int], *, config: transformer.Config, chunk: int, row_tokens: int = 512) -> float:
    """Scores a text in rows of `row_tokens` (each row starts afresh): exp of the mean nats per predicted token."""
    pieces = [ids[i : i + row_tokens] for i in range(0, len(ids), row_tokens)]
    total, tokens = 0.0, 0
    for piece in pieces:
        row = np.zeros((1, row_tokens), np.int32)
        row[0, : len(piece)] = piece
        used = (np.arange(row_tokens) < len(piece))[None]
        columns = {"tokens": row, "train": used, "tokens_segment_ids": used.astype(np.int32)}
        columns["tokens_positions"] = np.arange(row_tokens, dtype=np.int32)[None] * used
        loss, count = packed_loss(params, columns, config=config, chunk=chunk)
        total, tokens = total + float(loss) * int(count), tokens + int(count)
    return float(np.exp(total / max(1, tokens)))
