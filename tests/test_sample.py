"""The sampler says of a token what whole rows say; its support, its stops, and rows that keep to themselves."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import base, sample
from rsi_jax.kernels import attention
from rsi_jax.model import transformer
from tests import tiny

CONFIG = tiny.config(window=6, logit_soft_cap=5.0)
B, T, A, O = 4, 24, 5, 4  # rows, capacity, budget of a turn, chunk width
PLAIN = sample.Sampling(max_tokens=A)
PROMPTS = ([5, 6, 7], [8], [9, 10, 11, 12], [13, 14])
SEEN = ([20, 21], [22], [23, 24, 25], [26])  # what is shown after the first turn


def keys_of(rows=range(B), seed=0):
    return jax.vmap(lambda i: jax.random.fold_in(jax.random.key(seed), i))(jnp.asarray(list(rows)))


class Streams:
    """Slots that are played turn by turn: their tokens, and what the sampler said of those it drew."""

    def __init__(self, params, sampling, *, rows=range(B), capacity=T, config=CONFIG):
        self.params, self.sampling, self.config, self.keys = params, sampling, config, keys_of(rows)
        n = len(self.keys)
        self.cache = transformer.new_cache(config, n, capacity)
        self.tokens, self.cached = [[] for _ in range(n)], np.zeros(n, np.int32)
        self.logp, self.kept = np.full((n, T + 1), np.nan), np.full((n, T + 1), np.nan)

    def turn(self, shown) -> sample.Turn:
        """Appends what is shown to each row ([] = the row waits) and samples."""
        n = len(self.tokens)
        chunk, length = np.full((n, O), 60, np.int32), np.zeros(n, np.int32)
        for i, ids in enumerate(shown):
            if ids:
                self.tokens[i] += ids
                pending = self.tokens[i][self.cached[i] :]
                chunk[i, : len(pending)], length[i] = pending, len(pending)
        self.cache, out = sample.turn(
            self.params, self.cache, chunk, length, self.cached, self.keys, config=self.config, sampling=self.sampling
        )
        out = jax.device_get(out)
        for i, count in enumerate(out.length_B):
            at = slice(len(self.tokens[i]), len(self.tokens[i]) + count)
            self.logp[i, at], self.kept[i, at] = out.logp_BA[i, :count], out.kept_mass_BA[i, :count]
            self.tokens[i] += out.tokens_BA[i, :count].tolist()
        self.cached = self.cached + length + np.maximum(out.length_B - 1, 0) * (length > 0)
        return out


@functools.partial(jax.jit, static_argnames=("config",))
def _logits(params, tokens, length, *, config):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ranges = attention.causal_ranges(length, tokens.shape[1])
    logits = transformer.hidden_states(
        params, config, transformer.Rows(tokens, positions, ranges)
    ) @ transformer.unembedding(params)
    return config.logit_soft_cap * jnp.tanh(logits / config.logit_soft_cap)


def forced(params, streams, temperature=1.0):
    """Teacher-forced log-probs of every word at every place [B, T + 1, V]; place t is predicted from before t."""
    tokens, length = np.zeros((B, T), np.int32), np.zeros(B, np.int32)
    for i, ids in enumerate(streams[:B]):
        tokens[i, : len(ids)], length[i] = ids, len(ids)
    logits = np.asarray(_logits(params, tokens, length, config=CONFIG))
    return np.pad(np.asarray(jax.nn.log_softmax(logits / temperature)), ((0, 0), (1, 0), (0, 0)))


def chosen(logp, streams):
    return np.array([[logp[i, t, y] for t, y in enumerate(ids)] + [0] * (T + 1 - len(ids)) for i, ids in streams])


def check_against_whole_rows(streams, params):
    """Every sampled log-prob, its kept mass put back, is that of the whole row under `params`."""
    logp = forced(params, streams.tokens, streams.sampling.temperature)
    want = chosen(logp, enumerate(streams.tokens))
    sampled = ~np.isnan(streams.logp)
    got = streams.logp + np.log(streams.kept)
    np.testing.assert_allclose(got[sampled], want[sampled], atol=1e-4)
    return logp, sampled


def two_turns(sampling, params, **knobs):
    streams = Streams(params, sampling, **knobs)
    streams.turn(PROMPTS)
    streams.turn(SEEN)
    return streams


PARAMS = functools.cache(tiny.params)


def test_T33_cached_log_probs_are_those_of_whole_rows_also_after_an_update():
    for seed in (0, 1):  # the same program with other weights, as after an update
        streams = two_turns(PLAIN, PARAMS(CONFIG, seed))
        _, sampled = check_against_whole_rows(streams, PARAMS(CONFIG, seed))
        assert sampled.sum() == 2 * A * B
        assert (streams.kept[sampled] == 1.0).all()
        for ids, prompt, seen in zip(streams.tokens, PROMPTS, SEEN, strict=True):  # appended to, never rewritten
            assert ids[: len(prompt)] == prompt and ids[len(prompt) + A :][: len(seen)] == seen


def test_a_row_is_the_same_in_any_slot_beside_any_neighbours():
    params = PARAMS(CONFIG)
    want = two_turns(PLAIN, params)
    order = [2, 0, 3, 1]
    streams = Streams(params, PLAIN, rows=order)
    for shown in (PROMPTS, SEEN):
        mine = [shown[row] for row in order]
        out = streams.turn([*mine[:2], [], []])  # half of the slots wait
        assert (out.finish_B[2:] == base.NOT_SAMPLED).all() and (out.length_B[2:] == 0).all()
        assert not out.tokens_BA[2:].any() and not out.logp_BA[2:].any() and (out.kept_mass_BA[2:] == 1).all()
        streams.turn([[], [], *mine[2:]])
    alone = Streams(params, PLAIN, rows=[2])
    for shown in (PROMPTS, SEEN):
        alone.turn([shown[2]])
    for slot, row in enumerate(order):
        assert streams.tokens[slot] == want.tokens[row]
        np.testing.assert_allclose(streams.logp[slot], want.logp[row], atol=1e-6)
    assert alone.tokens[0] == want.tokens[2]


def test_T23_finish_reasons_come_from_the_stop_set_and_the_budget():
    free = Streams(PARAMS(CONFIG), PLAIN)
    drawn = free.turn(PROMPTS)
    assert (drawn.finish_B == base.LENGTH).all() and (drawn.length_B == A).all()
    stops = (int(drawn.tokens_BA[0, 1]), int(drawn.tokens_BA[1, A - 1]))
    streams = Streams(PARAMS(CONFIG), dataclasses.replace(PLAIN, stop_ids=stops))
    out = streams.turn(PROMPTS)
    hit = np.isin(drawn.tokens_BA, stops)
    length = np.where(hit.any(axis=1), hit.argmax(axis=1) + 1, A)
    np.testing.assert_array_equal(out.length_B, length)
    np.testing.assert_array_equal(out.finish_B, np.where(hit.any(axis=1), base.STOP, base.LENGTH))
    assert out.finish_B[1] == base.STOP and length[1] == A  # a stop on the last token of the budget is a stop
    assert (out.finish_B == base.LENGTH).any() and (length < A).any()
    for i, n in enumerate(length):  # the stop token is sampled, scored and kept; nothing stands behind it
        np.testing.assert_array_equal(out.tokens_BA[i, :n], drawn.tokens_BA[i, :n])
        np.testing.assert_allclose(out.logp_BA[i, :n], drawn.logp_BA[i, :n], atol=1e-6)
        assert not out.tokens_BA[i, n:].any() and not out.logp_BA[i, n:].any() and (out.logp_BA[i, :n] < 0).all()
    streams.turn(SEEN)  # rows that stopped at different lengths go on from where they are
    check_against_whole_rows(streams, PARAMS(CONFIG))


def test_a_full_context_ends_the_turn_for_length():
    streams = Streams(PARAMS(CONFIG), PLAIN, capacity=7)
    out = streams.turn(PROMPTS)
    np.testing.assert_array_equal(out.length_B, [4, 5, 3, 5])  # never more than 7 tokens in all
    assert (out.finish_B == base.LENGTH).all()
    check_against_whole_rows(streams, PARAMS(CONFIG))


def test_T28_kept_mass_puts_the_full_log_prob_back_at_any_temperature():
    sampling = sample.Sampling(temperature=1.4, top_p=0.6, top_k=12, max_tokens=A)
    streams = two_turns(sampling, PARAMS(CONFIG))
    logp, sampled = check_against_whole_rows(streams, PARAMS(CONFIG))
    assert (streams.kept[sampled] < 0.999).all()
    for i, t in np.argwhere(sampled):
        p = np.exp(logp[i, t])
        rank = np.sum(p > p[streams.tokens[i][t]])
        above, mass = np.sort(p)[::-1][:rank].sum(), np.sort(p)[::-1][: sampling.top_k].sum()
        assert rank < sampling.top_k and above / mass < sampling.top_p + 1e-6


def test_greedy_takes_the_mode():
    streams = two_turns(sample.Sampling(greedy=True, max_tokens=A), PARAMS(CONFIG))
    logp, sampled = check_against_whole_rows(streams, PARAMS(CONFIG))
    for i, t in np.argwhere(sampled):
        assert logp[i, t, streams.tokens[i][t]] >= logp[i, t].max() - 1e-5


def test_frequencies_are_those_of_the_softmax():
    n = 2000
    streams = Streams(PARAMS(CONFIG), sample.Sampling(temperature=0.8, max_tokens=1), rows=range(n), capacity=O)
    out = streams.turn([[5, 6]] * n)
    p = np.exp(forced(PARAMS(CONFIG), [[5, 6]], temperature=0.8)[0, 2])
    np.testing.assert_allclose(out.logp_BA[:, 0], np.log(p)[out.tokens_BA[:, 0]], atol=1e-4)
    share = np.bincount(out.tokens_BA[:, 0], minlength=64) / n
    assert np.abs(share - p).max() < 5 * np.sqrt(0.25 / n)
    assert np.sum((share - p) ** 2 / p) * n < 63 + 6 * np.sqrt(2 * 63)  # chi-square, six standard deviations


# --- the support -----------------------------------------------------------------------------------------------------

KNOBS = ((0, 0.3), (0, 0.95), (1, 1.0), (3, 1.0), (5, 0.7), (9, 1.0))
supports = jax.jit(lambda logits: {knobs: sample.restrict(logits, *knobs) for knobs in KNOBS})


def test_T28_support_of_top_p():
    p = np.array([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3]])
    logp, mass = sample.restrict(jnp.log(jnp.asarray(p)), 0, 0.9)
    np.testing.assert_allclose(np.exp(logp), [[2 / 3, 1 / 3, 0], [0, 2 / 3, 1 / 3]], atol=1e-6)
    np.testing.assert_allclose(mass, [0.9, 0.9], atol=1e-6)
    np.testing.assert_allclose(logp[0, 0], np.log(0.6667), atol=1e-4)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.1, 2.0, 20.0]))
def test_the_support_is_the_smallest_set_that_qualifies(seed, spread):
    logits = jnp.asarray(np.random.default_rng(seed).normal(size=(4, 8)) * spread, jnp.float32)
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(axis=1, keepdims=True)
    for knobs, (logp, mass) in supports(logits).items():
        check_support(p, np.asarray(logp, np.float64), np.asarray(mass, np.float64), *knobs)


def check_support(p, logp, mass, top_k, top_p):
    keep = np.isfinite(logp)
    np.testing.assert_allclose(np.exp(logp).sum(axis=1), 1.0, atol=1e-5)
    np.testing.assert_allclose(mass, np.where(keep, p, 0).sum(axis=1), atol=1e-5)
    np.testing.assert_allclose(np.exp(logp), np.where(keep, p, 0) / mass[:, None], atol=1e-5)
    assert (np.where(keep, p, 1).min(axis=1) >= np.where(keep, 0, p).max(axis=1)).all()  # the likeliest ones
    k = min(top_k or 8, 8)
    assert (keep.sum(axis=1) <= k).all() and keep.any(axis=1).all()
    if top_p == 1.0:
        assert (keep.sum(axis=1) == k).all()
    else:
        within = np.sort(p, axis=1)[:, ::-1][:, :k].sum(axis=1)
        smallest = np.where(keep, p, 1).min(axis=1)
        assert (mass / within >= top_p - 1e-5).all() and ((mass - smallest) / within < top_p + 1e-5).all()


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        ({"temperature": 0.0}, "temperature=0.0 must be > 0"),
        ({"top_p": 0.0}, "top_p=0.0 must be in"),
        ({"top_k": -1}, "top_k must be >= 0"),
        ({"max_tokens": 0}, "max_tokens >= 1"),
    ],
)
def test_knobs_out_of_range_are_named(knobs, says):
    with pytest.raises(base.InputError, match=says):
        sample.Sampling(**knobs)
