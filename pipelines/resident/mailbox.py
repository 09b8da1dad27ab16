"""How the launcher and resident workers exchange messages: in memory, or as files of a folder.

Each worker has a number of its own and gets tasks one at a time. In a folder, the task number k of
worker w is the file `task-w-k` and its reply the file `reply-w-k`; a worker announces itself by
`worker-w`, and the file `stop` ends all of them.
"""

from __future__ import annotations

import abc
import hashlib
import hmac
import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import cloudpickle
import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.values.elements import Environment, EnvironmentCoder
from beamjax.pipelines.worker.tasks import Sources, StepFn
from beamjax.runtime.materialized_outputs import NOTHING, MaterializedOutputs
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry import process_ids
from beamjax.telemetry.progress import ShardEvent, Tally

PAUSES = ((0.02, 0.0003), (0.5, 0.001), (10.0, 0.005), (float("inf"), 0.025))
"""Seconds since the last message, and seconds between two looks until then. Short intervals at
first keep a round short; long ones later keep an idle worker below 1 % of a core."""

REMOTE_PAUSE = 0.1
"""Seconds between two looks at a URL, each of which is a request."""

LAUNCHER_SECONDS = 2.0
"""Seconds between two heartbeats of the launcher."""

MOST_PROGRAMS = 256
"""Largest number of programs that a worker holds; it reads others anew when it needs them."""

LOST_SECONDS = 60.0
"""Seconds without a heartbeat after which workers consider the launcher dead."""


@dataclass
class Peer:
    """A worker as the launcher sees it.

    Attributes:
      name: names the worker.
      process: identifies its process; None where it is a thread of this process.
      sent: tasks that it was given.
    """

    name: str
    process: dict[str, object] | None = None
    sent: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether its process has certainly ended."""
        return self.process is not None and process_ids.is_alive(self.process) is False


class Mailbox(Protocol):
    """The launcher's end."""

    def joined(self) -> list[Peer]:
        """The workers that have announced themselves since the last call."""

    def publish(self, program: Program) -> None:
        """Makes a program known to all workers."""

    def send(self, peer: Peer, task: WorkerTask) -> None:
        """Gives a worker a task."""

    def reply(self, peer: Peer) -> Reply | None:
        """The reply to the last task of a worker, if it is there; it is given once."""

    def wait(self, since: float) -> None:
        """Waits for a short time, or until a reply may be there; `since` is when waiting began."""

    def stop(self) -> None:
        """Ends all workers, those included that join later."""


class WorkerEnd(abc.ABC):
    """A worker's end.

    Args:
      secret: signs programs.
    """

    def __init__(self, secret: bytes):
        self.secret = secret
        self.name = uuid.uuid4().hex
        self._programs: dict[str, Program] = {}

    @abc.abstractmethod
    def tasks(self) -> Iterator[WorkerTask]:
        """The tasks of this worker, until it has to end."""

    @abc.abstractmethod
    def reply(self, reply: Reply) -> None:
        """Answers the last task."""

    @abc.abstractmethod
    def _encoded(self, name: str) -> bytes:
        """A program that was published, as bytes."""

    def program(self, name: str) -> Program:
        """A program that was published."""
        if name not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            self._programs[name] = Program.decode(self._encoded(name), self.secret)
        return self._programs[name]


# --- workers that are threads of this process


