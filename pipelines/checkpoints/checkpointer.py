"""Saves the state of a run, and restores it from the last complete checkpoint.

In a run on Beam, values are references and sources. Their files are linked into the folder of
checkpoints, so the launching process never loads placed values. `LocalCheckpointer` writes the
arrays of a run in this process in the same form. Each of the two reads checkpoints of the other.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError, CheckpointError
from beamjax.numerics.provenance import UNKNOWN
from beamjax.options import Options
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import Ref, content_key
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.values import (
    PlacedValue,
    ServerValue,
    Value,
    leaf_spec,
    scattered,
    stack_of,
)
from beamjax.plan.liveness import Position, live_at, loops_at
from beamjax.plan.steps import Block, Plan, ValueType
from beamjax.runtime import fingerprints
from beamjax.runtime.checkpoints import (
    Array,
    Checkpoint,
    Entry,
    Given,
    Members,
    Record,
    Rows,
    Scattered,
    Stack,
    Stored,
    members_file,
)
from beamjax.runtime.inputs import Inputs
from beamjax.sources.arrays.data_files import FileHashes
from beamjax.sources.source_base import LeafSpec, open_spec
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, encode_arrays, plain_array
from beamjax.storage.dtypes import dtype_name

ROWS = 1024
"""Most small entries of a stacked result in one array. A full array is written once, while the last
one is written again with each checkpoint."""
ROWS_BYTES = 1 << 20
"""Bytes of such entries from which an array is full."""
FILE_BYTES = 16 << 20
"""Approximate size in bytes of a file of members that a run in this process writes."""


@dataclass(frozen=True)
class FolderStore(Store):
    """A store in a folder of checkpoints.

    Unlike `Store`, it does not trust an existing file by its name and size: it leaves only files as
    they are that this process has written or checked.
    """

    folder: CheckpointFolder | None = None

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Writes a file, unless this process has written or checked it."""
        assert self.folder is not None
        self.folder.write(name, data)


@dataclass
class _Entries:
    """What is written of a stacked result.

    Attributes:
      values: its entries, a list that the run appends to.
      done: the number of these entries that are in `records` or `rows`.
      records: entries that need not be written again.
      rows: the latest small entries, which are not yet enough to fill an array.
    """

    values: Sequence[Value]
    done: int = 0
    records: list[Record] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)


