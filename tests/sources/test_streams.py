"""Sources of unknown length: how they are read, and `run` and `explain` over them."""

import os
import tempfile

import apache_beam as beam
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that
from explained import facts_of
from helpers import assert_close, assert_same_bits, assert_same_types, examples, raw
from hypothesis import given, settings
from hypothesis import strategies as st
from source_files import refused
from streams import Counted, Numbers, W, creations, data, opened, reductions, stream, two_passes

import beamjax as bj
from beamjax.errors import PlacementError, SourceError, StagingError, StructureError
from beamjax.sources.array_source import from_arrays
from beamjax.sources.source_base import LeafSpec, StreamSource, spec_of
from beamjax.sources.streams.chunks import Streams, blocks_of, checked_chunks, members_of

OPTIONS = {"shard_size": 8}
THREADS = {**OPTIONS, "direct_running_mode": "multi_threading", "direct_num_workers": 2}
RUNNERS = ["local", "DirectRunner"]


def local(fn, *args, options=OPTIONS):
    return bj.run(fn, *args, runner="local", options=options)


# --- programs


@opened
def summed_loss(w, d):
    return bj.reduce_sum(bj.map_fn(lambda e: jnp.sum(jnp.tanh(e["x"] @ w)) ** 2, d))


@opened
def mean_loss(w, d):
    return bj.reduce_mean(bj.map_fn(lambda e: jnp.sum(jnp.tanh(e["x"] @ w)) ** 2, d))


@opened
def number(d):
    n = d["k"].shape[0]
    return jnp.int32(n), jnp.float32(n) * W, jnp.max(d["k"]), bj.reduce_sum(bj.broadcast(W))


@opened
def branches(w, d):
    return bj.reduce_sum(d["x"]) if d["x"].shape[0] > 3 else bj.reduce_max(d["x"])


@opened
def in_order(d):
    return jnp.sort(d["x"], axis=0)


@opened
def as_they_are(d):
    return d


@opened
def train(w, d):
    def round_(w, rate):
        value, gradient = jax.value_and_grad(mean_loss)(w, d)
        return w - rate * gradient, value

    return jax.lax.scan(round_, w, jnp.asarray([0.1, 0.05]))


@opened
def until_small(w, d):
    def round_(state):
        w, i = state
        y = bj.map_fn(lambda e: (e["x"] @ w).sum(), d)
        return w * jnp.where(bj.reduce_mean(y) > 0, 0.5, 0.25), i + 1

    return jax.lax.while_loop(lambda state: (state[1] < 3) & (state[0][0] > 0.1), round_, (w, 0))


@opened
def either(w, d):
    few = bj.reduce_sum(d["k"]) > 3
    return jax.lax.cond(few, lambda: bj.reduce_mean(d["x"]), lambda: bj.reduce_max(d["x"])) @ w


PROGRAMS = (
    reductions, jax.value_and_grad(summed_loss), jax.value_and_grad(mean_loss), creations, number,
    two_passes, branches, in_order, as_they_are, train, until_small, either,
)  # fmt: skip


def note(fn, *args):
    explanation = bj.explain(fn, *args, options=OPTIONS)
    text = " ".join(facts_of(explanation).notes)
    assert text in str(explanation).replace("\n  ", " ")
    return text


def check(fn, *args, tree):
    """Runs over chunks have the types of `jit`, and the bits of `run` on arrays."""
    exact = local(fn, *args, tree)
    expected = jax.jit(fn)(*args, tree)
    assert_same_types(exact, expected)
    assert_close(exact, expected, rtol=1e-4, atol=1e-4)
    for how in ({"runner": "local", "options": OPTIONS}, {"options": THREADS}):
        rows = Counted(tree)
        found = bj.run(fn, *args, bj.from_chunks(rows), **how)
        assert rows.reads == 1
        assert_same_types(found, expected)
        assert_same_bits(found, exact)


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_programs(fn):
    args = [] if fn in (number, in_order, as_they_are) else [W]
    assert "This is the plan for 840 members" in note(fn, *args, stream(data(20)))
    check(fn, *args, tree=data(20))


@pytest.mark.parametrize("n", [1, pytest.param(7, marks=pytest.mark.long), 9])
def test_numbers_of_members_about_a_shard(n):
    check(reductions, W, tree=data(n))
    check(two_passes, W, tree=data(n))


def test_keys_as_members_and_wide_types():
    keys = jax.random.split(jax.random.key(0), 20)
    check(opened(lambda k: bj.reduce_mean(bj.map_fn(jax.random.normal, k))), tree=keys)
    with jax.enable_x64(True):
        check(mean_loss, W, tree=data(20))


