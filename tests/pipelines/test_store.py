"""The store: what was put is got back, bit for bit, from any thread and process, or it says why."""

import dataclasses
import json
import os
import pickle
import random
import stat
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from url_files import UrlFileSystem

from beamjax.errors import ArrayFormatError, OptionsError, SourceError, StructureError
from beamjax.pipelines.values import store
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.run_stores import clear_store, new_store
from beamjax.pipelines.values.store import Store
from beamjax.storage import files
from beamjax.storage.arrays import _DTYPES, dtype_name

DTYPES = list(_DTYPES.values())
ZEROS = np.zeros(20_000)
"""A value that is in one file of 160,128 bytes."""


@pytest.fixture(autouse=True)
def _fresh_cache():
    store._CACHE.clear()
    yield
    store._CACHE.clear()
    store.set_cache_bytes(2**30)


def numbers(dtype, shape, seed=0):
    empty = np.empty(shape, dtype)
    if empty.nbytes == 0:
        return empty
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, empty.nbytes, np.uint8).view(dtype).reshape(shape)


def assert_same(found, expected):
    assert_same_bits(found, expected)
    assert not any(value.flags.writeable for value in found)


@pytest.fixture(params=["local", "url"])
def root(request, tmp_path):
    path = f"{tmp_path}/store"
    return path if request.param == "local" else f"bjtest:/{path}"


def local(root):
    return Path(root.removeprefix("bjtest:/"))


# --- round trips


def test_small_values_are_inline(tmp_path):
    place = Store(str(tmp_path / "store"))
    ref = place.put([np.zeros(1000)])
    assert ref.kind == "inline"
    assert 8000 < len(ref.inline) <= store.INLINE_BYTES
    assert_same(place.get(ref), [np.zeros(1000)])
    assert place.put([np.zeros(64 * 1024, np.uint8)]).kind == "file"
    assert place.put([]).kind == "inline"
    assert place.get(place.put([])) == []


def test_many_small_arrays(tmp_path):
    place = Store(str(tmp_path), piece_bytes=2**20)
    values = [np.full((), i) for i in range(3000)]
    ref = place.put(values)
    assert ref.kind == "file"
    assert_same(place.get(ref), values)
    empties = [np.zeros((0, i)) for i in range(1500)]
    ref = place.put(empties)
    assert not ref.files
    assert_same(place.get(ref), empties)


def test_big_arrays_are_cut_and_small_ones_gathered(root):
    place = Store(root, piece_bytes=2**16)
    values = [numbers(np.float32, (100_000,)), np.arange(5), numbers(ml_dtypes.bfloat16, (9, 9999))]
    ref = place.put(values, "big")
    assert len(ref.files) == 10
    for name, size in ref.files:
        assert size <= 2**16
        assert (local(root) / name).stat().st_size == size
        assert name.endswith("-big.arrays")
    assert_same(place.get(ref), values)


@pytest.mark.parametrize(
    "chunks", [[], [(2, "f4")], [(6, "i4")], [(2, "i4"), (4, "f4")], [(7, "f4")]]
)
def test_chunks_of_other_arrays_are_refused(chunks):
    others = iter([np.zeros(size, dtype) for size, dtype in chunks])
    with pytest.raises(ArrayFormatError, match=r"file: found .*, expected float32\[3, 2\]"):
        store.assemble(np.dtype("f4"), (3, 2), others, "file")


SHAPES = st.sampled_from([(), (0, 3), (3, 2)]) | st.tuples(st.integers(0, 3000))


@pytest.mark.versions
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6),
    st.sampled_from([0, 70_000]),
    st.integers(1024, 8192),
)
def test_any_values_and_cuts_give_back_the_same(tmp_path_factory, specs, more, piece):
    place = Store(str(tmp_path_factory.mktemp("store")), piece_bytes=piece)
    specs = [*specs, (np.dtype("int8"), (more,))]
    values = [numbers(dtype, shape, sum(shape)) for dtype, shape in specs]
    ref = place.put(values)
    assert all(size <= piece for _, size in ref.files)
    assert_same(place.get(ref, cache=False), values)
    assert ref.leaves == tuple((dtype_name(dtype), shape) for dtype, shape in specs)
    assert ref.nbytes == sum(value.nbytes for value in values)


def test_layouts_and_byte_orders(tmp_path):
    place = Store(str(tmp_path))
    value = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    ref = place.put([value])
    for other in (np.asfortranarray(value), value.astype(">f4"), jax.numpy.asarray(value)):
        assert place.put([other]) == ref
    assert_same(place.get(ref), [value])


def test_names_are_those_of_contents(root):
    place, value = Store(root), np.arange(20_000)
    ref = place.put([value], "a b/c")
    (path,) = local(root).iterdir()
    assert path.name.endswith("-a_b_c.arrays")
    before = path.stat()
    assert place.put([value.copy()], "a b/c") == ref
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert place.put([value + 1], "a b/c").key != ref.key
    assert place.put([value.reshape(2, -1)], "a b/c").key != ref.key


