"""The properties of this process, besides the program, on which the last bits of results depend."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from pathlib import Path

import jax

from beamjax import _compat
from beamjax.bodies.xla_threads import lapack_threads
from beamjax.numerics.provenance import MAX_TEXT, Provenance


def provenance_here(xla_threads: int) -> Provenance:
    """The provenance of values that this process computes."""
    return _here(xla_threads, lapack_threads())


@functools.lru_cache(maxsize=64)
def _here(xla_threads: int, lapack: int | None) -> Provenance:
    versions = ", ".join(f"{name} {version}" for name, version in _compat.versions().items())
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        scipy = importlib.metadata.version("scipy")
        threads = f"XLA threads {xla_threads}, LAPACK threads {lapack or 'as in the process'}"
        machine = f"{_processor()}; {threads}; scipy {scipy}"
    else:
        machine = f"{device.device_kind}; {device.client.platform_version}"
    flags = _flags()
    kind = "; ".join(filter(None, (machine, versions, flags)))
    return Provenance({kind[:MAX_TEXT]: (socket.gethostname()[:MAX_TEXT],)})


_NO_MATTER = re.compile(r"--xla_(force_host_platform_device_count|dump_\w+)(=|$)")


def _flags() -> str:
    """The flags of XLA that may change the bits of results."""
    flags = sorted(f for f in os.environ.get("XLA_FLAGS", "").split() if not _NO_MATTER.match(f))
    return f"XLA_FLAGS {' '.join(flags)}" if flags else ""


_VECTORS = re.compile(r"avx|sse|fma|f16c|amx|bmi|asimd|neon|sve|sme|bf16|i8mm|fphp|fcma")
"""CPU features by which XLA, Eigen and OpenBLAS choose their kernels."""
_NAMES = ("model name", "cpu family", "model", "CPU implementer", "CPU part", "CPU variant")


@functools.cache
def _processor() -> str:
    """The type of the processor: its name, its vector instructions, and the sizes of its caches."""
    # Eigen cuts a contraction into blocks by the sizes of the caches, which changes last bits.
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".strip()
    facts = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    name = " ".join(facts[key] for key in _NAMES if key in facts)
    words = (facts.get("flags") or facts.get("Features") or "").split()
    vectors = " ".join(sorted(filter(_VECTORS.search, words)))
    digest = hashlib.blake2b(vectors.encode(), digest_size=4).hexdigest()
    return f"{platform.machine()} {name}, features {digest}, caches {' '.join(_caches())}"


def _caches() -> list[str]:
    """The sizes of the data caches, from L1 on."""
    sizes = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() != "Instruction":
                sizes.append((index / "size").read_text().strip())
        except OSError:
            continue
    return sizes
