"""Hinted re-readings: equal to reading each spliced row apart, on the span only, without a gradient to the teacher."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import annotate, base
from rsi_jax.credit import examples
from rsi_jax.feedback import teacher as teacher_lib
from rsi_jax.feedback import views as views_lib
from rsi_jax.kernels.divergence.api import NAMES
from rsi_jax.train import update
from tests import tiny

CONFIG = tiny.config(logit_soft_cap=5.0)
B, T, PER, N, U = 4, 20, 2, 5, 4
K, BRANCH = B * PER, PER * (T + N)
TEMPERATURE = 0.8
OBJECTIVE = update.Objective(span=U)
PARAMS, OTHER = tiny.params(CONFIG, 0), tiny.params(CONFIG, 1)


def draw_views(seed, rollout, *, unused=0.2, empty=False, before=False) -> base.Views:
    """Views on whole actions, hints anywhere before them. empty: no hint tokens. before: at least one token between."""
    rng = np.random.default_rng(seed)
    views = examples.random_views(seed, rollout, per_rollout=PER, hint_tokens=N, unused=unused)
    start = np.asarray(views.span_start_K)
    insert_at = [rng.integers(0, max(s - before, 0) + 1) for s in start]
    views = views.replace(insert_at_K=jnp.asarray(insert_at, jnp.int32), branch=BRANCH)
    return views.replace(hint_length_K=jnp.zeros_like(views.hint_length_K)) if empty else views


def draw(seed, **knobs):
    rollout = examples.random_rollout(seed, B=B, T=T)
    return rollout.replace(views=draw_views(seed, rollout, **knobs), value_BT=None)


def credit_of(rollout, name="forward_kl"):
    weight_K = rollout.views.weight_K * rollout.views.polarity_K
    divergence = base.Divergence(name=name, temperature=TEMPERATURE)
    return base.Credit(jnp.zeros_like(rollout.logp_BT), view_weight_K=weight_K, divergence=divergence)


def loss_of(params, teacher, rollout, nudge=0.0, name="forward_kl"):
    """nudge: added to the student's states, to see which of them count."""
    hidden, credit = annotate.hidden_states(params, CONFIG, rollout) + nudge, credit_of(rollout, name)
    read = views_lib.teacher_states(params if teacher is None else teacher, CONFIG, rollout, U)
    return update.feedback_loss(params, teacher, CONFIG, hidden, read, rollout, credit, OBJECTIVE)[0]


@jax.jit
def live(params, rollout):
    """(loss, gradient) of each divergence with the policy itself as the teacher."""
    return {name: jax.value_and_grad(functools.partial(loss_of, name=name))(params, None, rollout) for name in NAMES}


@jax.jit
def frozen(params, teacher, rollout):
    """(loss, gradients on the policy, on the teacher and on the student's states [B, T, D])."""
    nudge = jnp.zeros((B, T, CONFIG.width))
    return jax.value_and_grad(loss_of, (0, 1, 3))(params, teacher, rollout, nudge)


WINDOWED = tiny.config(layers=2, window=4)
teacher_states = jax.jit(functools.partial(views_lib.teacher_states, config=WINDOWED, span=U))


# --- re-reading ------------------------------------------------------------------------------------------------------

reread = jax.jit(views_lib.reread)
span_tokens = jax.jit(views_lib.span_tokens, static_argnums=2)


def spliced(rollout, k):
    """The row that view k reads, as a list; [] for an unused view."""
    v = jax.tree.map(np.asarray, rollout.views)
    at, end = v.insert_at_K[k], v.span_start_K[k] + v.span_length_K[k]
    trunk = np.asarray(rollout.tokens_BT)[v.rollout_K[k]].tolist()
    return trunk[:at] + v.hint_KN[k][: v.hint_length_K[k]].tolist() + trunk[at:end] if v.span_length_K[k] else []


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), empty=st.booleans())
def test_a_reread_row_is_the_trunk_with_the_hint_spliced_in(seed, empty):
    rollout = draw(seed, empty=empty)
    tokens, length = (np.asarray(x) for x in reread(rollout.tokens_BT, rollout.views))
    for k in range(K):
        want = spliced(rollout, k)
        assert tokens.shape[1] >= len(want) == length[k]
        assert tokens[k].tolist() == want + [0] * (tokens.shape[1] - len(want))


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_T37_sentinel_every_span_token_stands_right_behind_the_state_that_predicts_it(seed):
    rollout = draw(seed)
    rollout = rollout.replace(tokens_BT=jnp.arange(B * T, dtype=jnp.int32).reshape(B, T))  # one word per place
    views = rollout.views.replace(hint_KN=1000 + jnp.arange(K * N, dtype=jnp.int32).reshape(K, N))
    tokens, _ = reread(rollout.tokens_BT, views)
    found = np.asarray(span_tokens(rollout.tokens_BT, views, U))
    v = jax.tree.map(np.asarray, views)
    for k in np.flatnonzero(v.span_length_K):
        for u in range(v.span_length_K[k]):
            place = v.span_start_K[k] + u
            assert found[k, u] == v.rollout_K[k] * T + place
            assert tokens[k, v.span_start_K[k] + v.hint_length_K[k] + u] == found[k, u]


