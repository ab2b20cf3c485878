"""Mutation testing: what counts as a mutant, and that one is applied, caught, or survives."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import mutant_worker, mutants, mutate_credit
from rsi_jax import base, returns


def changed(body, kind=None):
    """The mutated lines of a function with this body."""
    source = "def f(x, mask):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    found = mutants.of_module("m", source)
    for mutant in found:
        assert mutant.apply(source) != source
        compile(mutant.apply(source), "m", "exec")
    return [mutant.lines(source)[1] for mutant in found if kind in (None, mutant.kind)]


@pytest.mark.parametrize(
    ("kind", "line", "want"),
    [
        ("sign", "return a + b", ["return (a - (b))"]),
        ("sign", "return a - b", ["return (a + (b))"]),
        ("sign", "x = a / b\nreturn x", ["x = (-(a / b))"]),
        ("sign", "return -x", ["return (x)"]),
        ("sign", "return x > 0", ["return (x < 0)"]),
        ("sign", "return x == 0", []),
        ("mask", "return jnp.where(mask, x, 0.0)", ["return (x)"]),
        ("mask", "return masked.zero(x, mask)", ["return (x)"]),
        ("mask", "return a & b", ["return (a)", "return (b)"]),
        ("mask", "a &= b", ["a = b", "pass"]),
        ("mask", "return masked.mean(x, mask, axis=1)", ["return masked.mean(x, jnp.ones_like(mask), axis=1)"]),
        ("shift", "return x[0] + last + 1", ["return x[1] + last + 1", "return (x[0] + last)"]),
        ("shift", "return x[1:]", ["return x[:]", "return x[0:]"]),
        ("shift", "return jnp.roll(x, 1)", ["return jnp.roll(x, 0)"]),
        ("shift", "return jnp.pad(x, (0, 1))", ["return jnp.pad(x, (1, 0))", "return jnp.pad(x, (1, 1))"]),
        ("shift", "return jnp.zeros(x.shape[0])", []),
        ("mean", "return jnp.mean(x)", ["return jnp.sum(x)"]),
        ("mean", "return masked.group_sum(x, g, w)", ["return masked.group_mean(x, g, w)"]),
        ("mean", "return x / jnp.maximum(size_B, 1.0)", ["return (x)"]),
        ("gradient", "return jax.lax.stop_gradient(x)", ["return (x)"]),
    ],
)
def test_each_kind_of_mistake(kind, line, want):
    got = changed(line, kind)
    assert [text for text in want if text not in got] == []
    assert want or not got


def test_checks_docstrings_and_metrics_are_left_alone():
    body = '''"""x + 1"""
chex.assert_rank(x - 1, 2)
if x - 1 > 0:
    raise ValueError(f"{x + 1}")
spread = x - 1
twice = spread + spread
metrics = {"spread": twice - 1}
metrics["more"] = -x
return Credit(adv=x, metrics={**metrics, "n": x - 1})'''
    assert changed(body) == []
    assert changed(body.replace("adv=x", "adv=spread")) == ["spread = (x)", "spread = (x + (1))"]


def test_the_table_covers_the_code_and_each_mutant_of_it_compiles():
    jobs, equivalent = mutate_credit.without_equivalents(mutate_credit.all_jobs())
    assert {"masked", "returns", "credit.group", "losses.policy"} <= {job.mutant.module for job in jobs}
    assert {job.mutant.kind for job in jobs} == set(mutants.KINDS)
    assert not {job.digest for job in jobs} & {job.digest for job, _ in equivalent}
    for job in jobs:
        assert mutant_worker.code_of(job.mutant.apply(job.source), job.mutant.function)


def test_an_equivalent_that_is_no_mutant_any_more_is_an_error(monkeypatch):
    gone = (("returns.gae", "x", "y", "why"),)
    monkeypatch.setattr(mutate_credit.equivalent_mutants, "EQUIVALENT", gone)
    with pytest.raises(base.InputError, match=r"no mutant of returns\.gae"):
        mutate_credit.without_equivalents(mutate_credit.all_jobs())


def mutated(function, kind, after):
    """The job whose mutated line ends with `after`."""
    found = [job for job in mutate_credit.all_jobs() if job.mutant.function == function and job.mutant.kind == kind]
    (job,) = [job for job in found if job.mutant.lines(job.source)[1].endswith(after)]
    return job


def test_a_mutant_stands_in_for_the_function_under_every_name_and_is_taken_back():
    job = mutated("leave_one_out", "shift", "others = (jnp.sum(mask_G))")
    leave_one_out, value = returns.leave_one_out, jnp.asarray([1.0, 0, 0, 0])
    want = [0, 1 / 3, 1 / 3, 1 / 3]
    with mutant_worker.applied("returns", "leave_one_out", job.mutant.apply(job.source)):
        np.testing.assert_allclose(leave_one_out(value), [0, 1 / 4, 1 / 4, 1 / 4])
    np.testing.assert_allclose(leave_one_out(value), want, atol=1e-7)
    with (
        pytest.raises(ValueError, match="the code of the original"),
        mutant_worker.applied("returns", "leave_one_out", job.source),
    ):
        pass


def test_a_result_holds_as_long_as_the_tests_it_rests_on():
    job = next(job for job in mutate_credit.all_jobs() if job.mutant.module == "losses.policy")
    first, second = (job.proof(f"{file}::test") for file in job.files[:2])
    assert len({first, second, job.proof(None)}) == 3  # what survives rests on all of them
    assert job.proof("the mutant takes too long") == job.proof(None)


@pytest.mark.slow
def test_a_mistake_is_caught_and_what_changes_nothing_survives():
    wrong = mutated("leave_one_out", "shift", "others = (jnp.sum(mask_G))")
    same = mutated("leave_one_out", "mask", ", (mask_G))")  # without others, the sum of the others is 0 already
    worker = mutate_credit.Worker([("returns", "leave_one_out")], timeout=60.0)
    try:
        caught, survived = worker.run(wrong), worker.run(same)
    finally:
        worker.stop()
    assert caught["caught"] == "tests/test_returns.py::test_leave_one_out_averages_the_others"
    assert survived["caught"] is None and survived["tests"] == 1
