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
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing import test_stream
from apache_beam.testing.util import assert_that
from helpers import assert_close
from programs import Pair

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StagingError, StructureError
from beamjax.sources import source_base

N = 21
W = np.arange(3, dtype=np.float32)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5, 3)).astype(np.float32)
K = RNG.integers(0, 9, size=N).astype(np.int32)
DATA = {"x": X, "k": K}
SHARDS = {"shard_size": 8}


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


def check_that(results, expected, label=""):
    """Checks PCollections, of members where an array has some, against arrays."""
    assert jax.tree.structure(results) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    for number, (result, array) in enumerate(pairs):
        array = np.asarray(array)

        def check(found, array=array):
            if array.ndim > 0 and len(array) == N:
                assert sorted(i for i, _ in found) == list(range(N))
                found = [np.stack([np.asarray(v) for _, v in sorted(found, key=lambda p: p[0])])]
            assert_close(found, [array], 1e-4, 1e-4)

        assert_that(result, check, label=f"check {label}{number}")


# --- what works


@pytest.mark.versions
def test_members_come_in_any_order_and_results_are_those_of_jit():
    expected = jax.jit(two_passes)(W, DATA)
    threads = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
    for seed, flags in enumerate(([], threads)):
        with pipeline(*flags) as p:
            transform = bj.transform(two_passes, W, abstract(DATA), options=SHARDS)
            check_that(p | beam.Create(members(DATA, seed)) | transform, expected)
    with beam.Pipeline("BundleBasedDirectRunner", options=PipelineOptions([])) as p:
        check_that(p | beam.Create(members(X)) | bj.transform(total, W, abstract(X)), total(W, X))


def test_members_in_any_order_are_put_in_theirs():
    """Neighbours, and what comes before a member, are those of the numbers of members."""

    @bj.program(clients=N)
    def prog(x):
        rows = bj.map_fn(lambda v: v[0], x)
        placed = jnp.cumsum(rows, axis=0), bj.neighbours(rows, before=1, wrap=True)
        return placed, jnp.linalg.qr(rows)

    # An array that does not have all members is one element.
    changes = bj.program(clients=N)(lambda x: jnp.diff(bj.map_fn(lambda v: v[0], x), axis=0))
    for fn in (prog, changes):
        with pipeline() as p:
            transform = bj.transform(fn, abstract(X), options=SHARDS)
            check_that(p | beam.Create(members(X)) | transform, jax.jit(fn)(X))


@pytest.mark.versions
def test_trees_and_dtypes_of_members():
    trees = (
        (X, K),
        {"a": {"b": [X, (K,)]}, "c": None},
        Pair(X, K),
        [X.astype(ml_dtypes.bfloat16), K > 3],
        (X[:, 0, 0], X[:, :0]),
        (X.astype(np.complex64), K.astype(np.uint8)),
    )
    with pipeline() as p:
        for number, data in enumerate(trees):
            prog = bj.program(clients=N)(
                lambda d: [
                    (bj.reduce_sum(leaf), bj.map_fn(jnp.copy, leaf)) for leaf in jax.tree.leaves(d)
                ]
            )
            elements = p | f"create {number}" >> beam.Create(members(data))
            results = elements | f"{number}" >> bj.transform(prog, abstract(data))
            check_that(results, jax.jit(prog)(data), f"{number} ")


def test_several_abstract_arguments_are_one_element():
    """Next to a source and an array of the same placement."""

    @bj.program(clients=N)
    def prog(x, w, d, i, scale):
        def body(v, e, i, s):
            return (v @ w) * (e["k"] + i).astype("float32") * s

        return bj.reduce_sum(bj.map_fn(body, (x, d, i, scale)))

    scale = RNG.normal(size=N).astype(np.float32)
    with pipeline() as p:
        transform = bj.transform(prog, abstract(X), W, abstract({"k": K}), bj.from_arrays(K), scale)
        expected = jax.jit(prog)(X, W, {"k": K}, K, scale)
        check_that(p | beam.Create(members((X, {"k": K}))) | transform, expected)


@pytest.mark.versions
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
        check_that(results, (mean, jax.random.key_data(split)))


def test_results_go_on_in_the_pipeline_next_to_other_transforms():
    expected = jax.jit(two_passes)(W, DATA)
    twice = bj.program(clients=N)(lambda z: bj.reduce_min(z * 2))
    with pipeline() as p:
        results = p | beam.Create(members(DATA)) | bj.transform(two_passes, W, abstract(DATA))
        sums = (
            results["placed"][1]
            | beam.MapTuple(lambda i, y: (i % 2, float(np.sum(y))))
            | beam.CombinePerKey(sum)
            | beam.Values()
            | beam.CombineGlobally(sum)
        )
        assert_that(sums, lambda found: np.testing.assert_allclose(
            found, [np.sum(expected["placed"][1])], rtol=1e-4))  # fmt: skip
        again = "again" >> bj.transform(twice, jax.ShapeDtypeStruct((N,), np.float32))
        check_that(results["placed"][0] | again, np.min(expected["placed"][0]) * 2, "again")
        windowed = (
            p
            | "windowed" >> beam.Create(members(X))
            | beam.WindowInto(beam.window.FixedWindows(1))
            | "out" >> beam.WindowInto(beam.window.GlobalWindows())
        )
        transform = bj.transform(total, W, abstract(X))
        for label in ("first", "second"):
            check_that(windowed | label >> transform, total(W, X), label)


