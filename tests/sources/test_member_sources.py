"""Sources without files of their own: by index, of numbers, of some, padded, grouped and zipped."""

import json

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import source_files
from helpers import assert_same_bits, raw
from hypothesis import strategies as st
from source_files import TREE, Batches, Members, N, assert_reads, part, refused

import beamjax as bj
from beamjax.errors import CheckpointError, PlacementError, SourceError, StructureError
from beamjax.sources.array_source import ArraySource
from beamjax.sources.derived_sources import ShortSource, ZippedSource, grouped
from beamjax.sources.member_values import leaf_array
from beamjax.sources.ragged_source import choose_buckets
from beamjax.sources.source_base import LeafSpec, members_bytes, open_spec, spec_of, take_members
from beamjax.sources.streams.spool import spilled

OPTIONS = {"shard_size": 8}


# --- from_random_access


def test_several_members_are_asked_for_together():
    dataset = Batches(TREE)
    bj.from_random_access(dataset).read(3, 6)
    assert dataset.asked == [0, [3, 4, 5]]
    source = bj.from_random_access(dataset, member=dataset[0])
    dataset.asked.clear()
    source.read(2, 2)
    assert dataset.asked == []


def test_a_dataset_is_opened_once_in_a_process():
    for _ in range(3):
        source = bj.from_random_access(source_files.open_members, {"n": 17})
        source.read(0, 2)
    assert source_files.opened.count(17) == 1
    assert source.spec() is not None
    assert "from source_files:open_members" in repr(source)


