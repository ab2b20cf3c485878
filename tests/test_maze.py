"""The maze: the published numbers come out exactly, the rules are the benchmark's, and anchors give true credit."""

import functools

import jax
import numpy as np
import pytest

from rsi_jax import base, credit, rollout, sample
from rsi_jax.credit import examples
from rsi_jax.envs import maze
from rsi_jax.evals import maze_exact
from rsi_jax.model import chat, tokenizer
from tests import tiny

ENV = maze.make()
UNIFORM = maze_exact.wandering(1.0)


def play(env, seed: int, texts) -> tuple[list[maze.State], list]:
    """Says `texts` in turn: the states in which each was said, the replies."""
    state, _ = env.reset(seed)
    states, replies = [], []
    for text in texts:
        states.append(state)
        state, reply = env.step(state, text, base.STOP)
        replies.append(reply)
    return states, replies


def distances() -> dict[tuple[int, int], int]:
    """Steps from each free cell to the goal, by a wave over the letters of the layout."""
    free = {(r, c) for r, row in enumerate(maze.LAYOUT) for c, place in enumerate(row) if place == "."}
    found, wave, steps = {}, {maze.GOAL}, 0
    while wave:
        found |= dict.fromkeys(wave, steps)
        near = {(r + dr, c + dc) for r, c in wave for dr, dc in ((0, 1), (0, -1), (1, 0), (-1, 0))}
        wave, steps = (near & free) - set(found), steps + 1
    assert set(found) == free
    return found


# --- the maze and its exact values -----------------------------------------------------------------------------------


def test_the_maze_has_the_published_shape():
    assert len(maze.LAYOUT) == 10 and {len(row) for row in maze.LAYOUT} == {13}
    assert len(maze.CELLS) == 26 and maze.GOAL == (8, 6) and set(maze.STARTS) == set(maze.CELLS) - {maze.GOAL}
    assert all(row == row[::-1] for row in maze.LAYOUT)


def test_the_best_policy_returns_what_is_published():
    """-6.84 over the 25 starts other than the goal; with the goal as a start it would be -6.58."""
    best = maze_exact.values(ENV)
    steps = distances()
    for cell in maze.STARTS:
        assert best.value[0, maze_exact.INDEX[cell]] == 1 - steps[cell]
    assert best.mean == pytest.approx(-6.84, abs=1e-9) and best.mean * 25 / 26 == pytest.approx(-6.58, abs=0.005)
    shortest = maze_exact.values(ENV, maze_exact.wandering(0.0))
    np.testing.assert_array_equal(shortest.value[0], best.value[0])
    assert maze_exact.values(ENV, maze_exact.wandering(0.0), earns=maze_exact.succeeds).mean == 1


def test_the_uniform_policy_returns_what_is_published():
    """Against powers of its matrix of transitions: -85.89 and 24.68 % success (published: -85.9 and 24.6 %).

    With S_t the chance of not being at the goal after t actions, the mean return is -(S_1 + ... + S_100 + S_100).
    """
    found, reached = (maze_exact.values(ENV, UNIFORM, **kind) for kind in ({}, {"earns": maze_exact.succeeds}))
    starts = list(maze.STARTS)
    step = np.zeros((25, 25))
    for i, (r, c) in enumerate(starts):
        for dr, dc in ((0, 1), (0, -1), (1, 0), (-1, 0)):
            after = (r + dr, c + dc) if maze.LAYOUT[r + dr][c + dc] == "." else (r, c)
            if after != maze.GOAL:
                step[i, starts.index(after)] += 0.25
    away = [float(np.linalg.matrix_power(step, t).sum() / 25) for t in range(101)]
    assert found.mean == pytest.approx(-(sum(away[1:]) + away[100]), abs=1e-9)
    assert reached.mean == pytest.approx(1 - away[100], abs=1e-12)
    assert round(found.mean, 1) == -85.9 and round(found.mean, 2) == -85.89 and round(reached.mean, 4) == 0.2468


