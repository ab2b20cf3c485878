"""GGUF files: weights and rotary order, quantised types, and one clear line for every bad file."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rsi_jax import base
from rsi_jax.model import gguf_file, hf, transformer
from tests import tiny_files

KINDS = gguf.GGMLQuantizationType


def test_tiny_file_gives_the_weights_that_were_written(tmp_path):
    written = tiny_files.config(tied=False, norm_eps=2.0**-17)
    path = tiny_files.write_gguf(tmp_path / "tiny.gguf", written)
    config, params, tok, template = gguf_file.load(path)
    assert config == written and template == tiny_files.CHATML
    expected = hf.assemble(written, tiny_files.weights(written), "tiny")
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert tok.token_strings(tok.encode("hello 12")) == ["hello", " ", "1", "2"]


def test_params_have_the_tree_of_a_fresh_model(tmp_path):
    config, params, _, _ = gguf_file.load(tiny_files.write_gguf(tmp_path / "t", tiny_files.config()), value_head=True)
    fresh = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    assert config.value_head and config.tied
    assert jax.tree.structure(params) == jax.tree.structure(fresh)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
    assert not params["value_head"]["kernel"].any() and not params["value_head"]["bias"].any()


def test_half_split_rows_score_as_interleaved_ones():
    """q . k after rotation is the same number in both layouts: pairs (2c, 2c + 1) there, (c, c + C/2) here."""
    heads, size, width, theta = 3, 8, 5, 100.0
    rng = np.random.default_rng(1)
    stored = rng.normal(size=(2, heads * size, width))  # interleaved, as in a llama GGUF
    x, positions = rng.normal(size=(2, width)), (3, 11)

    def interleaved(rows, position):
        pairs = rows.reshape(heads, size // 2, 2)
        angle = position * theta ** (-np.arange(size // 2) * 2 / size)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
        return turned

    q, k = (interleaved(w @ v, p) for w, v, p in zip(stored, x, positions, strict=True))
    expected = (q * k.conj()).real.sum(-1)
    ours = []
    for w, v, position in zip(stored, x, positions, strict=True):
        rows = (gguf_file.half_split(w, heads) @ v).reshape(1, 1, heads, size)
        ours.append(transformer.rope(jnp.asarray(rows, jnp.float32), jnp.full((1, 1), position), theta)[0, 0])
    np.testing.assert_allclose((ours[0] * ours[1]).sum(-1), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(tiny_files.interleave(gguf_file.half_split(stored[0], heads), heads), stored[0])


@pytest.mark.parametrize(
    ("kind", "error"), [(KINDS.F16, 2e-3), (KINDS.BF16, 2e-2), (KINDS.Q8_0, 2e-2), (KINDS.Q4_1, 0.2), (KINDS.Q5_0, 0.2)]
)
def test_types_are_dequantised(tmp_path, kind, error):
    written = tiny_files.config(ffn=64)
    config, params, _, _ = gguf_file.load(tiny_files.write_gguf(tmp_path / "tiny.gguf", written, kind=kind))
    expected = hf.assemble(config, tiny_files.weights(written), "tiny")
    for found, true in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, true, atol=error * np.abs(true).max())


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(base.InputError, match="none.gguf: no such file"):
        gguf_file.load(tmp_path / "none.gguf")


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100, b"GGUF" + b"\xff" * 64])
def test_garbage_is_named(tmp_path, content):
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(base.InputError, match=r"bad.gguf: not a whole GGUF file .*get it again"):
        gguf_file.load(path)


def test_a_truncated_file_is_named(tmp_path):
    whole = tiny_files.write_gguf(tmp_path / "whole.gguf", tiny_files.config()).read_bytes()
    path = tmp_path / "cut.gguf"
    for share in (0.02, 0.2, 0.5, 0.9, 0.999):
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(base.InputError, match="cut.gguf: not a whole GGUF file") as caught:
            gguf_file.load(path)
        assert "\n" not in str(caught.value)


def test_what_this_decoder_lacks_is_named(tmp_path):
    config = tiny_files.config()

    def load(**knobs):
        return gguf_file.load(tiny_files.write_gguf(tmp_path / "odd.gguf", config, **knobs))

    with pytest.raises(base.InputError, match="architecture 'gemma4' is not supported"):
        load(architecture="gemma4")
    with pytest.raises(base.InputError, match="rope.scaling.type = 'yarn'"):
        load(entries={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(base.InputError, match="rope.dimension_count = 4 differs from the head size 8"):
        load(entries={"llama.rope.dimension_count": 4})
    with pytest.raises(base.InputError, match="rope_freqs.weight has no place"):
        load(more={"rope_freqs.weight": np.ones(4, np.float32)})
    with pytest.raises(base.InputError, match="layers.0.self_attn.q_proj.bias has no place"):
        load(more={"blk.0.attn_q.bias": np.ones(32, np.float32)})


def test_tensors_that_do_not_fit_are_named():
    config = tiny_files.config()
    tensors = tiny_files.weights(config)
    name = "layers.1.self_attn.k_proj.weight"
    with pytest.raises(base.InputError, match=f"x: tensor {name} is missing"):
        hf.assemble(config, {key: value for key, value in tensors.items() if key != name}, "x")
    with pytest.raises(base.InputError, match=f"x: tensor {name} is .32, 8. "):
        hf.assemble(config, tensors | {name: tensors[name][:8]}, "x")
    with pytest.raises(base.InputError, match=f"x: tensor {name} holds values that are not finite"):
        hf.assemble(config, tensors | {name: tensors[name] * np.inf}, "x")


def test_smollm2_is_found_or_the_mend_is_named(monkeypatch):
    monkeypatch.setattr(gguf_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(base.InputError, match="make smollm2"):
        gguf_file.find_smollm2()
