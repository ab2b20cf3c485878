"""The rows that attention is timed on are what they are called, and the command ends with its JSON line."""

import json

import numpy as np
import pytest

from experiments import bench, bench_attention


def pairs(ranges_4T):
    lo1, hi1, lo2, hi2 = ranges_4T[:, :, None]
    k = np.arange(ranges_4T.shape[1])
    return ((lo1 <= k) & (k < hi1)) | ((lo2 <= k) & (k < hi2))


@pytest.mark.parametrize("tokens", [33, 600, 1000])
def test_rows_are_what_they_are_called(tokens):
    rows = bench_attention.ranges_of(tokens)
    causal = np.tril(np.ones((tokens, tokens), bool))
    shown = {name: pairs(ranges) for name, ranges in rows.items()}
    np.testing.assert_array_equal(shown["causal"], causal)
    np.testing.assert_array_equal(shown["window"], np.triu(causal, 1 - bench_attention.WINDOW))
    first = shown["packed"].argmax(1)
    assert len(set(first)) == bench_attention.SEQUENCES and not (shown["packed"] & ~causal).any()
    assert (shown["packed"].sum(1) == np.arange(tokens) + 1 - first).all()
    trunk, branches = tokens // 2, shown["branches"][tokens // 2 :]
    np.testing.assert_array_equal(shown["branches"][:trunk], causal[:trunk])
    prefix = branches[:, :trunk].sum(1)
    assert len(set(prefix)) == bench_attention.BRANCHES and (np.diff(prefix) >= 0).all() and 0 < prefix[0]
    own = branches[:, trunk:].sum(1)
    assert (np.diff(own)[np.diff(prefix) == 0] == 1).all() and (own[1:][np.diff(prefix) > 0] == 1).all() and own[0] == 1
    for name, ranges in rows.items():
        assert bench_attention.visible_share(ranges) == pytest.approx(shown[name].mean())


def test_ratios_are_to_chunked_of_the_same_pass():
    found = {
        ("chunked", "forward"): bench.Timing(None, 0.0, 2.0, 4.0, 1),
        ("reference", "forward"): bench.Timing(None, 0.0, 6.0, 2.0, 9),
    }
    lines = bench_attention.results("causal", 0.5, found)
    assert [line["wall_over_chunked"] for line in lines] == [1.0, 3.0]
    assert [line["cpu_over_chunked"] for line in lines] == [1.0, 0.5]


def test_the_command_ends_with_its_rows(capsys, monkeypatch):
    causal = {"causal": bench_attention.ranges_of(150)["causal"]}
    monkeypatch.setattr(bench_attention, "ranges_of", lambda tokens: causal)
    flags = ("--tokens=150", "--heads=2", "--kv_heads=1", "--head_size=4", "--repeats=1")
    bench_attention.FLAGS.values(["bench_attention", *flags])
    bench_attention.main([])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["program"], row["pass"]) for row in rows] == [
        (program, name) for program in ("chunked", "reference", "jax.nn") for name in ("forward", "with gradient")
    ]
    assert all(row["wall_ms"] > 0 and row["temp_mib"] > 0 for row in rows)