@dataclass
class MemoryMailbox:
    """A mailbox for workers in this process, which share all objects."""

    programs: dict[str, bytes] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    _new: list[Peer] = field(default_factory=list)
    _tasks: dict[str, queue.SimpleQueue[WorkerTask | None]] = field(default_factory=dict)
    _replies: dict[str, Reply] = field(default_factory=dict)
    _arrived: threading.Event = field(default_factory=threading.Event)

    def joined(self) -> list[Peer]:
        new, self._new = self._new, []
        return new

    def publish(self, program: Program) -> None:
        # Encoded, so that each worker has DoFns of its own, as Beam does it.
        if program.name not in self.programs:
            self.programs[program.name] = program.encode(b"")

    def send(self, peer: Peer, task: WorkerTask) -> None:
        peer.sent += 1
        self._tasks[peer.name].put(task)

    def reply(self, peer: Peer) -> Reply | None:
        return self._replies.pop(peer.name, None)

    def wait(self, since: float) -> None:
        self._arrived.wait(0.1)
        self._arrived.clear()

    def stop(self) -> None:
        self.stopped.set()
        for tasks in list(self._tasks.values()):
            tasks.put(None)

    def join(self) -> MemoryWorker:
        """The end of a new worker."""
        worker = MemoryWorker(self)
        self._tasks[worker.name] = queue.SimpleQueue()
        self._new.append(Peer(worker.name))
        self._arrived.set()
        return worker

    def answer(self, name: str, reply: Reply) -> None:
        """A worker has a reply."""
        self._replies[name] = reply
        self._arrived.set()


class MemoryWorker(WorkerEnd):
    """The end of a worker in this process."""

    def __init__(self, mailbox: MemoryMailbox):
        super().__init__(b"")
        self.mailbox = mailbox

    def tasks(self) -> Iterator[WorkerTask]:
        while not self.mailbox.stopped.is_set():
            task = self.mailbox._tasks[self.name].get()
            if task is None:
                return
            yield task

    def _encoded(self, name: str) -> bytes:
        return self.mailbox.programs[name]

    def reply(self, reply: Reply) -> None:
        self.mailbox.answer(self.name, reply)


_here: dict[str, MemoryMailbox] = {}
"""The mailboxes of this process, by the folders of their jobs."""


# --- workers anywhere


class FileMailbox:
    """A mailbox in a folder that the launcher and all workers reach.

    Args:
      folder: a path or URL.
      secret: signs programs.
    """

    def __init__(self, folder: str, secret: bytes):
        self.folder = folder
        self.secret = secret
        self._known: set[str] = set()
        self._published: set[str] = set()
        self._looked = float("-inf")
        self._stopped = threading.Event()
        self._beats = 0
        self._beat()
        threading.Thread(target=self._live, name="beamjax launcher", daemon=True).start()

    def joined(self) -> list[Peer]:
        if time.monotonic() - self._looked < 0.02:
            return []
        self._looked = time.monotonic()
        found = []
        for name in files.names(self.folder):
            if name.startswith("worker-") and name not in self._known:
                self._known.add(name)
                process = json.loads(bytes(files.read(files.join(self.folder, name))))
                found.append(Peer(name.removeprefix("worker-"), process))
        return found

    def publish(self, program: Program) -> None:
        if program.name not in self._published:
            self._write(f"program-{program.name}", program.encode(self.secret))
            self._published.add(program.name)

    def send(self, peer: Peer, task: WorkerTask) -> None:
        self._write(f"task-{peer.name}-{peer.sent}", encode_task(task))
        peer.sent += 1

    def reply(self, peer: Peer) -> Reply | None:
        name = f"reply-{peer.name}-{peer.sent - 1}"
        data = _read(self.folder, name)
        if data is None:
            return None
        files.remove_files(self.folder, [name, f"task-{peer.name}-{peer.sent - 1}"])
        return decode_reply(data)

    def wait(self, since: float) -> None:
        time.sleep(_pause(self.folder, since))

    def stop(self) -> None:
        self._stopped.set()
        self._write("stop", b"")

    def _live(self) -> None:
        while not self._stopped.wait(LAUNCHER_SECONDS):
            self._beat()

    def _beat(self) -> None:
        self._beats += 1
        record = {"beats": self._beats, "process": process_ids.this_process()}
        self._write("launcher", json.dumps(record).encode())

    def _write(self, name: str, data: bytes) -> None:
        files.write(files.join(self.folder, name), data, make=False)


