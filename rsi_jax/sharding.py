"""One mesh, one table: logical axis names -> mesh axes. Everything is jit with NamedSharding."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rsi_jax import base

AXES = ("data", "fsdp", "tensor", "context")
# Logical axis -> mesh axis (None: replicated). Rows of a batch go over data and fsdp.
RULES: Mapping[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head": None,
    "ffn": "tensor",
    None: None,
}


def make_mesh(shape: Mapping[str, int], devices: Sequence | None = None) -> Mesh:
    """Makes the mesh over AXES from sizes per axis; one size may be -1 (the devices that are left).

    Raises: base.InputError when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [shape.get(axis, 1) for axis in AXES]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        text = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise base.InputError(f"mesh {text} needs {math.prod(sizes)} devices, there are {len(devices)}")
    return Mesh(np.array(devices).reshape(sizes), AXES)


def spec(names: Sequence[str | None]) -> PartitionSpec:
    """Maps logical axis names to a PartitionSpec."""
    return PartitionSpec(*(RULES[name] for name in names))


def param_shardings(params, logical_axes: Mapping[str, Sequence[str | None]], mesh: Mesh):
    """Finds the sharding of each parameter by the end of its path in `logical_axes`.

    An axis that its mesh axes do not divide is replicated. Works on optimizer state too: its leaves end in the same
    paths; anything else is replicated.
    """

    def one(path, leaf):
        text = jax.tree_util.keystr(path, simple=True, separator="/")
        names = next((axes for end, axes in logical_axes.items() if text.endswith(end)), ())
        if len(names) != np.ndim(leaf):
            return NamedSharding(mesh, PartitionSpec())
        axes = [RULES[name] for name in names]
        fits = [axis if leaf.shape[i] % _size(mesh, axis) == 0 else None for i, axis in enumerate(axes)]
        return NamedSharding(mesh, PartitionSpec(*fits))

    return jax.tree_util.tree_map_with_path(one, params)


def _size(mesh: Mesh, axis) -> int:
    return math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))


def rows(mesh: Mesh) -> NamedSharding:
    """The sharding of batch rows (leading axis)."""
    return NamedSharding(mesh, spec(["batch"]))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of scalars."""
    return NamedSharding(mesh, PartitionSpec())


def put_rows(tree, mesh: Mesh):
    """Places host columns with their leading axis over the data axes.

    Raises: ValueError when the rows do not divide; pad with zero-weight rows first.
    """
    return jax.device_put(tree, rows(mesh))
