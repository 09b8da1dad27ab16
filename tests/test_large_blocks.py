"""No element of a pipeline is larger than the limit: what the blocks hold that steps hand on."""

import inspect

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.pipelines import combiners, large_blocks, results, streaming, transforms, workers
from beamjax.pipelines.elements import Block, BlockCoder
from beamjax.pipelines.large_blocks import cut, whole
from beamjax.pipelines.store import Store

KIB = 1 << 10
N, WIDTH = 40, 4096  # 16 KiB a member of float32
RNG = np.random.default_rng(3)
X = RNG.normal(size=(N, WIDTH)).astype(np.float32)
STEPS = (
    workers.MapShards, results.ReadMembers, streaming.ReadStreams, streaming.LoadBlocks,
    transforms.FormBlocks,
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path))


def inline_bytes(block):
    return sum(value.nbytes for value in block.values.values())


@pytest.fixture
def sizes(monkeypatch):
    """Bytes of all blocks that steps hand on; the limit is that of three members."""
    found = []
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", 50 * KIB)

    def watched(method):
        def process(self, *args):
            for element in method(self, *args) or ():
                value = getattr(element, "value", element)
                if isinstance(value, Block):
                    found.append((len(BlockCoder().encode(value)), value.count, bool(value.refs)))
                yield element

        # Beam reads what arguments it takes.
        process.__signature__ = inspect.signature(method)
        return process

    for step in STEPS:
        for name in ("process", "finish_bundle"):
            if name in vars(step):
                monkeypatch.setattr(step, name, watched(vars(step)[name]))
    yield found
    assert found
    assert max(nbytes for nbytes, *_ in found) <= 50 * KIB + 2 * KIB


# --- blocks


def block(count=8, start=16):
    return Block(start, count, 8, {"x": X[:count], "k": np.arange(count)})


def test_a_small_block_stays_as_it_is(store):
    small = block()
    assert whole(small, store) is small
    assert [list(part.values) for part in cut(small, store)] == [["x", "k"]]


def test_a_large_block_goes_to_the_store(store, monkeypatch):
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", 50 * KIB)
    large = block()
    found = whole(large, store)
    assert not found.values
    assert found.nbytes == large.nbytes
    encoded = BlockCoder().encode(found)
    assert len(encoded) < 2 * KIB
    again = BlockCoder().decode(encoded)
    assert again == found or again.refs == found.refs
    assert (again.start, again.count, again.shard_size) == (16, 8, 8)
    for name, array in again.arrays(store).items():
        np.testing.assert_array_equal(array, large.values[name])
        assert array.dtype == large.values[name].dtype


@pytest.mark.parametrize(("limit", "counts"), [(50 * KIB, [3, 3, 2]), (1 * KIB, [1] * 8)])
def test_blocks_are_cut_to_fewer_members(store, monkeypatch, limit, counts):
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", limit)
    parts = list(cut(block(), store))
    assert [part.count for part in parts] == counts
    assert [part.start for part in parts] == [16 + sum(counts[:i]) for i in range(len(counts))]
    assert all(inline_bytes(part) <= limit for part in parts)
    assert all(bool(part.refs) == (limit == KIB) for part in parts)
    whole_again = [np.concatenate([part.array(name, store) for part in parts]) for name in "xk"]
    np.testing.assert_array_equal(whole_again[0], X[:8])
    np.testing.assert_array_equal(whole_again[1], np.arange(8))


# --- pipelines


@bj.program(clients=None)
def two_passes(x):
    y = bj.map_fn(lambda v: jnp.sin(v) * 2, x)
    centred = bj.map_fn(lambda v, m: v - m, (y, bj.broadcast(bj.reduce_mean(y))))
    return centred, bj.reduce_sum(bj.map_fn(jnp.square, centred))


