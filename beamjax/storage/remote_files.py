"""Small whole files at URLs, by Beam's FileSystems; `files` is for paths and URLs alike.

On object stores a file appears when it is closed, and replaces another file of its name atomically.
On other file systems it is written under a temporary name and renamed. If a file system does not
replace files when it renames, the old file is renamed first.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
import uuid
from collections.abc import Sequence
from typing import BinaryIO

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._beam_compat import has_file_options

TEMPORARY = ".tmp"
"""The same as in `files`, which imports this module."""
OBJECT_STORES = ("gs", "s3", "azfs")
"""Schemes of URLs at which files are written atomically."""
_ATTEMPTS = 5
"""Attempts to rename a file to a name that other processes may be writing too."""
_RAW = CompressionTypes.UNCOMPRESSED


def is_known(path: str) -> bool:
    """Whether Beam has a file system for the scheme of a URL."""
    try:
        _known().get_filesystem(path)
    except ValueError:
        return False
    return True


def join(folder: str, name: str) -> str:
    """URL of a file in a folder."""
    return _known().join(folder, name)


def write(path: str, data: bytes, keep: bool) -> None:
    """Writes a file, so that readers see all of it or nothing; see `files.write`."""
    systems = _known()
    if keep and _has_size(path, len(data)):
        return
    if systems.get_scheme(path) in OBJECT_STORES:
        with systems.create(path, compression_type=_RAW) as file:
            file.write(data)
        return
    temporary = _temporary(path)
    with systems.create(temporary, compression_type=_RAW) as file:
        file.write(data)
    _replace(temporary, path, reusable_bytes=len(data) if keep else None)


def read(path: str) -> memoryview:
    """The whole content."""
    with _known().open(path, compression_type=_RAW) as file:
        return memoryview(file.read())


def _has_size(path: str, nbytes: int) -> bool:
    """Whether there is a file of this size."""
    return exists(path) and size(path) == nbytes


def size(path: str) -> int:
    """Bytes of a file."""
    return _known().get_filesystem(path).size(path)


def status(path: str) -> tuple[int, str]:
    """Bytes of a file, and the time of its last change as its file system reports it."""
    system = _known().get_filesystem(path)
    metadata = system.metadata(path)
    return metadata.size_in_bytes, str(metadata.last_updated_in_seconds)


def content_mark(path: str) -> str:
    """A short string that changes with the content: from its checksum, or the time of its change.

    Only object stores have checksums that do not require reading the file.
    """
    systems = _known()
    if systems.get_scheme(path) in OBJECT_STORES:
        return f"{size(path)} bytes, {systems.checksum(path)}"
    return "{} bytes, {}".format(*status(path))


def match(pattern: str) -> list[str]:
    """URLs of the files that match a pattern, in the order of their names."""
    return sorted(file.path for file in _known().match([pattern])[0].metadata_list)


def open_file(path: str) -> BinaryIO:
    """A file as it is, for reading in any order."""
    file: BinaryIO = _known().open(path, compression_type=_RAW)
    return file


def names(folder: str) -> list[str]:
    """Names of the files in a folder; none if it is not there."""
    return [name for name, _, _ in listed(folder)]


def listed(folder: str) -> list[tuple[str, int, float]]:
    """Name, bytes and time of the last change of each file in a folder; none if it is not there."""
    systems = _known()
    found = systems.match([systems.join(folder, "*")])[0].metadata_list
    return [
        (systems.split(file.path)[1], file.size_in_bytes, file.last_updated_in_seconds or 0.0)
        for file in found
    ]


def exists(path: str) -> bool:
    """Whether there is a file."""
    return bool(_known().exists(path))


def remove_files(folder: str, gone: Sequence[str]) -> None:
    """Removes files from a folder; some may already be gone."""
    if gone:
        systems = _known()
        systems.delete([systems.join(folder, name) for name in gone])


def copy(source: str, target: str) -> None:
    """Copies a file from or to a URL, by the file system itself if it can."""
    systems = _known()
    scheme = systems.get_scheme(target)
    final = target if scheme in OBJECT_STORES else _temporary(target)
    if not (systems.get_scheme(source) == scheme and _copied(source, final)):
        with (
            systems.open(source, compression_type=_RAW) as file,
            systems.create(final, compression_type=_RAW) as made,
        ):
            shutil.copyfileobj(file, made, 2**20)
    if final != target:
        _replace(final, target)


def _copied(source: str, target: str) -> bool:
    """Copies a file by the file system itself; False if it can't."""
    try:
        _known().copy([source], [target])
    except Exception:
        return False
    return True


def _replace(temporary: str, path: str, reusable_bytes: int | None = None) -> None:
    """Renames a file, while other processes may rename others to the same name.

    A file of `reusable_bytes` that another process has written meanwhile is left as it is: readers
    may have it open.
    """
    systems = _known()
    for attempt in range(_ATTEMPTS):
        try:
            if reusable_bytes is not None and _has_size(path, reusable_bytes):
                systems.delete([temporary])
                return
            _rename(temporary, path, set_aside=attempt > 0)
            return
        except Exception:
            if attempt + 1 == _ATTEMPTS:
                with contextlib.suppress(Exception):
                    systems.delete([temporary])
                raise
            # A random time, so that processes that write the same name do not retry together.
            time.sleep(random.uniform(0, 0.1 * 2**attempt))


def _rename(temporary: str, path: str, set_aside: bool) -> None:
    """Renames a file to a name that may be taken. If that fails, the file of that name remains.

    Args:
      temporary: the old name.
      path: the new name.
      set_aside: whether to rename a file of the new name first, if it can't be replaced, as in
        HDFS.
    """
    systems = _known()
    try:
        systems.rename([temporary], [path])
        return
    except Exception:
        if not set_aside or not systems.exists(path):
            raise
    old = _temporary(path)
    systems.rename([path], [old])
    try:
        systems.rename([temporary], [path])
    except Exception:
        if not systems.exists(path):
            systems.rename([old], [path])
            raise
        # Another writer was first: remove the old file that was set aside.
        with contextlib.suppress(Exception):
            systems.delete([old])
        raise
    with contextlib.suppress(Exception):
        systems.delete([old])


def _temporary(path: str) -> str:
    return f"{path}.{uuid.uuid4().hex}{TEMPORARY}"


def _known() -> type[FileSystems]:
    """Beam's FileSystems, with default options if none are set: some file systems need options.

    Pipelines and workers set options of their own.
    """
    if not has_file_options():
        FileSystems.set_options(PipelineOptions([]))
    return FileSystems
