"""Opens files of tables as sources: `from_parquet`, `from_arrow`, `from_csv`."""

from __future__ import annotations

import dataclasses
import time
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np

from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.arrays.data_files import find_files_in_folders, is_url
from beamjax.sources.source_base import MASK, LeafSpec, first_of
from beamjax.sources.tables.arrow_columns import Batch, known_shape
from beamjax.sources.tables.arrow_types import (
    Conversion,
    RowType,
    agree,
    chosen,
    column_in,
    column_names,
    column_type,
    row_type,
)
from beamjax.sources.tables.table_files import Format, RowRange, TableFile
from beamjax.sources.tables.table_source import FORMATS, MAX_LIST, Column, TableSource

_FOOTERS_AT_ONCE = 16
"""Threads that read footers: most of the time is spent waiting for URLs."""
_MOST_PATHS = 64
"""Files that a thread opens one after the other, at most."""
_LATE_SECONDS, _FILE_SECONDS = 0.2, 0.0005
"""One thread opens local files until it is late: it takes so long in all, and so long for each."""

_MISSING = "__HIVE_DEFAULT_PARTITION__"

Values = Mapping[str, str | None]
"""The value of each column in the folders of a file, as text; None for a missing one."""
Heads = Sequence[tuple[TableFile, Any]]
"""Files with their schemas."""


def from_parquet(
    paths: Any,
    columns: Any = None,
    *,
    text_bytes: int | None = None,
    buckets: Sequence[int] | None = None,
    fill_null: int | float | None = None,
    times: bool = False,
    decimals: str | None = None,
) -> TableSource:
    """A placed input from files of Parquet. Each row is a member.

    A member is a dictionary of the columns. Numbers and bools are arrays of shape (). Lists of one
    length, also nested ones, and tensors of a fixed shape are arrays of that shape. Fixed-size
    binary is uint8. A field of structs is a column of its own: "a.b" is the field b of the column
    a. So is each name in folders such as `year=2024/month=5` below the given folder or pattern
    (hive partitions).

    Workers read only the columns that the program uses, in the row groups of their members. They
    decode each row group once per pass, a few MB at a time. Row groups that the rounds of a loop
    read repeatedly are cached up to a limit (half a GiB, see `Options.memory`). A row group should
    have a few to a hundred MB in the columns that are read. It is decoded as a whole; one of more
    than 128 MiB is decoded in pieces from its beginning, which is fast only if members are read in
    order. The launcher reads the footers, and the first row of columns of lists.

    Args:
      paths: a path, a pattern such as "data/part-*.parquet", a folder, which stands for its files
        that end in .parquet or .pq, also in hive partitions, or a URL that fsspec knows (of a
        folder with a `/` at its end); or a list of these. The members are in the order of the
        files. Files of a pattern or a folder are in the order of their names.
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
        timestamp in ns as int64 nanoseconds since 1970. Most need `jax_enable_x64`. All files must
        have the same unit. Times of the old type INT96 are int64 nanoseconds.
      decimals: "float64" reads decimals as the nearest floats, "int64" as integers that count units
        of their last digit: 1.25 as 125. None refuses decimals.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name.

    Raises:
      SourceError: a file is missing, is no file of Parquet, or does not have the columns of the
        first file with the same types. When the source is read: a row is null or has a list of
        another length, a time of INT96 is outside of the years 1677 to 2262, a column is
        encrypted, or the file has changed.
      StructureError: a column has elements other than numbers, such as times without `times`, or
        texts without `text_bytes`.
      PlacementError: there are no rows, and a column has lists of any length.
    """
    conversion = Conversion(text_bytes, buckets, fill_null, times, decimals)
    return _from_files(paths, columns, conversion, "from_parquet", "parquet")


