"""Times passes on shards of made-up members, with the executor that runs use."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from beamjax.bodies.xla_threads import compute_device
from beamjax.errors import BeamjaxError
from beamjax.options import Options
from beamjax.plan.merging import is_in_files
from beamjax.plan.shard import Shard
from beamjax.plan.steps import Map, Plan, ValueType
from beamjax.runtime.shard_executor import ShardExecutor, add_computed, new_accumulators

REPEATED_SECONDS = 0.1
"""Seconds for which the runs of a shard are repeated; the best time counts."""
MIN_RUNS, MAX_RUNS = 4, 30
"""Bounds of the number of timed runs of a shard."""


class ProbeError(BeamjaxError):
    """A pass could not be timed."""


def shard_seconds(plan: Plan, step: Map, options: Options, limit: float) -> float:
    """The shortest time to compute a shard of a pass and merge its partials, in seconds.

    Args:
      plan: the plan of the pass.
      step: the pass.
      options: options of the run; `reduction` and `xla_threads` are used.
      limit: seconds that the probe may take, with compiling.

    Raises:
      ProbeError: the body fails on made-up members, or takes longer than `limit`.
    """
    return run_with_limit(lambda: _timed(plan, step, options, limit), limit)


def run_with_limit(function: Callable[[], float], limit: float) -> float:
    """Calls a function in a daemon thread and returns its result.

    If it takes longer than `limit` seconds, its thread is abandoned and ends by itself.

    Raises:
      ProbeError: the function raises an error, or takes longer.
    """
    found: list[float] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            found.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, name="beamjax probe", daemon=True)
    thread.start()
    thread.join(limit)
    if errors:
        reason = f"{type(errors[0]).__name__}: {errors[0]}".split("\n")[0]
        raise ProbeError(f"a body fails on made-up members ({reason:.200})") from errors[0]
    if not found:
        raise ProbeError(f"a body takes longer than {limit:.1f} s on made-up members")
    return found[0]


def _timed(plan: Plan, step: Map, options: Options, limit: float) -> float:
    mode: Any = options.reduction
    began = time.perf_counter()
    rng = np.random.default_rng(0)
    size = plan.shard_sizes[step.placement]
    served = {name: random_array(rng, plan.values[name], ()) for name in step.broadcasts}
    operands = [random_array(rng, plan.values[name], (size,)) for name in step.operands]
    if step.guard is not None and step.guard.reads:
        operands[-1] = np.ones(size, np.bool_)
    execute = ShardExecutor(plan, step, served, compute_device(options.xla_threads))
    merges = bool(step.buffers) and not is_in_files(step, mode)
    accumulators = new_accumulators(step, mode) if merges else []

    def run(number: int) -> None:
        shard = Shard(number, number * size, size)
        done = execute(shard, operands)
        if merges:
            buffers = zip(step.buffers, accumulators, done.partials, strict=False)
            add_computed(list(buffers), [], shard, done.left_out)

    run(0)  # Compiles, so it is not timed.
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or (sum(seconds) < REPEATED_SECONDS and len(seconds) < MAX_RUNS):
        start = time.perf_counter()
        run(len(seconds) + 1)
        end = time.perf_counter()
        seconds.append(end - start)
        if end - began + 2 * seconds[-1] > limit:
            break
    return min(seconds)


def random_array(
    rng: np.random.Generator, value: ValueType, leading: tuple[int, ...]
) -> np.ndarray:
    """A random array for a value: normally distributed floats, small integers, arbitrary keys.

    Zeros are not representative: sparse or denormal values take less or more time than usual ones.
    """
    shape, dtype = (*leading, *value.shape), np.dtype(value.dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(dtype)
    if value.key_impl is not None or dtype.name in ("uint8", "uint32"):
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    if dtype.kind in "iu" or "int" in dtype.name:
        return rng.integers(0, 2 if "int2" in dtype.name else 4, shape).astype(dtype)
    normal = rng.standard_normal(shape)
    if dtype.kind == "c":
        return (normal + 1j * rng.standard_normal(shape)).astype(dtype)
    return normal.astype(np.float32).astype(dtype)
