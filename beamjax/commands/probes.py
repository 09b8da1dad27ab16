"""What `doctor` tries in processes of their own, so that it holds no device itself.

`python -m beamjax.commands.probes NAME` prints what was found as one line of JSON, the last one.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import jax
import numpy as np

import beamjax as bj
from beamjax.bodies.export import default_platform, export_body, load_body


def devices() -> dict[str, Any]:
    """What JAX computes on here."""
    found = jax.local_devices()
    return {
        "platform": default_platform(),
        "devices": [device.device_kind for device in found],
        "memory": [_memory(device) for device in found],
    }


def _memory(device: Any) -> int | None:
    """Bytes that JAX may use of a device, if it says so."""
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except Exception:  # not all plugins have it
        return None


def body() -> dict[str, Any]:
    """Exports a body, reads it again and computes it."""
    start = time.perf_counter()
    x = jax.ShapeDtypeStruct((8, 8), np.float32)
    key, exported = export_body("probe", lambda x: [x @ x], [x], [default_platform()])
    (found,) = load_body(key, exported)(np.ones((8, 8), np.float32))
    if not np.array_equal(found, np.full((8, 8), 8, np.float32)):
        raise ValueError(f"found {np.asarray(found)[0, 0]}, expected 8 in all entries")
    return {"seconds": time.perf_counter() - start}


def job() -> dict[str, Any]:
    """Runs a program on Beam's runner in this process."""
    start = time.perf_counter()

    @bj.program(members=20)
    def mean(x: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda v: v * 2, x))

    found = bj.run(mean, np.arange(20, dtype=np.float32), options={"shard_size": 8})
    if found != 19:
        raise ValueError(f"found {found}, expected 19")
    return {"seconds": time.perf_counter() - start}


PROBES = {"devices": devices, "body": body, "job": job}

if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
