"""What all checkpointers do: they choose the values to save, and the checkpoint to go on from."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from beamjax.errors import ArrayFormatError, CheckpointError
from beamjax.numerics.provenance import UNKNOWN
from beamjax.options import Options
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.pipelines.checkpoints.records import (
    FolderStore,
    check_type,
    entry_type,
    record_of,
    ref_of,
)
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.values import leaf_spec
from beamjax.plan.liveness import Position, live_at, loops_at
from beamjax.plan.steps import Block, Plan, ValueType
from beamjax.runtime import fingerprints
from beamjax.runtime.checkpoints import (
    Array,
    Checkpoint,
    Members,
    Record,
    Rows,
    Stored,
    members_file,
)
from beamjax.runtime.inputs import Inputs
from beamjax.sources.arrays.data_files import FileHashes
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays

ROWS = 1024
"""Small entries of a stacked result in one array; after that many it is not written again."""
ROWS_BYTES = 1 << 20
"""Or after so many bytes."""

V = TypeVar("V")


@dataclass
class _Entries:
    """What is written already of a stacked result: records, and rows that are still too few."""

    values: Sequence[Any]
    done: int = 0
    records: list[Record] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)


class BaseCheckpointer(abc.ABC, Generic[V]):
    """Saves the state of a run; see `control_flow.Checkpointer`.

    Args:
      plan: that is run.
      inputs: of it.
      options: with the folder.

    Raises:
      CheckpointError: the folder is that of another plan, or of other inputs.
    """

    def __init__(self, plan: Plan, inputs: Inputs, options: Options):
        assert options.checkpoint is not None
        self.plan = plan
        self.every = options.checkpoint_every
        outputs = dict.fromkeys(out.value for out in plan.outputs if out.value is not None)
        self.whole = Block(plan.steps, tuple(outputs))
        self.folder = CheckpointFolder(options.checkpoint)
        self.store = FolderStore(self.folder.path, folder=self.folder)
        self.prints = fingerprints.plan_fingerprint(plan, options)
        hashes = FileHashes(self.folder.input_hashes())
        self.input_prints = fingerprints.input_fingerprints(inputs, hashes)
        self.folder.save_input_hashes(hashes.to_json())
        self.position: Position = ()
        self.finished = False
        self.values: dict[str, V] = {}
        self.stacks: dict[str, list[V]] = {}
        self._entries: dict[str, _Entries] = {}
        self.provenance = UNKNOWN

    @abc.abstractmethod
    def is_given(self, name: str) -> bool:
        """Whether a name is that of an input."""

    @abc.abstractmethod
    def record(self, name: str, value: V) -> Record:
        """Writes a value of the plan."""

    @abc.abstractmethod
    def value(self, record: Record, spec: ValueType) -> V:
        """Undoes `record`, for a value of this type."""

    @abc.abstractmethod
    def row(self, array: np.ndarray) -> V:
        """A server value that is one entry of a stacked result."""

    # ------------------------------------------------------------------------------- saving

    def save(
        self, position: Position, values: Mapping[str, V], stacks: Mapping[str, Sequence[V]]
    ) -> None:
        """Saves a checkpoint: what is live of these values."""
        live = (name for name in sorted(live_at(self.whole, position)) if not self.is_given(name))
        records = {name: self.record(name, values[name]) for name in live}
        entries = {name: self._stack(name, of) for name, of in stacks.items()}
        self._save(position, False, records, entries)

    def finish(self, values: Mapping[str, V]) -> None:
        """Saves the outputs of a run that is at its end."""
        self._save((), True, {n: self.record(n, value) for n, value in values.items()}, {})

    def _save(
        self,
        position: Position,
        finished: bool,
        values: Mapping[str, Record],
        stacks: Mapping[str, tuple[Record, ...]],
    ) -> None:
        self.folder.save(
            Checkpoint(
                self.prints, self.input_prints, position, finished, values, stacks, self.provenance
            )
        )

    def _stack(self, name: str, values: Sequence[V]) -> tuple[Record, ...]:
        """Writes what is new in a stacked result; small entries go together into one array."""
        entries = self._entries.get(name)
        if entries is None or entries.values is not values:
            entries = self._entries[name] = _Entries(values)
        entry = entry_type(self.plan.values[name])
        for value in values[entries.done :]:
            record = self.record(name, value)
            if not isinstance(record, Array):
                entries.records.append(record)
                continue
            entries.rows.append(record.array)
            if len(entries.rows) >= ROWS or len(entries.rows) * entry.nbytes >= ROWS_BYTES:
                entries.records.append(Rows(self.stored(name, np.stack(entries.rows))))
                entries.rows = []
        entries.done = len(values)
        rest = (Rows(Array(np.stack(entries.rows))),) if entries.rows else ()
        return (*entries.records, *rest)

    def stored(self, name: str, array: np.ndarray) -> Array | Stored:
        """Writes a server value, to the manifest if it is small."""
        return record_of(self.store.put([array], name))

    # ------------------------------------------------------------------------------ reading

    def restore(self) -> None:
        """Finds the last checkpoint that is whole.

        Raises:
          CheckpointError: it is one of another plan, or of other inputs.
        """
        for name, found in self.folder.manifests():
            self._check_same(name, found)
            try:
                self._check_position(found)
                self._restore(found)
            except ArrayFormatError as error:
                self.folder.warn(name, error)
                continue
            self.position, self.finished = found.position, found.finished
            self.provenance = found.provenance
            self.folder.keep(name, found)
            return
        self.values, self.stacks = {}, {}

    def _restore(self, found: Checkpoint) -> None:
        self.values = {
            name: self.value(record, self._type(name)) for name, record in found.values.items()
        }
        self.stacks, self._entries = {}, {}
        for loop, done in loops_at(self.whole, found.position):
            for name in loop.stacked:
                self._restore_stack(name, found.stacks[name], done)

    def _restore_stack(self, name: str, records: Sequence[Record], done: int) -> None:
        entry = entry_type(self._type(name))
        values: list[V] = []
        whole = _Entries(values)
        for record in records:
            if not isinstance(record, Rows):
                values.append(self.value(record, entry))
                whole.records.append(record)
                continue
            rows = self.array(record.of, None)
            if rows.ndim == 0 or len(rows) > done - len(values):
                raise ArrayFormatError(f"{name}: found rows {rows.shape} for {done} rounds")
            check_type(name, rows, entry, len(rows))
            values.extend(map(self.row, rows))
            if isinstance(record.of, Stored) or len(rows) >= ROWS:
                whole.records.append(record)
            else:
                whole.rows.extend(rows)
        if len(values) != done:
            raise ArrayFormatError(f"{name}: found {len(values)} entries, expected {done}")
        whole.done = done
        self.stacks[name], self._entries[name] = values, whole

    def array(self, record: Record, spec: ValueType | None) -> np.ndarray:
        """A server value that is in the manifest or in files; of this type, if one is given."""
        match record:
            case Array(array=array):
                pass
            case Stored():
                self.check_files(record)
                (array,) = self.store.get(ref_of(record), cache=False)
            case _:
                raise ArrayFormatError(f"found {type(record).__name__}, expected an array")
        if spec is not None:
            check_type(str(spec), array, spec)
        return array

    def check_files(self, record: Stored) -> None:
        """Reads the files of a value, one at a time, and checks their sizes and checksums.

        Their names say nothing of their content: workers write parts of reductions under unique
        names.

        Raises:
          ArrayFormatError: one of them is missing or damaged.
        """
        for name, size in record.files:
            data = self._file(name)
            if len(data) != size:
                raise ArrayFormatError(
                    f"{self.folder.join(name)}: found {len(data)} bytes, expected {size}"
                )
            self._decoded(name, data)
            self.folder.known.add(name)

    def source(self, record: Members, spec: ValueType) -> MembersSource:
        """A placed value in files, once all of them were read, one at a time.

        Raises:
          ArrayFormatError: one of them is missing or damaged, or not of this type.
        """
        n = self.plan.sizes[spec.placement or ""]
        for start, count in record.parts:
            name = members_file(record.stem, start, count)
            arrays = self._decoded(name, self._file(name))
            if len(arrays) != 1:
                raise ArrayFormatError(f"{name}: found {len(arrays)} arrays, expected one")
            check_type(name, arrays[0], spec, count)
            self.folder.known.add(name)
        if sum(count for _, count in record.parts) != n:
            raise ArrayFormatError(f"{record.stem}: the members of {n} are not all there")
        return MembersSource(self.folder.path, record.stem, record.parts, leaf_spec(spec), n)

    def _file(self, name: str) -> memoryview:
        try:
            return files.read(self.folder.join(name))
        except FileNotFoundError as error:
            raise ArrayFormatError(f"{self.folder.join(name)}: is missing") from error
        except Exception as error:
            if name not in files.names(self.folder.path):
                raise ArrayFormatError(f"{self.folder.join(name)}: is missing") from error
            raise CheckpointError(f"{self.folder.join(name)}: cannot be read ({error})") from error

    def _decoded(self, name: str, data: memoryview) -> list[np.ndarray]:
        try:
            return decode_arrays(data)[0]
        except ArrayFormatError as error:
            raise ArrayFormatError(f"{self.folder.join(name)}: {error}") from None

    def _type(self, name: str) -> ValueType:
        try:
            return self.plan.values[name]
        except KeyError:
            raise ArrayFormatError(f"found the value {name!r:.80}, which is none") from None

    def _check_same(self, name: str, found: Checkpoint) -> None:
        changed = fingerprints.differences(self.prints, found.plan)
        what = "is of another plan"
        if not changed:
            what = "is of other inputs"
            changed = fingerprints.differences(self.input_prints, found.inputs)
        if changed:
            raise CheckpointError(
                f"checkpoint {self.folder.join(name)} {what} than this run: they differ in "
                f"{'; '.join(changed[:5])}{'; ...' if len(changed) > 5 else ''}. Give this run a "
                "folder of its own (the option checkpoint), or remove the folder to start anew"
            )

    def _check_position(self, found: Checkpoint) -> None:
        """Raises ArrayFormatError unless the plan has such a place, and all its values are here."""
        names = set(self.whole.outputs)
        try:
            if not found.finished:
                names = live_at(self.whole, found.position)
            loops = loops_at(self.whole, found.position)
            for number, (loop, done) in enumerate(loops):
                under_way = number + 1 < len(loops) or found.position[-1][0] != loop.name
                if loop.rounds is not None and done + under_way > loop.rounds:
                    raise KeyError(loop.name)
            missing = {n for n in names - found.values.keys() if not self.is_given(n)}
            missing |= {n for loop, _ in loops for n in loop.stacked if n not in found.stacks}
        except (KeyError, ValueError):
            raise ArrayFormatError(f"the plan has no place {found.position!r:.80}") from None
        if missing:
            raise ArrayFormatError(f"found no value of {', '.join(sorted(missing))}")
