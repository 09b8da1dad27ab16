"""Checkpointers for the driver and for a run in this process.

The driver has references and sources: their files are linked into the folder, so that the bytes of
placed values never are in the launching process. The plan in this process has arrays. Either reads
what the other one wrote.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from beamjax.errors import ArrayFormatError
from beamjax.options import Options
from beamjax.pipelines.checkpoints.checkpointer import BaseCheckpointer
from beamjax.pipelines.checkpoints.folder import held
from beamjax.pipelines.checkpoints.records import check_kind, entry_type, record_of, ref_of
from beamjax.pipelines.values.refs import Ref
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.values.values import PlacedValue, ServerValue, Value, scattered, stack_of
from beamjax.plan.steps import Plan, ValueType
from beamjax.runtime.checkpoints import (
    Array,
    Entry,
    Given,
    Members,
    Record,
    Scattered,
    Stack,
    Stored,
    members_file,
)
from beamjax.runtime.inputs import Inputs
from beamjax.sources.source_base import open_spec
from beamjax.storage import files
from beamjax.storage.arrays import encode_arrays, plain_array

FILE_BYTES = 16 << 20


class DriverCheckpointer(BaseCheckpointer[Value]):
    """For the driver.

    Args:
      plan: that is run.
      inputs: of it.
      options: with the folder.
      store: of the run.
      values: the inputs, as the driver has them.
    """

    def __init__(
        self,
        plan: Plan,
        inputs: Inputs,
        options: Options,
        store: Store,
        values: Mapping[str, Value],
    ):
        super().__init__(plan, inputs, options)
        self.run_store = store
        self._given = dict(values)
        self._names = {id(value): name for name, value in values.items()}
        self._placed = {
            _key(value.spec, value.leaf): name
            for name, value in values.items()
            if isinstance(value, PlacedValue)
        }
        self._token = uuid.uuid4().hex[:16]
        self.restore()

    def is_given(self, name: str) -> bool:
        return name in self._given

    def row(self, array: np.ndarray) -> ServerValue:
        return ServerValue(self.run_store, array)

    def record(self, name: str, value: Value) -> Record:
        if id(value) in self._names:
            return Given(self._names[id(value)])
        if isinstance(value, ServerValue):
            return self._served(value.ref(name))
        if value.entries is not None:
            return Stack(tuple(self.record(name, entry) for entry in value.entries))
        return self._spec(value.spec, value.leaf)

    def value(self, record: Record, spec: ValueType) -> Value:
        if isinstance(record, Given):
            return self._given_value(record.name, spec)
        if spec.placement is None:
            check_kind(record, Array, Stored)
            return self._restored(record, spec)
        match record:
            case Members():
                return PlacedValue(self.source(record, spec).to_spec())
            case Scattered(of=of, axis=axis):
                whole = uncut(spec, axis, self.plan.sizes[spec.placement])
                return scattered(self._restored(of, whole), "scattered", axis, self.run_store)
            case Entry(of=of, index=index, size=size) if index < size:
                whole = replace(spec, shape=(size, *spec.shape))
                return self.value(of, whole).entry(index)
            case Stack(of=of):
                return self._stacked(of, spec)
        raise ArrayFormatError(f"found {type(record).__name__} for {spec}")

    # ------------------------------------------------------------------------------- saving

    def _served(self, ref: Ref) -> Array | Stored:
        for name, _ in ref.files:
            self.folder.link(files.join(self.run_store.root, name), name)
        return record_of(ref)

    def _spec(self, spec: Mapping[str, Any], leaf: int) -> Record:
        """A leaf of a source that the driver made, or that is an input."""
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
        # Runs before this one used the same stems.
        stem = f"{self._token}-{spec['stem']}"
        for part in parts:
            source = files.join(spec["folder"], members_file(spec["stem"], *part))
            self.folder.link(source, members_file(stem, *part))
        return Members(stem, parts)

    # ------------------------------------------------------------------------------ reading

    def _given_value(self, name: str, spec: ValueType) -> Value:
        if name not in self._given:
            raise ArrayFormatError(f"found the input {name!r:.80}, which is none")
        check_given(self.plan, name, spec)
        return self._given[name]

    def _restored(self, record: Record, spec: ValueType) -> ServerValue:
        if isinstance(record, Stored):
            if (record.dtype, record.shape) != (spec.dtype, spec.shape):
                raise ArrayFormatError(f"found {record.dtype}{list(record.shape)} for {spec}")
            self.check_files(record)
            for name, _ in record.files:
                files.link(self.folder.join(name), files.join(self.run_store.root, name))
            return ServerValue(self.run_store, ref=ref_of(record))
        return ServerValue(self.run_store, self.array(record, spec))

    def _stacked(self, of: tuple[Record, ...], spec: ValueType) -> PlacedValue:
        if len(of) != spec.shape[:1][0]:
            raise ArrayFormatError(f"found a stack of {len(of)} for {spec}")
        entries = [self.value(part, entry_type(spec)) for part in of]
        n = self.plan.sizes[spec.placement or ""]
        return stack_of(spec, [e for e in entries if isinstance(e, PlacedValue)], n, self.run_store)


class LocalCheckpointer(BaseCheckpointer[np.ndarray]):
    """For the plan in this process, whose placed values are arrays with members along axis 0.

    Args:
      plan: that is run.
      inputs: of it.
      options: with the folder.
    """

    def __init__(self, plan: Plan, inputs: Inputs, options: Options):
        super().__init__(plan, inputs, options)
        self._reader = inputs.reader()
        self._served = inputs.server()
        # What the last checkpoint has, and this one: unchanged arrays are not hashed again.
        self._last: dict[int, tuple[np.ndarray, Record]] = {}
        self._now: dict[int, tuple[np.ndarray, Record]] = {}
        self.restore()

    def is_given(self, name: str) -> bool:
        return name in self._served or name in self._reader.where

    def row(self, array: np.ndarray) -> np.ndarray:
        return array

    def save(self, *state: Any) -> None:
        """Saves a checkpoint: what is live of these values."""
        self._last, self._now = self._now, {}
        super().save(*state)

    def record(self, name: str, value: np.ndarray) -> Record:
        array, record = (self._now | self._last).get(id(value), (None, None))
        if record is None or array is not value:
            placed = self.plan.values[name].placement is not None
            record = self._members(value) if placed else self.stored(name, value)
        self._now[id(value)] = value, record
        return record

    def value(self, record: Record, spec: ValueType) -> np.ndarray:
        n = self.plan.sizes[spec.placement] if spec.placement else 0
        match record:
            case Given(name=name):
                check_given(self.plan, name, spec)
                if name in self._served:
                    return self._served[name]
                return self._reader.read([name], 0, n)[name]
            case Array() | Stored() if not spec.placement:
                return self.array(record, spec)
            case Members() if spec.placement:
                return self.source(record, spec).read(0, n)[0]
            case Scattered(of=of, axis=axis) if spec.placement:
                return np.moveaxis(self.array(of, uncut(spec, axis, n)), axis, 0)
            case Entry(of=of, index=index, size=size) if spec.placement and index < size:
                return self.value(of, replace(spec, shape=(size, *spec.shape)))[:, index]
            case Stack(of=of) if spec.placement and len(of) == spec.shape[:1][0]:
                entries = [self.value(part, entry_type(spec)) for part in of]
                none = np.empty((n, *spec.shape), np.dtype(spec.dtype))
                return np.stack(entries, axis=1) if entries else none
        raise ArrayFormatError(f"found {type(record).__name__} for {spec}")

    def _members(self, array: np.ndarray) -> Members:
        """Writes a placed value to files that are named after its content."""
        array = plain_array(array)
        digest = hashlib.blake2b(f"{array.dtype.name}{array.shape}".encode(), digest_size=20)
        if array.nbytes:
            digest.update(array.reshape(-1).view(np.uint8).data)
        stem, n = digest.hexdigest(), len(array)
        count = min(n, max(1, FILE_BYTES // max(array[:1].nbytes, 1)))
        parts = tuple((start, min(count, n - start)) for start in range(0, n, count))
        for start, count in parts:
            data = encode_arrays([array[start : start + count]])
            self.folder.write(members_file(stem, start, count), data)
        return Members(stem, parts)


@contextlib.contextmanager
def local_checkpointer(
    plan: Plan, inputs: Inputs, options: Options
) -> Iterator[LocalCheckpointer | None]:
    """What keeps checkpoints of a run in this process, if the options say so.

    Raises:
      CheckpointError: the folder can't be used for this run.
    """
    with folder_of(options):
        yield LocalCheckpointer(plan, inputs, options) if options.checkpoint else None


def folder_of(options: Options) -> contextlib.AbstractContextManager[None]:
    """While a run has its folder of checkpoints to itself, if it has one."""
    return held(options.checkpoint) if options.checkpoint else contextlib.nullcontext()


def check_given(plan: Plan, name: str, spec: ValueType) -> None:
    """Raises ArrayFormatError unless an input is of this type."""
    found = plan.values.get(name)
    if found is None or replace(found, key_impl=spec.key_impl) != spec:
        raise ArrayFormatError(f"found the input {name!r:.80} of type {found}, expected {spec}")


def uncut(spec: ValueType, axis: int, n: int) -> ValueType:
    """The type of a server value whose n members, along an axis, are of this type."""
    if axis > len(spec.shape):
        raise ArrayFormatError(f"found the axis {axis} of members of {spec}")
    return replace(spec, placement=None, shape=(*spec.shape[:axis], n, *spec.shape[axis:]))


def _key(spec: Mapping[str, Any], leaf: int) -> str:
    return json.dumps([spec, leaf], sort_keys=True)
