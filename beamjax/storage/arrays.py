"""Arrays and a small JSON dictionary (`meta`) as bytes: raw little-endian data, never pickle.

The bytes depend on the arrays and `meta` alone. Decoding copies nothing. Every size in the header
is checked against the buffer before it is used: a forged one can't cause a large allocation.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.storage.schema import MAX_JSON_BYTES, add_codec, parse_json

# --- the names of dtypes: those that JAX computes with

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


# --- arrays as bytes

Buffer: TypeAlias = bytes | bytearray | memoryview

# offset  0   8 bytes   magic
#         8   uint16    format version (1)
#        10   uint16    reserved, zero
#        12   uint32    length of the JSON header, in bytes
#        16   uint64    length of the whole buffer, in bytes
#        24   uint32    crc32 of everything after the JSON header, padding included
#        28   uint32    crc32 of bytes 0..28 and of the JSON header
#        32   JSON      {"arrays": [{"dtype", "nbytes", "offset", "shape"}, ...], "meta": {...}}
#        64·k payloads  each at the next multiple of 64, C order; zeros between

MAGIC = b"\x93BJARR\r\n"
VERSION = 1
ALIGNMENT = 64
_PREFIX = struct.Struct("<8sHHIQI")
"""Bytes 0 to 28, which the second checksum covers."""
_CHECKED_PREFIX = struct.Struct("<8sHHIQII")
"""The same and that checksum."""
_MAX_NDIM = 64
"""Most axes of an array in NumPy 2."""
_MAX_BYTES = 2**63 - 1


def plain_array(array: Any, where: str = "array") -> np.ndarray:
    """The array as a contiguous NumPy array that can be stored; copied only if necessary."""
    if isinstance(array, np.ma.MaskedArray) or not hasattr(array, "__array__"):
        raise StructureError(
            f"{where}: found {type(array).__name__}, expected a NumPy or JAX array (masks "
            "would be lost: call .filled() first)."
        )
    try:
        dtype_name(getattr(array, "dtype", None))
    except StructureError as error:
        raise StructureError(f"{where}: {error}") from None
    array = np.asarray(array, order="C")
    if array.dtype.str[0] == ">":
        return array.astype(array.dtype.newbyteorder("<"))
    return array


class Joined(NamedTuple):
    """Flat arrays of one native dtype, which `encode_arrays` writes as one concatenated array."""

    parts: Sequence[np.ndarray]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.size for part in self.parts),)


def encode_arrays(arrays: Sequence[Any], meta: dict[str, Any] | None = None) -> bytes:
    """Encodes arrays and a dictionary of plain JSON values to one buffer, always the same."""
    views = [
        array if isinstance(array, Joined) else plain_array(array, f"array {index}")
        for index, array in enumerate(arrays)
    ]
    header_bytes, offsets, total = _layout(views, _checked_meta(meta))
    parts: list[Buffer] = [b"", header_bytes]
    position = _CHECKED_PREFIX.size + len(header_bytes)
    payload_crc = 0
    for view, offset in zip(views, offsets, strict=True):
        pieces = view.parts if isinstance(view, Joined) else [view]
        more: list[Buffer] = [bytes(offset - position), *map(_as_bytes, pieces)]
        for part in more:
            payload_crc = zlib.crc32(part, payload_crc)
            parts.append(part)
        position = offset + view.nbytes
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(header_bytes), total, payload_crc)
    parts[0] = prefix + struct.pack("<I", zlib.crc32(header_bytes, zlib.crc32(prefix)))
    return b"".join(parts)


def decode_arrays(data: Buffer) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Decodes what `encode_arrays` made, without copying it."""
    view = _byte_view(data)
    header, position = _read_header(view)
    records, meta = header.get("arrays"), header.get("meta")
    if not isinstance(records, list) or not isinstance(meta, dict):
        raise ArrayFormatError(
            "header of an array buffer: expected a list 'arrays' and a dictionary 'meta', found "
            f"{type(records).__name__} and {type(meta).__name__}."
        )
    arrays = []
    for index, record in enumerate(records):
        array, position = _read_array(view, index, record, position)
        arrays.append(array)
    if position != len(view):
        raise ArrayFormatError(
            f"array buffer: {len(view) - position} trailing bytes after the last of {len(arrays)} "
            f"arrays; expected the buffer to end at byte {position}, found {len(view)} bytes."
        )
    return arrays, meta


