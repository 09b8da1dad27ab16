"""Runs NumPy on parts of long vectors in several threads, as NumPy releases the GIL in a call."""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LONG = 1 << 18
"""Length of a vector from which a second thread saves time."""

MAX_THREADS = 4
"""Largest number of threads. More of them would wait for each other and for memory."""


def in_parts(count: int, values: int, work: Callable[[int, int], None]) -> None:
    """Calls `work(first, last)` on ranges that cover range(count), in several threads."""
    alone = values < LONG or getattr(_local, "divided", False)
    threads = 1 if alone else min(_threads(), count)
    if threads < 2:
        work(0, count)
        return

    def part(first: int, last: int) -> None:
        # A part is not divided again: all threads are busy already.
        _local.divided = True
        try:
            work(first, last)
        finally:
            _local.divided = False

    cuts = [count * i // threads for i in range(threads + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(part, *cut) for cut in itertools.pairwise(cuts[1:])]
    try:
        part(cuts[0], cuts[1])
    finally:
        # Wait for all threads even after an error, since they use the caller's arrays.
        for other in others:
            other.exception()
    for other in others:
        other.result()


_local = threading.local()


@functools.cache
def _threads() -> int:
    return min(len(os.sched_getaffinity(0)), MAX_THREADS) if hasattr(os, "sched_getaffinity") else 2


@functools.cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked process needs its own."""
    return ThreadPoolExecutor(MAX_THREADS, f"beamjax-{process}")
