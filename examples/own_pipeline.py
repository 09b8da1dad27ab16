"""A beamjax program inside a Beam pipeline, and a Beam pipeline as the data of `bj.run`.

scikit-learn's diabetes data is in text files, of which some lines are broken. The first pipeline
reads and parses them; a program as a `PTransform` computes the sums for a least-squares fit, and
later transforms use its result. Then `bj.from_beam` writes the rows of the same pipeline to files,
as members of a program with many rounds of gradient descent. Both results agree with NumPy.

    python examples/own_pipeline.py --rounds=2000 --runner=DirectRunner

Other flags go to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import beamjax as bj

Rows = dict[str, jax.Array]  # "id" (n,), "x" (n, 11), the last one 1, and "y" (n,)


@bj.program(placements={"patients": None})
def sums(rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The matrix and the right-hand side of the normal equations."""
    parts = bj.map_fn(lambda row: (jnp.outer(row["x"], row["x"]), row["x"] * row["y"]), rows)
    return bj.reduce_sum(parts)


@bj.program(placements={"patients": None})
def descend(weights: jax.Array, rate: jax.Array, rounds: jax.Array, rows: Rows) -> jax.Array:
    """Rounds of gradient descent with momentum."""

    def loss(w: jax.Array) -> jax.Array:
        return bj.reduce_mean(bj.map_fn(lambda row: (row["x"] @ w - row["y"]) ** 2, rows))

    def step(state: tuple[jax.Array, jax.Array], _: Any) -> tuple[Any, None]:
        w, momentum = state
        momentum = 0.95 * momentum - rate * jax.grad(loss)(w)
        return (w + momentum, momentum), None

    return jax.lax.scan(step, (weights, jnp.zeros_like(weights)), rounds)[0][0]


def parsed(line: str) -> Iterator[dict[str, Any]]:
    """The row of a line; none if the line is broken."""
    try:
        number, *measured, y = map(float, line.split(","))
    except ValueError:
        return
    x = np.array([*measured, 1], np.float32)
    yield {"id": np.int32(number), "x": x, "y": np.float32(y)}


def write_lines(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Writes the data with broken lines in between; returns the rows for the comparison."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(axis=0), (y - y.mean()) / y.std()
    lines = [",".join(map(repr, [i, *row.tolist(), float(y[i])])) for i, row in enumerate(x)]
    for part in range(3):
        text = "\n".join([*lines[part::3], "broken,,line", ""])
        (folder / f"part-{part}.csv").write_text(text, encoding="utf-8")
    return np.append(x, np.ones((len(x), 1)), axis=1), y


def main(argv: Sequence[str] | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the weights by `transform`, by `run`, and by NumPy."""
    parser = argparse.ArgumentParser(description="Pipelines.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner")
    flags, others = parser.parse_known_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x, y = write_lines(folder)
        read = beam.io.ReadFromText(str(folder / "part-*.csv")) | beam.FlatMap(parsed)
        like = jax.eval_shape(lambda: {"id": jnp.int32(0), "x": jnp.zeros(11), "y": jnp.zeros(())})
        (n,) = jax.export.symbolic_shape("n")
        many = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape), leaf.dtype), like)
        with bj.pipeline(flags.runner, others) as pipeline:
            members = pipeline | read | "Number" >> beam.Map(lambda row: (int(row["id"]), row))
            matrix, right = members | bj.transform(sums, many)
            (
                matrix
                | beam.Map(np.linalg.solve, beam.pvalue.AsSingleton(right))
                | beam.Map(lambda weights: " ".join(map(str, weights.tolist())))
                | beam.io.WriteToText(str(folder / "weights"), shard_name_template="")
            )
        solved = np.array((folder / "weights").read_text(encoding="utf-8").split(), float)

        rows = bj.from_beam(
            read, like=like, folder=folder / "rows", index=lambda row: row["id"],
            runner=flags.runner, options=others,
        )  # fmt: skip
        zeros = np.zeros(11, np.float32)
        descended = np.asarray(bj.run(descend, zeros, 0.05, np.arange(flags.rounds), rows,
                                      runner="local"))  # fmt: skip
    truth = np.linalg.lstsq(x, y)[0]
    print(f"{len(rows)} patients; weights by NumPy, by transform, by {flags.rounds} rounds")
    for three in zip(truth, solved, descended, strict=True):
        print("".join(f"{weight:10.4f}" for weight in three))
    return solved, descended, truth


if __name__ == "__main__":
    main()
