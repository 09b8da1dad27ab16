"""The process of one way: does what the launcher asks for on stdin, a line of JSON each.

    {"open": {...}}     opens a job (`ways.Job`)        {"shard_size": ...}
    {"round": 0.5}      calls for so many seconds       {"seconds": ..., "calls": ..., ...}
    {"tally": true}     runs it as a job of beamjax     {"seconds": ..., "read": ..., ...}

An answer may be {"missing": package} or {"error": text} instead.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import CASES
from benchmarks.suite.ways import ALL, Call, Job, Way


class Served:
    """A job that is open.

    Attributes:
      calls: what computes it; for a limit two smaller ones, whose times are extrapolated.
    """

    def __init__(self, name: str, way: Way, started: Any, job: Job, limited: bool):
        self.name, self.job = name, job
        limit = CASES[job.case].limits.get(name) if limited else None
        self.unit, self.counts = "n", [job.size["n"]]
        jobs = [job]
        if limit is not None:
            ((self.unit, most),) = limit.items()
            self.counts = [most, max(1, most // 4)]
            jobs = [replace(job, size={**job.size, self.unit: k}) for k in self.counts]
            if most >= job.size[self.unit]:
                self.counts, jobs = [job.size[self.unit]], [job]
        self.jobs = jobs
        self.calls: list[Call] = [way.call(job, started) for job in jobs]

    def round(self, at_least: float) -> dict[str, Any]:
        """Seconds of the whole size: the median of as many calls as fill a time."""
        times: list[float] = []
        begin = time.perf_counter()
        while not times or time.perf_counter() - begin < at_least:
            start = time.perf_counter()
            self.answer = self.calls[0]()
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times)
        if len(self.calls) == 1:
            return {"seconds": seconds, "calls": len(times), "extrapolated": None}
        start = time.perf_counter()
        self.calls[1]()
        shorter = time.perf_counter() - start
        (most, few), all_of_it = self.counts, self.job.size[self.unit]
        each = max(0.0, seconds - shorter) / (most - few)
        return {
            "seconds": seconds + each * (all_of_it - most), "calls": len(times),
            "extrapolated": {self.unit: most, "seconds": seconds},
        }  # fmt: skip

    def compare(self) -> float | None:
        """The difference from the first way's answer, which is kept in a file."""
        from benchmarks.suite.sums import difference, difference_from_first, leaves
        from benchmarks.suite.ways.in_process import loop

        found = leaves(self.answer)
        if len(self.calls) > 1:
            return difference(found, leaves(loop(self.jobs[0])()))
        path = Path(self.job.folder) / f"answer-{self.job.size['n']}.npz"
        return difference_from_first(path, found)


def plan(job: Job, options: dict[str, Any]) -> dict[str, Any]:
    """What beamjax plans: members in a shard, passes and bytes."""
    import beamjax as bj

    problem = job.open()
    program, source = problem.program(bj), problem.source(bj)
    facts = bj.explain(program, problem.server, source, options=options).to_json()
    return {
        "shard_size": facts["placements"][0]["shard_size"], "at_once": at_once(facts),
        "nbytes": problem.nbytes,
        "passes": facts["passes"], "partial_bytes": facts["partial_bytes"],
        "broadcast_bytes": facts["broadcast_bytes"],
    }  # fmt: skip


def at_once(facts: dict[str, Any]) -> int:
    """Members that a shard computes at once: all of them, or a batch."""
    ways = (choice["chosen"] for choice in facts["choices"] if choice["option"] == "member_loop")
    batches = [int(way.split()[-1]) for way in ways if way.startswith("batches")]
    return min(batches, default=facts["placements"][0]["shard_size"])


def tally(job: Job) -> dict[str, Any]:
    """What the workers of beamjax counted in a run on DirectRunner."""
    import beamjax as bj

    problem = opened_by(job)
    given = problem.program(bj), problem.server, problem.source(bj)
    start = time.perf_counter()
    with bj.launch(*given, options={"progress": False}) as running:
        running.result()
        seconds = time.perf_counter() - start
        done = vars(running.progress().done)
    return {"seconds": seconds, **done}


def opened_by(job: Job) -> Any:
    from benchmarks.suite.sums import opened

    return opened(job)


def answer(name: str, way: Way, started: Any, asked: dict[str, Any], state: dict[str, Any]) -> Any:
    """What is said to one line."""
    if "write" in asked:
        job = Job(**asked["write"])
        Path(job.folder).mkdir(parents=True, exist_ok=True)
        CASES[job.case].type().write(Path(job.folder), job.size)
        return plan(job, asked.get("options", {}))
    if "open" in asked:
        job = Job(**asked["open"])
        state["served"] = Served(name, way, started, job, asked.get("limited", False))
        return {"open": True}
    if "tally" in asked:
        return tally(state["served"].job)
    found = state["served"].round(asked["round"])
    if asked.get("compare"):
        found["difference"] = state["served"].compare()
    return found


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever the libraries print
    name = json.loads(sys.stdin.readline())["way"]
    way, state = ALL[name], {}  # type: tuple[Way, dict[str, Any]]
    try:
        with way.started() as started:
            print(json.dumps({"started": True}), file=answers)
            for line in sys.stdin:
                print(json.dumps(answer(name, way, started, json.loads(line), state)), file=answers)
            state.clear()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        told = {"missing": package} if package in way.packages else {"error": str(error)}
        print(json.dumps(told), file=answers)
    except Exception as error:
        traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"[:500]}), file=answers)
