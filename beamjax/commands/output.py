"""Results of a run as text, as JSON values and as files."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from beamjax._text import aligned
from beamjax.bodies.load import unwrap
from beamjax.errors import OptionsError, SourceError
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.tables.keyed_table import KeyedTable

SMALL = 8
"""Largest number of elements of a leaf that a summary shows."""


def named_leaves(result: Any) -> Iterator[tuple[str, str, Any]]:
    """The leaves of a tree: the path as JAX writes it, the path as a name, and the leaf."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield f"result{jax.tree_util.keystr(path)}", name or "result", leaf


def result_data(result: Any) -> list[dict[str, Any]]:
    """The name, dtype and shape of each leaf as JSON values, with its elements if they are few."""
    leaves = []
    for _, name, leaf in named_leaves(result):
        facts: dict[str, Any] = {"name": name}
        if isinstance(leaf, KeyedTable):
            facts |= {"keys": len(leaf), "folder": leaf.folder}
        else:
            facts |= {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
            if isinstance(leaf, Placed):
                facts["folder"] = leaf.folder
            elif leaf.size <= SMALL:
                array = plain(leaf)
                facts["value"] = (array.astype(str) if array.dtype.kind == "c" else array).tolist()
        leaves.append(facts)
    return leaves


def result_text(result: Any) -> str:
    """A line for each leaf: its path, its type, and its elements or their extent."""
    rows = []
    for where, _, leaf in named_leaves(result):
        if isinstance(leaf, KeyedTable):
            rows.append((where, f"{len(leaf)} keys", f"in {leaf.folder}"))
        else:
            kind = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
            extent = f"in {leaf.folder}" if isinstance(leaf, Placed) else _extent(plain(leaf))
            rows.append((where, kind, extent))
    return "\n".join(aligned(rows)) if rows else "the result has no leaves"


def _extent(array: np.ndarray) -> str:
    if array.size <= SMALL:
        return np.array2string(array, separator=" ", max_line_width=10_000).replace("\n", "")
    if array.dtype.kind not in "fiu":
        return ""
    numbers = array.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return "no finite element"
    odd = f", {numbers.size - finite.size} not finite" if finite.size < numbers.size else ""
    return f"from {finite.min():.6g} to {finite.max():.6g}, mean {finite.mean():.6g}{odd}"


def plain(leaf: Any) -> np.ndarray:
    """Converts a leaf to an array of a dtype that NumPy can save, with the same numbers."""
    # Keys become their data, bfloat16 and narrower floats float32, and int4 int8.
    if getattr(leaf, "dtype", None) == jax.dtypes.float0:
        return np.zeros(leaf.shape, bool)
    array = np.asarray(unwrap(leaf) if isinstance(leaf, jax.Array) else leaf)
    if array.dtype.isbuiltin == 1:
        return array
    return array.astype(np.float32 if jnp.issubdtype(array.dtype, jnp.floating) else np.int8)


# --- files


def check_out(path: str | None, keep: str | None) -> None:
    """Raises OptionsError if results can't be written to this path."""
    if path is None:
        return
    name, file = os.path.basename(path), path.endswith((".npz", ".npy"))
    if file and keep == "placed":
        raise OptionsError(f"--out {path}: found a file, but with --keep placed it is a folder")
    if not file and keep != "placed":
        raise OptionsError(
            f"--out {path}: found {name!r}, expected a name that ends in .npz, or in .npy for a "
            "single array; a folder needs --keep placed"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if file and not os.path.isdir(folder):
        raise OptionsError(f"--out {path}: there is no folder {folder}")


def write_out(result: Any, path: str) -> None:
    """Writes the leaves of a result to an .npz file, a single one to an .npy file, or a folder."""
    # Arrays in an .npz file have the names of their paths. A folder already holds the placed
    # results, and gets a file for each other leaf.
    is_folder = not path.endswith((".npz", ".npy"))
    arrays: dict[str, np.ndarray] = {}
    for _, name, leaf in named_leaves(result):
        if isinstance(leaf, KeyedTable) and not is_folder:
            columns = named_leaves(leaf.arrays())
            arrays |= {f"{name}/{inner}": plain(array) for _, inner, array in columns}
        elif not isinstance(leaf, Placed | KeyedTable) or not is_folder:
            arrays[name] = plain(leaf)
    if path.endswith(".npy") and len(arrays) != 1:
        raise OptionsError(
            f"--out {path}: found {len(arrays)} leaves, expected one; an .npz file takes all of "
            "them"
        )
    try:
        if is_folder:
            for name, array in arrays.items():
                _write(os.path.join(path, f"{name}.npy"), {name: array})
        else:
            _write(path, arrays)
    except OSError as error:
        raise SourceError(f"--out {path}: cannot write the result ({error})") from error


def _write(path: str, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file atomically: under a temporary name first."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.tmp", "wb") as file:
        if path.endswith(".npz"):
            _save_all(file, arrays)
        else:
            np.save(file, next(iter(arrays.values())))
    os.replace(f"{path}.tmp", path)


def _save_all(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    """As `np.savez`, which does not accept some names, such as `file`."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)