@given(n=st.integers(1, 30), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=8))
@examples(5)
def test_the_cut_into_chunks_does_not_show(n, sizes):
    exact = local(two_passes, W, data(n))
    assert_same_bits(local(two_passes, W, stream(data(n), sizes)), exact)


@pytest.mark.parametrize("sizes", [[1], [7], [8], [9], [0, 5, 0, 50]], ids=str)
def test_the_cut_into_chunks_does_not_show_on_beam(sizes):
    exact = local(two_passes, W, data(50))
    assert_same_bits(bj.run(two_passes, W, stream(data(50), sizes), options=OPTIONS), exact)


def test_nothing_is_left(tmp_path):
    options = {**OPTIONS, "work_folder": str(tmp_path)}
    for runner in RUNNERS:
        bj.run(two_passes, W, stream(data(20)), runner=runner, options=options)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("write_bytes", [100, 1 << 22])
def test_verify_and_transform(write_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.graph.streaming.WRITE_BYTES", write_bytes)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # Beam leaves folders in it.
    assert bj.verify(two_passes, W, stream(data(20)), options=OPTIONS).ok
    exact = [raw(x) for x in local(two_passes, W, data(20))]

    def same(expected, placed):
        def matches(found):
            if placed:
                found = [np.stack([x for _, x in sorted(found, key=lambda pair: pair[0])])]
            assert_same_bits(found, [expected])

        return matches

    with beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([])) as pipeline:
        found = pipeline | bj.transform(two_passes, W, stream(data(20)), options=OPTIONS)
        for i, result in enumerate(found):
            assert_that(result, same(exact[i], i != 1), label=f"check {i}")
    message = "needs the number of members as a constant"
    refused(StagingError, message, bj.transform, branches, W, stream(data(20)))
    (n,) = jax.export.symbolic_shape("n")
    spec = jax.ShapeDtypeStruct((n,), "int32")
    refused(StagingError, r"use beamjax\.run", bj.transform, paired, stream(data(20)["x"]), spec)


# --- beside others


@opened
def paired(x, k):
    return bj.reduce_sum(bj.map_fn(lambda a, b: a.sum() * b.astype("float32"), (x, k)))


@pytest.mark.parametrize("runner", RUNNERS)
def test_beside_an_array_or_another_stream(runner):
    x, k = data(20)["x"], data(20)["k"]
    expected = local(paired, x, k)
    for args in (
        (stream(x), k), (x, stream(k)), (stream(x), stream(k, [7])), (from_arrays(x), stream(k)),
    ):  # fmt: skip
        assert_same_bits(bj.run(paired, *args, runner=runner, options=OPTIONS), expected)
    how = {"runner": runner, "options": OPTIONS}
    message = r"shape \(17,\), expected \(20(.|\n)*has 20 members"
    refused(PlacementError, message, bj.run, paired, stream(x), k[:17], **how)
    message = r"shape \(17,\), expected \(20(.|\n)*has 20 members; .* has 17 members"
    refused(PlacementError, message, bj.run, paired, stream(x), stream(k[:17]), **how)


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_placement_of_fixed_size(runner):
    prog = bj.program(clients=20)(lambda d: bj.reduce_sum(bj.map_fn(jnp.sin, d["x"])))
    how = {"runner": runner, "options": OPTIONS}
    assert_same_bits(bj.run(prog, stream(data(20)), **how), local(prog, data(20)))
    assert "the plan for 20 members" in note(prog, stream(data(20)))
    message = r"expected \(20, (.|\n)*has 17 members"
    refused(PlacementError, message, bj.run, prog, stream(data(17)), **how)


def test_two_placements_of_unknown_size():
    @bj.program(placements={"a": None, "b": None})
    def prog(x, k):
        total = bj.reduce_sum(x, placement="a").sum()
        return total, bj.reduce_max(k, placement="b")

    x, k = data(20)["x"], data(17)["k"]
    assert_same_bits(bj.run(prog, stream(x), stream(k), options=OPTIONS), local(prog, x, k))


def test_sources_side_by_side():
    a, b = np.arange(20), np.arange(20.0)
    where = {"a": (0, 0), "b": (1, 0)}
    for block in Streams((stream(a, [1]), stream(b, [7])), where, True).blocks(8):
        stop = block.start + block.count
        np.testing.assert_array_equal(block.values["a"], a[block.start : stop])
        np.testing.assert_array_equal(block.values["b"], b[block.start : stop])
    for lengths in [(20, 17), (17, 20), (16, 17), (8, 16)]:
        streams = Streams(tuple(stream(np.arange(n)) for n in lengths), where, True)
        message = f"has {min(lengths)} members, but .* or more"
        error = refused(SourceError, message, lambda streams: list(streams.blocks(8)), streams)
        assert str(error).count("ChunkSource") == 2


