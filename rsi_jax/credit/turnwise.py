"""Credit that tells turns apart by rewards of their own: the environment's, a judge's, or the answer's likelihood.

Column k of a judge or of an answer belongs to turn k. What a judge or a tracked answer says is no reward of the
environment: it enters the advantages and never the return that is reported.
"""

import jax
import jax.numpy as jnp

from rsi_jax import base, masked
from rsi_jax.credit import rewards, turns

NEEDS: dict[str, tuple[str, ...]] = {"prm": ("judge_BS",), "pbrs": ("judge_BS",), "igpo": ("answer_logp_BS",)}


def turn_rloo(rollout: base.Rollout, *, discount: float = 1.0) -> base.Credit:
    """Leave-one-out at every turn: A_k = G_k - mean over the others of G_k, where one that has stopped counts as 0.

      G_k = r_k + γ d_k G_{k+1}

    The baseline of turn k is a number that the rollout itself cannot move, not even by stopping early, so it is
    unbiased; an average over those that got as far as k is not, and erases the signal for going on. With one turn:
    rloo.

    Args:
      rollout: rewards, discounts, groups and weights are read.
      discount: γ per turn, in [0, 1].

    Source: Kool et al. 2019 (https://openreview.net/forum?id=r1lgTGL5DE), applied to each turn's return-to-go.
    Differs: a turn at which the whole group agrees to 1e-6 gives exactly 0; a singleton gives 0.
    """
    rewards.check(rollout)
    togo_BS = rewards.returns_to_go(rewards.counted_turns(rollout), discount)
    togo_BS = jnp.where(rewards.counted_B(rollout)[:, None], togo_BS, jnp.nan)  # NaN: enters no group statistic

    def centred(togo_B):
        places = (togo_B, rollout.group_B, rollout.weight_B)
        others_B = jnp.maximum(masked.group_size(*places) - 1.0, 1.0)
        deviation_B = togo_B - (masked.group_sum(*places) - togo_B) / others_B
        return masked.zero(deviation_B, masked.group_spread(*places) > masked.SPREAD)

    return _credit(rollout, jax.vmap(centred, 1, 1)(togo_BS))


def mt_grpo(
    rollout: base.Rollout,
    *,
    turn_weight: float = 1.0,
    outcome_weight: float = 1.0,
    scale: str = "std",
    std_floor: float = 1e-6,
) -> base.Credit:
    """Multi-turn GRPO: A_k = outcome_weight A_outcome + turn_weight A_turn,k; the last turn has A_outcome alone.

    A_outcome normalises the reward of the last turn over the group; A_turn,k normalises r_k over those of the group
    that have a turn k which is not their last. That baseline depends on who got so far: where the policy can stop, it
    is biased against going on (`turn_rloo` is not). With turn_weight = 0: grpo on the last reward.

    Args:
      rollout: rewards, groups and weights are read.
      turn_weight, outcome_weight: >= 0.
      scale: 'std' | 'none'.
      std_floor: in units of the reward, > 0.

    Raises: base.InputError for an unknown scale or a knob out of range.

    Source: Zeng et al. 2025, MT-GRPO (https://arxiv.org/abs/2505.11821), eq. 7-8 for two turns.
    Differs: any number of turns; the turn term is of the turn's own reward.
    """
    rewards.check(rollout)
    rewards.check_scale("mt_grpo", scale, std_floor)
    if turn_weight < 0 or outcome_weight < 0:
        raise base.InputError(
            f"credit.mt_grpo: turn_weight and outcome_weight must be >= 0, got {turn_weight} and {outcome_weight}"
        )
    table, counted_B = rewards.counted_turns(rollout), rewards.counted_B(rollout)
    final_BS = turns.final(table.used_S)
    outcome_B = jnp.where(counted_B, masked.sum(table.reward_S, final_BS, axis=1), jnp.nan)

    def normalised(x_B):
        return rewards.relative(x_B, rollout.group_B, rollout.weight_B, scale=scale, floor=std_floor)

    reward_BS = jnp.where(table.used_S & ~final_BS & counted_B[:, None], table.reward_S, jnp.nan)
    turn_BS = jax.vmap(normalised, 1, 1)(reward_BS)
    return _credit(rollout, outcome_weight * normalised(outcome_B)[:, None] + turn_weight * turn_BS)


