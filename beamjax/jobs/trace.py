"""A run as a trace in the Trace Event Format of Chrome, which Perfetto opens.

The format is described in "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from beamjax.telemetry.progress import step_name

if TYPE_CHECKING:
    from beamjax.jobs.report import Report

LAUNCHER = 0
"""The process of a trace that has the events of the whole run; workers are numbered from 1."""


def chrome_trace(report: Report) -> dict[str, Any]:
    """The trace of a run, as JSON values; times are in microseconds since the run began."""
    return {
        "traceEvents": [*_run(report), *_shards(report)],
        "displayTimeUnit": "ms",
        "otherData": {
            "program": report.program,
            "runner": report.runner,
            "state": report.state,
            "began": report.started,
        },
    }


def _run(report: Report) -> Iterator[dict[str, Any]]:
    """The run itself, the ends of its rounds, its checkpoints and its members over time."""
    yield _process(LAUNCHER, f"run on {report.runner}")
    yield {
        "ph": "X", "name": report.program, "pid": LAUNCHER, "tid": 0, "ts": 0,
        "dur": _micro(report.progress.seconds),
    }  # fmt: skip
    moments = {"end of a round": report.round_ends, "checkpoint": report.checkpoints}
    for name, times in moments.items():
        for at in times:
            yield {"ph": "i", "s": "p", "name": name, "pid": LAUNCHER, "tid": 0, "ts": _micro(at)}
    columns = (report.samples.get(name, ()) for name in ("seconds", "members"))
    for at, members in zip(*columns, strict=True):
        args = {"members": members}
        yield {"ph": "C", "name": "members", "pid": LAUNCHER, "ts": _micro(at), "args": args}


def _shards(report: Report) -> Iterator[dict[str, Any]]:
    """The shards of each worker. Those that overlap in time are on different tracks."""
    workers = list(dict.fromkeys(event.worker for event in report.events))
    for pid, worker in enumerate(workers, 1):
        yield _process(pid, worker)
        ends: list[float] = []  # of the last shard of each track
        events = [event for event in report.events if event.worker == worker]
        for event in sorted(events, key=lambda event: event.time - event.seconds):
            start = max(event.time - event.seconds - report.began, 0.0)
            free = (i for i, end in enumerate(ends) if end <= start)
            track = next(free, len(ends))
            ends[track : track + 1] = [start + event.seconds]
            yield {
                "ph": "X", "name": step_name(event.step), "cat": "shard", "pid": pid, "tid": track,
                "ts": _micro(start), "dur": _micro(event.seconds),
                "args": {"first member": event.start, "members": event.members},
            }  # fmt: skip


def _process(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 1)
