"""Shards computed side by side by `runner="local"`: the bits, the errors and what is dropped are
those of one thread, and no thread is left behind.
"""

import dataclasses
import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import SourceError, StagingError
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.options import Options
from beamjax.plan.steps import Cost
from beamjax.runtime import ordered_pool
from beamjax.runtime.ordered_pool import DaemonThreads
from beamjax.runtime.shard_executor import ShardExecutor

N = 83
RNG = np.random.default_rng(0)
X = RNG.normal(size=(N, 5)).astype(np.float32) * np.exp(RNG.normal(size=(N, 1)) * 9).astype(
    np.float32
)
THREADED = {"local_threads": 3, "shard_size": 8}
SERIAL = {"local_threads": 1, "shard_size": 8}


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    """The numbers of threads of the pools, which are used however short shards are."""
    made, numbers = [], []

    def pool(threads):
        numbers.append(threads)
        made.append(DaemonThreads(threads))
        return made[-1]

    for name in ("SHARD_OPERATIONS", "PASS_OPERATIONS"):
        monkeypatch.setattr(ordered_pool, name, 0.0)
    monkeypatch.setattr("beamjax.runtime.local.DaemonThreads", pool)
    yield numbers
    # The threads of all of them are free for the work of others.
    assert all(end.done() for each in made for end in each._ends)


def local(fn, *args, **options):
    return bj.run(fn, *args, runner="local", options=options)


@bj.program(clients=N)
def descend(w, x):
    def step(w, _):
        return w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w) * v, x)), None

    return jax.lax.scan(step, w, None, length=3)[0]


@bj.program(clients=None)
def summed(x):
    return bj.reduce_sum(bj.map_fn(jnp.tanh, x))


def stream():
    chunks = lambda: iter(np.array_split(X, 7))
    return bj.from_chunks(chunks, jax.ShapeDtypeStruct((5,), np.float32))


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (descend, lambda: (jnp.ones(5), X)),
        (summed, lambda: (stream(),)),
    ],
    ids=["rounds", "stream"],
)
def test_the_bits_are_those_of_one_thread(fn, args, pools):
    expected = local(fn, *args(), **SERIAL)
    assert not pools
    for threads in (2, 5):
        found = local(fn, *args(), **SERIAL | {"local_threads": threads})
        assert_same_bits(found, expected)
    assert pools
    assert max(pools) <= 5


@pytest.mark.parametrize("on", ["on_error", "on_nonfinite"])
def test_the_members_that_are_dropped_are_those_of_one_thread(on, tmp_path, pools):
    class Torn:
        """Every 31st member can't be read, or is not finite."""

        def __len__(self):
            return N

        def __getitem__(self, i):
            if i % 31 != 7:
                return X[i]
            if on == "on_error":
                raise OSError(f"member {i} is torn")
            return X[i] * np.nan

    @bj.program(clients=N)
    def mean(x):
        y = bj.map_fn(jnp.tanh, x)
        return bj.reduce_mean(y), y

    def found(options):
        letters = tmp_path / str(options["local_threads"])
        source = bj.from_random_access(Torn())
        result = local(mean, source, **options | {on: "drop", "dead_letters": letters})
        return result, letters.read_text()

    expected, lines = found(SERIAL)
    assert [json.loads(line)["member"] for line in lines.splitlines()] == [7, 38, 69]
    result, same_lines = found(THREADED)
    assert_same_bits(result, expected)
    assert same_lines == lines
    assert pools


# --- errors


def test_an_error_names_the_first_shard_that_fails(pools):
    threads = set()

    class Failing:
        def __len__(self):
            return N

        def __getitem__(self, i):
            threads.add(threading.current_thread())
            if i >= 50:
                raise OSError(f"member {i} is torn")
            return X[i]

    with pytest.raises(SourceError, match=r"shard 6 .*members 48 to 55.*member 50.*is torn") as e:
        local(summed, bj.from_random_access(Failing()), **THREADED)
    assert (e.value.failure.shard, e.value.failure.members) == (6, (48, 55))
    # The constructor reads a member. After that one thread of the run reads, and others compute.
    assert len(threads - {threading.current_thread()}) == 1
    assert pools


@pytest.fixture
def before_shard(monkeypatch):
    """Calls a function with the index of each shard before its body is computed."""

    def install(function):
        real = ShardExecutor._called

        def called(self, call, shard, *rest):
            function(shard.index)
            return real(self, call, shard, *rest)

        monkeypatch.setattr(ShardExecutor, "_called", called)

    return install


