"""Files of Parquet, by row groups."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import DataFile, is_url, look, open_file
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows, checked_schema
from beamjax.sources.tables.arrow_types import column_in, column_type
from beamjax.sources.tables.table_files import Format, RowRange, TableFile, check_unchanged
from beamjax.storage.shared_cache import VALUE_BYTES, SharedCache

PIECE_BYTES = 2**26
"""Bytes of decoded members in a piece. A row group of more than twice as many is read in pieces."""
BATCH_BYTES = 2**22
"""Bytes of a row group that are decoded at a time: Arrow needs several times as much memory."""
_CACHED_PIECES = 3
"""Latest pieces of a row group that stay in memory, for threads that are behind the others."""
_CHECKED_ROWS = 1 << 16
"""Rows of a column that are decoded at a time to check them."""
_BUFFER_BYTES = 1 << 20
"""Bytes that are read from a column at a time, if a row group is not read as a whole."""
_SMALL_BYTES = 1 << 16
"""Bytes of a local file that is read at once: as many as Arrow reads to find the footer."""


class ParquetFormat(Format):
    """Row groups. Those of more than twice `PIECE_BYTES` are read in pieces."""

    batch_kind = "row group"
    endings = (".parquet", ".pq")

    def head(self, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        footer = _footer(file)
        return TableFile(file, footer.rows), footer.schema

    def most_rows(self, nbytes: int) -> int:
        return max(PIECE_BYTES // max(nbytes, 1), 1)

    def table(self, file: TableFile, number: int, types: Mapping[str, str], rows: RowRange) -> Any:
        columns = list(types)
        try:
            with _with_footer(file.file) as (footer, parquet):
                check_unchanged(file, self.batch_kind, number, footer.rows, footer.schema, columns)
                return _rows_of(file, footer, parquet, number, columns, rows)
        except SourceError as error:  # Arrow does not say in which column.
            bad = [name for name in columns if not _is_readable(file.file, number, name)]
            if not bad or len(bad) == len(columns) > 1:
                raise
            names = ", ".join(map(repr, bad[:20]))
            raise SourceError(f"{error} Of the columns, {names} can't be read.") from error


def _rows_of(
    file: TableFile,
    footer: _Footer,
    opened: Any,  # the file if it is open already, or None
    number: int,
    columns: Sequence[str],
    rows: RowRange,
) -> Any:
    """Columns of a row group; see `Format.table`."""
    if rows.length < file.rows[number]:
        key = file.file, number, tuple(columns), rows.step
        cursor = _CURSORS.get(key, lambda: _Cursor(*key))
        return cursor.piece(rows.start // rows.step)
    part = f"row group {number} of "
    _check_times(file.file, footer, number, columns)
    # The rows that make about `BATCH_BYTES`. Metadata would say the bytes of each column, but
    # asking pyarrow for those of an encrypted column aborts the process.
    batch = max(rows.step * BATCH_BYTES // PIECE_BYTES, 1)
    if is_url(file.file.path) or batch >= rows.length:
        with contextlib.ExitStack() as stack:
            if opened is None:
                opened = stack.enter_context(_opened(file.file, footer.metadata))
            stack.enter_context(arrow_readable(file.file.path, f"{part}a file of Parquet"))
            threads = not _is_small(file.file)  # They take longer to start than to decode it.
            return opened.read_row_group(number, columns=list(columns), use_threads=threads)
    with _opened(file.file, footer.metadata, part, _BUFFER_BYTES) as parquet:
        import pyarrow as pa

        return pa.Table.from_batches(parquet.iter_batches(batch, [number], list(columns)))


def _is_readable(file: DataFile, number: int, column: str) -> bool:
    """Whether a column of a row group can be read alone."""
    try:
        with _opened(file, part=f"row group {number} of ", buffer_size=_BUFFER_BYTES) as parquet:
            for _ in parquet.iter_batches(_CHECKED_ROWS, [number], [column]):
                pass
    except SourceError:
        return False
    return True


def _check_times(file: DataFile, footer: _Footer, number: int, columns: Sequence[str]) -> None:
    """Raises SourceError for times of INT96 that pyarrow would wrap around to int64 nanoseconds."""
    import pyarrow as pa

    stored = [name for name in columns if name in footer.int96]
    if not stored:
        return
    part = f"row group {number} of "
    with _opened(file, part=part, buffer_size=_BUFFER_BYTES, int96_unit="us") as parquet:
        for batch in parquet.iter_batches(_CHECKED_ROWS, [number], stored):
            for name in stored:
                try:
                    column_in(batch, name).cast(column_type(footer.schema, name, file.path))
                except pa.ArrowInvalid as error:
                    raise SourceError(
                        f"{file.path}: column {name!r}, row group {number}: found a time of INT96 "
                        f"outside of the years 1677 to 2262, which int64 nanoseconds do not hold "
                        f"({error}); write the column as timestamps in microseconds."
                    ) from error


class _Cursor:
    """A row group that is too large to be decoded as a whole, and is read in pieces in order."""

    # Parquet can be decoded only from the beginning of a row group. The latest pieces stay in
    # memory, for threads that are behind. A request for an earlier piece starts at the beginning.

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
        _check_times(self._file, _footer(self._file), number, columns)
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
    file: DataFile,
    metadata: Any = None,
    part: str = "",
    buffer_size: int = 0,
    int96_unit: str | None = None,
) -> Iterator[Any]:
    """A file, opened for one thread."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    with contextlib.ExitStack() as stack:
        stack.enter_context(arrow_readable(file.path, f"{part}a file of Parquet"))
        source: Any = file.path
        if is_url(file.path):
            source = stack.enter_context(contextlib.closing(open_file(file.path)))
        elif _is_small(file):
            with open(file.path, "rb", buffering=0) as small:
                source = pa.BufferReader(small.read())
        # At URLs, the ranges of all columns are read together, since each read is a round trip.
        whole = is_url(file.path) and not buffer_size
        # Checksums are optional. Spark writes them, and comparing them takes 0.3 ms per MB.
        opened = parquet.ParquetFile(
            source, metadata=metadata, pre_buffer=whole, buffer_size=buffer_size,
            page_checksum_verification=True, coerce_int96_timestamp_unit=int96_unit,
        )  # fmt: skip
        yield stack.enter_context(opened)


