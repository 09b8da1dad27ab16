"""Jobs side by side: results in order, bounded, with the errors of the first; no thread is left."""

import contextvars
import functools
import threading
import time

import jax
import pytest

from beamjax.errors import JobCancelledError
from beamjax.runtime import ordered_pool
from beamjax.runtime.ordered_pool import DaemonThreads, OrderedResults, most_jobs, usual_threads


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = set(threading.enumerate())
    yield
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]


def results(jobs, threads, *, most=None, check=lambda: None):
    workers = DaemonThreads(threads, as_here=True)
    assert all(thread.daemon for thread in workers._threads)  # None keeps the process from ending.
    ordered = OrderedResults(most_jobs(threads) if most is None else most, check)
    try:
        for job in jobs:
            yield from ordered.add(workers.submit(job))
        yield from ordered.rest()
    finally:
        ordered.cancel()
        workers.close()


def after(seconds, value):
    time.sleep(seconds)
    return value


def failing(error):
    raise error


def test_jobs_are_done_side_by_side_and_no_more_are_taken_than_there_may_be():
    meeting = threading.Barrier(3, timeout=20)
    assert sorted(results([meeting.wait] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    for threads, most in ((1, 1), (2, 4), (3, 6)):
        taken, given, worst = [], 0, 0
        for i in results(
            (taken.append(i) or functools.partial(after, 0.001 * (i % 3), i) for i in range(20)),
            threads,
        ):
            assert i == given
            worst, given = max(worst, len(taken) - given), given + 1
        assert most_jobs(threads) == worst == most
    assert 2 <= usual_threads() <= ordered_pool.MAX_THREADS


def test_jobs_that_have_not_begun_are_forgotten():
    begun = []
    job = lambda i: [begun.append(i), time.sleep(0.02)]
    found = results((functools.partial(job, i) for i in range(20)), 1, most=5)
    next(found)
    found.close()
    assert len(begun) <= 3

    def late():
        raise TimeoutError("of the job itself")

    with pytest.raises(TimeoutError, match="of the job itself"):
        list(results([late], 1))

    def jobs():
        yield lambda: 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(results(jobs(), 2))


def test_waiting_ends_when_it_is_in_vain(monkeypatch):
    monkeypatch.setattr(ordered_pool, "LOOK", 0.01)
    over = threading.Event()

    def check():
        if looks.append(None) or len(looks) > 3:
            over.set()
            raise JobCancelledError("over")

    looks = []
    with pytest.raises(JobCancelledError):
        list(results([lambda: over.wait(20)], 1, check=check))
    assert len(looks) == 4


def test_threads_have_the_settings_and_variables_of_the_thread_that_makes_them():
    variable = contextvars.ContextVar("variable", default=0)
    device = jax.devices()[-1]
    look = lambda: (
        variable.get(), jax.config.jax_enable_x64, jax.config.jax_default_device,
        jax.config.jax_numpy_rank_promotion,
    )  # fmt: skip
    token = variable.set(3)
    with jax.enable_x64(True), jax.default_device(device), jax.numpy_rank_promotion("warn"):
        (found,) = results([look], 1)
    variable.reset(token)
    assert found == (3, True, device, "warn")
