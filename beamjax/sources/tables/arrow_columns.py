"""Converts columns of Arrow to arrays with a row per member, which are views if possible."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import readable
from beamjax.sources.source_base import MAX_VALUES, LeafSpec
from beamjax.sources.tables.arrow_types import (
    RowType,
    Shape,
    axes_order,
    is_list,
    is_tensor,
    is_text,
    is_time,
)


class RowError(SourceError):
    """A row is missing or has another shape. Other rows of its row group can be read."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Consecutive rows of a file."""

    file: str  # path or URL
    kind: str  # "row group", "record batch"
    number: int  # of the row group or record batch in the file, from 0
    start: int  # the number of the first row in it
    first: int  # the number of the first row in the file

    def at(self, column: str, row: int) -> str:
        """The place of a row of the batch, for messages."""
        return (
            f"{self.file}: column {column!r}, {self.kind} {self.number}, row {self.start + row} of "
            f"it (row {self.first + row} of the file)"
        )


@contextlib.contextmanager
def arrow_readable(path: str, expected: str) -> Iterator[None]:
    """Converts errors of Arrow in the `with` block to a SourceError that names the file."""
    import pyarrow as pa

    with readable(path, expected):
        try:
            yield
        except pa.ArrowException as error:  # Some of these are neither ValueError nor OSError.
            raise ValueError(str(error)) from error


def checked_schema(schema: Any) -> Any:
    """The schema of a file; ValueError if names are damaged, which pyarrow finds only on use."""
    for name in schema.names:
        str(name)
    return schema


