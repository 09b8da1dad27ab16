"""Shards computed side by side by `runner="local"`: the bits, the errors and what is dropped are
those of one thread, and no thread is left behind.
"""

import json
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import SourceError, StagingError
from beamjax.runtime import passes, shard_times
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
def always_in_threads(monkeypatch):
    """However short shards are; and the threads are gone at the end."""
    for name in ("LONG", "WORTH_STARTING", "SURELY_LONG"):
        monkeypatch.setattr(shard_times, name, 0.0)
    before = set(threading.enumerate())
    yield
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("beamjax shards")]
    assert not left


@pytest.fixture
def pools(monkeypatch):
    """The numbers of threads of the pools that were made."""
    made = []

    def pool(threads, **options):
        made.append(threads)
        return DaemonThreads(threads, **options)

    monkeypatch.setattr(passes, "DaemonThreads", pool)
    return made


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
    over = threading.Event()
    # Short waits: a thread is told to end between two lines of Python.
    before_shard(lambda index: index == 3 and any(over.wait(0.01) for _ in range(2000)))
    with pytest.raises(bj.WorkerError, match=r"shard 3 .*computing took longer than 0.4 s") as e:
        local(summed, X, **THREADED, shard_timeout=0.4)
    assert e.value.failure.shard == 3
    deadline = time.monotonic() + 15
    names = ("beamjax shards", "beamjax run")
    while any(thread.name.startswith(names) for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    over.set()


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


def done(seconds, cores=1.0, compiling=0.0):
    """A job whose span took so long."""

    def job():
        clock[0] += cores * seconds + compiling
        return passes.Done(None, None, SimpleNamespace(seconds=seconds, compiling=compiling))

    return job


clock = [0.0]


@pytest.mark.parametrize(
    ("seconds", "cores", "threads", "serial", "made"),
    [
        (1e-5, 1, 4, 20, []),  # handing them over would take longer
        (1e-3, 1, 4, 2, [4]),
        (1e-3, 2, 4, 2, [2]),
        (1e-3, 4, 4, 20, []),  # its shards keep all cores busy
        (1e-3, 0.1, 4, 2, [4]),
        (0.05, 1, 8, 2, [8]),  # compiling says nothing of its cores
        (0.05, 1, 1, 20, []),
    ],
)
def test_threads_are_as_many_as_pay(seconds, cores, threads, serial, made, monkeypatch, pools):
    monkeypatch.undo()
    numbers = []
    monkeypatch.setattr(
        passes,
        "DaemonThreads",
        lambda n, as_here: numbers.append(n) or DaemonThreads(n, as_here=as_here),
    )
    monkeypatch.setattr(passes.time, "process_time", lambda: clock[0])
    monkeypatch.setattr(shard_times, "_times", {})
    taken = []
    jobs = (taken.append(i) or done(seconds, cores, 0.5 if i == 0 else 0.0) for i in range(20))
    for number, _ in enumerate(passes.computed(jobs, 20, threads, "body", lambda: None), 1):
        if not numbers and number < 20:
            assert len(taken) == number
            alone = number
        elif number == 20 and not numbers:
            alone = 20
    assert (alone, numbers) == (serial, made)


def test_what_is_worth_a_thread(monkeypatch):
    monkeypatch.undo()
    faults = []
    for seconds, known, left, expected in (
        (1e-3, True, 4, (True, False)),
        (1e-3, True, 3, (False, False)),  # 3 ms of shards are not worth starting threads for
        (1e-3, True, None, (True, False)),
        (2e-4, True, None, (True, False)),
        (1e-4, True, None, (False, False)),
        (2e-3, True, 2, (True, True)),
        (9.0, True, 1, (False, True)),
        (9.0, True, 0, (False, True)),
        (9.0, False, 9, (False, False)),
    ):
        known_time = shard_times._ShardTime(seconds, 1.0, known)
        monkeypatch.setattr(shard_times, "_times", {"body": known_time})
        found = shard_times.pays("body", left, 2), shard_times.pays_in_bundle("body")
        if found != expected:
            faults.append((seconds, known, left, found))
    assert faults == []
    assert not shard_times.pays("other", 9, 2)
    # Shards that keep several cores busy leave less to threads.
    for cores, left, most, expected in (
        (1.5, 9, 2, True),
        (1.5, 7, 2, False),
        (2.0, 999, 2, False),
        (2.1, 999, 2, False),
        (2.0, 3, 16, True),
    ):
        times = {"body": shard_times._ShardTime(1e-3, cores, True)}
        monkeypatch.setattr(shard_times, "_times", times)
        assert shard_times.pays("body", left, most) == expected
    assert not shard_times.pays_in_bundle("other")
    # Of many threads, only bodies that do not hold Python's lock for long keep all busy.
    for seconds, cores, expected in (
        (1e-3, 1.0, (8, 8)),
        (0.02, 1.0, (16, 16)),
        (0.02, 8.0, (2, 2)),
        (0.02, 16.0, (2, 1)),
    ):
        times = {"body": shard_times._ShardTime(seconds, cores, True)}
        monkeypatch.setattr(shard_times, "_times", times)
        found = shard_times.threads("body", 16), shard_times.threads_in_bundle("body", 16)
        assert found == expected


def test_a_shard_that_is_measured_again_takes_the_least_seconds(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(shard_times.time, "process_time", lambda: 2.0)
    monkeypatch.setattr(shard_times, "_times", {})

    def learned(seconds, compiling=0.0):
        span = SimpleNamespace(seconds=seconds, compiling=compiling)
        shard_times.learn("body", span, 1.0)
        found = shard_times._times["body"]
        return found.seconds, found.cores, found.known

    assert learned(0.01) == (0.01, 100.0, False)  # short the first time: it may be a fluke
    assert learned(0.5) == (0.01, 2.0, True)
    assert learned(0.001) == (0.01, 2.0, True)  # what is known stays
    shard_times._times.clear()
    assert learned(0.02) == (0.02, 50.0, True)
    shard_times._times.clear()
    assert not learned(0.02, compiling=0.5)[2]
    monkeypatch.setattr(shard_times, "_times", dict.fromkeys(range(shard_times._MAX_KNOWN)))
    learned(1.0)
    assert list(shard_times._times) == [*range(1, shard_times._MAX_KNOWN), "body"]


def test_a_limit_of_memory_takes_fewer_threads(monkeypatch, pools):
    monkeypatch.setattr("beamjax.runtime.ordered_pool.usual_threads", lambda: 4)
    x = np.zeros((2048, 4096), np.float32)
    local(summed, x, shard_size=256, memory="3000MiB")
    local(summed, x, shard_size=256, memory="280MiB")
    assert len(pools) == 1  # The second run has room for one thread.
    with pytest.raises(StagingError, match="use 1 of 4 threads"):
        local(summed, x, shard_size=256, memory="280MiB", local_threads=4)


def test_a_call_that_compiles_says_nothing_about_later_ones(monkeypatch):
    monkeypatch.undo()  # with the true limits
    body = object()
    for seconds, compiling in ((1e-4, 0.5), (5e-2, 0.0)):
        begun = time.process_time() - seconds
        shard_times.learn(body, SimpleNamespace(seconds=seconds, compiling=compiling), begun)
    assert shard_times.pays(body, 100, 2)
