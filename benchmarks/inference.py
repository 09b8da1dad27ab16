"""Predictions of a JAX model in Beam: `JaxModelHandler` against hand-written DoFns and `bj.run`.

    python -m benchmarks.inference --examples 20000

All ways compute a network of 784, 512, 512 and 10 units on the same examples, on the embedded
DirectRunner, in turns, and count what they predict. All read the examples from one .npy file, the
pipelines in blocks. "per element" is a DoFn that calls a jitted function on each element; "batches"
one that calls it on what `BatchElements` gives, whose sizes differ, so JAX compiles it for each.
`bj.run` keeps its predictions in files. The output has the least of several times, examples a
second, and the ratio to `JaxModelHandler`.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
from apache_beam.ml.inference.base import RunInference
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import beamjax as bj
from beamjax.pipelines import JaxModelHandler

UNITS = (784, 512, 512, 10)
BATCH, BLOCK = 64, 256


def network(params: Sequence[Any], x: Any) -> Any:
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights)
    return jnp.argmax(x @ params[-1], axis=-1)


class PerElement(beam.DoFn):
    def __init__(self, params: Sequence[np.ndarray]):
        self.params = params

    def setup(self) -> None:
        self.model = jax.jit(network)
        self.on_device = jax.device_put(self.params)

    def process(self, x: np.ndarray) -> Iterable[int]:
        yield int(self.model(self.on_device, x))


class PerBatch(PerElement):
    def process(self, batch: Sequence[np.ndarray]) -> Iterable[int]:
        yield from np.asarray(self.model(self.on_device, np.stack(batch)))


def read_block(path: str, first: int) -> Iterable[np.ndarray]:
    return np.load(path, mmap_mode="r")[first : first + BLOCK]


def counted(transform: Callable[[Any], Any], path: str) -> None:
    found: list[int] = []
    blocks = range(0, len(np.load(path, mmap_mode="r")), BLOCK)
    with beam.Pipeline(FnApiRunner()) as pipeline:
        examples = pipeline | beam.Create(blocks) | beam.FlatMap(partial(read_block, path))
        results = transform(examples)
        results | beam.combiners.Count.Globally() | beam.Map(found.append)


def ways(params: Sequence[np.ndarray], examples: np.ndarray, folder: str) -> dict[str, Any]:
    path = f"{folder}/examples.npy"
    np.save(path, examples)

    @bj.program(placements={"examples": None})
    def program(x: Any) -> Any:
        return bj.map_fn(lambda one: network(params, one), x)

    options = {"keep": "placed", "work_folder": folder}
    batches = beam.BatchElements(min_batch_size=1, max_batch_size=BATCH)
    handler = JaxModelHandler(network, params, examples[0], batch_sizes=[1, 8, BATCH])
    return {
        "JaxModelHandler": lambda: counted(lambda xs: xs | RunInference(handler), path),
        "per element": lambda: counted(lambda xs: xs | beam.ParDo(PerElement(params)), path),
        "batches": lambda: counted(lambda xs: xs | batches | beam.ParDo(PerBatch(params)), path),
        "bj.run": lambda: bj.run(program, bj.from_npy(path), options=options),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=20_000)
    parser.add_argument("--times", type=int, default=3)
    flags = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    params = [(0.05 * rng.normal(size=shape)).astype("f4") for shape in itertools.pairwise(UNITS)]
    examples = rng.normal(size=(flags.examples, UNITS[0])).astype("f4")
    with tempfile.TemporaryDirectory() as folder:
        calls = ways(params, examples, folder)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(flags.times):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    least = {name: min(each) for name, each in seconds.items()}
    print(f"{'':16} {'seconds':>8} {'examples/s':>11} {'ratio':>6}")
    for name, each in least.items():
        ratio = each / least["JaxModelHandler"]
        print(f"{name:16} {each:8.2f} {flags.examples / each:11.0f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