def test_without_members_it_is_applied_to_the_pipeline():
    @bj.program(clients=N)
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        return {"y": y, "sum": bj.reduce_sum(y), "w": w, "three": np.float32(3), "x": x}

    with pipeline() as p:
        results = p | bj.transform(prog, W, bj.from_arrays(X))
        whole = results.pop("x")
        assert_that(whole, lambda found: assert_close(found, [X]), label="x")
        three = np.float32(3)
        check_that(results, {"y": X @ W, "sum": np.sum(X @ W, 0), "w": W, "three": three})


def test_nothing_is_left_once_the_pipeline_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)
    gc.collect()  # earlier pipelines
    before = dict(source_base._LIVE)
    with pipeline() as p:
        p | bj.transform(total, W, bj.from_arrays(X))
        assert len(source_base._LIVE) == len(before) + 1
    del p
    gc.collect()
    assert before == source_base._LIVE
    assert list(tmp_path.iterdir()) == []


@bj.program(clients=N)
def rounds(w, x):
    def one(carry, i):
        w, m = carry
        m = bj.map_fn(lambda m, v: 0.5 * m + jnp.sum(v @ w), (m, x))
        slower = lambda: w - 0.1 * bj.reduce_mean(m)
        w = jax.lax.cond(i > 1, lambda: w, slower)
        return (w, m), bj.reduce_max(m) * i

    return jax.lax.scan(one, (w, jnp.zeros(N)), jnp.arange(4.0))


@pytest.mark.versions
def test_scans_are_written_out_and_all_branches_are_computed():
    with pipeline() as p:
        results = p | beam.Create(members(X)) | bj.transform(rounds, W, abstract(X))
        check_that(results, jax.jit(rounds)(W, X))


# --- what does not


BAD = {
    "missing": (members(X)[1:], SourceError, "1 members of shard . are missing.*expected 0 to 20"),
    "most missing": (members(X)[:1], SourceError, "members of shard [01]"),
    "all missing": ([], SourceError, "21 members of shard 0 are missing.*first one is member 0"),
    "twice": ([*members(X), (4, X[4])], SourceError, "member 4 is in the PCollection twice"),
    "too high": ([*members(X), (21, X[4])], SourceError, "found member 21, expected 0 to 20"),
    "negative": ([(-1, X[0])], SourceError, "found member -1, expected 0 to 20"),
    "no pair": ([X[0]], StructureError, r"found the element .* expected \(index, member\)"),
    "text": ([("a", X[0])], StructureError, r"expected \(index, member\)"),
    "bool": ([(True, X[0])], StructureError, r"expected \(index, member\)"),
    "triple": ([(0, X[0], 1)], StructureError, r"expected \(index, member\)"),
    "shape": ([(0, X[0, :4])], StructureError, r"member 0 of x is float32\[4, 3\], expect"),
    "dtype": ([(3, X[0].astype("f8"))], StructureError, r"3 .* is float64\[5, 3\], expected float"),
    "tree": ([(0, {"x": X[0]})], StructureError, r"member 0 is the tree .*, expected PyTreeDef"),
    "a word": ([(0, "text")], StructureError, r"member 0 of x is <U4\[\], expected float"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_members_are_errors(case):
    elements, error, message = BAD[case]
    with pytest.raises(error, match=message) as caught, pipeline() as p:
        p | beam.Create(elements) | bj.transform(total, W, abstract(X))
    assert caught.type is error


def test_arguments_that_cannot_be_members():
    @bj.program(a=N, b=5)
    def two(x, y):
        return bj.reduce_sum(x, placement="a"), bj.reduce_sum(y, placement="b")

    same = bj.program(clients=N)(lambda x: (x, bj.reduce_sum(x)))
    for error, message, program, *args in (
        (PlacementError, "w.* has 3 members", total, abstract(W), X),
        (PlacementError, r"arg has shape \(\), expected \(21, ...\)", total, W, abstract(W[0])),
        (StagingError, r"mixes jax\.ShapeDtypeStruct with arrays", two_passes, W,
         {"x": abstract(X), "k": K}),
        (StagingError, "expected exactly one", two, abstract(X), abstract(X[:5])),
        (StagingError, "returns x as it is", same, abstract(X)),
    ):  # fmt: skip
        with pytest.raises(error, match=message), pipeline() as p:
            p | beam.Create([]) | bj.transform(program, *args)


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
    unbounded = pipeline() | test_stream.TestStream().advance_watermark_to_infinity()
    with pytest.raises(StagingError, match="found an unbounded PCollection"):
        unbounded | bj.transform(total, W, abstract(X))


def test_rounds_that_depend_on_values_are_refused():
    more = lambda w: w[0] < 9
    rounds = lambda w, x: jax.lax.while_loop(more, lambda w: w + total(w, x).sum(), w)
    message = r"test_transforms\.py:\d+.*: found the rounds of a loop around .*beamjax\.run"
    with pytest.raises(StagingError, match=message):
        bj.transform(rounds, W, X)
