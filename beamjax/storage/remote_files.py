"""Small whole files at URLs, by fsspec; `files` is for paths and URLs alike."""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import random
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from beamjax.errors import OptionsError

TEMPORARY = ".tmp"
"""The same as in `files`, which imports this module."""
OBJECT_STORES = ("gs", "s3", "az", "abfs")
"""Schemes of URLs at which files are written atomically."""
INSTALL = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}
"""The packages with which fsspec reaches a store."""
VARIABLES = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"),
}
"""Environment variables from which clients take addresses and keys, for messages."""
_ATTEMPTS = 5
"""Attempts to rename a file to a name that other processes may be writing too."""
_COMPARED_BYTES = 2**20
"""Bytes of a file from which on a writer asks first whether the same file is already there. Smaller
ones are simply written again, as that is a single request too."""
_READ_AHEAD_BYTES = 4 * 2**20
"""Bytes that a file open for reading fetches beyond what was asked for."""
_SETTINGS = {"s3": {"max_concurrency": 1}}
"""Settings of clients. With more, s3fs asks for the size of each file before it reads it."""
_CHANGED = ("LastModified", "updated", "mtime", "last_modified", "created")
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "content_md5")
"""Keys under which the file systems of fsspec report the time of the last change, and checksums."""

_systems: dict[tuple[int, str], Any] = {}
"""Clients, by the process and the store. A client does not work in a forked process."""
_lock = threading.Lock()


def missing(path: str) -> str | None:
    """Why this process can't reach the store of a URL; None if it has the packages."""
    scheme = path.partition("://")[0]
    try:
        import fsspec

        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        package = INSTALL.get(scheme, "fsspec")
        return f"needs a package that is not installed ({error}); run pip install {package}"
    except ValueError:
        return f"has the scheme {scheme}://, which no file system of fsspec has"
    return None


def join(folder: str, name: str) -> str:
    """URL of a file in a folder."""
    return f"{folder.rstrip('/')}/{name}"


def write(path: str, data: bytes, keep: bool) -> None:
    """Writes a file, so that readers see all of it or nothing; see `files.write`."""
    with _requests(path) as system:
        # On object stores a file appears when its request ends, and replaces another file of its
        # name atomically. On other file systems it is written under another name and renamed.
        if _is_object_store(path):
            if not (keep and len(data) >= _COMPARED_BYTES and _has_size(system, path, len(data))):
                system.pipe_file(path, data)
            return
        if keep and _has_size(system, path, len(data)):
            return
        _make_parent(system, path)
        temporary = _temporary(path)
        system.pipe_file(temporary, data)
        _replace(system, temporary, path, reusable_bytes=len(data) if keep else None)


def read(path: str) -> memoryview:
    """The whole content."""
    with _requests(path) as system:
        return memoryview(system.cat_file(path))


def read_all(paths: Sequence[str]) -> list[bytes]:
    """The content of files of one store, all of which are there. They are read at the same time."""
    with _requests(paths[0]) as system:
        contents = system.cat(list(paths))
        return [contents[system._strip_protocol(path)] for path in paths]


def write_all(data: Mapping[str, bytes]) -> None:
    """Writes files to one store, at the same time on an object store."""
    first = next(iter(data))
    if not _is_object_store(first):
        for path, content in data.items():
            write(path, content, keep=False)
        return
    with _requests(first) as system:
        system.pipe(dict(data))


def size(path: str) -> int:
    """Bytes of a file."""
    with _requests(path) as system:
        return int(system.info(path)["size"])


def status(path: str) -> tuple[int, str]:
    """Bytes of a file, and the time of its last change as its file system reports it."""
    with _requests(path) as system:
        info = system.info(path)
        return int(info["size"]), str(_first(info, _CHANGED))


def content_mark(path: str) -> str:
    """A short string that changes with the content: a checksum, or the time of the change."""
    # Only object stores have checksums that do not require reading the file.
    with _requests(path) as system:
        info = system.info(path)
        mark = _first(info, _CHECKSUMS) or _first(info, _CHANGED)
        return f"{info['size']} bytes, {mark}"


