"""The elements between the steps of a pipeline, and their coders.

An element is parts of values, by name: whole server values, pieces of them, or a block of members.
The coders are deterministic, and nothing in an element is pickled: elements are encoded by
`beamjax.storage.arrays`. Importing this file registers the coder of `Element`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
from apache_beam.coders import Coder, registry

from beamjax.errors import ArrayFormatError, StructureError
from beamjax.pipelines.values.refs import StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.runtime.values import Part
from beamjax.storage import arrays as wire

T = TypeVar("T")

MAX_ELEMENT_BYTES = 2**31 - 2**20
"""Largest element, in bytes: the limit of gRPC and protobuf, minus a margin for their headers."""
LIMIT_BYTES = (64 << 20) - (64 << 10)
"""Largest size in bytes of the arrays in a block, so that an element has at most 64 MiB."""


class Element(dict[str, Part]):
    """Parts of values, by name. Their data are arrays, or references to values in the store."""

    @property
    def range(self) -> tuple[int, int]:
        """The first member of a block and the number of its members."""
        part = next(iter(self.values()))
        return part.start, part.count

    @property
    def nbytes(self) -> int:
        """The total size of all values in bytes."""
        return sum(_data(part).nbytes for part in self.values())

    def array(self, name: str, store: Store) -> np.ndarray:
        """A value of a block, which may be in the store."""
        data = _data(self[name])
        return store.array(data, cache=False) if isinstance(data, StoreRef) else data

    def arrays(self, store: Store) -> dict[str, np.ndarray]:
        """All values of a block; see `array`."""
        return {name: self.array(name, store) for name in self}

    def refs(self) -> dict[str, StoreRef]:
        """References to server values, by name."""
        return {name: ref_of(part) for name, part in self.items()}


def stored_part(ref: StoreRef, start: int = 0, count: int = 1) -> Part:
    """The part of a value that is in the store: by default, a whole server value."""
    data: Any = ref
    return Part(start, count, data)


def ref_of(part: Part) -> StoreRef:
    """Undoes `stored_part`; raises ArrayFormatError for another part."""
    data: Any = part.data
    if isinstance(data, StoreRef):
        return data
    raise ArrayFormatError("a server value: found an array, expected a reference to the store")


def _data(part: Part) -> Any:
    return part.data


def block_of(start: int, count: int, values: Mapping[str, np.ndarray]) -> Element:
    """Consecutive members, with those of their placed values that later steps need."""
    # Without any, later steps still count the members.
    rows = values or {"": np.empty((count, 0), np.uint8)}
    return Element({name: Part(start, count, array) for name, array in rows.items()})


def whole(block: Element, store: Store) -> Element:
    """A block as one element. If it is too large, its values are written to the store."""
    if block.nbytes <= LIMIT_BYTES:
        return block
    refs = {name: store.put([part.data], "block") for name, part in block.items()}
    return Element({name: stored_part(ref, *block.range) for name, ref in refs.items()})


def cut(block: Element, store: Store) -> Iterator[Element]:
    """A block as elements with as many members as fit; see `whole` for members that do not fit."""
    start, count = block.range
    arrays = block.arrays(store)
    most = max(LIMIT_BYTES * count // max(block.nbytes, 1), 1)
    for first in range(0, count, most):
        rows = {name: array[first : first + most] for name, array in arrays.items()}
        yield whole(block_of(start + first, min(most, count - first), rows), store)


# --- coders


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


class ElementCoder(_Coder[Element]):
    """Coder of `Element`."""

    element = Element

    def pack(self, value: Element) -> tuple[list[np.ndarray], dict[str, Any]]:
        arrays, records = [], []
        for name in sorted(value):
            part = value[name]
            record: list[Any] = [name, int(part.start), int(part.count)]
            data: Any = part.data
            if isinstance(data, StoreRef):
                record.append(data.to_json())
                data = np.frombuffer(data.inline, np.uint8)
            arrays.append(data)
            records.append(record)
        return arrays, {"parts": records}

    def unpack(self, arrays: list[np.ndarray], meta: dict[str, Any]) -> Element:
        parts = Element()
        for array, (name, start, count, *stored) in zip(arrays, meta["parts"], strict=True):
            if type(name) is not str or type(start) is not int or type(count) is not int:
                raise TypeError("the parts have no names or ranges")
            if start < 0 or count < 0:
                raise ValueError(f"a part of {count} members begins at {start}")
            if stored:
                (record,) = stored
                ref = StoreRef.from_json(record, array.tobytes())
                parts[name] = stored_part(ref, start, count)
            elif array.shape[:1] != (count,):
                raise ValueError(f"the part {name!r} of {count} members is {array.shape}")
            else:
                parts[name] = Part(start, count, array)
        return parts


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


registry.register_coder(Element, ElementCoder)
