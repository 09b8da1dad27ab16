"""The Beam job of resident workers, which lasts as long as a run or a session."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import logging
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam

from beamjax.bodies.python_bodies import with_settings_of_here
from beamjax.errors import BeamjaxError, JobCancelledError, SourceError, WorkerError
from beamjax.pipelines.launch import (
    await_job_server,
    new_pipeline,
    run_pipeline,
)
from beamjax.pipelines.resident.mailbox import (
    Mailbox,
    Peer,
    close_mailbox,
    open_mailbox,
)
from beamjax.pipelines.resident.task_messages import (
    NO_PASS,
    Output,
    Pass,
    Program,
    Reply,
    WorkerTask,
)
from beamjax.pipelines.resident.worker import ServeTasks
from beamjax.pipelines.runners.connect import Connection
from beamjax.pipelines.values.store import Store, is_store
from beamjax.pipelines.worker import lost_workers, orphans
from beamjax.plan.merging import workers_of
from beamjax.storage import files
from beamjax.telemetry.monitor import Monitor

PREFIX = "rounds-"
"""The beginning of the names of folders with messages."""

ELEMENTS_PER_WORKER = 8
"""Elements of the job per worker. Runners assign elements to workers by hash, so with one for each,
many workers would get none. A worker serves tasks while it processes its first element; further
elements wait until the job ends."""

MAX_STARTS = 4
"""Largest number of starts of the job without a finished pass. After these, the run fails with the
error of the job."""

ALONE_SECONDS = 30.0
"""Seconds without any worker, after all have died, until the job is started again. They double with
each start; those of the first one depend on the runner."""

SECONDS_TO_END = 15.0
"""Seconds in which the job ends after `stop`. Otherwise it is cancelled."""

SECONDS_AFTER_ERROR = 0.3
"""The same after an error, when nothing needs the tasks that workers still compute."""

_log = logging.getLogger("beamjax")


@dataclass
class _Attempt:
    """One start of the job."""

    abort: BeamjaxError | None = None  # if set, the job is ended with this error
    failure: BaseException | None = None  # the error with which it ended
    had_workers: bool = False  # whether one of its workers was ever seen alive
    # When its last worker was seen dead; None if it has workers.
    alone_since: float | None = None
    # Runs the job and waits for its end.
    thread: threading.Thread = field(init=False)


class ResidentJob:
    """A Beam job with resident workers, from the first pass until `close`."""

    def __init__(self, connection: Connection, store: Store):
        # Other pipelines run at the same time, and an in-memory runner has state.
        runner = connection.runner
        if connection.spec.in_this_process:
            runner = copy.copy(runner)
        self.connection = connection
        # In the store of the run, which the launcher and all workers must reach.
        self.folder = files.join(store.root, f"{PREFIX}{secrets.token_hex(8)}")
        self._store = store
        self._runner = runner
        self._secret = secrets.token_bytes(32)
        self._pool: Pool | None = None
        self._starts = 0  # since the last finished pass
        self._hopeless: BeamjaxError | None = None  # why no start can succeed

    def run(self, program: Program, *arguments: Any) -> list[Output]:
        """Runs a program on the workers; see `Pool.run`."""
        try:
            pool = self._pool or self.start()
            outputs = pool.run(program, *arguments)
        except OSError as error:
            raise SourceError(
                f"{self.folder}: cannot exchange messages with the workers ({error}); expected a "
                "folder that this process and all workers can write and read (option work_folder)"
            ) from error
        self._starts = 1  # only starts since the last finished pass count
        return outputs

    def start(self) -> Pool:
        """Starts the job, and returns its workers."""
        files.make_folder(self.folder)
        self._mailbox = open_mailbox(self.folder, self._secret, self.connection.shared)
        self._pool = Pool(self._mailbox, self.check)
        self._start()
        return self._pool

    def check(self, died: bool) -> None:
        """Starts the job again if it has ended, or if its runner leaves it without workers."""
        assert self._pool is not None
        if self._hopeless is not None:
            raise self._hopeless
        attempt = self._attempt
        if died and self._is_abandoned(attempt):
            attempt.failure = attempt.abort = WorkerError("all its workers died")
        elif attempt.thread.is_alive():
            if not died:
                attempt.had_workers, attempt.alone_since = True, None
            return
        if attempt.failure is None and not self._pool.has_had_workers:
            raise WorkerError(
                f"work_folder: the workers do not see {self.folder}; expected a folder that this "
                f"process on {socket.gethostname()} and the pools on all hosts can write and read"
            )
        if self._starts >= MAX_STARTS:
            raise WorkerError(
                f"{type(self._runner).__name__}: the job of the resident workers ended "
                f"{self._starts} times before its work was done: {attempt.failure or 'no error'}"
            ) from attempt.failure
        reason = attempt.failure or "it had ended"
        _log.warning("starting the job of the resident workers again: %s", reason)
        self._mailbox.open()
        self._start()

    def _is_abandoned(self, attempt: _Attempt) -> bool:
        """Whether the runner will not start workers any more, now that all have died."""
        now = time.monotonic()
        if attempt.alone_since is None:
            attempt.alone_since = now
        spec, again = self.connection.spec, self._starts - 1
        if attempt.had_workers and not spec.replaces_workers:
            return True
        limit = ALONE_SECONDS * 2**again if again else spec.seconds_alone
        return now - attempt.alone_since > limit

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Ends the workers and the job; `seconds` are theirs to finish their tasks."""
        if self._pool is None:
            return
        attempt = self._attempt
        try:
            self._mailbox.stop()
        except Exception as error:  # Workers miss the launcher later, so the job is cancelled.
            attempt.abort = JobCancelledError(f"its workers can't be ended: {error}")
        attempt.thread.join(seconds)
        if attempt.thread.is_alive():
            # The job thread looks for `abort` several times a second, and then cancels the job.
            attempt.abort = JobCancelledError("the job of the resident workers did not end")
            attempt.thread.join(SECONDS_TO_END)
        close_mailbox(self.folder)
        with contextlib.suppress(Exception):
            remove_folder(self.folder)

    def _start(self) -> None:
        self._starts += 1
        self._attempt = attempt = _Attempt()
        work = functools.partial(with_settings_of_here(self._run), attempt)
        attempt.thread = threading.Thread(target=work, name="beamjax rounds", daemon=True)
        attempt.thread.start()

    def _await_job_server(self, pipeline: beam.Pipeline) -> None:
        """As `await_job_server`; starting the job again would not help."""
        try:
            await_job_server(pipeline.options)
        except WorkerError as error:
            self._hopeless = error
            raise

    def _reason(self, pipeline: beam.Pipeline) -> Callable[[], BeamjaxError | None]:
        """A look for the reason why no worker joins. Once one has, the others can do without it."""
        progress = self.connection.spec.job(pipeline.options).look(attempts=2)

        def look() -> BeamjaxError | None:
            if self._pool is None or self._pool.has_had_workers:
                return None
            self._hopeless = progress()
            return self._hopeless

        return look

    def _run(self, attempt: _Attempt) -> None:
        """Runs the job to its end."""
        connection = self.connection
        try:
            with new_pipeline(connection, self._runner) as pipeline:
                self._await_job_server(pipeline)
                add_workers(pipeline, connection, ServeTasks(self.folder, self._secret))
                end = lost_workers.end_pipeline if connection.shared else lost_workers.end_workers
                looks = [lambda: attempt.abort, self._reason(pipeline)]
                run_pipeline(pipeline, looks, functools.partial(end, self._store))
        except BaseException as error:
            attempt.failure = attempt.failure or error


