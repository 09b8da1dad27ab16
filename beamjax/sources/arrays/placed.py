"""Placed values in files, each of which holds consecutive members as one array.

`Placed` is a result that stays on disk: a handle to .npy files, and an input of other programs.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError, WorkerError
from beamjax.sources.arrays import data_files
from beamjax.sources.arrays.npy_source import map_file, restored, storable, stored_dtype, unmap
from beamjax.sources.blocks import SourceBlock, read_blocks
from beamjax.sources.source_base import (
    ByIndex,
    Count,
    LeafSpec,
    Positive,
    PyTreeDef,
    Which,
    describe_source,
    spec_of,
)
from beamjax.sources.source_kinds import FileSource
from beamjax.storage import files, trust


class MemberFiles(ByIndex, FileSource):
    """One placed value in files that are named after the members in them."""

    suffix: ClassVar[str]

    def __init__(
        self,
        folder: str,
        stem: str,
        parts: Sequence[tuple[Count, Positive]],
        leaf: LeafSpec,
        size: Count,
    ):
        self.folder = folder
        self.stem = trust.checked_name(stem, folder)
        self.leaf = leaf
        self.size = size
        self.parts: list[tuple[int, int]] = []
        end = 0
        # Files in which all members are also in an earlier one are left out. The longest file of
        # each start comes first.
        for start, count in sorted(parts, key=lambda part: (part[0], -part[1])):
            if start + count > end:
                self.parts.append((start, count))
                end = start + count
        # Consecutive shards are often in the same file. Threads may replace the pair at any time,
        # so it is always read and written as a whole.
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
        """The array in a file."""

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return (self.leaf,)

    def __len__(self) -> int:
        return self.size

    @property
    def files(self) -> list[str]:
        """The names of the files."""
        return [self.file_name(self.stem, *part) for part in self.parts]

    def check_complete(self, what: str) -> None:
        """Checks that each member is in a file; `what` names the value in the message."""
        ends = [0, *(start + count for start, count in self.parts)]
        starts = [*(start for start, _ in self.parts), self.size]
        gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        if gaps:
            raise WorkerError(
                f"{what}: {sum(stop - start for start, stop in gaps)} of {self.size} members are "
                f"missing, the first one is {gaps[0][0]}; do the launcher and the workers see the "
                f"same files in {self.folder}, and were none removed while the job ran?"
            )

    def _at(self, which: Which) -> list[np.ndarray]:
        return read_blocks([self.leaf], self._blocks, self._load, which)

    def _blocks(self, start: int, stop: int) -> Iterator[SourceBlock]:
        while start < stop:
            # Files may overlap: the one with the latest start is read.
            at = bisect.bisect_right(self.parts, start, key=lambda part: part[0]) - 1
            first, count = self.parts[at] if at >= 0 else (0, 0)
            if first + count <= start:
                raise SourceError(f"{self!r}: found member {start} in no file")
            yield SourceBlock(at, 0, first, first + count)
            start = first + count

    def _load(self, block: SourceBlock) -> list[np.ndarray]:
        return [self._members(block.first, block.last - block.first)]

    def identity(self) -> tuple[Any, list[str]]:
        spec = spec_of(self) | {"folder": None, "stem": None}
        return spec, [f"{self.folder.rstrip('/')}/{name}" for name in self.files]

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


class Placed(MemberFiles):
    """A placed result in files, made by `beamjax.run(..., keep="placed")` or `open_placed`.

    It is a `Source` with one leaf, so another program takes it as an argument, and its members are
    read on the workers. `np.asarray(placed)` reads all members; `placed[3]` and `placed[10:20]`
    read some of them.

    The .npy file `part-ID-START-COUNT.npy` holds COUNT members from START on; `placed.json` lists
    the files. Dtypes that .npy does not know, such as bfloat16, are stored as unsigned integers of
    the same width, typed keys as their data.
    """

    suffix = ".npy"
    manifest = "placed.json"

    def load(self, path: str) -> np.ndarray:
        if not data_files.is_url(path):
            stored = map_file(path)
        else:
            with data_files.open_file(path) as file:
                stored = np.lib.format.read_array(file, allow_pickle=False)
        if stored.dtype != stored_dtype(self.leaf.dtype):
            return stored  # It is not what was written; `_checked` refuses it.
        return restored(stored, self.leaf.dtype)

    @property
    def local(self) -> bool:
        return not data_files.is_url(self.folder)

    @property
    def treedef(self) -> PyTreeDef:
        import jax

        return jax.tree_util.tree_structure(0)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, members first; for typed keys, the shape of their data."""
        return (self.size, *self.leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the members; for typed keys, the dtype of their data."""
        return self.leaf.dtype

    @property
    def ndim(self) -> int:
        """The number of axes, including the axis of members."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.read(0, self.size)[0], dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> np.ndarray:
        """One member, or a slice of them.

        Returns:
          An array of shape `leaf.shape`; for a slice of k members, (k, *leaf.shape).

        Raises:
          IndexError: there is no such member.
          TypeError: the index is neither a number nor a slice; use `np.asarray` for other indices.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            if step == 1:
                return self.read(start, max(start, stop))[0]
            return self.read(0, self.size)[0][index]
        if not isinstance(index, int | np.integer):
            raise TypeError(
                f"{self!r}: found the index {index!r}, expected a number or a slice; np.asarray "
                "returns an array that takes any index"
            )
        number = int(index) + (self.size if index < 0 else 0)
        if not 0 <= number < self.size:
            raise IndexError(f"{self!r}: found the index {index}, expected one of {self.size}")
        return self.read(number, number + 1)[0][0]

    def __str__(self) -> str:
        return describe_source(self, f"in {self.folder}")

    def remove(self) -> None:
        """Removes the files, and the folder if nothing else is in it."""
        for name in self.files:
            unmap(os.path.join(self.folder, name))
        files.remove_files(self.folder, [*self.files, self.manifest])
        if not data_files.is_url(self.folder):
            with contextlib.suppress(OSError):
                os.rmdir(self.folder)


def encode_part(members: np.ndarray) -> bytes:
    """Members as the content of an .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(storable(members)), allow_pickle=False)
    return file.getvalue()
