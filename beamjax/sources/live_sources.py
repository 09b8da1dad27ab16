"""Sources in the memory of this process, which its other threads find by a token."""

from __future__ import annotations

import os
import threading
import uuid
from typing import TYPE_CHECKING, Any

from beamjax.errors import SourceError

if TYPE_CHECKING:
    from beamjax.sources.source_base import Source

_LIVE: dict[str, Source] = {}
_LIVE_LOCK = threading.Lock()


def register(source: Source) -> str:
    """Shares a live source with the other threads of this process, until `release`.

    Returns:
        A token for `lookup`, or for `open_spec(live_spec(token))`.
    """
    token = uuid.uuid4().hex
    with _LIVE_LOCK:
        _LIVE[token] = source
    return token


def live_spec(token: str) -> dict[str, Any]:
    """The spec of a registered source; good in this process only."""
    return {"kind": "live", "token": token}


def lookup(token: str) -> Source:
    """The source that was registered under `token`.

    Raises:
        SourceError: if it was released, or registered in another process.
    """
    with _LIVE_LOCK:
        source = _LIVE.get(token)
    if source is None:
        raise SourceError(
            f"source {token}: not registered in process {os.getpid()}. In-memory sources live in "
            "the process that made them and until they are released: write it to files with "
            "source.spill(folder), in a folder that the workers see, to read it elsewhere."
        )
    return source


def release(token: str) -> None:
    """Forgets a registered source; harmless if it is unknown."""
    with _LIVE_LOCK:
        _LIVE.pop(token, None)
