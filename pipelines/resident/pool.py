"""Distributes the tasks of passes to resident workers, however fast they are and whoever dies."""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from beamjax.errors import WorkerError
from beamjax.pipelines.resident.mailbox import Mailbox, Peer
from beamjax.pipelines.resident.task_messages import (
    NO_PASS,
    Pass,
    Program,
    Reply,
    Result,
    WorkerTask,
)
from beamjax.telemetry.monitor import Monitor

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
"""Each further copy of a task is made after so many times the wait for the one before it. A
worker holds one task at a time, so it has one copy of a task at most."""

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
        current: Pass,
        elements: Sequence[Any],
        look: Callable[[], None],
        monitor: Monitor,
    ) -> list[Result]:
        """Runs a program over elements; returns the results of its tasks, in their order."""
        # `look` raises an error to end the pass.
        self.mailbox.publish(program)
        number = next(self._numbers)
        tasks = self._tasks(program.name, replace(current, number=number), elements)
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
        # Sorted by task, so they do not depend on which worker replies first.
        return [reply.result for _, reply in sorted(done.items())]

    def _tasks(self, program: str, current: Pass, elements: Sequence[Any]) -> list[WorkerTask]:
        """Cuts the elements of a pass into tasks with about the same number of elements."""
        workers = max(len(self._peers), 1)
        known = self._seconds.get(program)
        per_worker = FIRST_TASKS
        if known is not None:
            per_worker = int(known * len(elements) / workers / TASK_SECONDS)
        count = min(workers * max(1, min(per_worker, MAX_TASKS)), len(elements))
        bounds = [number * len(elements) // count for number in range(count + 1)]
        ranges = itertools.pairwise(bounds)
        return [WorkerTask(current, i, tuple(elements[a:b])) for i, (a, b) in enumerate(ranges)]

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
