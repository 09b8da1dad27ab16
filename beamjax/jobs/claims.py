"""Gives a run its folders for itself, from before it is planned until it has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from beamjax.errors import OptionsError, SourceError
from beamjax.options import Options
from beamjax.storage import files, locks


@contextlib.contextmanager
def claimed(options: Options) -> Iterator[None]:
    """A context in which no other run uses the `job_folder` and the `results_folder` of a run."""
    named = {"job_folder": options.job_folder, "results_folder": options.results_folder}
    # Folders at URLs have no locks. The same folder may be given for both.
    local = {os.path.abspath(f): name for name, f in named.items() if f and not files.is_url(f)}
    with contextlib.ExitStack() as stack:
        for folder, name in local.items():
            stack.enter_context(_locked(name, folder))
        if options.job_folder is not None:
            from beamjax.telemetry.job_folder import JobFolder  # most runs have none

            JobFolder(options.job_folder).refuse_other(options.overwrite)
        yield


@contextlib.contextmanager
def _locked(name: str, folder: str) -> Iterator[None]:
    path = os.path.join(folder, locks.NAME)
    try:
        files.make_folder(folder)
        handle = locks.try_lock(path)
    except OSError as error:
        raise SourceError(
            f"{name}: cannot write to {folder} ({error}); expected a folder that this process and "
            "all workers can write and read"
        ) from error
    if handle is None:
        raise OptionsError(
            f"{name}: found another run that uses {folder}, expected a folder of its own for each "
            "run; wait for the end of that run"
        )
    try:
        yield
    finally:
        locks.unlock(path, handle)
        with contextlib.suppress(OSError):  # it has the files of the run
            os.rmdir(folder)
