"""The stores of runs: new folders, which are removed at the end of the run."""

from __future__ import annotations

import re

from beamjax.errors import SourceError
from beamjax.pipelines.values.store import SUFFIXES, Store
from beamjax.storage import files, temporary


def new_store(parent: str | None = None) -> Store:
    """A store in a new folder; without a parent, in the temporary folder of this machine."""
    store = Store(temporary.new_name(parent), persistent=False)
    try:
        temporary.make(store.root)
    except OSError as error:
        raise SourceError(
            f"{store.root}: cannot write here ({error}); expected a folder that the launcher "
            "and all workers can write and read."
        ) from error
    return store


def is_store(name: str) -> bool:
    """Whether `new_store` gives a folder such a name."""
    return re.fullmatch(f"{temporary.PREFIXES[0]}[0-9a-f]{{32}}", name) is not None


def remove_store(store: Store) -> None:
    """Removes the store of a run with everything in it, including the files of sources."""
    if files.is_url(store.root):
        clear_store(store)
    else:
        temporary.remove(store.root)


def clear_store(store: Store) -> None:
    """Removes the files of a store, and the folder if nothing else is in it."""
    try:
        files.remove(store.root, (*SUFFIXES, ".npy"))
        temporary.remove_empty(store.root)
    except Exception as error:
        raise SourceError(f"{store.root}: cannot remove stored values ({error}).") from error
