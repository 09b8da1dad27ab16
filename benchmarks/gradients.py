"""Gradients by weights that members share, against the best function for `jax.jit`.

    python -m benchmarks.gradients --runners local DirectRunner

Each loss is that of one member. "jit" is the gradient of the mean loss, written with a batch of all
members or with `jax.vmap`, whichever is faster. All ways are timed in turns, in one process. The
output has the least of several times, and its ratio to "jit".
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj

RNG = np.random.default_rng(0)
Case = tuple[Callable[..., Any], Callable[..., Any], Any, tuple[Any, ...]]
"""The loss of a member, the mean loss of a batch, weights, and members."""


def normal(*shape: int, scale: float = 0.05) -> np.ndarray:
    return (scale * RNG.normal(size=shape)).astype(np.float32)


def layer(n: int, inputs: int, outputs: int) -> Case:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def mean(w: Any, x: Any) -> Any:
        return jnp.mean(jnp.sum(jnp.tanh(x @ w) ** 2, axis=1))

    return loss, mean, normal(inputs, outputs), (normal(n, inputs, scale=1),)


def classifier(network: Callable[..., Any], weights: Any, x: np.ndarray) -> Case:
    def loss(weights: Any, x: Any, label: Any) -> Any:
        return -jax.nn.log_softmax(network(weights, x[None])[0])[label]

    def mean(weights: Any, x: Any, labels: Any) -> Any:
        scores = jax.nn.log_softmax(network(weights, x))
        return -jnp.mean(jnp.take_along_axis(scores, labels[:, None], axis=1))

    return loss, mean, weights, (x, RNG.integers(0, 10, len(x)).astype(np.int32))


def perceptron() -> Case:
    def network(weights: Any, x: Any) -> Any:
        first, bias, second = weights
        return jax.nn.relu(x @ first + bias) @ second

    weights = normal(784, 256), normal(256), normal(256, 10)
    return classifier(network, weights, normal(4000, 784, scale=1))


def convolutional() -> Case:
    def convolved(x: Any, kernel: Any) -> Any:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    def network(weights: Any, x: Any) -> Any:
        first, second, last = weights
        y = jax.nn.relu(convolved(jax.nn.relu(convolved(x, first)), second))
        return y.reshape(len(x), -1) @ last

    weights = normal(3, 3, 1, 16), normal(3, 3, 16, 32), normal(28 * 28 * 32, 10)
    return classifier(network, weights, normal(500, 28, 28, 1, scale=1))


def transformer() -> Case:
    width = 128

    def loss(weights: Any, x: Any) -> Any:
        query, key, value, out, up, down = weights
        scores = (x @ query) @ jnp.matrix_transpose(x @ key) / np.float32(np.sqrt(width))
        y = x + jax.nn.softmax(scores) @ (x @ value) @ out
        return jnp.mean((y + jax.nn.gelu(y @ up) @ down) ** 2)

    weights = *(normal(width, width) for _ in range(4)), normal(width, 512), normal(512, width)
    return loss, loss, weights, (normal(200, 32, width, scale=1),)


CASES = {
    "5000 x 784 x 256": lambda: layer(5000, 784, 256),
    "4000 x 784 x 10": lambda: layer(4000, 784, 10),
    "1000 x 2300 x 2300": lambda: layer(1000, 2300, 2300),
    "perceptron": perceptron,
    "convolutions": convolutional,
    "transformer block": transformer,
}


def least_seconds(ways: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    least = [float("inf")] * len(ways)
    for turn in range(1 + repeats):
        for number, way in enumerate(ways):
            start = time.perf_counter()
            jax.block_until_ready(way())
            if turn:  # The first one compiles.
                least[number] = min(least[number], time.perf_counter() - start)
    return least


def ways_of(case: Case, runners: Sequence[str]) -> list[Callable[[], Any]]:
    """The gradient by two functions for `jax.jit`, then by each runner."""
    loss, mean, weights, members = case

    @bj.program(placements={"members": None})
    def program(weights: Any, members: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda *x: loss(weights, *x), members))

    def by_vmap(weights: Any, *members: Any) -> Any:
        return jnp.mean(jax.vmap(functools.partial(loss, weights))(*members))

    jits = [jax.jit(jax.grad(fn)) for fn in (mean, by_vmap)]
    on_runner = functools.partial(bj.run, jax.grad(program), weights, members)
    return [
        *(functools.partial(fn, weights, *members) for fn in jits),
        *(functools.partial(on_runner, runner=runner) for runner in runners),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--runners", nargs="+", default=["local", "DirectRunner"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    for name in args.cases:
        ways = ways_of(CASES[name](), args.runners)
        batch, vmap, *seconds = least_seconds(ways, args.repeats)
        jit = min(batch, vmap)
        print(f"{name:20} jit {1e3 * jit:7.1f} ms", end="")
        for runner, taken in zip(args.runners, seconds, strict=True):
            print(f"   {runner} {1e3 * taken:7.1f} ms ({taken / jit:.2f})", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