def test_exact_values_obey_the_recursion():
    values = maze_exact.values(ENV, maze_exact.wandering(0.5))
    policy = maze_exact.wandering(0.5)
    np.testing.assert_allclose(policy.sum(axis=1)[[maze_exact.INDEX[cell] for cell in maze.STARTS]], 1)
    above_goal, corner = maze_exact.INDEX[(7, 6)], maze_exact.INDEX[(1, 1)]
    down, up = (maze_exact.TEXTS.index(f"move {way}") for way in ("down", "up"))
    assert values.q[99, above_goal, down] == 0 and values.q[100, above_goal, down] == -1  # the 101st action is too late
    assert values.q[0, corner, up] == pytest.approx(values.value[1, corner] - 1)
    assert values.q[0, corner, -1] == pytest.approx(values.value[1, corner] - 4)  # an illegal action
    adv = np.einsum("na,tna->tn", policy, values.q) - values.value[:-1]
    np.testing.assert_allclose(adv, 0, atol=1e-12)


@pytest.mark.parametrize(
    "observed, mean_return, published",
    [
        ("full", -101, 0),
        ("full", -83, 50),
        ("full", -6.84, 100),
        ("full", -37.7, 79.7),  # PPO
        ("full", -6.97, 99.9),  # ILQL
        ("full", -40.12, 78.2),  # GPT-4
        ("full", -85.89, 42.0),  # the uniform policy
        ("partial", -25.75, 100),
        ("partial", -52.9, 76.3),  # ILQL
        ("partial", -71.04, 60.4),  # GPT-4
    ],
)
def test_scores_are_the_benchmarks(observed, mean_return, published):
    assert maze.score(mean_return, observed) == pytest.approx(published, abs=0.06)


# --- the rules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", maze.CELLS)
def test_every_move_leads_to_the_next_free_cell_or_nowhere(cell):
    if cell == maze.GOAL:
        return
    for text, (dr, dc) in zip(maze.ACTIONS, ((-1, 0), (1, 0), (0, -1), (0, 1)), strict=True):
        place = (cell[0] + dr, cell[1] + dc)
        after, reply = ENV.step(maze.State(cell, 7), text, base.STOP)
        assert after == maze.State(place if place in maze.CELLS else cell, 8)
        assert reply.reward == (0 if place == maze.GOAL else -1) and reply.done == (place == maze.GOAL)
        assert reply.info["legal"]


@pytest.mark.parametrize("text", ["", "move", "up", "move north", "Move up", "move up ", "move up move up", "goal"])
def test_any_other_text_is_illegal_and_uses_a_step(text):
    state = maze.State((5, 6), 3)
    after, reply = ENV.step(state, text, base.STOP)
    assert after == maze.State((5, 6), 4) and state.step == 3
    assert reply.reward == -4 and not reply.done and not reply.info["legal"] and reply.messages


@pytest.mark.parametrize("said, each", [("move up", -1.0), ("jump", -4.0)])
@pytest.mark.parametrize("steps", [1, 5, 100])
def test_an_episode_without_the_goal_ends_one_action_after_its_steps(steps, said, each):
    env = maze.make(steps=steps)
    seed = next(seed for seed in range(100) if env.reset(seed)[0].cell == (1, 1))
    _, replies = play(env, seed, [said] * (steps + 1))
    assert [reply.done for reply in replies] == [False] * steps + [True]
    assert [reply.reward for reply in replies] == [each] * steps + [-1.0]
    assert replies[-1].info["success"] is False and replies[-1].messages == ()
    assert env.max_turns == len(replies)


def test_the_goal_counts_up_to_the_last_step_and_no_later():
    for step, success in ((99, True), (100, False)):
        after, reply = ENV.step(maze.State((7, 6), step), "move down", base.STOP)
        assert reply.done and reply.info["success"] is success and (after.cell == maze.GOAL) is success
        assert reply.reward == (0 if success else -1)


def test_an_anchor_names_the_cell_and_nothing_else():
    anchors = {}
    for env in (ENV, maze.make(observed="partial", steps=9)):
        for cell in maze.STARTS:
            for step in (0, 5):
                for text in (*maze.ACTIONS, "jump"):
                    reply = env.step(maze.State(cell, step), text, base.STOP)[1]
                    anchors.setdefault(cell, set()).add(reply.anchor)
    assert all(len(found) == 1 for found in anchors.values())
    assert len(set.union(*anchors.values())) == 25 and min(set.union(*anchors.values())) >= 0 > base.NO_ANCHOR