class Tensor:
    """What knows itself as an array, such as a tensor of PyTorch."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        if isinstance(self.value, type):  # as of a tensor that another device has
            raise self.value
        return np.asarray(self.value, dtype)


def test_members_of_other_types():
    members = [
        (np.float64(i), i, i / 2, i > 1, np.full(2, i, ml_dtypes.bfloat16)) for i in range(5)
    ]
    dtypes = ["float64", "int32", "float32", "bool", "bfloat16"]
    whole = [np.asarray([m[k] for m in members]).astype(d) for k, d in enumerate(dtypes)]
    assert_reads(bj.from_random_access(members), whole)
    big = [np.arange(3, dtype=">f4") + i for i in range(5)]
    assert_reads(bj.from_random_access(big), np.stack(big).astype(np.float32))
    assert_reads(bj.from_random_access(range(5, 9)), np.arange(5, 9, dtype=np.int32))
    tensors = [{"x": Tensor([1.0, 2.0])}, {"x": Tensor([3.0, 4.0])}]
    assert_reads(bj.from_random_access(tensors), np.array([[1.0, 2.0], [3.0, 4.0]]))
    keys = jax.random.split(jax.random.key(3), 5)
    source = bj.from_random_access(keys)
    assert source.leaves[0].key_impl == "threefry2x32"
    assert_reads(source, raw(keys), 1, 4)
    for other, found in [
        (jax.random.key(0, impl="rbg"), r"key<rbg>\[\]"),
        (np.zeros(2, np.uint32), r"uint32\[2\]"),
    ]:
        source = bj.from_random_access([keys[0], other])
        message = f"member 1: found {found} as a member, expected .*threefry.* as in the first"
        refused(SourceError, message, source.read, 0, 2)


def test_what_is_no_dataset():
    def not_at_the_top():
        return [1]

    for dataset, error, message in [
        (3, StructureError, r"found a int, expected an object with len\(dataset\)"),
        (source_files.not_marked, StructureError, "found a function.*decorate.*opens_dataset"),
        (iter([]), StructureError, "found a list_iterator"),
        ([], PlacementError, "found 0 members"),
        ([{}], StructureError, "without leaves"),
        (["text"], StructureError, "member 0: found str 'text', expected a NumPy or JAX array"),
        ([{"a": [None, object()]}], StructureError, r"member 0\['a'\]\[1\]: found object"),
        ([np.array(["a"])], StructureError, "member 0: dtype <U1 cannot be stored"),
        ([np.ma.zeros(3)], StructureError, "member 0: found a masked array, expected"),
        ([2**40], StructureError, "member 0: "),
        ({"a": 3}, SourceError, r"member 0: cannot be read \(KeyError: 0\)"),
        ("no dataset", StructureError, "or the name of a function that opens one"),
        ("source_files:a.b", StructureError, "or the name of a function"),
        ("no_such_module:f", SourceError, "no_such_module:f: cannot be imported"),
        ("source_files:no_such", SourceError, "no_such: cannot be imported.*no attribute"),
        ("source_files:not_marked", SourceError, "not marked, expected .*opens_dataset"),
        ("os:system", SourceError, "not marked"),
        ("source_files:open_nothing", SourceError, "cannot open the dataset.*no such table"),
        ("source_files:open_members", SourceError, "cannot open the dataset.*TypeError.*'n'"),
    ]:
        refused(error, message, bj.from_random_access, dataset)
    refused(StructureError, "found kwargs with a list", bj.from_random_access, [1], {})
    for value in (np.int32(3), {3}, (1, 2), {1: 2}, np.nan, np.inf):
        kwargs = {"n": value}
        message = "expected values that JSON can hold"
        refused(StructureError, message, bj.from_random_access, source_files.open_members, kwargs)
    opener = bj.opens_dataset(not_at_the_top)
    refused(StructureError, "expected one at the top of a module", bj.from_random_access, opener)


def test_lists_of_numbers_must_fit_the_expected_dtype():
    leaf = LeafSpec((2,), np.dtype(np.int32), None, "")
    np.testing.assert_array_equal(leaf_array([1, -(2**31)], leaf), [1, -(2**31)])
    for numbers, found in [
        ([1, 2**31], r"\[1, 2147483648\], which int32 can't hold"),
        ([1.0, 2.0], r"float64\[2\]"),
        ([1], r"int64\[1\]"),
        ([[1], [1, 2]], "lists of unequal lengths"),
    ]:
        refused(StructureError, f"found {found}.*expected int32", leaf_array, numbers, leaf)


def test_members_that_differ_or_cannot_be_read():
    x = np.zeros(2, np.float32)
    for later, message in [
        ({"x": x}, r"found a tree with the leaves \[\"\['x'\]\"\]"),
        ({"x": x, "y": 1, "z": 2}, "found a tree"),
        ((x, 1), "found a tree"),
        ({"x": np.zeros(3, "f4"), "y": 1}, r"found float32\[3\] as leaf \['x'\], expected .*\[2"),
        ({"x": np.zeros((2, 1), "f4"), "y": 1}, r"found float32\[2, 1\] as leaf \['x'\]"),
        ({"x": np.zeros(2), "y": 1}, r"found float64\[2\] as leaf \['x'\], expected float32\[2\]"),
        ({"x": 1.0, "y": 1}, r"found float 1.0 as leaf \['x'\]"),
        *(
            ({"x": Tensor(error), "y": 1}, r"found Tensor .* as leaf \['x'\]")
            for error in (TypeError, ValueError, RuntimeError)
        ),
        ({"x": x, "y": 1.0}, r"found float 1.0 as leaf \['y'\], expected int32\[\]"),
        ({"x": x, "y": True}, r"found bool True as leaf \['y'\], expected int32\[\]"),
        ({"x": x, "y": 2**31}, r"found int 2147483648 as leaf \['y'\], expected int32\[\]"),
        ({"x": x, "y": "one"}, r"found str 'one' as leaf \['y'\]"),
        ({"x": np.ma.zeros(2, "f4"), "y": 1}, r"found a masked array as leaf \['x'\]"),
        ({"x": jax.random.key(0), "y": 1}, r"found key<fry>\[\] as leaf \['x'\], expected float32"),
    ]:
        source = bj.from_random_access([{"x": x, "y": 1}, later])
        refused(SourceError, f"from_random_access, member 1.*{message}", source.read, 0, 2)

    class Odd(Batches):
        def __getitems__(self, indices):
            if 3 in indices:
                raise KeyError("three")
            return super().__getitems__(indices)[1:]

    source = bj.from_random_access(Odd(TREE))
    message = r"members 2 to 4: cannot be read \(KeyError: 'three'\)"
    refused(SourceError, message, source.read, 2, 5)
    message = "5 to 6: __getitems__ returns 1 members, expected 2"
    refused(SourceError, message, source.read, 5, 7)
    short = [1, 2, 3]
    source = bj.from_random_access(short)
    short.pop()
    refused(SourceError, r"member 2: cannot be read.*IndexError", source.read, 0, 3)


def test_specs_of_datasets_that_are_none():
    spec = spec_of(bj.from_random_access(source_files.open_members, {"n": 5}))
    message = r"open_members: found 5 members .*expected 6"
    refused(SourceError, message, open_spec({**spec, "size": 6}).read, 0, 1)
    for change in [
        *({"size": size} for size in (-1, "5")),
        {"leaves": [3]},
        *({"dataset": dataset} for dataset in (3, {"module": "a", "name": "b"})),
        *(
            {"dataset": {"module": module, "name": name, "kwargs": kwargs}}
            for module, name, kwargs in (
                ("os", "system", {"command": "true"}), ("source_files", 3, {}), ("", "", {}),
                ("source_files", "open_members", []), ("source_files", "part", {"n": 3}),
            )
        ),
    ]:  # fmt: skip
        text = json.dumps({**spec, **change})
        refused(SourceError, "", lambda text: open_spec(json.loads(text)).read(0, 1), text)


def test_rows_of_members_and_checkpoints(tmp_path):
    x = part(TREE, 0, 20)["x"]

    @bj.program(placements={"batches": 5})
    def batched(x):
        rows = x.reshape(5, 4, 2, 3)
        return bj.reduce_sum(bj.map_fn(lambda r: r.mean(0), rows))

    live = bj.from_random_access(Members(x))
    for runner in ("local", "DirectRunner"):
        found = bj.run(batched, live, runner=runner)
        np.testing.assert_allclose(found, x.reshape(5, 4, 2, 3).mean(1).sum(0), rtol=1e-4)

    @bj.program(clients=20)
    def rounds(w, x):
        def step(w, _):
            return w + bj.reduce_mean(bj.map_fn(lambda x: x.sum() * w, x)), None

        return jax.lax.scan(step, w, length=2)[0]

    how = {"runner": "local", "options": {"checkpoint": str(tmp_path)}}
    found = [bj.run(rounds, jnp.float32(1), live, **how) for _ in range(2)]
    assert found[0] == found[1]
    other = bj.from_random_access(Members(x + 1))
    refused(CheckpointError, "differ in x", bj.run, rounds, jnp.float32(1), other, **how)


# --- from_range


@bj.program(placements={"draws": None})
def draws(key, i):
    values = bj.map_fn(lambda i: jax.random.normal(jax.random.fold_in(key, i), (3,)), i)
    return bj.reduce_mean(values), bj.reduce_max(values)


def test_a_range_is_arange():
    assert (
        repr(bj.from_range(50))
        == "<RangeSource: 50 members of int32[] (200 bytes) from RangeSource>"
    )
    with jax.enable_x64(True):
        source = bj.from_range(np.int64(50))
        assert_reads(source, jnp.arange(50), 7, 50)
    assert_reads(open_spec(spec_of(source)), np.arange(50))
    n = 2**31 - 1  # the most
    source = bj.from_range(n)
    assert members_bytes(source) == 4 * n
    assert source.read(n - 3, n)[0].tolist() == [n - 3, n - 2, n - 1]
    assert "2147483647 members" in str(bj.explain(draws, jax.random.key(0), source))
    key = jax.random.key(7)
    expected = jax.jit(draws)(key, jnp.arange(1000))
    for runner in ("local", "DirectRunner"):
        mean, greatest = bj.run(draws, key, bj.from_range(1000), runner=runner)
        np.testing.assert_allclose(mean, expected[0], atol=1e-6)
        assert_same_bits(greatest, expected[1])


def test_what_is_no_number_of_members():
    for n, error, message in [
        (3.0, StructureError, "from_range: found 3.0, expected the number of members"),
        (None, StructureError, "found None"),
        (np.ones(3), StructureError, "expected the number of members, an integer"),
        (-1, PlacementError, "found -1 members, expected 0 to 2147483647"),
        (-5, PlacementError, "found -5 members"),
        (2**31, PlacementError, "found 2147483648 members"),
    ]:
        refused(error, message, bj.from_range, n)
    leaf = {"shape": [], "dtype": "int32", "key_impl": None, "path": ""}
    for change in [
        *({"size": size} for size in (-1, 2**60, 2.0, None)),
        *({"leaf": other} for other in (3, {**leaf, "shape": [2]}, {**leaf, "dtype": "float32"})),
        {"leaf": {**leaf, "dtype": "int8"}, "size": 129},
    ]:
        spec = {**spec_of(bj.from_range(50)), **change}
        refused(SourceError, "RangeSource': found the spec", open_spec, spec)
    spec = {**spec_of(bj.from_range(50)), "leaf": {**leaf, "dtype": "int8"}, "size": 128}
    assert open_spec(spec).read(127, 128)[0] == 127


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_two_sources_are_read_together(runner):
    @bj.program(placements={"clients": None})
    def picked(i, x):
        return bj.reduce_sum(bj.map_fn(lambda i, x: x * i, (i, x)))

    x = np.arange(50, dtype=np.int32) ** 2
    found = bj.run(picked, bj.from_range(50), bj.from_arrays(x), runner=runner)
    assert (found.dtype, found) == (jnp.int32, np.sum(np.arange(50) ** 3))
    other = bj.from_arrays(np.ones(51, np.int32))
    message = r"has shape \(51,\), expected \(50, \.\.\.\)"
    refused(PlacementError, message, bj.run, picked, bj.from_range(50), other, runner=runner)


# --- take and sample

KEY = jax.random.key(7)


@hypothesis.given(st.sets(st.integers(0, N - 1), min_size=1), st.integers(0, N), st.data())
def test_any_ranges_of_any_members(members, start, data):
    source = bj.take(TREE, data.draw(st.permutations(sorted(members))))
    indices = sorted(members)
    assert source.indices.tolist() == indices
    start = min(start, len(source))
    stop = data.draw(st.integers(start, len(source)))
    assert_reads(source, {name: array[indices] for name, array in TREE.items()}, start, stop)


class Watched(bj.Source):
    """A source of one's own, which remembers what is read."""

    leaves = (LeafSpec((), np.dtype("int32")),)

    def __init__(self, gap_bytes):
        self.ranges, self._gap_bytes = [], gap_bytes

    def __len__(self):
        return N

    def read(self, start, stop):
        self.ranges.append((start, stop))
        return [np.arange(start, stop, dtype=np.int32)]


