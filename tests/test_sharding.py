"""Updates on 8 devices equal those on one, and everything lies where the table says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rsi_jax import base, optim, sharding
from rsi_jax.credit import examples
from rsi_jax.feedback import schedule
from rsi_jax.model import transformer
from rsi_jax.train import lm, update
from tests import tiny

CONFIG = tiny.config(heads=2, kv_heads=1, value_head=True)
B, T = 8, 16
OPTIMIZER = optax.sgd(0.3, momentum=0.9)


def mesh_of(**shape):
    return sharding.make_mesh(shape)


def state_of(params, *, teacher=None, optimizer=OPTIMIZER):
    return base.TrainState(jnp.int32(0), params, optimizer.init(params), teacher=teacher, aux=schedule.init())


def by_path(tree):
    return {
        jax.tree_util.keystr(k, simple=True, separator="/"): x for k, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def assert_equal_on(mesh, make_step, state, *batch):
    """An update on the mesh gives what it gives on one device, and leaves the state where it was."""
    want = make_step()(jax.tree.map(jnp.copy, state), *batch)
    places = sharding.param_shardings(state, transformer.LOGICAL_AXES, mesh)
    start = jax.device_put(jax.tree.map(jnp.copy, state), places)
    got = make_step(places=places)(start, *sharding.put_rows(batch, mesh))
    tiny.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for path, leaf in by_path(got[0]).items():
        assert leaf.sharding.is_equivalent_to(by_path(places)[path], leaf.ndim), path
    assert not np.allclose(*(tiny.leaves(s.params)["embed/embedding"] for s in (got[0], state)))


def test_an_lm_update_on_rows_over_data_and_fsdp():
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (B, T)), axis=1)[:, ::-1].copy()  # two documents and padding, say
    first = np.array([[np.argmax(row == s) for s in row] for row in segments])
    batch = {
        "tokens": rng.integers(0, 64, (B, T)), "train": rng.random((B, T)) < 0.7,
        "tokens_segment_ids": segments, "tokens_positions": (np.arange(T) - first) * (segments > 0),
    }  # fmt: skip
    step = functools.partial(lm.make_update, CONFIG, OPTIMIZER, clip=1.0, chunk=512)
    assert_equal_on(mesh_of(data=2, fsdp=4), step, state_of(tiny.params(CONFIG)), batch)


def test_an_rl_update_with_views_over_every_axis():
    rollout = examples.random_rollout(0, B=B, T=T, turns=3)
    views = examples.random_views(0, rollout, per_rollout=2).replace(branch=16)
    credit = base.Credit(rollout.logp_BT + 1.0, rollout.value_BT, views.weight_K, base.Divergence("forward_kl"))
    objective = update.Objective(span=4, teacher="ema", teacher_rate=0.5)
    step = functools.partial(update.make_update, CONFIG, objective, OPTIMIZER)
    state = state_of(tiny.params(CONFIG), teacher=tiny.params(CONFIG, 1))
    assert_equal_on(mesh_of(data=2, fsdp=2, tensor=2), step, state, rollout.replace(views=views), credit)


@pytest.mark.parametrize("name", optim.NAMES)
def test_parameters_and_optimizer_state_lie_where_the_table_says(name):
    config = tiny.config(heads=4, kv_heads=1, qk_norm=True, tied=False, value_head=True)
    optimizer = optim.make(name, optax.constant_schedule(0.1))
    state = jax.eval_shape(lambda p: state_of(p, teacher=p, optimizer=optimizer), tiny.params(config))
    found = by_path(sharding.param_shardings(state, transformer.LOGICAL_AXES, mesh_of(data=2, fsdp=2, tensor=2)))
    table = {
        "embed/embedding": P("tensor", "fsdp"),
        "unembed/kernel": P("fsdp", "tensor"),
        "layers/0/attention/q": P("fsdp", "tensor", None),
        "layers/0/attention/k": P("fsdp", None, None),  # one head does not divide by two
        "layers/0/attention/o": P("tensor", None, "fsdp"),
        "layers/0/ffn/up": P("fsdp", "tensor"),
        "layers/0/ffn/down": P("tensor", "fsdp"),
        "layers/0/attention/q_norm/scale": P(None),
        "value_head/kernel": P("fsdp", None),
    }
    for path, spec in table.items():
        assert found[f"params/{path}"].spec == found[f"teacher/{path}"].spec == spec, path
        moments = [place for key, place in found.items() if key.startswith("opt/") and key.endswith(f"/{path}")]
        assert moments and all(place.spec == spec for place in moments), path
    assert found["step"].spec == P()


def test_meshes():
    assert dict(mesh_of(data=-1, fsdp=2).shape) == {"data": 4, "fsdp": 2, "tensor": 1, "context": 1}
    assert mesh_of(data=-1).axis_names == sharding.AXES
    with pytest.raises(
        base.InputError, match="mesh data 3 x fsdp 1 x tensor 1 x context 1 needs 3 devices, there are 8"
    ):
        mesh_of(data=3)


def test_rows_go_over_data_and_fsdp_and_must_divide():
    mesh = mesh_of(data=2, fsdp=4)
    x = sharding.put_rows({"a": np.arange(16), "b": np.zeros((8, 3))}, mesh)
    assert {shard.data.shape for shard in x["a"].addressable_shards} == {(2,)}
    assert {shard.data.shape for shard in x["b"].addressable_shards} == {(1, 3)}
    with pytest.raises(ValueError, match="data"):
        sharding.put_rows(np.zeros(6), mesh)
