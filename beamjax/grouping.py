"""Rows of a flat table grouped by a column: members of unequal size, in files.

The rows are dealt to parts by a hash of their keys, and each part is put in order by itself, so
that no more than one part of the table is in memory. What comes out depends on the table alone:
neither on who reads which rows, nor on how often.
"""

from __future__ import annotations

import collections
import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from beamjax.arrays import decode_arrays, encode_arrays
from beamjax.dealt_rows import DealtRows
from beamjax.errors import ArrayFormatError, OptionsError, SourceError, StructureError
from beamjax.fingerprints import source_fingerprint
from beamjax.options import Options, parse_options
from beamjax.sources.array_source import from_arrays
from beamjax.sources.data_files import is_url
from beamjax.sources.npy_source import NpySeries, NpySource, storable
from beamjax.sources.ragged_source import GroupedRows, chosen_buckets, place_of_mask
from beamjax.sources.source_base import LeafSpec, Source, StreamSource

LOCAL = "local"
MANIFEST = "groups.json"
VERSION = 1
PART_BYTES = 1 << 25
"""Of the rows of a part, about: a worker sorts them in memory."""
BLOCK_BYTES = 1 << 24
"""Of the rows that are read and dealt at once."""
MAX_PARTS = 4096

Arrays = list[np.ndarray]


@dataclass(frozen=True)
class Grouping:
    """What is grouped, and where the groups go.

    Attributes:
      folder: of the files, which all workers see.
      key: the number of the leaf with the keys.
      parts: how many.
      rows: of the table.
    """

    folder: str
    key: int
    parts: int
    rows: int

    def blocks(self, source: Source) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are read at once."""
        size = max(BLOCK_BYTES // max(sum(leaf.nbytes for leaf in source.leaves), 1), 1)
        for start in range(0, self.rows, size):
            yield start, min(start + size, self.rows)

    def deal(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Reads rows, and gives those of each part: the number of each row, then all leaves."""
        arrays = source.read(start, stop)
        part = hashed(arrays[self.key]) % np.uint64(self.parts)
        order = np.argsort(part, kind="stable")
        cuts = np.searchsorted(part[order], np.arange(self.parts + 1, dtype=np.uint64))
        for number in np.unique(part).tolist():
            mine = order[cuts[number] : cuts[number + 1]]
            rows = [(start + mine).astype(np.int64), *(array[mine] for array in arrays)]
            yield number, encode_arrays(rows)

    def write(self, part: int, blocks: Iterable[bytes]) -> None:
        """Puts the rows of a part in order and writes them: by length of the group, key, number.

        Raises:
          SourceError: a file can't be written.
        """
        read = [decode_arrays(block)[0] for block in blocks]
        rows, *leaves = (np.concatenate(arrays) for arrays in zip(*read, strict=True))
        keys = scalars(leaves.pop(self.key))
        order = np.lexsort((rows, keys))
        names, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
        members = np.lexsort((names, counts))
        order = order[_ranges(starts[members], counts[members])]
        self.save(part, "keys", names[members])
        for number, array in enumerate(leaves):
            self.save(part, f"leaf-{number:03d}", storable(array[order]))
        self.save(part, "counts", counts[members].astype(np.int64))

    def path(self, part: int, what: str) -> str:
        """Of a file of a part."""
        return os.path.join(self.folder, f"part-{part:05d}-{what}.npy")

    def written(self) -> list[int]:
        """The parts that have rows."""
        return [part for part in range(self.parts) if os.path.exists(self.path(part, "counts"))]

    def save(self, part: int, what: str, array: np.ndarray) -> None:
        """Writes a file of a part.

        Raises:
          SourceError: it can't be written.
        """
        path = self.path(part, what)
        try:
            handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
            with os.fdopen(handle, "wb") as file:
                np.save(file, array, allow_pickle=False)
            os.replace(temporary, path)
        except OSError as error:
            raise SourceError(
                f"{path}: cannot write {array.nbytes} bytes of grouped rows ({error})."
            ) from error


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
      StructureError: the rows are no dict, or there is no such leaf, or it holds no integers.
      SourceError: the table can't be read, or the folder can't be written.
      OptionsError: the folder holds the groups of something else.
    """
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
        shuffle(rows, grouping, runner, parse_options(options))
        write_manifest(where, record)
    return _opened(grouping, leaves, names, buckets)


def parts_for(rows: Source) -> int:
    """Into how many parts rows are dealt."""
    return min(max(-(-rows.nbytes // PART_BYTES), 1), MAX_PARTS)


def hashed(keys: np.ndarray) -> np.ndarray:
    """uint64[n] that are as good as random, of integers or texts: the finalizer of SplitMix64.

    Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 16.
    """
    if keys.ndim == 2:  # texts
        width = -(-keys.shape[1] // 8) * 8
        words = np.zeros((len(keys), width), np.uint8)
        words[:, : keys.shape[1]] = keys
        x = np.zeros(len(keys), np.uint64)
        for word in words.view("<u8").T:
            x = hashed(x ^ word.astype(np.uint64))
        return x
    x = keys.astype(np.int64 if keys.dtype.kind == "i" else np.uint64).view(np.uint64)
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def scalars(keys: np.ndarray) -> np.ndarray:
    """Keys that NumPy sorts: texts as bytes of one width."""
    if keys.ndim == 1:
        return keys
    return np.ascontiguousarray(keys).view(f"S{keys.shape[1]}")[:, 0]


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers of all ranges, one range after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)


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
      SourceError: rows can't be read, or the folder can't be written.
    """
    os.makedirs(grouping.folder, mode=0o700, exist_ok=True)
    for path in Path(grouping.folder).glob("part-*.npy"):  # of a call that was stopped
        path.unlink()
    # Several runners of Beam have what they shuffle in memory.
    dealt = DealtRows.inside(grouping.folder)
    try:
        if runner != LOCAL:
            from beamjax.pipelines import shuffling

            shuffling.shuffle(rows, grouping, dealt, runner, options)
            return
        parts = collections.defaultdict(list)
        for start, stop in grouping.blocks(rows):
            for part, piece in dealt.write(grouping.deal(rows, start, stop)):
                parts[part].append(piece)
        for part in sorted(parts):
            grouping.write(part, dealt.read(parts[part]))
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
