"""Placed results in files: equal to results in memory, read lazily, inputs of other programs."""

import errno
import gc
import json
import os
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known
from faults import WAYS
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import ArrayFormatError, OptionsError, SourceError, WorkerError
from beamjax.sources.arrays.placed import Placed

N = 50
X = np.arange(N * 3, dtype=np.float32).reshape(N, 3)
W = np.array([1.0, -1.0, 0.5], np.float32)
PROCESSES = pytest.param("processes", marks=pytest.mark.long)


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


def run(fn, *args, way="one", keep="placed", **options):
    runner, more = WAYS[way]
    return bj.run(fn, *args, runner=runner, keep=keep, options={"shard_size": 8, **more, **options})


@pytest.mark.parametrize("way", ["local", "one", "threads", PROCESSES])
def test_results_are_those_of_a_run_in_memory(way, tmp_path):
    placed, total = run(embed, W, X, way=way, results_folder=str(tmp_path / "r"))
    assert isinstance(total, jax.Array)
    assert_same_bits((placed, total), run(embed, W, X, way="local", keep=None))
    assert sorted(os.listdir(tmp_path / "r")) == ["0-scaled", "0-score"]
    for leaf in placed.values():
        assert isinstance(leaf, bj.Placed)
        assert sorted(os.listdir(leaf.folder)) == sorted([*leaf.files, Placed.manifest])
        stored = [np.load(Path(leaf.folder, name)) for name in leaf.files]
        assert sum(map(len, stored)) == N

    @bj.program(clients=N)
    def total_of(y):
        return bj.reduce_sum(bj.map_fn(lambda m: m["score"] * 2, y))

    np.testing.assert_allclose(run(total_of, placed, way=way, keep=None), 2 * total, rtol=1e-6)
    if way == "local":
        assert bj.verify(total_of, placed).ok


