"""One pass over one shard: pad, compute, cut. The same code in this process and on a worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from beamjax.accumulators import Accumulator
from beamjax.bodies import load_body, with_x64
from beamjax.dyadic import DyadicTree
from beamjax.errors import BeamjaxError, Failure, WorkerError
from beamjax.plan import Combine, Lane, Map, Plan
from beamjax.reducers import make_accumulator, reducer_of


@dataclass(frozen=True)
class Shard:
    """Members [start, start + count) of a placement: shard number `index`."""

    index: int
    start: int
    count: int


def shards(n: int, size: int, first: int = 0, last: int | None = None) -> Iterator[Shard]:
    """Shards number [first, last) of n members in shards of `size`; the last one may be short."""
    for index in range(first, -(-n // size) if last is None else last):
        start = index * size
        yield Shard(index, start, min(size, n - start))


class ShardExecutor:
    """Computes one `Map` step a shard at a time.

    Args:
      plan: that the step is part of.
      step: what to compute.
      broadcasts: the server values that it reads, by name; put on the device once.
      device: to compute on; None for the one that JAX takes by itself.

    Raises:
      WorkerError: the body can't be loaded here.
    """

    def __init__(
        self,
        plan: Plan,
        step: Map,
        broadcasts: Mapping[str, np.ndarray],
        device: jax.Device | None = None,
    ):
        self.step = step
        self.device = device
        self.size = plan.shard_sizes[step.placement]
        self._x64 = plan.x64
        self._body = plan.bodies[step.body]
        # What calls back to the host is given true members only, so that no call is for padding.
        self._pads = self._body.python is None
        self._call = load_body(step.body, self._body, self.size)
        with with_x64(self._x64):
            self._broadcasts = [
                jax.device_put(broadcasts[name], device) for name in step.broadcasts
            ]
        known = dict(zip(step.broadcasts, self._broadcasts, strict=True))
        self._joins = [join_shards(plan, step, combine, known) for combine in step.combines]

    def __call__(
        self, shard: Shard, operands: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[Any]]:
        """Computes a shard.

        Args:
          shard: which.
          operands: one array of shape (shard.count, ...) for each operand of the step.

        Returns:
          The placed results, of shapes (shard.count, ...), and the partials: a vector for each
          lane, then a list of arrays for each combine.

        Raises:
          WorkerError: the computation failed; the message names step, shard and members.
        """
        with shard_errors(self.step, shard):
            arrays = list(map(np.asarray, operands))
            if self._pads:
                arrays = list(map(self._pad, arrays))
            call = self._call
            if shard.count < self.size and not self._pads:
                call = load_body(self.step.body, self._body, shard.count)
            with with_x64(self._x64), _on(self.device):
                start, count = np.int32(shard.start), np.int32(shard.count)
                outs = call(start, count, *self._broadcasts, *arrays)
                arrays = [np.asarray(out) for out in outs]
        step = self.step
        results = [x[: shard.count] for x in arrays[: len(step.results)]]
        partials: list[Any] = arrays[len(results) :][: len(step.lanes)]
        rest = arrays[len(results) + len(partials) :]
        for combine in step.combines:
            partials.append(rest[: len(combine.leaves)])
            rest = rest[len(combine.leaves) :]
        return results, partials

    def trees(self) -> list[DyadicTree[list[np.ndarray]]]:
        """An empty tree for the partials of each combine."""
        return list(map(DyadicTree, self._joins))

    def _pad(self, x: np.ndarray) -> np.ndarray:
        """Repeats the last member: unlike zeros, it is sure to let loops in the body end."""
        missing = self.size - x.shape[0]
        return x if not missing else np.concatenate([x, np.repeat(x[-1:], missing, axis=0)])


def _on(device: jax.Device | None) -> contextlib.AbstractContextManager[Any]:
    """A context in which JAX computes on a device."""
    return contextlib.nullcontext() if device is None else jax.default_device(device)


@contextlib.contextmanager
def shard_errors(step: Map, shard: Shard) -> Iterator[None]:
    """Says of every error in a `with` block which step and shard it belongs to.

    Raises:
      BeamjaxError: of the same type if it is one of ours, otherwise a `WorkerError`.
    """
    try:
        yield
    except Exception as error:
        functions = f" ({', '.join(step.functions)})" if step.functions else ""
        where = (
            f"step {step.name!r}{functions}, shard {shard.index} of placement "
            f"{step.placement!r}, members {shard.start} to {shard.start + shard.count - 1}"
        )
        told: BeamjaxError = WorkerError(f"{where}: {type(error).__name__}: {error}")
        if isinstance(error, BeamjaxError):
            told = type(error)(f"{where}: {error}")
        members = shard.start, shard.start + shard.count - 1
        told.failure = Failure(step.name, shard.index, members)
        raise told from error


def new_accumulators(step: Map, mode: Any) -> list[Any]:
    """An empty accumulator for each lane of a step."""
    return [new_accumulator(lane, lane.size, mode) for lane in step.lanes]


def new_accumulator(lane: Lane, size: int, mode: Any) -> Accumulator:
    """An empty accumulator for `size` values of a lane: all of them, or a piece."""
    return make_accumulator(lane.kind, np.dtype(lane.dtype), size, mode=mode)


def join_shards(
    plan: Plan, step: Map, combine: Combine, known: Mapping[str, Any]
) -> Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]:
    """What brings the partials of a combine together, for a `DyadicTree`.

    Args:
      plan: with the body of the combine.
      step: the pass that it ends.
      combine: the reduction.
      known: server values, by name.

    Raises:
      WorkerError: the body can't be loaded here; and later, if it fails.
    """
    call = load_body(combine.body, plan.bodies[combine.body])
    with with_x64(plan.x64):
        inputs = [jax.device_put(known[name]) for name in combine.inputs]

    def join(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        try:
            with with_x64(plan.x64):
                return [np.asarray(out) for out in call(*inputs, *left, *right)]
        except Exception as error:
            raise WorkerError(
                f"step {step.name!r}, reduction by {combine.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    return join


def finish_tree(
    combine: Combine, tree: DyadicTree[list[np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the value of each result, from a tree with all shards.

    Raises:
      WorkerError: a shard was added twice.
    """
    arrays = tree.fold()
    assert arrays is not None, "a placement has a shard at least"
    for name, array in zip(combine.results, arrays, strict=True):
        if name is not None:
            yield name, array


def finish_lane(
    plan: Plan, step: Map, lane: Lane, accumulator: Any, piece: tuple[int, int]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Turns the finished accumulator of a piece of a lane into results.

    Args:
      piece: the range [lo, hi) of the lane that the accumulator holds.

    Yields:
      The name of a result, the offset of these values in it, and the values, a flat vector.
    """
    lo, hi = piece
    n = plan.sizes[step.placement]
    for reduction in lane.reductions:
        start, stop = max(lo, reduction.offset), min(hi, reduction.offset + reduction.size)
        if start < stop or reduction.size == 0:
            dtype = np.dtype(plan.values[reduction.result].dtype)
            with with_x64(plan.x64):
                values = reducer_of(reduction.reducer).finish(
                    accumulator, start - lo, max(stop, start) - lo, n, np.dtype(reduction.dtype)
                )
            yield reduction.result, start - reduction.offset, values.astype(dtype, copy=False)