def test_only_these_are_read_and_what_lies_between():
    for gap, ranges in [
        (0, [(3, 5), (9, 10), (20, 21)]),
        (4 * 4, [(3, 10), (20, 21)]),  # four members of four bytes
        (4 * 4 - 1, [(3, 5), (9, 10), (20, 21)]),
    ]:
        source = Watched(gap)
        numbers = np.array([20, 4, 3, 9, 4])
        assert_same_bits(take_members(source, numbers), [numbers.astype(np.int32)])
        assert source.ranges == ranges


def test_a_number_out_of_range_is_refused():
    source = bj.from_arrays(TREE)
    for numbers in ([-1, 3], [3, N]):
        message = f"members {min(numbers)} to {max(numbers)} were asked for"
        refused(SourceError, message, take_members, source, np.array(numbers))


def test_a_sample_is_of_distinct_members_all_equally_likely():
    counts = np.zeros(N)
    for number in range(300):
        drawn = bj.sample(TREE, 10, jax.random.fold_in(KEY, number)).indices
        assert len(set(drawn.tolist())) == 10
        counts[drawn] += 1
    expected = 300 * 10 / N
    assert ((counts - expected) ** 2 / expected).sum() < 55  # chi squared, 22 degrees: 1 in 10,000
    assert len(set(counts.tolist())) > 5
    first = bj.sample(TREE, 5, KEY).indices.tolist()
    assert first == bj.sample(TREE, 5, KEY).indices.tolist()
    assert first == bj.sample(TREE, 5, jax.random.key_data(KEY)).indices.tolist()
    assert bj.sample(TREE, N, KEY).indices.tolist() == list(range(N))