def sum_of(root, record):
    """The sum of a stored value, and whether Beam was imported to read it."""
    beam_before = "apache_beam" in sys.modules
    (value,) = Store(root).get(StoreRef.from_json(json.loads(record)))
    return int(value.sum()), beam_before == ("apache_beam" in sys.modules)


def test_stores_and_references_are_small_plain_data(tmp_path, other_process):
    place = Store(str(tmp_path))
    assert pickle.loads(pickle.dumps(place)) == place
    assert len(pickle.dumps(place)) < 300
    for value in (np.arange(3), np.arange(30_000)):
        ref = place.put([value])
        assert pickle.loads(pickle.dumps(ref)) == ref
        assert StoreRef.from_json(json.loads(json.dumps(ref.to_json())), ref.inline) == ref
        assert hash(ref) == hash(dataclasses.replace(ref))
    found = other_process(sum_of, place.root, json.dumps(ref.to_json()))
    assert found == (np.arange(30_000).sum(), True)


def test_writers_at_once(root, monkeypatch):
    def hesitant(method):
        def late(*args, **kwargs):
            time.sleep(random.uniform(0, 0.01))
            return method(*args, **kwargs)

        return late

    # So that each meets files of the others in the midst of what it does.
    for name in ("exists", "mv", "rm_file"):
        monkeypatch.setattr(UrlFileSystem, name, hesitant(getattr(UrlFileSystem, name)))
    place = Store(root, piece_bytes=2**16)
    value = numbers(np.float32, (100_000,))
    contents = [bytes([i]) * 1000 for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        refs = set(pool.map(lambda _: place.put([value]), range(16)))
        list(pool.map(lambda data: place.write("last.json", data), contents))
    (ref,) = refs
    assert_same(place.get(ref), [value])
    assert bytes(files.read(files.join(root, "last.json"))) in contents
    assert not [path for path in local(root).iterdir() if path.suffix == ".tmp"]


# --- cache


def test_loaded_once_for_all_threads(tmp_path, monkeypatch):
    place = Store(str(tmp_path))
    refs = [place.put([np.full(20_000, i)]) for i in range(4)]
    reads, lock, original = [], threading.Lock(), files.read

    def counted(path):
        with lock:
            reads.append(path)
        return original(path)

    monkeypatch.setattr(files, "read", counted)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda i: place.get(refs[i % 4])[0], range(200)))
    assert len(reads) == 4
    assert all(value[0] == i % 4 for i, value in enumerate(got))
    assert got[0] is got[4]
    place.get(refs[0]).clear()  # The list is the caller's own.
    assert len(place.get(refs[0])) == 1
    place.get(refs[0], cache=False)
    assert len(reads) == 5


def test_the_cache_is_bounded_and_the_last_used_stay(tmp_path):
    store.set_cache_bytes(400_000)
    place = Store(str(tmp_path))
    refs = [place.put([np.full(20_000, i)]) for i in range(4)]
    first, second = (place.get(ref)[0] for ref in refs[:2])
    assert place.get(refs[0])[0] is first
    place.get(refs[2])
    assert place.get(refs[0])[0] is first
    assert place.get(refs[1])[0] is not second
    store.set_cache_bytes(0)
    last = place.get(refs[3])[0]
    assert place.get(refs[3])[0] is last


# --- cleanup


def test_cleanup_removes_what_it_wrote(root):
    place = Store(root)
    value = numbers(np.uint8, (9 * 2**20,))
    (mapped,) = place.get(place.put([value]))
    assert not mapped.flags.owndata
    (local(root) / "left.tmp").write_text("by a killed worker")
    (local(root) / "users.txt").write_text("not ours")
    clear_store(place)
    assert [path.name for path in local(root).iterdir()] == ["users.txt"]
    clear_store(place)
    assert_same([mapped], [value])


def test_temporary_stores_are_apart_and_private(tmp_path, monkeypatch):
    work = str(tmp_path / "work")
    first, second = new_store(work), new_store(work)
    assert first.root != second.root
    refs = [place.put([ZEROS]) for place in (first, second)]
    assert stat.S_IMODE(os.stat(first.root).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(f"{first.root}/{refs[0].files[0][0]}").st_mode) == 0o600
    clear_store(first)
    # A worker may go on after the run was interrupted.
    with pytest.raises(SourceError, match="cannot write"):
        first.put([ZEROS])
    assert not os.path.exists(first.root)
    assert_same(second.get(refs[1]), [ZEROS])
    clear_store(first)
    assert new_store("bjtest://x").root.startswith("bjtest://x/beamjax-")
    monkeypatch.chdir(tmp_path)
    assert Store("folder").root == str(tmp_path / "folder")
    assert Store("bjtest://a/b").root == "bjtest://a/b"


