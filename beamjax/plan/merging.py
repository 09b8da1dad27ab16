"""Chooses in how many ranges a pass starts, and how far in parallel its reductions are merged.

The choice depends only on bytes, shards and workers, so that `explain` can show it before anything
runs and it is the same on all machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.numerics.reducers import accumulator_kind
from beamjax.options import beam_flags
from beamjax.plan.steps import FusedBuffer, Map, accumulator_ranges

MERGE_BYTES = 200_000_000
"""Bytes of accumulators that a worker merges in about a second. A group has at least so many."""

RANGES, RANGES_PER_WORKER, RANGE_SHARDS = 256, 4, 256
"""A pass starts from at most 256 ranges of shards, or four for each worker if they are more, so
that there are few partials. But a range has at most 256 shards: a worker that dies or is slow holds
up no more, and runners distribute ranges, not shards."""


def range_width(shards: int, workers: int | None) -> int:
    """The number of shards of each range that a pass starts from."""
    most = max(RANGES, RANGES_PER_WORKER * (workers or 1))
    return max(1, min(-(-shards // most), RANGE_SHARDS))


@dataclass(frozen=True)
class FanOut:
    """How the reductions of a pass are merged."""

    pieces: int  # number of ranges of values; each is merged separately, on any worker
    nbytes: int  # of the accumulators of one process
    groups: int  # number of parallel merges of each range before the last merge; 1 for none
    why: str  # the reason for the number of groups


def fan_out(step: Map, shards: int | None, workers: int | None, mode: str) -> FanOut:
    """Chooses how the reductions of a pass are merged; None is an unknown number."""
    nbytes = sum(accumulator_bytes(buffer, mode) for buffer in step.buffers)
    pieces = len(accumulator_ranges(step))
    # Most bundles have one range, and each bundle has one partial.
    partials = RANGES if shards is None else -(-shards // range_width(shards, workers))
    piece_bytes = nbytes // pieces if pieces else 0
    groups = _groups(pieces, partials, piece_bytes, workers or 1)
    workers_text = "the workers" if workers is None else f"{workers} workers"
    if groups > 1:
        why = f"{workers_text} for {partials} partials"
    elif pieces < (workers or 1):
        why = f"too few bytes to divide among {workers_text}"
    else:
        why = "on one worker" if 1 in (pieces, workers) else f"in parallel on {workers_text}"
    return FanOut(pieces, nbytes, groups, why)


def _groups(pieces: int, partials: int, piece_bytes: int, workers: int) -> int:
    """The number of groups in which the partials of a range are merged first: a power of two."""
    if not pieces:
        return 1
    # More groups than the square root would make the last merge longer than the first ones.
    most = min(workers // pieces, math.isqrt(partials), partials * piece_bytes // MERGE_BYTES)
    return 1 << max(most.bit_length() - 1, 0)


def workers_of(options: Any) -> int | None:
    """The workers that a Beam `PipelineOptions`, or flags, ask for; None if they do not say."""
    flags = beam_flags(options)
    for name in ("parallelism", "max_num_workers", "num_workers", "direct_num_workers"):
        text = str(flags.get(name) or "")
        # 1 is the default of direct_num_workers, so it does not say that there is one worker.
        if text.isdigit() and int(text) > (name == "direct_num_workers"):
            return int(text)
    return None


def accumulator_bytes(buffer: FusedBuffer, mode: str, most: bool = False) -> int:
    """Bytes of the accumulator of a fused buffer, for numbers of ordinary size."""
    # `most` gives an upper bound, for numbers of like size and a million shards.
    dtype = np.dtype(buffer.dtype)
    return buffer.size * accumulator_kind(buffer.kind, dtype, mode).bytes_each(dtype, most)
