"""Work with a limit of seconds: late work fails with its place, other work is left alone."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beamjax import spans as event
from beamjax.errors import Failure, JobCancelledError, WorkerError
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Server
from beamjax.spans import Spans, timed
from beamjax.telemetry import watchdog
from beamjax.telemetry.watchdog import Watchdog, bounded

SERVER = Server("server_0", "key", (), ())
MAP = Map("map_0", "clients", "key", (), (), (), (), functions=("f",))
SHARD = Shard(2, 16, 8)
WHERE = r"^step 'map_0' \(f\), shard 2 of placement 'clients', members 16 to 23: "


def watched(limit, on_late=None):
    """The spans of a process in which a span may take so many seconds."""
    return Spans(watch=Watchdog([SERVER, MAP], limit, on_late=on_late))


def wait_for(event):
    """Waits as a loop of Python does."""
    while not event.is_set():
        time.sleep(0.01)


def started(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_work_in_time_is_left_alone():
    spans = watched(60.0)
    with timed(spans, "map_0", "compute", SHARD):
        assert len(watchdog._watched) == 1
    with timed(spans, "map_0", "transfer"), timed(watched(None), "map_0", "compute", SHARD):
        assert watchdog._watched == {}
    assert spans.watch.late is None
    assert not spans.watch.has_file
    with pytest.raises(KeyError), timed(watched(1e-9), "map_0", "compute", SHARD):
        raise KeyError("x")  # Errors of the work are its own.


@pytest.mark.parametrize(
    ("step", "shard", "message", "failure"),
    [
        (MAP, SHARD, WHERE + "computing took longer than 0.001 s", Failure("map_0", 2, (16, 23))),
        (SERVER, None, r"^step 'server_0': computing took", Failure("server_0")),
    ],
)
def test_work_that_ends_late_fails_where_it_ends(step, shard, message, failure):
    with (
        pytest.raises(WorkerError, match=message) as caught,
        timed(watched(1e-3), step.name, "compute", shard),
    ):
        time.sleep(0.002)
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == (
        failure.step, failure.shard, failure.members,
    )  # fmt: skip
    assert watchdog.placed_error(step, step.name, shard, WorkerError("x")).failure == failure


def test_work_that_hangs_is_reported_while_it_hangs():
    errors = []
    spans = watched(0.1, errors.append)

    def work():
        with pytest.raises(JobCancelledError), timed(spans, "map_0", "read", SHARD):
            wait_for(threading.Event())

    thread = started(work)
    thread.join(20)  # It is cancelled.
    assert not thread.is_alive()
    (error,) = errors
    assert spans.watch.late is error
    assert "reading took longer than 0.1 s" in str(error)
    assert "in wait_for" in error.failure.traceback
    assert error.failure.time == pytest.approx(time.time(), abs=60)
    with pytest.raises(JobCancelledError), timed(spans, "map_0", "read", SHARD):
        pytest.fail("this run has ended")


def test_work_that_waits_for_the_work_that_hangs_is_not_blamed(monkeypatch):
    errors, over = [], threading.Event()
    spans = watched(0.3, errors.append)

    def waiting():  # As in JAX, where another shard may hold the threads.
        with pytest.raises(JobCancelledError), timed(spans, "map_0", "compute", Shard(0, 0, 8)):
            threading.Event.wait(over, 20)

    def hanging():
        with pytest.raises(JobCancelledError), timed(spans, "map_0", "compute", SHARD):
            wait_for(over)

    # The frame in which a thread waits decides: that of the first is in a file of the library.
    monkeypatch.setattr(watchdog, "_OURS", (*watchdog._OURS, threading.__file__))
    threads = [started(waiting), started(hanging)]
    threads[1].join(20)
    over.set()
    threads[0].join(20)
    (error,) = errors
    assert error.failure.shard == 2
    assert "other threads of the process were at 'map_0' shard 0" in str(error)
    assert error.failure.traceback.index("shard 0") < error.failure.traceback.index("shard 2")


def test_seconds_of_compiling_do_not_count():
    slow = jax.jit(lambda x: jnp.linalg.eigh(jnp.linalg.inv(x) @ x + jnp.tanh(x))[0] * 3.25)
    x = np.eye(7, dtype=np.float32)
    spans = watched(60.0)
    with timed(spans, "map_0", "compute", SHARD) as span:
        began = time.perf_counter()
        jax.block_until_ready(slow(x))
        spent, compiling = time.perf_counter() - began, span.inner["compile"]
        assert compiling > 0.01
        spans.watch.limit = spent - compiling / 2
        assert span.compiles_since is None
        assert not spans.watch.is_late(span)
    spans.watch.limit = 0.01
    with timed(spans, "map_0", "compute", SHARD) as span:  # Nor while JAX still compiles.
        event._listen(event._LOWERED, 0.0)
        time.sleep(0.05)
        assert not spans.watch.is_late(span)
        event._listen(event._COMPILED, 0.05)
        assert not spans.watch.is_late(span)


def test_calls_in_a_thread():
    with jax.enable_x64(True):
        assert bounded(lambda: jnp.ones(3).dtype, Watchdog()) == jnp.float64
    with pytest.raises(KeyError, match="x"):
        bounded(lambda: {}["x"], Watchdog())
    spans, ended = watched(0.1), threading.Event()

    def hang():
        try:
            with timed(spans, "map_0", "compute", SHARD):
                wait_for(threading.Event())
        finally:
            ended.set()

    with pytest.raises(WorkerError, match=WHERE):
        bounded(hang, spans.watch)
    assert ended.wait(20)
