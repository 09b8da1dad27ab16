"""Files of a run: sources of unknown length, results, arrays that wait, and its folder."""

import contextlib
import errno
import json
import os
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from helpers import assert_same_bits
from streams import Numbers, stream

import beamjax as bj
from beamjax.errors import ArrayFormatError, SourceError, WorkerError
from beamjax.options import Options
from beamjax.pipelines.graph.collect_results import (
    WritePlaced,
    WriteServed,
    find_placed,
    read_served,
)
from beamjax.pipelines.tables.stored_streams import spooled
from beamjax.pipelines.values.elements import Element, block_of, stored_part
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import placed_files
from beamjax.pipelines.worker_inputs import source_specs
from beamjax.plan.steps import Input, Plan, ValueType
from beamjax.runtime.inputs import Inputs
from beamjax.sources.arrays.npy_source import _MAPPED, ArrayFile, NpySource
from beamjax.sources.arrays.placed import encode_part
from beamjax.sources.source_base import LeafSpec, open_spec, spec_of
from beamjax.sources.streams.spool import spool, spooled_here
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays
from beamjax.storage.buffers import allocate, file_array

X = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
PLAN = Plan(
    name="prog", sizes={"clients": 20}, shard_sizes={"clients": 8},
    values={"x": ValueType((3,), "float32", None, "clients")},
    inputs=(Input("args[0]", None, "x"),), steps=(), outputs=(), bodies={}, x64=False,
    jax_version="0",
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))


# --- sources of unknown length


def test_streams_in_npy_files(tmp_path):
    tree = [
        np.arange(20, dtype=np.int8),
        np.arange(40.0).reshape(20, 2).astype(ml_dtypes.bfloat16),
        np.arange(20).astype(">i4"),
        np.zeros((20, 0), np.float32),
        np.arange(20) % 2 == 0,
    ]
    source = spool(stream(tree), tmp_path / "new")
    assert len(source) == 20
    for found, expected in zip(source.read(3, 17), tree, strict=True):
        assert found.dtype == expected.dtype.newbyteorder("=")
        np.testing.assert_array_equal(found, expected[3:17])
    assert np.load(source.files[0]).tolist() == tree[0].tolist()
    (tmp_path / "work").mkdir()
    options = Options(work_folder=str(tmp_path / "work"))
    with spooled_here([Numbers([3, 0, 2]), Numbers([1])], options) as (first, second):
        assert first.read(0, 5)[0].tolist() == [0, 1, 2, 3, 4]
        assert (len(first), len(second)) == (5, 1)
    assert not os.listdir(tmp_path / "work")
    assert not [key for key in _MAPPED._values if str(tmp_path / "work") in key[0]]
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match="cannot write"):
        spool(Numbers([1]), tmp_path / "file" / "0")


def test_streams_in_files_of_the_store(monkeypatch, tmp_path):
    monkeypatch.setattr("beamjax.pipelines.tables.stored_streams.FILE_BYTES", 16)
    x = {"x": np.arange(30.0).reshape(10, 3), "k": np.arange(10)}
    with spooled([Numbers([5, 0, 6]), stream(x)], FnApiRunner(), Options()) as (numbers, rows):
        assert len(spec_of(numbers)["files"][0]) == 4
        assert not numbers.cuts
        assert numbers.read(0, 11)[0].tolist() == list(range(11))
        again = open_spec(json.loads(json.dumps(spec_of(numbers))))
        assert again.read(3, 8)[0].tolist() == [3, 4, 5, 6, 7]
        assert again.read(5, 5)[0].shape == (0,)
        assert rows.treedef == jax.tree.structure(x)
        np.testing.assert_array_equal(rows.read(2, 9)[1], x["x"][2:9])
        with pytest.raises(SourceError, match="range within 0 to 11"):
            numbers.read(3, 12)
    with pytest.raises(SourceError, match="cannot open"):
        open_spec(spec_of(numbers)).read(0, 1)


@pytest.mark.parametrize("scheme", ["", "bjtest://"], ids=["path", "url"])
def test_damaged_files_of_a_run_are_refused(scheme, tmp_path):
    x = np.arange(6, dtype=np.int32).reshape(3, 2)
    written = encode_part(x)
    damaged = [b"nothing", written[:-1], written + b"0", encode_part(x.astype("f4"))]
    damaged += [written.replace(b"(3, 2)", b"(9, 2)"), encode_part(x[:2])]
    for number, data in enumerate([written, *damaged]):
        path = f"{scheme}{tmp_path}/{number}"
        files.write(path, data)
        source = NpySource(((ArrayFile(path, 3),),), (LeafSpec((2,), np.dtype("i4")),))
        if not number:
            np.testing.assert_array_equal(source.read(1, 3)[0], x[1:])
            assert source.local == (not scheme)
        elif scheme or number != 3:  # NumPy ignores bytes after an array
            with pytest.raises(SourceError, match=f"{number}: "):
                source.read(0, 3)


