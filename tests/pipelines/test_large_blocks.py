"""No element of a pipeline is larger than the limit: what the blocks hold that steps hand on."""

import inspect

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.pipelines import run as runs
from beamjax.pipelines import transform as transforms
from beamjax.pipelines.graph import collect_results, streaming
from beamjax.pipelines.runners.connect import make_runner
from beamjax.pipelines.values import elements as large_blocks
from beamjax.pipelines.values.elements import Element, ElementCoder, block_of, cut, whole
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import map_shards as workers

KIB = 1 << 10
N, WIDTH = 40, 4096  # 16 KiB a member of float32
X = np.random.default_rng(3).normal(size=(N, WIDTH)).astype(np.float32)
STEPS = (
    workers.MapShards, collect_results.ReadMembers, streaming.ReadStreams, streaming.LoadBlocks,
    transforms.FormBlocks,
)  # fmt: skip


def stored(block):
    """Whether the values of a block are in files."""
    return any(isinstance(part.data, StoreRef) for part in block.values())


@pytest.fixture
def sizes(monkeypatch):
    """Bytes, members and whether they are in files, of all blocks that steps hand on.

    The limit is that of three members.
    """
    found = []
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", 50 * KIB)

    def watched(method):
        def process(self, *args):
            for element in method(self, *args) or ():
                value = getattr(element, "value", element)
                if isinstance(value, Element):
                    found.append((len(ElementCoder().encode(value)), value.range[1], stored(value)))
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


def test_blocks_are_cut_or_in_files(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    block = block_of(16, 8, {"x": X[:8], "k": np.arange(8)})
    assert whole(block, store) is block
    assert [list(part) for part in cut(block, store)] == [["x", "k"]]
    for limit, counts in (
        (block.nbytes, [8]),
        (block.nbytes - 1, [7, 1]),
        (50 * KIB, [3, 3, 2]),
        (KIB, [1] * 8),
    ):
        monkeypatch.setattr(large_blocks, "LIMIT_BYTES", limit)
        parts = list(cut(block, store))
        starts = [16 + sum(counts[:i]) for i in range(len(counts))]
        assert [part.range for part in parts] == list(zip(starts, counts, strict=True))
        assert all(stored(part) == (limit == KIB) for part in parts)
        assert all(part.nbytes <= limit for part in parts if not stored(part))
        for name, expected in block.arrays(store).items():
            found = np.concatenate([part.array(name, store) for part in parts])
            assert_same_bits(found, expected)
    found = whole(block, store)
    assert stored(found)
    assert found.nbytes == block.nbytes
    encoded = ElementCoder().encode(found)
    assert len(encoded) < 2 * KIB
    again = ElementCoder().decode(encoded)
    assert again.refs() == found.refs()
    assert again.range == (16, 8)
    assert_same_bits(again.arrays(store), block.arrays(store))


# --- pipelines


@bj.program(clients=None)
def two_passes(x):
    y = bj.map_fn(lambda v: jnp.sin(v) * jnp.max(v), x)  # stored, as it is not elementwise
    centred = bj.map_fn(lambda v, m: v - m, (y, bj.broadcast(bj.reduce_mean(y))))
    return centred, bj.reduce_sum(bj.map_fn(jnp.square, centred))


def here(fn, *args):
    return bj.run(fn, *args, runner="local", options={"shard_size": 8})


def test_passes_hand_on_large_members(sizes, monkeypatch):
    """On resident workers, and in one pipeline, where the next pass needs whole shards."""
    expected = here(two_passes, X)
    for handed in (0, 1 << 30):
        sizes.clear()
        monkeypatch.setattr(runs, "HANDED_BYTES", handed)
        assert_same_bits(bj.run(two_passes, X, options={"shard_size": 8}), expected)
        # Resident workers hand on no blocks.
        assert any(refs for *_, refs in sizes) == (handed > 0)
        assert any(count < 8 for _, count, _ in sizes) == (handed > 0)
    sizes.clear()
    monkeypatch.setattr(large_blocks, "LIMIT_BYTES", 10 * KIB)  # less than a member
    assert_same_bits(bj.run(two_passes, X, options={"shard_size": 8}), expected)
    assert {count for _, count, _ in sizes} == {1, 8}
    assert all(refs for *_, refs in sizes)


def test_results_that_stay_in_files(sizes, tmp_path):
    for workers_of_run in (1, 2):
        folder = str(tmp_path / str(workers_of_run))
        options = {
            "shard_size": 8, "results_folder": folder, "direct_num_workers": workers_of_run,
        }  # fmt: skip
        kept, total = bj.run(two_passes, X, keep="placed", options=options)
        centred, expected = here(two_passes, X)
        assert_same_bits((np.asarray(kept), total), (np.asarray(centred), expected))
    assert max(count for _, count, refs in sizes if not refs) <= 3


def test_inputs_that_are_gathered_or_results_and_results_by_key(sizes):
    @bj.program(clients=None)
    def mixed(x):
        y = bj.map_fn(lambda v: v * 2, x)
        return x, y[::-1], y @ y.T

    options = {"shard_size": 8}
    assert_same_bits(bj.run(mixed, X, options=options), here(mixed, X))

    @bj.program(clients=None)
    def by_key(x, keys):
        return bj.reduce_by_key(bj.map_fn(lambda v: v + 1, x), keys, None)

    keys = np.arange(N, dtype=np.int32) % 5
    found, expected = bj.run(by_key, X, keys, options=options), here(by_key, X, keys)
    assert_same_bits(found.read(0, 5), expected.read(0, 5))


def test_members_of_unknown_number(sizes):
    chunks = lambda: (X[start : start + 7] for start in range(0, N, 7))
    for flags in ({}, {"direct_num_workers": 2, "direct_running_mode": "multi_threading"}):
        found = bj.run(two_passes, bj.from_chunks(chunks), options={"shard_size": 8, **flags})
        assert_same_bits(found, here(two_passes, X))


def test_members_of_a_pipeline(sizes):
    expected = np.asarray(here(two_passes, X)[0])

    def check(found):
        assert sorted(i for i, _ in found) == list(range(N))
        for i, member in found:
            np.testing.assert_array_equal(member, expected[i])

    like = jax.ShapeDtypeStruct((N, WIDTH), np.float32)
    with beam.Pipeline(runner=make_runner("DirectRunner")) as pipeline:
        members = pipeline | beam.Create(list(enumerate(X)))
        centred, _ = members | bj.transform(two_passes, like, options={"shard_size": 8})
        centred | beam.combiners.ToList() | beam.Map(check)


def test_blocks_of_72_mib(monkeypatch):
    """With the limit as it is."""
    x = np.arange(8 * (9 << 18), dtype=np.float32).reshape(8, 9 << 18)
    seen, finish = [], workers.MapShards._finish

    def watched(self, done):
        for element in finish(self, done):
            if isinstance(element, Element):
                seen.append((element.nbytes, element.range[1]))
            yield element

    monkeypatch.setattr(workers.MapShards, "_finish", watched)
    program = bj.program(clients=None)(lambda x: bj.map_fn(lambda v: v * 2, x))
    np.testing.assert_array_equal(bj.run(program, x, options={"shard_size": 8}), x * 2)
    assert [count for _, count in seen] == [7, 1]
    assert max(nbytes for nbytes, _ in seen) < 64 << 20
