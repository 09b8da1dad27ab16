"""Files that sources read: local paths and globs, and any URL that fsspec knows.

Local files need no fsspec.
"""

from __future__ import annotations

import bz2
import concurrent.futures
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import itertools
import lzma
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from beamjax.errors import SourceError, StructureError
from beamjax.storage.files import is_url as is_url
from beamjax.storage.files import local_path, remote

_DECOMPRESS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
}
_MAGIC = {".gz": b"\x1f\x8b\x08", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0"}
SETTLED_NS = 2_000_000_000
"""Age of a file in nanoseconds from which on another change is certain to show in its time of
change. FAT has the coarsest times, of two seconds."""
_SEEN = "the launcher and all workers see under this path"


@dataclasses.dataclass(frozen=True, slots=True)
class DataFile:
    """A file as it was when a source was made from it."""

    path: str  # absolute, or a URL
    nbytes: int
    stamp: str  # the time of the last change, as the file system reports it

    def __post_init__(self) -> None:
        if self.nbytes < 0 or "\0" in self.path:
            raise ValueError(f"found the file {self.path!r:.80} of {self.nbytes} bytes")

    def mark(self) -> list[Any] | None:
        """Path, size and times of a local file that has not changed; None for other files."""
        if is_url(self.path):
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        times = status.st_mtime_ns, status.st_ctime_ns
        same = (status.st_size, str(status.st_mtime_ns)) == (self.nbytes, self.stamp)
        # Another change of a file that was just written might not show in its times.
        settled = time.time_ns() - max(times) > SETTLED_NS
        return [*dataclasses.astuple(self), *times] if same and settled else None

    def check(self) -> None:
        """Checks that the file has not changed."""
        if not is_url(self.path):  # The usual case: small reads take most of their time here.
            with contextlib.suppress(OSError, ValueError):
                status = os.stat(self.path)
                if (status.st_size, str(status.st_mtime_ns)) == (self.nbytes, self.stamp):
                    return
        now = look(self.path)
        if now != self:
            raise SourceError(
                f"{self.path}: found {now.nbytes} bytes written at {now.stamp}, expected "
                f"{self.nbytes} bytes written at {self.stamp}; the file was changed after the "
                "source was made from it."
            )


def compression(path: str) -> str:
    """The ending of the name of a compressed file, such as ".gz"; "" for other names."""
    ending = os.path.splitext(path)[1]
    return ending if ending in _DECOMPRESS else ""


def compression_of_content(data: bytes) -> str:
    """As `compression`, from the first bytes of a file, with which other formats may begin too."""
    return next((end for end, magic in _MAGIC.items() if data.startswith(magic)), "")


def find_files(paths: Any, caller: str, endings: Sequence[str] = ()) -> list[str]:
    """As `find_files_in_folders`, without the folders."""
    return [path for path, _ in find_files_in_folders(paths, caller, endings)]


def find_files_in_folders(
    paths: Any, caller: str, endings: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The files that a user names, each with the folders on the way: "year=2024/month=5"."""
    # These are the folders below the given one, or below the one in which a pattern begins. With
    # `endings`, a folder (a URL with a `/` at its end) stands for its files with these endings,
    # also those in folders below that are named `name=value`.
    several = list(paths) if isinstance(paths, list | tuple) else [paths]
    files: list[tuple[str, str]] = []
    for pattern in several:
        if not isinstance(pattern, str | os.PathLike):
            raise StructureError(
                f"{caller}: found {pattern!r:.80}, expected a path, a pattern such as "
                "'data/part-*', a URL, or a list of these."
            )
        pattern = local_path(os.fspath(pattern))
        folder = pattern.endswith("/") if is_url(pattern) else os.path.isdir(pattern)
        if endings and folder:
            root = pattern.rstrip("/") if is_url(pattern) else os.path.abspath(pattern)
            matches = _within(pattern, caller, endings)
        else:
            root = _root_of_pattern(pattern if is_url(pattern) else os.path.abspath(pattern))
            matches = _matches(pattern, caller)
        files += [(path, _folders_below(root, path)) for path in matches]
    if not files:
        raise SourceError(f"{caller}: found no files in an empty list, expected at least one.")
    return files


def _root_of_pattern(pattern: str) -> str:
    """The folder in which a pattern begins; that of the file for a plain path."""
    folders = pattern.split("/")[:-1]
    return "/".join(itertools.takewhile(lambda name: not glob.has_magic(name), folders))


def _folders_below(root: str, path: str) -> str:
    below = path.removeprefix(f"{root}/").rpartition("/")[0]
    return below if path.startswith(f"{root}/") else ""


def _within(folder: str, caller: str, endings: Sequence[str]) -> list[str]:
    """The files with these endings in a folder, and in folders below that are named name=value."""
    if is_url(folder):
        with readable(folder):
            names = [path for end in endings for path in remote().match(f"{folder}**/*{end}")]
        root = folder.rstrip("/")
    else:
        root = os.path.abspath(folder)
        names = []
        for at, folders, names_there in os.walk(root):
            folders[:] = [name for name in folders if "=" in name]  # where `os.walk` goes on
            names += [os.path.join(at, n) for n in names_there if n.endswith(tuple(endings))]
    data = sorted(name for name in names if _is_data(root, name))
    if not data:
        raise SourceError(
            f"{caller}: found no file that ends in {' or '.join(endings)} in the folder {folder}, "
            "expected at least one; give a pattern for files of other names or in folders below."
        )
    return data


def _is_data(root: str, path: str) -> bool:
    below = _folders_below(root, path)
    # Spark and Beam give names that begin with `_` or `.` to their own files.
    hidden = path.rpartition("/")[2].startswith(("_", "."))
    return not hidden and (not below or all("=" in name for name in below.split("/")))


def _matches(pattern: str, caller: str) -> list[str]:
    if is_url(pattern):
        with readable(pattern):
            matches = remote().match(pattern)
    elif os.path.lexists(pattern):  # Brackets may be part of a name.
        matches = [os.path.abspath(pattern)]
    else:
        matches = sorted(map(os.path.abspath, glob.glob(pattern, recursive=True)))
    if not matches:
        raise SourceError(
            f"{caller}: found no file {pattern!r}"
            f"{'' if is_url(pattern) else f' from {os.getcwd()}'}, expected one that {_SEEN}."
        )
    return matches


def look(path: str) -> DataFile:
    """A file as it is now."""
    with readable(path):
        if is_url(path):
            return DataFile(path, *remote().status(path))
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path}: found a folder, expected a file, or a pattern of files.")
        return DataFile(path, status.st_size, str(status.st_mtime_ns))


def open_file(path: str) -> BinaryIO:
    """Opens a file for reading in any order, without decompression."""
    with readable(path):
        return remote().open_file(path) if is_url(path) else open(path, "rb")


@contextlib.contextmanager
def open_stream(path: str, compressed: str) -> Iterator[BinaryIO]:
    """Opens a file for reading from its beginning; decompresses it if it is compressed."""
    with open_file(path) as file:
        if not compressed:
            yield file
            return
        with _DECOMPRESS[compressed](file) as decompressed:
            yield decompressed


@contextlib.contextmanager
def readable(path: str, expected: str = "") -> Iterator[None]:
    """Converts errors of reading in the `with` block to a SourceError that names the file."""
    try:
        yield
    except SourceError:
        raise
    except FileNotFoundError as error:
        raise SourceError(
            f"{path}: is not there; expected {expected or 'a file'} that {_SEEN}."
        ) from error
    except PermissionError as error:
        raise SourceError(
            f"{path}: may not be read by user {_user()} ({error.strerror or error}); expected "
            f"{expected or 'a file'} that {_SEEN}."
        ) from error
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        text = " ".join(str(error).split())  # Those of Arrow have several lines.
        raise SourceError(
            f"{path}: cannot read ({type(error).__name__}: {text}); expected "
            f"{expected or 'a file'} that {_SEEN}."
        ) from error


# --- hashes of contents

_THREADS = 4
"""Threads that hash files. They run concurrently, because hashing and reading release the GIL."""


class FileHashes:
    """Hashes of files. A hash is reused while the size and the times of its file stay the same."""

    def __init__(self, known: Mapping[str, Any] | None = None):
        self._known = dict(known or {})
        self._unsettled: set[str] = set()

    def of(self, paths: Iterable[str]) -> list[str]:
        """The hash of each local file; for a URL, what `remote_files.content_mark` returns."""
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._hash, paths))

    def to_json(self) -> dict[str, Any]:
        """The hashes as plain JSON values, except those of files that have just changed."""
        # These files may change again without a new size or time.
        return {path: digest for path, digest in self._known.items() if path not in self._unsettled}

    def _hash(self, path: str) -> str:
        with readable(path):
            if is_url(path):
                return str(remote().content_mark(path))
            status = os.stat(path)
            seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
            match self._known.get(path):
                case [*before, str(digest)] if before == seen:
                    return digest
            now = time.time_ns()
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, _new_hash).hexdigest()
            self._known[path] = [*seen, digest]
            if now - max(status.st_mtime_ns, status.st_ctime_ns) < SETTLED_NS:
                self._unsettled.add(path)
            return digest


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "of this process"
