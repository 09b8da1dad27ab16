"""The worker processes and threads of a run, from the name and options of its runner."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamjax.options import Options, beam_flags
from beamjax.runtime.ordered_pool import computing_threads

DIRECT = ("direct", "fnapi")
"""Names of the runner of Beam in this process."""
EMBEDDED_FLINK = ("[local]", "[auto]")
"""Values of `flink_master` with which Flink runs in a job server of the launching process."""
SPARK_THREADS = 4
"""Threads of Beam's default `spark_master_url`, local[4]."""
DATAFLOW_THREADS = 12
"""Threads of a worker process of Dataflow by default."""


@dataclass(frozen=True)
class Workers:
    """The worker processes of a run.

    Attributes:
      threads: number of threads of a worker process that process bundles; 1 without Beam.
      shared: whether the launching process is the worker.
      beam: whether there is a Beam pipeline.
      handing: number of worker processes that send results to the launching process, if the runner
        is in that process; otherwise 0.
      computing: number of threads that compute the shards of a bundle; more than 1 only if a worker
        has one bundle at a time.
    """

    threads: int = 1
    shared: bool = True
    beam: bool = True
    handing: int = 0
    computing: int = 1

    @classmethod
    def of(cls, runner: str, options: Options) -> Workers:
        """Returns the workers of a runner.

        Args:
          runner: "local", or the name of a Beam runner. Any other name counts as a cluster with one
            thread in each process.
          options: the options of the run.
        """
        name = runner.lower().removesuffix("runner")
        if name == "local":
            return cls(beam=False, computing=computing_threads(options))
        flags = beam_flags(options.beam)
        if name in DIRECT:
            count = _number(flags, "direct_num_workers", 1) or os.cpu_count() or 1
            if flags.get("direct_running_mode") == "multi_processing":
                return cls(shared=False, handing=count)
            return cls(count, computing=computing_threads(options) if count == 1 else 1)
        here, threads = _found(name, flags)
        loops = "use_loopback_process_worker" not in str(flags.get("experiments", ""))
        if "environment_type" in flags:
            here = flags["environment_type"] == "LOOPBACK"
        count = _number(flags, "number_of_worker_harness_threads", threads)
        alone = name == "prism" and here and loops and count == 1
        return cls(count, here and loops, computing=computing_threads(options) if alone else 1)

    @property
    def all_threads(self) -> int:
        """The number of threads of a worker process that compute at the same time."""
        return self.threads * self.computing

    def with_fewer_threads(self) -> Iterator[Workers]:
        """Yields the same workers with fewer threads, the largest number first."""
        for count in range(self.all_threads - 1, 0, -1):
            one = self.threads == 1
            yield replace(self, computing=count) if one else replace(self, threads=count)

    def text(self) -> str:
        """Returns the workers in words."""
        count = self.all_threads
        threads = "1 thread" if count == 1 else f"{count} threads"
        if self.shared:
            return f"{threads} of the launching process"
        return f"processes of {threads}"


def _found(name: str, flags: Mapping[str, Any]) -> tuple[bool, int]:
    """Returns whether the launching process is the worker, and the threads of a worker."""
    match name:
        case "prism":  # which gives its worker one bundle at a time
            return True, 1
        case "flink":
            return _flink(flags)
        case "spark":
            return _spark(flags)
        case "dataflow":
            return False, DATAFLOW_THREADS
    return False, 1


def _spark(flags: Mapping[str, Any]) -> tuple[bool, int]:
    """As `_found` for Spark, which runs in a job server by default."""
    master = str(flags.get("spark_master_url", f"local[{SPARK_THREADS}]"))
    if _elsewhere(flags, "spark") or not master.startswith("local"):
        return False, 1
    threads = master.removeprefix("local").strip("[]") or "1"
    return True, int(threads) if threads.isdigit() else os.cpu_count() or 1


def _flink(flags: Mapping[str, Any]) -> tuple[bool, int]:
    """As `_found` for Flink: a task manager with slots, or Flink in a job server."""
    if _elsewhere(flags, "flink"):
        return False, 1
    master = flags.get("flink_master")
    if master is None or flags.get("flink_cluster"):
        from beamjax.pipelines.clusters import flink_cluster

        folder = flags.get("flink_cluster") or flink_cluster.default_folder()
        cluster = flink_cluster.read(folder)
        if cluster is not None:
            return False, cluster.settings.slots
    if flags.get("flink_cluster") or master not in (None, *EMBEDDED_FLINK):
        return False, 1
    return True, _number(flags, "parallelism", 0) or os.cpu_count() or 1


def _elsewhere(flags: Mapping[str, Any], name: str) -> bool:
    """Returns whether the options name a job server."""
    names = ("job_endpoint", f"{name}_job_server_jar", f"{name}_submit_uber_jar")
    return any(flags.get(flag) for flag in names)


def _number(flags: Mapping[str, Any], name: str, usual: int) -> int:
    """Returns a flag as a number, or the default; Beam refuses other text later."""
    text = str(flags.get(name, usual))
    return int(text) if text.isdigit() else usual
