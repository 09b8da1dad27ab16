"""Measures how fast this machine computes, reads and merges, in less than a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from beamjax.bodies.export import on_device
from beamjax.bodies.xla_threads import compute_device
from beamjax.diagnostics.calibration import (
    MIN_SECONDS,
    UNMEASURED,
    Calibration,
    calibration,
    remember,
)
from beamjax.execution import run
from beamjax.interpreters.cutting.cost import body_cost
from beamjax.numerics.reducers import make_accumulator
from beamjax.ops.operators import map_fn, program, reduce_sum
from beamjax.options import XLA_THREADS
from beamjax.plan.cost import USUAL, Cost, Rates

MAX_UNUSUAL = 10.0
"""Measured rates are clipped to within this factor of the default, as a machine may be busy."""
_RUNS = 5
"""Number of timed calls of a function, of which the median counts."""


def calibrated() -> Calibration:
    """The rates of this machine, which are measured if that was not done before."""
    found = calibration()
    if not found.measured:
        with on_device(compute_device(XLA_THREADS)):
            found = measure()
        remember(found)
    return found


def measure() -> Calibration:
    """Measures the rates of this machine.

    The timed functions resemble bodies, and their cost is counted in the same way.
    """

    def usually(function: Callable[[], Any], runs: int = _RUNS) -> float:
        """A typical time of a function in seconds, without its first call."""
        function()
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
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
    partial = np.ones(1 << 20, float32)  # merging a smaller one is too fast to measure

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
    merged = _near(2 * 8 * partial.size / usually(merge, 3), usual.merge)
    return Calibration(rates, read, merged, measured=True)


def _near(found: float, usual: float) -> float:
    """Clips a measured rate: on a shared machine, measurements may be far off."""
    return min(max(found, usual / MAX_UNUSUAL), usual * MAX_UNUSUAL)


def _shards_run() -> Callable[[], Any]:
    """Returns a function that runs a program in this process, with many shards of little work."""

    @program(members=None)
    def total(x: jax.Array) -> Any:
        return reduce_sum(map_fn(_double, x))

    options = {"shard_size": 8, "member_loop": "vmap", "local_threads": 1, "progress": False}
    x = np.ones((8 * _SHARDS, 4), np.float32)
    return lambda: run(total, x, runner="local", options=options)


_MANY = 1000
"""Number of small operations in `_many`."""
_SHARDS = 200
"""Number of shards in the run that is timed."""
_TIMES = 4
"""Number of passes through the weights in `_pass_through`."""


@jax.jit
def _double(x: jax.Array) -> jax.Array:
    return x + x


@jax.jit
def _pass_through(weights: jax.Array) -> jax.Array:
    """Reads more than a cache holds, and returns little, so that allocation takes no time."""

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + weights @ jnp.full(weights.shape[1], i, jnp.float32)

    return jax.lax.fori_loop(0, _TIMES, step, jnp.zeros(weights.shape[0]))


@jax.jit
def _descend(x: jax.Array, y: jax.Array) -> jax.Array:
    """Steps of gradient descent of eight members, whose data fit in the cache."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        def step(_: int, w: jax.Array) -> jax.Array:
            return w - 1e-3 * ((x @ w - y) @ x)

        return jax.lax.fori_loop(0, 400, step, jnp.zeros(x.shape[1]))

    return jax.vmap(one)(x, y)


@jax.jit
def _loose(numbers: jax.Array) -> jax.Array:
    """Operations other than matrix products: random numbers for each member, and their exp."""
    key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")

    def one(number: jax.Array) -> jax.Array:
        return jnp.exp(jax.random.uniform(jax.random.fold_in(key, number), (4,)))

    return jax.lax.map(jax.vmap(one), numbers)


@jax.jit
def _many(x: jax.Array) -> jax.Array:
    """Many small operations, whose time is that of starting them; XLA does not fuse a loop."""

    def one(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x[::-1] * (1 + 1e-9 * jnp.sum(x)), None

    return jax.lax.scan(one, x, None, length=_MANY)[0]
