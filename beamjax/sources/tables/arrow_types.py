"""Finds out which columns of Arrow can be arrays, and the shapes and dtypes of their rows."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from beamjax._text import hint
from beamjax.errors import SourceError, StructureError

Shape = tuple[int | None, ...]
"""The shape of one row; None for axes of lists of any length."""

MAX_TEXT = 1 << 20
"""Largest `text_bytes`."""
DECIMALS = ("float64", "int64")
"""Dtypes as which decimals are read."""


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The options by which columns are converted to arrays; see `from_parquet`."""

    text_bytes: int | None = None
    buckets: Sequence[int] | None = None
    fill_null: int | float | None = None
    times: bool = False
    decimals: str | None = None

    def check(self, caller: str) -> None:
        """Raises StructureError for invalid options."""
        size, fill = self.text_bytes, self.fill_null
        if size is not None and (type(size) is not int or not 1 <= size <= MAX_TEXT):
            raise StructureError(
                f"{caller}, text_bytes: found {size!r}, expected a number from 1 to {MAX_TEXT}."
            )
        if fill is not None and type(fill) not in (int, float):
            raise StructureError(f"{caller}, fill_null: found {fill!r:.80}, expected a number.")
        if self.decimals is not None and self.decimals not in DECIMALS:
            raise StructureError(
                f"{caller}, decimals: found {self.decimals!r:.80}, expected 'float64' or 'int64'."
            )


class RowType(NamedTuple):
    """The type of a row of a column."""

    shape: Shape
    dtype: np.dtype
    unit: str = ""  # what integers count that stand for times or decimals: "timestamp[ms]", "1e-2"


_NUMBERS = (
    "expected bool, integers, floats, fixed-size binary, tensors of a fixed shape, or lists of "
    "these of one length"
)


# --- the columns of a schema: `a.b` is the field `b` of the column of structs `a`


def path_of(fields: Any, name: str) -> tuple[str, ...]:
    """The names of the fields from a schema, or a type of structs, to a column; () if none."""
    import pyarrow.types as types

    # A field `a.b` of the schema has precedence over a field `b` of structs.
    if fields.get_field_index(name) >= 0:
        return (name,)
    at = name.find(".")
    while at >= 0:
        index = fields.get_field_index(name[:at])
        kind = _known_type(fields, index) if index >= 0 else None
        if kind is not None and types.is_struct(kind) and (rest := path_of(kind, name[at + 1 :])):
            return (name[:at], *rest)
        at = name.find(".", at + 1)
    return ()


def column_names(fields: Any, prefix: str = "") -> Iterator[str]:
    """The names of all columns, in the order of the file; the fields of structs for structs."""
    import pyarrow.types as types

    for index, name in enumerate(fields.names):
        kind = _known_type(fields, index)
        if kind is not None and types.is_struct(kind) and kind.num_fields:
            yield from column_names(kind, f"{prefix}{name}.")
        else:
            yield prefix + name


def _known_type(fields: Any, index: int) -> Any:
    """The type of a field; None if pyarrow can't represent it."""
    try:
        return fields.field(index).type
    except (KeyError, ValueError, NotImplementedError):
        return None


def column_in(table: Any, name: str) -> Any:
    """A column of a Table or a RecordBatch. A field of a missing struct is missing."""
    import pyarrow.compute as compute

    first, *rest = path_of(table.schema, name)
    column = table.column(first)
    for field in rest:
        column = compute.struct_field(column, field)
    return column


def chosen(schema: Any, columns: Any, file: str, caller: str) -> list[str]:
    """The names of the columns that a user chose, sorted, as JAX orders dictionaries."""
    listed = [columns] if isinstance(columns, str) else columns
    if listed is None:
        listed = list(column_names(schema))
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise StructureError(
            f"{caller}: found columns={columns!r:.80}, expected the name of a column, a list of "
            "names, or None for all."
        )
    if not listed:
        raise StructureError(f"{caller}: found no columns for {file}, expected at least one name.")
    check_columns(schema, listed, file)
    return sorted(set(listed))


