"""Where a run came from: code revision, packages, machine, command."""

import importlib.metadata
import pathlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import rsi_jax

PACKAGES = ("rsi_jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "numpy", "tokenizers", "gguf")


def environment(
    *, devices: Sequence[Any] = (), packages: Sequence[str] = PACKAGES, root: str | pathlib.Path | None = None
) -> dict[str, Any]:
    """Describes code, packages and machine as plain JSON. Never asks jax for its devices: pass `jax.devices()`.

    root: folder whose git revision counts; by default the checkout that rsi_jax was imported from (none when it was
    installed as a package: the git repository around an environment says nothing about it).
    Returns: revision and changed_files (None without git), command, python, platform, packages, devices.
    """
    if root is None:
        source = pathlib.Path(rsi_jax.__path__[0]).resolve()
        root = None if "site-packages" in source.parts else source.parent
    revision = _git(root, "rev-parse", "HEAD") if root else None
    changed = _git(root, "status", "--porcelain") if root else None
    return {
        "revision": revision,
        "changed_files": None if changed is None else len(changed.splitlines()),
        "command": shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in packages},
        "devices": [str(getattr(device, "device_kind", device)) for device in devices],
    }


def _git(root: str | pathlib.Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
