"""One optimizer update: the losses of a minibatch, two gradients balanced, one step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rsi_jax import annotate, base, chains, losses, optim, packing
from rsi_jax.feedback import schedule
from rsi_jax.feedback import teacher as teacher_lib
from rsi_jax.feedback import views as views_lib
from rsi_jax.kernels import divergence as divergence_op
from rsi_jax.kernels import token_logprob
from rsi_jax.model import transformer

TOP = 0.2  # share of the trained tokens, the least certain ones, whose mean entropy is logged beside that of all


@dataclasses.dataclass(frozen=True)
class Objective:
    """The loss, as static knobs. Units and reasons stand in configs/default.py.

    outcome_clip, feedback_clip: each gradient is clipped to its own norm before they are added: a raw forward KL starts
    about 50 times larger than the policy gradient and would silence it under one common clip.
    feedback_schedule: knobs of feedback.schedule.scale, whose factor multiplies the feedback gradient after its clip
    (before it, the clip would undo the factor).
    correction, correction_level, correction_low, correction_high: the knobs of losses.correction_weights. They multiply
    every outcome term of a token (policy, KL, entropy, critic); 'none' = the batch as it was sampled.
    span: scored tokens of a view at most (U). micro_batch: rollouts per forward, 0 = all at once. remat: what the
    backward pass computes again.
    chain_rows: rows of a chain; what the loss says of a rollout (its mean, its ratio) it says of a chain.
    """

    surrogate: str = "ppo"
    ratio_level: str = ""
    aggregation: str = "token_mean"
    aggregation_constant: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = 0.0
    sapo_tau_pos: float = 1.0
    sapo_tau_neg: float = 1.05
    dro_beta: float = 0.05
    correction: str = "none"
    correction_level: str = "token"
    correction_low: float = 0.0
    correction_high: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3+"
    entropy_coef: float = 0.0
    value_coef: float = 0.5
    value_clip: float = 0.2
    outcome_clip: float = 1.0
    feedback_clip: float = 1.0
    feedback_schedule: tuple[tuple[str, Any], ...] = ()
    temperature: float = 1.0
    teacher: str = "frozen"
    teacher_rate: float = 0.05
    teacher_every: int = 10
    span: int = 8
    micro_batch: int = 0
    chain_rows: int = 1
    chunk: int = 0
    remat: transformer.Remat = transformer.Remat()


def token_weights(rollout: base.Rollout, objective: Objective) -> jax.Array:
    """Pre-scales every token over the whole optimizer batch, so that any micro-batching sums to the same loss."""
    whole = chains.join(rollout, objective.chain_rows)
    weight_BT = losses.aggregate_weights(
        whole.mask_BT,
        whole.weight_B,
        whole.group_B,
        how=objective.aggregation,
        constant=objective.aggregation_constant,
    )
    return weight_BT.reshape(rollout.tokens_BT.shape)


def correct(rollout: base.Rollout, weight_BT: jax.Array, o: Objective):
    """Weighs the tokens by trainer over sampler, and takes the ratio from the trainer on: (rollout, weights, metrics).

    Raises: ValueError at trace time without policy_logp_BT.
    """
    if o.correction == "none":
        return rollout, weight_BT, {}
    policy_logp_BT = base.given(rollout.policy_logp_BT, "policy_logp_BT")
    columns = (policy_logp_BT, rollout.logp_BT, rollout.mask_BT & (weight_BT > 0))
    factor_BT, found = losses.correction_weights(
        *(chains.by_chain(x, o.chain_rows) for x in columns),
        how=o.correction,
        level=o.correction_level,
        low=o.correction_low,
        high=o.correction_high,
    )
    metrics = {f"correction/{name}": x for name, x in found.items()}
    return rollout.replace(logp_BT=policy_logp_BT), weight_BT * factor_BT.reshape(weight_BT.shape), metrics


def outcome_loss(params, config, hidden_RPD, rollout: base.Rollout, credit: base.Credit, weight_BT, o: Objective):
    """The policy loss on the credit's advantages, with KL, entropy and critic terms: (loss, sums to log)."""
    mask_BT = rollout.mask_BT
    logp_BT, entropy_BT = annotate.token_logp(
        params, config, hidden_RPD, rollout, temperature=o.temperature, chunk=o.chunk
    )
    columns = (logp_BT, rollout.logp_BT, credit.adv_BT, mask_BT, weight_BT)
    loss, ratios = losses.policy_loss(
        *(chains.by_chain(x, o.chain_rows) for x in columns),
        surrogate=o.surrogate,
        ratio_level=o.ratio_level,
        clip_low=o.clip_low,
        clip_high=o.clip_high,
        dual_clip=o.dual_clip,
        sapo_tau_pos=o.sapo_tau_pos,
        sapo_tau_neg=o.sapo_tau_neg,
        dro_beta=o.dro_beta,
    )
    sums = {
        "policy_loss": loss,
        "entropy": losses.weighted_sum(entropy_BT, mask_BT, weight_BT),
        "entropy_histogram": losses.histogram(entropy_BT, mask_BT & (weight_BT > 0), *losses.ENTROPY),
    }
    if o.entropy_coef:
        loss += losses.entropy_bonus(entropy_BT, mask_BT, weight_BT, coef=o.entropy_coef)
    if o.kl_coef:
        ref_logp_BT = base.given(rollout.ref_logp_BT, "ref_logp_BT")
        kl_BT = losses.kl_penalty_BT(logp_BT, ref_logp_BT, mask_BT, estimator=o.kl_estimator)
        sums["kl_ref"] = losses.weighted_sum(kl_BT, mask_BT, weight_BT)
        loss += o.kl_coef * sums["kl_ref"]
    if credit.value_target_BT is not None:
        value_BT = annotate.shifted_values(params, hidden_RPD, rollout)
        old_value_BT = base.given(rollout.value_BT, "value_BT")
        value, value_sums = losses.value_loss(
            value_BT, old_value_BT, credit.value_target_BT, mask_BT, weight_BT, clip=o.value_clip
        )
        sums["value_loss"] = value
        loss += o.value_coef * value
        ratios = ratios | value_sums
    row_B = jnp.sum(jnp.where(mask_BT, logp_BT, 0.0), axis=1)  # names the sample when a loss is not finite
    return loss, (sums, ratios, row_B)


