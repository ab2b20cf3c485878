"""Credit that the policy's own hinted reading modulates, token by token; nothing is distilled.

δ_t = log T(y_t) - log S(y_t): what the teacher (the policy with the hint) thinks of a sampled token beyond what the
student thought when it sampled it. It is known on the spans of views, the mean over the views of a token where there
are several; elsewhere it is 0 and the advantage is `inner`'s.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards

NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("rlsd", "opd"), ("views", "view_logp_KU"))


def rlsd(
    rollout: base.Rollout, *, inner: base.CreditFn, mix: jax.Array | float = 0.5, clip: float = 0.2
) -> base.Credit:
    """Sign-preserving self-distillation: A' = A ((1 - λ) + λ clip(exp(sign(A) δ), 1 - ε, 1 + ε)).

    The outcome says in which direction, the teacher how far: a token that the teacher likes is praised more in a good
    rollout and blamed less in a bad one. With λ = 0, δ = 0 or ε = 0: `inner`; where A is 0 it stays 0, so a group
    without signal learns nothing.

    Args:
      rollout: needs views, view_logp_KU and what `inner` needs.
      inner: credit function that makes A.
      mix: λ in [0, 1]; it may be traced (the paper anneals it to 0 over 50 steps).
      clip: ε in [0, 1).

    Raises: ValueError without views or their log-probs; base.InputError for a clip out of range.

    Source: RLSD, Yang et al. 2026 (https://arxiv.org/abs/2604.03128).
    """
    if not 0 <= clip < 1:
        raise base.InputError(f"credit.rlsd.clip must be in [0, 1), got {clip}")
    credit, delta_BT, known_BT = _inner_and_delta(rollout, inner)
    gain_BT = jnp.clip(jnp.exp(jnp.sign(credit.adv_BT) * delta_BT), 1.0 - clip, 1.0 + clip)
    return _credit(rollout, credit, credit.adv_BT * (1.0 - mix + mix * gain_BT), delta_BT, known_BT)


def opd(
    rollout: base.Rollout, *, inner: base.CreditFn, weight: jax.Array | float = 1.0, clip: float = 0.0
) -> base.Credit:
    """On-policy distillation as a reward: A' = A + w δ on the spans.

    Its expected gradient is that of the reverse KL from student to teacher. It acts on what the student samples: it
    suppresses a bad token at once and raises a good one only as often as that is sampled. E[δ] <= 0: on average it is
    a penalty. With w = 0 or δ = 0: `inner`. Unlike `rlsd` it teaches where the outcome is silent.

    Args:
      rollout: needs views, view_logp_KU and what `inner` needs.
      inner: credit function that makes A.
      weight: w, >= 0; it may be traced.
      clip: nats beyond which δ counts no more, 0 = none.

    Raises: ValueError without views or their log-probs; base.InputError for a clip that is negative.

    Source: Agarwal et al. 2024 (https://arxiv.org/abs/2306.13649) and Thinking Machines 2025, on-policy distillation.
    Differs: the teacher is the policy with a hint, and only located spans are scored.
    """
    if clip < 0:
        raise base.InputError(f"credit.opd.clip must be >= 0, got {clip}")
    credit, delta_BT, known_BT = _inner_and_delta(rollout, inner)
    bounded_BT = jnp.clip(delta_BT, -clip, clip) if clip else delta_BT
    return _credit(rollout, credit, credit.adv_BT + weight * bounded_BT, delta_BT, known_BT)


def _inner_and_delta(rollout: base.Rollout, inner: base.CreditFn) -> tuple[base.Credit, jax.Array, jax.Array]:
    """What `inner` says; δ_BT, 0 where it is not known; where it is known."""
    rewards.check(rollout, "views", "view_logp_KU")
    views, view_logp_KU = base.given(rollout.views, "views"), base.given(rollout.view_logp_KU, "view_logp_KU")
    T, offset_U = rollout.tokens_BT.shape[1], jnp.arange(view_logp_KU.shape[1])
    at_KU = views.span_start_K[:, None] + offset_U
    used_KU = (views.weight_K > 0)[:, None] & (offset_U < views.span_length_K[:, None]) & (at_KU > 0) & (at_KU < T)
    place = (jnp.broadcast_to(views.rollout_K[:, None], at_KU.shape), jnp.where(used_KU, at_KU, T))
    zero_BT = jnp.zeros(rollout.tokens_BT.shape, jnp.float32)
    count_BT = zero_BT.at[place].add(used_KU.astype(jnp.float32), mode="drop")
    total_BT = zero_BT.at[place].add(masked.zero(view_logp_KU, used_KU), mode="drop")
    known_BT = (count_BT > 0) & rewards.counted_BT(rollout)
    delta_BT = masked.zero(total_BT / jnp.maximum(count_BT, 1.0) - rollout.logp_BT, known_BT)
    return inner(rollout), jax.lax.stop_gradient(delta_BT), known_BT


def _credit(rollout, credit: base.Credit, adv_BT, delta_BT, known_BT) -> base.Credit:
    adv_BT = jax.lax.stop_gradient(masked.zero(adv_BT, rollout.mask_BT).astype(jnp.float32))
    metrics = {
        **credit.metrics,
        "frac_zero_adv": rewards.frac_zero_adv(rollout, adv_BT),
        "delta": masked.mean(delta_BT, known_BT),
        "delta_tokens": masked.count(known_BT),
        "hint_coverage": masked.mean(known_BT, rollout.mask_BT & (rollout.weight_B > 0)[:, None]),
    }
    return credit.replace(adv_BT=adv_BT, metrics=metrics)
