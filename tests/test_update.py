"""One optimizer update: any split gives the same two gradients, each clipped on its own, and what breaks is named."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import config_dict

from rsi_jax import annotate, base, losses, metrics, optim
from rsi_jax.credit import examples
from rsi_jax.feedback import schedule
from rsi_jax.train import budget, diagnostics, loop, rl, update
from tests import tiny

CONFIG = tiny.config(value_head=True, tied=False)
PARAMS, OTHER = tiny.params(CONFIG, 0), tiny.params(CONFIG, 1)
B, T, PER, U = 4, 16, 2, 4
OBJECTIVE = update.Objective(
    span=U,
    kl_coef=0.1,
    entropy_coef=0.01,
    chunk=16,
    teacher="ema",
    teacher_rate=0.25,
    outcome_clip=0.3,
    feedback_clip=0.2,
    feedback_schedule=(("off_at", 1.0), ("fade", 0.4)),
)
RARE = 63  # a word of no rollout


def draw(seed, rows=B, **knobs):
    """Rollouts with views, scored by the policy itself, and the credit of their spans and rewards."""
    rollout = examples.random_rollout(seed, B=rows, T=T, turns=3, **knobs)
    views = examples.random_views(seed, rollout, per_rollout=PER, hint_tokens=4).replace(branch=PER * (4 + U + 2))
    logp, _ = annotate.score_rollout(PARAMS, rollout, config=CONFIG)
    rollout = rollout.replace(logp_BT=logp, views=views)
    rng = np.random.default_rng(seed)
    adv, target = (
        jnp.where(rollout.mask_BT, jnp.asarray(rng.normal(size=(rows, T)), jnp.float32), 0) for _ in range(2)
    )
    return rollout, base.Credit(adv, target, views.weight_K * views.polarity_K, base.Divergence("jsd"))


def off_policy(rollout, seed=0):
    logp = np.asarray(rollout.logp_BT)
    noise = np.random.default_rng(seed).normal(size=logp.shape) * 0.3
    return rollout.replace(logp_BT=jnp.asarray(np.where(logp < 0, logp + noise, 0.0), jnp.float32))


@functools.partial(jax.jit, static_argnames=("objective", "config"))
def gradients(params, teacher, rollout, credit, objective=OBJECTIVE, config=CONFIG):
    return update.gradients(params, teacher, config, rollout, credit, objective)


step = update.make_update(CONFIG, OBJECTIVE, optax.sgd(1.0))


def state_of(params=PARAMS, teacher=OTHER, success=0.0):
    params, teacher = tiny.copy(params), tiny.copy(teacher)
    aux = schedule.init() | {"success": jnp.float32(success)}
    return base.TrainState(jnp.int32(0), params, optax.sgd(1.0).init(params), teacher=teacher, aux=aux)


def norm(tree):
    return np.sqrt(sum(float(np.sum(np.square(x))) for x in tiny.leaves(tree).values()))


# --- gradients -------------------------------------------------------------------------------------------------------


def test_T13_any_micro_batches_give_the_same_gradients_and_metrics():
    rollout, credit = draw(0)
    rollout = off_policy(rollout)
    whole = gradients(PARAMS, OTHER, rollout, credit)
    assert norm(whole[0][0]) > 1e-2 and norm(whole[0][1]) > 1e-2
    bare = credit.replace(view_weight_K=None)
    for micro, scored in ((1, credit), (2, credit), (4, credit), (1, bare)):
        knobs = dataclasses.replace(OBJECTIVE, micro_batch=micro)
        grads, sums, ratios, row_B, view_sums = gradients(PARAMS, OTHER, rollout, scored, knobs)
        tiny.assert_close(grads, whole[0][: len(grads)], rtol=1e-4, atol=1e-6)
        tiny.assert_close((sums, row_B), (whole[1], whole[3]), rtol=1e-4, atol=1e-5)
        tiny.assert_close(view_sums, {} if scored is bare else whole[4], rtol=1e-4, atol=1e-5)
        tiny.assert_close(losses.summarise(ratios), losses.summarise(whole[2]), rtol=1e-4, atol=1e-6)
    with pytest.raises(base.InputError, match="rl.micro_batch=3 does not divide the 4 rollouts"):
        update.gradients(PARAMS, OTHER, CONFIG, rollout, credit, dataclasses.replace(OBJECTIVE, micro_batch=3))


def test_T37_a_hint_changes_no_number_of_the_student():
    rollout, credit = draw(1)
    other = rollout.replace(views=rollout.views.replace(hint_KN=(rollout.views.hint_KN + 7) % 60))
    (a, b) = (gradients(PARAMS, OTHER, r, credit) for r in (rollout, other))
    tiny.assert_close((a[0][0], a[1:4]), (b[0][0], b[1:4]))  # outcome gradient, sums, ratios, log-probs: to the bit
    assert a[4]["feedback_loss"] != b[4]["feedback_loss"]


def test_rows_of_weight_zero_change_nothing_whatever_they_hold():
    (rollout, credit), (noise, _) = (jax.tree.map(np.asarray, draw(seed)) for seed in (2, 3))
    dead = np.arange(B) >= 2
    rollout = rollout.replace(weight_B=np.where(dead, 0, 1).astype(np.float32))
    credit = credit.replace(view_weight_K=np.where(np.repeat(dead, PER), 0, credit.view_weight_K))

    def mixed(a, b):
        rows = np.repeat(dead, a.shape[0] // B).reshape(-1, *[1] * (a.ndim - 1))
        return np.where(rows, b, a).astype(a.dtype)

    garbage = jax.tree.map(mixed, rollout, noise).replace(weight_B=rollout.weight_B)
    others = credit.replace(adv_BT=mixed(credit.adv_BT, 1e3), value_target_BT=mixed(credit.value_target_BT, -1e3))
    a, b = (gradients(PARAMS, OTHER, *x) for x in ((rollout, credit), (garbage, others)))
    tiny.assert_close((a[0], a[1], a[4]), (b[0], b[1], b[4]), atol=1e-7)
    few = jax.tree.map(lambda x: x[:2], rollout.replace(views=None))
    np.testing.assert_allclose(update.token_weights(rollout, OBJECTIVE)[:2], update.token_weights(few, OBJECTIVE))


def test_bfloat16_computes_and_the_masters_stay_float32():
    rollout, credit = draw(4)
    credit = credit.replace(view_weight_K=None)
    low = dataclasses.replace(CONFIG, dtype="bfloat16")
    grads, sums, *_ = gradients(PARAMS, None, rollout, credit, config=low)
    assert all(g.dtype == jnp.float32 and np.isfinite(g).all() for g in jax.tree.leaves(grads))
    exact = gradients(PARAMS, OTHER, *draw(4))[0][0]
    dot = sum(np.vdot(a, b) for a, b in zip(tiny.leaves(grads[0]).values(), tiny.leaves(exact).values(), strict=True))
    assert 0.98 < dot / norm(grads[0]) / norm(exact) < 1 - 1e-7
    assert sums["entropy"].dtype == jnp.float32


# --- the update ------------------------------------------------------------------------------------------------------


def test_T30_at_the_first_update_the_ratio_is_one():
    _, metrics = step(state_of(), *draw(5))
    assert abs(metrics["ratio_max"] - 1) < 1e-5 and abs(metrics["ratio_mean"] - 1) < 1e-5
    assert metrics["clip_fraction"] == 0 and abs(metrics["approx_kl"]) < 1e-6 and metrics["ess"] > 1 - 1e-6
    assert metrics["bad_row"] == -1


def test_each_gradient_is_clipped_on_its_own_and_the_teacher_follows():
    rollout, credit = draw(6)
    (outcome, feedback), *_ = gradients(PARAMS, OTHER, rollout, credit)
    state, metrics = step(state_of(success=0.9), rollout, credit)  # the feedback has faded to a quarter
    np.testing.assert_allclose(metrics["feedback/scale"], 0.25, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm/outcome"], norm(outcome), rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm/feedback"], norm(feedback), rtol=1e-5)
    scales = [limit / norm(g) for limit, g in ((0.3, outcome), (0.2, feedback))]
    assert all(scale < 1 for scale in scales)
    want = jax.tree.map(lambda p, a, b: p - scales[0] * a - 0.25 * scales[1] * b, PARAMS, outcome, feedback)
    tiny.assert_close(state.params, want, rtol=1e-5, atol=1e-6)
    followed = jax.tree.map(lambda old, new: old + 0.25 * (new - old), OTHER, state.params)  # T43
    tiny.assert_close(state.teacher, followed, rtol=1e-5, atol=1e-6)
    assert state.step == 1
    dot = sum(np.vdot(a, b) for a, b in zip(jax.tree.leaves(outcome), jax.tree.leaves(feedback), strict=True))
    np.testing.assert_allclose(metrics["grad_cosine"], dot / norm(outcome) / norm(feedback), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", optim.NAMES)
def test_a_batch_without_signal_moves_nothing_whatever_the_momentum(name):
    rollout, credit = draw(6)
    optimizer = optim.make(name, optax.constant_schedule(0.01), weight_decay=0.1)
    one = update.make_update(CONFIG, dataclasses.replace(OBJECTIVE, kl_coef=0.0, entropy_coef=0.0), optimizer)
    silent = base.Credit(jnp.zeros_like(credit.adv_BT), None)
    state, metrics = one(dataclasses.replace(state_of(), opt=optimizer.init(PARAMS)), rollout, credit)
    assert metrics["without_signal"] == 0
    before = jax.device_get((state.params, state.opt))
    state, metrics = one(state, rollout, silent)
    assert metrics["without_signal"] == 1 and state.step == 2
    tiny.assert_close((state.params, state.opt), before)  # to the bit


@pytest.mark.parametrize("name", optim.NAMES)
def test_a_rate_scales_what_a_batch_moves_and_nothing_else(name):
    rollout, credit = draw(6)
    optimizer = optim.make(name, optax.constant_schedule(0.01), weight_decay=0.1)
    one = update.make_update(CONFIG, OBJECTIVE, optimizer)
    whole, half, none = (
        one(dataclasses.replace(state_of(), opt=optimizer.init(PARAMS)), rollout, credit, None, rate)[0]
        for rate in (1.0, 0.5, 0.0)
    )
    tiny.assert_close(half.params, jax.tree.map(lambda x, y: (x + y) / 2, whole.params, PARAMS), rtol=1e-5, atol=1e-6)
    tiny.assert_close((none.params, none.opt), (PARAMS, whole.opt))


def test_the_learning_rate_follows_the_budget_that_ends_the_stage():
    ledger = metrics.Ledger()
    rl = config_dict.ConfigDict({"schedule": "linear", "max_generated": 0, "max_minutes": 0.0})
    ledger.add(generated=30)
    ledger.seconds |= {"train": 42.0, "generate": 3.0, "evaluate": 1000.0}  # evaluations are not the method's
    assert budget.spent(rl, ledger) == 0 and budget.rate(rl, ledger) == 1 and budget.schedule(rl) == "linear"
    rl.max_generated = 40
    assert budget.schedule(rl) == "constant"  # over updates
    assert (budget.spent(rl, ledger), budget.rate(rl, ledger)) == (0.75, 0.25)
    rl.max_minutes = 1.0
    assert budget.spent(rl, ledger) == 0.75  # the one that ends first
    rl.max_generated = 60
    assert budget.spent(rl, ledger) == 0.75  # now that of time: 45 s of 60
    rl.schedule = "cosine"
    np.testing.assert_allclose(budget.rate(rl, ledger), (1 + np.cos(np.pi * 0.75)) / 2)
    ledger.add(generated=1000)
    assert budget.spent(rl, ledger) > 1 and budget.rate(rl, ledger) == 0
    rl.schedule = "constant"
    assert budget.rate(rl, ledger) == 1


def test_i_feedback_of_weight_zero_is_the_outcome_loss_alone():
    rollout, credit = draw(7)
    off = credit.replace(view_weight_K=jnp.zeros_like(credit.view_weight_K))
    on, none = gradients(PARAMS, OTHER, rollout, credit), gradients(PARAMS, OTHER, rollout, off)
    tiny.assert_close((on[0][0], on[1:4]), (none[0][0], none[1:4]))  # one program: to the bit
    assert norm(on[0][1]) > 0 == norm(none[0][1])
    a, metrics = step(state_of(), rollout, off)
    assert metrics["feedback_loss"] == metrics["grad_norm/feedback"] == metrics["grad_cosine"] == metrics["views"] == 0
    b, bare = step(state_of(), rollout, credit.replace(view_weight_K=None))
    assert all(metrics[name] == bare[name] for name in bare)  # two programs, the same losses
    tiny.assert_close(a.params, b.params, rtol=3e-7, atol=1e-8)  # XLA rounds the last bit of an update as it fuses it


def test_the_sample_that_breaks_is_named():
    rollout, credit = draw(8)
    broken = tiny.copy(PARAMS)
    broken["embed"]["embedding"] = broken["embed"]["embedding"].at[RARE].set(jnp.nan)
    assert not (np.asarray(rollout.tokens_BT) == RARE).any()
    bad = rollout.replace(tokens_BT=rollout.tokens_BT.at[2, 0].set(RARE))
    state, metrics = step(state_of(broken), bad, credit)
    assert metrics["bad_row"] == 2 and not np.isfinite(metrics["grad_norm/outcome"])
    says = r"rl step 4: .*policy_loss.* is not finite; rollout 2 of the batch .*; parameters not finite: \['embed'\]"
    with pytest.raises(FloatingPointError, match=says):
        loop.check_finite(metrics, state, "rl", 4)


@pytest.mark.parametrize("name", ["loss", "policy_loss", "grad_norm", "grad_norm/feedback"])
def test_what_is_not_finite_is_named(name):
    state = types.SimpleNamespace(params={"w": np.ones(2)})
    fine = {"loss": 1.0, "grad_norm": 2.0, "gain": float("nan"), "bad_row": -1}
    loop.check_finite(fine, state, "rl", 0)  # a measurement may be missing, a loss may not
    for value in (float("nan"), float("inf")):
        with pytest.raises(FloatingPointError, match=f"lm step 7: {name} is not finite; the last checkpoint is intact"):
            loop.check_finite(fine | {name: value}, state, "lm", 7)


def test_the_update_logs_the_least_certain_fifth_and_what_the_teacher_thinks_of_the_spans():
    rollout, credit = draw(5)
    _, metrics = step(state_of(), rollout, credit)
    entropy = np.asarray(annotate.score_rollout(PARAMS, rollout, config=CONFIG)[1])[np.asarray(rollout.mask_BT)]
    assert abs(metrics["entropy"] - entropy.mean()) < 1e-5
    fifth = np.sort(entropy)[::-1] * np.clip(0.2 * entropy.size - np.arange(entropy.size), 0, 1)
    assert abs(metrics["entropy_top"] - fifth.sum() / (0.2 * entropy.size)) < 0.0125  # half the width of a bin
    assert metrics["entropy_top"] > metrics["entropy"] + 0.05
    assert all(abs(metrics[f"ratio_p{q}"] - 1) < 1e-5 for q in ("01", "50", "99"))
    bound = {"config": CONFIG, "columns": ("view_logp_KU",), "teacher": OTHER, "span": U}
    scored, views, deltas = annotate.annotate(PARAMS, rollout, **bound), rollout.views, []
    for k in np.flatnonzero(np.asarray(credit.view_weight_K)):
        n = min(int(views.span_length_K[k]), U)
        places = int(views.span_start_K[k]) + np.arange(n)
        deltas.append(scored.view_logp_KU[k, :n] - rollout.logp_BT[views.rollout_K[k], places])
    np.testing.assert_allclose(metrics["feedback/delta"], np.mean(np.concatenate(deltas)), rtol=1e-4)


# --- minibatches -----------------------------------------------------------------------------------------------------


def knobs(epochs=1, parts=1, seed=0):
    return types.SimpleNamespace(seed=seed, rl=types.SimpleNamespace(epochs=epochs, minibatches=parts))


def test_minibatches_hold_every_rollout_once_an_epoch_with_its_views():
    rows = 8
    rollout = examples.random_rollout(0, B=rows, T=T)
    rollout = rollout.replace(tokens_BT=rollout.tokens_BT.at[:, 0].set(jnp.arange(rows)))
    views = examples.random_views(0, rollout, per_rollout=PER, unused=0.0)
    rollout = jax.tree.map(np.asarray, rollout.replace(views=views.replace(source_K=jnp.arange(rows * PER))))
    credit = base.Credit(np.asarray(rollout.logp_BT) * 2, None, np.arange(rows * PER, dtype=np.float32))
    for parts in (2, 4):
        seen = []
        for part, scores, mine in rl.minibatches(rollout, credit, knobs(2, parts), 3):
            np.testing.assert_array_equal(mine, part.tokens_BT[:, 0])
            seen += mine.tolist()
            assert part.tokens_BT.shape == (rows // parts, T) and part.views.rollout_K.shape == (rows // parts * PER,)
            np.testing.assert_array_equal(part.segments.length_BS, rollout.segments.length_BS[mine])
            np.testing.assert_array_equal(scores.adv_BT, part.logp_BT * 2)
            np.testing.assert_array_equal(mine[part.views.rollout_K], part.views.source_K // PER)
            np.testing.assert_array_equal(scores.view_weight_K, part.views.source_K)
            np.testing.assert_array_equal(part.views.hint_KN, rollout.views.hint_KN[part.views.source_K])
        assert sorted(seen[:rows]) == sorted(seen[rows:]) == list(range(rows)) and seen[:rows] != seen[rows:]
    again = [part.tokens_BT[:, 0].tolist() for part, _, _ in rl.minibatches(rollout, credit, knobs(1, 4), 3)]
    assert sum(again, []) == seen[:rows]  # drawn from (seed, step, epoch) alone
    (only,) = rl.minibatches(rollout, credit, knobs(), 0)
    assert only[0] is rollout and only[2].tolist() == list(range(rows))


def test_the_updates_on_a_batch_are_logged_as_their_mean_and_a_bad_row_is_one_of_the_batch():
    updates = [
        {"policy_loss": 1.0, "ratio_max": 3.0, "tokens": 9, "bad_row": -1},
        {"policy_loss": 2.0, "ratio_max": 2.0, "tokens": 5, "bad_row": 1},
    ]
    found = diagnostics.over_updates(updates, [np.array([0, 3]), np.array([1, 2])])
    assert found == {"policy_loss": 1.5, "ratio_max": 3.0, "bad_row": 2.0}
    assert diagnostics.over_updates(updates[:1], [np.array([0, 3])])["bad_row"] == -1


def test_prompt_mean_counts_the_prompts_of_a_minibatch():
    rows = 8
    rollout = examples.rollout([[examples.prompt(1), examples.action(2)]] * rows, group=np.arange(rows) // 2)
    rollout = jax.tree.map(np.asarray, rollout)
    credit = base.Credit(np.zeros_like(rollout.logp_BT))
    objective = update.Objective(aggregation="prompt_mean")
    for part, _, _ in rl.minibatches(rollout, credit, knobs(1, 4), 0):
        weight = np.asarray(update.token_weights(jax.tree.map(jnp.asarray, part), objective))
        np.testing.assert_allclose(weight.sum(), 1.0, rtol=1e-6)


# --- optimizers and schedules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", optim.NAMES)
def test_optimizers_step_every_parameter_against_its_gradient(name):
    optimizer = optim.make(name, optax.constant_schedule(0.01), weight_decay=0.0)
    grads = tiny.params(CONFIG, 3)
    changes, _ = jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p))(grads, PARAMS)
    for path, change in tiny.leaves(changes).items():
        grad = tiny.leaves(grads)[path]
        assert change.dtype == np.float32 and np.isfinite(change).all() and np.vdot(change, grad) < 0, path
        rms = np.sqrt(np.mean(change**2))
        muon = name == "muon" and change.ndim > 1 and "embed" not in path and "head" not in path
        assert 0.0015 < rms < 0.0025 if muon else 0.009 < rms < 0.016, path  # a fifth of Adam's, orthogonal
        if muon:
            matrix = (
                change.reshape(-1, change.shape[-1]) if path.endswith("/o") else change.reshape(change.shape[0], -1)
            )
            singular = np.linalg.svd(matrix, compute_uv=False)
            assert singular.max() / singular.min() < 2.5, path
    with pytest.raises(base.InputError, match="optimizer='sgd' is no optimizer"):
        optim.make("sgd", optax.constant_schedule(0.1))


@pytest.mark.parametrize("name", optim.NAMES)
def test_weight_decay_shrinks_every_leaf_alike(name):
    optimizer = optim.make(name, optax.constant_schedule(0.01), weight_decay=0.5)
    still = jax.tree.map(jnp.zeros_like, PARAMS)
    changes, _ = optimizer.update(still, optimizer.init(PARAMS), PARAMS)
    tiny.assert_close(changes, jax.tree.map(lambda p: -0.005 * p, PARAMS), rtol=1e-5)


def test_clip_bounds_the_norm_and_zero_is_no_bound():
    grads = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([[4.0]])}
    for limit, want in ((1.0, 1.0), (10.0, 5.0), (0, 5.0)):
        clipped, before = optim.clip(grads, limit)
        np.testing.assert_allclose([norm(clipped), before], [want, 5.0], rtol=1e-6)
    zero, before = optim.clip(jax.tree.map(jnp.zeros_like, grads), 1.0)
    assert before == 0 and norm(zero) == 0


@pytest.mark.parametrize("kind", optim.SCHEDULES)
def test_learning_rates_rise_over_the_warm_up_and_fall_to_zero_at_the_end(kind):
    rate = optim.learning_rate(0.1, updates=20, warmup=4, schedule=kind)
    found = [float(rate(i)) for i in range(21)]
    np.testing.assert_allclose(found[:4], [0.025, 0.05, 0.075, 0.1], rtol=1e-5)
    np.testing.assert_allclose(found[4], 0.1, rtol=1e-5)
    assert all(a >= b - 1e-9 for a, b in zip(found[3:], found[4:], strict=False))
    np.testing.assert_allclose(found[20], 0.1 if kind == "constant" else 0.0, atol=1e-8)
    np.testing.assert_allclose(found[12], {"constant": 0.1, "linear": 0.05, "cosine": 0.05}[kind], rtol=1e-5)
    for warmup in (0, 1):
        np.testing.assert_allclose(optim.learning_rate(0.1, updates=5, warmup=warmup, schedule=kind)(0), 0.1, rtol=1e-6)
    with pytest.raises(base.InputError, match="schedule='step' is no schedule"):
        optim.learning_rate(0.1, updates=1, warmup=0, schedule="step")


def test_feedback_rises_falls_fades_and_is_gated():
    knobs = dict(warmup=1, decay=0, off_at=2.0, fade=0.2, min_gain=-1.0)

    def scale(step=5, success=0.0, gain=np.nan, **changes):
        aux = {"success": jnp.float32(success), "gain": jnp.float32(gain)}
        return float(schedule.scale(aux, step, **(knobs | changes)))

    fresh = schedule.init()
    assert float(schedule.scale(fresh, 0, **knobs)) == 1.0
    np.testing.assert_allclose([scale(s, warmup=4) for s in range(5)], [0.25, 0.5, 0.75, 1, 1])
    np.testing.assert_allclose([scale(s, decay=10) for s in (0, 5, 10, 50)], [1, 0.5, 0, 0])
    np.testing.assert_allclose([scale(success=s, off_at=1.0) for s in (0.5, 0.8, 0.9, 1.0)], [1, 1, 0.5, 0], atol=1e-6)
    assert scale(success=1.0) == 1.0  # off_at=2: never
    assert [scale(gain=g, min_gain=0.1) for g in (np.nan, 0.2, 0.1, -1.0)] == [1, 1, 0, 0]
    aux = schedule.learn(fresh, jnp.float32(1.0))
    aux = schedule.learn(aux, jnp.float32(0.0))
    np.testing.assert_allclose(aux["success"], 0.3 * 0.7)
    assert np.isnan(aux["gain"])
    state = schedule.remember_gain(base.TrainState(0, {}, {}, aux=aux), 0.25)
    for found in (state, schedule.remember_gain(state, float("nan"))):  # not measured anew: the last one stands
        assert found.aux["gain"] == 0.25 and found.aux["success"] == aux["success"]
