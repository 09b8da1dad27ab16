"""What a workload is: members in files, functions of a member, and what is made of their sums.

All ways share these functions and files, so they differ only in how members reach the functions and
how sums come back. A way computes `problem.solve(sums)` with sums of its own, or runs the
`problem.program` whole.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Tree = Any  # nested dicts and tuples of arrays
Sums = Callable[[str, Tree], Tree]
"""Name of a function and server values to the sums over all members, in float64."""


class Problem(abc.ABC):
    """A workload whose data is open.

    Attributes:
      size: numbers by name; `n` is that of the members.
      n: members.
      folder: where `write` has put the data.
      server: tree of arrays that all members see at the start.
      functions: name to a function of server values and one member, a tree of arrays of which the
        way makes sums over the members; JAX.
    """

    functions: Mapping[str, Callable[..., Tree]]
    server: Tree
    options: Mapping[str, Any] = {}  # of runs of beamjax

    def __init__(self, folder: Path, size: Mapping[str, int]):
        self.folder, self.size, self.n = Path(folder), dict(size), size["n"]

    @classmethod
    def write(cls, folder: Path, size: Mapping[str, int]) -> None:
        """Makes the data, as .npy files; nothing where members have none."""
        return

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> Tree:
        """Members [start, stop) as a tree of arrays with a leading axis."""

    @abc.abstractmethod
    def solve(self, sums: Sums) -> Tree:
        """The answer, from sums over members; NumPy and a little JAX."""

    @abc.abstractmethod
    def program(self, ops: Any) -> Callable[..., Tree]:
        """The same as a program of (server, members); `ops` is beamjax or drjax."""

    @abc.abstractmethod
    def source(self, bj: Any) -> Any:
        """The members as beamjax reads them."""

    @property
    def nbytes(self) -> int:
        """Of all members together."""
        return sum(path.stat().st_size for path in self.folder.glob("*.npy"))

    def shards(self, size: int) -> list[tuple[int, int]]:
        """Ranges of `size` consecutive members, the last one shorter."""
        return [(start, min(start + size, self.n)) for start in range(0, self.n, size)]

    def shard_sum(self, name: str) -> Callable[[Tree, Tree], Tree]:
        """The sum of a function over the members of a shard, for the device."""
        import jax

        each = jax.vmap(self.functions[name], (None, 0))

        def total(server: Tree, members: Tree) -> Tree:
            return jax.tree.map(lambda x: x.sum(axis=0), each(server, members))

        return total

    def whole(self) -> Tree:
        """All members in memory."""
        return self.read(0, self.n)

    def one(self, index: int) -> Tree:
        """A member, without a leading axis."""
        import jax

        return jax.tree.map(lambda x: x[0], self.read(index, index + 1))


class ClientProblem(Problem):
    """A workload of clients that train by steps, which FedJAX's for-each-client can do."""

    @abc.abstractmethod
    def client_step(self, state: Tree, batch: Tree) -> Tree:
        """The model of a client after a step; JAX."""

    @abc.abstractmethod
    def batches(self, fedjax: Any, client: int) -> Iterator[Tree]:
        """What the steps of a client are given, in order."""

    def cohorts(self) -> Iterator[Sequence[int]]:
        """For each round, the clients whose mean model is the next one."""
        yield range(self.n)

    def weight(self, client: int) -> float:
        """Of the client in the mean."""
        return 1.0


def opened(folder: Path, name: str) -> np.ndarray:
    """A .npy file, mapped; a plain array, so that JAX takes it as it takes others."""
    return np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r"))


def write_rows(path: Path, shape: tuple[int, ...], rows: Callable[[int, int], np.ndarray]) -> None:
    """Writes a float32 array of any length by parts of 64 MiB at most, from rows [start, stop)."""
    target = np.lib.format.open_memmap(path, "w+", np.float32, shape)
    step = max(1, (64 << 20) // (4 * int(np.prod(shape[1:]))))
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        target[start:stop] = rows(start, stop)
    target.flush()
