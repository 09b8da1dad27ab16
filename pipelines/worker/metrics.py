"""The work of a step as metrics of Beam, which every runner shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from apache_beam.metrics import Metrics

from beamjax.telemetry.meters import COUNTED, Meter, Reports, recorder_for
from beamjax.telemetry.progress import SECONDS, Tally

NAMESPACE = "beamjax"


class StepMetrics:
    """Counters of a step, and distributions of its seconds in a bundle, in milliseconds.

    Unlike `Progress`, they also count work that a runner repeats.

    Args:
      step: name of the step; a metric is called `step/members`.
    """

    def __init__(self, step: str):
        names = ("members", "shards", "bytes_read", "bytes_reduced", "bytes_saved", *COUNTED)
        self._counters = {n: Metrics.counter(NAMESPACE, f"{step}/{n}") for n in names}
        self._times = {n: Metrics.distribution(NAMESPACE, f"{step}/{n}_ms") for n in SECONDS}

    def add(self, bundle: Tally) -> None:
        """The work of one bundle."""
        for name, counter in self._counters.items():
            counter.inc(getattr(bundle, name))
        for name, distribution in self._times.items():
            distribution.update(round(1000 * getattr(bundle, name)))


class StepTimes:
    """Seconds of a step that are not those of a shard, reported to Beam and to the job.

    The metrics have the names of those of the shards, and count in other transforms of Beam.

    Args:
      step: name of the step.
      kind: what they are, "compute", "merge" or "transfer". Compiling and
        transfers are counted apart.
      reports: where the job reads them; None if nothing does.
    """

    def __init__(self, step: str, kind: str, reports: Reports | None):
        self.step = step
        self.kind = kind
        self.reports = reports
        self.spent = Tally()
        names = dict.fromkeys(("compile", "transfer", kind))
        self._times = {n: Metrics.distribution(NAMESPACE, f"{step}/{n}_ms") for n in names}

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """What is done here counts."""
        meter = Meter(self.step, recorder_for(self.reports))
        yield
        meter.lap(self.kind)
        meter.apart()
        self.spent += meter.total

    def tell_beam(self) -> None:
        """Adds what was measured since the last time to the metrics, if it is anything."""
        spent = self.take()
        if spent != Tally():
            for name, distribution in self._times.items():
                distribution.update(round(1000 * getattr(spent, name)))

    def take(self) -> Tally:
        """What was measured since the last time, for those that report to Beam by other means."""
        spent, self.spent = self.spent, Tally()
        return spent

    def report(self) -> None:
        """The same, and writes the record of this process; for the end of a bundle."""
        self.tell_beam()
        recorder = recorder_for(self.reports)
        if recorder is not None:
            recorder.flush()
