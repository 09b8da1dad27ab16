"""How much memory the shuffle of a table takes, and tables that are refused since it is too much.

A shuffle is no plan, so this is counted from the batches in which its steps read and write rows.
Keys are taken to be dealt about evenly: a part has no more than twice the rows of the mean. Rows of
a part that has more are written by batches too, but its keys and numbers are all in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from beamjax.diagnostics.memory import SLACK, Estimate, StepMemory, some
from beamjax.diagnostics.memory_limit import advised_limit, refuse, threads_advice
from beamjax.diagnostics.topology import Workers
from beamjax.options import Options
from beamjax.shuffle.table_parts import Grouping
from beamjax.sources.source_base import Source
from beamjax.storage.block_cache import PASSING_BYTES

BASE_BYTES = 224 << 20
"""Of a process with Python, Beam and Arrow, that computes nothing: 126 MiB were measured, and what
Arrow takes while it decodes."""
BASE_BYTES_LOCAL = 160 << 20
"""Without Beam: 82 MiB, and likewise."""
DEAL, WRITE = "Deal rows", "Write groups"


def grouping_estimate(rows: Source, grouping: Grouping, workers: Workers) -> Estimate:
    """The peak memory of the processes that shuffle a table.

    Args:
      rows: of the table.
      grouping: of them.
      workers: where.
    """
    beam, threads, blocks = workers.beam, workers.threads, rows.block_bytes
    first = (
        ("Python, Beam and Arrow", BASE_BYTES) if beam else ("Python and Arrow", BASE_BYTES_LOCAL)
    )
    launching = some([first, ("rows in memory", _live_bytes(rows))])
    decoded = SLACK * (PASSING_BYTES + threads * 2 * blocks) if blocks else 0
    kept = launching if workers.shared else some([first])
    kept = [*kept, *some([("decoded blocks of sources", decoded)])]
    of_steps = [
        (DEAL, "rows that are dealt", grouping.dealing_bytes(rows)),
        (WRITE, "rows of a part", grouping.writing_bytes(rows)),
    ]
    steps = [
        StepMemory(step, "", tuple(some([(what, SLACK * threads * nbytes)])))
        for step, what, nbytes in of_steps
    ]
    return Estimate(tuple(kept), tuple(steps), tuple(launching), workers.shared)


def check_grouping(rows: Source, grouping: Grouping, options: Options, runner: Any) -> None:
    """Refuses a shuffle that may take more memory than `options.memory`.

    Raises:
      StagingError: with the step, what takes how much, and what to change.
    """
    limit = options.memory_bytes
    if limit is None:
        return
    name = runner if isinstance(runner, str) else type(runner).__name__
    workers = Workers.of(name, options)
    found = grouping_estimate(rows, grouping, workers)
    if found.worker_bytes > limit:
        raise refuse(found, limit, list(_advice(rows, grouping, workers, limit)))


def _advice(rows: Source, grouping: Grouping, workers: Workers, limit: int) -> Iterator[str]:
    def need(workers: Workers) -> int:
        return grouping_estimate(rows, grouping, workers).worker_bytes

    yield from threads_advice(workers, lambda fewer: need(fewer) <= limit)
    if _live_bytes(rows) and workers.shared:
        yield "keep the table in files (from_parquet, from_npy) rather than in memory"
    if rows.block_bytes > PASSING_BYTES:
        yield f"write the table in smaller blocks than of {rows.block_bytes >> 20} MiB"
    yield advised_limit(need(workers))


def _live_bytes(source: Source) -> int:
    """Bytes of a source that are in the memory of this process."""
    return source.nbytes if source.is_live else sum(map(_live_bytes, source.inner))
