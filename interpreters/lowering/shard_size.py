"""How many members make a shard.

On a CPU members are fastest in the largest number that stays in the second-level cache; past 64
nothing is gained unless they are tiny, where the cost of the call is what counts. Then shards
grow with n as well, as long as there are enough of them to be dealt to many workers. Where so many
members are done sooner than a shard is read, handed over and added up, a shard has many times as
many: in such batches, or at once where little is computed of what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jax.extend import core as jex

from beamjax.errors import OptionsError
from beamjax.interpreters.cutting.cost import member_cost
from beamjax.interpreters.cutting.pieces import Emission, MapPiece, Piece, walk
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.lowering.callbacks import reason_for_python
from beamjax.interpreters.lowering.map_bodies import goes_one_by_one
from beamjax.interpreters.placement.places import PlacedProgram
from beamjax.interpreters.rules.table import Local
from beamjax.options import Options
from beamjax.plan.cost import USUAL, Cost

CACHE_BYTES = 1 << 20
MULTIPLE = 8
USUAL_LIMIT = 64
TINY_MEMBER_BYTES = 1 << 10
TINY_LIMIT, TINY_SHARDS = 4096, 64
LARGE_MEMBER_BYTES = 4 << 20
WORTH_SECONDS = 2e-3
"""Of arithmetic and reading, as they are counted, that a shard is to have if that takes batches."""
CACHE_GAIN = 8.0
"""How much faster bytes move in the cache than from memory, about."""
DRAWN_BYTES = 16
"""Of a member that is little but a number, from which it is computed."""
MOST_BATCHES, FEWEST_SHARDS = 256, 16
MAX_BATCHED_BYTES = 8 << 20
PRODUCT_MEMBERS = 128
"""Fewest members that a product contracts over: with fewer, to write its result takes longer."""
MERGED_BYTES = 2e9
"""Bytes of partials that are added up exactly in a second, about."""
MERGE_SHARE = 8
"""Seconds of computing for each second in which the partials of a shard are added up."""
STREAMED_SHARE = 4
"""Bytes used for each byte that is read, up to which members are not worth batches."""
# What a shard reads and writes travels as elements, which have to stay under 64 MiB.
MAX_SHARD_BYTES = 32 << 20


def shard_sizes(
    program: PlacedProgram, pieces: Sequence[Piece], options: Options, platforms: Sequence[str]
) -> dict[str, int]:
    """Members in a shard of each placement: a multiple of 8, one size for all passes.

    A fixed multiple of 8 is what makes the bits of a member independent of where it stands in the
    shard on XLA's CPU backend.

    Raises:
      OptionsError: `options.shard_size` is not a positive multiple of 8.
    """
    if options.shard_size is not None and (options.shard_size < 1 or options.shard_size % MULTIPLE):
        raise OptionsError(
            f"shard_size: found {options.shard_size}, expected a positive multiple of {MULTIPLE}"
        )
    sizes = {}
    may_batch = _may_batch(pieces, options, platforms)
    for placement, n in program.sizes.items():
        passes = [p for p in walk(pieces) if isinstance(p, MapPiece) and p.placement == placement]
        if is_unknown(n):  # Bytes are then counted without the axis of the members.
            size = options.shard_size or min((fitting_size(p, 1) for p in passes), default=MULTIPLE)
            sizes[placement] = size
            continue
        size = options.shard_size or min((fitting_size(p, n) for p in passes), default=MULTIPLE)
        if may_batch and all(goes_one_by_one(piece, ()) for piece in passes):
            size *= _batches(passes, n, size)
        sizes[placement] = min(size, -(-n // MULTIPLE) * MULTIPLE)
    return sizes


def _may_batch(pieces: Sequence[Piece], options: Options, platforms: Sequence[str]) -> bool:
    """Whether shards of several batches are an option for the passes of a program."""
    if options.shard_size is not None or options.member_loop not in (None, "batches"):
        return False
    calls_back = any(
        isinstance(piece, MapPiece) and reason_for_python([e.eqn for e in piece.emissions], options)
        for piece in walk(pieces)
    )
    return tuple(platforms) == ("cpu",) and not calls_back


def _batches(passes: Sequence[MapPiece], n: int, size: int) -> int:
    """How many batches of `size` members make a shard: a power of two."""
    costs = [member_cost(piece, n) for piece in passes]
    if not passes or any(cost.guessed for cost in costs):
        return 1
    moved = [_moved(piece, n) for piece in passes]
    # What a batch takes besides stays in the cache.
    members = [replace(cost, nbytes=nbytes) for cost, nbytes in zip(costs, moved, strict=True)]
    seconds = max(sum(map(USUAL.seconds, members)) / len(passes), 1e-12)
    merging = max(map(_reduced, passes)) / MERGED_BYTES
    most = max(
        min(2 * WORTH_SECONDS / seconds, MAX_BATCHED_BYTES / max(*moved, 1), n / FEWEST_SHARDS),
        min(MERGE_SHARE * merging / seconds, MAX_SHARD_BYTES / max(*moved, 1), n / 2),
    )
    return power_of_two(min(most / size, MOST_BATCHES))


def is_streamed(piece: MapPiece, n: int) -> bool:
    """Whether tiny members are read from memory, and little else is done with them.

    XLA has all cores work on one large operation, as those of many tiny members are, but not in a
    loop. So these are computed at once.
    """
    read, used = _read(piece, n), _used(piece, n)
    return DRAWN_BYTES < read <= TINY_MEMBER_BYTES - used and used <= STREAMED_SHARE * read


def power_of_two(most: float) -> int:
    """The largest power of two up to a number; 1 if that is less."""
    return 1 << max(int(most).bit_length() - 1, 0)


def cost_of_member(piece: MapPiece, n: Any) -> Cost:
    """What one member costs in a pass over n, in shards and batches of these sizes.

    What it reads and gives moves once; the rest moves in the cache, if a few members fit in there.
    """
    cost, n = member_cost(piece, n), 1 if is_unknown(n) else n
    if MULTIPLE * (_read(piece, n) + _used(piece, n)) > CACHE_BYTES:
        return cost
    moved = min(_moved(piece, n), cost.nbytes)
    return replace(cost, nbytes=moved + (cost.nbytes - moved) / CACHE_GAIN)


def fitting_size(piece: MapPiece, n: int) -> int:
    """The number of members at which a pass over n of them is fastest, within bounds."""
    moved = _moved(piece, n)
    used = _read(piece, n) + _used(piece, n)
    limit = USUAL_LIMIT
    if used <= TINY_MEMBER_BYTES:
        limit = max(TINY_LIMIT, n // TINY_SHARDS)
    size = min(CACHE_BYTES / max(used, 1), MAX_SHARD_BYTES / max(moved, 1), limit)
    if _contracts(piece):
        size = max(size, min(PRODUCT_MEMBERS, MAX_SHARD_BYTES / max(used, 1)))
    return max(MULTIPLE, power_of_two(size))


def is_large(piece: MapPiece, n: Any) -> bool:
    """Whether the members of a pass are so large that a shard computes one after the other."""
    n = 1 if is_unknown(n) else n
    return _used(piece, n) >= LARGE_MEMBER_BYTES


def batch_size(piece: MapPiece, n: Any) -> int:
    """Members to be computed at once where those of a shard come in batches: a power of two."""
    n = 1 if is_unknown(n) else n
    members = min(CACHE_BYTES / max(_read(piece, n) + _used(piece, n), 1), USUAL_LIMIT)
    return max(MULTIPLE, power_of_two(members))


def largest_size(piece: MapPiece, n: int, limit: int) -> int:
    """The largest shard of a pass over n members that may be tried, a power of two.

    Args:
      limit: bytes that its members may take at once.
    """
    moved = _moved(piece, n)
    size = min(limit / max(moved + _used(piece, n), 1), MAX_SHARD_BYTES / max(moved, 1))
    size = min(size, max(n // TINY_SHARDS, MULTIPLE), TINY_LIMIT)
    return max(MULTIPLE, power_of_two(size))


def _read(piece: MapPiece, n: int) -> float:
    """Bytes that a pass reads of a member."""
    return sum(_nbytes(var.aval) for var, _ in piece.operands) / n


def _moved(piece: MapPiece, n: int) -> float:
    """Bytes that a pass reads of a member, and those that it gives."""
    return _read(piece, n) + sum(_nbytes(var.aval) for var in piece.results) / n


def _reduced(piece: MapPiece) -> int:
    """Bytes that a shard gives to reductions."""
    return sum(_nbytes(var.aval) for eqn in piece.folds for var in eqn.outputs)


def _contracts(piece: MapPiece) -> bool:
    """Whether a pass contracts over its members to results that fill much of the cache."""
    results = (eqn.outputs[0] for eqn in piece.folds if eqn.primitive.name == "dot_general")
    return 4 * sum(_nbytes(var.aval) for var in results) > CACHE_BYTES


def _used(piece: MapPiece, n: int) -> float:
    """Bytes that a member needs at once in a pass, besides what is read of it."""
    return max((_bytes_at_once(e, n) for e in piece.emissions), default=0)


def _bytes_at_once(emission: Emission, n: int) -> float:
    """Bytes that one member needs while an equation is computed, its operands left out."""
    eqn = emission.eqn
    if eqn.primitive.name == "bj_map":
        return _body_bytes(eqn.params["jaxpr"])
    if isinstance(emission.reading, Local):
        return sum(_nbytes(var.aval) for var in eqn.outputs) / n
    return 0


def _body_bytes(closed: Any) -> int:
    """Peak bytes of the values that are alive at once in a body, each freed after its last use."""
    jaxpr = getattr(closed, "jaxpr", closed)
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if _is_var(v)}
    last.update({v: len(jaxpr.eqns) for v in jaxpr.outvars if _is_var(v)})
    made: set[Any] = set()
    alive = peak = 0
    for i, eqn in enumerate(jaxpr.eqns):
        inner = max(map(_body_bytes, jex.jaxprs_in_params(eqn.params)), default=0)
        alive += sum(_nbytes(v.aval) for v in eqn.outvars)
        made.update(eqn.outvars)
        peak = max(peak, alive + inner)
        for v in {v for v in eqn.invars if _is_var(v) and v in made and last[v] == i}:
            alive -= _nbytes(v.aval)
    return peak


def _is_var(atom: Any) -> bool:
    return not hasattr(atom, "val")


def _nbytes(aval: Any) -> int:
    if not hasattr(aval, "shape"):
        return 0
    return known_size(aval.shape) * aval.dtype.itemsize
