"""Carries messages between the launcher and resident workers: in memory, or as files of a folder.

Each worker has a unique name and gets tasks one at a time. These are the files of a folder:

    worker-W            worker W has joined; the file identifies its process
    program-P           program P, signed
    task-W-K, reply-W-K task number K of worker W, and its reply; the launcher removes both
    launcher            the heartbeat of the launcher
    stop                all workers end, including those that join later

Each file is written once, under a temporary name that is then renamed, so a reader never sees part
of a message. `launcher` is rewritten with each heartbeat. No file has two writers. So there are no
locks, and both sides poll.
"""

from __future__ import annotations

import abc
import json
import logging
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.resident.messages import (
    NO_PASS,
    Program,
    Reply,
    WorkerTask,
    decode_reply,
    decode_task,
    encode_reply,
    encode_task,
)
from beamjax.storage import files
from beamjax.telemetry import process_ids

PAUSES = ((0.02, 0.0003), (0.5, 0.001), (10.0, 0.005), (float("inf"), 0.025))
"""Pairs of seconds: until this time since the last message, the folder is polled at this interval.
Short intervals at first keep rounds short. Longer ones keep an idle worker below 1 % of a core."""

REMOTE_PAUSE = 0.1
"""Seconds between two polls of a URL, each of which is a request."""

LAUNCHER_SECONDS = 2.0
"""Seconds between two heartbeats of the launcher."""

MOST_PROGRAMS = 256
"""Largest number of programs that a worker holds. It reads others again when it needs them."""

LOST_SECONDS = 60.0
"""Seconds without a heartbeat after which workers end, since the launcher must be dead. On the same
machine they end as soon as its process has ended."""

_log = logging.getLogger("beamjax")


@dataclass
class Peer:
    """A worker as the launcher sees it.

    Attributes:
      name: the unique name of the worker.
      process: identifies its process; None if it is a thread of this process.
      sent: the number of tasks that were sent to it.
    """

    name: str
    process: dict[str, object] | None = None
    sent: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended. False for a process on another machine."""
        return self.process is not None and process_ids.is_alive(self.process) is False


class Mailbox(Protocol):
    """The launcher's end of a mailbox."""

    def joined(self) -> list[Peer]:
        """The workers that have joined since the last call."""

    def publish(self, program: Program) -> None:
        """Makes a program available to all workers, before a task uses it."""

    def send(self, peer: Peer, task: WorkerTask) -> None:
        """Sends a task to a worker that has none."""

    def reply(self, peer: Peer) -> Reply | None:
        """Takes the reply to the last task of a worker; None if there is none yet."""

    def wait(self, since: float) -> None:
        """Waits for a short time, or until a reply may be there; `since` is when waiting began."""

    def stop(self) -> None:
        """Ends all workers, including those that join later."""


class WorkerEnd(abc.ABC):
    """A worker's end of a mailbox.

    Args:
      secret: the key with which programs are signed.
    """

    def __init__(self, secret: bytes):
        self.secret = secret
        self.name = uuid.uuid4().hex
        self._programs: dict[str, Program] = {}

    @abc.abstractmethod
    def tasks(self) -> Iterator[WorkerTask]:
        """The tasks of this worker, until it has to end. Each must be answered before the next."""

    @abc.abstractmethod
    def reply(self, reply: Reply) -> None:
        """Sends the reply to the last task."""

    @abc.abstractmethod
    def _encoded(self, name: str) -> bytes:
        """A published program as bytes."""

    def program(self, name: str) -> Program:
        """A published program, decoded once for each worker."""
        if name not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:  # remove the oldest
                del self._programs[next(iter(self._programs))]
            self._programs[name] = Program.decode(self._encoded(name), self.secret)
        return self._programs[name]


# --- workers that are threads of this process


@dataclass
class MemoryMailbox:
    """A mailbox for workers in this process, which share all objects."""

    programs: dict[str, bytes] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    _new: queue.SimpleQueue[Peer] = field(default_factory=queue.SimpleQueue)
    _tasks: dict[str, queue.SimpleQueue[WorkerTask | None]] = field(default_factory=dict)
    _replies: dict[str, Reply] = field(default_factory=dict)
    _arrived: threading.Event = field(default_factory=threading.Event)

    def joined(self) -> list[Peer]:
        return [self._new.get() for _ in range(self._new.qsize())]

    def publish(self, program: Program) -> None:
        # Encoded, so that each worker has its own DoFns, as in Beam: they have state.
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
        """Adds a worker, and returns its end."""
        worker = MemoryWorker(self)
        self._tasks[worker.name] = queue.SimpleQueue()
        self._new.put(Peer(worker.name))
        self._arrived.set()
        return worker

    def answer(self, name: str, reply: Reply) -> None:
        """Delivers the reply of a worker."""
        self._replies[name] = reply
        self._arrived.set()


