"""Placed inputs from files of tables, Parquet and Arrow: members are rows, leaves are columns."""

from __future__ import annotations

import abc
import dataclasses
import functools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

from beamjax.errors import PlacementError, SourceError, StructureError
from beamjax.sources.arrays.data_files import DataFile, find_files, is_url
from beamjax.sources.block_source import Arrays, BlockSource, SourceBlock
from beamjax.sources.source_base import (
    MASK,
    MAX_VALUES,
    Count,
    LeafSpec,
    Leaves,
    Positive,
    PyTreeDef,
    describe_source,
    first_of,
    natural,
    starts_of,
)
from beamjax.sources.tables.arrow_columns import Batch, RowError, known_shape, to_padded, to_rows
from beamjax.sources.tables.arrow_types import RowType, agree, chosen, column_type, row_type

_FOOTERS_AT_ONCE = 16
"""Threads that read footers: most of the time is spent waiting for URLs."""


@dataclasses.dataclass(frozen=True)
class TableFile:
    """A file of a table.

    Attributes:
      file: the file as it was when the source was made.
      rows: the number of rows of each row group or record batch.
    """

    file: DataFile
    rows: tuple[Count, ...]


class RowRange(NamedTuple):
    """Rows of a row group.

    Attributes:
      start: the first row.
      length: the number of rows.
      step: rows of each piece in which the row group is read; its last piece may be shorter.
    """

    start: int
    length: int
    step: int


