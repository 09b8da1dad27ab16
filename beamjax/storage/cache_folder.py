"""The folder in which beamjax caches what is expensive to compute or build."""

from __future__ import annotations

import os
from pathlib import Path

from beamjax.errors import OptionsError
from beamjax.storage import trust


def cache_folder(name: str) -> Path:
    """Creates and returns a cache folder of this user: `$BEAMJAX_CACHE/name`.

    Without that variable it is `~/.cache/beamjax/name`, or `$XDG_CACHE_HOME/beamjax/name`.

    Raises:
      OptionsError: the folder can't be made, or another user can write to it.
    """
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
    trust.check_folder(folder, "BEAMJAX_CACHE")
    return folder
