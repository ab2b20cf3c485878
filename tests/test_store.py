"""The archive of rollouts: exact reads, resume, kills inside append, readers beside a writer, full disks."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from rsi_jax import base, store

HERE = pathlib.Path(__file__).resolve().parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(HERE.parent)}


def make_columns(step: int, rows: int = 4, tokens: int = 10, views: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "tokens_BT": rng.integers(0, 1000, (rows, tokens), dtype=np.int32),
        "logp_BT": rng.normal(size=(rows, tokens)).astype(np.float32),
        "kept_mass_BT": rng.random((rows, tokens), dtype=np.float32),
        "group_B": np.arange(rows, dtype=np.int32),
        "segments.parent_BS": rng.integers(0, 3, (rows, 2), dtype=np.int32),
        "flag_B": rng.random(rows) < 0.5,
        "half_BD": rng.normal(size=(rows, 2)).astype("bfloat16"),
        "views.hint_KN": rng.integers(0, 9, (rows * views, 5), dtype=np.int32),
    }


def make_transcripts(step: int, rows: int = 4) -> list[dict]:
    return [{"row": row, "text": f"é\nstep {step}"} for row in range(rows)]


def append(archive: store.Archive, *steps: int, **shape: int) -> None:
    for step in steps:
        archive.append(step, make_columns(step, **shape), make_transcripts(step))


def assert_is_step(archive: store.Archive, step: int, **shape: int) -> None:
    wanted = make_columns(step, **shape)
    read = archive.read(list(wanted), step)
    for name, column in wanted.items():
        assert read[name].dtype == column.dtype and read[name].shape == column.shape, name
        assert read[name].tobytes() == column.tobytes(), name
    assert archive.transcripts(step) == [{"step": step} | record for record in make_transcripts(step)]


def test_steps_read_back_bitwise_and_by_slice(tmp_path):
    archive = store.Archive(tmp_path / "rollouts")
    assert archive.steps() == [] and archive.columns() == {}
    append(archive, 1, 2, 5)
    other = store.Archive(tmp_path / "rollouts")
    assert other.steps() == [1, 2, 5]
    assert other.columns()["half_BD"] == other.columns(2)["half_BD"] == np.dtype("bfloat16")
    assert other.rows_of(2) == slice(4, 8) and other.rows_of(5, "K") == slice(24, 36)
    for step in (1, 2, 5):
        assert_is_step(other, step)
    whole = np.concatenate([make_columns(step)["tokens_BT"] for step in (1, 2, 5)])
    for rows in (slice(3, 9), slice(None), slice(-2, None), slice(5, 6), other.rows_of(2)):
        assert np.array_equal(other.read(["tokens_BT"], rows)["tokens_BT"], whole[rows])
    assert other.read(["tokens_BT", "group_B"], slice(4, 4))["group_B"].shape == (0,)


def test_ragged_steps_are_exact_by_step_and_padded_by_slice(tmp_path):
    archive = store.Archive(tmp_path)
    shapes = {
        1: {"tokens": 10},
        2: {"tokens": 3, "rows": 7},
        3: {"tokens": 5000, "rows": 2},
        4: {"tokens": 1, "views": 0},
    }
    for step, shape in shapes.items():
        append(archive, step, **shape)
    for step, shape in shapes.items():
        assert_is_step(archive, step, **shape)
    read = archive.read(["tokens_BT", "kept_mass_BT"], slice(0, 11))
    assert read["tokens_BT"].shape == (11, 10)
    assert (read["tokens_BT"][4:, 3:] == 0).all() and (read["kept_mass_BT"][4:, 3:] == 1).all()
    assert archive.read(["tokens_BT"], slice(None))["tokens_BT"].shape == (17, 5000)


def test_truncate_drops_what_a_resumed_run_repeats(tmp_path):
    archive = store.Archive(tmp_path)
    append(archive, 1, tokens=10)
    append(archive, 2, 3, tokens=3000)
    assert archive.truncate(3) == 0 and archive.truncate(1) == 2 and archive.truncate(1) == 0
    assert archive.steps() == [1]
    with pytest.raises(ValueError, match="step 2 is not in the archive"):
        archive.read(["tokens_BT"], 2)
    append(archive, 2, tokens=20)
    append(archive, 3, tokens=20)
    assert_is_step(archive, 2, tokens=20)
    padded = archive.read(["tokens_BT"], slice(None))["tokens_BT"]
    assert padded.shape == (12, 20) and (padded[:4, 10:] == 0).all()
    assert len((tmp_path / "transcripts.jsonl").read_text().splitlines()) == 12
    assert archive.truncate(0) == 3
    columns = make_columns(1) | {"tokens_BT": make_columns(1)["tokens_BT"].astype(np.int64)}
    columns["group_B"] = np.zeros((4, 1), np.int32)
    archive.append(1, columns, [])
    assert archive.read(["tokens_BT"], 1)["tokens_BT"].dtype == np.int64 and archive.transcripts(1) == []


def test_columns_may_come_later_but_never_silently(tmp_path):
    archive = store.Archive(tmp_path)
    append(archive, 1)
    archive.append(2, make_columns(2) | {"value_BT": np.ones((4, 10), np.float32)}, [])
    assert (archive.read(["value_BT"], 2)["value_BT"] == 1).all()
    assert "value_BT" in archive.columns(2) and "value_BT" not in archive.columns(1)
    for rows in (1, slice(None)):
        with pytest.raises(ValueError, match="step 1 has no column value_BT"):
            archive.read(["value_BT"], rows)


def test_misuse_is_refused_before_anything_is_written(tmp_path):
    archive = store.Archive(tmp_path)
    append(archive, 1)
    before = (tmp_path / "index.json").read_bytes()
    wrong = {
        "in earlier steps int32": {"tokens_BT": np.zeros((4, 10))},
        "3 rows": {"group_B": np.zeros(3, np.int32)},
        "dimensions": {"tokens": np.zeros(4)},
        "shape": {"tokens_BT": np.zeros(4, np.int32)},
    }
    for words, columns in wrong.items():
        with pytest.raises(ValueError, match=words):
            archive.append(2, make_columns(2) | columns, [])
    with pytest.raises(TypeError):
        archive.append(2, make_columns(2), [{"text": object()}])
    with pytest.raises(ValueError, match="truncate"):
        append(archive, 1)
    with pytest.raises(ValueError, match="no column loss_BT"):
        archive.read(["loss_BT"], 1)
    with pytest.raises(ValueError, match="one row axis"):
        archive.read(["tokens_BT", "views.hint_KN"], slice(None))
    with pytest.raises(ValueError, match="slice step 2"):
        archive.read(["tokens_BT"], slice(0, 4, 2))
    assert (tmp_path / "index.json").read_bytes() == before


def test_a_rollout_comes_back_as_it_was(tmp_path):
    columns = {name: np.zeros((2, 3), np.int32) for name in base.Segments.__dataclass_fields__}
    views = (
        {name: np.ones(4, np.int32) for name in base.Views.__dataclass_fields__}
        | {"branch": 7}
        | {"hint_KN": np.ones((4, 2), np.int32)}
    )
    rollout = base.Rollout(
        tokens_BT=np.arange(10, dtype=np.int32).reshape(2, 5),
        logp_BT=np.zeros((2, 5), np.float32),
        kept_mass_BT=np.ones((2, 5), np.float32),
        group_B=np.zeros(2, np.int32),
        segments=base.Segments(**columns),
        weight_B=np.ones(2, np.float32),
        chain_B=np.arange(2, dtype=np.int32),
        views=base.Views(**views),
    )
    archive = store.Archive(tmp_path)
    archive.append(1, store.columns_of(rollout), [])
    again = store.rollout_of(archive.read(list(archive.columns()), 1))
    assert again.value_BT is None and again.views.branch == 7
    assert {k: v.tobytes() for k, v in store.columns_of(again).items()} == {
        k: v.tobytes() for k, v in store.columns_of(rollout).items()
    }


def test_temporary_files_of_a_killed_writer_do_no_harm(tmp_path):
    append(store.Archive(tmp_path), 1)
    for path in [p for p in (tmp_path / "columns").rglob("*") if p.is_file()]:
        (path.parent / f"{path.name}.__lock").write_bytes(b"x" * 10_000)
    archive = store.Archive(tmp_path)
    append(archive, 2)
    assert_is_step(archive, 1)
    assert_is_step(archive, 2)


def test_damage_is_named(tmp_path):
    archive = store.Archive(tmp_path)
    append(archive, 1)
    chunk = next(p for p in (tmp_path / "columns" / "tokens_BT" / "c").rglob("*") if p.is_file())
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(bytes(data))
    with pytest.raises(base.InputError, match="column tokens_BT in .* is damaged"):
        archive.read(["tokens_BT"], 1)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(base.InputError, match=r"index.json is damaged"):
        archive.steps()


def test_a_disk_that_is_really_full(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small file system here")
    try:
        archive = store.Archive(small / "rollouts")
        append(archive, 1)
        with pytest.raises(base.InputError, match="rollouts of step 2 not archived: no space left on"):
            append(archive, 2, rows=100, tokens=5000)
        with pytest.raises(base.InputError, match="rollouts of step 2 not archived: no space left on"):
            archive.append(2, make_columns(2), [{"text": "x" * 2_000_000}])
        assert_is_step(archive, 1)
        assert archive.steps() == [1]
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


WRITER = """
    import sys
    sys.path.insert(0, sys.argv[3])
    import test_store
    from rsi_jax import store
    archive = store.Archive(sys.argv[1])
    archive.truncate(int(sys.argv[2]))
    step = (archive.steps() or [0])[-1]
    while True:
        step += 1
        print("begin", step, flush=True)
        test_store.append(archive, step, rows=1 + step % 5, tokens=100 * (1 + step % 3))
        print("done", step, flush=True)
"""


def shape_of(step: int) -> dict[str, int]:
    return {"rows": 1 + step % 5, "tokens": 100 * (1 + step % 3)}


def test_kill_9_inside_append_keeps_what_was_committed_and_readers_never_see_less(tmp_path):
    rng, keep = random.Random(0), 0
    archive = store.Archive(tmp_path)
    for _ in range(3):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), str(keep), str(HERE)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        lines, begins = [], rng.randrange(2, 5)
        while begins:
            lines.append(process.stdout.readline().split())
            begins -= lines[-1][0] == "begin"
            if lines[-1][0] == "done":  # a reader beside the writer
                assert_is_step(archive, int(lines[-1][1]), **shape_of(int(lines[-1][1])))
        time.sleep(rng.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        lines += [line.split() for line in process.communicate()[0].splitlines()]
        done = max(int(step) for word, step in lines if word == "done")
        steps = archive.steps()
        assert steps == list(range(1, steps[-1] + 1)) and steps[-1] in (done, done + 1)
        for step in steps:
            assert_is_step(archive, step, **shape_of(step))
        keep = steps[-1] - rng.randrange(2)
