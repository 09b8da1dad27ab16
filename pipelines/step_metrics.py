"""What a step does, as metrics of Beam that every runner shows."""

from __future__ import annotations

from apache_beam.metrics import Metrics

from beamjax.progress import SECONDS, Tally

NAMESPACE = "beamjax"


class StepMetrics:
    """Counters of a step, and distributions of its seconds in a bundle, in milliseconds.

    Unlike `Progress`, they count what a runner repeats: all that was done, not what is done.

    Args:
      step: name of the step; a metric is called `step/members`.
    """

    def __init__(self, step: str):
        names = ("members", "shards", "bytes_read")
        self._counters = {n: Metrics.counter(NAMESPACE, f"{step}/{n}") for n in names}
        self._times = {n: Metrics.distribution(NAMESPACE, f"{step}/{n}_ms") for n in SECONDS}

    def add(self, bundle: Tally) -> None:
        """What one bundle did."""
        for name, counter in self._counters.items():
            counter.inc(getattr(bundle, name))
        for name, distribution in self._times.items():
            distribution.update(round(1000 * getattr(bundle, name)))