def prm(
    rollout: base.Rollout, *, inner: base.CreditFn, weight: jax.Array | float = 1.0, form: str = "difference"
) -> base.Credit:
    """Adds a judge's scores of the turns, p_k in [0, 1], to `inner`: A_k + w C_k.

      difference  C_k = p_k - p_{k-1}, the progress of turn k; p_0 against the mean p_0 of its group
      sum         C_k = Σ_{j >= k} p_j - the group's mean of Σ_j p_j: pays for length where p > 0
      min         C_k = min_{j >= k} p_j - the group's mean of min_j p_j: a rollout is as good as its worst step

    With w = 0: `inner`. A judge that says the same of every turn adds nothing by 'difference' and by 'min'.

    Args:
      rollout: needs judge_BS and what `inner` needs; where a score is not finite, C_k = 0 for the differences on both
        sides of it ('difference'); it is read as 0 ('sum') or 1 ('min').
      inner: credit function of the outcome.
      weight: w >= 0; it may be traced.
      form: 'difference' | 'sum' | 'min'.

    Raises: ValueError without judge_BS; base.InputError for an unknown form.

    Source: Setlur et al. 2024 (https://arxiv.org/abs/2410.08146), progress as an advantage; Cheng et al. 2025, PURE
      (https://arxiv.org/abs/2504.15275), the min form; Lightman et al. 2023 (https://arxiv.org/abs/2305.20050).
    """
    rewards.check(rollout, "judge_BS")
    if form not in ("difference", "sum", "min"):
        raise base.InputError(f"credit.prm.form is 'difference', 'sum' or 'min', got '{form}'")
    credit, table = inner(rollout), rewards.counted_turns(rollout)
    judge_BS = base.given(rollout.judge_BS, "judge_BS")
    known_BS = table.used_S & jnp.isfinite(judge_BS) & rewards.counted_B(rollout)[:, None]

    def less_group_mean(x_B, counts_B):
        x_B = jnp.where(counts_B, x_B, jnp.nan)
        mean_B = masked.group_mean(x_B, rollout.group_B, rollout.weight_B)
        return mean_B, masked.group_spread(x_B, rollout.group_B, rollout.weight_B) <= masked.SPREAD

    if form == "difference":
        mean_B, agree_B = less_group_mean(judge_BS[:, 0], known_BS[:, 0])
        first_B = jnp.where(agree_B, judge_BS[:, 0], mean_B)
        before_BS = jnp.concatenate([first_B[:, None], judge_BS[:, :-1]], axis=1)
        known_BS &= jnp.concatenate([known_BS[:, :1], known_BS[:, :-1]], axis=1)
        part_BS = masked.zero(judge_BS - before_BS, known_BS)
    else:
        neutral = 0.0 if form == "sum" else 1.0
        step_BS = jnp.where(known_BS, judge_BS, neutral)
        scan = jax.lax.cumsum if form == "sum" else jax.lax.cummin
        togo_BS = scan(step_BS, axis=1, reverse=True)
        mean_B, _ = less_group_mean(togo_BS[:, 0], rewards.counted_B(rollout))
        part_BS = togo_BS - mean_B[:, None]
    return _added(rollout, credit, weight * part_BS)


def pbrs(
    rollout: base.Rollout, *, inner: base.CreditFn, weight: jax.Array | float = 1.0, discount: float = 1.0
) -> base.Credit:
    """Potential-based shaping: `inner` on rewards r_k + w (γ d_k Φ(s_{k+1}) - Φ(s_k)), which keeps the best policy.

    Φ(s_{k+1}) is the judge's score of turn k, Φ(s_0) = 0, and Φ = 0 where the episode ended (d = 0). With γ = 1 the
    shaping of an episode sums to 0: a variant that reads returns only sees no difference; one that reads
    returns-to-go gets Φ as its baseline, for G_k becomes G_k - w Φ(s_k). With w = 0: `inner`.

    Args:
      rollout: needs judge_BS and what `inner` needs; a score that is not finite is read as 0.
      inner: credit function that reads rewards by turn, e.g. centred_return_to_go.
      weight: w >= 0; it may be traced.
      discount: γ per turn, in [0, 1]: that of `inner`.

    Raises: ValueError without judge_BS; base.InputError for a discount out of range.

    Source: Ng, Harada & Russell 1999, theorem 1.
    """
    rewards.check(rollout, "judge_BS")
    if not 0 <= discount <= 1:
        raise base.InputError(f"credit.pbrs.discount must be in [0, 1], got {discount}")
    table = rewards.counted_turns(rollout)
    judge_BS = base.given(rollout.judge_BS, "judge_BS")
    after_BS = masked.zero(judge_BS, jnp.isfinite(judge_BS))
    before_BS = jnp.pad(after_BS, ((0, 0), (1, 0)))[:, :-1]
    shaping_BS = weight * (discount * table.discount_S * after_BS - before_BS)
    segments = rollout.segments
    acts_BS = (segments.kind_BS == base.ACTION) & (segments.length_BS > 0)
    own_BS = jnp.take_along_axis(shaping_BS, jnp.maximum(rollout.turn_BS, 0), axis=1)
    reward_BS = segments.reward_BS + masked.zero(own_BS, acts_BS)
    credit = inner(rollout.replace(segments=segments.replace(reward_BS=reward_BS)))
    return credit.replace(metrics={**credit.metrics, **rewards.report(rollout, credit.adv_BT)})


