"""Rollouts as columns: names, row axes, padding, and the way there and back."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from rsi_jax import base

# What pads a narrow step when a slice spans steps of several widths; 0 for every other column.
FILL = {
    "kept_mass_BT": 1,
    "segments.anchor_BS": base.NO_ANCHOR,
    "segments.parent_BS": base.NO_PARENT,
}
_PARTS = {"segments": base.Segments, "views": base.Views}


def columns_of(rollout: base.Rollout) -> dict[str, np.ndarray]:
    """Flattens a rollout to host columns: 'tokens_BT', 'segments.start_BS', 'views.hint_KN'.

    Columns that are None are left out. A static field of the views becomes a column too ('views.branch_K').
    """
    columns = {}
    for field in dataclasses.fields(rollout):
        value = getattr(rollout, field.name)
        if field.name in _PARTS and value is not None:
            for part in dataclasses.fields(value):
                column = getattr(value, part.name)
                if _is_static(part):
                    columns[f"{field.name}.{part.name}_K"] = np.full(value.rollout_K.shape[0], column, np.int32)
                else:
                    columns[f"{field.name}.{part.name}"] = column
        elif value is not None:
            columns[field.name] = value
    return {name: np.asarray(column) for name, column in jax.device_get(columns).items()}


def rollout_of(columns: Mapping[str, np.ndarray]) -> base.Rollout:
    """Builds the rollout of `columns_of` again; columns that are absent stay None.

    Raises: TypeError when a column that every rollout has is missing.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, column in columns.items():
        part, _, field = name.rpartition(".")
        parts.setdefault(part, {})[field] = column
    for name, fields in parts.items():
        for field in dataclasses.fields(_PARTS[name]) if name else ():
            if _is_static(field) and (column := fields.pop(f"{field.name}_K", None)) is not None and len(column):
                fields[field.name] = int(column[0])
    nested = {name: _PARTS[name](**fields) for name, fields in parts.items() if name}
    return base.Rollout(**parts.get("", {}), **nested)


def _is_static(field: dataclasses.Field) -> bool:
    return not field.metadata.get("pytree_node", True)


def axis(name: str) -> str:
    """Row axis of a column: the first letter of its dimensions."""
    match = re.fullmatch(r"[a-z0-9_.]+_([A-Z])[A-Z]*", name)
    if match is None:
        raise ValueError(f"column {name}: its name must end in its dimensions, row axis first, such as tokens_BT")
    return match.group(1)


def fill(name: str, dtype: np.dtype) -> Any:
    """What pads a column, as a Python scalar."""
    return np.asarray(FILL.get(name, 0)).astype(dtype).item()
