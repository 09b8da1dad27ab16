"""The one event of a run: a span of work on a step by one thread. `Spans` adds spans up."""

# Compilations, transfers and counts belong to the span that is open in their thread, and their
# seconds are not counted twice.

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import jax

from beamjax.errors import JobCancelledError

if TYPE_CHECKING:
    from beamjax.plan.shard import Shard

KINDS = ("read", "transfer", "compile", "compute", "merge")
"""The kinds of work of workers."""
MAX_SPANS = 1000
"""Largest number of spans of a process and of a run, about 80 kB of JSON."""
_BYTES = {"read": "bytes_read", "merge": "bytes_reduced"}
_SHOWN_SECONDS = 1e-3  # a compilation from which a trace shows it as a span of its own
_EPOCH = time.time() - time.perf_counter()

T = TypeVar("T")
Range = tuple[int, int, int]
"""Shards [start, stop), and how often they were computed."""


class Span(NamedTuple):
    """Work of one kind on a step."""

    step: str  # its name in the plan; "" for the whole run
    shard: int | None  # the number of the shard, None for work that belongs to no shard
    kind: str  # one of `KINDS`, or "plan" for the whole run
    start: float  # in seconds since the epoch, by the clock of the worker
    seconds: float
    nbytes: int  # bytes that were read or reduced


@dataclass(frozen=True)
class Work:
    """A sum of spans, as it travels between processes."""

    # Seconds of each kind, bytes and counts, by step and name.
    sums: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Ranges of the shards that are done, by step; in any order, they may overlap.
    shards: Mapping[str, tuple[Range, ...]] = field(default_factory=dict)
    spans: tuple[Span, ...] = ()  # evenly thinned if they are many
    step: str = ""  # the name of the step of the last shard
    # When the first span began, in seconds since the epoch; None if there is none
    began: float | None = None

    def __post_init__(self) -> None:
        for ranges in self.shards.values():
            if not all(0 <= start < stop and times >= 1 for start, stop, times in ranges):
                raise ValueError(f"the ranges {ranges!r:.200}, expected (first, stop, times)")


class Thinned(Generic[T]):
    """A bounded list, which drops every second entry when it is full."""

    def __init__(self, most: int):
        self._most = most
        self._kept: list[T] = []
        self._every = 1
        self._count = 0

    def add(self, entry: T) -> None:
        """Adds an entry."""
        if self._count % self._every == 0:
            self._kept.append(entry)
            if len(self._kept) >= self._most:
                self._kept = self._kept[::2]
                self._every *= 2
        self._count += 1

    @property
    def entries(self) -> tuple[T, ...]:
        """The entries that are left, in order."""
        return tuple(self._kept)


class Watch(Protocol):
    """Sees each span when it begins and ends."""

    def begin(self, span: timed) -> None:
        """Called before a span begins; raises if its run has ended."""

    def end(self, span: timed, error: BaseException | None) -> None:
        """Called after it; raises if it took too long, or if its run has ended."""

    def check(self) -> None:
        """Raises if its run has ended."""


