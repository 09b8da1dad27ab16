"""The inputs of a run in the launching process."""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from beamjax.bodies.load import raw_array
from beamjax.plan.steps import Input, Plan
from beamjax.runtime.values import Leaf, Reader, Ref, ref_to
from beamjax.sources.array_source import ArraySource
from beamjax.sources.derived_sources import ShortSource, grouped, snapshot_of
from beamjax.sources.source_base import LeafSpec, Source, StreamSource
from beamjax.storage.buffers import snapshot

if TYPE_CHECKING:
    from beamjax.sources.streams.chunks import Streams


class Inputs:
    """The values of a plan's inputs."""

    def __init__(self, plan: Plan, values: Sequence[Any]):
        self.plan = plan
        # For each input an array, a scalar, or a pair of a `Source` and the index of its leaf.
        self.values = values
        self.has_sources = tuple in map(type, values)

    def snapshot(self) -> Inputs:
        """The same values, in memory that the caller can't write to."""
        sources: dict[int, Source] = {}

        def copied(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                return snapshot(value)
            if not isinstance(value, tuple):
                return value
            source, leaf = value
            if id(source) not in sources:
                sources[id(source)] = snapshot_of(source)
            return sources[id(source)], leaf

        return Inputs(self.plan, list(map(copied, self.values)))

    def server(self) -> dict[str, np.ndarray]:
        """The inputs that steps read whole, by name, as raw arrays."""
        return {
            spec.server: self.whole(i)
            for i, spec in enumerate(self.plan.inputs)
            if spec.server is not None
        }

    @functools.cached_property
    def refs(self) -> dict[str, Ref]:
        """All inputs that steps read, by name, for this process: it reads arrays in place."""
        types = self.plan.values
        refs = {name: ref_to(array, types[name]) for name, array in self.server().items()}
        for value, spec in zip(self.values, self.plan.inputs, strict=True):
            if spec.placed is None or isinstance(value, tuple):
                continue
            rows = _rows(value, spec.axis)
            if rows.dtype.isnative:  # else shards are converted one at a time
                rows = rows.view()
                rows.flags.writeable = False
                refs[spec.placed] = ref_to(rows, types[spec.placed], len(rows))
        if self.plan.placed_inputs <= refs.keys():
            return refs
        return refs | self.placed(self.reader(refs))

    def placed(self, reader: Reader) -> dict[str, Ref]:
        """The inputs that steps read by shards, by name, as a reader has them."""
        values, sizes, refs = self.plan.values, self.plan.sizes, {}
        for name, (source, leaf) in reader.where.items():
            n = sizes[values[name].placement or ""]
            refs[name] = ref_to(Leaf(reader.sources[source], leaf, reader.x64), values[name], n)
        return refs

    def whole(self, index: int) -> np.ndarray:
        """One input as a raw array."""
        value, spec = self.values[index], self.plan.inputs[index]
        if isinstance(value, tuple):
            from beamjax.sources.streams.chunks import members_of  # arrays need none

            source, leaf = value
            return members_of(source, self.plan.x64, [leaf])[0]
        raw = raw_array(value)
        name = spec.server
        return raw if name is None else raw.astype(self.plan.values[name].dtype, copy=False)

    def reader(self, others: Container[str] = ()) -> Reader:
        """A reader of the inputs that steps read by shards, without `others`."""
        sources: list[Source] = []
        numbers: dict[tuple[int, int], int] = {}
        where = {}
        for number, (value, spec) in enumerate(zip(self.values, self.plan.inputs, strict=True)):
            if isinstance(value, jax.ShapeDtypeStruct) or _is_stream(value):
                continue
            names = [(view.placed, view.rows) for view in spec.views]
            for name, rows in [(spec.placed, 1), *names]:
                if name is None or name in others:
                    continue
                # A source is read once for all its leaves; an array has one leaf.
                key = id(value[0]) if isinstance(value, tuple) else -number - 1, rows
                if key not in numbers:
                    numbers[key] = len(sources)
                    sources.append(self._source(value, spec, rows))
                leaf = value[1] if isinstance(value, tuple) else 0
                where[name] = numbers[key], leaf
        return Reader(*_selected(sources, where), self.plan.x64)

    def streams(self) -> Streams | None:
        """The sources of unknown length, if any, even those that no step reads."""
        from beamjax.sources.streams.chunks import Streams  # arrays need none

        sources: list[StreamSource] = []
        where = {}
        for value, spec in zip(self.values, self.plan.inputs, strict=True):
            if not _is_stream(value):
                continue
            source, leaf = value
            if all(source is not other for other in sources):
                sources.append(source)
            if spec.placed is not None:
                number = next(i for i, other in enumerate(sources) if source is other)
                where[spec.placed] = number, leaf
        return Streams(tuple(sources), where, self.plan.x64) if sources else None

    def _source(self, value: Any, spec: Input, rows: int) -> Source:
        """The source of an input, with `rows` of its rows in each member."""
        if isinstance(value, tuple):
            source = value[0]
        else:
            source = _array_source(_rows(value, spec.axis if rows == 1 else 0), spec.path)
        if spec.short:
            return ShortSource(source)
        return source if rows == 1 else grouped(source, rows)


def _selected(
    sources: Sequence[Source], where: Mapping[str, tuple[int, int]]
) -> tuple[tuple[Source, ...], dict[str, tuple[int, int]]]:
    """The sources without leaves that no step reads, as far as they can leave them out."""
    selected = []
    for number, source in enumerate(sources):
        used = sorted({leaf for at, leaf in where.values() if at == number})
        selected.append(source.select(used))
    numbers = [{leaf: i for i, leaf in enumerate(leaves)} for _, leaves in selected]
    moved = {name: (at, numbers[at][leaf]) for name, (at, leaf) in where.items()}
    return tuple(source for source, _ in selected), moved


def _is_stream(value: Any) -> bool:
    return isinstance(value, tuple) and isinstance(value[0], StreamSource)


def _rows(value: Any, axis: int) -> np.ndarray:
    """A raw array with the members, which are along `axis` of a value, along axis 0."""
    array = raw_array(value)
    return np.moveaxis(array, axis, 0) if axis else array


def _array_source(array: np.ndarray, path: str) -> ArraySource:
    leaf = LeafSpec(array.shape[1:], array.dtype, None, path)
    return ArraySource([array], [leaf], _SINGLE)


_SINGLE = jax.tree_util.tree_structure(0)
"""The tree of a single leaf."""
