"""The Beam job whose workers stay: it starts with a session or a run, and ends with it."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam

from beamjax._beam_compat import FnApiRunner
from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import BeamjaxError, JobCancelledError, WorkerError
from beamjax.pipelines import waiting
from beamjax.pipelines.launch import KEEP_WORKERS, new_pipeline
from beamjax.pipelines.resident.mailbox import close_mailbox, open_mailbox
from beamjax.pipelines.resident.messages import Output, Program
from beamjax.pipelines.resident.pool import Pool
from beamjax.pipelines.resident.worker import ServeTasks
from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.runners.loopback import loopback_only
from beamjax.plan.merging import workers_of
from beamjax.storage import files

ELEMENTS_PER_WORKER = 8
"""Elements of the job for each worker. A runner deals them by hash; with several for each worker
no worker is without one. An element that waits behind another one does so until the job ends."""

MAX_STARTS = 4
"""Times that the job is started in a row without a task done, before its error counts."""

ALONE_SECONDS = 30.0
"""Seconds without a worker, after all have died, until the job is started again; twice as many at
each further start. Flink takes up to 25 s to notice a death and to start a worker. It can fail to:
where a pool is away for a moment, Beam leaks a reference to the environment (in
`ReferenceCountingExecutableStageContextFactory`), and the task manager then uses dead workers for
the rest of the job."""

SECONDS_TO_END = 15.0
"""Seconds for the job to end by itself when it is asked to; then it is cancelled."""

_log = logging.getLogger("beamjax")


@dataclass
class _Attempt:
    """One start of the job.

    Attributes:
      abort: ends it, if set.
      failure: why it ended.
      had_workers: whether it has had a worker that lived.
      alone_since: the time since when it has none, if all have died.
      thread: waits for it.
    """

    abort: BeamjaxError | None = None
    failure: BaseException | None = None
    had_workers: bool = False
    alone_since: float | None = None
    thread: threading.Thread = field(init=False)


class ResidentJob:
    """A Beam job with workers that stay, from the first pass until `close`.

    Args:
      connection: to the runner.
      parent: folder or URL for the messages, which the launcher and all workers reach.
    """

    def __init__(self, connection: Connection, parent: str):
        # Other pipelines run beside this one, and a runner in this process has a state.
        runner = connection.runner
        if isinstance(runner, FnApiRunner):
            runner = copy.copy(runner)
        self.connection = connection
        self.folder = files.join(parent, f"rounds-{secrets.token_hex(8)}")
        self._runner = runner
        self._secret = secrets.token_bytes(32)
        self._pool: Pool | None = None
        self._starts = 0

    def run(self, program: Program, *arguments: Any) -> list[Output]:
        """Runs a program on the workers; see `Pool.run`."""
        pool = self._pool or self.start()
        outputs = pool.run(program, *arguments)
        self._starts = 1
        return outputs

    def start(self) -> Pool:
        """Starts the job, and returns its workers."""
        files.make_folder(self.folder)
        self._mailbox = open_mailbox(self.folder, self._secret, self.connection.shared)
        self._pool = Pool(self._mailbox, self.check)
        self._start()
        return self._pool

    def check(self, died: bool) -> None:
        """Starts the job again if it has ended, or if its runner starts no other workers.

        Args:
          died: whether all workers have died and none has joined since.

        Raises:
          WorkerError: it has ended too often.
        """
        attempt = self._attempt
        if died and self._is_abandoned(attempt):
            attempt.failure = attempt.abort = WorkerError("all its workers died")
        elif attempt.thread.is_alive():
            if not died:
                attempt.had_workers, attempt.alone_since = True, None
            return
        if self._starts >= MAX_STARTS:
            raise WorkerError(
                f"{type(self._runner).__name__}: the job of the resident workers ended "
                f"{self._starts} times before its work was done: {attempt.failure or 'no error'}"
            ) from attempt.failure
        reason = attempt.failure or "it had ended"
        _log.warning("beamjax: starting the job of the resident workers again: %s", reason)
        self._start()

    def _is_abandoned(self, attempt: _Attempt) -> bool:
        """Whether to expect no other workers of the runner, now that all have died."""
        now = time.monotonic()
        if attempt.alone_since is None:
            attempt.alone_since = now
        if attempt.had_workers and isinstance(self._runner, KEEP_WORKERS):
            return True
        return now - attempt.alone_since > ALONE_SECONDS * 2 ** (self._starts - 1)

    def close(self) -> None:
        """Ends the workers and the job."""
        if self._pool is None:
            return
        self._mailbox.stop()
        attempt = self._attempt
        attempt.thread.join(SECONDS_TO_END)
        if attempt.thread.is_alive():
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

    def _run(self, attempt: _Attempt) -> None:
        """Runs the job to its end."""
        connection = self.connection
        try:
            with new_pipeline(connection, self._runner) as pipeline:
                add_workers(pipeline, connection, ServeTasks(self.folder, self._secret))
                with loopback_only():
                    if isinstance(self._runner, FnApiRunner) and not connection.shared:
                        waiting.run_apart(pipeline, lambda: attempt.abort, None)
                    else:
                        waiting.run(pipeline, connection.flags, look=lambda: attempt.abort)
        except BaseException as error:
            attempt.failure = attempt.failure or error


def add_workers(pipeline: beam.Pipeline, connection: Connection, fn: ServeTasks) -> None:
    """Adds resident workers to a pipeline."""
    workers = range(ELEMENTS_PER_WORKER * (workers_of(connection.flags) or 1))
    (
        pipeline
        | "Workers" >> beam.Create(list(workers), reshuffle=False)
        | "Deal" >> beam.Reshuffle()
        | "ServeTasks" >> beam.ParDo(fn)
    )


def remove_folder(folder: str) -> None:
    """Removes a folder of messages."""
    names = files.names(folder)
    files.remove_files(folder, [name for name in names if name != "stop"])
    deadline = time.monotonic() + 1.0
    while files.names(folder) and time.monotonic() < deadline:
        files.remove_files(folder, files.names(folder))
        files.remove(folder, "")


@contextlib.contextmanager
def resident_job(connection: Connection, parent: str) -> Iterator[ResidentJob]:
    """A job with resident workers, as long as the context lasts."""
    job = ResidentJob(connection, parent)
    try:
        yield job
    finally:
        job.close()
