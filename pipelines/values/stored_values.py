"""Values of a run whose parts are in its store, and their form in messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import Here, StoreRef
from beamjax.pipelines.values.store import Store
from beamjax.plan.steps import Plan, ValueType
from beamjax.runtime.values import Leaf, Part, Ref, Values, ref_to
from beamjax.sources.source_base import LeafSpec, Source, open_spec
from beamjax.storage.schema import add_codec, from_plain, to_plain


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in a store, or in this process under a key of the store."""

    store: Store
    ref: StoreRef | Here

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.array()[start:stop]

    def array(self) -> np.ndarray:
        return self.store.array(self.ref)


@dataclass(frozen=True)
class SourceLeaf:
    """A leaf of a source in a message. The store has its spec, which may list very many files."""

    spec: StoreRef
    leaf: int


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


# --- in messages, the data of a part are a `SourceLeaf` or a `StoreRef`


def opened(
    values: Values, store: Store, x64: bool, sources: dict[str, Source]
) -> Mapping[str, Ref]:
    """The values of a message. Sources that are opened for them are added to `sources`."""

    def data(held: Any) -> Any:
        match held:
            case SourceLeaf(spec=spec, leaf=leaf):
                if spec.key not in sources:
                    text = store.array(spec, cache=False).tobytes()
                    sources[spec.key] = open_spec(json.loads(text))
                return Leaf(sources[spec.key], leaf, x64)
            case StoreRef():
                return Stored(store, held)
        return held  # of the launcher, whose thread this worker is

    return {name: value.with_data(data) for name, value in values.items()}


def _part_to_plain(part: Part) -> Any:
    return [part.start, part.count, to_plain(part.data), list(part.at), list(part.entry)]


def _part_from_plain(record: Any) -> Part:
    start, count, held, at, entry = record
    data: Any = from_plain(SourceLeaf if "spec" in held else StoreRef, held, "a part of a value")
    return Part(start, count, data, tuple(at), tuple(entry))


add_codec(Part, _part_to_plain, _part_from_plain)
