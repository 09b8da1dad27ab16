"""The pipeline of `from_beam`: groups the elements of a PCollection, and writes each group.

A PCollection has no order. So members are sorted by number or by a hash of their bytes, and the
files depend only on the members, not on bundles, retries or the number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import apache_beam as beam
import numpy as np
from apache_beam import typehints

from beamjax._beam_compat import unused_transform
from beamjax.errors import SourceError, StructureError
from beamjax.options import Options
from beamjax.pipelines.launch import new_pipeline, run_steps
from beamjax.pipelines.run import temporary_store
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.pipelines.worker.worker_errors import transform_errors
from beamjax.sources.arrays.part_files import number_of_parts, write_part
from beamjax.sources.member_values import MemberType, shown
from beamjax.sources.source_base import MAX_VALUES
from beamjax.storage import files

ENCODE, COUNT, ASSIGN, WRITE = "Encode members", "Count members", "Assign parts", "Write parts"
_OWN = "beamjax"
"""Prefix of the labels of these steps, in a pipeline that has others."""
_COUNTED = "from_beam.json"
_KEY_BYTES = 16

Index: TypeAlias = Callable[[Any], int] | None
Counted: TypeAlias = tuple[int, int]
"""The number of members, and the number of elements that were left out."""


@dataclass(frozen=True)
class Collection:
    """How elements become members."""

    folder: str  # of the parts, which all workers see
    member: MemberType  # the expected type of each element
    # Returns the number of an element; None sorts members by a hash of their bytes.
    index: Index
    drop: bool  # whether elements that are no members are left out
    part_bytes: int  # approximate

    @property
    def row_bytes(self) -> int:
        """Bytes of a member and its key."""
        return _KEY_BYTES + sum(leaf.nbytes for leaf in self.member.leaves)

    def encoded(self, element: Any) -> bytes:
        """A member as bytes that sort in the order of the members: its key and its leaves."""
        data = b"".join(array.tobytes() for array in self.member.arrays(element))
        if self.index is None:
            return hashlib.blake2b(data, digest_size=_KEY_BYTES).digest() + data
        number = self.index(element)
        known = isinstance(number, int | np.integer) and not isinstance(number, bool)
        if not known or not 0 <= number < MAX_VALUES:
            raise StructureError(
                f"from_beam: index returns {shown(number)}, expected the number of the member, "
                "an int from 0"
            )
        return int(number).to_bytes(8, "big") + bytes(_KEY_BYTES - 8) + data

    def part(self, row: bytes, counted: Counted) -> int:
        """The part of a member: each part has a range of numbers or of hashes."""
        key, parts = int.from_bytes(row[:8], "big"), self.parts(counted)
        if self.index is None:
            return key * parts >> 64
        # The last part also gets numbers that are too large, which `_check_numbers` refuses.
        return min(key * parts // sum(counted), parts - 1)

    def parts(self, counted: Counted) -> int:
        """The number of parts."""
        return number_of_parts(counted[0] * self.row_bytes, self.part_bytes)

    def write(self, part: int, rows: Iterable[bytes], counted: Counted) -> None:
        """Writes the members of a part."""
        table = np.frombuffer(b"".join(sorted(rows)), np.uint8).reshape(-1, self.row_bytes)
        if self.index is not None:
            numbers = table[:, :8].copy().view(">u8")[:, 0].astype(np.int64)
            self._check_numbers(numbers, part, counted)
        arrays, start = [], _KEY_BYTES
        for leaf in self.member.leaves:
            column = np.ascontiguousarray(table[:, start : start + leaf.nbytes])
            arrays.append(np.ndarray((len(table), *leaf.shape), leaf.dtype, column.data))
            start += leaf.nbytes
        write_part(self.folder, part, arrays)

    def _check_numbers(self, numbers: np.ndarray, part: int, counted: Counted) -> None:
        """Checks that each number of a part occurs once; elements that were dropped leave gaps."""
        size, parts = sum(counted), self.parts(counted)
        low, high = -(-part * size // parts), -(-(part + 1) * size // parts)
        expected = f"from_beam, index: {counted[0]} members are numbered 0 to {size - 1}"
        twice = numbers[1:][numbers[1:] == numbers[:-1]]
        if len(twice):
            count = int((numbers == twice[0]).sum())
            raise SourceError(f"{expected}, each once; found {count} elements with {twice[0]}.")
        missing = np.setdiff1d(np.arange(low, high), numbers)
        if len(missing) and not counted[1]:
            more = f" (and {len(missing) - 1} more of its part)" if len(missing) > 1 else ""
            raise SourceError(f"{expected}, each once; found no element with {missing[0]}{more}.")
        if numbers[-1] >= size:
            raise SourceError(f"{expected}, each once; found an element with {numbers[-1]}.")


def collect(
    transform: Any, collection: Collection, runner: Any, options: Options
) -> tuple[int, list[str]]:
    """Runs a pipeline and writes its elements as members."""
    connection = connect(runner, options)
    with temporary_store(connection.options) as store:
        with new_pipeline(connection) as pipeline:
            elements = _applied(transform, pipeline)
            elements | _OWN >> _Collect(store, collection)
            errors = transform_errors("from_beam", f"{_OWN}/")
            run_steps(pipeline, connection, store, [ENCODE, COUNT, ASSIGN, WRITE], errors)
        path = files.join(store.root, _COUNTED)
        try:
            members, dropped = json.loads(bytes(files.read(path)))
        except (OSError, ValueError) as error:
            raise SourceError(
                f"{path}: cannot read ({error}); do the launcher and the workers see the same "
                "files under this path?"
            ) from error
    return members, dropped


class _Collect(beam.PTransform):
    """Writes elements to files of members."""

    def __init__(self, store: Store, collection: Collection):
        super().__init__()
        self.store = store
        self.collection = collection

    def expand(self, input_or_inputs: Any) -> Any:
        """Beam's name for what a transform does."""
        store, collection = self.store, self.collection
        encode = beam.ParDo(EncodeMembers(store, collection))
        rows, notes = input_or_inputs | ENCODE >> encode.with_outputs("notes", main="rows")
        # Without it, a pipeline without elements would count nothing.
        none = input_or_inputs.pipeline | "No members" >> beam.Create([(0, "")])
        counted = (
            (
                none | "Zero" >> beam.Map(lambda _: (0, 0)).with_output_types(tuple[int, int]),
                rows | "One" >> beam.Map(lambda _: (0, 1)).with_output_types(tuple[int, int]),
            )
            | "Counts" >> beam.Flatten()
            | "Sum" >> beam.CombinePerKey(sum)
        )
        size = beam.pvalue.AsSingleton(
            {"members": counted, "notes": notes}
            | "Members and notes" >> beam.CoGroupByKey()
            | COUNT >> beam.ParDo(CountMembers(store))
        )
        return (
            rows
            | ASSIGN >> beam.ParDo(AssignParts(store, collection), size)
            | "Group parts" >> beam.GroupByKey()
            | WRITE >> beam.ParDo(WriteParts(store, collection), size)
        )


