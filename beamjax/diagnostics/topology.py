"""The worker processes and threads of a run, from the name and options of its runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from beamjax.options import Options, beam_flags
from beamjax.runtime.ordered_pool import computing_threads


class Workers(NamedTuple):
    """The worker processes of a run."""

    threads: int = 1  # of a worker process, that process bundles; 1 without Beam
    shared: bool = True  # the launching process is the worker
    beam: bool = True  # there is a Beam pipeline
    # Worker processes that send results to the launching process; 0 if the runner is elsewhere.
    handing: int = 0
    # Threads that compute the shards of a bundle; more than 1 only with one bundle at a time.
    computing: int = 1

    @classmethod
    def of(cls, runner: str, options: Options) -> Workers:
        """Returns the workers of "local" or of a Beam runner by its name."""
        if runner == "local":
            return cls(beam=False, computing=computing_threads(options.local_threads))
        from beamjax.pipelines.runners.runner_table import spec_of
        from beamjax.pipelines.runners.spec import number

        # A name that the table lacks counts as a cluster with one thread in each process.
        spec, flags = spec_of(runner), beam_flags(options.beam)
        here, threads = spec.workers(flags)
        if spec.in_this_process:
            handing = 0 if here else threads
            threads = threads if here else 1
        else:
            handing = 0
            if "environment_type" in flags:
                here = flags["environment_type"] == "LOOPBACK"
            here = here and "use_loopback_process_worker" not in str(flags.get("experiments", ""))
            threads = number(flags, "number_of_worker_harness_threads", threads)
        alone = spec.one_bundle and here and threads == 1
        computing = computing_threads(options.local_threads) if alone else 1
        return cls(threads, here, True, handing, computing)

    @property
    def all_threads(self) -> int:
        """The number of threads of a worker process that compute at the same time."""
        return self.threads * self.computing

    def with_fewer_threads(self) -> Iterator[Workers]:
        """Yields the same workers with fewer threads, the largest number first."""
        for count in range(self.all_threads - 1, 0, -1):
            single = self.threads == 1
            yield self._replace(computing=count) if single else self._replace(threads=count)

    def text(self) -> str:
        """Returns the workers in words."""
        count = self.all_threads
        threads = "1 thread" if count == 1 else f"{count} threads"
        if self.shared:
            return f"{threads} of the launching process"
        return f"processes of {threads}"
