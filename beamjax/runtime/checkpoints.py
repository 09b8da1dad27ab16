"""Checkpoints as bytes: the position of a run, and the values that the rest of the run needs.

A checkpoint is one buffer of `beamjax.storage.arrays`, its *manifest*. Small values are arrays in
it. Large values are files beside it, which hold such buffers too, so that a checksum covers every
byte. Nothing is pickled. Everything is checked before it is used, and reading a forged manifest
takes no more memory than its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.plan.liveness import Position
from beamjax.storage.arrays import Buffer, decode_arrays, encode_arrays
from beamjax.storage.dtypes import dtype_from_name

KIND = "beamjax checkpoint"
FORMAT = 1
MAX_BYTES = 2**26
"""Largest manifest that is read, in bytes. Values of more than 64 KiB are in files instead."""
KEPT = 2
"""Number of checkpoints that a run keeps. If the last one is damaged, the one before it is used."""

_STORED = re.compile(r"[0-9a-f]{40}[A-Za-z0-9_-]{0,61}\.arrays")
_STEM = re.compile(r"[A-Za-z0-9_-]{1,200}")
_HASH = re.compile(r"[0-9a-f]{40}")
_MAX_DEPTH = 32
_MAX_INT = 2**63 - 1


@dataclass(frozen=True, eq=False)
class Array:
    """A raw array, in the manifest itself."""

    array: np.ndarray


@dataclass(frozen=True)
class Stored:
    """A raw array in files of the folder. Their names are unique.

    Attributes:
      key: the key of its reference (`Ref`) in a store.
      dtype: the name of its dtype.
      shape: its shape.
      files: the name and the size in bytes of each file, in order.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Members:
    """A placed value in files of consecutive members, `stem-start-count.members`.

    Attributes:
      stem: the prefix of the file names.
      parts: the first member and the number of members of each file.
    """

    stem: str
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Given:
    """An input of the run, by its name in the plan."""

    name: str


@dataclass(frozen=True)
class Entry:
    """The entry `index` of the `size` entries along the first axis of each member."""

    of: Record
    index: int
    size: int


@dataclass(frozen=True)
class Stack:
    """Placed values, stacked along the first axis of each member."""

    of: tuple[Record, ...]


@dataclass(frozen=True)
class Scattered:
    """A server value cut into members along an axis."""

    of: Record
    axis: int


@dataclass(frozen=True)
class Rows:
    """Several entries of a stacked server value, along axis 0 of one array."""

    of: Record