def add_workers(pipeline: beam.Pipeline, connection: Connection, fn: ServeTasks) -> None:
    """Adds resident workers to a pipeline."""
    workers = range(ELEMENTS_PER_WORKER * (workers_of(connection.flags) or 1))
    (
        pipeline
        | "Workers" >> beam.Create(list(workers), reshuffle=False)
        | "Deal" >> beam.Reshuffle()
        | "ServeTasks" >> beam.ParDo(fn)
    )


def remove_folder(folder: str) -> None:
    """Removes a folder of messages."""
    # `stop` goes last, so that a worker that starts late still sees it. Workers may still be
    # writing their last file, so this tries again for a second.
    names = files.names(folder)
    files.remove_files(folder, [name for name in names if name != "stop"])
    deadline = time.monotonic() + 1.0
    while files.names(folder) and time.monotonic() < deadline:
        files.remove_files(folder, files.names(folder))
        files.remove(folder, "")


def remove_orphans(parent: str) -> None:
    """Removes the stores of runs in a folder whose launchers are dead."""
    # Their workers have seen it, or it is certain as the launcher was on this machine. A store that
    # can't be removed is no reason to fail.
    with contextlib.suppress(Exception):
        for store in files.folders(parent):
            folder = files.join(parent, store)
            if is_store(store) and any(
                orphans.is_orphaned(files.join(folder, name))
                for name in files.folders(folder)
                if name.startswith((PREFIX, orphans.PREFIX))
            ):
                files.remove_tree(folder)


