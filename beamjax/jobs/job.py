"""Jobs: one call of a function of programs, run here or by a thread, seen from any process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import functools
import os
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.diagnostics.fact_types import PlanFacts
from beamjax.errors import ArrayFormatError, JobCancelledError, JobError
from beamjax.jobs.display import Display, display_for
from beamjax.jobs.recording import Recording, save_report, watched
from beamjax.jobs.report import Report, read_report
from beamjax.jobs.results import read_result, write_result
from beamjax.options import Options
from beamjax.plan.dropping import DeadLetters, Dropped
from beamjax.plan.steps import Plan
from beamjax.storage import files, records
from beamjax.telemetry import termination
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.progress import Progress

POLL = 0.2
"""Seconds between two looks into the folder of a job, while a caller waits for it."""


class JobState(enum.Enum):
    """What a job is doing, or how it ended.

    `LOST` is a job whose launching process died. Workers of a cluster may still finish what they
    were given, but no process collects the result.
    """

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


class Work(Protocol):
    """What a job does: a call that is planned, with its arguments."""

    @property
    def plan(self) -> Plan:
        """The plan to be run."""
        ...

    @property
    def runner(self) -> str:
        """The name of the runner."""
        ...

    @property
    def options(self) -> Options:
        """The options of the run."""
        ...

    def compute(self, monitor: Monitor) -> Any:
        """Runs the plan under a monitor, and gives the tree that the function returns."""
        ...

    def plan_facts(self) -> PlanFacts:
        """What `explain` shows of the plan."""
        ...

    def prediction(self) -> tuple[Mapping[str, float], str]:
        """`predicted` and `advice` of `Progress`."""
        ...


class Job:
    """A job, seen through its folder.

    Args:
      folder: with a job in it.

    Raises:
      JobError: there is none.
    """

    def __init__(self, folder: JobFolder):
        self._folder = folder
        described = folder.describe()
        self.name: str = described["name"]
        self.runner: str = described["runner"]
        self._process: dict[str, Any] = described["process"]

    @property
    def folder(self) -> str:
        """Path or URL of the folder, for `open_job` in any process that sees it."""
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
        """The members that were dropped so far, by placement and index."""
        return self._folder.dropped()

    def report(self) -> Report:
        """A report of the job, or of the job so far: `save(path)` makes a page of it.

        During a run, it is a few seconds old.
        """
        return read_report(self._folder)

    def wait(self, timeout: float | None = None) -> JobState:
        """Waits for the end of the job.

        Args:
          timeout: seconds after which it returns in any case.

        Returns:
          The state, `RUNNING` if the time was up.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pause = POLL * self._folder.slowness
        while (state := self.state) is JobState.RUNNING:
            left = pause if end is None else min(pause, end - time.monotonic())
            if left <= 0:
                break
            time.sleep(left)
        return state

    def cancel(self) -> None:
        """Ends the job as soon as that is possible; a job that is over stays as it is.

        Shards under way are finished. `wait()` says when the job has ended.
        """
        if self.state is JobState.RUNNING:
            self._folder.request_cancel()

    def result(self, *, like: Any = None) -> Any:
        """Waits for the end of the job, and gives what the function returned.

        Args:
          like: a tree with the structure of the result, for a result that another process reads
            and that holds more than dicts, lists, tuples, named tuples and None.

        Raises:
          Exception: what `run` would have raised.
          JobCancelledError: the job was cancelled.
          JobError: the launching process died before the job was done.
          StructureError: the structure can't be rebuilt from the folder alone.
          ArrayFormatError, SourceError: a file in the folder was changed or removed.
        """
        self.wait()
        state, error = self._ended()
        match JobState(state):
            case JobState.DONE:
                return read_result(self._folder, like)
            case JobState.CANCELLED:
                raise JobCancelledError(f"{self.folder}: the job was cancelled")
            case JobState.LOST:
                raise JobError(
                    f"{self.folder}: the job has no result; its launching process "
                    f"{self._process.get('pid')} on {self._process.get('host')} is gone. Launch "
                    "the function again"
                )
        path = f"{self.folder}/state{records.SUFFIX}"
        if error is None:
            raise ArrayFormatError(f"{path}: found no error, expected that of a failed job")
        failed = records.error_of(error, path, JobError)
        text = failed.failure.traceback if failed.failure else ""
        raise failed from records.WorkerTraceback(text)

    def close(self) -> None:
        """Removes the folder once the job has ended, if it was a temporary one of this handle."""

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
        return f"<Job {self.name} on {self.runner}: {self.state.value}, in {self.folder}>"


def open_job(folder: str | os.PathLike[str]) -> Job:
    """A job of any process, by its folder.

    Args:
      folder: path or URL; that of the option `job_folder`, or `job.folder`.

    Returns:
      A handle like that of `launch`. `cancel()` asks the launching process and the workers, which
      look every second or so. A launching process on another machine that gives no sign for a
      minute counts as lost.

    Raises:
      JobError: there is no job in the folder.
      ArrayFormatError: a file in it is not what was written.
    """
    return Job(JobFolder(os.fspath(folder)))


# --- jobs of this process


