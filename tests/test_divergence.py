"""Divergences of student and teacher: closed forms, limits, data processing, and what never has a gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import losses
from rsi_jax.kernels import divergence as divergence_op
from rsi_jax.kernels.divergence.api import NAMES

V = 7
N = V  # as many tokens as words: every row can sample another word
EXACT = ("forward_kl", "reverse_kl", "jsd")


def draw(seed, spread=1.5):
    rng = np.random.default_rng(seed)
    student, teacher = (jnp.asarray(rng.normal(size=(N, V)) * spread, jnp.float32) for _ in range(2))
    return student, teacher, jnp.asarray(rng.integers(0, V, N), jnp.int32)


def kl(log_p, log_q):
    """KL in float64."""
    return np.sum(np.exp(log_p) * (log_p - log_q), axis=-1)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.sum(np.exp(x), axis=-1, keepdims=True))


def valued(student, teacher, target, **knobs):
    """(value per token, gradient of each token's value on its student logits)."""
    fn = functools.partial(divergence_op.from_logits, teacher_NV=teacher, target_N=target, **knobs)
    value, pull = jax.vjp(fn, student)
    return value, pull(jnp.ones_like(value))[0]


@jax.jit
def everything(student, teacher, target):
    """Every name at several top_k, in one program for all tests."""
    return {name: {k: valued(student, teacher, target, name=name, top_k=k) for k in (0, 1, 3, V)} for name in NAMES}


def test_T54_values_from_probabilities():
    student, teacher = (jnp.log(jnp.asarray([p])) for p in ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2]))
    target = jnp.zeros(1, jnp.int32)
    got = [float(divergence_op.from_logits(student, teacher, target, name=name)[0]) for name in EXACT]
    np.testing.assert_allclose(got, [0.092033, 0.085123, 0.021901], atol=1e-6)
    weights = losses.importance_weights(jnp.asarray([[2.0, 0.0]]), jnp.ones((1, 2), bool), high=2.0)
    np.testing.assert_allclose(weights, [[2.0, 1.0]])


def test_closed_form_gradients():
    student, teacher, target = draw(0)
    log_s, log_t = log_softmax(student), log_softmax(teacher)
    s, t = np.exp(log_s), np.exp(log_t)
    delta = (log_t - log_s)[np.arange(N), target]
    want = {
        "forward_kl": s - t,
        "reverse_kl": s * (log_s - log_t - kl(log_s, log_t)[:, None]),
        "sampled": -delta[:, None] * (np.eye(V)[np.asarray(target)] - s),
    }
    found = everything(student, teacher, target)
    for name, exact in want.items():
        np.testing.assert_allclose(found[name][0][1], exact, atol=2e-6, err_msg=name)
    np.testing.assert_allclose(found["forward_kl"][0][0], kl(log_t, log_s), atol=2e-6)
    np.testing.assert_allclose(found["reverse_kl"][0][0], kl(log_s, log_t), atol=2e-6)


def test_the_sampled_form_has_the_reverse_kl_gradient_in_expectation():
    student, teacher, _ = (jnp.broadcast_to(x[:1], x.shape) for x in draw(1))
    found = everything(student, teacher, jnp.arange(V, dtype=jnp.int32))  # one distribution, every word sampled once
    expected = np.exp(log_softmax(student))[0] @ np.asarray(found["sampled"][0][1])
    np.testing.assert_allclose(expected, found["reverse_kl"][0][1][0], atol=2e-6)


@pytest.mark.parametrize("spread", [0.3, 2.0, 30.0])
def test_jsd_is_symmetric_bounded_and_half_way(spread):
    student, teacher, target = draw(2, spread)
    a, b = (everything(*pair, target)["jsd"][0][0] for pair in ((student, teacher), (teacher, student)))
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert (np.asarray(a) <= np.log(2) + 1e-6).all() and (np.asarray(a) >= -1e-6).all()
    half = np.log((np.exp(log_softmax(student)) + np.exp(log_softmax(teacher))) / 2)
    exact = (kl(log_softmax(student), half) + kl(log_softmax(teacher), half)) / 2
    np.testing.assert_allclose(a, exact, atol=1e-5)


