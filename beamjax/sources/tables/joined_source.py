"""Placed inputs that are the rows of two tables with the same key."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.npy_source import NpySeries
from beamjax.sources.source_base import LeafSpec, Source, open_spec


class JoinedRows(NpySeries):
    """Joined rows in files; see `beamjax.join`.

    Attributes:
      unmatched: rows of the left and of the right table whose key is in one only.
    """

    def __init__(
        self,
        files: Sequence[Sequence[tuple[str, int]]],
        leaves: Sequence[LeafSpec],
        unmatched: tuple[int, int],
    ) -> None:
        """Use `beamjax.join`."""
        import jax

        names = [ast.literal_eval(leaf.path[1:-1]) for leaf in leaves]
        super().__init__(files, leaves, jax.tree_util.tree_structure(dict.fromkeys(names, 0)))
        self.unmatched = unmatched


class TwoTables(Source, kind="two-tables"):
    """Two tables for one shuffle; they are read apart."""

    def __init__(self, left: Source, right: Source) -> None:
        self._tables = left, right

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return tuple(leaf for table in self._tables for leaf in table.leaves)

    @property
    def inner(self) -> tuple[Source, ...]:
        return self._tables

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def with_inner(self, inner: Sequence[Source]) -> TwoTables:
        return TwoTables(*inner)

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        raise SourceError("two tables are read apart.")

    def to_spec(self) -> dict[str, Any]:
        return {**self.spec_head(), "tables": [table.to_spec() for table in self._tables]}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> TwoTables:
        left, right = map(open_spec, spec["tables"])
        return cls(left, right)
