"""How fast this machine is: measured in less than a second, kept in a file, mended after runs.

Nothing that changes bits depends on it: it is for what people are told, and for where small work
goes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.bodies.export import on_device
from beamjax.bodies.xla_threads import compute_device
from beamjax.interpreters.tuning import plan_cache
from beamjax.numerics.reducers import make_accumulator
from beamjax.plan.cost import USUAL, Cost, Rates

FORMAT = 3
KINDS = ("read", "compute", "merge", "compile")
"""What is mended by what runs measured, besides what runners take for themselves."""
MEMORY = 0.6
"""How much of an old factor stays when there is a new one."""
MAX_FACTOR = 100.0
MIN_SECONDS = 1e-9
"""Less is no time."""
MAX_UNUSUAL = 10.0
"""How far from the usual a machine may be."""
_RUNS = 5


@dataclass(frozen=True)
class Fixed:
    """What a runner takes for itself, in seconds.

    Attributes:
      pipeline: for each pipeline.
      step: for each step in one.
      shard: for each shard, whose range and partials are elements of Beam.
    """

    pipeline: float
    step: float
    shard: float = 2e-4


RUNNERS = {
    "local": Fixed(0.0, 3e-4, 0.0),
    "DirectRunner": Fixed(0.025, 0.05, 5e-5),
    "PrismRunner": Fixed(0.5, 0.1),
    "FlinkRunner": Fixed(3.0, 0.2),
    "SparkRunner": Fixed(4.0, 0.3),
    "DataflowRunner": Fixed(240.0, 5.0),
}
"""Before anything was measured: of warm job servers and of workers that run."""
ELSEWHERE = Fixed(3.0, 0.2)


UNMEASURED = replace(USUAL, call=1e-7, extra=2e10)
"""Rates of a machine that nobody measured, for what is told; `USUAL` is for what is chosen."""


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

    rates: Rates = UNMEASURED
    read: float = 8e9
    merge: float = 4e9
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
        return Fixed(times * found.pipeline, times * found.step, times * found.shard)

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
    return f"machine-{plan_cache.digest(FORMAT, plan_cache.machine())}"


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
        with on_device(compute_device(1)):  # with which shards are computed, unless somebody asks
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
    """Rates of computing, bytes a second that are read, and bytes of partials that are merged.

    What is timed looks like what bodies do, and is counted as they are.
    """
    from beamjax.interpreters.tuning.cost import body_cost

    def usually(function: Callable[[], Any], runs: int = _RUNS) -> float:
        """Seconds of a function, not the first time, and not at best."""
        function()
        times = []
        for _ in range(runs):
            start = clock()
            function()
            times.append(clock() - start)
        return max(statistics.median(times), MIN_SECONDS)

    def timed(function: Callable[..., Any], *args: Any) -> tuple[float, Cost]:
        """Seconds and cost of a jitted function."""
        cost = body_cost(jax.make_jaxpr(function)(*args))
        return usually(lambda: np.asarray(function(*args))) - call, cost

    float32 = np.dtype("float32")
    call = usually(lambda: np.asarray(_double(np.ones(8, float32))))
    large = np.ones(1 << 22, float32)
    moved, _ = timed(_pass_through, jax.device_put(large.reshape(-1, 1024)))
    few, counted = timed(_many, np.ones(512, float32))
    loose, cost = timed(_loose, np.arange(4096, dtype=np.uint32).reshape(2, -1))
    extra = cost.extra / max(loose - cost.flops / USUAL.flops, loose / 2)
    dense, cost = timed(_descend, np.ones((8, 64, 256), float32), np.ones((8, 64), float32))
    flops = cost.flops / max(dense - cost.extra / extra, dense / 2)
    copied = usually(lambda: large.copy())
    partial = np.ones(1 << 20, float32)  # smaller ones take no time to speak of

    def merge() -> None:
        accumulator = make_accumulator("sum", float32, partial.size, mode="exact")
        accumulator.add(partial, 0)
        accumulator.add(partial, 0)

    rates = Rates(
        _near(flops, USUAL.flops),
        _near(_TIMES * large.nbytes / max(moved, MIN_SECONDS), USUAL.nbytes),
        _near(few / counted.calls, UNMEASURED.call),
        _near(usually(_shards_run(), 3) / _SHARDS, USUAL.shard),
        _near(extra, UNMEASURED.extra),
    )
    usual = Calibration()
    read = _near(large.nbytes / copied, usual.read)
    return rates, read, _near(2 * 8 * partial.size / usually(merge, 3), usual.merge)


def _near(found: float, usual: float) -> float:
    """What was found, if it can be; a machine that others use too may say anything."""
    return min(max(found, usual / MAX_UNUSUAL), usual * MAX_UNUSUAL)


def _shards_run() -> Callable[[], Any]:
    """A run in this process of many shards that hardly compute."""
    import beamjax as bj

    @bj.program(members=None)
    def total(x: jax.Array) -> Any:
        return bj.reduce_sum(bj.map_fn(_double, x))

    options = {"shard_size": 8, "member_loop": "vmap", "local_threads": 1, "progress": False}
    x = np.ones((8 * _SHARDS, 4), np.float32)
    return lambda: bj.run(total, x, runner="local", options=options)


_MANY = 1000
_SHARDS = 200
_TIMES = 4


@jax.jit
def _double(x: jax.Array) -> jax.Array:
    return x + x


@jax.jit
def _pass_through(weights: jax.Array) -> jax.Array:
    """Reads more than the cache holds, and makes little, so that no memory is to be had for it."""

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + weights @ jnp.full(weights.shape[1], i, jnp.float32)

    return jax.lax.fori_loop(0, _TIMES, step, jnp.zeros(weights.shape[0]))


@jax.jit
def _descend(x: jax.Array, y: jax.Array) -> jax.Array:
    """Steps of gradient descent of eight members, in the cache."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        def step(_: int, w: jax.Array) -> jax.Array:
            return w - 1e-3 * ((x @ w - y) @ x)

        return jax.lax.fori_loop(0, 400, step, jnp.zeros(x.shape[1]))

    return jax.vmap(one)(x, y)


@jax.jit
def _loose(numbers: jax.Array) -> jax.Array:
    """What is no matrix product: a few random numbers of each member, and functions of them."""
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")

    def one(number: jax.Array) -> jax.Array:
        return jnp.exp(jax.random.uniform(jax.random.fold_in(key, number), (4,)))

    return jax.lax.map(jax.vmap(one), numbers)


@jax.jit
def _many(x: jax.Array) -> jax.Array:
    """Operations so small that their number counts; in a loop over less XLA makes one of all."""

    def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x[::-1] * (1 + 1e-9 * jnp.sum(x)), None

    return jax.lax.scan(one, x, None, length=_MANY)[0]
