"""Log-probs without [T, V] against their definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax.kernels import token_logprob as logprob_op


def naive(hidden, unembed, target, temperature, soft_cap):
    logit = hidden @ unembed
    logit = soft_cap * jnp.tanh(logit / soft_cap) if soft_cap else logit
    logp = jax.nn.log_softmax(logit / temperature)
    return logp[jnp.arange(len(target)), target], -jnp.sum(jnp.exp(logp) * logp, axis=1)


def scored(hidden, unembed, target, weights, score):
    def total(hidden, unembed):
        logp, entropy = score(hidden, unembed, target)
        return jnp.sum(logp * weights[0] + entropy * weights[1]), (logp, entropy)

    (_, out), grads = jax.value_and_grad(total, (0, 1), has_aux=True)(hidden, unembed)
    return out, grads


def test_chunked_log_probs_are_the_naive_ones_for_any_chunk():
    rng = np.random.default_rng(0)
    hidden, unembed = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((13, 5), (5, 17)))
    target, weights = jnp.asarray(rng.integers(0, 17, 13)), jnp.asarray(rng.normal(size=(2, 13)), jnp.float32)
    knobs = {"temperature": 0.6, "soft_cap": 4.0}

    @jax.jit
    def all_chunks(hidden, unembed):
        scores = [functools.partial(logprob_op.token_logprob, chunk=chunk, **knobs) for chunk in (1, 4, 13)]
        scores.append(functools.partial(naive, **knobs))
        return [scored(hidden, unembed, target, weights, score) for score in scores]

    *chunked, want = all_chunks(hidden, unembed)
    for got in chunked:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=5e-6)


def test_T27_the_temperature_stands_inside_the_softmax():
    eye, target = jnp.eye(2), jnp.asarray([0])
    logp, _ = logprob_op.token_logprob(jnp.asarray([[2.0, 0.0]]), eye, target, temperature=0.5)
    np.testing.assert_allclose(logp, [-0.01815], atol=1e-5)
    raw, _ = logprob_op.token_logprob(jnp.asarray([[2.0, 0.0]]), eye, target)
    np.testing.assert_allclose([raw[0], raw[0] / 0.5], [-0.12693, -0.25386], atol=1e-5)


def test_T30_low_precision_states_are_scored_in_float32():
    rng = np.random.default_rng(1)
    hidden, unembed = (jnp.asarray(rng.normal(size=s) * 4, jnp.bfloat16) for s in ((4, 16), (16, 1000)))
    target = jnp.asarray([0, 1, 2, 3])
    got, entropy = logprob_op.token_logprob(hidden, unembed, target)
    want, _ = naive(hidden.astype(jnp.float32), unembed.astype(jnp.float32), target, 1.0, 0.0)
    assert got.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_T34_memory_does_not_grow_with_tokens_times_vocabulary():
    V, D, chunk = 4096, 4, 16

    def peak(tokens):
        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((tokens, D), jnp.float32), ((D, V), jnp.float32))]
        target = jax.ShapeDtypeStruct((tokens,), jnp.int32)

        def total(hidden, unembed, target):
            return jnp.sum(logprob_op.token_logprob(hidden, unembed, target, chunk=chunk)[0])

        compiled = jax.jit(jax.grad(total, (0, 1))).lower(*shapes, target).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = peak(64), peak(256)
    assert large - small < 64 * V * 4, (small, large)
    assert large < 256 * V * 4 / 2, (small, large)
