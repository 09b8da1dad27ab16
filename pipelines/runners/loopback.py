"""Servers that Beam opens in this process, at loopback addresses.

Where workers of its in-memory runner are processes, or threads that it talks to by gRPC, Beam opens
servers for them at all addresses of the machine, and has no option for that. A client that reaches
them can take the place of a worker. Where workers of another runner are threads of this process,
that asks a server here for them: a client that reaches it can have this process run anything. All
clients look for them at "localhost" in any case.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from beamjax._beam_compat import redirect_submission_files, server_modules
from beamjax.pipelines.clusters.processes import LOOPBACK

EVERYWHERE, HERE = "[::]:", f"{LOOPBACK}:"
"""One address, not a name that has two: a free port of the first may be taken at the second."""
_MODULES = server_modules()
"""Modules in which Beam makes these servers."""
_lock = threading.Lock()
_users = 0


class _Instead:
    """A proxy of an object; a subclass overrides some attributes."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Server(_Instead):
    """A gRPC server that listens at loopback addresses only."""

    def add_insecure_port(self, address: str) -> int:
        port: int = self._original.add_insecure_port(address.replace(EVERYWHERE, HERE))
        return port


class _Grpc(_Instead):
    """The package grpc, which makes such servers."""

    def server(self, *args: Any, **kwargs: Any) -> _Server:
        return _Server(self._original.server(*args, **kwargs))


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """A context in which Beam opens servers in this process at loopback addresses only."""
    global _users
    with _lock:
        if not _users:
            for module in _MODULES:
                module.grpc = _Grpc(module.grpc)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                for module in _MODULES:
                    module.grpc = module.grpc._original


_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("folder", default=None)


@contextlib.contextmanager
def submission_files_in(folder: str) -> Iterator[None]:
    """A context in which the folders that Beam makes for a submission are in this one.

    On runners other than its in-memory one it makes a folder for the files of each environment,
    which it never removes.
    """
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


redirect_submission_files(_folder.get)