def test_the_scale_of_jsd_is_constant_over_alpha():
    alphas = (1e-3, 0.1, 0.5, 0.9, 1 - 1e-3)

    @jax.jit
    def jsd(student, teacher):
        target = jnp.zeros(N, jnp.int32)
        return [divergence_op.from_logits(student, teacher, target, name="jsd", alpha=alpha) for alpha in alphas]

    student, teacher, target = draw(5, 0.5)
    log_s, log_t = log_softmax(student), log_softmax(teacher)
    first, *_, last = jsd(student, teacher)
    np.testing.assert_allclose(first, kl(log_t, log_s) / 4, rtol=0.02)
    np.testing.assert_allclose(last, kl(log_s, log_t) / 4, rtol=0.02)
    near = teacher + 0.03 * student  # for close distributions every alpha is the same quarter of a KL
    for value in jsd(near, teacher)[1:-1]:
        np.testing.assert_allclose(value, kl(log_softmax(near), log_t) / 4, rtol=0.05, atol=1e-7)
    for alpha in (0.0, 1.0):
        with pytest.raises(ValueError, match="use forward_kl or reverse_kl"):
            divergence_op.from_logits(student, teacher, target, name="jsd", alpha=alpha)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.2, 2.0, 20.0]))
def test_the_tail_bucket_is_below_the_exact_value_and_rises_to_it(seed, spread):
    found = everything(*draw(seed, spread))
    for name in EXACT:
        rungs = np.stack([found[name][k][0] for k in (1, 3, V, 0)])
        slack = 1e-5 * (1 + np.abs(rungs[-1]))
        assert (np.diff(rungs, axis=0) >= -slack).all() and (rungs >= -slack).all(), name
        np.testing.assert_array_equal(rungs[-2], rungs[-1])  # top_k = V is the exact value


def test_the_union_of_both_top_sets_is_kept():
    student = jnp.log(jnp.asarray([[0.6, 0.2, 0.1, 0.05, 0.05]]))
    teacher = jnp.log(jnp.asarray([[0.1, 0.1, 0.1, 0.1, 0.6]]))
    value, pull = jax.jit(functools.partial(valued, name="forward_kl", top_k=1))(
        student, teacher, jnp.zeros(1, jnp.int32)
    )
    s, t = np.array([0.6, 0.05, 0.35]), np.array([0.1, 0.6, 0.3])  # student's first, teacher's first, the rest
    np.testing.assert_allclose(value, [np.sum(t * np.log(t / s))], rtol=1e-5)
    assert pull[0, 4] < 0 < pull[0, 0]  # the teacher's word rises though the student hardly says it


def test_clip_is_a_ceiling_and_cuts_the_gradient_there():
    student, teacher, target = draw(6)
    exact = everything(student, teacher, target)
    ceiling = {name: float(np.median(exact[name][0][0])) * 1.01 for name in EXACT} | {"sampled": 0.3}
    run = jax.jit(lambda *x: {name: valued(*x, name=name, clip=ceiling[name]) for name in NAMES})
    clipped = run(student, teacher, target)
    for name in EXACT:
        full, (value, grad) = np.asarray(exact[name][0][0]), clipped[name]
        np.testing.assert_allclose(value, np.minimum(full, ceiling[name]), rtol=1e-6)
        grad = np.asarray(grad)
        assert not grad[full > ceiling[name]].any() and grad[full < ceiling[name]].any(axis=1).all()
    delta = (log_softmax(teacher) - log_softmax(student))[np.arange(N), target]
    factor = np.clip(delta, -0.3, 0.3)[:, None]
    want = -factor * (np.eye(V)[np.asarray(target)] - np.exp(log_softmax(student)))
    np.testing.assert_allclose(clipped["sampled"][1], want, atol=1e-6)


