"""The archive of rollouts: every column of every step on disk, readable by slice while the run goes on.

    <folder>/columns/<name>    one zarr3 array per column, compressed and checksummed; rows are appended
    <folder>/transcripts.jsonl the text of the rollouts, one JSON object a line, each with its step
    <folder>/index.json        what is committed: steps, shapes, bytes of text. Replaced by one rename, last

Only what the index names exists: a writer killed inside `append` leaves rows and bytes that no reader sees and the next
append overwrites. The first letter of a column's dimensions is its row axis (`tokens_BT` grows along B, `hint_KN` along
K). Other dimensions may differ from step to step: arrays are as wide as the widest step, chunks that no step wrote take
no room, and a step reads back exactly as wide as it was appended.
"""

import errno
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rsi_jax import base
from rsi_jax.store import columns as columns_lib
from rsi_jax.store.columns import FILL, columns_of, rollout_of

__all__ = ["FILL", "Archive", "columns_of", "rollout_of"]

CHUNK_BYTES = 256 * 1024
CHUNK_ROWS, CHUNK_WIDTH = 1024, 2048
# Reasons of the operating system that the user can mend, and the words for them.
_DISK_ERRORS = {
    errno.ENOSPC: "no space left on",
    errno.EDQUOT: "disk quota exceeded on",
    errno.EROFS: "read-only file system at",
    errno.EACCES: "no permission to write",
}


