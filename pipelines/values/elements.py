"""The elements between the steps of a pipeline, and their coders.

The coders are deterministic, and nothing in an element is pickled: elements are encoded by
`beamjax.storage.arrays`. Importing this file registers the coders of `MemberBlock` and
`Environment`. A partial result is a plain `tuple[str, bytes]` (range of a buffer, encoded
accumulator), for which Beam has coders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from apache_beam.coders import Coder, registry

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.storage import arrays as wire

T = TypeVar("T")

MAX_ELEMENT_BYTES = 2**31 - 2**20
"""Largest element, in bytes: the limit of gRPC and protobuf, minus a margin for their headers."""


@dataclasses.dataclass(frozen=True, eq=False)
class MemberBlock:
    """Consecutive members, with those of their placed values that later steps need."""

    start: int
    count: int  # at most `shard_size`
    shard_size: int  # of the plan, in members
    values: dict[str, np.ndarray]  # arrays of shape (count, ...), by name
    # The same in the store, if they are too large for an element.
    refs: dict[str, StoreRef] = dataclasses.field(default_factory=dict)
    provenance: Provenance = UNKNOWN

    def __post_init__(self) -> None:
        if self.start < 0 or not 0 < self.count <= self.shard_size:
            raise StructureError(
                f"block at member {self.start}: found {self.count} members, expected from 1 to the "
                f"shard size {self.shard_size}, and a start of at least 0."
            )
        shapes = {name: np.shape(value) for name, value in self.values.items()}
        for name, ref in self.refs.items():
            shapes[name] = ref.leaves[0][1] if len(ref.leaves) == 1 else ()
        for name, shape in shapes.items():
            if not shape or shape[0] != self.count:
                raise StructureError(
                    f"block at member {self.start}, value {name!r}: found the shape {shape}, "
                    f"expected ({self.count}, ...)."
                )

    @property
    def nbytes(self) -> int:
        """The total size of all values in bytes."""
        held = sum(array.nbytes for array in self.values.values())
        return held + sum(ref.nbytes for ref in self.refs.values())

    def array(self, name: str, store: Store) -> np.ndarray:
        """A value of the block, or of the store if the block has a reference to it."""
        if name in self.values:
            return self.values[name]
        return store.array(self.refs[name], cache=False)

    def arrays(self, store: Store) -> dict[str, np.ndarray]:
        """All values, by name; see `array`."""
        return {name: self.array(name, store) for name in (*self.values, *self.refs)}


class PartKey(NamedTuple):
    """The part of a value that begins at an offset of its first axis, or of the flat value."""

    name: str
    offset: int


class NodeKey(NamedTuple):
    """A partial of an associative function: a node of a `DyadicTree`."""

    level: int
    number: int


@dataclasses.dataclass(frozen=True)
class Environment:
    """The server values that a step needs, or parts of them."""

    values: Mapping[Any, Any]  # by name, or by the key of a part; in an element, none is `Here`
    provenance: Provenance = UNKNOWN


class _Coder(Coder, Generic[T]):
    """A deterministic coder of one type, through `beamjax.storage.arrays`."""

    element: type

    def pack(self, value: T) -> tuple[list[np.ndarray], dict[str, Any]]:
        """`value` as arrays and plain JSON values."""
        raise NotImplementedError

    def unpack(self, arrays: list[np.ndarray], meta: dict[str, Any]) -> T:
        """Undoes `pack`. `decode` catches the errors that other values cause."""
        raise NotImplementedError

    def encode(self, value: T) -> bytes:
        """A value as bytes; equal values have equal bytes."""
        name = self.element.__name__
        # Beam calls a coder with whatever a transform emits.
        if not isinstance(value, self.element):
            raise StructureError(
                f"{self!r}: found {type(value).__name__}, expected {name}; give the transform "
                "the type hint of what it returns."
            )
        arrays, meta = self.pack(value)
        size = wire.encoded_size(arrays)
        if size > MAX_ELEMENT_BYTES:
            raise StructureError(
                f"{self!r}: found a {name} of {size} bytes, expected at most {MAX_ELEMENT_BYTES}; "
                "make the shards smaller."
            )
        return wire.encode_arrays(arrays, {"element": name, **meta})

    def decode(self, encoded: bytes) -> T:
        """Undoes `encode`; arrays are read-only views of `encoded`."""
        arrays, meta = wire.decode_arrays(encoded)
        name = self.element.__name__
        if meta.get("element") != name:
            raise ArrayFormatError(
                f"{self!r}: found an element {meta.get('element')!r}, expected {name!r}."
            )
        try:
            return self.unpack(arrays, meta)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ArrayFormatError(
                f"{self!r}: found {len(arrays)} arrays with {meta!r:.200}, which is no {name} "
                f"({type(error).__name__}: {error})."
            ) from error

    def estimate_size(self, value: T) -> int:
        """The approximate encoded size, in bytes. Beam's default is to encode the value."""
        arrays, _ = self.pack(value)
        return wire.encoded_size(arrays)

    def is_deterministic(self) -> bool:
        return True

    def to_type_hint(self) -> type:
        return self.element


