"""Two tables joined by a column, by one shuffle: for sources that are not in the same order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from beamjax.call_checks import parsed_options
from beamjax.errors import OptionsError, SourceError, StructureError
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.shuffle.dealt_rows import Blocks
from beamjax.shuffle.table_parts import (
    BLOCK_BYTES,
    WRITTEN_ROW_BYTES,
    Grouping,
    hashed,
    parts_for,
    scalars,
)
from beamjax.sources.array_source import from_arrays
from beamjax.sources.arrays.npy_source import storable
from beamjax.sources.source_base import Source
from beamjax.sources.tables.joined_source import JoinedRows, TwoTables
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.tables.grouping import (
    LOCAL,
    VERSION,
    checked_folder,
    found_before,
    shuffle,
    table_columns,
    write_manifest,
)
from beamjax.tables.grouping_memory import check_grouping

HOW = ("same", "inner")
_SIDES = ("the left table", "the right table")


@dataclass(frozen=True)
class Joining(Grouping):
    """What is joined, and where the rows go; see `Grouping`.

    Attributes:
      other: the number of the leaf with the keys of the right table; `key` is that of the left.
      left: rows of the left table; `rows` are those of both.
      how: "same" or "inner".
    """

    other: int = 0
    left: int = 0
    how: str = "same"

    def blocks(self, source: Source) -> Iterator[tuple[int, int]]:
        """Ranges of rows that are read at once, each of one table."""
        for table, first in zip(source.inner, (0, self.left), strict=True):
            size = max(BLOCK_BYTES // max(sum(leaf.nbytes for leaf in table.leaves), 1), 1)
            for start in range(0, len(table), size):
                yield first + start, first + min(start + size, len(table))

    def deal(self, source: Source, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
        """Reads rows, and gives those of each part with their numbers in their table."""
        side = int(start >= self.left)
        first = side * self.left
        arrays = source.inner[side].read(start - first, stop - first)
        keys = arrays[(self.key, self.other)[side]]
        part = hashed(keys) % np.uint64(self.parts)
        for number in np.unique(part).tolist():
            mine = np.flatnonzero(part == number)
            rows = [start - first + mine, *(array[mine] for array in arrays)]
            yield number, encode_arrays(rows, {"side": side})

    def writing_bytes(self, source: Source) -> int:
        """Of memory, to write a part of twice the mean: its rows as read, together and in order."""
        rows = min(-(-self.rows // self.parts) * 2, self.rows)
        return rows * (3 * sum(leaf.nbytes for leaf in source.leaves) + WRITTEN_ROW_BYTES)

    def write(self, part: int, blocks: Blocks) -> None:
        """Joins the rows of a part, and writes them in the order of the keys.

        Raises:
          SourceError: a key is there twice, or only in one table, or a file can't be written.
        """
        read: list[list[list[np.ndarray]]] = [[], []]
        for block in blocks:
            arrays, meta = decode_arrays(block)
            read[int(meta["side"])].append(arrays)
        tables = [self._table(side, found) for side, found in enumerate(read) if found]
        alone = [] if len(tables) == 2 else [int(bool(read[1]))]
        if alone and self.how == "same":
            self._refuse(alone[0], tables[0][0][0])
        if alone:
            counts = np.zeros(2, np.int64)
            counts[alone[0]] = len(tables[0][0])
            self.save(part, "alone", counts)
            return
        (keys, left), (others, right) = tables
        here, there = np.isin(keys, others), np.isin(others, keys)
        if self.how == "same":
            for side, (known, names) in enumerate(((here, keys), (there, others))):
                if not known.all():
                    self._refuse(side, names[~known][0])
        self.save(part, "alone", np.array([(~here).sum(), (~there).sum()], np.int64))
        if not here.any():
            return
        leaves = [*(x[here] for x in left), *(x[there] for x in right)]
        for number, array in enumerate(leaves):
            self.save(part, f"leaf-{number:03d}", storable(array))
        self.save(part, "counts", np.ones(here.sum(), np.int64))

    def _table(
        self, side: int, blocks: list[list[np.ndarray]]
    ) -> tuple[np.ndarray, list[np.ndarray]]:
        """The keys of a table, ascending, and its leaves; of the right one without the keys."""
        numbers, *leaves = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
        at = (self.key, self.other)[side]
        keys = scalars(leaves[at])
        order = np.lexsort((numbers, keys))
        keys = keys[order]
        again = np.flatnonzero(keys[1:] == keys[:-1])
        if len(again):
            first, second = numbers[order][again[0] : again[0] + 2]
            key = keys[again[0]].item()
            raise SourceError(
                f"join: found the key {key!r} twice in {_SIDES[side]}, in rows {first} "
                f"and {second}; expected each key once. beamjax.group_by brings the rows of a key "
                "together."
            )
        return keys, [x[order] for i, x in enumerate(leaves) if side == 0 or i != at]

    def _refuse(self, side: int, key: Any) -> None:
        raise SourceError(
            f"join: found the key {key.item()!r} in {_SIDES[side]} only, expected the same keys in "
            "both; how='inner' leaves out such rows, and counts them."
        )


def join(
    left: Any,
    right: Any,
    on: str,
    *,
    folder: str | os.PathLike[str],
    how: str = "same",
    runner: Any = LOCAL,
    options: Any = None,
) -> JoinedRows:
    """The rows of two tables with the same key, side by side: a placed input.

        users = bj.join(bj.from_parquet("users.parquet"), bj.from_zarr("features.zarr"), "id",
                        folder="/data/joined")

    For tables that are not in the same order; those that are can be two arguments of a program, and
    are read together. Both are read once and shuffled once, by key, into files in the folder, where
    the next call with the same tables finds them. The members are in the order of the files.

    Args:
      left: of the rows, a source of known length, or a tree of arrays: a dict with a leaf `on`.
      right: likewise. But for `on` no leaf is in both.
      on: the name of the leaf with the keys, as for `group_by`, each once in each table.
      folder: a local path that the workers see, made if it is not there.
      how: "same" expects the same keys in both tables; "inner" leaves out rows whose key is in one
        only, and counts them: `joined.unmatched`.
      runner: of Beam, or "local", as for `group_by`.
      options: as for `beamjax.run`.

    Raises:
      StagingError: it may take more memory than `options={"memory": ...}` has for a worker process.
      StructureError: a table is no dict, or has no such keys, or both have leaves of one name.
      SourceError: a key is there twice, or in one table only; or a table can't be read, or the
        folder can't be written.
      OptionsError: `how` is unknown, or the folder holds something else.
    """
    if how not in HOW:
        raise OptionsError(f"join, how: found {how!r}, expected one of {', '.join(HOW)}")
    parsed = parsed_options(options, runner)
    tables = [x if isinstance(x, Source) else from_arrays(x) for x in (left, right)]
    columns = [table_columns(table, on, "join") for table in tables]
    (key, names), (other, others) = columns
    twice = sorted(set(names) & set(others) - {on})
    if twice:
        raise StructureError(f"join: found the leaf {twice[0]!r} in both tables; rename one.")
    types = [table.leaves[at] for table, (at, _) in zip(tables, columns, strict=True)]
    if (types[0].shape, types[0].dtype) != (types[1].shape, types[1].dtype):
        raise StructureError(
            f"join: found keys {types[0]} and {types[1]} as {on!r}, expected one type in "
            "both tables."
        )
    where = checked_folder(folder, "join")
    both = TwoTables(*tables)
    joining = Joining(
        where, key, parts_for(both), len(both), other=other, left=len(tables[0]), how=how
    )
    leaves = [*tables[0].leaves, *(leaf for i, leaf in enumerate(tables[1].leaves) if i != other)]
    leaves = [
        replace(leaf, path=f"[{name!r}]")
        for leaf, name in zip(
            leaves, [*names, *(name for name in others if name != on)], strict=True
        )
    ]
    record = {
        "version": VERSION,
        "tables": [source_fingerprint(table) for table in tables],
        "on": on,
        "how": how,
        "parts": joining.parts,
        "leaves": [leaf.to_json() for leaf in leaves],
    }
    if not found_before(where, record, "join"):
        check_grouping(both, joining, parsed, runner)
        shuffle(both, joining, runner, parsed)
        write_manifest(where, record)
    return _opened(joining, leaves, on)


def _opened(joining: Joining, leaves: list[Any], on: str) -> JoinedRows:
    parts = joining.written()
    sizes = [len(np.load(joining.path(part, "counts"), mmap_mode="r")) for part in parts]
    alone = np.zeros(2, np.int64)
    for part in range(joining.parts):
        path = joining.path(part, "alone")
        if os.path.exists(path):
            alone += np.load(path)
    if not parts:
        raise SourceError(f"join: found no key of {on!r} that is in both tables.")
    if 2 * sum(sizes) + alone.sum() != joining.rows:
        raise SourceError(
            f"{joining.folder}: found {sum(sizes)} joined rows and {alone.sum()} alone, of "
            f"{joining.rows} in both tables; do the launcher and the workers see the same files "
            "there? Remove the folder to join anew."
        )
    # In the order of a dict of JAX.
    order = sorted(range(len(leaves)), key=lambda i: leaves[i].path)
    series = [
        [(joining.path(part, f"leaf-{i:03d}"), n) for part, n in zip(parts, sizes, strict=True)]
        for i in order
    ]
    return JoinedRows(series, [leaves[i] for i in order], (int(alone[0]), int(alone[1])))