def checked_rows(rows: Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows of the row groups of a file; ValueError if they are out of range."""
    if any(count < 0 for count in rows) or sum(rows) >= MAX_VALUES:
        raise ValueError(f"found {rows!r:.80} rows")
    return tuple(rows)


def known_shape(values: Any, column: str, batch: Batch, kind: RowType) -> tuple[int, ...]:
    """The shape of the first row of an array of Arrow, for columns of lists of any length."""
    _validate(values, column, batch)
    rows = _Rows(column, batch, kind.shape, kind.dtype, fill=0)  # The fill affects no shapes.
    return rows.converted(values.slice(0, 1)).shape[1:]


Fill = int | float | None
"""The number that replaces missing ones; None refuses missing numbers."""


def to_rows(column: Any, name: str, leaf: LeafSpec, batch: Batch, fill: Fill = None) -> np.ndarray:
    """A column as an array of shape (rows, *leaf.shape), read-only."""
    rows, parts, first = _Rows(name, batch, leaf.shape, leaf.dtype, fill), [], 0
    for chunk in getattr(column, "chunks", [column]):
        _validate(chunk, name, batch)
        rows.first = first
        parts.append(rows.converted(chunk))
        first += len(chunk)
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    array.flags.writeable = False
    return array


def to_padded(
    column: Any, name: str, leaf: LeafSpec, batch: Batch, fill: Fill = None
) -> tuple[np.ndarray, np.ndarray]:
    """Pads a column of lists of any length with zeros; returns the array and the lengths."""
    shape = leaf.shape
    rows, first = _Rows(name, batch, (0, *shape[1:]), leaf.dtype, fill), 0
    parts: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    for chunk in getattr(column, "chunks", [column]):
        _validate(chunk, name, batch)
        rows.first = first
        if chunk.null_count:
            rows.ends = None
            rows.refuse_null(chunk, 1)
        lengths = chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        (long,) = np.nonzero(lengths > shape[0])
        if len(long):
            raise RowError(
                f"{batch.at(name, first + int(long[0]))}: found a list of length "
                f"{lengths[long[0]]}, expected at most {shape[0]}, the last of the buckets."
            )
        rows.ends = np.cumsum(lengths)
        flat = rows.converted(chunk.flatten(), 1)
        padded = np.zeros((len(chunk), *shape), flat.dtype)
        padded[np.arange(shape[0]) < lengths[:, None]] = flat
        parts.append(padded)
        counts.append(lengths)
        first += len(chunk)
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    array.flags.writeable = False
    return array, np.concatenate(counts)


def _validate(array: Any, column: str, batch: Batch) -> None:
    """Raises SourceError for a damaged array, which could crash the process."""
    # This takes time only for lists and texts.
    import pyarrow as pa

    try:
        array.validate(full=True)
    except pa.ArrowException as error:
        where = f"{batch.kind} {batch.number} with sound lists as {column!r}"
        with arrow_readable(batch.file, where):
            raise error


def _decoded(array: Any) -> Any:
    """The values of a dictionary array. pyarrow cannot take items of string views, as of Polars."""
    import pyarrow as pa

    values = array.dictionary
    if pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type):
        array = pa.DictionaryArray.from_arrays(array.indices, values.cast(pa.large_binary()))
    return array.dictionary_decode()


def _plain_decimals(array: Any, dtype: np.dtype) -> Any:
    """Decimals as the nearest floats, or as integers that count units of their last digit."""
    import pyarrow as pa

    if dtype == np.float64:
        # Arrow's cast of decimals to floats does not give the nearest ones. That of texts does.
        return array.cast(pa.string()).cast(pa.float64())
    digits, bits = array.type.precision, array.type.bit_width
    if bits < 128:  # Arrow 25 refuses to cast whole decimals of 32 bits to integers.
        array, bits = array.cast(pa.decimal128(digits, array.type.scale)), 128
    whole = pa.decimal256(digits, 0) if bits == 256 else pa.decimal128(digits, 0)
    return array.view(whole).cast(pa.int64())


class _Rows:
    """Converts arrays of Arrow to NumPy arrays, from the outermost list to the numbers."""

    def __init__(
        self, column: str, batch: Batch, shape: Shape, dtype: np.dtype, fill: Fill = None
    ) -> None:
        self.fill = fill
        self.dtype = dtype
        self.column = column
        self.batch = batch
        self.shape = shape
        self.first = 0  # the number of the first row of the current chunk in the batch
        # The end of each row in the items of the chunk; None if rows are of one length.
        self.ends: np.ndarray | None = None

    def at(self, item: int, per_row: int) -> str:
        """The place of an item of the chunk, for messages; a row has `per_row` items."""
        row = item // per_row
        if self.ends is not None:
            row = int(np.searchsorted(self.ends, row, side="right"))
        return self.batch.at(self.column, self.first + row)

    def converted(self, array: Any, depth: int = 0) -> np.ndarray:
        """Converts an array of rows, or of the items of lists (depth 1) that end at `ends`."""
        import pyarrow as pa

        try:
            return self.values(array, depth, 1)
        except pa.ArrowException as error:  # such as a kernel that pyarrow does not have
            raise SourceError(
                f"{self.batch.at(self.column, self.first)}: cannot convert {array.type} to an "
                f"array ({type(error).__name__}: {' '.join(str(error).split())}); write the column "
                "in another type."
            ) from error

    def values(self, array: Any, depth: int, per_row: int) -> np.ndarray:
        """Converts an array whose items are below `depth` axes, `per_row` of them in a row."""
        import pyarrow.types as types

        if types.is_dictionary(array.type):
            return self.values(_decoded(array), depth, per_row)
        if is_time(array.type):
            array = array.view(f"int{array.type.bit_width}")
        if types.is_decimal(array.type):
            array = _plain_decimals(array, self.dtype)
        kind, count = array.type, len(array)
        if array.null_count and self.fill is not None and types.is_primitive(kind):
            array = self._filled(array)
        if array.null_count:
            self.refuse_null(array, per_row)
        if is_tensor(kind):
            order = axes_order(kind) or []
            below = per_row * math.prod(kind.shape)
            inner = self.values(array.storage.flatten(), depth + len(kind.shape), below)
            inner = inner.reshape(count, *kind.shape, *inner.shape[1:])
            return inner.transpose(
                0, *(axis + 1 for axis in order), *range(len(kind.shape) + 1, inner.ndim)
            )
        if types.is_fixed_size_list(kind) or is_list(kind):
            size = self._size(array, depth, per_row)
            inner = self.values(array.flatten(), depth + 1, per_row * size)
            return inner.reshape(count, size, *inner.shape[1:])
        if types.is_fixed_size_binary(kind):
            width = kind.byte_width
            data = array.buffers()[1] if count and width else b""
            flat = np.frombuffer(data, np.uint8)[array.offset * width :][: count * width]
            return flat.reshape(count, width)
        if is_text(kind):
            return self._texts(array, depth, per_row)
        return array.to_numpy(zero_copy_only=not types.is_boolean(kind))

    def _filled(self, array: Any) -> Any:
        """An array of numbers or bools, with `fill` in place of missing ones."""
        import pyarrow as pa

        fill = self.fill
        try:
            # pyarrow would round 0.5 to an integer, and refuse 0 and 1 as bools.
            if pa.types.is_boolean(array.type) and fill in (0, 1):
                fill = bool(fill)
            elif not pa.types.is_floating(array.type) and not float(fill or 0).is_integer():
                raise pa.ArrowInvalid
            return array.fill_null(fill)
        except pa.ArrowException as error:
            raise SourceError(
                f"{self.batch.file}: column {self.column!r}: found fill_null={fill}, expected a "
                f"number of the type of the column, {array.type}."
            ) from error

    def _texts(self, array: Any, depth: int, per_row: int) -> np.ndarray:
        """Texts as uint8, with zeros after them up to the expected width."""
        import pyarrow as pa

        width = self.shape[depth]
        assert width is not None  # `text_bytes`
        flat = array.cast(pa.large_binary())
        offsets = np.frombuffer(flat.buffers()[1], np.int64)[flat.offset :][: len(flat) + 1]
        lengths = np.diff(offsets)
        (long,) = np.nonzero(lengths > width)
        if len(long):
            raise RowError(
                f"{self.at(int(long[0]), per_row)}: found a text of "
                f"{lengths[long[0]]} bytes, expected at most {width}; choose a larger text_bytes."
            )
        texts = np.zeros((len(flat), width), np.uint8)
        data = np.frombuffer(flat.buffers()[2] or b"", np.uint8)
        texts[np.arange(width) < lengths[:, None]] = data[offsets[0] : offsets[-1]]
        return texts

    def _size(self, array: Any, depth: int, per_row: int) -> int:
        """The common length of all lists in an array."""
        import pyarrow.types as types

        if types.is_fixed_size_list(array.type):
            return array.type.list_size
        lengths = array.value_lengths().to_numpy(zero_copy_only=False)
        if depth >= len(self.shape):
            raise RowError(
                f"{self.batch.at(self.column, self.first)}: found lists {depth + 1} deep, "
                f"expected values of shape {self.shape}."
            )
        size = self.shape[depth]
        if size is None:
            size = int(lengths[0]) if len(lengths) else 0
        (odd,) = np.nonzero(lengths != size)
        if len(odd):
            raise RowError(
                f"{self.at(int(odd[0]), per_row)}: found a list of "
                f"length {lengths[odd[0]]}, expected {size} as in the first row of the source; all "
                "rows of a column of arrays have the same shape. Pad or cut the lists."
            )
        return size

    def refuse_null(self, array: Any, per_row: int) -> None:
        """Raises RowError for the first missing item; a row has `per_row` items."""
        import pyarrow as pa
        import pyarrow.compute as compute

        null = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        count = compute.sum(array.is_null()).as_py()
        # 0 would change a mean; NaN shows, and `jnp.nanmean` leaves it out.
        number = 'float("nan")' if pa.types.is_floating(array.type) else "0"
        remedy = f"a number in each row. Give a number for them, fill_null={number}, or leave"
        if not pa.types.is_primitive(array.type):
            remedy = f"a {array.type} in each row, which fill_null does not replace. Leave"
        raise RowError(
            f"{self.at(null, per_row)}: found null, {count} of them "
            f"in this {self.batch.kind}; expected {remedy} out such rows before: arrays have no "
            "missing values."
        )
