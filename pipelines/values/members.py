"""Placed values between the pipelines of a run: sources over files of the store.

A file holds consecutive members as one array, and its name says which. Values that a loop slices or
stacks, and server values that are cut into members, are views: sources that read other values when
a worker reads its shard.
"""

from __future__ import annotations

import base64
import functools
import json
import shutil
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store, members_in
from beamjax.runtime.fingerprints import source_fingerprint
from beamjax.sources.array_source import ArraySource
from beamjax.sources.arrays.placed import MemberFiles
from beamjax.sources.canonical import check_members
from beamjax.sources.derived_sources import ShortSource
from beamjax.sources.source_base import Count, LeafSpec, PlainSource, Source, natural, open_spec
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.dtypes import dtype_from_name
from beamjax.storage.schema import from_plain, parse_json

SUFFIX = ".members"


class MembersSource(MemberFiles, kind="members"):
    """One placed value in files of the store, in the format of `beamjax.storage.arrays`."""

    suffix = SUFFIX

    def wraps(self, leaf: int) -> bool:
        return True  # integers were checked when the files were written

    def load(self, path: str) -> np.ndarray:
        def read() -> np.ndarray:
            (array,) = decode_arrays(files.read(path))[0]
            return array

        return members_in(path, read)


class EntrySource(PlainSource, kind="entry"):
    """One entry along the first axis of each member of another source.

    Args:
      base: the spec of the other source.
      index: the index of the entry. Leaves without such an entry are left as they are.
    """

    def __init__(self, base: Mapping[str, Any], index: Count):
        self.base = base
        self.index = index

    @functools.cached_property
    def source(self) -> Source:
        """The other source, opened at its first use, on the worker."""
        return open_spec(dict(self.base))

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return tuple(
            LeafSpec(leaf.shape[1:], leaf.dtype, leaf.key_impl, leaf.path)
            if self._cuts(leaf)
            else leaf
            for leaf in self.source.leaves
        )

    def __len__(self) -> int:
        return len(self.source)

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        arrays = self.source.read(start, stop)
        return [
            array[:, self.index] if self._cuts(leaf) else array
            for leaf, array in zip(self.source.leaves, arrays, strict=True)
        ]

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        if self._cuts(self.source.leaves[leaf]):
            index = (index[0], self.index, *index[1:])
        return self.source, leaf, index

    def _cuts(self, leaf: LeafSpec) -> bool:
        return bool(leaf.shape) and self.index < leaf.shape[0]


class StackedSource(PlainSource, kind="stacked"):
    """Placed values of one type, stacked along a new first axis of each member.

    Args:
      path: the path of a file that lists the spec of each value's source and its leaf there. It is
        a file, as there may be too many for the description of a step.
      leaf: the type of one member of the stack.
      size: the number of members.

    Raises:
      TypeError: the leaf has no axis of its own for the stack.
    """

    def __init__(self, path: str, leaf: LeafSpec, size: Count):
        if not leaf.shape:
            raise TypeError("found a stack without an axis of its own")
        self.path = path
        self.leaf = leaf
        self.size = size

    @functools.cached_property
    def entries(self) -> list[tuple[Source, int]]:
        """The sources of the stacked values and their leaves there, opened at their first use."""
        try:
            listed = parse_json(files.read(self.path), self.path)
            entries = [(open_spec(spec), natural(leaf)) for spec, leaf in listed]
        except OSError as error:
            raise SourceError(f"{self.path}: cannot read the list of a stack ({error})") from error
        except (RecursionError, TypeError, ValueError) as error:
            if isinstance(error, SourceError):
                raise
            raise ArrayFormatError(f"{self.path}: found no list of a stack ({error})") from error
        types = [(s.leaves[n].shape, s.leaves[n].dtype) for s, n in entries if n < len(s.leaves)]
        each = self.leaf.shape[1:], self.leaf.dtype
        if len(types) != self.leaf.shape[0] or any(found != each for found in types):
            raise ArrayFormatError(
                f"{self.path}: found a stack of {types!r:.200}, expected {self.leaf}"
            )
        return entries

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        member, entry, *rest = index
        source, number = self.entries[entry]
        return source, number, (member, *rest)

    @staticmethod
    def write(folder: str, entries: Sequence[tuple[dict[str, Any], int]]) -> str:
        """Writes the list of the stacked values; returns the name of its file."""
        name = f"stack-{uuid.uuid4().hex}{SUFFIX}"
        files.write(files.join(folder, name), json.dumps(entries).encode())
        return name

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        return (self.leaf,)

    def __len__(self) -> int:
        return self.size

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        shape = stop - start, *self.leaf.shape
        stacked = None
        for i, (source, leaf) in enumerate(self.entries):
            array = source.read(start, stop)[leaf]
            if stacked is None:  # The stored values may be fewer than the type says.
                stacked = np.empty(shape, self.leaf.dtype)
            stacked[:, i] = array
        return [np.empty(shape, self.leaf.dtype) if stacked is None else stacked]


