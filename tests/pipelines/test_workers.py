"""What workers do: shards of any bundle to partials and blocks; what is dear once a process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of

import beamjax as bj
from beamjax.errors import WorkerError
from beamjax.numerics.reducers import decode_accumulator
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import tasks
from beamjax.pipelines.worker.map_shards import PARTIALS, MapShards, Ranges
from beamjax.pipelines.worker.tasks import SourceSpecs, StoredBodies, Task
from beamjax.plan.shard import Shard, Shards
from beamjax.plan.steps import Map
from beamjax.runtime.shard_executor import LoadedPass, ShardExecutor
from beamjax.sources.source_base import live_spec, register, release
from beamjax.telemetry.progress import Totals

N, SIZE = 20, 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.arange(3, dtype=np.float32)


@pytest.fixture(scope="module")
def plan():
    """One pass."""

    @bj.program(clients=N)
    def program(w, x):
        y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
        return y, bj.reduce_sum(y)

    return plan_of(program, W, X, shard_size=SIZE)


def pass_of(plan):
    (step,) = (step for step in plan.steps if isinstance(step, Map))
    return step


@pytest.fixture
def store(tmp_path):
    store = Store(str(tmp_path))
    with tasks.caching_for(store):
        yield store


@pytest.fixture
def token():
    token = register(bj.from_arrays(X))
    yield token
    release(token)


def first_pass(plan, store, token):
    step = pass_of(plan)
    (operand,) = step.operands
    bodies = {step.body: StoredBodies(store).of(plan, step.body)}
    static = {name: store.put([W]) for name in step.broadcasts}
    sources = SourceSpecs((live_spec(token),), {operand: (0, 0)}, False)
    fn = MapShards(Task(plan, step, bodies, static, store), sources, {}, ())
    fn.setup()
    return fn


def run_bundle(fn, elements, *served):
    """The blocks and partials of a bundle."""
    fn.start_bundle()
    blocks = [block for element in elements for block in fn.process(element, *served)]
    partials = []
    for output in fn.finish_bundle():
        if isinstance(output, beam.pvalue.TaggedOutput):
            assert output.tag == PARTIALS
            partials.append(output.value.value)
        else:  # A shard that other threads computed may be done only now.
            blocks.append(output.value)
    return blocks, partials


def total(partials):
    merged = None
    for _, data in partials:
        live = decode_accumulator(data)
        if merged is not None:
            live.merge(merged)
        merged = live
    return merged.total(0, merged.size, np.dtype("float32"))


# --- shards and bundles


def test_ranges_are_all_shards_once():
    for count, width in ((1, 1), (7, 3), (6, 3), (256, 1), (5, 9)):
        found = list(Ranges(count, width).process(None))
        assert [i for first, last in found for i in range(first, last)] == list(range(count))
    whole = list(Shards(N, SIZE))
    assert whole == [Shard(0, 0, 8), Shard(1, 8, 8), Shard(2, 16, 4)]
    assert list(Shards(N, SIZE).between(1, 3)) == whole[1:]
    assert list(Shards(16, SIZE)) == whole[:2]


def test_any_bundles_give_the_same_blocks_and_sums(plan, store, token, monkeypatch):
    fn = first_pass(plan, store, token)
    reported = []
    monkeypatch.setattr(fn.spans, "report", lambda: reported.append(fn.spans.take()))
    blocks, partials = run_bundle(fn, [(0, 2), (2, 3)])
    (work,) = reported
    found = Totals.of(work.sums.values())
    assert (found.members, found.shards, found.bytes_read) == (20, 3, X.nbytes)
    assert min(found.read, found.compute, found.merge) > 0
    found = np.concatenate([block[fn.task.step.results[0]].data for block in blocks])
    np.testing.assert_allclose(found, np.tanh(X) * W, rtol=1e-5)
    assert [block.range for block in blocks] == [(0, 8), (8, 8), (16, 4)]
    assert len(partials) == 1
    for bundles in ([[(2, 3)], [(0, 2)]], [[(1, 2), (0, 1)], [(2, 3)]], [[(0, 1)], [(1, 3)], []]):
        more = [run_bundle(fn, bundle) for bundle in bundles]
        pieces = [partial for _, partials in more for partial in partials]
        assert total(pieces).tobytes() == total(partials).tobytes()
        assert sum(len(blocks) for blocks, _ in more) == 3
    assert run_bundle(fn, []) == ([], [])
    expected = run_bundle(fn, [(0, 1)])[1]
    fn.start_bundle()
    list(fn.process((1, 3)))  # This bundle fails after that: nothing is left of it.
    assert run_bundle(fn, [(0, 1)])[1] == expected


def test_padding_repeats_the_last_member_and_is_cut_off(plan):
    step = pass_of(plan)
    execute = ShardExecutor(LoadedPass(plan, step), dict.fromkeys(step.broadcasts, W))
    found = execute(Shard(2, 16, 4), [X[16:]])
    (short,), partial_short = found.results, found.partials
    (full,) = execute(Shard(2, 16, 8), [np.concatenate([X[16:], X[12:16]])]).results
    assert short.shape == (4, 3)
    assert short.tobytes() == full[:4].tobytes()
    np.testing.assert_allclose(partial_short[0], short.sum(0), rtol=1e-5)
    with pytest.raises(WorkerError, match=r"step 'map_clients_0' .*shard 1 .*members 8 to 15"):
        execute(Shard(1, 8, 8), [X[8:16, :2]])


# --- once a process


def test_threads_share_executors(plan, store, token, monkeypatch):
    made, init = [], ShardExecutor.__init__
    monkeypatch.setattr(
        ShardExecutor, "__init__", lambda self, *args: made.append(1) or init(self, *args)
    )
    task = first_pass(plan, store, token).task
    (name,) = task.static
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tasks.executors(task, task.static), range(4)))
    assert len(made) == 1
    assert len(set(map(id, found))) == 1
    assert tasks.executors(task, {name: store.put([W + 1])}) is not found[0]
    assert tasks.executors(task, task.static) is found[0]
    for i in range(tasks.MAX_EXECUTORS + 3):
        tasks.executors(task, {name: store.put([W + i])})
    assert len(tasks._executors._values) == tasks.MAX_EXECUTORS


def test_the_end_of_a_run_frees_the_executors_that_no_other_run_uses(plan, tmp_path, token):
    first, second = Store(str(tmp_path / "first")), Store(str(tmp_path / "second"))
    with tasks.caching_for(second):
        with tasks.caching_for(first):
            of_first, of_second = (first_pass(plan, s, token).task for s in (first, second))
            (name,) = of_first.static
            alone = {name: first.put([W + 1])}
            gone, stays = (tasks.executors(of_first, refs) for refs in (alone, of_first.static))
            assert tasks.executors(of_second, of_second.static) is stays
            assert tasks.executors(of_first, alone) is gone
        assert tasks.executors(of_second, of_second.static) is stays
        assert tasks.executors(of_first, alone) is not gone
    assert tasks.executors(of_second, of_second.static) is not stays


def test_executors_of_two_passes_are_made_at_the_same_time(plan, store, token, monkeypatch):
    task = first_pass(plan, store, token).task
    (name,) = task.static
    both, load, errors = threading.Barrier(2, timeout=30), Store._load, [OSError("a flaky disk")]

    def load_both(self, ref):
        both.wait()  # fails unless the other body or server value is read at the same time
        if errors:
            raise errors.pop()
        return load(self, ref)

    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)
    refs = [{name: store.put([W + i])} for i in (7, 8)]
    tasks.executors(task, {name: store.put([W + 6])})  # reads the body, which both share
    monkeypatch.setattr(Store, "_load", load_both)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(tasks.executors, task, each) for each in refs]
        raised = [one.exception() for one in asked]
    assert sorted(map(repr, raised)) == ["None", "OSError('a flaky disk')"]
    monkeypatch.setattr(Store, "_load", load)
    for i, each in zip((7, 8), refs, strict=True):  # an error is not cached
        (executor,) = tasks.executors(task, each)
        np.testing.assert_array_equal(executor.broadcasts[name], W + i)
