"""The store: what was put is got back, bit for bit, from any thread and process, or it says why."""

import dataclasses
import json
import os
import pickle
import random
import stat
import subprocess
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
from hypothesis import strategies as st
from url_files import UrlFileSystem

from beamjax.errors import ArrayFormatError, OptionsError, SourceError, StructureError
from beamjax.pipelines import files, store
from beamjax.pipelines.refs import Ref
from beamjax.pipelines.store import Store
from beamjax.stored_dtypes import _DTYPES, dtype_name

DTYPES = list(_DTYPES.values())


@pytest.fixture(autouse=True)
def _fresh_cache():
    store.clear_cache()
    yield
    store.clear_cache()
    store.set_cache_bytes(2**30)


def numbers(dtype, shape, seed=0):
    empty = np.empty(shape, dtype)
    if empty.nbytes == 0:
        return empty
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, empty.nbytes, np.uint8).view(dtype).reshape(shape)


def assert_same(lefts, rights):
    assert len(lefts) == len(rights)
    for left, right in zip(lefts, rights, strict=True):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
        assert not left.flags.writeable


def _hesitant(method):
    def late(*args):
        time.sleep(random.uniform(0, 0.01))
        return method(*args)

    return late


@pytest.fixture(params=["local", "url"])
def root(request, tmp_path):
    path = f"{tmp_path}/store"
    return path if request.param == "local" else f"bjtest:/{path}"


# ---------------------------------------------------------------- round trips


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype_name(dtype))
def test_every_dtype_inline_and_in_files(dtype, tmp_path):
    place = Store(str(tmp_path), piece_bytes=4096)
    for shape in [(), (0, 3), (3, 2), (200, 401)]:
        values = [numbers(dtype, shape), np.arange(3)]
        ref = place.put(values, "step 1/x")
        assert_same(place.get(ref), values)
        assert ref.leaves == ((dtype_name(dtype), shape), ("int64", (3,)))
        assert ref.nbytes == sum(value.nbytes for value in values)


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
    local = Path(root.removeprefix("bjtest:/"))
    for name, size in ref.files:
        assert size <= 2**16
        assert (local / name).stat().st_size == size
        assert name.endswith("-big.arrays")
    assert_same(place.get(ref), values)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 3000)), max_size=6),
    st.integers(1024, 8192),
)
def test_any_cutting_gives_back_the_same(tmp_path_factory, specs, piece):
    place = Store(str(tmp_path_factory.mktemp("store")), piece_bytes=piece)
    values = [numbers(dtype, (size,), size) for dtype, size in specs]
    values.append(np.zeros(70_000, np.int8))
    ref = place.put(values)
    assert all(size <= piece for _, size in ref.files)
    assert_same(place.get(ref, cache=False), values)


def test_layouts_and_byte_orders(tmp_path):
    place = Store(str(tmp_path))
    value = np.arange(40_000, dtype=np.float32).reshape(200, 200)
    ref = place.put([value])
    assert place.put([np.asfortranarray(value)]) == ref
    assert place.put([value.astype(">f4")]) == ref
    assert place.put([jax.numpy.asarray(value)]) == ref
    assert_same(place.get(ref), [value])


def test_put_is_idempotent_and_content_hashed(root):
    place = Store(root)
    value = np.arange(20_000)
    ref = place.put([value], "a b/c")
    local = Path(root.removeprefix("bjtest:/"))
    (path,) = local.iterdir()
    assert path.name.endswith("-a_b_c.arrays")
    before = path.stat()
    assert place.put([value.copy()], "a b/c") == ref
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino
    assert place.put([value + 1], "a b/c").key != ref.key
    assert place.put([value.reshape(2, -1)], "a b/c").key != ref.key


def test_put_heals_a_torn_file(root):
    place = Store(root)
    ref = place.put([np.arange(20_000)])
    path = Path(root.removeprefix("bjtest:/")) / ref.files[0][0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ArrayFormatError, match="found 100 bytes, expected 160128"):
        place.get(ref)
    place.put([np.arange(20_000)])
    assert_same(place.get(ref), [np.arange(20_000)])


def test_folders_and_files_are_private(tmp_path):
    place = Store(str(tmp_path / "a"))
    ref = place.put([np.zeros(20_000)])
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "a" / ref.files[0][0]).st_mode) == 0o600


def test_store_and_refs_are_small_plain_data(tmp_path):
    place = Store(str(tmp_path))
    assert pickle.loads(pickle.dumps(place)) == place
    assert len(pickle.dumps(place)) < 300
    for value in (np.arange(3), np.arange(30_000)):
        ref = place.put([value])
        assert pickle.loads(pickle.dumps(ref)) == ref
        assert Ref.from_json(json.loads(json.dumps(ref.to_json())), ref.inline) == ref
        assert hash(ref) == hash(dataclasses.replace(ref))


