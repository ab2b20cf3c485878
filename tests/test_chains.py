"""Chains: credit, weights and ratios of rows are those of the whole trajectory that they are cut from."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base, chains
from rsi_jax.credit import critic, examples, group, laws, rewards
from rsi_jax.feedback import hints, locate
from rsi_jax.train import columns, diagnostics, evaluate, rl, update
from tests import tiny

ROWS = 3


def places_of(whole: base.Rollout, seed: int, rows: int) -> dict[str, np.ndarray]:
    """Draws what each row holds of its trajectory: [B, 2], from and to, in segments (S), tokens (T) and turns (A)."""
    rng, s, bounds = np.random.default_rng(seed), jax.tree.map(np.asarray, whole.segments), []
    for kind_S, length_S in zip(s.kind_BS, s.length_BS, strict=True):
        observed = np.flatnonzero((kind_S == base.OBSERVATION) & (length_S > 0))
        count = rng.integers(0, min(rows - 1, len(observed)) + 1)
        starts = np.sort(rng.choice(observed, count, replace=False))
        ends = [*starts, *[np.sum(length_S > 0)] * (rows - count)]
        bounds.append(np.stack([[0, *ends[:-1]], ends], axis=1))
    place_B2 = np.concatenate(bounds).astype(int)

    def passed(x_BS):
        before = np.concatenate([np.zeros((len(x_BS), 1), int), np.cumsum(x_BS, axis=1)], axis=1)
        return np.take_along_axis(np.repeat(before, rows, axis=0), place_B2, axis=1)

    acts_BS = (s.kind_BS == base.ACTION) & (s.length_BS > 0)
    return {"S": place_B2, "T": passed(s.length_BS), "A": passed(acts_BS)}


def cut(whole: base.Rollout, seed: int, rows: int = ROWS) -> base.Rollout:
    """Cuts trajectories before some of their observations into chains; what no row holds is NaN or 0."""
    places = places_of(whole, seed, rows)
    B, used_B = len(places["S"]), places["S"][:, 1] > places["S"][:, 0]
    last_B = used_B & (np.append(~used_B[1:], True) | (np.arange(B) % rows == rows - 1))

    def move(x, axis):
        x = np.asarray(x)
        moved = np.full((B, *x.shape[1:]), np.nan if x.dtype.kind == "f" else 0, x.dtype)
        for b, (low, high) in enumerate(places[axis]):
            moved[b, : high - low] = x[b // rows, low:high]
        return moved

    s = {name: move(x, "S") for name, x in vars(whole.segments).items()}
    s["start_BS"] -= np.where(s["length_BS"] > 0, places["T"][:, :1], 0)
    s["kind_BS"][:, 0] = base.PROMPT
    axes = {"BT": "T", "BTM": "T", "BS": "A"}
    made = {}
    for name, x in laws.columns(whole):
        axis = axes.get(name.rpartition("_")[2])
        made[name] = move(x, axis) if axis else x if name.endswith("_KU") else np.repeat(x, rows)
    made["weight_B"] = np.where(used_B, made["weight_B"], 0).astype(np.float32)
    made["chain_B"] = np.arange(B, dtype=np.int32) // rows
    if whole.end_value_B is not None:
        made["end_value_B"] = np.where(last_B, made["end_value_B"], np.nan).astype(np.float32)
    whole = whole.replace(segments=base.Segments(**s), **made)
    return jax.tree.map(jnp.asarray, whole if whole.views is None else _with_views(whole, places["T"], rows))


def _with_views(made: base.Rollout, place_B2: np.ndarray, rows: int) -> base.Rollout:
    """Gives every row as many places for views as a trajectory had; hints and the columns of views go along."""
    old = jax.tree.map(np.asarray, base.given(made.views, "views"))
    B, per = len(place_B2), len(old.rollout_K) // (len(place_B2) // rows)
    inside = (old.span_start_K[:, None] >= place_B2[:, 0]) & (old.span_start_K[:, None] < place_B2[:, 1])
    mine = inside & (np.arange(B) // rows == old.rollout_K[:, None])
    row_K = np.where(mine.any(axis=1), np.argmax(mine, axis=1), old.rollout_K * rows)
    used_K, low_K = old.span_length_K > 0, place_B2[row_K, 0]
    shifted = {name: np.where(used_K, getattr(old, name) - low_K, 0) for name in ("insert_at_K", "span_start_K")}
    made = made.replace(views=old.replace(**shifted))
    return spread_views(made, row_K * per + np.arange(len(row_K)) % per, np.arange(B * per) // per)


def spread_views(made: base.Rollout, at_K: np.ndarray, rollout_K: np.ndarray) -> base.Rollout:
    """Puts view k and its columns at place at_K of more places, which belong to the rollouts of rollout_K."""

    def spread(x, fill=0):
        x = np.asarray(x)
        moved = np.full((len(rollout_K), *x.shape[1:]), fill, x.dtype)
        moved[at_K] = x
        return jnp.asarray(moved)

    old = base.given(made.views, "views")
    views = jax.tree.map(spread, old).replace(
        rollout_K=jnp.asarray(rollout_K, jnp.int32), source_K=spread(old.source_K, -1)
    )
    more = {name: spread(x, np.nan) for name, x in laws.columns(made) if name.endswith("_KU")}
    return made.replace(views=views, **more)


def widened(whole: base.Rollout, rows: int = ROWS) -> base.Rollout:
    """Trajectories with the capacities of chains."""
    (C, T), S, K = whole.tokens_BT.shape, whole.segments.kind_BS.shape[1], whole.views.rollout_K.shape[0]
    per = K // C
    at_K = np.asarray(whole.views.rollout_K) * per * rows + np.arange(K) % per
    wide = examples.pad(whole, tokens=(rows - 1) * T, segments=(rows - 1) * S)
    return spread_views(wide, at_K, np.arange(K * rows) // (per * rows))


def outputs(found: base.Credit, rollout: base.Rollout) -> dict[str, np.ndarray]:
    """What a credit says of the sampled tokens and of the used views, in the order of their trajectories."""
    mask_BT, said = np.asarray(rollout.mask_BT), laws.outputs(found)
    used_K = np.asarray(rollout.views.span_length_K) > 0
    by_place = {key: x[mask_BT] for key, x in said.items() if key != "views"}
    if "views" in said:
        v = jax.tree.map(np.asarray, rollout.views)
        own = used_K & (np.asarray(rollout.weight_B)[v.rollout_K] > 0)
        by_place["views"] = said["views"][own][np.argsort(v.hint_KN[own].sum(axis=1), kind="stable")]
    return by_place


def assert_same_segments(a: base.Rollout, b: base.Rollout) -> None:
    """The used segments of two layouts are the same but for where they stand."""
    used_a, used_b = (np.asarray(x.segments.length_BS) > 0 for x in (a, b))
    for name in set(vars(a.segments)) - {"start_BS"}:
        x, y = (np.asarray(getattr(r.segments, name)) for r in (a, b))
        np.testing.assert_array_equal(x[used_a], y[used_b], err_msg=name)
    before = []
    for v in (jax.tree.map(np.asarray, r.views) for r in (a, b)):
        used_K = v.span_length_K > 0
        order = np.lexsort((v.span_length_K[used_K], v.hint_KN[used_K].sum(axis=1), v.rollout_K[used_K]))
        before.append((v.span_start_K - v.insert_at_K)[used_K][order])
    np.testing.assert_array_equal(*before)


@pytest.mark.parametrize("seed", laws.SEEDS[:2])
def test_the_credit_of_the_rows_of_a_chain_is_that_of_the_trajectory(seed):
    whole = laws.random(seed, masked=0.2 if seed else 0.0)
    rows = cut(whole, seed)
    per_chain = np.asarray(rows.length_B).reshape(-1, ROWS)
    assert {1, 2, 3} >= set((per_chain > 0).sum(axis=1)) and (per_chain[:, 1:] > 0).any()
    np.testing.assert_array_equal(np.asarray(rows.tokens_BT)[rows.mask_BT], np.asarray(whole.tokens_BT)[whole.mask_BT])
    wide, joined = widened(whole), chains.join(rows, ROWS)  # of one shape: compiled once
    assert_same_segments(joined, whole)
    want, got = laws.run(wide), laws.run(joined)
    for name, found in want.items():
        of_rows = chains.split(got[name], ROWS)
        a, b = outputs(found, wide), outputs(of_rows, rows)
        assert a.keys() == b.keys()
        for key, x in a.items():
            np.testing.assert_allclose(x, b[key], atol=laws.TOLERANCE, err_msg=f"{name} {key}")
        assert not np.asarray(of_rows.adv_BT)[~np.asarray(rows.mask_BT)].any(), name
        for key, value in found.metrics.items():
            np.testing.assert_allclose(value, of_rows.metrics[key], atol=1e-5, err_msg=f"{name} {key}")


def chain_of(*parts, empty: int = 0):
    """Rows of spans: one per part, a prompt and then what is given; the last ones empty."""
    return [[examples.prompt(2), *spans] for spans in parts] + [[]] * empty


UP, DOWN = examples.action(3, 1.0, discount=0.0, finish=base.ENV), examples.action(2, discount=0.0, finish=base.ENV)
PAIR = examples.rollout(  # two chains of one group: the first one wins in its third row
    chain_of([examples.action(2)], [examples.action(1)], [UP]) + chain_of([DOWN], empty=2),
    group=[5] * 6,
    weight=[1, 1, 1, 1, 0, 0],
    value=[[0.0] * 2, [0.0], [0.0] * 3, [0.0] * 2, [], []],
).replace(chain_B=jnp.arange(6) // 3, end_value_B=jnp.where(jnp.isin(jnp.arange(6), jnp.array([2, 3])), 0.0, jnp.nan))


def test_the_reward_of_the_last_row_reaches_the_first_and_a_chain_counts_once():
    found = {
        name: chains.over(fn, ROWS)(PAIR)
        for name, fn in (("reinforce", group.reinforce), ("dr_grpo", group.dr_grpo), ("rloo", group.rloo))
    }
    mask_BT, winner_B = np.asarray(PAIR.mask_BT), np.arange(6) < 3
    for name, (won, lost) in {"reinforce": (1.0, 0.0), "dr_grpo": (0.5, -0.5), "rloo": (1.0, -1.0)}.items():
        want_BT = np.where(mask_BT, np.where(winner_B, won, lost)[:, None], 0.0)
        np.testing.assert_allclose(found[name].adv_BT, want_BT, atol=1e-6, err_msg=name)
        assert found[name].metrics["groups"] == 1 and found[name].metrics["masked_rows"] == 0
    gae = chains.over(lambda rollout: critic.gae(rollout, discount=0.5, lambda_=1.0), ROWS)(PAIR)
    np.testing.assert_allclose(np.asarray(gae.adv_BT)[mask_BT][:6], 0.5 ** np.arange(5, -1, -1), atol=1e-6)
    np.testing.assert_allclose(np.asarray(gae.value_target_BT)[mask_BT][:6], 0.5 ** np.arange(5, -1, -1), atol=1e-6)
    assert not np.asarray(gae.adv_BT)[3:].any()


def test_one_row_to_a_chain_is_the_rollout_itself():
    assert chains.join(PAIR, 1) is PAIR


def test_groups_with_any_labels_and_the_penalty_of_a_long_chain():
    assert chains.join(PAIR, ROWS).group_B.tolist() == [0, 0]
    assert rl._silent_groups(PAIR, ROWS) == set() and rl._silent_groups(PAIR, 1) == set()
    flat = PAIR.replace(segments=PAIR.segments.replace(reward_BS=jnp.zeros_like(PAIR.segments.reward_BS)))
    assert rl._silent_groups(flat, ROWS) == {5}
    whole = rewards.overlong_shaping(chains.join(PAIR, ROWS), max_length=8, buffer=4)  # 6 and 2 sampled tokens
    reward_BS = np.asarray(whole.segments.reward_BS).reshape(PAIR.segments.reward_BS.shape)
    np.testing.assert_allclose(reward_BS.sum(axis=1), [0, 0, 0.5, 0, 0, 0])
    assert reward_BS[2, 1] == 0.5


@pytest.mark.parametrize(
    ("how", "first", "second"),
    [("token_mean", 6 / 8, 2 / 8), ("sequence_mean", 0.5, 0.5), ("prompt_mean", 6 / 8, 2 / 8), ("constant", 0.3, 0.1)],
)
def test_the_weights_of_the_loss_are_of_chains(how, first, second):
    objective = update.Objective(aggregation=how, aggregation_constant=10.0, chain_rows=ROWS)
    weight_BT = np.asarray(update.token_weights(PAIR, objective))
    assert weight_BT.shape == PAIR.tokens_BT.shape and not weight_BT[~np.asarray(PAIR.mask_BT)].any()
    np.testing.assert_allclose(weight_BT.sum(axis=1).reshape(2, 3).sum(axis=1), [first, second], rtol=1e-6)


# --- updates ---------------------------------------------------------------------------------------------------------

CONFIG = tiny.config()
PARAMS = tiny.params(CONFIG, 0)


def batch(rows: int = 2):
    """Chains with views, the log-probs of the sampler apart from those of the policy, and any credit."""
    whole = examples.random_rollout(3, B=4, T=16, turns=3).replace(value_BT=None)
    whole = whole.replace(views=examples.random_views(3, whole, unused=0.2).replace(branch=14))
    rollout = cut(whole, 1, rows)
    rollout = rollout.replace(tokens_BT=jnp.where(rollout.segment_BT < 0, 0, rollout.tokens_BT))
    rollout = rollout.replace(logp_BT=jnp.where(rollout.mask_BT, rollout.logp_BT, 0.0))
    rollout = rollout.replace(kept_mass_BT=jnp.ones(rollout.tokens_BT.shape), ref_logp_BT=None)
    adv_BT = jnp.where(rollout.mask_BT, jnp.sin(jnp.arange(rollout.tokens_BT.size).reshape(rollout.tokens_BT.shape)), 0)
    return rollout, base.Credit(adv_BT, None, rollout.views.weight_K, base.Divergence())


def test_micro_batches_of_whole_chains_give_the_same_gradients():
    rollout, credit = batch()
    knobs = dict(surrogate="gspo", aggregation="sequence_mean", chain_rows=2, span=4, chunk=16)
    found = {}
    for micro in (0, 4):
        objective = update.Objective(micro_batch=micro, **knobs)
        found[micro] = jax.jit(lambda r, c, o=objective: update.gradients(PARAMS, None, CONFIG, r, c, o))(
            rollout, credit
        )
        tiny.assert_close(found[micro][0], found[0][0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(found[micro][3], found[0][3], atol=1e-5)
    assert len(found[0][0]) == 2 and all(np.abs(x).max() > 1e-4 for x in tiny.leaves(found[0][0]).values())
    with pytest.raises(base.InputError, match="rl.micro_batch=1 is no multiple of rollout.chain_rows=2"):
        update.gradients(PARAMS, None, CONFIG, rollout, credit, update.Objective(micro_batch=1, **knobs))


def test_the_ratio_of_a_sequence_is_that_of_its_chain():
    """Half a nat more in one row, half a nat less in the other: the chain is on-policy, its rows are not."""
    spans = chain_of([examples.action(3)], [examples.action(3, 1.0, discount=0.0, finish=base.ENV)])
    rollout = examples.rollout(spans, T=8).replace(ref_logp_BT=None)
    sums = {}
    hidden_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, CONFIG.width)), jnp.float32)
    own_BT, _ = update.annotate.token_logp(PARAMS, CONFIG, hidden_BTD, rollout, temperature=1.0, chunk=16)
    apart_B1 = jnp.array([[0.5], [-0.5]])
    rollout = rollout.replace(logp_BT=jnp.where(rollout.mask_BT, own_BT + apart_B1, 0.0))
    for rows in (1, 2):
        o = update.Objective(surrogate="gspo", chain_rows=rows, correction="truncate", correction_level="sequence")
        weight_BT, credit = update.token_weights(rollout, o), base.Credit(rollout.mask_BT * 1.0)
        _, (_, sums[rows], _) = update.outcome_loss(PARAMS, CONFIG, hidden_BTD, rollout, credit, weight_BT, o)
        trainer = rollout.replace(policy_logp_BT=jnp.where(rollout.mask_BT, own_BT, 0.0))
        _, corrected_BT, found = update.correct(trainer, weight_BT, o)
        same = np.allclose(corrected_BT, weight_BT, rtol=1e-5)
        assert same == (rows == 2) and abs(float(found["correction/max"]) - (1.0 if same else np.exp(0.5))) < 1e-5
    np.testing.assert_allclose(sums[1]["ratio_max"], np.exp(0.5), rtol=1e-5)
    np.testing.assert_allclose(sums[2]["ratio_max"], 1.0, rtol=1e-5)


def test_minibatches_never_cut_a_chain():
    rollout, credit = jax.tree.map(np.asarray, batch())
    config = rl_knobs(parts=2)
    seen = []
    for part, scores, rows in rl.minibatches(rollout, credit, config, 0, chain_rows=2):
        assert (rows.reshape(-1, 2) == rows[::2, None] + [0, 1]).all() and not (rows[::2] % 2).any()
        assert part.chain_B.tolist() == [0, 0, 1, 1] and max(part.group_B) < 2
        np.testing.assert_array_equal(part.tokens_BT, rollout.tokens_BT[rows])
        np.testing.assert_array_equal(scores.adv_BT, credit.adv_BT[rows])
        seen += rows.tolist()
    assert sorted(seen) == list(range(8))


def rl_knobs(parts: int):
    return types.SimpleNamespace(seed=0, rl=types.SimpleNamespace(epochs=1, minibatches=parts))


# --- text ------------------------------------------------------------------------------------------------------------


def record(text, start=0, reward=0.0, *, shown="", reply="", summary=False, **info):
    shown, reply = ([base.Message(role="user", content=x)] if x else [] for x in (shown, reply))
    return base.TurnRecord(shown, text, start, 1, 0, base.STOP, reply, reward, info, summary)


def parts_of(seed, *rows):
    """The transcripts of a chain of three rows."""
    return [
        base.Transcript(seed, 0, tokens=list(range(10 * part, 10 * part + 10)), turns=list(rows[part]), part=part)
        if part < len(rows)
        else base.Transcript(seed, 0, part=part)
        for part in range(ROWS)
    ]


LONG = " ".join(["word"] * 30)
TEXTS = [
    *parts_of(
        1,
        [record("a", 1, shown="tools x y"), record(LONG, 2, summary=True)],
        [record("b", 3, shown="renamed x z"), record("c", 4), record("s", 5, summary=True)],
        [record(LONG, 6, 1.0)],
    ),
    *parts_of(2, [record("d", 7, 0.25, shown="tools x y")]),
]


def test_episodes_are_the_turns_of_the_environment():
    whole = chains.episodes(TEXTS)
    assert [[turn.text for turn in one.turns] for one in whole] == [["a", "b", "c", LONG], ["d"]]
    assert [one.score for one in whole] == [1.0, 0.25] and [one.seed for one in whole] == [1, 2]
    assert chains.episodes(whole) == whole and chains.episode_of(TEXTS) == [0, 0, 0, 1, 1, 1]
    for row, one in enumerate(TEXTS):
        for turn, said in enumerate(one.turns):
            place = chains.turn_in_episode(TEXTS, row, turn)
            assert said.summary or whole[chains.episode_of(TEXTS)[row]].turns[place] is said
    scalars = evaluate.summarise(TEXTS, lambda episodes: {"episodes": float(len(episodes))})
    assert scalars["return"] == 0.625 and scalars["turns"] == 2.5 and scalars["episodes"] == 2
    assert diagnostics.chained(TEXTS) == {"chains/rows": 2.0, "chains/summary_tokens": 1.0, "chains/truncated": 0.0}


def test_no_rule_finds_a_summary_and_hints_know_the_whole_episode():
    findings, _ = locate.locate(TEXTS, locate.find(["long_answer"]), per_rollout=4, seed="")
    assert findings == [locate.Finding(2, 0, "long_answer")]
    templates = hints.Templates({"long_answer": "use {tools}"}, {}, "", "")
    assert hints.write("template", findings, TEXTS, templates, seed="") == ["use tools x z"]
    two = [*findings, locate.Finding(0, 0, "long_answer")]  # of one episode: there is no other hint to shuffle in
    assert hints.write("shuffled", two, TEXTS, templates, seed="") == ["", ""]


def test_judges_and_answers():
    rules = locate.find(["long_answer"])
    judge = functools.partial(columns._by_rules, rules)
    judge_BS = columns.judged(judge, TEXTS, capacity=4, name="")
    np.testing.assert_array_equal(
        judge_BS[:4, :3], [[1, 1, np.nan], [1, 1, 1], [0, np.nan, np.nan], [1] + 2 * [np.nan]]
    )
    assert np.isnan(judge_BS[4:]).all()
    assert columns.best_answers(PAIR, TEXTS) == [[26]] * 6  # the last action of the chain that won
