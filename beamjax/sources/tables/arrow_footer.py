"""How many rows the record batches of an Arrow file have, from its headers alone.

pyarrow gives only after it has read, and unpacked, the batches themselves. The format is that of
https://arrow.apache.org/docs/format/Columnar.html#ipc-file-format and the schemas beside it.
"""

from __future__ import annotations

import os
import struct
from typing import Any, BinaryIO, NamedTuple

from flatbuffers import number_types
from flatbuffers.table import Table

_MAGIC = b"ARROW1"
_TAIL = struct.Struct("<i6s")  # length of the footer, magic
_BLOCK = struct.Struct("<qi4xq")  # where a message is, bytes of its header, bytes of its body
_RECORD_BATCH = 3  # in the union of headers of a message


class BatchHeader(NamedTuple):
    """What a record batch says of itself."""

    rows: int
    packed: bool


def batch_headers(file: BinaryIO, limit: int | None = None) -> list[BatchHeader]:
    """The headers of the first record batches of a file, all by default.

    Raises:
      ValueError: it is no file of Arrow.
    """
    try:
        return [_header(file, *block) for block in _blocks(file)[:limit]]
    except (struct.error, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"a header of Arrow is damaged ({error})") from error


def _blocks(file: BinaryIO) -> list[tuple[int, int]]:
    """Where the headers of the record batches are, and how long."""
    end = file.seek(0, os.SEEK_END)
    length, magic = _TAIL.unpack(_bytes(file, max(end - _TAIL.size, 0), _TAIL.size))
    if magic != _MAGIC or not 0 < length <= end - _TAIL.size:
        raise ValueError("found no footer of Arrow at its end")
    footer = _root(_bytes(file, end - _TAIL.size - length, length))
    offset = _field(footer, 3)
    if not offset:
        return []
    start = footer.Vector(offset)
    if footer.VectorLen(offset) * _BLOCK.size > length:
        raise ValueError("found more record batches than its footer can hold")
    found = (
        _BLOCK.unpack_from(footer.Bytes, start + i * _BLOCK.size)
        for i in range(footer.VectorLen(offset))
    )
    return [(where, size) for where, size, _ in found]


def _header(file: BinaryIO, where: int, size: int) -> BatchHeader:
    data = _bytes(file, where, size)
    skipped = 8 if data[:4] == b"\xff" * 4 else 4  # before Arrow 0.15 the length alone
    message = _root(data[skipped:])
    kind = _field(message, 1)
    if not kind or message.Get(number_types.Uint8Flags, kind + message.Pos) != _RECORD_BATCH:
        raise ValueError("found a message that is no record batch")
    batch = Table(message.Bytes, message.Indirect(_field(message, 2) + message.Pos))
    length = _field(batch, 0)
    rows = batch.Get(number_types.Int64Flags, length + batch.Pos) if length else 0
    if rows < 0:
        raise ValueError(f"found a record batch of {rows} rows")
    return BatchHeader(rows, bool(_field(batch, 3)))


def _bytes(file: BinaryIO, start: int, count: int) -> bytes:
    if start < 0 or count < 0:
        raise ValueError(f"found {count} bytes at {start}")
    file.seek(start)
    found = file.read(count)
    if len(found) != count:
        raise ValueError(f"ends after {start + len(found)} bytes, expected {start + count}")
    return found


def _root(data: bytes) -> Any:
    return Table(data, struct.unpack_from("<I", data)[0])


def _field(table: Any, number: int) -> int:
    """Where a field of a table is, from the table; 0 if it is not there."""
    return table.Offset(4 + 2 * number)