def test_equal_distributions_are_at_distance_zero_with_zero_gradient():
    student, _, target = draw(7, 4.0)
    for name, by_k in everything(student, student, target).items():
        for value, grad in by_k.values():
            np.testing.assert_allclose(value, 0.0, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(grad, 0.0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("scale", [80.0, 1e4, 1e30])
def test_extreme_logits_stay_finite_in_value_and_gradient(scale):
    eye = jnp.eye(N, V) * scale
    for student, teacher in ((eye, -eye), (-eye, eye), (eye, eye[::-1])):
        for name, by_k in everything(student, teacher, jnp.zeros(N, jnp.int32)).items():
            for k, (value, grad) in by_k.items():
                assert np.isfinite(value).all() and np.isfinite(grad).all(), (name, k)


def test_from_states_is_from_logits_for_any_chunk_and_the_teacher_has_no_gradient():
    rng = np.random.default_rng(8)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((N, 4), (4, V), (N, 4), (4, V))]
    target = jnp.asarray(rng.integers(0, V, N), jnp.int32)
    knobs = {"temperature": 0.7, "soft_cap": 2.0, "top_k": 3, "name": "jsd"}

    @jax.jit
    def graded(arrays):
        def total(arrays, chunk):
            student, student_dv, teacher, teacher_dv = arrays
            value = divergence_op.divergence(student, student_dv, teacher, teacher_dv, target, chunk=chunk, **knobs)
            return jnp.sum(value * jnp.arange(1.0, N + 1)), value

        return [jax.grad(functools.partial(total, chunk=chunk), has_aux=True)(arrays) for chunk in (512, 2)]

    (grads, value), in_chunks = graded(arrays)
    logits = [2.0 * np.tanh(np.asarray(h @ w) / 2.0) / 0.7 for h, w in (arrays[:2], arrays[2:])]
    np.testing.assert_allclose(value, everything(*map(jnp.asarray, logits), target)["jsd"][3][0], atol=1e-5)
    assert np.asarray(grads[0]).any() and np.asarray(grads[1]).any()
    assert not np.asarray(grads[2]).any() and not np.asarray(grads[3]).any()
    for a, b in zip(jax.tree.leaves(in_chunks), jax.tree.leaves((grads, value)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def buckets(student, teacher, top_k):
    """Which words are one entry of the sum [N, V, V + 1]: each kept word is one, all others together the last."""
    top = [np.argsort(-np.asarray(x), axis=1)[:, : top_k or x.shape[1]] for x in (student, teacher)]
    member = np.zeros((*student.shape, student.shape[1] + 1))
    for row, kept in zip(member, np.concatenate(top, axis=1), strict=True):
        row[kept, kept] = 1.0
        row[:, -1] = 1.0 - row.sum(axis=1)
    return member


def defined(student, teacher, member, *, name, alpha=0.5, clip=0.0, entry_clip=0.0):
    """The divergence per token of logits as `from_logits` describes it, on probabilities."""
    mass = (jnp.einsum("nv,nvm->nm", jax.nn.softmax(x), member) for x in (student, teacher))
    s, t = (jnp.where(member.any(axis=1), x, 1.0) for x in mass)  # no word in it: an entry of 0
    m = (1 - alpha) * s + alpha * t
    f = {
        "forward_kl": t * jnp.log(t / s),
        "reverse_kl": s * jnp.log(s / t),
        "jsd": ((1 - alpha) * s * jnp.log(s / m) + alpha * t * jnp.log(t / m)) / (4 * alpha * (1 - alpha)),
    }[name]
    value = jnp.sum(jnp.clip(f, -entry_clip, entry_clip) if entry_clip else f, axis=1)
    return jnp.minimum(value, clip) if clip else value


CASES = [
    {"name": "forward_kl"}, {"name": "forward_kl", "entry_clip": 0.04}, {"name": "forward_kl", "top_k": 3, "clip": 0.4},
    {"name": "reverse_kl", "clip": 0.5}, {"name": "reverse_kl", "entry_clip": 0.04, "top_k": 2},
    {"name": "jsd", "alpha": 0.2, "entry_clip": 0.01}, {"name": "jsd", "alpha": 0.7, "top_k": 4},
]  # fmt: skip


def weighed(fn, arrays, weights):
    """(values, gradients of their weighted sum in the student's and the teacher's states and unembeddings)."""

    def total(arrays):
        value = fn(*arrays)
        return jnp.sum(weights * value), value

    return jax.grad(total, has_aux=True)(arrays)[::-1]


@pytest.mark.parametrize(("temperature", "soft_cap"), [(0.7, 2.0), (1.3, 0.0)])
def test_values_and_gradients_from_states_are_those_of_float64(temperature, soft_cap):
    rng = np.random.default_rng(11)
    arrays = [rng.normal(size=s).astype(np.float32) for s in ((13, 5), (5, 17), (13, 3), (3, 17))]
    weights, target = rng.normal(size=13).astype(np.float32), jnp.zeros(13, jnp.int32)

    def logits(hidden, unembed):
        raw = hidden @ unembed
        return (soft_cap * jnp.tanh(raw / soft_cap) if soft_cap else raw) / temperature

    members = [buckets(logits(*arrays[:2]), logits(*arrays[2:]), case.get("top_k", 0)) for case in CASES]

    def one(a, b, c, d, member, case):
        knobs = {name: knob for name, knob in case.items() if name != "top_k"}
        return defined(logits(a, b), jax.lax.stop_gradient(logits(c, d)), member, **knobs)

    @jax.jit
    def wanted(arrays, weights):
        run = [functools.partial(one, member=m, case=case) for m, case in zip(members, CASES, strict=True)]
        return [weighed(fn, arrays, weights) for fn in run]

    @jax.jit
    def found(arrays):
        run = functools.partial(divergence_op.divergence, target_N=target, temperature=temperature, soft_cap=soft_cap)
        chunked = [weighed(functools.partial(run, chunk=4, **case), arrays, weights) for case in CASES]
        whole = [weighed(functools.partial(run, implementation="reference", **case), arrays, weights) for case in CASES]
        return chunked, whole

    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, wanted([np.float64(x) for x in arrays], np.float64(weights)))
    for got in found(arrays):
        for case, (value, grads), (exact, slopes) in zip(CASES, got, want, strict=True):
            np.testing.assert_allclose(value, exact, atol=1e-5, err_msg=str(case))
            for a, b in zip(grads, slopes, strict=True):
                np.testing.assert_allclose(a, b, atol=3e-5, err_msg=str(case))
            assert not np.asarray(grads[2]).any() and not np.asarray(grads[3]).any()


def test_a_clipped_entry_alone_loses_its_gradient():
    student, teacher = (jnp.log(jnp.asarray([p])) for p in ([0.05, 0.35, 0.6], [0.7, 0.2, 0.1]))
    exact, pull = valued(student, teacher, jnp.zeros(1, jnp.int32), name="forward_kl", entry_clip=0.5)
    s, t = np.exp(student[0]), np.exp(teacher[0])
    f = t * np.log(t / s)
    assert f[0] > 0.5 > np.abs(f[1:]).max()
    np.testing.assert_allclose(exact, [0.5 + f[1] + f[2]], rtol=1e-5)  # below 0: the ceiling cut the only rise
    np.testing.assert_allclose(pull[0], np.array([0, -t[1], -t[2]]) + s * (t[1] + t[2]), atol=1e-6)
    with pytest.raises(ValueError, match="no entries to clip"):
        divergence_op.from_logits(student, teacher, jnp.zeros(1, jnp.int32), name="sampled", entry_clip=0.5)


def test_logits_of_the_teacher_have_no_gradient():
    student, teacher, target = draw(10)

    @jax.jit
    def pull(teacher):
        def total(teacher, name):
            return jnp.sum(divergence_op.from_logits(student, teacher, target, name=name))

        return [jax.grad(total)(teacher, name) for name in NAMES]

    assert not any(np.asarray(grad).any() for grad in pull(teacher))


def test_an_unknown_name_is_named():
    with pytest.raises(ValueError, match="unknown divergence 'kl'; known: forward_kl"):
        divergence_op.from_logits(*draw(9), name="kl")
