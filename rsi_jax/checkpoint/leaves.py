"""The leaves of a checkpointed tree: names, table entries, digests, and their way back onto devices."""

import hashlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rsi_jax import base

# Differing leaves that an error names, of each sort.
NAMED_LEAVES = 4


def named(tree: Any) -> list[tuple[str, Any]]:
    """Lists (name, leaf) in the tree's order; names are paths such as 'params/layers/0/ffn/gate'.

    Raises: ValueError for a key with '/' in it, or two leaves whose paths read the same.
    """
    pairs = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "tree"
        if name.count("/") != max(len(path) - 1, 0):
            raise ValueError(f"leaf {name}: keys of a checkpointed tree must not contain '/'")
        pairs.append((name, leaf))
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("two leaves of the tree have the same name once written as text; rename one")
    return pairs


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def spec(leaf: Any) -> str:
    """What must agree between a saved leaf and its place: 'float32[3,4]', 'key<fry>[]', 'int'."""
    if isinstance(leaf, (bool, int, float)) and not isinstance(leaf, np.generic):
        return type(leaf).__name__
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape") or leaf.dtype == object:
        raise ValueError(f"a checkpoint holds arrays and Python bool, int, float; not {type(leaf).__name__} {leaf!r}")
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _entry_spec(entry: dict[str, Any]) -> str:
    return entry["dtype"] if entry["shape"] is None else f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"


def is_stored(entry: dict[str, Any]) -> bool:
    """Whether the leaf lies in the array files: not a Python scalar, not empty."""
    return entry["shape"] is not None and 0 not in entry["shape"]


def encode(tree: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Makes the leaf table and the arrays to write, by name.

    An entry: name; dtype (or 'bool', 'int', 'float' of a Python scalar); shape (None: Python scalar); impl of a PRNG
    key; weak type; value of a scalar (floats as hex); sha256 of the bytes (None: the array spans other processes).
    """
    entries, arrays = [], {}
    for name, leaf in named(tree):
        entry = {"name": name, "dtype": spec(leaf), "shape": None, "impl": None, "weak": False}
        entry |= {"value": None, "sha256": None}
        entries.append(entry)
        if not hasattr(leaf, "dtype"):
            entry["value"] = leaf.hex() if isinstance(leaf, float) else leaf
            continue
        entry |= {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "weak": getattr(leaf, "weak_type", False)}
        if entry["weak"]:
            _weak_zero(name, np.dtype(leaf.dtype))
        if _is_key(leaf):
            entry["impl"] = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            leaf = np.asarray(leaf)
            entry["sha256"] = sha256(leaf)
        if is_stored(entry):
            arrays[name] = leaf
    return entries, arrays


def _weak_zero(name: str, dtype: np.dtype) -> jax.Array:
    """A weakly typed zero of a dtype. Raises: ValueError where jax has no Python scalar of this dtype."""
    zero = jnp.asarray(np.zeros((), dtype).item())
    if zero.dtype != dtype:
        raise ValueError(f"leaf {name} is weakly typed {dtype}, which cannot be restored; give it a dtype")
    return zero


def place(template: Any, entry: dict[str, Any], value: np.ndarray | None) -> Any:
    """One restored leaf, of the template's sort and on its sharding; the saved value and weak type."""
    if entry["shape"] is None:
        return float.fromhex(entry["value"]) if entry["dtype"] == "float" else entry["value"]
    if isinstance(template, (np.ndarray, np.generic)):
        value = np.zeros(template.shape, template.dtype) if value is None else np.array(value)
        return value[()] if isinstance(template, np.generic) else value
    if value is None:  # an empty array, or an empty array of keys
        abstract = jax.eval_shape(jax.random.key_data, template) if entry["impl"] else template
        value = np.zeros(abstract.shape, abstract.dtype)
    sharding = getattr(template, "sharding", None)
    if sharding is None or not getattr(template, "committed", True):
        array = jnp.array(value)
    else:
        array = jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])
    if entry["weak"]:
        zeros = jnp.broadcast_to(_weak_zero(entry["name"], value.dtype), value.shape)
        weak = zeros.at[...].set(array)
        array = jax.device_put(weak, array.sharding) if array.committed else weak
    return jax.random.wrap_key_data(array, impl=entry["impl"]) if entry["impl"] else array


def require_fit(path: pathlib.Path, entries: list[dict[str, Any]], wanted: dict[str, str]) -> None:
    """Raises: base.InputError naming the saved leaves that differ from those of the run ({name: spec})."""
    saved = {entry["name"]: _entry_spec(entry) for entry in entries}
    sorts = {
        "missing in the checkpoint": [f"{name} {kind}" for name, kind in wanted.items() if name not in saved],
        "not known to this run": [f"{name} {kind}" for name, kind in saved.items() if name not in wanted],
        "saved as another shape or dtype": [
            f"{name} saved {saved[name]}, wanted {kind}"
            for name, kind in wanted.items()
            if saved.get(name, kind) != kind
        ],
    }
    count = sum(map(len, sorts.values()))
    if not count:
        return
    parts = []
    for words, names in sorts.items():
        if names:
            more = f" and {len(names) - NAMED_LEAVES} more" if len(names) > NAMED_LEAVES else ""
            parts.append(f"{words}: {', '.join(names[:NAMED_LEAVES])}{more}")
    raise base.InputError(
        f"checkpoint {path} does not fit this run, {count} of {len(saved | wanted)} leaves differ "
        f"({'; '.join(parts)}): resume with the config it was written with, or choose a new run folder"
    )


def sha256(value: np.ndarray | bytes) -> str:
    """Hex digest of bytes, or of an array's bytes in C order."""
    if isinstance(value, np.ndarray):
        value = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return hashlib.sha256(value).hexdigest()


def table_digest(entries: list[dict[str, Any]]) -> str:
    """Hex digest of a leaf table; equal for bitwise equal trees."""
    return sha256(canonical(entries).encode())


def canonical(value: Any) -> str:
    """JSON text that depends only on the value."""
    return json.dumps(value, sort_keys=True)
