"""Checkpoints that a killed run resumes from bitwise, and the flag that a signal sets.

One folder per committed step. A step appears by one rename, after all of its bytes are written, so a process killed at
any moment leaves every earlier step intact and nothing half-written under a step's name. Each leaf carries a SHA-256,
and so does the host part: a file that was damaged later is found when read, named, and the step before it is used.

    <folder>/<step>/arrays   the array leaves (orbax, zarr3, uncompressed)
    <folder>/<step>/host     JSON: the leaf table (name, dtype, shape, digest; Python scalars themselves) and `meta`
    <folder>/<step>.damaged  a step that could not be read, moved aside by the first save after it

orbax is imported on first use, so that importing this package stays cheap.
"""

import errno
import json
import logging
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
from absl import logging as absl_logging

from rsi_jax import base
from rsi_jax.checkpoint import leaves
from rsi_jax.checkpoint.stop import Stop

__all__ = ["Checkpoints", "Stop", "digest"]

# Reasons of the operating system that the user can mend, and the words for them.
_DISK_ERRORS = {
    errno.ENOSPC: "no space left on",
    errno.EDQUOT: "disk quota exceeded on",
    errno.EROFS: "read-only file system at",
    errno.EACCES: "no permission to write",
}


class _DamagedError(Exception):
    """A step whose files are missing, unreadable or differ from their digests."""


