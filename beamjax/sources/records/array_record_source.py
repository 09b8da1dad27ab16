"""Placed inputs from ArrayRecord files of `tf.train.Example`, by the package `array_record`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from beamjax.errors import PlacementError, SourceError
from beamjax.sources.arrays.data_files import DataFile, find_files, is_url, look
from beamjax.sources.records.record_source import Counted, RecordSource
from beamjax.sources.records.tf_example import ExampleParser, feature_leaves, infer_features
from beamjax.storage.shared_cache import SharedCache

CALLER = "from_array_record"


class ArrayRecordSource(RecordSource, kind="array-record"):
    """Records of local files; see `from_array_record`."""

    def records(self, number: int, first: int, last: int) -> list[bytes]:
        return _read_records(self._files[number], first, last)


def from_array_record(paths: Any, features: Any = None) -> ArrayRecordSource:
    """A placed input from ArrayRecord files: a member is a `tf.train.Example`, as a dict of arrays.

    It needs the package `array_record` (`pip install -e '.[array-record]'`), on the workers too.
    For records of another kind, give `from_random_access` an object that reads and decodes them.

    Args:
      paths: a path, a pattern, or a list of these, of files that the launcher and all workers see
        under the same path. The members are the records of the first file, then those of the
        second, and so on.
      features: as for `from_tfrecord`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the features.

    Raises:
      SourceError: the package is not installed, a file is missing or is no file of ArrayRecord, or
        the first record does not have these features.
      StructureError: `features` are no types.
      PlacementError: the files hold no record.
    """
    files = [(file, _count(file)) for file in map(look, _local(find_files(paths, CALLER)))]
    filled = next((counted for counted in files if counted[1]), None)
    if filled is None:
        raise PlacementError(f"{CALLER}: found no record in {files[0][0].path}, expected one.")
    (first,) = _read_records(filled, 0, 1)
    where = f"{filled[0].path}, record 0"
    if features is None:
        features = infer_features(first, where)
    leaves, treedef = feature_leaves(features, CALLER)
    names = sorted(features)
    ExampleParser(names, leaves).parse([first], lambda _: where)
    return ArrayRecordSource(tuple(files), tuple(names), tuple(leaves), treedef)


def _local(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        if is_url(path):
            raise SourceError(
                f"{CALLER}: found the URL {path}, expected files of this machine, which alone the "
                "package array_record reads; copy or mount them where all workers see them."
            )
    return paths


def _count(file: DataFile) -> int:
    return int(_opened(file).num_records())


def _read_records(counted: Counted, first: int, last: int) -> list[bytes]:
    file, count = counted
    file.check()
    reader = _opened(file)
    if (found := reader.num_records()) != count:
        raise SourceError(
            f"{file.path}: found {found} records, expected {count}; the source was made from "
            "another file."
        )
    try:
        return list(reader.read(first, last))
    except Exception as error:  # of any kind: the package does not document what it raises
        raise SourceError(
            f"{file.path}, records {first} to {last - 1}: cannot read them ({error}); the file is "
            "damaged."
        ) from error


_READERS: SharedCache[Any] = SharedCache(64, lambda _: 1)
"""Open files, at most 64; each has its index in memory."""


def _opened(file: DataFile) -> Any:
    """A reader, which threads may share: the calls here do not change its state."""
    return _READERS.get(file, lambda: _reader(file))


def _reader(file: DataFile) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise SourceError(
            f"{file.path}: cannot import the package array_record ({error}); pip install "
            "-e '.[array-record]', here and on the workers."
        ) from error
    try:
        # For random access: no readahead, no threads of the reader.
        reader = array_record_module.ArrayRecordReader(
            file.path, "readahead_buffer_size:0,max_parallelism:0"
        )
        if reader.ok():
            return reader
        reason = "it is another file, or was cut off"
    except Exception as error:  # of any kind, as above
        reason = str(error)
    raise SourceError(
        f"{file.path}: found {file.nbytes} bytes, expected a file of ArrayRecord ({reason})."
    )
