"""Placed values between the pipelines of a run: sources over files of the store.

A file holds consecutive members as one array, and is named after them. What a loop slices or
stacks, and server values that are cut into members, are views of other values, read when a worker
asks for its shard.
"""

from __future__ import annotations

import base64
import functools
import json
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, SourceError
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.sources.arrays.placed import MemberFiles
from beamjax.sources.source_base import LeafSpec, Source, field, natural, open_spec
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays
from beamjax.storage.dtypes import dtype_from_name

SUFFIX = ".members"


class MembersSource(MemberFiles, kind="members"):
    """One placed value in files of `beamjax.storage.arrays` in the store of a run."""

    suffix = SUFFIX

    def wraps(self, leaf: int) -> bool:
        return True  # they were checked when they were written

    def load(self, path: str) -> np.ndarray:
        (array,) = decode_arrays(files.read(path))[0]
        return array


class EntrySource(Source, kind="entry"):
    """One entry, along the first axis of each member, of what another source holds.

    Args:
      base: the spec of the other source.
      index: of the entry; leaves that have none are left as they are.
    """

    def __init__(self, base: dict[str, Any], index: int):
        self.base = base
        self.index = index

    @functools.cached_property
    def source(self) -> Source:
        """The other source, opened where something is read."""
        return open_spec(self.base)

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

    def to_spec(self) -> dict[str, Any]:
        return {**self.spec_head(), "base": self.base, "index": self.index}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> EntrySource:
        return cls(field(spec, "base", dict), natural(spec["index"]))

    def origin(self, leaf: int, index: tuple[int, ...]) -> tuple[Source, int, tuple[int, ...]]:
        if self._cuts(self.source.leaves[leaf]):
            index = (index[0], self.index, *index[1:])
        return self.source, leaf, index

    def _cuts(self, leaf: LeafSpec) -> bool:
        return bool(leaf.shape) and self.index < leaf.shape[0]


class StackedSource(Source, kind="stacked"):
    """Placed values of one type, stacked along a new first axis of each member.

    Args:
      path: of a file that lists the spec of each value's source, and its leaf there: there may be
        more of them than fit in the description of a step.
      leaf: one member of the stack.
      size: the number of members.
    """

    def __init__(self, path: str, leaf: LeafSpec, size: int):
        self.path = path
        self.leaf = leaf
        self.size = size

    @functools.cached_property
    def entries(self) -> list[tuple[Source, int]]:
        """The sources of the stacked values and their leaves there, opened where they are read."""
        try:
            listed = json.loads(bytes(files.read(self.path)))
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
        """Writes the list of a stack; returns the name of its file."""
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
            if stacked is None:  # What is there to be read may be less than what it should be.
                stacked = np.empty(shape, self.leaf.dtype)
            stacked[:, i] = array
        return [np.empty(shape, self.leaf.dtype) if stacked is None else stacked]

    def to_spec(self) -> dict[str, Any]:
        leaf = self.leaf.to_json()
        return {**self.spec_head(), "path": self.path, "leaf": leaf, "size": self.size}

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> StackedSource:
        leaf = LeafSpec.from_json(spec["leaf"])
        if not leaf.shape:
            raise TypeError("a stack without an axis of its own")
        return cls(field(spec, "path", str), leaf, natural(spec["size"]))


class ScatteredSource(Source, kind="scattered"):
    """A server value cut into members.

    Args:
      store: where the reference leads.
      ref: to the server value.
      axis: of it, along which the members lie.
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
        return cls(Store(field(spec, "root", str)), ref, axis)
