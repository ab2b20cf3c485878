"""Packaging of rsi_jax; `make setup` installs requirements.lock, this file's core and `dev` pinned by `make lock`."""

import ast
import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent

CORE = [
    "absl-py>=2.1",
    "chex>=0.1.91,<0.2",
    "flax>=0.12.7,<0.13",
    "gguf>=0.17,<1",
    "grain>=0.2.13,<0.3",
    "jax>=0.11,<0.13",
    "jinja2>=3.1,<4",
    "markupsafe>=3,<4",
    "matplotlib>=3.10,<4",
    "ml_collections>=1.1,<2",
    "numpy>=2.2,<3",
    "optax>=0.2.6,<0.3",
    "orbax-checkpoint>=0.12,<0.13",
    "rich>=14,<16",
    "safetensors>=0.6,<1",
    "scipy>=1.15,<2",
    "tensorboardX>=2.6.4,<3",
    "tensorstore>=0.1.78,<0.2",
    "tokenizers>=0.22,<1",
]
# Imported only inside the functions that use them; tests/test_layering.py holds that.
EXTRAS = {
    "mcp": ["mcp>=2.2,<3"],
    "slack": ["slack-sdk>=3.48,<4", "slack-bolt>=1.30,<2"],
    "pager": ["pagerduty>=7.2,<8"],
    "slurm": ["submitit>=1.5.4,<2"],
    "ray": ["ray>=2.60,<3"],
    "track": ["trackio>=0.43,<1"],
    "wandb": ["wandb>=0.31,<1"],
    "cuda": ["jax[cuda12]>=0.11,<0.13"],
    "tpu": ["jax[tpu]>=0.11,<0.13"],
    "dev": [
        "hypothesis>=6.150",
        "pre-commit>=4",
        "pyright>=1.1.414",
        "pytest>=9",
        "pytest-xdist>=3.8",
        "ruff>=0.17",
        "setuptools>=77",
    ],
}


def version() -> str:
    """Reads `__version__` from rsi_jax/__init__.py without importing it."""
    for node in ast.parse((ROOT / "rsi_jax" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError("rsi_jax/__init__.py sets no __version__")


def packages() -> list[str]:
    """Lists rsi_jax and its rooms; kernels/ counts as rsi_jax.kernels, not through the checkout's symbolic link."""
    rooms = setuptools.find_packages(str(ROOT), include=["rsi_jax", "rsi_jax.*"], exclude=["rsi_jax.kernels*"])
    kernels = setuptools.find_packages(str(ROOT / "kernels"))
    return rooms + ["rsi_jax.kernels"] + [f"rsi_jax.kernels.{op}" for op in kernels]


if __name__ == "__main__":
    setuptools.setup(
        name="rsi_jax",
        version=version(),
        description="Long-horizon credit assignment in language-model RL, in JAX",
        long_description=(ROOT / "README.md").read_text(),
        long_description_content_type="text/markdown",
        license="Apache-2.0",
        license_files=["LICENSE"],
        python_requires=">=3.12",
        packages=packages(),
        package_dir={"rsi_jax": "rsi_jax", "rsi_jax.kernels": "kernels"},
        package_data={"": ["*.*"], "rsi_jax": ["data/**/*"]},
        install_requires=CORE,
        extras_require=EXTRAS,
    )
