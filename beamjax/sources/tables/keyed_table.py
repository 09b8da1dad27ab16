"""Results by key on disk: the result of `reduce_by_key` if the keys are not known in advance."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.sources.arrays.npy_source import Part, PartFiles, unmap
from beamjax.sources.source_base import LeafSpec, PyTreeDef, describe_source, natural
from beamjax.storage import files

MANIFEST = "keys.json"
VERSION = 2


class KeyedTable(PartFiles):
    """Rows of a key and the reduction of its members, in .npy files.

    Made by `beamjax.run` of a program that returns `reduce_by_key(x, keys)` without a number of
    keys, or by `open_keyed`. It is a `Source` of `{"key": int[], "value": tree}`, so another
    program can take the rows as its members. They are in the order of the files, not of the keys.

    Attributes:
      folder: the folder of the files.
    """

    @property
    def keys(self) -> np.ndarray:
        """int[n]: all keys, in the order of the rows."""
        return self.read(0, len(self))[0]

    @property
    def values(self) -> Any:
        """A tree of arrays of shapes (n, ...), in the order of the rows."""
        return self._tree(self.read(0, len(self)))["value"]

    def arrays(self) -> dict[str, Any]:
        """`{"key": keys, "value": values}`, in the order of the keys, in memory."""
        arrays = self.read(0, len(self))
        order = np.argsort(arrays[0])
        return self._tree([array[order] for array in arrays])

    def _tree(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        import jax

        tree: dict[str, Any] = jax.tree_util.tree_unflatten(self.treedef, arrays)
        return tree

    def describe(self) -> str:
        return describe_source(self, f"by key in {self.folder}")

    def remove(self) -> None:
        """Removes the files, and the folder if nothing else is in it."""
        for name in self.files:
            unmap(os.path.join(self.folder, name))
        files.remove_files(self.folder, [*self.files, MANIFEST])
        with contextlib.suppress(OSError):
            os.rmdir(self.folder)


def write_keyed(
    folder: str, parts: list[Part], leaves: list[LeafSpec], treedef: PyTreeDef
) -> KeyedTable:
    """Writes the list of the files of a table, and opens it.

    Returns:
      The table.

    Raises:
      SourceError: the folder can't be written.
    """
    from beamjax.storage.treedefs import tree_to_json

    record = {
        "version": VERSION,
        "parts": parts,
        "leaves": [leaf.to_json() for leaf in leaves],
        "tree": tree_to_json(treedef),
    }
    path = os.path.join(folder, MANIFEST)
    try:
        files.write(path, json.dumps(record).encode())
    except OSError as error:
        raise SourceError(f"{path}: cannot write the list of a table ({error}).") from error
    return KeyedTable(folder, parts, leaves, treedef)


def open_keyed(folder: str | os.PathLike[str]) -> KeyedTable:
    """Opens a table of results by key, in any process.

    Args:
      folder: the folder of the table, a local path: `table.folder`.

    Returns:
      The table, a `Source` of rows `{"key": int[], "value": tree}`.

    Raises:
      SourceError: there is no table.
      ArrayFormatError: its list of files is damaged.
    """  # noqa: DOC501
    from beamjax.storage.treedefs import tree_from_json

    where = os.path.abspath(folder)
    path = os.path.join(where, MANIFEST)
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(
            f"{path}: cannot read ({error}); expected the folder of a table by key."
        ) from error
    except ValueError as error:
        raise ArrayFormatError(f"{path}: found no list of files ({error})") from error
    try:
        if record["version"] != VERSION:
            raise TypeError(f"found version {record['version']!r:.20}, expected {VERSION}")
        leaves = [LeafSpec.from_json(leaf) for leaf in record["leaves"]]
        parts = [(natural(part), natural(rows, 1)) for part, rows in record["parts"]]
        treedef = tree_from_json(record["tree"], path)
        if treedef.num_leaves != len(leaves) or not leaves or not parts:
            raise TypeError(f"found {len(leaves)} leaves for a tree of {treedef.num_leaves}")
    except (KeyError, TypeError, ValueError) as error:
        raise ArrayFormatError(f"{path}: found no list of a table ({error})") from error
    return KeyedTable(where, parts, leaves, treedef)
