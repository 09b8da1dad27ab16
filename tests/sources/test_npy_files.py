"""Files of NumPy: `from_npy` and `from_npz`."""

import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from source_files import (
    ARRAYS,
    CUTS,
    TREE,
    N,
    assert_reads,
    random_bits,
    refused,
    save,
    save_npy,
    write_npz,
)

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.arrays import npy_source
from beamjax.sources.arrays.npy_source import NpySource
from beamjax.sources.source_base import open_spec, spec_of

X, K = TREE["x"], np.arange(N)
BFLOATS = random_bits(ml_dtypes.bfloat16, (3,))


# --- from_npy


def test_single_files_and_patterns_in_a_tree(tmp_path, monkeypatch):
    paths = save_npy(tmp_path, {"x": X}, CUTS) | save_npy(tmp_path, {"k": K})
    source = bj.from_npy(paths)
    assert_reads(source, {"k": K, "x": X}, 3, 20)
    assert np.shares_memory(source.read(5, 9)[1], source.read(6, 10)[1])
    assert "and 4 more" in repr(source)
    single = bj.from_npy(Path(paths["k"]))
    assert isinstance(single, NpySource)
    assert single.files == (paths["k"],)
    assert np.shares_memory(single.read(1, 6)[0], single.read(5, 7)[0])
    assert isinstance(bj.from_npy(str(tmp_path / "k-*.npy")), NpySource)
    np.save(tmp_path / "x[1].npy", K + 1)
    assert_reads(bj.from_npy(tmp_path / "x[1].npy"), K + 1)
    monkeypatch.chdir(tmp_path)
    assert bj.from_npy("k-0.npy").files == (paths["k"],)


def test_files_that_are_no_members(tmp_path):
    path = tmp_path / "x.npy"
    for content, error, message in [
        (None, SourceError, "cannot open .No such file"),
        (b"", SourceError, "found 0 bytes that are not a whole .npy array"),
        (b"hello, world", SourceError, "found 12 bytes that are not a whole .npy array"),
        (np.array([{}]), StructureError, r"found an array of objects of Python .dtype object.1"),
        (np.zeros(2, [("a", "O")]), StructureError, "found an array of objects of Python"),
        (np.array(["a"]), StructureError, "dtype <U1"),
        (np.array(3.0), StructureError, r"found an array of shape \(\)"),
        (BFLOATS, StructureError, r"found the dtype \|V2.*expected numbers.*lose bfloat16"),
        (np.zeros(2, [("a", "f4")]), StructureError, r"found the dtype \[\('a', '<f4'\)\]"),
    ]:
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            np.save(path, content, allow_pickle=True)
        found = refused(error, message, bj.from_npy, path)
        assert str(path) in str(found)


def test_trees_that_are_no_files(tmp_path):
    for n in (3, 4):
        np.save(tmp_path / f"{n}.npy", np.zeros(n))
    pattern = save_npy(tmp_path, {"x": X}, (0, 4, N))["x"]
    for error, message, tree in [
        (StructureError, r"leaf \['a'\]: found int, expected the path of", {"a": 3}),
        (StructureError, "a tree without leaves", []),
        (SourceError, r"from_npy: found no file '.*/z-\*.npy'", tmp_path / "z-*.npy"),
        (StructureError, r"leaf \['a'\]: found the URL .*, expected a loc", {"a": "gs://b/x.npy"}),
        (StructureError, "found the URL .*, expected a loc", "https://host/x-*.npy"),
        (
            PlacementError,
            r"leaf \[1\] .*4.npy.: found 4 members, expected 3",
            [tmp_path / "3.npy", tmp_path / "4.npy"],
        ),
        (
            PlacementError,
            r"\(.*x-0.npy and 1 more\): found 23 members, expected 3",
            [tmp_path / "3.npy", pattern],
        ),
    ]:
        refused(error, message, bj.from_npy, tree)
    for array, error, message in [
        (X[:, 0], StructureError, r"found float32\[3\] in .*x-5.npy, expected float32\["),
        (X.astype(float), StructureError, r"found float64\[2, 3\] in .*x-5.npy, expected"),
        (b"text", SourceError, r"x-5.npy: found 4 bytes that are not a whole .npy"),
    ]:
        if isinstance(array, bytes):
            (tmp_path / "x-5.npy").write_bytes(array)
        else:
            np.save(tmp_path / "x-5.npy", array)
        refused(error, message, bj.from_npy, pattern)


def test_files_that_change_are_found_by_time_and_type(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, K.astype(float))
    source = bj.from_npy({"x": path})
    source.read(0, N)
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    for change in (
        lambda: path.write_bytes(whole[:-8]),
        lambda: np.save(path, np.zeros((N, 2))),
        lambda: np.save(path, K),
        lambda: path.write_bytes(whole),
    ):
        change()
        message = r"x.npy: found .* bytes written .* was changed after"
        refused(SourceError, message, source.read, 0, 1)
    os.utime(path, ns=(written, written))
    assert_reads(source, K.astype(float))
    npy_source._MAPPED.clear()
    np.save(path, K)
    os.utime(path, ns=(written, written))  # with the size and the time that it had
    message = r"x.npy: found int64\[23\], expected float64\[23\] for leaf \['x'\]"
    refused(SourceError, message, source.read, 0, 1)
    # Files of a run have no times in their specs.
    series = bj.from_npy(save_npy(tmp_path, {"y": X}, (0, 4, N)))
    np.save(tmp_path / "y-1.npy", X[:2])
    spec = spec_of(series)
    for file in spec["files"][0]:
        file["stamp"] = None
    again = open_spec(spec)
    assert_reads(again, X, 0, 4)
    message = r"y-1.npy: found float32\[2, 2, 3\], expected float32"
    refused(SourceError, message, again.read, 3, 5)


