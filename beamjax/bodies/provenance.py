"""Provenance: the kinds of machine that computed a run, on which its last bits depend."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from beamjax import _compat
from beamjax.bodies.xla_threads import lapack_threads
from beamjax.errors import ArrayFormatError
from beamjax.storage.schema import add_codec

MAX_KINDS = 8
"""Largest number of kinds in a provenance, which drops the last ones in order. Two are enough to
know that it is mixed."""
MAX_HOSTS = 2
"""Largest number of hosts of each kind, which are for messages."""
MAX_TEXT = 1000
"""Largest number of characters of a kind or a host."""


@dataclass(frozen=True)
class Provenance:
    """The kinds of machine that computed a run."""

    # A text for each kind, with the names of a few hosts. Equal texts promise equal bits for the
    # same plan.
    kinds: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: Provenance) -> Provenance:
        """All kinds of both: commutative, associative and idempotent."""
        if not other.kinds or self == other:
            return self
        if not self.kinds:
            return other
        # The first ones in order stay, so the result does not depend on the order of merges.
        kinds: dict[str, tuple[str, ...]] = {}
        for kind in sorted({**self.kinds, **other.kinds})[:MAX_KINDS]:
            hosts = {*self.kinds.get(kind, ()), *other.kinds.get(kind, ())}
            kinds[kind] = tuple(sorted(hosts)[:MAX_HOSTS])
        return Provenance(kinds)

    def __bool__(self) -> bool:
        return bool(self.kinds)

    @property
    def is_mixed(self) -> bool:
        """Whether another run of the same plan may give other bits."""
        return len(self.kinds) > 1

    def mixture(self) -> str:
        """A sentence on the kinds of machine that were mixed."""
        listed = "; ".join(f"{', '.join(hosts)} ({kind})" for kind, hosts in self.kinds.items())
        return f"the workers may give different last bits: found {listed}, expected one kind"

    def to_json(self) -> dict[str, list[str]]:
        """Plain JSON values."""
        return {kind: list(hosts) for kind, hosts in self.kinds.items()}

    @classmethod
    def from_json(cls, plain: Any) -> Provenance:
        """Undoes `to_json`; None gives the empty provenance."""
        if plain is None:
            return UNKNOWN
        if not (
            isinstance(plain, dict)
            and len(plain) <= MAX_KINDS
            and all(_is_entry(kind, hosts) for kind, hosts in plain.items())
        ):
            raise ArrayFormatError(
                f"provenance: found {plain!r:.200}, expected up to {MAX_KINDS} kinds of machine "
                f"with up to {MAX_HOSTS} hosts each"
            )
        return cls({kind: tuple(hosts) for kind, hosts in plain.items()})


def _is_entry(kind: Any, hosts: Any) -> bool:
    texts = [kind, *hosts] if isinstance(hosts, list) and len(hosts) <= MAX_HOSTS else [None]
    return all(isinstance(text, str) and len(text) <= MAX_TEXT for text in texts)


add_codec(Provenance, Provenance.to_json, Provenance.from_json)

UNKNOWN = Provenance()
"""The provenance of what no machine has computed yet."""


def merged(parts: Iterable[Provenance]) -> Provenance:
    """All kinds of some provenances."""
    return functools.reduce(Provenance.__or__, parts, UNKNOWN)


# --- this process


def provenance_here(xla_threads: int) -> Provenance:
    """The kind of this process."""
    return _here(xla_threads, lapack_threads())


@functools.lru_cache(maxsize=64)
def _here(xla_threads: int, lapack: int | None) -> Provenance:
    versions = ", ".join(f"{name} {version}" for name, version in _compat.versions().items())
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        scipy = _scipy_version()
        threads = f"XLA threads {xla_threads}, LAPACK threads {lapack or 'as in the process'}"
        machine = f"{_processor()}; {threads}; scipy {scipy}"
    else:
        machine = f"{device.device_kind}; {device.client.platform_version}"
    flags = _flags()
    kind = "; ".join(filter(None, (machine, versions, flags)))
    return Provenance({kind[:MAX_TEXT]: (socket.gethostname()[:MAX_TEXT],)})


def _scipy_version() -> str:
    # `importlib.metadata.version` imports Python's email package to parse all fields.
    fields = importlib.metadata.distribution("scipy").read_text("METADATA") or ""
    return fields.partition("\nVersion: ")[2].partition("\n")[0]


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
