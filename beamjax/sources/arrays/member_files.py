"""Sources over files that each hold consecutive members of one placed value as one array."""

from __future__ import annotations

import abc
import bisect
import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.sources.source_base import LeafSpec, Source, field, natural


class MemberFiles(Source):
    """One placed value in files that are named after the members in them.

    A subclass says how a file is read.

    Args:
      folder: of the files, a path or URL.
      stem: that their names begin with.
      parts: start and count of each file. They may overlap, where a bundle was retried.
      leaf: one member.
      size: the number of members.
    """

    suffix: ClassVar[str]

    def __init__(
        self,
        folder: str,
        stem: str,
        parts: Iterable[Sequence[int]],
        leaf: LeafSpec,
        size: int,
    ):
        self.folder = folder
        self.stem = stem
        self.leaf = leaf
        self.size = size
        self.parts: list[tuple[int, int]] = []
        end = 0
        for start, count in sorted(parts, key=lambda part: (part[0], -part[1])):
            if start + count > end:
                self.parts.append((start, count))
                end = start + count
        # Shards are read one after the other: the next one is often in the same file.
        self._last: tuple[str, np.ndarray] | None = None

    @classmethod
    def file_name(cls, stem: str, start: int, count: int) -> str:
        """The name of the file with members [start, start + count)."""
        return f"{stem}-{start}-{count}{cls.suffix}"

    @classmethod
    def members_in(cls, names: Iterable[str], stem: str) -> list[tuple[int, int]]:
        """Start and count of the members in each file of these names that belongs to `stem`."""
        pattern = re.compile(rf"{re.escape(stem)}-(\d+)-(\d+){re.escape(cls.suffix)}")
        return sorted((int(m[1]), int(m[2])) for m in map(pattern.fullmatch, names) if m)

    @abc.abstractmethod
    def load(self, path: str) -> np.ndarray:
        """The array in a file.

        Raises:
          Exception: it can't be read, or holds something else.
        """

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return (self.leaf,)

    def __len__(self) -> int:
        return self.size

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return [self.file_name(self.stem, *part) for part in self.parts]

    def missing(self) -> list[int]:
        """The members that are in no file."""
        seen = np.zeros(self.size, bool)
        for start, count in self.parts:
            seen[start : start + count] = True
        return np.flatnonzero(~seen).tolist()

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        pieces = []
        while start < stop:
            at = bisect.bisect_right(self.parts, start, key=lambda part: part[0]) - 1
            first, count = self.parts[at] if at >= 0 else (0, 0)
            end = min(stop, first + count)
            if end <= start:
                raise SourceError(f"{self!r}: found member {start} in no file")
            pieces.append(self._members(first, count)[start - first : end - first])
            start = end
        if len(pieces) == 1:
            return pieces
        none = np.empty((0, *self.leaf.shape), self.leaf.dtype)
        return [np.concatenate(pieces) if pieces else none]

    def identity(self) -> tuple[Any, list[str]]:
        spec = self.to_spec() | {"folder": None, "stem": None}
        return spec, [f"{self.folder.rstrip('/')}/{name}" for name in self.files]

    def to_spec(self) -> dict[str, Any]:
        return {
            **self.spec_head(),
            "folder": self.folder,
            "stem": self.stem,
            "parts": [list(part) for part in self.parts],
            "leaf": self.leaf.to_json(),
            "size": self.size,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Self:
        leaf = LeafSpec.from_json(spec["leaf"])
        folder, stem = field(spec, "folder", str), field(spec, "stem", str)
        parts = [(natural(start), natural(count, 1)) for start, count in spec["parts"]]
        return cls(folder, stem, parts, leaf, natural(spec["size"]))

    def _members(self, start: int, count: int) -> np.ndarray:
        name, last = self.file_name(self.stem, start, count), self._last
        if last is None or last[0] != name:
            last = self._last = name, self._checked(name, count)
        return last[1]

    def _checked(self, name: str, count: int) -> np.ndarray:
        path = f"{self.folder.rstrip('/')}/{name}"
        try:
            array = self.load(path)
        except SourceError:  # names the file
            raise
        except (ArrayFormatError, ValueError) as error:
            raise ArrayFormatError(f"{path}: {error}") from None
        except Exception as error:
            raise SourceError(
                f"{path}: cannot read members of a placed value ({error}); do the launcher and "
                "all workers see the same files under this path?"
            ) from error
        if (array.shape, array.dtype) != ((count, *self.leaf.shape), self.leaf.dtype):
            raise ArrayFormatError(
                f"{path}: found {array.dtype}{list(array.shape)}, expected {count} members of "
                f"{self.leaf}"
            )
        return array
