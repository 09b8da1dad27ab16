"""Values of a run whose parts are in its store."""

from __future__ import annotations

import json
import weakref
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import Here
from beamjax.pipelines.values.refs import Ref as StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.plan.steps import Plan, ValueType
from beamjax.runtime.inputs import Reader
from beamjax.runtime.values import Leaf, Part, Ref, ref_to
from beamjax.sources.derived_sources import key_of
from beamjax.sources.source_base import LeafSpec, Source, open_spec, spec_of
from beamjax.storage.shared_cache import SharedCache


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a store, or in this process under a key of the store."""

    store: Store
    ref: StoreRef | Here

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array()[start:stop]

    def array(self) -> np.ndarray:
        return self.store.array(self.ref)


def leaf_spec(value: ValueType) -> LeafSpec:
    """The type of a placed value as a leaf of a source."""
    return LeafSpec(value.shape, np.dtype(value.dtype))


def stored(store: Store, ref: StoreRef, value: ValueType) -> Ref:
    """A server value in a store."""
    return ref_to(Stored(store, ref), value)


def members(source: Source, plan: Plan, name: str) -> Ref:
    """The placed value of this name, whose members are in a source that a run has written."""
    value = plan.values[name]
    return ref_to(Leaf(source, 0, plan.x64), value, plan.sizes[value.placement or ""])


def files_of_data(data: Any) -> frozenset[str]:
    """The names of the files of a store that hold a part."""
    match data:
        case Stored(ref=StoreRef() as ref):
            return frozenset(name for name, _ in ref.files)
        case Leaf(source=MembersSource() as source):
            return frozenset(source.files)
    return frozenset()


@dataclass(frozen=True, eq=False)
class Operands:
    """The placed values that the workers of a pass read."""

    values: Mapping[str, Ref]  # without parts in the memory of the launcher
    x64: bool

    def open(self) -> Reader:
        """A reader of their members."""
        return Reader.of(self.values, self.x64)

    def to_json(self, arrays: list[np.ndarray]) -> dict[str, Any]:
        """The values as plain values; bytes are added to `arrays`."""
        sources: dict[Hashable, int] = {}
        """The number in `arrays` of the spec of each source."""

        def data(part: Part) -> Any:
            if isinstance(part.data, Leaf):
                source, key = part.data.source, key_of(part.data.source)
                if key not in sources:
                    sources[key] = len(arrays)
                    arrays.append(np.frombuffer(_encoded_spec(source), np.uint8))
                return {"source": sources[key], "leaf": part.data.leaf}
            assert isinstance(part.data, Stored)
            assert isinstance(part.data.ref, StoreRef)
            arrays.append(np.frombuffer(part.data.ref.inline, np.uint8))
            root = part.data.store.root
            return {"ref": part.data.ref.to_json(), "inline": len(arrays) - 1, "root": root}

        values = {
            name: [
                value.dtype, value.shape, value.n,
                [[part.start, part.count, part.at, part.entry, data(part)] for part in value.parts],
            ]
            for name, value in self.values.items()
        }  # fmt: skip
        return {"values": values, "x64": self.x64}

    @classmethod
    def from_json(cls, record: dict[str, Any], arrays: list[np.ndarray]) -> Operands:
        """Undoes `to_json`."""
        sources: dict[int, Source] = {}
        x64 = record["x64"]

        def part(start: int, count: int, at: list[int], entry: list[int], data: Any) -> Part:
            held: Leaf | Stored
            if "source" in data:
                number = data["source"]
                if number not in sources:
                    sources[number] = _open(arrays[number].tobytes())
                held = Leaf(sources[number], data["leaf"], x64)
            else:
                inline = arrays[data["inline"]].tobytes()
                held = Stored(Store(data["root"]), StoreRef.from_json(data["ref"], inline))
            return Part(start, count, held, tuple(at), tuple(entry))

        values = {
            name: Ref(dtype, tuple(shape), n, tuple(part(*each) for each in parts))
            for name, (dtype, shape, n, parts) in record["values"].items()
        }
        return cls(values, x64)


CACHED_BYTES = 1 << 12
"""Bytes of an encoded spec from which on a process holds the source that it describes."""
_specs: dict[int, tuple[weakref.ref[Source], bytes]] = {}
"""Sources and their encoded specs, by the ids of the sources."""
_opened: SharedCache[Source] = SharedCache(4, lambda _: 1)
"""Sources that this process has opened, by their encoded specs."""


def _encoded_spec(source: Source) -> bytes:
    """The spec of a source as compressed JSON. It may list very many files, for each task."""
    number = id(source)
    known, encoded = _specs.get(number, (lambda: None, b""))
    if known() is not source:
        encoded = zlib.compress(json.dumps(spec_of(source)).encode(), 1)
        _specs[number] = weakref.ref(source, lambda _: _specs.pop(number, None)), encoded
    return encoded


def _open(encoded: bytes) -> Source:
    """The source of an encoded spec."""

    def opened() -> Source:
        return open_spec(json.loads(zlib.decompress(encoded)))

    # Each round reads the sources of the run; those of values of the last round are small.
    return opened() if len(encoded) < CACHED_BYTES else _opened.get(encoded, opened)
