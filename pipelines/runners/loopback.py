"""Makes the servers that Beam opens in this process private to this user."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import Any

from beamjax._beam_compat import redirect_submission_files, server_modules
from beamjax.pipelines.clusters.processes import LOOPBACK
from beamjax.pipelines.own_user import OwnUserOnly

# If the workers of Beam's in-memory runner are processes, or threads connected by gRPC, Beam opens
# servers for them at all addresses of the machine, and has no option to change that. A client that
# reaches them can act as a worker. If the workers of another runner are threads of this process,
# the runner requests them from a server here. A client that reaches that server can run any code in
# this process. Legitimate clients connect to "localhost" in any case, as this user.

EVERYWHERE, HERE = "[::]:", f"{LOOPBACK}:"
"""Addresses in Beam's code, and their replacement. It is one address and not "localhost", which may
have two: a port that is free at the first may be in use at the second."""
_MODULES = server_modules()
"""Modules in which Beam creates these servers."""
_lock = threading.Lock()
_users = 0  # Nested and concurrent contexts; the last one restores the modules.


class _Proxy:
    """A proxy of an object. Subclasses override some of its attributes."""

    def __init__(self, original: Any):
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _OwnServer(_Proxy):
    """A gRPC server that listens at loopback addresses only, and answers its own user only."""

    def __init__(self, original: Any, own: OwnUserOnly):
        super().__init__(original)
        self._own = own

    def add_insecure_port(self, address: str) -> int:
        port: int = self._original.add_insecure_port(address.replace(EVERYWHERE, HERE))
        self._own.ports.add(port)
        return port


class _Grpc(_Proxy):
    """The package `grpc`, with such servers."""

    def server(self, *args: Any, **kwargs: Any) -> _OwnServer:
        own = OwnUserOnly()
        interceptors = (own, *(kwargs.pop("interceptors", None) or ()))
        return _OwnServer(self._original.server(*args, interceptors=interceptors, **kwargs), own)


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """A context in which Beam opens servers in this process for this user only."""
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
    """A context in which Beam creates its folders for a submission inside of this folder."""
    # For runners other than its in-memory one, Beam creates a folder for the files of each
    # environment and never removes it.
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


redirect_submission_files(_folder.get)
