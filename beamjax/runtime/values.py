"""Values between the steps of a plan: where their parts are, and how they are read.

A value is a `Ref`. It never changes; slices of members, entries and stacks are other refs that
share its parts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np

from beamjax.errors import SourceError
from beamjax.plan.steps import ValueType
from beamjax.sources.canonical import check_members
from beamjax.sources.source_base import MASK, LeafSpec, Source
from beamjax.sources.source_kinds import key_of
from beamjax.spans import count


class Held(Protocol):
    """Data that is read when it is needed."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of an array whose first axis has the members."""

    def array(self) -> np.ndarray:
        """The whole array."""


@dataclass(frozen=True, eq=False)
class Leaf:
    """The members of a leaf of a source."""

    source: Source
    leaf: int  # its index in the source
    x64: bool  # whether JAX computes with 64-bit types
    # The leaf that these rows are from. The files of its source must exist as long as it does.
    of: Leaf | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.checked(self.source.read(start, stop)[self.leaf], start, stop)

    def array(self) -> np.ndarray:
        return self.read(0, len(self.source))

    def rows(self, numbers: np.ndarray) -> Leaf:
        """Some of these members, in any order and some repeatedly."""
        # Workers read rows from specs, and do not pick them.
        from beamjax.sources.derived_sources import rows_source

        return replace(self, source=rows_source(self.source, numbers), of=self)

    def checked(self, array: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Members [start, stop) as the source read them, which must be that many, of the dtype."""
        if len(array) != stop - start:
            raise SourceError(
                f"{self.source}: asked for members {start} to {stop - 1}, "
                f"found {len(array)} of them; a source must not change while it is read"
            )
        check_members(self.source, self.leaf, array, start, self.x64)
        return array


Data: TypeAlias = np.ndarray | Held
"""An array in this process, a leaf of a source, or an array in the store of a run."""


@dataclass(frozen=True, eq=False)
class Part:
    """The members [start, start + count) of a value, or one entry of each of these members."""

    start: int
    count: int
    data: Data  # the rows of these members
    # Where in each member of the value a row belongs; () if the row is the whole member.
    at: tuple[int, ...] = ()
    entry: tuple[int, ...] = ()  # the entry of each row; () for the whole row

    def read(self, start: int, stop: int) -> np.ndarray:
        """The rows of members [start, stop), which are in this part."""
        first, last = start - self.start, stop - self.start
        rows = (
            self.data[first:last]
            if isinstance(self.data, np.ndarray)
            else self.data.read(first, last)
        )
        at: Any = (slice(None), *self.entry)
        return rows[at] if self.entry else rows

    def take(self, members: np.ndarray) -> np.ndarray:
        """The rows of some members of this part, in any order and some repeatedly."""
        numbers = members - self.start
        rows: np.ndarray
        if isinstance(self.data, np.ndarray):
            rows = self.data
        elif isinstance(self.data, Leaf):
            rows, numbers = self.data.rows(numbers).array(), np.arange(len(numbers))
        else:
            # A part of the store is one file, which is read as a whole.
            first = int(numbers.min())
            rows, numbers = self.data.read(first, int(numbers.max()) + 1), numbers - first
        at: Any = (numbers, *self.entry)
        return rows[at]


@dataclass(frozen=True, eq=False)
class Ref:
    """A value of a plan."""

    dtype: str  # the name of its raw dtype
    shape: tuple[int, ...]  # of a placed value: the shape of one member
    n: int | None  # the number of members of a placed value; None for a server value
    parts: tuple[Part, ...]  # a server value is one part

    @property
    def data(self) -> Data:
        """What holds a server value, or a placed value of one part."""
        (part,) = self.parts
        return part.data

    @property
    def held(self) -> Held | None:
        """What holds all members as they are, if it is no array; None for other values."""
        if len(self.parts) == 1:
            (part,) = self.parts
            if not (isinstance(part.data, np.ndarray) or part.at or part.entry):
                return part.data
        return None

    @property
    def leaf(self) -> Leaf | None:
        """The leaf of a source that has all members as they are; None for other values."""
        held = self.held
        return held if isinstance(held, Leaf) else None

    def array(self) -> np.ndarray:
        """The raw array; the members of a placed value are along axis 0."""
        if self.n is not None:
            return self.rows(0, self.n)
        data = self.parts[0].data
        return data if isinstance(data, np.ndarray) else data.array()

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Members [start, stop) of a placed value."""
        parts = [p for p in self.parts if p.start < stop and p.start + p.count > start]
        if len(parts) == 1 and not parts[0].at:
            return parts[0].read(start, stop)
        # Several parts cover the range: other members, or other entries of the same members.
        rows = np.empty((stop - start, *self.shape), np.dtype(self.dtype))
        for part in parts:
            first, last = max(start, part.start), min(stop, part.start + part.count)
            at: Any = (slice(first - start, last - start), *part.at)
            rows[at] = part.read(first, last)
        return rows

    def with_data(self, change: Callable[[Data], Data]) -> Ref:
        """The same value, with the data of its parts elsewhere."""
        parts = tuple(replace(part, data=change(part.data)) for part in self.parts)
        return replace(self, parts=parts)

    def entry(self, index: int) -> Ref:
        """The entry of this index along the first axis, or along that of each member."""
        if self.n is None:
            return server(self.array()[index])
        # A stacked value has parts for each entry: take those of this one. In any other part, rows
        # are whole members, of which the entry is taken when they are read.
        parts = tuple(
            replace(part, at=part.at[1:]) if part.at else replace(part, entry=(*part.entry, index))
            for part in self.parts
            if not part.at or part.at[0] == index
        )
        return Ref(self.dtype, self.shape[1:], self.n, parts)


def server(array: np.ndarray) -> Ref:
    """A server value in this process."""
    array = np.asarray(array)
    return Ref(array.dtype.name, array.shape, None, (Part(0, 1, array),))


def placed(array: np.ndarray) -> Ref:
    """A placed value in this process, with its members along axis 0."""
    return Ref(array.dtype.name, array.shape[1:], len(array), (Part(0, len(array), array),))


def ref_to(data: Data, value: ValueType, n: int | None = None) -> Ref:
    """The value of this type, with n members if it is placed, that is in one place."""
    return Ref(value.dtype, value.shape, n, (Part(0, 1 if n is None else n, data),))


def scattered(whole: Ref, axis: int) -> Ref:
    """The placed value whose members are along an axis of a server value."""
    if axis or isinstance(whole.data, np.ndarray):
        return placed(np.moveaxis(whole.array(), axis, 0))
    n = whole.shape[0]
    return Ref(whole.dtype, whole.shape[1:], n, (Part(0, n, whole.data),))


def rows_of(whole: Ref, numbers: np.ndarray) -> Ref:
    """The members of a placed value with these numbers, in any order and some repeatedly."""
    leaf, n = whole.leaf, len(numbers)
    if leaf is not None:
        # Nothing is read now: workers read these members as they read any other.
        return Ref(whole.dtype, whole.shape, n, (Part(0, n, leaf.rows(numbers)),))
    rows = np.empty((n, *whole.shape), np.dtype(whole.dtype))
    for part in whole.parts:
        own = np.flatnonzero((numbers >= part.start) & (numbers < part.start + part.count))
        if len(own):
            at: Any = (own, *part.at)
            rows[at] = part.take(numbers[own])
    return placed(rows)


def stacked(value: ValueType, n: int | None, entries: Sequence[Ref]) -> Ref:
    """Values stacked along a new first axis, or along that of each of n members."""
    if n is None:
        arrays = [entry.array() for entry in entries]
        whole = np.stack(arrays) if arrays else np.empty(value.shape)
        return server(whole.astype(value.dtype, copy=False))
    parts = (
        replace(part, at=(number, *part.at))
        for number, entry in enumerate(entries)
        for part in entry.parts
    )
    return Ref(value.dtype, value.shape, n, tuple(parts))


Values: TypeAlias = Mapping[str, Ref]
"""Values by name."""


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads placed inputs, each source once for all its leaves."""

    sources: tuple[Source, ...]
    # For each placed input of the plan, the indices of its source and of its leaf there.
    where: Mapping[str, tuple[int, int]]
    x64: bool  # whether the plan computes with 64-bit types
    # Placed values that are not all members of one leaf, by name.
    others: Values = field(default_factory=dict)
    held: frozenset[str] = frozenset()  # the names of those that have a `Ref.held`

    @classmethod
    def of(cls, values: Values, x64: bool) -> Reader:
        """A reader of placed values."""
        sources: dict[Hashable, Source] = {}
        where, others, held = {}, {}, set()
        for name, value in values.items():
            data = value.held
            if not isinstance(data, Leaf):
                others[name] = value
                if data is not None:
                    held.add(name)
                continue
            key = key_of(data.source)
            sources.setdefault(key, data.source)
            where[name] = list(sources).index(key), data.leaf
        return cls(tuple(sources.values()), where, x64, others, frozenset(held))

    def read(self, names: Sequence[str], start: int, stop: int) -> dict[str, np.ndarray]:
        """Members [start, stop) of the placed inputs of these names, as raw arrays."""
        arrays: dict[int, list[np.ndarray]] = {}
        read = {}
        for name in names:
            if name in self.others:
                read[name] = self.others[name].rows(start, stop)
                continue
            source, leaf = self.where[name]
            if source not in arrays:
                arrays[source] = self.sources[source].read(start, stop)
            whole = Leaf(self.sources[source], leaf, self.x64)
            read[name] = whole.checked(arrays[source][leaf], start, stop)
        for i, mask in self._masks.items() if self.sources else ():
            used = [self.where[name][1] for name in names if self.where.get(name, (-1,))[0] == i]
            if used:
                _count_padding(self.sources[i].leaves, arrays[i], used, mask)
        return read

    def stamps(self, names: Sequence[str], start: int, stop: int) -> list[str] | None:
        """A text for each of these inputs that changes when members [start, stop) change."""
        # None if a source has to read the members to know, or if an input is not read by shards.
        stamps = []
        for name in names:
            if name not in self.where:
                return None
            source, leaf = self.where[name]
            mark = self.sources[source].stamp(start, stop)
            if mark is None:
                return None
            stamps.append(f"{leaf} {self.x64} {mark}")
        return stamps or None

    @functools.cached_property
    def _masks(self) -> dict[int, int]:
        """The leaf that marks rows, as opposed to padding, by the index of its source."""
        masks = {i: _mask_of(source) for i, source in enumerate(self.sources)}
        return {i: mask for i, mask in masks.items() if mask is not None}


def _count_padding(
    leaves: Sequence[LeafSpec], arrays: Sequence[np.ndarray], used: Sequence[int], mask: int
) -> None:
    """Counts the padding of ragged members that this thread has read."""
    rows = arrays[mask]
    short = rows.size - int(np.count_nonzero(rows))
    for number in used:
        if leaves[number].ragged and short:
            count("bytes_padding", arrays[number].nbytes * short // rows.size)


def _mask_of(source: Source) -> int | None:
    """The number of the mask among the leaves; None if members are not ragged."""
    path = f"[{MASK!r}]"
    masks = (i for i, leaf in enumerate(source.leaves) if leaf.path == path and leaf.ragged)
    return next(masks, None)
