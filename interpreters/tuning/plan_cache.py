"""A cache of probed choices on this machine: small JSON files, which may be deleted at any time.

The files are in `$BEAMJAX_PLANNER_CACHE`, by default in the folder `planner` of beamjax's cache. If
the variable is empty, or the folder can't be made, nothing is cached.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import jax

from beamjax import _compat
from beamjax.errors import OptionsError
from beamjax.options.choices import write_json
from beamjax.storage.cache_folder import cache_folder

VARIABLE = "BEAMJAX_PLANNER_CACHE"
MAX_BYTES = 1 << 20
"""Largest file that is read."""


def folder() -> Path | None:
    """The folder of the cache; None if nothing is cached."""
    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    try:
        if given is None:
            return cache_folder("planner")
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, OptionsError):
        return None
    return Path(given).absolute()


def load(name: str) -> dict[str, Any] | None:
    """The record with this name, or None. Warns if the file is not a JSON object."""
    found = folder()
    if found is None:
        return None
    path = found / f"{name}.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("it is too large")
        record = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError(f"found a {type(record).__name__}, expected an object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        ignore(name, error)
        return None
    return record


def ignore(name: str, error: Exception) -> None:
    """Warns that the file with this name is not used."""
    found = folder()
    path = name if found is None else found / f"{name}.json"
    warnings.warn(
        f"{path}: beamjax can't use this file and will write it anew: {error}",
        RuntimeWarning,
        stacklevel=3,
    )


def store(name: str, record: dict[str, Any]) -> None:
    """Stores a record; does nothing if the folder can't be written."""
    found = folder()
    if found is not None:
        with contextlib.suppress(OSError):
            write_json(found / f"{name}.json", record)


def digest(*parts: Any) -> str:
    """A hash of JSON values, to be used in a name."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.cache
def machine() -> dict[str, Any]:
    """The hardware and the versions that decide how fast this machine is, by readable names."""
    device = jax.local_devices()[0]
    versions = _compat.versions()
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "device": f"{device.platform} {device.device_kind}",
        "jax": versions["jax"],
        "jaxlib": versions["jaxlib"],
    }


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
