"""Chooses how a pass computes a shard: all members at once (vmap), in batches, or sequentially."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamjax.interpreters.cutting.stages import MapStage
from beamjax.interpreters.dimensions import is_unknown
from beamjax.interpreters.lowering import shard_size
from beamjax.interpreters.lowering.convolutions import convolves_by_member
from beamjax.interpreters.lowering.map_bodies import can_run_sequentially
from beamjax.options import Options
from beamjax.options.choices import Vectorization
from beamjax.plan.steps import FusedBuffer

VMAP = Vectorization()


def choose_vectorization(
    stage: MapStage,
    buffers: Sequence[FusedBuffer],
    n: Any,
    size: int,
    options: Options,
    platforms: Sequence[str],
    chosen: Vectorization | None = None,
) -> tuple[Vectorization, str]:
    """How a pass computes a shard, with the reason if it is not vmap over all members.

    Args:
      stage: the pass.
      buffers: the fused buffers of its reductions.
      n: the number of members.
      size: members per shard.
      options: `member_loop` and `member_batch` take precedence.
      platforms: platforms of the executable.
      chosen: a saved or probed choice, which comes second; None to choose by rules.
    """
    if not can_run_sequentially(stage, buffers):
        return VMAP, ""
    if options.member_loop is not None:
        found = Vectorization(options.member_loop, options.member_batch or 0)
        why = f"the option member_loop={options.member_loop!r}"
    elif chosen is not None:
        found, why = chosen, "as was chosen"
    else:
        found, why = _by_rule(stage, n, options, platforms)
    if found.kind == "batches":
        found = Vectorization(
            "batches", found.batch or min(shard_size.batch_size(stage, n), size // 2 // 8 * 8)
        )
        if found.batch == 0 or size % found.batch or size <= found.batch:
            return VMAP, ""
    return found, why if found != VMAP else ""


def _by_rule(
    stage: MapStage, n: Any, options: Options, platforms: Sequence[str]
) -> tuple[Vectorization, str]:
    """How to compute a shard of any size by rules, and why."""
    if shard_size.is_large(stage, n):
        return Vectorization("loop"), "large members"
    if tuple(platforms) != ("cpu",):
        return VMAP, ""
    if convolves_by_member(stage):
        return Vectorization("loop"), "convolutions whose kernels differ between members"
    if is_unknown(n) or options.shard_size is not None:
        return VMAP, ""
    if shard_size.is_streamed(stage, n):
        return VMAP, ""
    return Vectorization(
        "batches", shard_size.best_shard_size(stage, n)
    ), "no more members fit in the cache"