# --- the loss against reading rows apart -----------------------------------------------------------------------------


@jax.jit
def log_probs(params, tokens, length):
    """Log-probs of the next word at every place of whole rows, with the cap and the temperature inside."""
    rollout = examples.rollout([[examples.prompt(1)]] * K, T=T + N, S=1)
    segments = rollout.segments.replace(length_BS=length[:, None])
    states = annotate.hidden_states(params, CONFIG, rollout.replace(tokens_BT=tokens, segments=segments))
    logits = states @ params["embed"]["embedding"].T
    return jax.nn.log_softmax(CONFIG.logit_soft_cap * jnp.tanh(logits / CONFIG.logit_soft_cap) / TEMPERATURE)


def predictions(params, rows):
    tokens, length = np.zeros((K, T + N), np.int32), np.array([len(row) for row in rows])
    for k, row in enumerate(rows):
        tokens[k, : len(row)] = row
    return np.asarray(log_probs(params, tokens, length), np.float64)


def by_hand(rollout, teacher_params):
    """The loss of each divergence, one view, one token at a time: {name: loss}, and log T of the sampled tokens."""
    v = jax.tree.map(np.asarray, rollout.views)
    trunk = [np.asarray(rollout.tokens_BT)[row].tolist() for row in v.rollout_K]
    student, teacher = predictions(PARAMS, trunk), predictions(teacher_params, [spliced(rollout, k) for k in range(K)])
    total, sampled = dict.fromkeys(NAMES, 0.0), np.zeros((K, U))
    for k in range(K):
        scored = [t for t in range(v.span_start_K[k], v.span_start_K[k] + v.span_length_K[k]) if t > 0]
        for t in scored:
            log_s, log_t = student[k, t - 1], teacher[k, t - 1 + v.hint_length_K[k]]
            log_m, y = np.logaddexp(log_s, log_t) - np.log(2), trunk[k][t]
            values = {
                "forward_kl": np.exp(log_t) @ (log_t - log_s),
                "reverse_kl": np.exp(log_s) @ (log_s - log_t),
                "jsd": (np.exp(log_s) @ (log_s - log_m) + np.exp(log_t) @ (log_t - log_m)) / 2,
                "sampled": -(log_t[y] - log_s[y]) * log_s[y],
            }
            sampled[k, t - v.span_start_K[k]] = log_t[y]
            for name in NAMES:
                total[name] += v.weight_K[k] * v.polarity_K[k] * values[name] / len(scored)
    return total, sampled


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_loss_is_that_of_reading_every_spliced_row_apart(seed):
    rollout = draw(seed, unused=0.1)
    assert (np.asarray(rollout.views.polarity_K) < 0).any() or seed
    want, sampled = by_hand(rollout, PARAMS)
    for name, (loss, _) in live(PARAMS, rollout).items():
        np.testing.assert_allclose(loss, want[name], rtol=1e-4, atol=1e-5, err_msg=name)
    want, other = by_hand(rollout, OTHER)
    np.testing.assert_allclose(frozen(PARAMS, OTHER, rollout)[0], want["forward_kl"], rtol=1e-4, atol=1e-5)
    knobs = dict(config=CONFIG, columns=("view_logp_KU",), temperature=TEMPERATURE, span=U)
    column = annotate.annotate(PARAMS, rollout, teacher=OTHER, **knobs).view_logp_KU
    np.testing.assert_allclose(column, other, atol=1e-5)
    assert not np.allclose(sampled, other)


