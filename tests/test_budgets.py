"""Size budgets of the house: what is longer is split by meaning, or named here with its reason."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("rsi_jax", "kernels", "configs", "experiments", "tests")

FILE, FUNCTION, MAIN = 400, 60, 120  # lines, docstrings included

# "file" or "file::function": why it is longer.
EXCEPTIONS: dict[str, str] = {}


def over_budget(root: pathlib.Path) -> dict[str, str]:
    """Maps each file and function over its budget to what it measures."""
    found = {}
    root = root.resolve()
    for path in sorted({p.resolve() for folder in FOLDERS for p in (root / folder).rglob("*.py")}):
        name, text = str(path.relative_to(root)), path.read_text()
        if (lines := len(text.splitlines())) > FILE:
            found[name] = f"{lines} lines, budget {FILE}"
        for node in ast.walk(ast.parse(text, name)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                budget = MAIN if node.name == "main" else FUNCTION
                if lines > budget:
                    found[f"{name}::{node.name}"] = f"line {node.lineno}: {lines} lines, budget {budget}"
    return found


def test_everything_is_within_its_budget():
    found = over_budget(ROOT)
    assert {name: size for name, size in found.items() if name not in EXCEPTIONS} == {}
    assert sorted(EXCEPTIONS.keys() - found.keys()) == [], "exceptions that nothing needs any more"


def test_what_is_too_long_is_found(tmp_path):
    folder = tmp_path / "rsi_jax"
    folder.mkdir()
    (folder / "file.py").write_text("x = 1\n" * (FILE + 1))
    (folder / "edge.py").write_text("x = 1\n" * FILE)
    body = "    pass\n"
    (folder / "function.py").write_text(f"def ok():\n{body * (FUNCTION - 1)}def long():\n{body * FUNCTION}")
    (folder / "method.py").write_text("class A:\n    async def long(self):\n" + "        pass\n" * FUNCTION)
    (folder / "short_main.py").write_text(f"def main():\n{body * (MAIN - 1)}")
    (folder / "long_main.py").write_text(f"def main():\n{body * MAIN}")
    assert list(over_budget(tmp_path)) == [
        "rsi_jax/file.py",
        "rsi_jax/function.py::long",
        "rsi_jax/long_main.py::main",
        "rsi_jax/method.py::long",
    ]