def test_an_error_of_a_body_names_the_first_shard_that_fails(before_shard, pools):
    def fail(index):
        if index >= 4:
            time.sleep(0.05 if index == 4 else 0)  # Later ones fail first.
            raise RuntimeError(f"no room for {index}")

    before_shard(fail)
    for _ in range(3):
        with pytest.raises(bj.WorkerError, match=r"shard 4 .*no room for 4") as error:
            local(summed, X, **THREADED)
        assert error.value.failure.shard == 4
    assert pools


def test_a_shard_that_takes_too_long_ends_the_run(before_shard, pools):
    stopped = threading.Event()

    def hang(index):
        try:
            # Short waits: a thread is told to end between two lines of Python.
            while index == 3:
                time.sleep(0.01)
        except bj.JobCancelledError:
            stopped.set()
            raise

    before_shard(hang)
    with pytest.raises(bj.WorkerError, match=r"shard 3 .*computing took longer than 0.4 s") as e:
        local(summed, X, **THREADED, shard_timeout=0.4)
    assert e.value.failure.shard == 3
    assert stopped.wait(15)


def test_a_job_that_is_cancelled_ends(before_shard, pools):
    reached = threading.Event()

    def slow(index):
        if index >= 2:
            reached.set()
            time.sleep(0.05)

    before_shard(slow)
    with bj.launch(summed, X, runner="local", options=THREADED) as job:
        assert reached.wait(20)
        job.cancel()
        with pytest.raises(bj.JobCancelledError):
            job.result()
        assert job.progress().done.shards < 11


# --- who computes where


def test_bodies_that_call_back_run_shard_by_shard(pools):
    seen = []

    @bj.program(clients=N)
    def told(x):
        def body(v):
            jax.debug.callback(lambda i: seen.append((int(i), threading.get_ident())), v[0])
            return v

        return bj.reduce_sum(bj.map_fn(body, x))

    x = np.repeat(np.arange(N, dtype=np.float32)[:, None], 5, axis=1)
    local(told, x, **THREADED)
    assert sorted(i for i, _ in seen) == list(range(N))
    shards = [i // 8 for i, _ in seen]
    assert shards == sorted(shards)
    assert not pools


@pytest.mark.parametrize(
    ("members", "shard_size", "most", "expected"),
    [
        (80, 8, 4, 0),  # passing shards of 8e6 operations to threads would take longer
        (96, 16, 4, 0),  # a pass of 9.6e7 is not worth starting threads for
        (112, 16, 4, 4),
        (1 << 20, 16, 1, 1),
        (1 << 20, 16, 64, 8),  # short shards do not keep many threads busy
        (1 << 20, 1024, 64, 20),
    ],
)
@pytest.mark.parametrize("cost", [Cost(1e6), Cost(4e5, extra=6e5), Cost(nbytes=2e5)])
def test_threads_follow_from_the_counted_work(
    monkeypatch, members, shard_size, most, expected, cost
):
    monkeypatch.undo()
    shape = jax.ShapeDtypeStruct((members, 3), "float32")
    maximum = bj.program(clients=members)(bj.reduce_max)
    plan = plan_for(flatten_call(maximum, [shape]), Options(shard_size=shard_size)).plan
    (step,) = plan.steps
    plan = dataclasses.replace(plan, costs={step.name: cost})
    assert ordered_pool.threads_for(plan, step, most) == expected


def test_a_limit_of_memory_takes_fewer_threads(monkeypatch, pools):
    monkeypatch.setattr("beamjax.runtime.ordered_pool.usual_threads", lambda: 4)
    x = np.zeros((2048, 4096), np.float32)
    local(summed, x, shard_size=256, memory="3000MiB")
    local(summed, x, shard_size=256, memory="280MiB")
    assert len(pools) == 1  # The second run has room for one thread.
    with pytest.raises(StagingError, match="use 1 of 4 threads"):
        local(summed, x, shard_size=256, memory="280MiB", local_threads=4)


@pytest.mark.parametrize("rounds", [None, 3])
@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_work_is_counted_where_a_pass_is_computed(monkeypatch, runner, rounds):
    """Beam's workers get a part of the plan, which says how much a shard computes, too."""
    monkeypatch.undo()
    used = []
    for module in ("beamjax.runtime.local", "beamjax.pipelines.worker.map_shards"):
        monkeypatch.setattr(f"{module}.DaemonThreads", lambda n: used.append(n) or DaemonThreads(n))

    @bj.program(clients=256)
    def powers(w, x):
        def once(w):
            return w + bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ w @ w).sum(), x))

        return once(w) if rounds is None else jax.lax.fori_loop(0, rounds, lambda _, w: once(w), w)

    w, x = np.eye(128, dtype=np.float32), np.ones((256, 128, 128), np.float32)
    bj.run(powers, w, x, runner=runner, options={"shard_size": 16, "local_threads": 2})
    assert set(used) == {2}
