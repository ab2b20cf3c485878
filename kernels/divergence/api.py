"""The divergence op: KL(T||S), KL(S||T), generalised JSD or the sampled-token form, per token.

Gradients flow to the student only. Closed forms on the student's logits (temperature 1):
  forward KL(T || S)   S - T
  reverse KL(S || T)   S * (log S/T - KL(S || T))
  sampled              -(sg(log T - log S)(y)) (1[v = y] - S(v)); its mean over y ~ S is the reverse-KL gradient.
"""

import chex
import jax
import jax.numpy as jnp

from rsi_jax.kernels.token_logprob.api import logits_of, over_chunks

NAMES = ("forward_kl", "reverse_kl", "jsd", "sampled")


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
    temperature: float = 1.0,
    soft_cap: float = 0.0,
    chunk: int = 512,
) -> jax.Array:
    """Computes the divergence per token [N], nats, float32, from hidden states and unembeddings (shared or separate).

    target_N: the sampled tokens (used by 'sampled' only).
    clip: ceiling per token in nats (0 = none); a clipped token has no gradient.
    See `from_logits` for the other arguments. Memory: 2 * chunk * V * 4 bytes.
    """
    chex.assert_rank([student_ND, student_DV, teacher_ND, teacher_DV, target_N], [2, 2, 2, 2, 1])
    teacher_ND, teacher_DV = jax.lax.stop_gradient((teacher_ND, teacher_DV))

    def score(student_CD, teacher_CD, target_C):
        student_CV = logits_of(student_CD, student_DV, temperature=temperature, soft_cap=soft_cap)
        teacher_CV = logits_of(teacher_CD, teacher_DV, temperature=temperature, soft_cap=soft_cap)
        return from_logits(student_CV, teacher_CV, target_C, name=name, alpha=alpha, top_k=top_k, clip=clip)

    return over_chunks(score, chunk, student_ND, teacher_ND, target_N)


def from_logits(
    student_NV: jax.Array,
    teacher_NV: jax.Array,
    target_N: jax.Array,
    *,
    name: str = "forward_kl",
    alpha: float = 0.5,
    top_k: int = 0,
    clip: float = 0.0,
) -> jax.Array:
    """Computes the divergence per token from logits [N, V].

    name: one of NAMES.
    alpha: jsd mixture, in (0, 1): m = (1 - alpha) S + alpha T,
      D = ((1 - alpha) KL(S || m) + alpha KL(T || m)) / (4 alpha (1 - alpha)): alpha = 1/2 is the Jensen-Shannon
      divergence (<= log 2), and the limits are KL(T || S) / 4 and KL(S || T) / 4.
      Differs: SDPO and TRL leave it unscaled and switch to the plain KLs at the ends, so their loss scale jumps there.
    top_k: 0 = exact; k = the union of the student's and the teacher's top k, the rest as one bucket. Never above
      the exact value (data processing), and rises with k to the exact value at k = V.
    Returns: [N] float32 >= 0 ('sampled' may be negative: it is a policy-gradient surrogate, -sg(log T - log S) log S).
    """
    if name not in NAMES:
        raise ValueError(f"unknown divergence {name!r}; known: {', '.join(NAMES)}")
    log_s = jax.nn.log_softmax(student_NV.astype(jnp.float32))
    log_t = jax.lax.stop_gradient(jax.nn.log_softmax(teacher_NV.astype(jnp.float32)))
    if name == "sampled":
        s_N, t_N = (jnp.take_along_axis(x, target_N[:, None], axis=1)[:, 0] for x in (log_s, log_t))
        delta_N = jax.lax.stop_gradient(jnp.clip(t_N - s_N, -20.0, 20.0))
        value_N = -(jnp.clip(delta_N, -clip, clip) if clip else delta_N) * s_N
        return value_N
    if top_k and top_k < student_NV.shape[1]:
        log_s, log_t = _bucketed(log_s, log_t, top_k)
    value_N = _exact(log_s, log_t, name, alpha)
    return jnp.minimum(value_N, clip) if clip else value_N


def _exact(log_s, log_t, name: str, alpha: float) -> jax.Array:
    if name == "forward_kl":
        return _kl(log_t, log_s)
    if name == "reverse_kl":
        return _kl(log_s, log_t)
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"jsd needs alpha in (0, 1), got {alpha}; use forward_kl or reverse_kl for the limits")
    log_m = jnp.logaddexp(log_s + jnp.log1p(-alpha), log_t + jnp.log(alpha))
    mixed = (1.0 - alpha) * _kl(log_s, log_m) + alpha * _kl(log_t, log_m)
    return mixed / (4.0 * alpha * (1.0 - alpha))


def _kl(log_p, log_q) -> jax.Array:
    present = log_p > -1e30  # an empty bucket has no mass: 0 log 0 = 0, and no gradient
    safe_p = jnp.where(present, log_p, 0.0)
    safe_q = jnp.where(present, log_q, 0.0)
    return jnp.sum(jnp.where(present, jnp.exp(safe_p) * (safe_p - safe_q), 0.0), axis=-1)


def _bucketed(log_s, log_t, top_k: int):
    """Keeps the union of both top-k sets and sums the rest into one bucket, on the full support [N, V + 1]."""

    def kept(log_p):
        return log_p >= jax.lax.top_k(log_p, top_k)[0][:, -1:]

    keep_NV = jax.lax.stop_gradient(kept(log_s) | kept(log_t))
    empty_N = jnp.all(keep_NV, axis=1)

    def bucket(log_p):
        rest_NV = jnp.where(keep_NV & ~empty_N[:, None], -jnp.inf, log_p)  # never all -inf: its gradient is NaN
        tail_N = jnp.where(empty_N, -jnp.inf, jax.nn.logsumexp(rest_NV, axis=1))
        return jnp.concatenate([jnp.where(keep_NV, log_p, -jnp.inf), tail_N[:, None]], axis=1)

    return bucket(log_s), bucket(log_t)