def _names(meta: dict[str, Any]) -> list[str]:
    names = meta["names"]
    if not isinstance(names, list) or not all(type(name) is str for name in names):
        raise TypeError("the names are no texts")
    return names


def _key(plain: Any) -> str | PartKey | NodeKey:
    match plain:
        case str():
            return plain
        case [str(name), int(offset)]:
            return PartKey(name, offset)
        case [int(level), int(number)]:
            return NodeKey(level, number)
    raise TypeError(f"{plain!r:.40} is no key")


def _made_by(provenance: Provenance) -> dict[str, Any]:
    return {"provenance": provenance.to_json()} if provenance else {}


class MemberBlockCoder(_Coder[MemberBlock]):
    """Coder of `MemberBlock`."""

    element = MemberBlock

    def pack(self, value: MemberBlock) -> tuple[list[np.ndarray], dict[str, Any]]:
        names = sorted(value.values)
        block = [int(value.start), int(value.count), int(value.shard_size)]
        meta: dict[str, Any] = {"block": block, "names": names}
        arrays = [value.values[name] for name in names]
        if value.refs:
            refs = EnvironmentCoder().pack(Environment(value.refs))
            arrays, meta["refs"] = [*arrays, *refs[0]], refs[1]
        return arrays, meta | _made_by(value.provenance)

    def unpack(self, arrays: list[np.ndarray], meta: dict[str, Any]) -> MemberBlock:
        start, count, shard_size = meta["block"]
        if not all(type(number) is int for number in meta["block"]):
            raise TypeError("the block is not in numbers")
        names = _names(meta)
        refs: Mapping[str, Any] = {}
        if "refs" in meta:
            refs = EnvironmentCoder().unpack(arrays[len(names) :], meta["refs"]).values
            arrays = arrays[: len(names)]
        values = dict(zip(names, arrays, strict=True))
        provenance = Provenance.from_json(meta.get("provenance"))
        return MemberBlock(start, count, shard_size, values, dict(refs), provenance)


class EnvironmentCoder(_Coder[Environment]):
    """Coder of `Environment`."""

    element = Environment

    def pack(self, value: Environment) -> tuple[list[np.ndarray], dict[str, Any]]:
        names = sorted(value.values)
        refs = [value.values[name] for name in names]
        keys = [list(name) if isinstance(name, tuple) else name for name in names]
        meta = {"names": keys, "refs": [ref.to_json() for ref in refs]}
        meta |= _made_by(value.provenance)
        return [np.frombuffer(ref.inline, np.uint8) for ref in refs], meta

    def unpack(self, arrays: list[np.ndarray], meta: dict[str, Any]) -> Environment:
        refs = [
            StoreRef.from_json(record, inline.tobytes())
            for record, inline in zip(meta["refs"], arrays, strict=True)
        ]
        provenance = Provenance.from_json(meta.get("provenance"))
        return Environment(dict(zip(map(_key, meta["names"]), refs, strict=True)), provenance)


class ArrayCoder(_Coder[np.ndarray]):
    """Coder of one NumPy array of numbers; see `register_array_coder`."""

    element = np.ndarray

    def pack(self, value: np.ndarray) -> tuple[list[np.ndarray], dict[str, Any]]:
        return [value], {}

    def unpack(self, arrays: list[np.ndarray], meta: dict[str, Any]) -> np.ndarray:
        (array,) = arrays
        return array


def register_array_coder() -> None:
    """Makes `ArrayCoder` the coder of every PCollection of type `np.ndarray`."""
    # Not at import: it refuses arrays of strings and objects, which users may have in their own
    # pipelines.
    registry.register_coder(np.ndarray, ArrayCoder)


registry.register_coder(MemberBlock, MemberBlockCoder)
registry.register_coder(Environment, EnvironmentCoder)


LIMIT_BYTES = (64 << 20) - (64 << 10)
"""Largest size in bytes of the values in a block, so that an element has at most 64 MiB."""


def whole(block: MemberBlock, store: Store) -> MemberBlock:
    """A block as one element. If it is too large, its values are written to the store."""
    if block.nbytes <= LIMIT_BYTES:
        return block
    refs = {name: store.put([array], "block") for name, array in block.values.items()}
    return replace(block, values={}, refs=refs)


def cut(block: MemberBlock, store: Store) -> Iterator[MemberBlock]:
    """A block as elements with as many members as fit; see `whole` for members that do not fit."""
    most = max(LIMIT_BYTES * block.count // max(block.nbytes, 1), 1)
    for first in range(0, block.count, most):
        values = {name: array[first : first + most] for name, array in block.values.items()}
        count = min(most, block.count - first)
        part = replace(block, start=block.start + first, count=count, values=values)
        yield whole(part, store)
