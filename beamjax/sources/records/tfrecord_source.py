"""Placed inputs from TFRecord files of `tf.train.Example`, without TensorFlow."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
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
from beamjax.sources.blocks import blocks_of, ends_of
from beamjax.sources.records.tf_example import ExampleParser, feature_leaves, infer_features
from beamjax.sources.records.tfrecord_frames import (
    EXPECTED,
    HEADER_BYTES,
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
    Source,
    check_range,
    cuts_at,
    describe_source,
    first_of,
    spec_of,
)
from beamjax.sources.source_kinds import FileSource, FileStream

CALLER = "from_tfrecord"
MARK_BYTES = 1 << 20
"""Smallest distance, in bytes, of the records of which a source stores the position. The positions
of records in between are found when they are read."""
MAX_MARKS = 1 << 13
"""Approximate number of stored positions in all files together, which limits the size of a spec."""

Counted = tuple[DataFile, Count]
"""A file, and the number of records in it."""
Mark = tuple[Count, Count]
"""The number of a record in its file, and its position in bytes."""


class _Examples(HoldsLeaves):
    """Features of the records of some files."""

    def __init__(
        self, paths: Sequence[str], names: Sequence[str], leaves: Leaves, treedef: PyTreeDef
    ) -> None:
        super().__init__(leaves, treedef)
        if len(names) != len(leaves) or not names:
            raise TypeError(f"found the features {names!r:.80}, expected {len(leaves)} names")
        if not paths:
            raise ValueError("found no files")
        self._paths = list(paths)
        self._names = tuple(names)
        self._parser = ExampleParser(names, leaves)

    def __str__(self) -> str:
        return describe_source(self, f"in {first_of(self._paths)}")


class TFRecordSource(_Examples, FileSource):
    """Records of local files; see `from_tfrecord`."""

    def __init__(
        self,
        files: tuple[Counted, ...],
        marks: tuple[tuple[Mark, ...], ...],
        names: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_tfrecord`, which checks."""
        super().__init__([file.path for file, _ in files], names, leaves, treedef)
        self._files = tuple(files)
        self._ends = ends_of([count for _, count in self._files])
        self._marks = tuple(marks)
        for counted, own in zip(files, marks, strict=True):
            _check_marks(counted, own)

    @property
    def local(self) -> bool:
        return True

    @functools.cached_property
    def cuts(self) -> Mapping[int, str]:
        return cuts_at([(file.path, count) for file, count in self._files])

    _gap_bytes = 1 << 16

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        check_range(self, start, stop)
        records: list[bytes] = []
        for file in blocks_of(self._ends, start, stop):
            low, high = max(start, file.first), min(stop, file.last)
            counted = self._files[file.number], self._marks[file.number]
            records += _read_records(*counted, low - file.first, high - file.first)
        return self._parser.parse(records, lambda place: self._where(start + place))

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        if len(leaves) == len(self._leaves):
            return self, leaves
        names, types = zip(*((self._names[i], self._leaves[i]) for i in leaves), strict=True)
        return TFRecordSource(self._files, self._marks, names, types), leaves

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        return f"{self._where(index[0])}, feature {self._names[leaf]!r}"

    def identity(self) -> tuple[Any, list[str]]:
        return spec_of(self) | {"files": None}, self._paths

    def _where(self, member: int) -> str:
        """The name of a member in messages."""
        (file,) = blocks_of(self._ends, member, member + 1)
        return f"{self._files[file.number][0].path}, record {member - file.first}"


class TFRecordStream(_Examples, FileStream):
    """Records of files, each of which is a piece; see `from_tfrecord`."""

    def __init__(
        self,
        files: tuple[DataFile, ...],
        names: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
    ) -> None:
        """Use `from_tfrecord`, which checks; arguments as of `TFRecordSource`."""
        super().__init__([file.path for file in files], names, leaves, treedef)
        self._files = tuple(files)

    @property
    def pieces(self) -> int:
        return len(self._files)

    def chunks(self, piece: int) -> Iterator[Sequence[np.ndarray]]:
        file = self._files[piece]
        file.check()
        for number, records in stream_records(file):
            yield self._parser.parse(records, functools.partial(_record_of, file, number))
        # A file that was truncated meanwhile may end between two records, without an error.
        file.check()

    def where_in(self, piece: int, leaf: int, index: tuple[int, ...]) -> str:
        where = _record_of(self._files[piece], index[0], 0)
        return f"{where}, feature {self._names[leaf]!r}"


