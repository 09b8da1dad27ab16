"""Sources: what is read is what was given, in this process and in another, or a clear error."""

import json
import os
import pickle
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError
from beamjax.sources import LeafSpec, from_arrays, from_npy, npy_source, open_spec
from beamjax.stored_dtypes import _DTYPES, dtype_from_name

N = 7


def numbers(dtype, shape, seed=0):
    empty = np.empty(shape, dtype)
    if empty.nbytes == 0:
        return empty
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, empty.nbytes, np.uint8).view(dtype).reshape(shape)


def sample_tree():
    return {
        "x": np.arange(N * 6, dtype=np.float32).reshape(N, 2, 3),
        "y": [jnp.arange(N), numbers(ml_dtypes.bfloat16, (N, 4))],
        "key": jax.random.split(jax.random.key(3), N),
    }


def assert_same(left, right):
    left, right = np.asarray(left), np.asarray(right)
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


def save(path, array):
    np.save(path, array)
    return str(path)


# ---------------------------------------------------------------- arrays in memory


def test_from_arrays_reads_ranges_of_the_tree():
    tree = sample_tree()
    source = from_arrays(tree)
    assert len(source) == N
    assert source.treedef == jax.tree.structure(tree)
    key, x, ints, bfloats = source.read(2, 5)
    assert_same(x, tree["x"][2:5])
    assert_same(ints, tree["y"][0][2:5])
    assert_same(bfloats, tree["y"][1][2:5])
    assert_same(key, jax.random.key_data(tree["key"])[2:5])
    assert source.leaves == (
        LeafSpec((2,), np.dtype(np.uint32), "threefry2x32", "['key']"),
        LeafSpec((2, 3), np.dtype(np.float32), None, "['x']"),
        LeafSpec((), np.dtype(np.int32), None, "['y'][0]"),
        LeafSpec((4,), np.dtype(ml_dtypes.bfloat16), None, "['y'][1]"),
    )


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_key_impl_restores_the_keys(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), N)
    source = from_arrays(keys)
    (data,) = source.read(0, N)
    assert source.leaves[0].shape == data.shape[1:]
    restored = jax.random.wrap_key_data(jnp.asarray(data), impl=source.leaves[0].key_impl)
    assert restored.dtype == keys.dtype
    assert_same(jax.random.normal(restored[3]), jax.random.normal(keys[3]))


def test_read_is_a_readonly_view():
    value = np.arange(N * 1000.0).reshape(N, 1000)
    (read,) = from_arrays(value).read(1, 3)
    assert np.shares_memory(read, value)
    with pytest.raises(ValueError, match="read-only"):
        read[0, 0] = 1
    value[1, 0] = 5  # the user's own array stays writable


def test_big_endian_is_read_native():
    source = from_arrays(np.arange(N, dtype=">f4"))
    assert source.leaves[0].dtype == np.dtype(np.float32)
    assert_same(source.read(0, N)[0], np.arange(N, dtype=np.float32))


