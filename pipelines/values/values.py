"""Values between the passes of a run, as the launching process holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from beamjax.pipelines.values.members import (
    EntrySource,
    MembersSource,
    ScatteredSource,
    StackedSource,
)
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.plan.steps import Plan, ValueType
from beamjax.sources.source_base import LeafSpec, open_spec
from beamjax.storage import files


class ServerValue:
    """A server value: in the memory of this process, in the store, or both.

    Args:
      store: the store to which it is written when a worker needs it.
      array: the raw array, or None.
      ref: the reference to it in the store, or None.
    """

    def __init__(self, store: Store, array: np.ndarray | None = None, ref: Ref | None = None):
        self._store = store
        self._array = array
        self._ref = ref

    def array(self) -> np.ndarray:
        """The raw array, loaded from the store if it is only there."""
        if self._array is not None:
            return self._array
        assert self._ref is not None
        return self._store.array(self._ref)

    def ref(self, hint: str) -> Ref:
        """A reference for workers. The first call writes the value to the store."""
        if self._ref is None:
            assert self._array is not None
            self._ref = self._store.hold([self._array], hint)
        return self._ref

    def entry(self, index: int) -> ServerValue:
        """The entry of this index along the first axis."""
        return ServerValue(self._store, np.asarray(self.array()[index]))

    @property
    def files(self) -> frozenset[str]:
        """The names of the files of the store that hold it."""
        return frozenset(name for name, _ in self._ref.files) if self._ref else frozenset()


@dataclass(frozen=True)
class PlacedValue:
    """A placed value. Workers read it; it is not in the memory of this process.

    Attributes:
      spec: the spec of its source.
      leaf: the index of its leaf in the source.
      files: the names of the files of the store that hold it.
      entries: the values that it stacks, if it is a stack.
    """

    spec: dict[str, Any]
    leaf: int = 0
    files: frozenset[str] = field(default=frozenset(), repr=False)
    entries: tuple[PlacedValue, ...] | None = field(default=None, repr=False)

    def entry(self, index: int) -> PlacedValue:
        """The entry of this index along the first axis of each member."""
        if self.entries is not None:
            return self.entries[index]
        spec = EntrySource(self.spec, index).to_spec()
        return PlacedValue(spec, self.leaf, self.files)

    def whole(self) -> np.ndarray:
        """Loads all members, along axis 0."""
        source = open_spec(self.spec)
        return source.read(0, len(source))[self.leaf]


Value: TypeAlias = ServerValue | PlacedValue


def leaf_spec(value: ValueType) -> LeafSpec:
    """The type of a placed value as a leaf of a source."""
    return LeafSpec(value.shape, np.dtype(value.dtype))


def placed(spec: dict[str, Any], leaf: int) -> PlacedValue:
    """The placed value that is a leaf of the source with this spec."""
    kept = spec["kind"] == MembersSource.kind
    held = frozenset(MembersSource.from_spec(spec).files) if kept else frozenset()
    return PlacedValue(spec, leaf, held)


def members(source: MembersSource) -> PlacedValue:
    """The placed value of a source over files of the store."""
    return PlacedValue(source.to_spec(), 0, frozenset(source.files))


def scattered(value: ServerValue, hint: str, axis: int, store: Store) -> PlacedValue:
    """A server value cut into members along an axis."""
    ref = value.ref(hint)
    return PlacedValue(ScatteredSource(store, ref, axis).to_spec(), 0, value.files)


def stacked(name: str, entries: Sequence[Value], plan: Plan, store: Store) -> Value:
    """Stacks the values of the rounds of a loop.

    Args:
      name: the name of the result in the plan.
      entries: the values, which are all server values or all placed values.
      plan: the plan, with the type of the result.
      store: the store of the run.
    """
    value = plan.values[name]
    if value.placement is None:
        arrays = [entry.array() for entry in entries if isinstance(entry, ServerValue)]
        whole = np.stack(arrays) if arrays else np.empty(value.shape)
        return ServerValue(store, whole.astype(value.dtype, copy=False))
    placed = [entry for entry in entries if isinstance(entry, PlacedValue)]
    return stack_of(value, placed, plan.sizes[value.placement], store)


def stack_of(value: ValueType, entries: Sequence[PlacedValue], n: int, store: Store) -> PlacedValue:
    """Stacks placed values along the first axis of each of n members."""
    file = StackedSource.write(store.root, [(entry.spec, entry.leaf) for entry in entries])
    source = StackedSource(files.join(store.root, file), leaf_spec(value), n)
    held = frozenset({file}).union(*(entry.files for entry in entries))
    return PlacedValue(source.to_spec(), 0, held, tuple(entries))
