"""What a body costs, in operations and bytes, and how long that takes on a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """What has to be done, counted from equations.

    Attributes:
      flops: arithmetic operations; a transcendental function counts as several.
      nbytes: that move between memory and the processor, at most.
      calls: operations that are started, each of which has a price of its own.
      guessed: whether a loop is in it whose rounds depend on data, and are taken to be a few.
      extra: operations of a matrix product that take as long as these take longer than so many of
        a matrix product.
      shared: how much of the weight XLA has all cores work on, wherever it stands.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    calls: float = 0.0
    guessed: bool = False
    extra: float = 0.0
    shared: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.calls + other.calls,
            self.guessed or other.guessed,
            self.extra + other.extra,
            self.shared + other.shared,
        )

    def times(self, count: float) -> Cost:
        """The same so many times."""
        flops, nbytes, calls = count * self.flops, count * self.nbytes, count * self.calls
        return Cost(
            flops, nbytes, calls, self.guessed, count * self.extra, count * self.shared
        )  # fmt: skip

    @property
    def weight(self) -> float:
        """Operations of a matrix product that take as long."""
        return self.flops + self.extra


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    Attributes:
      flops: operations of matrix products a second on a core, in bodies as they are, not at best.
      nbytes: bytes a second between memory and the processor.
      call: seconds to start an operation in an executable.
      shard: seconds that a shard takes besides: to be handed to an executable, and its results
        back.
      extra: of what `Cost.extra` counts, a second; as many as of matrix products on a machine on
        which slower operations are as much slower as `interpreters.cost` says.
    """

    flops: float = 5e10
    nbytes: float = 1e10
    call: float = 1e-6
    shard: float = 1e-4
    extra: float = 5e10

    def seconds(self, cost: Cost) -> float:
        """Of work that is done on many members at once, without that of starting it.

        What computes waits for what moves or the other way round: a roofline (S. Williams,
        A. Waterman and D. Patterson, Communications of the ACM 52(4), 2009).
        """
        return max(cost.flops / self.flops + cost.extra / self.extra, cost.nbytes / self.nbytes)


USUAL = Rates()
"""Of a machine that nobody measured. What is decided by these is the same on all machines."""


@dataclass(frozen=True)
class Fixed:
    """What a runner takes for itself, in seconds.

    Attributes:
      pipeline: for each pipeline.
      step: for each step in one.
      shard: for each shard, whose range and partials are elements of Beam.
    """

    pipeline: float
    step: float
    shard: float = 2e-4


RUNNERS = {
    "local": Fixed(0.0, 3e-4, 0.0),
    "DirectRunner": Fixed(0.025, 0.05, 5e-5),
    "PrismRunner": Fixed(0.5, 0.1),
    "FlinkRunner": Fixed(3.0, 0.2),
    "SparkRunner": Fixed(4.0, 0.3),
    "DataflowRunner": Fixed(240.0, 5.0),
}
"""Before anything was measured: of warm job servers and of workers that run."""
ELSEWHERE = Fixed(3.0, 0.2)
