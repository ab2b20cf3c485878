"""Hand-computed credit of the variants that tell turns and tokens apart, worked out in the comments."""

import jax.numpy as jnp
import numpy as np

from rsi_jax import base, credit
from rsi_jax.credit import examples
from rsi_jax.credit.examples import action, observation, prompt
from tests.test_credit_cases import DR_GRPO, of, per_rollout

CENTRED = credit.find("centred_return_to_go")[0]
ROOT_HALF = 0.5**0.5  # z of two values that differ


def two_turns(rewards, **knobs):
    """One rollout per pair of rewards: a prompt, an action at token 1, and one at tokens 3 and 4 that ends it."""
    end = {"discount": 0.0, "finish": base.ENV}
    rows = [[prompt(1), action(1, a), observation(1), action(2, b, **end)] for a, b in rewards]
    return examples.rollout(rows, **knobs)


def by_turn(found):
    """[B, 2], after a look at the second token of the second turn."""
    adv_BT = np.asarray(found.adv_BT)
    np.testing.assert_array_equal(adv_BT[:, 3], adv_BT[:, 4])
    return adv_BT[:, [1, 3]]


# --- groups ----------------------------------------------------------------------------------------------------------


def test_T51_the_optimal_token_baseline():
    """W = 1 - 2 * .5 + .5 = .5 and 1 - 2 * .9 + .82 = .02 a token: b = .5 / .52 at every token, R = 1 and 0."""
    rollout = examples.bandit([1.0, 0.0])
    rollout = rollout.replace(
        logp_BT=jnp.log(jnp.asarray([[1, 0.5, 0.5], [1, 0.9, 0.9]])),
        collision_BT=jnp.asarray([[9, 0.5, 0.5], [9, 0.82, 0.82]]),
    )
    got = of(rollout, "otb").adv_BT
    np.testing.assert_allclose(got, [[0, 0.038462, 0.038462], [0, -0.961538, -0.961538]], atol=1e-5)


def test_T51_a_rollout_that_has_ended_stays_in_the_baseline_with_nothing_to_come():
    """n = 1: b = .02 / .52; n = 2: the first has ended with W = .5 and G = 0, b = .04 / .54."""
    rollout = examples.rollout([[prompt(1), action(1, 0.0)], [prompt(1), action(2, 1.0)]])
    rollout = rollout.replace(
        logp_BT=jnp.log(jnp.asarray([[1, 0.5, 1], [1, 0.9, 0.9]])),
        collision_BT=jnp.asarray([[9, 0.5, 9], [9, 0.82, 0.82]]),
    )
    got = of(rollout, "otb").adv_BT
    np.testing.assert_allclose(got, [[0, -0.038462, 0], [0, 0.961538, 0.925926]], atol=1e-5)


def test_the_optimal_token_baseline_of_rollouts_that_are_all_sampled_and_of_certain_ones():
    """W = .5 at both tokens of both rows: b = 1/2, at the very last token too; one of chance 1 weighs nothing."""
    rollout = examples.rollout([[action(2, 1.0)], [action(2, 0.0)]])
    for chance, want in ((0.5, [[0.5, 0.5], [-0.5, -0.5]]), (1.0, [[1.0, 1.0], [0.0, 0.0]])):
        columns = {"logp_BT": jnp.full((2, 2), np.log(chance)), "collision_BT": jnp.full((2, 2), chance)}
        got = credit.find("otb")[0](rollout.replace(**columns)).adv_BT
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_grpo_per_turn_counts_a_rollout_once_for_each_of_its_turns():
    """Three turns of return 1 and one of 0: mean .75, std .5."""
    long = [prompt(1), action(1), observation(1), action(2), observation(1), action(1, 1.0)]
    rollout = examples.rollout([long, [prompt(1), action(4, 0.0)]])
    np.testing.assert_allclose(per_rollout(rollout, "grpo", per="turn"), [0.5, -1.5], atol=1e-5)
    np.testing.assert_allclose(per_rollout(rollout, "grpo", per="turn", scale="none"), [0.25, -0.75], atol=1e-6)