def from_arrow(
    paths: Any,
    columns: Any = None,
    *,
    text_bytes: int | None = None,
    buckets: Sequence[int] | None = None,
    fill_null: int | float | None = None,
    times: bool = False,
    decimals: str | None = None,
) -> TableSource:
    """A placed input from files of Arrow (IPC or Feather), or of ORC. Each row is a member.

    As `from_parquet`, with record batches instead of row groups. Local files are mapped. Numbers of
    files that are not compressed are read without a copy, so a file must not be written while it is
    read. The launcher reads the lengths of the record batches; in files that are compressed or at
    URLs, it has to read a column for that.

    Files that end in .orc are ORC, with stripes instead of row groups, each of which is decoded as
    a whole. The launcher reads a column to find out how many rows the stripes have.

    Args:
      paths: as for `from_parquet`, with files of one format. The files in a folder are those that
        end in .arrow, .feather, .ipc or .orc.
      columns: as for `from_parquet`.
      text_bytes: as for `from_parquet`.
      buckets: as for `from_parquet`.
      fill_null: as for `from_parquet`.
      times: as for `from_parquet`.
      decimals: as for `from_parquet`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name.

    Raises:
      SourceError: as for `from_parquet`, and for streams of Arrow, which have no footer.
      StructureError: a column has elements other than numbers, such as times without `times`, or
        texts without `text_bytes`.
      PlacementError: there are no rows, and a column has lists of any length.
    """
    conversion = Conversion(text_bytes, buckets, fill_null, times, decimals)
    return _from_files(paths, columns, conversion, "from_arrow", "arrow", "orc")


def from_csv(
    paths: Any,
    columns: Any = None,
    *,
    text_bytes: int | None = None,
    fill_null: int | float | None = None,
    times: bool = False,
) -> TableSource:
    """A placed input from files of CSV. Each line is a member.

    The first line of each file has the names of the columns. Values are separated by commas, in
    files that end in .tsv by tabs, and may be quoted, but not contain line breaks. The launcher
    parses all files to count lines and to infer the types of the columns, as pyarrow does. Workers
    parse the blocks of their members, of 8 MiB. Where many runs read the same files, convert them
    to Parquet.

    Args:
      paths: as for `from_parquet`. The files in a folder are those that end in .csv or .tsv.
      columns: as for `from_parquet`.
      text_bytes: as for `from_parquet`.
      fill_null: as for `from_parquet`. An empty value is missing.
      times: as for `from_parquet`.

    Returns:
      A `Source` of dictionaries whose keys are the names of the columns; of arrays if `columns` is
      a single name. Numbers are int64 or float64.

    Raises:
      SourceError: a file is missing, compressed, or no file of CSV, or does not have the columns of
        the first file. When the source is read: a value is missing, or the file has changed.
      StructureError: a column has elements other than numbers, such as times without `times`, or
        texts without `text_bytes`.
    """
    conversion = Conversion(text_bytes, None, fill_null, times)
    return _from_files(paths, columns, conversion, "from_csv", "csv")


def _from_files(
    paths: Any, columns: Any, conversion: Conversion, caller: str, *forms: str
) -> TableSource:
    """A source of files of one of some formats, which the ending of the first file chooses."""
    import jax

    conversion.check(caller)
    listed = find_files_in_folders(
        paths, caller, [e for form in forms for e in FORMATS[form].endings]
    )
    matching = (form for form in forms if listed[0][0].endswith(FORMATS[form].endings))
    form = next(matching, forms[0])
    reader = FORMATS[form]
    heads = _heads(reader, listed)
    first = heads[0][0].file.path
    names = chosen(heads[0][1], columns, first, caller)
    types = _row_types(heads, names, columns, conversion, caller)
    ragged: list[str] = []
    if conversion.buckets is not None:
        ragged = _padded_columns(types, conversion.buckets, first, caller)
    files = [file for file, _ in heads]
    shapes = _known_shapes(reader, files, types)
    stored = {}
    if form == "csv":
        stored = {name: str(column_type(heads[0][1], name, first)) for name in names}
    names = sorted([*names, MASK]) if ragged else names
    bare = isinstance(columns, str) and not ragged
    columns_read = []
    for name in names:
        path = "" if bare else f"[{name!r}]"
        leaf = LeafSpec(shapes[name], types[name].dtype, None, path, name in ragged)
        columns_read.append(Column(name, leaf, stored.get(name, "")))
    return TableSource(
        form, tuple(files), tuple(columns_read),
        jax.tree_util.tree_structure(0 if bare else dict.fromkeys(names, 0)),
        tuple(conversion.buckets or ()),
        None if conversion.fill_null is None else repr(conversion.fill_null),
    )  # fmt: skip


