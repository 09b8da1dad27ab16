"""Replaces each `Keyed` in the result of a program by a table."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from beamjax.errors import OptionsError, StructureError
from beamjax.numerics.by_key import ByKey, Rows
from beamjax.ops.keyed import Keyed
from beamjax.options import Options
from beamjax.plan.steps import Plan
from beamjax.runtime.keyed_reduction import KeyedReduction
from beamjax.runtime.materialized_outputs import (
    MaterializedOutputs,
    materialized_outputs,
    refuse_results,
)
from beamjax.sources.array_source import from_arrays
from beamjax.sources.arrays import part_files
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.arrays.part_files import number_of_parts, prepare_folder, written_parts
from beamjax.sources.arrays.placed import Placed
from beamjax.sources.derived_sources import ZippedSource
from beamjax.sources.source_base import LeafSpec, Source
from beamjax.sources.tables.keyed_table import KeyedTable
from beamjax.storage import temporary
from beamjax.storage.arrays import dtype_from_name


@dataclass(frozen=True)
class KeyedOutput:
    """A `Keyed` among the results."""

    path: str  # in the result
    leaves: tuple[int, ...]  # the numbers of the outputs: of the keys, then of the values


def keyed_outputs(out_tree: Any, options: Options) -> list[KeyedOutput]:
    """Finds each `Keyed` in the tree of a result."""
    numbered = jax.tree_util.tree_unflatten(out_tree, range(out_tree.num_leaves))
    nodes = jax.tree_util.tree_flatten_with_path(numbered, is_leaf=_is_keyed)[0]
    outputs = [
        KeyedOutput(jax.tree_util.keystr(path), tuple(jax.tree_util.tree_leaves(node)))
        for path, node in nodes
        if _is_keyed(node)
    ]
    if outputs and "drop" in (options.on_error, options.on_nonfinite):
        raise OptionsError(
            f"result{outputs[0].path}: reduce_by_key without a number of keys reduces members "
            "after the program, which does not know the dropped members; give num_keys, or leave "
            "out on_error='drop' and on_nonfinite='drop'"
        )
    return outputs


def materialized_results(plan: Plan, out_tree: Any, options: Options) -> MaterializedOutputs:
    """The results that go to files, among them those from which tables are made."""
    keyed = keyed_outputs(out_tree, options)
    numbers = {number for output in keyed for number in output.leaves}
    results = materialized_outputs(plan, out_tree, options, numbers)
    refuse_results([_folder(results, output.path) for output in keyed], options)
    return results


def with_tables(result: Any, results: MaterializedOutputs, runner: Any, options: Options) -> Any:
    """Replaces each `Keyed` of a result by a table."""
    nodes, tree = jax.tree_util.tree_flatten_with_path(result, is_leaf=_is_keyed)
    leaves = [
        _table(node, jax.tree_util.keystr(path), results, runner, options)
        if _is_keyed(node)
        else node
        for path, node in nodes
    ]
    return jax.tree_util.tree_unflatten(tree, leaves)


def _is_keyed(node: Any) -> bool:
    return isinstance(node, Keyed)


def _table(
    keyed: Keyed, path: str, results: MaterializedOutputs, runner: Any, options: Options
) -> KeyedTable:
    members = [keyed.keys, *jax.tree_util.tree_leaves(keyed.values)]
    # `jax.vmap` over the program makes the members arrays with another first axis.
    arrays = [member for member in members if not isinstance(member, Placed)]
    texts = np.ndim(keyed.keys) == 2 and keyed.keys.dtype == np.uint8
    if any(np.ndim(member) == 0 for member in arrays) or np.ndim(keyed.keys) != 1 + texts:
        raise StructureError(
            f"result{path}: found members with keys along another axis than the first, as jax.vmap "
            "makes them; reduce_by_key without a number of keys can't be transformed by jax.vmap."
        )
    source = ZippedSource([m if isinstance(m, Placed) else from_arrays(m) for m in members])
    by_key = ByKey(
        keyed.op,
        (source.leaves[0].shape, source.leaves[0].dtype),
        tuple((leaf.shape, leaf.dtype) for leaf in source.leaves[1:]),
        tuple(map(dtype_from_name, keyed.dtypes)),
    )
    folder = _folder(results, path)
    prepare_folder(folder)
    parts = number_of_parts(len(source) * by_key.row_bytes, part_files.PART_BYTES)
    _reduce(source, KeyedReduction(folder, by_key, len(source), parts), runner, options)
    for member in members:
        if isinstance(member, Placed):
            member.remove()
    tree = jax.tree_util.tree_structure({"key": 0, "value": keyed.values}, is_leaf=_is_placed)
    leaves = [LeafSpec(*by_key.key, None, "['key']")]
    values = jax.tree_util.tree_flatten_with_path(keyed.values)[0]
    for (where, _), (shape, _), dtype in zip(values, by_key.members, by_key.results, strict=True):
        leaves.append(LeafSpec(shape, dtype, None, f"['value']{jax.tree_util.keystr(where)}"))
    table = KeyedTable(folder, written_parts(folder), leaves, tree).finish()
    if not results.persistent:
        weakref.finalize(table, _remove, KeyedTable(folder, table.parts, leaves, tree))
    return table


def _remove(table: KeyedTable) -> None:
    """Removes a table, and the temporary folder of the run after its last table."""
    table.remove()
    temporary.remove_empty(os.path.dirname(table.folder))


def _reduce(source: Source, reduction: KeyedReduction, runner: Any, options: Options) -> None:
    """Reduces the members of each key into files, in this process or by a runner of Beam."""
    if runner != "local" and len(source):
        from beamjax.pipelines.tables.reduce_by_key import reduce_by_key

        reduce_by_key(source, reduction, runner, options)
        return
    parts: dict[int, list[Rows]] = {}
    for start, stop in reduction.blocks():
        for part, rows in reduction.rows(source, start, stop):
            parts[part] = reduction.by_key.added(parts.get(part, []), [rows])
    # A table has at least one part.
    for part, waiting in (parts or {0: []}).items():
        reduction.write(part, waiting)


def _is_placed(node: Any) -> bool:
    return isinstance(node, Placed)


def _folder(results: MaterializedOutputs, path: str) -> str:
    """The folder of a table, next to the folders of its members."""
    folder = results.base
    if is_url(folder):
        raise OptionsError(
            f"result{path}: found the folder {folder} for results by key, expected a local path "
            "that all workers see"
        )
    words = [word for word in path.replace("'", "").replace("]", "").split("[") if word]
    return os.path.join(folder, "-".join(["keyed", *words]))
