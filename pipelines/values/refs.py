"""References to stored values, and the names of their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.storage import arrays as wire
from beamjax.storage.arrays import dtype_from_name, dtype_name

SUFFIX = ".arrays"
_SAFE_NAME = re.compile(r"[0-9a-f]{40}[A-Za-z0-9_-]*\.arrays")


@dataclasses.dataclass(frozen=True)
class StoreRef:
    """A reference to a stored value, a list of arrays. Plain data, JSON apart from `inline`."""

    key: str  # equal for equal content, or unique; caches use it
    # The name of the dtype and the shape of each array.
    leaves: tuple[tuple[str, tuple[int, ...]], ...]
    inline: bytes = b""  # the encoded arrays, if they are small
    files: tuple[tuple[str, int], ...] = ()  # otherwise names and sizes in bytes, in order

    @property
    def kind(self) -> str:
        """`"inline"` or `"file"`."""
        return "inline" if self.inline else "file"

    @property
    def nbytes(self) -> int:
        """The size of the loaded arrays in bytes."""
        return sum(math.prod(shape) * dtype_from_name(name).itemsize for name, shape in self.leaves)

    def to_json(self) -> dict[str, Any]:
        """Everything but `inline`, as plain JSON values."""
        return {
            "key": self.key,
            "leaves": [[name, list(shape)] for name, shape in self.leaves],
            "files": [list(file) for file in self.files],
        }

    @classmethod
    def from_json(cls, record: dict[str, Any], inline: bytes = b"") -> StoreRef:
        """Undoes `to_json`; raises ArrayFormatError for other records."""
        try:
            ref = cls(
                record["key"],
                tuple(
                    (name, wire.checked_shape(name, shape, dtype_from_name(name)))
                    for name, shape in record["leaves"]
                ),
                inline,
                tuple((name, size) for name, size in record["files"]),
            )
            sizes = [size for _, size in ref.files]
            plain = isinstance(ref.key, str) and all(type(s) is int and s >= 0 for s in sizes)
            plain = plain and all(_SAFE_NAME.fullmatch(name) for name, _ in ref.files)
        except (KeyError, TypeError, ValueError):
            plain = False
        if not plain:
            raise ArrayFormatError(
                f"reference to a stored value: found {record!r:.200}, expected a key, leaves as "
                "[dtype, shape] and files as [name, bytes]."
            )
        return ref


@dataclasses.dataclass(frozen=True, eq=False)
class Here:
    """A reference to an array in this process, for workers that are threads of it."""

    array: np.ndarray  # nothing changes it
    # Unique, as that of a `StoreRef`.
    key: str = dataclasses.field(default_factory=lambda: unique_key())


def ref_to_files(
    leaves: tuple[tuple[str, tuple[int, ...]], ...], files: Sequence[tuple[str, int]]
) -> StoreRef:
    """A reference to arrays of these dtypes and shapes, with names and sizes of their files."""
    # The first 40 characters of a name are a hash of the file, or unique.
    names = [json.dumps(leaves).encode(), *(name[:40].encode() for name, _ in files)]
    return StoreRef(content_key(names), leaves, files=tuple(files))


def leaves_of(arrays: Iterable[np.ndarray]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The name of the dtype and the shape of each array."""
    return tuple((dtype_name(array.dtype), array.shape) for array in arrays)


def unique_key() -> str:
    """A unique first part of a file name: 40 hexadecimal digits, as many as `content_key` has."""
    return uuid.uuid4().hex + uuid.uuid4().hex[:8]


def file_name(key: str, hint: str) -> str:
    """A file name: its first part, and a hint for users who look into the folder."""
    suffix = re.sub(r"[^A-Za-z0-9_-]+", "_", hint)[:60]
    return f"{key}{'-' * bool(suffix)}{suffix}{SUFFIX}"


def is_name(name: str) -> bool:
    """Whether a store may have given this name to a file."""
    return _SAFE_NAME.fullmatch(name) is not None


def content_key(parts: Iterable[bytes | memoryview]) -> str:
    """The first part of a file name: a hash of the content."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