class Checkpointer:
    """Saves the state of a run; see `control_flow.Checkpointer`.

    Args:
      plan: the plan that is run.
      inputs: its inputs.
      options: the options of the run, with the folder of checkpoints.
      store: the store of the run.
      given: the inputs by name, in the form that the run uses.

    Raises:
      CheckpointError: the folder belongs to another plan, or to other inputs.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        options: Options,
        store: Store,
        given: Mapping[str, Value],
    ):
        assert options.checkpoint is not None
        self.plan = plan
        self.every = options.checkpoint_every
        self.whole = Block(plan.steps, tuple(plan.returned()))
        self.folder = CheckpointFolder(options.checkpoint)
        self.store = FolderStore(self.folder.path, folder=self.folder)
        self.prints = fingerprints.plan_fingerprint(plan, options)
        hashes = FileHashes(self.folder.input_hashes())
        self.input_prints = fingerprints.input_fingerprints(inputs, hashes)
        self.folder.save_input_hashes(hashes.to_json())
        self.position: Position = ()
        self.finished = False
        self.values: dict[str, Value] = {}
        self.stacks: dict[str, list[Value]] = {}
        self._entries: dict[str, _Entries] = {}
        self.provenance = UNKNOWN
        self._run_store = store
        self._given = dict(given)
        # Inputs are saved as their names. The ids stay unique, since `_given` keeps the objects.
        self._names = {id(value): name for name, value in given.items()}
        self._placed = {
            _key(value.spec, value.leaf): name
            for name, value in given.items()
            if isinstance(value, PlacedValue)
        }
        self._token = uuid.uuid4().hex[:16]
        self._restore_last()

    # ------------------------------------------------------------------------------- saving

    def save(
        self, position: Position, values: Mapping[str, Value], stacks: Mapping[str, Sequence[Value]]
    ) -> None:
        """Saves a checkpoint with those of these values that later steps read."""
        records = {name: self._record(name, values[name]) for name in self.live(position)}
        entries = {name: self._stack(name, of) for name, of in stacks.items()}
        self._save(position, False, records, entries)

    def live(self, position: Position) -> list[str]:
        """The names of the values that a checkpoint at a position holds, without the inputs."""
        return sorted(live_at(self.whole, position) - self._given.keys())

    def value_of(self, name: str, array: np.ndarray) -> Value:
        """An array as a value of a plan. A placed one is written to files named by its content."""
        if self.plan.values[name].placement is None:
            return ServerValue(self._run_store, array)
        array = plain_array(array)
        data = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
        stem, n = content_key([f"{array.dtype.name}{array.shape}".encode(), data]), len(array)
        count = min(n, max(1, FILE_BYTES // max(array[:1].nbytes, 1)))
        parts = [(start, min(count, n - start)) for start in range(0, n, count)]
        for start, count in parts:
            data = encode_arrays([array[start : start + count]])
            self.folder.write(members_file(stem, start, count), data)
        leaf = LeafSpec(array.shape[1:], array.dtype)
        return PlacedValue(MembersSource(self.folder.path, stem, parts, leaf, n).to_spec())

    def finish(self, values: Mapping[str, Value]) -> None:
        """Saves the outputs of a finished run."""
        self._save((), True, {n: self._record(n, value) for n, value in values.items()}, {})

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

    def _stack(self, name: str, values: Sequence[Value]) -> tuple[Record, ...]:
        """Writes the new entries of a stacked result; small entries share an array."""
        entries = self._entries.get(name)
        if entries is None or entries.values is not values:
            # Another list: the loop is inside of another one, and has started again.
            entries = self._entries[name] = _Entries(values)
        entry = _entry_type(self.plan.values[name])
        for value in values[entries.done :]:
            record = self._record(name, value)
            if not isinstance(record, Array):
                entries.records.append(record)
                continue
            entries.rows.append(record.array)
            if len(entries.rows) >= ROWS or len(entries.rows) * entry.nbytes >= ROWS_BYTES:
                rows = self.store.put([np.stack(entries.rows)], name)
                entries.records.append(Rows(_record_of(rows)))
                entries.rows = []
        entries.done = len(values)
        rest = (Rows(Array(np.stack(entries.rows))),) if entries.rows else ()
        return (*entries.records, *rest)

    def _record(self, name: str, value: Value) -> Record:
        if id(value) in self._names:
            return Given(self._names[id(value)])
        if isinstance(value, ServerValue):
            return self._served(value.ref(name))
        if value.entries is not None:
            return Stack(tuple(self._record(name, entry) for entry in value.entries))
        return self._spec(value.spec, value.leaf)

    def _served(self, ref: Ref) -> Array | Stored:
        for name, _ in ref.files:
            self.folder.link(files.join(self._run_store.root, name), name)
        return _record_of(ref)

    def _spec(self, spec: Mapping[str, Any], leaf: int) -> Record:
        """The record of a leaf of a source that the driver made, or that is an input."""
        given = self._placed.get(_key(spec, leaf))
        if given is not None:
            return Given(given)
        match spec["kind"]:
            case "members":
                return self._linked(spec)
            case "entry":
                size = open_spec(spec["base"]).leaves[leaf].shape[0]
                return Entry(self._spec(spec["base"], leaf), spec["index"], size)
            case "scattered":
                ref = Ref.from_json(spec["ref"], base64.b64decode(spec["inline"]))
                return Scattered(self._served(ref), spec["axis"])
        raise TypeError(spec["kind"])

    def _linked(self, spec: Mapping[str, Any]) -> Members:
        parts = tuple((start, count) for start, count in spec["parts"])
        if spec["folder"] == self.folder.path:
            return Members(spec["stem"], parts)
        # Every run numbers its stems from 0, so files of an earlier run may have the same names.
        stem = f"{self._token}-{spec['stem']}"
        for part in parts:
            source = files.join(spec["folder"], members_file(spec["stem"], *part))
            self.folder.link(source, members_file(stem, *part))
        return Members(stem, parts)

    # ------------------------------------------------------------------------------ reading

    def _restore_last(self) -> None:
        """Restores the last complete checkpoint; without one, the run starts at the beginning.

        Raises:
          CheckpointError: it belongs to another plan, or to other inputs.
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
            name: self._value(record, self._type(name)) for name, record in found.values.items()
        }
        self.stacks, self._entries = {}, {}
        for loop, done in loops_at(self.whole, found.position):
            for name in loop.stacked:
                self._restore_stack(name, found.stacks[name], done)

    def _restore_stack(self, name: str, records: Sequence[Record], done: int) -> None:
        entry = _entry_type(self._type(name))
        values: list[Value] = []
        whole = _Entries(values)
        for record in records:
            if not isinstance(record, Rows):
                values.append(self._value(record, entry))
                whole.records.append(record)
                continue
            rows = self._array(record.of, None)
            if rows.ndim == 0 or len(rows) > done - len(values):
                raise ArrayFormatError(f"{name}: found rows {rows.shape} for {done} rounds")
            _check_type(name, rows, entry, len(rows))
            values.extend(ServerValue(self._run_store, row) for row in rows)
            if isinstance(record.of, Stored) or len(rows) >= ROWS:
                whole.records.append(record)
            else:
                whole.rows.extend(rows)
        if len(values) != done:
            raise ArrayFormatError(f"{name}: found {len(values)} entries, expected {done}")
        whole.done = done
        self.stacks[name], self._entries[name] = values, whole

    def _value(self, record: Record, spec: ValueType) -> Value:
        if isinstance(record, Given):
            return self._given_value(record.name, spec)
        if spec.placement is None:
            return self._restored(record, spec)
        match record:
            case Members():
                return PlacedValue(self._source(record, spec).to_spec())
            case Scattered(of=of, axis=axis):
                whole = _uncut(spec, axis, self.plan.sizes[spec.placement])
                return scattered(self._restored(of, whole), "scattered", axis, self._run_store)
            case Entry(of=of, index=index, size=size) if index < size:
                whole = replace(spec, shape=(size, *spec.shape))
                return self._value(of, whole).entry(index)
            case Stack(of=of):
                return self._stacked(of, spec)
        raise ArrayFormatError(f"found {type(record).__name__} for {spec}")

    def _given_value(self, name: str, spec: ValueType) -> Value:
        if name not in self._given:
            raise ArrayFormatError(f"found {name!r:.80}, expected the name of an input")
        found = self.plan.values.get(name)
        if found is None or replace(found, key_impl=spec.key_impl) != spec:
            raise ArrayFormatError(f"found the input {name!r:.80} of type {found}, expected {spec}")
        return self._given[name]

    def _restored(self, record: Record, spec: ValueType) -> ServerValue:
        if isinstance(record, Stored):
            if (record.dtype, record.shape) != (spec.dtype, spec.shape):
                raise ArrayFormatError(f"found {record.dtype}{list(record.shape)} for {spec}")
            self._check_files(record)
            for name, _ in record.files:
                files.link(self.folder.join(name), files.join(self._run_store.root, name))
            return ServerValue(self._run_store, ref=_ref_of(record))
        return ServerValue(self._run_store, self._array(record, spec))

    def _stacked(self, of: tuple[Record, ...], spec: ValueType) -> PlacedValue:
        if len(of) != spec.shape[:1][0]:
            raise ArrayFormatError(f"found a stack of {len(of)} for {spec}")
        entries = [self._value(part, _entry_type(spec)) for part in of]
        n = self.plan.sizes[spec.placement or ""]
        return stack_of(
            spec, [e for e in entries if isinstance(e, PlacedValue)], n, self._run_store
        )

    def _array(self, record: Record, spec: ValueType | None) -> np.ndarray:
        """A server value that is in the manifest or in files; checked against a type, if given."""
        match record:
            case Array(array=array):
                pass
            case Stored():
                self._check_files(record)
                (array,) = self.store.get(_ref_of(record), cache=False)
            case _:
                raise ArrayFormatError(f"found {type(record).__name__}, expected an array")
        if spec is not None:
            _check_type(str(spec), array, spec)
        return array

    def _check_files(self, record: Stored) -> None:
        """Reads the files of a value, one at a time, and checks their sizes and checksums.

        Their names are no hashes of the content: workers write parts of reductions under unique
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

    def _source(self, record: Members, spec: ValueType) -> MembersSource:
        """A placed value in files. All of them are read and checked, one at a time.

        Raises:
          ArrayFormatError: one of them is missing or damaged, or has another type.
        """
        n = self.plan.sizes[spec.placement or ""]
        for start, count in record.parts:
            name = members_file(record.stem, start, count)
            arrays = self._decoded(name, self._file(name))
            if len(arrays) != 1:
                raise ArrayFormatError(f"{name}: found {len(arrays)} arrays, expected one")
            _check_type(name, arrays[0], spec, count)
            self.folder.known.add(name)
        if sum(count for _, count in record.parts) != n:
            raise ArrayFormatError(f"{record.stem}: some of the {n} members are missing")
        return MembersSource(self.folder.path, record.stem, record.parts, leaf_spec(spec), n)

    def _file(self, name: str) -> memoryview:
        try:
            return files.read(self.folder.join(name))
        except FileNotFoundError as error:
            raise ArrayFormatError(f"{self.folder.join(name)}: is missing") from error
        except Exception as error:  # file systems at URLs raise errors of their own types
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
            raise ArrayFormatError(f"found {name!r:.80}, expected the name of a value") from None

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
                "folder of its own (the option checkpoint), or remove the folder to start at the "
                "beginning"
            )

    def _check_position(self, found: Checkpoint) -> None:
        """Raises ArrayFormatError unless the plan has the position, and all its values are here."""
        names = set(self.whole.outputs)
        try:
            if not found.finished:
                names = live_at(self.whole, found.position)
            loops = loops_at(self.whole, found.position)
            for number, (loop, done) in enumerate(loops):
                # The last part of a position counts finished rounds; in an enclosing loop, one more
                # round has begun.
                under_way = number + 1 < len(loops) or found.position[-1][0] != loop.name
                if loop.rounds is not None and done + under_way > loop.rounds:
                    raise KeyError(loop.name)
            missing = {n for n in names - found.values.keys() if n not in self._given}
            missing |= {n for loop, _ in loops for n in loop.stacked if n not in found.stacks}
        except (KeyError, ValueError):
            raise ArrayFormatError(f"the plan has no position {found.position!r:.80}") from None
        if missing:
            raise ArrayFormatError(f"found no value of {', '.join(sorted(missing))}")


class LocalCheckpointer:
    """Checkpoints of a run in this process, in which values are arrays.

    Args:
      saved: the checkpoints of the same run, in which they are instances of `Value`.
    """

    def __init__(self, saved: Checkpointer):
        self._saved = saved
        self.every, self.position, self.finished = saved.every, saved.position, saved.finished
        self.provenance = saved.provenance
        self.values = {name: _whole(value) for name, value in saved.values.items()}
        self.stacks = {name: list(map(_whole, of)) for name, of in saved.stacks.items()}
        # For each stacked result, its list of entries, and the values of those that are written.
        self._stacks: dict[str, tuple[Sequence[np.ndarray], list[Value]]] = {
            name: (self.stacks[name], of) for name, of in saved.stacks.items()
        }
        # The arrays of the last checkpoint and of this one, by id: arrays that are the same objects
        # are not written again. Holding the arrays keeps their ids from being reused.
        self._last: dict[int, tuple[np.ndarray, Value]] = {}
        self._now: dict[int, tuple[np.ndarray, Value]] = {}

    def save(
        self,
        position: Position,
        values: Mapping[str, np.ndarray],
        stacks: Mapping[str, Sequence[np.ndarray]],
    ) -> None:
        """Saves a checkpoint with those of these values that later steps read."""
        self._last, self._now = self._now, {}
        live = self._saved.live(position)
        written = {name: self._value(name, values[name]) for name in live}
        for name, arrays in stacks.items():
            known, done = self._stacks.get(name, ([], []))
            if known is not arrays:  # a loop inside of another one has started again
                done = []
            done += [self._value(name, array) for array in arrays[len(done) :]]
            self._stacks[name] = arrays, done
        self._saved.provenance = self.provenance
        self._saved.save(position, written, {name: self._stacks[name][1] for name in stacks})

    def finish(self, values: Mapping[str, np.ndarray]) -> None:
        """Saves the outputs of a finished run."""
        self._saved.provenance = self.provenance
        self._saved.finish({name: self._value(name, array) for name, array in values.items()})

    def _value(self, name: str, array: np.ndarray) -> Value:
        known, value = (self._now | self._last).get(id(array), (None, None))
        if value is None or known is not array:
            value = self._saved.value_of(name, array)
        self._now[id(array)] = array, value
        return value


def _whole(value: Value) -> np.ndarray:
    return value.array() if isinstance(value, ServerValue) else value.whole()


def _record_of(ref: Ref) -> Array | Stored:
    """The record of a server value whose files are in the folder of checkpoints."""
    if ref.inline:
        (array,) = decode_arrays(ref.inline)[0]
        return Array(array)
    ((dtype, shape),) = ref.leaves
    return Stored(ref.key, dtype, shape, ref.files)


def _ref_of(record: Stored) -> Ref:
    """Undoes `_record_of`."""
    return Ref(record.key, ((record.dtype, record.shape),), files=record.files)


def _entry_type(value: ValueType) -> ValueType:
    """The type of an entry of a stacked result."""
    return replace(value, shape=value.shape[1:])


def _check_type(what: str, array: np.ndarray, spec: ValueType, rows: int | None = None) -> None:
    """Checks an array against its type in the plan.

    Args:
      what: the name of the array, for messages.
      array: the array that was read.
      spec: its type, or the type of its rows if `rows` is given.
      rows: the number of rows that it must have.

    Raises:
      ArrayFormatError: it has another shape or dtype.
    """
    shape = spec.shape if rows is None else (rows, *spec.shape)
    if array.shape != shape or dtype_name(array.dtype) != spec.dtype:
        raise ArrayFormatError(
            f"{what}: found {array.dtype}{list(array.shape)}, expected {spec.dtype}{list(shape)}"
        )


def _uncut(spec: ValueType, axis: int, n: int) -> ValueType:
    """The type of the server value that `Scatter` cuts, along an axis, into n such members."""
    if axis > len(spec.shape):
        raise ArrayFormatError(f"found the axis {axis} of members of {spec}")
    return replace(spec, placement=None, shape=(*spec.shape[:axis], n, *spec.shape[axis:]))


def _key(spec: Mapping[str, Any], leaf: int) -> str:
    return json.dumps([spec, leaf], sort_keys=True)
