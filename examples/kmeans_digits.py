"""k-means of handwritten digits to convergence: a `while_loop` around reductions by key.

The loop and its condition are part of the program. `bj.run` turns each round into a pass over the
members, which sums the digits of each cluster; this process only computes how far the centres
moved. `jax.vmap` over the first centres runs several restarts in the same passes. The output
compares each restart with scikit-learn from the same first centres.

    python examples/kmeans_digits.py --clusters=10 --restarts=4 --runner=DirectRunner

Other flags go to beamjax (--shard_size=32) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits

import beamjax as bj

TOLERANCE, MOST_ROUNDS = 1e-4, 100

Found = tuple[jax.Array, jax.Array, jax.Array]  # centres, inertia or last move, rounds


@bj.program(placements={"points": None})
def kmeans(first: jax.Array, points: jax.Array) -> Found:
    """Lloyd's algorithm from first centres (clusters, pixels)."""

    def nearest(centres: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The cluster of each point, and the square of its distance."""

        def at_one(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            squares = jnp.sum((centres - x[None]) ** 2, axis=1)
            return jnp.argmin(squares), jnp.min(squares)

        return bj.map_fn(at_one, points)

    def moved(state: Found) -> Found:
        centres, _, rounds = state
        cluster, _ = nearest(centres)
        means = bj.reduce_by_key(points, cluster, len(first), op="mean")
        means = jnp.where(jnp.isnan(means), centres, means)  # an empty cluster keeps its centre
        return means, jnp.max(jnp.abs(means - centres)), rounds + 1

    centres, _, rounds = jax.lax.while_loop(
        lambda state: (state[1] > TOLERANCE) & (state[2] < MOST_ROUNDS),
        moved,
        (first, jnp.asarray(jnp.inf), jnp.asarray(0)),
    )
    return centres, bj.reduce_sum(nearest(centres)[1]), rounds


def main(argv: Sequence[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the inertia of each restart, and that of scikit-learn."""
    parser = argparse.ArgumentParser(description="k-means.", allow_abbrev=False)
    parser.add_argument("--clusters", type=int, default=10)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)

    points = load_digits().data.astype(np.float32)
    rng = np.random.default_rng(0)
    first = np.stack(
        [points[rng.choice(len(points), flags.clusters, False)] for _ in range(flags.restarts)]
    )
    began = time.perf_counter()
    restarts = jax.vmap(kmeans, in_axes=(0, None))
    _, inertia, rounds = bj.run(restarts, first, points, runner=flags.runner, options=others)
    print(f"{len(points)} digits on {flags.runner} in {time.perf_counter() - began:.1f} s")

    truth = np.array(
        [
            KMeans(flags.clusters, init=start, n_init=1, tol=0, max_iter=MOST_ROUNDS)
            .fit(points)
            .inertia_
            for start in first
        ]
    )
    for number, (ours, theirs) in enumerate(zip(np.asarray(inertia), truth, strict=True)):
        count = int(rounds[number])
        print(f"restart {number}: inertia {ours:,.0f} after {count} rounds, sklearn {theirs:,.0f}")
    return np.asarray(inertia), truth


if __name__ == "__main__":
    main()
