"""The Beam job of resident workers, which lasts as long as a run or a session."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam

from beamjax.bodies.jax_settings import with_settings_of_here
from beamjax.errors import BeamjaxError, JobCancelledError, SourceError, WorkerError
from beamjax.pipelines.launch import (
    await_job_server,
    new_pipeline,
    run_pipeline,
)
from beamjax.pipelines.resident.mailbox import close_mailbox, open_mailbox
from beamjax.pipelines.resident.pool import Pool
from beamjax.pipelines.resident.task_messages import Program, Result
from beamjax.pipelines.resident.worker import ServeTasks
from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.values.run_stores import is_store
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import lost_workers, orphans
from beamjax.storage import files

PREFIX = "rounds-"
"""The beginning of the names of folders with messages."""

ELEMENTS_PER_WORKER = 8
"""Elements of the job per worker. Runners assign elements to workers by hash, so with one for each,
many workers would get none. A worker serves tasks while it processes its first element; further
elements wait until the job ends."""

MAX_STARTS = 4
"""Largest number of starts of the job without a finished pass. After these, the run fails with the
error of the job."""

ALONE_SECONDS = 30.0
"""Seconds without any worker, after all have died, until the job is started again. They double with
each start; those of the first one depend on the runner."""

SECONDS_TO_END = 15.0
"""Seconds in which the job ends after `stop`. Otherwise it is cancelled."""

SECONDS_AFTER_ERROR = 0.3
"""The same after an error, when nothing needs the tasks that workers still compute."""

_log = logging.getLogger("beamjax")


@dataclass
class _Attempt:
    """One start of the job."""

    abort: BeamjaxError | None = None  # if set, the job is ended with this error
    failure: BaseException | None = None  # the error with which it ended
    had_workers: bool = False  # whether one of its workers was ever seen alive
    # When its last worker was seen dead; None if it has workers.
    alone_since: float | None = None
    # Runs the job and waits for its end.
    thread: threading.Thread = field(init=False)


class ResidentJob:
    """A Beam job with resident workers, from the first pass until `close`."""

    def __init__(self, connection: Connection, store: Store):
        # Other pipelines run at the same time, and an in-memory runner has state.
        runner = connection.runner
        if connection.spec.in_this_process:
            runner = copy.copy(runner)
        self.connection = connection
        # In the store of the run, which the launcher and all workers must reach.
        self.folder = files.join(store.root, f"{PREFIX}{secrets.token_hex(8)}")
        self._store = store
        self._runner = runner
        self._secret = secrets.token_bytes(32)
        self._pool: Pool | None = None
        self._starts = 0  # since the last finished pass
        self._hopeless: BeamjaxError | None = None  # why no start can succeed
        self._is_warned = False  # of workers that can't join

    def run(self, program: Program, *arguments: Any) -> list[Result]:
        """Runs a program on the workers; see `Pool.run`."""
        try:
            pool = self._pool or self.start()
            outputs = pool.run(program, *arguments)
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot exchange messages with the workers ({error}); expected a "
                "folder that this process and all workers can write and read (option work_folder)"
            ) from error
        self._starts = 1  # only starts since the last finished pass count
        return outputs

    def start(self) -> Pool:
        """Starts the job, and returns its workers."""
        files.make_folder(self.folder)
        self._mailbox = open_mailbox(self.folder, self._secret, self.connection.shared)
        self._pool = Pool(self._mailbox, self.check)
        self._start()
        return self._pool

    def check(self, died: bool) -> None:
        """Starts the job again if it has ended, or if its runner leaves it without workers."""
        assert self._pool is not None
        if self._hopeless is not None:
            raise self._hopeless
        attempt = self._attempt
        if died and self._is_abandoned(attempt):
            attempt.failure = attempt.abort = WorkerError("all its workers died")
        elif attempt.thread.is_alive():
            if not died:
                attempt.had_workers, attempt.alone_since = True, None
            return
        if attempt.failure is None and not self._pool.has_had_workers:
            raise WorkerError(
                f"work_folder: the workers do not see {self.folder}; expected a folder that this "
                f"process on {socket.gethostname()} and the pools on all hosts can write and read"
            )
        if self._starts >= MAX_STARTS:
            raise WorkerError(
                f"{type(self._runner).__name__}: the job of the resident workers ended "
                f"{self._starts} times before its work was done: {attempt.failure or 'no error'}"
            ) from attempt.failure
        reason = attempt.failure or "it had ended"
        _log.warning("starting the job of the resident workers again: %s", reason)
        self._mailbox.open()
        self._start()

    def _is_abandoned(self, attempt: _Attempt) -> bool:
        """Whether the runner will not start workers any more, now that all have died."""
        now = time.monotonic()
        if attempt.alone_since is None:
            attempt.alone_since = now
        spec, again = self.connection.spec, self._starts - 1
        if attempt.had_workers and not spec.replaces_workers:
            return True
        limit = ALONE_SECONDS * 2**again if again else spec.seconds_alone
        return now - attempt.alone_since > limit

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Ends the workers and the job; `seconds` are theirs to finish their tasks."""
        if self._pool is None:
            return
        attempt = self._attempt
        try:
            self._mailbox.stop()
        except Exception as error:  # Workers miss the launcher later, so the job is cancelled.
            attempt.abort = JobCancelledError(f"its workers can't be ended: {error}")
        attempt.thread.join(seconds)
        if attempt.thread.is_alive():
            # The job thread looks for `abort` several times a second, and then cancels the job.
            attempt.abort = JobCancelledError("the job of the resident workers did not end")
            attempt.thread.join(SECONDS_TO_END)
        close_mailbox(self.folder)
        with contextlib.suppress(Exception):
            remove_folder(self.folder)

    def _start(self) -> None:
        self._starts += 1
        self._attempt = attempt = _Attempt()
        work = functools.partial(with_settings_of_here(self._run), attempt)
        attempt.thread = threading.Thread(target=work, name="beamjax rounds", daemon=True)
        attempt.thread.start()

    def _await_job_server(self, pipeline: beam.Pipeline) -> None:
        """As `await_job_server`; starting the job again would not help."""
        try:
            await_job_server(pipeline.options)
        except WorkerError as error:
            self._hopeless = error
            raise

    def _reason(self, pipeline: beam.Pipeline) -> Callable[[], BeamjaxError | None]:
        """A look for the reason why no worker joins."""
        progress = self.connection.spec.job(pipeline.options).look(attempts=2)

        def look() -> BeamjaxError | None:
            if self._pool is None or self._is_warned or (reason := progress()) is None:
                return None
            if not self._pool.has_had_workers:
                self._hopeless = reason
                return reason
            self._is_warned = True
            _log.warning("%s; the other workers compute its share", reason)
            return None

        return look

    def _run(self, attempt: _Attempt) -> None:
        """Runs the job to its end."""
        connection = self.connection
        try:
            with new_pipeline(connection, self._runner) as pipeline:
                self._await_job_server(pipeline)
                add_workers(pipeline, connection, ServeTasks(self.folder, self._secret))
                end = lost_workers.end_pipeline if connection.shared else lost_workers.end_workers
                looks = [lambda: attempt.abort, self._reason(pipeline)]
                run_pipeline(pipeline, looks, functools.partial(end, self._store))
        except BaseException as error:
            attempt.failure = attempt.failure or error


