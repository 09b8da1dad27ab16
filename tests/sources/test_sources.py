"""What every source must do: the bits of arrays, in any range, thread, process and runner."""

import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, raw
from source_files import (
    ARRAYS,
    NUMBERS,
    SOURCES,
    STREAMS,
    TABLES,
    TREE,
    N,
    assert_reads,
    members,
    random_bits,
    refused,
    save,
    save_npy,
    write_parquet,
)
from streams import Numbers, stream

import beamjax as bj
from beamjax.errors import BeamjaxError, PlacementError, SourceError, StructureError
from beamjax.sources import source_base
from beamjax.sources.array_source import from_arrays
from beamjax.sources.arrays import npy_writing
from beamjax.sources.source_base import LeafSpec, members_bytes, open_spec, spec_of, take_members
from beamjax.sources.source_kinds import buckets_of
from beamjax.sources.streams.spool import spilled
from beamjax.storage.arrays import _DTYPES, dtype_from_name
from beamjax.storage.shared_cache import BLOCKS

OPTIONS = {"shard_size": 8}
THREADS = {**OPTIONS, "direct_running_mode": "multi_threading", "direct_num_workers": 2}
PROCESSES = {**THREADS, "direct_running_mode": "multi_processing"}


@pytest.fixture(params=SOURCES)
def given(request, tmp_path):
    """A source, and the arrays that it stands for."""
    BLOCKS.clear()
    return SOURCES[request.param](tmp_path)


def test_every_range_is_that_of_the_arrays(given):
    source, tree = given
    assert len(source) == N
    assert source.treedef == jax.tree.structure(tree)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    types = [(leaf.shape, leaf.dtype, leaf.path) for leaf in source.leaves]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    expected = zip(leaves, paths, strict=True)
    assert types == [(leaf.shape[1:], leaf.dtype, path) for leaf, path in expected]
    if not buckets_of(source):
        assert members_bytes(source) == sum(leaf.nbytes for leaf in leaves)
    for start in range(N + 1):
        for stop in range(start, N + 1):
            found = source.read(start, stop)
            assert_same_bits(found, [leaf[start:stop] for leaf in leaves])
    for start, stop in ((-1, 1), (2, 1), (0, N + 1), (N + 1, N + 1)):
        message = f"members {start} to {stop} were asked for"
        refused(SourceError, message, source.read, start, stop)
    assert f"{N} members of" in repr(source)


def test_rows_by_index_are_those_of_the_arrays(given):
    source, tree = given
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    draw = np.random.default_rng(0).integers
    for numbers in ([], [N - 1], [7, 3, 3, 0, N - 1], range(N), draw(0, N, 100)):
        numbers = np.array(numbers, np.int64)
        assert_same_bits(take_members(source, numbers), [leaf[numbers] for leaf in leaves])


def test_specs_and_pickles_open_to_the_same_members(given, tmp_path):
    source, tree = given
    if source.spec() is None:
        refused(SourceError, "is not pickled", spec_of, source)
        refused(SourceError, "is not pickled", pickle.dumps, source)
    source = spilled(source, str(tmp_path / "spilled"))
    spec = spec_of(source)
    text = json.dumps(spec)
    assert len(pickle.dumps(source)) < 1000 + 2 * len(text)
    for again in (open_spec(json.loads(text)), pickle.loads(pickle.dumps(source))):
        assert again.spec() is not None
        assert again.leaves == source.leaves
        assert spec_of(again) == spec
        assert again.treedef == jax.tree.structure((0,) * len(source.leaves))
        assert_reads(again, tree)


@pytest.mark.parametrize("name", ["arrays", "spilled", "npy", "npy series", *ARRAYS, *TABLES])
def test_what_other_members_share_cannot_be_written(name, tmp_path):
    source, _ = SOURCES[name](tmp_path)
    for start, stop in ((0, N), (1, 3), (3, 20)):
        assert not any(array.flags.writeable for array in source.read(start, stop))


