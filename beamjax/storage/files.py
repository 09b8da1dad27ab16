"""Small whole files on a local path or any URL that fsspec knows, written atomically."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

from beamjax.storage import trust
from beamjax.storage.trust import is_url as is_url
from beamjax.storage.trust import local_path as local_path

TEMPORARY = ".tmp"
"""Suffix of files that are not yet whole."""
_MAP_BYTES = 8 * 2**20
"""Bytes of a file from which on it is mapped, not read. Each map holds a file descriptor."""


# --- retries of operations that fail for a moment, as those on a shared folder do

MOMENTARY = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.ESTALE)
"""Errors that may be gone a moment later: a server that restarts, or a disk from which another
process removes files."""
PATIENCE_SECONDS = 30.0
"""Seconds for which an operation is retried."""
_PAUSE_SECONDS = 0.25
_IMPATIENT_SECONDS = 60.0
"""Seconds after a failure in which no operation is retried, so that a run that fails ends soon."""

_P = ParamSpec("_P")
_T = TypeVar("_T")
_lock = threading.Lock()
_runs = 0
_failed = float("-inf")


@contextlib.contextmanager
def patient() -> Iterator[None]:
    """A context in which the functions of this module retry, in all threads of this process."""
    global _runs, _failed
    with _lock:
        _runs += 1
        _failed = float("-inf")
    try:
        yield
    finally:
        with _lock:
            _runs -= 1


def patiently(operation: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function retry in the context of `patient`."""

    @functools.wraps(operation)
    def tried(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return retried(operation, *args, **kwargs) if _runs else operation(*args, **kwargs)

    return tried


def retried(operation: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Calls a function, and again if it fails with one of `MOMENTARY`."""
    global _failed
    begun = time.monotonic()
    while True:
        try:
            return operation(*args, **kwargs)
        except OSError as error:
            now = time.monotonic()
            if error.errno not in MOMENTARY or now - _failed < _IMPATIENT_SECONDS:
                raise
            if now - begun > PATIENCE_SECONDS:
                _failed = now
                text = f"{error.strerror}, also after {PATIENCE_SECONDS:.0f} s of attempts"
                raise OSError(error.errno, text, error.filename) from error
        time.sleep(_PAUSE_SECONDS)


# --- operations


def join(folder: str, name: str) -> str:
    """Path of a file in a folder."""
    return remote().join(folder, name) if is_url(folder) else os.path.join(folder, name)


@patiently
def write(
    path: str, data: bytes, *, keep: bool = False, make: bool = True, sync: bool = False
) -> None:
    """Writes a file under a temporary name, and renames it: readers see the whole file or none."""
    # With `keep`, an existing file of this name and size stays, for names that are hashes of the
    # content. With `sync`, the content is on the disk before the file is renamed.
    if is_url(path):
        remote().write(path, data, keep)
        return
    if make:
        make_folder(os.path.dirname(path) or ".")
    _write_local(path, data, keep, sync)


def make_folder(folder: str) -> None:
    """Makes a local folder, for this user only (mode 0700), if it is not there."""
    if not is_url(folder):
        os.makedirs(folder, mode=0o700, exist_ok=True)


@patiently
def read(path: str) -> memoryview:
    """The whole content, read-only; a large local file is mapped. Links and devices are errors."""
    if is_url(path):
        return remote().read(path)
    with open(trust.open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size < _MAP_BYTES:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


@patiently
def size(path: str) -> int:
    """Bytes of a file."""
    return remote().size(path) if is_url(path) else os.path.getsize(path)


@patiently
def names(folder: str) -> list[str]:
    """Names of the files in a folder; none if it is not there."""
    return remote().names(folder) if is_url(folder) else _names(folder, os.DirEntry.is_file)


@patiently
def folders(folder: str) -> list[str]:
    """Names of the folders in a folder, without links; none if it is not there."""
    return remote().folders(folder) if is_url(folder) else _names(folder, os.DirEntry.is_dir)


def _names(folder: str, is_kind: Callable[..., bool]) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if is_kind(entry, follow_symlinks=False)]
    except FileNotFoundError:
        return []


def remove_tree(folder: str) -> None:
    """Removes a folder with all that is in it. Errors are ignored."""
    # It is for folders that nothing uses any more, except processes that do not know it yet. A
    # local folder is renamed first, so that they can't write to it while it is removed.
    if is_url(folder):
        with contextlib.suppress(Exception):
            remote().remove_tree(folder)
        return
    gone = f"{folder}{TEMPORARY}"
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    for path in (gone, folder):
        shutil.rmtree(path, ignore_errors=True)


class Listed(NamedTuple):
    """A file in a folder: its name, its bytes, and the time of its last change since the epoch."""

    name: str
    nbytes: int
    time: float


@patiently
def listed(folder: str) -> list[Listed]:
    """The files in a folder; none if it is not there."""
    if is_url(folder):
        return list(itertools.starmap(Listed, remote().listed(folder)))
    entries = []
    for name in names(folder):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            status = os.lstat(os.path.join(folder, name))
            entries.append(Listed(name, status.st_size, status.st_mtime))
    return entries


@patiently
def exists(path: str) -> bool:
    """Whether there is a file."""
    return bool(remote().exists(path)) if is_url(path) else os.path.exists(path)


@patiently
def remove_files(folder: str, gone: Sequence[str]) -> None:
    """Removes files from a folder; some may already be gone."""
    if is_url(folder):
        remote().remove_files(folder, gone)
        return
    for name in gone:
        Path(folder, name).unlink(missing_ok=True)


def remove(folder: str, suffix: str | tuple[str, ...]) -> None:
    """Removes files with a suffix, temporary files, and a local folder that is then empty."""
    suffixes = (*((suffix,) if isinstance(suffix, str) else suffix), TEMPORARY)
    if is_url(folder):
        remove_files(folder, [name for name in names(folder) if name.endswith(suffixes)])
        return
    if not os.path.isdir(folder):
        return
    for path in Path(folder).iterdir():
        if path.name.endswith(suffixes):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other programs may have files in it
        os.rmdir(folder)


def _write_local(path: str, data: bytes, keep: bool, sync: bool) -> None:
    if keep and os.path.exists(path) and os.path.getsize(path) == len(data):
        return
    handle, temporary = tempfile.mkstemp(suffix=TEMPORARY, dir=os.path.dirname(path) or ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


@patiently
def link(source: str, target: str) -> None:
    """Gives a file a second name, as a link if possible; else copies it, a piece at a time."""
    if is_url(source) or is_url(target):
        remote().copy(source, target)
        return
    # `os.link` refuses a name that is taken, so the link gets a temporary name and is renamed.
    temporary = f"{target}.{uuid.uuid4().hex}{TEMPORARY}"
    try:
        try:
            os.link(source, temporary)
        except OSError:  # another device, or a file system without links
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def sync(paths: Iterable[str]) -> None:
    """Waits until local files and folders are on the disk. URLs are ignored."""
    for path in paths:
        if not is_url(path):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def remote() -> ModuleType:
    """The module with the functions for URLs, which need packages of their own."""
    from beamjax.storage import remote_files

    return remote_files