def test_both_forms_of_observation():
    partial = maze.make(observed="partial")
    shown = {"full": set(), "partial": set()}
    for cell in maze.CELLS:
        full, walls = ENV._describe(cell)["content"], partial._describe(cell)["content"]
        assert full == f"goal 8 6 position {cell[0]} {cell[1]} {walls}"
        shown["full"].add(full)
        shown["partial"].add(walls)
        blocked = [way for way in maze.OFFSETS if maze.beside(cell, way) == cell]
        assert walls == " ".join(["walls", *(blocked or ["none"])])
    assert len(shown["full"]) == 26 and len(shown["partial"]) == 8  # places look alike
    assert partial._describe((1, 1))["content"] == "walls up down left"
    assert partial._describe((5, 6))["content"] == "walls up"
    words = set(ENV.words())
    assert set(" ".join([*shown["full"], *shown["partial"], *maze.ACTIONS]).split()) <= words


def test_a_seed_names_a_start_and_the_starts_are_uniform():
    count = dict.fromkeys(maze.STARTS, 0)
    for seed in range(5000):
        state, shown = ENV.reset(seed)
        count[state.cell] += 1
        assert shown == (ENV._describe(state.cell),) and state.step == 0
    expected = 5000 / 25
    assert sum((n - expected) ** 2 / expected for n in count.values()) < 51.2  # chi-square, 24 degrees, p = 0.001
    assert ENV.reset(2**40 - 1) == ENV.reset(2**40 - 1)


def test_playing_again_gives_the_same():
    seed = next(seed for seed in range(100) if ENV.reset(seed)[0].cell == (1, 1))
    up, down, left, right = maze.ACTIONS
    texts = [right, right, "jump", down, down, left, up]
    states, replies = play(ENV, seed, texts)
    assert [state.cell for state in states] == [(1, 1), (1, 2), (1, 3), (1, 3), (2, 3), (3, 3), (3, 3)]
    assert play(ENV, seed, texts) == (states, replies)
    for state, text, reply in zip(states, texts, replies, strict=True):  # from any state on, in any order
        assert ENV.step(state, text, base.STOP)[1] == reply


# --- demonstrations and the summary ----------------------------------------------------------------------------------


def returns_of(env, seeds: range) -> np.ndarray:
    totals = []
    for seed in seeds:
        steps = env.demonstration(seed, hinted=False, train_bare=True)
        _, replies = play(env, seed, [step.action for step in steps])
        assert [reply.done for reply in replies] == [False] * (len(steps) - 1) + [True]
        assert [step.shown for step in steps[1:]] == [reply.messages for reply in replies[:-1]]
        totals.append(sum(reply.reward for reply in replies))
    return np.array(totals)


def test_demonstrations_follow_the_shortest_path():
    steps = distances()
    assert returns_of(ENV, range(60)).tolist() == [1 - steps[ENV.reset(seed)[0].cell] for seed in range(60)]


@pytest.mark.parametrize("wander", [0.7, 1.0])
def test_wandering_demonstrations_return_what_their_policy_does(wander):
    found = returns_of(maze.make(wander=wander), range(400))
    exact = maze_exact.values(ENV, maze_exact.wandering(wander)).mean
    assert abs(found.mean() - exact) < 4 * found.std(ddof=1) / 400**0.5


def told(env, texts, *, seed: int = 0, truncated: bool = False) -> base.Transcript:
    _, replies = play(env, seed, texts)
    turns = [
        base.TurnRecord([], text, 0, 1, 0, base.STOP, list(reply.messages), reply.reward, reply.info)
        for text, reply in zip(texts, replies, strict=True)
    ]
    return base.Transcript(seed, 0, turns=turns, truncated=truncated)


def test_the_summary_counts_and_scores():
    best = [step.action for step in ENV.demonstration(0, hinted=False, train_bare=True)]
    lost = ["jump"] * 100 + [""]
    found = maze.summary([told(ENV, best), told(ENV, lost)])
    assert found["success"] == 0.5 and found["illegal"] == 101 / (101 + len(best))
    assert found["shortest"] == len(best) / (101 + len(best))
    assert found["score"] == maze.score((1 - len(best) - 401) / 2, "full")
    cut = told(ENV, lost[:4], truncated=True)
    assert "score" not in maze.summary([told(ENV, best), cut])  # the return of what was cut off is not known
    assert maze.summary([cut])["success"] == 0
    assert "score" not in maze.summary([told(maze.make(steps=50), best)])  # no number of the benchmark's


@pytest.mark.parametrize("knobs", [{"observed": "none"}, {"steps": 0}, {"wander": 1.5}, {"wander": -0.1}])
def test_bad_knobs_are_named(knobs):
    with pytest.raises(base.InputError, match=f"env.maze.{next(iter(knobs))}="):
        maze.make(**knobs)


