"""Frames of TFRecord files: length, checksum of the length, record, checksum of the record."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import (
    DataFile,
    compression,
    compression_of_content,
    open_file,
    open_stream,
    readable,
)

HEADER_BYTES = 12
"""Bytes of a length (8) and its checksum."""
FOOTER_BYTES = 4
"""Bytes of the checksum of a record."""
WINDOW_BYTES = 1 << 16
"""Bytes that are read at a time to find headers."""
CHUNK_BYTES = 1 << 22
"""Bytes that are read from a stream at a time."""
EXPECTED = "a file of TFRecord"

_length_at = struct.Struct("<Q").unpack_from


def compression_of(path: str) -> str:
    """The compression of a file, by its name or else its content: ".gz", or "" if there is none."""
    named = compression(path)
    if named:
        return named
    with readable(path, EXPECTED), open_file(path) as opened:
        data = opened.read(HEADER_BYTES)
    ending = compression_of_content(data)
    if ending and len(data) == HEADER_BYTES and not len(_wrong_lengths(data, [0])):
        return ""  # These bytes are the length of a record, with a valid checksum.
    return ending


def record_offsets(file: DataFile, start: int, number: int, stop: int) -> Iterator[np.ndarray]:
    """Finds the positions of records from `start` on, window by window, in their headers only."""
    path, position = file.path, start
    with readable(path, EXPECTED), open_file(path) as opened:
        while position < stop:
            opened.seek(position)
            window = opened.read(WINDOW_BYTES)
            begins, end = headers(window, stop - position)
            check_headers(window, begins, path, number)
            number += len(begins)
            if not begins or position + end > file.nbytes:
                raise truncated(path, number - 1 if begins else number)
            yield np.asarray(begins) + position
            position += end
    if position != stop:
        raise SourceError(
            f"{path}: found no record that begins after {stop} bytes; the source was made from "
            "another file."
        )


def headers(data: bytes, limit: int) -> tuple[list[int], int]:
    """Finds frames in bytes that begin with a frame. Nothing is checked."""
    begins: list[int] = []
    position, last = 0, min(len(data) - HEADER_BYTES, limit - 1)
    while position <= last:
        begins.append(position)
        position += HEADER_BYTES + FOOTER_BYTES + _length_at(data, position)[0]
    return begins, position


def check_headers(data: bytes, begins: Sequence[int], path: str, number: int) -> None:
    """Compares lengths with their checksums."""
    if not begins:
        return
    wrong = _wrong_lengths(data, begins)
    if len(wrong):
        raise SourceError(
            f"{path}, record {number + wrong[0]}: found a length with a wrong checksum, expected "
            "a record of TFRecord; the file is damaged, or has another format."
        )


def _wrong_lengths(data: bytes, begins: Sequence[int]) -> np.ndarray:
    """The indices of the frames at these positions in which the checksum of the length is wrong."""
    stored = b"".join([data[begin + 8 : begin + HEADER_BYTES] for begin in begins])
    computed = masked_checksums([data[begin : begin + 8] for begin in begins])
    return np.flatnonzero(computed != np.frombuffer(stored, "<u4"))


def check_records(
    records: Sequence[bytes], stored: Sequence[bytes], path: str, number: int
) -> None:
    """Compares records with their checksums."""
    expected = np.frombuffer(b"".join(stored), "<u4")
    wrong = np.flatnonzero(masked_checksums(records) != expected)
    if len(wrong):
        raise SourceError(
            f"{path}, record {number + wrong[0]}: found {len(records[wrong[0]])} bytes with a "
            "wrong checksum; the file is damaged."
        )


def truncated(path: str, number: int) -> SourceError:
    """The error for a file that ends within a record."""
    return SourceError(f"{path}, record {number}: the file ends in it.")


def frames_in(data: bytes, begins: Sequence[int], end: int) -> tuple[list[bytes], list[bytes]]:
    """The records of adjacent frames, and their stored checksums."""
    ends = [*begins[1:], end]
    records = [data[a + HEADER_BYTES : b - FOOTER_BYTES] for a, b in zip(begins, ends, strict=True)]
    return records, [data[b - FOOTER_BYTES : b] for b in ends]


# Shards that are read in order often begin in the block in which the one before ended.
@functools.lru_cache(16)
def block_offsets(file: DataFile, start: int, number: int, stop: int) -> np.ndarray:
    """The position of each record in a block of a file, then the end of the block."""
    return np.concatenate([*record_offsets(file, start, number, stop), [stop]])


def stream_records(
    file: DataFile, chunk_bytes: int | None = None
) -> Iterator[tuple[int, list[bytes]]]:
    """Reads all records of a file from its beginning."""
    chunk = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
    number = 0
    compressed = compression_of(file.path)
    with readable(file.path, EXPECTED), open_stream(file.path, compressed) as opened:
        data = b""
        while more := _more(opened, data, chunk):
            data += more
            begins, end = headers(data, len(data))
            check_headers(data, begins, file.path, number)
            if begins and end > len(data):
                end = begins.pop()
            if begins:
                records, stored = frames_in(data, begins, end)
                check_records(records, stored, file.path, number)
                yield number, records
                number += len(records)
            data = data[end:]
        if data:
            raise truncated(file.path, number)


def _more(opened: BinaryIO, data: bytes, chunk: int) -> bytes:
    """Reads the rest of the first record in `data`, or a chunk."""
    # At most doubles `data`: a damaged length can't cause a large allocation.
    missing = (
        _length_at(data)[0] + HEADER_BYTES + FOOTER_BYTES - len(data)
        if len(data) >= HEADER_BYTES
        else 0
    )
    return opened.read(min(max(missing, chunk), max(chunk, len(data))))


def masked_checksums(records: Sequence[bytes]) -> np.ndarray:
    """CRC-32C of each record, uint32, masked as in TFRecord."""
    # Here, as all programs import this module, and few read TFRecords.
    import google_crc32c

    # A CRC over data that contains its own CRC would be degenerate, hence the mask.
    checksums = np.fromiter(map(google_crc32c.value, records), np.uint32, len(records))
    return ((checksums >> 15) | (checksums << 17)) + np.uint32(0xA282EAD8)
