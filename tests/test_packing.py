"""Packed rows: the trunk and every branch read as if each were read apart, at no gradient's cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rsi_jax import annotate, base, losses, packing
from rsi_jax.credit import examples
from rsi_jax.feedback import views as views_lib
from rsi_jax.model import transformer
from rsi_jax.train import update
from tests import tiny

B, T, PER, N, U, ROW = 5, 24, 4, 5, 6, 40
# Grouped heads, a window in all layers but the last, soft caps: whatever a row must not mix up.
CONFIG = tiny.config(layers=3, window=5, global_every=3, heads=4, kv_heads=2, value_head=True, attention_soft_cap=9.0)
PARAMS, OTHER = tiny.params(CONFIG, gain=1.0), tiny.params(CONFIG, 1, gain=1.0)


def draw_views(seed, rollout) -> base.Views:
    """Views anywhere: nested, adjacent, overlapping, equal spans; gaps; empty hints; at the very start and the end."""
    rng = np.random.default_rng(seed)
    length_K = np.repeat(np.asarray(rollout.length_B), PER)
    K = B * PER
    start_K = rng.integers(0, np.maximum(length_K, 1))
    start_K = np.where(rng.random(K) < 0.3, np.roll(start_K, 1), start_K)  # a span where another one begins
    start_K = np.minimum(start_K, np.maximum(length_K - 1, 0))
    span_K = np.where(length_K > 0, rng.integers(1, np.minimum(U, np.maximum(length_K - start_K, 1)) + 1), 0)
    span_K = np.where(rng.random(K) < 0.2, 0, span_K)
    insert_K = rng.choice([0, 1, 2], K)  # at the very start; at the span; anywhere before it
    insert_K = np.choose(insert_K, [np.zeros(K, int), start_K, rng.integers(0, start_K + 1)])
    hint_K = rng.choice([0, 1, N], K)
    longest = int((hint_K + start_K + span_K - insert_K).reshape(B, PER).sum(axis=1).max())
    return base.Views(
        rollout_K=jnp.repeat(jnp.arange(B), PER), insert_at_K=jnp.asarray(insert_K, jnp.int32),
        span_start_K=jnp.asarray(start_K, jnp.int32), span_length_K=jnp.asarray(span_K, jnp.int32),
        hint_KN=jnp.asarray(rng.integers(0, 60, (K, N)), jnp.int32), hint_length_K=jnp.asarray(hint_K, jnp.int32),
        source_K=jnp.zeros(K, jnp.int32), weight_K=jnp.asarray(span_K > 0, jnp.float32),
        polarity_K=jnp.asarray(rng.choice([-1.0, 1.0], K), jnp.float32), branch=-(-longest // 64) * 64,
    )  # fmt: skip


def draw(seed, views=draw_views) -> base.Rollout:
    """Rollouts of all lengths, one of them cut by its context at a sampled token, one empty now and then."""
    rollout = examples.random_rollout(seed, B=B, T=T, turns=4)
    segments = jax.tree.map(np.asarray, rollout.segments)
    length_BS = segments.length_BS.copy()
    if seed % 2:
        length_BS[2] = 0
    rollout = rollout.replace(segments=segments.replace(length_BS=length_BS))
    return jax.tree.map(jnp.asarray, rollout.replace(views=views(seed, rollout)))


def packed(rollout, plan, m):
    """The rollouts of a forward, and their rows in the batch."""
    credit = base.Credit(jnp.zeros_like(rollout.logp_BT))
    (part, _, _), rows_C = packing.forward(plan, rollout, credit, jnp.zeros_like(rollout.logp_BT), m)
    return part, np.asarray(rows_C)


read = jax.jit(functools.partial(views_lib.read, config=CONFIG))
pick = jax.jit(views_lib.span_states, static_argnums=3)
apart = jax.jit(functools.partial(views_lib.teacher_states, config=CONFIG, span=U))
alone = jax.jit(functools.partial(annotate.hidden_states, config=CONFIG))


def scored(rollout):
    return np.asarray(views_lib.span_mask(rollout.views, U))


@pytest.mark.parametrize("seed", range(6))
def test_one_row_with_branches_is_every_view_read_apart(seed):
    rollout = draw(seed)
    want = apart(PARAMS, rollout=rollout.replace(views=rollout.views.replace(branch=0)))
    hidden, branches = read(PARAMS, rollout=rollout)
    mask = scored(rollout)
    assert mask.sum() > B * PER
    got = pick(hidden, branches, rollout, U)
    np.testing.assert_allclose(np.asarray(got)[mask], np.asarray(want)[mask], rtol=1e-5, atol=1e-5)
    used = np.arange(T) < np.asarray(rollout.length_B)[:, None]
    np.testing.assert_allclose(
        np.asarray(hidden)[used], np.asarray(alone(PARAMS, rollout=rollout))[used], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rows", [1, 2])
def test_rollouts_that_share_a_row_read_as_if_each_were_alone(seed, rows):
    rollout = draw(seed)
    plan = packing.plan(jax.tree.map(np.asarray, rollout), tokens=ROW, rows=rows)
    want = np.asarray(apart(PARAMS, rollout=rollout.replace(views=rollout.views.replace(branch=0))))
    student = np.asarray(views_lib.student_states(alone(PARAMS, rollout=rollout), rollout, U))
    logp = np.asarray(annotate.score_rollout(PARAMS, rollout, config=CONFIG)[0])
    mask, seen = scored(rollout), []
    assert plan.used < np.count_nonzero(rollout.length_B)
    for m in range(plan.used):
        part, rows_C = packed(rollout, plan, m)
        hidden, branches = read(PARAMS, rollout=part)
        found = np.asarray(pick(hidden, branches, part, U))
        trunk = np.asarray(views_lib.student_states(hidden, part, U))
        part_logp = np.asarray(annotate.score_rollout(PARAMS, part, config=CONFIG)[0])
        for c, b in enumerate(rows_C):
            mine = slice(c * PER, (c + 1) * PER)
            if b == B:
                assert not part.length_B[c] and not scored(part)[mine].any()
                continue
            seen.append(b)
            theirs = slice(b * PER, (b + 1) * PER)
            np.testing.assert_allclose(found[mine][mask[theirs]], want[theirs][mask[theirs]], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(trunk[mine][mask[theirs]], student[theirs][mask[theirs]], rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(part_logp[c], logp[b], rtol=1e-5, atol=1e-5)
    assert sorted(seen) == np.flatnonzero(rollout.length_B).tolist()


OBJECTIVE = update.Objective(span=U, kl_coef=0.1, entropy_coef=0.01, chunk=16)


@functools.partial(jax.jit, static_argnames="objective")
def gradients(teacher, rollout, credit, plan=None, objective=OBJECTIVE):
    return update.gradients(PARAMS, teacher, CONFIG, rollout, credit, objective, plan)


def credit_of(seed, rollout):
    rng = np.random.default_rng(seed)
    adv, target = (jnp.where(rollout.mask_BT, jnp.asarray(rng.normal(size=(B, T)), jnp.float32), 0.0) for _ in range(2))
    weight_K = rollout.views.weight_K * rollout.views.polarity_K
    return base.Credit(adv, target, weight_K, base.Divergence("jsd", top_k=0))


def assert_same(got, want, **bound):
    tiny.assert_close((got[0], got[1], got[3], got[4]), (want[0], want[1], want[3], want[4]), **bound)
    tiny.assert_close(losses.summarise(got[2]), losses.summarise(want[2]), **bound)


@pytest.mark.parametrize("teacher", [None, OTHER], ids=["live", "other"])
def test_a_packed_update_is_the_update_of_a_row_each(teacher):
    for seed in (0, 1):
        rollout = draw(seed)
        credit = credit_of(seed, rollout)
        plan = packing.plan(jax.tree.map(np.asarray, rollout), tokens=ROW)
        whole = gradients(teacher, rollout, credit)
        assert all(float(norm(g)) > 1e-3 for g in whole[0])
        assert_same(gradients(teacher, rollout, credit, plan), whole, rtol=2e-4, atol=2e-5)


def norm(tree):
    return np.sqrt(sum(float(np.sum(np.square(x))) for x in tiny.leaves(tree).values()))


def test_a_live_teacher_is_the_policy_frozen_where_it_stands_and_remat_changes_nothing():
    rollout = draw(3)
    credit = credit_of(3, rollout)
    live = gradients(None, rollout, credit)
    assert_same(gradients(PARAMS, rollout, credit), live, rtol=2e-4, atol=2e-5)
    for keep in ("layer", "attention"):
        less = dataclasses.replace(OBJECTIVE, remat=transformer.Remat(keep))
        assert_same(gradients(None, rollout, credit, objective=less), live, rtol=2e-4, atol=2e-5)


def test_no_gradient_reaches_a_branch_nor_the_trunk_through_one():
    rollout = draw(4)

    def total(params):
        _, branches = views_lib.read(params, CONFIG, rollout)
        return jnp.sum(jnp.sin(branches))

    for path, grad in tiny.leaves(jax.jit(jax.grad(total))(PARAMS)).items():
        assert not grad.any(), path


def flops(fn) -> float:
    return jax.jit(fn).lower(PARAMS).compile().cost_analysis()["flops"]


@pytest.mark.parametrize("keep", ["none", "layer"])
def test_a_gradient_costs_what_the_trunks_does_and_one_forward_of_the_branches(keep):
    rollout, remat = draw(5), transformer.Remat(keep)
    config = dataclasses.replace(CONFIG, attention="reference")  # without loops, of which the compiler counts one turn

    def trunk(params):
        return jnp.sum(jnp.sin(annotate.hidden_states(params, config, rollout, remat=remat)))

    def both(params):
        hidden, branches = views_lib.read(params, config, rollout, remat=remat)
        return jnp.sum(jnp.sin(hidden)), branches

    forward = flops(both) - flops(trunk)
    assert forward > 0.5 * flops(trunk)
    cost = flops(jax.grad(both, has_aux=True))
    assert cost <= 1.02 * (flops(jax.grad(trunk)) + forward)


# --- rows by a budget of tokens --------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(9, 30))
def test_first_fit_puts_every_rollout_in_one_row_that_holds_it(lengths, tokens):
    lengths = np.array(lengths, int)
    rows = packing.first_fit(lengths, tokens)
    assert sorted(sum(rows, [])) == np.flatnonzero(lengths).tolist()
    sums = [lengths[row].sum() for row in rows]
    assert all(0 < s <= tokens for s in sums)
    assert sum(2 * s <= tokens for s in sums) <= 1  # two rows half empty would have been one
    assert len(rows) <= 11 / 9 * -(-lengths.sum() // tokens) + len(rows) * 0.5 + 1


def test_a_rollout_longer_than_a_row_is_named():
    rollout = jax.tree.map(np.asarray, draw(0))
    longest = int(np.argmax(rollout.length_B))
    with pytest.raises(base.InputError, match=rf"rollout {longest} has \d+ tokens: raise rl.row_tokens=3"):
        packing.plan(rollout, tokens=3)


def test_positions_begin_anew_and_padding_sees_nothing():
    rollout = draw(2)
    plan = packing.plan(jax.tree.map(np.asarray, rollout), tokens=ROW)
    part, rows_C = packed(rollout, plan, 0)
    rows = jax.tree.map(np.asarray, packing.trunk_rows(part))
    place = 0
    for b in rows_C[rows_C < B]:
        n = int(rollout.length_B[b])
        mine = slice(place, place + n)
        np.testing.assert_array_equal(rows.tokens_BT[0, mine], np.asarray(rollout.tokens_BT)[b, :n])
        np.testing.assert_array_equal(rows.positions_BT[0, mine], np.arange(n))
        np.testing.assert_array_equal(rows.ranges.lo2[0, mine], place)
        np.testing.assert_array_equal(rows.ranges.hi2[0, mine], place + np.arange(n) + 1)
        place += n
    assert place < ROW and not rows.ranges.hi2[0, place:].any()


def test_columns_scored_a_few_rollouts_at_a_time_are_those_of_all():
    rollout = jax.tree.map(np.asarray, draw(6))
    names = ("policy_logp_BT", "view_logp_KU")

    def score(part):
        scored = annotate.annotate(PARAMS, part, config=CONFIG, columns=names, span=U)
        return {name: getattr(scored, name) for name in names}

    whole = packing.in_parts(score, rollout, B, 0)
    for most in (1, 2, B):
        tiny.assert_close(packing.in_parts(score, rollout, B, most), whole, atol=1e-5)
    assert np.count_nonzero(whole["view_logp_KU"]) == scored(rollout).sum()
