"""Hugging Face folders: shards, tied and repeated names, bfloat16, and one clear line for every bad file."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from rsi_jax import base
from rsi_jax.model import hf
from tests import tiny_files

CONFIG = tiny_files.config()


def expected(config):
    return hf.assemble(config, tiny_files.weights(config), "tiny")


def assert_same(params, other):
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"qk_norm": True}, {"value_head": True}])
def test_folder_gives_the_weights_that_were_written(tmp_path, changes):
    written = tiny_files.config(**changes)
    folder = tiny_files.write_hf(tmp_path / "m", written)
    config, params, tok, template = hf.load(folder, value_head=written.value_head)
    assert config == written and template == tiny_files.CHATML
    assert_same(params, expected(written))
    assert tok.stop_ids == {0, 2} and tok.token_strings(tok.encode("hello")) == ["hello"]


def test_kernels_hold_the_transposed_matrices():
    tensors, layer = tiny_files.weights(CONFIG), expected(CONFIG)["layers"][1]
    x = np.random.default_rng(2).normal(size=CONFIG.width).astype(np.float32)
    q = np.einsum("d,dhc->hc", x, layer["attention"]["q"])
    np.testing.assert_allclose(q.ravel(), tensors["layers.1.self_attn.q_proj.weight"] @ x, rtol=1e-4, atol=1e-4)
    out = np.einsum("hc,hcd->d", q, layer["attention"]["o"])
    np.testing.assert_allclose(out, tensors["layers.1.self_attn.o_proj.weight"] @ q.ravel(), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(layer["ffn"]["down"].T, tensors["layers.1.mlp.down_proj.weight"])


def test_shards_with_and_without_an_index(tmp_path):
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG)
    tensors = tiny_files.hf_names(tiny_files.weights(CONFIG))
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": names[:9], "b.safetensors": names[8:]}  # one name is in both, with the same values
    for file, part in parts.items():
        tiny_files.save(folder / file, {name: tensors[name] for name in part})
    assert_same(hf.load(folder)[1], expected(CONFIG))
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    tiny_files.save(folder / "unrelated.safetensors", {"x": np.ones(1, np.float32)})
    assert_same(hf.load(folder)[1], expected(CONFIG))
    tiny_files.save(folder / "b.safetensors", {name: tensors[name] + 1 for name in parts["b.safetensors"]})
    with pytest.raises(base.InputError, match="is in two shards with different values"):
        hf.load(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(base.InputError, match="b.safetensors: named in .* but missing"):
        hf.load(folder)


def test_tied_names(tmp_path):
    """Tied weights under both names, or only under the head's; old checkpoints also store rotary constants."""
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG)
    tensors = tiny_files.hf_names(tiny_files.weights(CONFIG))
    embedding = tensors["model.embed_tokens.weight"]
    constant = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    tiny_files.save(folder / "model.safetensors", tensors | constant | {"lm_head.weight": embedding.copy()})
    assert_same(hf.load(folder)[1], expected(CONFIG))
    without = {name: array for name, array in tensors.items() if "embed" not in name}
    tiny_files.save(folder / "model.safetensors", without | {"lm_head.weight": embedding})
    assert_same(hf.load(folder)[1], expected(CONFIG))
    tiny_files.save(folder / "model.safetensors", tensors | {"lm_head.weight": embedding + 1})
    with pytest.raises(base.InputError, match="lm_head.weight differs from embed_tokens.weight"):
        hf.load(folder)


def test_names_without_prefix_and_bfloat16(tmp_path):
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG)
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in tiny_files.weights(CONFIG).items()}
    tiny_files.save(folder / "model.safetensors", rounded)
    params = hf.load(folder)[1]
    assert_same(params, hf.assemble(CONFIG, rounded, "tiny"))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "model_type 'gpt_oss' is not supported; supported: llama"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling = .*llama3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_scaling = .*yarn"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"vocab_size": 8}, "tensor embed_tokens.weight"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    ],
)
def test_what_this_decoder_lacks_is_named(tmp_path, changes, message):
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG, **changes)
    with pytest.raises(base.InputError, match=message):
        hf.load(folder)


def test_config_of_other_families(tmp_path):
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG, model_type="mistral", sliding_window=5)
    assert hf.load(folder)[0] == tiny_files.config(window=5)
    folder = tiny_files.write_hf(folder, CONFIG, rope_theta=None, rope_parameters={"rope_theta": 5e4})
    assert hf.load(folder)[0] == tiny_files.config(rope_theta=5e4)


def test_missing_and_broken_files_are_named(tmp_path):
    with pytest.raises(base.InputError, match="config.json: no such file"):
        hf.load(tmp_path)
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG)
    shard = folder / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(base.InputError, match="model.safetensors: not a whole safetensors file"):
        hf.load(folder)
    shard.unlink()
    with pytest.raises(base.InputError, match=r"m: no \*.safetensors"):
        hf.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(base.InputError, match="config.json: not JSON"):
        hf.load(folder)


def test_templates_and_stop_ids_from_their_files(tmp_path):
    folder = tiny_files.write_hf(tmp_path / "m", CONFIG)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    settings = {"eos_token": {"content": "<|im_end|>"}, "add_bos_token": True, "bos_token": "<|bos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": named}))
    _, _, tok, template = hf.load(folder)
    assert template == "a" and tok.stop_ids == {0, 2, 3} and tok.add_bos and tok.bos_id == 3
    (folder / "chat_template.jinja").write_text("c")
    assert hf.load(folder)[3] == "c"
