"""Columns of Arrow as arrays with a row a member, views of Arrow's own memory where they can be."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError, StructureError
from beamjax.sources.data_files import readable
from beamjax.sources.source_base import MAX_VALUES

Shape = tuple[int | None, ...]
"""Of one row; None where the lists of a column may have any length."""

_NUMBERS = (
    "expected bool, integers, floats, fixed-size binary, tensors of a fixed shape, or lists of "
    "these of one length"
)


class RowError(SourceError):
    """A row is missing or has another shape; others of its row group can be read."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Consecutive rows of a file.

    Attributes:
      file: path or URL.
      kind: what they are there: "row group", "record batch".
      number: of it in the file, from 0.
      start: their first row in it.
      first: their first row in the file.
    """

    file: str
    kind: str
    number: int
    start: int
    first: int

    def at(self, column: str, row: int) -> str:
        """For messages: where a row of the batch is."""
        return (
            f"{self.file}: column {column!r}, {self.kind} {self.number}, row {self.start + row} of "
            f"it (row {self.first + row} of the file)"
        )


@contextlib.contextmanager
def arrow_readable(path: str, expected: str) -> Iterator[None]:
    """Makes errors of Arrow in the `with` block a SourceError that names the file."""
    import pyarrow as pa

    with readable(path, expected):
        try:
            yield
        except pa.ArrowException as error:  # of which not all are a ValueError or an OSError
            raise ValueError(str(error)) from error


def checked_schema(schema: Any) -> Any:
    """The schema of a file; ValueError if it is damaged, which shows when it is looked at only."""
    for name, kind in zip(schema.names, schema.types, strict=True):
        str(name), str(kind)
    return schema


def checked_rows(rows: Sequence[int]) -> tuple[int, ...]:
    """The rows of each row group of a file; ValueError if they can't be so many."""
    if any(count < 0 for count in rows) or sum(rows) >= MAX_VALUES:
        raise ValueError(f"found {rows!r:.80} rows")
    return tuple(rows)


def chosen(schema: Any, columns: Any, file: str, who: str) -> list[str]:
    """The names of the columns that a user wants, in the order of a dictionary of JAX: sorted.

    Args:
      schema: of the file.
      columns: a name, a list of names, or None for all.
      file: that is read.
      who: asks, for messages: "from_parquet".

    Raises:
      StructureError: `columns` are no names.
      SourceError: a column is not there, or is there twice.
    """
    listed = [columns] if isinstance(columns, str) else columns
    if listed is None:
        listed = list(schema.names)
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise StructureError(
            f"{who}: found columns={columns!r:.80}, expected the name of a column, a list of "
            "names, or None for all."
        )
    if not listed:
        raise StructureError(f"{who}: found no columns for {file}, expected at least one name.")
    for name in listed:
        count = schema.names.count(name)
        if count > 1:
            raise SourceError(f"{file}: found {count} columns named {name!r}, expected one.")
        if not count:
            near = difflib.get_close_matches(name, schema.names, 1)
            names = ", ".join(map(repr, schema.names[:50])) or "none"
            raise SourceError(
                f"{file}: found no column {name!r}"
                f"{f'; do you mean {near[0]!r}?' if near else '.'} There are {names}"
                f"{', ...' if len(schema.names) > 50 else ''}."
            )
    return sorted(set(listed))


def row_type(
    schema: Any, column: str, file: str, text_bytes: int | None = None
) -> tuple[Shape, np.dtype]:
    """Shape and dtype of a row of a column.

    Args:
      schema: of the file.
      column: the name of one that is there.
      file: for messages.
      text_bytes: of texts, and bytes of any length, as uint8[text_bytes]; None refuses them.

    Raises:
      StructureError: it has no numbers.
    """
    kind = schema.field(column).type
    found = _row_type(kind, text_bytes)
    if found is None:
        others = [f.name for f in schema if _row_type(f.type, text_bytes) is not None]
        texts = ", read it as bytes, text_bytes=64," if _row_type(kind, 1) is not None else ""
        choice = ", ".join(map(repr, others[:20])) + (", ..." if len(others) > 20 else "")
        raise StructureError(
            f"{file}: column {column!r} is of the type {kind}, {_NUMBERS}. Choose others, "
            f"columns=[{choice}]{texts} or write it as numbers."
        )
    return found


def _is_text(kind: Any) -> bool:
    """Whether values are bytes of any length."""
    import pyarrow.types as types

    return any(
        is_one(kind)
        for is_one in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
        )
    )


