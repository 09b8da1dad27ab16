"""Files that sources read: local paths and globs, and any URL that Beam's FileSystems knows.

Local files need no Beam.
"""

from __future__ import annotations

import bz2
import concurrent.futures
import contextlib
import dataclasses
import glob
import gzip
import hashlib
import io
import lzma
import os
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, cast

from beamjax.errors import SourceError, StructureError
from beamjax.storage.files import is_url as is_url

_UNPACK: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".lzma": lzma.open,
}
_MAGIC = {".gz": b"\x1f\x8b\x08", ".bz2": b"BZh", ".xz": b"\xfd7zXZ\0"}
SETTLED = 2_000_000_000
"""Nanoseconds after which another change of a file is sure to give it another time of change, on
any file system: FAT counts in two seconds."""
_SEEN = "the launcher and all workers see under this path"


@dataclasses.dataclass(frozen=True)
class DataFile:
    """A file as it was when a source was made of it.

    Attributes:
      path: absolute, or a URL.
      nbytes: of the file.
      stamp: changes with the file: when it was last written, as its file system says.
    """

    path: str
    nbytes: int
    stamp: str

    def __post_init__(self) -> None:
        if self.nbytes < 0 or "\0" in self.path:
            raise ValueError(f"found the file {self.path!r:.80} of {self.nbytes} bytes")

    def mark(self) -> list[Any] | None:
        """Path, bytes and times of a local file that is still the same; None for others.

        Also None for a file that was written just before: it may change without another time.
        """
        if is_url(self.path):
            return None
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        times = found.st_mtime_ns, found.st_ctime_ns
        same = (found.st_size, str(found.st_mtime_ns)) == (self.nbytes, self.stamp)
        settled = time.time_ns() - max(times) > SETTLED
        return [*dataclasses.astuple(self), *times] if same and settled else None

    def check(self) -> None:
        """Asks the file system whether the file is still the same.

        Raises:
          SourceError: it was written anew, or is gone.
        """
        found = look(self.path)
        if found != self:
            raise SourceError(
                f"{self.path}: found {found.nbytes} bytes written at {found.stamp}, expected "
                f"{self.nbytes} bytes written at {self.stamp}; the file was changed after the "
                "source was made from it."
            )


def packing(path: str) -> str:
    """The ending by which a name marks a compressed file, such as ".gz"; "" for other names.

    A compressed file can be read from its beginning only.
    """
    ending = os.path.splitext(path)[1]
    return ending if ending in _UNPACK else ""


def packing_of_content(data: bytes) -> str:
    """The same from the first bytes of a file, which may be those of another format by chance."""
    return next((end for end, magic in _MAGIC.items() if data.startswith(magic)), "")


def find_files(paths: Any, caller: str, endings: Sequence[str] = ()) -> list[str]:
    """The files that a user names.

    Args:
      paths: a path or a URL, either with `*`, `?` and `[...]`, or a list of those. What a pattern
        finds is in the order of the names; a list keeps its order.
      caller: the caller, for messages: "from_parquet".
      endings: of the files of a folder, which may then be given too (a URL with a `/` at its end).
        Names that begin with `_` or `.` are left out, as those that Spark and Beam write there.

    Returns:
      Absolute paths and URLs.

    Raises:
      StructureError: `paths` are no paths.
      SourceError: nothing is there under one of them.
    """
    several = list(paths) if isinstance(paths, list | tuple) else [paths]
    found: list[str] = []
    for given in several:
        if not isinstance(given, str | os.PathLike):
            raise StructureError(
                f"{caller}: found {given!r:.80}, expected a path, a pattern such as "
                "'data/part-*', a URL, or a list of these."
            )
        given = os.fspath(given)
        folder = given.endswith("/") if is_url(given) else os.path.isdir(given)
        found += _within(given, caller, endings) if endings and folder else _matches(given, caller)
    if not found:
        raise SourceError(f"{caller}: found no files in an empty list, expected at least one.")
    return found


