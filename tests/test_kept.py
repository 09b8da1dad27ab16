"""Placed results that stay in files: the same as without, read lazily, inputs of other programs."""

import errno
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam

import beamjax as bj
from beamjax.errors import ArrayFormatError, OptionsError, SourceError, WorkerError
from beamjax.sources.placed import MANIFEST

N = 50
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
W = np.array([1.0, -1.0, 0.5], np.float32)
RUNNERS = {
    "local": {"runner": "local"},
    "one": {},
    "threads": {"options": {"direct_running_mode": "multi_threading", "direct_num_workers": 2}},
    "processes": {"options": {"direct_running_mode": "multi_processing", "direct_num_workers": 2}},
}


@bj.program(clients=N)
def embed(w, x):
    y = bj.map_fn(lambda v: {"score": v @ w, "scaled": (v * w).astype(jnp.bfloat16)}, x)
    return y, bj.reduce_sum(y["score"])


@bj.program(clients=N)
def rounds(w, x):
    def one(state, _):
        state = bj.map_fn(lambda s, v: s * 0.5 + v @ w, (state, x))
        return state, state

    return jax.lax.scan(one, bj.broadcast(jnp.float32(0)), length=3)


def kept(fn, *args, how=None, **options):
    how = dict(how or {})
    how["options"] = {"shard_size": 8, **how.get("options", {}), **options}
    return bj.run(fn, *args, keep="placed", **how)


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        array = np.asarray(a)
        assert array.dtype == b.dtype
        assert array.shape == b.shape
        assert array.tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("how", RUNNERS)
def test_results_are_those_of_a_run_without(how, tmp_path):
    found = kept(embed, W, X, how=RUNNERS[how], results_folder=str(tmp_path / "r"))
    expected = bj.run(embed, W, X, runner="local", options={"shard_size": 8})
    placed, total = found
    assert all(isinstance(leaf, bj.Placed) for leaf in placed.values())
    assert isinstance(total, jax.Array)
    same(found, expected)
    assert sorted(os.listdir(tmp_path / "r")) == ["0-scaled", "0-score"]
    for leaf in placed.values():
        names = os.listdir(leaf.folder)
        assert MANIFEST in names
        assert sorted(names) == sorted([*leaf.files, MANIFEST])
        stored = [np.load(Path(leaf.folder, name)) for name in leaf.files]
        assert sum(map(len, stored)) == N


@pytest.mark.parametrize("how", ["local", "one", "processes"])
def test_the_state_of_a_loop_and_what_it_stacks(how):
    found = kept(rounds, W, X, how=RUNNERS[how])
    expected = bj.run(rounds, W, X, runner="local", options={"shard_size": 8})
    assert isinstance(found[0], bj.Placed)
    same(found, expected)


def test_a_handle_reads_what_it_is_asked_for(tmp_path):
    (placed, _) = kept(embed, W, X, results_folder=tmp_path)
    score, scaled = placed["score"], placed["scaled"]
    expected = jax.jit(embed)(W, X)[0]["score"]
    assert score.shape == (N,)
    assert (scaled.shape, scaled.dtype, scaled.ndim) == ((N, 3), ml_dtypes.bfloat16, 2)
    assert len(score) == N
    np.testing.assert_array_equal(score[3], expected[3])
    np.testing.assert_array_equal(score[-1], expected[-1])
    np.testing.assert_array_equal(score[6:20], expected[6:20])
    np.testing.assert_array_equal(score[20:6], expected[20:6])
    np.testing.assert_array_equal(score[::7], expected[::7])
    np.testing.assert_array_equal(np.asarray(score, np.float64), np.asarray(expected, np.float64))
    with pytest.raises(IndexError, match="found the index 50, expected one of 50"):
        score[N]
    with pytest.raises(TypeError, match=r"np\.asarray"):
        score["x"]


@pytest.mark.parametrize("how", ["local", "one", "processes"])
def test_it_is_the_input_of_another_program(how):
    placed, _ = kept(embed, W, X, how=RUNNERS[how])

    @bj.program(clients=N)
    def total(y):
        return bj.reduce_sum(bj.map_fn(lambda m: m["score"] * 2, y))

    expected = jax.jit(total)(jax.jit(embed)(W, X)[0])
    np.testing.assert_allclose(bj.run(total, placed, **RUNNERS[how]), expected, rtol=1e-6)
    assert bj.verify(total, placed).ok