class Archive:
    """The archived rollouts of one run. One process appends; any number may read meanwhile.

    On resume call `truncate(restored step)` before the first append, so that no step is held twice.
    """

    def __init__(self, folder: str | pathlib.Path):
        self.folder = pathlib.Path(folder).absolute()
        self._swept = False

    def steps(self) -> list[int]:
        """Lists the committed steps, in order."""
        return [entry[0] for entry in self._index()["steps"]]

    def columns(self, step: int | None = None) -> dict[str, np.dtype]:
        """Dtype of each column that a step has, or (None) any step. Raises: ValueError if the step is not committed."""
        index = self._index()
        names = index["columns"] if step is None else self._entry(index, step)[0]
        return {name: np.dtype(index["columns"][name]["dtype"]) for name in names}

    def rows_of(self, step: int, axis: str = "B") -> slice:
        """Rows of a step along a row axis. Raises: ValueError if the step is not committed."""
        return slice(*self._bounds(self._index(), step, axis))

    def append(self, step: int, columns: Mapping[str, np.ndarray], transcripts: Sequence[Mapping[str, Any]]) -> None:
        """Commits the rollouts of one step: all of it or, if killed, nothing.

        Args:
          step: larger than every committed step.
          columns: host arrays by name; columns with the same row axis have as many rows. A column may be absent.
          transcripts: JSON objects in the order of the rollouts; each is written with its `step`.

        Raises:
          base.InputError: disk full or not writable; what was committed before stays.
          ValueError: a step that does not grow, a name without dimensions, or rows or a dtype that do not agree.
        """
        index = self._index()
        if index["steps"] and step <= index["steps"][-1][0]:
            raise ValueError(
                f"step {step} after step {index['steps'][-1][0]} in {self.folder}: truncate({step - 1}) before "
                "repeating steps"
            )
        columns = {name: np.asarray(column) for name, column in columns.items()}
        _require_agreement(index, columns)
        text = b"".join(json.dumps({"step": step} | dict(record)).encode() + b"\n" for record in transcripts)
        try:
            self._sweep()
            self._write(index, columns)
            end = self._write_text(index, text)
            _commit(self.folder, _extended(index, step, columns, end))
        except (OSError, ValueError) as error:
            self._swept = False
            words = _disk_error(error)
            if words is None:
                raise
            raise base.InputError(
                f"rollouts of step {step} not archived: {words} {self.folder}; earlier steps are intact"
            ) from error

    def truncate(self, step: int) -> int:
        """Drops the steps after `step` (nothing else); returns how many. Safe to repeat, safe to kill."""
        index = self._index()
        kept = [entry for entry in index["steps"] if entry[0] <= step]
        dropped = len(index["steps"]) - len(kept)
        if dropped:
            used = {name for _, layout, _ in kept for name in index["layouts"][layout]}
            columns = {name: spec for name, spec in index["columns"].items() if name in used}
            _commit(self.folder, index | {"steps": kept, "columns": columns})
        return dropped

    def read(self, columns: Sequence[str], rows: int | slice) -> dict[str, np.ndarray]:
        """Reads columns by step or by rows, without reading the rest.

        Args:
          columns: names; see `columns()`.
          rows: a step: each column exactly as it was appended. A slice: rows along the one row axis that all the
            columns share; steps narrower than the widest in the slice are padded with FILL on the right.

        Raises:
          ValueError: unknown step or column, a column that some step of the slice lacks, or row axes that differ.
          base.InputError: a chunk that is damaged.
        """
        index = self._index()
        unknown = [name for name in columns if name not in index["columns"]]
        if unknown:
            raise ValueError(f"no column {', '.join(unknown)} in {self.folder}; it has {', '.join(index['columns'])}")
        axes = sorted({columns_lib.axis(name) for name in columns})
        if isinstance(rows, slice) and len(axes) > 1:
            raise ValueError(f"a slice needs one row axis, not {', '.join(axes)}: read by step instead")
        bounds = {axis: self._bounds(index, rows, axis) for axis in axes}
        step = None if isinstance(rows, slice) else rows
        parts = {name: _parts(index, name, *bounds[columns_lib.axis(name)], step) for name in columns}
        started = {name: self._start(name, parts[name]) for name in columns}
        return {
            name: self._gather(name, np.dtype(index["columns"][name]["dtype"]), parts[name], started[name])
            for name in columns
        }

    def transcripts(self, step: int) -> list[dict[str, Any]]:
        """The transcripts of a step. Raises: ValueError if the step is not committed."""
        _, start, end = self._entry(self._index(), step)
        with (self.folder / "transcripts.jsonl").open("rb") as file:
            file.seek(start)
            return [json.loads(line) for line in file.read(end - start).splitlines()]

    def _index(self) -> dict[str, Any]:
        path = self.folder / "index.json"
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            return {"columns": {}, "layouts": [], "steps": []}
        except ValueError as error:
            raise base.InputError(
                f"{path} is damaged ({error}): put back a copy, or choose a new run folder"
            ) from error

    def _bounds(self, index: dict[str, Any], rows: int | slice, axis: str) -> tuple[int, int]:
        """First row and last row + 1 of a step or a slice."""
        if isinstance(rows, slice):
            start, stop, stride = rows.indices(_rows(index, axis))
            if stride != 1:
                raise ValueError(f"rows are read in runs: slice step {stride} is not 1")
            return start, max(start, stop)
        self._entry(index, rows)
        return next((start, stop) for step, start, stop, _ in _spans(index, axis) if step == rows)

    def _entry(self, index: dict[str, Any], step: int) -> tuple[dict[str, list[int]], int, int]:
        """(shapes, first byte of text, last + 1) of a step. Raises: ValueError if it is not committed."""
        steps = [entry[0] for entry in index["steps"]]
        if step not in steps:
            held = f"steps {steps[0]} to {steps[-1]} ({len(steps)} of them)" if steps else "no step yet"
            raise ValueError(f"step {step} is not in the archive {self.folder}, which has {held}")
        at = steps.index(step)
        return index["layouts"][index["steps"][at][1]], index["steps"][at - 1][2] if at else 0, index["steps"][at][2]

    def _spec(self, name: str) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{self.folder}/columns/{name}/"}}

    def _sweep(self) -> None:
        """Removes the temporary files of a killed or failed writer.

        tensorstore writes a chunk into `<chunk>.__lock` and renames it, but does not empty one that it finds there: a
        longer leftover would end up behind the new chunk and spoil it.
        """
        if not self._swept:
            for path in self.folder.glob("columns/**/*.__lock"):
                path.unlink(missing_ok=True)  # the failed writer itself may still be clearing up
        self._swept = True

    def _write(self, index: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
        """Writes columns behind the committed rows; nothing is committed yet."""
        import tensorstore

        opened = {}
        for name, column in columns.items():
            if name in index["columns"]:
                opened[name] = tensorstore.open(self._spec(name), open=True)
            else:
                metadata = _metadata(name, column)
                opened[name] = tensorstore.open(
                    self._spec(name) | {"metadata": metadata}, create=True, delete_existing=True
                )
        writes = []
        for name, column in columns.items():
            array, start = opened[name].result(), _rows(index, columns_lib.axis(name))
            needed = (start + column.shape[0], *column.shape[1:])
            grown = tuple(map(max, array.shape, needed))
            if grown != array.shape:
                array = array.resize(exclusive_max=grown, expand_only=True).result()
            if column.size:
                writes.append(array[_place(start, start + column.shape[0], column.shape[1:])].write(column))
        failed = [write.exception() for write in writes]  # waits for all of them
        for error in filter(None, failed):
            raise error

    def _write_text(self, index: dict[str, Any], text: bytes) -> int:
        """Writes text behind the committed bytes; returns where it ends."""
        start = index["steps"][-1][2] if index["steps"] else 0
        path = self.folder / "transcripts.jsonl"
        self.folder.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "w+b") as file:
            if os.fstat(file.fileno()).st_size < start:
                raise base.InputError(
                    f"{path} is shorter than its index says: put back a copy, or truncate the archive"
                )
            file.truncate(start)
            file.seek(start)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return start + len(text)

    def _start(self, name: str, parts: list[tuple[int, int, list[int]]]) -> list[Any]:
        """Futures of the parts of a column."""
        import tensorstore

        array = tensorstore.open(self._spec(name), open=True).result()
        return [array[_place(first, last, wide)].read() for first, last, wide in parts]

    def _gather(self, name: str, dtype: np.dtype, parts: list[tuple[int, int, list[int]]], started: list) -> np.ndarray:
        """One array from the parts of a column, padded to the widest."""
        first, last = parts[0][0], parts[-1][1]
        widest = [max(sizes) for sizes in zip(*(wide for *_, wide in parts), strict=True)]
        out = np.full((last - first, *widest), columns_lib.fill(name, dtype), dtype)
        for (start, stop, wide), future in zip(parts, started, strict=True):
            try:
                out[_place(start - first, stop - first, wide)] = future.result()
            except ValueError as error:
                raise base.InputError(f"column {name} in {self.folder} is damaged: {error}") from error
        return out


