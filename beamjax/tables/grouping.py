"""Rows of a flat table grouped by a column: members of unequal size, in files.

The rows are dealt to parts by a hash of their keys, and each part is put in order by itself, so
that no more than one part of the table is in memory. What comes out depends on the table alone:
neither on who reads which rows, nor on how often.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.call_checks import parsed_options
from beamjax.errors import ArrayFormatError, OptionsError, SourceError, StructureError
from beamjax.options import Options
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.shuffle.dealt_rows import DealtRows
from beamjax.shuffle.table_parts import Grouping, parts_for
from beamjax.sources.array_source import from_arrays
from beamjax.sources.arrays.data_files import is_url
from beamjax.sources.arrays.npy_source import NpySeries, NpySource
from beamjax.sources.ragged_source import GroupedRows, chosen_buckets, place_of_mask
from beamjax.sources.source_base import LeafSpec, Source, StreamSource
from beamjax.tables.grouping_memory import check_grouping

LOCAL = "local"
MANIFEST = "groups.json"
VERSION = 1


def group_by(
    source: Any,
    by: str,
    *,
    folder: str | os.PathLike[str],
    buckets: Sequence[int] | None = None,
    runner: Any = LOCAL,
    options: Any = None,
) -> GroupedRows:
    """Members of unequal size from a flat table: the rows with the same key are one member.

        rows = bj.from_parquet("examples/*.parquet")  # columns client, x, y
        clients = bj.group_by(rows, "client", folder="/data/clients")
        bj.run(federated_round, state, clients)  # {"x": (rows, ...), "y": (rows,), "mask": (rows,)}

    The table is read once, its rows are shuffled once, and the groups are written to the folder,
    where the next call with the same table, column and folder finds them. As with `from_ragged`,
    whose buckets and mask these members have, shards are padded little: members of like length
    stand together. Rows of a member are in the order of the table; `clients.keys` are the keys, in
    the order of the members.

    Args:
      source: of the rows, of known length, or a tree of arrays of shape (rows, ...): a dict.
      by: the name of the leaf with the keys, which the members do not have: integers of shape (),
        or uint8[k], texts of k bytes at most as `from_parquet(..., text_bytes=k)` reads them.
      folder: a local path that the workers see, made if it is not there.
      buckets: lengths to pad to, as for `from_ragged`.
      runner: of Beam, for one shuffle over its workers; "local" does it in this process, with
        files, in the memory of a part of the table.
      options: as for `beamjax.run`.

    Raises:
      StagingError: it may take more memory than `options={"memory": ...}` has for a worker process.
      StructureError: the rows are no dict, or there is no such leaf, or it holds no integers.
      SourceError: the table can't be read, or the folder can't be written.
      OptionsError: the folder holds the groups of something else.
    """
    parsed = parsed_options(options, runner)
    rows = source if isinstance(source, Source) else from_arrays(source)
    key, names = table_columns(rows, by, "group_by")
    if len(names) == 1:
        raise StructureError(f"group_by: found no leaf but {by!r}, expected rows of data too.")
    where = checked_folder(folder, "group_by")
    parts = parts_for(rows)
    grouping = Grouping(where, key, parts, len(rows))
    leaves = [leaf for i, leaf in enumerate(rows.leaves) if i != key]
    record = {
        "version": VERSION,
        "table": source_fingerprint(rows),
        "by": by,
        "parts": parts,
        "leaves": [leaf.to_json() for leaf in leaves],
    }
    if not found_before(where, record, "group_by"):
        check_grouping(rows, grouping, parsed, runner)
        shuffle(rows, grouping, runner, parsed)
        write_manifest(where, record)
    return _opened(grouping, leaves, names, buckets)


def checked_folder(folder: str | os.PathLike[str], who: str) -> str:
    """The absolute path of a folder for tables; OptionsError for a URL."""
    where = os.fspath(folder)
    if is_url(where):
        raise OptionsError(
            f"{who}, folder: found the URL {where}, expected a path: rows are in files that "
            "workers map. Use a folder that they share."
        )
    return os.path.abspath(where)


def table_columns(rows: Source, by: str, who: str) -> tuple[int, list[str]]:
    """The number of the leaf with the keys of a table, and the names of all leaves.

    Raises:
      SourceError, StructureError: it is no table with such keys.
    """
    import jax

    if isinstance(rows, StreamSource) or rows.buckets:
        raise SourceError(
            f"{who}: found {rows!r}, expected single rows in a source of known length."
        )
    tree = jax.tree_util.tree_unflatten(rows.treedef, range(len(rows.leaves)))
    flat = isinstance(tree, dict) and all(isinstance(leaf, int) for leaf in tree.values())
    if not flat or by not in tree:
        names = ", ".join(map(repr, tree)) if isinstance(tree, dict) else repr(rows)
        raise StructureError(f"{who}: found no leaf {by!r} in a dict of {names}.")
    leaf = rows.leaves[tree[by]]
    text = len(leaf.shape) == 1 and leaf.shape[0] > 0 and leaf.dtype == np.uint8
    if (leaf.shape or leaf.dtype.kind not in "iu") and not text:
        raise StructureError(
            f"{who}: found {leaf} as the leaf {by!r}, expected an integer in each row, or a text "
            "as uint8[bytes]."
        )
    return tree[by], sorted(tree, key=lambda name: tree[name])


def found_before(folder: str, record: dict[str, Any], who: str) -> bool:
    """Whether a folder holds what this record tells of.

    Raises:
      ArrayFormatError: its list can't be read.
      OptionsError: it holds something else.
    """
    path = os.path.join(folder, MANIFEST)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise ArrayFormatError(f"{path}: cannot read ({error}); remove the folder.") from error
    if found == record:
        return True
    fields = found if isinstance(found, dict) else {}
    told = [name for name in record if fields.get(name) != record[name]]
    raise OptionsError(
        f"{who}: {folder} holds what was made of another table: {', '.join(told)} differ. Choose "
        "another folder, or remove this one to begin anew."
    )


def write_manifest(folder: str, record: dict[str, Any]) -> None:
    """Says that a folder holds all of something."""
    temporary = os.path.join(folder, f"{MANIFEST}.tmp")
    Path(temporary).write_text(json.dumps(record, indent=1), encoding="utf-8")
    os.replace(temporary, os.path.join(folder, MANIFEST))


def shuffle(rows: Source, grouping: Grouping, runner: Any, options: Options) -> None:
    """Deals rows to parts and writes the parts, in this process or by a runner of Beam.

    Raises:
      StagingError: it may take more memory than `options.memory`.
      SourceError: rows can't be read, or the folder can't be written.
    """
    os.makedirs(grouping.folder, mode=0o700, exist_ok=True)
    for path in Path(grouping.folder).glob("part-*.npy"):  # of a call that was stopped
        path.unlink()
    # Several runners of Beam have what they shuffle in memory.
    dealt = DealtRows.inside(grouping.folder, grouping.parts)
    try:
        if runner != LOCAL:
            from beamjax.pipelines.tables import shuffle as shuffling

            shuffling.shuffle(rows, grouping, dealt, runner, options)
            return
        ranges = grouping.blocks(rows)
        dealt.list([dealt.write(grouping.deal(rows, start, stop)) for start, stop in ranges])
        for part in range(grouping.parts):
            if blocks := dealt.blocks(part):
                grouping.write(part, blocks)
    finally:
        dealt.remove()


def _opened(
    grouping: Grouping,
    leaves: Sequence[LeafSpec],
    names: Sequence[str],
    buckets: Sequence[int] | None,
) -> GroupedRows:
    import jax

    parts = grouping.written()
    counts = [np.load(grouping.path(part, "counts"), mmap_mode="r") for part in parts]
    lengths = np.concatenate(counts) if counts else np.zeros(0, np.int64)
    if lengths.sum() != grouping.rows:
        raise SourceError(
            f"{grouping.folder}: found {lengths.sum()} rows in groups, expected {grouping.rows}; "
            "do the launcher and the workers see the same files there? Remove the folder to group "
            "anew."
        )
    sizes = [int(found.sum()) for found in counts]
    series = [
        [(grouping.path(part, f"leaf-{i:03d}"), n) for part, n in zip(parts, sizes, strict=True)]
        for i in range(len(leaves))
    ]
    members = [name for number, name in enumerate(names) if number != grouping.key]
    treedef = jax.tree_util.tree_structure(dict.fromkeys(members, 0))
    rows = NpySeries(series, leaves, treedef)
    ends = os.path.join(grouping.folder, "ends.npy")
    if not os.path.exists(ends):
        np.save(f"{ends}.tmp.npy", np.cumsum(lengths))
        os.replace(f"{ends}.tmp.npy", ends)
    number = LeafSpec((), np.dtype(np.int64))
    keys = [np.load(grouping.path(part, "keys")) for part in parts]
    chosen = chosen_buckets(buckets, lengths, rows)
    return GroupedRows(
        rows, NpySource([ends], [number], len(lengths)), chosen, *place_of_mask(rows), keys
    )
