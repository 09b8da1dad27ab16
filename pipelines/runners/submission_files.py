"""Temporary folders that Beam makes while it submits a pipeline, and does not remove.

On runners other than Beam's in-memory one it makes a folder for the files of each environment,
which for LOOPBACK are two. They are made in the folder of the pipeline instead, which Beam removes.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

from beamjax._beam_compat import redirect_submission_files

_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("folder", default=None)


@contextlib.contextmanager
def made_in(folder: str) -> Iterator[None]:
    """A context in which Beam makes these folders in one that goes with the pipeline."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


redirect_submission_files(_folder.get)