def _applied(transform: Any, pipeline: beam.Pipeline) -> beam.PCollection:
    """The PCollection of a user."""
    if isinstance(transform, beam.PCollection):
        raise StructureError(
            "from_beam: found a PCollection, which is part of a pipeline of your own; expected the "
            "PTransform that makes it, or a function of the pipeline: from_beam(lambda p: p | ...)."
            " Inside your own pipeline, apply beamjax.transform to it."
        )
    if isinstance(transform, beam.PTransform):
        pcoll = pipeline | "Elements" >> unused_transform(transform)
    elif callable(transform):
        pcoll = transform(pipeline)
    else:
        raise StructureError(
            f"from_beam: found a {type(transform).__name__}, expected a PTransform or a function "
            "of a pipeline."
        )
    if not isinstance(pcoll, beam.PCollection) or pcoll.pipeline is not pipeline:
        raise StructureError(
            f"from_beam: the transform returns {shown(pcoll)}, expected a PCollection of the "
            "pipeline that it is applied to."
        )
    if not pcoll.is_bounded:
        raise StructureError(
            "from_beam: found an unbounded PCollection, which has no last member; expected a "
            "bounded one, as of ReadFromKafka(..., max_num_records=n)."
        )
    if not pcoll.windowing.is_default():
        raise StructureError(
            f"from_beam: the elements are in {type(pcoll.windowing.windowfn).__name__}, expected "
            "the global window and the default trigger: a program reduces over all members at "
            "once. Put beam.WindowInto(beam.window.GlobalWindows()) at the end."
        )
    return pcoll


class CollectionFn(StepFn):
    """A step that knows how elements become members."""

    def __init__(self, store: Store, collection: Collection):
        self.store = store
        self.collection = collection


class EncodeMembers(CollectionFn):
    """From elements to rows, or to notes on what was left out."""

    yields = bytes

    def process(self, element: Any) -> Iterator[Any]:
        try:
            yield self.collection.encoded(element)
        except Exception as error:
            if not self.collection.drop:
                raise
            message = f"{type(error).__name__}: {error}"
            if not isinstance(error, StructureError):
                message = f"{message}; the element is {shown(element)}"
            yield beam.pvalue.TaggedOutput("notes", (0, message))


class CountMembers(StepFn):
    """Writes the number of members and the notes for the launcher; emits both numbers."""

    yields = tuple[int, int]

    def __init__(self, store: Store):
        self.store = store

    def process(self, element: tuple[int, dict[str, Iterable[Any]]]) -> Iterator[Counted]:
        members, notes = sum(element[1]["members"]), sorted(element[1]["notes"])
        self.store.write(_COUNTED, json.dumps([members, notes]).encode())
        yield members, len(notes)


class AssignParts(CollectionFn):
    """From rows to (part, row)."""

    yields = typehints.KV[int, bytes]

    def process(self, element: bytes, counted: Counted) -> Iterator[tuple[int, bytes]]:
        yield self.collection.part(element, counted), element


class WriteParts(CollectionFn):
    """Writes the rows of each part."""

    yields = typehints.Any

    def process(self, element: tuple[int, Iterable[bytes]], counted: Counted) -> None:
        self.collection.write(*element, counted)
