"""Placed inputs from files of Parquet: each row is a member.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from beamjax.sources.arrays.data_files import DataFile, is_url, look, open_file
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows, checked_schema
from beamjax.sources.tables.table_source import (
    Conversion,
    RowRange,
    TableFile,
    TableSource,
    from_tables,
)
from beamjax.storage.shared_cache import SharedCache

PIECE_BYTES = 2**26
"""Bytes of decoded members in a piece. A row group of more than twice as many is read in pieces."""
BATCH_BYTES = 2**22
"""Bytes of a row group that are decoded at a time: Arrow needs several times as much memory."""
_CACHED_PIECES = 3
"""Latest pieces of a row group that stay in memory, for threads that are behind the others."""
_BUFFER_BYTES = 1 << 20
"""Bytes that are read from a column at a time, if a row group is not read as a whole."""


class ParquetSource(TableSource, kind="parquet"):
    """Rows of Parquet files, decoded by row groups; see `from_parquet`."""

    batch_kind = "row group"
    endings = (".parquet", ".pq")

    @classmethod
    def _head(cls, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        footer = _footer(file)
        return TableFile(file, footer.rows), footer.schema

    def _most_rows(self) -> int:
        return max(PIECE_BYTES // max(sum(leaf.nbytes for leaf in self._leaves), 1), 1)

    @classmethod
    def _table(cls, file: TableFile, number: int, columns: Sequence[str], rows: RowRange) -> Any:
        file.file.check()
        footer = _footer(file.file)
        cls._check(file, footer.rows, footer.schema, columns)
        if rows.length < file.rows[number]:
            key = file.file, number, tuple(columns), rows.step
            cursor = _CURSORS.get(key, lambda: _Cursor(*key))
            return cursor.piece(rows.start // rows.step)
        part = f"row group {number} of "
        with arrow_readable(file.file.path, f"{part}a file of Parquet"):
            # The rows that make about `BATCH_BYTES`.
            batch = rows.length * BATCH_BYTES // max(_row_group_bytes(footer, number, columns), 1)
        if is_url(file.file.path) or batch >= rows.length:
            with _opened(file.file, footer.metadata, part) as parquet:
                return parquet.read_row_group(number, columns=list(columns))
        with _opened(file.file, footer.metadata, part, _BUFFER_BYTES) as parquet:
            import pyarrow as pa

            batches = parquet.iter_batches(max(batch, 1), [number], list(columns))
            return pa.Table.from_batches(batches)


def _row_group_bytes(footer: _Footer, number: int, columns: Sequence[str]) -> int:
    """Bytes of columns of a row group, uncompressed."""
    group, requested = footer.metadata.row_group(number), set(columns)
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in requested or chunk.path_in_schema in requested
    )


class _Cursor:
    """A row group that is too large to be decoded as a whole, and is read in pieces in order.

    Parquet can be decoded only from the beginning of a row group. The latest pieces stay in memory,
    for threads that are behind. A request for an earlier piece starts again at the beginning.

    Args:
      file: the file.
      number: the number of the row group.
      columns: the names of the columns.
      rows: the number of rows of a piece.
    """

    def __init__(self, file: DataFile, number: int, columns: Sequence[str], rows: int) -> None:
        self._file = file
        self._where = number, list(columns), rows
        self._lock = threading.Lock()  # One thread decodes; others wait for its pieces.
        self._opened = contextlib.ExitStack()
        weakref.finalize(self, self._opened.close)
        self._batches: Iterator[Any] = iter(())
        self._last: dict[int, Any] = {}
        self._next = -1  # The number of the next piece; -1 before the first is requested.

    def piece(self, index: int) -> Any:
        """One of the pieces, as a Table."""
        with self._lock:
            if index in self._last:
                return self._last[index]
            if not 0 <= self._next <= index:
                self._restart()
            while self._next <= index:
                self._last[self._next] = self._decoded()
                self._last.pop(self._next - _CACHED_PIECES, None)
                self._next += 1
            return self._last[index]

    def _restart(self) -> None:
        self._opened.close()
        self._last.clear()
        number, columns, rows = self._where
        part = f"row group {number} of "
        opened = _opened(self._file, part=part, buffer_size=_BUFFER_BYTES)
        parquet = self._opened.enter_context(opened)
        self._batches = parquet.iter_batches(rows, row_groups=[number], columns=columns)
        self._next = 0

    def _decoded(self) -> Any:
        import pyarrow as pa

        number, _, rows = self._where
        parts, count = [], 0
        with arrow_readable(self._file.path, f"row group {number} of a file of Parquet"):
            while count < rows and (part := next(self._batches, None)) is not None:
                parts.append(part)
                count += len(part)
            return pa.Table.from_batches(parts)


_CURSORS: SharedCache[_Cursor] = SharedCache(4, lambda _: 1)
"""Row groups that are being read in pieces, at most 4."""


@contextlib.contextmanager
def _opened(
    file: DataFile, metadata: Any = None, part: str = "", buffer_size: int = 0
) -> Iterator[Any]:
    """A file, opened for one thread."""
    import pyarrow.parquet as parquet

    with contextlib.ExitStack() as stack:
        stack.enter_context(arrow_readable(file.path, f"{part}a file of Parquet"))
        source: Any = file.path
        if is_url(file.path):
            source = stack.enter_context(contextlib.closing(open_file(file.path)))
        # At URLs, the ranges of all columns are read together, since each read is a round trip.
        whole = is_url(file.path) and not buffer_size
        # Checksums are optional. Spark writes them, and comparing them takes 0.3 ms per MB.
        opened = parquet.ParquetFile(
            source, metadata=metadata, pre_buffer=whole, buffer_size=buffer_size,
            page_checksum_verification=True,
        )  # fmt: skip
        yield stack.enter_context(opened)


@dataclasses.dataclass(frozen=True)
class _Footer:
    """The footer of a file: Parquet's metadata, the rows of each row group, and the schema."""

    metadata: Any
    rows: tuple[int, ...]
    schema: Any


