"""Set-up of every test process, before jax is imported: 8 virtual CPU devices, and nothing kept between runs.

JAX_PLATFORMS=cuda pytest ... runs the same tests on an accelerator.
"""

import os

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = ["--xla_force_host_platform_device_count=8"]
if os.environ["JAX_PLATFORMS"] == "cpu":  # most of the suite's time is compiling what runs once: a fifth less of it
    FLAGS += ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a cached program would hide a change of XLA's flags
os.environ.setdefault("MPLBACKEND", "agg")

# The same examples in every run; no deadline, since a first call compiles.
hypothesis.settings.register_profile("house", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("house")
