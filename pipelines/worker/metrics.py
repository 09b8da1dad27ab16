"""The spans of a DoFn, as Beam metrics, which every runner shows, and in the record of the job."""

from __future__ import annotations

import time

from apache_beam.metrics import Metrics

from beamjax.spans import KINDS, Spans
from beamjax.telemetry.worker_records import EVERY_SECONDS, Reports, report

NAMESPACE = "beamjax"
COUNTERS = ("members", "shards", "bytes_read")


class WorkerSpans(Spans):
    """Adds up the spans of a DoFn or CombineFn, and reports them."""

    def __init__(self, reports: Reports | None):
        # Metrics are named by the step, as in `step/members`. Unlike `Progress`, they also count
        # work that a runner repeats. Seconds are distributions of the milliseconds between two
        # reports.
        super().__init__(traces=True, ranges=True)
        self.reports = reports
        self._reported = time.monotonic()

    def __reduce__(self) -> tuple[type[WorkerSpans], tuple[Reports | None]]:
        return WorkerSpans, (self.reports,)

    def tick(self) -> None:
        """Reports if the last report is a second old; called after each shard."""
        if time.monotonic() - self._reported >= EVERY_SECONDS:
            self.report()

    def report(self) -> None:
        """Reports what was done since the last report; called at the end of a bundle."""
        self._reported = time.monotonic()
        work = self.take()
        for name, sums in work.sums.items():
            for counter in COUNTERS:
                if counter in sums:
                    Metrics.counter(NAMESPACE, f"{name}/{counter}").inc(int(sums[counter]))
            for kind in KINDS:
                if kind in sums:
                    times = Metrics.distribution(NAMESPACE, f"{name}/{kind}_ms")
                    times.update(round(1000 * sums[kind]))
        if work.sums:
            # Raises JobCancelledError if the job was cancelled.
            report(work, self.reports)
