"""Files of TFRecord with Examples, encoded from their definitions and framed by Beam."""

import struct

import google_crc32c
import numpy as np
from apache_beam.io import tfrecordio

# Beam asks for another library that has it.
tfrecordio._default_crc32c_fn.fn = lambda data: google_crc32c.value(bytes(data))


def write(path, records):
    with open(path, "wb") as file:
        for record in records:
            tfrecordio._TFRecordUtil.write_record(file, record)
    return str(path)


def varint(number):
    number &= 2**64 - 1
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def delimited(number, data):
    return varint(number << 3 | 2) + varint(len(data)) + data


def feature(value, packed=True):
    """A feature: bytes for a bytes_list, floats for a float_list, integers for an int64_list."""
    if isinstance(value, bytes):
        return delimited(1, delimited(1, value))
    flat = np.asarray(value).reshape(-1)
    if flat.dtype.kind == "f":
        parts = [struct.pack("<f", x) for x in flat]
        values = delimited(1, b"".join(parts)) if packed else b"".join(b"\x0d" + x for x in parts)
        return delimited(2, values)
    parts = [varint(int(x)) for x in flat]
    values = delimited(1, b"".join(parts)) if packed else b"".join(b"\x08" + x for x in parts)
    return delimited(3, values)


def example(features, packed=True):
    """A tf.train.Example as bytes."""
    entries = b""
    for name, value in features.items():
        encoded = value if isinstance(value, Encoded) else feature(value, packed)
        entries += delimited(1, delimited(1, name.encode()) + delimited(2, bytes(encoded)))
    return delimited(1, entries)


class Encoded(bytes):
    """A feature that is encoded already."""


def framed(record, length=None, good_length=True, good_data=True):
    """A record as it is in a file, right or not."""
    header = struct.pack("<Q", len(record) if length is None else length)
    mask = tfrecordio._TFRecordUtil._masked_crc32c
    sums = [mask(header) + (not good_length), mask(record) + (not good_data)]
    return header + struct.pack("<I", sums[0]) + record + struct.pack("<I", sums[1])


def mended(data):
    """The same bytes with right checksums, wherever their lengths lead to."""
    out, position = bytearray(data), 0
    while position + 12 <= len(out):
        (length,) = struct.unpack_from("<Q", out, position)
        end = position + 12 + length
        right = framed(bytes(out[position + 12 : end]), length)
        out[position + 8 : position + 12] = right[8:12]
        if end + 4 <= len(out):
            out[end : end + 4] = right[-4:]
        position = end + 4
    return bytes(out)
