"""A model on paper: a round with up to 1,000 workers, from costs that were measured.

With S shards and W workers, all of them started and warm, a round takes

    T(W) = passes * (round + broadcast + ceil(S / W) * shard + merges)
    broadcast = bytes * ceil(log2(W + 1)) / bandwidth, 0 for one worker
    merges    = ceil(S / W) * merge + levels * fan * (merge + partial / bandwidth)
    fan       = min(W, 16),  levels = ceil(log(W) / log(16)), 0 for one worker

`shard` is what a worker reads, transfers and computes of a shard, `merge` what the addition of a
partial takes: what the workers of a run on DirectRunner counted, divided by its shards, in seconds
of a worker. `round` is what is left of the run's seconds, divided by passes: the pipeline itself.
Bandwidth is an assumption, 1.25 GB/s, and so is that bytes go from worker to worker as in a tree.
Stragglers, retries, the start of machines and reading from other machines are left out, so this
is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.suite.ways import DIRECT

BANDWIDTH = 1.25e9
FAN = 16
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
TIMES_LARGER = 1000
"""The workload that the model is asked about has so many times the members that were measured."""


@dataclass(frozen=True)
class Costs:
    """What was measured of a workload.

    Attributes:
      shards: of a pass.
      passes: over the members.
      shard: seconds of a worker for a shard: reading, transferring, computing.
      merge: seconds to add one partial.
      round: seconds of a pass that are neither.
      broadcast: bytes that each worker needs in a pass.
      partial: bytes of a partial.
    """

    shards: int
    passes: int
    shard: float
    merge: float
    round: float
    broadcast: float
    partial: float


def costs(measured: Mapping[str, Any]) -> Costs | None:
    """From what `measure` gave for a workload, if beamjax ran on DirectRunner."""
    row = next((row for row in measured["rows"] if row["way"] == DIRECT), None)
    if row is None or not row.get("tally"):
        return None
    tally, plan = row["tally"], measured["plan"]
    shards = max(1, tally["shards"])
    passes = max(1, math.ceil(tally["members"] / measured["size"]["n"]))
    body, merge = tally["read"] + tally["transfer"] + tally["compute"], tally["merge"]
    left = max(0.0, tally["seconds"] - tally["compile"] - body - merge)
    return Costs(
        shards=math.ceil(shards / passes), passes=passes, shard=body / shards,
        merge=merge / shards, round=left / passes,
        broadcast=plan["broadcast_bytes"] / passes, partial=plan["partial_bytes"] / passes,
    )  # fmt: skip


def seconds(cost: Costs, workers: int, times_larger: int = 1) -> dict[str, float]:
    """The parts of a run with so many workers, in seconds; their sum is the run."""
    each = math.ceil(cost.shards * times_larger / workers)
    levels = 0 if workers == 1 else math.ceil(round(math.log(workers) / math.log(FAN), 9))
    send = cost.broadcast * math.ceil(math.log2(workers + 1)) / BANDWIDTH
    between = levels * min(workers, FAN) * (cost.merge + cost.partial / BANDWIDTH)
    parts = {
        "round": cost.round, "broadcast": send if workers > 1 else 0.0,
        "shards": each * cost.shard, "merges": each * cost.merge + between,
    }  # fmt: skip
    return {name: cost.passes * value for name, value in parts.items()}


def on_paper(cases: Mapping[str, Any]) -> dict[str, Any]:
    """Costs, seconds and speed-ups of each workload that has them."""
    found = {}
    for case, measured in cases.items():
        cost = costs(measured)
        if cost is None:
            continue
        totals = [seconds(cost, workers, TIMES_LARGER) for workers in WORKERS]
        alone = sum(totals[0].values())
        found[case] = {
            "costs": vars(cost), "workers": list(WORKERS), "seconds": totals,
            "speed_up": [alone / sum(parts.values()) for parts in totals],
        }  # fmt: skip
    return {"times_larger": TIMES_LARGER, "bandwidth": BANDWIDTH, "fan": FAN, "cases": found}