class ScatteredSource(Source, kind="scattered"):
    """A server value cut into members.

    Args:
      store: the store that has the value.
      ref: the reference to the server value.
      axis: the axis of the server value along which it is cut.
    """

    def __init__(self, store: Store, ref: Ref, axis: int):
        self.store = store
        self.ref = ref
        self.axis = axis

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        ((name, shape),) = self.ref.leaves
        return (LeafSpec((*shape[: self.axis], *shape[self.axis + 1 :]), dtype_from_name(name)),)

    def __len__(self) -> int:
        ((_, shape),) = self.ref.leaves
        return shape[self.axis]

    def read(self, start: int, stop: int) -> list[np.ndarray]:
        self.check_range(start, stop)
        found = self.store.get(self.ref)
        if [(x.dtype.name, x.shape) for x in found] != list(self.ref.leaves):
            raise ArrayFormatError(
                f"{self!r}: found {len(found)} arrays, expected one of {self.ref.leaves}"
            )
        return [np.moveaxis(found[0], self.axis, 0)[start:stop]]

    def to_spec(self) -> dict[str, Any]:
        return {
            **self.spec_head(),
            "root": self.store.root,
            "ref": self.ref.to_json(),
            "inline": base64.b64encode(self.ref.inline).decode(),
            "axis": self.axis,
        }

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> ScatteredSource:
        ref = Ref.from_json(spec["ref"], base64.b64decode(spec["inline"]))
        axis = natural(spec["axis"])
        if len(ref.leaves) != 1 or axis >= len(ref.leaves[0][1]):
            raise TypeError(f"found axis {axis} of {ref.leaves}, expected one array with this axis")
        return cls(Store(from_plain(str, spec["root"], "root")), ref, axis)


Uploads = OrderedDict[str, list[dict[str, Any]]]
"""The specs of sources that were written to a store, by the prefix of their files, from the least
recently used."""

FILE_BYTES = 16 * 2**20
"""Approximate bytes of one file. For a shard, a worker reads all files that have members of it."""


def stays_here(source: Source, store: Store) -> bool:
    """Whether only this machine can read the source, while workers on others can read the store."""
    if any(stays_here(part, store) for part in source.inner):
        return True
    return files.is_url(store.root) and source.is_local


def in_files(
    source: Source, store: Store, x64: bool, number: int, known: Uploads | None = None
) -> list[dict[str, Any]]:
    """The specs with which workers in other processes open a source.

    Data that is in the memory of this process, or on this machine only, is written to the store.

    Args:
      source: the source of placed inputs.
      store: the store of the run.
      x64: whether JAX computes with 64-bit types.
      number: the index of the source in the run, for unique file names.
      known: the uploads of earlier runs; a source with equal content is not written again.

    Returns:
      One spec for all leaves, or one for each leaf.
    """
    stem = f"source-{number}-{uuid.uuid4().hex}"
    is_written = stays_here(source, store) or isinstance(source, ArraySource)
    if known is not None and is_written:
        stem = f"source-{source_fingerprint(source).removeprefix('#')}"
        if stem in known:
            known.move_to_end(stem)
            return known[stem]
        store = _lasting(store)
    if stays_here(source, store):
        specs = [leaf.to_spec() for leaf in upload(source, store, x64, stem)]
    else:
        specs = [source.spilled(files.join(store.root, stem)).to_spec()]
    if known is not None and is_written:
        known[stem] = specs
    return specs


def _lasting(store: Store) -> Store:
    """A store in a subfolder. `Store.sweep` does not remove files there."""
    folder = files.join(store.root, "sources")
    files.make_folder(folder)
    return replace(store, root=folder)


def remove_upload(store: Store, stem: str) -> None:
    """Removes the files of an upload, whose names begin with `stem`."""
    store = _lasting(store)
    if files.is_url(store.root):
        names = [name for name in files.names(store.root) if name.startswith(stem)]
        files.remove_files(store.root, names)
    else:
        shutil.rmtree(files.join(store.root, stem), ignore_errors=True)


def upload(source: Source, store: Store, x64: bool, stem: str) -> list[MembersSource]:
    """Writes all members of a source to a store.

    Args:
      source: the source to read.
      store: the store to write to.
      x64: whether JAX computes with 64-bit types.
      stem: the prefix of the file names.

    Returns:
      A source for each leaf.

    Raises:
      SourceError: members can't be read or written, or an integer does not fit the dtype that JAX
        uses for it.
    """
    if isinstance(source, ShortSource):  # Files hold members of one shape, with padding.
        (source,) = source.inner
    width = max(1, FILE_BYTES // max(1, *(leaf.nbytes for leaf in source.leaves)))
    parts = list(_parts(len(source), width))
    for start, count in parts:
        for number, array in enumerate(source.read(start, start + count)):
            check_members(source, number, array, start, x64)
            name = MembersSource.file_name(f"{stem}-{number}", start, count)
            store.write(name, encode_arrays([array], {}))
    return [
        MembersSource(store.root, f"{stem}-{number}", parts, leaf, len(source))
        for number, leaf in enumerate(source.leaves)
    ]


def _parts(n: int, width: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, width):
        yield start, min(width, n - start)