def test_threads_read_what_one_reads(given):
    source, tree = given
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]

    def read(seed):
        rng = np.random.default_rng(seed)
        for _ in range(20):
            start, stop = sorted(rng.integers(0, N + 1, 2))
            assert_same_bits(source.read(start, stop), [leaf[start:stop] for leaf in leaves])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))


@bj.program(placements={"members": None})
def moments(tree):
    """A mean, a maximum, and a placed result of each leaf, in two passes."""
    scaled = bj.map_fn(lambda m: jax.tree.map(lambda x: jnp.tanh(x.astype("float32")), m), tree)
    mean = bj.reduce_mean(scaled)
    squares = bj.map_fn(lambda m: jax.tree.map(lambda x, y: (x - y) ** 2, m, mean), scaled)
    return mean, bj.reduce_max(tree), bj.reduce_sum(squares), scaled


def test_a_program_has_the_bits_of_arrays_and_the_numbers_of_jit(given):
    source, tree = given
    expected = bj.run(moments, tree, runner="local", options=OPTIONS)
    assert_close(expected, jax.jit(moments)(tree), rtol=1e-4)
    for how in ({"runner": "local", "options": OPTIONS}, {"options": THREADS}):
        assert_same_bits(bj.run(moments, source, **how), expected)


def test_worker_processes_read_all_of_them(tmp_path, monkeypatch):
    # Workers import datasets from here.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    sources = {"numbers": Numbers([5, 0, N - 5]), "chunks": stream(TREE)}
    trees = {"numbers": np.arange(N, dtype=np.float32), "chunks": TREE}
    for name, make in (SOURCES | STREAMS).items():
        if "URL" in name:  # Workers do not know the file system of these tests.
            continue
        (tmp_path / name).mkdir()
        found = make(tmp_path / name)
        sources[name], trees[name] = found if isinstance(found, tuple) else (found, TREE)
    names = sorted(sources)
    arguments = [sources[name] for name in names]

    @bj.program(placements={"members": None})
    def maxima(*trees):
        return [bj.reduce_max(tree) for tree in trees]

    found = bj.run(maxima, *arguments, options=PROCESSES)
    expected = [jax.tree.map(lambda x: np.max(x, axis=0), trees[name]) for name in names]
    assert_same_bits(jax.tree.map(raw, found), jax.tree.map(np.asarray, expected))


@pytest.mark.parametrize("name", STREAMS)
def test_streams(name, tmp_path):
    source = STREAMS[name](tmp_path)
    assert source.pieces == 4
    assert source.treedef == jax.tree.structure(TREE)
    again = open_spec(json.loads(json.dumps(spec_of(source))))
    assert spec_of(again) == spec_of(source)
    assert again.leaves == source.leaves
    for each in (source, again):
        assert_same_bits(members(each), list(TREE.values()))
    expected = bj.run(moments, TREE, runner="local", options=OPTIONS)
    for how in ({"runner": "local", "options": OPTIONS}, {"options": THREADS}):
        assert_same_bits(bj.run(moments, source, **how), expected)


WIDE = {"f": np.arange(N) / 3, "i": np.arange(N) * 2**40 - 7}


@bj.program(placements={"members": None})
def sums(tree):
    return bj.reduce_sum(tree)


def test_64_bits_are_kept_where_jax_has_them(tmp_path):
    sources = [bj.from_npy(save_npy(tmp_path, WIDE)), bj.from_random_access(
        [{name: array[i] for name, array in WIDE.items()} for i in range(N)]
    )]  # fmt: skip
    sources += [
        form.read(save(form, tmp_path / name, WIDE)) for name, form in (ARRAYS | TABLES).items()
    ]
    with jax.enable_x64(True):
        expected = bj.run(sums, WIDE, runner="local")
        assert (expected["f"].dtype, int(expected["i"])) == (np.float64, WIDE["i"].sum())
        for source in sources:
            assert_same_bits(bj.run(sums, source, runner="local"), expected)


