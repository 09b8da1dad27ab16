"""Members in parts, as workers of Beam write them: an .npy file for each leaf of each part."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.sources.arrays.npy_source import ArrayFile, NpySource, storable
from beamjax.sources.source_base import (
    LeafSpec,
    PyTreeDef,
    arguments_of,
    natural,
)
from beamjax.storage import files, trust
from beamjax.storage.schema import parse_json

Part = tuple[int, int]
"""The number of a part, and the number of members in it."""
PART_BYTES = 1 << 25
"""Approximate bytes of the members of a part, which a worker has in memory."""
MAX_PARTS = 4096
_FIRST_LEAF = re.compile(r"part-(\d+)-leaf-000\.npy")


class PartFiles(NpySource):
    """Members in the parts of one folder, which has a manifest once all parts are written."""

    manifest: ClassVar[str]
    """The name of the manifest."""
    version: ClassVar[int]

    def __init__(
        self, folder: str, parts: Sequence[Part], leaves: Sequence[LeafSpec], treedef: PyTreeDef
    ) -> None:
        series = [
            tuple(ArrayFile(part_path(folder, part, number), rows) for part, rows in parts)
            for number in range(len(leaves))
        ]
        super().__init__(tuple(series), tuple(leaves), treedef)
        self.folder = folder
        self.parts = tuple(parts)

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

        record = {
            "version": self.version,
            "parts": self.parts,
            "leaves": [leaf.to_json() for leaf in self.leaves],
            "tree": tree_to_json(self.treedef),
        }
        path = os.path.join(self.folder, self.manifest)
        try:
            files.write(path, json.dumps({**record, **self._extra()}, indent=1).encode())
        except OSError as error:
            raise SourceError(f"{path}: cannot write the list of files ({error}).") from error
        return self

    def _extra(self) -> dict[str, Any]:
        """What a subclass adds to the manifest."""
        return {}

    def _take(self, record: dict[str, Any], path: str) -> None:
        """Takes what `_extra` gave; KeyError, TypeError or ValueError if it is damaged."""

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
            leaves = [LeafSpec.from_json(leaf) for leaf in record["leaves"]]
            parts = [(natural(part), natural(rows, 1)) for part, rows in record["parts"]]
            treedef = tree_from_json(record["tree"], path)
            if treedef.num_leaves != len(leaves) or not leaves or not parts:
                raise TypeError(f"found {len(leaves)} leaves for a tree of {treedef.num_leaves}")
            found = cls(folder, parts, leaves, treedef)
            found._take(record, path)
        except (KeyError, TypeError, ValueError) as error:
            raise ArrayFormatError(f"{path}: found no list of files ({error}).") from error
        found.check_files()
        return found


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
    numbers = [int(found[1]) for found in map(_FIRST_LEAF.fullmatch, os.listdir(folder)) if found]
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
