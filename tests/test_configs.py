"""Every config is a valid diff of the default, and the default holds exactly the knobs that functions take."""

import dataclasses
import importlib
import inspect
import pathlib

import pytest

from configs import default
from rsi_jax import base, credit, envs
from rsi_jax.feedback import hints, locate, schedule
from rsi_jax.train import setup, update

CONFIGS = sorted(path.stem for path in pathlib.Path(default.__file__).parent.glob("*.py") if path.stem != "__init__")


def load(name: str):
    return importlib.import_module(f"configs.{name}").get_config()


def fields_of(config, prefix=""):
    for name, value in config.items():
        if hasattr(value, "items"):
            yield from fields_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_only_changes_fields_that_the_default_has(name):
    assert set(fields_of(load(name))) == set(fields_of(default.get_config()))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "jsonl"])
def test_a_config_passes_its_own_checks(name):
    setup.check(load(name))


@pytest.mark.parametrize("name", sorted(credit.variants()))
def test_the_knobs_of_a_variant_are_its_keyword_arguments(name):
    parameters = inspect.signature(credit.find(name)[0]).parameters.values()
    knobs = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    subtree = default.get_config().credit[name].to_dict()
    assert set(subtree) == set(knobs)
    differs = {k for k, v in knobs.items() if v is not inspect.Parameter.empty and v != subtree[k]}
    assert not differs, f"the default config of {name} differs from the function's defaults in {differs}"


def test_the_knobs_of_an_environment_are_its_fields():
    config = default.get_config()
    for name in ("tool_calls", "questions", "maze"):
        made = envs.find(name).make(**config.env[name].to_dict())
        assert dataclasses.is_dataclass(made)
        assert set(config.env[name]) <= {field.name for field in dataclasses.fields(made)}


def test_every_rule_has_a_template_and_every_knob_of_a_rule_a_parameter():
    feedback = default.get_config().feedback
    assert set(feedback.templates) == set(feedback.wrong) == set(locate.RULES)
    for name, rule in locate.RULES.items():
        knobs = [p.name for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert sorted(feedback.get(name, {})) == sorted(knobs)


def test_the_objective_reads_its_knobs_from_the_config():
    """Each field of Objective is set by the config, none by a default that the config does not show."""
    config = default.get_config()
    made = setup.make_objective(config)
    shown = set(config.rl) | {"temperature", "teacher", "teacher_rate", "teacher_every", "span", "chunk", "remat"}
    shown |= {"feedback_schedule", "chain_rows"}
    knobs = inspect.signature(schedule.scale).parameters.values()
    named = {knob.name: config.feedback[knob.name] for knob in knobs if knob.kind is knob.KEYWORD_ONLY}
    assert dict(made.feedback_schedule) == named
    assert {field.name for field in dataclasses.fields(update.Objective)} <= shown
    assert made.outcome_clip == config.rl.outcome_clip and made.span == config.sample.max_tokens


@pytest.mark.parametrize("kind", ["empty", "irrelevant", "shuffled", "wrong", "oracle", "template"])
def test_every_hint_writer_is_a_choice(kind):
    assert kind in hints.WRITERS
    config = default.get_config()
    config.feedback.hint = kind
    setup.check(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rl.micro_batch", 7, "rl.micro_batch=7 does not divide"),
        ("rl.row_tokens", 9, "rl.row_tokens=9 cannot hold a rollout of rollout.capacity="),
        (
            "compute.remat",
            "layers",
            "compute.remat='layers' is none of 'none', 'layer', 'attention'; did you mean 'layer'",
        ),
        (
            "compute.attention",
            "flash",
            "compute.attention='flash' is none of '', 'reference', 'chunked', 'tpu', 'mosaic",
        ),
        ("compute.offload", True, "compute.offload moves what compute.remat keeps"),
        ("rl.overlong_buffer", 5, "rl.overlong_buffer=5 needs rl.overlong_length"),
        ("rl.surrogate", "pop", "rl.surrogate='pop' is none of"),
        ("rl.correction", "icepop", "rl.correction='icepop' is none of 'none', 'truncate', 'mask'"),
        ("rl.correction_high", 0.5, "correction_low <= 1 <= correction_high, got 0.0 and 0.5"),
        ("credit.name", "grop", "did you mean 'grpo'"),
    ],
)
def test_a_bad_value_names_its_field(path, value, message):
    config = default.get_config()
    group, name = path.split(".")
    config[group][name] = value
    with pytest.raises(base.InputError, match=message.replace(".", r"\.")):
        setup.check(config)


def test_a_judge_that_cannot_be_imported_is_named_with_its_field():
    config = default.get_config()
    config.columns.judge = "math:sqqrt"
    with pytest.raises(base.InputError, match="columns.judge='math:sqqrt': math has no function 'sqqrt'; did you mean"):
        setup.check(config)