@pytest.mark.parametrize("name", ["spilled", *ARRAYS, *TABLES])
def test_every_dtype_is_read_as_it_is(name, tmp_path):
    names = list(_DTYPES) if name == "spilled" else NUMBERS
    if name not in ("spilled", *TABLES):
        names = [*names, "complex64", "complex128", ">f4", ">i8"]
    for number, shape in enumerate([(), (3,), (2, 3)]):
        dtypes = [dtype_from_name(n) if name == "spilled" else np.dtype(n) for n in names]
        arrays = [np.nan_to_num(random_bits(d, (N, *shape)).astype(d)) if d.kind == "f"
                  else random_bits(d, (N, *shape)) for d in dtypes]  # fmt: skip
        tree = {f"{i:02d}": array for i, array in enumerate(arrays)}
        native = {k: x.astype(x.dtype.newbyteorder("=")) for k, x in tree.items()}
        path = tmp_path / str(number)
        if name == "spilled":
            source = from_arrays(tree).spill(path)
        else:
            form = (ARRAYS | TABLES)[name]
            source = form.read(save(form, path, tree))
        assert source.treedef == jax.tree.structure(tree)
        assert_reads(source, native)
        assert_reads(source, native, 3, 18)
        assert_reads(open_spec(spec_of(source)), native, 2, 5)


# --- what is imported, and what an extra is missing for

SCRIPT = """
import json, sys
import beamjax as bj
assert "jax" not in sys.modules
bj.from_npy
optional = {"pyarrow", "zarr", "apache_beam"}
assert not optional & {*sys.modules}, optional & {*sys.modules}
specs, expected, path = json.loads(sys.stdin.read())
sys.modules["zarr"] = None
try:
    bj.from_zarr(path)
except bj.SourceError as error:
    assert all(part in str(error) for part in ("pip install -e '.[zarr]'", path)), error
else:
    raise AssertionError("zarr")
del sys.modules["zarr"]
from beamjax.sources.source_base import open_spec
for name, spec in specs.items():
    source = open_spec(spec)
    found = [array.tobytes().hex() for array in source.read(1, len(source) - 1)]
    assert found == expected[name], name
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert "apache_beam" not in sys.modules
"""


