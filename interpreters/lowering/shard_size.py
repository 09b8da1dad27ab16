"""Chooses how many members a shard has, and how they are computed: by vmap, in batches or one by
one.

On a CPU, a shard should be as large as fits in the second-level cache. More than 64 members only
help if members are tiny, because then the overhead per call dominates. For tiny members, shards
also grow with n, as long as there are enough shards for many workers. If the overhead of a shard
takes longer than its computation, the shard gets a multiple of the members. These are computed in
batches, or all at once if little is computed per byte read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from beamjax.bodies.jaxprs import nbytes_of, peak_bytes
from beamjax.interpreters.cutting.cost import member_cost
from beamjax.interpreters.cutting.stages import Emission, MapStage, Stage, walk
from beamjax.interpreters.dimensions import is_unknown, known_size
from beamjax.interpreters.lowering.callbacks import reason_for_python
from beamjax.interpreters.lowering.convolutions import convolves_by_member
from beamjax.interpreters.lowering.dropped_members import guard_of
from beamjax.interpreters.lowering.map_bodies import can_run_sequentially
from beamjax.interpreters.placement.places import FileGroups, PlacedProgram
from beamjax.interpreters.rules.sharding_rules import MemberwiseRule, ReductionRule, shape_of
from beamjax.options import Options
from beamjax.options.rules import MULTIPLE
from beamjax.plan.cost import USUAL, Cost
from beamjax.plan.steps import VMAP, FusedBuffer, Vectorization

CACHE_BYTES = 1 << 20
"""Assumed size of the second-level cache of a core, in bytes."""
USUAL_LIMIT = 64
"""Largest number of members per shard, unless they are tiny."""
TINY_MEMBER_BYTES = 1 << 10
"""Largest working memory of a tiny member, in bytes."""
TINY_LIMIT, TINY_SHARDS = 4096, 64
"""A shard has at most 4096 tiny members, or more as long as a placement has at least 64 shards."""
LARGE_MEMBER_BYTES = 4 << 20
"""Working memory of a member, in bytes, above which members are computed sequentially."""
WORTH_SECONDS = 2e-3
"""Predicted seconds of work that a shard of several batches should have, so that its overhead is
small."""
CACHE_GAIN = 8.0
"""Approximate factor by which bytes move faster in the cache than from memory."""
DRAWN_BYTES = 16
"""Largest number of bytes read per member that still counts as a member computed from a seed or an
index."""
MOST_BATCHES, FEWEST_SHARDS = 256, 16
"""Largest number of batches per shard, and the fewest such shards of a placement."""
MAX_BATCHED_BYTES = 8 << 20
"""Largest size of what a shard of several batches reads and returns, in bytes."""
MAX_FILE_SECONDS = 1.0
"""Predicted seconds of the largest shard that is a whole file. All of it is computed again if a
member of the file changes, or if the shard fails."""
FILE_SECONDS = 2e-4
"""Assumed seconds to find and open a file."""
FILE_SHARD_SECONDS = 3e-4
"""Assumed seconds of overhead of a shard between two others whose files are opened. It is more than
`Rates.shard`, since the code of shards has left the cache of the processor."""
MAX_CUT_SHARE = 0.1
"""Largest estimated share by which cutting shards at files may slow down the passes."""
FEWEST_GROUPS = 4
"""Fewest groups of files of a placement. With fewer, a changed file would be most of the data."""
MASKED_SECONDS = 1e-9
"""Assumed seconds to mask one value of one member."""
PRODUCT_MEMBERS = 1024
"""Fewest members per shard that a product contracts over, as long as two shards remain. Each shard
writes the result of the product and adds it up, which for 128 members takes longer than the product
itself."""
EQUAL_SHARDS, EQUAL_MEMBERS = 16, 4096
"""Up to 16 shards that a product contracts over have equal sizes, of at most 4096 members. Few
shards of a fixed size would compute much padding in the last one."""
SHORT_SECONDS = 1e-2
"""Predicted seconds of a pass that needs no second shard, if a product contracts over its
members."""
MERGED_BYTES = 2e9
"""Approximate bytes of partials that one core adds up exactly in a second."""
MERGE_SHARE = 8
"""Seconds that a shard should compute for each second in which its partials are added up."""
STREAMED_SHARE = 4
"""Largest ratio of working bytes to bytes read at which members are computed at once instead of in
batches."""
MAX_SHARD_BYTES = 32 << 20
"""Largest size of what a shard reads or returns, in bytes: Beam elements must be below 64 MiB."""


def shard_sizes(
    program: PlacedProgram, stages: Sequence[Stage], options: Options, platforms: Sequence[str]
) -> dict[str, int]:
    """The number of members per shard of each placement: a multiple of 8, one size for all passes.

    With a fixed multiple of 8, the bits of a member do not depend on its row in the shard on XLA's
    CPU backend.
    """
    may_batch = _may_batch(stages, options, platforms)
    return {
        placement: _shard_size(
            _Passes.over(placement, stages, n),
            program.file_groups.get(placement),
            options,
            may_batch,
        )[0]
        for placement, n in program.sizes.items()
    }


@dataclass(frozen=True)
class _Passes:
    """The passes over a placement of n members, with the costs on which shard sizes depend.

    Each cost is computed once, when it is first needed, since that reads all equations of bodies.
    """

    stages: Sequence[MapStage]
    n: Any

    @staticmethod
    def over(placement: str, stages: Sequence[Stage], n: Any) -> _Passes:
        """The passes among some stages that are over a placement of n members."""
        mine = (s for s in walk(stages) if isinstance(s, MapStage) and s.placement == placement)
        return _Passes(list(mine), n)

    @functools.cached_property
    def best_size(self) -> int:
        """The number of members per shard without batches or cuts."""
        return min((best_shard_size(stage, self.n) for stage in self.stages), default=MULTIPLE)

    @functools.cached_property
    def costs(self) -> list[Cost]:
        """For each pass, the cost of a member."""
        return [member_cost(stage, self.n) for stage in self.stages]

    @functools.cached_property
    def seconds(self) -> float:
        """Predicted seconds of all passes per member, without overhead."""
        costs = (cost_of_member(stage, self.n) for stage in self.stages)
        return max(sum(map(USUAL.seconds, costs)), 1e-12)

    @functools.cached_property
    def moved(self) -> list[float]:
        """For each pass, the bytes that it reads and returns per member."""
        return [_moved(stage, self.n) for stage in self.stages]

    @functools.cached_property
    def masking(self) -> float:
        """Predicted seconds to mask the reductions of all passes, per member."""
        return sum(masked_values(stage, self.n) for stage in self.stages) * MASKED_SECONDS

    @functools.cached_property
    def can_run_sequentially(self) -> bool:
        """Whether all passes can compute their members in batches."""
        return all(can_run_sequentially(stage, ()) for stage in self.stages)

    @functools.cached_property
    def can_skip_padding(self) -> bool:
        """Whether it pays that shards of several batches leave out batches of padding.

        All batches of a short shard mask its reductions, which may take longer than the padding.
        See `sequential_body`.
        """
        if any(stage.results or is_streamed(stage, self.n) for stage in self.stages):
            return False
        if not self.can_run_sequentially or not self.stages:
            return False
        if any(cost.guessed for cost in self.costs):
            return False
        return self.masking <= MAX_CUT_SHARE * self.seconds


def _shard_size(
    passes: _Passes, groups: FileGroups | None, options: Options, may_batch: bool
) -> tuple[int, int]:
    """The number of members per shard of a placement, and the most members that padding computes.

    Args:
      passes: the passes over the placement.
      groups: how files are grouped if shards are cut at files, else None.
      options: options of the run.
      may_batch: whether passes of the program can compute shards in several batches.
    """
    n, size = passes.n, options.shard_size or passes.best_size
    if is_unknown(n):
        return size, size
    batches = 1
    if may_batch and passes.can_run_sequentially:
        batches = _batches(passes, size)
    padded = whole = size * batches
    if groups is not None and options.shard_size is None:
        rows = groups.rows
        whole = padded = _size_in_files(passes, whole, rows)
        may_skip = may_batch and guard_of(options) is None
        if may_skip and rows >= size and passes.can_skip_padding:
            whole, padded = _size_of_files(passes, size, size * batches, rows), size
    all_members = -(-n // MULTIPLE) * MULTIPLE
    return min(whole, all_members), min(padded, all_members)


def _slowdown_by_cuts(
    passes: _Passes, groups: FileGroups, options: Options, may_batch: bool
) -> float:
    """The predicted share by which cutting shards at groups of files slows down the passes.

    It depends on the plan alone, not on the option `cache`, so neither do the bits of results.
    """
    if not passes.stages:
        return 0.0
    plain, _ = _shard_size(passes, None, options, may_batch)
    size, padded = _shard_size(passes, groups, options, may_batch)
    rows, count = groups.rows, len(passes.stages)
    overhead, opening = count * FILE_SHARD_SECONDS, count * groups.files * FILE_SECONDS
    before = opening + rows * (passes.seconds + overhead / plain)
    # The last shard of a group is half full on average, and masks its reductions.
    last = overhead / 2 + padded * (passes.seconds / 2 + passes.masking)
    return (last + rows * (overhead / size - overhead / plain)) / before


def file_groups(
    program: PlacedProgram,
    placement: str,
    rows: int,
    stages: Sequence[Stage],
    options: Options,
    platforms: Sequence[str],
    at_each: bool = False,
) -> FileGroups | str:
    """The groups of files, of about `rows` members each, at which shards of a placement are cut.

    They are as small as `MAX_CUT_SHARE` allows, or files with `at_each`.

    Returns:
      The groups, or why shards are not cut at files.
    """
    n, may_batch = program.sizes[placement], _may_batch(stages, options, platforms)
    passes = _Passes.over(placement, stages, n)
    # They find their ranges by the index of the first member, see `rules.by_shard`.
    if any(emission.rule.by_shard for stage in passes.stages for emission in stage.emissions):
        return "a pass depends on the order of the members"
    groups = FileGroups(1, rows)
    while not at_each:
        share = _slowdown_by_cuts(passes, groups, options, may_batch)
        if share <= MAX_CUT_SHARE:
            break
        groups = FileGroups(2 * groups.files, 2 * groups.rows)
        if groups.rows * FEWEST_GROUPS > n:
            return f"passes would take about {share:.0%} longer"
    return groups


def _size_in_files(passes: _Passes, size: int, rows: int) -> int:
    """The number of members per shard, at most `size`, at which passes over groups are fastest.

    A group takes rows / size + 1/2 shards on average. Each costs its overhead, and the time of all
    its rows, padding included. This is least where size² = 2 * rows * overhead / time per member.
    """
    best = math.sqrt(2 * rows * len(passes.stages) * USUAL.shard / passes.seconds)
    return min(size, max(MULTIPLE, power_of_two(min(best, 2 * rows))))


def _size_of_files(passes: _Passes, batch: int, size: int, rows: int) -> int:
    """The number of members per shard if shards leave out batches of padding.

    Groups of up to four times the usual length are one shard, unless it would be too large.

    Args:
      passes: the passes over the placement.
      batch: members per batch.
      size: members per shard without cuts.
      rows: approximate number of members per group of files.
    """
    most = max(size, MAX_FILE_SECONDS * len(passes.stages) / passes.seconds)
    largest = MAX_BATCHED_BYTES / max(*passes.moved, 1)
    most = min(most, 4 * rows, largest, passes.n / FEWEST_SHARDS)
    return batch * power_of_two(most / batch)


def with_whole_blocks(
    program: PlacedProgram, stages: Sequence[Stage], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Shard sizes such that each shard begins where a range does; see `rules.by_shard`."""
    whole = dict(sizes)
    for stage in (stage for stage in walk(stages) if isinstance(stage, MapStage)):
        for emission in (each for each in stage.emissions if each.rule.by_shard):
            size, block = whole[stage.placement], emission.eqn.params["block"]
            whole[stage.placement] = -(-size // block) * block
    return {
        placement: size
        if size == sizes[placement]
        else min(size, -(-program.sizes[placement] // MULTIPLE) * MULTIPLE)
        for placement, size in whole.items()
    }


def _may_batch(stages: Sequence[Stage], options: Options, platforms: Sequence[str]) -> bool:
    """Whether the passes of a program can compute shards in several batches."""
    if options.shard_size is not None or options.member_loop not in (None, "batches"):
        return False
    calls_back = any(
        isinstance(stage, MapStage) and reason_for_python([e.eqn for e in stage.emissions], options)
        for stage in walk(stages)
    )
    return tuple(platforms) == ("cpu",) and not calls_back


def _batches(passes: _Passes, size: int) -> int:
    """The number of batches of `size` members per shard: a power of two."""
    n, costs, moved = passes.n, passes.costs, passes.moved
    if not costs or any(cost.guessed for cost in costs):
        return 1
    # Only what a shard reads and returns grows with the batches; the rest stays in the cache.
    members = [replace(cost, nbytes=nbytes) for cost, nbytes in zip(costs, moved, strict=True)]
    seconds = max(sum(map(USUAL.seconds, members)) / len(members), 1e-12)
    merging = max(map(_reduced, passes.stages)) / MERGED_BYTES
    most = max(
        min(2 * WORTH_SECONDS / seconds, MAX_BATCHED_BYTES / max(*moved, 1), n / FEWEST_SHARDS),
        min(MERGE_SHARE * merging / seconds, MAX_SHARD_BYTES / max(*moved, 1), n / 2),
    )
    return power_of_two(min(most / size, MOST_BATCHES))


def is_streamed(stage: MapStage, n: int) -> bool:
    """Whether a pass reads tiny members from memory and computes little with them.

    XLA runs one large operation over many tiny members on all cores, but not inside a loop over
    batches. So such members are computed at once.
    """
    read, used = _read(stage, n), _used(stage, n)
    return DRAWN_BYTES < read <= TINY_MEMBER_BYTES - used and used <= STREAMED_SHARE * read


def power_of_two(most: float) -> int:
    """The largest power of two that is at most `most`, and at least 1."""
    return 1 << max(int(most).bit_length() - 1, 0)


def cost_of_member(stage: MapStage, n: Any) -> Cost:
    """The cost of one member in a pass over n members.

    What it reads and returns moves from or to memory once. If a few members fit in the cache, all
    other bytes move within the cache.
    """
    cost, n = member_cost(stage, n), _counted(n)
    if MULTIPLE * (_read(stage, n) + _used(stage, n)) > CACHE_BYTES:
        return cost
    moved = min(_moved(stage, n), cost.nbytes)
    return replace(cost, nbytes=moved + (cost.nbytes - moved) / CACHE_GAIN)


def best_shard_size(stage: MapStage, n: Any) -> int:
    """The number of members per shard at which a pass over n members should be fastest."""
    # Half of the members, rounded up to a power of two: at least two shards remain.
    unknown = is_unknown(n)
    half = math.inf if unknown else 1 << ((n + 1) // 2 - 1).bit_length()
    n = _counted(n)
    moved = _moved(stage, n)
    used = _read(stage, n) + _used(stage, n)
    limit = USUAL_LIMIT
    if used <= TINY_MEMBER_BYTES:
        limit = max(TINY_LIMIT, n // TINY_SHARDS)
    size = min(CACHE_BYTES / max(used, 1), MAX_SHARD_BYTES / max(moved, 1), limit)
    if _contracts(stage):
        most = MAX_SHARD_BYTES / max(used, moved, 1)
        short = n * USUAL.seconds(cost_of_member(stage, n)) < SHORT_SECONDS
        count = max(1 if short else 2, math.ceil(n / max(min(EQUAL_MEMBERS, most), size)))
        if not unknown and count <= EQUAL_SHARDS:
            return max(1, -(-n // (MULTIPLE * count))) * MULTIPLE
        size = max(size, min(PRODUCT_MEMBERS, half, most))
    return max(MULTIPLE, power_of_two(size))


def is_large(stage: MapStage, n: Any) -> bool:
    """Whether the members of a pass are so large that they should be computed sequentially."""
    n = _counted(n)
    return _used(stage, n) >= LARGE_MEMBER_BYTES


def batch_size(stage: MapStage, n: Any) -> int:
    """The number of members per batch, for shards of several batches: a power of two."""
    n = _counted(n)
    members = min(CACHE_BYTES / max(_read(stage, n) + _used(stage, n), 1), USUAL_LIMIT)
    return max(MULTIPLE, power_of_two(members))


# --- how a shard is computed


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
      options: `member_loop` takes precedence.
      platforms: platforms of the executable.
      chosen: that of another plan of the program, which comes second; None to choose by rules.
    """
    if not can_run_sequentially(stage, buffers):
        return VMAP, ""
    if options.member_loop is not None:
        found = Vectorization(options.member_loop)
        why = f"the option member_loop={options.member_loop!r}"
    elif chosen is not None:
        found, why = chosen, "as in the plan of the launching process"
    else:
        found, why = _by_rule(stage, n, options, platforms)
    if found.kind == "batches":
        found = Vectorization(
            "batches", found.batch or min(batch_size(stage, n), size // 2 // 8 * 8)
        )
        if found.batch == 0 or size % found.batch or size <= found.batch:
            return VMAP, ""
    return found, why if found != VMAP else ""


def _by_rule(
    stage: MapStage, n: Any, options: Options, platforms: Sequence[str]
) -> tuple[Vectorization, str]:
    """How to compute a shard of any size by rules, and why."""
    if is_large(stage, n):
        return Vectorization("loop"), "large members"
    if tuple(platforms) != ("cpu",):
        return VMAP, ""
    if convolves_by_member(stage):
        return Vectorization("loop"), "convolutions whose kernels differ between members"
    if is_unknown(n) or options.shard_size is not None:
        return VMAP, ""
    if is_streamed(stage, n):
        return VMAP, ""
    return Vectorization("batches", best_shard_size(stage, n)), "no more members fit in the cache"


# --- bytes of a member


def _counted(n: Any) -> int:
    """The number of members; 1 if it is unknown, because `nbytes_of` then leaves out their axis."""
    return 1 if is_unknown(n) else n


def _read(stage: MapStage, n: int) -> float:
    """Bytes that a pass reads per member."""
    return sum(nbytes_of(var.aval) for var, _ in stage.operands) / n


def masked_values(stage: MapStage, n: Any) -> float:
    """The number of values per member that reductions read."""
    values = 0.0
    for emission in stage.emissions:
        if isinstance(emission.rule, ReductionRule):
            for atom, axis in zip(emission.eqn.inputs, emission.rule.in_axes, strict=True):
                if axis is not None:
                    values += known_size(shape_of(atom)) / (1 if is_unknown(n) else n)
    return values


def _moved(stage: MapStage, n: int) -> float:
    """Bytes that a pass reads and returns per member."""
    return _read(stage, n) + sum(nbytes_of(var.aval) for var in stage.results) / n


def _reduced(stage: MapStage) -> int:
    """Bytes of the partials of a shard."""
    return sum(nbytes_of(var.aval) for eqn in stage.reductions for var in eqn.outputs)


def _contracts(stage: MapStage) -> bool:
    """Whether a pass has a product that contracts over its members."""
    return any(eqn.primitive.name == "dot_general" for eqn in stage.reductions)


def _used(stage: MapStage, n: int) -> float:
    """Peak working memory per member in a pass, without its operands, in bytes."""
    return max((_bytes_at_once(e, n) for e in stage.emissions), default=0)


def _bytes_at_once(emission: Emission, n: int) -> float:
    """Working memory per member of one equation, without its operands, in bytes."""
    eqn = emission.eqn
    if eqn.primitive.name == "bj_map":
        return peak_bytes(eqn.params["jaxpr"])
    if isinstance(emission.rule, MemberwiseRule):
        return sum(nbytes_of(var.aval) for var in eqn.outputs) / n
    return 0