def _heads(reader: Format, listed: Sequence[tuple[str, str]]) -> Heads:
    """The files and their schemas, which include the columns in names of folders."""
    heads = list(_opened(reader, [path for path, _ in listed]))
    schemas = reader.common([schema for _, schema in heads])
    distinct = {id(schema): schema for schema in schemas}
    known = {name for schema in distinct.values() for name in schema.names}
    values = {folders: _folder_values(folders) for folders in dict.fromkeys(f for _, f in listed)}
    fields = _typed_fields(list(values.values()), known)
    if not fields:
        return [(file, schema) for (file, _), schema in zip(heads, schemas, strict=True)]
    names = [field.name for field in fields]
    texts = {folders: {name: of[name] for name in names} for folders, of in values.items()}
    joined = {key: _with_fields(schema, fields) for key, schema in distinct.items()}
    return [
        (dataclasses.replace(file, folders=texts[folders]), joined[id(schema)])
        for (file, _), schema, (_, folders) in zip(heads, schemas, listed, strict=True)
    ]


def _opened(reader: Format, paths: Sequence[str]) -> Iterator[tuple[TableFile, Any]]:
    """The files and their schemas; files in a row share equal ones, which are large."""
    last = None
    for file, schema in _heads_in_order(reader, paths):
        last = last if last is not None and last.equals(schema) else schema
        yield file, last


