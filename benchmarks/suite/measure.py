"""The rows of a workload: all ways in turn, round by round, and what they took."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import CASES
from benchmarks.suite.launcher import Process, WayFailed, started
from benchmarks.suite.ways import ALL, DIRECT, LOOP, usual

Row = dict[str, Any]
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
      rounds: after the first call, at most.
      seconds: that the calls of a round fill.
      budget: seconds of a way, after which it has no further round.
      small: sizes of a test.
      ways: to measure, or empty for all that there are.
      pythons: interpreters of ways that have one of their own.
      shard_size: instead of the one that beamjax plans.
      members: of workloads, instead of their full number.
      log: a file for what the processes print.
      tell: is told what is done.
    """

    rounds: int = 3
    seconds: float = 0.5
    budget: float = 10.0
    small: bool = False
    ways: Sequence[str] = ()
    pythons: Mapping[str, str] = field(default_factory=dict)
    shard_size: int | None = None
    members: Mapping[str, int] = field(default_factory=dict)
    log: Path | None = None
    tell: Tell = lambda text: None

    def chosen(self, case: str) -> list[str]:
        return [way for way in usual(case) if not self.ways or way in self.ways]

    def size(self, case: str) -> dict[str, int]:
        size = dict(CASES[case].small if self.small else CASES[case].full)
        return size | ({"n": self.members[case]} if case in self.members else {})


def measure(case: str, folder: Path, settings: Settings) -> dict[str, Any]:
    """A workload by its ways.

    Args:
      case: letter.
      folder: for the data.
      settings: how.

    Returns: the size, what beamjax plans, and a row for each way.
    """
    size = settings.size(case)
    settings.tell(f"{case}: {CASES[case].text(size)}")
    job: dict[str, Any] = {"case": case, "size": size, "folder": str(folder)}
    planned = write(job, settings)
    job["shard_size"] = planned["at_once"]
    cache = folder / "compiled"
    with started(settings.chosen(case), settings.pythons, settings.log, cache) as processes:
        rows = run_ways(processes, job, settings)
    loop = next((row.get("seconds") for row in rows if row["way"] == LOOP), None)
    for row in rows:
        seconds = row.get("seconds")
        row["x_loop"] = seconds / loop if seconds and loop else None
    title = CASES[case].text(size)
    return {"title": title, "size": size, "plan": planned, "rows": rows}


def write(job: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Writes the data of a job, and plans it, in a process that ends then."""
    options = {} if settings.shard_size is None else {"shard_size": settings.shard_size}
    with started(["local"], settings.pythons, settings.log) as processes:
        processes["local"].hear()
        return processes["local"].ask(write=job, options=options)


def run_ways(processes: dict[str, Process], job: dict[str, Any], settings: Settings) -> list[Row]:
    """First calls of all ways, then rounds in turn."""
    rows: dict[str, Row] = {
        way: {"way": way, "title": ALL[way].title, "rounds": []} for way in processes
    }
    going = list(processes)

    @contextlib.contextmanager
    def told(way: str) -> Iterator[None]:
        try:
            yield
        except WayFailed as error:
            rows[way]["missing" if error.missing else "error"] = str(error)
            going.remove(way)
            settings.tell(f"  {ALL[way].title}: {error}")

    for way in list(going):
        with told(way):
            processes[way].hear()
    for way in list(going):
        with told(way):
            processes[way].ask(open=job, limited=not settings.small)
            rows[way]["start_mib"] = processes[way].memory_mib()
    for way in list(going):
        with told(way):
            found = processes[way].ask(round=0, compare=True)
            rows[way] |= {"first_seconds": found["seconds"], "difference": found["difference"]}
            rows[way]["extrapolated"] = found["extrapolated"]
            rows[way]["spent"] = spent(found)
            settings.tell(f"  {ALL[way].title}: first {found['seconds']:.2f} s")
            if ALL[way].start is not None and spent(found) < settings.budget / 2:
                processes[way].ask(round=0)  # any worker may have had any shard
    for number in range(settings.rounds):
        for way in list(going):
            if number and rows[way]["spent"] > settings.budget:
                continue
            with told(way):
                found = processes[way].ask(round=settings.seconds)
                rows[way]["rounds"].append(found["seconds"])
                rows[way]["spent"] += max(spent(found), settings.seconds)
    for way in going:
        rows[way]["seconds"] = statistics.median(rows[way]["rounds"])
        rows[way]["peak_mib"] = processes[way].peak.mib
        settings.tell(f"  {ALL[way].title}: {rows[way]['seconds']:.3f} s")
    if DIRECT in going:
        with told(DIRECT):
            rows[DIRECT]["tally"] = processes[DIRECT].ask(tally=True)
    return list(rows.values())


def spent(found: Mapping[str, Any]) -> float:
    """Seconds that a round took, not those that it stands for."""
    measured = found["extrapolated"]["seconds"] if found["extrapolated"] else found["seconds"]
    return float(measured) * int(found["calls"])
