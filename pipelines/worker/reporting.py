"""What a worker reports to the launching process: spans, errors, and what its threads do.

Spans go to Beam's metrics, which every runner shows, and to the record of the job. Errors go to the
store, since runners lose their types; see `worker_errors`. What threads do is in a file there, by
which `lost_workers` finds out what a process was doing when it died.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import faulthandler
import functools
import inspect
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from apache_beam.metrics import Metrics

from beamjax.errors import BeamjaxError, JobCancelledError
from beamjax.pipelines.values.store import Store
from beamjax.spans import KINDS, Spans
from beamjax.storage import files, records
from beamjax.telemetry.watchdog import Watchdog
from beamjax.telemetry.worker_records import EVERY_SECONDS, Reports, report

# --- spans

NAMESPACE = "beamjax"
COUNTERS = ("members", "shards", "bytes_read")


class WorkerSpans(Spans):
    """Adds up the spans of a DoFn or CombineFn, and reports them."""

    def __init__(self, reports: Reports | None):
        # Metrics are named by the step, as in `step/members`. Unlike `Progress`, they also count
        # work that a runner repeats. Seconds are distributions of the milliseconds between two
        # reports.
        super().__init__(traces=True, ranges=True)
        self.reports = reports
        self._reported = time.monotonic()

    def __reduce__(self) -> tuple[type[WorkerSpans], tuple[Reports | None]]:
        return WorkerSpans, (self.reports,)

    def tick(self) -> None:
        """Reports if the last report is a second old; called after each shard."""
        if time.monotonic() - self._reported >= EVERY_SECONDS:
            self.report()

    def report(self) -> None:
        """Reports what was done since the last report; called at the end of a bundle."""
        self._reported = time.monotonic()
        work = self.take()
        for name, sums in work.sums.items():
            for counter in COUNTERS:
                if counter in sums:
                    Metrics.counter(NAMESPACE, f"{name}/{counter}").inc(int(sums[counter]))
            for kind in KINDS:
                if kind in sums:
                    times = Metrics.distribution(NAMESPACE, f"{name}/{kind}_ms")
                    times.update(round(1000 * sums[kind]))
        if work.sums:
            # Raises JobCancelledError if the job was cancelled.
            report(work, self.reports)


# --- errors

ERROR = "error-"
"""The prefix of the names of the files with records of errors."""


def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a method of a DoFn, generator or not, leave records of its errors in the store."""

    @functools.wraps(method)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from method(self, *args, **kwargs)
        except Exception as error:
            _record_for(self, error)
            raise

    @functools.wraps(method)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            _record_for(self, error)
            raise

    return generating if inspect.isgeneratorfunction(method) else calling


def _record_for(fn: Any, error: Exception) -> None:
    with contextlib.suppress(Exception):  # the runner may discard the DoFn
        fn.spans.report()
    task = getattr(fn, "task", None)
    store = getattr(fn, "store", None) or getattr(task, "store", None)
    if store is not None and not isinstance(error, JobCancelledError):
        record_error(store, error, getattr(task or fn, "step", None))


def record_error(store: Store, error: Exception, step: Any = None) -> None:
    """Writes a record of an error, which the caller then raises."""
    # The step is for errors that do not name theirs.
    record = records.error_record(error, getattr(step, "name", ""))
    with contextlib.suppress(Exception):  # a full disk must not hide the error itself
        store.write(f"{ERROR}{uuid.uuid4().hex}{records.SUFFIX}", records.encode(record))


# --- what threads do

CRASH = "crash-"
"""The prefix of the names of the files with stacks of crashes."""
MAX_WATCHDOGS = 64
"""Runs whose watchdogs a process holds. A pool of workers serves many runs."""

_watchdogs: collections.OrderedDict[str, Watchdog] = collections.OrderedDict()
_lock = threading.Lock()


def watchdog_of(store: Store, here: bool, limit: float | None) -> Watchdog:
    """The watchdog of this process for the run with this store."""
    # A pool of workers serves several runs at a time, and each has its own limit of time.
    with _lock:
        if store.root not in _watchdogs:
            _watchdogs[store.root] = _make_watchdog(store, here, limit)
            if len(_watchdogs) > MAX_WATCHDOGS:
                _watchdogs.popitem(last=False)
        return _watchdogs[store.root]


def watchdog_here(store: Store) -> Watchdog | None:
    """The watchdog of this process for the run with this store, if it has one."""
    return _watchdogs.get(store.root)


def forget_watchdog(store: Store) -> None:
    """Makes `watchdog_of` make a new one, as for another pipeline of a run."""
    with _lock:
        _watchdogs.pop(store.root, None)


def _make_watchdog(store: Store, here: bool, limit: float | None) -> Watchdog:
    # The launching process sees its own watchdog. Any other process also writes a file to the
    # store, and ends itself if its work takes too long.
    if here:
        return Watchdog(limit=limit, on_late=lambda error: record_error(store, error))
    folder = None if files.is_url(store.root) else store.root

    def end_process(error: BeamjaxError) -> None:
        record_error(store, error)
        # A thread that hangs in native code can't be stopped. The runner notices the dead worker,
        # and some runners retry.
        os._exit(1)

    watchdog = Watchdog(limit=limit, folder=folder, on_late=end_process)
    if watchdog.has_file:
        _trace_crashes(store.root)
    return watchdog


@atexit.register
def _leave() -> None:
    """Records a normal end, so that this process does not count as lost."""
    for watchdog in list(_watchdogs.values()):
        watchdog.leave()


_trace: Any = None  # the open file of `faulthandler`


def _trace_crashes(folder: str) -> None:
    """Makes Python write its stack to the folder of the latest run if native code crashes."""
    global _trace
    if faulthandler.is_enabled() and _trace is None:
        return  # the user has enabled it, for a file of their own
    with contextlib.suppress(OSError):
        path = os.path.join(folder, f"{CRASH}{os.getpid()}")
        former, _trace = _trace, open(path, "w")  # noqa: SIM115
        faulthandler.enable(_trace)
        if former is not None:
            former.close()
