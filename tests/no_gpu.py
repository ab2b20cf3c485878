"""GPUs that are not there: to trace for, to interpret on this machine, to lower for, and to compile for with CUDA."""

import contextlib
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call
from jax.experimental import topologies
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from rsi_jax.kernels.attention import gpu_tile

H100 = "NVIDIA H100 80GB HBM3"
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }} registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 23 }} runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{H100}"
"""


def traced(kind: str = H100):
    """Traces for a GPU of this kind."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def interpreted(**params):
    """Runs kernels on this machine, their threads, barriers and memories simulated. params: of InterpretGPUParams.

    The interpreter knows no `pl.run_state`, and no wgmma of registers: such a product is made by XLA, and its tile is
    read as wgmma reads it, where a later copy may write.
    """

    def add_product(total, a, b):
        tile = b[...]
        plgpu.commit_smem()
        return total + jnp.dot(a, tile, preferred_element_type=jnp.float32)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_tile, "add_product", add_product)
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(**params)):
            try:
                yield
            finally:
                interpret_pallas_call.reset_gpu_interpret_mode_state()


def lowered(kind: str, fn, *specs) -> str:
    """Lowers for a kind of GPU: the module as text."""
    checks = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    with traced(kind):
        return export.export(jax.jit(fn), platforms=["cuda"], disabled_checks=checks)(*specs).mlir_module()


@functools.cache  # one architecture per process: Mosaic keeps the first one
def _mesh() -> Mesh:
    devices = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x1").devices
    return Mesh(np.array(devices), ("x",), axis_types=(AxisType.Auto,))


def compiled(fn, *specs):
    """Compiles for an H100, by ptxas. Skips where the wheels of CUDA 13 are not installed."""
    if not importlib.util.find_spec("jax_cuda13_plugin"):
        wheels = "jax-cuda13-plugin jax-cuda13-pjrt nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm nvidia-cuda-crt"
        pytest.skip(f"CUDA compiles for an H100: pip install {wheels}")
    mesh = _mesh()
    place = NamedSharding(mesh, PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), specs)
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn).trace(*specs).lower().compile()
