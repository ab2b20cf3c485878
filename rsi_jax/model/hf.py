"""Hugging Face folders (config.json, safetensors, tokenizer.json) -> config, params, tokenizer, chat template."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors

from rsi_jax import base
from rsi_jax.model import tokenizer as tokenizer_lib
from rsi_jax.model import transformer

# model_type -> whether it normalises queries and keys per head. All of them: RoPE, RMSNorm, SwiGLU, no biases.
FAMILIES = {"llama": False, "mistral": False, "qwen3": True}

# Module of a decoder layer in a HF checkpoint -> path in our layer. A matrix there is [out, in].
_LAYER = {
    "input_layernorm": ("attention_norm", "scale"),
    "post_attention_layernorm": ("ffn_norm", "scale"),
    "self_attn.q_proj": ("attention", "q"),
    "self_attn.k_proj": ("attention", "k"),
    "self_attn.v_proj": ("attention", "v"),
    "self_attn.o_proj": ("attention", "o"),
    "mlp.gate_proj": ("ffn", "gate"),
    "mlp.up_proj": ("ffn", "up"),
    "mlp.down_proj": ("ffn", "down"),
}
_QK_NORM = {
    "self_attn.q_norm": ("attention", "q_norm", "scale"),
    "self_attn.k_norm": ("attention", "k_norm", "scale"),
}


def load(
    folder: str | Path, *, value_head: bool = False
) -> tuple[transformer.Config, transformer.Params, tokenizer_lib.Tokenizer, str]:
    """Reads a checkpoint folder in the Hugging Face layout.

    value_head: add a critic that starts at 0.

    Returns: the config, float32 numpy params, the tokenizer, and the chat template ("" when the folder has none).
    Raises: base.InputError naming the file when one is missing, broken, or of a model that is not supported.
    """
    folder = Path(folder)
    entries = _read_json(folder / "config.json")
    config = _config(entries, folder / "config.json", value_head)
    tensors = dict(_read_tensors(folder))
    if config.tied:
        _drop_tied_copy(tensors, folder)
    params = assemble(config, tensors, str(folder))
    tokenizer, template = _load_tokenizer(folder, entries)
    if tokenizer.vocab_size > config.vocab:
        raise base.InputError(f"{folder}: tokenizer.json has {tokenizer.vocab_size} tokens, the model {config.vocab}")
    return config, params, tokenizer, template


def assemble(config: transformer.Config, tensors: Mapping[str, np.ndarray], source: str) -> transformer.Params:
    """Arranges tensors named as in a HF llama checkpoint (without the leading `model.`) as params of the decoder.

    tensors: every tensor of the file; matrices are [out, in], queries and keys in half-split rotary order.

    Raises: base.InputError naming the tensor that is missing, left over, of another shape, or not finite.
    """
    shapes = jax.eval_shape(lambda: transformer.init(config, jax.random.key(0)))
    left, params = dict(tensors), {}
    for name, path in _paths(config).items():
        if name not in left:
            raise base.InputError(f"{source}: tensor {name} is missing; get the file again, or another model")
        shape = _at(shapes, path).shape
        array = np.asarray(left.pop(name), np.float32)
        if name.endswith("_proj.weight") or path[0] == "unembed":
            array = array.T
        inputs = 2 if path[-1] == "o" else 1  # leading axes of our kernel that are one axis there
        if array.shape != (math.prod(shape[:inputs]), *([math.prod(shape[inputs:])] if len(shape) > 1 else [])):
            raise base.InputError(
                f"{source}: tensor {name} is {array.shape} (input first), the config asks for {shape}"
            )
        if not np.isfinite(array).all():
            raise base.InputError(f"{source}: tensor {name} holds values that are not finite; get the file again")
        _put(params, path, np.ascontiguousarray(array.reshape(shape)))
    if left:
        raise base.InputError(f"{source}: tensor {min(left)} has no place in this decoder; this model is not supported")
    if config.value_head:
        params["value_head"] = {"kernel": np.zeros((config.width, 1), np.float32), "bias": np.zeros(1, np.float32)}
    return params


def _paths(config: transformer.Config) -> dict[str, tuple]:
    modules = _LAYER | (_QK_NORM if config.qk_norm else {})
    paths: dict[str, tuple] = {"embed_tokens.weight": ("embed", "embedding"), "norm.weight": ("norm", "scale")}
    if not config.tied:
        paths["lm_head.weight"] = ("unembed", "kernel")
    for layer in range(config.layers):
        for module, path in modules.items():
            paths[f"layers.{layer}.{module}.weight"] = ("layers", layer, *path)
    return paths


def _at(tree: Any, path: tuple) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _put(tree: dict, path: tuple, leaf: np.ndarray) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf


def _read_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    if not path.is_file():
        if needed:
            raise base.InputError(
                f"{path}: no such file; give a folder with config.json, *.safetensors, tokenizer.json"
            )
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise base.InputError(f"{path}: not JSON ({error}); get the file again") from error


def _config(entries: Mapping[str, Any], path: Path, value_head: bool) -> transformer.Config:
    family = entries.get("model_type")
    if family not in FAMILIES:
        raise base.InputError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
    rope = entries.get("rope_parameters") or entries.get("rope_scaling") or {}
    unsupported = {
        "hidden_act": entries.get("hidden_act", "silu") != "silu",
        "attention_bias": entries.get("attention_bias", False),
        "mlp_bias": entries.get("mlp_bias", False),
        "rope_scaling": rope.get("rope_type", rope.get("type", "default")) != "default",
        "layer_types": len(set(entries.get("layer_types") or ())) > 1,
    }
    for key, found in unsupported.items():
        if found:
            raise base.InputError(f"{path}: {key} = {entries.get(key) or rope} is not supported by this decoder")
    windowed = entries.get("use_sliding_window", family == "mistral")
    try:
        heads, width = entries["num_attention_heads"], entries["hidden_size"]
        return transformer.Config(
            vocab=entries["vocab_size"],
            width=width,
            layers=entries["num_hidden_layers"],
            heads=heads,
            kv_heads=entries.get("num_key_value_heads") or heads,
            head_size=entries.get("head_dim") or width // heads,
            ffn=entries["intermediate_size"],
            rope_theta=float(rope.get("rope_theta") or entries.get("rope_theta") or 10_000.0),
            norm_eps=float(entries["rms_norm_eps"]),
            tied=bool(entries.get("tie_word_embeddings", False)),
            qk_norm=FAMILIES[family],
            window=(entries.get("sliding_window") or 0) if windowed else 0,
            value_head=value_head,
        )
    except KeyError as error:
        raise base.InputError(f"{path}: {error} is missing; get the file again") from error
    except ValueError as error:
        raise base.InputError(f"{path}: {error}") from error


def _read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Reads every tensor of every shard; a name that two shards hold must hold the same values in both."""
    index = _read_json(folder / "model.safetensors.index.json", needed=False)
    names = sorted(set(index.get("weight_map", {}).values())) or sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise base.InputError(
            f"{folder}: no *.safetensors; give a folder with config.json, *.safetensors, tokenizer.json"
        )
    seen: dict[str, np.ndarray] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise base.InputError(f"{path}: named in model.safetensors.index.json but missing; get the shard")
        try:
            with safetensors.safe_open(path, framework="np") as file:
                found = {key: np.asarray(file.get_tensor(key), np.float32) for key in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
            raise base.InputError(f"{path}: not a whole safetensors file ({error}); get it again") from error
        for key, array in found.items():
            key = key.removeprefix("model.")
            if key.endswith("rotary_emb.inv_freq"):
                continue  # a constant that old checkpoints store
            if key in seen and not np.array_equal(seen[key], array):
                raise base.InputError(f"{path}: tensor {key} is in two shards with different values; get them again")
            seen[key] = array
    yield from seen.items()


def _drop_tied_copy(tensors: dict[str, np.ndarray], folder: Path) -> None:
    """Tied weights may be stored under either name, or under both with the same values."""
    copy = tensors.pop("lm_head.weight", None)
    if copy is None:
        return
    if not np.array_equal(tensors.setdefault("embed_tokens.weight", copy), copy):
        raise base.InputError(
            f"{folder}: lm_head.weight differs from embed_tokens.weight though config.json ties them;"
            " set tie_word_embeddings to false"
        )


def _load_tokenizer(folder: Path, entries: Mapping[str, Any]) -> tuple[tokenizer_lib.Tokenizer, str]:
    settings = _read_json(folder / "tokenizer_config.json", needed=False)
    generation = _read_json(folder / "generation_config.json", needed=False)
    named = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            named[name] = token
    stops: set[int] = set()
    for ids in (entries.get("eos_token_id"), generation.get("eos_token_id")):
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    tokenizer = tokenizer_lib.from_json(
        folder / "tokenizer.json",
        named_tokens=named,
        stop_ids=stops,
        add_bos=bool(settings.get("add_bos_token", False)),
    )
    return tokenizer, _template(folder, settings)


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return template