# --- errors of programs


def test_a_wrong_program_is_traced_a_constant_number_of_times():
    """However many arguments it has besides the source."""
    params = [np.ones(2 + i, np.float32) for i in range(20)]
    for size in (None, "x"):
        calls = []

        @bj.program(placements={"clients": size})
        def wrong(params, x, calls=calls):
            calls.append(1)
            return bj.reduce_sum(bj.map_fn(lambda v: v.no_such_attribute, x))

        member = jax.ShapeDtypeStruct((4, 3), "float32")
        source = bj.from_chunks(Counted(data(20)["x"]), member)
        refused(AttributeError, "no_such_attribute", bj.run, wrong, params, source)
        assert len(calls) <= 16


def test_a_program_may_check_lengths():
    """It fails in the same way for all numbers of members but the right one."""
    x, k = data(20)["x"], data(20)["k"]
    params = [np.ones(2 + i, np.float32) for i in range(30)]

    @bj.program(placements={"clients": "x"})
    def prog(params, k, x):
        assert x.shape[0] == k.shape[0]
        return bj.reduce_sum(x)

    np.testing.assert_allclose(local(prog, params, k, stream(x)), x.sum(0), rtol=1e-5)
    refused(AssertionError, "", local, prog, params, k[1:], stream(x))


def test_errors_of_the_program_come_before_anything_is_read():
    def wrong(x):
        raise KeyError("mine")

    rows = Counted(data(20)["x"])
    member = jax.ShapeDtypeStruct((4, 3), "float32")
    refused(KeyError, "mine", bj.run, opened(wrong), bj.from_chunks(rows, member))
    prog = opened(lambda x: bj.reduce_sum(x) + jnp.ones(7))
    refused(ValueError, "hapes", bj.run, prog, bj.from_chunks(rows))
    assert rows.reads == 0


@pytest.mark.parametrize("runner", RUNNERS)
def test_errors_of_reading(runner):
    def rows():
        yield np.zeros((4, 3), np.float32)
        raise OSError("connection lost")

    total = opened(bj.reduce_sum)
    message = "rows>, chunk 1: cannot be read .*connection lost"
    refused(SourceError, message, bj.run, total, bj.from_chunks(rows), runner=runner)
    how = {"runner": runner, "options": {**OPTIONS, "work_folder": "/proc/none"}}
    message = r"/proc/none.*cannot write here"
    refused(SourceError, message, bj.run, two_passes, W, stream(data(20)), **how)


# --- chunks of functions


def test_what_from_chunks_gives():
    tree = {"x": np.arange(10.0).reshape(5, 2), "k": np.arange(5, dtype=np.int8)}
    source = stream(tree)
    assert source.treedef == jax.tree.structure(tree)
    assert [str(leaf) for leaf in source.leaves] == ["int8[]", "float64[2]"]
    assert_same_bits(members_of(source, True), [tree["k"], tree["x"]])
    for text in ("in chunks from", "their number is unknown"):
        assert text in repr(source)
    keys = jax.random.split(jax.random.key(0), 5)
    member = jax.ShapeDtypeStruct((), keys.dtype)
    for source in (stream(keys, [2]), bj.from_chunks(lambda: [keys], member)):
        assert source.leaves[0].key_impl == "threefry2x32"
        assert_same_bits(members_of(source, True), [raw(keys)])


def test_a_function_is_not_called_where_the_type_of_a_member_is_given():
    calls = []

    def rows():
        calls.append(1)
        yield np.ones((2, 3), np.float32)

    source = bj.from_chunks(rows, jax.ShapeDtypeStruct((3,), "float32"))
    assert not calls
    assert members_of(source, True)[0].shape == (2, 3)


def test_what_is_no_function_of_chunks():
    once = iter([np.ones(3), np.ones(3)])
    for error, message, *args in [
        (StructureError, "found a generator, expected a function", (x for x in [np.ones(3)])),
        (SourceError, "the same iterator", lambda: once),
        (SourceError, "returns a int, expected an iterable", lambda: 3),
        (SourceError, "no chunk with a row", lambda: [np.ones((0, 3))]),
        (StructureError, "without leaves", list, {}),
        (StructureError, "member.*found 3", list, 3),
    ]:
        refused(error, message, bj.from_chunks, *args)
    source = stream(np.ones(3))
    refused(SourceError, "is not pickled", spec_of, source)
    refused(SourceError, "known only when all of them have been read", len, source)
    refused(SourceError, "not by index", source.read, 0, 1)


