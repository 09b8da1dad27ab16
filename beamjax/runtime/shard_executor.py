"""Computes one shard of a pass: pads it, runs the body, and removes the padding."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from beamjax import _compat
from beamjax._text import as_cause
from beamjax.bodies.load import (
    from_device,
    is_copied,
    load_body,
    loaded_elsewhere,
    on_device,
    to_device,
    with_x64,
)
from beamjax.bodies.xla_threads import clients_of
from beamjax.errors import WorkerError
from beamjax.numerics.ordered_tree import DyadicTree
from beamjax.numerics.reducers import ACCUMULATED, PICK
from beamjax.plan.shard import Shard, shard_error
from beamjax.plan.steps import (
    Bucketed,
    Combine,
    FusedBuffer,
    Guard,
    Map,
    PaddingCheck,
    Plan,
    accumulator_ranges,
)
from beamjax.runtime.ordered_pool import threads_for
from beamjax.spans import count
from beamjax.storage import buffers

if TYPE_CHECKING:
    from beamjax.plan.dropping import Dropped
    from beamjax.runtime.cached_shards import CachedShards
    from beamjax.runtime.failing_members import Call


MAX_LISTED = 1000
"""Largest number of shards that are stored with the bodies of a pass, as a list of 0.1 MB. More are
listed in each run."""


class Computed(NamedTuple):
    """The results of a shard."""

    results: list[np.ndarray]  # the placed results, each of shape (count, ...)
    # A vector for each buffer, then a list of arrays for each combine; None where no member is
    # left.
    partials: list[Any]
    left_out: int = 0  # the number of members that are not in the partials
    dropped: tuple[Dropped, ...] = ()  # the members that this pass dropped


def partials_of(step: Map, arrays: Sequence[np.ndarray]) -> list[Any]:
    """The partials of buffers and combines, from what a body returns after the placed results."""
    rest = iter(arrays)
    buffers = [next(rest) for _ in step.buffers]
    return [*buffers, *([next(rest) for _ in combine.leaves] for combine in step.combines)]


class LoadedPass:
    """A pass as this process computes it, which all its runs share."""

    def __init__(
        self, plan: Plan, step: Map, device: jax.Device | None = None, most_threads: int = 1
    ):
        self.plan = plan
        self.step = step
        self.client_of = device
        body = plan.bodies[step.body]
        # A body that holds a mesh uses the first devices of the same client.
        self.device = None if body.devices > 1 else device
        self.size = plan.shard_sizes[step.placement]
        # Functions on the host get one shard at a time, without padding.
        self.calls_back = body.python is not None
        # How many threads compute shards; 0 if the calling thread does.
        self.threads = threads_for(plan, step, most_threads)
        # The results that the body returns: the guard adds the mask of the members that are left.
        emits_mask = step.guard is not None and step.guard.emits_mask
        self.body_results = step.results[:-1] if emits_mask else step.results
        self.functions: dict[tuple[str, int], Callable[..., Any]] = {}
        # The mask that the guard reads is an operand of the step, but not of the body.
        operands = len(step.operands) - (step.guard is not None and step.guard.reads)
        self.fitted = {bucketed.shapes[:operands]: bucketed for bucketed in step.bucketed}
        shards = plan.shards(step.placement)
        few = shards.count is not None and shards.count <= MAX_LISTED
        self.shards: Iterable[Shard] = list(shards) if few else shards
        # The ranges of the reduction buffers that have an accumulator each.
        self.ranges = accumulator_ranges(step)
        self.copies = is_copied(self.device)
        # An accelerator computes one shard at a time, as memory allows, while threads that wait for
        # the lock have already transferred their shards.
        self.turn: Any = threading.Lock() if self.copies else contextlib.nullcontext()
        # Bodies that call back to the host, or that hold a mesh, stay on the first client.
        self.clients = None if self.calls_back else clients_of(self.device)
        self._main = self.load(step.body, self.size)
        self.is_used = False

    @property
    def is_compiled(self) -> bool:
        """Whether JAX has compiled the body in this process."""
        return _compat.is_compiled(self._main)

    def function(
        self, step: Map | Bucketed | PaddingCheck, full: bool, shard: Shard
    ) -> Callable[..., Any]:
        """The function that computes a shard."""
        key = step.body if full else step.short_body
        if key is None:
            raise WorkerError(
                f"found a shard of {shard.count} members, expected {self.size}, as all shards of "
                "this plan are full: this is an error in beamjax, please report it"
            )
        members = shard.count if self.calls_back else self.size
        return self.functions.get((key, members)) or self.load(key, members)

    def load(self, key: str, members: int) -> Callable[..., Any]:
        """Loads the function of a body."""
        function = load_body(key, self.plan.bodies[key], members, self.client_of)
        self.functions[key, members] = function
        return function


class ShardExecutor:
    """Computes the shards of a loaded pass, with the server values of a run."""

    def __init__(
        self,
        loaded: LoadedPass,
        broadcasts: Mapping[str, np.ndarray | jax.Array],
        checked: set[str] | None = None,
        cached: CachedShards | None = None,
    ):
        self.loaded = loaded
        self.step = loaded.step
        self.cached = cached  # the results of its shards in earlier runs
        # Keys of the bodies that are known not to read padding. The first shard of another body is
        # computed again with more padding, and its key is added. None checks nothing.
        self._checked = checked
        self._elsewhere: dict[jax.Device, list[jax.Array]] = {}
        if loaded.is_used:
            count("bodies_reused", len(loaded.functions))
        loaded.is_used = True
        plan, step = loaded.plan, loaded.step
        with with_x64(plan.x64):
            # Once for all shards, unless they are on the device already.
            self.broadcasts = {
                name: put_broadcast(broadcasts[name], loaded.device) for name in step.broadcasts
            }
        self._broadcasts = list(self.broadcasts.values())
        self._joins = [
            join_shards(plan, step, combine, self.broadcasts, loaded.client_of)
            for combine in step.combines
        ]

    def __call__(
        self, shard: Shard, operands: Sequence[np.ndarray], lost: Mapping[int, str] | None = None
    ) -> Computed:
        """Computes a shard from its operands, each of shape (shard.count, ...)."""
        # `lost` has the reasons why members could not be read, by their position in the shard.
        try:
            arrays = list(map(np.asarray, operands))
            # Zeros replace members that could not be read, so `arrays` is not a key of the results.
            if self.cached is None or lost:
                return self._computed(shard, arrays, lost or {})
            compute = functools.partial(self._computed, shard, arrays, {})
            return self.cached.computed(shard, arrays, compute)
        except Exception as error:
            raise shard_error(self.step, shard, error) from as_cause(error)

    def _computed(
        self, shard: Shard, arrays: list[np.ndarray], lost: Mapping[int, str]
    ) -> Computed:
        if self.step.guard is not None:
            return self._guarded(shard, list(arrays), lost, self.step.guard)
        full = shard.count == self.loaded.size
        heads = [np.int32(shard.count)]
        outs = self._run(shard, full, heads, arrays)
        if self.step.padding_check is not None:
            self._check_padding(self.step.padding_check, shard, full, heads, arrays)
        return Computed(*self._split(shard, outs))

    def _run(
        self, shard: Shard, full: bool, heads: Sequence[Any], arrays: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Pads the operands and calls the body for them."""
        # `full`: there is no padding, and all members count. `heads`: the arguments of the body
        # after the index of the first member.
        loaded = self.loaded
        if shard.count < loaded.size and not loaded.calls_back:
            arrays = list(map(self._pad, arrays))
        step: Map | Bucketed = loaded.step
        if loaded.fitted:
            # Ragged members have the body of their bucket, the shape that they were padded to.
            step = loaded.fitted.get(tuple(array.shape[1:] for array in arrays), step)
        function = loaded.function(step, full, shard)
        return self._called(function, shard, heads, arrays)

    def _check_padding(
        self,
        check: PaddingCheck,
        shard: Shard,
        full: bool,
        heads: Sequence[Any],
        arrays: Sequence[np.ndarray],
    ) -> None:
        """Compares the results of the body with less and with more padding, once for each body."""
        # This finds programs whose results depend on the padding of ragged members, which depends
        # on the other members of a shard.
        from beamjax.sources import padding  # few programs have ragged members

        checked = self._checked
        if checked is None or self.step.body in checked:
            return
        shapes = [array.shape[1:] for array in arrays]
        ragged = [i for i, shape in enumerate(shapes) if shape != check.shapes[i]]
        less = padding.without_padding(arrays, ragged)
        if less is None:
            return
        more = [padding.padded_rows(x, shape) for x, shape in zip(less, check.shapes, strict=False)]
        outs = self._run(shard, full, heads, less)
        function = self.loaded.function(check, full, shard)
        longer = self._called(function, shard, heads, list(map(self._pad, more)))
        placed = len(self.loaded.body_results)
        results = zip(outs[:placed], longer[:placed], strict=True)
        pairs = [(x[: shard.count], y[: shard.count]) for x, y in results if x.shape == y.shape]
        buffers = list(zip(self.step.buffers, check.buffers, strict=True))
        pairs += padding.same_values(buffers, outs[placed:], longer[placed:])
        padding.check_padding(shapes, pairs, [*less, *map(np.asarray, self._broadcasts)])
        checked.add(self.step.body)

    def _called(
        self, call: Callable[..., Any], shard: Shard, heads: Sequence[Any], arrays: Sequence[Any]
    ) -> list[np.ndarray]:
        loaded, first = self.loaded, np.int32(shard.start)
        with with_x64(loaded.plan.x64), on_device(loaded.device):
            if loaded.clients is not None:
                with loaded.clients.least_busy() as device:
                    outs = self._on_client(device, call, [first, *heads], arrays)
                    return list(map(np.asarray, outs))
            if not loaded.copies:
                return list(map(np.asarray, call(first, *heads, *self._broadcasts, *arrays)))
            inputs = to_device(arrays, loaded.device)
            with loaded.turn:
                outs = jax.block_until_ready(call(first, *heads, *self._broadcasts, *inputs))
            return from_device(outs)

    def _on_client(
        self,
        device: jax.Device,
        call: Callable[..., Any],
        heads: Sequence[Any],
        arrays: Sequence[Any],
    ) -> Sequence[jax.Array]:
        """Calls the body on a device of another CPU client than that of the pass, or on it."""
        args = *heads, *self._broadcasts, *arrays
        if device is self.loaded.device:
            outs: Sequence[jax.Array] = call(*args)
            return outs
        if device not in self._elsewhere:
            served = map(np.asarray, self._broadcasts)  # in the memory that they have
            self._elsewhere[device] = [_compat.device_array(x, device) for x in served]
        moved = loaded_elsewhere(call, args, device)
        with on_device(device):
            return moved(*heads, *self._elsewhere[device], *arrays)

    def _split(self, shard: Shard, arrays: list[np.ndarray]) -> tuple[list[np.ndarray], list[Any]]:
        """Splits the results of a body into placed results and partials."""
        placed = len(self.loaded.body_results)
        results, rest = [x[: shard.count] for x in arrays[:placed]], arrays[placed:]
        return results, partials_of(self.step, rest) if self.step.combines else rest

    def _guarded(
        self, shard: Shard, arrays: list[np.ndarray], lost: Mapping[int, str], guard: Guard
    ) -> Computed:
        """Computes a shard of a step with a guard, which may drop members."""
        from beamjax.runtime.failing_members import compute_rest, filled  # few steps have a guard

        loaded = self.loaded
        kept = arrays.pop() if guard.reads else np.ones(shard.count, np.bool_)
        last: Any = ()

        def call(places: np.ndarray, counted: np.ndarray) -> list[np.ndarray]:
            members = (shard.start + places).astype(np.int32)
            if not loaded.calls_back:
                missing = np.zeros(loaded.size - shard.count, np.bool_)
                members, counted = self._pad(members), np.concatenate([counted, missing])
            all_counted = bool(counted[: shard.count].all())
            # Then `places` is 0, 1, ..., and the operands need no copy.
            plain = len(places) == shard.count and places[-1] == shard.count - 1 and all_counted
            rows = arrays if plain else [x[places] for x in arrays]
            full = plain and shard.count == loaded.size
            nonlocal last
            last = full, [members, counted], rows
            return self._run(shard, *last)

        outs, kept, dropped = compute_rest(self.step, shard.start, kept, lost, call)
        if outs is not None:
            if self.step.padding_check is not None:
                self._check_padding(self.step.padding_check, shard, *last)
            results, partials = self._split(shard, outs)
        else:
            results, partials = self._without_members(shard, call)
        if not kept.all():
            results = [filled(x, kept) for x in results]
        if guard.emits_mask:
            results.append(kept)
        return Computed(results, partials, int((~kept).sum()), dropped)

    def _without_members(self, shard: Shard, call: Call) -> tuple[list[np.ndarray], list[Any]]:
        """The results of a shard of which no member is left."""
        from beamjax.runtime.failing_members import message_of

        step = self.step
        types = [self.loaded.plan.values[name] for name in self.loaded.body_results]
        results = [np.zeros((shard.count, *x.shape), np.dtype(x.dtype)) for x in types]
        nothing: list[Any] = [None] * (len(step.buffers) + len(step.combines))
        reducers = {r.reducer for buffer in step.buffers for r in buffer.reductions}
        if not nothing or (shard.index and PICK.name not in reducers):
            return results, nothing
        # The first shard adds the initial values of reductions, and a member that the server picks
        # by its index comes from its shard even if it was dropped. So the body runs with all
        # members masked, which may fail as it did for the members.
        try:
            outs = call(np.arange(shard.count), np.zeros(shard.count, np.bool_))
        except Exception as error:
            if shard.index:
                return results, nothing
            raise WorkerError(
                f"all {shard.count} members of the first shard were dropped, expected one to be "
                f"left; choose a larger shard_size ({message_of(error)})"
            ) from error
        return results, self._split(shard, outs)[1][: len(step.buffers)] + nothing[
            len(step.buffers) :
        ]

    def trees(self) -> list[DyadicTree[list[np.ndarray]]]:
        """An empty tree for the partials of each combine."""
        return list(map(DyadicTree, self._joins))

    def _pad(self, x: np.ndarray) -> np.ndarray:
        """Pads with copies of the last member. With zeros, a loop in the body might never end."""
        size = self.loaded.size
        if len(x) == size:
            return x
        padded = buffers.empty((size, *x.shape[1:]), x.dtype)
        padded[: len(x)], padded[len(x) :] = x, x[-1]
        return padded