# --- with a model, and credit ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("observed", maze.OBSERVED)
def test_a_tiny_model_plays_it(observed):
    env = maze.make(observed=observed, steps=3)
    words = chat.word_chat(tokenizer.WordTokenizer(env.words()))
    sampling = sample.Sampling(max_tokens=3, stop_ids=tuple(sorted(words.stop_ids)))
    model = tiny.config(vocab=words.tokenizer.vocab_size)
    tasks = [rollout.Task(seed, seed // 2) for seed in (0, 1, 2, 2)]
    params, key = tiny.params(model), jax.random.key(0)
    sampler = rollout.Sampler(env, words, model, sampling, 80, 2)
    made, transcripts = rollout.collect(params, tasks, key, sampler)
    kinds, anchors = (np.asarray(x) for x in (made.segments.kind_BS, made.segments.anchor_BS))
    for b, transcript in enumerate(transcripts):
        states, replies = play(env, transcript.seed, [turn.text for turn in transcript.turns])
        assert not transcript.truncated and replies[-1].done and len(replies) <= 4
        assert [turn.info["position"] for turn in transcript.turns] == [state.cell for state in states]
        assert anchors[b, kinds[b] == base.ACTION].tolist()[: len(replies)] == [reply.anchor for reply in replies]
        assert float(made.return_B[b]) == transcript.score == sum(reply.reward for reply in replies)
    again = rollout.collect(params, tasks, key, sampler)[1]
    assert [one.tokens for one in again] == [one.tokens for one in transcripts]


def sampled_group(policy: np.ndarray, values: maze_exact.Values, seed: int, size: int):
    """Plays `size` episodes of `policy` from one start: the rollout, and the exact advantage [B, turns] of each."""
    rng, turns = np.random.default_rng(seed), ENV.max_turns
    rows, anchors, adv = [], np.full((size, 2 * turns + 1), base.NO_ANCHOR), np.zeros((size, turns))
    for b in range(size):
        (state, _), row, done = ENV.reset(seed), [examples.prompt(1)], False
        while not done:
            n, t = maze_exact.INDEX[state.cell], state.step
            a = rng.choice(len(maze_exact.TEXTS), p=policy[n])
            adv[b, t] = values.q[t, n, a] - values.value[t, n]
            state, reply = ENV.step(state, maze_exact.TEXTS[a], base.STOP)
            done, anchors[b, len(row)] = reply.done, reply.anchor
            row.append(examples.action(1, reply.reward, discount=0.0 if done else 1.0))
            row += [] if done else [examples.observation(1)]
        rows.append(row)
    made = examples.rollout(rows, T=2 * turns + 1, S=2 * turns + 1)
    return examples.with_anchors(made, anchors), adv


def test_the_step_term_of_gigpo_tells_the_true_advantage():
    """Correlation over the turns of a group of 8, mean and 95 % interval over 12 seeds: 0.28 [0.22, 0.34]; the episode
    term alone reaches 0.12 [0.10, 0.15]. The advantage is exact and undiscounted, of the policy that played (nine
    actions in ten are random); the step term is of the default knobs, discount 0.95.
    """
    policy = maze_exact.wandering(0.9)
    values = maze_exact.values(ENV, policy)
    grpo = credit.find("grpo")[0]
    whole, episode = jax.jit(functools.partial(credit.find("gigpo")[0], inner=grpo)), jax.jit(grpo)
    step, plain = [], []
    for seed in range(12):
        made, adv = sampled_group(policy, values, seed, 8)
        acts = np.asarray(made.mask_BT)[:, 1::2]  # action tokens stand at odd places, one per turn
        assert acts.sum() == np.asarray(made.mask_BT).sum()
        terms = [np.asarray(term(made).adv_BT)[:, 1::2][acts] for term in (whole, episode)]
        step.append(np.corrcoef(terms[0] - terms[1], adv[acts])[0, 1])
        plain.append(np.corrcoef(terms[1], adv[acts])[0, 1])

    def interval(x):
        half = 2.201 * np.std(x, ddof=1) / len(x) ** 0.5  # Student's t, 11 degrees of freedom
        return np.mean(x) - half, np.mean(x) + half

    low, high = interval(step)
    assert 0.1 < low < high < 0.5, (low, high)
    assert interval(np.subtract(step, plain))[0] > 0
