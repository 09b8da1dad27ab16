"""Placed inputs, the members of which are records of `tf.train.Example` in several files."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from beamjax.sources.arrays.data_files import DataFile
from beamjax.sources.block_source import blocks_of, ends_of
from beamjax.sources.records.tf_example import ExampleParser
from beamjax.sources.source_base import (
    Count,
    HoldsLeaves,
    LeafSpec,
    Leaves,
    PyTreeDef,
    describe_source,
    first_of,
    starts_of,
)

Counted = tuple[DataFile, Count]
"""A file, and the number of records in it."""


class RecordSource(HoldsLeaves):
    """Records of local files, read by number. A subclass defines how they are read.

    Args:
        files: the files, at least one, in the order of their members.
        names: the names of the features.
        leaves: one member of each feature.
        treedef: the tree of a dict of them; a tuple by default.
    """

    def __init__(
        self,
        files: tuple[Counted, ...],
        names: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        super().__init__(leaves, treedef)
        check_features(names, leaves)
        if not files:
            raise ValueError("found no files")
        self._files = tuple(files)
        self._ends = ends_of([count for _, count in self._files])
        self._names = tuple(names)
        self._parser = ExampleParser(names, leaves)

    @abc.abstractmethod
    def records(self, number: int, first: int, last: int) -> list[bytes]:
        """The bytes of records [first, last) of a file; `first < last`.

        Raises:
            SourceError: they can't be read.
        """

    @property
    def is_local(self) -> bool:
        return True

    @functools.cached_property
    def file_starts(self) -> Mapping[int, int]:
        return starts_of([(file.path, count) for file, count in self._files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        records: list[bytes] = []
        for file in blocks_of(self._ends, start, stop):
            low, high = max(start, file.first), min(stop, file.last)
            records += self.records(file.number, low - file.first, high - file.first)
        return self._parser.parse(records, lambda place: self._where(start + place))

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        return f"{self._where(index[0])}, feature {self._names[leaf]!r}"

    def describe(self) -> str:
        return describe_source(self, f"in {first_of([file.path for file, _ in self._files])}")

    def identity(self) -> tuple[Any, list[str]]:
        return self.to_spec() | {"files": None}, [file.path for file, _ in self._files]

    def _where(self, member: int) -> str:
        """The name of a member in messages."""
        (found,) = blocks_of(self._ends, member, member + 1)
        return f"{self._files[found.number][0].path}, record {member - found.first}"


def check_features(names: Sequence[str], leaves: Sequence[LeafSpec]) -> None:
    """Raises TypeError unless there is a name for each leaf, and at least one leaf."""
    if len(names) != len(leaves) or not names:
        raise TypeError(f"found the features {names!r:.80}, expected {len(leaves)} names")
