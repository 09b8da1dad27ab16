"""Placed inputs from TFRecord files of `tf.train.Example`, without TensorFlow."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from beamjax.errors import PlacementError, SourceError
from beamjax.sources.arrays.data_files import (
    DataFile,
    find_files,
    is_url,
    look,
    open_file,
    readable,
)
from beamjax.sources.records.record_source import (
    Counted,
    RecordSource,
    check_features,
    files_for_people,
)
from beamjax.sources.records.tf_example import ExampleParser, feature_leaves, infer_features
from beamjax.sources.records.tfrecord_frames import (
    EXPECTED,
    HEADER,
    block_offsets,
    check_records,
    compression_of,
    frames_in,
    record_offsets,
    stream_records,
)
from beamjax.sources.source_base import (
    Count,
    HoldsLeaves,
    Leaves,
    PyTreeDef,
    StreamSource,
    describe_source,
)

CALLER = "from_tfrecord"
MARK_BYTES = 1 << 20
"""Bytes, at least, between the records whose positions a source stores; it searches for others."""
MAX_MARKS = 1 << 13

Mark = tuple[Count, Count]
"""The number of a record in its file, and where it begins."""


class TFRecordSource(RecordSource, kind="tfrecord"):
    """Records of local files; see `from_tfrecord`."""

    def __init__(
        self,
        files: tuple[Counted, ...],
        marks: tuple[tuple[Mark, ...], ...],
        names: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_tfrecord`, which checks.

        Args:
            files: with the number of records in each.
            marks: of each file, the first of which is (0, 0).
            names: of the features.
            leaves: what a member has of each.
            treedef: of a dict of them; a tuple by default.
        """
        super().__init__(files, names, leaves, treedef)
        self._marks = tuple(marks)
        for counted, found in zip(files, marks, strict=True):
            _check_marks(counted, found)

    def records(self, number: int, first: int, last: int) -> list[bytes]:
        return _read_records(self._files[number], self._marks[number], first, last)


