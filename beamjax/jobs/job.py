"""Jobs: calls of functions of programs, as the launching process and other processes see them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from beamjax._text import described
from beamjax.call import Call
from beamjax.errors import (
    ArrayFormatError,
    BeamjaxError,
    JobCancelledError,
    JobError,
    SourceError,
)
from beamjax.jobs.display import display_for, say
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.storage import files, temporary, trust
from beamjax.telemetry import interrupts
from beamjax.telemetry.messages import SELDOM_SECONDS
from beamjax.telemetry.monitor import Monitor

if TYPE_CHECKING:
    from beamjax.jobs.recording import Recording
    from beamjax.jobs.report import Report
    from beamjax.telemetry.job_folder import JobFolder
    from beamjax.telemetry.progress import Progress

# Most runs have no folder, so what reads and writes folders is imported where it is needed.

POLL_SECONDS = 0.2
"""Seconds between two reads of the state of a job, while a caller waits for it."""


_LOG = logging.getLogger("beamjax")


class JobState(enum.Enum):
    """What a job is doing, or how it ended.

    Attributes:
      RUNNING: the job has not ended.
      DONE: the job has a result.
      FAILED: the run raised an error.
      CANCELLED: a caller, a signal or another process cancelled the job.
      LOST: the launching process died. Workers of a cluster may still finish their work, but no
        process collects the result.
    """

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Job:
    """A handle to a job, from `launch` or `open_job`.

    As a context manager, it calls `close` at the end of the `with` block.

    Args:
      folder: a folder with a job in it.

    Attributes:
      name: the name of the program.
      runner: the name of the runner.

    Raises:
      JobError: there is no job in the folder.
    """

    def __init__(self, folder: JobFolder):
        self._folder = folder
        self._record = folder.describe()
        self.name = self._record.name
        self.runner = self._record.runner

    @property
    def folder(self) -> str:
        """Path or URL of the folder, for `open_job` in any process that can read it."""
        return self._folder.path

    @property
    def state(self) -> JobState:
        """What the job is doing, or how it ended."""
        return JobState(self._ended()[0])

    def progress(self) -> Progress:
        """The progress of the job; during a run, it is about a second old."""
        return self._folder.progress()

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        """The members that have been dropped so far, with placement, index, step and reason."""
        return self._folder.dropped()

    def report(self) -> Report:
        """Reports on the job; `save(path)` makes a page of the report.

        Returns:
          The report, which is a few seconds old during a run.

        Raises:
          JobError: the folder holds no job any more.
          ArrayFormatError: a record in the folder is damaged.
        """
        from beamjax.jobs.report import read_report

        return read_report(self._folder)

    def wait(self, timeout: float | None = None) -> JobState:
        """Waits for the end of the job.

        Args:
          timeout: the most seconds to wait; None for no limit.

        Returns:
          The state; `RUNNING` if the job has not ended within the timeout.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = POLL_SECONDS * self._folder.slowness
        while (state := self.state) is JobState.RUNNING:
            left = pause if end is None else min(pause, end - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
        return state

    def cancel(self) -> None:
        """Cancels the job, unless it has ended.

        It returns at once. Workers finish the shards that they are computing; `wait()` waits for
        the end of the job.
        """
        if self.state is JobState.RUNNING:
            self._folder.request_cancel()

    def result(self, timeout: float | None = None, *, like: Any = None) -> Any:
        """Waits for the end of the job, and returns the result of the function.

        Args:
          timeout: the most seconds to wait; None for no limit.
          like: a tree with the structure of the result. It is needed if another process reads a
            result with nodes other than dicts, lists, tuples, named tuples and None.

        Returns:
          The tree that the function returned, with the same leaves as from `run`.

        Raises:
          Exception: any error that `run` would have raised.
          TimeoutError: the job has not ended within the timeout; it goes on.
          JobCancelledError: the job was cancelled.
          KeyboardInterrupt: Ctrl-C interrupts the wait. If this process has launched the job, that
            cancels the job.
          JobError: the launching process died before the job was done.
          StructureError: the structure of the result can't be rebuilt without `like`.
          ArrayFormatError: a file in the folder was damaged.
          SourceError: a file in the folder can't be read.
        """
        if self.wait(timeout) is JobState.RUNNING:
            self._raise_timeout(timeout)
        state, error = self._ended()
        match JobState(state):
            case JobState.DONE:
                from beamjax.jobs.results import read_result

                return read_result(self._folder, like)
            case JobState.CANCELLED:
                raise JobCancelledError(f"{self.folder}: the job was cancelled")
            case JobState.LOST:
                process = self._record.process
                raise JobError(
                    f"{self.folder}: the job has no result; its launching process "
                    f"{process.get('pid')} on {process.get('host')} is gone. Launch the function "
                    "again"
                )
        from beamjax.storage import records

        path = self._folder.record_path("state")
        if error is None:
            raise ArrayFormatError(f"{path}: found no error, expected that of a failed job")
        failed = records.error_of(error, path, JobError)
        text = failed.failure.traceback if failed.failure else ""
        raise failed from records.WorkerTraceback(text)

    def _raise_timeout(self, timeout: float | None) -> NoReturn:
        raise TimeoutError(
            f"{self.folder}: the job has not ended after {timeout:g} s; it goes on, and cancel() "
            "ends it"
        )

    def close(self) -> None:
        """Removes the folder at the end of the job, if it is a temporary folder of this handle."""

    def _ended(self) -> tuple[str, dict[str, Any] | None]:
        state, error = self._folder.state()
        if state == "none":
            raise JobError(f"{self.folder}: found no state of a job; was the folder cleaned up?")
        return state, error

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()

    def __repr__(self) -> str:
        try:
            state = self.state.value
        except BeamjaxError:  # such as that of a folder that was removed
            state = "unknown"
        return f"<Job {self.name} on {self.runner}: {state}, in {self.folder}>"


def open_job(folder: str | os.PathLike[str]) -> Job:
    """Opens a job of any process by its folder.

    Args:
      folder: the path or URL of the option `job_folder`, or `job.folder`.

    Returns:
      A handle like that of `launch`. `cancel()` leaves a request in the folder, which the launching
      process and the workers check about once a second. A job whose launching process is on another
      machine and has written nothing for a minute counts as lost.

    Raises:
      JobError: there is no job in the folder.
      ArrayFormatError: a file in the folder is damaged.
      SourceError: a file in the folder can't be read.
      OptionsError: another user can write to the folder.
    """
    from beamjax.telemetry.job_folder import JobFolder

    path = files.local_path(os.fspath(folder))
    trust.check_folder(path, "open_job")
    return Job(JobFolder(path))


# --- jobs of this process


class _Launched(Job):
    """A job of this process, with its result in memory."""

    def __init__(self, folder: JobFolder, monitor: Monitor, work: interrupts.Work[Any],
                 is_temporary: bool):  # fmt: skip
        super().__init__(folder)
        self._monitor = monitor
        self._work = work
        self._outcome = work.outcome
        # Removes the folder of a handle that was closed or collected, once the job has ended.
        ended = functools.partial(_remove, folder, is_temporary)
        self._release = weakref.finalize(self, self._outcome.add_done_callback, ended)

    @property
    def state(self) -> JobState:
        if not self._outcome.done():
            return JobState.CANCELLED if self._work.is_abandoned else JobState.RUNNING
        error = self._outcome.exception()
        if error is None:
            return JobState.DONE
        return JobState.CANCELLED if _is_cancel(error) else JobState.FAILED

    def progress(self) -> Progress:
        return self._monitor.progress()

    @property
    def dropped(self) -> tuple[Dropped, ...]:
        return self._monitor.letters.dropped

    def wait(self, timeout: float | None = None) -> JobState:
        concurrent.futures.wait([self._outcome], timeout)
        interrupts.restore()
        return self.state

    def cancel(self) -> None:
        if self.state is JobState.RUNNING:
            self._work.cancel()

    def result(self, timeout: float | None = None, *, like: Any = None) -> Any:
        if not self._work.wait(timeout):
            self._raise_timeout(timeout)
        return self._outcome.result()

    def close(self) -> None:
        self._release()


def _remove(
    folder: JobFolder, is_temporary: bool, _outcome: concurrent.futures.Future[Any]
) -> None:
    if is_temporary:
        folder.remove()


def _folder_of(options: Options) -> JobFolder:
    """The folder of a job, which is a temporary one by default."""
    from beamjax.telemetry.job_folder import JobFolder

    return JobFolder(options.job_folder or temporary.new_name(options.work_folder, "job"))


class JobRun:
    """One run of a call as a job, with its monitor, display and folder."""

    def __init__(self, call: Call, launched: bool = False):
        options = call.options
        self._call = call
        self._launched = launched  # a thread runs it, and the caller has a handle
        display = display_for(options, launched)
        self._says = display is None and options.progress is None
        reports = launched or bool(options.job_folder or options.report)
        self.folder = _folder_of(options) if reports or display is not None else None
        letters = DeadLetters(options.drop_limit, options.dead_letters)
        self.monitor = Monitor(call.plan, self.folder, letters, call.planning)
        self._recording: Recording | None = None
        self._ending, self._has_begun = threading.Lock(), False
        if self.folder is not None:
            from beamjax.jobs.recording import Recording

            self._recording = Recording(self.folder, self.monitor, call, display, reports)

    @property
    def _is_temporary(self) -> bool:
        """Whether the folder is removed after the run."""
        return self._call.options.job_folder is None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """A context for a run that has a folder; records its progress and its end there."""
        assert self.folder is not None
        assert self._recording is not None
        if not self._launched:
            self._begin()
        failed: BaseException | None = None
        try:
            with self._recording.going_on():
                yield
        except BaseException as error:
            failed = error
            if not (self._is_temporary or isinstance(error, JobCancelledError)):
                error.add_note(f"The folder of the job is kept: {self.folder.path}")
            raise
        finally:
            self._record_end(failed)

    def _record_end(self, error: BaseException | None) -> None:
        """Writes the state of the job, and removes its folder if nothing needs it."""
        with self._ending:
            folder = self.folder
            if folder is None or not self._has_begun:
                return
            self._has_begun = False
            state = "done" if error is None else "cancelled" if _is_cancel(error) else "failed"
            try:
                folder.write_state(state, error)
            except Exception as failed:  # The result, or the error itself, matters more.
                _LOG.warning("the end of the job is not recorded: %s", failed)
            from beamjax.jobs.recording import save_report

            save_report(folder, self._call.options)
            if not self._launched and self._is_temporary:
                folder.remove()

    def cancel(self) -> None:
        """Requests the end of the job in this process and, through the folder, on workers."""
        self.monitor.cancel()
        if self.folder is not None:
            with contextlib.suppress(Exception):
                self.folder.request_cancel()

    def _abandon(self) -> None:
        self._record_end(JobCancelledError("the job was cancelled"))

    def _begin(self) -> None:
        assert self.folder is not None
        call = self._call
        if call.options.job_folder is None:
            temporary.make(self.folder.path)
        self.folder.begin(call.plan.name, call.runner)
        self._has_begun = True

    def returned(self, value: Any) -> Any:
        """Records the result of a run that has a folder, and returns it."""
        assert self.folder is not None
        assert self._recording is not None
        self._recording.returned(value)
        if self._launched or not self._is_temporary:
            from beamjax.jobs.results import write_result

            try:
                write_result(self.folder, value, self._call.plan.x64)
            except SourceError as error:  # The caller gets it all the same.
                _LOG.warning("the result is returned but not stored: %s", error)
        return value

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function that runs the job, and returns its result."""
        work = interrupts.Work[Any](self.cancel, self._abandon)
        return work.run(function, SELDOM_SECONDS, self._say if self._says else None)

    def _say(self) -> None:
        say(self._call.plan.name, self.monitor.progress())

    def launch(self, function: Callable[[], Any]) -> Job:
        """Starts a function that runs the job; returns the handle of the job."""
        self._begin()
        assert self.folder is not None
        work = interrupts.Work[Any](self.cancel, self._abandon)
        job = _Launched(self.folder, self.monitor, work, self._is_temporary)
        work.outcome.add_done_callback(functools.partial(_log_late_failure, job.name))
        work.start(function)
        return job


def _log_late_failure(name: str, outcome: concurrent.futures.Future[Any]) -> None:
    """Logs the error of a job that failed after the main thread, as no caller can receive it."""
    error = outcome.exception()
    if error is not None and not _is_cancel(error) and interrupts.exiting():
        _LOG.error(
            "job %s failed after the main program had ended, call job.wait() before its end: %s",
            name, described(error),
        )  # fmt: skip


def _is_cancel(error: BaseException) -> bool:
    cancels = (JobCancelledError, KeyboardInterrupt, SystemExit)
    return isinstance(error, cancels) or interrupts.terminated()
