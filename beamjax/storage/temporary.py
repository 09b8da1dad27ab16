"""Temporary folders that are removed by the next run on this machine if their process is killed."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import socket
import stat
import tempfile
import threading
import uuid
from pathlib import Path

from beamjax.storage import locks, trust
from beamjax.storage.trust import is_url

PREFIXES = ("beamjax-", "beam-pipeline-temp")
"""How the names of temporary folders begin: those of beamjax, and of pipelines of Beam."""
# The system releases the lock of a file when its process ends in any way, so neither pids nor their
# reuse matter. The file names the machine, since some network file systems do not share locks
# between machines.
OWNER = ".owner"
"""The file whose lock the process of a folder holds."""
_MAX_OWNER_BYTES = 1000

_held: dict[str, int] = {}
"""Descriptors of the locks of this process, by folder."""
_lock = threading.Lock()


def new_name(parent: str | None, kind: str = "") -> str:
    """The path or URL of a temporary folder that does not exist yet."""
    parent = tempfile.gettempdir() if parent is None else parent
    name = f"{PREFIXES[0]}{kind}{'-' if kind else ''}{uuid.uuid4().hex}"
    return f"{parent.rstrip('/')}/{name}" if is_url(parent) else os.path.abspath(f"{parent}/{name}")


def make(folder: str) -> None:
    """Makes a temporary folder of this process, for this user only. Does nothing at a URL."""
    if is_url(folder):
        return
    trust.check_folder(folder, "work_folder")
    sweep_once(os.path.dirname(folder))
    _machine()  # so that little time passes until the folder has an owner
    os.makedirs(folder, mode=0o700, exist_ok=True)
    adopt(folder)


def adopt(folder: str) -> None:
    """Makes an existing folder one of this process, which has a name with one of `PREFIXES`."""
    handle = locks.try_lock(os.path.join(folder, OWNER))
    if handle is not None:  # else this process has made it before
        os.write(handle, "\n".join(_machine()).encode())
        with _lock:
            _held[folder] = handle


def release(folder: str) -> None:
    """Gives up a folder of this process: what uses it may outlive the process."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, OWNER))
    _forget(folder)


def remove(folder: str) -> None:
    """Removes a folder of this process with all its files. What can't be removed stays."""
    shutil.rmtree(folder, ignore_errors=True)
    _forget(folder)


def _forget(folder: str) -> None:
    with _lock:
        handle = _held.pop(folder, None)
    if handle is not None:
        os.close(handle)


def remove_empty(folder: str) -> None:
    """Removes a local folder of this process if it has no files."""
    with contextlib.suppress(OSError):
        if set(os.listdir(folder)) <= {OWNER}:
            remove(folder)


@functools.cache
def sweep_once(parent: str) -> None:
    """As `sweep`, once in a process. Does nothing at a URL."""
    if not is_url(parent):
        sweep(parent)


def sweep(parent: str) -> None:
    """Removes the temporary folders of this user in a parent whose processes are gone."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIXES) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


@functools.cache
def _machine() -> tuple[str, str, str]:
    """The boot of this machine, its name, and its id. The first or last may be empty."""
    return _line("/proc/sys/kernel/random/boot_id"), socket.gethostname(), _line("/etc/machine-id")


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _remove_if_abandoned(folder: str) -> None:
    if os.lstat(folder).st_uid != os.geteuid():
        return
    path = os.path.join(folder, OWNER)
    if not stat.S_ISREG(os.lstat(path).st_mode):  # a folder without this file is not one of these
        return
    handle = locks.try_lock(path)
    if handle is None:
        return
    try:
        booted, *where = os.pread(handle, _MAX_OWNER_BYTES, 0).decode().split("\n")
        now, *here = _machine()
        # Containers of one machine have names of their own. If this machine was restarted since,
        # its name and its id are the same.
        if (now and booted == now) or (where == here and (here[-1] or not now)):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(handle)
