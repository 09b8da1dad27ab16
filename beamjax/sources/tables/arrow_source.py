"""Placed inputs from files of Arrow (IPC files, also known as Feather): each row is a member.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from beamjax.sources.arrays.data_files import DataFile, is_url, look, open_file, readable
from beamjax.sources.block_source import Arrays, SourceBlock
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows, checked_schema
from beamjax.sources.tables.table_source import (
    Conversion,
    RowRange,
    TableFile,
    TableSource,
    from_tables,
)
from beamjax.storage.shared_cache import SharedCache

_EXPECTED = "a file of Arrow (IPC with a footer, or Feather of version 2)"


class ArrowSource(TableSource, kind="arrow"):
    """Rows of Arrow files, by record batches; see `from_arrow`."""

    batch_kind = "record batch"
    endings = (".arrow", ".feather", ".ipc")

    @classmethod
    def _head(cls, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        whole = _opened(file)
        # Only batches say how many rows they have. Of a file that is not mapped, read one column.
        first = whole if whole.mapped or not whole.schema.names else _opened(file, [0])
        rows = [len(first.batch(number)) for number in range(first.count)]
        with readable(file.path, _EXPECTED):
            return TableFile(file, checked_rows(rows)), whole.schema

    @classmethod
    def _table(cls, file: TableFile, number: int, columns: Sequence[str], rows: RowRange) -> Any:
        file.file.check()
        whole = _opened(file.file)
        # A different number of batches is an error of `_check`. That of rows shows when the batch
        # is decoded.
        found = file.rows if whole.count == len(file.rows) else (0,) * whole.count
        cls._check(file, found, whole.schema, columns)
        if whole.mapped:
            return whole.batch(number)
        requested = [whole.schema.get_field_index(name) for name in columns]
        return _opened(file.file, requested).batch(number)

    def _block(self, block: SourceBlock) -> Arrays:
        file = self._place(block)[0].file
        if not is_url(file.path):
            file.check()  # A memory map shows what is written to the file later.
            # Arrays of a mapped file are views, which need no cache.
            if _opened(file).mapped:
                return self._checked(block)
        return super()._block(block)


class _Reader:
    """An open file, mapped if it is local.

    Args:
      file: the file.
      fields: the numbers of the columns to read; all if empty.
    """

    def __init__(self, file: DataFile, fields: Sequence[int]) -> None:
        import pyarrow as pa

        self._file = file
        self._lock = threading.Lock()  # The first batch also reads dictionaries into the reader.
        with self._readable():
            if is_url(file.path):
                raw = open_file(file.path)
                weakref.finalize(self, raw.close)  # The cache may drop it while a thread reads.
                source = pa.PythonFile(raw, "r")
            else:
                source = pa.memory_map(file.path)
            options = pa.ipc.IpcReadOptions(included_fields=list(fields))
            self._reader = pa.ipc.open_file(source, options=options)
            self.schema = checked_schema(self._reader.schema)
            self.count: int = self._reader.num_record_batches
            self.mapped = not is_url(file.path) and not fields and self._is_mapped(source)
            """Whether batches are read without a copy, which choosing columns prevents."""

    def _is_mapped(self, source: Any) -> bool:
        """Whether the first buffer with data is in the map of the file, so not decompressed."""
        source.seek(0)
        whole = source.read_buffer()
        for number in range(self.count):
            batch = self._reader.get_batch(number)
            for index in range(batch.num_columns):
                try:
                    buffers = batch.column(index).buffers()
                except KeyError:  # pyarrow does not know the type; others may be read.
                    continue
                for buffer in buffers:
                    if buffer is not None and buffer.size:
                        return bool(0 <= buffer.address - whole.address < whole.size)
        return True

    def batch(self, number: int) -> Any:
        """A record batch."""
        with self._readable(f"record batch {number} of "), self._lock:
            return self._reader.get_batch(number)

    def _readable(self, part: str = "") -> contextlib.AbstractContextManager[None]:
        return arrow_readable(self._file.path, f"{part}{_EXPECTED}")


_READERS: SharedCache[_Reader] = SharedCache(64, lambda _: 1)
"""Open files, at most 64: reading a footer again takes longer than reading a small record batch."""


def _opened(file: DataFile, fields: Sequence[int] = ()) -> _Reader:
    return _READERS.get((file, tuple(fields)), lambda: _Reader(file, fields))


def from_arrow(
    paths: Any,
    columns: Any = None,
    *,
    text_bytes: int | None = None,
    buckets: Sequence[int] | None = None,
    fill_null: int | float | None = None,
    times: bool = False,
) -> ArrowSource:
    """A placed input from files of Arrow (IPC or Feather). Each row is a member.

    As `from_parquet`, with record batches instead of row groups. Local files are mapped. Numbers of
    files that are not compressed are read without a copy, so a file must not be written while it is
    read. The launcher reads the lengths of the record batches; in files that are compressed or at
    URLs, it has to read a column for that.

    Args:
      paths: as for `from_parquet`. The files in a folder are those that end in .arrow, .feather or
        .ipc.
      columns: as for `from_parquet`.
      text_bytes: as for `from_parquet`.
      buckets: as for `from_parquet`.
      fill_null: as for `from_parquet`.
      times: as for `from_parquet`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name.

    Raises:
      SourceError: as for `from_parquet`, and for streams of Arrow, which have no footer.
      StructureError: a column has elements other than numbers, such as times without `times`, or
        texts without `text_bytes`.
      PlacementError: there are no rows, and a column has lists of any length.
    """
    conversion = Conversion(text_bytes, buckets, fill_null, times)
    return from_tables(ArrowSource, paths, columns, conversion, "from_arrow")
