"""A look at a job every half second while it runs, for those who wait for it or look on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from beamjax.jobs.display import Display
from beamjax.jobs.recording import Recording
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.monitor import Monitor

LOOK = 0.5
"""Seconds between two looks of the launching process at what its workers do."""
SOON = (0.03, 0.05, 0.1, 0.2)
"""The same of the first looks of who keeps the course of a run."""


@contextlib.contextmanager
def watched(
    folder: JobFolder, monitor: Monitor, display: Display | None, kept: Recording | None
) -> Iterator[None]:
    """While a job runs, a thread writes how far it is, shows it, and looks who wants it to end.

    Args:
      folder: of the job.
      monitor: of its run.
      display: where people see how far it is, if they do.
      kept: keeps what a report needs, if there may be one.
    """
    over = threading.Event()

    def look() -> None:
        progress = monitor.progress()
        with contextlib.suppress(Exception):  # the work goes on if nobody can see how far it is
            folder.write_progress(progress)
            if folder.cancel_requested():
                monitor.cancel()
        if kept is not None:
            kept.look(progress)
        if display is not None:
            with contextlib.suppress(Exception):  # as of a stderr that is closed
                display.update(progress)

    def watch() -> None:
        if kept is not None:  # a short run has a course, too
            for pause in SOON:
                if over.wait(pause):
                    return
                kept.look(monitor.progress())
        while not over.wait(LOOK * folder.slowness):
            look()

    thread = threading.Thread(target=watch, name="beamjax progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
        if display is not None:
            with contextlib.suppress(Exception):
                display.close()