def encode_array(array: Any) -> bytes:
    """Encodes one array; see `encode_arrays`."""
    return encode_arrays([array])


def decode_array(data: Buffer) -> np.ndarray:
    """Decodes one array, as a read-only view of `data`; see `decode_arrays`."""
    arrays, _ = decode_arrays(data)
    if len(arrays) != 1:
        raise ArrayFormatError(f"array buffer: found {len(arrays)} arrays, expected one.")
    return arrays[0]


def encoded_size(arrays: Sequence[np.ndarray]) -> int:
    """Approximate number of bytes that `encode_arrays` returns, without encoding anything."""
    return sum(array.nbytes + 2 * ALIGNMENT for array in arrays) + 2 * ALIGNMENT


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _as_bytes(array: np.ndarray) -> memoryview:
    if array.nbytes == 0:
        return memoryview(b"")
    return array.reshape(-1).view(np.uint8).data


def _checked_meta(meta: dict[str, Any] | None) -> dict[str, Any]:
    meta = {} if meta is None else meta
    try:
        is_plain = json.loads(json.dumps(meta, allow_nan=False)) == meta
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    if not is_plain or not isinstance(meta, dict):
        raise StructureError(
            f"meta of an array buffer: found {meta!r:.200}, expected plain JSON values: a "
            "dictionary with string keys, of lists, strings, finite numbers, booleans, None."
        )
    return meta


def _layout(views: list[np.ndarray | Joined], meta: dict[str, Any]) -> tuple[bytes, list[int], int]:
    """JSON header, offset of each array, and total length."""
    # Offsets are relative to the buffer, so they depend on the length of the header in which they
    # are written. The header is padded with spaces to the first length that is long enough.
    start = _CHECKED_PREFIX.size
    while True:
        offsets, position = [], start
        for view in views:
            offsets.append(_aligned(position))
            position = offsets[-1] + view.nbytes
        records = [
            {
                "dtype": dtype_name(view.dtype),
                "nbytes": view.nbytes,
                "offset": offset,
                "shape": list(view.shape),
            }
            for view, offset in zip(views, offsets, strict=True)
        ]
        text = json.dumps(
            {"arrays": records, "meta": meta}, sort_keys=True, separators=(",", ":")
        ).encode()
        if len(text) > MAX_JSON_BYTES - ALIGNMENT:
            raise StructureError(
                f"{len(views)} arrays and their meta: the header has {len(text)} bytes, expected "
                f"at most {MAX_JSON_BYTES - ALIGNMENT}."
            )
        end = _aligned(_CHECKED_PREFIX.size + len(text))
        if end <= start:
            return text.ljust(start - _CHECKED_PREFIX.size), offsets, position
        start = end


def _byte_view(data: Buffer) -> memoryview:
    try:
        return memoryview(data).toreadonly().cast("B")
    except TypeError:
        raise ArrayFormatError(
            f"array buffer: found {type(data).__name__}, expected contiguous bytes."
        ) from None