def feedback_loss(
    params, teacher, config, hidden_RPD, teacher_KUD, rollout: base.Rollout, credit: base.Credit, o: Objective
):
    """The divergence of each view's span, student from teacher, times the credit's view weights: (loss, sums).

    teacher_KUD: the states of the teacher that predict each span token; `teacher` is whose unembedding reads them.
    """
    views, weight_K, d = base.given(rollout.views, "views"), credit.view_weight_K, credit.divergence
    assert weight_K is not None  # `gradients` asks for this loss only where the credit weighs the views
    teacher_params = jax.lax.stop_gradient(params) if teacher is None else teacher
    student_KUD = views_lib.student_states(hidden_RPD, rollout, o.span)
    K, U, D = student_KUD.shape
    value_KU = divergence_op.divergence(
        student_KUD.reshape(-1, D),
        transformer.unembedding(params),
        teacher_KUD.reshape(-1, D),
        transformer.unembedding(teacher_params),
        views_lib.span_tokens(rollout.tokens_BT, views, o.span).reshape(-1),
        name=d.name,
        alpha=d.alpha,
        top_k=d.top_k,
        clip=d.clip,
        entry_clip=d.entry_clip,
        temperature=d.temperature,
        soft_cap=config.logit_soft_cap,
        chunk=o.chunk,
    ).reshape(K, U)
    mask_KU = views_lib.span_mask(views, o.span)
    if d.is_clip:
        value_KU *= _span_importance(params, config, student_KUD, rollout, o, d.is_clip)
    used_K = weight_K != 0
    value_K = jnp.sum(jnp.where(mask_KU, value_KU, 0.0), axis=1) / jnp.maximum(1, jnp.sum(mask_KU, axis=1))
    loss = jnp.sum(jnp.where(used_K, weight_K * jnp.where(used_K, value_K, 0.0), 0.0))
    scored_KU = mask_KU & used_K[:, None]
    sums = {"divergence": jnp.sum(jnp.where(used_K, value_K, 0.0)), "views": jnp.sum(used_K)}
    sums |= _delta_sums(teacher_params, config, teacher_KUD, rollout, scored_KU, o)
    return loss, sums


def _delta_sums(teacher, config, teacher_KUD, rollout: base.Rollout, scored_KU, o: Objective) -> dict[str, jax.Array]:
    """Sums log T(y) - log S(y) over the scored tokens, S as when it sampled them, both over the whole vocabulary."""
    logp_KU = annotate.span_logp(teacher, config, teacher_KUD, rollout, temperature=o.temperature, chunk=o.chunk)
    own_BT = rollout.logp_BT + jnp.log(rollout.kept_mass_BT)
    own_KU = views_lib.span_tokens(own_BT, base.given(rollout.views, "views"), o.span)
    delta = jnp.sum(jnp.where(scored_KU, logp_KU - own_KU, 0.0))
    return {"delta": jax.lax.stop_gradient(delta), "delta_tokens": jnp.sum(scored_KU)}


