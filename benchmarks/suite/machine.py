"""What ran where: the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("beamjax", "jax", "apache-beam", "numpy")
PEERS = {"dask": ("distributed",)}
"""Packages whose versions matter too, by the way's."""

_CODE = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None
print(json.dumps({name: of(name) for name in sys.argv[1:]}))
"""


def machine() -> dict[str, Any]:
    """Processor, cores, load, and the versions of what this Python has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = {
        "machine": platform.machine(),
        "cores": cores,
        "load average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def memory_gib() -> float:
    """Of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def versions_of(pythons: Mapping[str, str]) -> dict[str, Any]:
    """Versions in other interpreters, by what they are given for."""
    found = {}
    for key, python in pythons.items():
        way = key.partition("-")[0]
        names = ("jax", "numpy", way, *PEERS.get(way, ()))
        done = subprocess.run(
            [python, "-c", _CODE, *names], capture_output=True, text=True, check=False
        )
        told = json.loads(done.stdout) if done.returncode == 0 else {}
        found[key] = {name: value for name, value in told.items() if value}
    return found