def igpo(rollout: base.Rollout, *, weight: float = 0.1, discount: float = 1.0, std_floor: float = 1e-6) -> base.Credit:
    """Information gain: how much a turn raised the likelihood of the answer, beside the outcome.

      g_k = p_{k+1} - p_k, p_k = exp(mean log-prob of the answer's tokens before turn k), for all turns but the last
      A_k = w z(g_k) + γ d_k A_{k+1} before the last turn, whose A is z(outcome)

    d_k are the environment's discounts. z normalises over all such turns of the group, gains and outcomes each on their
    own, before discounting (the other order gives other numbers). The gains of a rollout telescope. With w = 0 and
    γ = 1: grpo on the last reward.

    Args:
      rollout: needs answer_logp_BS; where it is not finite (no answer is known) a gain is 0.
      weight: w >= 0; 0.05 to 0.1 in the authors' runs, 0.5 was unstable.
      discount: γ per turn, in [0, 1].
      std_floor: > 0.

    Raises: ValueError without answer_logp_BS; base.InputError for a knob out of range.

    Source: IGPO, Wang et al. 2025 (https://arxiv.org/abs/2510.14967), eq. 4-7.
    Differs: gains and outcomes are normalised apart (the authors' code can do either, together by default), and w
      scales z, not the gain before it; std with n - 1.
    """
    rewards.check(rollout, "answer_logp_BS")
    rewards.check_scale("igpo", "std", std_floor)
    if weight < 0 or not 0 <= discount <= 1:
        raise base.InputError(f"credit.igpo: weight >= 0 and discount in [0, 1], got {weight} and {discount}")
    table, counted_B = rewards.counted_turns(rollout), rewards.counted_B(rollout)
    final_BS = turns.final(table.used_S)
    chance_BS = jnp.exp(base.given(rollout.answer_logp_BS, "answer_logp_BS"))
    gain_BS = jnp.pad(chance_BS[:, 1:], ((0, 0), (0, 1))) - chance_BS
    inner_BS = table.used_S & ~final_BS & counted_B[:, None]
    gain_BS = jnp.where(jnp.isfinite(gain_BS), gain_BS, 0.0)
    group_BS = jnp.broadcast_to(rollout.group_B[:, None], gain_BS.shape)
    weight_N = jnp.broadcast_to(rollout.weight_B[:, None], gain_BS.shape).reshape(-1)
    flat_N = jnp.where(inner_BS, gain_BS, jnp.nan).reshape(-1)
    places = (flat_N, group_BS.reshape(-1), weight_N)
    gain_BS = rewards.relative(*places, scale="std", floor=std_floor).reshape(gain_BS.shape)
    outcome_B = jnp.where(counted_B, masked.sum(table.reward_S, final_BS, axis=1), jnp.nan)
    outcome_B = rewards.relative(outcome_B, rollout.group_B, rollout.weight_B, scale="std", floor=std_floor)
    step_BS = weight * gain_BS + jnp.where(final_BS, outcome_B[:, None], 0.0)
    return _credit(rollout, rewards.returns_to_go(table._replace(reward_S=step_BS), discount))


def _credit(rollout: base.Rollout, adv_BS: jax.Array) -> base.Credit:
    adv_BT = rewards.turns_to_tokens(rollout, adv_BS)
    return base.Credit(adv_BT=adv_BT, metrics=rewards.report(rollout, adv_BT))


def _added(rollout: base.Rollout, credit: base.Credit, part_BS: jax.Array) -> base.Credit:
    adv_BT = credit.adv_BT + rewards.turns_to_tokens(rollout, part_BS)
    return credit.replace(adv_BT=adv_BT, metrics={**credit.metrics, **rewards.report(rollout, adv_BT)})
