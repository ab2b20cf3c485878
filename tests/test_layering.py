"""Who may import whom: one table, and the imports of rsi_jax, kernels, configs and experiments held to it."""

import ast
import pathlib
import sys
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]

# room: the rooms it may import besides itself; "and below" adds all that those may import.
ROOMS = {
    "loops": "ops train derive evals problems and below",
    "ops": "store metrics base",
    "train": "continuations anchors rollout annotate feedback credit losses optim checkpoint store metrics report "
    "and below",
    "derive": "rollout annotate feedback credit losses optim checkpoint store metrics and below",
    "evals": "continuations rollout envs problems sandbox and below",
    "envs": "sandbox tools problems base",
    "problems": "sandbox store base",
    "tools": "sandbox base",
    "continuations": "rollout base",
    "anchors": "base",
    "rollout": "sample envs model base",
    "chains": "base",
    "packing": "model kernels base",
    "feedback": "chains packing model kernels masked sharding base",
    "annotate": "feedback packing model kernels masked sharding base",  # teacher columns are read off the views
    "sample": "model kernels sharding base",
    "model": "kernels sharding base",
    "credit": "base masked returns kernels",
    "losses": "base masked returns kernels",
    "report": "metrics base",
    "optim": "base",
    "checkpoint": "base",
    "store": "base",
    "metrics": "base",
    "sharding": "base",
    "sandbox": "base",
    "masked": "base",
    "returns": "base",
    "base": "",
    "kernels": "",
    "configs": "",
    "__init__": "",
}
# room: the only libraries it may import beside the standard library; a room without a row may import any.
LIBRARIES = {
    "kernels": "jax numpy chex",
    "credit": "jax numpy chex",
    "losses": "jax numpy chex",
    "masked": "jax numpy chex",
    "returns": "jax numpy chex",
    "configs": "ml_collections",
    "__init__": "",
}
# Modules of the optional extras of setup.py: imported inside the function that uses them, never when a module loads.
OPTIONAL = {"mcp", "slack_sdk", "slack_bolt", "pagerduty", "submitit", "ray", "trackio", "wandb"}

OURS = {"rsi_jax", "kernels", "configs", "experiments", "tests"}


def may_import(room: str) -> set[str]:
    """Rooms that `room` may import: itself, its row, and what stands below where its row says so."""
    row = set(ROOMS[room].split())
    named = row - {"and", "below"}
    below = {lower for name in named for lower in may_import(name)} if "below" in row else set()
    return {room} | named | below | ({"__init__"} if room not in LIBRARIES else set())


def imports_of(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, dotted name, lazy) of each import; lazy = not executed when the module loads."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name, lazy) for alias in node.names)
            case ast.ImportFrom():
                module = "." * node.level + (node.module or "")
                yield from ((node.lineno, f"{module}.{alias.name}", lazy) for alias in node.names)
            case ast.If() if ast.unparse(node.test).endswith("TYPE_CHECKING"):
                yield from imports_of(ast.Module(node.body, []), lazy=True)
                yield from imports_of(ast.Module(node.orelse, []), lazy)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from imports_of(node, lazy=True)
            case _:
                yield from imports_of(node, lazy)


def fault_of(room: str, name: str, lazy: bool) -> str | None:
    """Says what is wrong with `room` importing `name`, or None."""
    top, _, rest = name.partition(".")
    if not top:
        return "relative import"
    if top == "kernels":
        return "kernels is imported as rsi_jax.kernels"
    if top in OPTIONAL and not lazy:
        return f"{top} is an optional extra: import it inside the function that uses it"
    if room == "experiments":
        return None
    if top in OURS:
        inner = rest.split(".")[0]
        target = top if top != "rsi_jax" else "__init__" if inner == "" or inner.startswith("__") else inner
        return None if target in may_import(room) else f"{room} may not import {target}"
    if room in LIBRARIES and top not in LIBRARIES[room].split() and top not in sys.stdlib_module_names:
        return f"{room} may not import {top}"
    return None


def faults(root: pathlib.Path) -> list[str]:
    """Lists each forbidden import under root as `file:line: what`."""
    found = []
    root = root.resolve()
    for path in sorted({p.resolve() for folder in OURS - {"tests"} for p in (root / folder).rglob("*.py")}):
        parts = path.relative_to(root).with_suffix("").parts
        room = parts[1] if parts[0] == "rsi_jax" else parts[0]
        if room not in ROOMS and room != "experiments":
            found.append(f"{path.relative_to(root)}:1: room {room} has no row in the table")
            continue
        for line, name, lazy in imports_of(ast.parse(path.read_text(), str(path))):
            fault = fault_of(room, name, lazy)
            if fault:
                found.append(f"{path.relative_to(root)}:{line}: {fault} ({name})")
    return found


def test_the_house_keeps_its_layers():
    assert faults(ROOT) == []


def test_what_the_table_never_allows():
    assert not {"derive", "ops", "loops"} & may_import("train")
    assert not any({"experiments", "tests", "configs"} & (may_import(room) - {room}) for room in ROOMS)
    assert may_import("kernels") == {"kernels"}


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("rsi_jax/train.py", "from rsi_jax.derive import judges", "train may not import derive"),
        ("rsi_jax/train.py", "def f():\n    import rsi_jax.ops.monitor", "train may not import ops"),
        ("rsi_jax/credit/group.py", "from rsi_jax import base, model", "credit may not import model"),
        ("rsi_jax/losses.py", "from absl import flags", "losses may not import absl"),
        ("rsi_jax/envs/shell.py", "from experiments import train", "envs may not import experiments"),
        ("rsi_jax/metrics.py", "try:\n    import wandb\nexcept ImportError:\n    wandb = None", "optional extra"),
        ("rsi_jax/base.py", "from . import masked", "relative import"),
        ("rsi_jax/model/layers.py", "from kernels import attention", "imported as rsi_jax.kernels"),
        ("rsi_jax/attic.py", "", "attic has no row"),
        ("kernels/attention/api.py", "import flax", "kernels may not import flax"),
        ("kernels/attention/api.py", "from rsi_jax import base", "kernels may not import base"),
        ("configs/tool_calls.py", "import jax", "configs may not import jax"),
        ("experiments/serve.py", "import mcp", "optional extra"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path, file, code, fault):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    (found,) = faults(tmp_path)
    assert found.startswith(f"{file}:") and fault in found


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("rsi_jax/loops/inner.py", "from rsi_jax import ops, sharding\nfrom rsi_jax.sandbox import vault"),
        ("rsi_jax/tools/a.py", "import typing\nif typing.TYPE_CHECKING:\n    import mcp\ndef f():\n    import mcp"),
        ("kernels/attention/gpu.py", "import functools\nfrom jax.experimental import pallas\nimport rsi_jax.kernels"),
        ("configs/tool_calls.py", "from configs import default\nimport ml_collections"),
        ("experiments/train.py", "from configs import default\nfrom rsi_jax import train"),
    ],
)
def test_an_allowed_import_passes(tmp_path, file, code):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(code)
    assert faults(tmp_path) == []