def check_columns(schema: Any, names: Sequence[str], file: str) -> None:
    """Raises SourceError unless a file has each of these columns once."""
    missing = [name for name in names if not path_of(schema, name)]
    if not missing:
        return
    listed, name = list(column_names(schema)), missing[0]
    count = collections.Counter(schema.names)[name]
    if count > 1:
        raise SourceError(f"{file}: found {count} columns named {name!r}, expected one.")
    near = hint(name, listed) or "."
    names = ", ".join(map(repr, listed[:50])) or "none"
    raise SourceError(
        f"{file}: found no column {name!r}{near} There are {names}"
        f"{', ...' if len(listed) > 50 else ''}."
    )


# --- the types of columns


def row_type(schema: Any, column: str, file: str, how: Conversion = Conversion()) -> RowType:
    """The type of a row of a column."""
    kind = column_type(schema, column, file)
    converted = _row_type(kind, how)
    if converted is not None:
        return converted
    others = _numeric_columns(schema, how)
    ways = []
    if others:
        choice = ", ".join(map(repr, others[:20])) + (", ..." if len(others) > 20 else "")
        ways.append(f"choose others, columns=[{choice}]")
    for way, option, other in (
        ("bytes", "text_bytes=64", Conversion(text_bytes=1)),
        ("integers", "times=True", Conversion(times=True)),
        ("floats", "decimals='float64'", Conversion(decimals="float64")),
    ):
        if _row_type(kind, other) is not None:
            ways.append(f"read it as {way}, {option}")
    remedy = ", or ".join([*ways, "write it as numbers"])
    raise StructureError(
        f"{file}: column {column!r} is of the type {kind}, {_NUMBERS}. "
        f"{remedy[0].upper()}{remedy[1:]}."
    )


def column_type(schema: Any, column: str, file: str) -> Any:
    """The type of a column."""
    try:
        kind = schema
        for name in path_of(schema, column):
            kind = kind.field(name).type
        str(kind)  # pyarrow finds damaged types only on use.
    except (KeyError, ValueError, NotImplementedError) as error:
        raise SourceError(
            f"{file}: column {column!r} is of a type that pyarrow cannot read "
            f"({type(error).__name__}: {error}); choose other columns, columns=[...]."
        ) from error
    return kind


def _numeric_columns(schema: Any, how: Conversion) -> list[str]:
    """The columns that can be read."""
    names = []
    for name in column_names(schema):
        try:
            if path_of(schema, name) and _row_type(column_type(schema, name, ""), how) is not None:
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


def _row_type(kind: Any, how: Conversion) -> RowType | None:
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
        elif types.is_decimal(kind):  # before binary of a fixed size, which these are as well
            unit = f"1e-{kind.scale}" if how.decimals == "int64" else ""
            return RowType(tuple(shape), np.dtype(how.decimals), unit) if how.decimals else None
        elif types.is_fixed_size_binary(kind):
            return RowType((*shape, kind.byte_width), np.dtype(np.uint8))
        elif how.text_bytes is not None and is_text(kind):
            return RowType((*shape, how.text_bytes), np.dtype(np.uint8))
        elif types.is_boolean(kind):
            return RowType(tuple(shape), np.dtype(np.bool_))
        elif types.is_integer(kind):
            sign = "u" if types.is_unsigned_integer(kind) else ""
            return RowType(tuple(shape), np.dtype(f"{sign}int{kind.bit_width}"))
        elif how.times and is_time(kind):
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
    """The axis in memory of each axis of a tensor; None if that is ambiguous."""
    # For permutations that are not their own inverse, pyarrow deviates from Arrow's specification,
    # which has the inverse.
    order = list(kind.permutation or range(len(kind.shape)))
    return order if all(order[order[axis]] == axis for axis in order) else None


def agree(first: RowType, other: RowType) -> bool:
    """Whether two columns can be parts of one array."""
    return (
        (first.dtype, first.unit) == (other.dtype, other.unit)
        and len(first.shape) == len(other.shape)
        and all(a == b or None in (a, b) for a, b in zip(first.shape, other.shape, strict=True))
    )
