"""Placed inputs from ArrayRecord files of `tf.train.Example`, by the package `array_record`."""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import PlacementError, SourceError
from beamjax.sources.data_files import DataFile, find_files, is_url, look
from beamjax.sources.source_base import (
    HoldsLeaves,
    LeafSpec,
    PyTreeDef,
    describe_source,
    natural,
)
from beamjax.sources.tf_example import (
    ExampleParser,
    feature_leaves,
    features_of_spec,
    infer_features,
)

WHO = "from_array_record"
MAX_OPEN = 64
"""Files that a process keeps open, with their indices in memory."""


class ArrayRecordSource(HoldsLeaves, kind="array-record"):
    """Records of local files, read by their number; see `from_array_record`."""

    def __init__(
        self,
        files: Sequence[tuple[DataFile, int]],
        names: Sequence[str],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_array_record`, which checks.

        Args:
            files: with the number of records in each.
            names: of the features.
            leaves: what a member has of each.
            treedef: of a dict of them; a tuple by default.
        """
        super().__init__(leaves, treedef)
        self._files = tuple(files)
        self._ends = list(itertools.accumulate(count for _, count in self._files))
        self._names = tuple(names)
        self._parser = ExampleParser(names, leaves)

    @property
    def is_local(self) -> bool:
        return True

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        records: list[bytes] = []
        number = bisect.bisect_right(self._ends, start)
        while len(records) < stop - start:
            file, count = self._files[number]
            base = self._ends[number] - count
            first, last = start + len(records) - base, min(stop - base, count)
            if first < last:
                records += _read_records(file, count, first, last)
            number += 1
        return self._parser.parse(records, lambda i: self._where(start + i))

    def _where(self, member: int) -> str:
        number = bisect.bisect_right(self._ends, member)
        file, count = self._files[number]
        return f"{file.path}, record {member - (self._ends[number] - count)}"

    def describe(self) -> str:
        more = f" and {len(self._files) - 1} more" if len(self._files) > 1 else ""
        return describe_source(self, f"in {self._files[0][0].path}{more}")

    def to_spec(self) -> dict[str, Any]:
        return {
            **self.spec_head(),
            "files": [[file.to_json(), count] for file, count in self._files],
            "names": list(self._names),
            "leaves": [leaf.to_json() for leaf in self._leaves],
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> ArrayRecordSource:
        names, leaves = features_of_spec(spec)
        files = [(DataFile.from_json(file), natural(count)) for file, count in spec["files"]]
        if not files:
            raise ValueError("found no files")
        return cls(files, names, leaves)


def from_array_record(paths: Any, features: Any = None) -> ArrayRecordSource:
    """A placed input from ArrayRecord files: a member is a `tf.train.Example`, as a dict of arrays.

    It needs the package `array_record` (`pip install 'beamjax[array-record]'`), on the workers too.
    Records of another kind: open them, and decode them, by an object for `from_random_access`.

    Args:
      paths: a path, a pattern, or a list of those, of files that the launcher and all workers see
        under the same path. The records of one file come after those of another.
      features: as of `from_tfrecord`.

    Raises:
      SourceError: the package, or a file, is not there, or is none; or the first record has not
        these features.
      StructureError: `features` are no types.
      PlacementError: the files hold no record.
    """
    files = [(file, _count(file)) for file in map(look, _local(find_files(paths, WHO)))]
    filled = next((file for file, count in files if count), None)
    if filled is None:
        raise PlacementError(f"{WHO}: found no record in {files[0][0].path}, expected one.")
    (first,) = _read_records(filled, dict(files)[filled], 0, 1)
    where = f"{filled.path}, record 0"
    if features is None:
        features = infer_features(first, where)
    leaves, treedef = feature_leaves(features, WHO)
    names = sorted(features)
    ExampleParser(names, leaves).parse([first], lambda _: where)
    return ArrayRecordSource(files, names, leaves, treedef)


def _local(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        if is_url(path):
            raise SourceError(
                f"{WHO}: found the URL {path}, expected files of this machine, which alone the "
                "package array_record reads; copy or mount them where all workers see them."
            )
    return paths


def _count(file: DataFile) -> int:
    return int(_opened(file).num_records())


def _read_records(file: DataFile, count: int, first: int, last: int) -> list[bytes]:
    """Records [first, last) of a file, which has so many."""
    file.check()
    reader = _opened(file)
    if (found := reader.num_records()) != count:
        raise SourceError(
            f"{file.path}: found {found} records, expected {count}; the source was not made from "
            "this file."
        )
    try:
        return list(reader.read(first, last))
    except Exception as error:  # of any kind: what the package raises is not told anywhere
        raise SourceError(
            f"{file.path}, records {first} to {last - 1}: cannot read them ({error}); the file is "
            "damaged."
        ) from error


def _opened(file: DataFile) -> Any:
    """A reader, which threads may share: they call nothing of it that changes it."""
    with _LOCK:
        return _reader(file)


_LOCK = threading.Lock()


@functools.lru_cache(MAX_OPEN)
def _reader(file: DataFile) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise SourceError(
            f"{file.path}: cannot import the package array_record ({error}); pip install "
            "'beamjax[array-record]', here and on the workers."
        ) from error
    try:
        reader = array_record_module.ArrayRecordReader(
            file.path, "readahead_buffer_size:0,max_parallelism:0"
        )
        if reader.ok():
            return reader
        reason = "it is none, or was cut off"
    except Exception as error:  # of any kind, as above
        reason = str(error)
    raise SourceError(
        f"{file.path}: found {file.nbytes} bytes, expected a file of ArrayRecord ({reason})."
    )