def _feedback_metrics(sums) -> dict[str, jax.Array]:
    """Finishes the sums of `feedback_loss`: means over the views (divergence) and over their tokens (delta)."""
    return {
        "feedback_loss": sums["feedback_loss"],
        "divergence": sums["divergence"] / jnp.maximum(1, sums["views"]),
        "views": sums["views"],
        "feedback/delta": sums["delta"] / jnp.maximum(1, sums["delta_tokens"]),
    }


def _span_importance(params, config, student_KUD, rollout: base.Rollout, o: Objective, bound: float) -> jax.Array:
    """min(π / μ, bound) of each span token, no gradient: π as it is now, μ as it was when it sampled."""
    views = base.given(rollout.views, "views")
    tokens_KU = views_lib.span_tokens(rollout.tokens_BT, views, o.span)
    logp_N = token_logprob.token_logprob(
        student_KUD.reshape(-1, student_KUD.shape[-1]),
        transformer.unembedding(params),
        tokens_KU.reshape(-1),
        temperature=o.temperature,
        soft_cap=config.logit_soft_cap,
        chunk=o.chunk,
    ).logp_N
    old_KU = views_lib.span_tokens(rollout.logp_BT, views, o.span)
    ratio_KU = jnp.exp(jnp.clip(logp_N.reshape(old_KU.shape) - old_KU, -losses.LOG_RATIO_MAX, losses.LOG_RATIO_MAX))
    return jax.lax.stop_gradient(jnp.where(views_lib.span_mask(views, o.span), jnp.minimum(ratio_KU, bound), 0.0))


def gradients(
    params, teacher, config, rollout: base.Rollout, credit: base.Credit, o: Objective, plan: packing.Plan | None = None
):
    """Sums the gradients over forwards: ([outcome, feedback if there are views], sums, ratio sums, row_B, view sums).

    plan: which rollouts share rows; None = a row each, o.micro_batch at a time.
    Raises: base.InputError when micro_batch does not divide the rollouts.
    """
    B = rollout.tokens_BT.shape[0]
    hinted = credit.view_weight_K is not None and rollout.views is not None
    credit = credit.replace(metrics={})
    one = functools.partial(_of_forward, params, teacher, config, hinted, o)
    rollout, weight_BT, corrected = correct(rollout, token_weights(rollout, o), o)
    if plan is not None:
        part, count = functools.partial(packing.forward, plan, rollout, credit, weight_BT), plan.used
    elif o.micro_batch and o.micro_batch < B:
        part, count = packing.strided(o.micro_batch, o.chain_rows, rollout, credit, weight_BT)
    else:
        grads, sums, *others = one(rollout, credit, weight_BT)
        return grads, sums | corrected, *others

    def step(i, total):
        args, rows_C = part(i)
        grads, sums, ratios, row_C, view_sums = one(*args)
        added = jax.tree.map(jnp.add, (grads, sums, view_sums), (*total[:2], total[4]))
        row_B = total[3].at[rows_C].set(row_C, mode="drop")
        return added[0], added[1], losses.combine(ratios, total[2]), row_B, added[2]

    shapes = jax.eval_shape(lambda m: one(*part(m)[0]), jnp.int32(0))
    grads, sums, ratios, _, view_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total: tuple[Any, ...] = (grads, sums, ratios, jnp.zeros(B), view_sums)
    total = jax.lax.fori_loop(0, count, step, total)
    return total[0], total[1] | corrected, *total[2:]