@pytest.mark.parametrize("way", ["local", "one"])
def test_slices_of_members_are_arrays(way, tmp_path):
    """Of a value that is kept as a whole, or not at all."""

    @bj.program(clients=N)
    def changes(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        return y, y[1:], jnp.cumsum(y * 2)[:-1]

    found = run(changes, W, X, way=way, results_folder=str(tmp_path))
    assert [isinstance(leaf, bj.Placed) for leaf in found] == [True, False, False]
    assert_same_bits(found, run(changes, W, X, way="local", keep=None))
    assert_same_bits(found[1], found[0][1:])


@pytest.mark.parametrize("way", ["local", "one", PROCESSES])
def test_the_state_of_a_loop_and_what_it_stacks(way, tmp_path):
    expected = run(rounds, W, X, way="local", keep=None)
    for options in ({}, {"checkpoint": str(tmp_path / "c"), "results_folder": str(tmp_path / "r")}):
        for _ in range(2):
            found = run(rounds, W, X, way=way, overwrite=True, **options)
            assert isinstance(found[0], bj.Placed)
            assert_same_bits(found, expected)


def test_a_handle_reads_what_it_is_asked_for(tmp_path):
    placed, _ = run(embed, W, X, results_folder=tmp_path)
    score, scaled = placed["score"], placed["scaled"]
    expected = np.asarray(jax.jit(embed)(W, X)[0]["score"])
    assert (score.shape, len(score)) == ((N,), N)
    assert (scaled.shape, scaled.dtype, scaled.ndim) == ((N, 3), jnp.bfloat16, 2)
    some = [3, -1, -N, N - 1, slice(6, 20), slice(20, 6), slice(None, None, 7), slice(8, 16)]
    for index in [*some, slice(-3, None), slice(None, None, -7)]:
        np.testing.assert_array_equal(score[index], expected[index], err_msg=str(index))
    np.testing.assert_array_equal(np.asarray(score, np.float64), expected.astype(np.float64))
    for index in (N, -N - 1):
        with pytest.raises(IndexError, match=f"found the index {index}, expected one of 50"):
            score[index]
    with pytest.raises(TypeError, match=r"np\.asarray"):
        score["x"]


def test_typed_keys_and_empty_members():
    @bj.program(clients=N)
    def draw(key, x):
        keys = bj.map_fn(lambda i: jax.random.fold_in(key, i), jnp.arange(N))
        return keys, bj.map_fn(lambda v: v[:0], x)

    key = jax.random.key(3)
    found = run(draw, key, X)
    keys, empty = jax.jit(draw)(key, X)
    assert_same_bits(found, (jax.random.key_data(keys), empty))

    @bj.program(clients=N)
    def use(keys):
        return bj.reduce_sum(bj.map_fn(jax.random.uniform, keys))

    np.testing.assert_allclose(bj.run(use, found[0]), jax.jit(use)(keys), rtol=1e-6)


@bj.program(clients=None)
def double(x):
    return bj.map_fn(lambda v: v * 2, x)


def test_one_member():
    assert_same_bits(run(double, X[:1]), 2 * X[:1])


def test_members_along_another_axis_are_arrays():
    across = bj.program(clients=N)(lambda x: bj.map_fn(lambda v: v * 2, x.T))
    assert_same_bits(run(across, X.T), 2 * X)
    found = run(jax.vmap(double, in_axes=2, out_axes=0), np.stack([X, X], axis=2))
    assert isinstance(found, jax.Array)


@pytest.mark.parametrize("way", ["local", "one"])
def test_sources_of_unknown_length(way):
    double = bj.program(rows=None)(lambda x: bj.map_fn(lambda v: v * 2, x))
    found = run(double, bj.from_chunks(lambda: [X[:20], X[20:21], X[21:]]), way=way)
    assert isinstance(found, bj.Placed)
    assert_same_bits(found, X * 2)


# --- folders


def test_temporary_files_go_with_the_handles(tmp_path):
    placed, _ = run(embed, W, X, work_folder=str(tmp_path))
    folder = Path(placed["score"].folder)
    assert folder.is_dir()
    assert folder.is_relative_to(tmp_path)
    del placed
    gc.collect()
    assert not list(tmp_path.rglob("*"))


def read(folder):
    return np.asarray(bj.open_placed(folder))


def test_a_given_folder_stays_and_can_be_moved(tmp_path, other_process):
    placed, _ = run(embed, W, X, results_folder=tmp_path / "r")
    expected, folder = np.asarray(placed["scaled"]), placed["scaled"].folder
    del placed
    gc.collect()
    assert_same_bits(other_process(read, folder), expected)
    moved = tmp_path / "moved"
    os.rename(folder, moved)
    placed = bj.open_placed(moved)
    assert_same_bits(placed, expected)
    placed.remove()
    assert not moved.exists()


def test_a_second_run_does_not_touch_the_results_of_the_first(tmp_path):
    first, _ = run(embed, W, X, results_folder=tmp_path)
    with pytest.raises(bj.OptionsError, match="found a result of another run"):
        run(embed, 2 * W, X, results_folder=tmp_path)
    assert_same_bits(bj.open_placed(first["score"].folder), jax.jit(embed)(W, X)[0]["score"])
    second, _ = run(embed, 2 * W, X, results_folder=tmp_path, overwrite=True)
    with pytest.raises(bj.SourceError, match="No such file"):
        np.asarray(first["score"])
    assert_same_bits(bj.open_placed(second["score"].folder), jax.jit(embed)(2 * W, X)[0]["score"])


def test_at_a_url(tmp_path):
    placed, _ = run(embed, W, X, results_folder=f"bjtest:/{tmp_path}/r")
    assert_same_bits(placed, run(embed, W, X, keep=None)[0])
    again = bj.open_placed(placed["score"].folder)
    assert_same_bits(again, placed["score"])
    again.remove()
    assert not list((tmp_path / "r" / "0-score").iterdir())


def test_the_result_of_a_job(tmp_path):
    job = bj.launch(embed, W, X, keep="placed", options={"job_folder": str(tmp_path / "j")})
    placed, _ = job.result()
    assert placed["score"].folder.startswith(str(tmp_path / "j"))
    found, total = bj.open_job(tmp_path / "j").result()
    assert isinstance(found["score"], bj.Placed)
    assert_same_bits((found, total), jax.jit(embed)(W, X))


# --- failures


def _refuse(v):
    if v[0] > 100:
        raise ValueError("not this one")
    return np.float32(v[0])


@pytest.mark.parametrize("way", ["local", "one"])
def test_nothing_is_left_of_a_run_that_fails(way, tmp_path):
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    body = lambda v: jax.pure_callback(_refuse, kind, v, vmap_method="sequential")
    fails = bj.program(clients=N)(lambda x: bj.map_fn(body, x))
    with pytest.raises(WorkerError, match="not this one"):
        run(fails, X, way=way, results_folder=tmp_path / "r")
    assert not list(tmp_path.rglob("*.npy"))


def test_options_that_are_refused(tmp_path):
    for message, options in (
        ("keep: found 'all'", {"keep": "all"}),
        ("results_folder: found a folder, but", {"keep": None, "results_folder": str(tmp_path)}),
        ("results_folder: found 3", {"results_folder": 3}),
    ):
        with pytest.raises(OptionsError, match=message):
            run(embed, W, X, **options)
    with pytest.raises(OptionsError, match="options of transform"):
        bj.transform(embed, W, X, options={"keep": "placed"})
    for option in ({"job_folder": "x"}, {"report": "x.html"}):
        with pytest.raises(OptionsError, match="in the options of transform, which records no job"):
            bj.transform(embed, W, X, options=option)
    (tmp_path / "file").write_text("")
    for way in ("local", "one"):
        with pytest.raises((SourceError, WorkerError), match="file"):
            run(embed, W, X, way=way, results_folder=str(tmp_path / "file"))


def test_damaged_folders(tmp_path):
    with pytest.raises(SourceError, match=r"placed\.json: cannot read"):
        bj.open_placed(tmp_path)
    for text in ("", "[]", '{"version": 7}', '{"version": 1}', '{"version": 1, "folder": 3}'):
        (tmp_path / Placed.manifest).write_text(text)
        with pytest.raises((SourceError, ArrayFormatError), match="found"):
            bj.open_placed(tmp_path)
    placed, _ = run(embed, W, X, results_folder=tmp_path / "r")
    score = placed["score"]
    manifest = Path(score.folder, Placed.manifest)
    whole = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(whole) | {"parts": []}))
    with pytest.raises(SourceError, match="found member 0 in no file"):
        bj.open_placed(score.folder)[0]
    manifest.write_text(whole)
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


