"""What exact sums cost: `python benchmarks/reductions.py`.

A wide mean (every member gives a vector) end to end, with exact sums and with
`reduction="fast"`, and the adds alone on the partials of the shards: exact, fast, and NumPy's
in-place add. The ways are timed in turn in one process; the table shows the shortest times.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.numerics.reducers import make_accumulator
from beamjax.options import parse_options
from beamjax.plan.shard import Shard, Shards
from beamjax.plan.steps import Map
from beamjax.runtime.ordered_pool import usual_threads
from beamjax.runtime.shard_executor import LoadedPass, ShardExecutor


def timed(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """The shortest time of each way, in seconds, after one call that is not counted."""
    for way in ways.values():
        way()
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def show(title: str, best: dict[str, float], base: str) -> None:
    """Prints a table of times and their ratios to those of `base`."""
    print(f"\n{title}")
    for name, seconds in best.items():
        print(f"  {name:32} {seconds:8.3f} s {seconds / best[base]:7.2f} x")


def wide(shards: int, width: int) -> None:
    """Partials of 100 MB: what merging them takes, against as many in-place adds of NumPy."""
    # What a job takes besides its bodies (its `compute`) and compiling is the reduction: adding up,
    # sending, merging, rounding, and bringing the result home. The adds of NumPy are timed right
    # before and after each job; the ratio is to their mean. A small job before pays for imports. A
    # loop over the jitted body shows what of it nobody can save who gets partials from JAX. With
    # several threads, as usual, bodies are timed alone, in as many threads that do nothing else.
    w = jax.device_put(np.random.default_rng(0).normal(size=width).astype(np.float32))
    members = shards * 8

    @bj.program(placements={"i": members})
    def total(w, i):
        one = lambda k, v: jnp.where(k % 8 == 0, v, 0.0)
        return bj.reduce_sum(bj.map_fn(one, (i, bj.broadcast(w))))

    rows, sums = [np.array(w), np.array(w)], np.ones(width, np.float32)
    for row in rows:
        row.flags.writeable = False  # as what comes from JAX is

    def adds() -> float:
        start = time.perf_counter()
        for k in range(shards):
            np.add(sums, rows[k % 2], out=sums)
        return time.perf_counter() - start

    print("one add of 100 MB, nanoseconds of a core for each value, and of the clock")
    for name, add in {
        "NumPy, in place": functools.partial(np.add, sums, out=sums),
        "fast": make_accumulator("sum", np.dtype("float32"), width, mode="fast").add,
        "exact": make_accumulator("sum", np.dtype("float32"), width, mode="exact").add,
    }.items():
        add(rows[0])
        cpu, clock = time.process_time(), time.perf_counter()
        for k in range(8):
            add(rows[k % 2])
        spent = [time.process_time() - cpu, time.perf_counter() - clock]
        print(f"  {name:22} " + " ".join(f"{each / 8 / width * 1e9:8.2f}" for each in spent))
    load = os.getloadavg()[0]
    shard = jax.jit(lambda w, i: sum(jnp.where(k % 8 == 0, w, 0.0) for k in i))
    print(f"{shards} shards, partials of {width * 4 / 1e6:.0f} MB; load {load:.1f}")
    print(f"  {'':22} {'job':>8} {'bodies':>8} {'merge':>8} {'rest':>8} {'adds':>8} {'ratio':>7}")
    by_hand(shard, w, sums, shards, adds)
    for runner in ("local", "DirectRunner"):
        bj.run(total, jnp.zeros(9), bj.from_range(members), runner=runner)
        for mode in ("fast", "exact"):
            base = adds()
            # One shard after the other, so that what is not a body can be told from the bodies.
            options = {"reduction": mode, "shard_size": 8, "local_threads": 1}
            start = time.perf_counter()
            job = bj.launch(total, w, bj.from_range(members), runner=runner, options=options)
            job.result()
            seconds = time.perf_counter() - start
            base = (base + adds()) / 2
            done = job.progress().done
            rest = seconds - done.compute - done.compile
            line(f"{runner}, {mode}", seconds, done.compute, done.merge, rest, base)
    for mode in ("fast", "exact"):
        options = {"reduction": mode, "shard_size": 8}
        base, alone = adds(), bodies_alone(total, w, members, options)
        start = time.perf_counter()
        job = bj.launch(total, w, bj.from_range(members), runner="local", options=options)
        job.result()
        seconds = time.perf_counter() - start
        base = (base + adds()) / 2
        line(f"local, {mode}, threads", seconds, alone, job.progress().done.merge,
             seconds - alone, base)  # fmt: skip


def bodies_alone(
    program: Callable[..., object], w: jax.Array, members: int, options: dict[str, object]
) -> float:
    """Seconds in which the usual threads compute all shards of the one pass, and forget them."""
    call = flatten_call(program, (w, bj.from_range(members)))
    plan = plan_for(call, parse_options(options)).plan
    (step,) = (step for step in plan.steps if isinstance(step, Map))
    served = {name: np.asarray(w) for name in step.broadcasts}
    execute = ShardExecutor(LoadedPass(plan, step), served)

    def compute(shard: Shard) -> None:
        execute(shard, [np.arange(shard.start, shard.start + shard.count, dtype=np.int32)])

    every = list(Shards(members, 8))
    compute(every[0])
    with ThreadPoolExecutor(usual_threads()) as pool:
        start = time.perf_counter()
        list(pool.map(compute, every))
        return time.perf_counter() - start


def by_hand(
    shard: Callable[..., jax.Array],
    w: jax.Array,
    sums: np.ndarray,
    shards: int,
    adds: Callable[[], float],
) -> None:
    """Adds shards with NumPy; its rest is to add partials and to let go of them."""
    np.asarray(shard(w, np.arange(8)))
    bodies, base, start = 0.0, adds(), time.perf_counter()
    for k in range(shards):
        before = time.perf_counter()
        partial = np.asarray(shard(w, np.arange(8 * k, 8 * k + 8)))
        bodies += time.perf_counter() - before
        np.add(sums, partial, out=sums)
        del partial
    seconds = time.perf_counter() - start
    base = (base + adds()) / 2
    line("NumPy, by hand", seconds, bodies, seconds - bodies, seconds - bodies, base)


def line(name: str, *seconds: float) -> None:
    """A row of the table; the ratio is that of the last two."""
    cells = " ".join(f"{each:7.2f}s" for each in seconds)
    print(f"  {name:22} {cells} {seconds[-2] / seconds[-1]:6.1f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=512)
    parser.add_argument("--width", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--wide", action="store_true", help="only 64 shards of 100 MB")
    args = parser.parse_args()
    if args.wide:
        wide(64, 25_000_000)
        return
    n, width = args.members, args.width
    print(f"{n} members, {width} floats each, jax {jax.__version__}")

    @bj.program(placements={"clients": n})
    def mean(weights, x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(weights * v), x))

    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=width).astype(np.float32))
    x = rng.normal(size=n).astype(np.float32)

    def run(runner: str, reduction: str) -> Callable[[], object]:
        options = {"reduction": reduction}
        return lambda: bj.run(mean, weights, x, runner=runner, options=options)

    ways = {
        f"{runner}, {reduction}": run(runner, reduction)
        for runner in ("local", "DirectRunner")
        for reduction in ("fast", "exact")
    }
    show("The whole program", timed(ways, args.repeats), "local, fast")

    partials = rng.normal(size=(max(n // 8, 2), width)).astype(np.float32)

    def add(mode: str) -> Callable[[], object]:
        def way() -> object:
            accumulator = make_accumulator("sum", np.dtype("float32"), width, mode=mode)
            for index, partial in enumerate(partials):
                accumulator.add(partial, index)
            return accumulator.total(0, width, np.dtype("float32"))

        return way

    def plain() -> object:
        total = np.zeros(width, np.float32)
        for partial in partials:
            np.add(total, partial, out=total)
        return total

    title = f"Only the adds, {len(partials)} partials"
    ways = {"NumPy, in place": plain, "fast": add("fast"), "exact": add("exact")}
    show(title, timed(ways, args.repeats), "NumPy, in place")


if __name__ == "__main__":
    main()