def test_a_sample_of_very_many_takes_no_memory():
    class Many(ArraySource):
        def __len__(self):
            return 10**12

    source = bj.from_arrays(np.zeros(1))
    source.__class__ = Many
    drawn = bj.sample(source, 1000, KEY).indices
    assert len(np.unique(drawn)) == 1000
    assert drawn.max() > 10**11


def test_what_cannot_be_taken(tmp_path):
    for function, error, message, *args in [
        (bj.take, StructureError, "found float64", [1.0]),
        (bj.take, PlacementError, "from 0 to 22", [-1]),
        (bj.take, PlacementError, "found 3 to 23", [3, N]),
        (bj.take, PlacementError, "found 3 twice", [3, 4, 3]),
        (bj.sample, PlacementError, "found 24", N + 1, KEY),
        (bj.sample, PlacementError, "found -1, .* from 0 to 23", -1, KEY),
        (bj.sample, PlacementError, r"found 0\.5", 0.5, KEY),
        (bj.sample, StructureError, "one key", 2, jax.random.split(KEY)),
        (bj.sample, StructureError, "found 3", 2, 3),
    ]:
        refused(error, message, function, TREE, *args)
    stream = bj.from_chunks(lambda: [TREE])
    refused(SourceError, "known length", bj.sample, stream, 2, KEY)
    spec = spec_of(spilled(bj.take(TREE, [5, 2]), str(tmp_path)))
    wrong = {**spec, "numbers": spec["source"]}
    refused(SourceError, "expected one leaf int64", open_spec, wrong)


