"""Reductions too large for memory, in a pipeline: their partials are in the store.

What travels are pairs of the key of a section (`beamjax.plan.buffer_ranges`) and a small text that
says where its `Terms` are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from apache_beam import typehints

from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.pipelines.values.elements import Environment
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.merge import plan_with_size
from beamjax.pipelines.worker.metrics import StepTimes
from beamjax.pipelines.worker.tasks import StepFn, Task
from beamjax.plan.buffer_ranges import ValueRange, key_of
from beamjax.plan.steps import Map
from beamjax.runtime.large_reductions import (
    LargeBuffers,
    Terms,
    decoded_terms,
    encoded_terms,
    finished_sections,
    merge_terms,
    merged_pieces,
)
from beamjax.storage import aligned, files
from beamjax.storage.arrays import decode_arrays, encode_arrays
from beamjax.storage.scratch import Scratch

MAX_OPEN = 64
"""Partials of a section that are merged at once: each is a file that is open."""


def scratch_of(store: Store) -> Scratch:
    """Where the partials of a bundle wait: beside the store, if that is a local folder."""
    return Scratch(None if files.is_url(store.root) else store.root)


def terms_of_bundle(
    wide: LargeBuffers, store: Store, provenance: Provenance = UNKNOWN
) -> Iterator[tuple[str, bytes]]:
    """What a bundle sends of buffers that are too large for memory."""
    for section, terms in wide.terms():
        terms.provenance = provenance
        yield key_of(section), _sent(terms.moved(lambda array: _save(store, array)))


class MergeSections(StepFn):
    """What merges the terms of a section.

    Args:
      task: the pass.
      mode: of the accumulators.
    """

    def __init__(self, task: Task[Map], mode: Any):
        self.task = task
        self.mode = mode
        self.times = StepTimes(task.step.name, "merge", task.store.reports)

    def load(self, ref: Ref) -> np.ndarray:
        """A partial, or an encoded accumulator."""
        return self.task.store.array(ref, cache=False)

    def terms(self, section: ValueRange, elements: Iterable[bytes]) -> Terms[Any]:
        """All terms of a section; those that are too many to be open at once are merged."""
        buffer, terms = self.task.step.buffers[section.buffer], Terms[Any]()
        for data in elements:
            terms += _received(data)
            if len(terms.rows) >= MAX_OPEN:
                terms = merge_terms(section, buffer, self.mode, terms, self._array, _kept)
        return terms

    def _array(self, where: Ref | np.ndarray) -> np.ndarray:
        return self.load(where) if isinstance(where, Ref) else where

    def finish_bundle(self) -> None:
        """Tells how long it took."""
        self.times.report()


class MergeSectionGroup(MergeSections):
    """The terms of a group, merged: what is left for the last merge."""

    yields = typehints.KV[str, bytes]

    def process(self, element: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, bytes]]:
        key = element[0].rpartition("|")[0]
        section = ValueRange.from_key(key)
        buffer, store = self.task.step.buffers[section.buffer], self.task.store
        with self.times.measured(), self.task.at_work("merging"):
            terms = self.terms(section, element[1])
            merged = merge_terms(
                section, buffer, self.mode, terms, self._array, lambda array: _save(store, array)
            )
        yield key, _sent(merged)


class FinishSections(MergeSections):
    """The terms of a section to parts of the results, `name|offset`."""

    yields = Environment
    whole = False

    def process(
        self, element: tuple[str, Iterable[bytes]], *served: Environment
    ) -> Iterator[Environment]:
        section, step = ValueRange.from_key(element[0]), self.task.step
        plan, buffer = plan_with_size(self.task, served), step.buffers[section.buffer]
        parts = {}
        for r in buffer.reductions:
            start, stop = max(section.start, r.offset), min(section.stop, r.offset + r.size)
            if start < stop or not r.size:
                dtype = np.dtype(plan.values[r.result].dtype)
                size = max(stop - start, 0)
                parts[r.result] = start - r.offset, aligned.empty((size,), dtype)

        def room(name: str, lo: int, hi: int) -> np.ndarray:
            start, part = parts[name]
            return part[lo - start : hi - start]

        with self.times.measured(), self.task.at_work("merging"):
            terms = self.terms(section, element[1])
            provenance = self.task.accept(terms.provenance)
            pieces = merged_pieces(section, buffer, self.mode, terms, self._array)
            finished_sections(plan, step, section, pieces, room)
        put = self.task.store.put
        yield Environment(
            {
                f"{n}|{start}": put([part], n, inline=False, hashed=False)
                for n, (start, part) in parts.items()
            },
            provenance,
        )


def _save(store: Store, array: np.ndarray) -> Ref:
    return store.put([array], "partial", inline=False, hashed=False)


def _kept(array: np.ndarray) -> np.ndarray:
    return array


def _sent(terms: Terms[Ref]) -> bytes:
    return encode_arrays([], {"terms": encoded_terms(terms, Ref.to_json)})


def _received(data: bytes) -> Terms[Ref]:
    return decoded_terms(decode_arrays(data)[1]["terms"], Ref.from_json)