class Spans:
    """Adds spans up, from any thread."""

    def __init__(self, traces: bool = False, ranges: bool = False, watch: Watch | None = None):
        # Whether to collect the ranges of shards, which may be computed again elsewhere.
        self.ranges = ranges
        self.watch = watch  # sees each span
        self.cancelled = False  # whether further spans raise JobCancelledError
        self.lock = threading.Lock()
        # Spans that have ended and are not added up yet. Appending takes no lock.
        self.ended: collections.deque[_Ended] = collections.deque()
        self.sums: dict[str, dict[str, float]] = {}
        self.shards: dict[str, list[Range]] = {}
        # Single spans, if they are collected.
        self.spans = Thinned[Span](MAX_SPANS) if traces else None
        self.step = ""
        self.began: float | None = None

    def add(self, work: Work) -> None:
        """Adds the spans of another sum."""
        with self.lock:
            add_sums(self.sums, work.sums)
            for step, ranges in work.shards.items() if self.ranges else ():
                # Joins the ranges of shards that were computed out of order, or again.
                self.shards[step] = merged([*self.shards.get(step, ()), *ranges])
            if self.spans is not None:
                for span in work.spans:
                    self.spans.add(span)
            self.step = work.step or self.step
            if work.began is not None:
                self.began = min(work.began, self.began or work.began)

    def work(self) -> Work:
        """The sum so far."""
        with self.lock:
            return self._work()

    def take(self) -> Work:
        """The sum since the last call."""
        with self.lock:
            work = self._work()
            self.sums, self.shards = {}, {}
            self.spans = None if self.spans is None else Thinned(MAX_SPANS)
            return work

    def add_up(self) -> None:
        """Adds up the spans that have ended."""
        with self.lock:
            self._add_up()

    def _work(self) -> Work:
        self._add_up()
        sums = {step: dict(sums) for step, sums in self.sums.items()}
        shards = {step: tuple(ranges) for step, ranges in self.shards.items()}
        spans = () if self.spans is None else self.spans.entries
        return Work(sums, shards, spans, self.step, self.began)

    def _add_up(self) -> None:
        while self.ended:
            self._add_span(self.ended.popleft())

    def _add_span(self, ended: _Ended) -> None:
        step, kind, shard, start, end, nbytes, inner, is_over = ended
        compiling, own = _without_inner(kind, end - start, inner) if inner else (0.0, end - start)
        amounts = {**inner, kind: inner.get(kind, 0.0) + own}
        if nbytes:
            amounts[_BYTES[kind]] = nbytes
        if shard is not None:
            self.step = step
        if shard is not None and kind == "merge" and is_over:
            amounts["shards"], amounts["members"] = 1, shard.count
            if self.ranges:
                _extend(self.shards.setdefault(step, []), shard.index)
        add_sums(self.sums, {step: amounts})
        began = round(_EPOCH + start, 6)
        self.began = began if self.began is None else min(began, self.began)
        if self.spans is None:
            return
        number = None if shard is None else shard.index
        self.spans.add(Span(step, number, kind, began, round(end - start, 6), nbytes))
        if compiling >= _SHOWN_SECONDS:  # A long compilation is shown at its beginning.
            self.spans.add(Span(step, number, "compile", began, round(compiling, 6), 0))


_Ended = tuple[str, str, "Shard | None", float, float, int, dict[str, float], bool]
"""A span that has ended; see `Spans._add_span`."""


def _without_inner(kind: str, seconds: float, inner: dict[str, float]) -> tuple[float, float]:
    """The seconds of compilations in a span, and those without compilations and transfers."""
    compiling = min(inner.get("compile", 0.0), seconds)
    transfer = min(inner.get("transfer", 0.0), seconds - compiling)
    if compiling and kind == "compute":
        # The first call of a body counts as compilation as a whole: JAX reports tracing, lowering
        # and compiling, but a first call also loads libraries.
        compiling = seconds - transfer
    inner["compile"], inner["transfer"] = compiling, transfer
    return compiling, seconds - compiling - transfer


class timed:
    """A context whose time is a span; raises JobCancelledError if the run has ended."""

    # A class and not a generator, as it is entered for each shard and must be fast.
    __slots__ = (
        "_outer", "compiles_since", "inner", "kind", "nbytes", "shard", "slot", "spans", "start",
        "step", "thread",
    )  # fmt: skip

    def __init__(
        self, spans: Spans, step: str, kind: str, shard: Shard | None = None, nbytes: int = 0
    ):
        self.spans = spans
        self.step = step
        # Compilations and transfers inside count as such, and not as this kind.
        self.kind = kind
        # The shard is done when its span of kind "merge" ends.
        self.shard = shard
        self.nbytes = nbytes  # may be set inside
        self.inner: dict[str, float] = {}
        # For the watch.
        self.compiles_since: float | None = None
        self.thread = 0
        self.slot: int | None = None

    def __enter__(self) -> timed:
        spans, self.start = self.spans, time.perf_counter()
        if spans.cancelled:
            raise JobCancelledError("the job was cancelled")
        if spans.watch is not None:
            spans.watch.begin(self)
        self._outer = _here.span
        _here.span = self
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, trace: Any) -> None:
        _here.span = self._outer
        spans = self.spans
        if self.kind:
            spans.ended.append((
                self.step, self.kind, self.shard, self.start, time.perf_counter(), self.nbytes,
                self.inner, error is None,
            ))  # fmt: skip
        if len(spans.ended) >= MAX_SPANS:
            spans.add_up()
        if spans.watch is not None:
            spans.watch.end(self, error)

    def then(self, kind: str, shard: Shard | None = None, nbytes: int = 0) -> None:
        """Ends the span, and begins another one of the step, unless its kind is ""."""
        spans = self.spans
        if spans.watch is not None:
            spans.watch.end(self, None)
        now = time.perf_counter()
        if self.kind:
            spans.ended.append((
                self.step, self.kind, self.shard, self.start, now, self.nbytes, self.inner, True,
            ))  # fmt: skip
        if len(spans.ended) >= MAX_SPANS:
            spans.add_up()
        self.kind, self.shard, self.nbytes = kind, shard, nbytes
        self.start, self.inner, self.compiles_since = now, {}, None
        if spans.cancelled:
            raise JobCancelledError("the job was cancelled")
        if spans.watch is not None:
            spans.watch.begin(self)


