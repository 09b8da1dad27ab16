"""Bytes that are almost right: what is behind checksums is changed, and the checksums made anew."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

from beamjax.storage.arrays import ALIGNMENT, MAGIC, VERSION

_PREFIX = struct.Struct("<8sHHIQI")
_START = _PREFIX.size + 4
_DEEP = json.loads("[" * 200 + "]" * 200)
HOSTILE = (
    *(0, 1, -1, 2, 7, 127, 2**16, 2**31, 2**40, 2**60, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)),
    *(0.0, 0.5, -1.5, 1e308, True, False, None),
    *("", "*", "..", "../x", "/", "a\0b", "x" * 300, "float0", "bfloat16", "int64", "complex128"),
    *([], {}, [[]], [0], [0, 0], [2**60], [2**31, 2**31], [0, 2**60], [""], {"": None}, _DEEP),
)
"""JSON values that readers may not expect."""


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Other bytes, of the same format most of the time."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kinds = [_raw]
        if data[: len(MAGIC)] == MAGIC and len(data) >= _START:
            kinds = [_raw, _in_payload, *[_in_header] * 6]
        elif data[:1] in (b"{", b"["):
            kinds = [_raw, *[_in_json] * 6]
        data = rng.choice(kinds)(data, rng)
    return data


def _raw(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    to = min(len(data), at + rng.choice((0, 1, 1, 4, 8, 64)))
    new = rng.choice(
        (
            b"",
            rng.randbytes(to - at),
            rng.randbytes(rng.choice((1, 8))),
            bytes(to - at),
            b"\xff" * (to - at),
            data[at:to] * 2,
        )
    )
    return data[:at] + new + data[to:] if rng.random() < 0.9 else data[:at]


def _in_json(data: bytes, rng: random.Random) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _raw(data, rng)
    return json.dumps(changed(value, rng)).encode()


def _in_header(data: bytes, rng: random.Random) -> bytes:
    try:
        length = min(int.from_bytes(data[12:16], "little"), len(data) - _START)
        header = json.loads(data[_START : _START + length])
    except (ValueError, RecursionError):
        return _raw(data, rng)
    return sealed(changed(header, rng), data[_START + length :], length)


def _in_payload(data: bytes, rng: random.Random) -> bytes:
    start = _START + int.from_bytes(data[12:16], "little")
    return _sealed(data[_START:start], _raw(data[start:], rng))


def sealed(header: Any, payload: bytes, length: int) -> bytes:
    """A buffer of arrays with right checksums, whatever the header says.

    Args:
      header: any JSON value.
      payload: what follows it.
      length: of the header before; if it does not fit, offsets that it gives are moved.
    """
    text = json.dumps(header).encode()
    if len(text) > length:
        more = -(-(len(text) + 64 - length) // ALIGNMENT) * ALIGNMENT
        for record in _records(header):
            if type(record.get("offset")) is int:
                record["offset"] += more
        text, length = json.dumps(header).encode(), length + more
    return _sealed(text.ljust(length), payload)


def _records(header: Any) -> list[dict[str, Any]]:
    found = header.get("arrays") if isinstance(header, dict) else None
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def _sealed(text: bytes, payload: bytes) -> bytes:
    total = _START + len(text) + len(payload)
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(text), total, zlib.crc32(payload))
    crc = struct.pack("<I", zlib.crc32(text, zlib.crc32(prefix)))
    return b"".join([prefix, crc, text, payload])


def changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with a change somewhere in it; the value itself may be changed too."""
    places = list(_places(value))
    if not places or rng.random() < 0.02:
        return rng.choice(HOSTILE)
    holder, key = rng.choice(places)
    found = holder[key]
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1:
        other, at = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[at]))
    elif kind == 2 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(found)))
    elif kind <= 3 and type(found) is int:
        holder[key] = found + rng.choice((-1, 1, 8, -8, 2**32, -found - found))
    elif kind <= 3 and type(found) is str and found:
        at = rng.randrange(len(found))
        holder[key] = found[:at] + chr(rng.randrange(0x250)) + found[at + rng.randrange(2) :]
    else:
        holder[key] = json.loads(json.dumps(rng.choice(HOSTILE)))
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])
