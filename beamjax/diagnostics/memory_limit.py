"""Plans that are refused because they may take more than `options.memory`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from beamjax._text import human_bytes
from beamjax.diagnostics.memory import Estimate, estimate
from beamjax.diagnostics.topology import Workers
from beamjax.errors import StagingError
from beamjax.options import Options
from beamjax.plan.steps import Plan
from beamjax.sources.source_base import Source


def check_memory(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> None:
    """Refuses a plan that may take more memory than `options.memory`.

    Raises:
      StagingError: with the step, what takes how much, and what to change.
    """
    limit = options.memory_bytes
    if limit is None:
        return
    found = estimate(plan, sources, options, workers)
    if found.worker_bytes <= limit:
        return
    raise refuse(found, limit, list(_advice(plan, sources, options, workers)))


def refuse(found: Estimate, limit: int, advice: Sequence[str]) -> StagingError:
    """The error for what may take more memory than it may.

    Args:
      found: what it takes.
      limit: of a worker process, in bytes.
      advice: what to change.
    """
    step = max(found.steps, key=lambda step: step.nbytes, default=None)
    parts = sorted((*found.kept, *(step.parts if step else ())), key=lambda part: -part.nbytes)
    at = f"step {step.step!r}" + (f" ({step.line})" if step.line else "") if step else "the run"
    told = ", ".join(f"{part.what} {human_bytes(part.nbytes)}" for part in parts)
    return StagingError(
        f"{at}: a worker process may take {human_bytes(found.worker_bytes)}, but memory="
        f"{human_bytes(limit)}: {told}. To change that, {'; or '.join(advice)}"
    )


def with_fitting_threads(
    plan: Plan, sources: Mapping[int, Source], options: Options, runner: str
) -> Options:
    """Options with as many threads that compute in this process as `options.memory` has room for.

    Args:
      plan: to be run.
      sources: the sources among its inputs, by the number of the input.
      options: of the run.
      runner: its name; "local" and DirectRunner with its one worker have such threads.
    """
    limit = options.memory_bytes
    threads = Workers.of(runner, options).computing
    if limit is None or options.local_threads is not None or threads == 1:
        return options
    while threads > 1:
        fewer = Workers.of(runner, replace(options, local_threads=threads))
        if estimate(plan, sources, options, fewer).worker_bytes <= limit:
            break
        threads -= 1
    return replace(options, local_threads=threads)


def advised_limit(nbytes: int) -> str:
    """What to do where this many bytes are needed in any case."""
    return f'give a worker process more, memory="{math.ceil(nbytes / 2**20)}MiB"'


def threads_advice(workers: Workers, fits: Callable[[Workers], bool]) -> Iterator[str]:
    """How many threads to use, if there are fewer that fit."""
    few = next(filter(fits, workers.with_fewer_threads()), None)
    if few is not None:
        yield f"use {few.all_threads} of {workers.all_threads} threads in a worker process"


def _advice(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> Iterator[str]:
    limit = options.memory_bytes or 0

    def need(
        plan: Plan = plan,
        options: Options = options,
        workers: Workers = workers,
        limit: int = limit,
    ) -> int:
        return estimate(plan, sources, replace(options, memory=limit), workers).worker_bytes

    size = max(plan.shard_sizes.values(), default=8)
    smaller = (size >> k for k in range(1, size.bit_length()))
    fits = next((s for s in smaller if s % 8 == 0 and need(_with_shards(plan, s)) <= limit), None)
    if fits is not None:
        yield f"set shard_size={fits} in the options"
    yield from threads_advice(workers, lambda fewer: need(workers=fewer) <= limit)
    saved = need() - need(options=replace(options, reduction="fast"))
    if 10 * saved > need() - limit:
        fit = "" if need() - saved <= limit else ", which is not enough by itself"
        yield f'set reduction="fast" in the options{fit}'
    if options.keep is None and need(options=replace(options, keep="placed")) <= limit:
        yield 'keep placed results in files, keep="placed"'
    # What is kept grows with the limit, so it is not the same as the need at the present one.
    enough = need()
    while need(limit=enough) > enough:
        enough = math.ceil(1.1 * enough)
    yield advised_limit(enough)


def _with_shards(plan: Plan, size: int) -> Plan:
    """A plan with smaller shards, whose bodies are taken to need as much less."""
    share = size / max(plan.shard_sizes.values())
    bodies = {
        key: replace(body, working=math.ceil(share * body.working))
        for key, body in plan.bodies.items()
    }
    sizes = {name: min(n, size) for name, n in plan.shard_sizes.items()}
    return replace(plan, shard_sizes=sizes, bodies=bodies)


def sources_of(values: Sequence[Any]) -> dict[int, Source]:
    """The sources among the values of the inputs of a plan, by the number of the input."""
    return {i: value[0] for i, value in enumerate(values) if isinstance(value, tuple)}
