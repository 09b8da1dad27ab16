"""What the planner remembers on this machine: small files of JSON, which may go at any time.

They are in `$BEAMJAX_PLANNER_CACHE`, by default in the folder `planner` of beamjax's cache. Where
the variable is empty, or the folder can't be written, nothing is remembered.
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
from beamjax.options.choices import write_json
from beamjax.storage.cache_folder import cache_folder

VARIABLE = "BEAMJAX_PLANNER_CACHE"
MAX_BYTES = 1 << 20


def folder() -> Path | None:
    """Where it is; None where nothing is remembered."""
    given = os.environ.get(VARIABLE)
    if given == "":
        return None
    try:
        if given is None:
            return cache_folder("planner")
        Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return Path(given).absolute()


def load(name: str) -> dict[str, Any] | None:
    """What was stored under a name; None, with a warning, for a file of something else."""
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
    """Says that what was stored under a name is not used."""
    found = folder()
    path = name if found is None else found / f"{name}.json"
    warnings.warn(
        f"{path} is not used, and will be written anew: {error}", RuntimeWarning, stacklevel=3
    )


def store(name: str, record: dict[str, Any]) -> None:
    """Remembers a record, if that can be."""
    found = folder()
    if found is not None:
        with contextlib.suppress(OSError):
            write_json(found / f"{name}.json", record)


def digest(*parts: Any) -> str:
    """A name for what these JSON values are about."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@functools.cache
def machine() -> dict[str, Any]:
    """What decides how fast this machine is, by names for people."""
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
