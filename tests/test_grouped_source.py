"""Sources whose members are several rows of another source."""

import pickle

import jax
import numpy as np
import pytest

from beamjax.errors import SourceError
from beamjax.sources import ArraySource, from_arrays, from_npy, open_spec
from beamjax.sources.grouped_source import GroupedSource, grouped

ROWS = 3
TREE = {"x": np.arange(24.0).reshape(12, 2), "y": np.arange(12)}


@pytest.fixture(params=["arrays", "npy"])
def source(request, tmp_path):
    if request.param == "arrays":
        return from_arrays(TREE)
    for name, array in TREE.items():
        np.save(tmp_path / f"{name}.npy", array)
    return from_npy({name: tmp_path / f"{name}.npy" for name in TREE})


def test_members_are_those_of_a_reshape(source):
    found = grouped(source, ROWS)
    assert len(found) == 4
    assert found.treedef == source.treedef
    assert [leaf.shape for leaf in found.leaves] == [(ROWS, 2), (ROWS,)]
    assert found.nbytes == source.nbytes
    for got, array in zip(found.read(1, 3), TREE.values(), strict=True):
        assert got.dtype == array.dtype
        np.testing.assert_array_equal(got, array.reshape(4, ROWS, *array.shape[1:])[1:3])


def test_arrays_stay_in_memory_without_a_copy():
    x = np.arange(6.0)
    found = grouped(from_arrays(x), ROWS)
    assert isinstance(found, ArraySource)
    assert np.shares_memory(found.read(0, 2)[0], x)


def test_keys():
    keys = jax.random.split(jax.random.key(0), 6)
    (leaf,) = grouped(from_arrays(keys), ROWS).leaves
    assert (leaf.shape, leaf.key_impl) == ((ROWS, 2), "threefry2x32")


def test_ranges_are_checked(source):
    with pytest.raises(SourceError, match="members 2 to 5 were asked for"):
        grouped(source, ROWS).read(2, 5)


def test_other_processes_open_it(tmp_path):
    np.save(tmp_path / "x.npy", TREE["x"])
    found = grouped(from_npy(tmp_path / "x.npy"), ROWS)
    for again in (open_spec(found.to_spec()), pickle.loads(pickle.dumps(found))):
        assert isinstance(again, GroupedSource)
        np.testing.assert_array_equal(again.read(0, 4)[0], TREE["x"].reshape(4, ROWS, 2))
    assert "with 3 rows each of 12 members" in repr(found)
