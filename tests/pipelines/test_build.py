"""Graphs: their elements have coders of our own, and they are small, however big the data are."""

import contextlib
import re

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam import coders
from apache_beam.coders import coder_impl
from apache_beam.pipeline import PipelineVisitor
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, execution
from helpers import assert_close, assert_same_bits

import beamjax as bj
from beamjax.pipelines.values.elements import Element

N = 40
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]


@bj.program(clients=N)
def everything(w, x):
    """Blocks, environments, gathers, server steps, several buffers, placed results."""
    y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
    mean = bj.reduce_mean(y)
    scale = jnp.linalg.norm(mean)
    z = bj.map_fn(lambda a, b: (a - mean) * b / scale, (y, x))
    return bj.reduce_max(z), bj.reduce_sum(z), z, jnp.sort(y, axis=0), scale


class Seen:
    """What runs of a fixture submitted."""

    def __init__(self):
        self.protos = []
        self.types = {}

    @property
    def transforms(self):
        return self.protos[-1].components.transforms.values()

    @property
    def size(self):
        return self.protos[-1].ByteSize()

    @property
    def labels(self):
        names = {t.unique_name for t in self.transforms}
        return {re.sub(r"_\d+", "_", name) for name in names if "/" not in name}

    @property
    def groupings(self):
        """Number of GroupByKeys, where Beam writes all elements down."""
        return sum(t.spec.urn == "beam:transform:group_by_key:v1" for t in self.transforms)


@pytest.fixture
def seen(monkeypatch):
    seen = Seen()
    submit, start = FnApiRunner.run_via_runner_api, beam.Pipeline.run

    def spy(self, proto, options):
        seen.protos.append(proto)
        return submit(self, proto, options)

    class Visitor(PipelineVisitor):
        def visit_transform(self, node):
            for output in node.outputs.values():
                seen.types[f"{node.full_label}[{output.tag}]"] = output.element_type

    def visit(self, *args, **kwargs):
        self.visit(Visitor())
        return start(self, *args, **kwargs)

    monkeypatch.setattr(FnApiRunner, "run_via_runner_api", spy)
    monkeypatch.setattr(beam.Pipeline, "run", visit)
    return seen


@pytest.fixture
def no_pickle(monkeypatch):
    """Coders that would pickle an element fail instead."""

    def fail(value):
        raise AssertionError(f"pickled: {value!r:.200}")

    failing = coder_impl.CallbackCoderImpl(fail, fail)
    for name in ("PickleCoder", "_MemoizingPickleCoder", "DillCoder", "CloudpickleCoder"):
        if hasattr(coders.coders, name):
            monkeypatch.setattr(getattr(coders.coders, name), "_create_impl", lambda self: failing)
    monkeypatch.setattr(
        coders.coders.FastPrimitivesCoder,
        "_create_impl",
        lambda self: coder_impl.FastPrimitivesCoderImpl(failing),
    )


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("width", [6, 20_000], ids=["inline", "files"])
def test_elements_have_coders_of_our_own(width, seen):
    w = np.linspace(-1, 1, width, dtype=np.float32)
    x = np.random.default_rng(0).normal(size=(N, width)).astype(np.float32)
    expected = jax.jit(everything)(w, x)
    for flags in ([], THREADS):
        found = bj.run(everything, w, x, options=["--shard_size=8", *flags])
        assert_close(found, expected, 1e-3, 1e-3)
    assert {"map_clients_", "server_", "gather_"} <= seen.labels
    assert Element in seen.types.values()
    plain = re.compile(r"(Tuple\[)*<class '(str|bytes|int)'>(, .*\])?")
    for label, kind in seen.types.items():
        if not label.startswith("Write") and kind is not Element:
            assert plain.fullmatch(str(kind)), label
    assert type(coders.registry.get_coder(Element)).__module__.startswith("beamjax.")


@pytest.mark.usefixtures("no_pickle")
def test_the_check_for_pickles_works():
    with pytest.raises(AssertionError, match="pickled"), beam.Pipeline(runner=FnApiRunner()) as p:
        p | beam.Create([1]) | beam.Map(lambda x: (x, object())) | beam.GroupByKey()