class FileWorker(WorkerEnd):
    """The end of a worker that finds its mailbox in a folder.

    Args:
      folder: of the mailbox.
      secret: signs programs.
    """

    def __init__(self, folder: str, secret: bytes):
        super().__init__(secret)
        self.folder = folder
        self._next = 0
        self._heard: tuple[object, float] = None, time.monotonic()
        self._write(f"worker-{self.name}", json.dumps(process_ids.this_process()).encode())

    def tasks(self) -> Iterator[WorkerTask]:
        since = looked = time.monotonic()
        while True:
            data = _read(self.folder, f"task-{self.name}-{self._next}")
            if data is not None:
                try:
                    task = decode_task(data)
                except ArrayFormatError as error:
                    self.reply(Reply(NO_PASS, 0, [], 0.0, error=str(error)))
                else:
                    yield task
                since = time.monotonic()
                continue
            if time.monotonic() - looked > 0.05:
                looked = time.monotonic()
                if _read(self.folder, "stop") is not None or self._is_alone():
                    return
            time.sleep(_pause(self.folder, since))

    def _encoded(self, name: str) -> bytes:
        return bytes(files.read(files.join(self.folder, f"program-{name}")))

    def reply(self, reply: Reply) -> None:
        self._write(f"reply-{self.name}-{self._next}", encode_reply(reply))
        self._next += 1

    def _is_alone(self) -> bool:
        """Whether the launcher is dead, or its folder is gone."""
        beat, since = self._heard
        if time.monotonic() - since < LAUNCHER_SECONDS and beat is not None:
            return False
        data = _read(self.folder, "launcher")
        if data is None:
            return beat is not None or time.monotonic() - since > LOST_SECONDS
        if data != beat:
            self._heard = data, time.monotonic()
        elif time.monotonic() - since > LOST_SECONDS:
            return True
        return process_ids.is_alive(json.loads(data)["process"]) is False

    def _write(self, name: str, data: bytes) -> None:
        files.write(files.join(self.folder, name), data, make=False)


def _read(folder: str, name: str) -> bytes | None:
    """The content of a file; None if it is not there."""
    path = files.join(folder, name)
    try:
        if not files.is_url(path):
            with open(path, "rb") as file:
                return file.read()
        return bytes(files.read(path)) if name in files.names(folder) else None
    except FileNotFoundError:
        return None


def _pause(folder: str, since: float) -> float:
    if files.is_url(folder):
        return REMOTE_PAUSE
    waited = time.monotonic() - since
    return next(pause for limit, pause in PAUSES if waited < limit)


# --- the two kinds


def open_mailbox(folder: str, secret: bytes, shared: bool) -> Mailbox:
    """The launcher's end of a new mailbox.

    Args:
      folder: of the job.
      secret: signs programs.
      shared: whether workers are threads of this process.
    """
    if not shared:
        return FileMailbox(folder, secret)
    _here[folder] = mailbox = MemoryMailbox()
    return mailbox


def close_mailbox(folder: str) -> None:
    """Forgets a mailbox of this process."""
    _here.pop(folder, None)


def join(folder: str, secret: bytes) -> WorkerEnd | None:
    """The worker's end for a new worker; None if the job has ended."""
    mailbox = _here.get(folder)
    if mailbox is not None:
        return None if mailbox.stopped.is_set() else mailbox.join()
    try:
        return None if _read(folder, "stop") is not None else FileWorker(folder, secret)
    except FileNotFoundError:  # The folder of the job is gone.
        return None


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
    """

    name: str
    fn: StepFn
    written: tuple[str, ...] = ()

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
      results: the placed values that go where the results of the run are kept.
    """

    number: int
    program: str
    step: str
    stem: str = ""
    served: Environment | None = None
    sources: Sources | None = None
    results: MaterializedOutputs = NOTHING


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
    """The reply to a task.

    Attributes:
      current: number of the pass, or `NO_PASS`.
      number: of the task in it.
      outputs: the elements that the DoFn emitted.
      seconds: how long the task took.
      spent: what was done, by step.
      events: the shards that were computed.
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
        "results": to_plain(current.results),
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
        results = from_plain(MaterializedOutputs, meta["results"], "a task")
        current = Pass(number, program, step, stem, served, sources, results)
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
