"""Which processes run a plan on a runner, and with how many threads: as far as its name and options
tell, without Beam.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from beamjax.options import Options, beam_flags
from beamjax.runtime.ordered_pool import computing_threads

DIRECT = ("direct", "fnapi")
EMBEDDED_FLINK = ("[local]", "[auto]")
"""What `flink_master` is where Flink runs inside of a job server of the launching process."""
SPARK_THREADS = 4
"""Of Beam's usual `spark_master_url`, local[4]."""
DATAFLOW_THREADS = 12


@dataclass(frozen=True)
class Workers:
    """Where a plan runs.

    Attributes:
      threads: of a worker process, each with a bundle of shards; without Beam there is one bundle.
      computing: threads that compute the shards of a bundle, several only where there is one.
      shared: whether the launching process is the worker.
      beam: whether there is a Beam pipeline.
      handing: how many worker processes hand what they made to the launching one, where that is the
        runner.
    """

    threads: int = 1
    shared: bool = True
    beam: bool = True
    handing: int = 0
    computing: int = 1

    @classmethod
    def of(cls, runner: str, options: Options) -> Workers:
        """Those of a runner, as far as its name and options tell.

        Args:
          runner: "local", or the name of a runner of Beam; any other, "" for example, is taken for
            a cluster with a thread in a process.
          options: of the run.
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
        """Of a worker process, that compute at the same time."""
        return self.threads * self.computing

    def with_fewer_threads(self) -> Iterator[Workers]:
        """The same with all numbers of threads below this one, the greatest first."""
        for count in range(self.all_threads - 1, 0, -1):
            one = self.threads == 1
            yield replace(self, computing=count) if one else replace(self, threads=count)

    def text(self) -> str:
        """For people."""
        count = self.all_threads
        threads = "1 thread" if count == 1 else f"{count} threads"
        if self.shared:
            return f"{threads} of the launching process"
        return f"processes of {threads}"


def _found(name: str, flags: Mapping[str, Any]) -> tuple[bool, int]:
    """Whether workers are threads of the launching process, and how many a process has."""
    match name:
        case "prism":  # gives its worker one bundle at a time
            return True, 1
        case "flink":
            return _flink(flags)
        case "spark":
            return _spark(flags)
        case "dataflow":
            return False, DATAFLOW_THREADS
    return False, 1


def _spark(flags: Mapping[str, Any]) -> tuple[bool, int]:
    """The same of Spark, of which Beam's usual master is in a job server too."""
    master = str(flags.get("spark_master_url", f"local[{SPARK_THREADS}]"))
    if _elsewhere(flags, "spark") or not master.startswith("local"):
        return False, 1
    threads = master.removeprefix("local").strip("[]") or "1"
    return True, int(threads) if threads.isdigit() else os.cpu_count() or 1


def _flink(flags: Mapping[str, Any]) -> tuple[bool, int]:
    """The same of Flink: of a task manager with its slots, or of Flink in a job server."""
    if _elsewhere(flags, "flink"):
        return False, 1
    master = flags.get("flink_master")
    if master is None or flags.get("flink_cluster"):
        from beamjax.pipelines.clusters import flink_cluster

        folder = flags.get("flink_cluster") or flink_cluster.default_folder()
        cluster = flink_cluster.read(folder)
        if cluster is not None and (
            flags.get("flink_cluster") or not flink_cluster.trouble(folder)
        ):
            return False, cluster.settings.slots
    if flags.get("flink_cluster") or master not in (None, *EMBEDDED_FLINK):
        return False, 1
    return True, _number(flags, "parallelism", 0) or os.cpu_count() or 1


def _elsewhere(flags: Mapping[str, Any], name: str) -> bool:
    """Whether the options say where a job server is."""
    said = ("job_endpoint", f"{name}_job_server_jar", f"{name}_submit_uber_jar")
    return any(flags.get(flag) for flag in said)


def _number(flags: Mapping[str, Any], name: str, usual: int) -> int:
    """A flag of Beam; what is no number, Beam refuses later."""
    text = str(flags.get(name, usual))
    return int(text) if text.isdigit() else usual