def test_files_are_read_elsewhere_without_beam_and_without_starting_jax(tmp_path):
    specs, expected = {}, {}
    for name, make in SOURCES.items():
        folder = tmp_path / name
        folder.mkdir()
        source = spilled(make(folder)[0], str(folder / "spilled"))
        if not name.startswith("opened"):  # The module of these has much to import.
            specs[name] = spec_of(source)
            expected[name] = [array.tobytes().hex() for array in source.read(1, N - 1)]
    text = json.dumps([specs, expected, str(write_parquet(tmp_path / "x", TREE) or tmp_path / "x")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- arrays in memory


def test_leaves_of_arrays_and_what_is_said_of_them():
    tree = {
        "x": np.zeros((N, 2, 3), np.float32),
        "y": [jnp.arange(N), random_bits(ml_dtypes.bfloat16, (N, 4))],
        "key": jax.random.split(jax.random.key(3), N),
    }
    source = from_arrays(tree)
    assert source.leaves == (
        LeafSpec((2,), np.dtype(np.uint32), "threefry2x32", "['key']"),
        LeafSpec((2, 3), np.dtype(np.float32), None, "['x']"),
        LeafSpec((), np.dtype(np.int32), None, "['y'][0]"),
        LeafSpec((4,), np.dtype(ml_dtypes.bfloat16), None, "['y'][1]"),
    )
    assert_reads(source, jax.tree.map(raw, tree), 2, 5)
    for part in ("['key'] uint32[2] (keys, threefry2x32)", "bfloat16[4] (1012 bytes) in memory"):
        assert part in repr(source)
    assert ", ... (" in repr(from_arrays([np.zeros(2)] * 5))


def test_keys_of_every_implementation_are_restored(tmp_path):
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        keys = jax.random.split(jax.random.key(0, impl=impl), N)
        for source in (from_arrays(keys), from_arrays(keys).spill(tmp_path)):
            (data,) = source.read(0, N)
            restored = jax.random.wrap_key_data(jnp.asarray(data), impl=source.leaves[0].key_impl)
            assert restored.dtype == keys.dtype
            assert_same_bits(restored, keys)


def test_arrays_are_read_as_views_that_cannot_be_written():
    value = np.arange(N * 1000.0).reshape(N, 1000)
    (read,) = from_arrays(value).read(1, 3)
    assert np.shares_memory(read, value)
    assert not read.flags.writeable
    value[1, 0] = 5  # The array of the caller stays writable.
    assert_reads(from_arrays(np.arange(N, dtype=">f4")), np.arange(N, dtype=np.float32))


@pytest.mark.parametrize(
    ("tree", "error", "message"),
    [
        ({}, StructureError, "tree without leaves"),
        ({"a": 3.0}, StructureError, r"leaf \['a'\]: found the scalar 3.0"),
        (True, StructureError, "placed input: found the scalar True"),
        ([np.float32(1)], StructureError, r"leaf \[0\]: found the scalar np.float32\(1.0\)"),
        (np.array(1), StructureError, r"found an array of shape \(\)"),
        (jnp.array(1), StructureError, r"found an array of shape \(\)"),
        (jax.random.key(0), StructureError, "found key<fry>, which has no members"),
        ({"s": "text"}, StructureError, r"leaf \['s'\]: found str"),
        (np.array(["a"]), StructureError, "dtype <U1"),
        ([np.array([{}])], StructureError, r"leaf \[0\]: dtype object"),
        (np.ma.zeros(3), StructureError, "found MaskedArray"),
        (
            {"a": np.zeros(4), "b": np.zeros(5)},
            PlacementError,
            r"leaf \['b'\]: found 5 members, expected 4 as in .*leaf \['a'\]",
        ),
    ],
)
def test_what_is_no_tree_of_members(tree, error, message):
    refused(error, message, from_arrays, tree)


def test_tracers_and_deleted_arrays_are_refused():
    refused(StructureError, "traced array", jax.jit(from_arrays), np.zeros(3))
    deleted = jnp.zeros(3)
    deleted.delete()
    refused(StructureError, "deleted", from_arrays, deleted)


def test_arrays_are_written_to_new_files_of_a_private_folder(tmp_path):
    folder = tmp_path / "new" / "folder"
    first = from_arrays(np.zeros(N)).spill(folder)
    second = from_arrays(np.ones(N)).spill(folder)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert (first.read(0, 1)[0], second.read(0, 1)[0]) == (0, 1)
    value = np.arange(4 * N, dtype=">f4").reshape(4, N).T
    bfloats = random_bits(ml_dtypes.bfloat16, (4, N)).T
    source = from_arrays((value, bfloats)).spill(folder)
    assert_reads(source, (value.astype(np.float32), bfloats), 1, 4)
    empty = np.zeros((N, 0), np.int8)
    assert_reads(from_arrays(empty).spill(folder), empty)


def test_arrays_that_cannot_be_written_leave_nothing_behind(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    source = from_arrays({"x": np.zeros(N)})
    refused(
        SourceError, "file: cannot write member 0 of .*in memory", source.spill, tmp_path / "file"
    )
    original = npy_writing.GrowingFile.append

    def full(file, array):
        original(file, array)
        if file.leaf.dtype == np.int8:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(npy_writing.GrowingFile, "append", full)
    source = from_arrays([np.zeros(N), np.zeros(N, np.int8)])
    refused(
        SourceError, "cannot write member 0 of .*No space left", source.spill, tmp_path / "full"
    )
    assert list((tmp_path / "full").iterdir()) == []


# --- specs


def changed(value):
    """Copies of a value of JSON with one change each."""
    if isinstance(value, dict):
        for key in value:
            yield from ({**value, key: other} for other in changed(value[key]))
            yield {name: value[name] for name in value if name != key}
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in changed(each))
    elif type(value) is int:
        yield from (value - 1, value + 1)
    yield from (other for other in (None, -1, "x", 2**62) if other != value)


OTHER_MEMBERS = {"range size", "grouped rows", "ragged buckets", "ragged mask_at"}
"""Sources and the fields of their specs of which another value is another good source."""


def test_specs_with_one_change_are_refused_or_harmless(tmp_path):
    """And so are files of tables and records with fewer or more members than a spec says."""
    faults = []
    for name, make in SOURCES.items():
        folder = tmp_path / name
        folder.mkdir()
        source, tree = make(folder)
        spec = json.loads(json.dumps(spec_of(spilled(source, str(folder / "spilled")))))
        expected = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
        for field, value in [(key, other) for key in spec for other in changed(spec[key])]:
            BLOCKS.clear()
            try:
                again = open_spec({**spec, field: value})
                found = [array.tobytes() for array in again.read(0, len(again))]
            except BeamjaxError:
                continue
            if found != expected and f"{name} {field}" not in OTHER_MEMBERS:
                faults.append((name, field, value))
    assert faults == []


class Squares(bj.Source):
    """Member i is i squared: the smallest source of one's own."""

    leaves = (LeafSpec((), np.dtype(np.int64)),)

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def read(self, start, stop):
        return [np.arange(start, stop) ** 2]


def test_a_source_of_ones_own():
    source = pickle.loads(pickle.dumps(Squares(5)))
    assert source.read(2, 4)[0].tolist() == [4, 9]
    assert str(source) == "5 members of int64[] (40 bytes) from Squares"
    assert source.treedef == jax.tree.structure((0,))
    assert source.spec() == {"size": 5}
    assert source.select([0]) == (source, range(1))


def test_the_protocol_is_small():
    public = {name for name in vars(bj.Source) if not name.startswith("_")} | {"__len__"}
    assert len(public) <= 10


def test_specs_that_cannot_be_opened():
    name = "beamjax.sources.arrays.npy_source:NpySource"
    npy = {"class": name, "leaves": [], "files": [], "wraps": False}
    leaf = {"shape": [], "dtype": "int32", "key_impl": None, "path": ""}
    series = [[{"path": "a.npy", "rows": n, "name": "", "stamp": None}] for n in (3, 4)]
    for spec, message in [
        ({"class": "odd"}, r"'odd': is unknown in process \d+"),
        ({"class": "__main__:Odd"}, "module that the workers can import"),
        ({"class": "json:JSONDecoder"}, "'json:JSONDecoder': is unknown"),
        ({"class": "no_such:Odd"}, "cannot import its module 'no_such'"),
        ({"class": name}, r"NpySource': found the spec .*KeyError: 'files'"),
        ({**npy, "leaves": 3}, "NpySource': found the spec .*leaves: found 3"),
        ({**npy, "files": ["a"]}, "files: found .a."),
        (npy, r"found \[\] files for 0 leaves, expected at least one file for each leaf"),
        ({**npy, "leaves": [leaf], "files": [[]]}, r"found \[0\] files for 1 leaves"),
        ({**npy, "leaves": [leaf] * 2, "files": series}, r"found \[3, 4\] members in the files"),
        (
            {"class": "beamjax.sources.array_source:ArraySource"},
            "ArraySource': found the spec .*KeyError: 'arrays'",
        ),
        ({"class": "live", "token": "gone"}, "source gone: not registered in process"),
        ({"class": "live"}, "source None: not registered"),
        ({"class": ["npy"]}, r"\['npy'\]"),
        ("npy", "source ''"),
    ]:
        refused(SourceError, message, open_spec, spec)


def test_live_sources_are_shared_until_they_are_released():
    source = from_arrays(np.zeros(3))
    token = source_base.register(source)
    assert open_spec(json.loads(json.dumps(source_base.live_spec(token)))) is source
    source_base.release(token)
    source_base.release(token)
    refused(SourceError, f"source {token}: .*process", source_base.lookup, token)
