"""Zarr arrays as placed inputs, against zarr's own reading, and with values that numbers encode."""

import base64
import json
import shutil
import struct
import threading
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from hypothesis import strategies as st
from source_files import TREE, N, assert_reads, refused

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.arrays import zarr_source
from beamjax.sources.source_base import open_spec, spec_of, take_members
from beamjax.storage.shared_cache import BLOCKS

zarr = pytest.importorskip(
    "zarr", reason="ZARR IS NOT TESTED: pip install -e '.[zarr]'", exc_type=ImportError
)

X = TREE["x"]
FORMATS = (2, 3)


@pytest.fixture(autouse=True)
def _no_blocks():
    BLOCKS.clear()


@pytest.fixture(params=FORMATS, ids=lambda number: f"v{number}")
def version(request):
    return request.param


def save(path, array, chunks, version=3, **more):
    made = zarr.create_array(
        str(path), shape=array.shape, dtype=array.dtype, chunks=chunks, zarr_format=version,
        overwrite=True, **more,
    )  # fmt: skip
    made[...] = array
    return str(path)


# --- what is read


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
def test_chunks_and_shards(how, tmp_path, monkeypatch):
    source = bj.from_zarr(save(tmp_path / "x", X, **how))
    for start, stop in [(0, N), (3, 9), (4, 8), (5, 6), (8, N), (N, N)]:
        assert_reads(source, X, start, stop)
    numbers = np.array([9, 2, N - 1, 9, 3])
    for nbytes in (1 << 16, 0):  # all at once, and by cached chunks
        monkeypatch.setattr(zarr_source, "_SMALL_CHUNK_BYTES", nbytes)
        assert_same_bits(take_members(source, numbers), [X[numbers]])


def test_what_is_not_stored_is_the_fill_value(version, tmp_path):
    path = tmp_path / "x"
    zarr.create_array(path, shape=(N,), chunks=(5,), dtype="i4", fill_value=7, zarr_format=version)
    assert_reads(bj.from_zarr(path), np.full(N, 7, np.int32))


def test_groups_and_trees(version, tmp_path):
    group = zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    for name, array in {"x": X, "sub/y": X[:, 0], "sub/deep/z": X[:, 0, 0]}.items():
        group.create_array(name, data=array, chunks=(4, *array.shape[1:]))
    group.create_group("empty")
    tree = {"sub": {"deep": {"z": X[:, 0, 0]}, "y": X[:, 0]}, "x": X}
    source = bj.from_zarr(tmp_path / "g")
    assert source.treedef == jax.tree.structure(tree)
    assert source.leaves[0].path == "['sub']['deep']['z']"
    other = save(tmp_path / "k", np.arange(N), (6,), version)
    both = bj.from_zarr({"g": tmp_path / "g", "k": [other, tmp_path / "g" / "x"]})
    whole = {"g": tree, "k": [np.arange(N), X]}
    assert both.treedef == jax.tree.structure(whole)
    for each in (both, open_spec(spec_of(both))):
        assert_reads(each, whole, 1, 22)
    assert "array 'sub/deep/z' and 4 more" in repr(both)


def test_zip_files_and_urls(tmp_path):
    with zarr.storage.ZipStore(tmp_path / "x.zip", mode="w") as store:
        zarr.create_array(store, data=X, chunks=(5, 2, 3))
    source = bj.from_zarr(tmp_path / "x.zip")
    for each in (source, open_spec(spec_of(source))):
        assert_reads(each, X, 3, 19)
    pytest.importorskip("fsspec")
    url = "memory://beamjax/x.zarr"
    spec = spec_of(bj.from_zarr({"x": save(url, X, (4, 2, 3))}))
    assert_reads(open_spec(spec), X, 3, 19)
    save(url, X + 1, (4, 2, 3))
    assert_reads(bj.from_zarr(url), X + 1, 3, 5)
    url = "memory://beamjax/y.zarr"
    spec = spec_of(bj.from_zarr(save(url, X, (4, 2, 3))))
    save(url, X[:, 0], (4, 3))
    message = r"found float32\[23, 3\], expected float32\[23, 2, 3\]"
    refused(SourceError, message, open_spec(spec).read, 0, 1)
    message = "memory://beamjax/none: cannot read"
    refused(SourceError, message, bj.from_zarr, "memory://beamjax/none")


