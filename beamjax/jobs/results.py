"""The result of a job, as files in its folder."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from beamjax.bodies.export import key_impl, unwrap, with_weak_type, with_x64, wrap
from beamjax.errors import ArrayFormatError
from beamjax.runtime.materialized_outputs import open_placed
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.tables.keyed_table import KeyedTable, open_keyed
from beamjax.storage import records, treedefs
from beamjax.telemetry.job_folder import JobFolder


def write_result(folder: JobFolder, value: Any, x64: bool) -> None:
    """Writes the tree that a function returned.

    Args:
      folder: of the job.
      value: a tree of arrays, and of handles to results in files.
      x64: whether 64-bit types were enabled when the program was staged.

    Raises:
      SourceError: the folder cannot be written.
    """
    leaves, treedef = jax.tree_util.tree_flatten(value)
    types = [
        {
            "impl": key_impl(leaf.dtype) if _is_key(leaf) else None,
            "weak": bool(getattr(leaf, "weak_type", False)),
            "placed": leaf.folder if isinstance(leaf, Placed | KeyedTable) else None,
            "keyed": isinstance(leaf, KeyedTable),
        }
        for leaf in leaves
    ]
    leaves = [np.empty(0) if isinstance(leaf, Placed | KeyedTable) else leaf for leaf in leaves]
    record = {"tree": treedefs.tree_to_json(treedef), "types": types, "x64": x64}
    folder.write_result([np.asarray(unwrap(leaf)) for leaf in leaves], record)


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)


def read_result(folder: JobFolder, like: Any = None) -> Any:
    """Undoes `write_result`: the same tree, shapes, dtypes, weak types and kinds of keys.

    Args:
      folder: of a job that is done.
      like: a tree with the structure of the result, or None.

    Raises:
      StructureError: the structure can't be rebuilt from the folder, or `like` has another one.
      JobError, ArrayFormatError, SourceError: a file was removed or changed.
    """
    arrays, record = folder.result()
    path = f"{folder.path}/result{records.SUFFIX}"
    found = records.checked(record, {"types": list, "x64": bool}, path)
    if like is not None:
        treedef = treedefs.like(like, len(arrays))
    else:
        treedef = treedefs.tree_from_json(record.get("tree"), path)
    if not treedef.num_leaves == len(arrays) == len(found["types"]):
        raise ArrayFormatError(
            f"{path}: found a tree of {treedef.num_leaves} leaves with {len(found['types'])} types "
            f"for {len(arrays)} arrays"
        )
    leaves = [
        _leaf(array, kind, found["x64"], path)
        for array, kind in zip(arrays, found["types"], strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _leaf(array: np.ndarray, kind: Any, x64: bool, path: str) -> Any:
    types: dict[str, Any] = {
        "impl": (str, type(None)),
        "weak": bool,
        "placed": (str, type(None)),
        "keyed": bool,
    }
    kind = records.checked(kind if isinstance(kind, dict) else {}, types, path)
    if kind["placed"] is not None:
        return (open_keyed if kind["keyed"] else open_placed)(kind["placed"])
    if array.dtype == jax.dtypes.float0:
        return array
    if kind["impl"] and kind["weak"]:
        raise ArrayFormatError(f"{path}: found keys of a weak type, expected numbers or keys")
    with with_x64(x64):
        try:
            leaf = wrap(jax.numpy.asarray(array), kind["impl"])
        except (TypeError, ValueError) as error:  # JAX has no such keys, or not with such data
            raise ArrayFormatError(
                f"{path}: found {array.dtype}{list(array.shape)} as keys of {kind['impl']!r:.80} "
                f"({error})"
            ) from error
        return with_weak_type(leaf, kind["weak"], x64)
