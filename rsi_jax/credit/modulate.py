"""Credit that the policy's own hinted reading modulates, token by token; nothing is distilled.

δ_t = log T(y_t) - log S(y_t): what the teacher (the policy with the hint) thinks of a sampled token beyond what the
student thought when it sampled it. It is known on the spans of views, the mean over the views of a token where there
are several, each with its polarity as sign (what a contrast likes is blamed); elsewhere it is 0 and the advantage is
`inner`'s.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked, returns
from rsi_jax.credit import rewards

NEEDS: dict[str, tuple[str, ...]] = {
    "rlsd": ("views", "view_logp_KU"),
    "opd": ("views", "view_logp_KU"),
    "vopd": ("views", "view_logp_KU", "view_kl_KU"),
    "agent_opsd": ("views", "view_logp_KU"),
    "rlcsd": ("views", "view_logp_KU", "wrong_logp_KU"),
}


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


def vopd(
    rollout: base.Rollout, *, inner: base.CreditFn, weight: jax.Array | float = 1.0, clip: float = 0.0
) -> base.Credit:
    """On-policy distillation against its own expectation: A' = A + w (δ + KL(S || T)) on the spans.

    E_S[δ] = -KL(S || T): subtracting it leaves the expected gradient of `opd` and takes away its pull on whatever was
    sampled, the most of its variance. With w = 0, or teacher = student: `inner`.

    Args:
      rollout: needs views, view_logp_KU, view_kl_KU and what `inner` needs.
      inner: credit function that makes A.
      weight: w, >= 0; it may be traced.
      clip: nats beyond which δ + KL counts no more, 0 = none.

    Raises: ValueError without these columns; base.InputError for a clip that is negative.

    Source: vOPD 2026 (https://arxiv.org/abs/2605.07865), the value baseline.
    Differs: the teacher is the policy with a hint, and only located spans are scored.
    """
    if clip < 0:
        raise base.InputError(f"credit.vopd.clip must be >= 0, got {clip}")
    credit, delta_BT, known_BT = _inner_and_delta(rollout, inner)
    kl_BT, _ = _on_tokens(rollout, base.given(rollout.view_kl_KU, "view_kl_KU"))
    centred_BT = delta_BT + kl_BT
    bounded_BT = jnp.clip(centred_BT, -clip, clip) if clip else centred_BT
    return _credit(rollout, credit, credit.adv_BT + weight * bounded_BT, delta_BT, known_BT)


def agent_opsd(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    mix: jax.Array | float = 0.5,
    clip: float = 0.2,
    discount: float = 0.95,
    success_return: float = 0.5,
    prior_clip: float = 0.05,
) -> base.Credit:
    """Belief over turns: A' = A ((1 - λ) + λ w_k), w_k = clip(1 + b z_k, 1 - b, 1 + b).

      e_k = Σ_{t in turn k} δ_t,   c_k = γ c_{k-1} + e_k,   B_k = σ(logit B_0 + c_k),   q_k = sign(A) (B_k - B_{k-1})

    z is q normalised over the turns of the rollout (0 where they agree), B_0 the success rate of the group. The teacher
    says how each turn moves the belief that the task will be done; a turn that moves it the way the outcome went weighs
    more. The sign of A is kept (b < 1). With λ = 0, b = 0 or δ = 0: `inner`.

    Args:
      rollout: needs views, view_logp_KU and what `inner` needs.
      inner: credit function that makes A; its sign at a turn is that of its sum over the turn.
      mix: λ in [0, 1]; it may be traced.
      clip: b in [0, 1).
      discount: γ per turn, in [0, 1].
      success_return: in units of the return: a rollout that reaches it succeeded.
      prior_clip: B_0 is kept in [prior_clip, 1 - prior_clip], in (0, 0.5).

    Raises: ValueError without these columns; base.InputError for a knob out of range.

    Source: AgentOPSD 2026 (https://arxiv.org/abs/2608.05987).
    Differs: turns without a view have e = 0.
    """
    if not (0 <= clip < 1 and 0 <= discount <= 1 and 0 < prior_clip < 0.5):
        raise base.InputError(
            "credit.agent_opsd: clip in [0, 1), discount in [0, 1] and prior_clip in (0, 0.5), got "
            f"{clip}, {discount}, {prior_clip}"
        )
    credit, delta_BT, known_BT = _inner_and_delta(rollout, inner)
    used_BS = rewards.counted_turns(rollout).used_S
    turn_BT, S = rollout.turn_BT, used_BS.shape[1]
    error_BS = masked.segment_sum(delta_BT, turn_BT, segments=S)
    back_BS = jax.vmap(returns.discounted_returns)(error_BS[:, ::-1], jnp.full_like(error_BS, discount))
    belief_BS = back_BS[:, ::-1]  # c, the same recursion run the other way
    success_B = (rollout.return_B >= success_return).astype(jnp.float32)
    success_B = jnp.where(rewards.counted_B(rollout), success_B, jnp.nan)
    prior_B = jnp.clip(masked.group_mean(success_B, rollout.group_B, rollout.weight_B), prior_clip, 1.0 - prior_clip)
    logit_BS = jax.scipy.special.logit(prior_B[:, None]) + jnp.pad(belief_BS, ((0, 0), (1, 0)))
    moved_BS = jnp.diff(jax.nn.sigmoid(logit_BS), axis=1)
    sign_BS = jnp.sign(masked.segment_sum(credit.adv_BT, turn_BT, segments=S))
    z_BS = jax.vmap(masked.whiten)(sign_BS * moved_BS, used_BS)
    gain_BT = rewards.turns_to_tokens(rollout, jnp.clip(1.0 + clip * z_BS, 1.0 - clip, 1.0 + clip))
    return _credit(rollout, credit, credit.adv_BT * (1.0 - mix + mix * gain_BT), delta_BT, known_BT)


def rlcsd(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    temperature: float = 0.02,
    beta: float = 1.0,
    mix: jax.Array | float = 0.5,
    bound: float = 2.0,
    threshold: float = 0.02,
) -> base.Credit:
    """Contrast of a right hint with wrong ones: A' = A + c, held to the sign of A (0 stays 0).

      e = log T(y | right hint) - log mean_k T(y | wrong hint k),   c = clip(β λ tanh(e / τ), -bound, bound)

    c counts where |c| > threshold. What any hint does to the text (its style, its length) cancels; only what the right
    words change is left. With λ = 0, or where right and wrong hints say the same: `inner`.

    Args:
      rollout: needs views, view_logp_KU, wrong_logp_KU and what `inner` needs.
      inner: credit function that makes A.
      temperature: τ > 0, nats.
      beta: β >= 0.
      mix: λ >= 0; it may be traced.
      bound, threshold: >= 0, in units of the advantage.

    Raises: ValueError without these columns; base.InputError for a knob out of range.

    Source: RLCSD 2026 (https://arxiv.org/abs/2606.11709).
    Differs: one mean over all tokens; the paper averages tokens with and without c apart.
    """
    if not (temperature > 0 and beta >= 0 and bound >= 0 and threshold >= 0):
        raise base.InputError(
            "credit.rlcsd: temperature must be > 0, beta, bound and threshold >= 0, got "
            f"{temperature}, {beta}, {bound}, {threshold}"
        )
    credit, delta_BT, known_BT = _inner_and_delta(rollout, inner)
    wrong_KU = base.given(rollout.wrong_logp_KU, "wrong_logp_KU")
    contrast_BT, _ = _on_tokens(rollout, base.given(rollout.view_logp_KU, "view_logp_KU") - wrong_KU)
    part_BT = jnp.clip(beta * mix * jnp.tanh(contrast_BT / temperature), -bound, bound)
    adv_BT = credit.adv_BT + masked.zero(part_BT, jnp.abs(part_BT) > threshold)
    sign_BT = jnp.sign(credit.adv_BT)
    return _credit(rollout, credit, sign_BT * jnp.maximum(sign_BT * adv_BT, 0.0), delta_BT, known_BT)


def _on_tokens(rollout: base.Rollout, x_KU: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A column of span tokens on the tokens themselves, the mean over the views of each; and where it is known.

    A view of polarity -1 counts with the other sign.
    """
    views = base.given(rollout.views, "views")
    T, offset_U = rollout.tokens_BT.shape[1], jnp.arange(x_KU.shape[1])
    at_KU = views.span_start_K[:, None] + offset_U
    used_KU = (views.weight_K > 0)[:, None] & (offset_U < views.span_length_K[:, None]) & (at_KU > 0) & (at_KU < T)
    place = (jnp.broadcast_to(views.rollout_K[:, None], at_KU.shape), jnp.where(used_KU, at_KU, T))
    zero_BT = jnp.zeros(rollout.tokens_BT.shape, jnp.float32)
    count_BT = zero_BT.at[place].add(used_KU.astype(jnp.float32), mode="drop")
    total_BT = zero_BT.at[place].add(masked.zero(x_KU * views.polarity_K[:, None], used_KU), mode="drop")
    known_BT = (count_BT > 0) & rewards.counted_BT(rollout)
    return masked.zero(total_BT / jnp.maximum(count_BT, 1.0), known_BT), known_BT


def _inner_and_delta(rollout: base.Rollout, inner: base.CreditFn) -> tuple[base.Credit, jax.Array, jax.Array]:
    """What `inner` says; δ_BT, 0 where it is not known; where it is known."""
    rewards.check(rollout, "views", "view_logp_KU")
    views, teacher_KU = base.given(rollout.views, "views"), base.given(rollout.view_logp_KU, "view_logp_KU")
    at_KU = views.span_start_K[:, None] + jnp.arange(teacher_KU.shape[1])
    student_KU = jnp.asarray(rollout.logp_BT)[views.rollout_K[:, None], at_KU]  # beyond the end: left out as unused
    delta_BT, known_BT = _on_tokens(rollout, teacher_KU - student_KU)
    return inner(rollout), delta_BT, known_BT


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
