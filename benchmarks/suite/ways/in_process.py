"""Ways without worker processes: jit, the shard loop, DrJAX; and beamjax on any runner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from benchmarks.suite.sums import opened, sums_in_process
from benchmarks.suite.ways import Call, Job


def jit(job: Job) -> Call:
    """All members on the device before the clock starts."""
    import beamjax as bj

    return _jitted(job, bj)


def drjax(job: Job) -> Call:
    """The same with DrJAX's operators."""
    import drjax as package

    return _jitted(job, package)


def _jitted(job: Job, ops: Any) -> Call:
    problem = opened(job)
    call = jax.jit(problem.program(ops))
    arguments = jax.device_put((problem.server, problem.whole()))
    return lambda: jax.block_until_ready(call(*arguments))


def loop(job: Job) -> Call:
    """The ideal, by hand: a jitted function over beamjax's shards, summed in float64."""
    problem, sums = opened(job), sums_in_process(job)
    return lambda: problem.solve(sums)


def beamjax(job: Job, runner: str = "DirectRunner", options: Mapping[str, Any] = {}) -> Call:
    """`bj.run` of the program on members in files."""
    import beamjax as bj

    if runner != "local":
        import apache_beam  # noqa: F401  (2 s that are not the first call's)
    problem = opened(job)
    chosen = {"progress": False, **problem.options, **options}
    program, source = problem.program(bj), problem.source(bj)
    return lambda: bj.run(program, problem.server, source, runner=runner, options=chosen)


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """A session on DirectRunner, which keeps its workers between calls, as Dask and Ray do."""
    import beamjax as bj

    with bj.session(runner="DirectRunner") as opened_session:
        yield opened_session


def in_session(job: Job, started: Any) -> Call:
    """The program in a session, on members in files."""
    import beamjax as bj

    problem = opened(job)
    program, source = problem.program(bj), problem.source(bj)
    return lambda: started.run(program, problem.server, source, options=dict(problem.options))
