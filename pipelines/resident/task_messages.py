"""The messages between the launcher and resident workers, and their encoding.

Programs are pickled, since they hold DoFns. Tasks and replies, which travel in each round, are
buffers of `beamjax.storage.arrays` and never unpickled. In files, all of them are signed.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.values.elements import Environment, EnvironmentCoder
from beamjax.pipelines.values.stored_values import Operands
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.spans import Work
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain

Output = tuple[str | None, Any]
"""An element that a DoFn emits, and its tag; None for the main output."""

NO_PASS = -1
"""The number of the pass in a reply to a task that the worker could not decode."""


def signed(secret: bytes, name: str, data: bytes) -> bytes:
    """The content of a file with a message: its signature and the message."""
    # Programs are unpickled, and tasks name modules that workers import. So both ends read only
    # what has a signature of this job; its key travels with the Beam job. Then other processes that
    # can write into the folder of messages can't run code, nor pass off one message as another one.
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
    found = hmac.new(secret, name.encode() + b"\0", hashlib.sha256)
    found.update(data)
    return found.digest()


@dataclass(frozen=True)
class Program:
    """A DoFn that workers run for the same step of each round."""

    name: str  # unique
    fn: StepFn
    # The placed values that workers write to files, from the blocks that `fn` emits.
    written: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The program as bytes."""
        data: bytes = cloudpickle.dumps(self)
        return data

    @staticmethod
    def decode(data: bytes) -> Program:
        """Undoes `encode`. It runs code, so the bytes must be those of the launcher."""
        program: Program = cloudpickle.loads(data)
        return program


@dataclass(frozen=True)
class Pass:
    """One run of a program over elements."""

    number: int  # in its job
    program: str  # its name
    # The prefix of the names of the files with placed values.
    stem: str = ""
    # The server values that are the side input of the DoFn; None for no side input.
    served: Environment | None = None
    operands: Operands | None = None  # the placed values that it reads
    # The placed values that are materialized as results of the run.
    results: MaterializedOutputs = NOTHING


@dataclass(frozen=True)
class WorkerTask:
    """Elements of a pass for one worker, which processes them as one bundle."""

    current: Pass
    number: int  # in its pass
    elements: Sequence[Any]


@dataclass(frozen=True)
class Reply:
    """The reply to a task."""

    current: int  # the number of the pass, or `NO_PASS`
    number: int  # of the task in it
    outputs: Sequence[Output]
    seconds: float
    work: Work = field(default_factory=Work)
    # The message of an error. The worker has also left a record of it in the store.
    error: str = ""
    cause: BaseException | None = None  # the exception, if the worker is a thread of this process


def encode_task(task: WorkerTask) -> bytes:
    """A task as bytes."""
    arrays: list[np.ndarray] = []
    current = task.current
    meta: dict[str, Any] = {
        "number": task.number,
        "elements": _packed(task.elements, arrays),
        "pass": [current.number, current.program, current.stem],
        "served": _packed(current.served, arrays),
        "operands": None,
        "results": to_plain(current.results),
    }
    if current.operands is not None:
        meta["operands"] = json.dumps(current.operands.to_json(arrays))
    return encode_arrays(arrays, meta)


def decode_task(data: bytes) -> WorkerTask:
    """Undoes `encode_task`; raises ArrayFormatError for other bytes."""

    def unpack(arrays: list[np.ndarray], meta: dict[str, Any]) -> WorkerTask:
        operands = None
        if meta["operands"] is not None:
            operands = Operands.from_json(json.loads(meta["operands"]), arrays)
        served = _unpacked(meta["served"], arrays)
        number, program, stem = meta["pass"]
        results = from_plain(MaterializedOutputs, meta["results"], "a task")
        current = Pass(number, program, stem, served, operands, results)
        return WorkerTask(current, meta["number"], _unpacked(meta["elements"], arrays))

    return _decoded(data, unpack)


def encode_reply(reply: Reply) -> bytes:
    """A reply as bytes."""
    arrays: list[np.ndarray] = []
    outputs = _packed([list(output) for output in reply.outputs], arrays)
    meta = {
        "reply": [reply.current, reply.number, reply.seconds, reply.error],
        "work": to_plain(reply.work),
        "outputs": outputs,
    }
    return encode_arrays(arrays, meta)


def decode_reply(data: bytes) -> Reply:
    """Undoes `encode_reply`; raises ArrayFormatError for other bytes."""

    def unpack(arrays: list[np.ndarray], meta: dict[str, Any]) -> Reply:
        current, number, seconds, error = meta["reply"]
        outputs = [(tag, element) for tag, element in _unpacked(meta["outputs"], arrays)]
        work = from_plain(Work, meta["work"], "a reply")
        return Reply(current, number, outputs, seconds, work, error)

    return _decoded(data, unpack)


def _decoded(data: bytes, unpack: Callable[[list[np.ndarray], dict[str, Any]], Any]) -> Any:
    arrays, meta = decode_arrays(data)
    try:
        return unpack(arrays, meta)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ArrayFormatError(
            f"a message between launcher and worker: found {meta!r:.200} ({error})"
        ) from error


def _packed(value: Any, arrays: list[np.ndarray]) -> Any:
    """Lists, tuples, ints, texts, bytes and environments as JSON. Bytes are added to `arrays`."""
    if isinstance(value, bytes):
        arrays.append(np.frombuffer(value, np.uint8))
        return {"bytes": len(arrays) - 1}
    if isinstance(value, Environment):
        return {"environment": _packed(EnvironmentCoder().encode(value), arrays)}
    if isinstance(value, tuple):
        return {"tuple": [_packed(part, arrays) for part in value]}
    if isinstance(value, list):
        return [_packed(part, arrays) for part in value]
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"found {type(value).__name__}, expected an element of a resident worker")


def _unpacked(value: Any, arrays: list[np.ndarray]) -> Any:
    match value:
        case {"bytes": int(index)}:
            return arrays[index].tobytes()
        case {"environment": encoded}:
            return EnvironmentCoder().decode(_unpacked(encoded, arrays))
        case {"tuple": parts}:
            return tuple(_unpacked(part, arrays) for part in parts)
        case list():
            return [_unpacked(part, arrays) for part in value]
    return value