def test_a_span_at_the_very_start_has_no_prediction_for_its_first_token():
    rollout = draw(0)
    v = rollout.views
    first = jnp.arange(K) == 0
    views = v.replace(
        insert_at_K=jnp.where(first, 0, v.insert_at_K), span_start_K=jnp.where(first, 0, v.span_start_K),
        span_length_K=jnp.where(first, 3, v.span_length_K), weight_K=first.astype(jnp.float32), polarity_K=jnp.ones(K),
    )  # fmt: skip
    rollout = rollout.replace(views=views)
    want, _ = by_hand(rollout, PARAMS)
    np.testing.assert_allclose(live(PARAMS, rollout)["forward_kl"][0], want["forward_kl"], rtol=1e-4)
    assert views_lib.span_mask(views, U)[0].tolist() == [False, True, True, False]


# --- METHODS 0.5 -----------------------------------------------------------------------------------------------------


def test_a_live_teacher_with_an_empty_hint_pulls_nowhere():
    found = live(PARAMS, draw(3, empty=True))  # forced: `build` makes no view of an empty hint
    for name, (loss, grads) in found.items():
        np.testing.assert_allclose(loss, 0.0, atol=1e-5, err_msg=name)
        for path, grad in tiny.leaves(grads).items():
            np.testing.assert_allclose(grad, 0.0, atol=2e-5, err_msg=f"{name} {path}")


def test_b_a_hint_that_no_one_attends_to_changes_nothing():
    """Catches a gather that is off by the hint's length: without attention a state knows its own token only."""
    deaf = tiny.copy(PARAMS)
    deaf["layers"][0]["attention"]["o"] = jnp.zeros_like(deaf["layers"][0]["attention"]["o"])
    rollout = draw(4, before=True)
    for name, (loss, _) in live(deaf, rollout).items():
        np.testing.assert_allclose(loss, 0.0, atol=1e-5, err_msg=name)
    assert abs(live(PARAMS, rollout)["forward_kl"][0]) > 1e-3


def test_c_states_outside_the_span_do_not_matter():
    rollout = draw(5)
    _, (_, _, grad) = frozen(PARAMS, OTHER, rollout)
    v, inside = jax.tree.map(np.asarray, rollout.views), np.zeros((B, T), bool)
    for k in np.flatnonzero(v.weight_K):
        inside[v.rollout_K[k], v.span_start_K[k] - 1 : v.span_start_K[k] - 1 + v.span_length_K[k]] = True
    np.testing.assert_array_equal(np.asarray(grad).any(axis=-1), inside)


def test_d_T45_without_spans_the_loss_is_zero_and_attached():
    rollout = draw(6, unused=1.1)
    assert not rollout.views.span_length_K.any()
    for name, (loss, grads) in live(PARAMS, rollout).items():
        assert float(loss) == 0.0, name
        for path, grad in tiny.leaves(grads).items():
            assert grad.shape == tiny.leaves(PARAMS)[path].shape and not grad.any(), (name, path)


def test_e_the_teacher_has_no_gradient_and_a_live_one_none_through_its_own_reading():
    rollout = draw(7)
    loss, (grads, teacher_grads, _) = frozen(PARAMS, PARAMS, rollout)
    assert not any(grad.any() for grad in tiny.leaves(teacher_grads).values())
    live_loss, live_grads = live(PARAMS, rollout)["forward_kl"]
    np.testing.assert_allclose(live_loss, loss, rtol=1e-6)
    tiny.assert_close(live_grads, grads, rtol=1e-4, atol=1e-6)


def test_an_empty_hint_from_another_teacher_is_a_pull_to_that_teacher():
    loss, _ = frozen(PARAMS, OTHER, draw(3, empty=True))
    assert abs(loss) > 1e-2


def test_j_padding_and_capacities_change_nothing():
    rollout = draw(8)
    views = rollout.views

    def one_more(x, fill):
        x = np.asarray(x).reshape(B, PER, *np.shape(x)[1:])
        return jnp.asarray(
            np.concatenate([x, np.full_like(x[:, :1], fill)], axis=1).reshape(B * (PER + 1), *x.shape[2:])
        )

    wider = jax.tree.map(lambda x: one_more(x, 0), views)
    wider = wider.replace(
        rollout_K=jnp.repeat(jnp.arange(B), PER + 1), hint_KN=jnp.pad(wider.hint_KN, ((0, 0), (0, 3)))
    )
    names = ("tokens_BT", "logp_BT", "ref_logp_BT", "kept_mass_BT")
    pad = {name: jnp.pad(getattr(rollout, name), ((0, 0), (0, 4)), constant_values=9) for name in names}
    got = jax.jit(loss_of)(PARAMS, OTHER, rollout.replace(views=wider, **pad))
    np.testing.assert_allclose(got, frozen(PARAMS, OTHER, rollout)[0], rtol=1e-5)