def test_describe_and_sizes():
    source = from_arrays(sample_tree())
    assert source.nbytes == N * (8 + 24 + 4 + 8)
    assert source.describe() == (
        "7 members of ['key'] uint32[2] (keys, threefry2x32), ['x'] float32[2, 3], "
        "['y'][0] int32[], ['y'][1] bfloat16[4] (308 bytes) in memory"
    )
    assert repr(source).startswith("<ArraySource: 7 members of")
    assert ", ... (" in from_arrays([np.zeros(2)] * 5).describe()


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({}, StructureError, "placed input: found a tree without leaves, expected an array"),
        ({"a": 3.0}, StructureError, r"leaf \['a'\]: found the scalar 3.0, which has no members"),
        (True, StructureError, "placed input: found the scalar True"),
        ([np.float32(1)], StructureError, r"leaf \[0\]: found the scalar np.float32\(1.0\)"),
        (np.array(1), StructureError, r"placed input: found an array of shape \(\), which has no"),
        (jnp.array(1), StructureError, r"found an array of shape \(\).*expected an array of shape"),
        (jax.random.key(0), StructureError, "found key<fry>, which has no members"),
        ({"s": "text"}, StructureError, r"leaf \['s'\]: found str, expected a NumPy or JAX array"),
        (np.array(["a"]), StructureError, "placed input: dtype <U1 cannot be stored as raw bytes"),
        ([np.array([{}])], StructureError, r"leaf \[0\]: dtype object cannot be stored"),
        (np.ma.zeros(3), StructureError, "placed input: found MaskedArray"),
        (np.zeros((0, 3)), PlacementError, "placed input: found 0 members, expected at least one"),
        (
            {"a": np.zeros(4), "b": np.zeros(5)},
            PlacementError,
            r"leaf \['b'\]: found 5 members, expected 4 as in placed input, leaf \['a'\]",
        ),
    ],
)
def test_from_arrays_refuses(tree, error, message):
    with pytest.raises(error, match=message) as info:
        from_arrays(tree)
    assert isinstance(info.value, BeamjaxError)


def test_from_arrays_refuses_tracers_and_deleted_arrays():
    with pytest.raises(StructureError, match=r"placed input: .*traced array"):
        jax.jit(from_arrays)(np.zeros(3))
    deleted = jnp.zeros(3)
    deleted.delete()
    with pytest.raises(StructureError, match="placed input: Array has been deleted"):
        from_arrays(deleted)


@pytest.mark.parametrize("bounds", [(-1, 2), (3, 2), (0, N + 1), (N + 1, N + 1)])
def test_read_refuses_ranges_outside(bounds, tmp_path):
    source = from_arrays(np.zeros(N))
    for each in (source, source.spill(tmp_path)):
        with pytest.raises(SourceError, match=f"members {bounds[0]} to {bounds[1]} were asked"):
            each.read(*bounds)


def test_empty_range_is_no_error():
    assert from_arrays(np.zeros((N, 3))).read(N, N)[0].shape == (0, 3)


# ---------------------------------------------------------------- spilled to files


@pytest.mark.parametrize("name", list(_DTYPES))
@pytest.mark.parametrize("shape", [(N,), (N, 2, 3), (N, 0)], ids=str)
def test_spill_keeps_every_dtype(name, shape, tmp_path):
    value = numbers(dtype_from_name(name), shape)
    source = from_arrays(value).spill(tmp_path)
    assert_same(source.read(0, N)[0], value)
    assert_same(open_spec(source.to_spec()).read(2, 5)[0], value[2:5])


def test_spill_keeps_layouts(tmp_path):
    value = np.arange(4 * N, dtype=">f4").reshape(4, N).T
    bfloats = numbers(ml_dtypes.bfloat16, (4, N)).T
    source = from_arrays((value, bfloats)).spill(tmp_path)
    read = source.read(1, 4)
    assert_same(read[0], value[1:4].astype(np.float32))
    assert_same(read[1], bfloats[1:4])
    assert not read[0].flags.writeable


def test_spill_twice_keeps_both(tmp_path):
    folder = tmp_path / "new" / "folder"
    first = from_arrays(np.zeros(N)).spill(folder)
    second = from_arrays(np.ones(N)).spill(folder)
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert first.read(0, 1)[0] == 0
    assert second.read(0, 1)[0] == 1


def test_spill_reports_what_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SourceError, match=r"file/.*npy: cannot write 56 bytes .*leaf \['x'\]"):
        from_arrays({"x": np.zeros(N)}).spill(tmp_path / "file")


