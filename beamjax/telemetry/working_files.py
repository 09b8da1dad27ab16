"""A small file in which a worker process records what its threads do; others read it if it dies.

The file is mapped to memory. So a record needs no system call, and it remains if the process is
killed.
"""

from __future__ import annotations

import collections
import contextlib
import json
import mmap
import os
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from beamjax.errors import ArrayFormatError
from beamjax.storage import trust
from beamjax.storage.buffers import allocate
from beamjax.storage.schema import from_plain, parse_json
from beamjax.telemetry import signs_of_life

PREFIX = "working-"
SLOTS = 64
"""The number of threads that one file can record; further threads are not recorded."""
DOING = ("reading", "computing", "merging")
"""Activities of a thread."""
MAX_NAME = 200
"""Largest number of characters of the name of a step in the file."""

# The file: a header with the record of the process as JSON, whose last byte says whether it has
# left; then slots, each one entry as JSON with zeros at the end. A slot whose first byte is zero is
# free.
_MARK = "workers-wanted"
_HEADER_BYTES = 1024
_LEFT_AT = _HEADER_BYTES - 1  # the byte that says that the process ended normally
_SLOT_BYTES = 1024  # an entry as JSON, and zeros
_FILE_BYTES = _HEADER_BYTES + SLOTS * _SLOT_BYTES


class WorkEntry(NamedTuple):
    """An activity of a thread, as its process recorded it."""

    doing: str  # one of `DOING`
    thread: int  # as `threading.get_ident` gives it
    since: float  # seconds since the epoch
    step: str
    shard: int | None  # None for a step without shards
    members: tuple[int, int] | None  # first and last member of the shard


class WorkingFile:
    """The file of this process in the folder of a run; OSError if nobody here called `invite`."""

    def __init__(self, folder: str):
        self._memory = _make(folder)
        self._free = collections.deque(range(SLOTS))

    def begin(self, entry: WorkEntry) -> int | None:
        """Records the activity that a thread begins; returns its slot, or None if all are taken."""
        try:
            slot = self._free.popleft()
        except IndexError:
            return None
        text = json.dumps(entry._replace(step=entry.step[:MAX_NAME]), ensure_ascii=False)
        data = text.encode(errors="replace").ljust(_SLOT_BYTES, b"\0")
        at = _HEADER_BYTES + slot * _SLOT_BYTES
        self._memory[at + 1 : at + _SLOT_BYTES] = data[1:]
        # Written last, so that a reader never sees half an entry.
        self._memory[at] = data[0]
        return slot

    def end(self, slot: int | None) -> None:
        """Records that the activity in a slot has ended."""
        if slot is not None:
            self._memory[_HEADER_BYTES + slot * _SLOT_BYTES] = 0
            self._free.append(slot)

    def leave(self) -> None:
        """Records that the process ends normally."""
        self._memory[_LEFT_AT] = 1


@dataclass(frozen=True)
class WorkingProcess:
    """The contents of the file of a process."""

    process: dict[str, Any]  # as `signs_of_life.this_process` describes it
    left: bool  # the process ended normally
    entries: tuple[WorkEntry, ...]  # in the order in which they began


def read_file(path: str) -> WorkingProcess | None:
    """Reads the file of a process and checks all fields; None if it is something else."""
    try:
        with open(trust.open_regular(path), "rb") as file:
            data = file.read(_FILE_BYTES + 1)
        process = parse_json(data[:_LEFT_AT].rstrip(b"\0"), path)
    except (OSError, ArrayFormatError):
        return None
    if len(data) != _FILE_BYTES or not _is_process(process):
        return None
    slots = (data[at : at + _SLOT_BYTES] for at in range(_HEADER_BYTES, _FILE_BYTES, _SLOT_BYTES))
    entries_read = (_read_slot(slot.rstrip(b"\0"), path) for slot in slots if slot[0])
    entries = sorted((entry for entry in entries_read if entry), key=lambda entry: entry.since)
    return WorkingProcess(process, bool(data[_LEFT_AT]), tuple(entries))


def _is_process(process: Any) -> bool:
    return (
        isinstance(process, dict)
        and type(process.get("pid")) is int
        and all(type(process.get(name)) is str for name in ("host", "boot", "started"))
    )


def _read_slot(data: bytes, path: str) -> WorkEntry | None:
    try:
        entry = from_plain(WorkEntry, parse_json(data, path), path)
    except ArrayFormatError:
        return None
    first, last = entry.members or (0, 0)
    is_sound = entry.doing in DOING and entry.step.isprintable() and 0 < entry.since < 1e11
    is_shard = (entry.shard is None) == (entry.members is None) and 0 <= first <= last
    return entry if is_sound and is_shard else None


def invite(folder: str) -> None:
    """Marks a folder, so that workers on this machine write their files into it."""
    with contextlib.suppress(OSError), open(os.path.join(folder, _MARK), "w") as file:
        json.dump(_machine(signs_of_life.this_process()), file)


def _machine(process: dict[str, Any]) -> dict[str, Any]:
    return {name: process[name] for name in ("host", "boot")}


def _make(folder: str) -> mmap.mmap:
    """Creates the mapped file of this process in a folder with the mark of `invite`."""
    process = signs_of_life.this_process()
    with open(os.path.join(folder, _MARK)) as file:
        if file.read(_HEADER_BYTES) != json.dumps(_machine(process)):
            raise OSError(f"{folder}: made on another machine")
    name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    handle = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        allocate(handle, 0, _FILE_BYTES)
        os.write(handle, json.dumps(process).encode())
        return mmap.mmap(handle, _FILE_BYTES)
    finally:
        os.close(handle)