def _of_forward(params, teacher, config, hinted: bool, o: Objective, rollout, credit, weight_BT) -> tuple[Any, ...]:
    """The gradients and sums of one forward: as `gradients`, of its rollouts."""
    hidden_RPD, pull, teacher_KUD = _read(params, teacher, config, rollout, hinted, o)
    terms: list[Callable[..., Any]] = [lambda p, h: outcome_loss(p, config, h, rollout, credit, weight_BT, o)]
    if hinted:
        terms.append(lambda p, h: feedback_loss(p, teacher, config, h, teacher_KUD, rollout, credit, o))
    found, direct, states = [], [], []
    for term in terms:  # each differentiated alone down to the states: one vjp over both pays for zero cotangents
        value, (on_params, on_states) = jax.value_and_grad(term, (0, 1), has_aux=True)(params, hidden_RPD)
        found.append(value)
        direct.append(on_params)
        states.append(on_states)
    through = jax.vmap(lambda x: pull(x)[0])(jnp.stack(states))  # in one pass: what layers recompute is shared
    grads = [jax.tree.map(lambda x, y, i=i: x + y[i], direct[i], through) for i in range(len(terms))]
    sums, ratios, row_B = found[0][1]
    return grads, sums, ratios, row_B, found[1][1] | {"feedback_loss": found[1][0]} if hinted else {}


def _read(params, teacher, config, rollout: base.Rollout, hinted: bool, o: Objective):
    """One forward with its pullback: (hidden_RPD, pull, the teacher's states on the spans or None).

    A live teacher reads the branches in the same forward; another one reads the same rows with its own weights.
    """
    if hinted and teacher is None and base.given(rollout.views, "views").branch:

        def live(p):
            hidden_RPD, branch_RQD = views_lib.read(p, config, rollout, remat=o.remat)
            return hidden_RPD, views_lib.span_states(hidden_RPD, branch_RQD, rollout, o.span)

        return jax.vjp(live, params, has_aux=True)
    hidden_RPD, pull = jax.vjp(lambda p: annotate.hidden_states(p, config, rollout, remat=o.remat), params)
    voice = params if teacher is None else teacher
    return hidden_RPD, pull, views_lib.teacher_states(voice, config, rollout, o.span) if hinted else None


def _dot(a, b):
    return sum(jnp.vdot(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def make_update(
    config: transformer.Config, objective: Objective, optimizer: optax.GradientTransformation, places: Any = None
):
    """Binds the static parts and jits: update(state, rollout, credit, plan, rate) -> (state, metrics).

    The state is donated. rate: factor on the change of the parameters, traced (budget.rate). A batch whose gradient is
    exactly 0 (no group with signal, no view) moves nothing, the optimizer's state included: Muon makes a full-sized
    step of whatever direction its momentum has left, and destroyed policies that way (LOG.md).
    places: shardings of the state, which the new one keeps; None = as XLA likes (then a second step may compile again).
    """

    def update(
        state: base.TrainState,
        rollout: base.Rollout,
        credit: base.Credit,
        plan: packing.Plan | None = None,
        rate: float | jax.Array = 1.0,
    ) -> tuple[base.TrainState, Any]:
        grads, sums, ratios, row_B, view_sums = gradients(
            state.params, state.teacher, config, rollout, credit, objective, plan
        )
        total, outcome_norm = optim.clip(grads[0], objective.outcome_clip)
        entropy_top = losses.top_mean(sums.pop("entropy_histogram"), TOP)
        metrics = (
            dict(sums) | losses.summarise(ratios) | {"entropy_top": entropy_top, "grad_norm/outcome": outcome_norm}
        )
        if len(grads) == 2:
            clipped, norm = optim.clip(grads[1], objective.feedback_clip)
            share = schedule.scale(state.aux, state.step, **dict(objective.feedback_schedule))
            dot = _dot(grads[0], grads[1])
            metrics |= {
                "grad_norm/feedback": norm,
                "grad_cosine": dot / jnp.maximum(norm * outcome_norm, 1e-12),
                "feedback/scale": share,
            } | _feedback_metrics(view_sums)
            total = jax.tree.map(lambda x, y: x + share * y, total, clipped)
        changes, opt = optimizer.update(total, state.opt, state.params)
        changes = jax.tree.map(lambda x: x * rate, changes)
        moved = optax.tree.norm(total) != 0  # NaN moves too, and is found by the loop
        new = optax.apply_updates(state.params, changes), opt
        params, opt = jax.tree.map(lambda x, y: jnp.where(moved, x, y), new, (state.params, state.opt))
        metrics["without_signal"] = 1.0 - moved
        step = state.step + 1
        teacher = teacher_lib.advance(
            objective.teacher,
            state.teacher,
            params,
            step,
            rate=objective.teacher_rate,
            every=objective.teacher_every,
        )
        metrics["bad_row"] = jnp.where(jnp.all(jnp.isfinite(row_B)), -1, jnp.argmin(jnp.isfinite(row_B)))
        return state.replace(step=step, params=params, opt=opt, teacher=teacher), metrics

    return jax.jit(update, donate_argnums=0, out_shardings=(places, None))
