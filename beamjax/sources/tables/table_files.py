"""What each format of tables defines: the batches of rows in a file, and how one is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import DataFile
from beamjax.sources.source_base import MAX_VALUES, Count
from beamjax.sources.tables.arrow_types import check_columns


@dataclasses.dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table."""

    file: DataFile
    rows: tuple[Count, ...]  # of each batch: row group, record batch, stripe or block
    starts: tuple[Count, ...] = ()  # of each batch in bytes, in formats that do not say it
    # The columns that names of folders hold, and their values as text; None for missing ones.
    folders: Mapping[str, str | None] = dataclasses.field(default_factory=dict)


class RowRange(NamedTuple):
    """Rows of a batch."""

    start: int
    length: int
    step: int  # rows of each piece in which the batch is read; its last piece may be shorter


class Format(Protocol):
    """A format of files."""

    batch_kind: str
    """The name of a batch of rows in messages, such as "row group"."""
    endings: tuple[str, ...]
    """Endings of the files that are read in a folder."""

    def head(self, path: str) -> tuple[TableFile, Any]:
        """The file and the schema of its columns."""

    def table(self, file: TableFile, number: int, types: Mapping[str, str], rows: RowRange) -> Any:
        """Columns of a batch, as a Table or a RecordBatch of Arrow, by their names and types."""

    def most_rows(self, nbytes: int) -> int:
        """Most rows of a piece, for rows of so many bytes. Batches of twice as many are cut."""
        return MAX_VALUES

    def is_view(self, file: DataFile) -> bool:
        """Whether arrays of a file are views of its map, which need no cache."""
        return False

    def common(self, schemas: Sequence[Any]) -> Sequence[Any]:
        """The schemas of files, with types on which they agree where a format only infers types."""
        return schemas


def check_unchanged(
    file: TableFile,
    kind: str,
    number: int,
    rows: Sequence[int],
    schema: Any,
    columns: Sequence[str],
) -> None:
    """Raises SourceError if the columns of a file or the rows of a batch of it have changed."""
    # The other batches are checked when they are read: a file may have very many.
    path, expected = file.file.path, file.rows
    if len(rows) != len(expected) or rows[number] != expected[number]:
        differ = f"{len(rows)} {kind}s, expected {len(expected)}"
        if len(rows) == len(expected):
            differ = f"{rows[number]} rows in {kind} {number}, expected {expected[number]}"
        raise SourceError(
            f"{path}: found {differ}; the file was changed after the source was made from it."
        )
    check_columns(schema, columns, path)