@contextlib.contextmanager
def resident_job(connection: Connection, store: Store) -> Iterator[ResidentJob]:
    """A context with a job of resident workers."""
    job = ResidentJob(connection, store)
    try:
        yield job
    except BaseException:
        job.close(SECONDS_AFTER_ERROR)
        raise
    job.close()


FIRST_TASKS = 4
"""Tasks for each worker in the first pass of a program, whose time is not known."""

TASK_SECONDS = 0.25
"""Seconds that a task should take at least, so that the cost of its messages does not matter."""

MAX_TASKS = 16
"""Largest number of tasks for each worker in a pass. More would hardly balance the load better."""

COPY_SECONDS = 0.25
"""Seconds after which a task is late, at least. An idle worker then computes it as well."""

COPY_RATIO = 3.0
"""A task is late if it takes this many times the median of the finished tasks of the pass."""

MORE_COPIES = 4.0
"""Each further copy of a task is made after so many times the wait for the one before it."""

UNKNOWN_SECONDS = 5.0
"""Seconds after which a task is late if no task of the pass is finished. Workers may still compile
the body."""

CHECK_SECONDS = 0.2
"""Seconds between two checks of the job and of the processes of its workers."""


@dataclass
class _Flight:
    """A task that a worker has and has not answered."""

    task: WorkerTask
    peer: Peer
    since: float


def _since(flight: _Flight) -> float:
    return flight.since


