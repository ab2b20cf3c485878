"""A training run in packed rows, with layers recomputed, is the run of a row each."""

import functools
import json

import jax
import numpy as np
import pytest

from rsi_jax import base, sharding, train
from rsi_jax.train import present, setup
from tests.test_train_app import tiny


@pytest.mark.slow
def test_a_step_in_packed_rows_with_layers_recomputed_is_the_step_of_a_row_each(tmp_path, monkeypatch):
    one_device = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(setup.sharding, "make_mesh", one_device)
    found = []
    for name, row_tokens, keep in (("plain", 0, "none"), ("packed", 200, "attention")):
        config = tiny(tmp_path / name)
        config.feedback.update(teacher="live", branch_tokens=0)
        config.rl.update(updates=1, row_tokens=row_tokens)
        config.compute.update(remat=keep, offload=bool(row_tokens))
        folder = present.open_folder(config, name=name)
        train.run(config, folder)
        found.append(json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]))
    plain, packed = found
    assert plain["stage"] == packed["stage"] == "rl" and plain["views"] > 0
    same = (
        "policy_loss feedback_loss divergence grad_norm/outcome grad_norm/feedback grad_cosine entropy feedback/delta"
    )
    for name in (*same.split(), "views", "ratio_max", "tokens"):
        np.testing.assert_allclose(packed[name], plain[name], rtol=1e-3, atol=1e-6, err_msg=name)


def test_rows_by_a_budget_are_refused_where_they_would_be_split(tmp_path):
    config = tiny(tmp_path)
    config.rl.row_tokens = 200
    with pytest.raises(base.InputError, match=r"mesh.data and mesh.fsdp would split in 8"):
        setup.make_parts(config)


@pytest.mark.slow
def test_hint_tokens_are_counted_where_hints_are_read(tmp_path, monkeypatch):
    one_device = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(setup.sharding, "make_mesh", one_device)
    spent = {}
    for name in ("textual_feedback", "locator_penalty", "rlsd"):
        config = tiny(tmp_path / name)
        config.credit.name = name
        config.rl.updates = 1
        spent[name] = train.run(config, present.open_folder(config, name=name))["ledger"]["tokens"]["hint"]
    assert spent["textual_feedback"] == spent["rlsd"] > 0 == spent["locator_penalty"]  # the same first batch