def add_workers(pipeline: beam.Pipeline, connection: Connection, fn: ServeTasks) -> None:
    """Adds resident workers to a pipeline."""
    workers = range(ELEMENTS_PER_WORKER * (connection.workers or 1))
    (
        pipeline
        | "Workers" >> beam.Create(list(workers), reshuffle=False)
        | "Deal" >> beam.Reshuffle()
        | "ServeTasks" >> beam.ParDo(fn)
    )


def remove_folder(folder: str) -> None:
    """Removes a folder of messages."""
    # `stop` goes last, so that a worker that starts late still sees it. Workers may still be
    # writing their last file, so this tries again for a second.
    names = files.names(folder)
    files.remove_files(folder, [name for name in names if name != "stop"])
    deadline = time.monotonic() + 1.0
    while files.names(folder) and time.monotonic() < deadline:
        files.remove_files(folder, files.names(folder))
        files.remove(folder, "")


def remove_orphans(parent: str) -> None:
    """Removes the stores of runs in a folder whose launchers are dead."""
    # Their workers have seen it, or it is certain as the launcher was on this machine. A store that
    # can't be removed is no reason to fail.
    with contextlib.suppress(Exception):
        for store in files.folders(parent):
            folder = files.join(parent, store)
            if is_store(store) and any(
                orphans.is_orphaned(files.join(folder, name))
                for name in files.folders(folder)
                if name.startswith((PREFIX, orphans.PREFIX))
            ):
                files.remove_tree(folder)


@contextlib.contextmanager
def resident_job(connection: Connection, store: Store) -> Iterator[ResidentJob]:
    """A context with a job of resident workers."""
    job = ResidentJob(connection, store)
    try:
        yield job
    except BaseException:
        job.close(SECONDS_AFTER_ERROR)
        raise
    job.close()
