"""Placed inputs from files of Parquet: a row a member.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
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
"""Bytes of decoded members in a piece. Row groups of more than twice as many are cut in pieces."""
BATCH_BYTES = 2**22
"""Bytes of a row group that are decoded at once: Arrow needs several times as much memory."""
_KEPT_PIECES = 3


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
            batch = rows.length * BATCH_BYTES // max(_row_group_bytes(footer, number, columns), 1)
        if is_url(file.file.path) or batch >= rows.length:
            with _opened(file.file, footer.metadata, part) as parquet:
                return parquet.read_row_group(number, columns=list(columns))
        with _opened(file.file, footer.metadata, part, 1 << 20) as parquet:
            batches = parquet.iter_batches(max(batch, 1), [number], list(columns))
            return _table_of(batches)


def _row_group_bytes(footer: _Footer, number: int, columns: Sequence[str]) -> int:
    """Bytes of columns of a row group, unpacked."""
    group, requested = footer.metadata.row_group(number), set(columns)
    chunks = map(group.column, range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if chunk.path_in_schema.split(".")[0] in requested or chunk.path_in_schema in requested
    )


def _table_of(batches: Iterable[Any]) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches(batches)


class _Cursor:
    """A row group that is too big to be decoded whole: pieces of so many rows, in their order.

    Parquet is decoded from the beginning of a row group only. The last pieces are kept, for threads
    that are not as far; a request for an earlier one decodes all anew.
    """

    def __init__(self, file: DataFile, number: int, columns: Sequence[str], rows: int) -> None:
        self._file = file
        self._where = number, list(columns), rows
        self._lock = threading.Lock()
        self._opened = contextlib.ExitStack()
        weakref.finalize(self, self._opened.close)
        self._batches: Iterator[Any] = iter(())
        self._last: dict[int, Any] = {}
        self._next = -1

    def piece(self, index: int) -> Any:
        """One of the pieces, as a Table."""
        with self._lock:
            if index in self._last:
                return self._last[index]
            if not 0 <= self._next <= index:
                self._restart()
            while self._next <= index:
                self._last[self._next] = self._decoded()
                self._last.pop(self._next - _KEPT_PIECES, None)
                self._next += 1
            return self._last[index]

    def _restart(self) -> None:
        self._opened.close()
        self._last.clear()
        number, columns, rows = self._where
        part = f"row group {number} of "
        parquet = self._opened.enter_context(_opened(self._file, part=part, buffer_size=1 << 20))
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
"""Row groups that are read by pieces at the same time."""


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
        # At URLs ranges of several columns are read together: each costs a round trip.
        whole = is_url(file.path) and not buffer_size
        opened = parquet.ParquetFile(
            source, metadata=metadata, pre_buffer=whole, buffer_size=buffer_size
        )
        yield stack.enter_context(opened)


@dataclasses.dataclass(frozen=True)
class _Footer:
    """The footer of a file: Parquet's metadata, the rows of its row groups, its columns."""

    metadata: Any
    rows: tuple[int, ...]
    schema: Any


_FOOTERS: SharedCache[_Footer] = SharedCache(2**26, lambda footer: footer.metadata.serialized_size)
"""Footers of the files that this process reads, up to 64 MiB as serialized."""


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
    """A placed input from files of Parquet, whose rows are the members.

    A member is a dictionary of the columns: numbers and bools are arrays of shape (), lists of one
    length (nested ones too) and tensors of a fixed shape arrays of theirs, fixed-size binary uint8.
    Workers read the row groups of their members, of these only the columns that were chosen, and
    decode each once a pass, a few MB at a time. Those that rounds of a loop read again and again
    are kept while there is room for them (half a GiB, see `Options.memory`). A row group should
    have a few to a hundred MB of the columns that are read: it is decoded whole, and of more than
    128 MiB by pieces, from its beginning, which is fast where members are read in their order only.
    The launcher reads the footers, and the first row of columns of lists.

    Args:
      paths: a path, a pattern such as "data/part-*.parquet", a folder, whose files that end in
        .parquet or .pq are taken, or a URL that Beam's FileSystems knows (of a folder with a `/` at
        its end); or a list of these. The members are in the order of the files, those of a pattern
        or a folder in the order of their names.
      columns: a list of names; None for all. A single name instead of a list gives that column's
        array itself instead of a dictionary.
      text_bytes: reads texts, in UTF-8, and bytes of any length as uint8[text_bytes] with zeros
        after them; None refuses such columns.
      buckets: pads the lists of columns whose rows have lists of any length: ascending lengths, of
        which the last one is at least the longest. The member has a leaf "mask" besides, True for
        items; those of all such columns of a row are as many. See `from_ragged`.
      fill_null: a number that takes the place of missing ones (null), such as 0 or nan; None
        refuses these. Missing lists and texts are refused in any case.
      times: True reads times, dates and durations as integers, in the unit that the column has:
        a timestamp in ns as int64 nanoseconds since 1970. Most need `jax_enable_x64`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name.

    Raises:
      SourceError: a file is missing, is no file of Parquet, has not the columns of the first one,
        or they are of another type. When it is read: a row is null or has a list of another
        length, or the file has changed.
      StructureError: a column has other than numbers, such as times without `times`, or texts
        without `text_bytes`.
      PlacementError: there are no rows.
    """
    conversion = Conversion(text_bytes, buckets, fill_null, times)
    return from_tables(ParquetSource, paths, columns, conversion, "from_parquet")