def _within(folder: str, caller: str, endings: Sequence[str]) -> list[str]:
    """The files of a folder with these endings."""
    if is_url(folder):
        with readable(folder):
            names = [path for end in endings for path in _remote().match(f"{folder}*{end}")]
    else:
        pattern = os.path.join(glob.escape(os.path.abspath(folder)), "*")
        names = [path for path in glob.glob(pattern) if path.endswith(tuple(endings))]
    found = sorted(name for name in names if not name.rpartition("/")[2].startswith(("_", ".")))
    if not found:
        raise SourceError(
            f"{caller}: found no file that ends in {' or '.join(endings)} in the folder {folder}, "
            "expected at least one; give a pattern for files of other names or in folders below."
        )
    return found


def _matches(pattern: str, caller: str) -> list[str]:
    if is_url(pattern):
        with readable(pattern):
            matches = _remote().match(pattern)
    elif os.path.lexists(pattern):  # a name may have brackets in it
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
    """A file as it is now.

    Raises:
      SourceError: it is not there, or may not be read.
    """
    with readable(path):
        if is_url(path):
            return DataFile(path, *_remote().status(path))
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path}: found a folder, expected a file, or a pattern of files.")
        return DataFile(path, status.st_size, str(status.st_mtime_ns))


def open_file(path: str) -> BinaryIO:
    """A file as it is, for reading in any order.

    Raises:
      SourceError: it is not there, or may not be read.
    """
    with readable(path):
        return _remote().open_file(path) if is_url(path) else open(path, "rb")


def open_stream(path: str, packed: str | None = None) -> BinaryIO:
    """A file for reading from its beginning, unpacked if it is compressed.

    Args:
      path: of the file.
      packed: ".gz", ".bz2", ".xz", ".lzma", or "" for one that is not compressed; by default, what
        its name says.

    Raises:
      SourceError: it is not there, or may not be read. What is packed badly is found while it is
        read: `readable` names the file then.
    """
    file = open_file(path)
    packed = packing(path) if packed is None else packed
    return cast(BinaryIO, _Unpacked(_UNPACK[packed](file), file)) if packed else file


class _Unpacked(io.BufferedReader):
    """What is unpacked, which closes the packed file too."""

    def __init__(self, unpacked: Any, packed: BinaryIO) -> None:
        super().__init__(unpacked)
        self._packed = packed

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._packed.close()


@contextlib.contextmanager
def readable(path: str, expected: str = "") -> Iterator[None]:
    """Makes errors of reading a file in the `with` block a SourceError that names the file.

    Args:
      path: of the file.
      expected: what it is to be, "a file of Parquet" for example.
    """
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
        raise SourceError(
            f"{path}: cannot read ({type(error).__name__}: {error}); expected "
            f"{expected or 'a file'} that {_SEEN}."
        ) from error


# --- hashes of contents

_THREADS = 4
"""Files that are hashed concurrently: hashlib and reads release the GIL."""


class FileHashes:
    """Hashes by path, each with the size and the times of the file that it was computed from.

    Args:
      known: what `to_json` gave before; entries of any other form are ignored.
    """

    def __init__(self, known: Mapping[str, Any] | None = None):
        self._known = dict(known or {})
        self._unsettled: set[str] = set()

    def of(self, paths: Iterable[str]) -> list[str]:
        """The hash of each file, or at a URL what its file system says of the content.

        Object stores have checksums. Other file systems give the size and the time of change.

        Raises:
          SourceError: a file can't be read.
        """
        with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(self._hash, paths))

    def to_json(self) -> dict[str, Any]:
        """The hashes as plain JSON values, but for those of files that changed just before.

        These may change again without another size or time.
        """
        return {path: found for path, found in self._known.items() if path not in self._unsettled}

    def _hash(self, path: str) -> str:
        with readable(path):
            if is_url(path):
                return str(_remote().content_mark(path))
            found = os.stat(path)
            seen = [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
            match self._known.get(path):
                case [*before, str(digest)] if before == seen:
                    return digest
            now = time.time_ns()
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, _new_hash).hexdigest()
            self._known[path] = [*seen, digest]
            if now - max(found.st_mtime_ns, found.st_ctime_ns) < SETTLED:
                self._unsettled.add(path)
            return digest


def _new_hash() -> Any:
    return hashlib.blake2b(digest_size=16)


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else "of this process"


def _remote() -> Any:
    """What is at URLs; imports Beam."""
    from beamjax.storage import remote_files

    return remote_files
