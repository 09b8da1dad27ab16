"""How fast this machine is: measured in less than a second, kept in a file, mended after runs.

Nothing that changes bits depends on it: it is for what people are told, and for where small work
goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax import plan_cache
from beamjax.costs import USUAL, Rates
from beamjax.reducers import make_accumulator

FORMAT = 1
KINDS = ("read", "compute", "merge", "compile")
"""What is mended by what runs measured, besides what runners take for themselves."""
MEMORY = 0.6
"""How much of an old factor stays when there is a new one."""
MAX_FACTOR = 100.0
MIN_SECONDS = 1e-9
"""Less is no time."""
MAX_UNUSUAL = 10.0
"""How far from the usual a machine may be."""
_BEST_OF = 5


@dataclass(frozen=True)
class Fixed:
    """What a runner takes for itself, in seconds.

    Attributes:
      pipeline: for each pipeline.
      step: for each step in one.
    """

    pipeline: float
    step: float


RUNNERS = {
    "local": Fixed(0.0, 5e-4),
    "DirectRunner": Fixed(0.05, 0.1),
    "PrismRunner": Fixed(0.5, 0.1),
    "FlinkRunner": Fixed(3.0, 0.2),
    "SparkRunner": Fixed(4.0, 0.3),
    "DataflowRunner": Fixed(240.0, 5.0),
}
"""Before anything was measured: of warm job servers and of workers that run."""
ELSEWHERE = Fixed(3.0, 0.2)


@dataclass(frozen=True)
class Calibration:
    """How fast this machine is.

    Attributes:
      rates: of computing.
      read: bytes a second from memory to a shard.
      merge: bytes of partials a second.
      factors: by which what runs took differs from what these say, by one of `KINDS` or the name of
        a runner.
      measured: whether it was, and is not only usual.
    """

    rates: Rates = USUAL
    read: float = 8e9
    merge: float = 2e8
    factors: Mapping[str, float] = field(default_factory=dict)
    measured: bool = False

    def factor(self, kind: str) -> float:
        """By what to multiply seconds of this kind."""
        return self.factors.get(kind, 1.0)

    def fixed(self, runner: str) -> Fixed:
        """What a runner takes for itself."""
        name = "DirectRunner" if runner == "FnApiRunner" else runner
        found = RUNNERS.get(name, ELSEWHERE)
        times = self.factor(runner)
        return Fixed(times * found.pipeline, times * found.step)

    def mended(self, kind: str, predicted: float, measured: float) -> Calibration:
        """The same after a run that took `measured` seconds of a kind, and not `predicted`."""
        if min(predicted, measured) < MIN_SECONDS:
            return self
        before = math.log(self.factor(kind))
        new = before + (1 - MEMORY) * math.log(measured / predicted)
        bound = math.log(MAX_FACTOR)
        factor = math.exp(min(max(new, -bound), bound))
        return replace(self, factors={**self.factors, kind: factor})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, **asdict(self)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Calibration:
        """Undoes `to_json`.

        Raises:
          ValueError: it is something else.
        """
        if record.get("format") != FORMAT:
            raise ValueError(f"found format {record.get('format')!r}, expected {FORMAT}")
        rates, factors = record.get("rates"), record.get("factors")
        if not isinstance(rates, dict) or not isinstance(factors, dict):
            raise ValueError("found no rates and factors")
        numbers = {f.name: _number(rates.get(f.name)) for f in fields(Rates)}
        return cls(
            Rates(**numbers),
            _number(record.get("read")),
            _number(record.get("merge")),
            {str(kind): _number(factor) for kind, factor in factors.items()},
            record.get("measured") is True,
        )


def _number(found: Any) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(f"found {found!r:.100}, expected a number above 0")
    return float(found)


# --- the file

_known: dict[str, Calibration] = {}


def _name() -> str:
    return f"machine-{plan_cache.digest(plan_cache.machine())}"


def calibration() -> Calibration:
    """That of this machine, as far as it is known; nothing is measured."""
    name = _name()
    record = plan_cache.load(name)
    if record is not None:
        try:
            return Calibration.from_json(record)
        except ValueError as error:
            plan_cache.ignore(name, error)
    return _known.get(name, Calibration())


def calibrated() -> Calibration:
    """That of this machine, measured if it never was, in less than a second."""
    found = calibration()
    if not found.measured:
        rates, read, merge = measure()
        found = replace(found, rates=rates, read=read, merge=merge, factors={}, measured=True)
        remember(found)
    return found


def remember(found: Calibration) -> None:
    """Keeps a calibration, in this process and for others."""
    _known[_name()] = found
    plan_cache.store(_name(), {**found.to_json(), "machine": plan_cache.machine()})


# --- measuring


def measure(clock: Callable[[], float] = time.perf_counter) -> tuple[Rates, float, float]:
    """Rates of computing, bytes a second that are read, and bytes of partials that are merged."""

    def best(function: Callable[[], Any]) -> float:
        function()
        times = []
        for _ in range(_BEST_OF):
            start = clock()
            function()
            times.append(clock() - start)
        return max(min(times), 1e-9)

    float32 = np.dtype("float32")
    shard = best(lambda: np.asarray(_double(np.ones(8, float32))))
    x = np.ones((64, 32, 64), float32)
    layers, weights = 8, np.full((64, 64), 0.01, float32)
    dense = best(lambda: np.asarray(_layers(x, weights))) - shard
    flops = layers * (2.0 * 64 * 32 * 64 * 64 + 8 * x.size) / max(dense, 1e-6)
    large = np.ones(1 << 22, float32)
    nbytes = 3 * large.nbytes / max(best(lambda: np.asarray(_double(large))) - shard, 1e-6)
    few = best(lambda: np.asarray(_many(np.ones(8, float32)))) - shard
    copied = best(lambda: large.copy())
    partial = np.ones(1 << 16, float32)

    def merge() -> None:
        accumulator = make_accumulator("sum", float32, partial.size, mode="exact")
        accumulator.add(partial, 0)

    rates = Rates(
        _near(flops, USUAL.flops),
        _near(nbytes, USUAL.nbytes),
        _near(few / _MANY, USUAL.call),
        _near(shard, USUAL.shard),
    )
    usual = Calibration()
    copies, merges = large.nbytes / copied, partial.nbytes / best(merge)
    return rates, _near(copies, usual.read), _near(merges, usual.merge)


def _near(found: float, usual: float) -> float:
    """What was found, if it can be; a machine that others use too may say anything."""
    return min(max(found, usual / MAX_UNUSUAL), usual * MAX_UNUSUAL)


_MANY = 2000


@jax.jit
def _double(x: jax.Array) -> jax.Array:
    return x + x


@jax.jit
def _layers(x: jax.Array, w: jax.Array) -> jax.Array:
    """Eight layers of a network on 64 members, whose weights are their own from the second on."""
    each = jnp.broadcast_to(w, (x.shape[0], *w.shape))

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.einsum("nij,njk->nik", x, each)), None

    return jax.lax.scan(layer, x, None, length=8)[0]


@jax.jit
def _many(x: jax.Array) -> jax.Array:
    """Operations so small that only their number counts."""

    def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.cumsum(x)[::-1], None

    return jax.lax.scan(one, x, None, length=_MANY // 2)[0]
