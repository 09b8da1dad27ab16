"""`diff`: finds where and why the results of two jobs differ, from their folders."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from beamjax.bodies.export import unwrap
from beamjax.errors import JobError
from beamjax.jobs.job import Job, JobState, open_job
from beamjax.jobs.report import CHECKSUMS, Report
from beamjax.numerics.ulp import NAN_DISTANCE, ulp_distance
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.tables.keyed_table import KeyedTable
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.progress import MOST_EVENTS, NOT_CHECKED


@dataclass(frozen=True)
class Difference:
    """How the results of two jobs compare, bit by bit.

    Attributes:
      where: the first value that differs, such as `result['loss'][3]`; "" if all bits are equal.
      values: the two values as text; or the types of the leaves, if these differ.
      ulp: the number of representable numbers between two floats; None for NaN and other dtypes.
      count: the number of values of this leaf that differ.
      step: the first step whose values differ, with its round, such as `loop_0[3]/map_rows_0`; ""
        if it is not known.
      value: the name of the first value of this step that differs, as in `explain`; "" if it is
        not known.
      shard: the number of the first shard whose results in this step differ; None if it is not
        known. A job records checksums of results up to 64 KiB, of at most 1,000 shards.
      members: the first member of this shard, and the member after its last; None without a shard.
      reasons: the differences between the jobs that may change bits: in the plan, the machines and
        the dropped members. If all of these are equal, the inputs must differ.
    """

    where: str
    values: tuple[str, str] = ("", "")
    ulp: int | None = None
    count: int = 0
    step: str = ""
    value: str = ""
    shard: int | None = None
    members: tuple[int, int] | None = None
    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.where)

    def __str__(self) -> str:
        if not self.where:
            return "all bits of the results are equal"
        distance = "" if self.ulp is None else f", {self.ulp} ULP apart"
        more = f"; {self.count} values of it differ" if self.count > 1 else ""
        lines = [f"{self.where}: {self.values[0]} and {self.values[1]}{distance}{more}"]
        if self.step:
            shard = f", value {self.value}" if self.value else ""
            if self.members is not None:
                first, end = self.members
                number = "a shard" if self.shard is None else f"shard {self.shard}"
                shard += f", {number} (members {first} to {end - 1})"
            lines.append(f"  first in the step {self.step}{shard}")
        return "\n".join([*lines, *(f"  because of {reason}" for reason in self.reasons)])


def diff(
    first: Job | str | os.PathLike[str],
    second: Job | str | os.PathLike[str],
    *,
    like: Any = None,
) -> Difference:
    """Finds the first value of the results of two jobs whose bits differ, and possible reasons.

    The jobs may have run on different machines, with different versions, on different data.

    Args:
      first: a job that is done, or its folder.
      second: another job that is done, or its folder.
      like: a tree with the structure of the results, as for `Job.result`.

    Returns:
      A `Difference`. It is true if the results differ, and `print` describes it.

    Raises:
      JobError: a job is not done, or a folder has no job.
      StructureError: the structure of a result can't be rebuilt without `like`.
      ArrayFormatError: a file of a result is damaged.
      SourceError: a file of a result can't be read.
    """
    jobs = [job if isinstance(job, Job) else open_job(job) for job in (first, second)]
    for job in jobs:
        if job.state is not JobState.DONE:
            raise JobError(
                f"{job.folder}: found a job that is {job.state.value}, expected one that is done: "
                "only such a job has a result to compare"
            )
    a, b = (dict(_leaves(job.result(like=like))) for job in jobs)
    for path in a | b:
        left, right = a.get(path), b.get(path)
        found = _compared(path, left, right)
        if found is not None:
            reports = jobs[0].report(), jobs[1].report()
            step, value = _first_value(*(_checksums(job) for job in jobs))
            found = replace(found, step=step, value=value, reasons=tuple(_reasons(*reports)))
            return _with_shard(found, *reports)
    return Difference("")


def _checksums(job: Job) -> dict[str, Any]:
    """Checksums of values in rounds, by step and value, in the order of the run."""
    record = JobFolder(job.folder).read(CHECKSUMS) or {}
    return dict(record.get("values", ()))


def _first_value(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, str]:
    """The first step with a recorded value that differs between the runs, and the value's name."""
    # Runners fuse steps differently, so one run may have values that the other lacks.
    differing = (name for name in a if name in b and a[name] != b[name])
    step, _, value = next(differing, "").rpartition(":")
    return step, value