class _Local(threading.local):
    span: timed | None = None
    transfers = 0
    transfer_began = 0.0


_here = _Local()


def count(name: str, amount: float = 1) -> None:
    """Adds to the count of a name, or the seconds of a kind, in the open span of this thread."""
    span = _here.span
    if span is not None:
        span.inner[name] = span.inner.get(name, 0) + amount


class transferring(contextlib.ContextDecorator):
    """A context whose time counts as moving values; nested ones count once."""

    def __enter__(self) -> None:
        if not _here.transfers:
            _here.transfer_began = time.perf_counter()
        _here.transfers += 1

    def __exit__(self, *error: object) -> None:
        _here.transfers -= 1
        if not _here.transfers:
            count("transfer", time.perf_counter() - _here.transfer_began)


# --- sums


def add_sums(sums: dict[str, dict[str, float]], more: Mapping[str, Mapping[str, float]]) -> None:
    """Adds numbers by step and name to `sums`."""
    for step, amounts in more.items():
        own = sums.setdefault(step, {})
        for name, amount in amounts.items():
            own[name] = own.get(name, 0) + amount


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same shards in ordered, disjoint ranges, whose counts are sums of overlapping ones."""
    changes: dict[int, int] = {}
    for start, stop, times in ranges:
        changes[start] = changes.get(start, 0) + times
        changes[stop] = changes.get(stop, 0) - times
    joined: list[Range] = []
    times, before = 0, 0
    for position in sorted(changes):
        if times:
            if joined and joined[-1][1:] == (before, times):
                joined[-1] = joined[-1][0], position, times
            else:
                joined.append((before, position, times))
        before = position
        times += changes[position]
    return joined


def _extend(ranges: list[Range], shard: int) -> None:
    """Adds a shard that often follows the last one."""
    if ranges and ranges[-1][1:] == (shard, 1):
        ranges[-1] = ranges[-1][0], shard + 1, 1
    else:
        ranges.append((shard, shard + 1, 1))


# --- what JAX reports

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = "/jax/core/compile/backend_compile_duration"
_REQUESTED = "/jax/compilation_cache/compile_requests_use_cache"
_FOUND = "/jax/compilation_cache/cache_hits"
_EVENTS = ("/jax/core/compile/jaxpr_trace_duration", _LOWERED, _COMPILED)

loaded_from_disk = threading.Event()
"""Set once an executable of this process came from JAX's cache on disk."""


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    if event in _EVENTS:
        count("compile", duration_secs)
        if event == _COMPILED:
            count("executables")
        if _here.span is not None:
            # JAX reports the end of a compilation, but not its start: right after lowering.
            _here.span.compiles_since = time.perf_counter() if event == _LOWERED else None


def _hear(event: str, **_: Any) -> None:
    # JAX reports a miss only if it then writes to the cache. So a request counts as a miss, and a
    # hit takes that back.
    if event == _REQUESTED:
        count("cache_misses")
    elif event == _FOUND:
        count("cache_misses", -1)
        count("cache_hits")
        loaded_from_disk.set()


jax.monitoring.register_event_duration_secs_listener(_listen)
jax.monitoring.register_event_listener(_hear)
