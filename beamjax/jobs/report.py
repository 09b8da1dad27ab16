"""The report of a run, read from the folder of its job while it runs or afterwards."""

from __future__ import annotations

import collections
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from beamjax.bodies.provenance import UNKNOWN, Provenance
from beamjax.errors import OptionsError
from beamjax.options import RULES
from beamjax.plan.dropping import Dropped
from beamjax.spans import KINDS, Span
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import Progress

if TYPE_CHECKING:
    from beamjax.diagnostics.pages.page import Page

SETUP, HISTORY = "about", "course"
"""Names of the records in the folder of a job: a `Setup` and a `History`."""
MAX_SAMPLES = 400
"""Largest number of samples of a run."""
COLUMNS = (
    "seconds", "members", "shards", "retries", "bytes_read", "rounds", "dropped", "workers",
    *KINDS,
)  # fmt: skip
"""The numbers of a sample: seconds since the job began, and fields of `Progress` and `Totals`."""


@dataclass(frozen=True)
class Curve:
    """Values of each round of a loop, such as losses.

    Attributes:
      path: the path of the leaf in the result, such as `result['losses']`.
      rounds: the numbers of the rounds from 0, evenly thinned if they are many.
      values: the values of these rounds; None where they are not finite.
      of: the number of all rounds.
    """

    path: str
    rounds: tuple[int, ...]
    values: tuple[float | None, ...]
    of: int


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The fields of a `Report` that do not change during a run."""

    options: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    plan: Mapping[str, Any] | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class History:
    """The fields of a `Report` that grow during a run, and that its process writes every second."""

    provenance: Provenance = UNKNOWN
    samples: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    round_ends: tuple[float, ...] = ()
    checkpoints: tuple[float, ...] = ()
    spans: tuple[tuple[str, Span], ...] = ()
    curves: tuple[Curve, ...] = ()
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.samples and not set(COLUMNS) <= set(self.samples):
            raise ValueError(f"samples of {', '.join(self.samples)}, expected {', '.join(COLUMNS)}")
        if len(set(map(len, self.samples.values()))) > 1:
            raise ValueError("samples of several lengths, expected columns of one length")


@dataclass(frozen=True, repr=False)
class Report(Setup, History):
    """A report of a job, up to now or to its end.

    Attributes:
      program: the name of the program.
      runner: the name of the runner.
      state: "running", "done", "failed", "cancelled" or "lost".
      began: seconds since the epoch at which the run began.
      progress: the progress at the end, or now.
      samples: the progress over time, a column for each of `COLUMNS`.
      round_ends: the ends of rounds in seconds since the beginning; if they are many, a sample of
        them at even distances.
      checkpoints: the times of checkpoints, like `round_ends`.
      curves: results with one float for each round of a loop.
      dropped: the dropped members.
      warnings: the warnings of beamjax during the run.
      error: type, message, step, traceback and more of the error; None if the run did not fail.
      options: the options of the run.
      machine: versions, and the machine of the launching process.
      plan: the plan as JSON values, as from `Explanation.to_json`; None if it is unknown.
      fingerprint: hashes of the parts of the plan. Equal plans have equal hashes.
      provenance: the processors, versions and numbers of threads that computed the results. The
        same fingerprint, inputs and provenance give the same bits, unless `provenance.is_mixed`.
      spans: the work of each thread, as pairs of a worker and a `beamjax.spans.Span`; if they are
        many, a sample of them at even distances.
    """

    program: str
    runner: str
    state: str
    began: float
    progress: Progress
    dropped: tuple[Dropped, ...] = ()
    error: Mapping[str, Any] | None = None

    @property
    def started(self) -> str:
        """The local time at which the run began."""
        moment = datetime.datetime.fromtimestamp(self.began).astimezone()
        return moment.isoformat(sep=" ", timespec="seconds")

    @property
    def reasons(self) -> Mapping[tuple[str, str, str], int]:
        """The number of dropped members, by placement, step and reason."""
        return collections.Counter((d.placement, d.step, d.reason) for d in self.dropped)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values; numbers that are not finite are None."""
        return to_plain(self) | {"is_mixed": self.provenance.is_mixed, "started": self.started}

    def to_html(self) -> str:
        """Returns a page with the progress over time, the shares of time, and errors.

        The page is a single file of HTML that needs no network. It contains its data as JSON.
        """
        from beamjax.diagnostics.pages.page import document

        return document(self._page())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the page of the run, or a trace of it, to a file.

        Args:
          path: the path or URL of the file. A name that ends in `.html` or `.htm` gets the page. A
            name that ends in `.json` gets a trace in the JSON format of Chrome, which
            https://ui.perfetto.dev and chrome://tracing open: the spans of each worker over time,
            ends of rounds and checkpoints.

        Raises:
          OptionsError: the name has another ending.
          SourceError: the file cannot be written.
        """
        from beamjax.diagnostics.pages.page import write

        rule = RULES["report"]
        try:
            is_trace = rule.read(path).lower().endswith(".json")
        except ValueError:
            raise OptionsError(f"found {os.fspath(path)!r}, expected {rule.expected}") from None
        write(path, json.dumps(chrome_trace(self)) if is_trace else self.to_html())

    def _repr_html_(self) -> str:
        from beamjax.diagnostics.pages.page import fragment

        return fragment(self._page())

    def _page(self) -> Page:
        from beamjax.diagnostics.pages.run_page import run_page

        return run_page(self.to_json())

    def __repr__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: Report) -> Iterator[str]:
    progress = report.progress
    done = progress.done
    yield f"run of {report.program} on {report.runner}: {report.state}"
    yield f"  began {report.started}, took {progress.seconds:.2f} s"
    yield f"  planning took {progress.planning:.2f} s before, starting {progress.starting:.2f} s"
    yield f"  {done.members:,} members, {progress.members_per_second:,.0f}/s"
    shares = [f"{name} {share:.0%}" for name, share in progress.shares.items() if share >= 0.005]
    if shares:
        yield f"  {', '.join(shares)}"
    if done.shards_cached:
        yield f"  {done.shards_cached:,} of {done.shards:,} shards from the cache"
    if done.retries:
        yield f"  {done.retries:,} shards retried"
    for (placement, step, reason), count in report.reasons.items():
        yield f"  {count:,} members of {placement} dropped in {step}: {reason}"
    if report.provenance.is_mixed:
        yield f"  {report.provenance.mixture()}"
    for text in report.warnings:
        yield f"  warning: {text}"
    if report.error is not None:
        yield f"  {report.error.get('type')}: {report.error.get('message')}"


def read_report(folder: JobFolder) -> Report:
    """Reads the report of a run from the folder of its job."""
    job = folder.describe()
    state, error = folder.state()
    setup = from_plain(Setup, folder.read(SETUP) or {}, folder.record_path(SETUP))
    history = from_plain(History, folder.read(HISTORY) or {}, folder.record_path(HISTORY))
    return Report(
        job.name, job.runner, state, job.time, folder.progress(),
        dropped=folder.dropped(), error=error, **vars(setup), **vars(history),
    )  # fmt: skip


# --- the trace

LAUNCHER = 0
"""Number of the process in a trace that has the events of the whole run; workers follow."""


def chrome_trace(report: Report) -> dict[str, Any]:
    """Returns a run in the Trace Event Format of Chrome, which Perfetto opens."""
    # Times are in microseconds since the run began. The format is described in "Trace Event
    # Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    return {
        "traceEvents": [*_run(report), *_spans(report)],
        "displayTimeUnit": "ms",
        "otherData": {
            "program": report.program,
            "runner": report.runner,
            "state": report.state,
            "began": report.started,
        },
    }


def _run(report: Report) -> Iterator[dict[str, Any]]:
    """Events of the run, the ends of its rounds, its checkpoints and its members over time."""
    yield _process(LAUNCHER, f"run on {report.runner}")
    progress = report.progress
    for name, start, seconds in (
        (report.program, 0.0, progress.seconds),
        ("planning", -progress.planning, progress.planning),
        ("starting", 0.0, progress.starting),
    ):
        yield {
            "ph": "X", "name": name, "pid": LAUNCHER, "tid": 0, "ts": _micro(start),
            "dur": _micro(seconds),
        }  # fmt: skip
    moments = {"end of a round": report.round_ends, "checkpoint": report.checkpoints}
    for name, times in moments.items():
        for at in times:
            yield {"ph": "i", "s": "p", "name": name, "pid": LAUNCHER, "tid": 0, "ts": _micro(at)}
    columns = (report.samples.get(name, ()) for name in ("seconds", "members"))
    for at, members in zip(*columns, strict=True):
        args = {"members": members}
        yield {"ph": "C", "name": "members", "pid": LAUNCHER, "ts": _micro(at), "args": args}


def _spans(report: Report) -> Iterator[dict[str, Any]]:
    """Events of the spans of each worker. Spans that overlap in time are on different tracks."""
    workers = list(dict.fromkeys(worker for worker, _ in report.spans))
    for pid, worker in enumerate(workers, 1):
        yield _process(pid, worker)
        ends: list[float] = []  # when the last span of each track ends
        spans = [span for of, span in report.spans if of == worker]
        for span in sorted(spans, key=lambda span: span.start):
            start = max(span.start - report.began, 0.0)
            free = (i for i, end in enumerate(ends) if end <= start)
            track = next(free, len(ends))
            ends[track : track + 1] = [start + span.seconds]
            yield {
                "ph": "X", "name": f"{span.kind} {span.step}", "cat": span.kind,
                "pid": pid, "tid": track, "ts": _micro(start), "dur": _micro(span.seconds),
                "args": {"step": span.step, "shard": span.shard, "bytes": span.nbytes},
            }  # fmt: skip


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)
