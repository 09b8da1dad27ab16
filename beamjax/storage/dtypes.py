"""The names of the dtypes that are stored as raw bytes: those that JAX computes with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.storage.schema import add_codec

FLOAT0 = np.dtype([("float0", "V")])
"""The dtype of tangents of integers in JAX. An array of it has a shape, but no bytes."""

_NATIVE = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def _dtype_table() -> dict[str, np.dtype]:
    table = {name: np.dtype(name) for name in _NATIVE}
    for attribute in vars(ml_dtypes).values():
        if isinstance(attribute, type) and issubclass(attribute, np.generic):
            dtype = np.dtype(attribute)
            table[dtype.name] = dtype
    table["float0"] = FLOAT0
    return table


_DTYPES = _dtype_table()


def dtype_name(dtype: Any) -> str:
    """The name of a dtype that a buffer can hold: `"float32"`, `"bfloat16"`, `"float0"`, ..."""
    if isinstance(dtype, np.dtype):
        if dtype == FLOAT0:
            return "float0"
        known = _DTYPES.get(dtype.name)
        if known is not None and dtype.newbyteorder("=") == known:
            return dtype.name
    raise StructureError(
        f"dtype {dtype} cannot be stored as raw bytes; expected a dtype that JAX computes with "
        "(bool, integers, floats, complex, float0). Convert strings and objects to numbers (a text "
        'to its bytes: np.char.encode(array, "utf-8")[..., None].view(np.uint8)), and pass typed '
        "keys through jax.random.key_data."
    )


def dtype_from_name(name: object) -> np.dtype:
    """Undoes `dtype_name`; the dtype is in native byte order."""
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ArrayFormatError(
            f"found the dtype {name!r}, expected one of {', '.join(sorted(_DTYPES))}; if another "
            "process wrote it, install its version of ml_dtypes here, where it is "
            f"{ml_dtypes.__version__}."
        )
    return dtype


add_codec(np.dtype, dtype_name, dtype_from_name)
