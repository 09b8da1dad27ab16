"""Makes the function of a pass over one shard, which is then compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.bodies.load import unwrap, wrap
from beamjax.interpreters.cutting.stages import MapStage
from beamjax.interpreters.lowering.fused_reductions import fused_vector
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.program import Atom, Eqn, Var
from beamjax.interpreters.rules.sharding_rules import (
    FunctionReductionRule,
    ReductionRule,
    TracedShard,
    read,
)
from beamjax.numerics.reducers import REDUCERS
from beamjax.plan.steps import FusedBuffer, Guard


def map_body(
    program: PlacedProgram,
    stage: MapStage,
    buffers: tuple[FusedBuffer, ...],
    impls: Sequence[str | None],  # of typed keys, or None: for each broadcast and operand
    guard: Guard | None,
    size: int,
    # For shards without padding and dropped members. They need no mask, which would keep XLA from
    # making one matrix product of a sum of products.
    full: bool = False,
) -> Callable[..., list[jax.Array]]:
    """The function of a pass over a shard of `size` members, on raw arrays; see `Map`, `Guard`."""

    def emit(shard: TracedShard, raw: Sequence[Any]) -> list[jax.Array]:
        wrapped = list(map(wrap, raw, impls))
        served = dict(zip(stage.broadcasts, wrapped[: len(stage.broadcasts)], strict=True))
        placed: dict[tuple[Var, int], Any] = {}
        arrays = wrapped[len(stage.broadcasts) :]
        for (var, along), x in zip(stage.operands, arrays, strict=True):
            placed[var, along.axis] = jnp.moveaxis(x, 0, along.axis)
        partials: dict[str, jax.Array] = {}
        combined: list[jax.Array] = []
        reduced: list[tuple[Any, int]] = []
        for emission in stage.emissions:
            eqn, rule = emission.eqn, emission.rule
            args = [
                read(served, atom) if axis is None else _read_placed(placed, atom, axis)
                for atom, axis in zip(eqn.inputs, rule.in_axes, strict=True)
            ]
            if isinstance(rule, ReductionRule):
                pairs = zip(args, rule.in_axes, strict=True)
                reduced += [(x, axis) for x, axis in pairs if axis is not None]
            if isinstance(rule, FunctionReductionRule):
                combined += map(unwrap, _combined(eqn, rule, args, shard))
                continue
            if isinstance(rule, ReductionRule):
                partials[eqn.outputs[0].name] = rule.partial(eqn, args, shard)
                continue
            outs = rule.emit(eqn, args, shard)
            for var, axis, out in zip(eqn.outputs, rule.out_axes, outs, strict=True):
                if axis is not None:
                    placed[var, axis] = out
        results = [(placed[var, axis], axis) for var, axis in _places(program, stage)]
        outs = [unwrap(jnp.moveaxis(x, axis, 0)) for x, axis in results]
        outs += [fused_vector(buffer, partials) for buffer in buffers] + combined
        if guard is not None and guard.on_nonfinite != "keep":
            outs.append(_are_finite([*reduced, *results], size))
        return outs

    if guard is not None and full:
        return lambda _, members, mask, *raw: emit(TracedShard(members[0], size, None), raw)
    if guard is not None:
        return lambda start, members, mask, *raw: emit(TracedShard(start, size, mask, members), raw)

    def body(start: jax.Array, count: jax.Array, *raw: jax.Array) -> list[jax.Array]:
        mask = None if full else lax.iota(np.dtype("int32"), size) < count
        return emit(TracedShard(start, size, mask), raw)

    return body


def sequential_body(
    at_once: Callable[..., Callable[..., list[jax.Array]]],
    stage: MapStage,
    buffers: tuple[FusedBuffer, ...],
    guard: Guard | None,
    batch: int,
    size: int,
    full: bool = False,
) -> Callable[..., list[jax.Array]]:
    """Like `map_body`, but a sequential loop over batches of the members of a shard."""
    # A shard without padding may have any size; if that is no multiple of the batch, all members
    # are computed at once.
    if size % batch:
        return at_once(size, full)
    # Working memory is for one batch only. Partials of batches are merged on the device, so the
    # bits of sums differ from those of `map_body`, but they depend on the plan alone.
    single = at_once(batch, full)
    rounds = size // batch
    heads = 2 if guard is None else 3
    broadcasts = heads + len(stage.broadcasts)
    results = len(stage.results)

    def body(*raw: jax.Array) -> list[jax.Array]:
        shared, operands = raw[heads:broadcasts], raw[broadcasts:]

        def members(i: Any) -> tuple[list[jax.Array], list[jax.Array]]:
            before = batch * jnp.asarray(i, raw[0].dtype)
            if guard is None:
                rest = [jnp.clip(raw[1] - before, 0, batch)]
            else:
                rest = [_rows(x, i, batch) for x in raw[1:heads]]
            own = [_rows(x, i, batch) for x in operands]
            outs = single(raw[0] + before, *rest, *shared, *own)
            partials = outs[results : results + len(buffers)]
            return partials, [*outs[:results], *outs[results + len(buffers) :]]

        def step(totals: list[jax.Array], i: jax.Array) -> tuple[list[jax.Array], Any]:
            partials, rows = members(i)
            merged = [
                REDUCERS[buffer.kind].merge(a, b)
                for buffer, a, b in zip(buffers, totals, partials, strict=True)
            ]
            return merged, rows

        number = np.dtype("int32")
        # The first batch gives the initial totals, so that a merge needs no identity.
        totals, first = members(np.zeros((), number))
        if guard is None and not first:  # There are no placed results, so padding can be skipped.
            lower = jnp.ones((), raw[1].dtype)
            stop = jnp.full((), rounds, raw[1].dtype) if full else (raw[1] + (batch - 1)) // batch
            return lax.fori_loop(lower, stop, lambda i, totals: step(totals, i)[0], totals)
        totals, rest = lax.scan(step, totals, lax.iota(number, rounds)[1:])
        rows = [
            jnp.concatenate([a, b.reshape((size - batch, *a.shape[1:]))])
            for a, b in zip(first, rest, strict=True)
        ]
        return [*rows[:results], *totals, *rows[results:]]

    return body


def can_run_sequentially(stage: MapStage, buffers: Sequence[FusedBuffer]) -> bool:
    """Whether a pass can compute its members sequentially: partials of batches can be merged."""
    whole = (e.rule.by_shard or isinstance(e.rule, FunctionReductionRule) for e in stage.emissions)
    return not any(whole) and all(np.dtype(buffer.dtype).kind != "c" for buffer in buffers)


def _rows(x: jax.Array, i: Any, batch: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, batch * i, batch)


def _read_placed(env: Mapping[tuple[Var, int], Any], atom: Atom, axis: int) -> Any:
    return env[atom, axis] if isinstance(atom, Var) else atom.val


def _places(program: PlacedProgram, stage: MapStage) -> list[tuple[Var, int]]:
    return [(var, program.places[var].axis) for var in stage.results]


def _combined(
    eqn: Eqn, rule: FunctionReductionRule, args: Sequence[Any], shard: TracedShard
) -> Any:
    shard, args = shard.in_front(args, rule.in_axes)
    return rule.partial(eqn, args, shard)


def _are_finite(values: Sequence[tuple[Any, int]], size: int) -> jax.Array:
    """bool[size]: which members have no NaN or infinity in values with the given member axes."""
    finite = jnp.ones(size, np.bool_)
    for x, axis in values:
        if jnp.issubdtype(x.dtype, np.inexact):
            wide = x.astype(np.float32) if x.dtype.itemsize == 1 else x
            others = [k for k in range(x.ndim) if k != axis]
            finite &= jnp.all(jnp.isfinite(wide), axis=others)
    return finite
