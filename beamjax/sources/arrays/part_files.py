"""Members in parts, as workers of Beam write them: an .npy file for each leaf of each part."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.plan.dropping import Dropped
from beamjax.sources.arrays.npy_source import ArrayFile, NpySource, storable
from beamjax.sources.source_base import (
    Count,
    LeafSpec,
    Leaves,
    Positive,
    PyTreeDef,
    arguments_of,
    describe_source,
)
from beamjax.storage import files, trust
from beamjax.storage.schema import from_plain, parse_json, to_plain

Part = tuple[int, int]
"""The number of a part, and the number of members in it."""
PART_BYTES = 1 << 25
"""Approximate bytes of the members of a part, which a worker has in memory."""
MAX_PARTS = 4096
_FIRST_LEAF = re.compile(r"part-(\d+)-leaf-000\.npy")


@dataclasses.dataclass(frozen=True)
class _Manifest:
    version: int
    parts: tuple[tuple[Count, Positive], ...]
    leaves: Leaves
    tree: Any
    dropped: tuple[Dropped, ...] = ()


class PartFiles(NpySource):
    """Members in the parts of one folder, which has a manifest once all parts are written."""

    manifest: ClassVar[str]
    """The name of the manifest."""
    version: ClassVar[int]

    def __init__(
        self,
        folder: str,
        parts: Sequence[Part],
        leaves: Sequence[LeafSpec],
        treedef: PyTreeDef,
        dropped: Sequence[Dropped] = (),
    ) -> None:
        series = [
            tuple(ArrayFile(part_path(folder, part, number), rows) for part, rows in parts)
            for number in range(len(leaves))
        ]
        super().__init__(tuple(series), tuple(leaves), treedef)
        self.folder = folder
        self.parts = tuple(parts)
        self.dropped = tuple(dropped)

    def spec(self) -> dict[str, Any]:
        return arguments_of(self, NpySource)

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> NpySource:  # type: ignore[override]
        return NpySource.from_spec(spec)

    def remove(self) -> None:
        """Removes the files, and the folder if nothing else is in it."""
        self.unmap()
        files.remove_files(self.folder, [*self.files, self.manifest])
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)

    def finish(self) -> Self:
        """Writes the manifest, which lets other processes open the folder."""
        from beamjax.storage.treedefs import tree_to_json

        tree = tree_to_json(self.treedef)
        record = _Manifest(self.version, self.parts, self.leaves, tree, self.dropped)
        path = os.path.join(self.folder, self.manifest)
        try:
            files.write(path, json.dumps(to_plain(record), indent=1).encode())
        except OSError as error:
            raise SourceError(f"{path}: cannot write the list of files ({error}).") from error
        return self

    @classmethod
    def open(cls, folder: str) -> Self:
        """Opens the parts of a folder."""
        from beamjax.storage.treedefs import tree_from_json

        path = os.path.join(folder, cls.manifest)
        try:
            record = parse_json(files.read(path), f"{path}: found no list of files")
        except OSError as error:
            raise SourceError(f"{path}: cannot read ({error}).") from error
        try:
            if record["version"] != cls.version:
                raise TypeError(f"found version {record['version']!r:.20}, expected {cls.version}")
            read = from_plain(_Manifest, record, path)
            treedef = tree_from_json(read.tree, path)
            if treedef.num_leaves != len(read.leaves) or not read.leaves or not read.parts:
                raise TypeError(
                    f"found {len(read.leaves)} leaves for a tree of {treedef.num_leaves}"
                )
            source = cls(folder, read.parts, read.leaves, treedef, read.dropped)
        except (KeyError, TypeError, ValueError) as error:
            raise ArrayFormatError(f"{path}: found no list of files ({error}).") from error
        source.check_files()
        return source


class CollectedMembers(PartFiles):
    """Members in files, made from the elements of a PCollection; see `beamjax.from_beam`.

    Attributes:
      folder: the folder of the files.
      dropped: the elements that were left out with `on_error="drop"`.
    """

    manifest = "members.json"
    version = 2

    def __str__(self) -> str:
        return describe_source(self, f"in {self.folder}")


def part_path(folder: str, part: int, leaf: int) -> str:
    """The file of a leaf of a part."""
    return os.path.join(folder, f"part-{part:05d}-leaf-{leaf:03d}.npy")


def number_of_parts(nbytes: int, part_bytes: int) -> int:
    """The number of parts for members of `nbytes` bytes together."""
    return min(max(-(-nbytes // part_bytes), 1), MAX_PARTS)


def write_part(folder: str, part: int, arrays: Sequence[np.ndarray]) -> None:
    """Writes the files of a part, one for each leaf."""
    for leaf, array in enumerate(arrays):
        path = part_path(folder, part, leaf)
        # Beam may write a part twice at the same time; both attempts write the same.
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            with open(temporary, "wb") as file:
                np.save(file, storable(array), allow_pickle=False)
            os.replace(temporary, path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot write {array.nbytes} bytes of members ({error}); expected a "
                "folder that the launcher and all workers can write and read."
            ) from error


def written_parts(folder: str) -> list[Part]:
    """The parts that have files in a folder."""
    numbers = [int(match[1]) for match in map(_FIRST_LEAF.fullmatch, os.listdir(folder)) if match]
    return [
        (number, len(np.load(part_path(folder, number, 0), mmap_mode="r")))
        for number in sorted(numbers)
    ]


def prepare_folder(folder: str) -> None:
    """Makes a folder for parts, and removes parts that a failed call has left in it."""
    trust.check_folder(folder, "a folder for members")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        remove_parts(folder)
        with open(os.path.join(folder, f"part-{uuid.uuid4().hex}.tmp"), "wb") as file:
            os.unlink(file.name)
    except OSError as error:
        raise SourceError(f"{folder}: cannot write members here ({error}).") from error


def remove_parts(folder: str) -> None:
    """Removes all parts in a folder, whole or not."""
    for pattern in ("part-*.npy", "part-*.tmp"):
        for path in Path(folder).glob(pattern):
            path.unlink()
