"""What a fixed number of XLA threads costs: `python benchmarks/threads.py`.

Bits depend on how many threads XLA divides a computation among, so beamjax fixes the number
(`xla_threads`), whatever the machine has. The table shows each program with `runner="local"`, with
one thread, with one for each core, and with the default, against `jax.jit`, which uses all cores.
The ways are timed in turn in one process; the table shows the shortest times.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj
from beamjax.options import XLA_THREADS


def products(x: jax.Array) -> jax.Array:
    """Large products, which XLA divides among threads."""
    return jnp.tanh(x @ x.T) @ x


def singular_values(x: jax.Array) -> jax.Array:
    """A factorization by LAPACK."""
    return jnp.linalg.svd(x, compute_uv=False)


def elementwise(x: jax.Array) -> jax.Array:
    """Much arithmetic for each element."""
    return jax.lax.fori_loop(0, 20, lambda _, v: jnp.sin(v) + 0.1, x).sum(0)


CASES: Mapping[str, tuple[Callable[..., Any], int, int, int]] = {
    "products, 64 members": (products, 64, 512, 8),
    "products, 8 large members": (products, 8, 1024, 8),
    "singular values, 64 members": (singular_values, 64, 128, 8),
    "singular values, 8 members": (singular_values, 8, 384, 8),
    "elementwise, 64 members": (elementwise, 64, 256, 8),
    "elementwise, 8 large members": (elementwise, 8, 1024, 8),
}
"""Of each: the body, the members, the rows and columns of a member, and the members of a shard."""


def best(ways: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The shortest time of each way in seconds, after one call that is not counted."""
    for way in ways.values():
        way()
    found = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for name, way in ways.items():
            start = time.perf_counter()
            jax.block_until_ready(way())
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"{'':30} {'jit':>8}  1 thread  {cores} threads  {XLA_THREADS} threads")
    for title, (body, n, width, shard_size) in CASES.items():
        x = np.random.default_rng(0).normal(size=(n, width, width)).astype(np.float32)

        @bj.program(clients=n)
        def program(x, body=body):  # type: ignore[no-untyped-def]
            return bj.reduce_sum(bj.map_fn(body, x))

        def local(threads, program=program, x=x, size=shard_size):  # type: ignore[no-untyped-def]
            options = {"xla_threads": threads, "shard_size": size}
            return lambda: bj.run(program, x, runner="local", options=options)

        jitted = jax.jit(program)
        ways = {"jit": lambda x=x, f=jitted: f(x)}
        ways |= {str(count): local(count) for count in (1, cores, XLA_THREADS)}
        jit, *others = best(ways, args.repeats).values()
        ratios = "".join(f"{seconds / jit:8.2f}x " for seconds in others)
        print(f"{title:30} {jit:7.3f}s {ratios}")


if __name__ == "__main__":
    main()
