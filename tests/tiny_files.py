"""Tiny model files for tests: a byte-level BPE of 256 bytes and a few merges, one llama in GGUF and in HF layout."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers

from rsi_jax.model import tokenizer as tokenizer_lib
from rsi_jax.model import transformer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ hello", "Ċ Ċ", "Ċ Ġ", "Ġ Ġ", "s y", "u s", "e r", "us er")
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou help<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def metadata(without_bytes: bytes = b"", **changes: Any) -> dict[str, Any]:
    """The tokenizer's GGUF entries; `changes` without the `tokenizer.ggml.` prefix."""
    letters = [c for c, byte in tokenizer_lib._byte_of_character().items() if byte not in without_bytes]
    tokens = [*SPECIALS, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    entries = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)),
        "merges": list(MERGES),
        "bos_token_id": 3,
        "eos_token_id": 2,
        "add_bos_token": False,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (entries | changes).items()}


def tokenizer(**changes: Any) -> tokenizer_lib.Tokenizer:
    return tokenizer_lib.from_gguf(metadata(**changes), "tiny")


def config(**changes: Any) -> transformer.Config:
    sizes = {"vocab": len(metadata()["tokenizer.ggml.tokens"]), "width": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    return transformer.Config(**(sizes | {"head_size": 8, "ffn": 48} | changes))


def weights(config: transformer.Config) -> dict[str, np.ndarray]:
    """Random tensors by HF name without `model.`, matrices [out, in]."""
    shapes = {
        "input_layernorm": (config.width,),
        "post_attention_layernorm": (config.width,),
        "self_attn.q_proj": (config.heads * config.head_size, config.width),
        "self_attn.k_proj": (config.kv_heads * config.head_size, config.width),
        "self_attn.v_proj": (config.kv_heads * config.head_size, config.width),
        "self_attn.o_proj": (config.width, config.heads * config.head_size),
        "mlp.gate_proj": (config.ffn, config.width),
        "mlp.up_proj": (config.ffn, config.width),
        "mlp.down_proj": (config.width, config.ffn),
        "self_attn.q_norm": (config.head_size,),
        "self_attn.k_norm": (config.head_size,),
    }
    found = {"embed_tokens.weight": (config.vocab, config.width), "norm.weight": (config.width,)}
    if not config.tied:
        found["lm_head.weight"] = (config.vocab, config.width)
    for layer in range(config.layers):
        for module, shape in shapes.items():
            if config.qk_norm or "_norm" not in module or "layernorm" in module:
                found[f"layers.{layer}.{module}.weight"] = shape
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in found.items()}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split -> interleaved rotary rows, as llama.cpp's converter writes queries and keys."""
    halves = rows.reshape(heads, 2, -1, rows.shape[-1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    config: transformer.Config,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    more: dict[str, np.ndarray] | None = None,
    entries: dict[str, Any] | None = None,
) -> Path:
    """Writes `weights(config)` as a GGUF file; matrices in the type `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.layers)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_chat_template(CHATML)
    for key, value in (metadata() | (entries or {})).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    names |= {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{key}_proj": f"attn_{'output' if key == 'o' else key}" for key in "qkvo"},
        **{f"mlp.{key}_proj": f"ffn_{key}" for key in ("gate", "up", "down")},
    }
    for name, array in weights(config).items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = interleave(array, config.heads if "q_proj" in name else config.kv_heads)
        module = name.removesuffix(".weight")
        if module.startswith("layers."):
            _, layer, module = module.split(".", 2)
            module = f"blk.{layer}.{names[module]}"
        else:
            module = names[module]
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(f"{module}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{module}.weight", array)
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_hf(folder: Path, config: transformer.Config, **changes: Any) -> Path:
    """Writes `weights(config)` as a HF folder with one shard; `changes` go into config.json."""
    folder.mkdir(exist_ok=True)
    entries = {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(entries | changes))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": CHATML}))
    backend: tokenizers.Tokenizer = tokenizer()._backend
    backend.save(str(folder / "tokenizer.json"))
    save(folder / "model.safetensors", hf_names(weights(config)))
    return folder


def hf_names(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name if name == "lm_head.weight" else f"model.{name}": array for name, array in tensors.items()}


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    safetensors.numpy.save_file(tensors, path)