def test_typed_keys_and_empty_members():
    @bj.program(clients=N)
    def draw(key, x):
        keys = bj.map_fn(lambda i: jax.random.fold_in(key, i), jnp.arange(N))
        return keys, bj.map_fn(lambda v: v[:0], x)

    key = jax.random.key(3)
    keys, nothing = kept(draw, key, X)
    expected = jax.jit(draw)(key, X)
    same(keys, jax.random.key_data(expected[0]))
    same(nothing, expected[1])

    @bj.program(clients=N)
    def use(keys):
        return bj.reduce_sum(bj.map_fn(jax.random.uniform, keys))

    np.testing.assert_allclose(bj.run(use, keys), jax.jit(use)(expected[0]), rtol=1e-6)


def test_members_along_another_axis_are_arrays():
    @bj.program(clients=N)
    def double(x):
        return bj.map_fn(lambda v: v * 2, x)

    found = kept(jax.vmap(double, in_axes=2, out_axes=0), np.stack([X, X], axis=2))
    assert isinstance(found, jax.Array)


def test_members_that_are_counted():
    @bj.program(rows=None)
    def double(x):
        return bj.map_fn(lambda v: v * 2, x)

    chunks = [X[:20], X[20:21], X[21:]]
    for how in ("local", "one"):
        found = kept(double, bj.from_chunks(lambda: chunks), how=RUNNERS[how])
        assert isinstance(found, bj.Placed)
        same(found, X * 2)


def test_temporary_files_go_with_the_handles(tmp_path):
    placed, _ = kept(embed, W, X, work_folder=str(tmp_path))
    folder = Path(placed["score"].folder)
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    del placed
    gc.collect()
    assert not list(tmp_path.rglob("*"))


def test_a_folder_of_ones_own_stays_and_is_opened_anywhere(tmp_path):
    placed, _ = kept(embed, W, X, results_folder=tmp_path / "r")
    expected = np.asarray(placed["scaled"])
    folder = placed["scaled"].folder
    del placed
    gc.collect()
    code = "import beamjax as bj, numpy as np, sys; print(np.asarray(bj.open_placed(sys.argv[1])))"
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(expected)
    moved = tmp_path / "moved"
    os.rename(folder, moved)
    placed = bj.open_placed(moved)
    same(placed, expected)
    placed.remove()
    assert not moved.exists()


def test_a_second_run_does_not_touch_the_results_of_the_first(tmp_path):
    first, _ = kept(embed, W, X, results_folder=tmp_path)
    second, _ = kept(embed, 2 * W, X, results_folder=tmp_path)
    same(first["score"], jax.jit(embed)(W, X)[0]["score"])
    same(bj.open_placed(second["score"].folder), jax.jit(embed)(2 * W, X)[0]["score"])


def test_at_a_url(tmp_path):
    placed, _ = kept(embed, W, X, results_folder=f"bjtest:/{tmp_path}/r")
    same(placed, bj.run(embed, W, X, options={"shard_size": 8})[0])
    again = bj.open_placed(placed["score"].folder)
    same(again, placed["score"])
    again.remove()
    assert not list((tmp_path / "r" / "0-score").iterdir())


@pytest.mark.parametrize("how", ["local", "one"])
def test_nothing_is_left_of_a_run_that_fails(how, tmp_path):
    def body(v):
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.pure_callback(_refuse, kind, v, vmap_method="sequential")

    @bj.program(clients=N)
    def fails(x):
        return bj.map_fn(body, x)

    with pytest.raises(WorkerError, match="not this one"):
        kept(fails, X, how=RUNNERS[how], results_folder=tmp_path / "r")
    assert not list(tmp_path.rglob("*.npy"))


def _refuse(v):
    if v[0] > 100:
        raise ValueError("not this one")
    return np.float32(v[0])


@pytest.mark.parametrize("how", ["local", "one"])
def test_with_a_checkpoint(how, tmp_path):
    options = {"checkpoint": str(tmp_path / "c"), "results_folder": str(tmp_path / "r")}
    expected = bj.run(rounds, W, X, runner="local", options={"shard_size": 8})
    for _ in range(2):
        found = kept(rounds, W, X, how=RUNNERS[how], **options)
        assert isinstance(found[0], bj.Placed)
        same(found, expected)


