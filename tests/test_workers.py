"""What workers do: shards of any bundle to partials and blocks; what is dear once a process."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import bodies, shards
from beamjax.errors import WorkerError
from beamjax.options import parse_options
from beamjax.pipelines import tasks
from beamjax.pipelines.elements import Block, Environment
from beamjax.pipelines.store import Store
from beamjax.pipelines.tasks import Sources, Task, store_body
from beamjax.pipelines.workers import PARTIALS, MapShards, Ranges, RunServer
from beamjax.plan import Body, Map, Server
from beamjax.planning import _stage, plan_for
from beamjax.reducers import decode_accumulator
from beamjax.shards import Shard, ShardExecutor
from beamjax.sources import live_spec, register, release

N, SIZE = 20, 8
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
W = np.arange(3, dtype=np.float32)


@bj.program(clients=N)
def centred(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
    mean = bj.reduce_mean(y)
    return bj.reduce_max(bj.map_fn(lambda u, v: u * v - mean, (y, x))), mean


@pytest.fixture(scope="module")
def plan():
    arguments, key, restore = _stage.flatten_arguments((W, X))
    return plan_for(centred, arguments, key, restore, parse_options({"shard_size": SIZE})).plan


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


def steps(plan, kind):
    return [step for step in plan.steps if isinstance(step, kind)]


def task_for(plan, step, store, **static):
    body = plan.bodies[step.body]
    refs = {name: store.put([value]) for name, value in static.items()}
    return Task(plan, step, {step.body: store_body(body, store, None)}, refs, store)


def first_pass(plan, store, token):
    step = steps(plan, Map)[0]
    (operand,) = step.operands
    static = dict.fromkeys(step.broadcasts, W)
    fn = MapShards(
        task_for(plan, step, store, **static),
        Sources((live_spec(token),), {operand: (0, 0)}, False),
        {}, (), "exact",
    )  # fmt: skip
    fn.setup()
    return fn


def run_bundle(fn, elements, *served):
    """The blocks and partials of a bundle."""
    fn.start_bundle()
    blocks = [block for element in elements for block in fn.process(element, *served)]
    partials = []
    for output in fn.finish_bundle():
        assert output.tag == PARTIALS
        partials.append(output.value.value)
    return blocks, partials


def total(partials):
    merged = None
    for _, data in partials:
        live = decode_accumulator(data)
        if merged is not None:
            live.merge(merged)
        merged = live
    return merged.total(0, merged.size, np.dtype("float32"))


# --- ranges


@pytest.mark.parametrize(("count", "width"), [(1, 1), (7, 3), (6, 3), (256, 1), (5, 9)])
def test_ranges_are_all_shards_once(count, width):
    found = list(Ranges(count, width).process(None))
    assert [i for first, last in found for i in range(first, last)] == list(range(count))


def test_shards_of_ranges():
    whole = list(shards.shards(N, SIZE))
    assert whole == [Shard(0, 0, 8), Shard(1, 8, 8), Shard(2, 16, 4)]
    assert list(shards.shards(N, SIZE, 1, 3)) == whole[1:]
    assert list(shards.shards(16, SIZE)) == whole[:2]


# --- passes


def test_any_bundles_give_the_same_blocks_and_sums(plan, store, token):
    fn = first_pass(plan, store, token)
    blocks, partials = run_bundle(fn, [(0, 3)])
    expected = np.tanh(X) * W
    (name,) = fn.task.step.results
    found = np.concatenate([block.values[name] for block in blocks])
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert [(b.start, b.count, b.shard_size) for b in blocks] == [(0, 8, 8), (8, 8, 8), (16, 4, 8)]
    assert len(partials) == 1
    for bundles in ([[(2, 3)], [(0, 2)]], [[(1, 2), (0, 1)], [(2, 3)]], [[(0, 1)], [(1, 3)], []]):
        more = [run_bundle(fn, bundle) for bundle in bundles]
        pieces = [partial for _, partials in more for partial in partials]
        assert total(pieces).tobytes() == total(partials).tobytes()
        assert sum(len(blocks) for blocks, _ in more) == 3


def test_an_empty_bundle_sends_nothing(plan, store, token):
    assert run_bundle(first_pass(plan, store, token), []) == ([], [])


def test_a_bundle_that_failed_leaves_no_partials(plan, store, token):
    fn = first_pass(plan, store, token)
    expected = run_bundle(fn, [(0, 1)])[1]
    fn.start_bundle()
    list(fn.process((1, 3)))
    assert run_bundle(fn, [(0, 1)])[1] == expected


def test_blocks_carry_values_to_the_next_pass(plan, store, token):
    first, second = steps(plan, Map)
    blocks, _ = run_bundle(first_pass(plan, store, token), [(0, 3)])
    (x,) = set(second.operands) - set(first.results)
    mean = np.ones(3, np.float32)
    (broadcast,) = second.broadcasts
    fn = MapShards(
        task_for(plan, second, store),
        Sources((live_spec(token),), {x: (0, 0)}, False),
        {},
        (),
        "exact",
    )
    fn.setup()
    _, partials = run_bundle(fn, blocks, Environment({broadcast: store.put([mean])}))
    y = np.tanh(X) * W
    np.testing.assert_allclose(total(partials), np.max(y * X - 1, axis=0), rtol=1e-5)


def test_server_values_that_are_read_by_shards(plan, store):
    step = steps(plan, Map)[0]
    (operand,) = step.operands
    task = task_for(plan, step, store, **dict.fromkeys(step.broadcasts, W), table=X.T)
    fn = MapShards(task, Sources((), {}, False), {operand: ("table", 1)}, (), "exact")
    fn.setup()
    blocks, _ = run_bundle(fn, [(0, 3)])
    found = np.concatenate([block.values[step.results[0]] for block in blocks])
    np.testing.assert_allclose(found, np.tanh(X) * W, rtol=1e-5)


def test_what_is_pickled_is_small_and_plain(plan, store, token):
    fn = first_pass(plan, store, token)
    del fn.reader, fn.letters
    data = pickle.dumps(fn)
    assert len(data) < 64 << 10
    again = pickle.loads(data)
    again.setup()
    assert run_bundle(again, [(0, 3)])[1] == run_bundle(again, [(0, 3)])[1]


def test_members_and_shards_are_counted_once_a_bundle(plan, store, token, monkeypatch):
    fn = first_pass(plan, store, token)
    found = []
    monkeypatch.setattr(fn.metrics, "add", found.append)
    run_bundle(fn, [(0, 2), (2, 3)])
    (tally,) = found
    assert (tally.members, tally.shards, tally.bytes_read) == (20, 3, X.nbytes)
    assert min(tally.read, tally.compute, tally.merge) > 0


# --- once a process


def test_threads_share_an_executor(plan, store, token, monkeypatch):
    made = []
    init = ShardExecutor.__init__
    monkeypatch.setattr(
        ShardExecutor, "__init__", lambda self, *args: made.append(1) or init(self, *args)
    )
    task = first_pass(plan, store, token).task
    found = []
    threads = [threading.Thread(target=lambda: found.append(tasks.executors(task, task.static)))
               for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(set(map(id, found))) == 1


def test_other_broadcasts_are_another_executor(plan, store, token):
    task = first_pass(plan, store, token).task
    (name,) = task.static
    first = tasks.executors(task, task.static)
    assert tasks.executors(task, {name: store.put([W + 1])}) is not first
    assert tasks.executors(task, task.static) is first


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

    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
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


def test_executors_are_not_kept_for_ever(plan, store, token):
    task = first_pass(plan, store, token).task
    (name,) = task.static
    for i in range(tasks.MAX_EXECUTORS + 3):
        tasks.executors(task, {name: store.put([W + i])})
    assert len(tasks._executors._values) == tasks.MAX_EXECUTORS


def test_a_body_is_loaded_once(plan):
    step = steps(plan, Map)[0]
    body = plan.bodies[step.body]
    assert bodies.load_body(step.body, body) is bodies.load_body(step.body, body)


def test_a_body_for_another_platform_cannot_be_loaded():
    message = r"computes on 'cpu', but the body was exported for tpu; add platforms=\['cpu'\]"
    with pytest.raises(WorkerError, match=message):
        bodies.load_body("key", Body("map_clients_0", {"tpu": b""}))


# --- a shard


def test_padding_repeats_the_last_member_and_is_cut_off(plan):
    step = steps(plan, Map)[0]
    execute = ShardExecutor(plan, step, dict.fromkeys(step.broadcasts, W))
    found = execute(Shard(2, 16, 4), [X[16:]])
    (short,), partial_short = found.results, found.partials
    (full,) = execute(Shard(2, 16, 8), [np.concatenate([X[16:], X[12:16]])]).results
    assert short.shape == (4, 3)
    assert short.tobytes() == full[:4].tobytes()
    np.testing.assert_allclose(partial_short[0], short.sum(0), rtol=1e-5)


def test_operands_of_another_shape_name_the_shard(plan):
    step = steps(plan, Map)[0]
    execute = ShardExecutor(plan, step, dict.fromkeys(step.broadcasts, W))
    with pytest.raises(WorkerError, match=r"step 'map_clients_0' .*shard 1 .*members 8 to 15"):
        execute(Shard(1, 8, 8), [X[8:16, :2]])


# --- the server


@bj.program(clients=N)
def norm(w, x):
    return jnp.linalg.norm(bj.reduce_sum(x) * w)


@pytest.mark.parametrize("as_element", [True, False])
def test_a_server_step_takes_values_from_anywhere(store, as_element):
    arguments, key, restore = _stage.flatten_arguments((W, X))
    plan = plan_for(norm, arguments, key, restore, parse_options(None)).plan
    (step,) = steps(plan, Server)
    (summed,) = (name for name in step.inputs if "arg" not in name)
    (given,) = set(step.inputs) - {summed}
    fn = RunServer(task_for(plan, step, store, **{given: W}))
    environment = Environment({summed: store.put([X.sum(0)])})
    arguments = (environment,) if as_element else (b"", environment)
    (found,) = fn.process(*arguments)
    (value,) = store.get(found.values[step.outputs[0]])
    np.testing.assert_allclose(value, np.linalg.norm(X.sum(0) * W), rtol=1e-5)


def test_blocks_know_their_bytes():
    assert Block(0, 4, 8, {"x": X[:4]}).nbytes == 48
    assert jax.device_count() >= 1
