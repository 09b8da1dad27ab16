"""The result of a job, as files in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from beamjax.bodies.export import key_impl
from beamjax.bodies.load import unwrap, with_weak_type, with_x64, wrap
from beamjax.errors import ArrayFormatError, JobError
from beamjax.runtime.materialized_outputs import open_placed
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.tables.keyed_table import KeyedTable
from beamjax.storage import treedefs
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry.job_folder import JobFolder


def write_result(folder: JobFolder, value: Any, x64: bool) -> None:
    """Writes the tree that a function returned: arrays, and handles of results in files."""
    leaves, treedef = jax.tree_util.tree_flatten(value)
    types = tuple(map(_leaf_type, leaves))
    leaves = [np.empty(0) if isinstance(leaf, Placed | KeyedTable) else leaf for leaf in leaves]
    for number, leaf in enumerate(leaves):
        folder.write_leaf(number, np.asarray(unwrap(leaf)))
    # Written last: a result with a record is whole.
    record = _ResultRecord(types, x64, treedefs.tree_to_json(treedef), folder.run)
    folder.write("result", to_plain(record))


@dataclass(frozen=True)
class _LeafType:
    """What the array of a leaf does not say."""

    impl: str | None  # the implementation of typed PRNG keys
    weak: bool  # whether it has a weak type
    placed: str | None  # the folder of a result in files
    stem: str = ""  # prefix of the names of these files, which is that of the run


@dataclass(frozen=True)
class _ResultRecord:
    """The types of the leaves, whether 64-bit types were enabled, the tree, and the run."""

    types: tuple[_LeafType, ...]
    x64: bool  # when the program was staged
    tree: Any = None
    run: str = ""


def _leaf_type(leaf: Any) -> _LeafType:
    is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    return _LeafType(
        key_impl(leaf.dtype) if is_key else None,
        bool(getattr(leaf, "weak_type", False)),
        leaf.folder if isinstance(leaf, Placed | KeyedTable) else None,
        leaf.stem if isinstance(leaf, Placed) else "",
    )


def read_result(folder: JobFolder, like: Any = None) -> Any:
    """Undoes `write_result`: the same tree, shapes, dtypes, weak types and kinds of keys."""
    record, path = folder.read("result"), folder.record_path("result")
    if record is None:
        raise JobError(
            f"{folder.path}: found no result of the job, which is done; it was removed, or "
            "could not be stored"
        )
    result = from_plain(_ResultRecord, record, path)
    if like is not None:
        treedef = treedefs.like(like, len(result.types))
    else:
        treedef = treedefs.tree_from_json(result.tree, path)
    if treedef.num_leaves != len(result.types):
        raise ArrayFormatError(
            f"{path}: found a tree of {treedef.num_leaves} leaves, expected {len(result.types)}, "
            "one for each type"
        )
    kinds = enumerate(result.types)
    leaves = [
        _leaf(folder.leaf(number, result.run), kind, result.x64, path) for number, kind in kinds
    ]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def _leaf(array: np.ndarray, kind: _LeafType, x64: bool, path: str) -> Any:
    if kind.placed is not None:
        placed = open_placed(kind.placed)
        if isinstance(placed, Placed) and placed.stem != kind.stem:
            raise ArrayFormatError(
                f"{path}: found results of another run in {kind.placed}, which have replaced those "
                "of this job"
            )
        return placed
    if array.dtype == jax.dtypes.float0:
        return array
    if kind.impl and kind.weak:
        raise ArrayFormatError(f"{path}: found keys of a weak type, expected numbers or keys")
    with with_x64(x64):
        try:
            leaf = wrap(jax.numpy.asarray(array), kind.impl)
        except (TypeError, ValueError) as error:  # unknown to this JAX, or the data do not fit
            raise ArrayFormatError(
                f"{path}: found {array.dtype}{list(array.shape)} as keys of {kind.impl!r:.80} "
                f"({error})"
            ) from error
        return with_weak_type(leaf, x64) if kind.weak else leaf