def _with_shard(found: Difference, a: Report, b: Report) -> Difference:
    """The difference with the first shard, of those that both jobs have recorded, that differs."""
    here, there = _by_shard(a), _by_shard(b)
    differing = [
        shard
        for shard, checksum in here.items()
        if shard.step.endswith(found.step.rpartition("/")[2])
        and NOT_CHECKED not in (checksum, there.get(shard, NOT_CHECKED))
        and checksum != there[shard]
    ]
    if not differing:
        return found
    first = min(
        (s for s in differing if s.step == differing[0].step), key=lambda s: (s.round, s.start)
    )
    before = {s.start: s.members for s in here if s.step == first.step and s.start < first.start}
    # Not all events may be recorded.
    number = len(before) if sum(before.values()) == first.start else None
    members = first.start, first.start + first.members
    return replace(found, step=found.step or first.step, shard=number, members=members)


class _Shard(NamedTuple):
    """A shard in a round; rounds of a step are counted without regard to loops."""

    step: str
    start: int
    members: int
    round: int


def _by_shard(report: Report) -> dict[_Shard, int]:
    """Finds the checksums of shards, in the order of the run.

    Returns:
      The checksums. Shards in rounds are left out if not all shards are recorded, because this
      counts the rounds.
    """
    counts: collections.Counter[tuple[str, int, int]] = collections.Counter()
    found = {}
    for event in sorted(report.events, key=lambda event: event.time):
        key = event.step.rpartition("/")[2], event.start, event.members
        found[_Shard(*key, counts[key])] = event.checksum
        counts[key] += 1
    if len(report.events) < MOST_EVENTS:
        return found
    return {shard: checksum for shard, checksum in found.items() if counts[shard[:3]] == 1}


def _leaves(result: Any) -> Iterator[tuple[str, Any]]:
    handles = Placed, KeyedTable
    is_leaf = lambda x: isinstance(x, handles)
    for path, leaf in jax.tree_util.tree_leaves_with_path(result, is_leaf=is_leaf):
        name = f"result{jax.tree_util.keystr(path)}"
        if isinstance(leaf, handles):
            raise JobError(
                f"{name}: found a result in files of {leaf.folder}, expected arrays; compare the "
                "files"
            )
        yield name, leaf


def _compared(path: str, left: Any, right: Any) -> Difference | None:
    """The difference of two leaves, without reasons; None if their bits are equal."""
    types = _type(left), _type(right)
    if types[0] != types[1]:
        return Difference(path, types, count=1)
    x, y = (np.asarray(unwrap(leaf)) for leaf in (left, right))
    if x.tobytes() == y.tobytes():
        return None
    bits = [np.ascontiguousarray(v).reshape(-1).view(np.uint8).reshape(v.size, -1) for v in (x, y)]
    places = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    index = tuple(map(int, np.unravel_index(places[0], x.shape)))
    is_float = jax.numpy.issubdtype(x.dtype, np.inexact)
    ulp = int(ulp_distance(x[index][None], y[index][None])[0]) if is_float else None
    ulp = None if ulp == NAN_DISTANCE else ulp
    texts = repr(x[index].item()), repr(y[index].item())
    return Difference(f"{path}{list(index) if index else ''}", texts, ulp, len(places))


def _type(leaf: Any) -> str:
    return "no leaf" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"


def _reasons(a: Report, b: Report) -> Iterator[str]:
    """The differences between the jobs that may change bits."""
    begun = False
    names = {**a.fingerprint, **b.fingerprint}
    for what, left, right in [
        *((name, a.fingerprint.get(name), b.fingerprint.get(name)) for name in names),
        ("the machines", _kinds(a), _kinds(b)),
        ("the members that were dropped", _dropped(a), _dropped(b)),
    ]:
        if left != right:
            begun = True
            is_hash = any(text is None or text.startswith("#") for text in (left, right))
            yield what if is_hash else f"{what}: {left} and {right}"
    if not (a.fingerprint and b.fingerprint):
        yield "an unknown difference: a folder has no fingerprint of the plan"
    elif not begun:
        yield "the inputs: the plan, the machines and the dropped members are the same"


def _kinds(report: Report) -> str:
    return "; ".join(report.provenance.kinds) or "unknown"


def _dropped(report: Report) -> str:
    found = [f"{each.placement} {each.member}" for each in report.dropped]
    more = f" and {len(found) - 8} more" if len(found) > 8 else ""
    return f"{', '.join(found[:8])}{more}" if found else "none"
