"""Files of TFRecord with Examples, encoded from their definitions and framed by Beam."""

import functools
import struct

import numpy as np
from apache_beam.io import tfrecordio

# Beam asks for a library that has it.
tfrecordio._default_crc32c_fn.fn = lambda data: crc32c(bytes(data))


@functools.cache
def _table():
    found = []
    for register in range(256):
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
        found.append(register)
    return found


def crc32c(data):
    """CRC-32C a byte at a time."""
    register, table = 0xFFFFFFFF, _table()
    for byte in data:
        register = (register >> 8) ^ table[(register ^ byte) & 0xFF]
    return register ^ 0xFFFFFFFF


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
