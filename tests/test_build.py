"""The graph: what travels is in our own coders, and small, however big the members are."""

import re

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam import coders
from apache_beam.coders import coder_impl
from apache_beam.pipeline import PipelineVisitor
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import beamjax as bj
from beamjax.pipelines import build
from beamjax.pipelines.elements import Block, Environment

N = 40
X = np.random.default_rng(0).normal(size=(N, 6)).astype(np.float32)
W = np.arange(6, dtype=np.float32)
MIB = 1 << 20


@bj.program(clients=N)
def everything(w, x):
    """Blocks, environments, gathers, server steps, several lanes, placed results."""
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
    def size(self):
        return self.protos[-1].ByteSize()

    @property
    def labels(self):
        transforms = self.protos[-1].components.transforms.values()
        return {t.unique_name for t in transforms if "/" not in t.unique_name}


@pytest.fixture
def seen(monkeypatch):
    seen = Seen()
    run = FnApiRunner.run_via_runner_api
    start = beam.Pipeline.run

    def spy(self, proto, options):
        seen.protos.append(proto)
        return run(self, proto, options)

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


FLAGS = {
    "one worker": [],
    "two workers": ["--direct_running_mode=multi_threading", "--direct_num_workers=2"],
}


def assert_close(found, expected):
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_pickle")
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("inline", [1 << 16, 0], ids=["inline", "files"])
def test_no_element_is_pickled(flags, inline, monkeypatch):
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", inline)
    found = bj.run(everything, W, X, options=["--shard_size=8", *flags])
    assert_close(found, jax.jit(everything)(W, X))


@pytest.mark.usefixtures("no_pickle")
def test_the_check_for_pickles_works():
    with pytest.raises(AssertionError, match="pickled"), beam.Pipeline(runner=FnApiRunner()) as p:
        p | beam.Create([1]) | beam.Map(lambda x: (x, object())) | beam.GroupByKey()


def test_types_of_elements_are_ours_or_plain(seen):
    bj.run(everything, W, X, options={"shard_size": 8})
    plain = re.compile(r"(Tuple\[)?<class '(str|bytes|int)'>(, .*\])?")
    types = {
        label: t for label, t in seen.types.items()
        if not label.startswith("Write") and t not in (Block, Environment)
    }  # fmt: skip
    assert set(seen.types.values()) >= {Block, Environment}
    assert [label for label, t in types.items() if not plain.fullmatch(str(t))] == []
    for ours in (Block, Environment):
        assert type(coders.registry.get_coder(ours)).__module__ == "beamjax.pipelines.elements"


def test_steps_are_named_as_in_the_plan(seen):
    bj.run(everything, W, X, options={"shard_size": 8})
    names = {"map_clients_0", "map_clients_1", "server_0", "gather_0"}
    labels = {re.sub(r"_\d+", "_", label) for label in seen.labels}
    assert {re.sub(r"_\d+", "_", name) for name in names} <= labels


def test_the_pipeline_does_not_grow_with_the_members(seen):
    sizes = []
    for n in (64, 1 << 16):

        @bj.program(clients=n)
        def total(x):
            return bj.reduce_sum(bj.map_fn(lambda v: v * 2, x))

        x = np.ones((n, 256), np.float32)
        np.testing.assert_array_equal(bj.run(total, x), np.full(256, 2 * n, np.float32))
        sizes.append(seen.size)
    assert x.nbytes == 64 * MIB
    assert abs(sizes[1] - sizes[0]) < 4096
    assert sizes[1] < MIB


def test_the_pipeline_does_not_grow_with_server_values_and_constants(seen):
    table = np.ones(1 << 22, np.float32)
    device_table = jnp.ones(1 << 22)

    @bj.program(clients=N)
    def total(x, table):
        return bj.reduce_sum(bj.map_fn(lambda v: v * jnp.sum(table) * jnp.sum(device_table), x))

    np.testing.assert_allclose(bj.run(total, X, table), X.sum(0) * 2.0**44, rtol=1e-4)
    assert seen.size < MIB


def test_many_rounds_are_a_small_pipeline(seen):
    @bj.program(clients=N)
    def rounds(w, x):
        for _ in range(12):
            w = w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v, w=w: jnp.tanh(v * w), x))
        return w

    assert_close(bj.run(rounds, W, X), jax.jit(rounds)(W, X))
    assert seen.size < MIB


# --- shape of the graph


def stages(seen):
    """Number of GroupByKeys, where Beam writes all elements down."""
    transforms = seen.protos[-1].components.transforms.values()
    return sum(t.spec.urn == "beam:transform:group_by_key:v1" for t in transforms)


@pytest.mark.parametrize(("workers", "expected"), [("one worker", 1), ("two workers", 2)])
def test_shards_are_dealt_only_where_there_are_several_workers(seen, workers, expected):
    total = bj.program(clients=N)(lambda x: bj.reduce_sum(x))
    bj.run(total, X, options=["--shard_size=8", *FLAGS[workers]])
    assert stages(seen) == expected


def test_one_shard_is_not_dealt(seen):
    total = bj.program(clients=N)(lambda x: bj.reduce_sum(x))
    bj.run(total, X, options=["--shard_size=40", *FLAGS["two workers"]])
    assert stages(seen) == 1


def test_shards_start_from_few_elements(seen, monkeypatch):
    monkeypatch.setattr(build, "MAX_RANGES", 4)
    total = bj.program(clients=9999)(lambda x: bj.reduce_sum(x))
    x = np.ones(9999, np.float32)
    assert bj.run(total, x, options={"shard_size": 8}) == 9999
    assert bj.run(total, x, options=["--shard_size=8", *FLAGS["two workers"]]) == 9999
