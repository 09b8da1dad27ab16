"""The cost of a body in operations and bytes, and how long a machine takes for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The work in some equations, as counted without running them.

    Attributes:
      flops: arithmetic operations; a transcendental function counts as several.
      nbytes: upper bound of the bytes that move between memory and the processor.
      calls: number of operations that are started; starting one takes `Rates.call` seconds.
      guessed: whether it includes a loop whose number of rounds depends on data and was guessed.
      extra: time by which these operations are slower than matrix products of as many operations,
        in operations of a matrix product.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    calls: float = 0.0
    guessed: bool = False
    extra: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.calls + other.calls,
            self.guessed or other.guessed,
            self.extra + other.extra,
        )

    def times(self, count: float) -> Cost:
        """The cost of doing this work `count` times."""
        flops, nbytes, calls = count * self.flops, count * self.nbytes, count * self.calls
        return Cost(flops, nbytes, calls, self.guessed, count * self.extra)

    @property
    def weight(self) -> float:
        """The number of operations of a matrix product that take as long as this work."""
        return self.flops + self.extra


@dataclass(frozen=True)
class Rates:
    """How fast a machine is.

    Attributes:
      flops: operations of matrix products per second on one core, in typical bodies (not the peak).
      nbytes: bytes per second between memory and the processor.
      call: seconds to start an operation in an executable.
      extra: units of `Cost.extra` per second. It equals `flops` on a machine where slow operations
        are as slow as the tables in `interpreters/cutting/cost.py` assume.
    """

    flops: float = 5e10
    nbytes: float = 1e10
    call: float = 1e-6
    extra: float = 5e10

    def seconds(self, cost: Cost) -> float:
        """Predicted seconds for work on many members at once, without the time to start it.

        This is a roofline model: either arithmetic or memory traffic is the bottleneck
        (S. Williams, A. Waterman and D. Patterson, Communications of the ACM 52(4), 2009).
        """
        return max(cost.flops / self.flops + cost.extra / self.extra, cost.nbytes / self.nbytes)


USUAL = Rates()
"""Rates of a typical machine. Decisions based on them are the same on all machines."""