def test_spill_leaves_nothing_behind_when_it_fails(tmp_path, monkeypatch):
    original = np.save

    def full(path, array, **kwargs):
        original(path, array, **kwargs)
        if str(path).endswith("001.npy"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(SourceError, match=r"001.npy: cannot write 7 bytes .*No space left"):
        from_arrays([np.zeros(N), np.zeros(N, np.int8)]).spill(tmp_path)
    assert list(tmp_path.iterdir()) == []


@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
@hypothesis.given(st.integers(1, 50), st.data())
def test_memory_and_files_read_the_same(tmp_path_factory, size, data):
    source = from_arrays([numbers(np.float32, (size, 2)), numbers(np.int8, (size,), 1)])
    stored = source.spill(tmp_path_factory.mktemp("spill"))
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    for left, right in zip(source.read(start, stop), stored.read(start, stop), strict=True):
        assert_same(left, right)


# ---------------------------------------------------------------- specs


def test_spec_is_json_and_opens_to_a_tuple_of_leaves(tmp_path):
    tree = sample_tree()
    source = from_arrays(tree).spill(tmp_path)
    assert source.treedef == jax.tree.structure(tree)
    spec = json.loads(json.dumps(source.to_spec()))
    again = open_spec(spec)
    assert again.leaves == source.leaves
    assert len(again) == N
    assert again.treedef == jax.tree.structure((0, 0, 0, 0))
    assert again.to_spec() == source.to_spec()
    for left, right in zip(again.read(0, N), source.read(0, N), strict=True):
        assert_same(left, right)


def test_pickle_holds_the_spec_only(tmp_path):
    source = from_arrays(np.zeros((N, 100_000))).spill(tmp_path)
    pickled = pickle.dumps(source)
    assert len(pickled) < 1000
    assert_same(pickle.loads(pickled).read(0, 1)[0], np.zeros((1, 100_000)))


def test_memory_is_not_pickled():
    source = from_arrays(np.zeros(N))
    for attempt in (lambda: pickle.dumps(source), source.to_spec):
        with pytest.raises(SourceError, match=r"is not pickled.*source.spill\(folder\).*register"):
            attempt()
    with pytest.raises(SourceError, match="a source in memory has no spec"):
        open_spec({"kind": "array"})


def test_another_process_reads_without_jax(tmp_path):
    source = from_arrays((np.arange(N), numbers(ml_dtypes.bfloat16, (N, 2)))).spill(tmp_path)
    code = (
        "import sys, json\n"
        "from beamjax.sources.source_base import open_spec\n"
        "source = open_spec(json.loads(sys.argv[1]))\n"
        "print(json.dumps([array.tobytes().hex() for array in source.read(1, 4)]))\n"
        "assert 'apache_beam' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, json.dumps(source.to_spec())]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(out) == [array.tobytes().hex() for array in source.read(1, 4)]


# ---------------------------------------------------------------- files


def test_from_npy_single_and_tree(tmp_path):
    x, y = np.arange(N), np.zeros((N, 3), np.float32)
    files = {"x": save(tmp_path / "x.npy", x), "y": tmp_path / "y.npy"}
    save(files["y"], y)
    source = from_npy(files)
    assert source.treedef == jax.tree.structure({"x": 0, "y": 0})
    assert source.files == (str(files["x"]), str(files["y"]))
    for read, value in zip(source.read(1, 6), (x, y), strict=True):
        assert_same(read, value[1:6])
        assert isinstance(read, np.memmap)
    assert source.describe().endswith(f"in {files['x']} and 1 more")
    assert_same(from_npy(files["x"]).read(0, N)[0], x)


def test_from_npy_makes_paths_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("x.npy", np.arange(N))
    assert from_npy("x.npy").files == (str(tmp_path / "x.npy"),)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, SourceError, "x.npy: cannot open .No such file.*expected a .npy file that the"),
        (b"", SourceError, "x.npy: found 0 bytes that are not a whole .npy array"),
        (b"hello, world", SourceError, "x.npy: found 12 bytes that are not a whole .npy array"),
        (np.array([{}]), SourceError, r"x.npy: found \d+ bytes .*objects in dtype"),
        (np.array(["a"]), StructureError, "in .*x.npy: dtype <U1 cannot be stored"),
        (np.array(3.0), StructureError, r"found an array of shape \(\) in .*x.npy"),
        (np.zeros((0, 2)), PlacementError, r"\(.*x.npy\): found 0 members"),
        (
            numbers(ml_dtypes.bfloat16, (3,)),
            StructureError,
            r"found the dtype \|V2 in .*x.npy, expected numbers. np.save loses bfloat16",
        ),
        (np.zeros(2, [("a", "f4")]), StructureError, r"found the dtype \[\('a', '<f4'\)\] in"),
    ],
)
def test_from_npy_refuses(content, error, message, tmp_path):
    path = tmp_path / "x.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(error, match=message):
        from_npy(path)


