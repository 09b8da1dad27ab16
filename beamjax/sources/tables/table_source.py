"""Placed inputs from files of tables: members are rows, leaves are columns.

Reading needs no JAX, so that a worker can read ahead before JAX has started.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.blocks import SourceBlock, blocks_of, ends_of, read_blocks
from beamjax.sources.source_base import (
    MASK,
    MAX_VALUES,
    ByIndex,
    HoldsLeaves,
    LeafSpec,
    Positive,
    PyTreeDef,
    Source,
    Which,
    cuts_at,
    describe_source,
    first_of,
    natural,
    spec_of,
)
from beamjax.sources.source_kinds import FileSource, RaggedMembers
from beamjax.sources.tables.arrow_columns import Batch, RowError, to_padded, to_rows
from beamjax.sources.tables.arrow_files import ArrowFormat
from beamjax.sources.tables.arrow_types import column_in
from beamjax.sources.tables.csv_files import CsvFormat
from beamjax.sources.tables.orc_files import OrcFormat
from beamjax.sources.tables.parquet_files import ParquetFormat
from beamjax.sources.tables.table_files import Format, RowRange, TableFile
from beamjax.storage.schema import to_plain
from beamjax.storage.shared_cache import BLOCKS, Arrays

FORMATS: Mapping[str, Format] = {
    "arrow": ArrowFormat(), "csv": CsvFormat(), "orc": OrcFormat(), "parquet": ParquetFormat()
}  # fmt: skip

MAX_LIST = 1 << 24
"""Largest number of items of a padded list."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column that is a leaf, or the mask of padded lists, the name of which is `MASK`."""

    name: str
    leaf: LeafSpec
    kind: str = ""  # for CSV, its type, as pyarrow writes it


