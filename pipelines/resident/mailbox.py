"""Carries messages between the launcher and resident workers: in memory, or as files of a folder.

Each worker has a unique random name and gets tasks one at a time. These are the files of a folder:

    worker-W            worker W has joined; its heartbeat
    program-P           program P
    task-W-K, reply-W-K task number K of worker W, and its reply; the launcher removes both
    launcher            the heartbeat of the launcher
    stop                all workers end, including those that join later

Programs, tasks and replies are signed. A file appears whole: it is written under a temporary name
that is then renamed, or by one request. Only heartbeats are rewritten. No file has two writers,
except that any worker whose launcher is dead may write `stop`. So there are no locks, and both
sides poll.

In a local folder, a reader opens the file that it expects. At a URL each operation is a request.
There, the launcher lists the folder once per poll, which shows new workers, replies and heartbeats,
and it writes and reads the messages of all workers at once. Pauses grow with the time since the
last message, so the number of requests grows with its logarithm.
"""

from __future__ import annotations

import abc
import contextlib
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from beamjax.errors import ArrayFormatError
from beamjax.pipelines.resident.task_messages import (
    NO_PASS,
    Program,
    Reply,
    WorkerTask,
    decode,
    encode,
    signed,
    verified,
)
from beamjax.pipelines.worker.orphans import LAUNCHER, STOP, LauncherWatch, read, write
from beamjax.storage import files
from beamjax.telemetry.signs_of_life import BEAT_SECONDS, Heart, Pulse

PAUSES = ((0.02, 0.0003), (0.5, 0.001), (10.0, 0.005), (float("inf"), 0.025))
"""Pairs of seconds: until this time since the last message, the folder is polled at this interval.
Short intervals at first keep rounds short. Longer ones keep an idle worker below 1 % of a core."""

REMOTE_PAUSES = (0.03, 2.0)
"""The shortest and the longest pause in seconds between two polls of a URL. In between, a pause is
a tenth of the time since the last message."""

STOP_SECONDS, REMOTE_STOP_SECONDS = 0.05, 2.0
"""Seconds after which an idle worker looks again whether the job has ended."""

MOST_PROGRAMS = 256
"""Largest number of programs that a worker holds. It reads others again when it needs them."""

SILENT_SECONDS = 10.0
"""Seconds without a heartbeat after which a worker on another host counts as dead."""


@dataclass
class Peer:
    """A worker as the launcher sees it."""

    name: str  # unique: a retry of a worker joins under another name
    pulse: Pulse | None = None  # None if it is a thread of this process
    sent: int = 0  # the number of tasks sent to it, which is the number of its next task

    @property
    def is_dead(self) -> bool:
        """Whether its process has ended, or is silent. A silent one may be heard again."""
        return self.pulse is not None and self.pulse.is_dead(SILENT_SECONDS)


class Mailbox(Protocol):
    """The launcher's end of a mailbox. Only the thread of the run uses it."""

    def joined(self) -> list[Peer]:
        """The workers that have joined since the last call."""

    def publish(self, program: Program) -> None:
        """Makes a program available to all workers, before a task uses it."""

    def send(self, peer: Peer, task: WorkerTask) -> None:
        """Sends a task to a worker that has none."""

    def reply(self, peer: Peer) -> Reply | None:
        """Takes the reply to the last task of a worker; None if there is none yet."""

    def wait(self, since: float) -> None:
        """Waits for a short time, or until a reply may be there; `since`: when waiting began."""

    def open(self) -> None:
        """Lets workers join again after `stop`, which orphaned workers write as well."""

    def stop(self) -> None:
        """Ends all workers, including those that join later."""