class TFRecordStream(HoldsLeaves, StreamSource, kind="tfrecord-stream"):
    """Records of files that are read from their beginning, a piece each; see `from_tfrecord`."""

    def __init__(
        self,
        files: tuple[DataFile, ...],
        names: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_tfrecord`, which checks; arguments as of `TFRecordSource`."""
        super().__init__(leaves, treedef)
        check_features(names, leaves)
        if not files:
            raise ValueError("found no files")
        self._files = tuple(files)
        self._names = tuple(names)
        self._parser = ExampleParser(names, leaves)

    @property
    def pieces(self) -> int:
        return len(self._files)

    def chunks(self, piece: int) -> Iterator[Sequence[np.ndarray]]:
        file = self._files[piece]
        file.check()
        for number, records in stream_records(file):
            yield self._parser.parse(records, functools.partial(_record_of, file, number))
        file.check()  # One that was cut between records meanwhile has a whole end.

    def where_in(self, piece: int, leaf: int, index: tuple[int, ...]) -> str:
        where = _record_of(self._files[piece], index[0], 0)
        return f"{where}, feature {self._names[leaf]!r}"

    def describe(self) -> str:
        return describe_source(self, files_for_people(self._files))


def from_tfrecord(paths: Any, features: Any = None) -> TFRecordSource | TFRecordStream:
    """A placed input from TFRecord files: a member is a `tf.train.Example`, as a dict of arrays.

        bj.from_tfrecord("data/train-*.tfrecord", {
            "image": jax.ShapeDtypeStruct((28, 28), "uint8"),
            "label": jax.ShapeDtypeStruct((), "int32"),
        })

    A `float_list` gives float32, an `int64_list` any integers that hold the values, or bool, with
    as many values as the shape has. A `bytes_list` has one value: the bytes of an array of any
    dtype, in C order and little-endian, as `tobytes()` of NumPy gives them. All checksums are
    checked.

    Files of this machine that are not compressed are indexed now, and read by shards; their number
    of members is known. If one is compressed (by gzip, bzip2 or xz) or at a URL, the workers read
    all files from their beginning, a worker a file, and the number is found then: the size of the
    placement has to be open, as for every `beamjax.StreamSource`.

    Args:
      paths: a path, a pattern, a URL, or a list of those. The records of one file come after those
        of another, in the order of the names that a pattern finds.
      features: a dict from the names that are requested to `jax.ShapeDtypeStruct`. None takes all
        of the first record: a list of one number is a scalar, one of several a vector, and bytes
        are uint8.

    Returns:
      A `Source` of dictionaries whose keys are the names of the features; a `StreamSource` if a
      file is compressed or at a URL.

    Raises:
      SourceError: a file is not there or is damaged, or the first record has not these features.
      StructureError: `features` are no types.
      PlacementError: the files that are indexed hold no record.
    """
    files = [look(path) for path in find_files(paths, CALLER)]
    first, where = _first_record(files)
    if features is None:
        features = infer_features(first, where)
    leaves, treedef = feature_leaves(features, CALLER)
    names = sorted(features)
    ExampleParser(names, leaves).parse([first], lambda _: where)
    if any(is_url(file.path) or compression_of(file.path) for file in files):
        return TFRecordStream(tuple(files), tuple(names), tuple(leaves), treedef)
    apart = max(MARK_BYTES, sum(file.nbytes for file in files) // MAX_MARKS)
    counts, marks = zip(*[_indexed(file, apart) for file in files], strict=True)
    counted = tuple(zip(files, counts, strict=True))
    return TFRecordSource(counted, tuple(marks), tuple(names), tuple(leaves), treedef)


def _record_of(file: DataFile, first: int, place: int) -> str:
    return f"{file.path}, record {first + place}"


def _first_record(files: Sequence[DataFile]) -> tuple[bytes, str]:
    """The first record of all, and what it is called in messages."""
    for file in files:
        for _, records in stream_records(file, HEADER):
            return records[0], f"{file.path}, record 0"
    raise PlacementError(f"{CALLER}: found no record {files_for_people(files)}, expected one.")


def _indexed(file: DataFile, apart: int) -> tuple[int, tuple[Mark, ...]]:
    """Counts the records of a file, and marks some that are so many bytes apart."""
    count = 0
    marks = [(0, 0)]
    for begins in record_offsets(file, 0, 0, file.nbytes):
        while (at := int(np.searchsorted(begins, marks[-1][1] + apart))) < len(begins):
            marks.append((count + at, int(begins[at])))
        count += len(begins)
    return count, tuple(marks)


def _read_records(counted: Counted, marks: Sequence[Mark], first: int, last: int) -> list[bytes]:
    file, count = counted
    file.check()
    number = bisect.bisect_right(marks, first, key=lambda mark: mark[0]) - 1
    offsets = []
    begin = marks[number][0]
    reached = begin
    while reached < last:
        (at, start), (after, stop) = marks[number], [*marks, (count, file.nbytes)][number + 1]
        found = block_offsets(file, start, at, stop)
        if len(found) != after - at + 1:
            raise SourceError(
                f"{file.path}: found {len(found) - 1} records from record {at} on, expected "
                f"{after - at}; the source was not made from this file."
            )
        offsets.append(found[:-1])
        reached, number = after, number + 1
    begins = np.concatenate([*offsets, found[-1:]])[first - begin : last - begin + 1].tolist()
    with readable(file.path, EXPECTED), open_file(file.path) as opened:
        opened.seek(begins[0])
        data = opened.read(begins[-1] - begins[0])
    if len(data) != begins[-1] - begins[0]:
        raise SourceError(f"{file.path}: was cut off while it was read.")
    records, stored = frames_in(data, [at - begins[0] for at in begins[:-1]], len(data))
    check_records(records, stored, file.path, first)
    return records


def _check_marks(counted: Counted, marks: Sequence[Mark]) -> None:
    """Raises ValueError for marks that no file can have."""
    file, count = counted
    ordered = all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(marks))
    if tuple(marks[:1]) != ((0, 0),) or not ordered:
        raise ValueError(f"found the marks {marks!r:.80}")
    if count < marks[-1][0] or file.nbytes < marks[-1][1]:
        raise ValueError(f"found {count} records in {file.nbytes} bytes, behind their marks")