_FOOTERS: SharedCache[_Footer] = SharedCache(2**26, lambda footer: footer.metadata.serialized_size)
"""Footers of the files that this process reads, up to 64 MiB in serialized form."""


def _footer(file: DataFile) -> _Footer:
    def read() -> _Footer:
        with _opened(file) as parquet:
            metadata = parquet.metadata
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            return _Footer(metadata, checked_rows(rows), checked_schema(parquet.schema_arrow))

    return _FOOTERS.get(file, read)


def from_parquet(
    paths: Any,
    columns: Any = None,
    *,
    text_bytes: int | None = None,
    buckets: Sequence[int] | None = None,
    fill_null: int | float | None = None,
    times: bool = False,
) -> ParquetSource:
    """A placed input from files of Parquet. Each row is a member.

    A member is a dictionary of the columns. Numbers and bools are arrays of shape (). Lists of one
    length, also nested ones, and tensors of a fixed shape are arrays of that shape. Fixed-size
    binary is uint8. Workers read the chosen columns of the row groups of their members, and decode
    each row group once per pass, a few MB at a time. Row groups that the rounds of a loop read
    repeatedly are cached up to a limit (half a GiB, see `Options.memory`). A row group should have
    a few to a hundred MB in the columns that are read. It is decoded as a whole; one of more than
    128 MiB is decoded in pieces from its beginning, which is fast only if members are read in
    order. The launcher reads the footers, and the first row of columns of lists.

    Args:
      paths: a path, a pattern such as "data/part-*.parquet", a folder, which stands for its files
        that end in .parquet or .pq, or a URL that Beam's FileSystems knows (of a folder with a `/`
        at its end); or a list of these. The members are in the order of the files. Files of a
        pattern or a folder are in the order of their names.
      columns: a list of names; None for all. A single name instead of a list gives that column's
        array itself instead of a dictionary.
      text_bytes: reads texts, in UTF-8, and bytes of any length as uint8[text_bytes] with zeros
        after them; None refuses such columns.
      buckets: lengths to which lists of any length are padded, ascending; the last one is at least
        the length of the longest list. A member then has one more leaf "mask", which is True for
        items. All such columns must have lists of the same length in a row. See `from_ragged`.
      fill_null: a number that replaces missing ones (null), such as 0 or nan; None refuses missing
        numbers. Missing lists and texts are always refused.
      times: True reads times, dates and durations as integers, in the unit of the column: a
        timestamp in ns as int64 nanoseconds since 1970. Most need `jax_enable_x64`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name.

    Raises:
      SourceError: a file is missing, is no file of Parquet, or does not have the columns of the
        first file with the same types. When the source is read: a row is null or has a list of
        another length, or the file has changed.
      StructureError: a column has elements other than numbers, such as times without `times`, or
        texts without `text_bytes`.
      PlacementError: there are no rows.
    """
    conversion = Conversion(text_bytes, buckets, fill_null, times)
    return from_tables(ParquetSource, paths, columns, conversion, "from_parquet")