# --- from_ragged

LENGTHS = np.array([3, 0, 5, 12, 1, 12, 2])
TOTAL = int(LENGTHS.sum())
STARTS = np.cumsum(LENGTHS) - LENGTHS
ROWS = {
    "n": np.arange(1, TOTAL + 1).astype(ml_dtypes.bfloat16),
    "x": np.arange(2 * TOTAL, dtype=np.float32).reshape(TOTAL, 2) + 1,
}


def padded(rows):
    tree = {"mask": np.arange(rows) < LENGTHS[:, None]}
    for name, array in ROWS.items():
        tree[name] = np.zeros((7, rows, *array.shape[1:]), array.dtype)
        for member, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=True)):
            tree[name][member, :length] = array[start : start + length][:rows]
    return tree


def test_members_are_padded_to_the_first_bucket_that_holds_them(tmp_path):
    for rows in (ROWS, bj.from_arrays(ROWS).spill(tmp_path)):
        source = bj.from_ragged(rows, LENGTHS, buckets=[2, 5, 13])
        assert [leaf.ragged for leaf in source.leaves] == [True] * 3
        assert [leaf.shape for leaf in source.leaves] == [(13,), (13,), (13, 2)]
        for start in range(8):
            for stop in range(start, 8):
                assert_reads(source, padded(13), start, stop)
                longest = LENGTHS[start:stop].max(initial=0)
                bucket = next(bucket for bucket in (2, 5, 13) if bucket >= longest)
                expected = [array[start:stop, :bucket] for array in padded(13).values()]
                assert_same_bits(ShortSource(source).read(start, stop), expected)


def test_rows_that_are_no_dict_and_typed_keys():
    keys = jax.random.split(jax.random.key(0), TOTAL)
    source = bj.from_ragged(keys, LENGTHS)
    mask, found = source.read(2, 3)
    assert source.treedef == jax.tree.structure({"mask": 0, "rows": 0})
    assert mask.sum() == 5
    assert_same_bits(found[0, :5], raw(keys)[3:8])
    assert {leaf.key_impl for leaf in source.leaves} == {None, "threefry2x32"}


def test_specs_of_ragged_members(tmp_path):
    memory = bj.from_ragged(ROWS, LENGTHS, buckets=[5, 12])
    refused(SourceError, "in the memory of process", spec_of, memory)
    source = spilled(memory, str(tmp_path))
    spec = spec_of(source)
    assert open_spec(spec).buckets == (5, 12)
    short = open_spec(spec_of(ShortSource(source)))
    assert short.read(0, 3)[0].shape == (3, 5)
    assert spec_of(spilled(ShortSource(memory), str(tmp_path)))["class"].endswith(":ShortSource")
    for change in [
        *({"buckets": buckets} for buckets in ([], [5, 2], [0], [2**40])),
        *({"mask_at": at} for at in (9, -1)),
        {"ends": spec["rows"]},
    ]:
        refused(SourceError, "", open_spec, {**spec, **change})
    ((file,),) = spec["ends"]["files"]
    for ends, message in [
        ([3, 3, 8, 20, 21, 38, 38], "member 5 has 17 rows, expected 0 to 12; .*changed"),
        ([3, 2, 8, 20, 21, 33, 35], "member 1 has -1 rows"),
    ]:
        np.save(file["path"], np.array(ends))
        refused(SourceError, message, source.read, 0, 7)


def test_buckets_are_halves_of_the_longest():
    for lengths, buckets in [
        ([3, 3], [8]),
        ([100, 51, 49], [56, 104]),
        ([1, 100], [8, 104]),
        ([0], [8]),
        ([8], [8]),
        ([2000, 5], [16, 2000]),
        ([0, 0, 9, 17], [8, 16, 24]),
        ([2**k for k in range(21)], [2**k for k in range(13, 21)]),  # No more than eight.
    ]:
        assert choose_buckets(np.array(lengths)) == buckets


