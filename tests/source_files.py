"""One tree of members in files of each format, and as each source; workers import this module."""

import dataclasses
import gzip
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import tfrecords
import url_files  # noqa: F401 - makes bjtest:// known
from helpers import assert_same_bits

import beamjax as bj
from beamjax.sources.derived_sources import grouped

N = 23
_RNG = np.random.default_rng(0)
TREE = {
    "label": _RNG.integers(-(2**31), 2**31, N).astype(np.int32),
    "ok": _RNG.integers(0, 2, N).astype(bool),
    "x": _RNG.normal(size=(N, 2, 3)).astype(np.float32),
}
CUTS = (0, 4, 4, 19, N)
"""Where files begin and end, one of which is empty."""
FEATURES = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in TREE.items()}
NUMBERS = [
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "bool"),
]


def part(tree, start, stop):
    return {name: array[start:stop] for name, array in tree.items()}


def random_bits(dtype, shape, seed=0):
    """Any values of a dtype, NaNs among them."""
    if np.dtype(dtype).kind in "bV":
        return np.random.default_rng(seed).integers(0, 2, shape).astype(bool).astype(dtype)
    size = (*shape, np.dtype(dtype).itemsize)
    data = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return data.reshape(-1).view(dtype).reshape(shape)


def refused(error, message, function, *args, **kwargs):
    """Asserts that a call raises an error whose text matches."""
    with pytest.raises(error, match=message or None) as caught:
        function(*args, **kwargs)
    return caught.value


def assert_reads(source, tree, start=0, stop=None):
    """Members start..stop-1 have the bits of the arrays."""
    leaves = [np.asarray(leaf)[start:stop] for leaf in jax.tree.leaves(tree)]
    found = source.read(start, len(source) if stop is None else stop)
    assert_same_bits(found, leaves)


def members(source):
    """All members of a source of unknown length."""
    chunks = [chunk for piece in range(source.pieces) for chunk in source.chunks(piece)]
    return [np.concatenate(arrays) for arrays in zip(*chunks, strict=True)]


# --- formats


def lists(array):
    """An Arrow array of lists of fixed size, one level for each axis."""
    made = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
        made = pa.FixedSizeListArray.from_arrays(made, size)
    return made


def table_of(tree):
    return pa.table({name: lists(array) for name, array in tree.items()})


def examples(tree):
    rows = range(len(next(iter(tree.values()))))
    return [tfrecords.example({name: array[i] for name, array in tree.items()}) for i in rows]


def write_npz(path, tree, rows=5):
    with open(path, "wb") as file:
        np.savez(file, **tree)


def write_parquet(path, tree, rows=5):
    table = tree if isinstance(tree, pa.Table) else table_of(tree)
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


def write_arrow(path, tree, rows=5, packing="uncompressed"):
    table = tree if isinstance(tree, pa.Table) else table_of(tree)
    pyarrow.feather.write_feather(table, str(path), compression=packing, chunksize=rows)


def write_packed(path, tree, rows=5):
    write_arrow(path, tree, rows, "zstd")


def write_zarr(path, tree, rows=5, version=3):
    group = pytest.importorskip("zarr").open_group(path, mode="w", zarr_format=version)
    for name, array in tree.items():
        group.create_array(name, data=array, chunks=(rows, *array.shape[1:]))


def write_zarr_2(path, tree, rows=5):
    write_zarr(path, tree, rows, 2)


@dataclasses.dataclass(frozen=True)
class Format:
    """How trees of arrays are written to a path, by so many rows at a time, and read."""

    write: Callable[..., Any]
    read: Callable[..., Any]
    batch: str = ""


TABLES = {
    "parquet": Format(write_parquet, bj.from_parquet, "row group"),
    "arrow": Format(write_arrow, bj.from_arrow, "record batch"),
    "feather": Format(write_packed, bj.from_arrow, "record batch"),
}
RECORDS = {
    "tfrecord": Format(
        lambda path, tree, rows=5: tfrecords.write(path, examples(tree)),
        lambda path: bj.from_tfrecord(path, FEATURES),
    ),
}
ARRAYS = {
    "npz": Format(write_npz, bj.from_npz),
    "zarr": Format(write_zarr, bj.from_zarr),
    "zarr 2": Format(write_zarr_2, bj.from_zarr),
}


def save(form, path, tree=None, rows=5):
    form.write(path, TREE if tree is None else tree, rows)
    return str(path)


def save_parts(form, folder, tree=None, cuts=CUTS, rows=5, end=""):
    """The members between each two cuts as a file; gives the paths."""
    tree = TREE if tree is None else tree
    return [
        save(form, folder / f"part-{i}{end}", part(tree, start, stop), rows)
        for i, (start, stop) in enumerate(itertools.pairwise(cuts))
    ]


