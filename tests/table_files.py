"""Tables in files of Parquet and of Arrow, for the tests of both."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

import beamjax as bj

N = 23
F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Form:
    """A format: what reads it, and what writes a table to a path by batches of so many rows."""

    read: Callable[..., Any]
    write: Callable[[pa.Table, Any, int], None]
    batch: str

    def save(self, table, path, rows=5):
        self.write(table, str(path), rows)
        return str(path)


def write_parquet(table, path, rows):
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def write_arrow(table, path, rows):
    pyarrow.feather.write_feather(table, path, compression="uncompressed", chunksize=rows)


def write_packed(table, path, rows):
    pyarrow.feather.write_feather(table, path, compression="zstd", chunksize=rows)


FORMS = {
    "parquet": Form(bj.from_parquet, write_parquet, "row group"),
    "arrow": Form(bj.from_arrow, write_arrow, "record batch"),
    "feather": Form(bj.from_arrow, write_packed, "record batch"),
}


def lists(array):
    made = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def table_of(arrays):
    return pa.table({name: lists(array) for name, array in arrays.items()})


def tree_of(n=N, seed=0):
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((n, 2, 3)).astype(F32),
        "label": rng.integers(0, 9, n).astype(np.int8),
        "ok": rng.integers(0, 2, n).astype(bool),
    }


def in_order(tree):
    return jax.tree.leaves(tree)


def part(tree, start, stop):
    return {name: array[start:stop] for name, array in tree.items()}


def save_parts(form, folder, tree, cuts, rows=5):
    """The rows between each two cuts as a file; gives the paths."""
    return [
        form.save(table_of(part(tree, start, stop)), folder / f"part-{i:02d}.bin", rows)
        for i, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]