# The index and pure functions of it. columns: {name: {dtype}}; layouts: [{name: shape}], the sets of shapes seen;
# steps: [[step, number of its layout, byte where its text ends]].


def _spans(index: dict[str, Any], axis: str) -> Iterator[tuple[int, int, int, dict[str, list[int]]]]:
    """(step, first row, last row + 1, shapes) of each step along a row axis."""
    lengths = [next((s[0] for name, s in x.items() if columns_lib.axis(name) == axis), 0) for x in index["layouts"]]
    start = 0
    for step, layout, _ in index["steps"]:
        yield step, start, start + lengths[layout], index["layouts"][layout]
        start += lengths[layout]


def _rows(index: dict[str, Any], axis: str) -> int:
    """Committed rows along a row axis."""
    return max((stop for _, _, stop, _ in _spans(index, axis)), default=0)


def _parts(
    index: dict[str, Any], name: str, start: int, stop: int, step: int | None
) -> list[tuple[int, int, list[int]]]:
    """(first row, last row + 1, widths) of a column in one step, or in each step that meets rows [start, stop)."""
    parts, wide = [], []
    for at, first, last, shapes in _spans(index, columns_lib.axis(name)):
        first, last = max(first, start), min(last, stop)
        wide = shapes.get(name, [0, *wide])[1:]
        if at != step if step is not None else first >= last:
            continue
        if name not in shapes:
            raise ValueError(f"step {at} has no column {name}: read the steps that have it")
        parts.append((first, last, wide))
    return parts or [(start, start, wide)]


def _require_agreement(index: dict[str, Any], columns: dict[str, np.ndarray]) -> None:
    """Raises: ValueError for columns that do not agree with each other or with those of earlier steps."""
    rows: dict[str, int] = {}
    shapes = {name: shape for x in index["layouts"] for name, shape in x.items() if name in index["columns"]}
    for name, column in columns.items():
        if column.ndim == 0 or len(shapes.get(name, column.shape)) != column.ndim:
            raise ValueError(f"column {name} has shape {column.shape}, before {shapes.get(name)}")
        if rows.setdefault(columns_lib.axis(name), column.shape[0]) != column.shape[0]:
            raise ValueError(
                f"column {name} has {column.shape[0]} rows, others of its axis {rows[columns_lib.axis(name)]}"
            )
        kind = index["columns"].get(name, {"dtype": str(column.dtype)})["dtype"]
        if kind != str(column.dtype):
            raise ValueError(f"column {name} is {column.dtype}, in earlier steps {kind}")


def _extended(index: dict[str, Any], step: int, columns: dict[str, np.ndarray], end: int) -> dict[str, Any]:
    """The index with one more step."""
    layout = {name: list(column.shape) for name, column in columns.items()}
    layouts = index["layouts"] + ([] if layout in index["layouts"] else [layout])
    added = {name: {"dtype": str(column.dtype)} for name, column in columns.items()}
    return {
        "columns": index["columns"] | added,
        "layouts": layouts,
        "steps": [*index["steps"], [step, layouts.index(layout), end]],
    }


def _commit(folder: pathlib.Path, index: dict[str, Any]) -> None:
    """Replaces the index by one rename."""
    path = folder / "index.json"
    temporary = folder / "index.json.tmp"
    with temporary.open("w") as file:
        json.dump(index, file, separators=(",", ":"))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


# Arrays.


def _place(first: int, last: int, wide: Sequence[int]) -> tuple[slice, ...]:
    return (slice(first, last), *(slice(0, size) for size in wide))


def _metadata(name: str, column: np.ndarray) -> dict[str, Any]:
    """zarr3 metadata of a new column: chunks of about CHUNK_BYTES, byte-shuffled zstd, CRC-32C."""
    wide = [min(1 << max(size - 1, 0).bit_length(), CHUNK_WIDTH) for size in column.shape[1:]]
    long = CHUNK_BYTES // (column.dtype.itemsize * math.prod(wide))
    chunk = [min(max(long, 1), CHUNK_ROWS), *wide]
    return {
        "shape": [0, *column.shape[1:]],
        "data_type": str(column.dtype),
        "fill_value": columns_lib.fill(name, column.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 3, "shuffle": "shuffle"}},
            {"name": "crc32c"},
        ],
    }


def _disk_error(error: BaseException) -> str | None:
    """Words for a failure of the disk that the user can mend, or None."""
    for number, words in _DISK_ERRORS.items():
        if getattr(error, "errno", None) == number or f"os_error_code='{number}'" in str(error):
            return words
    return None