def test_sweep_leaves_what_is_live(root, monkeypatch):
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    values = Store(root)
    values.sweep(())
    dead, live = values.put([np.arange(9)], "dead"), values.put([np.arange(5)], "live")
    again = values.put([np.arange(5)], "live")
    assert again == live
    files.write(files.join(root, "v-0-8.members"), b"data")
    files.write(files.join(root, "others.txt"), b"data")
    values.sweep({name for name, _ in live.files})
    assert sorted(files.names(root)) == sorted([live.files[0][0], "others.txt"])
    np.testing.assert_array_equal(values.get(again)[0], np.arange(5))
    with pytest.raises(SourceError, match="cannot read a stored value"):
        values.get(dead)
    values.sweep(())
    assert files.names(root) == ["others.txt"]

    def fail(folder):
        raise OSError("broken")

    monkeypatch.setattr(files, "names", fail)
    with pytest.raises(SourceError, match="cannot remove stored values"):
        values.sweep(())


# --- errors


def test_missing_torn_and_corrupt_files_are_named(root):
    place = Store(root)
    ref = place.put([ZEROS])
    path = local(root) / ref.files[0][0]
    data = path.read_bytes()
    path.unlink()
    with pytest.raises(SourceError, match=rf"{path.name}: cannot read .*160128 bytes"):
        place.get(ref)
    path.write_bytes(data[:100])
    with pytest.raises(ArrayFormatError, match="found 100 bytes, expected 160128"):
        place.get(ref)
    path.write_bytes(data[:50_000] + b"\1" + data[50_001:])
    with pytest.raises(ArrayFormatError, match=rf"{path.name}: .*checksum mismatch"):
        place.get(ref)
    path.write_bytes(data[:100])
    place.put([ZEROS])  # mends it
    assert_same(place.get(ref), [ZEROS])


def test_references_that_do_not_fit_their_files(tmp_path):
    place = Store(str(tmp_path))
    ref, other = place.put([ZEROS]), place.put([np.zeros(40_000, np.float32)])
    large = (("float64", (1 << 40,)),)
    tracemalloc.start()
    try:
        for changes, message in (
            ({"files": other.files}, r"found float32\[40000\] .*expected float64\[20000\]"),
            ({"files": ref.files * 2}, "has more data than its 1 arrays"),
            ({"files": ()}, "found files of 0 bytes, expected 160000"),
            ({"leaves": large}, f"files of {ref.files[0][1]} bytes, expected {8 << 40}"),
        ):
            with pytest.raises(ArrayFormatError, match=f"value {ref.key}.*{message}"):
                place.get(dataclasses.replace(ref, **changes))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for name in ("../../etc/passwd", "/etc/passwd", "x.arrays"):
        with pytest.raises(ArrayFormatError, match=f"{name}: not a file name that a store gives"):
            place.get(StoreRef("k", (("int8", (1,)),), files=((name, 1),)))


def test_folders_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"file: cannot write \w+.arrays of 160128 bytes"):
        Store(str(tmp_path / "file")).put([ZEROS])
    with pytest.raises(SourceError, match="cannot write here"):
        new_store(str(tmp_path / "file"))
    unknown = Store("nosuch://bucket/folder")
    with pytest.raises(
        SourceError, match=r"nosuch://bucket/folder: cannot write.*no file system of"
    ):
        unknown.put([ZEROS])
    with pytest.raises(SourceError, match="nosuch://bucket/folder: cannot remove stored values"):
        clear_store(unknown)
    with pytest.raises(OptionsError, match="found piece_bytes=1023, expected at least 1024"):
        Store("/a", piece_bytes=1023)
    Store("/a", piece_bytes=1024)

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    (tmp_path / "new").mkdir()
    with pytest.raises(SourceError, match=r"cannot write \w+.arrays of 160128 .*No space left"):
        Store(str(tmp_path / "new")).put([ZEROS])
    assert list((tmp_path / "new").iterdir()) == []


def test_put_refuses(tmp_path):
    for value, message in (
        (np.array(["a"]), "dtype <U1 cannot be stored"),
        ([1, 2], "found list, expected a NumPy or JAX array"),
        (np.ma.zeros(10**5), "found MaskedArray"),
        (jax.random.key(0), "dtype key<fry>"),
    ):
        with pytest.raises(StructureError, match=f"value 'x', array 0: {message}"):
            Store(str(tmp_path)).put([value], "x")


def test_records_that_are_no_reference():
    for record in (
        {},
        {"key": 1, "leaves": [], "files": []},
        {"key": "k", "leaves": [["int8", [-1]]], "files": []},
        {"key": "k", "leaves": [["int8", ["1"]]], "files": []},
        {"key": "k", "leaves": [["int8"]], "files": []},
        {"key": "k", "leaves": [["int9", [1]]], "files": []},
        {"key": "k", "leaves": [], "files": [["../x.arrays", 3]]},
        {"key": "k", "leaves": [], "files": [[3, 3]]},
        {"key": "k", "leaves": 3, "files": []},
        [],
        None,
    ):
        with pytest.raises(ArrayFormatError, match="reference to a stored value: "):
            StoreRef.from_json(record)
