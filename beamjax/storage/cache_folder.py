"""The folder in which beamjax caches what takes long to make."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """A folder for what takes long to make, for this user only: `$BEAMJAX_CACHE/name`.

    By default that is `~/.cache/beamjax/name`, or below `$XDG_CACHE_HOME`.
    """
    root = os.environ.get("BEAMJAX_CACHE")
    if not root:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = os.path.join(caches, "beamjax")
    folder = Path(root).absolute() / name
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
