"""TPUs that are not there: to trace for, to interpret on this machine, to lower for, and to compile for with libtpu."""

import contextlib
import functools

import jax
import numpy as np
import pytest
from jax import export
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

KINDS = {"v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}
AS_XLA = True  # the kernels as plain XLA ops: neither races nor bounds are watched, and a test takes seconds


def traced(kind: str = "v5e"):
    """Traces for a TPU of this kind."""
    device = AbstractDevice(device_kind=KINDS[kind], num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


@contextlib.contextmanager
def interpreted(params=AS_XLA):
    """Traces for a TPU, and runs its kernels on this machine; pltpu.InterpretParams simulates the TPU's memories."""
    with traced(), pltpu.force_tpu_interpret_mode(params):
        try:
            yield
        finally:
            pltpu.reset_tpu_interpret_mode_state()


def lowered(kind: str, fn, *specs) -> str:
    """Lowers for a kind of TPU: the module as text."""
    with traced(kind):
        return export.export(jax.jit(fn), platforms=["tpu"])(*specs).mlir_module()


@functools.cache
def _mesh(kind: str) -> Mesh:
    with pytest.MonkeyPatch.context() as patch:  # read when libtpu loads; else it asks the network where it is
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        patch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        return Mesh(np.array(topologies.get_topology_desc(TOPOLOGIES[kind], "tpu").devices[:1]), ("x",))


def compiled(kind: str, fn, *specs):
    """Compiles for one device of a kind of TPU. Skips where there is no libtpu."""
    pytest.importorskip("libtpu", reason="libtpu compiles for a TPU: pip install libtpu")
    mesh = _mesh(kind)
    place = NamedSharding(mesh, PartitionSpec())
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), specs)
    with use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(fn).trace(*specs).lower().compile()
