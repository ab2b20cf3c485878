"""Credit from textual feedback, its relative that distils whole rollouts, and the control arm without words.

All wrap another credit function (`inner`) and read rollout.views. A view is used if it has a weight and a span, its
rollout counts (weight_B > 0 and a finite return), and the gate lets it through.
"""

import chex
import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards

NEEDS: dict[str, tuple[str, ...]] = dict.fromkeys(("textual_feedback", "sdpo", "locator_penalty"), ("views",))
DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "sampled")


def textual_feedback(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    weight: jax.Array | float = 1.0,
    divergence: str = "forward_kl",
    alpha: float = 0.5,
    top_k: int = 0,
    clip: float = 0.0,
    entry_clip: float = 0.0,
    temperature: float = 1.0,
    failed_only: bool = False,
    success_return: float | None = None,
) -> base.Credit:
    """Adds to `inner` the pull of each located span toward what the policy says of it once hinted.

      loss += Σ_k view_weight_k * mean over the span of D(teacher, student),  view_weight_k = weight * w_k p_k / n

    with w and p the weight and polarity of the view and n the number of used views of the whole batch: for views of
    weight and polarity 1, `weight` times the mean over views of the mean over tokens, for any micro-batching. With
    weight = 0, or without views: `inner`, to the bit. The term does not vanish at the optimum of the reward: anneal
    `weight` (it may be traced) or gate it where that matters.

    Args:
      rollout: needs views, and the columns that `inner` needs.
      inner: credit function that makes the advantages.
      weight: scale of the term against the policy loss, >= 0.
      divergence: one of DIVERGENCES. forward_kl raises what the teacher says and the student never samples;
        reverse_kl and sampled mostly suppress what the student samples.
      alpha, top_k, clip, entry_clip, temperature: of base.Divergence.
      failed_only: use only views of rollouts that failed: whose return is below success_return.
      success_return: in units of the return; None = the best return of its group (then a group in which all
        failed alike has no failed rollout: give a number to teach there).

    Raises: ValueError without views, or if `inner` uses views itself; base.InputError for a knob out of range.

    Source: SDPO (https://arxiv.org/abs/2601.20802); SDFT (https://arxiv.org/abs/2601.19897).
    Differs: hints stand at the located turn and only its span is scored; one weight per view, not per token, so a
      long span pulls no harder than a short one.
    """
    views = _check(rollout)
    pull = base.Divergence(
        name=divergence, alpha=alpha, top_k=top_k, clip=clip, entry_clip=entry_clip, temperature=temperature
    )
    _check_divergence(pull)
    credit = inner(rollout)
    if credit.view_weight_K is not None:
        raise ValueError("textual_feedback wraps a credit function that uses views itself: give it another inner")
    used_K = _used(rollout, views, failed_only, success_return)
    n = jnp.maximum(masked.count(used_K), 1.0)
    view_weight_K = weight * masked.zero(views.weight_K * views.polarity_K, used_K) / n
    return credit.replace(
        view_weight_K=jax.lax.stop_gradient(view_weight_K.astype(jnp.float32)),
        divergence=pull,
        metrics={**credit.metrics, **_view_metrics(rollout, views, used_K)},
    )


def sdpo(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    weight: jax.Array | float = 1.0,
    outcome_weight: float = 0.0,
    alpha: float = 0.5,
    top_k: int = 100,
    is_clip: float = 2.0,
    success_return: float = 0.5,
) -> base.Credit:
    """Self-distillation policy optimisation: the divergence of the hinted reading alone, or beside the outcome.

      A = outcome_weight A_inner;   loss += weight Σ_views Σ_span min(π / μ, is_clip) JSD_alpha(teacher, student) / n

    n is the number of span tokens of all used views: every token counts the same, as in the authors' code (a view does
    in `textual_feedback`). A view is used if its rollout failed, or if another of its group succeeded.

    Args:
      rollout: needs views, and the columns that `inner` needs.
      inner: credit function that makes A_inner.
      weight, outcome_weight: >= 0.
      alpha: JSD mixture, in [0, 1]: 0 = forward KL, 1 = reverse KL.
      top_k: the likeliest tokens of student and teacher that are told apart, the rest is one; 0 = the whole vocabulary.
      is_clip: bound of the importance weight, 0 = none is applied.
      success_return: in units of the return: a rollout that reaches it succeeded.

    Raises: ValueError without views, or if `inner` uses views itself; base.InputError for a knob out of range.

    Source: Hübotter et al. 2026, SDPO (https://arxiv.org/abs/2601.20802).
    Differs: hints stand at the located turn; the top k are those of both, not of the student alone.
    """
    views, credit = _check(rollout), inner(rollout)
    if credit.view_weight_K is not None:
        raise ValueError("sdpo wraps a credit function that uses views itself: give it another inner")
    if not (0 <= alpha <= 1 and top_k >= 0 and is_clip >= 0 and outcome_weight >= 0):
        raise base.InputError(
            "credit.sdpo: alpha in [0, 1], top_k, is_clip and outcome_weight >= 0, got "
            f"{alpha}, {top_k}, {is_clip}, {outcome_weight}"
        )
    solved_B = (rollout.return_B >= success_return).astype(jnp.float32)
    solved_B = jnp.where(rewards.counted_B(rollout), solved_B, jnp.nan)
    solvers_B = masked.group_sum(solved_B, rollout.group_B, rollout.weight_B)
    open_B = (solved_B == 0) | ((solved_B == 1) & (solvers_B > 1))
    used_K = _present(views) & open_B[views.rollout_K]
    tokens_K = masked.zero(views.span_length_K.astype(jnp.float32), used_K)
    share_K = tokens_K / jnp.maximum(jnp.sum(tokens_K), 1.0)
    name = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(alpha), "jsd")
    adv_BT = jax.lax.stop_gradient(outcome_weight * credit.adv_BT)
    return credit.replace(
        adv_BT=adv_BT,
        view_weight_K=jax.lax.stop_gradient((weight * views.weight_K * views.polarity_K * share_K).astype(jnp.float32)),
        divergence=base.Divergence(name=name, alpha=alpha, top_k=top_k, is_clip=is_clip),
        metrics={**credit.metrics, **rewards.report(rollout, adv_BT), **_view_metrics(rollout, views, used_K)},
    )


