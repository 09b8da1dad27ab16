"""Sources over other sources: a subset of members, groups of members, or joined leaves."""

from __future__ import annotations

import collections
import functools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.array_source import ArraySource, from_arrays
from beamjax.sources.source_base import (
    Count,
    LeafSpec,
    Positive,
    PyTreeDef,
    Source,
    StreamSource,
    Which,
    describe_source,
    take_members,
)
from beamjax.sources.source_kinds import DerivedSource, RaggedMembers, buckets_of


class WrapperSource(DerivedSource):
    """A source over one other source; by default it has the same leaves and members."""

    _parts: ClassVar[tuple[str, ...]] = ("_source",)
    _source: Source

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return self._source.leaves

    @property
    def treedef(self) -> PyTreeDef:
        return self._source.treedef

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        source, *others = self.inner
        selected, numbers = source.select(leaves)
        return (self if selected is source else self.with_inner([selected, *others])), numbers

    def __len__(self) -> int:
        return len(self._source)


class TakenSource(WrapperSource, RaggedMembers):
    """Members of another source; see `take`."""

    _parts: ClassVar[tuple[str, ...]] = ("_source", "_numbers")

    def __init__(self, source: Source, numbers: Source) -> None:
        """Use `take` or `sample`, which check, or `rows_source`."""
        if [(leaf.shape, leaf.dtype) for leaf in numbers.leaves] != [((), np.dtype(np.int64))]:
            raise TypeError(f"found numbers {numbers!r}, expected one leaf int64[]")
        self._source = source
        self._numbers = numbers

    @property
    def buckets(self) -> tuple[int, ...]:
        return buckets_of(self._source)

    @property
    def usual_rows(self) -> float:
        return self._source.usual_rows if isinstance(self._source, RaggedMembers) else 0.0

    def rows_of(self, which: Which) -> np.ndarray | None:
        if not isinstance(self._source, RaggedMembers):
            return None
        return self._source.rows_of(*self._numbers._at(which))

    @property
    def indices(self) -> np.ndarray:
        """int64[n]: the numbers of the members in the other source, ascending."""
        return self._numbers.read(0, len(self))[0]

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        (numbers,) = self._numbers.read(index[0], index[0] + 1)
        return self._source, leaf, (int(numbers[0]), *index[1:])

    def __len__(self) -> int:
        return len(self._numbers)

    def _at(self, which: Which) -> list[np.ndarray]:
        return take_members(self._source, *self._numbers._at(which))

    def _short(self, which: Which) -> list[np.ndarray]:
        return take_members(ShortSource(self._source), *self._numbers._at(which))

    def __str__(self) -> str:
        return describe_source(self, f"of {self._source}")


_NUMBER = LeafSpec((), np.dtype(np.int64))


class RowsSource(TakenSource):
    """Rows of a source, in any order and some repeatedly; see `rows_source`."""

    _parts = ("_source",)

    def __init__(self, source: Source, rows: tuple[Count, ...]) -> None:
        self._source = source
        self._rows = rows
        self._numbers = ArraySource([np.array(rows, np.int64)], [_NUMBER], None)

    @property
    def key(self) -> Hashable:
        return id(self._source), self._rows


def rows_source(source: Source, numbers: np.ndarray) -> RowsSource:
    """The members of a source with these numbers."""
    if isinstance(source, ShortSource):
        (source,) = source.inner
    return RowsSource(source, tuple(numbers.tolist()))


def take(source: Any, indices: Any) -> TakenSource:
    """A placed input of some of the members of a source. Only these are read.

    Args:
      source: a source of known length, or a tree of arrays of shape (n, ...).
      indices: int[k], the numbers of the members, each once. In any order; the members are read in
        ascending order.

    Returns:
      A `Source` of k members. Its attribute `indices`, int64[k], has their numbers in ascending
      order.

    Raises:
      StructureError: `indices` are not integers of shape (k,).
      PlacementError: a number is out of range or occurs twice.
      SourceError: the length of the source is unknown.
    """
    source = _source(source, "take")
    n = len(source)
    numbers = np.asarray(indices)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
        raise StructureError(
            f"take, indices: found {numbers.dtype}{list(numbers.shape)}, expected integers of "
            "shape (k,)."
        )
    numbers = np.sort(numbers.astype(np.int64))
    if len(numbers) and (numbers[0] < 0 or numbers[-1] >= n):
        bounds = f"{numbers[0]} to {numbers[-1]}"
        raise PlacementError(f"take, indices: found {bounds}, expected some from 0 to {n - 1}.")
    again = np.flatnonzero(np.diff(numbers) == 0)
    if len(again):
        raise PlacementError(
            f"take, indices: found {numbers[again[0]]} twice, expected each member once."
        )
    return TakenSource(source, from_arrays(numbers))