def _read_header(view: memoryview) -> tuple[dict[str, Any], int]:
    """Checks lengths and checksums; returns the JSON header and where it ends."""
    start = _CHECKED_PREFIX.size
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)]:
        raise ArrayFormatError(
            f"array buffer: bad magic {bytes(view[: len(MAGIC)])!r}, expected {MAGIC!r}; these "
            "bytes were not written by beamjax."
        )
    if len(view) < start:
        raise ArrayFormatError(
            f"array buffer: truncated, found {len(view)} bytes, expected at least {start}."
        )
    _, version, _, length, total, payload_crc, header_crc = _CHECKED_PREFIX.unpack(view[:start])
    if version != VERSION:
        raise ArrayFormatError(
            f"array buffer: unknown version {version}, expected {VERSION}; use the version of "
            "beamjax that wrote it."
        )
    if total != len(view):
        defect = "truncated" if total > len(view) else "trailing bytes"
        raise ArrayFormatError(
            f"array buffer: {defect}, found {len(view)} bytes, expected {total} by its header."
        )
    if length > MAX_JSON_BYTES:  # before anything of that size is read
        raise ArrayFormatError(
            f"array buffer: found a header of {length} bytes, expected at most {MAX_JSON_BYTES}."
        )
    end = start + length
    if end > len(view):
        raise ArrayFormatError(
            f"array buffer: header longer than the data, found {len(view)} bytes, expected at "
            f"least {end}."
        )
    crc = zlib.crc32(view[start:end], zlib.crc32(view[: _PREFIX.size]))
    _check_crc("header", crc, header_crc)
    _check_crc("payload", zlib.crc32(view[end:]), payload_crc)
    return _parse_header(bytes(view[start:end])), end


def _check_crc(what: str, crc: int, expected: int) -> None:
    if crc != expected:
        raise ArrayFormatError(
            f"array buffer: checksum mismatch of the {what}, found {crc:#010x}, expected "
            f"{expected:#010x}; the bytes were changed after they were written."
        )


def _parse_header(text: bytes) -> dict[str, Any]:
    header = parse_json(text, "header of an array buffer")
    if not isinstance(header, dict):
        raise ArrayFormatError(
            f"header of an array buffer: found {type(header).__name__}, expected a JSON object."
        )
    return header


def _read_array(
    view: memoryview, index: int, record: object, position: int
) -> tuple[np.ndarray, int]:
    """The array that `record` describes, and where it ends."""
    where = f"array {index} of an array buffer"
    if not isinstance(record, dict):
        raise ArrayFormatError(f"{where}: found {type(record).__name__}, expected a JSON object.")
    try:
        dtype = dtype_from_name(record.get("dtype"))
    except ArrayFormatError as error:
        raise ArrayFormatError(f"{where}: {error}") from None
    shape = checked_shape(where, record.get("shape"), dtype)
    expected = {"offset": _aligned(position), "nbytes": math.prod(shape) * dtype.itemsize}
    for name, value in expected.items():
        recorded = record.get(name)
        if type(recorded) is not int or recorded != value:
            raise ArrayFormatError(
                f"{where}: found {name} {recorded!r}, expected {value} for {dtype_name(dtype)}"
                f"{list(shape)} after byte {position}."
            )
    offset, nbytes = expected["offset"], expected["nbytes"]
    if offset + nbytes > len(view):
        raise ArrayFormatError(
            f"{where}: ends at byte {offset + nbytes}, outside of the {len(view)} bytes found."
        )
    if nbytes == 0:
        array = np.empty(shape, dtype)
        array.flags.writeable = False
        return array, offset
    stored = dtype.newbyteorder("<")
    flat = np.frombuffer(view, stored, count=nbytes // dtype.itemsize, offset=offset)
    return flat.reshape(shape), offset + nbytes


def checked_shape(where: str, shape: object, dtype: np.dtype) -> tuple[int, ...]:
    """Checks a shape that was read."""
    if not isinstance(shape, list) or len(shape) > _MAX_NDIM:
        description = f"{len(shape)} dimensions" if isinstance(shape, list) else repr(shape)
        raise ArrayFormatError(
            f"{where}: found as shape {description}, expected a list of at most {_MAX_NDIM} sizes."
        )
    if any(type(size) is not int or not 0 <= size <= _MAX_BYTES for size in shape):
        raise ArrayFormatError(
            f"{where}: found the shape {shape!r:.200}, expected sizes from 0 to 2**63 - 1."
        )
    # NumPy ignores zeros when it checks that a shape fits, so (0, 2**62) can fail too.
    if math.prod(max(size, 1) for size in shape) * max(dtype.itemsize, 1) > _MAX_BYTES:
        raise ArrayFormatError(
            f"{where}: found the shape {shape!r:.200}, expected at most 2**63 - 1 bytes."
        )
    return tuple(shape)
