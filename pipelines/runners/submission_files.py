"""Temporary folders that Beam makes while it submits a pipeline, and does not remove.

On runners other than Beam's in-memory one it makes a folder for the files of each environment,
which for LOOPBACK are two. They are made in the folder of the pipeline instead, which Beam removes.
"""

from __future__ import annotations

import contextlib
import contextvars
import tempfile
from collections.abc import Iterator
from typing import Any

from apache_beam.transforms import environments

_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("folder", default=None)
_beams_own = environments.python_sdk_dependencies


@contextlib.contextmanager
def made_in(folder: str) -> Iterator[None]:
    """A context in which Beam makes these folders in one that goes with the pipeline."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def _dependencies(options: Any, tmp_dir: str | None = None) -> Any:
    if tmp_dir is None and _folder.get() is not None:
        tmp_dir = tempfile.mkdtemp(dir=_folder.get())
    return _beams_own(options, tmp_dir)


environments.python_sdk_dependencies = _dependencies