def locator_penalty(
    rollout: base.Rollout,
    *,
    inner: base.CreditFn,
    penalty: jax.Array | float = 1.0,
    failed_only: bool = False,
    success_return: float | None = None,
) -> base.Credit:
    """Subtracts `penalty` from `inner`'s advantage on the sampled tokens of the located spans; no hint is read.

    The control arm of textual feedback: it says where the fault is and not what to say instead. What feedback gains
    over it, the words of the hints gained. A token in several spans is penalised once; polarity is not read. With
    penalty = 0: `inner`.

    Args:
      rollout: needs views (their spans), and the columns that `inner` needs.
      inner: credit function that makes the advantages.
      penalty: in units of the advantage, >= 0.
      failed_only, success_return: the gate of `textual_feedback`.

    Raises: ValueError without views.
    """
    views = _check(rollout)
    credit = inner(rollout)
    used_K = _used(rollout, views, failed_only, success_return)
    located_BT = rollout.mask_BT & _covered(rollout, views, used_K)
    adv_BT = jax.lax.stop_gradient(credit.adv_BT - jnp.where(located_BT, penalty, 0.0).astype(jnp.float32))
    metrics = {**credit.metrics, **_view_metrics(rollout, views, used_K)}
    metrics["frac_zero_adv"] = rewards.frac_zero_adv(rollout, adv_BT)
    metrics["penalised_tokens"] = masked.count(located_BT)
    return credit.replace(adv_BT=adv_BT, metrics=metrics)


def _check(rollout: base.Rollout) -> base.Views:
    rewards.check(rollout, "views")
    views = base.given(rollout.views, "views")
    columns = [views.rollout_K, views.span_start_K, views.span_length_K, views.weight_K, views.polarity_K]
    chex.assert_rank(columns, 1)
    chex.assert_equal_shape(columns)
    return views


def _check_divergence(d: base.Divergence) -> None:
    where = "credit.textual_feedback"
    if d.name not in DIVERGENCES:
        mend = base.did_you_mean(d.name, DIVERGENCES)
        raise base.InputError(f"{where}.divergence '{d.name}' is none of {', '.join(DIVERGENCES)}{mend}")
    if d.name == "jsd" and not 0 < d.alpha < 1:
        raise base.InputError(
            f"{where}.alpha must be in (0, 1), got {d.alpha}; its limits are forward_kl and reverse_kl"
        )
    if min(d.top_k, d.clip, d.entry_clip) < 0 or not d.temperature > 0:
        raise base.InputError(
            f"{where}: top_k, clip and entry_clip must be >= 0 and temperature > 0, got {d.top_k}, {d.clip}, "
            f"{d.entry_clip} and {d.temperature}"
        )
    if d.name == "sampled" and d.entry_clip:
        raise base.InputError(f"{where}.entry_clip={d.entry_clip} bounds words of a sum, and 'sampled' has none: set 0")


def _present(views: base.Views) -> jax.Array:
    return (views.weight_K > 0) & (views.span_length_K > 0)


def _used(rollout: base.Rollout, views: base.Views, failed_only: bool, success_return: float | None) -> jax.Array:
    """True for the views that count."""
    open_B = rewards.counted_B(rollout)
    if failed_only and success_return is not None:
        open_B &= rollout.return_B < success_return
    elif failed_only:
        best_B = masked.group_max(rollout.return_B, rollout.group_B, rollout.weight_B)
        open_B &= rollout.return_B < best_B - masked.SPREAD
    return _present(views) & open_B[views.rollout_K]


def _covered(rollout: base.Rollout, views: base.Views, used_K: jax.Array) -> jax.Array:
    """True on the tokens of at least one used span."""
    B, T = rollout.tokens_BT.shape
    edge_BT = jnp.zeros((B, T + 1), jnp.int32)
    edge_BT = edge_BT.at[views.rollout_K, views.span_start_K].add(used_K.astype(jnp.int32), mode="drop")
    end_K = views.span_start_K + views.span_length_K
    edge_BT = edge_BT.at[views.rollout_K, end_K].add(-used_K.astype(jnp.int32), mode="drop")
    return jnp.cumsum(edge_BT, axis=1)[:, :T] > 0


def _view_metrics(rollout: base.Rollout, views: base.Views, used_K: jax.Array) -> dict[str, jax.Array]:
    """Counts views: given, used, gated (given but not used); the share of trained rollouts with a used view
    (frac_hinted), and that of trained tokens in a used span (hint_coverage)."""
    B, trained_B = rollout.tokens_BT.shape[0], rollout.weight_B > 0
    present_K = _present(views)
    hinted_B = jnp.zeros(B, bool).at[views.rollout_K].max(used_K, mode="drop")
    return {
        "views": masked.count(present_K),
        "views_used": masked.count(used_K),
        "views_gated": masked.count(present_K & ~used_K),
        "frac_hinted": masked.mean(hinted_B, trained_B),
        "hint_coverage": masked.mean(_covered(rollout, views, used_K), rollout.mask_BT & trained_B[:, None]),
    }
