"""The worked example of the README: its function, its row and its knobs make a variant that the laws hold."""

import pathlib
import re

import pytest
from ml_collections import config_dict

from rsi_jax import base, credit
from rsi_jax.credit import group, laws, rows
from rsi_jax.train import setup

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.fixture
def example(monkeypatch):
    """Adds the example as the README says, and takes it away again; gives its knobs."""
    text = README.read_text()
    function, row, knobs = re.findall(r"```python\n(.*?)```", text[text.index("## Add a credit variant") :], re.S)[:3]
    names = dict(vars(group))
    exec(compile(function, str(README), "exec"), names)
    monkeypatch.setattr(group, "median_baseline", names["median_baseline"], raising=False)
    for name, made in eval(f"{{{row}}}", vars(rows)).items():
        monkeypatch.setitem(rows.ROWS, name, made)
    monkeypatch.setenv("RSI_JAX_VARIANTS", "median_baseline")
    return eval(f"{{{knobs}}}")["median_baseline"]


def test_the_example_of_the_readme_keeps_the_laws_that_its_row_says(example):
    assert "median_baseline" in credit.variants() and laws.names() == ["median_baseline"]
    laws.run.clear_cache()  # compiled for other variants, if any test ran before
    for law in laws.LAWS:
        for name, (deviation, _) in laws.measure(law).items():
            assert (deviation <= laws.TOLERANCE) == (law not in rows.ROWS[name].breaks), (law, deviation)
    laws.run.clear_cache()


def test_it_is_chosen_by_name(example):
    config = config_dict.ConfigDict({"name": "median_baseline", "median_baseline": example})
    credit_fn, needs = setup.bind_credit(config)
    found = credit_fn(laws.random(0))
    assert needs == () and 0 < abs(found.adv_BT).max() <= example["bound"]
    config.median_baseline.bound = -1.0
    with pytest.raises(base.InputError, match="bound must be > 0"):
        setup.bind_credit(config)[0](laws.random(0))