def put_broadcast(value: np.ndarray | jax.Array, device: jax.Device | None) -> jax.Array:
    """Puts a server value on a device; a `jax.Array` is returned as it is."""
    if isinstance(value, jax.Array):
        return value
    count("broadcasts")
    return _compat.device_array(value, device)


def join_shards(
    plan: Plan, step: Map, combine: Combine, known: Mapping[str, Any], device: Any = None
) -> Callable[[list[np.ndarray], list[np.ndarray]], list[np.ndarray]]:
    """The function that merges two partials of a combine, for a `DyadicTree`."""
    call = load_body(combine.body, plan.bodies[combine.body], device=device)
    with with_x64(plan.x64):
        inputs = [jax.device_put(known[name], device) for name in combine.inputs]

    def join(left: list[np.ndarray], right: list[np.ndarray]) -> list[np.ndarray]:
        try:
            with with_x64(plan.x64), on_device(device):
                return from_device(call(*inputs, *left, *right))
        except Exception as error:
            raise WorkerError(
                f"step {step.name!r}, reduction by {combine.name!r}: "
                f"{type(error).__name__}: {error}"
            ) from error

    return join


def finish_tree(
    combine: Combine, tree: DyadicTree[list[np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the value of each result, from a tree that has all shards."""
    arrays = tree.fold()
    if arrays is None:
        raise WorkerError(f"reduction by {combine.name!r}: all members were dropped")
    for name, array in zip(combine.results, arrays, strict=True):
        if name is not None:
            yield name, array


def finish_buffer(
    plan: Plan, step: Map, buffer: FusedBuffer, accumulator: Any, piece: tuple[int, int]
) -> Iterator[tuple[str, int, np.ndarray]]:
    """Rounds the accumulator of a range of a buffer: the names, offsets and values of results."""
    # The accumulator holds the range [lo, hi) of the buffer, in which a result may begin or end.
    lo, hi = piece
    n = plan.sizes[step.placement]
    for reduction in buffer.reductions:
        start, stop = max(lo, reduction.offset), min(hi, reduction.offset + reduction.size)
        if start < stop or reduction.size == 0:
            dtype = np.dtype(plan.values[reduction.result].dtype)
            with with_x64(plan.x64):
                values = ACCUMULATED[reduction.reducer].finish(
                    accumulator, start - lo, max(stop, start) - lo, n, np.dtype(reduction.dtype)
                )
            yield reduction.result, start - reduction.offset, values.astype(dtype, copy=False)