def test_from_npy_refuses_trees(tmp_path):
    files = [save(tmp_path / f"{n}.npy", np.zeros(n)) for n in (3, 4)]
    with pytest.raises(PlacementError, match=r"leaf \[1\] .*4.npy.: found 4 members, expected 3"):
        from_npy(files)
    with pytest.raises(StructureError, match=r"leaf \['a'\]: found int, expected the path of"):
        from_npy({"a": 3})
    with pytest.raises(StructureError, match="a tree without leaves"):
        from_npy([])


def test_opening_a_spec_touches_no_file(tmp_path):
    source = from_npy(save(tmp_path / "x.npy", np.arange(N)))
    os.remove(tmp_path / "x.npy")
    again = open_spec(source.to_spec())
    assert len(again) == N
    with pytest.raises(SourceError, match=r"x.npy: is not there; expected a file"):
        again.read(0, 1)


def test_files_changed_later_are_found(tmp_path):
    path = tmp_path / "x.npy"
    source = from_npy({"x": save(path, np.arange(1000.0))})
    source.read(0, 1000)
    whole, written = path.read_bytes(), path.stat().st_mtime_ns
    changes = [
        lambda: path.write_bytes(whole[:-8]),
        lambda: save(path, np.zeros((1000, 2))),
        lambda: save(path, np.arange(1000)),
        lambda: path.write_bytes(whole),
    ]
    for change in changes:
        change()
        with pytest.raises(
            SourceError, match=r"x.npy: found .* bytes written .* was changed after"
        ):
            source.read(0, 1)
    os.utime(path, ns=(written, written))
    assert_same(source.read(0, 1000)[0], np.arange(1000.0))


def test_files_of_another_type_are_found(tmp_path):
    """Also where a file has the size and the time that it had."""
    path = tmp_path / "x.npy"
    source = from_npy({"x": save(path, np.arange(1000.0))})
    written = path.stat().st_mtime_ns
    npy_source._MAPPED.clear()
    save(path, np.arange(1000))
    os.utime(path, ns=(written, written))
    with pytest.raises(
        SourceError,
        match=r"x.npy: found int64\[1000\], expected float64\[1000\] for leaf \['x'\]; ",
    ):
        source.read(0, 1)


def test_a_file_is_mapped_once_for_all_threads(tmp_path, monkeypatch):
    source = from_npy(save(tmp_path / "x.npy", np.arange(10_000)))
    npy_source._MAPPED.clear()
    count, lock, original = [], threading.Lock(), np.lib.format.open_memmap

    def counted(*args, **kwargs):
        with lock:
            count.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(np.lib.format, "open_memmap", counted)
    source.read(0, 10)
    with ThreadPoolExecutor(8) as pool:
        reads = list(pool.map(lambda i: source.read(i, i + 10)[0], range(1000)))
    assert len(count) == 1
    assert all(read[0] == i for i, read in enumerate(reads))


def test_maps_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(npy_source, "_MAX_MAPPED", 3)
    files = [save(tmp_path / f"{i}.npy", np.full(N, i)) for i in range(6)]
    source = from_npy(files)
    assert [int(array[0]) for array in source.read(0, 1)] == list(range(6))
    assert len(npy_source._MAPPED) == 3