def test_rae_centres_on_what_it_remembers_after_this_batch():
    """b' = .5 * .4 + .5 * mean(1, 0) = .45; the row of weight 0 does not count."""
    rollout = examples.bandit([1.0, 0.0, 8.0], weight=[1, 1, 0]).replace(baseline_B=jnp.full(3, 0.4))
    np.testing.assert_allclose(per_rollout(rollout, "rae", decay=0.5), [0.55, -0.45, 0], atol=1e-6)


# --- turns -----------------------------------------------------------------------------------------------------------


def test_T40_a_baseline_over_those_that_got_as_far_erases_the_signal_for_going_on():
    """X stops, Y and Z go on and earn .5. Leave-one-out, X counting 0 at turn 1: -.5; .5 - .25 and .5 - .25."""
    stops = [prompt(1), action(1, 0.0)]
    goes_on = [prompt(1), action(1, 0.0), observation(1), action(2, 0.5)]
    rollout = examples.rollout([stops, goes_on, goes_on])
    np.testing.assert_allclose(by_turn(of(rollout, "turn_rloo")), [[-0.5, 0], [0.25, 0.25], [0.25, 0.25]], atol=1e-6)
    np.testing.assert_array_equal(of(rollout, "mt_grpo", outcome_weight=0.0).adv_BT, 0.0)


def test_mt_grpo_adds_the_turn_to_the_outcome_except_at_the_last():
    """Turn 0: outcome .5, -.5 and half of the turn's -1, 1; the last turn: the outcome alone."""
    rollout = two_turns([(0.0, 1.0), (2.0, 0.0)])
    got = by_turn(of(rollout, "mt_grpo", scale="none", turn_weight=0.5))
    np.testing.assert_allclose(got, [[0.5 - 0.5, 0.5], [-0.5 + 0.5, -0.5]], atol=1e-6)
    got = by_turn(of(rollout, "mt_grpo", outcome_weight=2.0))
    np.testing.assert_allclose(got, ROOT_HALF * np.array([[2 - 1, 2], [1 - 2, -2]]), atol=1e-5)


def test_T41_turn_rloo_discounts_before_it_centres():
    """G = (1, 0) and (.5, 1): each less that of the other."""
    got = by_turn(of(two_turns([(1.0, 0.0), (0.0, 1.0)]), "turn_rloo", discount=0.5))
    np.testing.assert_allclose(got, [[0.5, -1], [-0.5, 1]], atol=1e-6)


def test_T41_igpo_normalises_before_it_discounts():
    """Gains .4 and .2, outcomes 0 and 1: z = ±h and -h, h. A_0 = .5 (±h) + .25 (-h, h), h = .5 ** .5.

    Discounted first, turn 0 would be .5 * .4 = .2 and .5 * .2 + .25 = .35: the second rollout ahead, not the first.
    """
    chance = [[0.2, 0.6, 1, 1], [0.2, 0.4, 1, 1]]
    rollout = two_turns([(5.0, 0.0), (9.0, 1.0)]).replace(answer_logp_BS=jnp.log(jnp.asarray(chance)))
    got = by_turn(of(rollout, "igpo", weight=0.5, discount=0.25))
    np.testing.assert_allclose(got, ROOT_HALF * np.array([[0.25, -1], [-0.25, 1]]), atol=1e-4)
    unknown = rollout.replace(answer_logp_BS=jnp.full((2, 4), jnp.nan))
    got = by_turn(of(unknown, "igpo", weight=0.5, discount=0.25))
    np.testing.assert_allclose(got, ROOT_HALF * np.array([[-0.25, -1], [0.25, 1]]), atol=1e-5)


def test_prm_in_its_three_forms():
    """p = (.5, .8) and (.7, .4), with p_0 .6 on average, on top of ±.5; weight 2."""
    judge = jnp.asarray([[0.5, 0.8, 0, 0], [0.7, 0.4, 0, 0]])
    rollout = two_turns([(0.0, 1.0), (0.0, 0.0)]).replace(judge_BS=judge)
    forms = {
        "difference": [[-0.1, 0.3], [0.1, -0.3]],
        "sum": [[1.3 - 1.2, 0.8 - 1.2], [1.1 - 1.2, 0.4 - 1.2]],
        "min": [[0.5 - 0.45, 0.8 - 0.45], [0.4 - 0.45, 0.4 - 0.45]],
    }
    for form, part in forms.items():
        got = by_turn(of(rollout, "prm", inner=DR_GRPO, weight=2.0, form=form))
        np.testing.assert_allclose(got, [[0.5], [-0.5]] + 2 * np.array(part), atol=1e-6, err_msg=form)
    missing = rollout.replace(judge_BS=judge.at[0, 0].set(jnp.nan))  # no difference on either side of it
    got = by_turn(of(missing, "prm", inner=DR_GRPO, weight=2.0))
    np.testing.assert_allclose(got, [[0.5, 0.5], [-0.5, -0.5 - 0.6]], atol=1e-6)


