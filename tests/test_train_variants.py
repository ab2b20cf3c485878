"""Every credit variant trains by its name alone, and every surrogate, on the tool-call task."""

import functools
import json

import jax
import numpy as np
import pytest

from configs import default
from rsi_jax import credit, losses, sharding, train
from rsi_jax.train import present, setup
from tests.test_train_app import tiny


def trained(folder, monkeypatch, **fields):
    """Runs three updates; gives their lines of the metrics."""
    config = tiny(folder)
    config.update_from_flattened_dict(fields | {"evaluation.every": 0})
    one_device = functools.partial(sharding.make_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(setup.sharding, "make_mesh", one_device)
    train.run(config, present.open_folder(config, name="tiny"), defaults=default.get_config())
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == "rl"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(credit.variants()))
def test_a_variant_trains_by_its_name_alone(name, tmp_path, monkeypatch):
    able = {"lm.updates": 80, "model.width": 32, "env.tool_calls.horizon": 4, "env.tool_calls.names": 2}  # some succeed
    lines = trained(tmp_path, monkeypatch, **able, **{"credit.name": name})
    assert len(lines) == 3
    assert any(line["grad_norm/outcome"] > 0 or line.get("feedback_loss", 0) > 0 for line in lines)
    assert all(np.isfinite(line["grad_norm/outcome"]) and 0 <= line["credit/frac_zero_adv"] <= 1 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("how", losses.CORRECTIONS)
def test_a_correction_trains_by_its_name_and_finds_the_sampler_to_be_the_trainer(how, tmp_path, monkeypatch):
    lines = trained(tmp_path, monkeypatch, **{"rl.correction": how, "rl.epochs": 2, "rl.updates": 2})
    assert len(lines) == 2 and all(("correction/ess" in line) == (how != "none") for line in lines)
    assert all(abs(line.get("correction/ess", 1) - 1) < 1e-5 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("name", losses.SURROGATES)
def test_a_surrogate_trains_over_several_updates_per_batch(name, tmp_path, monkeypatch):
    fields = {"rl.surrogate": name, "rl.epochs": 2, "credit.name": "locator_penalty", "rl.updates": 2}
    lines = trained(tmp_path, monkeypatch, **fields)
    assert len(lines) == 2 and all(np.isfinite(line["policy_loss"]) and line["ratio_max"] > 0 for line in lines)