def test_chunks_that_differ():
    for later, message in [
        ({"y": np.ones(2)}, "chunk 1: found the tree"),
        ({"x": 3.0}, "chunk 1: .*scalar"),
        ({"x": ["text"]}, "chunk 1"),
        ({"x": np.ones(2, np.float32)}, "chunk 1.*found float32.*expected rows of float64"),
    ]:
        source = bj.from_chunks(lambda later=later: [{"x": np.ones(2)}, later])
        refused(SourceError, message, members_of, source, True)


# --- chunks of sources of one's own

X = (LeafSpec((2,), np.dtype("float32"), path="['x']"),)
TWO = tuple(LeafSpec((), np.dtype("int32"), path=path) for path in ("['a']", "['b']"))


class Given(StreamSource):
    """Chunks as they are, right or wrong."""

    leaves = X
    spec = from_spec = None

    def __init__(self, chunks, leaves=X):
        self.given, self.leaves = chunks, leaves

    def chunks(self, piece):
        return iter(self.given)


@given(
    n=st.integers(1, 40),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    size=st.integers(1, 16),
)
@settings(deadline=None, max_examples=60)
def test_blocks_have_the_members_in_order(n, sizes, size):
    tree = {"k": np.arange(n), "x": np.arange(2.0 * n).reshape(n, 2)}
    found = list(blocks_of(stream(tree, sizes), size, [1, 0], True))
    assert [count for count, _ in found] == [min(size, n - i) for i in range(0, n, size)]
    arrays = zip(*(arrays for _, arrays in found), strict=True)
    assert_same_bits([np.concatenate(leaf) for leaf in arrays], [tree["x"], tree["k"]])


def test_chunks_are_read_in_turn():
    def chunks():
        buffer = np.empty((3, 2), np.float32)  # used again and again
        for i in range(4):
            buffer[:] = i
            yield [buffer]

    blocks = list(blocks_of(Given(chunks()), 5, [0], True))
    found = np.concatenate([arrays[0][:, 0] for _, arrays in blocks])
    assert found.tolist() == np.repeat(np.arange(4), 3).tolist()
    assert members_of(Numbers([3, 0, 2, 1]), True)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert members_of(from_arrays(np.arange(3)), True)[0].tolist() == [0, 1, 2]
    mixed = Given([[np.ones((2, 2), ">f4")], [np.zeros((1, 2), "<f4")]])
    assert_same_bits(members_of(mixed, True), [np.float32([[1, 1], [1, 1], [0, 0]])])
    small = np.ones(3, ml_dtypes.bfloat16)
    assert_same_bits(members_of(Given([[small]], (LeafSpec((), small.dtype),)), True), [small])


def test_what_is_no_chunk():
    for chunk, leaves, message in [
        ([np.zeros((3, 2))], X, r"chunk 1, leaf \['x'\]: found float64\[3, 2\], expected rows"),
        ([np.zeros((3, 4), "f4")], X, r"found float32\[3, 4\], .* float32\[2\]"),
        ([np.float32(3)], X, r"found float32\[\], expected rows"),
        ([], X, "found 0 arrays, expected a list of 1 arrays"),
        (np.zeros((3, 2), "f4"), X, "expected a list of 1 arrays"),
        ([np.zeros(3, "i4"), np.zeros(2, "i4")], TWO, r"\['b'\]: found 2 rows, expected 3"),
    ]:
        good = [np.zeros((1, *leaf.shape), leaf.dtype) for leaf in leaves]
        read = checked_chunks(Given([good, chunk], leaves), 0, [0], True)
        refused(SourceError, message, list, read)


@pytest.mark.parametrize("runner", RUNNERS)
def test_streams_without_members(runner):
    expected = jax.jit(two_sums)(data(0))
    for chunks in ([], [data(0)], [data(0), data(0)]):
        source = bj.from_chunks(lambda chunks=chunks: chunks, MEMBER)
        assert_same_bits(bj.run(two_sums, source, runner=runner, options=OPTIONS), expected)
        assert_same_bits(members_of(source, True), jax.tree.leaves(data(0)))
    assert list(Streams((Given([]),), {"x": (0, 0)}, True).blocks(8)) == []
    assert_same_bits(bj.run(opened(bj.reduce_sum), Numbers([0, 0]), runner=runner), np.float32(0))


MEMBER = {"k": jax.ShapeDtypeStruct((), "int32"), "x": jax.ShapeDtypeStruct((4, 3), "float32")}


@opened
def two_sums(d):
    return bj.reduce_mean(d["x"]), bj.map_fn(lambda e: e["x"].sum(), d), bj.reduce_sum(d["k"])
