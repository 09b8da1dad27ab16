"""Results by key on disk: the result of `reduce_by_key` if the keys are not known in advance."""

from __future__ import annotations

from typing import Any

import numpy as np

from beamjax.numerics.accumulators import is_float
from beamjax.numerics.by_key import key_codes, text_of
from beamjax.sources.arrays.part_files import PartFiles
from beamjax.sources.source_base import describe_source


class KeyedTable(PartFiles):
    """Rows of a key and the reduction of its members, in .npy files.

    Made by `beamjax.run` of a program that returns `reduce_by_key(x, keys)` without a number of
    keys, or by `open_placed`. It is a `Source` of `{"key": key, "value": tree}`, so another program
    can take the rows as its members. They are in the order of the files, not of the keys. As in a
    program, a key that is a text is an array uint8[width] with zeros at its end.

    Attributes:
      folder: the folder of the files.
    """

    manifest = "keys.json"
    version = 2

    @property
    def keys(self) -> np.ndarray:
        """All keys, in the order of the rows: numbers (n,), or str (n,) for texts."""
        return text_of(self.read(0, len(self))[0])

    @property
    def values(self) -> Any:
        """A tree of arrays of shapes (n, ...), in the order of the rows."""
        return self._tree(self.read(0, len(self)))["value"]

    def arrays(self) -> dict[str, Any]:
        """`{"key": keys, "value": values}`, in the order of the keys, in memory."""
        keys, *values = self.read(0, len(self))
        order = np.argsort(key_codes(keys), kind="stable")
        return self._tree([text_of(keys[order]), *(array[order] for array in values)])

    def to_arrow(self) -> Any:
        """A `pyarrow.Table` of the rows, in the order of the keys, in memory.

            table.to_arrow().to_pandas()
            pyarrow.parquet.write_table(table.to_arrow(), "by_key.parquet")

        Its columns are "key" and "value", or "key" and one column for each leaf of the values:
        "value.a.b" for `value["a"]["b"]`. Arrays of a row are lists of a fixed size, floats that
        Arrow does not have are float32, and complex numbers are lists of two floats.

        Returns:
          The table.
        """
        import jax
        import pyarrow as pa

        columns = jax.tree_util.tree_flatten_with_path(self.arrays())[0]
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in columns]
        return pa.table({name: _column(x) for name, (_, x) in zip(names, columns, strict=True)})

    def _tree(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        import jax

        tree: dict[str, Any] = jax.tree_util.tree_unflatten(self.treedef, arrays)
        return tree

    def __str__(self) -> str:
        return describe_source(self, f"by key in {self.folder}")


def _column(array: np.ndarray) -> Any:
    """An array of rows as a column of Arrow."""
    import pyarrow as pa

    if array.dtype.kind == "c":
        array = np.ascontiguousarray(array)[..., None].view(f"f{array.dtype.itemsize // 2}")
    if array.dtype.kind == "V":
        array = array.astype(np.float32 if is_float(array.dtype) else np.int8)
    column = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