@bj.program(clients=N)
def outer(w, x):
    y = bj.map_fn(lambda v: w * v, x)
    return bj.reduce_sum(y), bj.reduce_max(y), bj.reduce_argmax(y)


@pytest.mark.usefixtures("no_pickle")
def test_accumulators_are_neither_pickled_nor_large(monkeypatch):
    """Between the two merges of each piece too, whose coder Beam's own fan-out leaves to pickle."""
    rng = np.random.default_rng(0)
    w = (rng.normal(size=300_000) * 10.0 ** rng.integers(-30, 30, 300_000)).astype(np.float32)
    x = rng.normal(size=N).astype(np.float32)
    expected = bj.run(outer, w, x, runner="local", options={"shard_size": 8})
    nbytes = []
    for buffers in (execution.ListBuffer, execution.GroupingBuffer):

        def measure(buffer, data, append=buffers.append):
            nbytes.append(len(data))
            append(buffer, data)

        monkeypatch.setattr(buffers, "append", measure)
    # No accumulator stays in memory.
    monkeypatch.setattr("beamjax.pipelines.run.in_memory", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr("beamjax.plan.merging._groups", lambda *_: 4)
    flags = ["--shard_size=8", *THREADS]
    assert_same_bits(bj.run(outer, w, x, options=flags), expected)
    assert nbytes
    assert max(nbytes) < 1 << 20


@pytest.mark.versions
def test_the_pipeline_does_not_grow_with_the_data(seen):
    closed_over = jnp.ones(1 << 19)
    sizes = []
    for n, width in ((64, 8), (1 << 13, 1 << 19)):

        @bj.program(clients=n)
        def total(x, table):
            return bj.reduce_sum(bj.map_fn(lambda v: v * table[0] * jnp.mean(closed_over), x))

        x = np.ones((n, 64), np.float32)
        found = bj.run(total, x, np.full(width, 2, np.float32))
        np.testing.assert_array_equal(found, np.full(64, 2 * n, np.float32))
        sizes.append(seen.size)
    assert abs(sizes[1] - sizes[0]) < 4096
    assert sizes[1] < 1 << 19


def test_many_rounds_are_a_small_pipeline(seen):
    x = np.linspace(-1, 1, N * 6, dtype=np.float32).reshape(N, 6)

    def size(count):
        @bj.program(clients=N)
        def rounds(w, x):
            for _ in range(count):
                w = w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v, w=w: jnp.tanh(v * w), x))
            return w

        found = bj.run(rounds, x[0], x)
        assert_close(found, jax.jit(rounds)(x[0], x))
        return seen.size

    assert size(6) - size(2) < 4 * (64 << 10)


def test_shards_are_dealt_only_to_several_workers(seen):
    x = np.arange(N, dtype=np.float32)
    total = bj.program(clients=N)(bj.reduce_sum)
    for flags, shard_size, groupings in (([], 8, 1), (THREADS, 8, 2), (THREADS, N, 1)):
        found = bj.run(total, x, options=[f"--shard_size={shard_size}", *flags])
        assert (found, seen.groupings) == (x.sum(), groupings)


def test_elements_are_ranges_of_many_shards(seen):
    n = 8 * 256 * 2 + 3  # Two or three shards in each of at most 256 ranges.
    total = bj.program(clients=n)(bj.reduce_sum)
    for flags in ([], THREADS):
        found = bj.run(total, np.ones(n, np.float32), options=["--shard_size=8", *flags])
        assert found == n


def test_only_passes_that_read_values_of_earlier_ones_start_from_their_blocks(seen):
    @bj.program(clients=N)
    def three_passes(x):
        y = bj.map_fn(lambda v: v / (1 + v @ v), x)  # stored, as it is not elementwise
        second = bj.reduce_sum(jnp.tanh(x - bj.reduce_mean(y)[None]))
        return bj.reduce_sum((y - second[None]) ** 2)

    x = np.linspace(0, 1, 3 * N, dtype=np.float32).reshape(N, 3)
    bj.run(three_passes, x, options=["--shard_size=8"])
    starts = {t.unique_name for t in seen.transforms if t.unique_name.endswith("/Shards")}
    assert starts == {"map_clients_0/Shards", "map_clients_1/Shards"}
