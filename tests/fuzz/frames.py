"""Bytes of TFRecord files with checksums that are right."""

import struct
from typing import Any

from beamjax.sources.crc32c import checksums, masked
from beamjax.sources.tf_example import _example_type


def _checksum(data: bytes) -> bytes:
    return masked(checksums([data])).tobytes()


def framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return length + _checksum(length) + record + _checksum(record)


def example(features: dict[str, Any]) -> bytes:
    message = _example_type(False)()
    for name, value in features.items():
        feature = message.features.feature[name]
        if isinstance(value, bytes):
            feature.bytes_list.value.append(value)
        elif isinstance(value[0], float):
            feature.float_list.value.extend(value)
        else:
            feature.int64_list.value.extend(value)
    return bytes(message.SerializeToString(deterministic=True))


def mended(data: bytes) -> bytes:
    """The same bytes with right checksums, wherever their lengths lead to."""
    out, position = bytearray(data), 0
    while position + 12 <= len(out):
        out[position + 8 : position + 12] = _checksum(bytes(out[position : position + 8]))
        (length,) = struct.unpack_from("<Q", out, position)
        end = position + 12 + length
        if end + 4 <= len(out):
            out[end : end + 4] = _checksum(bytes(out[position + 12 : end]))
        position = end + 4
    return bytes(out)
