"""`session`: consecutive calls of programs on resident workers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

from beamjax.call import LOCAL
from beamjax.errors import OptionsError
from beamjax.execution import finish, prepare, run_options
from beamjax.jobs.job import JobRun

IDLE_SECONDS = 600.0
"""Default seconds without a call after which a session ends its workers."""


class Session:
    """Resident workers for consecutive calls, made by `session`.

    As a context manager, it ends its workers at the end of the `with` block.

    Args:
      runner: as for `session`.
      options: as for `session`.
      idle_seconds: as for `session`.

    Raises:
      OptionsError: as for `session`.
    """

    def __init__(self, runner: Any, options: Any, idle_seconds: float):
        if not (isinstance(idle_seconds, int | float) and idle_seconds > 0):
            raise OptionsError(f"idle_seconds: found {idle_seconds!r}, expected a number above 0")
        self._runner = runner
        self._options = run_options(options, None, runner)
        if self._options.checkpoint is not None or self._options.job_folder is not None:
            raise OptionsError(
                "session: found a checkpoint or job_folder, which belongs to one run; give it to "
                "session.run"
            )
        self._closed = False
        self._workers = None
        if runner != LOCAL:
            from beamjax.pipelines.session_workers import SessionWorkers

            idle = min(float(idle_seconds), threading.TIMEOUT_MAX)
            self._workers = SessionWorkers(runner, self._options, idle)

    def run(
        self, fn: Callable[..., Any], *args: Any, options: Any = None, keep: str | None = None
    ) -> Any:
        """Runs a function of programs and returns what `fn(*args)` would, as `beamjax.run` does.

        Calls from several threads run sequentially.

        Args:
          fn: as for `beamjax.run`.
          *args: as for `beamjax.run`.
          options: the options of this run, which replace those of the session. Options of Beam
            always come from the session.
          keep: as for `beamjax.run`.

        Returns:
          As for `beamjax.run`.

        Raises:
          BeamjaxError: as for `beamjax.run`. The session remains usable.
          OptionsError: as for `beamjax.run`, or the session is closed.
        """
        if self._closed:
            raise OptionsError("session: found a run after its end; open another session")
        merged = self._options
        if options is not None or keep is not None:
            merged = run_options(merged if options is None else options, keep, self._runner)
            merged = replace(merged, beam=self._options.beam)
        call = prepare(fn, args, self._runner, merged, workers=self._workers)
        job = JobRun(call)
        return job.run(functools.partial(finish, call, job))

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""
        self._closed = True
        if self._workers is not None:
            self._workers.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "session: found it where something is pickled, but its workers belong to this process; "
            "open another session where it is used, or take it out of the function that travels"
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def session(
    runner: Any = "DirectRunner", options: Any = None, idle_seconds: float = IDLE_SECONDS
) -> Session:
    """Opens workers that stay between calls, so that a call takes milliseconds.

        with beamjax.session("FlinkRunner", options={...}) as s:
            for batch in batches:
                weights = s.run(step, weights, batch)

    The first call starts one Beam job, so later calls start no pipeline. From one call to the next,
    its workers keep compiled bodies, members that they have read, and arrays of the caller, up to
    the option `memory`. The results have the same bits as those of `beamjax.run`. A call with a
    placement of unknown size starts a pipeline of its own, and `runner="local"` needs no workers.

    Args:
      runner: as for `beamjax.run`.
      options: as for `beamjax.run`, without `checkpoint` and `job_folder`, which belong to one run.
      idle_seconds: seconds without a call after which the job ends, a number above 0. The next call
        starts another job.

    Returns:
      A `Session`, which is a context manager with a method `run`.

    Raises:
      OptionsError: the runner or an option is unknown, an option has an impossible value or belongs
        to one run, or `idle_seconds` is not a number above 0.
    """
    return Session(runner, options, idle_seconds)