def _heads_in_order(reader: Format, paths: Sequence[str]) -> Iterator[tuple[TableFile, Any]]:
    # On fast disks, threads that open small files wait for Python's lock: they take three times
    # as long as one.
    begun, done = time.perf_counter(), 0
    while done < len(paths) and not is_url(paths[done]):
        if time.perf_counter() - begun > _LATE_SECONDS + _FILE_SECONDS * done:
            break
        yield reader.head(paths[done])
        done += 1
    size = min(max((len(paths) - done) // _FOOTERS_AT_ONCE // 4, 1), _MOST_PATHS)
    parts = [paths[start : start + size] for start in range(done, len(paths), size)]
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for heads in pool.map(lambda part: list(map(reader.head, part)), parts):
            yield from heads


def _with_fields(schema: Any, fields: Sequence[Any]) -> Any:
    for field in fields:
        schema = schema.append(field)
    return schema


def _padded_columns(
    types: dict[str, RowType], buckets: Sequence[int], file: str, caller: str
) -> list[str]:
    """Pads columns of lists in `types` to the last bucket; returns their names, with the mask."""
    lengths = list(buckets)
    sound = lengths and all(type(b) is int and 1 <= b <= MAX_LIST for b in lengths)
    if not sound or lengths != sorted(set(lengths)):
        raise SourceError(
            f"{caller}, buckets: found {lengths}, expected lengths from 1 to {MAX_LIST}, ascending."
        )
    if MASK in types:
        raise StructureError(
            f"{file}: found a column {MASK!r}, which is the name of the mask of the items; "
            "choose others, columns=[...]."
        )
    ragged = [name for name, kind in types.items() if kind.shape[:1] == (None,)]
    if not ragged:
        raise StructureError(f"{caller}, buckets: found no column of lists in {file} to pad.")
    for name in ragged:
        inner = types[name].shape[1:]
        if None in inner:
            raise StructureError(
                f"{file}: column {name!r} has lists of lists of any length, of which only the "
                "outer ones are padded; write the inner ones as fixed-size lists."
            )
        types[name] = types[name]._replace(shape=(lengths[-1], *inner))
    types[MASK] = RowType((lengths[-1],), np.dtype(np.bool_))
    return [*ragged, MASK]


def _row_types(
    heads: Heads, names: Sequence[str], columns: Any, conversion: Conversion, caller: str
) -> dict[str, RowType]:
    """The type of each column, which all files agree on."""
    (head, schema), *others = heads
    first = head.file.path
    types = {name: row_type(schema, name, first, conversion) for name in names}
    for file, other in others:
        path = file.file.path
        if other is schema or other.equals(schema):
            continue
        extra = [] if columns is not None else sorted(set(column_names(other)) - set(names))
        if extra:
            raise SourceError(
                f"{path}: found the column {extra[0]!r}, which {first} has not; choose those that "
                "all files have: columns=[...]."
            )
        chosen(other, list(names), path, caller)
        for name in names:
            kind = row_type(other, name, path, conversion)
            if not agree(types[name], kind):
                advice = ""
                if types[name].unit or kind.unit:
                    advice = " Write all times in one unit, all with or all without a time zone."
                raise SourceError(
                    f"{path}: found the column {name!r} of the type "
                    f"{column_type(other, name, path)}, expected "
                    f"{column_type(schema, name, first)} as in {first}; a column is of one "
                    f"type in all files.{advice}"
                )
            types[name] = _merged(types[name], kind)
    return types


def _merged(first: RowType, other: RowType) -> RowType:
    """The common type; a size that one file leaves open is taken from the other."""
    pairs = zip(first.shape, other.shape, strict=True)
    return first._replace(shape=tuple(b if a is None else a for a, b in pairs))


def _known_shapes(
    reader: Format, files: Sequence[TableFile], types: Mapping[str, RowType]
) -> dict[str, tuple[int, ...]]:
    """The shape of a row of each column. For columns of lists, this reads the first row."""
    open_ones = [name for name, kind in types.items() if None in kind.shape]
    shapes = {name: cast(tuple[int, ...], kind.shape) for name, kind in types.items()}
    if open_ones:
        filled = ((f, number) for f in files for number, rows in enumerate(f.rows) if rows)
        file, number = next(filled, (None, 0))
        if file is None:
            raise PlacementError(
                f"{first_of([f.file.path for f in files])}: column {open_ones[0]!r} has lists of "
                "any length, and no row that shows it; write fixed-size lists, or give buckets."
            )
        table = reader.table(file, number, dict.fromkeys(open_ones, ""), RowRange(0, 1, 1))
        batch = Batch(file.file.path, reader.batch_kind, number, 0, 0)  # no rows are before it
        for name in open_ones:
            chunks = column_in(table, name)
            chunk = next((c for c in getattr(chunks, "chunks", [chunks]) if len(c)), None)
            if chunk is None:
                raise SourceError(f"{batch.file}: found no row in {batch.kind} {number}.")
            shapes[name] = known_shape(chunk, name, batch, types[name])
    return shapes


# --- columns in the names of folders, as Hive writes them: year=2024/country=DE/part-0.parquet


def _folder_values(folders: str) -> Values:
    """The columns in a path of folders, and their values."""
    pairs = (folder.partition("=") for folder in folders.split("/"))
    texts = ((name, urllib.parse.unquote(text)) for name, is_pair, text in pairs if is_pair)
    return {name: None if text == _MISSING else text for name, text in texts}


def _typed_fields(values: Sequence[Values], known: Collection[str]) -> list[Any]:
    """The fields of Arrow of the columns that all files have in the names of their folders."""
    import pyarrow as pa

    names = [
        name
        for name in dict.fromkeys(n for folders in values for n in folders)
        if name not in known
    ]
    for name in names:
        if any(name not in folders for folders in values):
            raise SourceError(
                f"found files in folders named {name}=... and others that are not; expected all "
                "files below such folders. Give a pattern that matches one kind of them."
            )
    return [pa.field(name, _kind([folders[name] for folders in values])) for name in names]


def _kind(texts: Sequence[str | None]) -> Any:
    """The smallest type of pyarrow's that holds all values: int32, int64, or texts."""
    import pyarrow as pa

    known = [text for text in texts if text is not None]
    if not known or any(not text.removeprefix("-").isdecimal() for text in known):
        return pa.string()
    numbers = [int(text) for text in known]
    for kind in (np.int32, np.int64):
        if np.iinfo(kind).min <= min(numbers) and max(numbers) <= np.iinfo(kind).max:
            return pa.from_numpy_dtype(kind)
    return pa.string()
