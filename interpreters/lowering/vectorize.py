"""How a pass computes the members of a shard: all at once, in batches, or one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamjax.interpreters.cutting.pieces import MapPiece
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering import shard_size
from beamjax.interpreters.lowering.map_bodies import goes_one_by_one
from beamjax.interpreters.lowering.own_kernels import convolves_by_member
from beamjax.options import Options
from beamjax.options.choices import Looping
from beamjax.plan.steps import Lane

VMAP = Looping()


def looping_of(
    piece: MapPiece,
    lanes: Sequence[Lane],
    n: Any,
    size: int,
    options: Options,
    platforms: Sequence[str],
    chosen: Looping | None = None,
) -> tuple[Looping, str]:
    """How a pass computes a shard, and why not all of its members at once, if so.

    Args:
      piece: the pass.
      lanes: of its reductions.
      n: its members.
      size: members in a shard.
      options: `member_loop` and `member_batch` come first.
      platforms: that it is for.
      chosen: what comes next; None for what the bodies tell.
    """
    if not goes_one_by_one(piece, lanes):
        return VMAP, ""
    if options.member_loop is not None:
        found = Looping(options.member_loop, options.member_batch or 0)
        why = f"the option member_loop={options.member_loop!r}"
    elif chosen is not None:
        found, why = chosen, "as was chosen"
    else:
        found, why = _by_rule(piece, n, options, platforms)
    if found.kind == "batches":
        found = Looping(
            "batches", found.batch or min(shard_size.batch_size(piece, n), size // 2 // 8 * 8)
        )
        if found.batch == 0 or size % found.batch or size <= found.batch:
            return VMAP, ""
    return found, why if found != VMAP else ""


def _by_rule(
    piece: MapPiece, n: Any, options: Options, platforms: Sequence[str]
) -> tuple[Looping, str]:
    """How the members of a shard of any size had better be computed, and why."""
    if shard_size.is_large(piece, n):
        return Looping("loop"), "large members"
    if tuple(platforms) != ("cpu",):
        return VMAP, ""
    if convolves_by_member(piece):
        return Looping("loop"), "convolutions with kernels of the members' own"
    if is_unknown(n) or options.shard_size is not None:
        return VMAP, ""
    if shard_size.is_streamed(piece, n):
        return VMAP, ""
    return Looping("batches", shard_size.fitting_size(piece, n)), "the cache holds no more of them"
