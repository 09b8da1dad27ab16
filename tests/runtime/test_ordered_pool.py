"""Jobs side by side: results in order, bounded, with the errors of the first; no thread is left."""

import contextvars
import functools
import gc
import threading
import time

import jax
import pytest

from beamjax.bodies import jax_settings
from beamjax.errors import JobCancelledError
from beamjax.runtime import ordered_pool
from beamjax.runtime.ordered_pool import (
    AHEAD,
    DaemonThreads,
    OrderedJobs,
    device_threads,
    usual_threads,
)


def results(jobs, *threads, check=lambda: None):
    """The results of jobs in a pool of each number of threads."""
    pools = [DaemonThreads(number) for number in threads]
    ordered = OrderedJobs(pools, check)
    try:
        for job in jobs:
            yield from ordered.add(job)
        yield from ordered.rest()
    finally:
        ordered.cancel()
        for pool in pools:
            pool.close()
        assert all(end.done() for pool in pools for end in pool._ends)


def after(seconds, value, index):
    time.sleep(seconds)
    return value, index


def test_jobs_are_done_side_by_side_and_no_more_are_taken_than_there_may_be():
    meeting = threading.Barrier(3, timeout=20)
    assert sorted(results([lambda _: meeting.wait()] * 6, 3)) == [0, 0, 1, 1, 2, 2]
    assert sorted(results([lambda _: meeting.wait()] * 3, 1, 1, 1)) == [0, 1, 2]
    for threads in ((), (1,), (2,), (3,), (1, 1), (1,) * 5):
        taken, given, worst = [], 0, 0
        jobs = (
            taken.append(i) or functools.partial(after, 0.001 * (i * 7 % 3), i) for i in range(20)
        )
        for found in results(jobs, *threads):
            assert found == (given, given % max(len(threads), 1))  # pools take turns
            worst, given = max(worst, len(taken) - given), given + 1
        assert given == 20
        assert worst == ((1 + AHEAD) * sum(threads) or 1)
    assert 2 <= usual_threads() <= ordered_pool.MAX_THREADS


def test_without_a_pool_the_thread_that_adds_a_job_runs_it():
    here = threading.get_ident()
    look = [lambda _: threading.get_ident()]
    assert list(results(look)) == [here]
    assert list(results(look, 1)) != [here]


def test_threads_serve_one_pool_after_the_other():
    list(results([functools.partial(after, 0.01, i) for i in range(8)], 3))
    before = threading.active_count()
    for _ in range(5):
        list(results([functools.partial(after, 0, i) for i in range(8)], 3))
    assert threading.active_count() <= before
    # Also if nobody closes the pool, as where a bundle failed.
    pool, idle = DaemonThreads(2), len(jax_settings._idle)
    ends = pool._ends
    del pool
    gc.collect()
    for end in ends:
        end.result(20)
    deadline = time.monotonic() + 20
    while len(jax_settings._idle) < idle + 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_jobs_that_have_not_begun_are_forgotten():
    begun = []
    job = lambda i, _: [begun.append(i), time.sleep(0.02)]
    found = results((functools.partial(job, i) for i in range(20)), 2)
    next(found)
    found.close()
    assert len(begun) <= 4

    def late(_):
        raise TimeoutError("of the job itself")

    with pytest.raises(TimeoutError, match="of the job itself"):
        list(results([late], 1))

    def jobs():
        yield lambda _: 1
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
        list(results([lambda _: over.wait(20)], 1, check=check))
    assert len(looks) == 4


def test_threads_have_the_settings_and_variables_of_the_thread_that_makes_them():
    variable = contextvars.ContextVar("variable", default=0)
    device = jax.devices()[-1]
    look = lambda _: (
        variable.get(), jax.config.jax_enable_x64, jax.config.jax_default_device,
        jax.config.jax_numpy_rank_promotion,
    )  # fmt: skip
    token = variable.set(3)
    with jax.enable_x64(True), jax.default_device(device), jax.numpy_rank_promotion("warn"):
        (found,) = results([look], 1)
        ordered = OrderedJobs([device_threads("settings")])
        (at_device,) = [*ordered.add(look), *ordered.rest()]
    variable.reset(token)
    assert found == (3, True, device, "warn")
    assert at_device[0] == 0  # all bundles share this thread


# --- accelerators

TWO = ("first", "second")


def test_a_device_has_one_job_at_a_time_though_bundles_share_it():
    busy, most = {0: 0, 1: 0}, []

    def job(index):
        busy[index] += 1
        most.append(busy[index])
        time.sleep(0.002)
        busy[index] -= 1

    def bundle():
        ordered = OrderedJobs(list(map(device_threads, TWO)))
        for _ in range(6):
            list(ordered.add(job))
        list(ordered.rest())

    threads = [threading.Thread(target=bundle) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 18


def test_what_is_cancelled_does_not_start():
    gate, started = threading.Event(), []
    first, other = (OrderedJobs([device_threads("a")]) for _ in range(2))
    assert list(first.add(lambda index: gate.wait(60))) == []
    assert list(other.add(started.append)) == []
    other.cancel()
    gate.set()
    assert list(first.rest()) == [True]
    assert list(other.rest()) == []
    assert started == []
    # Nor does an error keep the device from further jobs.
    assert list(first.add(lambda index: 1 / 0)) == []
    with pytest.raises(ZeroDivisionError):
        list(first.rest())
    assert [*first.add(lambda index: "after"), *first.rest()] == ["after"]
