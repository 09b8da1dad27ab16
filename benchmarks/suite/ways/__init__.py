"""The ways to compute a workload, by name. Importing this imports neither JAX nor Beam."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.suite.cases import CASES, Size
from benchmarks.suite.problem import Problem, Tree

Call = Callable[[], Tree]  # computes the answer once


@dataclass(frozen=True)
class Job:
    """One way with one workload, as a process of its own gets it.

    Attributes:
      case: letter.
      size: of the workload.
      folder: of its data.
      shard_size: members that beamjax's plan computes at once: a shard of the others.
    """

    case: str
    size: Size
    folder: str
    shard_size: int = 0

    def open(self) -> Problem:
        return CASES[self.case].open(Path(self.folder), self.size)


@dataclass(frozen=True)
class Way:
    """A way to compute.

    Attributes:
      title: in tables.
      make: module of this package and a function in it, of a job and what `start` gave.
      packages: that it imports besides JAX.
      options: of the function.
      start: module and a context manager that starts what serves many jobs, such as a cluster.
    """

    title: str
    make: str
    packages: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    start: str | None = None

    def started(self) -> AbstractContextManager[Any]:
        manager = nullcontext() if self.start is None else _named(self.start)(**self.options)
        return manager

    def call(self, job: Job, started: Any) -> Call:
        """What computes the answer of a job; not yet warm."""
        if self.start is not None:
            return _named(self.make)(job, started)
        return _named(self.make)(job, **self.options)


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"benchmarks.suite.ways.{module}"), name)


def _processes(workers: int) -> dict[str, Any]:
    mode = {"direct_running_mode": "multi_processing", "direct_num_workers": workers}
    return {"runner": "DirectRunner", "options": mode}


JIT, LOOP, LOCAL, DIRECT, BATCH = "jit", "loop", "local", "direct", "batch"
SESSION = "session"
PLAIN = {LOCAL: "local-plain", DIRECT: "direct-plain"}
"""Ways of beamjax to the same with sums that are plain adds in float64."""
_FAST = {"options": {"reduction": "fast"}}

WAYS = {
    JIT: Way("jit of the whole", "in_process:jit"),
    LOOP: Way("shard loop in process", "in_process:loop"),
    LOCAL: Way("beamjax local", "in_process:beamjax", ("beamjax",), {"runner": "local"}),
    DIRECT: Way("beamjax DirectRunner", "in_process:beamjax", ("beamjax", "apache_beam")),
    SESSION: Way(
        "session on DirectRunner",
        "in_process:in_session",
        ("beamjax", "apache_beam"),
        start="in_process:session",
    ),
    PLAIN[LOCAL]: Way(
        "local, plain adds", "in_process:beamjax", ("beamjax",), {"runner": "local", **_FAST}
    ),
    PLAIN[DIRECT]: Way(
        "DirectRunner, plain adds", "in_process:beamjax", ("beamjax", "apache_beam"), _FAST
    ),
    "element": Way("Beam, per element", "beam:per_element", ("apache_beam",)),
    BATCH: Way("Beam, BatchElements", "beam:batch_elements", ("apache_beam",)),
    "dask-2": Way("Dask, 2 workers", "dask:call", ("dask",), {"workers": 2}, "dask:cluster"),
    "ray-2": Way("Ray Data, 2 workers", "ray:call", ("ray",), {"workers": 2}, "ray:cluster"),
    "dask-ml": Way(
        "Dask-ML, 2 workers", "dask:dask_ml", ("dask", "dask_ml"), {"workers": 2}, "dask:cluster"
    ),
    "duckdb": Way("DuckDB", "duckdb:call", ("duckdb",)),
    "drjax": Way("DrJAX", "in_process:drjax", ("drjax",)),
    "fedjax": Way("FedJAX for-each-client", "fedjax:call", ("fedjax",)),
}
"""What a workload is measured by."""

SCALED = {
    "direct-1": Way(
        "beamjax, 1 process", "in_process:beamjax", ("beamjax", "apache_beam"), _processes(1)
    ),
    "direct-2": Way(
        "beamjax, 2 processes", "in_process:beamjax", ("beamjax", "apache_beam"), _processes(2)
    ),
    "dask-1": Way("Dask, 1 worker", "dask:call", ("dask",), {"workers": 1}, "dask:cluster"),
    "ray-1": Way("Ray Data, 1 worker", "ray:call", ("ray",), {"workers": 1}, "ray:cluster"),
}
"""More ways, for the comparison of one worker with two."""

ALL = WAYS | SCALED
OURS = (LOCAL, DIRECT, SESSION, *PLAIN.values(), "direct-1", "direct-2")
PEERS = tuple(name for name in WAYS if name not in (JIT, LOOP, *OURS))


def usual(case: str) -> tuple[str, ...]:
    """The ways of a workload: those that it names, or all that can do any."""
    if CASES[case].ways:
        return CASES[case].ways
    left_out = ["dask-ml", "duckdb", *([] if CASES[case].fedjax else ["fedjax"])]
    return tuple(way for way in WAYS if way not in left_out)
