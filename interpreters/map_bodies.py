"""The function of a pass over one shard, as it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from beamjax.bodies import unwrap, wrap
from beamjax.dropping import Guard
from beamjax.interpreters import rules
from beamjax.interpreters.flat_program import Atom, Eqn, Var
from beamjax.interpreters.lanes import lane_vector
from beamjax.interpreters.pieces import MapPiece
from beamjax.interpreters.places import PlacedProgram
from beamjax.interpreters.rules import Combination, Fold
from beamjax.plan import Lane


def map_body(
    program: PlacedProgram,
    piece: MapPiece,
    lanes: tuple[Lane, ...],
    impls: Sequence[str | None],
    guard: Guard | None,
    size: int,
) -> Callable[..., list[jax.Array]]:
    """The function of a pass over one shard, on raw arrays; see `Map` and `Guard`.

    Args:
      program: that the pass is part of.
      piece: the pass.
      lanes: of its reductions.
      impls: of the typed keys among its broadcasts and operands.
      guard: of the pass.
      size: of a shard.
    """

    def emit(shard: rules.Shard, raw: Sequence[Any]) -> list[jax.Array]:
        wrapped = list(map(wrap, raw, impls))
        served = dict(zip(piece.broadcasts, wrapped[: len(piece.broadcasts)], strict=True))
        placed: dict[tuple[Var, int], Any] = {}
        arrays = wrapped[len(piece.broadcasts) :]
        for (var, along), x in zip(piece.operands, arrays, strict=True):
            placed[var, along.axis] = jnp.moveaxis(x, 0, along.axis)
        partials: dict[str, jax.Array] = {}
        combined: list[jax.Array] = []
        reduced: list[tuple[Any, int]] = []
        for emission in piece.emissions:
            eqn, reading = emission.eqn, emission.reading
            args = [
                read(served, atom) if axis is None else _read_placed(placed, atom, axis)
                for atom, axis in zip(eqn.inputs, reading.in_axes, strict=True)
            ]
            if isinstance(reading, Fold):
                pairs = zip(args, reading.in_axes, strict=True)
                reduced += [(x, axis) for x, axis in pairs if axis is not None]
            if isinstance(reading, Combination):
                combined += map(unwrap, _combined(eqn, reading, args, shard))
                continue
            if isinstance(reading, Fold):
                partials[eqn.outputs[0].name] = reading.partial(eqn, args, shard)
                continue
            outs = reading.emit(eqn, args, shard)
            for var, axis, out in zip(eqn.outputs, reading.out_axes, outs, strict=True):
                if axis is not None:
                    placed[var, axis] = out
        results = [(placed[var, axis], axis) for var, axis in _places(program, piece)]
        outs = [unwrap(jnp.moveaxis(x, axis, 0)) for x, axis in results]
        outs += [lane_vector(lane, partials) for lane in lanes] + combined
        if guard is not None and guard.on_nonfinite != "keep":
            outs.append(_are_finite([*reduced, *results], size))
        return outs

    if guard is not None:
        return lambda start, members, kept, *raw: emit(rules.Shard(start, size, kept, members), raw)

    def body(start: jax.Array, count: jax.Array, *raw: jax.Array) -> list[jax.Array]:
        return emit(rules.Shard(start, size, lax.iota(np.dtype("int32"), size) < count), raw)

    return body


def read(env: Mapping[Var, Any], atom: Atom) -> Any:
    """The value of an atom on the server."""
    return env[atom] if isinstance(atom, Var) else atom.val


def _read_placed(env: Mapping[tuple[Var, int], Any], atom: Atom, axis: int) -> Any:
    return env[atom, axis] if isinstance(atom, Var) else atom.val


def _places(program: PlacedProgram, piece: MapPiece) -> list[tuple[Var, int]]:
    return [(var, program.places[var].axis) for var in piece.results]


def _combined(eqn: Eqn, reading: Combination, args: Sequence[Any], shard: rules.Shard) -> Any:
    shard, args = shard.in_front(args, reading.in_axes)
    return reading.partial(eqn, args, shard)


def _are_finite(values: Sequence[tuple[Any, int]], size: int) -> jax.Array:
    """bool[size]: the members without NaN and infinity; they lie along the axis of each value."""
    finite = jnp.ones(size, np.bool_)
    for x, axis in values:
        if jnp.issubdtype(x.dtype, np.inexact):
            wide = x.astype(np.float32) if x.dtype.itemsize == 1 else x
            others = [k for k in range(x.ndim) if k != axis]
            finite &= jnp.all(jnp.isfinite(wide), axis=others)
    return finite
