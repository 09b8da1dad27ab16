"""Reductions too large to add up in memory: partials are written to files and merged in ranges.

A reduction buffer is cut into sections (`ValueRange`). A file holds the partial of one shard for
one section, unchanged. To merge a section, it is cut into smaller ranges, and only the accumulator
of one range is in memory at a time. When there are many partials, they are merged to encoded
accumulators, which replace them. Merging is associative, so the results do not depend on when that
happens.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from beamjax.numerics.accumulators import Accumulator
from beamjax.numerics.provenance import UNKNOWN, Provenance
from beamjax.numerics.reducers import decode_accumulator
from beamjax.plan import buffer_ranges
from beamjax.plan.buffer_ranges import ValueRange, file_ranges
from beamjax.plan.steps import FusedBuffer, Map, Plan
from beamjax.runtime.shard_executor import finish_buffer, new_accumulator
from beamjax.storage import aligned
from beamjax.storage.scratch import Scratch, Slot

T = TypeVar("T")
U = TypeVar("U")

MAX_ROWS = 8
"""Number of partials of a section that are stored before they are merged."""


@dataclass
class Terms(Generic[T]):
    """The partials of a section that are to be merged; `T` is an array or a reference to one.

    Attributes:
      rows: the number of a shard, and its partial, a flat vector.
      merged: lists of encoded accumulators, with one for each range of the section.
      left_out: the number of members that are in none of the partials of `rows`. Accumulators
        count the members that they leave out themselves.
      provenance: the kinds of machine that computed the partials.
    """

    rows: list[tuple[int, T]] = field(default_factory=list)
    merged: list[list[T]] = field(default_factory=list)
    left_out: int = 0
    provenance: Provenance = UNKNOWN

    def moved(self, move: Callable[[T], U]) -> Terms[U]:
        """The same terms, with `move` applied to each array or reference."""
        rows = [(shard, move(row)) for shard, row in self.rows]
        merged = [list(map(move, pieces)) for pieces in self.merged]
        return Terms(rows, merged, self.left_out, self.provenance)

    def __iadd__(self, other: Terms[T]) -> Terms[T]:
        self.rows += other.rows
        self.merged += other.merged
        self.left_out += other.left_out
        self.provenance |= other.provenance
        return self


def merged_pieces(
    section: ValueRange,
    buffer: FusedBuffer,
    mode: Any,
    terms: Terms[T],
    load: Callable[[T], np.ndarray],
) -> Iterator[tuple[ValueRange, Accumulator]]:
    """The ranges of a section, each with the accumulator of all terms.

    A generator: each accumulator is built when it is requested, and holds one range.

    Args:
      section: a section of the buffer.
      buffer: the buffer.
      mode: the mode of the accumulators, "exact" or "fast".
      terms: the terms of the section.
      load: returns the array that a term refers to.
    """
    rows = [(shard, _read_only(load(row))) for shard, row in terms.rows]
    for number, piece in enumerate(section.cut(buffer_ranges.RANGE_VALUES)):
        accumulator = new_accumulator(buffer, piece.stop - piece.start, mode)
        for shard, row in rows:
            accumulator.add(row[piece.start - section.start : piece.stop - section.start], shard)
        for pieces in terms.merged:
            accumulator.merge(decode_accumulator(load(pieces[number]).data))
        if buffer.kind == "sum":
            accumulator.left_out += terms.left_out
        yield piece, accumulator


def _read_only(array: np.ndarray) -> np.ndarray:
    """A read-only view. Accumulators collect read-only partials, and add several at once."""
    view = array.view()
    view.flags.writeable = False
    return view


def merge_terms(
    section: ValueRange,
    buffer: FusedBuffer,
    mode: Any,
    terms: Terms[T],
    load: Callable[[T], np.ndarray],
    save: Callable[[np.ndarray], U],
) -> Terms[U]:
    """Merges all terms of a section to encoded accumulators; see `merged_pieces`."""
    pieces = merged_pieces(section, buffer, mode, terms, load)
    merged = [save(np.frombuffer(a.encode(), np.uint8)) for _, a in pieces]
    return Terms([], [merged], provenance=terms.provenance)


def finished_sections(
    plan: Plan,
    step: Map,
    section: ValueRange,
    pieces: Iterable[tuple[ValueRange, Accumulator]],
    room: Callable[[str, int, int], np.ndarray],
) -> None:
    """Writes the results of a section into arrays.

    Args:
      plan: the plan of the step.
      step: the pass.
      section: a section of one of its buffers.
      pieces: the merged ranges of the section.
      room: returns the array to write the values [start, stop) of a result to.
    """
    buffer = step.buffers[section.buffer]
    for piece, accumulator in pieces:
        where = piece.start, piece.stop
        for name, start, values in finish_buffer(plan, step, buffer, accumulator, where):
            room(name, start, start + values.size)[...] = values


class LargeBuffers:
    """Reduces the buffers of a pass that are too large to be added up in memory.

    Args:
      step: the pass.
      mode: the mode of the accumulators, "exact" or "fast".
      scratch: the files in which partials are stored.
    """

    def __init__(self, step: Map, mode: Any, scratch: Scratch):
        self.step = step
        self.mode = mode
        self.scratch = scratch
        self.sections = file_ranges(step)
        self._waiting: dict[ValueRange, Terms[Slot]] = collections.defaultdict(Terms)
        # The latest shard stays in memory, so a pass with one shard writes no file.
        self._last: tuple[int, Sequence[np.ndarray | None]] | None = None

    def add(self, shard: int, partials: Sequence[np.ndarray | None], left_out: int) -> None:
        """Adds the partials of a shard, which must not be changed afterwards."""
        self._write_last()
        for section in self.sections:
            if self.step.buffers[section.buffer].kind == "sum":
                self._waiting[section].left_out += left_out
        self._last = shard, partials

    def terms(self) -> Iterator[tuple[ValueRange, Terms[np.ndarray]]]:
        """The terms of each section, loaded when they are requested."""
        for section in self.sections:
            terms = self._waiting[section]
            if len(terms.rows) > self._rows_of_accumulator(section):
                self._waiting[section] = terms = self._merged(section)
            found = terms.moved(self.scratch.read)
            if self._last is not None:
                shard, partials = self._last
                whole = partials[section.buffer]
                if whole is not None:
                    found.rows.append((shard, whole[section.start : section.stop]))
            yield section, found

    def results(self, plan: Plan) -> dict[str, np.ndarray]:
        """The results by name, as whole values."""
        found = {
            r.result: aligned.empty((r.size,), np.dtype(plan.values[r.result].dtype))
            for buffer in self.step.buffers
            for r in buffer.reductions
        }
        for section, terms in self.terms():
            buffer = self.step.buffers[section.buffer]
            pieces = merged_pieces(section, buffer, self.mode, terms, lambda array: array)
            finished_sections(
                plan, self.step, section, pieces, lambda name, lo, hi: found[name][lo:hi]
            )
        return {name: array.reshape(plan.values[name].shape) for name, array in found.items()}

    def _write_last(self) -> None:
        if self._last is None:
            return
        shard, partials = self._last
        for section in self.sections:
            whole = partials[section.buffer]
            if whole is None:
                continue
            row = self.scratch.write(whole[section.start : section.stop])
            self._waiting[section].rows.append((shard, row))
            if len(self._waiting[section].rows) >= MAX_ROWS:
                self._waiting[section] = self._merged(section)
        self._last = None

    def _rows_of_accumulator(self, section: ValueRange) -> int:
        """The number of partials that take about as much space as an encoded accumulator."""
        buffer = self.step.buffers[section.buffer]
        return 3 if buffer.kind == "sum" and np.dtype(buffer.dtype).kind in "fc" else 1

    def _merged(self, section: ValueRange) -> Terms[Slot]:
        buffer, terms = self.step.buffers[section.buffer], self._waiting[section]
        merged = merge_terms(
            section, buffer, self.mode, terms, self.scratch.read, self.scratch.write
        )
        # The old slots are freed after `merge_terms` has read them.
        for slot in (*(row for _, row in terms.rows), *(s for m in terms.merged for s in m)):
            self.scratch.free(slot)
        return merged


def encoded_terms(terms: Terms[Any], to_json: Callable[[Any], Any]) -> dict[str, Any]:
    """Terms as plain JSON values."""
    plain = terms.moved(to_json)
    return {
        "rows": [list(row) for row in plain.rows],
        "merged": plain.merged,
        "left_out": plain.left_out,
        "provenance": plain.provenance.to_json(),
    }


def decoded_terms(meta: Mapping[str, Any], from_json: Callable[[Any], T]) -> Terms[T]:
    """Undoes `encoded_terms`."""
    rows = [(shard, row) for shard, row in meta["rows"]]
    provenance = Provenance.from_json(meta.get("provenance"))
    return Terms(rows, meta["merged"], meta["left_out"], provenance).moved(from_json)
