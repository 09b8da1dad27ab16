"""The default shard size against fixed ones, on ten bodies.

    python -m benchmarks.shard_size
    python -m benchmarks.shard_size MAML GRU --repeats=9

Each program runs with `runner="local"` and the default, with shards of 8, 32, 128 and 512 members,
each once with all members of a shard at once and once one by one, and with `jax.jit`. All ways are
timed in turn in one process; the table shows the shortest times, those of the other ways as ratios
to the best fixed one. With `--cpu` they are times of the processor, for machines that others use.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import beamjax as bj

RNG = np.random.default_rng(0)
SIZES, LOOPS = (8, 32, 128, 512), ("vmap", "loop")
Case = tuple[Callable[..., Any], tuple[Any, ...]]
"""A program and its arguments."""


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * RNG.standard_normal(shape)).astype(np.float32)


def mean_of(body: Callable[..., Any], weights: Any, members: Any) -> Case:
    """The mean of `body(weights, *member)` over the members."""

    @bj.program(placements={"members": None})
    def program(weights: Any, members: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(functools.partial(body, weights), members))

    return program, (weights, members)


def slope_of(loss: Callable[..., Any], weights: Any, members: Any) -> Case:
    """The gradient of the mean of `loss(weights, *member)` by the weights."""
    program, arguments = mean_of(loss, weights, members)
    return jax.grad(program), arguments


def layers(*widths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(normal(a, b, scale=a**-0.5), normal(b)) for a, b in itertools.pairwise(widths)]


def network(weights: Any, x: jax.Array) -> jax.Array:
    *inner, (last, bias) = weights
    for w, b in inner:
        x = jnp.tanh(x @ w + b)
    return x @ last + bias


def maml() -> Case:
    """The slope of a loss after three steps on each of 2,000 tasks of ten points."""

    def loss(weights: Any, points: Any) -> jax.Array:
        return jnp.mean((network(weights, points[0]) - points[1]) ** 2)

    def adapted(weights: Any, task: Any) -> jax.Array:
        for _ in range(3):
            slope = jax.grad(loss)(weights, task["train"])
            weights = jax.tree.map(lambda w, s: w - 0.01 * s, weights, slope)
        return loss(weights, task["test"])

    tasks = {name: (normal(2000, 10, 1), normal(2000, 10, 1)) for name in ("train", "test")}
    return slope_of(adapted, layers(1, 40, 40, 1), tasks)


def attention() -> Case:
    """A block of attention and a perceptron on 64 positions of width 64."""

    def block(weights: Any, x: jax.Array) -> jax.Array:
        query, key, value, out, up, down = weights
        heads = lambda w: (x @ w).reshape(64, 4, 16).swapaxes(0, 1)
        scores = heads(query) @ jnp.matrix_transpose(heads(key)) / np.float32(4)
        mixed = (jax.nn.softmax(scores) @ heads(value)).swapaxes(0, 1).reshape(64, 64)
        y = x + mixed @ out
        return jnp.mean(y + jax.nn.gelu(y @ up) @ down, axis=0)

    weights = *(normal(64, 64, scale=0.1) for _ in range(4)), normal(64, 256), normal(256, 64)
    return mean_of(block, weights, normal(1000, 64, 64))


def gru() -> Case:
    """The last state of a recurrent network after 50 inputs."""

    def last(weights: Any, xs: jax.Array) -> jax.Array:
        reset, update, new = weights

        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            xh = jnp.concatenate([x, h])
            r, z = jax.nn.sigmoid(xh @ reset), jax.nn.sigmoid(xh @ update)
            return (1 - z) * h + z * jnp.tanh(jnp.concatenate([x, r * h]) @ new), None

        return lax.scan(step, jnp.zeros(64), xs)[0]

    return mean_of(last, [normal(96, 64, scale=0.1) for _ in range(3)], normal(4000, 50, 32))


def convolution() -> Case:
    """The slope of the loss of two convolutions and a layer."""

    def loss(weights: Any, image: jax.Array) -> jax.Array:
        x, numbers = image[None], ("NHWC", "HWIO", "NHWC")
        for kernel in weights[:2]:
            convolved = lax.conv_general_dilated(
                x, kernel, (2, 2), "SAME", dimension_numbers=numbers
            )
            x = jax.nn.relu(convolved)
        return jnp.mean((x.reshape(-1) @ weights[2]) ** 2)

    weights = normal(3, 3, 1, 16), normal(3, 3, 16, 32), normal(7 * 7 * 32, 10, scale=0.01)
    return slope_of(loss, weights, normal(2000, 28, 28, 1))


def ode() -> Case:
    """200 steps of Runge and Kutta of an equation with three unknowns."""

    def flow(weights: Any, x: jax.Array) -> jax.Array:
        sigma, rho, beta = weights
        return jnp.stack(
            [sigma * (x[1] - x[0]), x[0] * (rho - x[2]) - x[1], x[0] * x[1] - beta * x[2]]
        )

    def solved(weights: Any, x: jax.Array) -> jax.Array:
        f = functools.partial(flow, weights)

        def step(_: Any, x: jax.Array) -> jax.Array:
            h = np.float32(0.01)
            k1 = f(x)
            k2 = f(x + h / 2 * k1)
            k3 = f(x + h / 2 * k2)
            return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3))

        return lax.fori_loop(0, 200, step, x)

    return mean_of(solved, np.float32([10, 28, 8 / 3]), normal(20_000, 3))


def sgd() -> Case:
    """Ten steps of linear regression, each on all rows of the member."""

    def trained(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        loss = lambda w: jnp.mean((x @ w - y) ** 2)
        return lax.fori_loop(0, 10, lambda _, w: w - 0.1 * jax.grad(loss)(w), w)

    return mean_of(trained, normal(64), (normal(4000, 32, 64), normal(4000, 32)))


def perceptron() -> Case:
    """The slope of the loss of a network with weights that all members share."""

    def loss(weights: Any, x: jax.Array, label: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(network(weights, x))[label]

    examples = normal(4000, 784), RNG.integers(0, 10, 4000).astype(np.int32)
    return slope_of(loss, layers(784, 256, 10), examples)


def kernel() -> Case:
    """The mean of a Gaussian kernel between 64 points and 64 others."""

    def energy(points: jax.Array, x: jax.Array) -> jax.Array:
        squares = jnp.sum((x[:, None] - points) ** 2, axis=-1)
        return jnp.mean(jnp.exp(-squares), axis=0)

    return mean_of(energy, normal(64, 3), normal(4000, 64, 3))


def inverse() -> Case:
    """The inverse of a matrix of 48 x 48."""

    def solved(ridge: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.linalg.inv(x @ x.T + ridge)

    return mean_of(solved, 5 * np.eye(48, dtype=np.float32), normal(2000, 48, 48))


def elementwise() -> Case:
    """Twenty elementwise operations on 1,000 numbers."""

    def chain(scale: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(10):
            x = jnp.tanh(x * scale) + x
        return jnp.sum(x)

    return mean_of(chain, np.float32(0.5), normal(20_000, 1000))


CASES: Mapping[str, Callable[[], Case]] = {
    "MAML": maml,
    "attention": attention,
    "GRU": gru,
    "convolution": convolution,
    "ODE": ode,
    "SGD": sgd,
    "perceptron": perceptron,
    "kernel": kernel,
    "inverse": inverse,
    "elementwise": elementwise,
}


def ways_of(case: Case) -> dict[str, Callable[[], Any]]:
    """`jit`, the default, and each fixed size with and without the loop over members."""
    program, arguments = case
    run = functools.partial(bj.run, program, *arguments, runner="local")
    ways: dict[str, Callable[[], Any]] = {
        "jit": functools.partial(jax.jit(program), *map(jnp_tree, arguments)),
        "default": run,
    }
    for loop, size in itertools.product(LOOPS, SIZES):
        options = {"shard_size": size, "member_loop": loop}
        ways[f"{size} {loop}"] = functools.partial(run, options=options)
    return ways


def default_of(case: Case) -> str:
    """The default: members per shard, and how the passes compute them."""
    program, arguments = case
    choices = bj.explain(program, *arguments).to_json()["choices"]
    found = dict.fromkeys(
        choice["chosen"] for choice in choices if choice["option"] in ("shard_size", "member_loop")
    )
    return ", ".join(found).replace(" members", "")


def jnp_tree(tree: Any) -> Any:
    return jax.tree.map(jnp.asarray, tree)


def least_seconds(
    ways: Mapping[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]
) -> dict[str, float]:
    """The shortest time of each way; the first call, which compiles, does not count."""
    for way in ways.values():
        jax.block_until_ready(way())
    least = dict.fromkeys(ways, math.inf)
    for _ in range(repeats):
        for name, way in ways.items():
            start = clock()
            jax.block_until_ready(way())
            least[name] = min(least[name], clock() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="times of the processor")
    args = parser.parse_args()
    clock = time.process_time if args.cpu else time.perf_counter
    fixed = [f"{size} {loop}" for loop, size in itertools.product(LOOPS, SIZES)]
    print(f"{'':12} {'best fixed':>21} {'default':>27} {'jit':>6}", *(f"{x:>8}" for x in fixed))
    ratios = []
    for name in args.cases:
        case = CASES[name]()
        seconds = least_seconds(ways_of(case), args.repeats, clock)
        best = min(fixed, key=seconds.__getitem__)
        ratios.append(seconds["default"] / seconds[best])
        print(
            f"{name:12} {1e3 * seconds[best]:8.1f} ms {best:>9}",
            f"{ratios[-1]:5.2f} {default_of(case):>21}",
            *(f"{seconds[way] / seconds[best]:{width}.2f}" for way, width in
              [("jit", 6), *((way, 8) for way in fixed)]),
            flush=True,
        )  # fmt: skip
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"\ndefault against the best fixed one: {mean:.2f} on average, {max(ratios):.2f} at most")


if __name__ == "__main__":
    main()
