"""The decoder's laws: no token sees the future or the padding, and the cache says what whole rows say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax.kernels import attention
from rsi_jax.model import transformer
from tests import tiny

PLAIN = tiny.config(layers=2)
# Every option at once.
FULL = tiny.config(
    layers=2, qk_norm=True, window=3, attention_soft_cap=4.0, logit_soft_cap=3.0, tied=False, value_head=True
)
B, T = 3, 11


def whole(params, config, tokens, length=(T, T, T), shift=0, *, remat=transformer.KEEP_ALL):
    tokens = jnp.asarray(tokens, jnp.int32)
    B, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width) + shift, (B, width))
    ranges = attention.causal_ranges(jnp.asarray(length), width)
    return transformer.hidden_states(params, config, transformer.Rows(tokens, positions, ranges), remat=remat)


read = jax.jit(whole, static_argnames=("config",))


def draw(seed):
    return np.random.default_rng(seed).integers(0, 64, (B, T))


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_the_future_changes_nothing(config):
    params, tokens, t = tiny.params(config), draw(7), 6
    changed = np.where(np.arange(T) > t, 50, tokens)
    a, b = read(params, config, tokens), read(params, config, changed)
    np.testing.assert_array_equal(a[:, : t + 1], b[:, : t + 1])
    assert np.asarray(a[:, t + 1 :] != b[:, t + 1 :]).any()


def test_the_future_has_no_gradient_and_a_window_reaches_so_far_back():
    t, tokens = 6, np.arange(T)[None] + 3  # one word per place: the gradient on a word is that on its place

    @jax.jit
    def pull(params):
        grads = jax.grad(lambda p: jnp.sum(whole(p, FULL, tokens, (T,))[0, t] * jnp.arange(1.0, 9.0)))(params)
        return grads["embed"]["embedding"][tokens[0]]

    grad, place = np.asarray(pull(tiny.params(FULL))), np.arange(T)
    reach = FULL.layers * (FULL.window - 1)
    np.testing.assert_array_equal(grad.any(axis=1), (place <= t) & (place >= t - reach))


def test_padding_changes_nothing_whatever_stands_there():
    params, tokens, length = tiny.params(FULL), draw(0), np.array([5, 8, 0])
    valid = np.arange(T) < length[:, None]
    a = np.asarray(read(params, FULL, tokens, length))
    garbage = np.asarray(read(params, FULL, np.where(valid, tokens, 7), length))
    np.testing.assert_array_equal(a[valid], garbage[valid])
    wider = np.asarray(read(params, FULL, np.pad(tokens, ((0, 0), (0, 3))), length))
    np.testing.assert_allclose(wider[:, :T][valid], a[valid], atol=1e-5)
    assert np.isfinite(wider).all()


def test_rows_do_not_see_each_other():
    params, tokens = tiny.params(PLAIN), draw(1)
    a, b = (read(params, PLAIN, x) for x in (tokens, np.stack([tokens[0], tokens[2], tokens[0]])))
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_allclose(a[2], b[1], atol=1e-6)


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_the_cache_in_any_chunks_says_what_whole_rows_say(config):
    params, tokens, O = tiny.params(config), draw(2), 4
    want = np.asarray(read(params, config, tokens))
    extend = jax.jit(functools.partial(transformer.extend, config=config))
    for seed in range(3):
        rng = np.random.default_rng(seed)
        cache, cached = transformer.new_cache(config, B, T + 2), np.zeros(B, np.int32)
        cache = jax.tree.map(lambda x: x + 100.0, cache)  # what a former stream left behind
        while (cached < T).any():
            length = np.minimum(rng.integers(0, O + 1, B), T - cached).astype(np.int32)  # 0: the row waits
            chunk = np.full((B, O), 9, np.int32)
            for b in range(B):
                chunk[b, : length[b]] = tokens[b, cached[b] : cached[b] + length[b]]
            before = cache
            hidden, cache = extend(params, tokens_BO=chunk, cached_B=cached, chunk_length_B=length, cache=cache)
            waiting = length == 0
            for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(cache), strict=True):
                np.testing.assert_array_equal(np.asarray(old)[waiting], np.asarray(new)[waiting])
            for b in range(B):
                place = slice(cached[b], cached[b] + length[b])
                np.testing.assert_allclose(hidden[b, : length[b]], want[b, place], atol=1e-5)
            cached += length


def test_only_distances_count():
    params, tokens = tiny.params(FULL), draw(3)
    shifted = read(params, FULL, tokens, shift=100)
    np.testing.assert_allclose(read(params, FULL, tokens), shifted, atol=1e-4)


REMATS = [transformer.Remat(keep, offload) for keep in transformer.REMATS for offload in (False, True)]


def test_what_is_recomputed_or_waits_elsewhere_changes_no_gradient():
    config, tokens = tiny.config(), draw(4)

    def graded(params, remat):
        return jax.value_and_grad(lambda p: jnp.sum(whole(p, config, tokens, remat=remat) ** 2))(params)

    none, impossible, *others = REMATS
    want, *found = jax.jit(lambda p: [graded(p, remat) for remat in (none, *others)])(tiny.params(config))
    for got in found:
        tiny.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for wrong in (impossible, transformer.Remat("all")):
        with pytest.raises(ValueError, match="is none of"):
            graded(tiny.params(config), wrong)


def test_bfloat16_computes_near_float32_and_keeps_float32_masters():
    low, tokens, params = tiny.config(layers=2, dtype="bfloat16"), draw(5), tiny.params(PLAIN)

    def total(params):
        hidden = whole(params, low, tokens)
        return jnp.sum(hidden), hidden

    grads, hidden = jax.jit(jax.grad(total, has_aux=True))(params)
    assert hidden.dtype == jnp.float32 and all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))
    gap = np.abs(np.asarray(hidden - read(params, PLAIN, tokens)))
    assert 1e-4 < gap.max() < 0.15
    assert transformer.new_cache(low, 1, 2)[0][0].dtype == jnp.bfloat16


@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_every_parameter_has_its_axes(config):
    for path, leaf in tiny.leaves(tiny.params(config)).items():
        names = [axes for end, axes in transformer.LOGICAL_AXES.items() if path.endswith(end)]
        assert len(names) == 1 and len(names[0]) == leaf.ndim, path


def test_a_fresh_model_predicts_near_uniformly_and_its_critic_says_zero():
    params = transformer.init(tiny.config(value_head=True), jax.random.key(0))
    states = np.random.default_rng(0).normal(size=(B, T, 8)).astype(np.float32)  # a final norm gives unit variance
    assert not np.asarray(transformer.values(params, states)).any()
    logp = np.asarray(jax.nn.log_softmax(states @ transformer.unembedding(params)))
    entropy = -np.sum(np.exp(logp) * logp, axis=-1)
    assert np.log(64) - 1.0 < entropy.mean() <= np.log(64)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


def test_shapes_that_cannot_be_are_named():
    with pytest.raises(ValueError, match="model.heads=3 must be a multiple of model.kv_heads=2"):
        tiny.config(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="model.head_size=5 must be even"):
        tiny.config(head_size=5)
