"""Small records of a job: plain JSON values in files that are written atomically and checked.

A record is the checked header of `beamjax.storage.arrays` without arrays: written under a temporary
name and renamed, with checksums that every reader verifies.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

from beamjax import errors
from beamjax._text import cut, printable
from beamjax.errors import ArrayFormatError, BeamjaxError, Failure
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain

SUFFIX = ".record"


def encode(record: dict[str, Any]) -> bytes:
    """The bytes of a record."""
    return encode_arrays([], record)


def decode(data: bytes | memoryview, path: str) -> dict[str, Any]:
    """Undoes `encode`. The caller checks the fields; `path` is for messages."""
    try:
        return decode_arrays(data)[1]
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{path}: {error}") from None


# --- errors


class WorkerTraceback(Exception):
    """The cause of an error in another process; shows its traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def error_record(error: BaseException, step: str = "") -> dict[str, Any]:
    """A record of an error, made in the process that raises it."""
    known = getattr(error, "failure", None) or Failure(step)
    text = "".join(traceback.format_exception(error))
    kinds = (kind for kind in type(error).__mro__ if vars(errors).get(kind.__name__) is kind)
    record: dict[str, Any] = to_plain(known)
    return record | {
        # An error of a private type counts as the public one that it derives from.
        "type": next(kinds, type(error)).__name__,
        "message": _message(error),
        "worker": known.worker or f"{socket.gethostname()}, process {os.getpid()}",
        "traceback": known.traceback or cut(text),
        "time": known.time or time.time(),
    }


def _message(error: BaseException) -> str:
    """The message without the hint how to replay it, which depends on the reading process."""
    text = str(error).removesuffix(getattr(error, "replay_hint", "")).rstrip()
    # That of beamjax has texts of others, which are cut.
    return text if isinstance(error, BeamjaxError) else cut(text)


@dataclass(frozen=True)
class _Raised:
    """The fields of a record of an error that are not those of its `Failure`."""

    type: str
    message: str


def error_of(
    record: dict[str, Any], path: str, otherwise: type[BeamjaxError] = errors.WorkerError
) -> BeamjaxError:
    """The error of a record, with its `failure`."""
    raised = from_plain(_Raised, record, path)
    failure = from_plain(Failure, record, path)
    # Python prints errors as they are, and the process that wrote this one may run foreign code.
    shown = replace(raised, message=printable(raised.message, lines=True))
    failure = replace(failure, traceback=printable(failure.traceback, lines=True))
    kind = getattr(errors, shown.type, None)
    if isinstance(kind, type) and issubclass(kind, BeamjaxError):
        error = kind(shown.message)
    else:
        where = f"step {failure.step!r}: " if failure.step else ""
        error = otherwise(f"{where}{shown.type}: {shown.message}")
    error.failure = failure
    return error
