"""Messages between the launcher and its resident workers."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.values.elements import Environment, EnvironmentCoder
from beamjax.pipelines.worker.tasks import Sources, StepFn
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry.progress import ShardEvent, Tally

Output = tuple[str | None, Any]
"""An element that a DoFn emits, and its tag; None for the main output."""


NO_PASS = -1
"""The number of the pass in a reply to a task that can't be read."""


@dataclass(frozen=True)
class Program:
    """DoFns that workers run for the same step of each round.

    Attributes:
      name: names the program.
      fn: the DoFn.
      written: the placed values that the worker writes of the blocks that `fn` emits.
      results: those of them that go where the results of the run are kept.
    """

    name: str
    fn: StepFn
    written: tuple[str, ...] = ()
    results: MaterializedOutputs = NOTHING

    def encode(self, secret: bytes) -> bytes:
        """The program as bytes, with a signature."""
        data: bytes = cloudpickle.dumps(self)
        return hmac.digest(secret, data, hashlib.sha256) + data

    @staticmethod
    def decode(signed: bytes, secret: bytes) -> Program:
        """Undoes `encode`.

        Raises:
          ArrayFormatError: the bytes do not come from the launcher of this job.
        """
        signature, data = signed[:32], signed[32:]
        if not hmac.compare_digest(signature, hmac.digest(secret, data, hashlib.sha256)):
            raise ArrayFormatError(
                "a program for resident workers: found a wrong signature, expected that of the "
                "launcher; something else has written into the folder of the job"
            )
        program: Program = cloudpickle.loads(data)
        return program


@dataclass(frozen=True)
class Pass:
    """One run of a program over elements.

    Attributes:
      number: counts the passes of a job.
      program: name of the program.
      step: name of the step in this round, for messages.
      stem: first part of the names of the files with placed values.
      served: the server values that the DoFn takes as its side input; None for no side input.
      sources: the placed inputs that it reads, if any.
    """

    number: int
    program: str
    step: str
    stem: str = ""
    served: Environment | None = None
    sources: Sources | None = None


@dataclass(frozen=True)
class WorkerTask:
    """Elements of a pass for one worker, which processes them as one bundle.

    Attributes:
      current: the pass.
      number: of the task in its pass.
      elements: the elements.
    """

    current: Pass
    number: int
    elements: Sequence[Any]


@dataclass(frozen=True)
class Reply:
    """What came out of a task.

    Attributes:
      current: number of the pass, or `NO_PASS`.
      number: of the task in it.
      outputs: the elements that the DoFn emitted.
      seconds: how long the task took.
      spent: what was done, by step.
      events: the shards that were done.
      error: what failed; the worker has left a record of it in the store. "" if nothing did.
      cause: the exception, where the worker is a thread of this process.
    """

    current: int
    number: int
    outputs: Sequence[Output]
    seconds: float
    spent: Mapping[str, Tally] = field(default_factory=dict)
    events: Sequence[ShardEvent] = ()
    error: str = ""
    cause: BaseException | None = None


def encode_task(task: WorkerTask) -> bytes:
    """A task as bytes."""
    arrays: list[np.ndarray] = []
    current = task.current
    sources = current.sources
    meta: dict[str, Any] = {
        "number": task.number,
        "elements": _packed(task.elements, arrays),
        "pass": [current.number, current.program, current.step, current.stem],
        "served": _packed(current.served, arrays),
        "sources": None,
    }
    if sources is not None:
        meta["sources"] = json.dumps([sources.specs, sources.where, sources.x64])
    return encode_arrays(arrays, meta)


def decode_task(data: bytes) -> WorkerTask:
    """Undoes `encode_task`.

    Raises:
      ArrayFormatError: the bytes are no task.
    """

    def unpack(arrays: list[np.ndarray], meta: dict[str, Any]) -> WorkerTask:
        sources = None
        if meta["sources"] is not None:
            specs, where, x64 = json.loads(meta["sources"])
            pairs = {name: (source, leaf) for name, (source, leaf) in where.items()}
            sources = Sources(tuple(specs), pairs, x64)
        served = _unpacked(meta["served"], arrays)
        number, program, step, stem = meta["pass"]
        current = Pass(number, program, step, stem, served, sources)
        return WorkerTask(current, meta["number"], _unpacked(meta["elements"], arrays))

    return _decoded(data, unpack)


def encode_reply(reply: Reply) -> bytes:
    """A reply as bytes."""
    arrays: list[np.ndarray] = []
    outputs = _packed([list(output) for output in reply.outputs], arrays)
    meta = {
        "reply": [reply.current, reply.number, reply.seconds, reply.error],
        "spent": {step: vars(tally) for step, tally in reply.spent.items()},
        "events": to_plain(reply.events),
        "outputs": outputs,
    }
    return encode_arrays(arrays, meta)


def decode_reply(data: bytes) -> Reply:
    """Undoes `encode_reply`.

    Raises:
      ArrayFormatError: the bytes are no reply.
    """

    def unpack(arrays: list[np.ndarray], meta: dict[str, Any]) -> Reply:
        current, number, seconds, error = meta["reply"]
        outputs = [(tag, element) for tag, element in _unpacked(meta["outputs"], arrays)]
        spent = {step: Tally(**fields) for step, fields in meta["spent"].items()}
        events = tuple(from_plain(ShardEvent, event, "a reply") for event in meta["events"])
        return Reply(current, number, outputs, seconds, spent, events, error)

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
    """A tree of numbers, texts, bytes and environments as JSON, with the bytes in `arrays`."""
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