@bj.program(clients=None)
def tiled(x):
    return bj.map_fn(lambda v: jnp.tile(v, 10), x)


@bj.program(clients=None)
def twice_over(x):
    y = bj.map_fn(lambda v: jnp.cumsum(jnp.tile(v, 900)), x)
    total = bj.reduce_sum(y)
    return bj.reduce_max(bj.map_fn(lambda y: (y - total).sum(), y))


def test_a_full_disk_is_an_error_on_every_runner(tmp_path):
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "beamjax-test", str(tmp_path)]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user can't mount a small file system")
    try:
        x, folder = np.ones(50_000, np.float32), str(tmp_path / "r")
        for runner in ("DirectRunner", "local"):
            with pytest.raises(SourceError) as caught:
                bj.run(tiled, x, runner=runner, keep="placed", options={"results_folder": folder})
            text = str(caught.value)
            assert text.startswith(f"{folder}/result/part-")
            assert re.search(r"npy: cannot write 2000\d{3} bytes of a result \(.*No space", text)
        options = {"work_folder": str(tmp_path)}
        with pytest.raises(bj.BeamjaxError, match=r"cannot write 180000000 bytes of .*No space"):
            bj.run(twice_over, x, runner="local", options=options)
        assert list(tmp_path.rglob("*")) == []
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_disks_without_posix_fallocate(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    expected = run(embed, W, X, way="local", keep=None)
    monkeypatch.setattr(os, "posix_fallocate", refuse, raising=False)
    assert_same_bits(run(embed, W, X, way="local", results_folder=str(tmp_path / "0")), expected)
    monkeypatch.delattr(os, "posix_fallocate")
    assert_same_bits(run(embed, W, X, way="local", results_folder=str(tmp_path / "1")), expected)
