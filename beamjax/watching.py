"""A look at a job every half second while it runs, for those who wait for it or look on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from beamjax.display import Display
from beamjax.job_folder import JobFolder
from beamjax.monitor import Monitor
from beamjax.recording import Recording

SOON, LOOK = 0.05, 0.5
"""Seconds between two looks of the launching process at its workers: at first, and later."""


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
        pause = min(SOON, LOOK)
        while not over.wait(pause * folder.slowness):
            look()
            pause = min(2 * pause, LOOK)

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
