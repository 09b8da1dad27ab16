"""`from_random_access`: members that an object gives one at a time."""

import json
import os

import datasets
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from datasets import Batches, Members, N
from source_checks import (
    RUNNERS,
    assert_reads,
    check_ranges,
    check_runs,
    check_spec,
    check_threads,
)

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.pipelines.store import Store
from beamjax.pipelines.uploads import stays_here
from beamjax.sources.grouped_source import grouped
from beamjax.sources.source_base import open_spec

TREE = datasets.tree()
LIVE = {"one": Members, "several": Batches, "list": lambda whole: list(Members(whole))}


@pytest.mark.parametrize("kind", LIVE)
def test_objects_of_this_process(kind, tmp_path):
    source = bj.from_random_access(LIVE[kind](TREE))
    check_ranges(source, TREE)
    check_threads(source, TREE)
    assert source.is_live
    assert "30 members of ['x'] float32[2, 3], " in repr(source)
    with pytest.raises(SourceError, match=r"is not pickled.*beamjax.opens_dataset"):
        source.to_spec()
    check_spec(source.spilled(str(tmp_path)), TREE)
    rows = grouped(source, 5).spilled(str(tmp_path / "rows"))
    assert_reads(open_spec(rows.to_spec()).read(1, 3), grouped(source, 5).read(1, 3))


def test_several_are_asked_for_together():
    dataset = Batches(TREE)
    bj.from_random_access(dataset).read(3, 6)
    assert dataset.asked == [0, [3, 4, 5]]
    source = bj.from_random_access(dataset, member=dataset[0])
    dataset.asked.clear()
    source.read(2, 2)
    assert dataset.asked == []


@pytest.mark.parametrize("name", ["datasets:open_members", datasets.open_members])
@pytest.mark.parametrize("batches", [False, True])
def test_opened_by_a_function(name, batches):
    source = bj.from_random_access(name, {"n": N, "batches": batches})
    check_ranges(source, TREE)
    check_threads(source, TREE)
    check_spec(source, TREE)
    assert not source.is_live
    assert "from datasets:open_members" in repr(source)


def test_it_is_opened_once_in_a_process():
    for _ in range(3):
        bj.from_random_access(datasets.open_members, {"n": 17}).read(0, 2)
    assert datasets.opened.count(17) == 1


def test_other_trees_and_dtypes():
    members = [
        (np.float64(i), i, i / 2, i > 1, np.full(2, i, ml_dtypes.bfloat16)) for i in range(5)
    ]
    source = bj.from_random_access(members)
    dtypes = ["float64", "int32", "float32", "bool", "bfloat16"]
    assert [leaf.dtype.name for leaf in source.leaves] == dtypes
    whole = tuple(
        np.asarray([m[k] for m in members]).astype(dtype) for k, dtype in enumerate(dtypes)
    )
    assert_reads(source.read(0, 5), whole)
    big = [np.arange(3, dtype=">f4") + i for i in range(5)]
    assert_reads(bj.from_random_access(big).read(0, 5), [np.stack(big).astype(np.float32)])
    assert_reads(bj.from_random_access(range(5, 9)).read(1, 3), [np.array([6, 7], np.int32)])


def test_typed_keys():
    keys = jax.random.split(jax.random.key(3), 5)
    source = bj.from_random_access(keys)
    assert source.leaves[0].key_impl == "threefry2x32"
    assert_reads(source.read(1, 4), [np.asarray(jax.random.key_data(keys))[1:4]])
    mixed = bj.from_random_access([keys[0], jax.random.key(0, impl="rbg")])
    with pytest.raises(SourceError, match=r"member 1: found key<rbg>\[\], expected .*threefry"):
        mixed.read(0, 2)
    with pytest.raises(SourceError, match=r"member 1: found uint32\[2\], expected .*threefry"):
        bj.from_random_access([keys[0], np.zeros(2, np.uint32)]).read(0, 2)