def save_npy(folder, tree=None, cuts=(0, None)):
    """Files of each leaf; gives patterns of them, or the path of the only one."""
    for name, array in (TREE if tree is None else tree).items():
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            np.save(folder / f"{name}-{i}.npy", array[start:stop])
    end = "0" if len(cuts) == 2 else "*"
    return {name: str(folder / f"{name}-{end}.npy") for name in (TREE if tree is None else tree)}


# --- datasets that give a member at a time


class Members:
    """Members one at a time."""

    def __init__(self, whole):
        self.whole = whole
        self.asked = []

    def __len__(self):
        return len(jax.tree.leaves(self.whole)[0])

    def __getitem__(self, index):
        self.asked.append(index)
        return jax.tree.map(lambda x: x[index], self.whole)


class Batches(Members):
    """Several members at a time, as grain and PyTorch ask for them."""

    def __getitems__(self, indices):
        self.asked.append(list(indices))
        return [jax.tree.map(lambda x, i=index: x[i], self.whole) for index in indices]


opened = []


@bj.opens_dataset
def open_members(n, batches=False):
    opened.append(n)
    return (Batches if batches else Members)(part(TREE, 0, n))


@bj.opens_dataset
def open_nothing():
    raise FileNotFoundError("no such table")


def not_marked(n):
    return open_members(n)


# --- sources


def _parts(name, folder):
    form = (TABLES | RECORDS)[name]
    save_parts(form, folder)
    return form.read(str(folder / "part-*"))


def _ragged(folder):
    lengths = np.arange(N) * 7 % 5
    starts = np.cumsum(lengths) - lengths
    rows = random_bits("int16", (int(lengths.sum()), 2))
    padded = np.zeros((N, 4, 2), np.int16)
    for member, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        padded[member, :length] = rows[start : start + length]
    mask = np.arange(4) < lengths[:, None]
    return bj.from_ragged({"rows": rows}, lengths, buckets=[2, 4]), {"mask": mask, "rows": padded}


def _grouped(folder):
    rows = {"x": TREE["x"].reshape(2 * N, 3)}
    return grouped(bj.from_npy(save_npy(folder, rows)), 2), {"x": TREE["x"]}


def _taken(folder):
    indices = np.arange(0, 3 * N, 3)[::-1]
    tripled = {name: np.repeat(array, 3, axis=0) for name, array in TREE.items()}
    return bj.take(bj.from_npz(save(ARRAYS["npz"], folder / "x", tripled)), indices), TREE


SOURCES = {
    "arrays": lambda folder: (bj.from_arrays(TREE), TREE),
    "spilled": lambda folder: (bj.from_arrays(TREE).spill(folder), TREE),
    "npy": lambda folder: (bj.from_npy(save_npy(folder)), TREE),
    "npy series": lambda folder: (bj.from_npy(save_npy(folder, cuts=CUTS)), TREE),
    **{
        name: lambda folder, form=form: (form.read(save(form, folder / "x")), TREE)
        for name, form in ARRAYS.items()
    },
    **{
        name: lambda folder, name=name: (_parts(name, folder), TREE)
        for name in (*TABLES, *RECORDS)
    },
    "range": lambda folder: (bj.from_range(N), np.arange(N, dtype=np.int32)),
    "members": lambda folder: (bj.from_random_access(Members(TREE)), TREE),
    "batches": lambda folder: (bj.from_random_access(Batches(TREE)), TREE),
    "list": lambda folder: (bj.from_random_access(list(Members(TREE))), TREE),
    "opened": lambda folder: (bj.from_random_access(open_members, {"n": N}), TREE),
    "opened batches": lambda folder: (
        bj.from_random_access("source_files:open_members", {"n": N, "batches": True}), TREE,
    ),
    "taken": _taken,
    "ragged": _ragged,
    "grouped": _grouped,
}  # fmt: skip
"""From a folder to a source and the arrays that it stands for."""


def _compressed(folder):
    for path in save_parts(RECORDS["tfrecord"], folder, end=".tfrecord"):
        Path(f"{path}.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
    return bj.from_tfrecord(str(folder / "*.gz"), FEATURES)


def _at_url(folder):
    save_parts(RECORDS["tfrecord"], folder)
    return bj.from_tfrecord(f"bjtest:/{folder}/part-*", FEATURES)


STREAMS = {
    "tfrecord.gz": _compressed,
    "tfrecord at a URL": _at_url,
}
"""From a folder to a source of unknown length of `TREE`."""