def test_streams_without_members(tmp_path):
    assert len(spool(Numbers([0, 0]), tmp_path)) == 0
    with spooled([Numbers([0, 0])], FnApiRunner(), Options()) as (source,):
        assert source.read(0, 0)[0].shape == (0,)


# --- results


def write(store, *bundles, name="x", stem="result-3"):
    fn = WritePlaced(store, name, stem)
    for bundle in bundles:
        fn.start_bundle()
        for start in bundle:
            values = X[start : start + 8]
            fn.process(block_of(start, len(values), {"x": values, "other": values * 2}))
        fn.finish_bundle()


def read_placed(store, stem="result-3"):
    return find_placed(store, PLAN, "x", stem, files.names(store.root)).read(0, 20)[0]


def test_placed_results_are_whole_however_they_are_bundled(tmp_path, monkeypatch):
    for number, bundles in enumerate(
        ([[0, 8, 16]], [[16], [0], [8]], [[8, 16], [0]], [[8], [8], [0, 8], [16], []])
    ):
        store = Store(str(tmp_path / str(number)))
        write(store, *bundles)
        write(store, [0, 8, 16], name="other", stem="result-31")
        assert_same_bits(read_placed(store), X)
        assert_same_bits(read_placed(store, "result-31"), X * 2)
    monkeypatch.setattr(placed_files, "FILE_BYTES", 100)
    store = Store(str(tmp_path / "small"))
    write(store, [0, 8, 16])
    assert len(list((tmp_path / "small").iterdir())) == 2
    assert_same_bits(read_placed(store), X)


def test_blocks_in_a_row_share_a_file(store):
    write(store, [0, 16])
    with pytest.raises(WorkerError, match=r"8 of 20 members are missing, .* is 8;"):
        read_placed(store)
    write(store, [16, 0], [8])
    names = {path.name for path in Path(store.root).iterdir()}
    assert names == {"result-3-0-8.members", "result-3-8-8.members", "result-3-16-4.members"}
    write(store, [16, 8, 0])
    (array,), _ = decode_arrays(Path(store.root, "result-3-0-20.members").read_bytes())
    assert_same_bits(array, X)


@pytest.mark.parametrize("size", [3, 1 << 15], ids=["inline", "files"])
def test_served_results(store, size):
    refs = {name: store.put([np.full(size, ord(name))]) for name in "abc"}
    values = Element({name: stored_part(ref) for name, ref in refs.items()})
    WriteServed(store, ("a", "b"), "result-0").process(values)
    assert read_served(store, "result-0").refs() == {"a": refs["a"], "b": refs["b"]}
    with pytest.raises(WorkerError, match=r"result-1\.arrays: cannot read a result"):
        read_served(store, "result-1")
    Path(store.root, "result-0.arrays").write_bytes(b"nothing")
    with pytest.raises(ArrayFormatError, match=r"result-0\.arrays: "):
        read_served(store, "result-0")


# --- inputs


def test_inputs_of_other_processes_are_in_files(store, tmp_path):
    np.save(tmp_path / "x.npy", X)
    for given_as, file in (
        ((bj.from_npy(tmp_path / "x.npy"), 0), str(tmp_path / "x.npy")),
        (X, store.root),
    ):
        assert not Path(store.root).exists()
        sources = source_specs(Inputs(PLAN, [given_as]), store, shared=False)
        assert sources.specs[0]["files"][0][0]["path"].startswith(file)
        np.testing.assert_array_equal(sources.open().read(["x"], 3, 5)["x"], X[3:5])


# --- arrays that wait in a file


def opened(folder):
    """The files in a folder that this process holds open."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(os.readlink(link))
    return [link for link in links if link.startswith(str(folder))]


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSPC])
def test_space_in_file_systems_that_reserve_none(number, tmp_path, monkeypatch):
    def fallocate(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    if number == errno.ENOSPC:
        with pytest.raises(SourceError, match=r"cannot write 24 bytes .*No space"):
            file_array((6,), np.dtype(np.float32), str(tmp_path))
        return
    rows = (5 << 20) // 8 + 1  # more than is written at once
    array = file_array((rows,), np.dtype(np.float64), str(tmp_path))
    assert not array.any()
    with (tmp_path / "file").open("wb") as file:
        allocate(file.fileno(), 3, rows)
    assert (tmp_path / "file").stat().st_blocks * 512 >= rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool"])
def test_an_array_in_a_file_is_an_array_of_zeros(dtype, tmp_path):
    array = file_array((5, 3), np.dtype(dtype), str(tmp_path))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert_same_bits(np.asarray(array), np.zeros((5, 3), dtype))
    array[1:3] = 1
    assert array[:, 0].tolist() == [0, 1, 1, 0, 0]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SourceError, match=r"missing: cannot write 1 bytes of placed values \("):
        file_array((1,), np.dtype(np.int8), str(tmp_path / "missing"))
