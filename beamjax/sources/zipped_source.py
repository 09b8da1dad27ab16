"""Placed inputs that are read together: leaves of several sources, by the same index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import PlacementError
from beamjax.sources.source_base import (
    LeafSpec,
    PyTreeDef,
    Source,
    describe_source,
    field,
    open_spec,
)


class ZippedSource(Source, kind="zipped"):
    """All leaves of sources with the same number of members.

    Args:
      sources: one or more.
      treedef: the tree that their leaves form; a tuple by default.

    Raises:
      PlacementError: they have different numbers of members.
    """

    def __init__(self, sources: Sequence[Source], treedef: PyTreeDef | None = None) -> None:
        self._sources = tuple(sources)
        self._treedef = treedef
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
        return ZippedSource(inner, self._treedef)

    def __len__(self) -> int:
        return len(self._sources[0])

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        return [array for source in self._sources for array in source.read(start, stop)]

    def describe(self) -> str:
        return describe_source(self, f"of {len(self._sources)} sources that are read together")

    def to_spec(self) -> dict[str, Any]:
        return {**self.spec_head(), "sources": [source.to_spec() for source in self._sources]}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> ZippedSource:
        sources = [open_spec(inner) for inner in field(spec, "sources", list)]
        if not sources:
            raise TypeError("found no sources, expected one or more")
        return cls(sources)
