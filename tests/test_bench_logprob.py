"""The benchmark of the vocabulary ops: its programs are one function, and its row says what was measured."""

import jax
import numpy as np
import pytest

from experiments import bench_logprob
from experiments.bench_logprob import AT_ONCE, CHECKPOINT, DIVERGENCE, OP, OPTAX


@pytest.fixture(scope="module")
def graded():
    drawn = bench_logprob.states(256, 8, 50)
    programs = bench_logprob.programs(chunk=64)
    return {name: jax.jit(jax.value_and_grad(program, (0, 1)))(*drawn) for name, program in programs.items()}


def test_the_competitors_compute_the_same_numbers(graded):
    for name in (CHECKPOINT, OP):
        for a, b in zip(jax.tree.leaves(graded[name]), jax.tree.leaves(graded[AT_ONCE]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=name)


def test_the_sums_are_those_of_float64(graded):
    hidden_ND, unembed_DV, target_N, teacher_ND = bench_logprob.states(256, 8, 50)
    logp_N, entropy_N, *slopes = bench_logprob.in_float64(hidden_ND, unembed_DV, target_N)
    np.testing.assert_allclose(graded[AT_ONCE][0], logp_N.sum() + entropy_N.sum(), rtol=1e-5)
    np.testing.assert_allclose(graded[OPTAX][0], logp_N.sum(), rtol=1e-5)
    for a, b in zip(graded[AT_ONCE][1], slopes, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    teacher, student = (np.float64(x) @ unembed_DV for x in (teacher_ND, hidden_ND))
    t, s = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (teacher, student))
    np.testing.assert_allclose(graded[DIVERGENCE][0], np.sum(np.exp(t) * (t - s)), rtol=1e-5)


def test_a_row_names_what_was_measured(capsys):
    row = bench_logprob.measure(tokens=256, width=8, vocab=600, chunk=16, repeats=1)
    assert (row["tokens"], row["width"], row["vocab"]) == (256, 8, 600)
    assert row["memory_ratio"] < 0.25 and row["max_abs_err"] < 1e-4
    assert all(row[name] > 0 for name in ("time_ratio", "checkpoint_ratio", "divergence_ratio"))
    table = capsys.readouterr().out
    assert all(name in table for name in (AT_ONCE, OPTAX, CHECKPOINT, OP, DIVERGENCE))
