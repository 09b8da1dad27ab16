"""Files of the chunks of a local Zarr array: whether they are those that a source was made of.

Nothing in Zarr marks a chunk that was written anew, and a chunk that is gone is read as the fill
value. So a source remembers when the last chunk was written, and whether all of them were there.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

from beamjax.errors import SourceError
from beamjax.sources.arrays.data_files import readable


@dataclasses.dataclass(frozen=True)
class ChunkFiles:
    """The files of an array.

    Attributes:
      folder: of the array.
      newest: when the last of its files was written, in nanoseconds.
      whole: whether there was a file for each chunk; where Zarr leaves out chunks of the fill value
        there is not.
    """

    folder: str
    newest: int
    whole: bool

    @classmethod
    def look(cls, folder: str, opened: Any) -> ChunkFiles:
        """Those of an array as they are now.

        Args:
          folder: of the array, a local path.
          opened: the array of Zarr.
        """
        newest = count = 0
        with readable(folder, "a folder of chunks"):
            for where, _, names in os.walk(folder):
                for name in names:
                    newest = max(newest, os.stat(os.path.join(where, name)).st_mtime_ns)
                    count += not name.startswith((".z", "zarr.json"))
        sizes = (math.ceil(n / c) for n, c in zip(opened.shape, _stored(opened), strict=True))
        return cls(folder, newest, count >= math.prod(sizes))

    def check(self, opened: Any, start: int, stop: int) -> None:
        """Raises SourceError if chunks with members of a range are others now, or gone."""
        for path in self._paths(opened, start, stop):
            try:
                written = os.stat(path).st_mtime_ns
            except FileNotFoundError:
                if self.whole:
                    raise SourceError(
                        f"{path}: is not there, expected a chunk, as there was one of each when "
                        "the source was made; Zarr would read its fill value."
                    ) from None
                continue
            except OSError as error:
                raise SourceError(f"{path}: cannot look at a chunk ({error}).") from error
            if written > self.newest:
                raise SourceError(
                    f"{path}: found a chunk written at {written}, expected none after "
                    f"{self.newest}; the file was changed after the source was made from it."
                )

    def _paths(self, opened: Any, start: int, stop: int) -> Iterator[str]:
        chunks = _stored(opened)
        ranges = [range(math.ceil(n / c)) for n, c in zip(opened.shape, chunks, strict=True)]
        ranges[0] = range(start // chunks[0], math.ceil(stop / chunks[0]))
        for place in itertools.product(*ranges):
            yield os.path.join(self.folder, opened.metadata.encode_chunk_key(place))

    def to_json(self) -> list[Any]:
        """Plain JSON values."""
        return [self.folder, self.newest, self.whole]

    @classmethod
    def from_json(cls, record: Any) -> ChunkFiles:
        """Undoes `to_json`; TypeError or ValueError for anything else."""
        folder, newest, whole = record
        if type(folder) is not str or type(newest) is not int or type(whole) is not bool:
            raise TypeError(f"found the files {record!r:.80}, expected folder, time and whole")
        if newest < 0 or "\0" in folder:
            raise ValueError(f"found the files {record!r:.80}")
        return cls(folder, newest, whole)


def _stored(opened: Any) -> tuple[int, ...]:
    """What is in a file along each axis: a shard, if chunks are in shards."""
    return tuple(max(int(n), 1) for n in (getattr(opened, "shards", None) or opened.chunks))


def chunk_files(store: str, name: str, opened: Any) -> ChunkFiles | None:
    """The files of an array in a folder; None for other stores, and for chunks of several sizes."""
    folder = os.path.join(store, name) if name else store
    try:
        known = os.path.isdir(folder) and len(_stored(opened)) == len(opened.shape) > 0
    except NotImplementedError:
        return None
    return ChunkFiles.look(folder, opened) if known else None
