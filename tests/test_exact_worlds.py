"""Exact worlds: dynamic programming against every trajectory, against sampling and against automatic derivatives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, credit, envs
from rsi_jax.credit import turns
from rsi_jax.envs import exact
from rsi_jax.envs.exact import columns, play

# Small enough that every trajectory can be walked.
TINY = {
    "key_to_door": 2,
    "passive_tmaze": 2,
    "active_tmaze": 1,
    "tool_not_found": 4,
    "umbrella_chain": 3,
    "discounting_chain": 5,
    "stopping": 4,
    "noisy_tree": 3,
}


@functools.cache
def tiny(name: str):
    world = exact.make(name, horizon=TINY[name])
    return world, exact.draw_logits(world, seed=1, lean=0.5)


def walk(world, logits):
    """Every way an episode can go: (probability, [(t, s, a, reward)], final state)."""
    pi_HNA = exact.policy(world, logits)

    def play_on(t, s, probability, path):
        if t == world.horizon or world.terminal_N[s]:
            yield probability, path, s
            return
        for a, j in np.argwhere(world.prob_HNAJ[t, s] > 0):
            p = probability * pi_HNA[t, s, a] * world.prob_HNAJ[t, s, a, j]
            reward = world.reward_HNAJ[t, s, a, j]
            yield from play_on(t + 1, world.next_HNAJ[t, s, a, j], p, [*path, (t, s, a, reward)])

    for s in np.flatnonzero(world.start_N):
        yield from play_on(0, s, world.start_N[s], [])


def test_every_world_is_found_by_its_name_and_a_misspelt_one_is_named():
    assert set(exact.names()) == set(TINY)
    with pytest.raises(base.InputError, match="did you mean 'umbrella_chain'"):
        exact.make("umbrela_chain")
    with pytest.raises(base.InputError, match="key_to_door needs at least 2, got 1"):
        exact.make("key_to_door", horizon=1)
    with pytest.raises(base.InputError, match="known: jsonl, maze, questions, tool_calls"):
        envs.find("exact")  # a policy there is a table, no language model


@pytest.mark.parametrize("name", TINY)
def test_values_returns_and_occupancy_are_those_of_all_trajectories(name):
    world, logits = tiny(name)
    H, N, A, _ = world.prob_HNAJ.shape
    returns = exact.returns(world, logits)
    mass, q_HNA, d_HN = 0.0, np.zeros((H, N, A)), np.zeros((H, N))
    discounted_HNA, at_HNA, z_HNAR = np.zeros((H, N, A)), np.zeros((H, N, A)), np.zeros(returns.prob_HNAR.shape)
    for probability, path, _ in walk(world, logits):
        mass += probability
        for k, (t, s, a, _) in enumerate(path):
            togo = sum(step[3] for step in path[k:])
            d_HN[t, s] += probability
            at_HNA[t, s, a] += probability
            q_HNA[t, s, a] += probability * togo
            discounted_HNA[t, s, a] += probability * sum(0.9**i * step[3] for i, step in enumerate(path[k:]))
            z_HNAR[t, s, a, np.argmin(abs(returns.at_R - togo))] += probability
    met = at_HNA > 0
    found = exact.values(world, logits)
    assert math.isclose(mass, 1.0, rel_tol=1e-9)
    assert np.allclose(exact.occupancy(world, logits), d_HN)
    assert np.allclose(found.q_HNA[met], (q_HNA / np.where(met, at_HNA, 1))[met])
    assert np.allclose(exact.values(world, logits, 0.9).q_HNA[met], (discounted_HNA / np.where(met, at_HNA, 1))[met])
    assert np.allclose(returns.prob_HNAR[met], (z_HNAR / np.where(met, at_HNA, 1)[..., None])[met])
    assert np.allclose(np.sum(exact.policy(world, logits) * found.adv_HNA, -1), 0, atol=1e-12)
    whole = sum(probability * sum(step[3] for step in path) for probability, path, _ in walk(world, logits))
    assert math.isclose(exact.expected_return(world, logits), whole, rel_tol=1e-9)


@pytest.mark.parametrize("name", TINY)
def test_hindsight_is_bayes_over_all_trajectories(name):
    world, logits = tiny(name)
    returns = exact.returns(world, logits)
    possible = returns.at_R[returns.prob_HNAR.sum((0, 1, 2)) > 0]
    return_edges = columns.edges_between(possible)
    reward_edges = columns.edges_between(world.reward_HNAJ)
    shape = world.prob_HNAJ.shape[:3]
    by_return = np.zeros((*shape, len(return_edges) + 1))
    by_reward = np.zeros((*shape, len(reward_edges) + 1))
    by_final = np.zeros((*shape, len(world.states)))
    for probability, path, final in walk(world, logits):
        for k, (t, s, a, _) in enumerate(path):
            togo = sum(step[3] for step in path[k:])
            by_return[t, s, a, columns.classes(return_edges, togo)] += probability
            by_final[t, s, a, final] += probability
            for step in path[k:]:
                by_reward[t, s, a, columns.classes(reward_edges, step[3])] += probability
    for counted, log_h in (
        (by_return, columns.return_hindsight(world, logits, return_edges)),
        (by_reward, columns.reward_hindsight(world, logits, reward_edges)),
        (by_final, columns.final_hindsight(world, logits)),
    ):
        total = counted.sum(2, keepdims=True)
        seen = np.broadcast_to(total > 0, counted.shape)
        expected = counted / np.where(total > 0, total, 1.0)
        assert seen.any() and np.allclose(np.exp(log_h)[seen], expected[seen], atol=1e-9)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", ["active_tmaze", "stopping", "umbrella_chain"])
def test_the_policy_gradient_is_the_derivative_of_the_expected_return(name, shared):
    world, logits = tiny(name)
    logits = logits[0] if shared else logits

    def earned(logits):
        d_N, total = jnp.asarray(world.start_N), 0.0
        for t in range(world.horizon):  # forwards, unlike the values
            pi_NA = jax.nn.softmax(logits if shared else logits[t])
            mass_NAJ = d_N[:, None, None] * pi_NA[..., None] * world.prob_HNAJ[t]
            total += jnp.sum(mass_NAJ * world.reward_HNAJ[t])
            d_N = jnp.zeros_like(d_N).at[world.next_HNAJ[t]].add(mass_NAJ)
        return total

    expected, gradient = jax.jit(jax.value_and_grad(earned))(jnp.asarray(logits))
    assert math.isclose(exact.expected_return(world, logits), float(expected), rel_tol=1e-4)
    assert np.allclose(exact.policy_gradient(world, logits), gradient, atol=1e-5)


@pytest.mark.parametrize("name", ["key_to_door", "active_tmaze", "stopping", "noisy_tree"])
def test_sampled_returns_and_continuations_agree_with_the_exact_values(name):
    world, logits = tiny(name)
    sample = exact.sample(world, logits, jax.random.key(0), groups=256)
    values = exact.values(world, logits)
    return_B = np.asarray(sample.rollout.return_B)
    start_B = values.v_HN[0, np.asarray(sample.path.state_BH)[:, 0]]
    miss_B = return_B - start_B
    assert abs(miss_B.mean()) < 4 * miss_B.std() / math.sqrt(len(miss_B)) + 1e-6
    adv_BH = np.where(sample.path.played_BH, columns.looked_up(sample.path, values.adv_HNA), 0.0)
    assert abs(adv_BH.sum(1).mean()) < 4 * adv_BH.sum(1).std() / math.sqrt(len(miss_B)) + 1e-6
    few = play.Path(*(x[:8] for x in sample.path))
    mean_BH, tokens = play.continuations(play.tables(world, logits), few, jax.random.key(1), 512)
    played_BH = np.asarray(few.played_BH)
    v_BH = values.v_HN[np.arange(world.horizon), np.asarray(few.state_BH)]
    prob_NR = np.einsum("hna,hnar->hnr", exact.policy(world, logits), exact.returns(world, logits).prob_HNAR)
    at_R = exact.returns(world, logits).at_R
    var_HN = prob_NR @ at_R**2 - (prob_NR @ at_R) ** 2
    error_BH = 5 * np.sqrt(var_HN[np.arange(world.horizon), np.asarray(few.state_BH)].clip(0) / 512) + 1e-5
    assert np.all(abs(np.asarray(mean_BH) - v_BH)[played_BH] < error_BH[played_BH])
    assert 512 * played_BH.sum() <= tokens <= 512 * played_BH.sum() * world.horizon


@pytest.mark.parametrize("observed", [True, False])
def test_a_rollout_says_what_was_played(observed):
    world, logits = tiny("stopping")
    rollout, path = exact.sample(world, logits, jax.random.key(3), groups=4, observed=observed)
    A = world.prob_HNAJ.shape[2]
    pi_HNA = exact.policy(world, logits)
    turns_B = np.asarray(path.played_BH).sum(1)
    assert 1 in turns_B and max(turns_B) > 1
    assert np.allclose(rollout.return_B, np.asarray(path.reward_BH).sum(1))
    table = jax.vmap(turns.table)(rollout.segments)
    for b, n in enumerate(turns_B):
        mask_T = np.asarray(rollout.mask_BT[b])
        action_K, state_K = np.asarray(path.action_BH)[b, :n], np.asarray(path.state_BH)[b, :n]
        assert np.asarray(rollout.tokens_BT)[b, mask_T].tolist() == action_K.tolist()
        assert rollout.tokens_BT[b, 0] == A + path.state_BH[b, 0]
        assert np.allclose(np.asarray(rollout.logp_BT)[b, mask_T], np.log(pi_HNA[np.arange(n), state_K, action_K]))
        assert not np.asarray(rollout.logp_BT)[b, ~mask_T].any()
        assert int(rollout.length_B[b]) == (2 * n if observed else 1 + n)
        assert np.asarray(table.anchor_S)[b, :n].tolist() == state_K.tolist()
        assert np.allclose(np.asarray(table.reward_S)[b, :n], np.asarray(path.reward_BH)[b, :n])
        assert np.asarray(table.discount_S)[b, :n].tolist() == [1.0] * (n - 1) + [0.0]
        last = np.flatnonzero(np.asarray(rollout.segments.kind_BS)[b] == base.ACTION)[n - 1]
        assert rollout.segments.finish_BS[b, last] == base.ENV
        if observed and n > 1:
            shown = np.asarray(rollout.segments.kind_BS)[b] == base.OBSERVATION
            spans = np.asarray(rollout.segments.length_BS)[b, shown]
            assert spans.sum() == n - 1 and rollout.tokens_BT[b, 2] == A + path.state_BH[b, 1]


def test_the_rows_of_a_group_begin_in_one_state_drawn_as_often_as_it_should():
    world, logits = tiny("umbrella_chain")
    rollout, path = exact.sample(world, logits, jax.random.key(0), groups=400, size=4)
    first_GB = np.asarray(path.state_BH)[:, 0].reshape(400, 4)
    assert np.all(first_GB == first_GB[:, :1]) and np.asarray(rollout.group_B)[::4].tolist() == list(range(400))
    assert abs(np.mean(first_GB[:, 0] == 0) - 0.5) < 4 * 0.5 / math.sqrt(400)


def test_forked_rows_share_the_turns_before_the_fork_and_differ_after_it():
    world, logits = tiny("noisy_tree")
    rollout, path = exact.sample(world, logits, jax.random.key(5), groups=64, size=4, forked=True)
    tree_B = np.asarray(rollout.tree_B)
    grown_B = tree_B != np.arange(256)
    assert grown_B.reshape(64, 4).tolist() == [[False, False, True, True]] * 64
    same_BH = np.ones((256, world.horizon), bool)
    for column in (path.state_BH, path.action_BH, path.branch_BH, path.logp_BH):
        same_BH &= np.asarray(column) == np.asarray(column)[tree_B]
    assert np.all(same_BH[grown_B, 0])  # the fork is at turn 1 or later
    shared_B = np.cumprod(same_BH[grown_B], axis=1).sum(1)
    assert {1, 2} <= set(shared_B.tolist())
    pi_HNA = exact.policy(world, logits)
    expected_BH = np.log(pi_HNA[np.arange(3), np.asarray(path.state_BH), np.asarray(path.action_BH)])
    assert np.allclose(path.logp_BH, expected_BH, atol=1e-5)
    with pytest.raises(base.InputError, match="even size"):
        exact.sample(world, logits, jax.random.key(0), groups=1, size=3, forked=True)


def test_gae_with_the_exact_critic_is_the_advantage_where_nothing_is_random():
    world, logits = tiny("tool_not_found")
    sample = exact.sample(world, logits, jax.random.key(0), groups=4, observed=True)
    rollout = columns.with_values(sample, world, logits)
    truth_BT = exact.on_tokens(
        rollout, sample.path, columns.looked_up(sample.path, exact.values(world, logits).adv_HNA)
    )
    found = credit.find("turn_gae")[0](rollout, discount=1.0, lambda_=0.0)
    assert np.allclose(found.adv_BT, truth_BT, atol=1e-5) and np.any(np.asarray(truth_BT) != 0)
    assert not np.any(rollout.end_value_B)
    noisy = columns.with_values(sample, world, logits, noise=0.5, seed=3)
    off_BT = np.asarray(noisy.value_BT - rollout.value_BT)
    assert 0.1 < off_BT[np.asarray(rollout.mask_BT)].std() < 1 and not off_BT[~np.asarray(rollout.mask_BT)].any()


def test_the_other_columns_stand_on_the_sampled_tokens():
    world, logits = tiny("stopping")
    sample = exact.sample(world, logits, jax.random.key(2), groups=2)
    mask_BT, path = np.asarray(sample.rollout.mask_BT), sample.path
    asked_BH = np.arange(world.horizon) % 2 == 0
    rollout, tokens = columns.with_continuations(sample, world, logits, jax.random.key(0), count=3, asked_BH=asked_BH)
    asked_BT = np.isfinite(np.asarray(rollout.mc_value_BT))
    assert np.array_equal(asked_BT[:, 1:], np.asarray(path.played_BH) & asked_BH)
    assert tokens >= 3 * asked_BT.sum()
    p = exact.policy(world, logits)[np.arange(world.horizon), 0, 0]
    collision_BT = np.asarray(columns.with_collisions(sample, world, logits).collision_BT)
    assert np.allclose(collision_BT[:, 1:], np.where(mask_BT[:, 1:], p**2 + (1 - p) ** 2, 0), atol=1e-6)
    # A judge who knows values is a critic that speaks a turn later; nothing is to come after the last.
    judge_BS = np.asarray(columns.with_judge(sample, world, logits).judge_BS)
    value_BT = np.asarray(columns.with_values(sample, world, logits).value_BT)
    turn_BS = np.arange(judge_BS.shape[1])
    for b, row_T in enumerate(value_BT):
        said_N = row_T[mask_BT[b]]
        assert np.allclose(
            judge_BS[b], np.where(turn_BS < len(said_N) - 1, np.roll(np.resize(said_N, len(turn_BS)), -1), 0)
        )
    baseline_B = np.asarray(columns.with_baseline(sample, world, logits).baseline_B)
    assert np.allclose(baseline_B, exact.values(world, logits).v_HN[0, 0]) and world.start_N[0] == 1
    # Who ended in "stopped" did so by its last action; who knows the end knows that action for certain.
    hindsight_BT = np.asarray(columns.with_hindsight(sample, world, logits).hindsight_logp_BT)
    turns_B = mask_BT.sum(1)
    stopped_B = np.asarray(path.action_BH)[np.arange(16), turns_B - 1] == 0
    late_B = stopped_B & (turns_B == world.horizon)
    assert stopped_B.any() and np.allclose(hindsight_BT[late_B, turns_B[late_B]], 0, atol=1e-6)
    assert np.all(hindsight_BT[mask_BT] <= 1e-6) and not hindsight_BT[~mask_BT].any()
    assert np.array_equal(columns.without_hint(sample).hindsight_logp_BT, sample.rollout.logp_BT)


@pytest.mark.parametrize("of", ["return", "reward"])
def test_counted_hindsight_tends_to_the_exact_one(of):
    world, logits = tiny("stopping")
    edges = columns.edges_between(0.5 * np.arange(world.horizon + 1) if of == "return" else [0.0, 0.5])
    exact_HNAM = getattr(columns, f"{of}_hindsight")(world, logits, edges)
    sample = exact.sample(world, logits, jax.random.key(0), groups=4096)
    counted_HNAM = columns.counted_hindsight(world, logits, sample.path, edges, of=of)
    rollout = columns.with_outcomes(sample, counted_HNAM)
    exact_BTM = np.exp(columns.with_outcomes(sample, exact_HNAM).outcome_logp_BTM)
    met_BT = np.asarray(rollout.mask_BT)
    assert rollout.outcome_logp_BTM.shape[2] == len(edges) + 1
    assert np.mean(abs(np.exp(rollout.outcome_logp_BTM) - exact_BTM)[met_BT]) < 0.02
    with pytest.raises(base.InputError, match="got 'value'"):
        columns.counted_hindsight(world, logits, sample.path, edges, of="value")


def test_a_world_that_cannot_be_is_refused():
    start = {"a": 1.0}
    half = [exact.Branch(0.5, "a")]
    with pytest.raises(base.InputError, match="must sum to 1"):
        exact.build(1, 1, start, lambda t, s, a: half, unit=1.0)
    with pytest.raises(base.InputError, match="whole multiple of unit=1.0"):
        exact.build(1, 1, start, lambda t, s, a: [exact.Branch(1.0, "a", 0.3)], unit=1.0)
    with pytest.raises(base.InputError, match="state a ends the episode and is also acted in"):
        exact.build(2, 1, start, lambda t, s, a: [exact.Branch(1.0, "a", over=True)], unit=1.0)
    with pytest.raises(base.InputError, match="logits must be"):
        exact.policy(tiny("stopping")[0], np.zeros((3, 3)))
    with pytest.raises(base.InputError, match=r"discount must be in \[0, 1\]"):
        exact.values(*tiny("stopping"), discount=1.5)


def test_a_leaning_policy_is_better_and_a_drawn_one_repeats():
    world = exact.make("tool_not_found", horizon=16)
    earned = [exact.expected_return(world, exact.draw_logits(world, 0, lean=lean)) for lean in (0.0, 2.0, 20.0)]
    assert earned[0] < earned[1] < earned[2] and earned[2] > 0.999
    assert np.array_equal(exact.draw_logits(world, 5), exact.draw_logits(world, 5))
