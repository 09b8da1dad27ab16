"""Means of clinical measurements with differential privacy, without members that have bad data.

Each of the 442 patients of scikit-learn's diabetes data is a member. The program clips the
measurements of a patient to a given norm, sums them over the patients, and adds Gaussian noise to
the sum, so that the result does not reveal whether any one patient took part (the Gaussian
mechanism of Dwork and Roth, "The Algorithmic Foundations of Differential Privacy", 2014, theorem
A.1, for patients who are added or removed). First, some measurements are made unreadable: beamjax
drops these patients, counts them and reports them, and the means do not include them.

    python examples/private_statistics.py --epsilon=0.9 --runner=DirectRunner

Other flags go to beamjax (--shard_size=64) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_diabetes

import beamjax as bj

BAD = (7, 100, 101)


@bj.program(placements={"patients": None})
def private_sum(
    key: jax.Array, norm: jax.Array, deviation: jax.Array, rows: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The noisy sums of clipped rows, the noisy number of rows, and the share of clipped rows."""

    def clipped(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        length = jnp.linalg.norm(row)
        return row * jnp.minimum(1, norm / length), length > norm

    values, too_long = bj.map_fn(clipped, rows)
    share = bj.reduce_mean(too_long)  # for the person who runs this; not private
    # A count is a sum of ones, each of which is one more coordinate of the member.
    sums = bj.reduce_sum(bj.map_fn(lambda x: jnp.append(x, norm), values))
    noisy = sums + deviation * jax.random.normal(key, sums.shape)
    return noisy[:-1], noisy[-1] / norm, share


def noise(norm: float, epsilon: float, delta: float) -> float:
    """The standard deviation that the theorem requires; epsilon must be below 1."""
    sensitivity = math.sqrt(2) * norm  # of a member's clipped row with its one
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def main(argv: Sequence[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the private means, and those of NumPy over the patients with sound data."""
    parser = argparse.ArgumentParser(description="Private means.", allow_abbrev=False)
    parser.add_argument("--epsilon", type=float, default=0.9)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--norm", type=float, default=4.0)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    if not 0 < flags.epsilon < 1:
        parser.error(f"--epsilon: found {flags.epsilon}, expected a number between 0 and 1")

    data = load_diabetes(scaled=False)
    sound = np.delete(data.data, BAD, axis=0)
    centre, scale = sound.mean(axis=0).round(), sound.std(axis=0)  # assumed to be public
    rows = ((data.data - centre) / scale).astype(np.float32)
    rows[BAD, 3] = np.nan
    deviation = noise(flags.norm, flags.epsilon, flags.delta)
    with tempfile.TemporaryDirectory() as folder:
        options = [*others, "--on_nonfinite=drop", f"--dead_letters={Path(folder) / 'dead.jsonl'}"]
        job = bj.launch(
            private_sum, jax.random.key(0), flags.norm, deviation, rows,
            runner=flags.runner, options=options,
        )  # fmt: skip
        sums, count, share = job.result()
        letters = (Path(folder) / "dead.jsonl").read_text().splitlines()

    means = np.asarray(sums) / float(count) * scale + centre
    print(f"dropped: patients {', '.join(str(d.member) for d in job.dropped)}; {letters[0]}")
    print(f"clipped: {float(share):.1%}; patients, noisy: {float(count):.1f}, true: {len(sound)}")
    print("measurement   private      true")
    for name, ours, true in zip(data.feature_names, means, sound.mean(axis=0), strict=True):
        print(f"{name:10} {ours:10.2f} {true:9.2f}")
    return means, sound.mean(axis=0)


if __name__ == "__main__":
    main()
