"""Deals the elements of a pass to resident workers, and collects what comes out."""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from beamjax.errors import WorkerError
from beamjax.pipelines.resident.mailbox import Mailbox, Peer
from beamjax.pipelines.resident.messages import NO_PASS, Output, Pass, Program, Reply, WorkerTask
from beamjax.telemetry.monitor import Monitor

FIRST_TASKS = 4
"""Tasks for each worker in a pass of which nothing is known yet."""

TASK_SECONDS = 0.25
"""Seconds that a task should take at least, so that messages cost little beside it."""

MAX_TASKS = 16
"""Most tasks for each worker in a pass; more would not balance the load much better."""

COPY_SECONDS = 0.25
"""Seconds after which an idle worker computes a task that another one was given, at the earliest;
the later of this and of `COPY_RATIO` times what the other tasks of the pass took."""

COPY_RATIO = 3.0

UNKNOWN_SECONDS = 5.0
"""Seconds until such a copy in a pass of which no task is done: its body may be being compiled."""

CHECK_SECONDS = 0.2
"""Seconds between two looks at the job and at the processes of its workers."""


@dataclass
class _Flight:
    """A task that was given to a worker."""

    task: WorkerTask
    peer: Peer
    since: float


@dataclass
class Pool:
    """The workers of a job, as seen by the launcher.

    A task that a dead or slow worker has is given to another one as well; the first reply counts.

    Attributes:
      mailbox: the launcher's end.
      check: looks at the job, given whether all workers have died and none has joined since; raises
        an error if it can't go on.
    """

    mailbox: Mailbox
    check: Callable[[bool], None]
    _peers: list[Peer] = field(default_factory=list)
    _flights: dict[str, _Flight] = field(default_factory=dict)
    _suspects: set[str] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that an element of a program took last."""
    _died: bool = False
    """Whether a worker has died since one has joined."""

    def run(
        self,
        program: Program,
        current: Callable[[int], Pass],
        elements: Sequence[Any],
        look: Callable[[], None],
        monitor: Monitor,
    ) -> list[Output]:
        """Runs a program over elements.

        Args:
          program: what workers run.
          current: makes the pass of its number.
          elements: what the program is run over; each task is a range of them.
          look: is called now and then; raises an error to give up.
          monitor: of the run.

        Returns:
          What the DoFn emits, in the order of the elements.

        Raises:
          WorkerError: a task failed.
        """
        self.mailbox.publish(program)
        number = next(self._numbers)
        tasks = self._tasks(program.name, current(number), elements)
        done: dict[int, Reply] = {}
        left = collections.deque(tasks)
        since = looked = time.monotonic()
        while len(done) < len(tasks):
            self._deal(left, tasks, done)
            arrived = self._collect(number, done, monitor)
            now = time.monotonic()
            if arrived:
                since = now
                continue
            if now - looked > CHECK_SECONDS:
                looked = now
                look()
                left.extend(self._lost(number, done))
                self.check(self._died and not self._peers)
            self.mailbox.wait(since)
        spent = sum(reply.seconds for reply in done.values())
        self._seconds[program.name] = spent / max(len(elements), 1)
        return [output for _, reply in sorted(done.items()) for output in reply.outputs]

    def _tasks(self, program: str, current: Pass, elements: Sequence[Any]) -> list[WorkerTask]:
        """Cuts the elements of a pass into tasks of about the same length."""
        workers = max(len(self._peers), 1)
        known = self._seconds.get(program)
        each = FIRST_TASKS
        if known is not None:
            each = int(known * len(elements) / workers / TASK_SECONDS)
        count = min(workers * max(1, min(each, MAX_TASKS)), len(elements))
        bounds = [number * len(elements) // count for number in range(count + 1)]
        ranges = itertools.pairwise(bounds)
        return [WorkerTask(current, i, elements[a:b]) for i, (a, b) in enumerate(ranges)]

    def _deal(
        self, left: collections.deque[WorkerTask], tasks: Sequence[WorkerTask], done: dict[int, Any]
    ) -> None:
        """Gives tasks to the workers that have none."""
        if joined := self.mailbox.joined():
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
        """The task for a worker: one of those that it had in the last round, if any is left."""
        place, workers = self._peers.index(peer), len(self._peers)
        own = [task for task in left if task.number * workers // count == place]
        task = own[0] if own else left[-1]
        left.remove(task)
        return task

    def _late(self, tasks: Sequence[WorkerTask], done: dict[int, Any]) -> WorkerTask | None:
        """A task to be computed once more, as its worker is dead or takes long; None if none is."""
        if not tasks:
            return None
        number = tasks[0].current.number
        flights = [
            flight
            for flight in self._flights.values()
            if flight.task.current.number == number and flight.task.number not in done
        ]
        copies = collections.Counter(flight.task.number for flight in flights)
        limit = UNKNOWN_SECONDS
        if done:
            usual = statistics.median(reply.seconds for reply in done.values())
            limit = max(COPY_SECONDS, COPY_RATIO * usual)
        oldest = min(
            (flight for flight in flights if copies[flight.task.number] == 1),
            key=lambda flight: flight.since,
            default=None,
        )
        if oldest is None or time.monotonic() - oldest.since < limit:
            return None
        self._suspects.add(oldest.peer.name)
        return oldest.task

    def _collect(self, number: int, done: dict[int, Reply], monitor: Monitor) -> bool:
        """Takes the replies that are there.

        Raises:
          WorkerError: a task of this pass failed.
        """
        arrived = False
        for flight in list(self._flights.values()):
            reply = self.mailbox.reply(flight.peer)
            if reply is None:
                continue
            arrived = True
            del self._flights[flight.peer.name]
            self._suspects.discard(flight.peer.name)
            is_wanted = reply.current == number and reply.number not in done
            if reply.error and (is_wanted or reply.current == NO_PASS):
                raise WorkerError(reply.error) from reply.cause
            if not is_wanted:
                continue
            done[reply.number] = reply
            monitor.reported(flight.peer.name, reply.spent, reply.events)
        return arrived

    def _lost(self, number: int, done: dict[int, Reply]) -> list[WorkerTask]:
        """Forgets the workers that are dead; the tasks of this pass that only they had."""
        lost = {}
        for peer in [peer for peer in self._peers if peer.is_dead]:
            self._peers.remove(peer)
            self._died = True
            self._suspects.discard(peer.name)
            flight = self._flights.pop(peer.name, None)
            if flight is not None and flight.task.current.number == number:
                lost[flight.task.number] = flight.task
        flying = {flight.task.number for flight in self._flights.values()}
        return [task for number, task in lost.items() if number not in done.keys() | flying]
