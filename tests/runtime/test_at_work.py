"""Work with a limit of seconds: late work fails with its place, other work is left alone."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beamjax.bodies import compile_time
from beamjax.bodies.counts import counts
from beamjax.errors import Failure, JobCancelledError, WorkerError
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Server
from beamjax.telemetry import watchdog as at_work
from beamjax.telemetry.watchdog import WorkTable, bounded

SERVER = Server("server_0", "key", (), ())
MAP = Map("map_0", "clients", "key", (), (), (), (), functions=("f",))
SHARD = Shard(2, 16, 8)
WHERE = r"^step 'map_0' \(f\), shard 2 of placement 'clients', members 16 to 23: "


def wait_for(event):
    """Waits as a loop of Python does."""
    while not event.is_set():
        time.sleep(0.01)


def started(target):
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_work_in_time_is_left_alone():
    table = WorkTable()
    with table.at("computing", MAP, SHARD, 60.0):
        assert len(at_work._watched) == 1
    with table.at("computing", MAP, SHARD):
        assert at_work._watched == {}
    assert table.late is None
    assert not table.has_file
    with pytest.raises(KeyError), table.at("computing", MAP, SHARD, 1e-9):
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
        WorkTable().at("computing", step, shard, 1e-3),
    ):
        time.sleep(0.002)
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == (
        failure.step, failure.shard, failure.members,
    )  # fmt: skip
    assert at_work.placed_error(step, shard, WorkerError("x")).failure == failure


def test_work_that_hangs_is_reported_while_it_hangs():
    errors = []
    table = WorkTable(on_late=errors.append)

    def work():
        with pytest.raises(JobCancelledError), table.at("reading", MAP, SHARD, 0.1):
            wait_for(threading.Event())

    thread = started(work)
    thread.join(20)  # It is cancelled.
    assert not thread.is_alive()
    (error,) = errors
    assert table.late is error
    assert "reading took longer than 0.1 s" in str(error)
    assert "in wait_for" in error.failure.traceback
    assert error.failure.time == pytest.approx(time.time(), abs=60)
    with pytest.raises(JobCancelledError), table.at("reading", MAP, SHARD, 60.0):
        pytest.fail("this table is late")


def test_work_that_waits_for_the_work_that_hangs_is_not_blamed(monkeypatch):
    errors, over = [], threading.Event()
    table = WorkTable(on_late=errors.append)

    def waiting():  # As in JAX, where another shard may hold the threads.
        with pytest.raises(JobCancelledError), table.at("computing", MAP, Shard(0, 0, 8), 0.3):
            threading.Event.wait(over, 20)

    def hanging():
        with pytest.raises(JobCancelledError), table.at("computing", MAP, SHARD, 0.31):
            wait_for(over)

    # The frame in which a thread waits decides: that of the first is in a file of the library.
    monkeypatch.setattr(at_work, "_OURS", (*at_work._OURS, threading.__file__))
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
    before = counts().compile
    with WorkTable().at("computing", MAP, SHARD, 60.0):
        (work,) = at_work._watched.values()
        began = time.monotonic()
        jax.block_until_ready(slow(x))
        spent = time.monotonic() - began
        compiling = counts().compile - before
        assert compiling > 0.01
        work.limit = spent - compiling / 2
        assert work._counts.compiles_since is None
        assert not work.is_late()
    with WorkTable().at("computing", MAP, SHARD, 0.01):  # Nor while JAX still compiles.
        (work,) = at_work._watched.values()
        compile_time._listen(compile_time._LOWERED, 0.0)
        time.sleep(0.05)
        assert not work.is_late()
        compile_time._listen(compile_time._COMPILED, 0.05)
        assert not work.is_late()


def test_calls_in_a_thread():
    with jax.enable_x64(True):
        assert bounded(lambda: jnp.ones(3).dtype, WorkTable()) == jnp.float64
    with pytest.raises(KeyError, match="x"):
        bounded(lambda: {}["x"], WorkTable())
    table, ended = WorkTable(), threading.Event()

    def hang():
        try:
            with table.at("computing", MAP, SHARD, 0.1):
                wait_for(threading.Event())
        finally:
            ended.set()

    with pytest.raises(WorkerError, match=WHERE):
        bounded(hang, table)
    assert ended.wait(20)
