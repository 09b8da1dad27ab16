"""Zarr arrays as placed inputs, against zarr's own reading; and what is refused."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from source_programs import (
    assert_opens_elsewhere,
    assert_reads,
    assert_runs,
    assert_same,
    assert_threads_read,
)

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources import block_source, zarr_source
from beamjax.sources.source_base import open_spec

zarr = pytest.importorskip(
    "zarr", reason="ZARR IS NOT TESTED: pip install 'beamjax[zarr]'", exc_type=ImportError
)

N = 23
X = np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3)
FORMATS = (2, 3)


@pytest.fixture(params=FORMATS, ids=lambda number: f"v{number}")
def version(request):
    block_source.BLOCKS.clear()
    return request.param


def save(path, array, chunks, version=3, **more):
    made = zarr.create_array(
        str(path), shape=array.shape, dtype=array.dtype, chunks=chunks, zarr_format=version,
        overwrite=True, **more,
    )  # fmt: skip
    made[...] = array
    return str(path)


def numbers(dtype, shape):
    return np.random.default_rng(0).integers(0, 2, shape).astype(dtype)


# --- what is read


DTYPES = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool", "complex64", "complex128", ">f4", ">i8"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip_of_every_dtype(version, dtype, tmp_path):
    value = numbers(dtype, (N, 3))
    path = save(tmp_path / "x", value, (5, 2), version)
    source = bj.from_zarr(path)
    native = zarr.open_array(path, mode="r")[:].astype(np.dtype(dtype).newbyteorder("="))
    assert len(source) == N
    assert source.treedef == jax.tree.structure(0)
    assert_reads(source, [native])
    assert_reads(source, [native], 3, 17)


@pytest.mark.parametrize(
    "how",
    [
        {"chunks": (N, 2, 3)},
        {"chunks": (1, 1, 1)},
        {"chunks": (100, 2, 3)},
        {"chunks": (4, 2, 3), "shards": (12, 2, 3)},
        {"chunks": (4, 2, 3), "compressors": None},
        {"chunks": (4, 2, 3), "order": "F", "version": 2},
        {"chunks": (4, 2, 3), "fill_value": 7},
    ],
    ids=str,
)
def test_chunks_and_shards(how, tmp_path):
    source = bj.from_zarr(save(tmp_path / "x", X, **how))
    for start, stop in [(0, N), (3, 9), (4, 8), (5, 6), (8, N), (N, N)]:
        assert_reads(source, [X], start, stop)


def test_what_is_not_stored_is_the_fill_value(version, tmp_path):
    path = tmp_path / "x"
    zarr.create_array(path, shape=(N,), chunks=(5,), dtype="i4", fill_value=7, zarr_format=version)
    assert_reads(bj.from_zarr(path), [np.full(N, 7, np.int32)])


def test_groups_and_trees(version, tmp_path):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    for name, array in {"x": X, "sub/y": X[:, 0], "sub/deep/z": X[:, 0, 0]}.items():
        made = group.create_array(name, shape=array.shape, chunks=(4, *array.shape[1:]), dtype="f4")
        made[...] = array
    group.create_group("empty")
    tree = {"sub": {"deep": {"z": X[:, 0, 0]}, "y": X[:, 0]}, "x": X}
    source = bj.from_zarr(tmp_path / "g")
    assert source.treedef == jax.tree.structure(tree)
    assert source.leaves[0].path == "['sub']['deep']['z']"
    assert_reads(source, jax.tree.leaves(tree), 2, 20)
    other = save(tmp_path / "k", np.arange(N), (6,), version)
    both = bj.from_zarr({"g": tmp_path / "g", "k": [other, tmp_path / "g" / "x"]})
    assert both.treedef == jax.tree.structure({"g": tree, "k": [0, 0]})
    assert_reads(both, [*jax.tree.leaves(tree), np.arange(N), X], 1, 22)
    assert "array 'sub/deep/z' and 4 more" in repr(both)
    assert_opens_elsewhere(both)


def test_zip_files(tmp_path):
    with zarr.storage.ZipStore(tmp_path / "x.zip", mode="w") as store:
        made = zarr.create_array(store, shape=X.shape, dtype=X.dtype, chunks=(5, 2, 3))
        made[...] = X
    source = bj.from_zarr(tmp_path / "x.zip")
    assert_reads(source, [X], 3, 19)
    assert_opens_elsewhere(source)


def test_urls(tmp_path):
    pytest.importorskip("fsspec")
    save("memory://beamjax/x.zarr", X, (4, 2, 3))
    source = bj.from_zarr({"x": "memory://beamjax/x.zarr"})
    assert_reads(source, [X], 3, 19)
    assert_reads(open_spec(source.to_spec()), [X])
    save("memory://beamjax/x.zarr", X + 1, (4, 2, 3))
    assert_reads(bj.from_zarr("memory://beamjax/x.zarr"), [X + 1], 3, 5)
    with pytest.raises(SourceError, match="memory://beamjax/none: cannot read"):
        bj.from_zarr("memory://beamjax/none")


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_any_range_of_any_chunks(tmp_path_factory, size, rows, data):
    block_source.BLOCKS.clear()
    value = np.arange(size * 2).reshape(size, 2)
    source = bj.from_zarr(save(tmp_path_factory.mktemp("x") / "x", value, (rows, 2)))
    for _ in range(4):
        start = data.draw(st.integers(0, size))
        assert_reads(source, [value], start, data.draw(st.integers(start, size)))


def test_chunks_are_decoded_once_and_whole_ones_not_kept(tmp_path, monkeypatch):
    block_source.BLOCKS.clear()
    source = bj.from_zarr(save(tmp_path / "x", np.arange(100), (10,)))
    read, lock, original = [], threading.Lock(), zarr_source._rows

    def noted(opened, array, start, stop):
        with lock:
            read.append((start, stop))
        return original(opened, array, start, stop)

    monkeypatch.setattr(zarr_source, "_rows", noted)
    source.read(5, 42)
    assert sorted(read) == [(0, 10), (10, 40), (40, 50)]
    assert_threads_read(source, [np.arange(100)])
    assert sorted(set(read)) == [(i, i + 10) for i in range(0, 20, 10)] + [(10, 40)] + [
        (i, i + 10) for i in range(20, 100, 10)
    ]
    assert len(block_source.BLOCKS.passing._values) == 10


def test_a_new_source_sees_chunks_that_were_written_anew(tmp_path):
    path = save(tmp_path / "x", np.arange(20), (10,))
    assert_reads(bj.from_zarr(path), [np.arange(20)], 3, 7)
    zarr.open_array(path, mode="r+")[...] = np.arange(20) * 2
    assert_reads(bj.from_zarr(path), [np.arange(20) * 2], 3, 7)


def test_programs(tmp_path):
    tree = {"x": np.tile(X, (2, 1, 1)), "k": np.arange(2 * N)}
    for name, array in tree.items():
        save(tmp_path / name, array, (7, *array.shape[1:]))
    assert_runs(bj.from_zarr({name: tmp_path / name for name in tree}), tree)


# --- what is refused


def test_what_is_no_array(version, tmp_path):
    with pytest.raises(
        SourceError, match=r"/none: is not there; expected an array or a group of Z"
    ):
        bj.from_zarr(tmp_path / "none")
    with pytest.raises(SourceError, match=r"cannot read .*expected an array or a group of Zarr"):
        bj.from_zarr(tmp_path)
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(SourceError, match=r"x.txt: cannot read .*expected an array or a group"):
        bj.from_zarr(tmp_path / "x.txt")
    zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    with pytest.raises(SourceError, match="/g: found a group without arrays"):
        bj.from_zarr(tmp_path / "g")
    with pytest.raises(StructureError, match=r"leaf \['a'\]: found int, expected the path of an a"):
        bj.from_zarr({"a": 3})
    with pytest.raises(StructureError, match="without leaves"):
        bj.from_zarr({})


@pytest.mark.filterwarnings("ignore:.*")  # of zarr, that a dtype is not in the specification
@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (np.float32(3), StructureError, r"found an array of shape \(\) in .*/x, which has no"),
        (np.zeros(3, [("a", "f4")]), StructureError, r"placed input in .*/x: dtype .*'a'"),
        (np.zeros(3, "<U4"), StructureError, "placed input in .*/x: dtype <U4 cannot"),
        (np.zeros(3, "M8[s]"), StructureError, "in .*/x: dtype datetime64"),
        (np.zeros((0, 3)), PlacementError, r"\(.*/x\): found 0 members"),
    ],
    ids=str,
)
def test_arrays_of_other_than_members(array, error, message, tmp_path):
    array = np.asarray(array)
    save(tmp_path / "x", array, tuple(max(size, 1) for size in array.shape))
    with pytest.raises(error, match=message):
        bj.from_zarr(tmp_path / "x")


def test_different_numbers_of_members(tmp_path):
    paths = [save(tmp_path / str(n), np.arange(n), (4,)) for n in (5, 6)]
    with pytest.raises(PlacementError, match=r"leaf \[1\] \(.*/6\): found 6 members, expected 5"):
        bj.from_zarr(paths)


def test_damaged_files(version, tmp_path):
    path = Path(save(tmp_path / "x", X, (5, 2, 3), version))
    chunk = path / ("1.0.0" if version == 2 else "c/1/0/0")
    whole = chunk.read_bytes()
    for data in (b"junk", whole[: len(whole) // 2]):
        chunk.write_bytes(data)
        source = bj.from_zarr(path)
        assert_reads(source, [X], 0, 5)
        with pytest.raises(SourceError, match=r"/x: cannot read.* members 5 to 9 of"):
            source.read(4, 8)
    meta = path / (".zarray" if version == 2 else "zarr.json")
    meta.write_text("{bad")
    with pytest.raises(SourceError, match="was changed after"):
        source.read(0, 1)
    with pytest.raises(SourceError, match=r"/x: cannot read .*expected an array or a group"):
        bj.from_zarr(path)


def test_arrays_that_change(version, tmp_path):
    path = save(tmp_path / "x", X, (5, 2, 3), version)
    source = bj.from_zarr(path)
    source.read(0, 3)
    save(path, np.zeros((N, 3)), (5, 3), version)
    with pytest.raises(SourceError, match="the file was changed after the source was made"):
        source.read(0, 3)
    shutil.rmtree(path)
    with pytest.raises(SourceError, match="is not there"):
        source.read(0, 3)


def test_urls_that_change():
    pytest.importorskip("fsspec")
    save("memory://beamjax/y.zarr", X, (4, 2, 3))
    spec = bj.from_zarr("memory://beamjax/y.zarr").to_spec()
    save("memory://beamjax/y.zarr", X[:, 0], (4, 3))
    with pytest.raises(
        SourceError, match=r"found float32\[23, 3\], expected float32\[23, 2, 3\]; t"
    ):
        open_spec(spec).read(0, 1)


def test_files_that_nobody_may_read(tmp_path, monkeypatch):
    source = bj.from_zarr(save(tmp_path / "x", X, (5, 2, 3)))

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zarr.Array, "__getitem__", forbidden)  # the user may be root
    with pytest.raises(SourceError, match=r"/x: may not be read by user \d+ \(Permission"):
        source.read(0, 1)
    monkeypatch.setattr(zarr, "open", forbidden)
    with pytest.raises(SourceError, match=r"/x: may not be read by user \d+ \(Permission"):
        bj.from_zarr(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [{"arrays": []}, {"arrays": [["x", "", 1]]}, {"arrays": [["x", "", 0, None, ""]]},
     {"arrays": [[1, "", 1, None, ""]]}, {"size": 0}, {"size": "1"}, {"leaves": []},
     {"arrays": None}, {"arrays": [["x", "", 1, [], ""]]}],
    ids=str,
)  # fmt: skip
def test_specs_that_are_none(change, tmp_path):
    spec = bj.from_zarr(save(tmp_path / "x", X, (5, 2, 3))).to_spec()
    with pytest.raises(SourceError, match="which its to_spec does not give"):
        open_spec({**spec, **change})


def test_without_zarr_it_says_what_to_install(tmp_path):
    code = (
        "import sys; sys.modules['zarr'] = None\n"
        "import beamjax as bj\n"
        "try: bj.from_zarr('x')\n"
        "except bj.SourceError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'beamjax[zarr]', on the workers too" in done.stdout
    assert os.path.abspath("x") in done.stdout


def test_importing_beamjax_imports_no_zarr():
    code = "import sys, beamjax; print('zarr' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ranges_are_copied_once_only(tmp_path):
    source = bj.from_zarr(save(tmp_path / "x", X, (10, 2, 3)))
    first, again = source.read(2, 5)[0], source.read(3, 6)[0]
    assert np.shares_memory(first, again)
    assert_same(again, X[3:6])
