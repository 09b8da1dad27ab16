"""Small whole files at URLs, by Beam's FileSystems; `files` is for paths and URLs alike.

On object stores a file is there when it is written to its end, and a second one of its name takes
its place at once. Elsewhere it is written under a temporary name and renamed. Where a file system
refuses a name that is taken, the old file is set aside until the new one has its name.
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
OBJECT_STORES = ("gs", "s3", "azfs")
_ATTEMPTS = 5  # at a name that others write too
_RAW = CompressionTypes.UNCOMPRESSED


def join(folder: str, name: str) -> str:
    """URL of a file in a folder."""
    return _known().join(folder, name)


def write(path: str, data: bytes, keep: bool) -> None:
    """Writes a file, so that readers see all of it or nothing; see `files.write`."""
    systems = _known()
    if keep and systems.exists(path) and systems.get_filesystem(path).size(path) == len(data):
        return
    if systems.get_scheme(path) in OBJECT_STORES:
        with systems.create(path, compression_type=_RAW) as file:
            file.write(data)
        return
    temporary = _temporary(path)
    with systems.create(temporary, compression_type=_RAW) as file:
        file.write(data)
    _replace(temporary, path, len(data) if keep else None)


def read(path: str) -> memoryview:
    """The whole content."""
    with _known().open(path, compression_type=_RAW) as file:
        return memoryview(file.read())


def size(path: str) -> int:
    """Bytes of a file."""
    return _known().get_filesystem(path).size(path)


def status(path: str) -> tuple[int, str]:
    """Bytes of a file, and when it was last written, as its file system says."""
    system = _known().get_filesystem(path)
    metadata = system.metadata(path)
    return metadata.size_in_bytes, str(metadata.last_updated_in_seconds)


def content_mark(path: str) -> str:
    """A short text that changes with the content: a checksum where there are such, or the time."""
    systems = _known()
    if systems.get_scheme(path) in OBJECT_STORES:
        return f"{size(path)} bytes, {systems.checksum(path)}"
    return "{} bytes, {}".format(*status(path))


def match(pattern: str) -> list[str]:
    """URLs of the files that a pattern finds, in the order of their names; none if none."""
    return sorted(file.path for file in _known().match([pattern])[0].metadata_list)


def open_file(path: str) -> BinaryIO:
    """A file as it is, for reading in any order."""
    file: BinaryIO = _known().open(path, compression_type=_RAW)
    return file


def names(folder: str) -> list[str]:
    """Names of the files in a folder; none if it is not there."""
    systems = _known()
    found = systems.match([systems.join(folder, "*")])[0].metadata_list
    return [systems.split(file.path)[1] for file in found]


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
    """Removes files of a folder, those that are still there."""
    if gone:
        systems = _known()
        systems.delete([systems.join(folder, name) for name in gone])


def copy(source: str, target: str) -> None:
    """Copies a file, of which one or both are at a URL, by the file system if it can."""
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
        _replace(final, target, None)


def _copied(source: str, target: str) -> bool:
    """Whether the file system itself could copy a file; not all do."""
    try:
        _known().copy([source], [target])
    except Exception:
        return False
    return True


def _replace(temporary: str, path: str, kept: int | None) -> None:
    """Renames a file, while other processes may do the same.

    A file of `kept` bytes that another writer has put there meanwhile is left as it is: readers
    may have seen it.
    """
    systems = _known()
    for attempt in range(_ATTEMPTS):
        try:
            if (
                kept is not None
                and systems.exists(path)
                and systems.get_filesystem(path).size(path) == kept
            ):
                systems.delete([temporary])
                return
            _rename(temporary, path, set_aside=attempt > 0)
            return
        except Exception:
            if attempt + 1 == _ATTEMPTS:
                with contextlib.suppress(Exception):
                    systems.delete([temporary])
                raise
            time.sleep(random.uniform(0, 0.1 * 2**attempt))


def _rename(temporary: str, path: str, set_aside: bool) -> None:
    """Renames a file to a name that may be taken; what has the name stays if that fails.

    Args:
      temporary, path: the old and the new name.
      set_aside: whether to rename what has the name, if it can't be replaced at once, as in HDFS.
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
    """Beam's FileSystems, some of which need options, if only those by default.

    A pipeline and a worker set its own there.
    """
    if not has_file_options():
        FileSystems.set_options(PipelineOptions([]))
    return FileSystems
