"""Log-probs without [N, V], and what both ops over a vocabulary share: chunks, memory, shards of the vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from rsi_jax.kernels import divergence as divergence_op
from rsi_jax.kernels import token_logprob as logprob_op
from rsi_jax.kernels import vocabulary

score = logprob_op.token_logprob


def draw(seed, *shapes, spread=1.0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape) * spread, jnp.float32) for shape in shapes]


def targets(seed, N, V):
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, N), jnp.int32)


def defined(hidden, unembed, target, temperature=1.0, soft_cap=0.0):
    """(logp, entropy, lse) as the textbook has them."""
    logit = hidden @ unembed
    logit = (soft_cap * jnp.tanh(logit / soft_cap) if soft_cap else logit) / temperature
    lse = jax.nn.logsumexp(logit, axis=1)
    logp = logit - lse[:, None]
    return logp[jnp.arange(len(target)), target], -jnp.sum(jnp.exp(logp) * logp, axis=1), lse


def weighed(fn, hidden, unembed, target, weights):
    """((logp, entropy, lse), gradients of their weighted sum in the hidden states and the unembedding)."""

    def total(hidden, unembed):
        found = fn(hidden, unembed, target)[:3]
        return sum(jnp.sum(w * x) for w, x in zip(weights, found, strict=True)), found

    grads, found = jax.grad(total, (0, 1), has_aux=True)(hidden, unembed)
    return found, grads


def in_float64(hidden, unembed, target, weights, **knobs):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (hidden, unembed, weights)]
        fn = jax.jit(functools.partial(weighed, functools.partial(defined, **knobs)))
        return jax.tree.map(np.asarray, fn(*wide[:2], np.asarray(target), wide[2]))


def assert_close(got, want, atol=2e-5):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol * max(1.0, np.max(np.abs(b), initial=0.0)))


@pytest.mark.parametrize(
    ("N", "D", "V", "chunk", "temperature", "soft_cap"),
    [
        (1, 1, 2, 0, 1.0, 0.0),
        (13, 5, 17, 1, 0.6, 4.0),
        (13, 5, 17, 4, 1.7, 0.0),
        (31, 3, 1, 7, 1.0, 2.0),
        (7, 8, 301, 7, 0.3, 30.0),
        (150, 6, 40_001, 0, 1.0, 0.0),
    ],
)
def test_scores_and_their_gradients_are_those_of_float64(N, D, V, chunk, temperature, soft_cap):
    hidden, unembed, weights = draw(N, (N, D), (D, V), (3, N))
    target, knobs = targets(N, N, V), {"temperature": temperature, "soft_cap": soft_cap}
    want = in_float64(hidden, unembed, target, weights, **knobs)
    for extra in ({"chunk": chunk}, {"implementation": "reference"}):
        got = jax.jit(functools.partial(weighed, functools.partial(score, **knobs, **extra)))(
            hidden, unembed, target, weights
        )
        assert_close(got, want)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["logp", "entropy", "lse"])
def test_each_score_alone_has_its_gradient(which):
    hidden, unembed, weights = draw(1, (9, 4), (4, 11), (3, 9))
    only, target = jnp.zeros((3, 9)).at[which].set(weights[which]), targets(1, 9, 11)

    def total(hidden, unembed):
        return jnp.sum(weights[which] * score(hidden, unembed, target, chunk=4)[which])  # the others have no cotangent

    got = jax.jit(jax.grad(total, (0, 1)))(hidden, unembed)
    assert_close(got, in_float64(hidden, unembed, target, only)[1])
    assert np.asarray(got[0]).any()


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.0, 1e-4, 1.0, 30.0, 1e4]))
def test_log_probs_are_at_most_0_and_entropies_at_least(seed, spread):
    hidden, unembed = draw(seed, (12, 6), (6, 33))
    found, grads = LAWS(hidden * spread, unembed, targets(seed, 12, 33), jnp.ones((3, 12)))
    assert (np.asarray(found[0]) <= 0).all() and (np.asarray(found[1]) >= 0).all()
    assert (np.asarray(found[1]) <= np.log(33) * (1 + 1e-6)).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((found, grads)))


LAWS = jax.jit(functools.partial(weighed, functools.partial(score, chunk=5)))


def test_a_common_offset_of_the_logits_changes_nothing():
    rng = np.random.default_rng(2)
    hidden, unembed = (jnp.asarray(rng.integers(-8, 9, size=s) / 4.0, jnp.float32) for s in ((9, 3), (3, 21)))
    target, weights = targets(2, 9, 21), draw(2, (3, 9))[0]  # sixteenths: still exact beside 10,000
    shifted = jnp.pad(hidden, ((0, 0), (0, 1)), constant_values=1.0), jnp.pad(unembed, ((0, 1), (0, 0)))
    shifted = shifted[0], shifted[1].at[3].set(1e4)
    run = jax.jit(functools.partial(weighed, functools.partial(score, chunk=4)))
    (logp, entropy, lse), grads = run(hidden, unembed, target, weights)
    (far_logp, far_entropy, far_lse), far_grads = run(*shifted, target, weights)
    assert_close((far_logp, far_entropy), (logp, entropy), atol=1e-6)
    np.testing.assert_allclose(far_lse - 1e4, lse, atol=1e-3)
    assert_close((far_grads[0][:, :3], far_grads[1][:3]), grads, atol=1e-6)


def test_a_target_that_is_hardly_possible_is_scored_and_pulled():
    unembed, target = jnp.eye(3), jnp.asarray([2])
    hidden = jnp.asarray([[0.0, 0.0, -200.0]])
    logp, pull = jax.vjp(lambda h: score(h, unembed, target).logp_N, hidden)
    np.testing.assert_allclose(logp, [-200.0 - np.log(2)], rtol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones(1))[0], [[-0.5, -0.5, 1.0]], atol=1e-6)


def test_T27_the_temperature_stands_inside_the_softmax():
    hidden, eye, target = jnp.asarray([[2.0, 0.0]]), jnp.eye(2), jnp.asarray([0])
    np.testing.assert_allclose(score(hidden, eye, target, temperature=0.5).logp_N, [-0.01815], atol=1e-5)
    raw = score(hidden, eye, target).logp_N
    np.testing.assert_allclose([raw[0], raw[0] / 0.5], [-0.12693, -0.25386], atol=1e-5)


def test_T30_low_precision_states_are_scored_in_float32():
    hidden, unembed = (x.astype(jnp.bfloat16) for x in draw(1, (4, 16), (16, 1000), spread=4.0))
    target, weights = jnp.asarray([0, 1, 2, 3]), jnp.ones((3, 4))
    got, grads = jax.jit(functools.partial(weighed, functools.partial(score, chunk=2)))(
        hidden, unembed, target, weights
    )
    want, want_grads = in_float64(hidden.astype(jnp.float32), unembed.astype(jnp.float32), target, weights)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=1e-4)
    for a, b in zip(grads, want_grads, strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(a.astype(jnp.float32), b, atol=0.02 * np.max(np.abs(b)))


def test_the_gradient_of_the_unembedding_adds_up_in_float32():
    """In bfloat16 a sum of equal terms stands still at 256 of them."""
    hidden, unembed = jnp.ones((1024, 1), jnp.bfloat16), jnp.zeros((1, 4), jnp.bfloat16)
    grad = jax.grad(lambda w: jnp.sum(score(hidden, w, jnp.zeros(1024, jnp.int32), chunk=1).logp_N))(unembed)
    np.testing.assert_allclose(grad.astype(jnp.float32), [[768.0, -256.0, -256.0, -256.0]], rtol=1e-2)


@pytest.mark.parametrize("chunk", [0, 1])
def test_no_token_and_one_token(chunk):
    unembed = draw(3, (4, 9))[0]
    for N in (0, 1):
        hidden, weights = draw(4, (N, 4), (3, N))
        run = jax.jit(functools.partial(weighed, functools.partial(score, chunk=chunk)))
        got = run(hidden, unembed, targets(3, N, 9), weights)
        assert_close(got, in_float64(hidden, unembed, targets(3, N, 9), weights))
        value = divergence_op.divergence(hidden, unembed, hidden, unembed, targets(3, N, 9), chunk=chunk)
        assert value.shape == (N,) and not np.asarray(value).any()


@pytest.mark.parametrize("extra", [{"chunk": 3}, {"implementation": "reference"}])
def test_the_most_likely_words_come_in_order_and_without_a_gradient(extra):
    rng = np.random.default_rng(5)
    logit = rng.integers(0, 4, size=(7, 12)).astype(np.float32)  # ties in every row
    fn = functools.partial(score, unembed_DV=jnp.eye(12), target_N=jnp.zeros(7, jnp.int32), top_k=5, **extra)
    got, pull = jax.vjp(lambda h: fn(h).top_logp_NK, jnp.asarray(logit))
    order = np.argsort(-logit, axis=1, kind="stable")[:, :5]
    np.testing.assert_array_equal(fn(jnp.asarray(logit)).top_id_NK, order)
    logp = logit - np.log(np.sum(np.exp(logit), axis=1, keepdims=True))
    np.testing.assert_allclose(got, np.take_along_axis(logp, order, axis=1), atol=1e-6)
    assert not np.asarray(pull(jnp.ones_like(got))[0]).any()
    assert score(jnp.asarray(logit), jnp.eye(12), jnp.zeros(7, jnp.int32), **extra).top_id_NK is None


@pytest.mark.parametrize("extra", [{}, {"implementation": "reference"}])
def test_a_target_outside_the_vocabulary_is_not_a_number(extra):
    hidden, unembed = draw(6, (3, 4), (4, 5))
    logp = score(hidden, unembed, jnp.asarray([-1, 4, 5]), **extra).logp_N
    np.testing.assert_array_equal(np.isnan(logp), [True, False, True])


def test_vmap_scan_and_remat_change_nothing():
    hidden, unembed, weights = draw(7, (3, 10, 4), (4, 19), (3, 3, 10))
    target = jnp.stack([targets(s, 10, 19) for s in range(3)])
    one = jax.jit(functools.partial(weighed, functools.partial(score, chunk=4), unembed=unembed))
    each = [one(hidden[i], target=target[i], weights=weights[i]) for i in range(3)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    by_vmap = jax.jit(jax.vmap(lambda h, y, w: one(h, target=y, weights=w)))(hidden, target, weights)
    by_scan = jax.lax.scan(lambda c, x: (c, one(x[0], target=x[1], weights=x[2])), 0, (hidden, target, weights))[1]
    again = jax.jit(functools.partial(weighed, jax.checkpoint(functools.partial(score, chunk=4))))
    by_remat = again(hidden[0], unembed, target[0], weights[0])
    for got, expected in ((by_vmap, want), (by_scan, want), (by_remat, each[0])):
        assert_close(got, expected, atol=1e-6)


# --- chunks ----------------------------------------------------------------------------------------------------------


@given(chunk=st.integers(0, 50), tokens=st.integers(1, 500), vocab=st.integers(1, 300_000))
def test_chunks_hold_every_token_and_are_even(chunk, tokens, vocab):
    rows = vocabulary.rows_of(chunk, tokens, vocab)
    count = -(-tokens // rows)
    assert 1 <= rows <= tokens and count * rows - tokens < count
    assert rows <= (chunk or max(vocabulary.ROWS, vocabulary.LOGITS // vocab))


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (7, 3), (8, 4), (5, 4)])
def test_chunks_joined_are_what_was_split(tokens, rows):
    x = jnp.arange(2 * tokens).reshape(tokens, 2)
    split = vocabulary.split(x, rows)
    assert split.shape == (-(-tokens // rows), rows, 2)
    np.testing.assert_array_equal(vocabulary.join(split, tokens), x)


def test_a_small_vocabulary_is_scored_in_one_piece():
    assert vocabulary.rows_of(0, 4096, 64) == vocabulary.rows_of(0, 4096, 512) == 4096
    assert vocabulary.rows_of(0, 4096, 32_768) == vocabulary.rows_of(0, 4096, 151_936) == 128


@pytest.mark.parametrize("name", ["logp", "forward_kl", "jsd"])
def test_T34_memory_does_not_grow_with_tokens_times_vocabulary(name):
    V, D, chunk = 4096, 4, 16

    def peak(tokens):
        shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((tokens, D), jnp.float32), ((D, V), jnp.float32))]
        target = jax.ShapeDtypeStruct((tokens,), jnp.int32)

        def total(hidden, unembed, target):
            if name == "logp":
                return jnp.sum(sum(score(hidden, unembed, target, chunk=chunk)[:3]))
            args = hidden, unembed, 0.5 * hidden, 2.0 * unembed, target
            return jnp.sum(divergence_op.divergence(*args, name=name, chunk=chunk))

        compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*shapes, target).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    small, large = peak(64), peak(256)
    assert large - small < 64 * V * 4, (small, large)
    assert large < 256 * V * 4 / 2, (small, large)


# --- the vocabulary over shards --------------------------------------------------------------------------------------


def sharded(fn, data, tensor, out):
    """Runs fn(hidden, unembed, ...) with tokens over `data` and columns of the unembeddings over `tensor`."""
    mesh = Mesh(np.array(jax.devices()[: data * tensor]).reshape(data, tensor), ("data", "tensor"))
    rows, columns = P("data"), P(None, "tensor")
    return jax.shard_map(fn, mesh=mesh, in_specs=(rows, columns, rows, columns, rows), out_specs=out)


needs_8_devices = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@needs_8_devices
@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 4)])
def test_scores_of_a_split_vocabulary_are_those_of_the_whole(data, tensor):
    hidden, unembed, weights, top_weights = draw(8, (12, 5), (5, 24), (3, 12), (12, 9))
    target, knobs = targets(8, 12, 24), {"temperature": 0.8, "soft_cap": 3.0, "chunk": 4, "top_k": 9}

    def graded(fn):
        def total(hidden, unembed):
            found = fn(hidden, unembed)
            return sum(jnp.sum(w * x) for w, x in zip(weights, found[:3], strict=True)), found

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, unembed)

    def split(hidden, unembed):
        run = sharded(lambda h, w, *rest: score(h, w, rest[-1], vocab_axis="tensor", **knobs), data, tensor, P("data"))
        return run(hidden, unembed, hidden, unembed, target)

    got, want = graded(split), graded(lambda h, w: score(h, w, target, **knobs))
    assert_close(got, want, atol=1e-5)
    np.testing.assert_array_equal(got[1].top_id_NK, want[1].top_id_NK)


@needs_8_devices
@pytest.mark.parametrize(("data", "tensor", "knobs"), [
    (2, 4, {"name": "forward_kl"}), (1, 2, {"name": "reverse_kl", "entry_clip": 0.05}),
    (2, 4, {"name": "jsd", "alpha": 0.3, "clip": 0.3}), (1, 2, {"name": "sampled"}),
    (2, 4, {"name": "forward_kl", "top_k": 7}), (1, 2, {"name": "reverse_kl", "top_k": 22}),
], ids=str)  # fmt: skip
def test_divergences_of_a_split_vocabulary_are_those_of_the_whole(data, tensor, knobs):
    arrays = draw(9, (12, 5), (5, 24), (12, 5), (5, 24))
    target, weights = targets(9, 12, 24), draw(10, (12,))[0]
    run = functools.partial(divergence_op.divergence, chunk=4, **knobs)
    split = sharded(functools.partial(run, vocab_axis="tensor"), data, tensor, P("data"))

    def graded(fn):
        def total(arrays):
            value = fn(*arrays, target)
            return jnp.sum(weights * value), value

        return jax.jit(jax.grad(total, has_aux=True))(arrays)

    got, want = graded(split), graded(run)
    assert_close(got, want, atol=1e-5)
    assert np.asarray(want[0][1]).any() and not np.asarray(got[0][2]).any() and not np.asarray(got[0][3]).any()


@needs_8_devices
def test_misuse_of_a_split_vocabulary_is_named():
    hidden, unembed, target = *draw(11, (4, 3), (3, 8)), jnp.zeros(4, jnp.int32)
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",))
    columns = P(None, "tensor")

    def run(unembed, spec, implementation="chunked", **options):
        fn = functools.partial(score, vocab_axis="tensor", implementation=implementation)
        jax.shard_map(fn, mesh=mesh, in_specs=(P(), spec, P()), out_specs=P(), **options)(hidden, unembed, target)

    with pytest.raises(ValueError, match="check_vma=True"):
        run(unembed, columns, check_vma=False)
    with pytest.raises(ValueError, match="needs an unembedding split over that axis"):
        run(unembed, P())
    with pytest.raises(ValueError, match="the reference holds the whole vocabulary"):
        run(unembed, columns, "reference")
    with pytest.raises(ValueError, match="divisible"):  # shards are equal: pad the vocabulary in the model, not here
        run(unembed[:, :7], columns)


def test_misuse_is_named():
    hidden, unembed, target = *draw(12, (4, 3), (3, 8)), jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="token_logprob has no implementation 'fused'; known: reference, chunked"):
        score(hidden, unembed, target, implementation="fused")
    for knobs in ({"temperature": 0.0}, {"soft_cap": -1.0}, {"chunk": -1}):
        with pytest.raises(ValueError, match="temperature > 0, soft_cap >= 0 and chunk >= 0"):
            score(hidden, unembed, target, **knobs)
        with pytest.raises(ValueError, match="divergence needs temperature"):
            divergence_op.divergence(hidden, unembed, hidden, unembed, target, **knobs)