def same(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


LIMITS = pytest.mark.parametrize("handed", [0, 1 << 30], ids=["apart", "together"])


@LIMITS
def test_passes_hand_on_large_members(sizes, handed, monkeypatch):
    """In one pipeline, where the next pass needs whole shards, and in two."""
    from beamjax.pipelines import driver

    monkeypatch.setattr(driver, "HANDED_BYTES", handed)
    options = {"shard_size": 8}
    same(
        bj.run(two_passes, X, options=options),
        bj.run(two_passes, X, runner="local", options=options),
    )
    assert any(refs for *_, refs in sizes) == (handed > 0)
    assert any(count < 8 for _, count, _ in sizes)


def test_members_that_are_large_alone(sizes, monkeypatch):
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", 10 * KIB)
    options = {"shard_size": 8}
    same(
        bj.run(two_passes, X, options=options),
        bj.run(two_passes, X, runner="local", options=options),
    )
    assert {count for _, count, _ in sizes} == {1, 8}
    assert all(refs for *_, refs in sizes)


@pytest.mark.parametrize("runner_options", [{}, {"direct_num_workers": 2}], ids=["one", "two"])
def test_results_that_are_kept(sizes, tmp_path, runner_options):
    options = {"shard_size": 8, "results_folder": str(tmp_path), **runner_options}
    kept, total = bj.run(two_passes, X, keep="placed", options=options)
    centred, expected = bj.run(two_passes, X, runner="local", options={"shard_size": 8})
    same((kept, total), (centred, expected))
    assert max(count for _, count, refs in sizes if not refs) <= 3


def test_an_input_that_is_gathered_or_a_result(sizes):
    @bj.program(clients=None)
    def mixed(x):
        y = bj.map_fn(lambda v: v * 2, x)
        return x, y[::-1], y @ y.T

    options = {"shard_size": 8}
    found = bj.run(mixed, X, options=options)
    same(found, bj.run(mixed, X, runner="local", options=options))


def test_results_by_key(sizes):
    @bj.program(clients=None)
    def by_key(x, keys):
        return bj.reduce_by_key(bj.map_fn(lambda v: v + 1, x), keys, None)

    keys = np.arange(N, dtype=np.int32) % 5
    options = {"shard_size": 8}
    found = bj.run(by_key, X, keys, options=options)
    expected = bj.run(by_key, X, keys, runner="local", options=options)
    same(found.read(0, 5), expected.read(0, 5))


def test_members_of_unknown_number(sizes):
    def chunks():
        for start in range(0, N, 7):
            yield X[start : start + 7]

    for flags in ({}, {"direct_num_workers": 2, "direct_running_mode": "multi_threading"}):
        options = {"shard_size": 8, **flags}
        found = bj.run(two_passes, bj.from_chunks(chunks), options=options)
        same(found, bj.run(two_passes, X, runner="local", options=options))


def test_members_of_a_pipeline(sizes):
    def check(found):
        assert len(found) == N
        for i, member in found:
            np.testing.assert_array_equal(member, expected[i])

    expected = np.asarray(bj.run(two_passes, X, runner="local", options={"shard_size": 8})[0])
    like = jax.ShapeDtypeStruct((N, WIDTH), np.float32)
    from beamjax.pipelines.connections import make_runner

    with beam.Pipeline(runner=make_runner("DirectRunner")) as pipeline:
        members = pipeline | beam.Create(list(enumerate(X)))
        centred, _ = members | bj.transform(two_passes, like, options={"shard_size": 8})
        checked = centred | beam.combiners.ToList() | beam.Map(check)
        assert checked is not None


def test_blocks_of_72_mib():
    """With the limit as it is."""
    x = np.arange(8 * (9 << 18), dtype=np.float32).reshape(8, 9 << 18)
    seen = []
    original = workers.MapShards._finish

    def watched(self, done):
        for element in original(self, done):
            if isinstance(element, Block):
                seen.append((inline_bytes(element), element.count))
            yield element

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.MapShards, "_finish", watched)
        program = bj.program(clients=None)(lambda x: bj.map_fn(lambda v: v * 2, x))
        found = bj.run(program, x, options={"shard_size": 8})
    np.testing.assert_array_equal(found, x * 2)
    assert [count for _, count in seen] == [7, 1]
    assert max(nbytes for nbytes, _ in seen) < 64 << 20


def test_who_reads_blocks_asks_for_their_arrays():
    """Not for the values alone, which a large block has elsewhere."""
    for step in (workers.MapShards, results.WritePlaced, combiners.PartsOfBlocks,
                 streaming.WriteBlocks, transforms.Members):  # fmt: skip
        assert ".values[" not in inspect.getsource(step).replace("environment.values[", "")
