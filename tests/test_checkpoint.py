"""Checkpoints: bitwise round trips, atomic commits under kill -9, damage, misfits and full disks."""

import contextlib
import errno
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rsi_jax import base, checkpoint

ENVIRONMENT = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).resolve().parent.parent)}


def make_tree(seed: int) -> dict:
    """Every sort of leaf that a trainer holds, all values a function of the seed."""
    rng = np.random.default_rng(seed)
    params = {
        "layers": {i: {"q": jnp.asarray(rng.normal(size=(4, 8)).astype(np.float32))} for i in range(2)},
        "half": jnp.asarray(rng.normal(size=(3,)), jnp.bfloat16),
        "odd": jnp.array([jnp.nan, -0.0, jnp.inf, 1e-42], jnp.float32),
    }
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init(params),
        "state": base.TrainState(step=jnp.int32(seed), params=None, opt=(), aux={"ema": jnp.asarray(0.5 + seed)}),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
        "weak": jnp.asarray(seed),
        "weak_row": jnp.full((2,), 0.25),
        "host": {"count": seed, "rate": 0.1 * seed, "nan": float("nan"), "flag": True, "none": None},
        "numpy": {"f64": rng.normal(size=2), "i64": np.int64(2**40 + seed), "empty": np.zeros((0, 3))},
        "empty": jnp.zeros((2, 0), jnp.bfloat16),
        "mask": jnp.array(True),
    }


def template(seed: int = 0) -> dict:
    return make_tree(seed + 100)


def test_round_trip_is_bitwise_in_values_dtypes_weak_types_and_sorts(tmp_path):
    tree = make_tree(3)
    meta = {"cursor": [1, 2], "stage": "rl", "ledger": {"tokens": 2**60, "cost": 0.1}, "text": "é\n"}
    store = checkpoint.Checkpoints(tmp_path / "run")
    assert store.restore(template()) is None and store.latest_step() is None
    assert store.save(5, tree, meta)
    step, restored, read_meta = checkpoint.Checkpoints(tmp_path / "run").restore(template())
    assert (step, read_meta) == (5, meta)
    assert jax.tree.structure(restored) == jax.tree.structure(tree)
    for (path, new), old in zip(jax.tree.leaves_with_path(restored), jax.tree.leaves(tree), strict=True):
        assert type(new) is type(old), path
        if hasattr(old, "dtype"):
            assert (new.dtype, new.shape) == (old.dtype, old.shape), path
            assert getattr(new, "weak_type", None) == getattr(old, "weak_type", None), path
            assert getattr(new, "committed", None) == getattr(old, "committed", None), path
    assert checkpoint.digest(restored) == checkpoint.digest(tree) == store.digest(5) != checkpoint.digest(make_tree(4))
    draws = [jax.random.normal(t["key"], (3,)) for t in (tree, restored)]
    assert np.array_equal(*draws)


def test_restores_onto_the_templates_shardings(tmp_path):
    store = checkpoint.Checkpoints(tmp_path)
    store.save(1, {"x": jnp.arange(8.0), "key": jax.random.key(1), "weak": jnp.asarray(2.0)}, {})
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    abstract = {
        "x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding),
        "key": jax.device_put(jax.random.key(0), replicated),
        "weak": jax.device_put(jnp.asarray(0.0), replicated),
    }
    _, tree, _ = store.restore(abstract)
    assert tree["x"].sharding == sharding and tree["x"].committed
    assert tree["key"].sharding == replicated and tree["weak"].sharding == replicated and tree["weak"].weak_type
    assert np.array_equal(tree["x"], np.arange(8.0))
    step, tree, _ = store.restore(
        {"x": jax.ShapeDtypeStruct((8,), jnp.float32)} | {k: abstract[k] for k in ("key", "weak")}
    )
    assert not tree["x"].committed


def test_a_part_is_read_alone(tmp_path):
    store, tree = checkpoint.Checkpoints(tmp_path), make_tree(3)
    store.save(1, tree, {"done": True})
    step, part, meta = store.restore(template()["params"], only="params")
    assert (step, meta) == (1, {"done": True}) and checkpoint.digest(part) == checkpoint.digest(tree["params"])
    with pytest.raises(base.InputError, match="1 of 5 leaves differ .missing in the checkpoint: params/more float32"):
        store.restore(template()["params"] | {"more": jnp.zeros(2)}, only="params")


