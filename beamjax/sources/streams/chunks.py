"""Checks chunks of streams, and divides them into blocks of the size of a shard."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from beamjax.errors import BeamjaxError, SourceError
from beamjax.ops.placements import MAX_MEMBERS
from beamjax.sources.canonical import check_chunk, check_members
from beamjax.sources.source_base import Source, StreamSource
from beamjax.storage.arrays import dtype_name

Arrays = list[np.ndarray]
"""Arrays of consecutive members, one for each leaf of a source, or for each requested leaf."""

WHOLE_BLOCK_MEMBERS = 1 << 10
"""Members of a block if a whole stream is read into memory."""


@dataclass(frozen=True)
class MemberBlock:
    """Consecutive members of all sources of a stream, by the name of each placed input."""

    start: int
    count: int
    values: dict[str, np.ndarray]


@dataclass(frozen=True)
class Streams:
    """Sources of unknown length, at least one, with the same number of members, read together."""

    sources: tuple[StreamSource, ...]
    where: Mapping[str, tuple[int, int]]  # placed input of the plan: number of the source, leaf
    x64: bool

    def blocks(self, size: int) -> Iterator[MemberBlock]:
        """All members, `size` at a time; the last block may be short."""
        requested = [sorted({leaf for i, leaf in self.where.values() if i == number})
                  for number in range(len(self.sources))]  # fmt: skip
        streams = [
            blocks_of(s, size, w, self.x64) for s, w in zip(self.sources, requested, strict=True)
        ]
        start = 0
        for parts in itertools.zip_longest(*streams, fillvalue=(0, [])):
            counts = [count for count, _ in parts]
            if len(set(counts)) > 1:
                raise _unequal(self.sources, [start + count for count in counts], size)
            values = {
                name: parts[source][1][requested[source].index(leaf)]
                for name, (source, leaf) in self.where.items()
            }
            check_count(self.sources[0], start + counts[0])
            yield MemberBlock(start, counts[0], values)
            start += counts[0]


def check_count(source: StreamSource, count: int) -> None:
    """Raises SourceError if a source has more members than a placement may have."""
    if count > MAX_MEMBERS:
        raise SourceError(
            f"{source!r}: found more than {MAX_MEMBERS} members, which is the limit of a placement."
        )


def _unequal(sources: Sequence[StreamSource], counts: Sequence[int], size: int) -> SourceError:
    low, high = counts.index(min(counts)), counts.index(max(counts))
    return SourceError(
        f"{sources[low]!r} has {counts[low]} members, but {sources[high]!r} has {counts[high]} or "
        "more; expected the same number in each, since they belong to the same placement."
    )


def blocks_of(
    source: StreamSource,
    size: int,
    requested: Sequence[int],
    x64: bool,
    pieces: Iterable[int] | None = None,
) -> Iterator[tuple[int, Arrays]]:
    """The members of a source, `size` at a time; the last block may be short."""
    leaves = [source.leaves[i] for i in requested]
    filled = 0
    block: Arrays = []
    pieces = range(source.pieces) if pieces is None else pieces
    chunks = (checked_chunks(source, piece, requested, x64) for piece in pieces)
    for chunk in itertools.chain.from_iterable(chunks):
        position, rows = 0, len(chunk[0])
        while position < rows:
            if not filled:
                block = [np.empty((size, *leaf.shape), leaf.dtype) for leaf in leaves]
            taken = min(size - filled, rows - position)
            for array, i in zip(block, requested, strict=True):
                array[filled : filled + taken] = chunk[i][position : position + taken]
            position, filled = position + taken, filled + taken
            if filled == size:
                yield filled, block
                filled = 0
    if filled:
        yield filled, [array[:filled] for array in block]


def checked_chunks(
    source: StreamSource, piece: int, requested: Sequence[int], x64: bool
) -> Iterator[Arrays]:
    """The chunks of a piece, each with at least one member."""
    start = 0
    where = f"{source!r}{f', piece {piece}' if source.pieces > 1 else ''}, chunk "
    for number, chunk in enumerate(_located(source.chunks(piece), where)):
        arrays = _checked(source, chunk, f"{where}{number}")
        for leaf in requested:
            check_chunk(source, piece, leaf, arrays[leaf], start, x64)
        start += len(arrays[0])
        if len(arrays[0]):
            yield arrays


def _located(chunks: Iterable[Sequence[np.ndarray]], where: str) -> Iterator[Sequence[np.ndarray]]:
    """Adds the number of the chunk to errors of the user's code."""
    number = 0
    try:
        for chunk in chunks:
            yield chunk
            number += 1
    except BeamjaxError:
        raise
    except Exception as error:
        raise SourceError(
            f"{where}{number}: cannot be read ({type(error).__name__}: {error})."
        ) from error


def _checked(source: StreamSource, chunk: Sequence[np.ndarray], where: str) -> Arrays:
    if not isinstance(chunk, list | tuple) or len(chunk) != len(source.leaves):
        description = f"{len(chunk)} arrays" if isinstance(chunk, list | tuple) else repr(chunk)
        raise SourceError(
            f"{where}: found {description:.200}, expected a list of {len(source.leaves)} arrays, "
            "one for each leaf."
        )
    arrays: Arrays = []
    for leaf, value in zip(source.leaves, chunk, strict=True):
        array = np.asarray(value)
        dtype = array.dtype.newbyteorder("=")
        path = f", leaf {leaf.path}" if leaf.path else ""
        if array.shape[1:] != leaf.shape or array.ndim == 0 or dtype != leaf.dtype:
            raise SourceError(
                f"{where}{path}: found {array.dtype.name}{list(array.shape)}, expected rows of "
                f"{dtype_name(leaf.dtype)}{list(leaf.shape)}; every chunk has an array of shape "
                "(rows, ...) for each leaf, with the dtype and the shape of a member in `leaves`."
            )
        arrays.append(array)
        if len(array) != len(arrays[0]):
            raise SourceError(
                f"{where}{path}: found {len(array)} rows, expected {len(arrays[0])} as in leaf "
                f"{source.leaves[0].path or 0}; all leaves have the same members."
            )
    return arrays


def members_of(source: Source, x64: bool, requested: Sequence[int] | None = None) -> Arrays:
    """All members of a source of any kind, in memory."""
    requested = range(len(source.leaves)) if requested is None else requested
    if not isinstance(source, StreamSource):
        arrays = source.read(0, len(source))
        for leaf in requested:
            check_members(source, leaf, arrays[leaf], 0, x64)
        return [arrays[leaf] for leaf in requested]
    blocks = list(blocks_of(source, WHOLE_BLOCK_MEMBERS, requested, x64))
    check_count(source, sum(count for count, _ in blocks))
    none = [np.empty((0, *source.leaves[i].shape), source.leaves[i].dtype) for i in requested]
    return [np.concatenate(arrays) for arrays in zip(none, *(x for _, x in blocks), strict=True)]
