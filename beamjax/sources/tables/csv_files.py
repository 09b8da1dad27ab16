"""Files of CSV, by blocks of text that end with a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import compression, look, open_file
from beamjax.sources.tables.arrow_columns import arrow_readable, checked_rows
from beamjax.sources.tables.table_files import Format, RowRange, TableFile
from beamjax.storage.shared_cache import SharedCache

BLOCK_BYTES = 1 << 23
"""Bytes of a block, approximately."""
_EXPECTED = "a file of CSV with a line of names and lines of as many values"


class CsvFormat(Format):
    """Blocks of lines. The types of columns are inferred."""

    batch_kind = "block"
    endings = (".csv", ".tsv")

    def head(self, path: str) -> tuple[TableFile, Any]:
        # Parses the whole file, to count rows and to infer types from all of them.
        if compression(path):
            raise SourceError(
                f"{path}: found a compressed file, which can be read only from its beginning; "
                "expected one that is not compressed. Read it with from_chunks, or decompress it."
            )
        file = look(path)
        with arrow_readable(path, _EXPECTED), open_file(path) as opened:
            rows, starts, schemas = [], [], []
            names: Sequence[str] | None = None
            for start, text in _blocks(opened):
                table = _parsed(text, path, names)
                names = table.schema.names
                rows.append(len(table))
                starts.append(start)
                schemas.append(table.schema)
            if not schemas:
                raise ValueError("found an empty file")
            schema = _common(schemas)
            return TableFile(file, checked_rows(rows), tuple(starts)), schema

    def common(self, schemas: Sequence[Any]) -> Sequence[Any]:
        if any(schema.names != schemas[0].names for schema in schemas):
            return schemas  # is an error, or the user chooses other columns
        return [_common(schemas)] * len(schemas)

    def table(self, file: TableFile, number: int, types: Mapping[str, str], rows: RowRange) -> Any:
        path = file.file.path
        with arrow_readable(path, f"block {number} of {_EXPECTED}"), open_file(path) as opened:
            names = _NAMES.get(file.file, lambda: _header(opened, path))
            stop = [*file.starts, file.file.nbytes][number + 1]
            opened.seek(file.starts[number])
            text = opened.read(stop - file.starts[number])
            return _parsed(text, path, names if number else None, types)


_NAMES: SharedCache[Sequence[str]] = SharedCache(1 << 12, lambda _: 1)
"""The names of the columns of files."""


def _header(opened: BinaryIO, path: str) -> Sequence[str]:
    _, text = next(_blocks(opened))
    names: Sequence[str] = _parsed(text, path).schema.names
    return names


def _blocks(opened: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Blocks of whole lines, and where they begin."""
    start, rest = 0, b""
    while data := opened.read(BLOCK_BYTES):
        end = data.rfind(b"\n") + 1
        if not end:
            rest += data
            continue
        yield start, rest + data[:end]
        start += len(rest) + end
        rest = data[end:]
    if rest:
        yield start, rest


def _parsed(
    text: bytes,
    path: str,
    names: Sequence[str] | None = None,
    types: Mapping[str, str] | None = None,
) -> Any:
    """A block as a Table, the first one with the names in its first line; infers missing types."""
    import pyarrow as pa
    from pyarrow import csv

    convert = csv.ConvertOptions()
    if types is not None:
        kinds = {name: _type(kind) for name, kind in types.items()}
        convert = csv.ConvertOptions(include_columns=list(kinds), column_types=kinds)
    return csv.read_csv(
        pa.BufferReader(text),
        # One block: pyarrow infers types from its first block.
        csv.ReadOptions(column_names=names, block_size=len(text) + 1, use_threads=False),
        csv.ParseOptions(delimiter="\t" if path.endswith(".tsv") else ","),
        convert,
    )


def _common(schemas: Sequence[Any]) -> Any:
    """A schema with types that hold the values of all blocks; texts where there is no other."""
    import pyarrow as pa

    columns = zip(*(schema.types for schema in schemas), strict=True)
    return pa.schema(
        [(name, _widest(kinds)) for name, kinds in zip(schemas[0].names, columns, strict=True)]
    )


def _widest(kinds: Sequence[Any]) -> Any:
    import pyarrow as pa

    distinct = dict.fromkeys(kind for kind in kinds if not pa.types.is_null(kind))
    if len(distinct) < 2:
        return next(iter(distinct), pa.null())
    if distinct.keys() == {pa.int64(), pa.float64()}:
        return pa.float64()
    if distinct.keys() == {pa.timestamp("s"), pa.timestamp("ns")}:
        return pa.timestamp("ns")
    return pa.string()


def _type(text: str) -> Any:
    """The type that `str` of it stands for."""
    import pyarrow as pa

    if text.startswith("timestamp[") and text.endswith(", tz=UTC]"):
        return pa.timestamp(text.removeprefix("timestamp[").partition(",")[0], "UTC")
    return pa.type_for_alias(text)