def test_a_single_leaf_and_scalars_alone(tmp_path):
    store = checkpoint.Checkpoints(tmp_path)
    store.save(0, 7, {})
    store.save(1, jnp.arange(3), {})
    assert np.array_equal(store.restore(jnp.zeros(3, jnp.int32))[1], [0, 1, 2])
    shutil.rmtree(tmp_path / "1")
    assert store.restore(0)[1] == 7


def test_retention_and_growing_steps(tmp_path):
    store = checkpoint.Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 5, 9):
        assert store.save(step, {"x": jnp.full(3, step)}, {"step": step})
    assert store.steps() == [5, 9] and store.latest_step() == 9
    assert store.save(9, {"x": jnp.full(3, 9)}, {"step": 9}) is False
    for step, value in ((9, 8), (7, 7), (5, 5)):
        with pytest.raises(ValueError, match="steps must grow"):
            store.save(step, {"x": jnp.full(3, value)}, {"step": step})
    with pytest.raises(base.InputError, match="keep=0"):
        checkpoint.Checkpoints(tmp_path, keep=0)


def test_a_misfit_names_the_leaves(tmp_path):
    store = checkpoint.Checkpoints(tmp_path)
    saved = {
        "a": jnp.zeros((2, 3)),
        "b": jnp.zeros(2, jnp.bfloat16),
        "old": jnp.zeros(1),
        "n": 1,
        "k": jax.random.key(0),
    }
    store.save(1, saved, {})
    wanted = {"a": jnp.zeros((2, 4)), "b": jnp.zeros(2), "n": jnp.int32(1), "k": jax.random.key(0, impl="rbg")}
    wanted["new"] = {i: jnp.zeros(1) for i in range(6)}
    with pytest.raises(base.InputError) as caught:
        store.restore(wanted)
    text = str(caught.value)
    assert "\n" not in text and "11 of 11 leaves differ" in text and "choose a new run folder" in text
    assert "a saved float32[2,3], wanted float32[2,4]" in text and "b saved bfloat16[2], wanted float32[2]" in text
    assert "old float32[1]" in text and "new/0 float32[1]" in text and "and 2 more" in text
    assert "n saved int, wanted int32[]" in text and "k saved key<fry>[], wanted key<rbg>[]" in text
    assert store.skipped == 0


@pytest.mark.parametrize("tree", [{"x": "text"}, {"x": np.array(["a"])}, {"a/b": jnp.ones(1)}, {"a": {"0": 1}, 1: 2}])
def test_what_cannot_be_saved_is_refused(tmp_path, tree):
    with pytest.raises((ValueError, TypeError)):
        checkpoint.Checkpoints(tmp_path).save(1, tree, {})
    assert checkpoint.Checkpoints(tmp_path).steps() == []


def test_meta_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not JSON"):
        checkpoint.Checkpoints(tmp_path).save(1, {"x": 1}, {"x": np.int64(3)})


