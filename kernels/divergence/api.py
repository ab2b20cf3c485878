"""The divergence op: KL(T||S), KL(S||T), generalised JSD or the sampled-token form, per token.

Gradients flow to the student only. A divergence is a sum of entries f(log s_v, log t_v) over the vocabulary, so with
a = df / dlog s the gradient on the student's logits is a_v - s_v sum_u a_u:

  forward KL(T || S)   f = t (log t - log s)   S - T
  reverse KL(S || T)   f = s (log s - log t)   S * (log S/T - KL(S || T))
  jsd                  see `from_logits`       S * (log S/M - KL(S || M)) / (4 alpha)
  sampled              no sum over entries     -(sg(log T - log S)(y)) (1[v = y] - S(v)); its mean over y ~ S is the
                                               reverse-KL gradient
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from rsi_jax.kernels import vocabulary
from rsi_jax.kernels.token_logprob.api import token_logprob
from rsi_jax.kernels.vocabulary import Head

NAMES = ("forward_kl", "reverse_kl", "jsd", "sampled")


class Form(NamedTuple):
    """Which divergence, all static; see `from_logits`."""

    name: str = "forward_kl"
    alpha: float = 0.5
    top_k: int = 0
    clip: float = 0.0
    entry_clip: float = 0.0


def divergence(
    student_ND: jax.Array,
    student_DV: jax.Array,
    teacher_ND: jax.Array,
    teacher_DV: jax.Array,
    target_N: jax.Array,
    *,
    name: str = "forward_kl",
    alpha: float = 0.5,
    top_k: int = 0,
    clip: float = 0.0,
    entry_clip: float = 0.0,
    temperature: float = 1.0,
    soft_cap: float = 0.0,
    chunk: int = 0,
    vocab_axis: str | None = None,
    implementation: str = "chunked",
) -> jax.Array:
    """Computes the divergence per token [N], nats, float32, from hidden states and unembeddings (shared or separate).

    target_N: the sampled tokens (used by 'sampled' only).
    name, alpha, top_k, clip, entry_clip: see `from_logits`. temperature, soft_cap: see `vocabulary.Head`.
    chunk: tokens at a time, 0 = automatic from V; memory is a few times chunk * V * 4 bytes, and the gradient of the
      student's unembedding in float32.
    vocab_axis: mesh axis over which V is split, in `jax.shard_map`; both unembeddings are this shard's.
    implementation: 'chunked' (every platform) | 'reference' (holds [N, V]; the definition).
    """
    chex.assert_rank([student_ND, student_DV, teacher_ND, teacher_DV, target_N], [2, 2, 2, 2, 1])
    chex.assert_equal_shape_prefix([student_ND, teacher_ND, target_N], 1)
    form, head = Form(name, alpha, top_k, clip, entry_clip), Head(temperature, soft_cap, chunk, vocab_axis)
    vocabulary.check("divergence", head, implementation, student_DV, teacher_DV)
    _check(form)
    teacher_ND, teacher_DV = jax.lax.stop_gradient((teacher_ND, teacher_DV))
    if implementation == "reference":
        student_NV = vocabulary.head_logits(head, student_ND, student_DV)
        return from_logits(student_NV, vocabulary.head_logits(head, teacher_ND, teacher_DV), target_N, **form._asdict())
    if name == "sampled":
        score = functools.partial(
            token_logprob, target_N=target_N, temperature=temperature, soft_cap=soft_cap, chunk=chunk,
            vocab_axis=vocab_axis,
        )  # fmt: skip
        return _sampled(score(student_ND, student_DV).logp_N, score(teacher_ND, teacher_DV).logp_N, clip)
    return _chunked(head, form, student_ND, student_DV, teacher_ND, teacher_DV)


def from_logits(
    student_NV: jax.Array,
    teacher_NV: jax.Array,
    target_N: jax.Array,
    *,
    name: str = "forward_kl",
    alpha: float = 0.5,
    top_k: int = 0,
    clip: float = 0.0,
    entry_clip: float = 0.0,
) -> jax.Array:
    """Computes the divergence per token from logits [N, V]: the definition, differentiated as it stands.

    name: one of NAMES.
    alpha: jsd mixture, in (0, 1): m = (1 - alpha) S + alpha T,
      D = ((1 - alpha) KL(S || m) + alpha KL(T || m)) / (4 alpha (1 - alpha)): alpha = 1/2 is the Jensen-Shannon
      divergence (<= log 2), and the limits are KL(T || S) / 4 and KL(S || T) / 4.
      Differs: SDPO and TRL leave it unscaled and switch to the plain KLs at the ends, so their loss scale jumps there.
    top_k: 0 = exact; k = the union of the student's and the teacher's top k, the rest as one bucket. Never above
      the exact value (data processing), and rises with k to the exact value at k = V.
    clip: ceiling per token in nats (0 = none), of |log T - log S| for 'sampled'; a clipped token has no gradient
      ('sampled': the clipped factor).
    entry_clip: each entry of the sum over the vocabulary (the bucket too, jsd with its scale) is clipped to
      [-entry_clip, entry_clip] nats before summing (0 = none); a clipped entry has no gradient, others keep theirs.
      The value may then be negative. Not for 'sampled', which has no such sum. Source: OPSD (arXiv 2601.18734), the
      pointwise (token, word) clip of its full-vocabulary forward KL.
    Returns: [N] float32 >= 0 ('sampled' may be negative: it is a policy-gradient surrogate, -sg(log T - log S) log S).
    """
    form, head = Form(name, alpha, top_k, clip, entry_clip), Head()
    _check(form)
    log_s = jax.nn.log_softmax(student_NV.astype(jnp.float32))
    log_t = jax.lax.stop_gradient(jax.nn.log_softmax(teacher_NV.astype(jnp.float32)))
    if name == "sampled":
        return _sampled(vocabulary.picked(head, log_s, target_N), vocabulary.picked(head, log_t, target_N), clip)
    value_N, _ = _sums(head, form, log_s, log_t)
    return jnp.minimum(value_N, clip) if clip else value_N


def _check(form: Form) -> None:
    if form.name not in NAMES:
        raise ValueError(f"unknown divergence {form.name!r}; known: {', '.join(NAMES)}")
    if form.name == "jsd" and not 0.0 < form.alpha < 1.0:
        raise ValueError(f"jsd needs alpha in (0, 1), got {form.alpha}; use forward_kl or reverse_kl for the limits")
    if form.name == "sampled" and form.entry_clip:
        raise ValueError("'sampled' has no entries to clip: use clip, or entry_clip=0")


def _sampled(s_N: jax.Array, t_N: jax.Array, clip: float) -> jax.Array:
    delta_N = jax.lax.stop_gradient(jnp.clip(t_N - s_N, -20.0, 20.0))
    return -(jnp.clip(delta_N, -clip, clip) if clip else delta_N) * s_N


def _entry(form: Form, log_s: jax.Array, log_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Computes one entry of the sum and its slope: (f, df / dlog s)."""
    if form.name == "forward_kl":
        t = jnp.exp(log_t)
        value, slope = t * (log_t - log_s), -t
    elif form.name == "reverse_kl":
        s = jnp.exp(log_s)
        value = s * (log_s - log_t)
        slope = value + s
    else:
        alpha, scale = form.alpha, 4.0 * form.alpha * (1.0 - form.alpha)
        log_m = jnp.logaddexp(log_s + jnp.log1p(-alpha), log_t + jnp.log(alpha))
        slope = (1.0 - alpha) / scale * jnp.exp(log_s) * (log_s - log_m)
        value = slope + alpha / scale * jnp.exp(log_t) * (log_t - log_m)
    if form.entry_clip:
        slope = jnp.where(jnp.abs(value) < form.entry_clip, slope, 0.0)
        value = jnp.clip(value, -form.entry_clip, form.entry_clip)
    return value, slope