Record: TypeAlias = Array | Stored | Members | Given | Entry | Stack | Scattered | Rows


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
      plan: the fingerprint of the plan.
      inputs: the fingerprints of its inputs.
      position: the rounds and branches that have begun and not ended.
      finished: whether the run has ended; then `values` are its outputs.
      values: the values that the rest of the run needs, by name.
      stacks: the entries so far of each stacked result of a loop that has not ended.
      provenance: the kinds of machine that computed these values.
    """

    plan: Mapping[str, str]
    inputs: Mapping[str, str]
    position: Position
    finished: bool
    values: Mapping[str, Record]
    stacks: Mapping[str, tuple[Record, ...]]
    provenance: Provenance = UNKNOWN

    def files(self) -> set[str]:
        """The names of the files that hold its values."""
        stacked = (record for records in self.stacks.values() for record in records)
        return {name for r in (*self.values.values(), *stacked) for name in _files(r)}


def members_file(stem: str, start: int, count: int) -> str:
    """The name of the file with members [start, start + count)."""
    return f"{stem}-{start}-{count}.members"


def encode(checkpoint: Checkpoint) -> bytes:
    """The manifest of a checkpoint.

    Raises:
      ArrayFormatError: it is larger than `MAX_BYTES`.
    """
    arrays: list[np.ndarray] = []
    write = lambda record: _to_json(record, arrays)
    meta = {
        "kind": KIND,
        "format": FORMAT,
        "plan": dict(checkpoint.plan),
        "inputs": dict(checkpoint.inputs),
        "position": [list(part) for part in checkpoint.position],
        "finished": checkpoint.finished,
        "values": {name: write(record) for name, record in checkpoint.values.items()},
        "stacks": {name: list(map(write, of)) for name, of in checkpoint.stacks.items()},
        "provenance": checkpoint.provenance.to_json(),
    }
    data = encode_arrays(arrays, meta)
    if len(data) > MAX_BYTES:
        raise ArrayFormatError(
            f"manifest of a checkpoint: {len(data)} bytes, expected at most {MAX_BYTES}; there are "
            "too many small values in the state of this run"
        )
    return data


def decode(data: Buffer) -> Checkpoint:
    """Undoes `encode`.

    Raises:
      ArrayFormatError: the bytes are damaged, truncated or something else.
    """
    if len(data) > MAX_BYTES:
        raise ArrayFormatError(
            f"manifest of a checkpoint: found {len(data)} bytes, expected at most {MAX_BYTES}"
        )
    arrays, meta = decode_arrays(data)
    if (meta.get("kind"), meta.get("format")) != (KIND, FORMAT):
        raise ArrayFormatError(
            f"manifest of a checkpoint: found the kind {meta.get('kind')!r:.60} in format "
            f"{meta.get('format')!r:.20}, expected {KIND!r} in format {FORMAT}"
        )
    record = lambda value: _from_json(value, arrays)
    values = _dict(meta.get("values"), "values")
    stacks = _dict(meta.get("stacks"), "stacks")
    return Checkpoint(
        _texts(meta.get("plan"), "plan"),
        _texts(meta.get("inputs"), "inputs"),
        tuple((_text(n), _number(i)) for n, i in _pairs(meta.get("position"), "position")),
        _of_type(meta.get("finished"), bool, "finished"),
        {name: record(value) for name, value in values.items()},
        {name: tuple(map(record, _list(of, name))) for name, of in stacks.items()},
        Provenance.from_json(meta.get("provenance")),
    )


def _files(record: Record) -> Iterator[str]:
    match record:
        case Stored(files=files):
            yield from (name for name, _ in files)
        case Members(stem=stem, parts=parts):
            yield from (members_file(stem, *part) for part in parts)
        case Stack(of=of):
            for part in of:
                yield from _files(part)
        case Entry(of=part) | Scattered(of=part) | Rows(of=part):
            yield from _files(part)


def _to_json(record: Record, arrays: list[np.ndarray]) -> dict[str, Any]:
    match record:
        case Array(array=array):
            arrays.append(array)
            return {"array": len(arrays) - 1}
        case Stored(key=key, dtype=dtype, shape=shape, files=files):
            listed = [list(file) for file in files]
            return {"stored": key, "dtype": dtype, "shape": list(shape), "files": listed}
        case Members(stem=stem, parts=parts):
            return {"members": stem, "parts": [list(part) for part in parts]}
        case Given(name=name):
            return {"given": name}
        case Entry(of=of, index=index, size=size):
            return {"entry": index, "size": size, "of": _to_json(of, arrays)}
        case Stack(of=of):
            return {"stack": [_to_json(part, arrays) for part in of]}
        case Scattered(of=of, axis=axis):
            return {"scattered": axis, "of": _to_json(of, arrays)}
        case Rows(of=of):
            return {"rows": _to_json(of, arrays)}


# --- reading manifests, which may be damaged or forged


def _from_json(value: Any, arrays: list[np.ndarray], depth: int = 0) -> Record:
    fields = _dict(value, "value")
    if depth > _MAX_DEPTH:
        raise _bad("value", "values of values", f"at most {_MAX_DEPTH} levels of them")
    inner = lambda part: _from_json(part, arrays, depth + 1)
    readers: dict[str, Callable[[Any], Record]] = {
        "array": lambda x: Array(arrays[_number(x, len(arrays) - 1)]),
        "stored": lambda x: _stored(_text(x, _HASH), fields),
        "members": lambda x: Members(_text(x, _STEM), tuple(_parts(fields))),
        "given": lambda x: Given(_text(x)),
        "entry": lambda x: Entry(inner(fields.get("of")), _number(x), _number(fields.get("size"))),
        "stack": lambda x: Stack(tuple(map(inner, _list(x, "stack")))),
        "scattered": lambda x: Scattered(inner(fields.get("of")), _number(x)),
        "rows": lambda x: Rows(inner(x)),
    }
    for kind, read in readers.items():
        if kind in fields:
            return read(fields[kind])
    raise _bad("value", sorted(fields), f"one of {', '.join(readers)}")


def _stored(key: str, fields: dict[str, Any]) -> Stored:
    dtype_from_name(fields.get("dtype"))
    shape = tuple(map(_number, _list(fields.get("shape"), "shape")))
    files = ((_text(n, _STORED), _number(s)) for n, s in _pairs(fields.get("files"), "files"))
    return Stored(key, fields["dtype"], shape, tuple(files))


def _parts(fields: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Ranges of members. Each begins where the one before it ends."""
    end = 0
    for start, count in _pairs(fields.get("parts"), "parts"):
        if _number(start) != end:
            raise _bad("members", f"a file from member {start} on", f"one from member {end} on")
        end += _number(count)
        yield start, count


def _pairs(value: Any, what: str) -> Iterator[tuple[Any, Any]]:
    for pair in _list(value, what):
        if not isinstance(pair, list) or len(pair) != 2:
            raise _bad(what, pair, "a list of pairs")
        yield pair[0], pair[1]


def _texts(value: Any, what: str) -> dict[str, str]:
    return {name: _text(text) for name, text in _dict(value, what).items()}


def _text(value: Any, pattern: re.Pattern[str] | None = None) -> str:
    text = _of_type(value, str, "name")
    if pattern is not None and not pattern.fullmatch(text):
        raise _bad("name", text, f"one that fits {pattern.pattern}")
    return text


def _number(value: Any, limit: int = _MAX_INT) -> int:
    number = _of_type(value, int, "number")
    if not 0 <= number <= limit:
        raise _bad("number", number, f"one from 0 to {limit}")
    return number


def _dict(value: Any, what: str) -> dict[str, Any]:
    return _of_type(value, dict, what)


def _list(value: Any, what: str) -> list[Any]:
    return _of_type(value, list, what)


def _of_type(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _bad(what, value, f"a {kind.__name__}")
    return value


def _bad(what: str, found: object, expected: str) -> ArrayFormatError:
    return ArrayFormatError(
        f"manifest of a checkpoint, {what}: found {found!r:.80}, expected {expected}"
    )
