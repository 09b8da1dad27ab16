"""What threads are at: limits, who is told, and what becomes of work that nobody waits for."""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from beamjax import at_work, compile_time
from beamjax.at_work import Table, bounded
from beamjax.errors import Failure, JobCancelledError, WorkerError
from beamjax.plan import Map, Server
from beamjax.shards import Shard

SERVER = Server("server_0", "key", (), ())
MAP = Map("map_0", "clients", "key", (), (), (), (), functions=("f",))
SHARD = Shard(2, 16, 8)
WHERE = r"^step 'map_0' \(f\), shard 2 of placement 'clients', members 16 to 23: "


def wait_for(event):
    """Waits as a loop of Python does."""
    while not event.is_set():
        time.sleep(0.01)


def test_work_in_time_is_left_alone():
    table = Table()
    with table.at("computing", MAP, SHARD, 60.0):
        assert len(at_work._watched) == 1
    assert at_work._watched == {}
    assert table.late is None
    assert not table.has_file


def test_work_without_a_limit_is_not_watched():
    with Table().at("computing", MAP, SHARD):
        assert at_work._watched == {}


def test_work_that_ends_late_fails_where_it_ends():
    late = WHERE + "computing took longer than 0.001 s"
    with (
        pytest.raises(WorkerError, match=late) as caught,
        Table().at("computing", MAP, SHARD, 1e-3),
    ):
        time.sleep(0.002)
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == ("map_0", 2, (16, 23))


def test_work_that_hangs_is_told_while_it_hangs():
    told, over = [], threading.Event()
    table = Table(on_late=told.append)

    def work():
        with pytest.raises(JobCancelledError), table.at("reading", MAP, SHARD, 0.1):
            wait_for(over)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)  # it is told to end
    assert not thread.is_alive()
    (error,) = told
    assert table.late is error
    assert "reading took longer than 0.1 s" in str(error)
    assert "in wait_for" in error.failure.traceback
    assert error.failure.time == pytest.approx(time.time(), abs=60)
    with pytest.raises(JobCancelledError), table.at("reading", MAP, SHARD, 60.0):
        pytest.fail("nobody waits for it")


def test_a_step_of_the_server_has_no_shard():
    late = r"^step 'server_0': computing took"
    with (
        pytest.raises(WorkerError, match=late) as caught,
        Table().at("computing", SERVER, None, 1e-9),
    ):
        time.sleep(0.001)
    assert caught.value.failure.step == "server_0"
    assert caught.value.failure.shard is None


def test_other_errors_of_the_work_are_its_own():
    with pytest.raises(KeyError), Table().at("computing", MAP, SHARD, 1e-9):
        raise KeyError("x")


def test_work_that_waits_for_the_work_that_hangs_is_not_blamed():
    told, over = [], threading.Event()
    table = Table(on_late=told.append)

    def waiting():  # as in JAX, whose threads another shard may hold
        with pytest.raises(JobCancelledError), table.at("computing", MAP, Shard(0, 0, 8), 0.3):
            compile_time.threading.Event.wait(over, 20)

    def hanging():
        with pytest.raises(JobCancelledError), table.at("computing", MAP, SHARD, 0.31):
            wait_for(over)

    # The frame in which a thread waits decides: that of the first is one of the library's files.
    ours = at_work._OURS
    at_work._OURS = (*ours, threading.__file__)
    try:
        threads = [threading.Thread(target=target) for target in (waiting, hanging)]
        for thread in threads:
            thread.start()
        threads[1].join(20)
        over.set()
        threads[0].join(20)
    finally:
        at_work._OURS = ours
    (error,) = told
    assert error.failure.shard == 2
    assert "other threads of the process were at 'map_0' shard 0" in str(error)
    assert error.failure.traceback.index("shard 0") < error.failure.traceback.index("shard 2")


def test_seconds_of_compiling_do_not_count():
    slow = jax.jit(lambda x: jnp.linalg.eigh(jnp.linalg.inv(x) @ x + jnp.tanh(x))[0] * 3.25)
    x = np.eye(7, dtype=np.float32)
    before = compile_time.compile_seconds()
    with Table().at("computing", MAP, SHARD, 60.0) as _:
        (work,) = at_work._watched.values()
        began = time.monotonic()
        jax.block_until_ready(slow(x))
        spent = time.monotonic() - began
        compiling = compile_time.compile_seconds() - before
        assert compiling > 0.01
        work.limit = spent - compiling / 2
        assert work._clock.since is None
        assert not work.is_late()


def test_the_clock_stands_while_jax_compiles():
    compile_time.compile_clock()
    with Table().at("computing", MAP, SHARD, 0.01):
        (work,) = at_work._watched.values()
        compile_time._listen(compile_time._LOWERED, 0.0)
        time.sleep(0.05)
        assert not work.is_late()
        compile_time._listen(compile_time._COMPILED, 0.05)
        assert not work.is_late()


# --- calls in a thread


def test_a_bounded_call_gives_what_the_function_gives():
    with jax.enable_x64(True):
        found = bounded(lambda: jnp.ones(3).dtype, Table())
    assert found == jnp.float64
    with pytest.raises(KeyError, match="x"):
        bounded(lambda: {}["x"], Table())


def test_a_bounded_call_that_hangs():
    table, ended = Table(), threading.Event()

    def hang():
        try:
            with table.at("computing", MAP, SHARD, 0.1):
                wait_for(threading.Event())
        finally:
            ended.set()

    with pytest.raises(WorkerError, match=WHERE):
        bounded(hang, table)
    assert ended.wait(20)


def test_an_error_that_knows_its_place():
    found = at_work.placed_error(MAP, SHARD, WorkerError("x"))
    assert found.failure == Failure("map_0", 2, (16, 23))
    assert at_work.placed_error(MAP, None, WorkerError("x")).failure == Failure("map_0")
