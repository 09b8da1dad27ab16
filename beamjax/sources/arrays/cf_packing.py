"""Decodes numbers packed by the CF conventions: scale_factor, add_offset and fill values.

The rules are those of xarray with `mask_and_scale=True`.
"""

from __future__ import annotations

import base64
import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from beamjax.errors import StructureError
from beamjax.storage.arrays import dtype_from_name

_FILLS = ("_FillValue", "missing_value")


@dataclasses.dataclass(frozen=True)
class Packing:
    """How values are decoded from the stored numbers of an array: `stored * scale + offset`."""

    stored: str  # the name of the stored dtype, in native byte order
    unsigned: bool  # integers stored as signed are unsigned, or the reverse (`_Unsigned`)
    scale: float | None
    offset: float | None
    fills: tuple[int | float, ...]  # stored numbers that stand for missing values: NaN

    @property
    def dtype(self) -> np.dtype:
        """The float dtype of the values: the one that xarray chooses for attributes from JSON."""
        stored = np.dtype(self.stored)
        exact = stored.itemsize <= (4 if stored.kind == "f" else 2)
        scaled = self.scale is not None or self.offset is not None
        return np.dtype(np.float32 if exact and not scaled else np.float64)

    def unpacked(self, stored: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Decodes stored numbers; missing values become NaN."""
        if self.unsigned:
            stored = stored.view(_other_sign(stored.dtype))
        values = stored.astype(self.dtype)
        if self.scale is not None:
            values *= self.scale
        if self.offset is not None:
            values += self.offset
        for fill in self.fills:
            values[stored == fill] = np.nan
        return values.astype(dtype, copy=False)

    def __post_init__(self) -> None:
        if dtype_from_name(self.stored).kind not in "iuf":
            raise TypeError(f"found numbers packed as {self.stored!r:.80}")


def packing_of(
    attributes: Mapping[str, Any], stored: np.dtype, fill: Any, where: str
) -> Packing | None:
    """The packing of an array by its attributes; None if the stored numbers are the values."""
    if stored.kind not in "iuf":
        return None
    scale, offset = (_number(attributes, x, where) for x in ("scale_factor", "add_offset"))
    unsigned = stored.kind != "f" and attributes.get("_Unsigned") == (
        "true" if stored.kind == "i" else "false"
    )
    read = _other_sign(stored) if unsigned else stored
    numbers = [_number(attributes, name, where, item) for name in _FILLS
             for item in np.ravel(np.asarray(attributes.get(name, []), object))]  # fmt: skip
    numbers += [] if fill is None else [fill.item() if isinstance(fill, np.generic) else fill]
    known = (_as_stored(number, read, unsigned) for number in numbers if number is not None)
    fills = tuple(dict.fromkeys(number for number in known if number is not None))
    scale, offset = (None if scale == 1 else scale), (None if offset == 0 else offset)
    if scale is None and offset is None and not fills and not unsigned:
        return None
    return Packing(
        stored.name,
        unsigned,
        scale=None if scale is None else float(scale),
        offset=None if offset is None else float(offset),
        fills=fills,
    )


def packing_text(packing: Packing) -> str:
    """`scale_factor=0.01, _FillValue=-32767`, for messages."""
    parts = {"scale_factor": packing.scale, "add_offset": packing.offset}
    texts = [f"{name}={value}" for name, value in parts.items() if value is not None]
    texts += ["_Unsigned"] if packing.unsigned else []
    return ", ".join([*texts, *(f"_FillValue={fill}" for fill in packing.fills)])


def _other_sign(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{'u' if dtype.kind == 'i' else 'i'}{dtype.itemsize}")


def _number(
    attributes: Mapping[str, Any], name: str, where: str, value: Any = None
) -> int | float | None:
    """The attribute `name`, or `value` from a list of it, as a number."""
    value = attributes.get(name) if value is None else value
    if isinstance(value, str):
        try:
            return float(value)  # "NaN"
        except ValueError:
            pass
        try:  # xarray writes floats to Zarr 3 as bytes in base64.
            (number,) = struct.unpack("<d", base64.standard_b64decode(value))
            return float(number)
        except (ValueError, struct.error):
            pass
    elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise StructureError(f"{where}, attribute {name!r}: found {value!r:.80}, expected a number.")


def _as_stored(number: int | float, dtype: np.dtype, unsigned: bool) -> int | float | None:
    """A fill value in the dtype of the numbers; None if it equals none of them."""
    if number != number:  # NaN needs no replacement.
        return None
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(number))
    if number != int(number):
        return None
    limits, bits = np.iinfo(dtype), 8 * dtype.itemsize
    number = int(number)
    if unsigned and not limits.min <= number <= limits.max:  # given in the stored dtype
        number = (number - int(limits.min)) % 2**bits + int(limits.min)
    return number if limits.min <= number <= limits.max else None
