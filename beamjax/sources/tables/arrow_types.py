"""Finds out which columns of Arrow can be arrays, and the shapes and dtypes of their rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from beamjax._text import hint
from beamjax.errors import SourceError, StructureError

Shape = tuple[int | None, ...]
"""The shape of one row; None for axes of lists of any length."""


class RowType(NamedTuple):
    """The type of a row of a column.

    Attributes:
      shape: the shape of the row.
      dtype: the dtype of its values.
      time: what integers that stand for times count: "timestamp[ms]"; "" for other values.
    """

    shape: Shape
    dtype: np.dtype
    time: str = ""


_NUMBERS = (
    "expected bool, integers, floats, fixed-size binary, tensors of a fixed shape, or lists of "
    "these of one length"
)


def chosen(schema: Any, columns: Any, file: str, caller: str) -> list[str]:
    """The names of the columns that a user chose, sorted, as JAX orders dictionaries.

    Args:
      schema: the schema of the file.
      columns: a name, a list of names, or None for all.
      file: the path of the file, for messages.
      caller: the caller, for messages: "from_parquet".

    Raises:
      StructureError: `columns` are no names.
      SourceError: a column is missing, or occurs twice.
    """
    listed = [columns] if isinstance(columns, str) else columns
    if listed is None:
        listed = list(schema.names)
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise StructureError(
            f"{caller}: found columns={columns!r:.80}, expected the name of a column, a list of "
            "names, or None for all."
        )
    if not listed:
        raise StructureError(f"{caller}: found no columns for {file}, expected at least one name.")
    for name in listed:
        count = schema.names.count(name)
        if count > 1:
            raise SourceError(f"{file}: found {count} columns named {name!r}, expected one.")
        if not count:
            near = hint(name, schema.names) or "."
            names = ", ".join(map(repr, schema.names[:50])) or "none"
            raise SourceError(
                f"{file}: found no column {name!r}{near} There are {names}"
                f"{', ...' if len(schema.names) > 50 else ''}."
            )
    return sorted(set(listed))


def row_type(
    schema: Any, column: str, file: str, text_bytes: int | None = None, times: bool = False
) -> RowType:
    """The type of a row of a column.

    Args:
      schema: the schema of the file.
      column: the name of the column.
      file: the path of the file, for messages.
      text_bytes: reads texts, and bytes of any length, as uint8[text_bytes]; None refuses them.
      times: whether times and dates are read as integers, in their unit.

    Raises:
      SourceError: pyarrow does not know the type of the column.
      StructureError: the column does not hold numbers.
    """
    kind = column_type(schema, column, file)
    found = _row_type(kind, text_bytes, times)
    if found is None:
        others = _numeric_columns(schema, text_bytes, times)
        ways = []
        if others:
            choice = ", ".join(map(repr, others[:20])) + (", ..." if len(others) > 20 else "")
            ways.append(f"choose others, columns=[{choice}]")
        if _row_type(kind, 1, False) is not None:
            ways.append("read it as bytes, text_bytes=64")
        if _row_type(kind, None, True) is not None:
            ways.append("read it as integers, times=True")
        remedy = ", or ".join([*ways, "write it as numbers"])
        raise StructureError(
            f"{file}: column {column!r} is of the type {kind}, {_NUMBERS}. "
            f"{remedy[0].upper()}{remedy[1:]}."
        )
    return found


def column_type(schema: Any, column: str, file: str) -> Any:
    """The type of a column.

    Raises:
      SourceError: pyarrow can't represent it. Other columns of the file can be read.
    """
    try:
        kind = schema.field(column).type
        str(kind)  # pyarrow finds damaged types only on use.
    except (KeyError, ValueError, NotImplementedError) as error:
        raise SourceError(
            f"{file}: column {column!r} is of a type that pyarrow cannot read "
            f"({type(error).__name__}: {error}); choose other columns, columns=[...]."
        ) from error
    return kind


def _numeric_columns(schema: Any, text_bytes: int | None, times: bool) -> list[str]:
    """The columns that can be read."""
    names = []
    for name in schema.names:
        try:
            if _row_type(column_type(schema, name, ""), text_bytes, times) is not None:
                names.append(name)
        except SourceError:
            continue
    return names


def is_text(kind: Any) -> bool:
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


def _row_type(kind: Any, text_bytes: int | None, times: bool) -> RowType | None:
    """The type of a row; None if it does not hold numbers."""
    import pyarrow.types as types

    shape: list[int | None] = []
    while True:
        if types.is_dictionary(kind):
            kind = kind.value_type
        elif is_tensor(kind) and (order := axes_order(kind)) is not None:
            shape += [kind.shape[axis] for axis in order]
            kind = kind.value_type
        elif types.is_fixed_size_list(kind):
            shape.append(kind.list_size)
            kind = kind.value_type
        elif is_list(kind):
            shape.append(None)
            kind = kind.value_type
        elif types.is_fixed_size_binary(kind):
            return RowType((*shape, kind.byte_width), np.dtype(np.uint8))
        elif text_bytes is not None and is_text(kind):
            return RowType((*shape, text_bytes), np.dtype(np.uint8))
        elif types.is_boolean(kind):
            return RowType(tuple(shape), np.dtype(np.bool_))
        elif types.is_integer(kind):
            sign = "u" if types.is_unsigned_integer(kind) else ""
            return RowType(tuple(shape), np.dtype(f"{sign}int{kind.bit_width}"))
        elif times and is_time(kind):
            return RowType(tuple(shape), np.dtype(f"int{kind.bit_width}"), _time_text(kind))
        elif types.is_floating(kind):
            return RowType(tuple(shape), np.dtype(f"float{kind.bit_width}"))
        else:
            return None


def _time_text(kind: Any) -> str:
    """What a time counts. Timestamps of all zones count from the same moment, in UTC."""
    import pyarrow.types as types

    if types.is_timestamp(kind) and kind.tz is not None:
        return f"timestamp[{kind.unit}, UTC]"
    return str(kind)


def is_time(kind: Any) -> bool:
    """Whether values are times, dates or durations, each of which is a count of a unit."""
    import pyarrow.types as types

    return bool(types.is_temporal(kind)) and not types.is_interval(kind)


def is_list(kind: Any) -> bool:
    """Whether values are lists of any length."""
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


def is_tensor(kind: Any) -> bool:
    """Whether values are tensors of a fixed shape."""
    import pyarrow as pa

    return isinstance(kind, pa.FixedShapeTensorType)


def axes_order(kind: Any) -> list[int] | None:
    """The axis in memory of each axis of a tensor; None if that is ambiguous.

    For permutations that are not their own inverse, pyarrow deviates from Arrow's specification,
    which has the inverse.
    """
    order = list(kind.permutation or range(len(kind.shape)))
    return order if all(order[order[axis]] == axis for axis in order) else None


def agree(first: RowType, other: RowType) -> bool:
    """Whether two columns can be parts of one array."""
    return (
        (first.dtype, first.time) == (other.dtype, other.time)
        and len(first.shape) == len(other.shape)
        and all(a == b or None in (a, b) for a, b in zip(first.shape, other.shape, strict=True))
    )
