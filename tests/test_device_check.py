"""The device check, on a CPU: its float64 references agree with the ops, and an op that is a little wrong is found."""

import json
import subprocess
import sys

import numpy as np
import pytest

from experiments import device_check, device_oracles
from rsi_jax.kernels import attention
from rsi_jax.kernels.attention import api


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(device_check, "SHAPES", ((1, 45, 4, 2, 8, 0.0), (2, 37, 2, 2, 8, 3.0)))


def test_references_and_ops_agree(small):
    rows = [row for op in device_check.OPS for row in device_check.checks(op, "cpu", 5)]
    assert {row["op"] for row in rows} == set(device_check.OPS) and len(rows) == 2 * 2 + 2 + 2
    assert all(row["ok"] and 0 < row["error"] <= row["tolerance"] for row in rows)


@pytest.mark.parametrize("fault", ["scale", "mask", "unwritten"])
def test_an_op_that_is_a_little_wrong_is_found(small, monkeypatch, fault):
    right = api.IMPLEMENTATIONS["chunked"]

    def wrong(q, k, v, ranges, *, scale, soft_cap):
        if fault == "mask":
            ranges = attention.Ranges(ranges[0], ranges[1] + 1, *ranges[2:])
        out, lse = right(q, k, v, ranges, scale=scale * (1.03 if fault == "scale" else 1), soft_cap=soft_cap)
        return (out.at[:, -1].set(np.nan) if fault == "unwritten" else out), lse

    monkeypatch.setitem(api.IMPLEMENTATIONS, "chunked", wrong)
    assert not any(row["ok"] for row in device_check.check_attention("cpu", 5))


def test_padding_and_branches_are_among_the_ranges():
    lo1, hi1, lo2, hi2 = device_check.branch_ranges(np.random.default_rng(0), 2, 60)
    empty = (hi1 <= lo1) & (hi2 <= lo2)
    assert empty.any() and (hi1 > lo1).any() and np.all((hi1 <= lo2) | (hi1 <= lo1))
    assert np.all(hi2[~empty] == np.broadcast_to(np.arange(60) + 1, empty.shape)[~empty])


def test_relative_error_by_hand():
    error = device_oracles.relative_error
    assert error([1.0, -np.inf, 3.5], [1.0, -np.inf, 4.0]) == 0.125
    assert error([np.nan, 1.0], [0.0, 1.0]) == error([0.0], [-np.inf]) == float("inf") and error([0.0], [0.0]) == 0


def test_without_an_accelerator_it_says_so():
    done = subprocess.run([sys.executable, "-m", "experiments.device_check"], capture_output=True, text=True)
    assert done.returncode == 0
    line = json.loads(done.stdout.splitlines()[-1])
    assert "no accelerator" in line["skipped"] and line["device"]