def _is_small(file: DataFile) -> bool:
    return file.nbytes <= _SMALL_BYTES and not is_url(file.path)


@dataclasses.dataclass(frozen=True)
class _Footer:
    """The footer of a file."""

    metadata: Any
    rows: tuple[int, ...]  # of each row group
    schema: Any
    int96: frozenset[str]  # the columns with times of the type INT96


def _int96_columns(schema: Any) -> frozenset[str]:
    """The columns with times of INT96, also in lists and structs."""
    leaves = map(schema.column, range(len(schema)))
    paths = [leaf.path.split(".") for leaf in leaves if leaf.physical_type == "INT96"]
    return frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))


FOOTER_RATIO = 12
"""Bytes of memory for each byte of a serialized footer, at most."""
_FOOTERS: SharedCache[_Footer] = SharedCache(
    2**27, lambda footer: FOOTER_RATIO * footer.metadata.serialized_size + VALUE_BYTES
)
"""Footers of the files that this process reads, up to 128 MiB."""


def _footer(file: DataFile) -> _Footer:
    with _with_footer(file) as (footer, _):
        return footer


@contextlib.contextmanager
def _with_footer(file: DataFile) -> Iterator[tuple[_Footer, Any]]:
    """The footer of a file, and the file if it had to be opened for its footer, else None."""
    # A pass over more files than the cache has footers opens each of them once.
    footer = _FOOTERS.find(file)
    if footer is not None:
        yield footer, None
        return
    with _opened(file) as parquet:
        metadata = parquet.metadata
        rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        schema = checked_schema(parquet.schema_arrow)
        footer = _Footer(metadata, checked_rows(rows), schema, _int96_columns(metadata.schema))
        # To read a small one again with its rows takes 10 us, and one takes 5 kB in the cache.
        if len(rows) > 1 or not _is_small(file):
            _FOOTERS.put(file, footer)
        yield footer, parquet