def test_shaping_by_a_potential_sums_to_nothing_and_is_a_baseline_of_what_is_to_come():
    """Φ = .25 and .75 after turn 0: shaped rewards (.25, 1 - .25) and (.75, 0 - .75). G = (1, .75) and (0, -.75)."""
    judge = jnp.asarray([[0.25, 0.9, 0, 0], [0.75, 0.1, 0, 0]])
    rollout = two_turns([(0.0, 1.0), (0.0, 0.0)]).replace(judge_BS=judge)
    got = by_turn(of(rollout, "pbrs", inner=CENTRED))
    np.testing.assert_allclose(got, [[0.5, 0.75 - 0.5], [-0.5, -0.75 - 0.5]], atol=1e-6)
    np.testing.assert_allclose(of(rollout, "pbrs", inner=DR_GRPO).adv_BT, of(rollout, "dr_grpo").adv_BT, atol=1e-6)
    # γ = .5, weight 2: turn 0 earns 2 * .5 Φ, turn 1 loses 2 Φ: returns 1 - .25 and 0 - .75
    got = by_turn(of(rollout, "pbrs", inner=DR_GRPO, discount=0.5, weight=2.0))
    np.testing.assert_allclose(got, [[0.75, 0.75], [-0.75, -0.75]], atol=1e-6)
    # cut short, an episode keeps the potential of where it stopped: returns 1 + .9 and .1
    cut = rollout.segments.replace(
        finish_BS=rollout.segments.finish_BS.at[:, 3].set(base.LENGTH), discount_BS=jnp.ones((2, 4))
    )
    got = by_turn(of(rollout.replace(segments=cut), "pbrs", inner=DR_GRPO))
    np.testing.assert_allclose(got, [[0.9, 0.9], [-0.9, -0.9]], atol=1e-6)


# --- critics ---------------------------------------------------------------------------------------------------------


