"""What a round of a loop costs: `python benchmarks/rounds.py`.

Rounds of gradient descent on a small model, as one scan around placed operators and as a Python
loop of runs, on each executor. Each way is timed in turn, several times, in one process; the table
shows the shortest time and what a round costs against `jit`.

`--served RUNNER` measures the price of a round on resident workers instead: 64 shards a round, in a
scan, and in a session with a call a round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj

MEMBERS, FEATURES = 512, 16


@bj.program(placements={"clients": MEMBERS})
def one_round(weights, x):
    grads = bj.map_fn(lambda v: jnp.tanh(v @ weights) * v, x)
    return weights - 0.1 * bj.reduce_mean(grads)


def rounds_by_scan(count: int) -> Callable:
    def scan(weights, x):
        return jax.lax.scan(lambda w, _: (one_round(w, x), None), weights, None, length=count)[0]

    return scan


def rounds_by_while(count: int) -> Callable:
    def loop(weights, x):
        step = lambda state: (one_round(state[0], x), state[1] + 1)
        return jax.lax.while_loop(lambda state: state[1] < count, step, (weights, 0))[0]

    return loop


CHECKPOINTED = {
    "local: scan": "local: scan, a checkpoint a round",
    "DirectRunner: scan": "DirectRunner: scan, a checkpoint a round",
}
"""Ways that differ in nothing but their checkpoints."""


def price_of_rounds(runner: str, options: dict, rounds: int) -> None:
    """Prints the seconds of a round on resident workers, without those of the job."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(MEMBERS, FEATURES)).astype(np.float32))
    weights = jnp.zeros(FEATURES)
    options = {"shard_size": MEMBERS // 64, **options}

    def seconds(count: int) -> float:
        start = time.perf_counter()
        found = bj.run(rounds_by_scan(count), weights, x, runner=runner, options=options)
        spent = time.perf_counter() - start
        local = bj.run(
            rounds_by_scan(count), weights, x, runner="local",
            options={"shard_size": MEMBERS // 64},
        )  # fmt: skip
        np.testing.assert_array_equal(found, local)
        return spent

    seconds(2)
    few = seconds(2)
    scan = (seconds(2 + rounds) - few) / rounds
    calls = []
    with bj.session(runner, options) as session:
        w = weights
        for _ in range(rounds):
            start = time.perf_counter()
            w = session.run(one_round, w, x)
            calls.append(time.perf_counter() - start)
    print(f"{runner}: the job and 2 rounds {few:.2f} s")
    print(f"{rounds} rounds of a scan: {1000 * scan:.1f} ms each")
    print(f"{rounds} calls of a session: {1000 * np.median(calls):.1f} ms, the median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--served", metavar="RUNNER", help="only the price of a round on it")
    parser.add_argument("--options", type=json.loads, default={}, help="of --served, as JSON")
    parser.add_argument("--count", type=int, default=32, help="rounds of each loop")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.served:
        price_of_rounds(args.served, args.options, max(args.count, 200))
        return
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(MEMBERS, FEATURES)).astype(np.float32))
    weights = jnp.asarray(rng.normal(size=FEATURES).astype(np.float32))
    scan, loop = rounds_by_scan(args.count), rounds_by_while(args.count)

    def python_loop(runner: str) -> jax.Array:
        w = weights
        for _ in range(args.count):
            w = bj.run(one_round, w, x, runner=runner)
        return w

    run = lambda fn, runner, **options: bj.run(fn, weights, x, runner=runner, options=options)
    compiled = jax.jit(scan)
    folders, numbers = tempfile.TemporaryDirectory(), itertools.count()

    def saved(fn: Callable, runner: str, every: int) -> jax.Array:
        folder = f"{folders.name}/{next(numbers)}"  # a finished run would not be run again
        return run(fn, runner, checkpoint=folder, checkpoint_every=every)

    ways: dict[str, Callable[[], jax.Array]] = {
        "jit of the scan": lambda: jax.block_until_ready(compiled(weights, x)),
        "local: scan": lambda: run(scan, "local"),
        "local: scan, a checkpoint a round": lambda: saved(scan, "local", 1),
        "local: scan, a checkpoint every 8": lambda: saved(scan, "local", 8),
        "local: while_loop": lambda: run(loop, "local"),
        "local: a run a round": lambda: python_loop("local"),
        "DirectRunner: scan": lambda: run(scan, "DirectRunner"),
        "DirectRunner: scan, a checkpoint a round": lambda: saved(scan, "DirectRunner", 1),
        "DirectRunner: scan, a checkpoint every 8": lambda: saved(scan, "DirectRunner", 8),
        "DirectRunner: while_loop": lambda: run(loop, "DirectRunner"),
        "DirectRunner: a run a round": lambda: python_loop("DirectRunner"),
    }
    expected = ways["jit of the scan"]()
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in ways.items():  # compiles, and checks
        np.testing.assert_allclose(way(), expected, rtol=1e-4, err_msg=name)
    for _ in range(args.repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
    print(f"{args.count} rounds, {MEMBERS} members of {FEATURES} floats, jax {jax.__version__}\n")
    print(f"{'way':40} {'seconds':>8} {'ms a round':>11}")
    for name, times in seconds.items():
        print(f"{name:40} {min(times):8.3f} {1000 * min(times) / args.count:11.2f}")
    print("\nWith checkpoints against without, by the shortest times:")
    for plain, saving in CHECKPOINTED.items():
        ratio = min(seconds[saving]) / min(seconds[plain])
        print(f"{saving:40} {ratio:8.2f} x {plain}")
    folders.cleanup()


if __name__ == "__main__":
    main()