def test_the_result_of_a_job(tmp_path):
    job = bj.launch(embed, W, X, keep="placed", options={"job_folder": str(tmp_path / "j")})
    placed, _ = job.result()
    assert placed["score"].folder.startswith(str(tmp_path / "j"))
    found, total = bj.open_job(tmp_path / "j").result()
    assert isinstance(found["score"], bj.Placed)
    same((found, total), jax.jit(embed)(W, X))


def test_bad_input(tmp_path):
    with pytest.raises(OptionsError, match="keep: found 'all'"):
        bj.run(embed, W, X, keep="all")
    with pytest.raises(OptionsError, match="results_folder: found a folder, but nothing is kept"):
        bj.run(embed, W, X, options={"results_folder": str(tmp_path)})
    with pytest.raises(OptionsError, match="results_folder: found 3"):
        bj.run(embed, W, X, keep="placed", options={"results_folder": 3})
    with pytest.raises(OptionsError, match="options of transform"):
        bj.transform(embed, W, X, options={"keep": "placed"})
    (tmp_path / "file").write_text("")
    for how in ("local", "one"):
        with pytest.raises((SourceError, WorkerError), match="file"):
            kept(embed, W, X, how=RUNNERS[how], results_folder=str(tmp_path / "file"))


def test_bad_folders(tmp_path):
    with pytest.raises(SourceError, match=r"placed\.json: cannot read"):
        bj.open_placed(tmp_path)
    for text in ("", "[]", '{"version": 7}', '{"version": 1}', '{"version": 1, "folder": 3}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises((SourceError, ArrayFormatError), match="found"):
            bj.open_placed(tmp_path)
    (tmp_path / MANIFEST).unlink()
    placed, _ = kept(embed, W, X, results_folder=tmp_path / "r")
    score = placed["score"]
    path = Path(score.folder, score.files[0])
    np.save(path, np.zeros(3))
    with pytest.raises(ArrayFormatError, match="found float64"):
        bj.open_placed(score.folder)[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match=r"npy: found 100 bytes .* not a whole"):
        bj.open_placed(score.folder)[0]
    path.unlink()
    with pytest.raises(SourceError, match="cannot open"):
        bj.open_placed(score.folder)[0]


FULL = """
import sys
import jax, numpy as np
import beamjax as bj

@bj.program(clients=None)
def embed(x):
    return bj.map_fn(lambda v: jax.numpy.tile(v, 10), x)

@bj.program(clients=None)
def again(x):
    y = bj.map_fn(lambda v: jax.numpy.cumsum(jax.numpy.tile(v, 900)), x)
    total = bj.reduce_sum(y)
    return bj.reduce_max(bj.map_fn(lambda y: (y - total).sum(), y))

x = np.ones(50_000, np.float32)
for fn, given in (
    (embed, dict(runner="DirectRunner", keep="placed", options={"results_folder": "FOLDER/r"})),
    (embed, dict(runner="local", keep="placed", options={"results_folder": "FOLDER/r"})),
    (again, dict(runner="local", options={"work_folder": "FOLDER", "recompute": "nothing"})),
):
    try:
        bj.run(fn, x, **given)
    except bj.BeamjaxError as error:
        print(type(error).__name__, error)
    else:
        print("nothing happened")
"""


def full_disk(folder):
    """A file system of 1 MiB, if this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "beamjax-test", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_full_disk_is_an_error_on_every_runner(tmp_path):
    if not full_disk(tmp_path):
        pytest.skip("this user can't mount a small file system")
    try:
        code = FULL.replace("FOLDER", str(tmp_path))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        left = sorted(path.name for path in tmp_path.rglob("*"))
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
    assert done.returncode == 0, done.stderr
    on_beam, here, between = done.stdout.splitlines()
    for line in (on_beam, here):
        assert line.startswith(f"SourceError {tmp_path}/r/result/part-")
        assert re.search(r"npy: cannot write 2000\d{3} bytes of a result \(.*No space left", line)
    assert "cannot write 180000000 bytes of placed values" in between
    assert "No space left on device" in between
    assert left == []


def test_disks_without_posix_fallocate(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    expected = bj.run(embed, W, X, runner="local", options={"shard_size": 8})
    for number, replaced in enumerate((refuse, None)):
        with monkeypatch.context() as patch:
            if replaced is None:
                patch.delattr(os, "posix_fallocate", raising=False)
            else:
                patch.setattr(os, "posix_fallocate", replaced, raising=False)
            folder = str(tmp_path / str(number))
            same(kept(embed, W, X, how=RUNNERS["local"], results_folder=folder), expected)