class Checkpoints:
    """The checkpoints of one run: save, and restore the newest that is whole.

    folder   directory of the steps; made on the first save.
    keep     committed steps kept (>= 1); older ones are deleted after a newer one is committed, so the disk must hold
             keep + 1. Falling back from a damaged step needs keep >= 2.
    skipped  damaged steps that `restore` passed over since this object was made; log it.

    One process writes a folder; any number may read it meanwhile.
    """

    def __init__(self, folder: str | pathlib.Path, *, keep: int = 3):
        if keep < 1:
            raise base.InputError(f"keep={keep} checkpoints: at least 1 is needed to resume")
        self.folder = pathlib.Path(folder).absolute()
        self.keep = keep
        self.skipped = 0
        self._damaged: set[int] = set()

    def steps(self) -> list[int]:
        """Lists the committed steps, oldest first, less those found damaged."""
        if not self.folder.is_dir():
            return []
        found = [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal() and path.is_dir()]
        return sorted(set(found) - self._damaged)

    def latest_step(self) -> int | None:
        """Newest committed step, or None. It has not been read: `restore` may find it damaged."""
        return max(self.steps(), default=None)

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> bool:
        """Writes one step, synchronously: once it returns, killing the process cannot lose the step.

        Args:
          step: >= 0, larger than every step saved before, over all stages of the run.
          tree: pytree of jax or numpy arrays (typed PRNG keys too), Python bool, int and float; None has no leaf.
          meta: JSON of the host: cursor, stage, ledger, tracker step.

        Returns:
          True if written; False if the newest step is this one with the same tree and meta (stop after a save).
        Raises:
          base.InputError: disk full, quota, read-only or no permission; earlier steps stay readable.
          ValueError: a step that does not grow, a leaf that is not an array or a scalar, or meta that is not JSON.
        """
        entries, arrays = leaves.encode(tree)
        host = _seal(step, entries, meta)
        self._set_aside()
        latest = self.latest_step()
        if latest is not None and step <= latest:
            if step == latest and self._is_saved(step, host):
                return False
            raise ValueError(f"checkpoint steps must grow: step {step} after step {latest} in {self.folder}")
        try:
            _write(self.folder, step, arrays, host, keep=self.keep)
        except BaseException as error:
            _discard(self.folder, step)
            words = _disk_error(error)
            if words is None:
                raise
            raise base.InputError(
                f"checkpoint at step {step} not written: {words} {self.folder}; earlier checkpoints are intact"
            ) from error
        return True

    def restore(self, template: Any, *, only: str = "") -> tuple[int, Any, dict[str, Any]] | None:
        """Reads the newest whole step, bitwise, onto the template's shardings.

        A damaged step is named in a warning, counted in `skipped`, and the one before it is read.

        Args:
          template: pytree like the one saved; leaves may be jax.ShapeDtypeStruct, with or without a sharding. It gives
            structure, shapes, dtypes, placement and jax or numpy; the values and weak types are those saved.
          only: name of the part of the saved tree that the template stands for ('params'); the rest is not read.

        Returns:
          (step, tree, meta), or None when nothing was ever saved here.
        Raises:
          base.InputError: the newest whole step does not fit the template, or no step is whole.
        """
        places = {f"{only}/{name}" if only else name: leaf for name, leaf in leaves.named(template)}
        wanted = {name: leaves.spec(leaf) for name, leaf in places.items()}
        steps = self.steps()
        for step in reversed(steps):
            try:
                body = self._read_host(step)
                saved = [entry for entry in body["leaves"] if not only or entry["name"].startswith(f"{only}/")]
                leaves.require_fit(self.folder / str(step), saved, wanted)
                values = self._read_arrays(step, saved)
            except _DamagedError as error:
                self.skipped += 1
                self._damaged.add(step)
                absl_logging.warning("checkpoint %s is damaged and skipped: %s", self.folder / str(step), error)
                continue
            entries = {entry["name"]: entry for entry in saved}
            placed = [leaves.place(leaf, entries[name], values.get(name)) for name, leaf in places.items()]
            return step, jax.tree.unflatten(jax.tree.structure(template), placed), body["meta"]
        if steps:
            raise base.InputError(
                f"no checkpoint in {self.folder} can be read: steps {steps} are damaged; "
                "put back a copy of one, or choose a new run folder to start again"
            )
        return None

    def digest(self, step: int) -> str:
        """SHA-256 of the tree saved at a step, equal to `checkpoint.digest(tree)`; reads no arrays.

        Raises: base.InputError if the step is missing or its host file is damaged.
        """
        try:
            return leaves.table_digest(self._read_host(step)["leaves"])
        except _DamagedError as error:
            raise base.InputError(f"checkpoint {self.folder / str(step)} cannot be read: {error}") from error

    def _is_saved(self, step: int, host: dict[str, Any]) -> bool:
        try:
            return leaves.canonical(self._read_host(step)) == leaves.canonical(host["body"])
        except _DamagedError:
            return False

    def _read_host(self, step: int) -> dict[str, Any]:
        """The host part of a step, its digest checked."""
        try:
            host = json.loads((self.folder / str(step) / "host" / "metadata").read_text())
            if leaves.sha256(leaves.canonical(host["body"]).encode()) != host["sha256"]:
                raise ValueError("its host file does not match its digest")
            return host["body"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _DamagedError(_one_line(error)) from error

    def _read_arrays(self, step: int, entries: list[dict[str, Any]]) -> dict[str, np.ndarray]:
        """The array leaves of a step in host memory, their digests checked."""
        stored = [entry for entry in entries if leaves.is_stored(entry)]
        try:
            values = _read(self.folder, step, [entry["name"] for entry in stored])
            for entry in stored:
                if entry["sha256"] is not None and leaves.sha256(values[entry["name"]]) != entry["sha256"]:
                    raise ValueError(f"leaf {entry['name']} does not match its digest")
            return values
        except MemoryError:
            raise
        except Exception as error:  # orbax and tensorstore raise many types on damaged bytes
            raise _DamagedError(_one_line(error)) from error

    def _set_aside(self) -> None:
        """Moves steps found damaged out of the way, so that the run can write them again."""
        for step in sorted(self._damaged):
            path, count = self.folder / f"{step}.damaged", 1
            while path.exists():
                path, count = self.folder / f"{step}.damaged{count}", count + 1
            if (self.folder / str(step)).exists():
                (self.folder / str(step)).rename(path)
        self._damaged.clear()


def digest(tree: Any) -> str:
    """SHA-256 of a pytree: names, dtypes, shapes, weak types and bytes of all leaves. Equal digests = bitwise equal."""
    return leaves.table_digest(leaves.encode(tree)[0])


def _seal(step: int, entries: list[dict[str, Any]], meta: dict[str, Any]) -> dict[str, Any]:
    """The host part of a step with its digest, as it will read back."""
    try:
        body = json.loads(json.dumps({"step": step, "leaves": entries, "meta": meta}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta of the checkpoint at step {step} is not JSON: {error}") from error
    return {"sha256": leaves.sha256(leaves.canonical(body).encode()), "body": body}


def _orbax() -> Any:
    """orbax, its logging silenced: what it reports as errors it also raises."""
    import orbax.checkpoint as ocp

    logger = logging.getLogger("absl")
    if _not_orbax not in logger.filters:
        logger.addFilter(_not_orbax)
    return ocp


def _not_orbax(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace("\\", "/")


def _write(folder: pathlib.Path, step: int, arrays: dict[str, Any], host: dict[str, Any], *, keep: int) -> None:
    """Commits one step, then deletes the steps beyond `keep` and what killed saves left behind."""
    ocp = _orbax()
    from orbax.checkpoint.checkpoint_managers import preservation_policy

    folder.mkdir(parents=True, exist_ok=True)
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        preservation_policy=preservation_policy.LatestN(keep),
        cleanup_tmp_directories=True,
    )
    handlers = {
        "arrays": ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True, use_compression=False),
        "host": ocp.JsonCheckpointHandler(),
    }
    items = {"host": ocp.args.JsonSave(host)}
    if arrays:
        items["arrays"] = ocp.args.PyTreeSave(arrays)
    with ocp.CheckpointManager(folder, options=options, item_handlers=handlers) as manager:
        if not manager.save(step, args=ocp.args.Composite(**items)):
            raise ValueError(f"checkpoint at step {step} was refused by orbax")


def _read(folder: pathlib.Path, step: int, names: list[str]) -> dict[str, np.ndarray]:
    """The named arrays of a step in host memory."""
    if not names:
        return {}
    ocp = _orbax()
    arguments = ocp.args.PyTreeRestore(
        item=dict.fromkeys(names, 0),
        restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names},
        partial_restore=True,
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)) as reader:
        return reader.restore(folder / str(step) / "arrays", args=arguments)


def _discard(folder: pathlib.Path, step: int) -> None:
    """Frees what a failed save wrote."""
    for path in folder.glob(f"{step}.orbax-checkpoint-tmp*"):
        shutil.rmtree(path, ignore_errors=True)


def _disk_error(error: BaseException | None) -> str | None:
    """Words for a failure of the disk anywhere in the chain of causes, or None."""
    while error is not None:
        for number, words in _DISK_ERRORS.items():
            if getattr(error, "errno", None) == number or f"os_error_code='{number}'" in str(error):
                return words
        error = error.__cause__ or error.__context__
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
