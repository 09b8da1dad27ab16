"""Chooses how a pass computes a shard: all members at once (vmap), in batches, or sequentially."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamjax.interpreters.cutting.pieces import MapPiece
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering import shard_size
from beamjax.interpreters.lowering.convolutions import convolves_by_member
from beamjax.interpreters.lowering.map_bodies import goes_one_by_one
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
    """How a pass computes a shard, with the reason if it is not vmap over all members.

    Args:
      piece: the pass.
      lanes: the fused buffers of its reductions.
      n: the number of members.
      size: members per shard.
      options: `member_loop` and `member_batch` take precedence.
      platforms: platforms of the executable.
      chosen: a saved or probed choice, which comes second; None to choose by rules.
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
    """How to compute a shard of any size by rules, and why."""
    if shard_size.is_large(piece, n):
        return Looping("loop"), "large members"
    if tuple(platforms) != ("cpu",):
        return VMAP, ""
    if convolves_by_member(piece):
        return Looping("loop"), "convolutions whose kernels differ between members"
    if is_unknown(n) or options.shard_size is not None:
        return VMAP, ""
    if shard_size.is_streamed(piece, n):
        return VMAP, ""
    return Looping("batches", shard_size.fitting_size(piece, n)), "no more members fit in the cache"