def test_another_process_gets_it(tmp_path):
    place = Store(str(tmp_path))
    ref = place.put([np.arange(20_000)])
    code = (
        "import sys, json\n"
        "from beamjax.pipelines.refs import Ref\n"
        "from beamjax.pipelines.store import Store\n"
        "ref = Ref.from_json(json.loads(sys.argv[2]))\n"
        "print(int(Store(sys.argv[1]).get(ref)[0].sum()), 'apache_beam' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, place.root, json.dumps(ref.to_json())]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert out.split() == [str(np.arange(20_000).sum()), "False"]


def test_writers_at_once(root, monkeypatch):
    # So that each meets files of the others in the midst of what it does.
    for name in ("exists", "rename", "delete"):
        monkeypatch.setattr(UrlFileSystem, name, _hesitant(getattr(UrlFileSystem, name)))
    place = Store(root, piece_bytes=2**16)
    value = numbers(np.float32, (100_000,))
    with ThreadPoolExecutor(8) as pool:
        refs = set(pool.map(lambda _: place.put([value]), range(16)))
    assert len(refs) == 1
    assert_same(place.get(refs.pop()), [value])
    local = Path(root.removeprefix("bjtest:/"))
    assert not [path for path in local.iterdir() if path.suffix == ".tmp"]


def test_writers_of_other_contents_at_once(root, monkeypatch):
    for name in ("exists", "rename", "delete"):
        monkeypatch.setattr(UrlFileSystem, name, _hesitant(getattr(UrlFileSystem, name)))
    place = Store(root)
    contents = [bytes([i]) * 1000 for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda data: place.write("last.json", data), contents))
    assert bytes(files.read(files.join(root, "last.json"))) in contents
    assert os.listdir(root.removeprefix("bjtest:/")) == ["last.json"]


# ---------------------------------------------------------------- cache


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
    place.get(refs[0], cache=False)
    assert len(reads) == 5


def test_cache_is_bounded_and_keeps_the_last(tmp_path, monkeypatch):
    store.set_cache_bytes(400_000)
    place = Store(str(tmp_path))
    refs = [place.put([np.full(20_000, i)]) for i in range(4)]
    first, second = (place.get(ref)[0] for ref in refs[:2])
    assert place.get(refs[0])[0] is first
    place.get(refs[2])
    assert place.get(refs[0])[0] is first, "the last used stay"
    assert place.get(refs[1])[0] is not second
    store.set_cache_bytes(0)
    last = place.get(refs[3])[0]
    assert place.get(refs[3])[0] is last


def test_cached_list_is_ones_own(tmp_path):
    place = Store(str(tmp_path))
    ref = place.put([np.zeros(20_000)])
    place.get(ref).clear()
    assert len(place.get(ref)) == 1


def test_a_failed_load_is_tried_again(tmp_path):
    place = Store(str(tmp_path))
    ref = place.put([np.zeros(20_000)])
    (path,) = tmp_path.iterdir()
    path.rename(tmp_path / "away")
    with pytest.raises(SourceError, match="cannot read a stored value"):
        place.get(ref)
    (tmp_path / "away").rename(path)
    assert_same(place.get(ref), [np.zeros(20_000)])


def test_big_files_are_mapped_and_outlive_cleanup(tmp_path):
    place = Store(str(tmp_path / "store"))
    value = numbers(np.uint8, (9 * 2**20,))
    ref = place.put([value])
    (loaded,) = place.get(ref)
    assert not loaded.flags.owndata
    place.cleanup()
    assert not (tmp_path / "store").exists()
    assert_same([loaded], [value])


# ---------------------------------------------------------------- cleanup


def test_cleanup_removes_what_it_wrote(root):
    place = Store(root)
    place.put([np.zeros(20_000)])
    local = Path(root.removeprefix("bjtest:/"))
    (local / "left.tmp").write_text("by a killed worker")
    (local / "users.txt").write_text("not ours")
    place.cleanup()
    assert [path.name for path in local.iterdir()] == ["users.txt"]
    place.cleanup()


def test_temporary_stores_are_apart(tmp_path):
    first, second = Store.temporary(str(tmp_path)), Store.temporary(str(tmp_path))
    assert first.root != second.root
    refs = [place.put([np.zeros(20_000)]) for place in (first, second)]
    first.cleanup()
    assert not os.path.exists(first.root)
    assert_same(second.get(refs[1]), [np.zeros(20_000)])
    first.cleanup()
    assert Store.temporary("bjtest://x").root.startswith("bjtest://x/beamjax-")


def test_local_roots_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Store("folder").root == str(tmp_path / "folder")
    assert Store("bjtest://a/b").root == "bjtest://a/b"


# ---------------------------------------------------------------- errors


def test_tiny_pieces_are_refused():
    with pytest.raises(
        OptionsError, match="store /a: found piece_bytes=10, expected at least 1024"
    ):
        Store("/a", piece_bytes=10)