def from_tfrecord(paths: Any, features: Any = None) -> TFRecordSource | TFRecordStream:
    """A placed input from TFRecord files: a member is a `tf.train.Example`, as a dict of arrays.

        bj.from_tfrecord("data/train-*.tfrecord", {
            "image": jax.ShapeDtypeStruct((28, 28), "uint8"),
            "label": jax.ShapeDtypeStruct((), "int32"),
        })

    A `float_list` is read as float32, an `int64_list` as bool or as any integers that hold its
    values. Both have as many values as the shape. A `bytes_list` has one value: the bytes of an
    array of any dtype, in C order and little-endian, as returned by `tobytes()` of NumPy. All
    checksums are verified.

    Local files that are not compressed are indexed in this call and read by shards; the number of
    members is known. If any file is compressed (by gzip, bzip2 or xz) or at a URL, workers read all
    files from their beginning, each file in one worker, and count the members, as for every
    `beamjax.StreamSource`.

    Args:
      paths: a path, a pattern, a URL, or a list of these. The members are the records of the first
        file, then those of the second, and so on; the files of a pattern are in the order of their
        names.
      features: a dict from the names of requested features to `jax.ShapeDtypeStruct`. None takes
        all features of the first record: a list of one number is a scalar, one of several numbers
        a vector, and bytes are uint8.

    Returns:
      A `Source` of dictionaries whose keys are the names of the features; a `StreamSource` if a
      file is compressed or at a URL.

    Raises:
      SourceError: a file is missing or damaged, or the first record does not have these features.
      StructureError: `features` are no types.
      PlacementError: the files hold no record, and `features` is None.
    """
    files = [look(path) for path in find_files(paths, CALLER)]
    first, where = _first_record(files)
    if features is None:
        if first is None:
            raise PlacementError(
                f"{CALLER}: found no record in {where}, and so no features; give them as the "
                "argument `features`."
            )
        features = infer_features(first, where)
    leaves, treedef = feature_leaves(features, CALLER)
    names = sorted(features)
    if first is not None:
        ExampleParser(names, leaves).parse([first], lambda _: where)
    if any(is_url(file.path) or compression_of(file.path) for file in files):
        return TFRecordStream(tuple(files), tuple(names), tuple(leaves), treedef)
    apart = max(MARK_BYTES, sum(file.nbytes for file in files) // MAX_MARKS)
    counts, marks = zip(*[_indexed(file, apart) for file in files], strict=True)
    counted = tuple(zip(files, counts, strict=True))
    return TFRecordSource(counted, tuple(marks), tuple(names), tuple(leaves), treedef)


def _record_of(file: DataFile, first: int, place: int) -> str:
    return f"{file.path}, record {first + place}"


def _first_record(files: Sequence[DataFile]) -> tuple[bytes | None, str]:
    """The first record of all files, if there is one, and its place for messages."""
    for file in files:
        for _, records in stream_records(file, HEADER_BYTES):
            return records[0], f"{file.path}, record 0"
    return None, first_of([file.path for file in files])


def _indexed(file: DataFile, apart: int) -> tuple[int, tuple[Mark, ...]]:
    """Counts the records of a file, and marks some that are at least `apart` bytes apart."""
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
        positions = block_offsets(file, start, at, stop)
        if len(positions) != after - at + 1:
            raise SourceError(
                f"{file.path}: found {len(positions) - 1} records from record {at} on, expected "
                f"{after - at}; the source was made from another file."
            )
        offsets.append(positions[:-1])
        reached, number = after, number + 1
    begins = np.concatenate([*offsets, positions[-1:]])[first - begin : last - begin + 1].tolist()
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
        raise ValueError(
            f"found marks beyond the end of the file, at {count} records or {file.nbytes} bytes"
        )
