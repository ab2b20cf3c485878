"""What a user's `pip install` of this repository brings."""

import ast
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup():
    """setup.py as a module, without running it."""
    spec = importlib.util.spec_from_file_location("setup", ROOT / "setup.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def distribution(requirement: str) -> str:
    """Normalised name of the distribution that a requirement line asks for."""
    return re.sub("[-_.]+", "-", re.split(r"[\[<>=~!; ]", requirement)[0]).lower()


def modules(folder: str) -> list[pathlib.Path]:
    return sorted({path.resolve().relative_to(ROOT) for path in (ROOT / folder).rglob("*.py")})


def test_every_folder_with_code_is_a_package_that_is_installed(setup):
    folders = {path.parent for path in modules("rsi_jax") if path.parts[:2] != ("rsi_jax", "data")}
    expected = {".".join(folder.parts) for folder in folders if folder.parts[0] == "rsi_jax"}
    expected |= {".".join(("rsi_jax", *path.parent.parts)) for path in modules("kernels")}
    assert "rsi_jax.kernels" in expected and "rsi_jax.kernels.attention" in expected
    assert sorted(expected) == sorted(setup.packages())


def imported(path: pathlib.Path) -> set[str]:
    """Top-level names of the libraries that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"rsi_jax", "configs", "experiments"}


def test_every_library_that_is_imported_is_declared(setup):
    declared = {distribution(line) for line in setup.CORE + sum(setup.EXTRAS.values(), [])}
    providers = importlib.metadata.packages_distributions()
    paths = [path for folder in ("rsi_jax", "kernels", "experiments", "configs") for path in modules(folder)]
    names = {(str(path), name) for path in paths for name in imported(path)}
    assert [n for n in sorted(names) if not declared & {distribution(d) for d in providers.get(n[1], [n[1]])}] == []


def test_the_lock_pins_every_dependency_and_names_no_host(setup):
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {distribution(line) for line in re.findall(r"^\S+==\S+", lock, re.MULTILINE)}
    assert {distribution(line) for line in setup.CORE + setup.EXTRAS["dev"]} <= pinned
    for line in lock.splitlines():
        assert re.fullmatch(r"#.*|[\w.\-]+==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), line
        assert "/" not in line, line


@pytest.mark.slow
def test_an_installed_copy_imports_from_a_foreign_folder(tmp_path, setup):
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    for name in ("rsi_jax", "kernels"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    (source / "rsi_jax" / "data" / "deep").mkdir(parents=True)
    (source / "rsi_jax" / "data" / "deep" / "sample.jsonl").write_text("{}\n")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", target, source]
    subprocess.run(pip, check=True)

    code = "import importlib, sys; [print(importlib.import_module(name).__file__) for name in sys.argv[1:]]"
    foreign = tmp_path / "project"
    foreign.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-c", code, *setup.packages()]
    out = subprocess.run(command, cwd=foreign, env=environment, check=True, capture_output=True, text=True).stdout
    assert len(out.split()) == len(setup.packages())
    assert all(pathlib.Path(line).is_relative_to(target) for line in out.split()), out
    installed = {str(path.relative_to(target)) for path in target.rglob("*") if "__pycache__" not in path.parts}
    sources = [path for folder in ("rsi_jax", "kernels") for path in (source / folder).rglob("*") if path.is_file()]
    names = {str(path.resolve().relative_to(source)) for path in sources}
    assert {re.sub("^kernels", "rsi_jax/kernels", name) for name in names} <= installed
    assert "rsi_jax/data/deep/sample.jsonl" in installed
    assert not {"experiments", "configs", "tests", "kernels"} & installed