@dataclass
class Pool:
    """Distributes the tasks of passes to the workers of a job."""

    # A worker has one task at a time. If it dies or is slow, another one gets the same task, and
    # the first reply counts: all of them compute the same bits.
    mailbox: Mailbox
    # Called with whether all workers have died and none has joined since; starts the job again if
    # need be, or raises an error.
    check: Callable[[bool], None]
    _peers: list[Peer] = field(default_factory=list)
    _flights: dict[str, _Flight] = field(default_factory=dict)
    """The task that each busy worker has, by the name of the worker."""
    _suspects: set[str] = field(default_factory=set)
    """Names of workers with a late task, which get no other task while there are other workers."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    """Numbers of passes. They tell replies to an earlier pass from those to the current one."""
    _seconds: dict[str, float] = field(default_factory=dict)
    """Seconds for each element in the last pass of a program."""
    _dead: list[Peer] = field(default_factory=list)
    """Workers that are dead, or whose heartbeats do not arrive."""
    _died: bool = False
    """Whether a worker has died since the last one joined."""

    @property
    def has_had_workers(self) -> bool:
        """Whether any worker has ever joined."""
        return bool(self._peers or self._dead)

    def run(
        self,
        program: Program,
        current: Callable[[int], Pass],
        elements: Sequence[Any],
        look: Callable[[], None],
        monitor: Monitor,
    ) -> list[Output]:
        """Runs a program over elements; returns what it emits, in the order of the elements."""
        # `current` makes the pass from its number; `look` raises an error to end the pass.
        self.mailbox.publish(program)
        number = next(self._numbers)
        tasks = self._tasks(program.name, current(number), elements)
        done: dict[int, Reply] = {}
        left = collections.deque(tasks)
        since = looked = time.monotonic()
        while len(done) < len(tasks):
            self._assign(left, tasks, done)
            arrived = self._collect(number, done, monitor)
            now = time.monotonic()
            if now - looked > CHECK_SECONDS:
                looked = now
                look()
                left.extend(self._lost(number, done))
                self.check(self._died and not self._peers)
            if arrived:
                since = now  # waiting starts again, with short pauses
            else:
                self.mailbox.wait(since)
        spent = sum(reply.seconds for reply in done.values())
        self._seconds[program.name] = spent / max(len(elements), 1)
        # Sorted by task, so results do not depend on which worker replies first.
        return [output for _, reply in sorted(done.items()) for output in reply.outputs]

    def _tasks(self, program: str, current: Pass, elements: Sequence[Any]) -> list[WorkerTask]:
        """Cuts the elements of a pass into tasks with about the same number of elements."""
        workers = max(len(self._peers), 1)
        known = self._seconds.get(program)
        each = FIRST_TASKS
        if known is not None:
            each = int(known * len(elements) / workers / TASK_SECONDS)
        count = min(workers * max(1, min(each, MAX_TASKS)), len(elements))
        bounds = [number * len(elements) // count for number in range(count + 1)]
        ranges = itertools.pairwise(bounds)
        return [WorkerTask(current, i, elements[a:b]) for i, (a, b) in enumerate(ranges)]

    def _assign(
        self, left: collections.deque[WorkerTask], tasks: Sequence[WorkerTask], done: dict[int, Any]
    ) -> None:
        """Sends tasks to idle workers: those that are left, then those that are late."""
        joined = self.mailbox.joined()
        # A host that was out of reach for a while is there again.
        joined += [peer for peer in self._dead if not peer.is_dead]
        if joined:
            self._dead = [peer for peer in self._dead if peer not in joined]
            self._peers += joined
            self._died = False
        free = [peer for peer in self._peers if peer.name not in self._flights]
        trusted = [peer for peer in free if peer.name not in self._suspects] or free
        for peer in trusted:
            task = self._next(peer, left, len(tasks)) if left else self._late(tasks, done)
            if task is None:
                return
            self._flights[peer.name] = _Flight(task, peer, time.monotonic())
            self.mailbox.send(peer, task)

    def _next(self, peer: Peer, left: collections.deque[WorkerTask], count: int) -> WorkerTask:
        """The next task for a worker."""
        # Prefers the tasks that the worker had in the last round: it has their members in its
        # caches.
        place, workers = self._peers.index(peer), len(self._peers)
        own = [task for task in left if task.number * workers // count == place]
        task = own[0] if own else left[-1]
        left.remove(task)
        return task

    def _late(self, tasks: Sequence[WorkerTask], done: dict[int, Any]) -> WorkerTask | None:
        """The late task with the fewest copies; None if there is none."""
        if not tasks:
            return None
        number = tasks[0].current.number
        flights = [
            flight
            for flight in self._flights.values()
            if flight.task.current.number == number and flight.task.number not in done
        ]
        copies = collections.Counter(flight.task.number for flight in flights)
        # A task is late when its latest copy has flown longer than `limit`, which grows with the
        # number of copies: a slow pass is not copied to all workers.
        limit = UNKNOWN_SECONDS
        if done:
            usual = statistics.median(reply.seconds for reply in done.values())
            limit = max(COPY_SECONDS, COPY_RATIO * usual)
        now = time.monotonic()
        latest = {flight.task.number: flight.since for flight in sorted(flights, key=_since)}
        late = [
            flight
            for flight in sorted(flights, key=_since)
            if now - latest[flight.task.number]
            > limit * MORE_COPIES ** (copies[flight.task.number] - 1)
        ]
        if not late:
            return None
        oldest = min(late, key=lambda flight: copies[flight.task.number])
        self._suspects.add(oldest.peer.name)
        return oldest.task

    def _collect(self, number: int, done: dict[int, Reply], monitor: Monitor) -> bool:
        """Takes the replies that have arrived; returns whether there were any."""
        arrived = False
        for flight in list(self._flights.values()):
            reply = self.mailbox.reply(flight.peer)
            if reply is None:
                continue
            arrived = True
            del self._flights[flight.peer.name]
            self._suspects.discard(flight.peer.name)
            # Late workers reply to tasks of earlier passes, or that another worker has done. Both
            # gave the same results, so such a reply, and its error, can be ignored.
            is_first = reply.current == number and reply.number not in done
            if reply.error and (is_first or reply.current == NO_PASS):
                raise WorkerError(reply.error) from reply.cause
            if not is_first:
                continue
            done[reply.number] = reply
            monitor.reported(flight.peer.name, reply.work)
        return arrived

    def _lost(self, number: int, done: dict[int, Reply]) -> list[WorkerTask]:
        """Removes dead workers; returns the unfinished tasks of this pass that only they had."""
        lost = {}
        for peer in [peer for peer in self._peers if peer.is_dead]:
            self._peers.remove(peer)
            self._dead.append(peer)
            self._died = True
            self._suspects.discard(peer.name)
            flight = self._flights.pop(peer.name, None)
            if flight is not None and flight.task.current.number == number:
                lost[flight.task.number] = flight.task
        flying = {flight.task.number for flight in self._flights.values()}
        return [task for number, task in lost.items() if number not in done.keys() | flying]
