"""Saves the state of a run, and restores it from the last complete checkpoint.

Files of the store are linked into the folder of checkpoints, so the launching process never loads
placed values. Arrays in this process are written there. A run in this process continues from the
checkpoints of a run on Beam, and the other way round.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from beamjax.bodies.provenance import UNKNOWN
from beamjax.errors import ArrayFormatError, CheckpointError
from beamjax.options import Options
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.pipelines.values import store as stores
from beamjax.pipelines.values.members import MembersSource
from beamjax.pipelines.values.refs import Here, StoreRef, content_key, ref_to_files
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.stored_values import Stored
from beamjax.plan.liveness import Position, live_at, loops_at
from beamjax.plan.steps import Block, Plan, ValueType
from beamjax.runtime import fingerprints
from beamjax.runtime.checkpoints import Checkpoint, Given, Members, Pieces, members_file
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.values import Data, Leaf, Part, Ref, Values, server
from beamjax.sources.arrays.data_files import FileHashes
from beamjax.sources.derived_sources import RowsSource
from beamjax.sources.source_base import LeafSpec
from beamjax.storage import files
from beamjax.storage.arrays import decode_arrays, dtype_name, encode_arrays, plain_array

ROWS = 1024
"""Most small entries of a stacked result in one array. A full array is written once, while the last
one is written again with each checkpoint."""
ROWS_BYTES = 1 << 20
"""Bytes of such entries from which an array is full."""
FILE_BYTES = 16 << 20
"""Approximate size in bytes of a file of members that a run in this process writes."""


@dataclass(frozen=True)
class FolderStore(Store):
    """A store in a folder of checkpoints."""

    # Unlike `Store`, it does not trust an existing file by its name and size: it leaves only files
    # as they are that this process has written or checked.
    folder: CheckpointFolder | None = None

    def write(self, name: str, data: bytes, *, keep: bool = False) -> None:
        """Writes a file, unless this process has written or checked it."""
        assert self.folder is not None
        self.folder.write(name, data)


@dataclass
class _Entries:
    """What is written of a stacked result."""

    values: Sequence[Ref]  # its entries, a list that the run appends to
    done: int = 0  # the number of these that are in `written` or `rows`
    # Entries that need not be written again.
    written: list[Ref] = field(default_factory=list)
    # The latest small entries, which are not yet enough to fill an array.
    rows: list[np.ndarray] = field(default_factory=list)


class Checkpointer:
    """Saves the state of a run; see `driver.Checkpointer`."""

    def __init__(self, plan: Plan, inputs: Inputs, options: Options, input_values: Values):
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
        self.values: dict[str, Ref] = {}
        self.stacks: dict[str, list[Ref]] = {}
        self._entries: dict[str, _Entries] = {}
        self.provenance = UNKNOWN
        self._given = dict(input_values)
        # Inputs are saved as their names. The ids stay unique, since `_given` keeps the objects.
        self._names = {id(value.data): name for name, value in input_values.items()}
        # The data of the last checkpoint and of this one, by id: the same objects are not written
        # again. Holding them keeps their ids from being reused.
        self._last: dict[int, tuple[Data, Data]] = {}
        self._now: dict[int, tuple[Data, Data]] = {}
        self._token = uuid.uuid4().hex[:16]
        self._restore_last()

    # ------------------------------------------------------------------------------- saving

    def save(self, position: Position, values: Values, stacks: Mapping[str, Sequence[Ref]]) -> None:
        """Saves a checkpoint with those of these values that later steps read."""
        self._last, self._now = self._now, {}
        live = sorted(live_at(self.whole, position) - self._given.keys())
        written = {name: self._written(name, values[name]) for name in live}
        entries = {name: self._stack(name, of) for name, of in stacks.items()}
        self._save(position, False, written, entries)

    def finish(self, values: Values) -> None:
        """Saves the outputs of a finished run."""
        self._last, self._now = self._now, {}
        self._save((), True, {n: self._written(n, value) for n, value in values.items()}, {})

    def _save(
        self,
        position: Position,
        finished: bool,
        values: Values,
        stacks: Mapping[str, tuple[Ref, ...]],
    ) -> None:
        self.folder.save(
            Checkpoint(
                self.prints, self.input_prints, position, finished, values, stacks, self.provenance
            )
        )

    def _stack(self, name: str, values: Sequence[Ref]) -> tuple[Ref, ...]:
        """Writes the new entries of a stacked result; small entries share an array."""
        entries = self._entries.get(name)
        if entries is None or entries.values is not values:
            # Another list: the loop is inside of another one, and has started again.
            entries = self._entries[name] = _Entries(values)
        entry = _entry_type(self.plan.values[name])
        for value in values[entries.done :]:
            written = self._written(name, value)
            row = written.data if value.n is None else None
            if isinstance(row, Given) and entry.nbytes <= stores.INLINE_BYTES:
                row = value.array()
            if not isinstance(row, np.ndarray):
                entries.written.append(written)
                continue
            entries.rows.append(row)
            if len(entries.rows) >= ROWS or len(entries.rows) * entry.nbytes >= ROWS_BYTES:
                rows = server(np.stack(entries.rows))
                entries.written.append(rows.with_data(lambda x: self._array(name, x)))
                entries.rows = []
        entries.done = len(values)
        rest = (server(np.stack(entries.rows)),) if entries.rows else ()
        return (*entries.written, *rest)

    def _written(self, name: str, value: Ref) -> Ref:
        """A value as a checkpoint has it, with its data in files of the folder."""
        return value.with_data(lambda data: self._data(name, data, value.n is not None))

    def _data(self, name: str, data: Data, placed: bool) -> Data:
        if id(data) in self._names:
            return Given(self._names[id(data)])
        known = self._now.get(id(data)) or self._last.get(id(data))
        if known is None:
            known = data, self._in_folder(name, data, placed)
        self._now[id(data)] = known
        return known[1]

    def _in_folder(self, name: str, data: Data, placed: bool) -> Data:
        match data:
            case np.ndarray():
                return self._members(data) if placed else self._array(name, data)
            case Stored(ref=Here(array=array)):
                return self._in_folder(name, array, placed)
            case Stored(store=store, ref=StoreRef() as ref):
                for file, _ in ref.files:
                    self.folder.link(files.join(store.root, file), file)
                return _pieces(ref)
            case Leaf(source=MembersSource() as source):
                return self._linked(source)
            case Leaf(source=RowsSource()):
                return self._members(data.array())
        raise TypeError(f"{name}: found {data!r:.80}, expected data that the run has computed")

    def _array(self, name: str, array: Any) -> Data:
        """The data of an array, in the manifest if it is small."""
        return _pieces(self.store.put([array], name))

    def _members(self, array: np.ndarray) -> Members:
        """Writes members in this process to files that are named by their content."""
        array = plain_array(array)
        data = array.reshape(-1).view(np.uint8).data if array.nbytes else b""
        stem, n = content_key([f"{array.dtype.name}{array.shape}".encode(), data]), len(array)
        count = min(n, max(1, FILE_BYTES // max(array[:1].nbytes, 1)))
        parts = tuple((start, min(count, n - start)) for start in range(0, n, count))
        for start, count in parts:
            data = encode_arrays([array[start : start + count]])
            self.folder.write(members_file(stem, start, count), data)
        return Members(stem, parts)

    def _linked(self, source: MembersSource) -> Members:
        parts = tuple((start, count) for start, count in source.parts)
        if source.folder == self.folder.path:
            return Members(source.stem, parts)
        # Every run numbers its stems from 0, so files of an earlier run may have the same names.
        stem = f"{self._token}-{source.stem}"
        for part in parts:
            file = files.join(source.folder, members_file(source.stem, *part))
            self.folder.link(file, members_file(stem, *part))
        return Members(stem, parts)

    # ------------------------------------------------------------------------------ reading

    def _restore_last(self) -> None:
        """Restores the last complete checkpoint; without one, starts at the beginning."""
        for name, checkpoint in self.folder.manifests():
            # Another plan, or other inputs, is an error, and no reason to start at the beginning:
            # it may be the wrong folder.
            self._check_same(name, checkpoint)
            try:
                self._check_position(checkpoint)
                self._restore(checkpoint)
            except ArrayFormatError as error:
                self.folder.warn(name, error)
                continue
            self.position, self.finished = checkpoint.position, checkpoint.finished
            self.provenance = checkpoint.provenance
            self.folder.keep(name, checkpoint)
            return
        self.values, self.stacks, self._now = {}, {}, {}

    def _restore(self, checkpoint: Checkpoint) -> None:
        self._now = {}
        self.values = {
            name: self._restored(value, self._type(name))
            for name, value in checkpoint.values.items()
        }
        self.stacks, self._entries = {}, {}
        for loop, done in loops_at(self.whole, checkpoint.position):
            for name in loop.stacked:
                self._restore_stack(name, checkpoint.stacks[name], done)

    def _restore_stack(self, name: str, saved: Sequence[Ref], done: int) -> None:
        entry = _entry_type(self._type(name))
        values: list[Ref] = []
        whole = _Entries(values)
        for value in saved:
            if entry.placement is not None or len(value.shape) == len(entry.shape):
                values.append(self._restored(value, entry))
                whole.written.append(value)
                continue
            several = entry._replace(shape=(*value.shape[:1], *entry.shape))
            if several.shape[0] > done - len(values):
                raise ArrayFormatError(f"{name}: found rows {value.shape} for {done} rounds")
            rows = self._restored(value, several).array()
            values.extend(map(server, rows))
            if len(rows) >= ROWS or not isinstance(value.data, np.ndarray):
                whole.written.append(value)
            else:
                whole.rows.extend(rows)
        if len(values) != done:
            raise ArrayFormatError(f"{name}: found {len(values)} entries, expected {done}")
        whole.done = done
        self.stacks[name], self._entries[name] = values, whole

    def _restored(self, value: Ref, spec: ValueType) -> Ref:
        """A value of the run from one of a checkpoint, whose types and files are checked."""
        n = None if spec.placement is None else self.plan.sizes[spec.placement]
        if (value.dtype, value.shape, value.n) != (spec.dtype, spec.shape, n):
            raise ArrayFormatError(
                f"found {value.dtype}{list(value.shape)} of {value.n} members for {spec}"
            )
        if n is None and (len(value.parts) != 1 or value.parts[0].at or value.parts[0].entry):
            raise ArrayFormatError(f"found {len(value.parts)} parts of a server value {spec}")
        parts = tuple(self._restored_part(part, spec, n) for part in value.parts)
        if n is not None:
            # Parts may be entries of members: all of them together must be all values.
            size = sum(part.count * math.prod(spec.shape[len(part.at) :]) for part in parts)
            if size != n * math.prod(spec.shape):
                raise ArrayFormatError(f"some of the {n} members of {spec} are missing")
        return replace(value, parts=parts)

    def _restored_part(self, part: Part, spec: ValueType, n: int | None) -> Part:
        at, entry = part.at, part.entry
        rest = spec.shape[len(at) :]
        if len(at) > len(spec.shape) or any(map(int.__ge__, at, spec.shape)):
            raise ArrayFormatError(f"found the entry {at} of {spec}")
        if n is not None and part.start + part.count > n:
            raise ArrayFormatError(
                f"found members {part.start} to {part.start + part.count} of {n}"
            )
        if isinstance(part.data, Given):
            return replace(part, data=self._given_data(part, spec, rest, n))
        if n is not None:
            if not isinstance(part.data, Members):
                raise ArrayFormatError(f"found {type(part.data).__name__} for {spec}")
            return replace(part, data=self._source(part.data, spec, part.count, rest, entry))
        data: Any = part.data
        if isinstance(data, Pieces):
            if (data.dtype, data.shape) != (spec.dtype, spec.shape):
                raise ArrayFormatError(f"found {data.dtype}{list(data.shape)} for {spec}")
            array = self._loaded(data)
            self._now[id(array)] = array, data
            return replace(part, data=array)
        if not isinstance(data, np.ndarray):
            raise ArrayFormatError(f"found {type(data).__name__}, expected an array")
        _check_type(str(spec), data, spec.dtype, spec.shape)
        return part

    def _given_data(
        self, part: Part, spec: ValueType, rest: tuple[int, ...], n: int | None
    ) -> Data:
        """The data of an input."""
        name = part.data.name  # type: ignore[union-attr]
        if name not in self._given:
            raise ArrayFormatError(f"found {name!r:.80}, expected the name of an input")
        value, of = self._given[name], self.plan.values[name]
        if n is None:
            fits = value.n is None and of.shape == spec.shape
        else:
            rows, count = (of.shape[1:], of.shape[0]) if value.n is None else (of.shape, value.n)
            fits = count == part.count and _fits(rows, part.entry, rest)
        if not fits or of.dtype != spec.dtype:
            raise ArrayFormatError(f"found the input {name!r:.80} of type {of}, expected {spec}")
        return value.data

    def _loaded(self, data: Pieces) -> np.ndarray:
        """A server value in files, whose sizes and checksums are checked."""
        for name, size in data.files:
            content = self._file(name)
            if len(content) != size:
                raise ArrayFormatError(
                    f"{self.folder.join(name)}: found {len(content)} bytes, expected {size}"
                )
            self._decoded(name, content)
            self.folder.known.add(name)
        ref = ref_to_files(((data.dtype, data.shape),), data.files)
        return self.store.array(ref, cache=False)

    def _source(
        self,
        data: Members,
        spec: ValueType,
        n: int,
        rest: tuple[int, ...],
        entry: tuple[int, ...],
    ) -> Leaf:
        """Members in files. All of them are read and checked, one at a time."""
        shape = rest
        for start, count in data.parts:
            name = members_file(data.stem, start, count)
            arrays = self._decoded(name, self._file(name))
            if len(arrays) != 1:
                raise ArrayFormatError(f"{name}: found {len(arrays)} arrays, expected one")
            shape = arrays[0].shape[1:] if entry and not start else shape
            if not _fits(shape, entry, rest):
                raise ArrayFormatError(f"{name}: found members {shape}, expected {rest}")
            _check_type(name, arrays[0], spec.dtype, (count, *shape))
            self.folder.known.add(name)
        if sum(count for _, count in data.parts) != n:
            raise ArrayFormatError(f"{data.stem}: some of the {n} members are missing")
        leaf = LeafSpec(shape, np.dtype(spec.dtype))
        source = MembersSource(self.folder.path, data.stem, data.parts, leaf, n)
        return Leaf(source, 0, self.plan.x64)

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

    def _check_same(self, name: str, checkpoint: Checkpoint) -> None:
        changed = fingerprints.differences(self.prints, checkpoint.plan)
        what = "is of another plan"
        if not changed:
            what = "is of other inputs"
            names = {fingerprints.input_key(i): x.path for i, x in enumerate(self.plan.inputs)}
            differing = fingerprints.differences(self.input_prints, checkpoint.inputs)
            changed = [names.get(key, key) for key in differing]
        if changed:
            raise CheckpointError(
                f"checkpoint {self.folder.join(name)} {what} than this run: they differ in "
                f"{'; '.join(changed[:5])}{'; ...' if len(changed) > 5 else ''}. Give this run a "
                "folder of its own (the option checkpoint), or remove the folder to start at the "
                "beginning"
            )

    def _check_position(self, checkpoint: Checkpoint) -> None:
        """Raises ArrayFormatError unless the plan has the position, and all its values are here."""
        names = set(self.whole.outputs)
        try:
            if not checkpoint.finished:
                names = live_at(self.whole, checkpoint.position)
            loops = loops_at(self.whole, checkpoint.position)
            for number, (loop, done) in enumerate(loops):
                # The last part of a position counts finished rounds; in an enclosing loop, one more
                # round has begun.
                under_way = number + 1 < len(loops) or checkpoint.position[-1][0] != loop.name
                if loop.rounds is not None and done + under_way > loop.rounds:
                    raise KeyError(loop.name)
            missing = {n for n in names - checkpoint.values.keys() if n not in self._given}
            missing |= {n for loop, _ in loops for n in loop.stacked if n not in checkpoint.stacks}
        except (KeyError, ValueError):
            raise ArrayFormatError(
                f"the plan has no position {checkpoint.position!r:.80}"
            ) from None
        if missing:
            raise ArrayFormatError(f"found no value of {', '.join(sorted(missing))}")


def _pieces(ref: StoreRef) -> Data:
    """The data of a checkpoint for an array in files of its folder, or in the reference itself."""
    if ref.inline:
        (array,) = decode_arrays(ref.inline)[0]
        return array
    ((dtype, shape),) = ref.leaves
    return Pieces(dtype, shape, ref.files)


def _entry_type(value: ValueType) -> ValueType:
    """The type of an entry of a stacked result."""
    return value._replace(shape=value.shape[1:])


def _fits(rows: tuple[int, ...], entry: tuple[int, ...], rest: tuple[int, ...]) -> bool:
    """Whether an entry of rows of this shape has the shape `rest`."""
    return rows[len(entry) :] == rest and all(map(int.__lt__, entry, rows))


def _check_type(what: str, array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    """Raises ArrayFormatError if an array, named `what` in messages, has another type."""
    if array.shape != shape or dtype_name(array.dtype) != dtype:
        raise ArrayFormatError(
            f"{what}: found {array.dtype}{list(array.shape)}, expected {dtype}{list(shape)}"
        )
