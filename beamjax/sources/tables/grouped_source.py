"""Placed inputs whose members are several rows in a row of another source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.sources.array_source import ArraySource
from beamjax.sources.source_base import (
    LeafSpec,
    PyTreeDef,
    Source,
    describe_source,
    natural,
    open_spec,
)


def grouped(source: Source, rows: int) -> Source:
    """The source with `rows` consecutive members as one: leaves of shape `(rows, *leaf.shape)`.

    Its members are those of `x.reshape(len(source) // rows, rows, ...)`; `rows` divides the number
    of members. Nothing is read or copied.
    """
    if not isinstance(source, ArraySource):
        return GroupedSource(source, rows)
    arrays = source.read(0, len(source))
    return ArraySource([_group(a, rows) for a in arrays], _leaves(source, rows), source.treedef)


class GroupedSource(Source, kind="grouped"):
    """Reads ranges of another source; see `grouped`."""

    def __init__(self, source: Source, rows: int) -> None:
        self._source = source
        self._rows = rows

    @property
    def source(self) -> Source:
        """What it reads."""
        return self._source

    @property
    def inner(self) -> tuple[Source, ...]:
        return (self._source,)

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        member, row, *rest = index
        return self._source, leaf, (member * self._rows + row, *rest)

    def with_inner(self, inner: Sequence[Source]) -> GroupedSource:
        (source,) = inner
        return GroupedSource(source, self._rows)

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return _leaves(self._source, self._rows)

    @property
    def treedef(self) -> PyTreeDef:
        return self._source.treedef

    def __len__(self) -> int:
        return len(self._source) // self._rows

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        arrays = self._source.read(start * self._rows, stop * self._rows)
        return [_group(array, self._rows) for array in arrays]

    def describe(self) -> str:
        return describe_source(self, f"with {self._rows} rows each of {self._source.describe()}")

    def to_spec(self) -> dict[str, Any]:
        return {**self.spec_head(), "source": self._source.to_spec(), "rows": self._rows}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> GroupedSource:
        return cls(open_spec(spec["source"]), natural(spec["rows"], 1))


def _leaves(source: Source, rows: int) -> tuple[LeafSpec, ...]:
    return tuple(replace(leaf, shape=(rows, *leaf.shape)) for leaf in source.leaves)


def _group(array: np.ndarray, rows: int) -> np.ndarray:
    return array.reshape(len(array) // rows, rows, *array.shape[1:])
