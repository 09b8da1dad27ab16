"""Zarr arrays whose numbers stand for others by the CF conventions."""

import base64
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources import open_spec

zarr = pytest.importorskip(
    "zarr", reason="ZARR IS NOT TESTED: pip install 'beamjax[zarr]'", exc_type=ImportError
)

N = 20
FORMATS = (2, 3)
DIMENSIONS = {"_ARRAY_DIMENSIONS": ["time"]}
"""What xarray writes to each array of format 2."""


def save(path, stored, attributes, version=3, fill=0):
    made = zarr.create_array(
        str(path), data=stored, chunks=(8, *stored.shape[1:]), zarr_format=version,
        fill_value=fill, attributes=attributes, overwrite=True,
    )  # fmt: skip
    assert made.metadata.zarr_format == version
    return str(path)


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


@pytest.mark.parametrize("version", FORMATS)
def test_values_are_those_that_numbers_stand_for(version, tmp_path):
    wrong = []
    for i, (attributes, stored, expected, dtype) in enumerate(CASES):
        path = save(tmp_path / f"{i}.zarr", stored, attributes, version, fill=None)
        for x64, wanted in (False, "float32"), (True, dtype):
            with jax.enable_x64(x64):
                source = bj.from_zarr(path, mask_and_scale=True)
                for each in source, open_spec(source.to_spec()):
                    (found,) = each.read(0, len(stored))
                    good = found.dtype == wanted
                    if not good or not np.array_equal(found, np.array(expected, wanted), True):
                        wrong.append((attributes, x64, found, expected))
    assert not wrong


@pytest.mark.parametrize("version", FORMATS)
def test_packed_numbers_are_refused_unless_the_caller_chooses(version, tmp_path):
    for i, (attributes, stored, _, _) in enumerate(CASES):
        path = save(tmp_path / f"{i}.zarr", stored, attributes, version, fill=None)
        with pytest.raises(StructureError, match=r"CF conventions .*mask_and_scale=True") as error:
            bj.from_zarr({"x": path})
        assert path in str(error.value)
        (raw,) = bj.from_zarr(path, mask_and_scale=False).read(0, len(stored))
        np.testing.assert_array_equal(raw, stored)
        assert raw.dtype == stored.dtype


def test_attributes_that_change_nothing_are_read_as_before(tmp_path):
    floats = np.array([1.5, NAN], np.float32)
    for i, (attributes, stored) in enumerate([
        ({"units": "K", "valid_min": 0}, I2), ({"scale_factor": 1.0, "add_offset": 0}, I2),
        ({"_FillValue": "NaN"}, floats), ({"_FillValue": in_base64(NAN)}, floats),
        ({"_Unsigned": "true"}, I2.astype("u2")), ({"scale_factor": 2.0}, np.array([True, False])),
    ]):  # fmt: skip
        for choice in (None, True):
            source = bj.from_zarr(
                save(tmp_path / f"{i}", stored, attributes), mask_and_scale=choice
            )
            np.testing.assert_array_equal(source.read(0, len(stored))[0], stored)
            assert source.leaves[0].dtype == stored.dtype


def test_the_fill_value_of_format_2_is_that_of_xarray(tmp_path):
    path = save(tmp_path / "x.zarr", I2, DIMENSIONS, version=2, fill=-5)
    with pytest.raises(StructureError, match="_FillValue=-5"):
        bj.from_zarr(path)
    (found,) = bj.from_zarr(path, mask_and_scale=True).read(0, 5)
    np.testing.assert_array_equal(found, np.array([-32767, 0, 1, NAN, 700], np.float32))
    plain = save(tmp_path / "plain.zarr", I2, {}, version=2, fill=-5)
    assert bj.from_zarr(plain).leaves[0].dtype == np.int16


def test_attributes_that_are_no_numbers(tmp_path):
    for name, value in [("scale_factor", "much"), ("_FillValue", [[1], "x"]), ("add_offset", {})]:
        path = save(tmp_path / "x.zarr", I2, {name: value})
        with pytest.raises(StructureError, match=f"attribute '{name}': found .*expected a number"):
            bj.from_zarr(path, mask_and_scale=True)


@bj.program(placements={"times": None})
def mean(x):
    known = bj.map_fn(jnp.isfinite, x)
    total = bj.reduce_sum(bj.map_fn(lambda v: jnp.where(jnp.isfinite(v), v, 0), x))
    return total / bj.reduce_sum(bj.map_fn(lambda k: k.astype(jnp.float32), known))


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_programs_read_the_values(runner, tmp_path):
    rng = np.random.default_rng(0)
    stored = rng.integers(-3000, 3000, (N, 3)).astype(np.int16)
    stored[3, 1] = stored[17] = -32767
    attributes = {"scale_factor": 0.01, "add_offset": 273.15, "_FillValue": -32767}
    path = save(tmp_path / "t.zarr", stored, attributes)
    truth = np.where(stored == -32767, NAN, stored * 0.01 + 273.15)
    source = bj.from_zarr(path, mask_and_scale=True)
    found = bj.run(mean, source, runner=runner, options={"shard_size": 8})
    np.testing.assert_allclose(found, np.nanmean(truth, axis=0), rtol=1e-6)


@pytest.fixture(params=FORMATS)
def group(request, tmp_path):
    path = tmp_path / "group.zarr"
    made = zarr.create_group(str(path), zarr_format=request.param)
    made.create_array("t2m", data=np.arange(N * 2.0, dtype="f4").reshape(N, 2))
    made.create_array("surface/sp", data=np.arange(N, dtype="i4"))
    made.create_array("latitude", data=np.arange(7.0))
    text = made.create_array("station", shape=(N,), dtype=str)
    text[:] = np.array([f"s{i}" for i in range(N)], dtype=object)
    times = made.create_array("time", shape=(N,), dtype="datetime64[s]")
    times[:] = np.arange(N).astype("datetime64[s]")
    return str(path)


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
def test_arrays_of_a_group_are_chosen(group):
    t2m, sp = np.arange(N * 2.0, dtype="f4").reshape(N, 2), np.arange(N, dtype="i4")
    source = bj.from_zarr(group, arrays=["t2m", "surface/sp"])
    tree = {"t2m": t2m, "surface": {"sp": sp}}
    assert source.treedef == jax.tree.structure(tree)
    for each in source, open_spec(source.to_spec()):
        for found, expected in zip(each.read(3, 11), jax.tree.leaves(tree), strict=True):
            np.testing.assert_array_equal(found, expected[3:11])
    one = bj.from_zarr({"a": group, "b": group}, arrays="surface/sp")
    assert one.treedef == jax.tree.structure({"a": 0, "b": 0})
    with pytest.raises(StructureError, match=r"'station'.*arrays=\["):
        bj.from_zarr(group)
    with pytest.raises(PlacementError, match="expected 7 as in") as error:
        bj.from_zarr(group, arrays=["t2m", "latitude"])
    assert group in str(error.value)
    with pytest.raises(SourceError, match=r"no array 'sp', expected some of .*'surface/sp'"):
        bj.from_zarr(group, arrays=["sp"])
    with pytest.raises(SourceError, match="arrays: found no name"):
        bj.from_zarr(group, arrays=[])
    with pytest.raises(StructureError, match="found an array, expected a group"):
        bj.from_zarr(f"{group}/t2m", arrays="t2m")