def flip_byte(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


DAMAGES = {
    "flipped bit of an array": lambda p: flip_byte(largest_file(p / "arrays")),
    "flipped bit of the host part": lambda p: flip_byte(p / "host" / "metadata"),
    "cut array file": lambda p: os.truncate(largest_file(p / "arrays"), 100),
    "no array files": lambda p: shutil.rmtree(p / "arrays"),
    "no host part": lambda p: shutil.rmtree(p / "host"),
    "empty host part": lambda p: os.truncate(p / "host" / "metadata", 0),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_step_is_named_skipped_counted_and_written_again(tmp_path, damage, caplog):
    store = checkpoint.Checkpoints(tmp_path)
    for step in (1, 2):
        store.save(step, {"x": jnp.full(3000, step)}, {})
    DAMAGES[damage](tmp_path / "2")
    with caplog.at_level("WARNING", "absl"):
        step, tree, _ = store.restore({"x": jnp.zeros(3000, jnp.int32)})
    assert step == 1 and tree["x"][0] == 1 and store.skipped == 1
    assert f"{tmp_path / '2'} is damaged" in caplog.text
    assert store.save(2, {"x": jnp.full(3000, 22)}, {})
    assert (tmp_path / "2.damaged").is_dir() and store.steps() == [1, 2]
    assert checkpoint.Checkpoints(tmp_path).restore({"x": jnp.zeros(3000, jnp.int32)})[1]["x"][0] == 22


def test_when_every_step_is_damaged_the_run_does_not_start_afresh(tmp_path):
    store = checkpoint.Checkpoints(tmp_path)
    store.save(1, {"x": jnp.ones(3)}, {})
    shutil.rmtree(tmp_path / "1" / "host")
    with pytest.raises(base.InputError, match="no checkpoint in .* can be read"):
        store.restore({"x": jnp.ones(3)})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_failing_disk_is_one_clear_line(tmp_path, monkeypatch, number):
    store = checkpoint.Checkpoints(tmp_path)
    store.save(1, {"x": jnp.ones(3)}, {})

    def fail(folder, step, *_, **__):
        (folder / f"{step}.orbax-checkpoint-tmp").mkdir()
        raise RuntimeError("writer") from OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint, "_write", fail)
    words = {errno.ENOSPC: "no space left on", errno.EROFS: "read-only file system at"}[number]
    with pytest.raises(base.InputError) as caught:
        store.save(2, {"x": jnp.ones(3)}, {})
    assert str(caught.value) == (
        f"checkpoint at step 2 not written: {words} {tmp_path}; earlier checkpoints are intact"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["1"]
    assert store.restore({"x": jnp.zeros(3)})[0] == 1


def test_a_disk_that_is_really_full(tmp_path, capfd):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    try:
        store = checkpoint.Checkpoints(small / "run")
        store.save(1, {"x": jnp.ones(3)}, {})
        capfd.readouterr()
        with pytest.raises(base.InputError, match="step 2 not written: no space left on"):
            store.save(2, {"x": jnp.arange(2_000_000)}, {})
        assert capfd.readouterr().err == ""
        assert store.save(3, {"x": jnp.ones(3) * 3}, {})
        assert store.restore({"x": jnp.zeros(3)})[0] == 3
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


SAVER = """
    import sys
    import numpy as np
    from rsi_jax import checkpoint
    store = checkpoint.Checkpoints(sys.argv[1], keep=2)
    found = store.restore({"x": np.zeros((4, 50_000)), "n": 0})
    step = found[0] if found else 0
    while True:
        step += 1
        print("begin", step, flush=True)
        store.save(step, {"x": np.full((4, 50_000), float(step)), "n": step}, {"cursor": step})
        print("saved", step, flush=True)
"""


def start(code: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


def test_kill_9_inside_save_loses_nothing_committed(tmp_path):
    rng, found = random.Random(0), 0
    for _ in range(3):
        process = start(SAVER, str(tmp_path))
        lines, begins = [], rng.randrange(2, 5)
        while begins:
            lines.append(process.stdout.readline().split())
            begins -= lines[-1][0] == "begin"
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.communicate()[0].splitlines()]
        saved = max(int(step) for word, step in lines if word == "saved")
        store = checkpoint.Checkpoints(tmp_path, keep=2)
        step, tree, meta = store.restore({"x": np.zeros((4, 50_000)), "n": 0})
        assert step in (saved, saved + 1) and step > found and store.skipped == 0
        assert meta == {"cursor": step} and tree["n"] == step and (tree["x"] == step).all()
        found = step
    store.save(found + 1, {"x": np.zeros((4, 50_000)), "n": 0}, {})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([str(found), str(found + 1)])


STOPPER = """
    import hashlib
    import time
    from rsi_jax import checkpoint
    with checkpoint.Stop() as stop:
        print("ready", flush=True)
        while not stop.requested:
            time.sleep(0.01)
        print(stop.name, flush=True)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as in a long compile, no Python handler runs in here
"""


def test_stop_sets_a_flag_and_a_second_sigint_kills():
    process = start(STOPPER)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n"
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    for _ in range(100):  # two that come before the first is delivered count as one
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3)
            break
    assert process.returncode == 130
    process.communicate()


def test_stop_puts_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with checkpoint.Stop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested and stop.name == "SIGINT"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_importing_does_not_import_orbax():
    code = "import sys; from rsi_jax import checkpoint; assert 'orbax' not in ' '.join(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)
