"""Placed inputs from files of Parquet: a row a member.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from beamjax.shared_cache import SharedCache
from beamjax.sources.arrow_columns import arrow_readable
from beamjax.sources.data_files import DataFile, is_url, look, open_file
from beamjax.sources.table_source import TableFile, TableSource, from_tables


class ParquetSource(TableSource, kind="parquet"):
    """Rows of Parquet files, decoded by row groups; see `from_parquet`."""

    batch_kind = "row group"
    endings = (".parquet", ".pq")

    @classmethod
    def _head(cls, path: str) -> tuple[TableFile, Any]:
        file = look(path)
        footer = _footer(file)
        return TableFile(file, footer.rows), footer.schema

    @classmethod
    def _table(cls, file: TableFile, number: int, columns: Sequence[str], first: bool) -> Any:
        file.file.check()
        footer = _footer(file.file)
        cls._check(file, footer.rows, footer.schema, columns)
        with _opened(file.file, footer.metadata, f"row group {number} of ") as parquet:
            if not first:
                return parquet.read_row_group(number, columns=list(columns))
            return next(parquet.iter_batches(1, row_groups=[number], columns=list(columns)))


@contextlib.contextmanager
def _opened(file: DataFile, metadata: Any = None, part: str = "") -> Iterator[Any]:
    """A file, opened for one thread."""
    import pyarrow.parquet as parquet

    with contextlib.ExitStack() as stack:
        stack.enter_context(arrow_readable(file.path, f"{part}a file of Parquet"))
        source: Any = file.path
        if is_url(file.path):
            source = stack.enter_context(contextlib.closing(open_file(file.path)))
        # At URLs ranges of several columns are read together: each costs a round trip.
        opened = parquet.ParquetFile(source, metadata=metadata, pre_buffer=is_url(file.path))
        yield stack.enter_context(opened)


@dataclasses.dataclass(frozen=True)
class _Footer:
    """What a file says of itself: Parquet's metadata, the rows of its row groups, its columns."""

    metadata: Any
    rows: tuple[int, ...]
    schema: Any


_FOOTERS: SharedCache[_Footer] = SharedCache(2**26, lambda footer: footer.metadata.serialized_size)
"""Of the files that this process reads, up to 64 MiB as they are in the files."""


def _footer(file: DataFile) -> _Footer:
    def read() -> _Footer:
        with _opened(file) as parquet:
            metadata = parquet.metadata
            rows = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return _Footer(metadata, tuple(rows), parquet.schema_arrow)

    return _FOOTERS.get(file, read)


def from_parquet(paths: Any, columns: Any = None) -> ParquetSource:
    """A placed input from files of Parquet, whose rows are the members.

    A member is a dictionary of the columns: numbers and bools are arrays of shape (), lists of one
    length (nested ones too) and tensors of a fixed shape arrays of theirs, fixed-size binary uint8.
    Workers read the row groups of their members, of these only the columns that were chosen, and
    decode each once a process while there is room for it (half a GiB). A row group is decoded
    whole: one should have a few to a hundred MB of the columns that are read. The launcher reads
    the footers, and the first row of columns of lists.

    Args:
      paths: a path, a pattern such as "data/part-*.parquet", a folder, whose files that end in
        .parquet or .pq are taken, or a URL that Beam's FileSystems knows (of a folder with a `/` at
        its end); or a list of these. The members are in the order of the files, those of a pattern
        or a folder in the order of their names.
      columns: a list of names; None for all. A single name instead of a list gives that column's
        array itself instead of a dictionary.

    Raises:
      SourceError: a file is missing, is no file of Parquet, has not the columns of the first one,
        or they are of another type. When it is read: a row is null or has a list of another
        length, or the file has changed.
      StructureError: a column has other than numbers, such as strings or times.
      PlacementError: there are no rows.
    """
    return from_tables(ParquetSource, paths, columns, "from_parquet")