class MemoryWorker(WorkerEnd):
    """The worker's end of a `MemoryMailbox`."""

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


# --- workers in other processes


class FileMailbox:
    """A mailbox in a folder that the launcher and all workers reach.

    Args:
      folder: a path or URL.
      secret: the key with which programs are signed.
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
        threading.Thread(target=self._keep_beating, name="beamjax launcher", daemon=True).start()

    def joined(self) -> list[Peer]:
        if time.monotonic() - self._looked < 0.02:  # listing a folder is slow
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
        # The worker already waits for the next number, so it reads neither file again.
        files.remove_files(self.folder, [name, f"task-{peer.name}-{peer.sent - 1}"])
        return decode_reply(data)

    def wait(self, since: float) -> None:
        time.sleep(_pause(self.folder, since))

    def stop(self) -> None:
        self._stopped.set()
        self._write("stop", b"stop")  # Beam cannot write an empty file to S3.

    def _keep_beating(self) -> None:
        while not self._stopped.wait(LAUNCHER_SECONDS):
            try:
                self._beat()
            except Exception as error:  # whatever a file system raises
                # Workers miss a heartbeat, but not the next ones.
                _log.warning("beamjax: can't write the heartbeat to %s: %s", self.folder, error)

    def _beat(self) -> None:
        # Workers notice that the number changes: clocks of machines may differ.
        self._beats += 1
        record = {"beats": self._beats, "process": process_ids.this_process()}
        self._write("launcher", json.dumps(record).encode())

    def _write(self, name: str, data: bytes) -> None:
        files.write(files.join(self.folder, name), data, make=False)


class FileWorker(WorkerEnd):
    """The worker's end of a `FileMailbox`.

    Args:
      folder: the folder of the mailbox.
      secret: the key with which programs are signed.
    """

    def __init__(self, folder: str, secret: bytes):
        super().__init__(secret)
        self.folder = folder
        self._next = 0
        # The last heartbeat, and when it was first seen.
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
                if _read(self.folder, "stop") is not None or self._is_orphaned():
                    return
            time.sleep(_pause(self.folder, since))

    def _encoded(self, name: str) -> bytes:
        return bytes(files.read(files.join(self.folder, f"program-{name}")))

    def reply(self, reply: Reply) -> None:
        self._write(f"reply-{self.name}-{self._next}", encode_reply(reply))
        self._next += 1

    def _is_orphaned(self) -> bool:
        """Whether the launcher is dead, or its folder is gone."""
        beat, since = self._heard
        if time.monotonic() - since < LAUNCHER_SECONDS and beat is not None:
            return False
        data = _read(self.folder, "launcher")
        if data is None:
            # The file is gone after it was seen, so the job has ended. If it was never seen, this
            # machine may see new files late, as on NFS.
            return beat is not None or time.monotonic() - since > LOST_SECONDS
        if data != beat:
            self._heard = data, time.monotonic()
        elif time.monotonic() - since > LOST_SECONDS:
            return True
        return process_ids.is_alive(json.loads(data)["process"]) is False

    def _write(self, name: str, data: bytes) -> None:
        files.write(files.join(self.folder, name), data, make=False)


def _read(folder: str, name: str) -> bytes | None:
    """The content of a file; None if it does not exist."""
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


# --- choosing one of the two


def open_mailbox(folder: str, secret: bytes, shared: bool) -> Mailbox:
    """The launcher's end of a new mailbox.

    Args:
      folder: the folder of messages.
      secret: the key with which programs are signed.
      shared: whether workers are threads of this process.
    """
    if not shared:
        return FileMailbox(folder, secret)
    _here[folder] = mailbox = MemoryMailbox()
    return mailbox


def close_mailbox(folder: str) -> None:
    """Removes a mailbox of this process from the list in which workers find it."""
    _here.pop(folder, None)


def join(folder: str, secret: bytes) -> WorkerEnd | None:
    """The end of a new worker; None if the job has ended."""
    mailbox = _here.get(folder)
    if mailbox is not None:
        return None if mailbox.stopped.is_set() else mailbox.join()
    try:
        return None if _read(folder, "stop") is not None else FileWorker(folder, secret)
    except FileNotFoundError:  # The folder of the job is gone.
        return None