class TableSource(HoldsLeaves, ByIndex, FileSource, RaggedMembers):
    """Rows of tables; see `from_parquet`, `from_arrow` and `from_csv`."""

    def __init__(
        self,
        form: str,
        files: tuple[TableFile, ...],
        columns: tuple[Column, ...],
        treedef: PyTreeDef | None = None,
        buckets: tuple[Positive, ...] = (),
        fill: str | None = None,
    ) -> None:
        super().__init__([column.leaf for column in columns], treedef)
        self._form = form
        self._format = FORMATS[form]
        self._files = tuple(files)
        self._columns = tuple(columns)
        self._buckets = tuple(buckets)
        self._fill = fill  # as text, since JSON has no NaN
        self._number = _number(fill)
        self._ends = ends_of([rows for file in files for rows in file.rows])
        self._numbers = np.cumsum([0, *(len(file.rows) for file in files)])
        self._check_arguments()

    def _check_arguments(self) -> None:
        """Raises TypeError for arguments that do not fit each other, as of a damaged spec."""
        natural(len(self))
        buckets = self._buckets
        if not self._columns:
            raise TypeError("found no columns, expected at least one")
        if any(file.starts and len(file.starts) != len(file.rows) for file in self._files):
            raise TypeError(f"found the files {self._files!r:.80}, expected a start of each batch")
        lengths = {leaf.shape[0] for leaf in self._leaves if leaf.ragged}
        ragged = [column.name for column in self._columns if column.leaf.ragged]
        if list(buckets) != sorted(set(buckets)) or (
            (MASK in ragged and len(ragged) > 1) != bool(buckets)
        ):
            raise TypeError(f"found buckets {buckets!r:.80} for the columns {ragged!r:.80}")
        if buckets and (lengths != {buckets[-1]} or buckets[-1] > MAX_LIST):
            raise TypeError(f"found lists of {lengths} for the buckets {buckets!r:.80}")

    # --- the source

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def usual_rows(self) -> float:
        # The lengths are not known before the rows are read, so the middle bucket is a guess.
        return float(self._buckets[len(self._buckets) // 2]) if self._buckets else 0.0

    @functools.cached_property
    def cuts(self) -> Mapping[int, str]:
        return cuts_at([(file.file.path, sum(file.rows)) for file in self._files])

    @property
    def block_bytes(self) -> int:  # type: ignore[override]
        rows = max((rows for file in self._files for rows in file.rows), default=0)
        return min(rows, 2 * self._most_rows()) * sum(leaf.nbytes for leaf in self._leaves)

    @property
    def local(self) -> bool:
        return not any(is_url(file.file.path) for file in self._files)

    def select(self, leaves: Sequence[int]) -> tuple[Source, Sequence[int]]:
        ragged = {i for i, leaf in enumerate(self._leaves) if leaf.ragged}
        picked = set(leaves)
        if self._buckets and picked & ragged:
            # The mask has the lengths of lists, and lists are read with it.
            mask = self._mask
            picked |= {mask, min((picked & ragged) - {mask}, default=min(ragged - {mask}))}
        if len(picked) == len(self._leaves):
            return self, range(len(self._leaves))
        order = sorted(picked)
        columns = tuple(self._columns[i] for i in order)
        buckets = self._buckets if picked & ragged else ()
        return TableSource(self._form, self._files, columns, None, buckets, self._fill), order

    def stamp(self, start: int, stop: int) -> str | None:
        parts: list[Any] = []
        for number, batch in enumerate(blocks_of(self._ends, start, stop)):
            file, place = self._place(batch)
            mark = file.file.mark()
            if mark is None:
                return None
            first = max(start - batch.first, 0) if number == 0 else 0
            values = sorted(file.folders.items())
            parts.append([mark, values, place, first, min(stop, batch.last) - batch.first])
        return json.dumps([self._how, parts])

    def identity(self) -> tuple[Any, list[str]]:
        folders = [sorted(file.folders.items()) for file in self._files]
        return spec_of(self) | {"files": folders}, [file.file.path for file in self._files]

    def __str__(self) -> str:
        return describe_source(self, f"in {first_of([file.file.path for file in self._files])}")

    def where(self, leaf: int, index: tuple[int, ...]) -> str:
        member, *rest = index
        (block,) = blocks_of(self._ends, member, member + 1)
        item = f", at {rest} of it" if rest else ""
        return f"{self._batch(block).at(self._columns[leaf].name, member - block.first)}{item}"

    # --- reading

    def _at(self, which: Which) -> Arrays:
        try:
            return read_blocks(self._leaves, self._blocks, self._block, which)
        except RowError:  # The bad row may be none of these: decode only these.
            if not isinstance(which, slice):
                return Source._at(self, which)
            start, stop = which.start, which.stop
            parts = [self._decode(block, start, stop) for block in self._blocks(start, stop)]
            return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _short(self, which: Which) -> Arrays:
        arrays = self._at(which)
        if not self._buckets:
            return arrays
        lengths = arrays[self._mask].sum(axis=1)
        rows = next(b for b in self._buckets if b >= lengths.max(initial=0))
        pairs = zip(arrays, self._leaves, strict=True)
        return [array[:, :rows] if leaf.ragged else array for array, leaf in pairs]

    @property
    def _mask(self) -> int:
        """The number of the mask among the leaves."""
        return next(i for i, column in enumerate(self._columns) if column.name == MASK)

    def _most_rows(self) -> int:
        """Most rows of a piece. A batch of more than twice as many is read in pieces."""
        return self._format.most_rows(sum(leaf.nbytes for leaf in self._leaves))

    def _blocks(self, start: int, stop: int) -> Iterator[SourceBlock]:
        """The batches with members of a range, or the pieces of large ones, in order."""
        most = self._most_rows()
        for batch in blocks_of(self._ends, start, stop):
            if batch.last - batch.first <= 2 * most:
                yield batch
                continue
            begin = max(start - batch.first, 0) // most * most
            for row in range(begin, min(stop, batch.last) - batch.first, most):
                first = batch.first + row
                yield SourceBlock(batch.number, row, first, min(first + most, batch.last))

    def _place(self, block: SourceBlock) -> tuple[TableFile, int]:
        """The file of a block, and the number of its batch there."""
        file = int(self._numbers.searchsorted(block.number, "right")) - 1
        return self._files[file], block.number - int(self._numbers[file])

    def _batch(self, block: SourceBlock, skipped: int = 0) -> Batch:
        """The place of the rows of a block, without the first ones, for messages."""
        file, number = self._place(block)
        first = block.first + skipped - int(self._ends[block.number - number])
        start = block.start + skipped
        return Batch(file.file.path, self._format.batch_kind, number, start, first)

    def _block(self, block: SourceBlock) -> Arrays:
        file = self._place(block)[0].file
        if not is_url(file.path):
            file.check()  # The cache may still hold what was in the file before.
            if self._format.is_view(file):
                return self._checked(block)
        key = self._key(block)
        return BLOCKS.get(key, lambda: self._checked(block), self._reader)

    @functools.cached_property
    def _reader(self) -> Hashable:
        """A key of this source, for the cache: the last block of each source of a thread stays."""
        return self._key(SourceBlock(0, 0, 0, 0))

    def _key(self, block: SourceBlock) -> Hashable:
        file, number = self._place(block)
        return file.file, number, block.start, self._how

    @functools.cached_property
    def _how(self) -> str:
        """What the arrays of a block depend on, besides the file."""
        return json.dumps(to_plain([self._form, self._columns, self._buckets, self._fill]))

    def _checked(self, block: SourceBlock) -> Arrays:
        """Decodes a block and checks its arrays against the leaves."""
        arrays, count = self._decode(block), block.last - block.first
        for array, leaf in zip(arrays, self._leaves, strict=True):
            if array.shape != (count, *leaf.shape) or array.dtype != leaf.dtype:
                raise SourceError(
                    f"{self!r}: found {array.dtype}{list(array.shape)} in block {block.number}, "
                    f"expected {leaf.dtype}{[count, *leaf.shape]} for leaf {leaf.path or 'itself'};"
                    " a file was changed after the source was made from it."
                )
        return arrays

    def _decode(self, block: SourceBlock, start: int = 0, stop: int = MAX_VALUES) -> Arrays:
        """The members of a block that are in a range, all by default."""
        rows = block.last - block.first
        low, high = (min(max(at, block.first), block.last) - block.first for at in (start, stop))
        columns = self._stored(block)
        if (low, high) != (0, rows):
            columns = {name: column.slice(low, high - low) for name, column in columns.items()}
        batch = self._batch(block, low)
        if self._buckets:
            return self._padded(columns, batch)
        return [
            to_rows(columns[column.name], column.name, column.leaf, batch, self._number)
            for column in self._columns
        ]

    def _stored(self, block: SourceBlock) -> dict[str, Any]:
        """The columns of a block as arrays of Arrow, without the mask."""
        file, number = self._place(block)
        rows = RowRange(block.start, block.last - block.first, self._most_rows())
        stored = [c for c in self._columns if not (self._buckets and c.name == MASK)]
        in_file = {c.name: c.kind for c in stored if c.name not in file.folders}
        file.file.check()
        table = self._format.table(file, number, in_file, rows) if in_file else None
        return {
            c.name: column_in(table, c.name)
            if c.name in in_file
            else _repeated(file.folders[c.name], c.leaf, rows.length)
            for c in stored
        }

    def _padded(self, columns: Mapping[str, Any], batch: Batch) -> Arrays:
        """Decodes members whose lists have any length, and adds the mask."""
        arrays: dict[str, np.ndarray] = {}
        lengths: dict[str, np.ndarray] = {}
        leaves = {column.name: column.leaf for column in self._columns}
        for name, column in columns.items():
            leaf = leaves[name]
            if leaf.ragged:
                arrays[name], lengths[name] = to_padded(column, name, leaf, batch, self._number)
            else:
                arrays[name] = to_rows(column, name, leaf, batch, self._number)
        (first, counts), *others = lengths.items()
        for name, other in others:
            (odd,) = np.nonzero(other != counts)
            if len(odd):
                raise RowError(
                    f"{batch.at(name, int(odd[0]))}: found a list of length {other[odd[0]]}, "
                    f"expected {counts[odd[0]]} as in the column {first!r}; lists of a row have "
                    "one mask."
                )
        mask = np.arange(self._buckets[-1]) < counts[:, None]
        return [mask if c.name == MASK else arrays[c.name] for c in self._columns]


def _number(text: str | None) -> int | float | None:
    """Undoes `repr` of a number."""
    if text is None:
        return None
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _repeated(text: str | None, leaf: LeafSpec, rows: int) -> Any:
    """The column of a value in the name of a folder."""
    import pyarrow as pa

    kind = pa.string() if leaf.shape else pa.from_numpy_dtype(leaf.dtype)
    value = text if text is None or leaf.shape else int(text)
    return pa.repeat(pa.scalar(value, kind), rows)
