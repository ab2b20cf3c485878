"""Credit variants against hand-computed numbers, and the faults that users of other systems met."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit, losses
from rsi_jax.credit import examples, rewards
from rsi_jax.credit.examples import action, observation, prompt


@functools.cache
def jitted(name, **knobs):
    return jax.jit(functools.partial(credit.find(name)[0], **knobs))


CAPACITY = {"B": (24,), "BT": (24, 32), "BS": (24, 8), "BTM": (24, 32, 4), "K": (6,), "KN": (6, 2), "KU": (6, 4)}


def widened(columns):
    """A rollout, its segments or its views with each column padded to the capacity of its letters."""
    wide = {}
    for name, x in vars(columns).items():
        if isinstance(x, jax.Array | np.ndarray):
            shape = CAPACITY[name.rsplit("_", 1)[1]]
            wide[name] = np.pad(x, [(0, n - m) for n, m in zip(shape, x.shape, strict=True)])
    return columns.replace(**wide)


def of(rollout, name, **knobs):
    """Credit of the named variant: of the rollout padded with rows of weight 0 to one shape, so each compiles once.

    Where a rollout has no critic, it has one that says 0.
    """
    B, T = rollout.tokens_BT.shape
    critic = {"value_BT": np.zeros((B, T), np.float32), "end_value_B": np.zeros(B, np.float32)}
    wide = rollout.replace(**{column: x for column, x in critic.items() if getattr(rollout, column) is None})
    wide = widened(wide).replace(segments=widened(rollout.segments))
    if rollout.views is not None:
        wide = wide.replace(views=widened(rollout.views))
    found = jitted(name, **knobs)(wide)
    assert not np.asarray(found.adv_BT)[B:].any() and not np.asarray(found.adv_BT)[:, T:].any()
    cut = {key: x[:B, :T] for key in ("adv_BT", "value_target_BT") if (x := getattr(found, key)) is not None}
    if found.view_weight_K is not None:
        cut["view_weight_K"] = found.view_weight_K[: rollout.views.rollout_K.shape[0]]
    return found.replace(**cut)


def per_rollout(rollout, name, **knobs):
    """The one advantage that all sampled tokens of each rollout carry."""
    adv_BT = np.asarray(of(rollout, name, **knobs).adv_BT)
    mask_BT = np.asarray(rollout.mask_BT)
    rows = [np.unique(adv[mask]) for adv, mask in zip(adv_BT, mask_BT, strict=True)]
    assert all(row.size == 1 for row in rows), "tokens of one rollout differ"
    assert not adv_BT[~mask_BT].any()
    return np.concatenate(rows)


# --- groups ----------------------------------------------------------------------------------------------------------


def test_T1_group_baselines():
    rollout = examples.bandit([1, 0, 0, 0])
    np.testing.assert_allclose(per_rollout(rollout, "grpo"), [1.499997] + 3 * [-0.499999], atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "rloo"), [1] + 3 * [-1 / 3], atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "dr_grpo"), [0.75] + 3 * [-0.25], atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "grpo", scale="none"), [0.75] + 3 * [-0.25], atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "maxrl"), [3, -1, -1, -1], atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "reinforce"), [1, 0, 0, 0])
    np.testing.assert_allclose(per_rollout(rollout, "reinforce", baseline="batch"), [0.75] + 3 * [-0.25])


@pytest.mark.parametrize("name", ["grpo", "rloo", "dr_grpo", "centred_return_to_go"])
def test_T3_groups_that_agree_give_exactly_zero_and_are_counted(name):
    group = [0] * 6 + [1] * 8 + [2] * 7
    got = of(examples.bandit([0.3] * 6 + [0.35] * 8 + [0.7] * 7, group=group), name)
    np.testing.assert_array_equal(got.adv_BT, 0.0)
    assert got.metrics["zero_variance_groups"] == 3 and got.metrics["singleton_groups"] == 0
    assert got.metrics["frac_zero_adv"] == 1


def test_T3_rounding_is_no_signal_and_a_small_difference_is():
    rollout = examples.bandit([0.3, 0.3 + 5e-7, 0.3, 0.3 + 1e-4], group=[0, 0, 1, 1])
    adv = per_rollout(rollout, "grpo")
    np.testing.assert_array_equal(adv[:2], 0.0)
    assert adv[3] > 0.5


@pytest.mark.parametrize(
    "name", ["grpo", "rloo", "dr_grpo", "maxrl", "opo", "reinforce_pp_baseline", "centred_return_to_go"]
)
def test_T4_a_singleton_gives_exactly_zero_in_every_group_estimator(name):
    got = of(examples.bandit([0.7, 1.0, 0.0], group=[2, 1, 1]), name)
    np.testing.assert_array_equal(got.adv_BT[0], 0.0)
    assert jnp.all(got.adv_BT[1:, 1:] != 0)
    assert got.metrics["singleton_groups"] == 1 and got.metrics["zero_variance_groups"] == 0


def test_T51_the_optimal_baseline_weighs_returns_by_length():
    rows = [[prompt(1), action(1, 1.0)], [prompt(1), action(3, 0.0)]]
    np.testing.assert_allclose(per_rollout(examples.rollout(rows), "opo"), [0.75, -0.25], atol=1e-6)
    np.testing.assert_allclose(per_rollout(examples.bandit([1, 0, 0, 0]), "opo"), [0.75] + 3 * [-0.25], atol=1e-6)


def test_maximum_likelihood_weighs_a_group_by_how_rare_success_is():
    rollout = examples.bandit([1] + 7 * [0] + 4 * [1] + 4 * [0], group=8 * [0] + 8 * [1])
    want = [7] + 7 * [-1] + 4 * [1] + 4 * [-1]
    np.testing.assert_allclose(per_rollout(rollout, "maxrl"), want, atol=1e-5)
    got = of(examples.bandit([-1, -2, 1, 0], group=[0, 0, 1, 1]), "maxrl")  # a mean that is not positive has no log
    np.testing.assert_array_equal(got.adv_BT[:2], 0.0)
    assert got.metrics["maxrl_excluded"] == 2 and np.asarray(got.adv_BT)[2:].any()


def test_reinforce_pp_scales_the_batch_by_one_number():
    rollout = examples.bandit([1, 0, 10, 0], group=[0, 0, 1, 1])
    tokens = np.asarray(rollout.mask_BT).sum(axis=1)  # the std is over tokens
    centred, plain = np.array([0.5, -0.5, 5, -5]), np.array([1.0, 0, 10, 0])
    got = per_rollout(rollout, "reinforce_pp_baseline")
    np.testing.assert_allclose(got, centred / np.repeat(centred, tokens).std(ddof=1), rtol=1e-5)
    got, every = per_rollout(rollout, "reinforce_pp"), np.repeat(plain, tokens)
    np.testing.assert_allclose(got, (plain - every.mean()) / every.std(ddof=1), rtol=1e-5)
    rows = [[prompt(1), action(1, a), observation(2), action(1, b)] for a, b in ((1.0, 2.0), (0.0, 1.0))]
    togo = np.array([3.0, 2, 1, 1])  # of each turn, in time order
    adv_BT = np.asarray(of(examples.rollout(rows), "reinforce_pp").adv_BT)
    np.testing.assert_allclose(adv_BT[:, [1, 4]].reshape(-1), (togo - togo.mean()) / togo.std(ddof=1), rtol=1e-5)


def test_T5_std_weighs_a_group_by_how_rare_its_outcomes_are():
    for r, std, none in (([1, 0], 0.7071, 0.5), ([1, 0] * 4, 0.9354, 0.5), ([0.51, 0.49], 0.7071, 0.01)):
        signs = np.tile([1, -1], len(r) // 2)
        rollout = examples.bandit(r)
        np.testing.assert_allclose(per_rollout(rollout, "grpo"), std * signs, atol=1e-4)
        np.testing.assert_allclose(per_rollout(rollout, "grpo", scale="none"), none * signs, atol=1e-6)


def test_T9_singletons_everywhere_are_reported_as_nothing_learned():
    got = of(examples.bandit([1.0, 0.0, 1.0], group=[0, 1, 2]), "grpo")
    assert got.metrics["frac_zero_adv"] == 1 and got.metrics["singleton_groups"] == 3


def test_T10_a_masked_sibling_does_not_shift_the_baseline():
    rollout = examples.bandit([1.0, 0.0, -100.0], weight=[1, 1, 0])
    for name, want in (("dr_grpo", 0.5), ("rloo", 1.0), ("centred_return_to_go", 0.5)):
        np.testing.assert_allclose(per_rollout(rollout, name), [want, -want, 0.0], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_T11_a_reward_that_is_not_finite_is_excluded_and_counted(bad):
    rollout = examples.bandit([1.0, bad, 0.0])
    np.testing.assert_allclose(per_rollout(rollout, "grpo", scale="none"), [0.5, 0, -0.5])
    assert of(rollout, "grpo").metrics["nonfinite_rewards"] == 1


def test_T16_and_T48_dynamic_sampling_keeps_the_groups_that_can_teach():
    rollout = examples.bandit([1.0, 0.0, 1.0, 1.0], group=[0, 0, 1, 1])
    keep = rewards.dynamic_sampling_keep(rollout)
    np.testing.assert_array_equal(keep, [True, True, False, False])
    knobs = {"how": "token_mean"}
    diluted = losses.aggregate_weights(rollout.mask_BT, rollout.weight_B, rollout.group_B, **knobs)
    kept = losses.aggregate_weights(rollout.mask_BT, rollout.weight_B, rollout.group_B, signal_B=keep, **knobs)
    np.testing.assert_allclose(kept[:2], 2 * diluted[:2])
    all_agree = examples.bandit([1.0, 1.0, 0.0, 0.0, np.nan, 1.0], group=[0, 0, 1, 1, 2, 2])
    assert not rewards.dynamic_sampling_keep(all_agree).any()


def test_T38_every_policy_token_carries_the_scalar_whatever_the_widths_and_the_order():
    long = [prompt(1), action(1), observation(3), action(4), observation(1), action(2, 1.0)]
    short = [prompt(5), action(2, 0.0)]
    rollout = examples.rollout([long, short, short, long], group=[0, 1, 0, 1])
    np.testing.assert_allclose(per_rollout(rollout, "dr_grpo"), [0.5, -0.5, -0.5, 0.5])


def test_T40_continuing_keeps_its_credit():
    stops = [prompt(1), action(2, 0.0)]
    goes_on = [prompt(1), action(2, 0.0), observation(1), action(2, 0.5)]
    rollout = examples.rollout([stops, goes_on, goes_on])
    want = [-1 / 3, 1 / 6, 1 / 6]
    np.testing.assert_allclose(per_rollout(rollout, "dr_grpo"), want, atol=1e-6)
    np.testing.assert_allclose(per_rollout(rollout, "centred_return_to_go"), want, atol=1e-6)


def test_T41_discounted_first_then_centred():
    rows = [[prompt(1), action(1, a), observation(1), action(1, b)] for a, b in ((1.0, 0.0), (0.0, 1.0))]
    adv_BT = of(examples.rollout(rows), "centred_return_to_go", discount=0.5).adv_BT
    np.testing.assert_allclose(adv_BT[:, 1], [0.25, -0.25])
    np.testing.assert_allclose(adv_BT[:, 3], [0 - 0.75, 1 - 0.75])


# --- critics ---------------------------------------------------------------------------------------------------------


def test_T18_observation_tokens_do_not_advance_time():
    rows = [[action(2), observation(2), action(1, 1.0, finish=base.ENV)]]
    rollout = examples.rollout(rows, value=[[0.2, 0.4, 0.6]])
    rollout = rollout.replace(value_BT=rollout.value_BT.at[0, 2:4].set(9.0))
    got = of(rollout, "gae", discount=1.0, lambda_=0.5)
    np.testing.assert_allclose(got.adv_BT, [[0.4, 0.4, 0, 0, 0.4]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT, [[0.6, 0.8, 0, 0, 1.0]], atol=1e-6)


def test_T18_a_reward_that_lands_on_an_observation_is_that_of_the_action_before_it():
    rewarded = [[action(2), observation(5, 1.0), action(1, finish=base.ENV)]]
    direct = [[action(2, 1.0), observation(5), action(1, finish=base.ENV)]]
    knobs = {"gae": {"discount": 1.0, "lambda_": 0.5}, "turn_gae": {"discount": 0.9, "lambda_": 0.5}}
    for name in ("gae", "turn_gae", "centred_return_to_go"):
        rollouts = (examples.rollout(rows, value=[[0.2, 0.4, 0.6]]) for rows in (rewarded, direct))
        a, b = (of(x, name, **knobs.get(name, {})).adv_BT for x in rollouts)
        np.testing.assert_array_equal(a, b)


def test_turn_gae_counts_turns_and_not_tokens():
    rows = [[prompt(1), action(3, 0.5), observation(2), action(1, 1.0, discount=0.0, finish=base.ENV)]]
    rollout = examples.rollout(rows, value=[[0.2, 7.0, 7.0, 0.6]])
    got = of(rollout, "turn_gae", discount=0.9, lambda_=0.5)
    last = 1.0 - 0.6
    first = 0.5 + 0.9 * 0.6 - 0.2 + 0.9 * 0.5 * last
    np.testing.assert_allclose(got.adv_BT, [[0, first, first, first, 0, 0, last]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT[0, 1:4], first + 0.2, atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT[0, 6], 1.0, atol=1e-6)


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_T23_only_running_out_of_tokens_bootstraps(name):
    def row(finish, discount):
        return [prompt(1), action(2), observation(1), action(2, 1.0, finish=finish, discount=discount)]

    ends = [(base.LENGTH, 1.0), (base.STOP, 1.0), (base.ENV, 0.0), (base.LENGTH, 0.0)]
    rows = [row(*end) for end in ends] + [[prompt(1), action(5, 1.0, finish=base.ENV, discount=0.0)]]
    values = [[0.1, 0.2, 0.3, 0.4]] * 4 + [[0.1, 0.2, 0.3, 0.4, 0.5]]
    ends_B = jnp.asarray([0.7, 9.0, 9.0, 9.0, 9.0])
    got = of(examples.rollout(rows, value=values).replace(end_value_B=ends_B), name, discount=0.9, lambda_=0.5)
    start = 0.4 if name == "gae" else 0.3
    last_B = np.asarray(got.adv_BT)[:, 5]
    np.testing.assert_allclose(last_B[0], 1 + 0.9 * 0.7 - start, atol=1e-6)  # the critic after the last token
    np.testing.assert_allclose(last_B[1:4], 1 - start, atol=1e-6)  # stopped, ended, ended when it ran out
    assert got.metrics["bootstrapped"] == 1  # and the longest row of the batch is not truncated


def test_critic_keeps_its_value_as_target_where_the_reward_is_not_finite():
    rollout = examples.rollout([[prompt(1), action(2, np.nan)], [prompt(1), action(2, 1.0)]], value=[[0.3, 0.4]] * 2)
    got = of(rollout, "gae", discount=1.0, lambda_=0.5)
    np.testing.assert_allclose(got.adv_BT, [[0, 0, 0], [0, 0.4, 0.6]], atol=1e-6)
    np.testing.assert_allclose(got.value_target_BT, [[0, 0.3, 0.4], [0, 0.7, 1]], atol=1e-6)
    assert got.metrics["nonfinite_rewards"] == 1


def test_T7_whitened_advantages_have_mean_zero_and_unit_std_over_the_sampled_tokens():
    rollout = examples.random_rollout(3)
    got = of(rollout, "gae", discount=1.0, lambda_=0.5, scale="std")
    kept = np.asarray(got.adv_BT)[np.asarray(rollout.mask_BT)]
    np.testing.assert_allclose([kept.mean(), kept.std(ddof=1)], [0, 1], atol=1e-5)
    np.testing.assert_array_equal(got.value_target_BT, of(rollout, "gae", discount=1.0, lambda_=0.5).value_target_BT)


# --- textual feedback ------------------------------------------------------------------------------------------------


def with_views(rollout, spans, weight=None, polarity=None):
    """Adds one view per (row, start, length)."""
    K = len(spans)
    rows, starts, lengths = (jnp.asarray(column, jnp.int32) for column in zip(*spans, strict=True))
    views = base.Views(
        rollout_K=rows,
        insert_at_K=starts,
        span_start_K=starts,
        span_length_K=lengths,
        hint_KN=jnp.zeros((K, 2), jnp.int32),
        hint_length_K=jnp.ones(K, jnp.int32),
        source_K=jnp.zeros(K, jnp.int32),
        weight_K=jnp.ones(K) if weight is None else jnp.asarray(weight, jnp.float32),
        polarity_K=jnp.ones(K) if polarity is None else jnp.asarray(polarity, jnp.float32),
    )
    return rollout.replace(views=views)


DR_GRPO = credit.find("dr_grpo")[0]


def test_view_weights_make_a_mean_over_the_used_views():
    rollout = examples.bandit([1.0, 0.0, 0.0], tokens=4)
    rollout = with_views(
        rollout, [(0, 1, 4), (0, 1, 2), (1, 2, 2), (2, 1, 0)], weight=[1, 0, 0.5, 1], polarity=[1, 1, -1, 1]
    )
    got = of(rollout, "textual_feedback", inner=DR_GRPO, weight=0.6)
    np.testing.assert_allclose(got.view_weight_K, [0.3, 0, -0.15, 0], atol=1e-7)
    np.testing.assert_array_equal(got.adv_BT, of(rollout, "dr_grpo").adv_BT)
    assert got.metrics["views"] == got.metrics["views_used"] == 2 and got.metrics["views_gated"] == 0
    np.testing.assert_allclose(got.metrics["frac_hinted"], 2 / 3, rtol=1e-6)
    assert got.divergence == base.Divergence(name="forward_kl")


def test_feedback_gates():
    spans = [(0, 1, 2), (1, 1, 2), (2, 1, 2), (3, 1, 2), (4, 1, 2)]
    rollout = examples.bandit([1.0, 0.5, 0.0, 0.0, 0.2], group=[0, 0, 1, 1, 0], weight=[1, 1, 1, 1, 0])
    rollout = with_views(rollout, spans)
    everyone = of(rollout, "textual_feedback", inner=DR_GRPO)
    np.testing.assert_allclose(everyone.view_weight_K, [0.25] * 4 + [0], atol=1e-7)
    below_best = of(rollout, "textual_feedback", inner=DR_GRPO, failed_only=True)
    np.testing.assert_allclose(below_best.view_weight_K, [0, 1, 0, 0, 0], atol=1e-7)
    assert below_best.metrics["views_gated"] == 4
    below_number = of(rollout, "textual_feedback", inner=DR_GRPO, failed_only=True, success_return=1.0)
    np.testing.assert_allclose(below_number.view_weight_K, [0, 1 / 3, 1 / 3, 1 / 3, 0], atol=1e-7)
    not_finite = with_views(examples.bandit([np.nan, 1.0]), [(0, 1, 2), (1, 1, 2)])
    gated = of(not_finite, "textual_feedback", inner=DR_GRPO, failed_only=True, success_return=2.0)
    np.testing.assert_allclose(gated.view_weight_K, [0, 1])
    ungated = of(not_finite, "textual_feedback", inner=DR_GRPO)
    np.testing.assert_allclose(ungated.view_weight_K, [0, 1])


def test_T45_a_batch_without_views_has_no_feedback_and_stays_finite():
    rollout = with_views(examples.bandit([1.0, 0.0]), [(0, 0, 0), (1, 0, 0)], weight=[0, 0])
    got = of(rollout, "textual_feedback", inner=DR_GRPO)
    np.testing.assert_array_equal(got.view_weight_K, 0.0)
    np.testing.assert_array_equal(got.adv_BT, of(rollout, "dr_grpo").adv_BT)
    assert got.metrics["views_used"] == 0


def test_locator_penalty_lowers_the_sampled_tokens_of_the_located_spans_once():
    rows = [[prompt(1), action(3, 1.0), observation(2), action(2)], [prompt(1), action(3, 0.0)]]
    rollout = with_views(examples.rollout(rows), [(0, 2, 5), (0, 3, 1), (1, 1, 3)], weight=[1, 1, 0])
    got = of(rollout, "locator_penalty", inner=DR_GRPO, penalty=2.0)
    np.testing.assert_allclose(got.adv_BT[0], [0, 0.5, -1.5, -1.5, 0, 0, -1.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(got.adv_BT[1, :4], [0, -0.5, -0.5, -0.5], atol=1e-6)
    assert got.view_weight_K is None and got.metrics["penalised_tokens"] == 3
    gated = of(rollout, "locator_penalty", inner=DR_GRPO, penalty=2.0, failed_only=True)
    np.testing.assert_array_equal(gated.adv_BT, of(rollout, "dr_grpo").adv_BT)


def test_feedback_refuses_a_second_layer_of_views():
    rollout = with_views(examples.bandit([1.0, 0.0]), [(0, 1, 2)])
    inner = functools.partial(credit.find("textual_feedback")[0], inner=DR_GRPO)
    with pytest.raises(ValueError, match="inner"):
        credit.find("textual_feedback")[0](rollout, inner=inner)


# --- shaping, lookup, misuse -----------------------------------------------------------------------------------------


def test_overlong_shaping_grows_over_the_buffer():
    lengths = (2, 6, 7, 8, 12)
    rows = [[prompt(3), action(1, 0.25), observation(4), action(n - 1, 1.0)] for n in lengths]
    shaped = rewards.overlong_shaping(examples.rollout(rows), max_length=8, buffer=2, penalty=0.5)
    np.testing.assert_allclose(shaped.return_B, 1.25 - np.asarray([0, 0, 0.25, 0.5, 0.5]), atol=1e-6)
    np.testing.assert_allclose(shaped.segments.reward_BS[:, 1], 0.25)
    with pytest.raises(base.InputError, match="buffer"):
        rewards.overlong_shaping(examples.rollout(rows), max_length=8, buffer=9)


def test_find_gives_functions_with_their_needs():
    assert credit.find("turn_gae")[1] == ("value_BT", "end_value_B")
    assert credit.find("locator_penalty")[1] == ("views",)
    function, needs = credit.find("grpo")
    assert function is credit.group.grpo and needs == ()
    known = credit.variants()
    for family in credit.FAMILIES:
        assert set(family.NEEDS) <= set(known)


@pytest.mark.parametrize(("typo", "meant"), [("gprp", "grpo"), ("GRPO", None), ("textual_feedbak", "textual_feedback")])
def test_find_suggests_the_nearest_name(typo, meant):
    with pytest.raises(base.InputError, match=f"did you mean '{meant}'" if meant else "unknown credit.name"):
        credit.find(typo)


@pytest.mark.parametrize(
    ("name", "knobs", "says"),
    [
        ("grpo", {"scale": "var"}, "scale"),
        ("grpo", {"std_floor": 0.0}, "std_floor"),
        ("reinforce", {"baseline": "group"}, "baseline"),
        ("gae", {"lambda_": 1.5}, "lambda_"),
        ("turn_gae", {"scale": "group"}, "scale"),
        ("textual_feedback", {"inner": DR_GRPO, "divergence": "foward_kl"}, "did you mean 'forward_kl'"),
        ("textual_feedback", {"inner": DR_GRPO, "divergence": "jsd", "alpha": 1.0}, "alpha"),
        ("textual_feedback", {"inner": DR_GRPO, "temperature": 0.0}, "temperature"),
        ("textual_feedback", {"inner": DR_GRPO, "entry_clip": -1.0}, "entry_clip"),
        ("textual_feedback", {"inner": DR_GRPO, "divergence": "sampled", "entry_clip": 1.0}, "entry_clip"),
    ],
)
def test_misuse_names_the_field(name, knobs, says):
    rollout = examples.complete(examples.random_rollout(0), 0)
    with pytest.raises(base.InputError, match=says):
        credit.find(name)[0](rollout, **knobs)


@pytest.mark.parametrize("name", ["gae", "turn_gae", "textual_feedback", "locator_penalty"])
def test_a_missing_column_is_an_error(name):
    knobs = {} if "gae" in name else {"inner": DR_GRPO}
    with pytest.raises(ValueError, match=credit.find(name)[1][0]):
        credit.find(name)[0](examples.bandit([1.0]), **knobs)