class _Rest(NamedTuple):
    """What top_k leaves out: its mask, and its mass under both, log-probs [N] (0 where nothing is left out)."""

    left_out_NV: jax.Array
    some_N: jax.Array
    log_s_N: jax.Array
    log_t_N: jax.Array


def _rest(head: Head, top_k: int, log_s: jax.Array, log_t: jax.Array) -> _Rest:
    def low(log_p):
        return log_p < vocabulary.top(head, jax.lax.stop_gradient(log_p), top_k)[0][:, -1:]

    left_out_NV = low(log_s) & low(log_t)
    some_N = vocabulary.total(head, jnp.sum(left_out_NV, axis=1)) > 0

    def mass(log_p):
        log_p = jnp.where(left_out_NV | ~some_N[:, None], log_p, -jnp.inf)  # never all -inf: its gradient is NaN
        return jnp.where(some_N, sum(vocabulary.log_sum(head, log_p)), 0.0)

    return _Rest(left_out_NV, some_N, mass(log_s), mass(log_t))


def _cut(head: Head, form: Form, log_s: jax.Array) -> bool:
    return 0 < form.top_k < vocabulary.size(head, log_s)


def _sums(head: Head, form: Form, log_s: jax.Array, log_t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds up the entries and their slopes: ([N], [N])."""
    parts = _entry(form, log_s, log_t)
    if not _cut(head, form, log_s):
        return vocabulary.total(head, tuple(jnp.sum(x, axis=1) for x in parts))
    rest = _rest(head, form.top_k, log_s, log_t)
    kept = vocabulary.total(head, tuple(jnp.sum(jnp.where(rest.left_out_NV, 0.0, x), axis=1) for x in parts))
    bucket = _entry(form, rest.log_s_N, rest.log_t_N)
    value_N, slope_N = (x + jnp.where(rest.some_N, y, 0.0) for x, y in zip(kept, bucket, strict=True))
    return value_N, slope_N


def _slopes(head: Head, form: Form, log_s: jax.Array, log_t: jax.Array) -> jax.Array:
    """Computes dD / dlog s_v [N, V]; a word in the bucket has its share of the bucket's."""
    slope_NV = _entry(form, log_s, log_t)[1]
    if not _cut(head, form, log_s):
        return slope_NV
    rest = _rest(head, form.top_k, log_s, log_t)
    share_NV = jnp.exp(log_s - rest.log_s_N[:, None])
    return jnp.where(rest.left_out_NV, _entry(form, rest.log_s_N, rest.log_t_N)[1][:, None] * share_NV, slope_NV)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(head: Head, form: Form, student_ND, student_DV, teacher_ND, teacher_DV) -> jax.Array:
    return _forward(head, form, student_ND, student_DV, teacher_ND, teacher_DV)[0]


def _forward(head: Head, form: Form, student_ND, student_DV, teacher_ND, teacher_DV):
    def score(student_CD, teacher_CD):
        student_CV = vocabulary.head_logits(head, student_CD, student_DV)
        teacher_CV = vocabulary.head_logits(head, teacher_CD, teacher_DV)
        norms = vocabulary.log_sum(head, student_CV), vocabulary.log_sum(head, teacher_CV)
        logs = map(vocabulary.log_softmax, (student_CV, teacher_CV), norms)
        return *_sums(head, form, *logs), *norms

    value_N, slope_N, *norms = vocabulary.over_chunks(head, student_DV.shape[1], score, student_ND, teacher_ND)
    kept = student_ND, student_DV, teacher_ND, teacher_DV, value_N, slope_N, norms
    return jnp.minimum(value_N, form.clip) if form.clip else value_N, kept


def _backward(head: Head, form: Form, kept, to_N):
    student_ND, student_DV, teacher_ND, teacher_DV, value_N, slope_N, norms = kept

    def slope(student_CV, teacher_CD, norms, slope_C, to_C):
        teacher_CV = vocabulary.head_logits(head, teacher_CD, teacher_DV)
        log_s, log_t = map(vocabulary.log_softmax, (student_CV, teacher_CV), norms)
        return to_C[:, None] * (_slopes(head, form, log_s, log_t) - jnp.exp(log_s) * slope_C[:, None])

    to_N = jnp.where(value_N < form.clip, to_N, 0.0) if form.clip else to_N
    pulled = vocabulary.pull(head, slope, student_ND, student_DV, teacher_ND, norms, slope_N, to_N)
    return *pulled, None, None


_chunked.defvjp(_forward, _backward)
