"""The cost of a body in operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cost:
    """The work in some equations, as counted without running them."""

    flops: float = 0.0  # arithmetic operations; a transcendental function counts as several
    nbytes: float = 0.0  # at most; between memory and the processor
    guessed: bool = False  # whether a number of rounds depends on data
    # Time by which these operations are slower than matrix products of as many operations, in
    # operations of a matrix product.
    extra: float = 0.0
    # Whether it includes a convolution whose input and kernel both differ between members.
    grouped: bool = False

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.nbytes + other.nbytes,
            self.guessed or other.guessed,
            self.extra + other.extra,
            self.grouped or other.grouped,
        )

    def times(self, count: float) -> Cost:
        """The cost of doing this work `count` times."""
        flops, nbytes, extra = count * self.flops, count * self.nbytes, count * self.extra
        return replace(self, flops=flops, nbytes=nbytes, extra=extra)

    @property
    def weight(self) -> float:
        """The number of operations of a matrix product that take as long as this work."""
        return self.flops + self.extra