def match(pattern: str) -> list[str]:
    """URLs of the files that match a pattern, in the order of their names."""
    with _requests(pattern) as system:
        entries = system.glob(pattern, detail=True)
        names = [name for name, entry in entries.items() if entry["type"] == "file"]
        # File systems name files without the scheme, and some without the host.
        origin = pattern.removesuffix(system._strip_protocol(pattern))
        return sorted(origin + name for name in names)


def open_file(path: str) -> BinaryIO:
    """A file as it is, for reading in any order."""
    with _requests(path) as system:
        file: BinaryIO = system.open(path, "rb", block_size=_READ_AHEAD_BYTES)
        return file


def names(folder: str) -> list[str]:
    """Names of the files in a folder; none if it is not there."""
    return [name for name, _, _ in listed(folder)]


def listed(folder: str) -> list[tuple[str, int, float]]:
    """Name, bytes and time of the last change of each file in a folder; none if it is not there."""
    return [
        (entry["name"].rpartition("/")[2], int(entry["size"] or 0), _seconds(entry))
        for entry in _entries(folder, "file")
        # Some stores list an empty object for the folder itself.
        if not entry["name"].endswith("/")
    ]


def folders(folder: str) -> list[str]:
    """Names of the folders in a folder; none if it is not there."""
    paths = [entry["name"].rstrip("/") for entry in _entries(folder, "directory")]
    return [path.rpartition("/")[2] for path in paths]


def _entries(folder: str, kind: str) -> list[dict[str, Any]]:
    with _requests(folder) as system:
        try:
            entries = system.ls(folder, detail=True)
        except FileNotFoundError:
            return []
        return [entry for entry in entries if entry["type"] == kind]


def remove_tree(folder: str) -> None:
    """Removes a folder with all that is in it."""
    with _requests(folder) as system:
        system.rm(folder, recursive=True)


def exists(path: str) -> bool:
    """Whether there is a file."""
    with _requests(path) as system:
        return bool(system.exists(path))


def remove_files(folder: str, gone: Sequence[str]) -> None:
    """Removes files from a folder; some may already be gone."""
    if not gone:
        return
    paths = [join(folder, name) for name in gone]
    with _requests(folder) as system:
        if _is_object_store(folder):  # in one request for many files
            with contextlib.suppress(FileNotFoundError):
                system.rm(paths)
            return
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(path)


def copy(source: str, target: str) -> None:
    """Copies a file from or to a URL, by the file system itself if it can."""
    remote = target if "://" in target else source
    with _requests(remote) as system:
        if remote is source:
            temporary = _temporary(target)
            system.get_file(source, temporary)
            os.replace(temporary, target)
            return
        final = target if _is_object_store(target) else _temporary(target)
        if final != target:
            _make_parent(system, target)
        if "://" not in source:
            system.put_file(source, final)
        elif _store(source) == _store(target):
            system.cp_file(source, final)
        else:
            with open_file(source) as file, system.open(final, "wb") as copied:
                shutil.copyfileobj(file, copied, 2**20)
        if final != target:
            _replace(system, final, target)


# --- names that other processes may be writing too


def _replace(system: Any, temporary: str, path: str, reusable_bytes: int | None = None) -> None:
    """Renames a file, while other processes may rename others to the same name."""
    # A file of `reusable_bytes` that another process has written meanwhile is left as it is:
    # readers may have it open.
    for attempt in range(_ATTEMPTS):
        try:
            if reusable_bytes is not None and _has_size(system, path, reusable_bytes):
                system.rm_file(temporary)
                return
            _rename(system, temporary, path, set_aside=attempt > 0)
            return
        except Exception:
            if attempt + 1 == _ATTEMPTS:
                with contextlib.suppress(Exception):
                    system.rm_file(temporary)
                raise
            # A random time, so that processes that write the same name do not retry together.
            time.sleep(random.uniform(0, 0.1 * 2**attempt))


