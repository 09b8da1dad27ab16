"""Placed results that stay on disk: handles to files of .npy, and inputs of further programs."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.sources.arrays import data_files
from beamjax.sources.arrays.member_files import MemberFiles
from beamjax.sources.arrays.npy_source import map_file, restored, storable, stored_dtype
from beamjax.sources.source_base import PyTreeDef, describe_source

MANIFEST = "placed.json"


class Placed(MemberFiles, kind="placed"):
    """A placed result in files, made by `beamjax.run(..., keep="placed")` or `open_placed`.

    It is a `Source` with one leaf, so another program takes it as an argument, and its members are
    read on the workers. `np.asarray(placed)` reads all of it, `placed[3]` and `placed[10:20]` some
    members, along axis 0.

    The files are of .npy, `part-ID-START-COUNT.npy` with COUNT members from START on, and
    `placed.json` lists them. Dtypes that .npy does not know, such as bfloat16, are stored as
    unsigned integers of the same width, typed keys as their data.
    """

    suffix = ".npy"

    def load(self, path: str) -> np.ndarray:
        if not data_files.is_url(path):
            stored = map_file(path)
        else:
            with data_files.open_file(path) as file:
                stored = np.lib.format.read_array(file, allow_pickle=False)
        if stored.dtype != stored_dtype(self.leaf.dtype):
            return stored  # of another type than was written; refused with what it is
        return restored(stored, self.leaf.dtype)

    @property
    def is_local(self) -> bool:
        return not data_files.is_url(self.folder)

    @property
    def treedef(self) -> PyTreeDef:
        import jax

        return jax.tree_util.tree_structure(0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Members first; of typed keys, that of their data."""
        return (self.size, *self.leaf.shape)

    @property
    def dtype(self) -> np.dtype:
        """Of the members; of typed keys, that of their data."""
        return self.leaf.dtype

    @property
    def ndim(self) -> int:
        """The number of axes, that of the members included."""
        return len(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.read(0, self.size)[0], dtype=dtype, copy=copy)

    def __getitem__(self, index: Any) -> np.ndarray:
        """One member, or a slice of them.

        Raises:
          IndexError: there is no such member.
          TypeError: the index is neither a number nor a slice; `np.asarray` takes any.
        """
        if isinstance(index, slice):
            start, stop, step = index.indices(self.size)
            if step == 1:
                return self.read(start, max(start, stop))[0]
            return self.read(0, self.size)[0][index]
        if not isinstance(index, int | np.integer):
            raise TypeError(
                f"{self!r}: found the index {index!r}, expected a number or a slice; np.asarray "
                "gives an array that takes any"
            )
        number = int(index) + (self.size if index < 0 else 0)
        if not 0 <= number < self.size:
            raise IndexError(f"{self!r}: found the index {index}, expected one of {self.size}")
        return self.read(number, number + 1)[0][0]

    def describe(self) -> str:
        return describe_source(self, f"in {self.folder}")

    def remove(self) -> None:
        """Removes the folder, if nothing else is in it, and the files."""
        if data_files.is_url(self.folder):
            from beamjax.storage import files

            files.remove_files(self.folder, [*self.files, MANIFEST])
            return
        for name in (*self.files, MANIFEST):
            Path(self.folder, name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


def encode_part(members: np.ndarray) -> bytes:
    """Members as the bytes of a file of .npy."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(storable(members)), allow_pickle=False)
    return file.getvalue()
