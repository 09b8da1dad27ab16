"""NumPy on parts of long vectors, on several cores: it holds Python's lock only between calls."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LONG = 1 << 18
"""Values of a vector that are worth a second thread."""

MAX_THREADS = 4
"""More wait for each other, and for memory."""


def in_parts(count: int, values: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(first, last)` on ranges that make up all of range(count).

    Args:
      count: of the parts that may be divided among threads.
      values: of the whole vector; a short one is left to this thread.
      work: may be called on several threads at once; the first error that it raises is raised here.
    """
    threads = min(_threads(), count)
    if values < LONG or threads < 2:
        work(0, count)
        return
    cuts = [count * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(work, *cut) for cut in itertools.pairwise(cuts[1:])]
    try:
        work(cuts[0], cuts[1])
    finally:
        for other in others:
            other.exception()
    for other in others:
        other.result()


@functools.cache
def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS) if hasattr(os, "sched_getaffinity") else 2


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process: one that is forked needs its own."""
    return ThreadPoolExecutor(MAX_THREADS, f"beamjax-{process}")