def test_missing_file_is_named(root):
    place = Store(root)
    ref = place.put([np.zeros(20_000)])
    place.cleanup()
    with pytest.raises(
        SourceError, match=rf"{ref.files[0][0]}: cannot read .*expected a file of 160128 bytes. Is "
    ):
        place.get(ref)


def test_corrupt_file_is_named(root):
    place = Store(root)
    ref = place.put([np.zeros(20_000)])
    path = Path(root.removeprefix("bjtest:/")) / ref.files[0][0]
    data = bytearray(path.read_bytes())
    data[50_000] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArrayFormatError, match=rf"{path.name}: .*checksum mismatch of the payload"):
        place.get(ref)


def test_another_value_in_the_file_is_found(tmp_path):
    place = Store(str(tmp_path))
    ref, other = place.put([np.zeros(20_000)]), place.put([np.zeros(40_000, np.float32)])
    swapped = dataclasses.replace(ref, files=other.files)
    with pytest.raises(
        ArrayFormatError,
        match=rf"value {ref.key}: found float32\[40000\] at element 0 .*expected float64\[20000\]",
    ):
        place.get(swapped)
    double = dataclasses.replace(ref, files=ref.files * 2)
    with pytest.raises(ArrayFormatError, match="has more data than its 1 arrays"):
        place.get(double)
    with pytest.raises(ArrayFormatError, match="found files of 0 bytes, expected 160000"):
        place.get(dataclasses.replace(ref, files=()))


def test_arrays_that_are_larger_than_their_files_get_no_memory(tmp_path):
    place = Store(str(tmp_path))
    ref = place.put([np.zeros(20_000)])
    large = dataclasses.replace(ref, leaves=(("float64", (1 << 40,)),))
    told = f"value {ref.key}: found files of {ref.files[0][1]} bytes, expected {8 << 40}"
    tracemalloc.start()
    try:
        with pytest.raises(ArrayFormatError, match=told):
            place.get(large)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "x.arrays"])
def test_refs_cannot_leave_the_store(name, tmp_path):
    with pytest.raises(ArrayFormatError, match=f"{name}: not a file name that a store gives"):
        Store(str(tmp_path)).get(Ref("k", (("int8", (1,)),), files=((name, 1),)))


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"file: cannot write \w+.arrays of 160128 bytes"):
        Store(str(tmp_path / "file")).put([np.zeros(20_000)])


def test_unknown_url_is_named():
    place = Store("nosuch://bucket/folder")
    with pytest.raises(
        SourceError, match=r"nosuch://bucket/folder: cannot write.*Unable to get fi"
    ):
        place.put([np.zeros(20_000)])
    with pytest.raises(SourceError, match="nosuch://bucket/folder: cannot remove stored values"):
        place.cleanup()


def test_no_temporary_file_is_left_by_a_failed_write(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(
        SourceError, match=r"cannot write \w+.arrays of 160128 bytes .*No space left"
    ):
        Store(str(tmp_path)).put([np.zeros(20_000)])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.array(["a"]), "value 'x', array 0: dtype <U1 cannot be stored"),
        ([1, 2], "value 'x', array 0: found list, expected a NumPy or JAX array"),
        (np.ma.zeros(10**5), "value 'x', array 0: found MaskedArray"),
        (jax.random.key(0), "value 'x', array 0: dtype key<fry>"),
    ],
)
def test_put_refuses(value, message, tmp_path):
    with pytest.raises(StructureError, match=message):
        Store(str(tmp_path)).put([value], "x")


@pytest.mark.parametrize(
    "record",
    [
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
    ],
    ids=repr,
)
def test_ref_from_json_refuses(record):
    with pytest.raises(ArrayFormatError, match=r"reference to a stored value: .*expected a key"):
        Ref.from_json(record)


def test_sweep_leaves_what_is_live(root, monkeypatch):
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    values = Store(root)
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


def test_sweep_of_nothing(tmp_path):
    Store(str(tmp_path / "none")).sweep(())


def test_sweep_says_what_failed(tmp_path, monkeypatch):
    def fail(folder):
        raise OSError("broken")

    monkeypatch.setattr(files, "names", fail)
    with pytest.raises(SourceError, match="cannot remove stored values"):
        Store(str(tmp_path)).sweep(())


def test_a_store_that_was_removed_stays_so(tmp_path, monkeypatch):
    """As for a worker that goes on after the run was interrupted."""
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    values = Store.temporary(str(tmp_path / "work"))
    assert stat.S_IMODE(os.stat(values.root).st_mode) == 0o700
    values.put([np.arange(3)])
    values.cleanup()
    with pytest.raises(SourceError, match="cannot write"):
        values.put([np.arange(3)])
    assert not Path(values.root).exists()


def test_a_store_in_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(SourceError, match="cannot write here"):
        Store.temporary(str(tmp_path / "file"))