def test_vapo_bridges_the_length_of_each_rollout_and_its_critic_learns_the_return():
    """α = .5. Four tokens: λ = .5, δ = (0, 0, .5, .5). Two tokens: λ = 0, δ = (.4, .4). γ = 1."""
    rows = [[prompt(1), action(n, 1.0, discount=0.0, finish=base.ENV)] for n in (4, 2)]
    rollout = examples.rollout(rows, value=[[0, 0, 0, 0.5], [0.2, 0.6]])
    got = of(rollout, "vapo", alpha=0.5)
    np.testing.assert_allclose(got.adv_BT, [[0, 0.1875, 0.375, 0.75, 0.5], [0, 0.4, 0.4, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT, [[0, 1, 1, 1, 1], [0, 1, 1, 0, 0]], atol=1e-6)


def test_a_critic_after_the_last_token_stands_for_what_a_cut_rollout_would_have_earned():
    """V = .2, .4 and .6 after them; r = .1 at the end; γ = .5, λ = .5: δ_1 = .1 + .3 - .4 = 0, δ_0 = .2 - .2 = 0.

    Ended instead: δ_1 = .1 - .4. As one turn: .1 + .3 - .2, or .1 - .2.
    """
    rows = [[prompt(1), action(2, 0.1, finish=finish)] for finish in (base.LENGTH, base.STOP)]
    rollout = examples.rollout(rows, value=[[0.2, 0.4]] * 2).replace(end_value_B=jnp.asarray([0.6, 0.6]))
    got = of(rollout, "gae", discount=0.5, lambda_=0.5)
    np.testing.assert_allclose(got.adv_BT, [[0, 0, 0], [0, -0.075, -0.3]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT, [[0, 0.2, 0.4], [0, 0.125, 0.1]], atol=1e-6)
    got = of(rollout, "turn_gae", discount=0.5, lambda_=0.5)
    np.testing.assert_allclose(got.adv_BT, [[0, 0.2, 0.2], [0, -0.1, -0.1]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT, [[0, 0.4, 0.4], [0, 0.1, 0.1]], atol=1e-6)


# --- values that were sampled ----------------------------------------------------------------------------------------


def test_T52_vineppo_telescopes():
    spans = [prompt(1), action(1), observation(1), action(2), observation(1), action(1, 1.0)]
    values = np.full((1, 7), np.nan, np.float32)
    values[0, [1, 3, 4, 6]] = [0.5, 0.75, 9.0, 0.25]  # token 4 is inside an action: not read
    rollout = examples.rollout([spans]).replace(mc_value_BT=jnp.asarray(values))
    got = np.asarray(of(rollout, "vineppo").adv_BT)[0, [1, 3, 4, 6]]
    np.testing.assert_allclose(got, [0.25, -0.5, -0.5, 0.75], atol=1e-6)
    np.testing.assert_allclose(got[[0, 1, 3]].sum(), 1.0 - 0.5, atol=1e-6)
    fewer = rollout.replace(mc_value_BT=rollout.mc_value_BT.at[0, 3].set(jnp.nan))
    got = np.asarray(of(fewer, "vineppo").adv_BT)[0, [1, 3, 4, 6]]
    np.testing.assert_allclose(got, [-0.25, -0.25, -0.25, 0.75], atol=1e-6)  # one stretch from .5 to .25
    late = rollout.replace(mc_value_BT=rollout.mc_value_BT.at[0, 1].set(jnp.nan))
    np.testing.assert_allclose(of(late, "vineppo").adv_BT[0, [1, 3]], [0, -0.5], atol=1e-6)


def test_T52_spo_credits_the_stretches_between_its_cuts_where_there_was_a_choice():
    """Cuts at tokens 0 and 2 of .5 and .8, then 1 is earned: .3, .3, .2, .2; token 1 was sampled with .95."""
    rollout = examples.rollout([[action(4, 1.0)]])
    rollout = rollout.replace(
        logp_BT=jnp.log(jnp.asarray([[0.5, 0.95, 0.89, 0.1]])),
        mc_value_BT=jnp.asarray([[0.5, jnp.nan, 0.8, jnp.nan]]),
    )
    np.testing.assert_allclose(of(rollout, "spo").adv_BT, [[0.3, 0, 0.2, 0.2]], atol=1e-6)
    np.testing.assert_allclose(of(rollout, "spo", prob_max=1.0).adv_BT, [[0.3, 0.3, 0.2, 0.2]], atol=1e-6)


def test_tree_grpo_sums_the_tree_and_the_task():
    """R = 1, 0 in one tree and 1, 1 in another: ±.5, ±.5 and 0, 0; of the group, mean .75 and std .5."""
    rollout = examples.bandit([1.0, 0.0, 1.0, 1.0]).replace(tree_B=jnp.asarray([0, 0, 1, 1]))
    want = [0.5 + 0.25, -0.5 - 0.75, 0.25, 0.25]
    np.testing.assert_allclose(per_rollout(rollout, "tree_grpo", scale="none"), want, atol=1e-6)
    want = [ROOT_HALF + 0.5, -ROOT_HALF - 1.5, 0.5, 0.5]
    np.testing.assert_allclose(per_rollout(rollout, "tree_grpo"), want, atol=1e-5)
    chains = rollout.replace(tree_B=jnp.arange(4))
    np.testing.assert_array_equal(of(chains, "tree_grpo").adv_BT, of(rollout, "grpo").adv_BT)


# --- hindsight -------------------------------------------------------------------------------------------------------


def hindsight(told, untold=((0.4, 0.4), (0.4, 0.4))):
    """R = 1 and 0; the chance of each token of turns 0 and 1 with and without hindsight."""

    def column(chances):
        return jnp.log(jnp.asarray([[1, a, 1, b, b] for a, b in chances]))

    rollout = two_turns([(0.0, 1.0), (0.0, 0.0)])
    return rollout.replace(logp_BT=column(untold), hindsight_logp_BT=column(told))


def test_hcapo_of_both_denominators():
    """Chances .2, .6: ρ = .5, 1.5 of their mean. γ = .5: Q = .25, 1.5, and 0, 0 of the failure.

    Mean .4375, std .718070: z = -.261117 (left out: a success), 1.479661, -.609272 twice. With the policy's .4 below:
    the same ρ. With .8 and .4: ρ = .25, 1.5, Q = .125, 1.5: mean .40625, std .731544.
    """
    wide = {"inner": DR_GRPO, "temperature": 1.0, "clip_low": 0.0, "clip_high": 9.0, "discount": 0.5}
    want = [[0.5, 0.5 + 1.479661], [-0.5 - 0.609272, -0.5 - 0.609272]]
    for denominator in ("trajectory", "policy"):
        rollout = hindsight([(0.2, 0.6), (0.3, 0.1)])
        np.testing.assert_allclose(by_turn(of(rollout, "hcapo", **wide, denominator=denominator)), want, atol=1e-5)
    rollout = hindsight([(0.2, 0.6), (0.3, 0.1)], [(0.8, 0.4), (0.4, 0.4)])
    got = by_turn(of(rollout, "hcapo", **wide, denominator="policy"))
    want = [[0.5, 0.5 + 1.495125], [-0.5 - 0.555332, -0.5 - 0.555332]]
    np.testing.assert_allclose(got, want, atol=1e-5)
    unmoved = by_turn(of(rollout, "hcapo", **wide, denominator="trajectory"))
    np.testing.assert_allclose(unmoved[0, 1], 0.5 + 1.479661, atol=1e-5)  # does not read the policy


def test_an_empty_hint_is_no_hindsight_only_against_the_policy_itself():
    """γ = .5, ρ = 1: Q = .5, 1, 0, 0; mean .375, std .478714: z = .261116, 1.305582, -.783349."""
    same = [(0.2, 0.6), (0.3, 0.1)]
    rollout = hindsight(same, same)
    against_policy = of(rollout, "hcapo", inner=DR_GRPO, denominator="policy", discount=0.5)
    assert against_policy.metrics["hindsight_ratio"] == 1  # exactly
    want = [[0.761116, 1.805582], [-1.283349, -1.283349]]
    np.testing.assert_allclose(by_turn(against_policy), want, atol=1e-5)
    published = by_turn(of(rollout, "hcapo", inner=DR_GRPO, discount=0.5))
    assert (np.abs(published - want) > 0.01).any()  # sure actions earn credit whatever hindsight says
    # Smoothed: Q = (.5 + 1) / 2, 1, 0, 0; mean .4375, std .515388
    smooth = by_turn(of(rollout, "hcapo", inner=DR_GRPO, denominator="policy", discount=0.5, smooth=True))
    np.testing.assert_allclose(smooth[0], [0.5 + 0.606340, 0.5 + 1.091411], atol=1e-5)


def test_hca_and_cocoa():
    """π = .5, rewards -.4, 1. h of turn 0: .25 for a loss (1 - 2), .8 for a gain (1 - .625); of turn 1: .4 (1 - 1.25).

    hca: what is to come from turn 0 is .6, a gain: .375 * .6. cocoa: -1 * -.4 + .375 * 1. At turn 1 both: -.25 * 1.
    """
    chance = np.full((1, 5, 4), 1e-9, np.float32)  # classes: loss, nothing, less than .5, gain
    chance[0, 1, [0, 3]], chance[0, 3:, 3] = [0.25, 0.8], 0.4
    rollout = two_turns([(-0.4, 1.0)]).replace(
        logp_BT=jnp.full((1, 5), np.log(0.5)), outcome_logp_BTM=jnp.log(jnp.asarray(chance))
    )
    np.testing.assert_allclose(by_turn(of(rollout, "hca")), [[0.225, -0.25]], atol=1e-6)
    np.testing.assert_allclose(by_turn(of(rollout, "cocoa")), [[0.775, -0.25]], atol=1e-6)
    np.testing.assert_allclose(by_turn(of(rollout, "cocoa", clip=1.0)), [[0.375, 0.0]], atol=1e-6)
    blind = rollout.replace(outcome_logp_BTM=jnp.repeat(rollout.logp_BT[..., None], 4, axis=2))
    for name in ("hca", "cocoa"):
        np.testing.assert_array_equal(of(blind, name).adv_BT, 0.0)