def sample(source: Any, k: int, key: Any) -> TakenSource:
    """A placed input of k members of a source, drawn without replacement; only they are read.

        cohort = bj.sample(clients, 100, jax.random.fold_in(key, round))
        state = bj.run(federated_round, state, cohort, cohort.indices)

    All sets of k members are equally likely. The draw is made in this call, with memory in
    proportion to k, not to the number of members. It is the same for the same key, number of
    members and version of NumPy. With `indices` as another placed input, a body can derive a key
    for each member that does not depend on the other members drawn:
    `jax.random.fold_in(key, index)`.

    Args:
      source: a source of known length, or a tree of arrays of shape (n, ...).
      k: the number of members to draw, from 0 to the number of members of the source.
      key: a key of `jax.random`, typed or raw.

    Returns:
      A `Source` of k members. Its attribute `indices`, int64[k], has their numbers in ascending
      order.

    Raises:
      PlacementError: `k` is out of range.
      StructureError: `key` is no single key.
      SourceError: the length of the source is unknown.
    """
    import jax

    source = _source(source, "sample")
    n = len(source)
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or not 0 <= k <= n:
        raise PlacementError(f"sample, k: found {k!r}, expected a number of members from 0 to {n}.")
    typed = jax.dtypes.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key)
    data = np.asarray(jax.random.key_data(key) if typed else key)
    if data.ndim != 1 or data.dtype != np.uint32:
        raise StructureError(f"sample, key: found {key!r:.200}, expected one key of jax.random.")
    drawn = np.random.default_rng(data).choice(n, int(k), replace=False, shuffle=False)
    return TakenSource(source, from_arrays(np.sort(drawn.astype(np.int64))))


def _source(members: Any, caller: str) -> Source:
    source = members if isinstance(members, Source) else from_arrays(members)
    if isinstance(source, StreamSource):
        raise SourceError(
            f"{caller}: found {source!r:.200}, the length of which is known only after all of it "
            "has been read; expected a source of known length."
        )
    return source


def grouped(source: Source, rows: int) -> Source:
    """The members of `x.reshape(len(source) // rows, rows, ...)`; nothing is read or copied."""
    if not isinstance(source, ArraySource):
        return GroupedSource(source, rows)
    arrays = source.read(0, len(source))
    return ArraySource([_group(a, rows) for a in arrays], _leaves(source, rows), source.treedef)


class GroupedSource(WrapperSource):
    """Reads ranges of another source; see `grouped`."""

    def __init__(self, source: Source, rows: Positive) -> None:
        self._source = source
        self._rows = rows

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        member, row, *rest = index
        return self._source, leaf, (member * self._rows + row, *rest)

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return _leaves(self._source, self._rows)

    def __len__(self) -> int:
        return len(self._source) // self._rows

    def _at(self, which: Which) -> list[np.ndarray]:
        if isinstance(which, slice):
            rows: Which = slice(which.start * self._rows, which.stop * self._rows)
        else:
            rows = (which[:, None] * self._rows + np.arange(self._rows)).reshape(-1)
        return [_group(array, self._rows) for array in self._source._at(rows)]

    def __str__(self) -> str:
        return describe_source(self, f"with {self._rows} rows each of {self._source}")


def _leaves(source: Source, rows: int) -> tuple[LeafSpec, ...]:
    return tuple(replace(leaf, shape=(rows, *leaf.shape)) for leaf in source.leaves)


def _group(array: np.ndarray, rows: int) -> np.ndarray:
    return array.reshape(len(array) // rows, rows, *array.shape[1:])


class ShortSource(WrapperSource):
    """A ragged source that pads to buckets: for passes with a body per bucket."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        return self._source, leaf, index

    def _at(self, which: Which) -> list[np.ndarray]:
        source = self._source
        return source._short(which) if isinstance(source, RaggedMembers) else source._at(which)

    def __str__(self) -> str:
        return str(self._source)


class ZippedSource(DerivedSource):
    """The leaves of several sources with the same number of members."""

    def __init__(self, sources: Sequence[Source], treedef: PyTreeDef | None = None) -> None:
        self._sources = tuple(sources)
        self._treedef = treedef
        if not self._sources:
            raise TypeError("found no sources, expected one or more")
        lengths = list(map(len, self._sources))
        if len(set(lengths)) != 1:
            raise PlacementError(
                f"found sources of {lengths} members, expected the same number in all that are "
                "read together."
            )

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return tuple(leaf for source in self._sources for leaf in source.leaves)

    @property
    def treedef(self) -> PyTreeDef:
        return super().treedef if self._treedef is None else self._treedef

    @property
    def inner(self) -> tuple[Source, ...]:
        return self._sources

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        for source in self._sources:
            if leaf < len(source.leaves):
                return source, leaf, index
            leaf -= len(source.leaves)
        raise IndexError(f"{self!r}: found no leaf {leaf}")

    def with_inner(self, inner: Sequence[Source]) -> ZippedSource:
        return ZippedSource(tuple(inner), self._treedef)

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        selected, numbers, first = [], list[int](), 0
        for source in self._sources:
            end = first + len(source.leaves)
            used = [leaf - first for leaf in leaves if first <= leaf < end]
            if used:
                part, order = source.select(used)
                selected.append(part)
                numbers += [first + leaf for leaf in order]
            first = end
        if not selected or len(numbers) == len(self.leaves):
            return self, range(len(self.leaves))
        return ZippedSource(selected), numbers

    @functools.cached_property
    def cuts(self) -> Mapping[int, str]:
        starts = (dict(source.cuts) for source in self._sources)
        return dict(collections.ChainMap(*starts))

    def __len__(self) -> int:
        return len(self._sources[0])

    def _at(self, which: Which) -> list[np.ndarray]:
        return [array for source in self._sources for array in source._at(which)]

    def __str__(self) -> str:
        return describe_source(self, f"of {len(self._sources)} sources that are read together")


def snapshot_of(source: Source) -> Source:
    """The same members, with a copy of arrays that the caller can still write to."""
    if isinstance(source, ArraySource):
        return source.snapshot()
    if not isinstance(source, DerivedSource):
        return source
    parts = list(map(snapshot_of, source.inner))
    pairs = zip(parts, source.inner, strict=True)
    return source.with_inner(parts) if any(new is not old for new, old in pairs) else source