class WorkerEnd(abc.ABC):
    """A worker's end of a mailbox."""

    is_here = False
    """Whether the worker is a thread of the launching process."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex

    @abc.abstractmethod
    def tasks(self) -> Iterator[WorkerTask]:
        """The tasks of this worker, until it has to end. Each must be answered before the next."""

    @abc.abstractmethod
    def reply(self, reply: Reply) -> None:
        """Sends the reply to the last task."""

    @abc.abstractmethod
    def program(self, name: str) -> Program:
        """A published program."""


# --- workers that are threads of this process


@dataclass
class MemoryMailbox:
    """A mailbox for workers in this process, which share all objects."""

    # Workers only read programs and `stopped`; each other attribute is filled by one side and
    # emptied by the other, by single operations of queues and dicts, which are atomic.
    programs: dict[str, Program] = field(default_factory=dict)
    stopped: threading.Event = field(default_factory=threading.Event)
    _new: queue.SimpleQueue[Peer] = field(default_factory=queue.SimpleQueue)
    _tasks: dict[str, queue.SimpleQueue[WorkerTask | None]] = field(default_factory=dict)
    _replies: dict[str, Reply] = field(default_factory=dict)
    _arrived: threading.Event = field(default_factory=threading.Event)

    def joined(self) -> list[Peer]:
        return [self._new.get() for _ in range(self._new.qsize())]

    def publish(self, program: Program) -> None:
        self.programs[program.name] = program

    def send(self, peer: Peer, task: WorkerTask) -> None:
        peer.sent += 1
        self._tasks[peer.name].put(task)

    def reply(self, peer: Peer) -> Reply | None:
        return self._replies.pop(peer.name, None)

    def wait(self, since: float) -> None:
        # A reply that arrives between these two lines is not lost: the caller looks at all replies
        # before it waits again, and no wait is longer than this.
        self._arrived.wait(0.1)
        self._arrived.clear()

    def open(self) -> None:
        self.stopped.clear()

    def stop(self) -> None:
        self.stopped.set()
        for tasks in list(self._tasks.values()):
            tasks.put(None)

    def join(self) -> MemoryWorker:
        """Adds a worker, and returns its end."""
        worker = MemoryWorker(self)
        # First the queue: the launcher may send a task as soon as it sees the peer.
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

    is_here = True

    def __init__(self, mailbox: MemoryMailbox):
        super().__init__()
        self.mailbox = mailbox

    def tasks(self) -> Iterator[WorkerTask]:
        while not self.mailbox.stopped.is_set():
            task = self.mailbox._tasks[self.name].get()
            if task is None:
                return
            yield task

    def program(self, name: str) -> Program:
        return self.mailbox.programs[name]

    def reply(self, reply: Reply) -> None:
        self.mailbox.answer(self.name, reply)


_here: dict[str, MemoryMailbox] = {}
"""The mailboxes of this process, by the folders of their jobs."""


# --- workers in other processes


class FileMailbox:
    """A mailbox in a folder that the launcher and all workers reach."""

    def __init__(self, folder: str, secret: bytes):
        self.folder = folder
        self.secret = secret
        self._peers: dict[str, Peer] = {}
        """All workers that have ever joined, by the names of their files."""
        self._published: set[str] = set()
        self._listed = self._listened = float("-inf")
        self._heart = Heart(files.join(folder, LAUNCHER))

    def joined(self) -> list[Peer]:
        now = time.monotonic()
        if now - self._listened > BEAT_SECONDS:
            self._listened = now
            self._listen()
        if now - self._listed < 0.02:  # listing a folder is slow
            return []
        self._listed = now
        return self._new(files.names(self.folder))

    def publish(self, program: Program) -> None:
        # Before the first task that names the program, so a worker that reads the task finds it.
        if program.name not in self._published:
            self._write_signed(f"program-{program.name}", encode(program))
            self._published.add(program.name)

    def send(self, peer: Peer, task: WorkerTask) -> None:
        # The number is part of the signed name, so an old task can't be passed off as the next one.
        self._write_signed(f"task-{peer.name}-{peer.sent}", encode(task))
        peer.sent += 1

    def reply(self, peer: Peer) -> Reply | None:
        name = f"reply-{peer.name}-{peer.sent - 1}"
        data = read(self.folder, name)
        if data is None:
            return None
        # The worker already waits for the next number, so it reads neither file again.
        files.remove_files(self.folder, [name, f"task-{peer.name}-{peer.sent - 1}"])
        return decode(Reply, verified(self.secret, name, data))

    def wait(self, since: float) -> None:
        time.sleep(_pause(self.folder, since))

    def open(self) -> None:
        # Only workers that took this process for dead have written it.
        files.remove_files(self.folder, [STOP])

    def stop(self) -> None:
        self._heart.stop()
        write(self.folder, STOP, b"stop")

    def _write_signed(self, name: str, data: bytes) -> None:
        write(self.folder, name, signed(self.secret, name, data))

    def _new(self, names: list[str]) -> list[Peer]:
        """The workers among these files that have not been seen before."""
        joined = []
        for name in names:
            if name.startswith("worker-") and name not in self._peers:
                # A worker that has joined and ended is no worker.
                with contextlib.suppress(FileNotFoundError):
                    pulse = Pulse(bytes(files.read(files.join(self.folder, name))))
                    self._peers[name] = Peer(name.removeprefix("worker-"), pulse)
                    joined.append(self._peers[name])
        return joined

    def _listen(self) -> None:
        """Reads the heartbeats of workers on other hosts."""
        for name, peer in self._peers.items():
            if peer.pulse is not None and peer.pulse.needs_looks:
                peer.pulse.look(read(self.folder, name))


class RemoteMailbox(FileMailbox):
    """A mailbox at a URL: messages of all workers are written, listed and read at once."""

    def __init__(self, folder: str, secret: bytes):
        super().__init__(folder, secret)
        self._outbox: dict[str, bytes] = {}
        self._inbox: dict[str, bytes] = {}
        self._awaited: dict[str, str] = {}
        """The names of the tasks whose replies have not arrived, by the names of the replies."""
        self._gone: list[str] = []
        """Files that were read. They are removed while the launcher waits anyway."""
        self._files: list[files.Listed] | None = None

    def joined(self) -> list[Peer]:
        # One exchange for each `wait`: `reply` is asked for each worker in between.
        if self._files is None:
            self._exchange()
        assert self._files is not None
        return self._new([file.name for file in self._files])

    def send(self, peer: Peer, task: WorkerTask) -> None:
        name = f"{peer.name}-{peer.sent}"
        content = signed(self.secret, f"task-{name}", encode(task))
        self._outbox[files.join(self.folder, f"task-{name}")] = content
        self._awaited[f"reply-{name}"] = f"task-{name}"
        peer.sent += 1

    def reply(self, peer: Peer) -> Reply | None:
        name = f"reply-{peer.name}-{peer.sent - 1}"
        data = self._inbox.pop(name, None)
        return None if data is None else decode(Reply, verified(self.secret, name, data))

    def wait(self, since: float) -> None:
        begun = time.monotonic()
        if self._outbox:
            files.remote().write_all(self._outbox)
            self._outbox = {}
        files.remove_files(self.folder, self._gone)
        self._gone = []
        # The requests above are part of the pause.
        time.sleep(max(0.0, _pause(self.folder, since) - (time.monotonic() - begun)))
        self._files = None

    def _exchange(self) -> None:
        """Lists the folder; reads the replies and heartbeats that have arrived."""
        self._files = files.listed(self.folder)
        for file in self._files:
            peer = self._peers.get(file.name)
            if peer is not None and peer.pulse is not None:
                peer.pulse.look((file.time, file.nbytes))
        arrived = [file.name for file in self._files if file.name in self._awaited]
        if arrived:
            paths = [files.join(self.folder, name) for name in arrived]
            self._inbox |= dict(zip(arrived, files.remote().read_all(paths), strict=True))
            self._gone += [*arrived, *(self._awaited.pop(name) for name in arrived)]


class FileWorker(WorkerEnd):
    """The worker's end of a mailbox in a folder."""

    def __init__(self, folder: str, secret: bytes):
        super().__init__()
        self.folder = folder
        self.secret = secret
        self._programs: dict[str, Program] = {}
        self._next = 0
        self._launcher = LauncherWatch(folder)
        self._heart = Heart(files.join(folder, f"worker-{self.name}"))

    def tasks(self) -> Iterator[WorkerTask]:
        since = looked = time.monotonic()
        every = REMOTE_STOP_SECONDS if files.is_url(self.folder) else STOP_SECONDS
        try:
            while True:
                # `reply` increases `_next`, and the caller replies before it asks for the next
                # task.
                name = f"task-{self.name}-{self._next}"
                data = self._launcher.look_for(name)
                if data is not None:
                    try:
                        task = decode(WorkerTask, verified(self.secret, name, data))
                    except ArrayFormatError as error:
                        self.reply(Reply(NO_PASS, 0, error=str(error)))
                    else:
                        yield task
                    since = time.monotonic()
                    continue
                # Only an idle worker looks for these, so that tasks cost no further reads.
                if time.monotonic() - looked > every:
                    looked = time.monotonic()
                    if self._launcher.look_for(STOP) or self._launcher.is_orphaned():
                        return
                time.sleep(_pause(self.folder, since))
        finally:
            self._heart.stop()

    def program(self, name: str) -> Program:
        if name not in self._programs:
            if len(self._programs) == MOST_PROGRAMS:  # remove the oldest
                del self._programs[next(iter(self._programs))]
            file = f"program-{name}"
            content = bytes(files.read(files.join(self.folder, file)))
            program = decode(Program, verified(self.secret, file, content))
            program.task.machine.set_up()
            self._programs[name] = program
        return self._programs[name]

    def reply(self, reply: Reply) -> None:
        name = f"reply-{self.name}-{self._next}"
        content = signed(self.secret, name, encode(reply))
        # The result may have taken minutes, and only this worker has it.
        files.retried(write, self.folder, name, content)
        self._next += 1


def _pause(folder: str, since: float) -> float:
    """Seconds to sleep before the next look at a folder; see `PAUSES`."""
    waited = time.monotonic() - since
    if files.is_url(folder):
        shortest, longest = REMOTE_PAUSES
        return min(max(shortest, 0.1 * waited), longest)
    return next(pause for limit, pause in PAUSES if waited < limit)


# --- choosing one of the two


def open_mailbox(folder: str, secret: bytes, shared: bool) -> Mailbox:
    """The launcher's end of a new mailbox; `shared`: workers are threads of this process."""
    if not shared:
        return (RemoteMailbox if files.is_url(folder) else FileMailbox)(folder, secret)
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
        return None if read(folder, STOP) is not None else FileWorker(folder, secret)
    except FileNotFoundError:  # The folder of the job is gone, or not there on this host.
        return None
