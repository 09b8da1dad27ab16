"""Decides which folders and files of this machine beamjax reads as its own.

Whoever can write to a folder of records, values or checkpoints changes results, and where a step is
Python runs code.
"""

from __future__ import annotations

import collections
import errno
import functools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePath
from urllib.parse import unquote

from beamjax.errors import ArrayFormatError, OptionsError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_MAX_LINKS = 40
_IN_ORDER = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""A link is an error, and opening a FIFO or a device does not wait."""


def is_url(path: str) -> bool:
    """Whether a path is a URL for fsspec, rather than for the operating system."""
    return "://" in path and _URL.match(path) is not None


def local_path(path: str) -> str:
    """The path that a URL with `file://` stands for; any other path or URL as it is."""
    return unquote(path.removeprefix("file://")) if path.startswith("file://") else path


def check_folder(folder: str | os.PathLike[str], use: str) -> None:
    """Refuses a local folder that another user can change."""
    # The folder, its parents, and the links on the way to it must belong to this user or to root.
    # Only these may write there, except in parents with the sticky bit, such as `/tmp`. A folder
    # that does not exist is judged by its parents.
    path = os.fspath(folder)
    if not is_url(path) and (reason := _distrust(path)):
        raise OptionsError(
            f"{use}: found {path}, but {reason}; whoever can write there can change results and "
            "run code as you. Give a folder that only you can write (chmod go-w), in folders of "
            "which the same is true"
        )


def cache_folder(name: str) -> Path:
    """Creates and returns a cache folder of this user: `$BEAMJAX_CACHE/name`, or in ~/.cache."""
    root = os.environ.get("BEAMJAX_CACHE")
    if not root:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(caches, "beamjax")
    folder = Path(root).absolute() / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionsError(
            f"{folder}: cannot make this folder, in which beamjax caches what takes long to build "
            f"({error}); set the environment variable BEAMJAX_CACHE to a folder that you may write"
        ) from error
    check_folder(folder, "BEAMJAX_CACHE")
    return folder


def checked_name(name: object, where: str) -> str:
    """A name from a record, if it is that of a file directly in a folder."""
    if isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0"):
        return name
    raise ArrayFormatError(
        f"{where}: found {str(name)[:200]!r}, expected the name of a file in this folder"
    )


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """Opens a regular file; returns its descriptor."""
    handle = os.open(path, flags | _IN_ORDER, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return handle


def _distrust(path: str) -> str | None:
    """Why a folder is not trusted; None if it is."""
    here = os.path.realpath(path)
    try:
        for step, status in _steps(path):
            if status.st_uid not in (os.geteuid(), 0):
                return f"{step} belongs to user {status.st_uid}"
            if not stat.S_ISLNK(status.st_mode) and _others_write(status, parent=step != here):
                return f"others can write to {step} (mode {stat.S_IMODE(status.st_mode):04o})"
    except (FileNotFoundError, NotADirectoryError):
        return None  # whoever makes it must be able to write in what was checked
    except OSError as error:
        return f"it can't be checked ({error})"
    return None


def _others_write(status: os.stat_result, parent: bool) -> bool:
    """Whether others can change a folder, or replace what this user has in a parent."""
    others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if parent and status.st_mode & stat.S_ISVTX:
        return False
    return bool(others) and not (others == stat.S_IWGRP and _is_own_group(status.st_gid))


def _steps(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """The folders and links on the way to a path as the system follows it, with their status."""
    names = collections.deque(PurePath(os.getcwd(), path).parts[1:])
    here, links = os.sep, 0
    yield here, os.lstat(here)
    while names:
        name = names.popleft()
        if name == os.pardir:
            here = os.path.dirname(here)
            continue
        step = os.path.join(here, name)
        status = os.lstat(step)
        yield step, status
        if not stat.S_ISLNK(status.st_mode):
            here = step
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = PurePath(os.readlink(step))
        if target.is_absolute():
            here = os.sep
        names.extendleft(reversed(target.parts[target.is_absolute() :]))


@functools.cache
def _is_own_group(gid: int) -> bool:
    """Whether a group has this user alone, as by the convention of private groups of users."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}