@hypothesis.settings(deadline=None, derandomize=True, max_examples=40)
@hypothesis.given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_any_range_of_any_chunks(tmp_path_factory, size, rows, data):
    BLOCKS.clear()
    value = np.arange(size * 2).reshape(size, 2)
    source = bj.from_zarr(save(tmp_path_factory.mktemp("x") / "x", value, (rows, 2)))
    for _ in range(4):
        start = data.draw(st.integers(0, size))
        assert_reads(source, value, start, data.draw(st.integers(start, size)))


def test_chunks_are_decoded_once_and_whole_ones_not_kept(tmp_path, monkeypatch):
    path = save(tmp_path / "x", np.arange(100), (10,))
    source = bj.from_zarr(path)
    read, lock, original = [], threading.Lock(), zarr_source._rows

    def noted(*args):
        with lock:
            read.append((args[-1].start, args[-1].stop))
        return original(*args)

    monkeypatch.setattr(zarr_source, "_rows", noted)
    source.read(5, 42)
    assert sorted(read) == [(0, 10), (10, 40), (40, 50)]
    for start in range(93):
        assert_reads(source, np.arange(100), start, start + 7)
    assert sorted(read) == sorted([(10, 40), *((i, i + 10) for i in range(0, 100, 10))])
    assert len(BLOCKS.passing._values) == 10
    assert np.shares_memory(source.read(2, 5)[0], source.read(3, 6)[0])
    # A new source sees chunks that were written anew.
    zarr.open_array(path, mode="r+")[...] = np.arange(100) * 2
    assert_reads(bj.from_zarr(path), np.arange(100) * 2, 3, 7)


# --- what is refused


def test_what_is_no_array(version, tmp_path):
    (tmp_path / "x.txt").write_text("text")
    zarr.open_group(tmp_path / "g", mode="w", zarr_format=version)
    for error, message, tree in [
        (SourceError, "/none: is not there; expected an array or a group", tmp_path / "none"),
        (SourceError, "cannot read .*expected an array or a group of Zarr", tmp_path),
        (SourceError, "x.txt: cannot read .*expected an array or a group", tmp_path / "x.txt"),
        (SourceError, "/g: found a group without arrays", tmp_path / "g"),
        (StructureError, r"leaf \['a'\]: found int, expected the path of an a", {"a": 3}),
        (StructureError, "without leaves", {}),
    ]:
        refused(error, message, bj.from_zarr, tree)


@pytest.mark.filterwarnings("ignore:.*")  # of zarr, that a dtype is not in the specification
def test_arrays_of_other_than_members(tmp_path):
    for array, error, message in [
        (np.float32(3), StructureError, r"found an array of shape \(\) in .*/x, which has no"),
        (np.zeros(3, [("a", "f4")]), StructureError, r"placed input in .*/x: dtype .*'a'"),
        (np.zeros(3, "<U4"), StructureError, "placed input in .*/x: dtype <U4 cannot"),
        (np.zeros(3, "M8[s]"), StructureError, "in .*/x: dtype datetime64"),
    ]:
        array = np.asarray(array)
        save(tmp_path / "x", array, tuple(max(size, 1) for size in array.shape))
        refused(error, message, bj.from_zarr, tmp_path / "x")
    paths = [save(tmp_path / str(n), np.arange(n), (4,)) for n in (5, 6)]
    message = r"leaf \[1\] \(.*/6\): found 6 members, expected 5.*Choose those that belong"
    refused(PlacementError, message, bj.from_zarr, paths)