class TableSource(BlockSource):
    """Rows of tables. A subclass defines how a row group of its files is read.

    Args:
        files: the files, in the order of their members.
        columns: the column of each leaf; `MASK` for the mask of padded lists.
        leaves: one member of each.
        treedef: the tree that they form; a tuple by default.
        buckets: lengths to which lists are padded; empty if all lists of a column have one length.
        fill: the number that replaces missing ones, as text: JSON has no NaN.
    """

    batch_kind: ClassVar[str]
    """The name of a batch of rows in messages, such as "row group"."""
    endings: ClassVar[tuple[str, ...]]
    """Endings of the files that are read in a folder."""

    def __init__(
        self,
        files: tuple[TableFile, ...],
        columns: tuple[str, ...],
        leaves: Leaves,
        treedef: PyTreeDef | None = None,
        buckets: tuple[Positive, ...] = (),
        fill: str | None = None,
    ) -> None:
        self._files = tuple(files)
        self._columns = tuple(columns)
        self._buckets = tuple(buckets)
        self._fill = fill
        self._number = _number(fill)
        super().__init__(leaves, [rows for file in files for rows in file.rows], treedef)
        self._numbers = np.cumsum([0, *(len(file.rows) for file in files)])
        natural(len(self))
        if len(columns) != len(leaves):
            raise TypeError(f"found columns {columns!r:.80}, expected a name for each leaf")
        lengths = {leaf.shape[0] for leaf in leaves if leaf.ragged}
        ragged = [name for name, leaf in zip(columns, leaves, strict=True) if leaf.ragged]
        if list(buckets) != sorted(set(buckets)) or (
            (MASK in ragged and len(ragged) > 1) != bool(buckets)
        ):
            raise TypeError(f"found buckets {buckets!r:.80} for the columns {ragged!r:.80}")
        if buckets and (lengths != {buckets[-1]} or buckets[-1] > MAX_LIST):
            raise TypeError(f"found lists of {lengths} for the buckets {buckets!r:.80}")

    @classmethod
    @abc.abstractmethod
    def _head(cls, path: str) -> tuple[TableFile, Any]:
        """The file and the schema of its columns; reads no rows."""

    @classmethod
    @abc.abstractmethod
    def _table(cls, file: TableFile, number: int, columns: Sequence[str], rows: RowRange) -> Any:
        """Columns of a row group, as a Table or a RecordBatch of Arrow.

        Args:
            file: the file, which is checked to be unchanged.
            number: the number of the row group.
            columns: the names of the columns.
            rows: the requested rows. A format may return later rows as well, if `rows.start` is 0.

        Raises:
            SourceError: they can't be read.
        """

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def usual_rows(self) -> float:
        # The lengths are not known before the rows are read, so the middle bucket is a guess.
        return float(self._buckets[len(self._buckets) // 2]) if self._buckets else 0.0

    @functools.cached_property
    def file_starts(self) -> Mapping[int, int]:
        return starts_of([(each.file.path, sum(each.rows)) for each in self._files])

    @property
    def block_bytes(self) -> int:
        rows = max((rows for file in self._files for rows in file.rows), default=0)
        return min(rows, 2 * self._most_rows()) * sum(leaf.nbytes for leaf in self._leaves)

    def read_short(self, start: int, stop: int) -> Arrays:
        arrays = self.read(start, stop)
        if not self._buckets:
            return arrays
        lengths = arrays[self._columns.index(MASK)].sum(axis=1)
        rows = next(b for b in self._buckets if b >= lengths.max(initial=0))
        pairs = zip(arrays, self._leaves, strict=True)
        return [array[:, :rows] if leaf.ragged else array for array, leaf in pairs]

    def _most_rows(self) -> int:
        """Most rows of a piece. A row group of more than twice as many is read in pieces."""
        return MAX_VALUES

    @classmethod
    def _check(cls, file: TableFile, rows: Sequence[int], schema: Any, columns: Any) -> None:
        """Raises SourceError if the rows or columns of a file have changed."""
        path, kind = file.file.path, cls.batch_kind
        if tuple(rows) != file.rows:
            raise SourceError(
                f"{path}: found {kind}s of {list(rows)!r:.80} rows, expected "
                f"{list(file.rows)!r:.80}; the file was changed after the source was made from it."
            )
        chosen(schema, list(columns), path, cls.kind)

    def _blocks(self, start: int, stop: int) -> Iterator[SourceBlock]:
        most = self._most_rows()
        for group in super()._blocks(start, stop):
            if group.last - group.first <= 2 * most:
                yield group
                continue
            begin = max(start - group.first, 0) // most * most
            for row in range(begin, min(stop, group.last) - group.first, most):
                first = group.first + row
                yield SourceBlock(group.number, row, first, min(first + most, group.last))

    def _place(self, block: SourceBlock) -> tuple[TableFile, int]:
        """The file of a block, and the number of its row group there."""
        file = int(np.searchsorted(self._numbers, block.number, side="right")) - 1
        return self._files[file], block.number - int(self._numbers[file])

    def _block(self, block: SourceBlock) -> Arrays:
        file, _ = self._place(block)
        if not is_url(file.file.path):
            file.file.check()  # The cache may still hold what was in the file before.
        return super()._block(block)

    def _key(self, block: SourceBlock) -> Hashable:
        file, number = self._place(block)
        return file.file, number, block.start, self._columns, self._fill

    def read(self, start: int, stop: int) -> Arrays:
        try:
            return super().read(start, stop)
        except RowError:  # The bad row may be outside of the range: decode only the range.
            parts = [self._decode(block, start, stop) for block in self._blocks(start, stop)]
            return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def content_mark(self, start: int, stop: int) -> str | None:
        parts: list[Any] = []
        for number, group in enumerate(BlockSource._blocks(self, start, stop)):
            file, row_group = self._place(group)
            mark = file.file.mark()
            if mark is None:
                return None
            first = max(start - group.first, 0) if number == 0 else 0
            parts.append([mark, row_group, first, min(stop, group.last) - group.first])
        leaves = [leaf.to_json() for leaf in self._leaves]
        return json.dumps([self.kind, self._columns, self._buckets, self._fill, leaves, parts])

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        member, *rest = index
        (block,) = BlockSource._blocks(self, member, member + 1)
        file, number = self._place(block)
        start, first = block.first, int(self._ends[block.number - number])
        batch = Batch(file.file.path, self.batch_kind, number, 0, start - first)
        item = f", at {rest} of it" if rest else ""
        return f"{batch.at(self._columns[leaf], member - start)}{item}"

    def _decode(self, block: SourceBlock, start: int = 0, stop: int = MAX_VALUES) -> Arrays:
        """The members of a block that are in a range, all by default."""
        file, number = self._place(block)
        rows = RowRange(block.start, block.last - block.first, self._most_rows())
        low, high = (min(max(at, block.first), block.last) - block.first for at in (start, stop))
        names = [name for name, leaf in self._stored()]
        table = self._table(file, number, names, rows)
        if (low, high) != (0, rows.length):
            table = table.slice(low, high - low)
        first = block.first + low - int(self._ends[block.number - number])
        batch = Batch(file.file.path, self.batch_kind, number, block.start + low, first)
        if self._buckets:
            return self._padded(table, batch)
        return [
            to_rows(table.column(name), name, leaf.shape, batch, self._number)
            for name, leaf in zip(self._columns, self._leaves, strict=True)
        ]

    def _stored(self) -> list[tuple[str, LeafSpec]]:
        """The columns in the files, without the mask, and their leaves."""
        pairs = zip(self._columns, self._leaves, strict=True)
        return [(name, leaf) for name, leaf in pairs if not self._buckets or name != MASK]

    def _padded(self, table: Any, batch: Batch) -> Arrays:
        """Decodes members whose lists have any length, and adds the mask."""
        arrays: dict[str, np.ndarray] = {}
        lengths: dict[str, np.ndarray] = {}
        for name, leaf in self._stored():
            column = table.column(name)
            if leaf.ragged:
                arrays[name], lengths[name] = to_padded(
                    column, name, leaf.shape, batch, self._number
                )
            else:
                arrays[name] = to_rows(column, name, leaf.shape, batch, self._number)
        (first, counts), *others = lengths.items()
        for name, found in others:
            (odd,) = np.nonzero(found != counts)
            if len(odd):
                raise RowError(
                    f"{batch.at(name, int(odd[0]))}: found a list of length {found[odd[0]]}, "
                    f"expected {counts[odd[0]]} as in the column {first!r}; lists of a row have "
                    "one mask."
                )
        mask = np.arange(self._buckets[-1]) < counts[:, None]
        return [mask if name == MASK else arrays[name] for name in self._columns]

    @property
    def is_local(self) -> bool:
        return not any(is_url(file.file.path) for file in self._files)

    def describe(self) -> str:
        return describe_source(self, f"in {first_of([file.file.path for file in self._files])}")

    def identity(self) -> tuple[Any, list[str]]:
        return self.to_spec() | {"files": None}, [file.file.path for file in self._files]


MAX_LIST = 1 << 24
"""Largest number of items of a padded list."""
MAX_TEXT = 1 << 20
"""Largest `text_bytes`."""

Found = TypeVar("Found", bound=TableSource)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The options by which columns are converted to arrays; see `from_parquet`."""

    text_bytes: int | None = None
    buckets: Sequence[int] | None = None
    fill_null: int | float | None = None
    times: bool = False

    def check(self, caller: str) -> None:
        """Raises StructureError for invalid options."""
        size, fill = self.text_bytes, self.fill_null
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_TEXT):
            raise StructureError(
                f"{caller}, text_bytes: found {size!r}, expected a number from 1 to {MAX_TEXT}."
            )
        if fill is not None and type(fill) not in (int, float):
            raise StructureError(f"{caller}, fill_null: found {fill!r:.80}, expected a number.")


def _number(text: str | None) -> int | float | None:
    """Undoes `repr` of a number."""
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def from_tables(
    cls: type[Found],
    paths: Any,
    columns: Any,
    conversion: Conversion,
    caller: str,
) -> Found:
    """A source of the class `cls` from the files that a user names; see `from_parquet`."""
    import jax

    conversion.check(caller)
    buckets = conversion.buckets
    found = find_files(paths, caller, cls.endings)
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        heads = list(pool.map(cls._head, found))
    names = chosen(heads[0][1], columns, found[0], caller)
    types = _row_types(heads, names, columns, conversion, caller)
    files = [file for file, _ in heads]
    ragged: list[str] = []
    if buckets is not None:
        ragged = _padded_columns(types, buckets, found[0], caller)
    shapes = _known_shapes(cls, files, types)
    names = sorted([*names, MASK]) if ragged else names
    bare = isinstance(columns, str) and not ragged
    tree = jax.tree_util.tree_structure(0 if bare else dict.fromkeys(names, 0))
    leaves = [
        LeafSpec(
            shapes[name], types[name].dtype, None, "" if bare else f"[{name!r}]", name in ragged
        )
        for name in names
    ]
    fill = None if conversion.fill_null is None else repr(conversion.fill_null)
    return cls(tuple(files), tuple(names), tuple(leaves), tree, tuple(buckets or ()), fill)


def _padded_columns(
    types: dict[str, RowType], buckets: Sequence[int], file: str, caller: str
) -> list[str]:
    """Sets the shapes of columns of lists to the last bucket, and adds the mask to `types`.

    Returns:
      The names of these columns and of the mask.
    """
    listed = list(buckets)
    sound = listed and all(type(b) is int and 1 <= b <= MAX_LIST for b in listed)
    if not sound or listed != sorted(set(listed)):
        raise SourceError(
            f"{caller}, buckets: found {listed}, expected lengths from 1 to {MAX_LIST}, ascending."
        )
    if MASK in types:
        raise StructureError(
            f"{file}: found a column {MASK!r}, which is the name of the mask of the items; "
            "choose others, columns=[...]."
        )
    ragged = [name for name, found in types.items() if found.shape[:1] == (None,)]
    if not ragged:
        raise StructureError(f"{caller}, buckets: found no column of lists in {file} to pad.")
    for name in ragged:
        inner = types[name].shape[1:]
        if None in inner:
            raise StructureError(
                f"{file}: column {name!r} has lists of lists of any length, of which only the "
                "outer ones are padded; write the inner ones as fixed-size lists."
            )
        types[name] = types[name]._replace(shape=(listed[-1], *inner))
    types[MASK] = RowType((listed[-1],), np.dtype(np.bool_))
    return [*ragged, MASK]


def _row_types(
    heads: Sequence[tuple[TableFile, Any]],
    names: Sequence[str],
    columns: Any,
    conversion: Conversion,
    caller: str,
) -> dict[str, RowType]:
    """The type of each column, which all files agree on."""
    types: dict[str, RowType] = {}
    first = heads[0][0].file.path
    for file, schema in heads:
        path = file.file.path
        extra = [] if columns is not None else sorted(set(schema.names) - set(names))
        if extra:
            raise SourceError(
                f"{path}: found the column {extra[0]!r}, which {first} has not; choose those that "
                "all files have: columns=[...]."
            )
        chosen(schema, list(names), path, caller)
        for name in names:
            found = row_type(schema, name, path, conversion.text_bytes, conversion.times)
            if not agree(types.setdefault(name, found), found):
                advice = ""
                if types[name].time or found.time:
                    advice = " Write all times in one unit, all with or all without a time zone."
                raise SourceError(
                    f"{path}: found the column {name!r} of the type "
                    f"{column_type(schema, name, path)}, expected "
                    f"{column_type(heads[0][1], name, first)} as in {first}; a column is of one "
                    f"type in all files.{advice}"
                )
            types[name] = _merged(types[name], found)
    return types


def _merged(first: RowType, other: RowType) -> RowType:
    """The common type; a size that one file leaves open is taken from the other."""
    pairs = zip(first.shape, other.shape, strict=True)
    return first._replace(shape=tuple(b if a is None else a for a, b in pairs))


def _known_shapes(
    cls: type[TableSource], files: Sequence[TableFile], types: dict[str, RowType]
) -> dict[str, tuple[int, ...]]:
    """The shape of a row of each column. For columns of lists, this reads the first row."""
    open_ones = [name for name, found in types.items() if None in found.shape]
    shapes = {name: cast(tuple[int, ...], found.shape) for name, found in types.items()}
    if open_ones:
        filled = ((f, number) for f in files for number, rows in enumerate(f.rows) if rows)
        file, number = next(filled, (None, 0))
        if file is None:
            raise PlacementError(
                f"{first_of([f.file.path for f in files])}: column {open_ones[0]!r} has lists of "
                "any length, and no row that shows it; write fixed-size lists, or give buckets."
            )
        table = cls._table(file, number, open_ones, RowRange(0, 1, 1))
        batch = Batch(file.file.path, cls.batch_kind, number, 0, 0)  # no rows are before the first
        for name in open_ones:
            chunks = table.column(name)
            chunk = next((c for c in getattr(chunks, "chunks", [chunks]) if len(c)), None)
            if chunk is None:
                raise SourceError(f"{batch.file}: found no row in {batch.kind} {number}.")
            shapes[name] = known_shape(chunk, name, batch, types[name].shape)
    return shapes
