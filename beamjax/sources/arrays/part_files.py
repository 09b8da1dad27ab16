"""Members in files that a shuffle wrote: a file for each leaf of each part."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import numpy as np

from beamjax.sources.arrays.npy_source import NpySeries
from beamjax.sources.source_base import LeafSpec, PyTreeDef

Part = tuple[int, int]
"""The number of a part and of the members in it."""
_FIRST_LEAF = re.compile(r"part-(\d+)-leaf-000\.npy")


class PartFiles(NpySeries):
    """Members in .npy files of one folder.

    Attributes:
      folder: of the files.
    """

    def __init__(
        self, folder: str, parts: Sequence[Part], leaves: Sequence[LeafSpec], treedef: PyTreeDef
    ) -> None:
        files = [
            [(part_path(folder, part, number), rows) for part, rows in parts]
            for number in range(len(leaves))
        ]
        super().__init__(files, leaves, treedef)
        self.folder = folder


def part_path(folder: str, part: int, leaf: int) -> str:
    """The file of a leaf of a part."""
    return os.path.join(folder, f"part-{part:05d}-leaf-{leaf:03d}.npy")


def written_parts(folder: str) -> list[Part]:
    """The parts that have files in a folder."""
    numbers = [int(found[1]) for found in map(_FIRST_LEAF.fullmatch, os.listdir(folder)) if found]
    return [
        (number, len(np.load(part_path(folder, number, 0), mmap_mode="r")))
        for number in sorted(numbers)
    ]
