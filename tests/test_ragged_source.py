"""Members of unequal length: padded, masked, in any process, or refused with the reason."""

import pickle

import hypothesis
import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.ragged_source import MAX_BUCKETS, ShortSource, choose_buckets
from beamjax.sources.source_base import open_spec

LENGTHS = np.array([3, 0, 5, 12, 1, 12, 2])
TOTAL = int(LENGTHS.sum())
ROWS = {
    "x": np.arange(2 * TOTAL, dtype=np.float32).reshape(TOTAL, 2) + 1,
    "n": np.arange(TOTAL, dtype=ml_dtypes.bfloat16) + ml_dtypes.bfloat16(1),
}
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])


def tree_of(source, start, stop, short=False):
    read = source.read_short if short else source.read
    return jax.tree_util.tree_unflatten(source.treedef, read(start, stop))


def assert_members(found, start, stop, rows):
    """As each member is, one by one."""
    for i, member in enumerate(range(start, stop)):
        count = LENGTHS[member]
        np.testing.assert_array_equal(found["mask"][i], np.arange(rows) < count)
        for name, array in ROWS.items():
            assert found[name].dtype == array.dtype
            expected = np.zeros((rows, *array.shape[1:]), array.dtype)
            expected[:count] = array[STARTS[member] : STARTS[member] + count]
            assert found[name][i].tobytes() == expected.tobytes()


@pytest.fixture(params=["arrays", "npy"])
def rows(request, tmp_path):
    if request.param == "arrays":
        return ROWS
    return bj.from_arrays(ROWS).spill(tmp_path / "rows")


@hypothesis.given(st.data())
@hypothesis.settings(
    deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_ranges(rows, data):
    source = bj.from_ragged(rows, LENGTHS, buckets=[2, 5, 13])
    start = data.draw(st.integers(0, len(LENGTHS)))
    stop = data.draw(st.integers(start, len(LENGTHS)))
    assert_members(tree_of(source, start, stop), start, stop, 13)
    longest = LENGTHS[start:stop].max(initial=0)
    short = next(bucket for bucket in (2, 5, 13) if bucket >= longest)
    assert_members(tree_of(source, start, stop, short=True), start, stop, short)
    assert source.leaves[0].ragged
    assert [leaf.shape for leaf in source.leaves] == [(13,), (13,), (13, 2)]


def test_rows_that_are_no_dict_and_typed_keys():
    keys = jax.random.split(jax.random.key(0), TOTAL)
    source = bj.from_ragged(keys, LENGTHS)
    found = tree_of(source, 2, 3)
    assert set(found) == {"rows", "mask"}
    data = np.asarray(jax.random.key_data(keys))
    assert found["rows"][0, :5].tobytes() == data[3:8].tobytes()
    impls = {leaf.key_impl for leaf in source.leaves}
    assert impls == {None, str(jax.random.key_impl(keys))}


def test_other_processes_open_it(tmp_path):
    memory = bj.from_ragged(ROWS, LENGTHS, buckets=[5, 12])
    with pytest.raises(SourceError, match="in the memory of process"):
        memory.to_spec()
    source = memory.spilled(str(tmp_path))
    for again in (open_spec(source.to_spec()), pickle.loads(pickle.dumps(source))):
        assert again.buckets == (5, 12)
        assert [leaf.ragged for leaf in again.leaves] == [True] * 3
        for left, right in zip(again.read(1, 4), source.read(1, 4), strict=True):
            assert left.tobytes() == right.tobytes()
    short = open_spec(ShortSource(source).to_spec())
    assert short.read(0, 3)[0].shape == (3, 5)
    assert ShortSource(memory).spilled(str(tmp_path)).to_spec()["kind"] == "short"


def test_a_table_that_changed_is_noticed(tmp_path):
    source = bj.from_ragged(ROWS, LENGTHS).spilled(str(tmp_path))
    (file,) = source.to_spec()["ends"]["files"]
    np.save(file, np.array([3, 3, 8, 20, 21, 38, 38]))
    with pytest.raises(SourceError, match=r"member 5 has 17 rows, expected 0 to 16; .*changed"):
        source.read(0, 7)
    np.save(file, np.array([3, 2, 8, 20, 21, 33, 35]))
    with pytest.raises(SourceError, match="member 1 has -1 rows"):
        source.read(0, 7)


@pytest.mark.parametrize(
    ("lengths", "buckets"),
    [
        ([3, 3], [8]),
        ([100, 51, 49], [56, 104]),
        ([1, 100], [8, 104]),
        ([0], [8]),
        ([8], [8]),
        ([2000, 5], [16, 2000]),
        ([0, 0, 9, 17], [8, 16, 24]),
    ],
)
def test_buckets_are_halves_of_the_longest(lengths, buckets):
    assert choose_buckets(np.array(lengths)) == buckets


@hypothesis.given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_chosen_buckets_hold_all_and_are_few(lengths):
    buckets = choose_buckets(np.array(lengths))
    assert buckets == sorted(set(buckets))
    assert len(buckets) <= MAX_BUCKETS
    assert buckets[-1] - 8 < max(*lengths, 1) <= buckets[-1]
    assert not any(bucket % 8 for bucket in buckets)


ATTEMPTS = {
    "floats": ({"lengths": [1.0]}, StructureError, "lengths: found float64"),
    "a matrix": ({"lengths": [[1]]}, StructureError, "expected integers of shape"),
    "nobody": ({"lengths": np.zeros(0, int)}, PlacementError, "found 0 lengths"),
    "negative": ({"lengths": [-1, TOTAL + 1]}, PlacementError, "lengths from -1"),
    "too few rows": ({"lengths": [TOTAL, 1]}, PlacementError, f"add up to {TOTAL + 1}.*{TOTAL}"),
    "no buckets": ({"buckets": []}, SourceError, "buckets: found \\[\\]"),
    "descending": ({"buckets": [12, 3]}, SourceError, "ascending"),
    "zero": ({"buckets": [0, 12]}, SourceError, "lengths from 1"),
    "far too long": ({"buckets": [2**40]}, SourceError, "found 1099511627776, expected at most"),
    "too short": ({"buckets": [3, 11]}, SourceError, "member 3 has 12 rows, expected at most 11"),
    "a mask of one's own": (
        {"rows": {"mask": np.zeros(TOTAL)}}, StructureError, "found a leaf 'mask'",
    ),
    "a stream": ({"rows": bj.from_chunks(lambda: [ROWS])}, SourceError, "known length"),
    "ragged rows": (
        {"rows": bj.from_ragged(ROWS, LENGTHS), "lengths": [7]}, SourceError, "single rows",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTEMPTS)
def test_bad_input(name):
    arguments, kind, message = ATTEMPTS[name]
    with pytest.raises(kind, match=message):
        bj.from_ragged(**{"rows": ROWS, "lengths": LENGTHS, **arguments})


@pytest.mark.parametrize(
    "change",
    [{"buckets": []}, {"buckets": [5, 2]}, {"buckets": [0]}, {"buckets": [2**40]},
     {"mask_at": 9}, {"mask_at": -1}, {"ends": None}],
)  # fmt: skip
def test_bad_specs(change, tmp_path):
    source = bj.from_ragged(ROWS, LENGTHS).spilled(str(tmp_path))
    spec = source.to_spec()
    other = spec["rows"] if "ends" in change else None
    with pytest.raises(SourceError):
        open_spec({**spec, **change, **({"ends": other} if other else {})})