def test_damaged_and_changed_arrays(version, tmp_path):
    path = Path(save(tmp_path / "x", X, (5, 2, 3), version))
    chunk = path / ("1.0.0" if version == 2 else "c/1/0/0")
    whole = chunk.read_bytes()
    for data in (b"junk", whole[: len(whole) // 2]):
        chunk.write_bytes(data)
        source = bj.from_zarr(path)
        assert_reads(source, X, 0, 5)
        refused(SourceError, r"/x: cannot read.* members 5 to 9 of", source.read, 4, 8)
    meta = path / (".zarray" if version == 2 else "zarr.json")
    meta.write_text("{bad")
    refused(SourceError, "was changed after", source.read, 0, 1)
    message = r"/x: cannot read .*expected an array or a group"
    refused(SourceError, message, bj.from_zarr, path)
    shutil.rmtree(path)
    source = bj.from_zarr(save(path, X, (5, 2, 3), version))
    save(path, np.zeros((N, 3)), (5, 3), version)
    refused(SourceError, "the file was changed after the source was made", source.read, 0, 3)


# --- numbers that stand for others by the CF conventions

DIMENSIONS = {"_ARRAY_DIMENSIONS": ["time"]}
"""What xarray writes to each array of format 2."""


def packed(path, stored, attributes, version=3, fill=None):
    chunks = (8, *stored.shape[1:])
    return save(path, stored, chunks, version, fill_value=fill, attributes=attributes)


def in_base64(value):
    """A float as xarray writes it to the attributes of format 3."""
    return base64.standard_b64encode(struct.pack("<d", value)).decode()


NAN = np.nan
I2 = np.array([-32767, 0, 1, -5, 700], np.int16)
# Attributes, numbers, the values that they stand for, and the dtype that xarray has for these.
CASES = [
    ({"scale_factor": 0.5, "add_offset": 280.0, "_FillValue": -32767}, I2,
     [NAN, 280, 280.5, 277.5, 630], "float64"),
    ({"scale_factor": 2.0, "missing_value": -5}, I2.astype("i4"),
     [-65534, 0, 2, NAN, 1400], "float64"),
    ({"add_offset": -1}, I2.astype("u1"), [0, -1, 0, 250, 187], "float64"),
    ({"_FillValue": 1, "missing_value": [0, 700]}, I2, [-32767, NAN, NAN, -5, NAN], "float32"),
    ({"_FillValue": -5.0}, I2.astype("i8"), [-32767, 0, 1, NAN, 700], "float64"),
    ({"_FillValue": in_base64(700.0)}, I2.astype("f4"), [-32767, 0, 1, -5, NAN], "float32"),
    ({"_FillValue": in_base64(1e20)}, np.array([1e20, 3], "f4"), [NAN, 3], "float32"),
    ({"_Unsigned": "true", "_FillValue": -1, "scale_factor": 0.5}, np.array([-1, -2, 4], "i1"),
     [NAN, 127, 2], "float64"),
    ({"_Unsigned": "false", "_FillValue": -1}, np.array([255, 254, 4], "u1"), [NAN, -2, 4],
     "float32"),
    # A fill value between two numbers of 53 bits is not that of its neighbour.
    ({"_FillValue": 2**53 + 1}, np.array([2**53, 2**53 + 1]), [2.0**53, NAN], "float64"),
]  # fmt: skip


def test_values_are_those_that_numbers_stand_for(version, tmp_path):
    """They are refused unless the caller chooses."""
    wrong = []
    for i, (attributes, stored, expected, dtype) in enumerate(CASES):
        path = packed(tmp_path / f"{i}.zarr", stored, attributes, version)
        for x64, wanted in (False, "float32"), (True, dtype):
            with jax.enable_x64(x64):
                source = bj.from_zarr(path, mask_and_scale=True)
                for each in source, open_spec(spec_of(source)):
                    (found,) = each.read(0, len(stored))
                    good = found.dtype == wanted
                    if not good or not np.array_equal(found, np.array(expected, wanted), True):
                        wrong.append((attributes, x64, found, expected))
        message = r"CF conventions .*mask_and_scale=True"
        error = refused(StructureError, message, bj.from_zarr, {"x": path})
        assert path in str(error)
        assert_reads(bj.from_zarr(path, mask_and_scale=False), stored)
    assert not wrong


def test_attributes_that_change_nothing_are_read_as_before(tmp_path):
    floats = np.array([1.5, NAN], np.float32)
    for attributes, stored in [
        ({"units": "K", "valid_min": 0}, I2), ({"scale_factor": 1.0, "add_offset": 0}, I2),
        ({"_FillValue": "NaN"}, floats), ({"_FillValue": in_base64(NAN)}, floats),
        ({"_Unsigned": "true"}, I2.astype("u2")), ({"scale_factor": 2.0}, np.array([True, False])),
    ]:  # fmt: skip
        path = packed(tmp_path / "x", stored, attributes, fill=0)
        for choice in (None, True):
            assert_reads(bj.from_zarr(path, mask_and_scale=choice), stored)


def test_fill_values_of_format_2_and_attributes_that_are_no_numbers(tmp_path):
    path = packed(tmp_path / "x.zarr", I2, DIMENSIONS, 2, -5)
    refused(StructureError, "_FillValue=-5", bj.from_zarr, path)
    expected = np.array([-32767, 0, 1, NAN, 700], np.float32)
    assert_reads(bj.from_zarr(path, mask_and_scale=True), expected)
    assert_reads(bj.from_zarr(packed(tmp_path / "plain.zarr", I2, {}, 2, -5)), I2)
    for name, value in [("scale_factor", "much"), ("_FillValue", [[1], "x"]), ("add_offset", {})]:
        path = packed(tmp_path / "x.zarr", I2, {name: value}, fill=0)
        message = f"attribute '{name}': found .*expected a number"
        refused(StructureError, message, bj.from_zarr, path, mask_and_scale=True)


@bj.program(placements={"times": None})
def mean(x):
    known = bj.map_fn(jnp.isfinite, x)
    total = bj.reduce_sum(bj.map_fn(lambda v: jnp.where(jnp.isfinite(v), v, 0), x))
    return total / bj.reduce_sum(bj.map_fn(lambda k: k.astype(jnp.float32), known))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_programs_read_the_values(runner, tmp_path):
    stored = np.random.default_rng(0).integers(-3000, 3000, (N, 3)).astype(np.int16)
    stored[3, 1] = stored[17] = -32767
    attributes = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32767}
    truth = np.where(stored == -32767, NAN, stored * 0.01 + 273.15)
    source = bj.from_zarr(packed(tmp_path / "t.zarr", stored, attributes), mask_and_scale=True)
    found = bj.run(mean, source, runner=runner, options={"shard_size": 8})
    np.testing.assert_allclose(found, np.nanmean(truth, axis=0), rtol=1e-6)


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_arrays_of_a_group_are_chosen(version, tmp_path):
    group = str(tmp_path / "group.zarr")
    t2m, sp = np.arange(N * 2.0, dtype="f4").reshape(N, 2), np.arange(N, dtype="i4")
    made = zarr.create_group(group, zarr_format=version)
    for name, array in {"t2m": t2m, "surface/sp": sp, "latitude": np.arange(7.0)}.items():
        made.create_array(name, data=array)
    made.create_array("station", shape=(N,), dtype=str)
    made.create_array("time", data=np.arange(N).astype("datetime64[s]"))
    source = bj.from_zarr(group, arrays=["t2m", "surface/sp"])
    tree = {"t2m": t2m, "surface": {"sp": sp}}
    assert source.treedef == jax.tree.structure(tree)
    for each in source, open_spec(spec_of(source)):
        assert_reads(each, tree, 3, 11)
    one = bj.from_zarr({"a": group, "b": group}, arrays="surface/sp")
    assert one.treedef == jax.tree.structure({"a": 0, "b": 0})
    for error, message, given, arrays in [
        (StructureError, r"'station'.*arrays=\[", group, None),
        (PlacementError, f"{group}.*expected 7 as in", group, ["t2m", "latitude"]),
        (SourceError, "no array 'sp', expected some of .*'surface/sp'", group, ["sp"]),
        (SourceError, "arrays: found no name", group, []),
        (StructureError, "found an array, expected a group", f"{group}/t2m", "t2m"),
    ]:
        refused(error, message, bj.from_zarr, given, arrays=arrays)


def spoil(path, version):
    """Gives an array a dtype that Zarr does not know."""
    file = Path(path) / (".zarray" if version == 2 else "zarr.json")
    metadata = json.loads(file.read_text())
    unknown = {"dtype": "|O", "filters": [{"id": "json2"}], "fill_value": None}
    metadata |= unknown if version == 2 else {"data_type": "unknown"}
    file.write_text(json.dumps(metadata))


@pytest.mark.parametrize("consolidated", [False, True])
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_arrays_beside_unreadable_ones(version, consolidated, tmp_path):
    path, values = str(tmp_path / "group.zarr"), np.arange(N, dtype="f4")
    group = zarr.create_group(path, zarr_format=version)
    for name in ("x", "bad", "below/y", "below/worse"):
        group.create_array(name, data=values)
    if consolidated:
        zarr.consolidate_metadata(path)
        file = Path(path) / (".zmetadata" if version == 2 else "zarr.json")
        changed = {
            2: ('"dtype": "<f4"', '"dtype": "|O"'),
            3: ('"data_type": "float32"', '"data_type": "unknown"'),
        }
        old, new = changed[version]
        file.write_text(file.read_text().replace(old, new))
    for name in ("bad", "below/worse"):
        spoil(f"{path}/{name}", version)
    assert_reads(bj.from_zarr(path, arrays=["x", "below/y"]), {"below": {"y": values}, "x": values})
    assert_reads(bj.from_zarr(path, arrays="below/y"), values)
    message = r"group\.zarr: cannot read .*Of the group, 'bad' can't be read\. Choose those"
    refused(SourceError, message, bj.from_zarr, path)
    message = r"group\.zarr: cannot read .*Of the group, 'below/worse' can't be read"
    refused(SourceError, message, bj.from_zarr, path, arrays="below")
    for name in ("bad", "below/worse"):
        refused(
            SourceError, rf"group\.zarr, array '{name}'", bj.from_zarr, path, arrays=["x", name]
        )