def test_what_is_not_ragged():
    for change, error, message in [
        ({"lengths": [1.0]}, StructureError, "lengths: found float64"),
        ({"lengths": [[1]]}, StructureError, "expected integers of shape"),
        ({"lengths": np.zeros(0, int)}, PlacementError, "found 0 lengths"),
        ({"lengths": [-1, TOTAL + 1]}, PlacementError, "lengths from -1"),
        ({"lengths": [TOTAL, 1]}, PlacementError, f"add up to {TOTAL + 1}.*{TOTAL}"),
        ({"buckets": []}, SourceError, r"buckets: found \[\]"),
        ({"buckets": [12, 3]}, SourceError, "ascending"),
        ({"buckets": [0, 12]}, SourceError, "lengths from 1"),
        ({"buckets": [2**40]}, SourceError, "found 1099511627776, expected at most"),
        ({"buckets": [3, 11]}, SourceError, "member 3 has 12 rows, expected at most 11"),
        ({"rows": {"mask": np.zeros(TOTAL)}}, StructureError, "found a leaf 'mask'"),
        ({"rows": bj.from_chunks(lambda: [ROWS])}, SourceError, "known length"),
        ({"rows": bj.from_ragged(ROWS, LENGTHS), "lengths": [7]}, SourceError, "single rows"),
    ]:
        given = {"rows": ROWS, "lengths": LENGTHS, **change}
        refused(error, message, bj.from_ragged, **given)
    assert bj.from_ragged(ROWS, LENGTHS, buckets=[12]).buckets == (12,)


def test_some_of_ragged_members():
    source = bj.from_ragged(ROWS["x"], LENGTHS, buckets=[2, 5, 12])
    taken = bj.take(source, [1, 0, 4, 5])
    assert taken.buckets == (2, 5, 12)
    for which in (slice(1, 4), np.arange(1, 4)):
        assert taken.rows_of(which).tolist() == [LENGTHS[i] for i in (1, 4, 5)]
    assert bj.take(TREE, [3, 1]).rows_of(slice(0, 2)) is None
    again = bj.take(taken, [0, 3])
    assert_same_bits(ShortSource(again).read(0, 1), ShortSource(source).read(0, 1))
    assert_same_bits(again.read(1, 2), source.read(5, 6))
    mask, found = ShortSource(taken).read(0, 2)
    assert found.shape == (2, 5, 2)
    assert mask.sum(axis=1).tolist() == [3, 0]
    whole = source.read(0, 7)[1][[0, 1, 4, 5]]
    assert_same_bits(taken.read(0, 4)[1], whole)

    @bj.program(clients=None)
    def sums(clients):
        return bj.reduce_sum(bj.map_fn(lambda c: c["rows"].sum(where=c["mask"][:, None]), clients))

    for runner in ("local", "DirectRunner"):
        assert bj.run(sums, taken, runner=runner) == whole.sum()


# --- grouped and zipped


def test_rows_of_arrays_are_grouped_without_a_copy():
    x = np.arange(6.0)
    found = grouped(bj.from_arrays(x), 3)
    assert isinstance(found, ArraySource)
    assert np.shares_memory(found.read(0, 2)[0], x)
    (leaf,) = grouped(bj.from_arrays(jax.random.split(jax.random.key(0), 6)), 3).leaves
    assert (leaf.shape, leaf.key_impl) == ((3, 2), "threefry2x32")
    live = grouped(bj.from_random_access(list(x)), 3)
    assert_reads(live, x.reshape(2, 3))
    assert "with 3 rows each of 6 members" in repr(live)


def test_sources_are_zipped(tmp_path):
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    zipped = ZippedSource([bj.from_arrays(x), bj.from_arrays({"y": y, "z": y * 2})])
    assert [str(leaf) for leaf in zipped.leaves] == ["float64[2]", "int64[]", "int64[]"]
    assert len(zipped) == 6
    spec = spec_of(spilled(zipped, str(tmp_path)))
    for source in (zipped, open_spec(spec)):
        assert_reads(source, [x, y, y * 2], 1, 4)
    sources = [bj.from_arrays(x), bj.from_arrays(y[:5])]
    refused(PlacementError, r"sources of \[6, 5\] members", ZippedSource, sources)
    for wrong in ([], None, [3]):
        refused(SourceError, "", open_spec, {**spec, "sources": wrong})