def _rename(system: Any, temporary: str, path: str, set_aside: bool) -> None:
    """Renames a file to a name that may be taken. If that fails, the file of that name remains."""
    # With `set_aside`, that file is renamed first if it can't be replaced, as in HDFS.
    try:
        system.mv(temporary, path)
        return
    except Exception:
        if not set_aside or not system.exists(path):
            raise
    old = _temporary(path)
    system.mv(path, old)
    try:
        system.mv(temporary, path)
    except Exception:
        if not system.exists(path):
            system.mv(old, path)
            raise
        # Another writer was first: remove the old file that was set aside.
        with contextlib.suppress(Exception):
            system.rm_file(old)
        raise
    with contextlib.suppress(Exception):
        system.rm_file(old)


def _temporary(path: str) -> str:
    return f"{path}.{uuid.uuid4().hex}{TEMPORARY}"


def _make_parent(system: Any, path: str) -> None:
    system.makedirs(path.rpartition("/")[0], exist_ok=True)


# --- file systems


@contextlib.contextmanager
def _requests(path: str) -> Iterator[Any]:
    """A context with the file system of a URL, in which errors say what the store needs."""
    try:
        yield _system(path)
    except OptionsError:
        raise
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, f"{error}", path) from error
    except Exception as error:  # clients raise errors of many kinds
        text = f"{_store(path)}: {type(error).__name__}: {error}{_advice(path)}"
        is_denied = isinstance(error, PermissionError)
        if not is_denied and (isinstance(error, OSError) or "Connect" in type(error).__name__):
            raise OSError(errno.EIO, text) from error  # the store is out of reach
        raise OSError(text) from error


def _advice(path: str) -> str:
    """Which variables of this host a client may lack."""
    names = VARIABLES.get(path.partition("://")[0], ())
    if not names:
        return ""
    unset = ", ".join(name for name in names if name not in os.environ)
    return (
        f"; on host {socket.gethostname()}, {unset or 'none'} of {', '.join(names)} is not set: if "
        "the store needs them, set the same ones for the launcher and, before they start, for the "
        "pools of workers on each host"
    )


def _system(path: str) -> Any:
    """The client of this process for the store of a URL."""
    # All threads share it, and it keeps its connections: an operation costs a request or two.
    key = os.getpid(), _client(path)
    with _lock:
        if key not in _systems:
            if (reason := missing(path)) is not None:
                raise OptionsError(f"{path}: {reason}")
            import fsspec

            # fsspec's own cache has a client for each thread. Listings must not be cached, as
            # other processes write to the same folders.
            settings = _SETTINGS.get(path.partition("://")[0], {})
            _systems[key], _ = fsspec.core.url_to_fs(
                path, skip_instance_cache=True, use_listings_cache=False, **settings
            )
        return _systems[key]


def _store(path: str) -> str:
    """The scheme and the host, or the bucket, of a URL."""
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}"


def _client(path: str) -> str:
    """What URLs of one client have in common. All buckets of an object store have the same one."""
    return path.partition("://")[0] if _is_object_store(path) else _store(path)


def _is_object_store(path: str) -> bool:
    return path.partition("://")[0] in OBJECT_STORES


def _has_size(system: Any, path: str, nbytes: int) -> bool:
    """Whether there is a file of this size."""
    try:
        return bool(system.info(path)["size"] == nbytes)
    except FileNotFoundError:
        return False


def _first(info: dict[str, Any], keys: Sequence[str]) -> Any:
    return next((info[key] for key in keys if info.get(key) is not None), None)


def _seconds(entry: dict[str, Any]) -> float:
    """The time of the last change of a file, in seconds since the epoch; 0 if it is unknown."""
    changed = _first(entry, _CHANGED)
    if isinstance(changed, str):
        changed = datetime.datetime.fromisoformat(changed)
    if isinstance(changed, datetime.datetime):
        return changed.timestamp()
    return float(changed or 0.0)