@pytest.mark.parametrize("knobs", [{"seed": 8}, {"seed": 3, "empty": True}], ids=["hinted", "empty"])
def test_packed_branches_are_views_read_apart(knobs):
    rollout = draw(**knobs)
    apart = rollout.replace(views=rollout.views.replace(branch=0))
    a, b = (teacher_states(tiny.params(WINDOWED), rollout=r) for r in (rollout, apart))
    mask = np.asarray(views_lib.span_mask(rollout.views, U))
    assert mask.sum() > K
    np.testing.assert_allclose(np.asarray(a)[mask], np.asarray(b)[mask], atol=1e-5)


def test_k_the_order_of_rollouts_and_views_changes_nothing():
    rollout = draw(9)
    order = np.array([2, 0, 3, 1])
    rows_K = (order[:, None] * PER + np.arange(PER)[::-1]).ravel()
    moved = jax.tree.map(lambda x: x[order], rollout.replace(views=None))
    views = jax.tree.map(lambda x: x[rows_K], rollout.views).replace(rollout_K=rollout.views.rollout_K)
    a, b = (frozen(PARAMS, OTHER, r)[0] for r in (rollout, moved.replace(views=views)))
    np.testing.assert_allclose(a, b, rtol=1e-5)


def test_T37_hints_are_in_no_mask_no_length_and_no_denominator():
    rollout = draw(10)
    bare, v = rollout.replace(views=None), jax.tree.map(np.asarray, rollout.views)
    np.testing.assert_array_equal(rollout.mask_BT, bare.mask_BT)
    np.testing.assert_array_equal(rollout.length_B, bare.length_B)
    weights = [update.token_weights(r, OBJECTIVE) for r in (rollout, bare)]
    np.testing.assert_array_equal(*weights)
    mask = np.asarray(views_lib.span_mask(rollout.views, U))
    np.testing.assert_array_equal(mask.sum(axis=1), v.span_length_K)
    branches = [len(spliced(rollout, k)) - v.insert_at_K[k] for k in range(K) if v.span_length_K[k]]
    assert views_lib.extra_tokens(rollout.views) == sum(branches)


# --- whose weights ---------------------------------------------------------------------------------------------------


def test_T43_an_ema_moves_by_its_rate():
    tree = {"w": jnp.ones(2)}
    moved = teacher_lib.advance("ema", tree, {"w": jnp.zeros(2)}, 1, rate=0.05, every=0)
    np.testing.assert_allclose(moved["w"], 0.95)
    for rate, want in ((0.0, 1.0), (1.0, 0.0)):  # frozen, live
        np.testing.assert_allclose(
            teacher_lib.advance("ema", tree, {"w": jnp.zeros(2)}, 1, rate=rate, every=0)["w"], want
        )


def test_kinds_of_teachers():
    params = {"w": jnp.arange(3.0)}
    assert teacher_lib.init("live", params) is None
    for kind in ("ema", "frozen", "snapshot"):
        made = teacher_lib.init(kind, params)
        tiny.assert_close(made, params)
        assert made["w"] is not params["w"]  # an update may consume the policy
    old, new = {"w": jnp.zeros(3)}, {"w": jnp.ones(3)}
    for kind in teacher_lib.KINDS:  # a variant without views has no teacher, whatever kind the config names
        assert teacher_lib.advance(kind, None, new, 1, rate=0.5, every=3) is None
    assert teacher_lib.advance("frozen", old, new, 3, rate=0.5, every=3) is old
    copied = [
        int(teacher_lib.advance("snapshot", old, new, jnp.int32(s), rate=0, every=3)["w"][0]) for s in range(1, 7)
    ]
    assert copied == [0, 0, 1, 0, 0, 1]
    with pytest.raises(base.InputError, match="feedback.teacher='late' is no teacher"):
        teacher_lib.init("late", params)
