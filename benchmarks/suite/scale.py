"""Scale: D from 10^3 to 10^7 members, and B on one worker process and on two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import CASES
from benchmarks.suite.launcher import WayFailed, started
from benchmarks.suite.measure import Settings, run_ways, write

MEMBERS = tuple(10**k for k in range(3, 8))
SMALL_MEMBERS = (100, 1_000)
BY_MEMBERS = ("jit", "loop", "local", "direct", "batch", "dask-2", "ray-2")
BY_WORKERS = ("direct-1", "direct-2", "dask-1", "dask-2", "ray-1", "ray-2")
CASE_BY_MEMBERS, CASE_BY_WORKERS = "D", "B"


def by_members(folder: Path, settings: Settings) -> dict[str, Any]:
    """Seconds of each way for each number of members, the better of two calls after the first."""
    base = settings.size(CASE_BY_MEMBERS)
    numbers = SMALL_MEMBERS if settings.small else MEMBERS
    ways = [way for way in BY_MEMBERS if not settings.ways or way in settings.ways]
    seconds: dict[str, dict[int, float]] = {way: {} for way in ways}
    extrapolated: list[tuple[str, int]] = []
    with started(ways, settings.pythons, settings.log, folder / "compiled") as processes:
        going = [way for way in ways if _answers(processes[way])]
        for n in numbers:
            job: dict[str, Any] = {"case": CASE_BY_MEMBERS, "size": base | {"n": n}}
            job["folder"] = str(folder)
            job["shard_size"] = write(job, settings)["at_once"]
            for way in list(going):
                try:
                    processes[way].ask(open=job, limited=not settings.small)
                    found = [processes[way].ask(round=0) for _ in range(3)][1:]
                except WayFailed:
                    going.remove(way)
                    continue
                seconds[way][n] = min(each["seconds"] for each in found)
                if found[0]["extrapolated"]:
                    extrapolated.append((way, n))
            settings.tell(f"scale: {n:,} members")
    return {
        "case": CASE_BY_MEMBERS, "title": CASES[CASE_BY_MEMBERS].title,
        "seconds": {way: found for way, found in seconds.items() if found},
        "extrapolated": extrapolated,
    }  # fmt: skip


def _answers(process: Any) -> bool:
    try:
        process.hear()
    except WayFailed:
        return False
    return True


def by_workers(folder: Path, settings: Settings) -> dict[str, Any]:
    """Rows of B on one worker process and on two. beamjax's processes are new in each run."""
    job: dict[str, Any] = {
        "case": CASE_BY_WORKERS, "size": settings.size(CASE_BY_WORKERS), "folder": str(folder)
    }  # fmt: skip
    job["shard_size"] = write(job, settings)["at_once"]
    ways = [way for way in BY_WORKERS if not settings.ways or way in settings.ways]
    with started(ways, settings.pythons, settings.log, folder / "compiled") as processes:
        rows = run_ways(processes, job, replace(settings, rounds=min(settings.rounds, 2)))
    return {"case": CASE_BY_WORKERS, "size": job["size"], "rows": rows}