def _row_type(kind: Any, text_bytes: int | None) -> tuple[Shape, np.dtype] | None:
    import pyarrow.types as types

    shape: list[int | None] = []
    while True:
        if types.is_dictionary(kind):
            kind = kind.value_type
        elif _is_tensor(kind) and (order := _order(kind)) is not None:
            shape += [kind.shape[axis] for axis in order]
            kind = kind.value_type
        elif types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        elif _is_list(kind):
            shape.append(None)
            kind = kind.value_type
        elif types.is_fixed_size_binary(kind):
            return (*shape, kind.byte_width), np.dtype(np.uint8)
        elif text_bytes is not None and _is_text(kind):
            return (*shape, text_bytes), np.dtype(np.uint8)
        elif types.is_boolean(kind):
            return tuple(shape), np.dtype(np.bool_)
        elif types.is_integer(kind):
            sign = "u" if types.is_unsigned_integer(kind) else ""
            return tuple(shape), np.dtype(f"{sign}int{kind.bit_width}")
        elif types.is_floating(kind):
            return tuple(shape), np.dtype(f"float{kind.bit_width}")
        else:
            return None


def _is_list(kind: Any) -> bool:
    import pyarrow.types as types

    return any(
        is_one(kind)
        for is_one in (
            types.is_list,
            types.is_large_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _is_tensor(kind: Any) -> bool:
    import pyarrow as pa

    return isinstance(kind, pa.FixedShapeTensorType)


def _order(kind: Any) -> list[int] | None:
    """Which axis of the memory of a tensor each of its axes is; None if nobody knows.

    Of permutations that are not their own inverse pyarrow writes and reads others than Arrow's
    specification says.
    """
    order = list(kind.permutation or range(len(kind.shape)))
    return order if all(order[order[axis]] == axis for axis in order) else None


def agree(first: tuple[Shape, np.dtype], other: tuple[Shape, np.dtype]) -> bool:
    """Whether rows of two columns can be of one array."""
    (shape, dtype), (other_shape, other_dtype) = first, other
    return (
        dtype == other_dtype
        and len(shape) == len(other_shape)
        and all(a == b or None in (a, b) for a, b in zip(shape, other_shape, strict=True))
    )


def known_shape(values: Any, column: str, batch: Batch) -> tuple[int, ...]:
    """The shape of the first row of an array of Arrow, for columns of lists of any length."""
    _validate(values, column, batch)
    rows = _Rows(column, batch, None)
    return rows.values(values.slice(0, 1), 0, 1).shape[1:]


def to_rows(column: Any, name: str, shape: tuple[int, ...], batch: Batch) -> np.ndarray:
    """A column as an array of shape (rows, *shape), read-only.

    Args:
      column: a ChunkedArray or an Array of Arrow.
      name: of the column.
      shape: that each row must have.
      batch: where the rows are.

    Raises:
      RowError: a row is missing (null), or a list has another length.
    """
    rows, parts, first = _Rows(name, batch, shape), [], 0
    for chunk in getattr(column, "chunks", [column]):
        _validate(chunk, name, batch)
        rows.first = first
        parts.append(rows.values(chunk, 0, 1))
        first += len(chunk)
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    array.flags.writeable = False
    return array


def to_padded(
    column: Any, name: str, shape: tuple[int, ...], batch: Batch
) -> tuple[np.ndarray, np.ndarray]:
    """A column of lists of any length, with zeros after the short ones, and their lengths.

    Args:
      column: as for `to_rows`.
      name: of the column.
      shape: of a padded row.
      batch: where the rows are.

    Raises:
      RowError: a row or an item is missing (null), or a list is too long.
    """
    rows, first = _Rows(name, batch, (0, *shape[1:])), 0
    parts: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for chunk in getattr(column, "chunks", [column]):
        _validate(chunk, name, batch)
        rows.first = first
        if chunk.null_count:
            rows.refuse_null(chunk, 1)
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        items = chunk.flatten()
        if items.null_count:
            missing = int(np.argmax(items.is_null().to_numpy(zero_copy_only=False)))
            row = int(np.searchsorted(np.cumsum(lengths), missing, side="right"))
            raise RowError(
                f"{batch.at(name, first + row)}: found null in a list, expected numbers."
            )
        (long,) = np.nonzero(lengths > shape[0])
        if len(long):
            raise RowError(
                f"{batch.at(name, first + int(long[0]))}: found a list of length "
                f"{lengths[long[0]]}, expected at most {shape[0]}, the last of the buckets."
            )
        flat = rows.values(items, 1, 1)
        padded = np.zeros((len(chunk), *shape), flat.dtype)
        padded[np.arange(shape[0]) < lengths[:, None]] = flat
        parts.append(padded)
        counts.append(lengths)
        first += len(chunk)
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    array.flags.writeable = False
    return array, np.concatenate(counts)


def _validate(array: Any, column: str, batch: Batch) -> None:
    """Raises SourceError where a damaged file would end the process; free but for lists."""
    with arrow_readable(batch.file, f"{batch.kind} {batch.number} with sound lists as {column!r}"):
        array.validate(full=True)


class _Rows:
    """Turns arrays of Arrow to NumPy's, from the outermost list to the numbers."""

    def __init__(self, column: str, batch: Batch, shape: tuple[int, ...] | None):
        self.column = column
        self.batch = batch
        self.shape = shape
        self.first = 0

    def values(self, array: Any, depth: int, each: int) -> np.ndarray:
        """An array of Arrow whose items are below `depth` axes, `each` of them in a row."""
        import pyarrow.types as types

        kind, count = array.type, len(array)
        if array.null_count:
            self.refuse_null(array, each)
        if types.is_dictionary(kind):
            return self.values(array.dictionary_decode(), depth, each)
        if _is_tensor(kind):
            order = _order(kind) or []
            below = each * math.prod(kind.shape)
            inner = self.values(array.storage.flatten(), depth + len(kind.shape), below)
            inner = inner.reshape(count, *kind.shape, *inner.shape[1:])
            return inner.transpose(
                0, *(axis + 1 for axis in order), *range(len(kind.shape) + 1, inner.ndim)
            )
        if types.is_fixed_size_list(kind) or _is_list(kind):
            size = self._size(array, depth, each)
            inner = self.values(array.flatten(), depth + 1, each * size)
            return inner.reshape(count, size, *inner.shape[1:])
        if types.is_fixed_size_binary(kind):
            width = kind.byte_width
            data = array.buffers()[1] if count and width else b""
            flat = np.frombuffer(data, np.uint8)[array.offset * width :][: count * width]
            return flat.reshape(count, width)
        if _is_text(kind):
            return self._texts(array, depth, each)
        return array.to_numpy(zero_copy_only=not types.is_boolean(kind))

    def _texts(self, array: Any, depth: int, each: int) -> np.ndarray:
        """Texts as bytes with zeros up to the width of a row."""
        import pyarrow as pa

        width = self.shape[depth] if self.shape is not None else 0
        flat = array.cast(pa.large_binary())
        offsets = np.frombuffer(flat.buffers()[1], np.int64)[flat.offset :][: len(flat) + 1]
        lengths = np.diff(offsets)
        (long,) = np.nonzero(lengths > width)
        if len(long) and self.shape is not None:
            raise RowError(
                f"{self.batch.at(self.column, self.first + int(long[0]) // each)}: found a text of "
                f"{lengths[long[0]]} bytes, expected at most {width}; choose a larger text_bytes."
            )
        texts = np.zeros((len(flat), width), np.uint8)
        data = np.frombuffer(flat.buffers()[2] or b"", np.uint8)
        texts[np.arange(width) < lengths[:, None]] = data[offsets[0] : offsets[-1]]
        return texts

    def _size(self, array: Any, depth: int, each: int) -> int:
        """The length of all lists of an array."""
        import pyarrow.types as types

        if types.is_fixed_size_list(array.type):
            return array.type.list_size
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        if self.shape is not None:
            size = self.shape[depth]
        else:
            size = int(lengths[0]) if len(lengths) else 0
        (odd,) = np.nonzero(lengths != size)
        if len(odd):
            raise RowError(
                f"{self.batch.at(self.column, self.first + int(odd[0]) // each)}: found a list of "
                f"length {lengths[odd[0]]}, expected {size} as in the first row of the source; all "
                "rows of a column of arrays have the same shape. Pad or cut the lists."
            )
        return size

    def refuse_null(self, array: Any, each: int) -> None:
        """RowError for the first missing row of an array whose items are `each` of a row."""
        import pyarrow.compute as compute

        null = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        count = compute.sum(array.is_null()).as_py()
        raise RowError(
            f"{self.batch.at(self.column, self.first + null // each)}: found null, {count} of them "
            f"in this {self.batch.kind}; expected a number in each row. Fill them in or leave out "
            "such rows before: arrays have no missing values."
        )
