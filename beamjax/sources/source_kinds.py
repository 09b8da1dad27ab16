"""What beamjax knows of its own sources, beyond the protocol `Source`."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from beamjax.sources.source_base import ByIndex, Source, StreamSource, Which, row_text, spec_of


class FileSource(Source):
    """Members in files or the like, as beamjax reads them."""

    # Whether 64-bit integers may wrap while JAX computes with 32 bits. Those of arrays in memory
    # wrap, as under `jax.jit`, and so may those in files of a run, which were checked when they
    # were written. In all other sources, integers that would wrap are refused.
    wraps = False
    block_bytes = 0  # bytes of members that are decoded to read any one of them

    def identity(self) -> tuple[Any, list[str]]:
        """Describes what the members depend on, to detect a changed source."""
        return spec_of(self), []

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        """The file, column and row of a value as text, for messages."""
        return member_text(self, leaf, index)


class DerivedSource(ByIndex):
    """Members that are those of other sources, or made of them."""

    _parts: ClassVar[tuple[str, ...]]
    """The names of the attributes with the other sources."""

    @property
    def inner(self) -> tuple[Source, ...]:
        """The other sources."""
        return tuple(getattr(self, name) for name in self._parts)

    @property
    def key(self) -> Hashable:
        """See `key_of`."""
        return id(self)

    def spec(self) -> dict[str, Any] | None:
        return None if any(part.spec() is None for part in self.inner) else super().spec()

    def with_inner(self, inner: Sequence[Source]) -> Self:
        """This source, reading from other sources with the same members instead of `inner`."""
        other = object.__new__(type(self))  # `copy` would make a spec of the source
        vars(other).update(vars(self), **dict(zip(self._parts, inner, strict=True)))
        return other

    @abc.abstractmethod
    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        """The source from which a value comes, another one or this one, and its place there."""


class RaggedMembers(Source):
    """Members that may be ragged: padded to one of several numbers of rows."""

    @property
    @abc.abstractmethod
    def buckets(self) -> tuple[int, ...]:
        """Numbers of rows to which `_short` pads, ascending; empty if no leaf is ragged."""
        # The last one is the number of rows in `leaves`.

    @property
    @abc.abstractmethod
    def usual_rows(self) -> float:
        """The mean number of rows of ragged members; 0 if no leaf is ragged."""

    def rows_of(self, which: Which) -> np.ndarray | None:
        """Counts the rows of members without reading them: int[k]; None if it can't."""
        return None

    @abc.abstractmethod
    def _short(self, which: Which) -> list[np.ndarray]:
        """As `_at`, but pads ragged leaves only to the first of `buckets` that is long enough."""


def buckets_of(source: Source) -> tuple[int, ...]:
    """The buckets of ragged members; empty for others."""
    return source.buckets if isinstance(source, RaggedMembers) else ()


def key_of(source: Source) -> Hashable:
    """The same for sources of which one read gives the leaves of both."""
    return source.key if isinstance(source, DerivedSource) else id(source)


def innermost(
    source: Source, leaf: int, index: tuple[int, ...] | None = None
) -> tuple[Source, int, tuple[int, ...]]:
    """The source that stores a value (the first by default), and the leaf and the index there."""
    at = (0,) * (1 + len(source.leaves[leaf].shape)) if index is None else index
    while isinstance(source, DerivedSource):
        inner, leaf, at = source.origin(leaf, at)
        if inner is source:
            break
        source = inner
    return source, leaf, at


def member_text(source: Source, leaf: int, index: tuple[int, ...]) -> str:
    """The source, leaf and member of a value as text."""
    path = source.leaves[leaf].path
    return f"{source}, {f'leaf {path}, ' if path else ''}{row_text(index, 'member')}"


def block_bytes_of(source: Source) -> int:
    """Bytes of members that are decoded to read any one of them; 0 without blocks."""
    if isinstance(source, DerivedSource):
        return sum(map(block_bytes_of, source.inner))
    return source.block_bytes if isinstance(source, FileSource) else 0


class FileStream(StreamSource):
    """A stream whose pieces are files."""

    @abc.abstractmethod
    def where_in(self, piece: int, leaf: int, index: tuple[int, ...]) -> str:
        """As `FileSource.where`, with `index[0]` counted from the beginning of a piece."""