class _Launched(Job):
    """A job of this process, with its result in memory."""

    def __init__(self, folder: JobFolder, monitor: Monitor, outcome: concurrent.futures.Future[Any],
                 keep: Callable[[BaseException | None], bool]):  # fmt: skip
        super().__init__(folder)
        self._monitor = monitor
        self._outcome = outcome
        self._release = weakref.finalize(self, _release, folder, outcome, keep)

    @property
    def state(self) -> JobState:
        if not self._outcome.done():
            return JobState.RUNNING
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
        termination.restore()
        return self.state

    def cancel(self) -> None:
        if self.state is JobState.RUNNING:
            _cancel(self._folder, self._monitor)

    def result(self, *, like: Any = None) -> Any:
        self.wait()
        return self._outcome.result()

    def close(self) -> None:
        self._release()


def _cancel(folder: JobFolder, monitor: Monitor) -> None:
    with contextlib.suppress(Exception):  # workers that can read the folder see it there
        folder.request_cancel()
    monitor.cancel()


def _release(
    folder: JobFolder,
    outcome: concurrent.futures.Future[Any],
    keep: Callable[[BaseException | None], bool],
) -> None:
    """Removes the folder of a handle that is gone, as soon as the job is over."""

    def ended(outcome: concurrent.futures.Future[Any]) -> None:
        if not keep(outcome.exception()):
            folder.remove()

    outcome.add_done_callback(ended)


def launch_work(work: Work) -> Job:
    """Does the work in a thread of this process."""
    folder, keep = _folder_of(work, needed=True)
    assert folder is not None
    folder.begin(_describe(work), work.options.overwrite)
    monitor = _monitor(work, folder)
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    @with_settings_of_here
    def execute() -> Any:
        shown = display_for(work.options, launched=True)
        return _execute(work, monitor, shown, save=True, record=True)

    def target() -> None:
        try:
            value = execute()
        except BaseException as error:
            _tell_where(folder, keep, error)
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    job = _Launched(folder, monitor, outcome, keep)
    cancel = functools.partial(_cancel, folder, monitor)
    termination.cancel_at_end(outcome, cancel, lambda: folder.end("cancelled"))
    threading.Thread(target=target, name=f"beamjax {work.plan.name}").start()
    return job


def run_work(work: Work) -> Any:
    """Does the work in this thread, and returns the result."""
    with termination.cancelling():
        return _run_work(work)


def _run_work(work: Work) -> Any:
    display = display_for(work.options, launched=False)
    options = work.options
    record = bool(options.job_folder or options.keep_folder or options.report)
    folder, keep = _folder_of(work, needed=record or display is not None)
    if folder is None:
        return work.compute(_monitor(work))
    folder.begin(_describe(work), work.options.overwrite)
    failed: BaseException | None = None
    try:
        return _execute(work, _monitor(work, folder), display, save=keep(None), record=record)
    except BaseException as error:
        failed = error
        _tell_where(folder, keep, error)
        raise
    finally:
        if not keep(failed):
            folder.remove()


def _folder_of(
    work: Work, needed: bool
) -> tuple[JobFolder | None, Callable[[BaseException | None], bool]]:
    """The folder of a job, if it has any, and whether to keep it when it has ended so."""
    options = work.options
    if options.job_folder is not None:
        return JobFolder(options.job_folder), lambda error: True
    kept = options.keep_folder

    def keep(error: BaseException | None) -> bool:
        failed = error is not None and not _is_cancel(error)
        return kept == "always" or (kept == "failed" and failed)

    if not needed and kept is None:
        return None, keep
    parent = options.work_folder or tempfile.gettempdir()
    return JobFolder(files.join(parent, f"beamjax-job-{uuid.uuid4().hex}")), keep


def _tell_where(
    folder: JobFolder, keep: Callable[[BaseException | None], bool], error: BaseException
) -> None:
    if keep(error):
        error.add_note(f"The folder of the job is kept: {folder.path}")


def _monitor(work: Work, folder: JobFolder | None = None) -> Monitor:
    options = work.options
    letters = DeadLetters(options.drop_limit, options.dead_letters)
    if folder is None:
        return Monitor(work.plan, None, letters, strict=options.strict)
    return Monitor(work.plan, folder, letters, *work.prediction(), strict=options.strict)


def _describe(work: Work) -> dict[str, Any]:
    return {"name": work.plan.name, "runner": work.runner}


def _is_cancel(error: BaseException) -> bool:
    cancels = (JobCancelledError, KeyboardInterrupt, SystemExit)
    return isinstance(error, cancels) or termination.requested()


def _execute(
    work: Work, monitor: Monitor, display: Display | None, save: bool, record: bool
) -> Any:
    """Does the work, and writes its result or its error into the folder of the monitor."""
    folder = monitor.folder
    assert folder is not None
    kept = Recording(folder, monitor, work.plan, work.options, work.plan_facts) if record else None
    try:
        with contextlib.ExitStack() as stack:
            if kept is not None:
                stack.enter_context(kept.going_on())
            with watched(folder, monitor, display, kept):
                value = work.compute(monitor)
            if kept is not None:
                kept.returned(value)
            if save:
                write_result(folder, value, work.plan.x64)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error itself matters more
            folder.end("cancelled" if _is_cancel(error) else "failed", error)
        raise
    else:
        folder.end("done")
        return value
    finally:
        save_report(folder, work.options)
