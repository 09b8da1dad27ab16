"""Watches a job while it runs: writes its progress, displays it, and honours cancellation."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from beamjax.jobs.display import Display
from beamjax.jobs.recording import Recording
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.monitor import Monitor

LOOK = 0.5
"""Seconds between two looks of the launching process at its workers."""
SOON = (0.03, 0.05, 0.1, 0.2)
"""Seconds before each of the first looks, so that the report of a short run has samples."""


@contextlib.contextmanager
def watched(
    folder: JobFolder, monitor: Monitor, display: Display | None, kept: Recording | None
) -> Iterator[None]:
    """Runs a thread that writes and displays progress, and cancels the job on request.

    Args:
      folder: the folder of the job.
      monitor: the monitor of its run.
      display: displays the progress, if not None.
      kept: records what a report needs, if not None.
    """
    over = threading.Event()

    def look() -> None:
        progress = monitor.progress()
        with contextlib.suppress(Exception):  # the work continues without records of its progress
            folder.write_progress(progress)
            if folder.cancel_requested():
                monitor.cancel()
        if kept is not None:
            kept.look(progress)
        if display is not None:
            with contextlib.suppress(Exception):  # as of a stderr that is closed
                display.update(progress)

    def watch() -> None:
        if kept is not None:  # a short run has samples, too
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