def test_files_are_mapped_once_for_all_threads_and_not_too_many(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.arange(1000))
    source = bj.from_npy(tmp_path / "x.npy")
    npy_source._MAPPED.clear()
    count, lock, original = [], threading.Lock(), np.lib.format.open_memmap

    def counted(*args, **kwargs):
        with lock:
            count.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "open_memmap", counted)
    source.read(0, 10)
    with ThreadPoolExecutor(8) as pool:
        reads = list(pool.map(lambda i: int(source.read(i, i + 10)[0][0]), range(900)))
    assert (len(count), reads) == (1, list(range(900)))
    monkeypatch.setattr(npy_source._MAPPED, "limit", 3)
    paths = save_npy(tmp_path, {f"x{i}": np.full(N, i) for i in range(6)})
    assert [int(array[0]) for array in bj.from_npy(paths).read(0, 1)] == list(range(6))
    first = npy_source.map_file(paths["x0"])
    for name in ("x1", "x0", "x2", "x0", "x3", "x0"):
        again = npy_source.map_file(paths[name])
        assert (again is first) == (name == "x0")


def test_a_read_asks_the_file_system_once_for_each_file(npz, tmp_path):
    """Small reads take as long as a few of these calls."""
    for source, files in (
        (bj.from_npy(save_npy(tmp_path, {"x": X, "k": K})), 2),
        (bj.from_npz(npz[0]), 1),
    ):
        source.read(0, 1)
        with mock.patch("os.stat", wraps=os.stat) as asked:
            source.read(3, 5)
        assert asked.call_count == files


# --- from_npz


@pytest.fixture
def npz(tmp_path):
    tree = {"columns": np.asfortranarray(np.arange(N * 4.0).reshape(N, 4)), "x": X}
    return save(ARRAYS["npz"], tmp_path / "x.npz", tree), tree


def test_arrays_of_any_order_are_mapped(npz):
    path, tree = npz
    source = bj.from_npz(path)
    for start in range(N + 1):
        for stop in range(start, N + 1):
            assert_reads(source, tree, start, stop)
    first, again = source.read(0, 9), source.read(4, 12)
    assert all(np.shares_memory(*pair) for pair in zip(first, again, strict=True))
    assert repr(source).endswith("x.npz>")


def test_what_is_no_npz(npz, tmp_path):
    path, tree = npz
    assert_reads(bj.from_npz(f"file://{path}"), tree)
    for given, error, message in [
        (3, StructureError, "from_npz: found int, expected the path"),
        ("gs://b/x.npz", StructureError, "found the URL gs://b/x.npz, expected a local path"),
        ("/none/x.npz", SourceError, "/none/x.npz: is not there"),
    ]:
        refused(error, message, bj.from_npz, given)
    for arrays, error, message in [
        ({}, StructureError, "found a tree without leaves"),
        ({"a": np.float32(1)}, StructureError, r"leaf \['a'\]: found an array of shape \(\) in"),
        ({"a": np.array(["x"])}, StructureError, "array 'a': dtype <U1"),
        ({"a": np.array([{}])}, StructureError, r"x.npz, 'a.npy': found an array of objects"),
        ({"a": BFLOATS}, StructureError, "lose bfloat16"),
        (
            {"a": np.zeros(3), "b": np.zeros(4)},
            PlacementError,
            r"leaf \['b'\] .*: found 4 members, expected 3 as in .*leaf \['a'\]",
        ),
    ]:
        write_npz(path, arrays)
        refused(error, message, bj.from_npz, path)
    np.savez_compressed(path, **tree)
    refused(SourceError, r"x.npz, 'columns.npy': is compressed.*np.savez", bj.from_npz, path)
    for name, message in [("notes.txt", "expected arrays only"), ("a.npy", "found no whole array")]:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(name, "text")
        refused(SourceError, f"x.npz, '{name}': {message}", bj.from_npz, path)
    write_npz(path, tree)
    data = Path(path).read_bytes()
    for size in range(0, len(data), 97):
        Path(path).write_bytes(data[:size])
        refused(SourceError, "x.npz", bj.from_npz, path)
    Path(path).write_bytes(b"text")
    message = r"x.npz: cannot read .*expected an .npz file"
    refused(SourceError, message, bj.from_npz, path)


def test_a_changed_byte_of_an_npz(npz):
    path, tree = npz
    data = bytearray(Path(path).read_bytes())
    for name, array in tree.items():
        at = data.index(np.ascontiguousarray(array.T if name == "columns" else array).tobytes())
        for place in (at, at + array.nbytes - 1):
            Path(path).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            message = rf"x\.npz, '{name}\.npy': found contents that differ from their checksum"
            refused(SourceError, message, bj.from_npz, path)
