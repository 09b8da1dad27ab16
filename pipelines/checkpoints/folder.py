"""A folder of checkpoints: the last ones of one run, with the files that hold their values.

    00000012.checkpoint   a manifest, see `beamjax.runtime.checkpoints`
    *.arrays, *.members   values, under names that are unique or hashes of the content
    inputs.record         hashes of the files that are inputs
    lock                  locked by the process of the run
    work/                 temporary files of the run

A manifest is written atomically, after all of its files are on the disk. So the folder stays valid
if the process or the machine stops at any moment. A lock gives a local folder to one process at a
time; nothing protects a folder at a URL.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

from beamjax.errors import ArrayFormatError, CheckpointError
from beamjax.runtime import checkpoints
from beamjax.runtime.checkpoints import Checkpoint
from beamjax.storage import files as file_io
from beamjax.storage import locks, records, trust

MANIFEST = re.compile(r"(\d{8,18})\.checkpoint")
INPUTS = f"inputs{records.SUFFIX}"
_OURS = re.compile(
    r"\d{8,18}\.checkpoint|[0-9a-f]{40}[A-Za-z0-9_-]*\.arrays|[A-Za-z0-9_-]+-\d+-\d+\.members"
    r"|tmp\w{8}\.tmp|[\w.-]+\.[0-9a-f]{32}\.tmp"
)


def work_folder(folder: str) -> str:
    """The default folder of the temporary files of a run."""
    return file_io.join(folder, "work")


@contextlib.contextmanager
def held(folder: str) -> Iterator[None]:
    """A context in which this process has exclusive use of a folder of checkpoints."""
    if file_io.is_url(folder):
        yield
        return
    trust.check_folder(folder, "checkpoint")
    try:
        # For this user only, if it does not exist.
        file_io.make_folder(folder)
        handle = locks.try_lock(os.path.join(folder, locks.NAME))
    except OSError as error:
        raise CheckpointError(
            f"checkpoint folder {folder}: cannot be written ({error}); expected a folder that this "
            "process and all workers can write and read"
        ) from error
    if handle is None:
        raise CheckpointError(
            f"checkpoint folder {folder}: another run is using it; wait for its end, or give each "
            "run a folder of its own"
        )
    try:
        # Only under the lock: what is there now is left from a killed process.
        shutil.rmtree(work_folder(folder), ignore_errors=True)
        yield
    finally:
        shutil.rmtree(work_folder(folder), ignore_errors=True)
        os.close(handle)


class CheckpointFolder:
    """The checkpoints of one run."""

    def __init__(self, path: str):
        self.path = path if file_io.is_url(path) else os.path.abspath(path)
        # Files that this process wrote or checked. A file of any other name is overwritten.
        self.known: set[str] = set()
        # The manifests to keep, from the oldest, each with the names of its files.
        self._kept: list[tuple[str, set[str]]] = []
        # Files that may not be on the disk yet.
        self._unsynced: set[str] = set()
        numbers = [int(match[1]) for match in map(MANIFEST.fullmatch, self._names()) if match]
        self._next = max(numbers, default=0) + 1

    def join(self, name: str) -> str:
        """Path of a file of the folder."""
        return file_io.join(self.path, name)

    def input_hashes(self) -> dict[str, Any]:
        """What `save_input_hashes` wrote; empty if the file is missing or damaged."""
        if INPUTS not in self._names():
            return {}
        with contextlib.suppress(ArrayFormatError):
            hashes = records.decode(self._read(INPUTS), INPUTS).get("files")
            if isinstance(hashes, dict):
                return hashes
        return {}

    def save_input_hashes(self, hashes: dict[str, Any]) -> None:
        """Writes hashes of files, so that a later run need not read these files again."""
        if hashes and hashes != self.input_hashes():
            with self._writing(INPUTS):
                file_io.write(self.join(INPUTS), records.encode({"files": hashes}))

    def manifests(self) -> Iterator[tuple[str, Checkpoint]]:
        """The name and the content of each manifest, from the last to the first one."""
        names = filter(MANIFEST.fullmatch, self._names())
        for name in sorted(names, key=lambda name: int(name.partition(".")[0]), reverse=True):
            try:
                yield name, checkpoints.decode(self._read(name))
            # The one before it may be whole.
            except ArrayFormatError as error:
                self.warn(name, error)

    def warn(self, name: str, error: Exception) -> None:
        """Warns that a checkpoint is not used."""
        warnings.warn(
            f"checkpoint {self.join(name)} is damaged and not used; the one before it is, or the "
            f"run starts at the beginning: {error}",
            RuntimeWarning,
            stacklevel=2,
        )

    def keep(self, name: str, checkpoint: Checkpoint) -> None:
        """Keeps the files of a checkpoint that was read, until newer checkpoints replace it."""
        self._kept = [(name, checkpoint.files())]

    def wrote(self, name: str) -> None:
        """Records a new file, which belongs to the next checkpoint."""
        self.known.add(name)
        self._unsynced.add(name)

    def link(self, source: str, name: str) -> None:
        """Links another file into the folder, or copies it where links are not possible."""
        if name not in self.known:
            with self._writing(name):
                file_io.link(source, self.join(name))
            self.wrote(name)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file of the folder, unless this process has written or checked it."""
        if name not in self.known:
            with self._writing(name):
                file_io.write(self.join(name), data)
            self.wrote(name)

    def save(self, checkpoint: Checkpoint) -> None:
        """Adds a checkpoint whose files are written, and removes files of older ones."""
        name = f"{self._next:08d}.checkpoint"
        self._next += 1
        data = checkpoints.encode(checkpoint)
        with self._writing(name):
            # In this order: after a power failure, no manifest may be on the disk without its
            # files. Syncing the folder writes the names of its files to the disk.
            file_io.sync([*map(self.join, sorted(self._unsynced)), self.path])
            file_io.write(self.join(name), data, sync=True)
            file_io.sync([self.path])
        self._unsynced.clear()
        self._kept = [*self._kept, (name, checkpoint.files())][-checkpoints.KEPT :]
        self._remove_others()

    def _remove_others(self) -> None:
        kept = {name for manifest, names in self._kept for name in (manifest, *names)}
        gone = [name for name in self._names() if _OURS.fullmatch(name) and name not in kept]
        # Manifests are removed first: none may be left without its files.
        gone.sort(key=lambda name: MANIFEST.fullmatch(name) is None)
        self.known.difference_update(gone)
        try:
            file_io.remove_files(self.path, gone)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint folder {self.path}: cannot remove old files ({error}); may this "
                "process write there?"
            ) from error

    def _names(self) -> list[str]:
        try:
            return file_io.names(self.path)
        except Exception as error:
            raise CheckpointError(
                f"checkpoint folder {self.path}: cannot be read ({error})"
            ) from error

    def _read(self, name: str) -> memoryview:
        try:
            size = file_io.size(self.join(name))
            if size > checkpoints.MAX_BYTES:
                raise ArrayFormatError(
                    f"found {size} bytes, expected at most {checkpoints.MAX_BYTES}"
                )
            return file_io.read(self.join(name))
        except ArrayFormatError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {self.join(name)}: cannot be read ({error})"
            ) from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise CheckpointError(
                f"checkpoint folder {self.path}: cannot write {name} ({error}); is there space, "
                "and may this process write there?"
            ) from error
