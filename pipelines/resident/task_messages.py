"""The messages between the launcher and resident workers, which are plain data.

Programs, tasks and replies are dataclasses as JSON, with their bytes beside it as arrays. Nothing
in them is pickled, but for bodies that JAX can't export. In files, all of them are signed.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from beamjax.bodies.provenance import UNKNOWN, Provenance
from beamjax.errors import ArrayFormatError
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.worker.tasks import Task
from beamjax.plan.steps import ValueRange
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.runtime.values import Part, Ref
from beamjax.spans import Work
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain

T = TypeVar("T")

NO_PASS = -1
"""The number of the pass in a reply to a task that the worker could not decode."""

_BYTES = "\0bytes"
"""The only key of what stands for bytes in JSON. Names of users have no zero byte."""


@dataclass(frozen=True)
class Piece:
    """Partials of one range of the values of a pass."""

    values: ValueRange
    # As `send` encodes them; or the accumulators, where workers are threads of the launcher.
    partials: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """What workers compute for the same step of each round."""

    name: str  # unique
    kind: str  # see `worker.py`
    task: Task[Any]
    # The placed values that workers write to files.
    written: tuple[str, ...] = ()
    # Whether partials travel as files, as they are many bytes in all.
    as_files: bool = False


@dataclass(frozen=True)
class Pass:
    """One run of a program over elements."""

    program: str  # its name
    # The prefix of the names of the files with placed values.
    stem: str = ""
    served: Mapping[str, StoreRef] = field(default_factory=dict)  # the server values that it reads
    # The placed values that it reads.
    operands: Mapping[str, Ref] = field(default_factory=dict)
    # The placed values that are materialized as results of the run.
    results: MaterializedOutputs = NOTHING
    number: int = 0  # in its job


@dataclass(frozen=True)
class WorkerTask:
    """Elements of a pass for one worker, which computes them together."""

    current: Pass
    number: int  # in its pass
    # Ranges [first, last) of shards, or partials to merge.
    elements: tuple[tuple[int, int] | Piece, ...]


@dataclass(frozen=True)
class Result:
    """What a task results in. Values and partials are small, or in files of the store."""

    values: tuple[tuple[str, Part], ...] = ()  # parts of server values, or whole ones
    partials: tuple[Piece, ...] = ()
    # The partials of each combine.
    combined: tuple[tuple[Part, ...], ...] = ()
    dropped: bytes = b""  # lines, see `plan.dropping`
    # The first member and the number of members of each file, by the name of the value.
    written: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    provenance: Provenance = UNKNOWN


@dataclass(frozen=True)
class Reply:
    """The reply to a task."""

    current: int  # the number of the pass, or `NO_PASS`
    number: int  # of the task in it
    result: Result = Result()
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
    # The message of an error. The worker has also left a record of it in the store.
    error: str = ""
    cause: Any = None  # the exception, if the worker is a thread of this process


def encode(message: Program | WorkerTask | Reply) -> bytes:
    """A message as bytes."""
    if isinstance(message, Reply):
        message = replace(message, cause=None)
    arrays: list[np.ndarray] = []
    plain = _without_bytes(to_plain(message), arrays)
    return encode_arrays(arrays, {"message": plain})


def decode(kind: type[T], data: bytes) -> T:
    """Undoes `encode`; raises ArrayFormatError for other bytes."""
    what = "a message between launcher and worker"
    arrays, meta = decode_arrays(data)
    try:
        plain = _with_bytes(meta["message"], arrays)
    except (KeyError, IndexError, TypeError) as error:
        raise ArrayFormatError(f"{what}: found {meta!r:.200} ({error})") from error
    return from_plain(kind, plain, what)


def _without_bytes(value: Any, arrays: list[np.ndarray]) -> Any:
    """The value with an index in `arrays` in place of bytes."""
    match value:
        case bytes():
            arrays.append(np.frombuffer(value, np.uint8))
            return {_BYTES: len(arrays) - 1}
        case dict():
            return {key: _without_bytes(child, arrays) for key, child in value.items()}
        case list():
            return [_without_bytes(child, arrays) for child in value]
    return value


def _with_bytes(value: Any, arrays: list[np.ndarray]) -> Any:
    match value:
        case dict() if _BYTES in value:
            return arrays[value[_BYTES]].tobytes()
        case dict():
            return {key: _with_bytes(child, arrays) for key, child in value.items()}
        case list():
            return [_with_bytes(child, arrays) for child in value]
    return value


# --- signatures


def signed(secret: bytes, name: str, data: bytes) -> bytes:
    """The content of a file with a message: its signature and the message."""
    # Programs may have pickled functions, and tasks name modules that workers import. So both ends
    # read only what has a signature of this job; its key travels with the Beam job. Then other
    # processes that can write into the folder of messages can't run code, nor pass off one message
    # as another one.
    return _signature(secret, name, data) + data


def verified(secret: bytes, name: str, content: bytes) -> bytes:
    """Undoes `signed`; raises ArrayFormatError for a message that is not of this job."""
    size = hashlib.sha256().digest_size
    data = content[size:]
    if not hmac.compare_digest(content[:size], _signature(secret, name, data)):
        raise ArrayFormatError(
            f"{name}, a message of resident workers: found a wrong signature, expected that of "
            "this job; something else has written into its folder"
        )
    return data


def _signature(secret: bytes, name: str, data: bytes) -> bytes:
    # Names contain no zero byte, so no other name and message have the same bytes.
    digest = hmac.new(secret, name.encode() + b"\0", hashlib.sha256)
    digest.update(data)
    return digest.digest()
