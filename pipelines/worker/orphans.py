"""Workers end if the process that launched them is gone, as when its host has died.

The launcher rewrites the file `launcher` in a folder. The first worker that misses it writes the
file `stop`, with which all workers end. Resident workers do so in the folder of their messages.
The workers of a single pipeline emit nothing more, so that the runner is soon done with it, and a
launcher that lives after all finds `stop`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from beamjax.errors import WorkerError
from beamjax.pipelines.values.store import Store
from beamjax.storage import files, trust
from beamjax.telemetry import signs_of_life
from beamjax.telemetry.signs_of_life import Heart, Pulse

LAUNCHER, STOP = "launcher", "stop"

LOST_SECONDS = 30.0
"""Seconds without a heartbeat of the launcher after which workers end. On the same machine they end
as soon as its process has ended."""

ORPHANED = b"orphaned"
"""The content of `stop` if workers wrote it, since their launcher was dead."""

PREFIX = "launched-"
"""The beginning of the names of the folders of single pipelines, in the stores of their runs."""


# --- on workers


class LauncherWatch:
    """Looks whether the launcher lives that writes its heartbeats to a folder."""

    def __init__(self, folder: str):
        self.folder = folder
        self._pulse: Pulse | None = None
        # When the first look was, and when the folder could be read.
        self._begun = self._reached = time.monotonic()

    def look_for(self, name: str) -> bytes | None:
        """As `read`. A folder out of reach has no news for a while, and then is an error."""
        try:
            content = read(self.folder, name)
        except OSError:
            # As long as a dead launcher is waited for.
            if time.monotonic() - self._reached > LOST_SECONDS:
                raise
            return None
        self._reached = time.monotonic()
        return content

    def is_orphaned(self) -> bool:
        """Whether the launcher is dead, or its folder is gone; then all workers of the job end."""
        looked = time.monotonic()
        data = self.look_for(LAUNCHER)
        if data is None:
            if self._reached < looked:  # The folder is out of reach.
                return False
            # If the file is gone after it was seen, the job has ended. If it was never seen, this
            # machine may see new files late, as on NFS.
            return self._pulse is not None or looked - self._begun > LOST_SECONDS
        if self._pulse is None:
            self._pulse = Pulse(data)
        self._pulse.look(data)
        if not self._pulse.is_dead(LOST_SECONDS):
            return False
        _stop_all(self.folder)
        return True


def is_orphaned(folder: str) -> bool:
    """Whether the launcher of a folder is certainly dead."""
    if read(folder, STOP) == ORPHANED:
        return True
    data = read(folder, LAUNCHER)
    return data is not None and Pulse(data).is_dead(LOST_SECONDS)


def _stop_all(folder: str) -> None:
    with contextlib.suppress(FileNotFoundError):  # The job has ended.
        write(folder, STOP, ORPHANED)


class _Watcher:
    """Watches the launcher of a single pipeline in a thread, until one of both has ended."""

    def __init__(self, folder: str):
        self._launcher = LauncherWatch(folder)
        self.is_orphaned = read(folder, STOP) is not None
        if not self.is_orphaned:
            threading.Thread(target=self._watch, name="beamjax launcher", daemon=True).start()

    def _watch(self) -> None:
        folder = self._launcher.folder
        try:
            while not (self._launcher.is_orphaned() or self._launcher.look_for(STOP)):
                time.sleep(signs_of_life.seconds_at(folder))
            # Before this worker stops to compute: a launcher that lives must see it. At a URL, the
            # file of a launcher that lives is never missing.
            if not files.is_url(folder):
                _stop_all(folder)
        except OSError:  # What this worker does in its store will fail as well.
            return
        self.is_orphaned = True


MAX_WATCHERS = 64
"""Pipelines whose launchers a process watches. A pool of workers serves many."""
_watchers: dict[str, _Watcher] = {}
_lock = threading.Lock()


def _is_over(fn: Any) -> bool:
    """Whether a DoFn need not compute any more."""
    store = store_of(fn)
    if store is None or store.launcher is None:
        return False
    with _lock:
        watcher = _watchers.get(store.launcher)
        if watcher is None:
            if len(_watchers) == MAX_WATCHERS:  # remove the oldest
                del _watchers[next(iter(_watchers))]
            _watchers[store.launcher] = watcher = _Watcher(store.launcher)
    return watcher.is_orphaned


def store_of(fn: Any) -> Store | None:
    """The store of a DoFn, if it has one."""
    store = getattr(fn, "store", None) or getattr(getattr(fn, "task", None), "store", None)
    return store if isinstance(store, Store) else None


def unless_orphaned(process: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the method `process` of a DoFn emit nothing if the launcher of its pipeline is gone."""

    @functools.wraps(process)
    def generating(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        if not _is_over(self):
            yield from process(self, *args, **kwargs)

    @functools.wraps(process)
    def calling(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if _is_over(self) else process(self, *args, **kwargs)

    return generating if inspect.isgeneratorfunction(process) else calling


# --- in the launching process


@contextlib.contextmanager
def heard(store: Store) -> Iterator[Store]:
    """A context in which the workers of a pipeline hear from this process; yields their store."""
    folder = files.join(store.root, f"{PREFIX}{secrets.token_hex(8)}")
    files.make_folder(folder)
    heart = Heart(files.join(folder, LAUNCHER))
    try:
        yield replace(store, launcher=folder)
    finally:
        heart.stop()
        files.remove_tree(folder)


def check_heard(store: Store) -> None:
    """Raises WorkerError if a worker of a pipeline that has ended took this process for dead."""
    # Such a worker emits nothing more, so results are missing.
    if store.launcher is not None and read(store.launcher, STOP) is not None:
        raise WorkerError(
            f"workers saw no heartbeat of this process in {store.root} for {LOST_SECONDS:.0f} s, "
            "and ended; was it stopped, or the work_folder out of reach? Run again"
        )


# --- files


def write(folder: str, name: str, data: bytes) -> None:
    """Writes a file of a folder that exists."""
    files.write(files.join(folder, name), data, make=False)


@files.patiently
def read(folder: str, name: str) -> bytes | None:
    """The content of a file; None if it does not exist."""
    path = files.join(folder, name)
    try:
        if not files.is_url(path):
            with open(trust.open_regular(path), "rb") as file:
                return file.read()
        return bytes(files.read(path))
    except FileNotFoundError:
        return None