class Tensor:
    """What knows itself as an array, such as a tensor of PyTorch."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)


def test_tensors_of_others():
    source = bj.from_random_access([{"x": Tensor([1.0, 2.0])}, {"x": Tensor([3.0, 4.0])}])
    assert_reads(source.read(0, 2), [np.array([[1.0, 2.0], [3.0, 4.0]])])


@pytest.mark.parametrize(
    ("dataset", "error", "message"),
    [
        (3, StructureError, r"found a int, expected an object with len\(dataset\)"),
        (datasets.not_marked, StructureError, "found a function.*decorate.*opens_dataset"),
        (iter([]), StructureError, "found a list_iterator"),
        ([], PlacementError, "found 0 members"),
        ([{}], StructureError, "without leaves"),
        (["text"], StructureError, "member 0: found str 'text', expected a NumPy or JAX array"),
        ([{"a": [None, object()]}], StructureError, r"member 0\['a'\]\[1\]: found object"),
        ([np.array(["a"])], StructureError, "member 0: dtype <U1 cannot be stored"),
        ([np.ma.zeros(3)], StructureError, "member 0: found .*expected a NumPy or JAX array"),
        ([2**40], StructureError, "member 0: "),
        ({"a": 3}, SourceError, r"member 0: cannot be read \(KeyError: 0\)"),
        ("no dataset", StructureError, "or the name of a function that opens one"),
        ("datasets:a.b", StructureError, "or the name of a function"),
        ("no_such_module:f", SourceError, "no_such_module:f: cannot import it"),
        ("datasets:no_such", SourceError, "datasets:no_such: cannot import it.*no attribute"),
        ("datasets:not_marked", SourceError, "not marked, expected .*opens_dataset"),
        ("os:system", SourceError, "not marked"),
        ("datasets:open_nothing", SourceError, "cannot open the dataset.*no such table"),
        ("datasets:open_members", SourceError, "cannot open the dataset.*TypeError.*'n'"),
    ],
)
def test_what_is_no_dataset(dataset, error, message):
    with pytest.raises(error, match=message):
        bj.from_random_access(dataset)


def test_arguments():
    with pytest.raises(StructureError, match="found kwargs with a list"):
        bj.from_random_access([1], {})
    for kwargs in ({"n": np.int32(3)}, {"n": {3}}, {"n": (1, 2)}, {"n": {1: 2}}, {"n": np.nan}):
        with pytest.raises(StructureError, match="expected what JSON can hold"):
            bj.from_random_access(datasets.open_members, kwargs)
    with pytest.raises(StructureError, match="expected one at the top of a module"):
        bj.from_random_access(bj.opens_dataset(lambda: [1]))


X = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"x": X}, r"member 1: found a tree with the leaves \[\"\['x'\]\"\]"),
        ({"x": X, "y": 1, "z": 2}, "member 1: found a tree"),
        ((X, 1), "member 1: found a tree"),
        (
            {"x": np.zeros(3, np.float32), "y": 1},
            r"leaf \['x'\]: found float32\[3\], expected .*\[2",
        ),
        ({"x": np.zeros((2, 1), np.float32), "y": 1}, r"leaf \['x'\]: found float32\[2, 1\]"),
        ({"x": np.zeros(2), "y": 1}, r"leaf \['x'\]: found float64\[2\], expected float32\[2\]"),
        ({"x": 1.0, "y": 1}, r"leaf \['x'\]: found float 1.0"),
        ({"x": X, "y": 1.0}, r"leaf \['y'\]: found float 1.0, expected int32\[\]"),
        ({"x": X, "y": True}, r"leaf \['y'\]: found bool True, expected int32\[\]"),
        ({"x": X, "y": 2**31}, r"leaf \['y'\]: found int 2147483648, expected int32\[\]"),
        ({"x": X, "y": "one"}, r"leaf \['y'\]: found str 'one'"),
        ({"x": np.ma.zeros(2, np.float32), "y": 1}, r"leaf \['x'\]: found "),
        ({"x": jax.random.key(0), "y": 1}, r"leaf \['x'\]: found key<fry>\[\], expected float32"),
    ],
)
def test_members_that_differ(later, message):
    source = bj.from_random_access([{"x": X, "y": 1}, later])
    with pytest.raises(SourceError, match=f"from_random_access, member 1.*{message[9:]}"):
        source.read(0, 2)


def test_members_that_cannot_be_read():
    class Odd(Batches):
        def __getitems__(self, indices):
            if 3 in indices:
                raise KeyError("three")
            return super().__getitems__(indices)[1:]

    source = bj.from_random_access(Odd(TREE))
    with pytest.raises(SourceError, match=r"members 2 to 4: cannot be read \(KeyError: 'three'\)"):
        source.read(2, 5)
    with pytest.raises(SourceError, match="5 to 6: __getitems__ gives 1 members, expected 2"):
        source.read(5, 7)
    short = [1, 2, 3]
    source = bj.from_random_access(short)
    short.pop()
    with pytest.raises(SourceError, match=r"member 2: cannot be read.*IndexError"):
        source.read(0, 3)


def test_a_dataset_that_changed():
    spec = bj.from_random_access(datasets.open_members, {"n": 5}).to_spec()
    with pytest.raises(SourceError, match=r"open_members: found 5 members .*expected 6"):
        open_spec({**spec, "size": 6}).read(0, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"opener": ["os", "system", {"command": "true"}]}, {"opener": ["a"]}, {"opener": 3},
        {"opener": ["datasets", 3, {}]}, {"opener": ["datasets", "open_members", []]},
        {"opener": ["", "", {}]}, {"size": -1}, {"size": "5"}, {"leaves": [3]},
        {"opener": ["datasets", "tree", {"n": 3}]},
    ],
)  # fmt: skip
def test_specs_that_are_none(change):
    spec = bj.from_random_access(datasets.open_members, {"n": 5}).to_spec()
    with pytest.raises(SourceError):
        open_spec(json.loads(json.dumps({**spec, **change}))).read(0, 1)


@pytest.mark.parametrize("runner", RUNNERS)
def test_runs(runner, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # so that workers find `datasets`
    check_runs(bj.from_random_access(Batches(TREE)), TREE, runner)
    check_runs(bj.from_random_access(datasets.open_members, {"n": N}), TREE, runner)


def test_workers_elsewhere(tmp_path):
    live = bj.from_random_access(Members(TREE))
    opened = bj.from_random_access(datasets.open_members, {"n": N})
    there, here = Store("inmemory://run", lasts=False), Store(str(tmp_path))
    assert stays_here(live, there)
    assert stays_here(grouped(live, 5), there)
    assert not stays_here(opened, there)
    assert not stays_here(live, here)


@bj.program(placements={"batches": 6})
def batched(x):
    rows = x.reshape(6, 5, 2, 3)
    return bj.reduce_sum(bj.map_fn(lambda r: r.mean(0), rows))


@pytest.mark.parametrize("runner", ["local", "processes"])
def test_rows_of_members(runner):
    found = bj.run(batched, bj.from_random_access(Members(TREE["x"])), **RUNNERS[runner])
    np.testing.assert_allclose(found, jax.jit(batched)(TREE["x"]), rtol=1e-5)


def test_checkpoints_tell_other_members(tmp_path):
    @bj.program(clients=N)
    def rounds(w, tree):
        def step(w, _):
            return w + bj.reduce_mean(bj.map_fn(lambda x: x.sum() * w, tree["x"])), None

        return jax.lax.scan(step, w, length=2)[0]

    options = {"checkpoint": str(tmp_path)}
    source = bj.from_random_access(Members(TREE))
    first = bj.run(rounds, jnp.float32(1), source, runner="local", options=options)
    again = bj.run(rounds, jnp.float32(1), source, runner="local", options=options)
    assert first == again
    other = bj.from_random_access(Members({**TREE, "x": TREE["x"] + 1}))
    with pytest.raises(bj.CheckpointError, match="args"):
        bj.run(rounds, jnp.float32(1), other, runner="local", options=options)
