"""How the reductions of a pass are merged: in memory or in files, in how many pieces, and where.

Chosen from bytes, shards and workers alone, by usual rates, so that it can be told before anything
runs, and is the same on all machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.options import beam_flags
from beamjax.plan.lane_pieces import step_pieces, step_sections
from beamjax.plan.steps import Lane, Map

HELD_BYTES = 512 << 20
"""Accumulators of a pass that a process holds in memory, in bytes; larger ones are in files."""

MERGE_RATE = 2e8
"""Bytes of accumulators that a worker merges in a second."""

GROUP_SECONDS = 0.1
"""To hand a group to a worker, and what it gives on from there."""

WORTH_SECONDS = 1.0
"""How much sooner groups have to be done than one merge of each piece."""

MAX_PARTIALS = 256
"""Partials of a piece at most, one for each range of shards that a pass is dealt in."""

PRODUCTS = 20
"""Of runs of shards that wait for the next one, at most: a power of two of shards each."""


@dataclass(frozen=True)
class FanOut:
    """How the reductions of a pass are merged.

    Attributes:
      pieces: keys of the merge; each is merged by itself, on any worker.
      nbytes: of the accumulators of one process.
      in_files: whether partials wait in files, and travel as references to them.
      groups: merges of one piece that go side by side before the last one.
      why: of the last two, in words.
      seconds: that the merges are told to take.
      other, other_seconds: the number of groups that was compared, 0 for none, and the same of it.
      merged: bytes that are merged in all.
    """

    pieces: int
    nbytes: int
    in_files: bool
    groups: int
    why: str
    seconds: float = 0.0
    other: int = 0
    other_seconds: float = 0.0
    merged: int = 0

    def text(self, size: str) -> str:
        """All of it in a line, with `nbytes` as text."""
        where = "files" if self.in_files else "memory"
        pieces = "1 piece" if self.pieces == 1 else f"{self.pieces} pieces"
        groups = f", each in {self.groups} groups before" if self.groups > 1 else ""
        return f"{size} of accumulators in {where}, {pieces}{groups}: {self.why}"


def fan_out(
    step: Map, shards: int | None, workers: int | None, mode: str, fixed: int | None = None
) -> FanOut:
    """Chooses it for a pass.

    Args:
      step: the pass.
      shards: that it has, if that is known.
      workers: that merge at the same time, if that is known.
      mode: of the accumulators.
      fixed: groups of each piece, if that is fixed.
    """
    nbytes, in_files = _nbytes(step, mode), is_in_files(step, mode)
    pieces = len(step_sections(step) if in_files else step_pieces(step))
    partials = MAX_PARTIALS if shards is None else min(shards, MAX_PARTIALS)
    each = nbytes // pieces if pieces else 0

    def told(groups: int) -> FanOut:
        """With the seconds of this way, and of the nearest other one."""
        other = 1 if groups > 1 else 2 if partials > 3 else 0
        seconds, others = (
            _seconds(g, pieces, partials, each, workers or 1) if g else 0.0 for g in (groups, other)
        )
        merged = partials * nbytes
        return FanOut(pieces, nbytes, in_files, groups, why, seconds, other, others, merged)

    if fixed is not None:
        why = f"the option merge_fan_out={fixed}"
        return told(min(fixed, max(partials, 1)))
    groups = _groups(pieces, partials, each, workers or 1)
    who = "the workers" if workers is None else f"{workers} workers"
    if groups > 1:
        why = f"{who} for {partials} partials"
    elif pieces < (workers or 1):
        why = f"too little to be divided for {who}"
    else:
        why = "on one worker" if 1 in (pieces, workers) else f"side by side on {who}"
    return told(groups)


def is_in_files(step: Map, mode: str) -> bool:
    """Whether the partials of a pass wait in files: its accumulators are too large for memory."""
    return _nbytes(step, mode) > HELD_BYTES


def _nbytes(step: Map, mode: str) -> int:
    return sum(accumulator_bytes(lane, mode) for lane in step.lanes)


def _groups(pieces: int, partials: int, each: int, workers: int) -> int:
    """In how many groups the partials of a piece are merged before: a power of two."""
    if not pieces or workers <= pieces:
        return 1
    most = min(workers // pieces, math.isqrt(partials))
    ways = [1 << k for k in range(max(most, 1).bit_length())]
    seconds = {groups: _seconds(groups, pieces, partials, each, workers) for groups in ways}
    best = min(ways, key=lambda groups: seconds[groups])
    return best if seconds[1] - seconds[best] >= WORTH_SECONDS else 1


def _seconds(groups: int, pieces: int, partials: int, each: int, workers: int) -> float:
    """Of merging partials of `each` bytes in every piece, with so many groups before."""
    turns = -(-pieces // workers)
    if groups <= 1:
        return turns * partials * each / MERGE_RATE
    turns_before = -(-pieces * groups // workers)
    before = turns_before * -(-partials // groups) * each / MERGE_RATE
    return before + turns * groups * (each / MERGE_RATE + GROUP_SECONDS)


def workers_of(options: Any) -> int | None:
    """The workers that options of Beam ask for; None if they do not say.

    Args:
      options: a Beam `PipelineOptions`, or flags.
    """
    found = beam_flags(options)
    for name in ("parallelism", "max_num_workers", "num_workers", "direct_num_workers"):
        text = str(found.get(name) or "")
        if text.isdigit() and int(text) > (name == "direct_num_workers"):
            return int(text)
    return None


def accumulator_bytes(lane: Lane, mode: str, most: bool = False) -> int:
    """Bytes of the accumulator of a lane, for numbers of ordinary size.

    Args:
      lane: of the accumulator.
      mode: "exact" or "fast".
      most: counts what it takes at most, for numbers of like size and a million of shards.
    """
    dtype = np.dtype(lane.dtype)
    if dtype.kind in "biu":
        return lane.size * dtype.itemsize
    parts, real = (2, dtype.itemsize // 2) if dtype.kind == "c" else (1, dtype.itemsize)
    each = 8
    if lane.kind not in ("sum", "prod"):
        each = max(real, 4)
    elif mode != "fast" and lane.kind == "prod":
        each = 8 * (PRODUCTS if most else 1)
    elif mode != "fast":
        digits = 1 if real <= 4 else 3
        each = 8 * (digits + 2 + (real > 4)) + 1 if most else 8 * digits
    return lane.size * parts * each
