"""`transform`: programs as a part of a user's own pipeline."""

import gc
import random
import tempfile

import apache_beam as beam
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import test_driver
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from plans import inputs_of
from programs import Pair

import beamjax as bj
from beamjax.errors import SourceError, StagingError, StructureError
from beamjax.options import Options
from beamjax.pipelines.transforms import PlanTransform
from beamjax.sources import live_sources

N = 21
W = np.arange(3, dtype=np.float32)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5, 3)).astype(np.float32)
K = RNG.integers(0, 9, size=N).astype(np.int32)


@bj.program(clients=N)
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: jnp.tanh(v @ w), x))


@bj.program(clients=N)
def two_passes(w, d):
    y = bj.map_fn(lambda e: jnp.tanh(e["x"] @ w) + e["k"].astype("float32"), d)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda e, v: jnp.sum(v - mean) * e["k"].astype("float32"), (d, y))
    return {"mean": mean, "placed": [z, y], "max": bj.reduce_max(z), "none": None}


@pytest.fixture(autouse=True)
def _own_tmp(tmp_path, monkeypatch):
    """Beam leaves a folder for each pipeline that is made and not run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def pipeline(*flags):
    return beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions(list(flags)))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def members(tree, seed=0):
    """The members of placed arrays as elements, in no order."""
    n = len(jax.tree.leaves(tree)[0])
    found = [(i, jax.tree.map(lambda x, i=i: np.asarray(x[i]), tree)) for i in range(n)]
    random.Random(seed).shuffle(found)
    return found


def same_array(expected):
    def check(found):
        (array,) = found
        expect = np.asarray(expected)
        assert (array.dtype, array.shape) == (expect.dtype, expect.shape)
        wide = "complex128" if array.dtype.kind == "c" else "float64"
        np.testing.assert_allclose(array.astype(wide), expect.astype(wide), rtol=1e-4, atol=1e-4)

    return check


def same_members(expected):
    def check(found):
        assert sorted(i for i, _ in found) == list(range(len(expected)))
        for i, array in found:
            same_array(expected[i])([array])

    return check


def check_tree(results, expected):
    """Checks PCollections, placed where there are more than one member, against arrays."""
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for number, (result, array) in enumerate(pairs):
        placed = array.ndim > 0 and len(array) == N
        check = same_members(np.asarray(array)) if placed else same_array(array)
        assert_that(result, check, label=f"check {number}")


def failing(elements):
    """The exception of a pipeline over these elements."""
    with pytest.raises(bj.BeamjaxError) as caught, pipeline() as p:
        p | beam.Create(elements) | bj.transform(total, W, abstract(X))
    return caught


# --- what works


@pytest.mark.parametrize("seed", range(3))
def test_members_come_in_any_order_and_results_are_those_of_jit(seed):
    data = {"x": X, "k": K}
    transform = bj.transform(two_passes, W, abstract(data), options={"shard_size": 8})
    with pipeline() as p:
        results = p | beam.Create(members(data, seed)) | transform
        check_tree(results, jax.jit(two_passes)(W, data))


def test_several_workers():
    flags = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
    data = {"x": X, "k": K}
    transform = bj.transform(two_passes, W, abstract(data), options={"shard_size": 8})
    with pipeline(*flags) as p:
        results = p | beam.Create(members(data)) | transform
        check_tree(results, jax.jit(two_passes)(W, data))


def test_the_bits_are_those_of_run():
    options = {"shard_size": 8}
    expected = np.asarray(bj.run(total, W, X, options=options)).tobytes()

    def check(found):
        assert [array.tobytes() for array in found] == [expected]

    with pipeline() as p:
        result = p | beam.Create(members(X)) | bj.transform(total, W, abstract(X), options=options)
        assert_that(result, check)


@pytest.mark.parametrize(
    "data",
    [
        (X, K),
        {"a": {"b": [X, (K,)]}, "c": None},
        Pair(X, K),
        [X.astype(ml_dtypes.bfloat16), K > 3],
        (X[:, 0, 0], X[:, :0]),
        (X.astype(np.complex64), K.astype(np.uint8)),
    ],
    ids=["tuple", "nested", "dataclass", "bfloat16", "empty", "complex"],
)
def test_trees_and_dtypes_of_members(data):
    prog = bj.program(clients=N)(
        lambda d: [(bj.reduce_sum(leaf), bj.map_fn(jnp.copy, leaf)) for leaf in jax.tree.leaves(d)]
    )
    with pipeline() as p:
        results = p | beam.Create(members(data)) | bj.transform(prog, abstract(data))
        check_tree(results, jax.jit(prog)(data))


def test_several_abstract_arguments_are_one_element():
    @bj.program(clients=N)
    def prog(x, w, d):
        return bj.reduce_sum(bj.map_fn(lambda v, e: (v @ w) * e["k"].astype("float32"), (x, d)))

    data = X, {"k": K}
    with pipeline() as p:
        transform = bj.transform(prog, abstract(X), W, abstract({"k": K}))
        result = p | beam.Create(members(data)) | transform
        assert_that(result, same_array(jax.jit(prog)(X, W, {"k": K})))


def test_typed_keys():
    keys = jax.random.split(jax.random.key(1), N)
    data = np.asarray(jax.random.key_data(keys))

    @bj.program(clients=N)
    def prog(k, x):
        drawn = bj.map_fn(lambda k, v: jax.random.normal(k, (3,)) * v[0], (k, x))
        return bj.reduce_mean(drawn), bj.map_fn(jax.random.split, k)

    def member(i):
        return i, (jax.random.wrap_key_data(data[i]), X[i])

    mean, split = jax.jit(prog)(keys, X)
    with pipeline() as p:
        transform = bj.transform(prog, abstract(keys), abstract(X))
        results = p | beam.Create(range(N)) | beam.Map(member) | transform
        check_tree(results, (mean, np.asarray(jax.random.key_data(split))))


def test_members_join_sources_and_arrays():
    @bj.program(clients=N)
    def prog(x, k, scale):
        return bj.reduce_sum(bj.map_fn(lambda v, i, s: v * i.astype("float32") * s, (x, k, scale)))

    scale = RNG.normal(size=N).astype(np.float32)
    with pipeline() as p:
        transform = bj.transform(prog, abstract(X), bj.from_arrays(K), scale)
        assert_that(p | beam.Create(members(X)) | transform, same_array(jax.jit(prog)(X, K, scale)))


def test_results_go_on_in_the_pipeline():
    data = {"x": X, "k": K}
    expected = jax.jit(two_passes)(W, data)
    with pipeline() as p:
        results = p | beam.Create(members(data)) | bj.transform(two_passes, W, abstract(data))
        norms = results["placed"][1] | beam.MapTuple(lambda i, y: (i % 2, float(np.sum(y))))
        sums = norms | beam.CombinePerKey(sum) | beam.Values() | beam.CombineGlobally(sum)
        assert_that(sums, lambda found: np.testing.assert_allclose(
            found, [np.sum(expected["placed"][1])], rtol=1e-4))  # fmt: skip
        again = results["placed"][0] | "again" >> bj.transform(
            bj.program(clients=N)(lambda z: bj.reduce_min(z * 2)),
            jax.ShapeDtypeStruct((N,), np.float32),
        )
        assert_that(again, same_array(np.min(expected["placed"][0]) * 2), label="second")


def test_without_members_it_is_applied_to_the_pipeline():
    @bj.program(clients=N)
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        return {"y": y, "sum": bj.reduce_sum(y), "w": w, "three": np.float32(3), "x": x}

    with pipeline() as p:
        results = p | bj.transform(prog, W, bj.from_arrays(X))
        placed = {name: results.pop(name) for name in ("y",)}
        check_tree(placed, {"y": X @ W})
        assert_that(results["x"], same_array(X), label="x")
        check_tree({k: results[k] for k in ("sum", "w")}, {"sum": np.sum(X @ W, 0), "w": W})
        assert_that(results["three"], same_array(np.float32(3)), label="three")


def test_a_transform_may_be_applied_twice_and_next_to_others():
    data = {"x": X, "k": K}
    transform = bj.transform(total, W, abstract(X))
    with pipeline() as p:
        elements = p | beam.Create(members(X))
        first, second = elements | "first" >> transform, elements | "second" >> transform
        other = (
            p | "all" >> beam.Create(members(data)) | bj.transform(two_passes, W, abstract(data))
        )
        expected = jax.jit(total)(W, X)
        assert_that(first, same_array(expected), label="1")
        assert_that(second, same_array(expected), label="2")
        assert_that(other["mean"], same_array(jax.jit(two_passes)(W, data)["mean"]), label="3")


def test_windows_that_were_left_again():
    with pipeline() as p:
        windowed = p | beam.Create(members(X)) | beam.WindowInto(beam.window.FixedWindows(1))
        whole = windowed | "out" >> beam.WindowInto(beam.window.GlobalWindows())
        assert_that(whole | bj.transform(total, W, abstract(X)), same_array(total(W, X)))


def test_beams_own_direct_runner():
    with beam.Pipeline("BundleBasedDirectRunner", options=PipelineOptions([])) as p:
        result = p | beam.Create(members(X)) | bj.transform(total, W, abstract(X))
        assert_that(result, same_array(total(W, X)))


def test_nothing_is_left_once_the_pipeline_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    gc.collect()  # earlier pipelines
    before = dict(live_sources._LIVE)
    with pipeline() as p:
        p | bj.transform(total, W, bj.from_arrays(X))
        assert len(live_sources._LIVE) == len(before) + 1
    del p
    gc.collect()
    assert before == live_sources._LIVE
    assert list(tmp_path.iterdir()) == []


# --- what does not


@pytest.mark.parametrize(
    ("elements", "error", "message"),
    [
        (members(X)[1:], SourceError, "1 members of shard . are missing.*expected 0 to 20"),
        (members(X)[:1], SourceError, "members of shard 0 are missing|members of shard 1"),
        ([], SourceError, "21 members of shard 0 are missing.*first one is member 0"),
        ([*members(X), (4, X[4])], SourceError, "member 4 is in the PCollection twice"),
        ([*members(X), (21, X[4])], SourceError, "found member 21, expected 0 to 20"),
        ([(-1, X[0])], SourceError, "found member -1, expected 0 to 20"),
        ([X[0]], StructureError, r"found the element .* expected \(index, member\)"),
        ([("a", X[0])], StructureError, r"expected \(index, member\)"),
        ([(True, X[0])], StructureError, r"expected \(index, member\)"),
        ([(0, X[0], 1)], StructureError, r"expected \(index, member\)"),
        ([(0, X[0, :4])], StructureError, r"member 0 of args\[1\] is float32\[4, 3\], expected float32\[5, 3\]"),  # noqa: E501
        ([(3, X[0].astype("f8"))], StructureError, r"member 3 .* is float64\[5, 3\], expected float32"),  # noqa: E501
        ([(0, {"x": X[0]})], StructureError, r"member 0 is the tree PyTreeDef\({'x': \*}\), expected PyTreeDef\(\*\)"),  # noqa: E501
        ([(0, "text")], StructureError, r"member 0 of args\[1\] is <U4\[\], expected float32"),
    ],
    ids=["missing", "most missing", "all missing", "twice", "too high", "negative", "no pair",
         "text index", "bool index", "triple", "shape", "dtype", "tree", "text"],
)  # fmt: skip
def test_wrong_members_are_errors(elements, error, message):
    caught = failing(elements)
    assert caught.type is error
    assert caught.match(message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((abstract(W), X), r"args\[0\].* has 3 members"),
        ((W, abstract(W[0])), r"arg has shape \(\), expected \(21, ...\)"),
    ],
    ids=["server", "scalar"],
)
def test_abstract_arguments_that_are_not_placed(args, message):
    with pytest.raises(bj.PlacementError, match=message):
        bj.transform(total, *args)


def test_mixed_arguments():
    with pytest.raises(StagingError, match=r"mixes jax\.ShapeDtypeStruct with arrays"):
        bj.transform(two_passes, W, {"x": abstract(X), "k": K})


def test_members_of_several_placements():
    @bj.program(a=N, b=5)
    def prog(x, y):
        return bj.reduce_sum(x, placement="a"), bj.reduce_sum(y, placement="b")

    with pytest.raises(StagingError, match="expected exactly one"), pipeline() as p:
        p | beam.Create([]) | bj.transform(prog, abstract(X), abstract(X[:5]))


def test_members_returned_as_they_are():
    prog = bj.program(clients=N)(lambda x: (x, bj.reduce_sum(x)))
    with pytest.raises(StagingError, match=r"returns args\[0\] as it is"), pipeline() as p:
        p | beam.Create([]) | bj.transform(prog, abstract(X))


def test_applied_to_the_wrong_thing():
    with pipeline() as p:
        elements = p | beam.Create(members(X))
        with pytest.raises(StagingError, match="applied to a PBegin"):
            p | bj.transform(total, W, abstract(X))
        with pytest.raises(StagingError, match="applied to a PCollection, but no argument is"):
            elements | "elements" >> bj.transform(total, W, X)
        with pytest.raises(StagingError, match="applied to a tuple"):
            (elements, elements) | "both" >> bj.transform(total, W, abstract(X))
        windowed = elements | beam.WindowInto(beam.window.FixedWindows(1))
        with pytest.raises(StagingError, match=r"in FixedWindows.*put beam.WindowInto"):
            windowed | "windowed" >> bj.transform(total, W, abstract(X))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("counting", r"^program\.py:7 \(fn\): found the rounds of a loop .*beamjax\.run"),
        ("choice", r"^p\.py:1: found a choice of branches around placed operators"),
    ],
)
def test_rounds_and_branches_need_a_driver(plan, message):
    plan = getattr(test_driver, plan)()
    arrays = {"x": test_driver.X, "w": test_driver.W, "i": np.int32(0), "limit": np.int32(3)}
    inputs = inputs_of(plan, **arrays)
    with pytest.raises(StagingError, match=message):
        PlanTransform(plan, inputs, jax.tree.structure((0, 0)), [], Options())


@bj.program(clients=N)
def rounds(w, x):
    def one(carry, i):
        w, m = carry
        m = bj.map_fn(lambda m, v: 0.5 * m + jnp.sum(v @ w), (m, x))
        slower = lambda: w - 0.1 * bj.reduce_mean(m)
        w = jax.lax.cond(i > 1, lambda: w, slower)
        return (w, m), bj.reduce_max(m) * i

    return jax.lax.scan(one, (w, jnp.zeros(N)), jnp.arange(4.0))


def test_scans_are_written_out_and_all_branches_are_computed():
    (w, m), largest = jax.jit(rounds)(W, X)
    with pipeline() as p:
        elements = p | beam.Create(members(X))
        (found_w, found_m), found = elements | bj.transform(rounds, W, abstract(X))
        assert_that(found_w, close_to([w]), label="server state")
        assert_that(found, close_to([largest]), label="stacked")
        last = found_m | beam.Map(lambda pair: np.concatenate([[pair[0]], np.ravel(pair[1])]))
        assert_that(last, close_to(np.c_[np.arange(N), m]), label="placed state")


def close_to(expected):
    def check(elements):
        found = sorted(map(tuple, np.asarray(elements)))
        np.testing.assert_allclose(found, sorted(map(tuple, expected)), rtol=1e-5)

    return check
