"""Checkpoints as bytes: the position of a run, and the values that the rest of the run needs.

A checkpoint is one buffer of `beamjax.storage.arrays`, its *manifest*: refs as JSON, with small
arrays beside it. Large values are files of the same folder.
"""

# Files hold such buffers too, so that a checksum covers every byte. Nothing is pickled. Everything
# is checked before it is used, and reading a forged manifest takes no more memory than its length.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.bodies.provenance import UNKNOWN, Provenance
from beamjax.errors import ArrayFormatError
from beamjax.plan.liveness import Position
from beamjax.runtime.values import Part, Ref, Values
from beamjax.storage.arrays import Buffer, decode_arrays, dtype_from_name, encode_arrays

KIND = "beamjax checkpoint"
FORMAT = 2
MAX_BYTES = 2**26
"""Largest manifest that is read, in bytes. Values of more than 64 KiB are in files instead."""
KEPT = 2
"""Number of checkpoints that a run keeps. If the last one is damaged, the one before it is used."""

_STORED = re.compile(r"[0-9a-f]{40}[A-Za-z0-9_-]{0,61}\.arrays")
_STEM = re.compile(r"[A-Za-z0-9_-]{1,200}")
_MAX_AXES = 32
_MAX_INT = 2**63 - 1


class _InFolder:
    """Data of a value in a manifest, which only a checkpointer can read."""

    def read(self, start: int, stop: int) -> np.ndarray:
        raise TypeError(f"{self} belongs to a checkpoint")

    def array(self) -> np.ndarray:
        raise TypeError(f"{self} belongs to a checkpoint")


@dataclass(frozen=True)
class Pieces(_InFolder):
    """A raw array in files of the folder, in flat pieces."""

    dtype: str  # its name
    shape: tuple[int, ...]
    # The name and the size in bytes of each file, in order. The names are unique.
    files: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Members(_InFolder):
    """Members in files of the folder, `stem-start-count.members`."""

    stem: str  # the prefix of the file names
    parts: tuple[tuple[int, int], ...]  # the first member and the number of members of each file


@dataclass(frozen=True)
class Given(_InFolder):
    """An input of the run, by its name in the plan."""

    name: str


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round."""

    plan: Mapping[str, str]  # the fingerprint of the plan
    inputs: Mapping[str, str]  # the fingerprints of its inputs
    position: Position  # the rounds and branches that have begun and not ended
    finished: bool  # whether the run has ended; then `values` are its outputs
    # The values that the rest of the run needs, by name; their data are arrays, `Pieces`,
    # `Members` and `Given`.
    values: Values
    # The entries so far of each stacked result of a loop that has not ended. Small server values
    # share an array, which has one axis more than an entry.
    stacks: Mapping[str, tuple[Ref, ...]]
    provenance: Provenance = UNKNOWN  # the kinds of machine that computed these values

    def files(self) -> set[str]:
        """The names of the files that hold its values."""
        stacked = (value for values in self.stacks.values() for value in values)
        parts = (part for value in (*self.values.values(), *stacked) for part in value.parts)
        return {name for part in parts for name in _files(part.data)}


def members_file(stem: str, start: int, count: int) -> str:
    """The name of the file with members [start, start + count)."""
    return f"{stem}-{start}-{count}.members"


def encode(checkpoint: Checkpoint) -> bytes:
    """The manifest of a checkpoint, of at most `MAX_BYTES`."""
    arrays: list[np.ndarray] = []
    write = lambda value: _to_json(value, arrays)
    meta = {
        "kind": KIND,
        "format": FORMAT,
        "plan": dict(checkpoint.plan),
        "inputs": dict(checkpoint.inputs),
        "position": [list(part) for part in checkpoint.position],
        "finished": checkpoint.finished,
        "values": {name: write(value) for name, value in checkpoint.values.items()},
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
    """Undoes `encode`; raises ArrayFormatError for bytes that are anything else."""
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
    read = lambda value: _from_json(value, arrays)
    values = _dict(meta.get("values"), "values")
    stacks = _dict(meta.get("stacks"), "stacks")
    return Checkpoint(
        _texts(meta.get("plan"), "plan"),
        _texts(meta.get("inputs"), "inputs"),
        tuple((_text(n), _number(i)) for n, i in _pairs(meta.get("position"), "position")),
        _of_type(meta.get("finished"), bool, "finished"),
        {name: read(value) for name, value in values.items()},
        {name: tuple(map(read, _list(of, name))) for name, of in stacks.items()},
        Provenance.from_json(meta.get("provenance")),
    )


def _files(data: Any) -> Iterator[str]:
    match data:
        case Pieces(files=files):
            yield from (name for name, _ in files)
        case Members(stem=stem, parts=parts):
            yield from (members_file(stem, *part) for part in parts)


def _to_json(value: Ref, arrays: list[np.ndarray]) -> dict[str, Any]:
    parts = [
        {
            "rows": [part.start, part.count],
            "at": list(part.at),
            "entry": list(part.entry),
            **_data_to_json(part.data, arrays),
        }
        for part in value.parts
    ]
    return {"dtype": value.dtype, "shape": list(value.shape), "n": value.n, "parts": parts}


def _data_to_json(data: Any, arrays: list[np.ndarray]) -> dict[str, Any]:
    match data:
        case np.ndarray():
            arrays.append(data)
            return {"array": len(arrays) - 1}
        case Pieces(dtype=dtype, shape=shape, files=files):
            return {"pieces": [list(file) for file in files], "of": [dtype, list(shape)]}
        case Members(stem=stem, parts=parts):
            return {"members": stem, "parts": [list(part) for part in parts]}
        case Given(name=name):
            return {"given": name}
    raise TypeError(f"found {data!r:.80}, expected data of a checkpoint")


# --- reading manifests, which may be damaged or forged


def _from_json(value: Any, arrays: list[np.ndarray]) -> Ref:
    fields = _dict(value, "value")
    dtype, n = dtype_from_name(fields.get("dtype")), fields.get("n")
    parts = tuple(_part(part, arrays) for part in _list(fields.get("parts"), "parts"))
    return Ref(
        dtype.name,
        _numbers(fields.get("shape"), "shape"),
        None if n is None else _number(n),
        parts,
    )


def _part(value: Any, arrays: list[np.ndarray]) -> Part:
    fields = _dict(value, "part")
    ((start, count),) = _pairs([fields.get("rows")], "rows")
    at, entry = (_numbers(fields.get(name), name) for name in ("at", "entry"))
    return Part(_number(start), _number(count), _data(fields, arrays), at, entry)


def _data(fields: dict[str, Any], arrays: list[np.ndarray]) -> Any:
    match fields:
        case {"array": index}:
            return arrays[_number(index, len(arrays) - 1)]
        case {"pieces": pieces, "of": [dtype, shape]}:
            files = tuple((_text(n, _STORED), _number(s)) for n, s in _pairs(pieces, "files"))
            return Pieces(dtype_from_name(dtype).name, _numbers(shape, "shape"), files)
        case {"members": stem}:
            return Members(_text(stem, _STEM), tuple(_parts(fields)))
        case {"given": name}:
            return Given(_text(name))
    raise _bad("part", sorted(fields), "one of array, pieces, members, given")


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    numbers = _list(value, what)
    if len(numbers) > _MAX_AXES:
        raise _bad(what, f"{len(numbers)} numbers", f"at most {_MAX_AXES}")
    return tuple(map(_number, numbers))


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


def _bad(what: str, value: object, expected: str) -> ArrayFormatError:
    return ArrayFormatError(
        f"manifest of a checkpoint, {what}: found {value!r:.80}, expected {expected}"
    )
