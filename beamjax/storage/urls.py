"""Tells URLs from paths of this machine."""

from __future__ import annotations

import re
from urllib.parse import unquote

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def is_url(path: str) -> bool:
    """Whether a path is a URL for fsspec, rather than for the operating system."""
    return _URL.match(path) is not None


def local_path(path: str) -> str:
    """The path that a URL with `file://` stands for; any other path or URL as it is."""
    return unquote(path.removeprefix("file://")) if path.startswith("file://") else path
