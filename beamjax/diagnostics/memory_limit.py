"""The option `memory`: refuses plans that may take more, and chooses threads that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from beamjax._text import human_bytes
from beamjax.diagnostics.fact_types import MemoryFact
from beamjax.diagnostics.memory import estimate
from beamjax.diagnostics.topology import Workers
from beamjax.errors import StagingError
from beamjax.options import Options
from beamjax.plan.steps import Map, Plan, Server, Step, walk
from beamjax.sources.source_base import Source


def check_memory(
    plan: Plan, sources: Mapping[int, Source], options: Options, workers: Workers
) -> None:
    """Refuses a plan that may take more memory than `options.memory`.

    Raises:
      StagingError: the message has the step, the largest parts, and what to change.
    """
    limit = options.memory_bytes
    if limit is None:
        return
    found = estimate(plan, sources, options, workers)
    if found.worker_bytes <= limit:
        return
    raise _refusal(plan, found, limit, list(_advice(plan, sources, options, workers)))


def _refusal(plan: Plan, found: MemoryFact, limit: int, advice: Sequence[str]) -> StagingError:
    """Makes the error for a plan that may take more than `limit` bytes in a worker process."""
    name = max(found.steps, key=lambda name: sum(found.steps[name].values()), default=None)
    largest = [*found.kept.items(), *(found.steps[name].items() if name else ())]
    at = "the run"
    if name:
        (step,) = (step for step in walk(plan.steps) if step.name == name)
        at = f"step {name!r}" + (f" ({_line(plan, step)})" if _line(plan, step) else "")
    parts = ", ".join(
        f"{what} {human_bytes(nbytes)}"
        for what, nbytes in sorted(largest, key=lambda part: -part[1])
    )
    return StagingError(
        f"{at}: a worker process may take {human_bytes(found.worker_bytes)}, but memory="
        f"{human_bytes(limit)}: {parts}. To change that, {'; or '.join(advice)}"
    )


def _line(plan: Plan, step: Step) -> str:
    if isinstance(step, Map | Server):
        return next(iter(plan.bodies[step.body].lines), "")
    return step.line


def with_fitting_threads(
    plan: Plan, sources: Mapping[int, Source], options: Options, runner: str
) -> Options:
    """Returns options with as many computing threads in this process as fit in `options.memory`.

    Args:
      plan: the plan.
      sources: the sources among its inputs, by the number of the input.
      options: the options of the run.
      runner: the name of the runner; "local" and DirectRunner with one worker have such threads.
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
    fewer = (few for few in workers.with_fewer_threads() if need(workers=few) <= limit)
    if (few := next(fewer, None)) is not None:
        yield f"use {few.all_threads} of {workers.all_threads} threads in a worker process"
    saved = need() - need(options=replace(options, reduction="fast"))
    if 10 * saved > need() - limit:
        fit = "" if need() - saved <= limit else ", which is not enough by itself"
        yield f'set reduction="fast" in the options{fit}'
    if options.keep is None and need(options=replace(options, keep="placed")) <= limit:
        yield 'store placed results in files, keep="placed"'
    # Caches grow with the limit, so the need at a larger limit is larger too.
    enough = need()
    while need(limit=enough) > enough:
        enough = math.ceil(1.1 * enough)
    yield f'give a worker process more, memory="{math.ceil(enough / 2**20)}MiB"'


def _with_shards(plan: Plan, size: int) -> Plan:
    """Returns a plan with smaller shards, and memory of bodies in proportion."""
    share = size / max(plan.shard_sizes.values())
    bodies = {
        key: replace(body, working=math.ceil(share * body.working))
        for key, body in plan.bodies.items()
    }
    sizes = {name: min(n, size) for name, n in plan.shard_sizes.items()}
    return replace(plan, shard_sizes=sizes, bodies=bodies)


def sources_of(values: Sequence[Any]) -> dict[int, Source]:
    """Returns the sources among the values of the inputs of a plan, by the number of the input."""
    return {i: value[0] for i, value in enumerate(values) if isinstance(value, tuple)}
