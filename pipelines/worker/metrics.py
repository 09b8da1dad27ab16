"""The work of a step as Beam metrics, which every runner shows."""

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
      step: the name of the step, which metric names begin with, as in `step/members`.
    """

    def __init__(self, step: str):
        names = ("members", "shards", "bytes_read", "bytes_reduced", *COUNTED)
        self._counters = {n: Metrics.counter(NAMESPACE, f"{step}/{n}") for n in names}
        self._times = {n: Metrics.distribution(NAMESPACE, f"{step}/{n}_ms") for n in SECONDS}

    def add(self, bundle: Tally) -> None:
        """Adds the work of one bundle."""
        for name, counter in self._counters.items():
            counter.inc(getattr(bundle, name))
        for name, distribution in self._times.items():
            distribution.update(round(1000 * getattr(bundle, name)))


class StepTimes:
    """Measures the seconds of a step outside of shards, and reports them to Beam and to the job.

    The metrics have the same names as those of `StepMetrics`, but belong to other Beam transforms.

    Args:
      step: the name of the step.
      kind: the kind of work: "compute", "merge", "read" or "transfer". The parts of it that are
        compilation and transfers are counted separately.
      reports: the reports of the job; None for no reports to the job.
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
        """A context whose time is measured."""
        meter = Meter(self.step, recorder_for(self.reports))
        yield
        meter.lap(self.kind)
        meter.apart()
        self.spent += meter.total

    def report_to_beam(self) -> None:
        """Adds the seconds since the last report to the metrics, if there are any."""
        spent = self.take()
        if spent != Tally():
            for name, distribution in self._times.items():
                distribution.update(round(1000 * getattr(spent, name)))

    def take(self) -> Tally:
        """Returns the work since the last report, and resets it; the caller reports it."""
        spent, self.spent = self.spent, Tally()
        return spent

    def report(self) -> None:
        """Reports to Beam and writes the record of this process. Called at the end of a bundle."""
        self.report_to_beam()
        recorder = recorder_for(self.reports)
        if recorder is not None:
            recorder.flush()
