"""Standard errors, cross-validation and the bootstrap of one fit, by weights of members.

Newton's method fits a logistic regression to scikit-learn's breast cancer data; each step is a pass
over the patients. `bj.reweight` gives three more programs. `bj.standard_error` computes the errors
of the coefficients, with one reverse pass for each coefficient. `jax.vmap` over weights of 0 and 1
fits the model five times, each time without a fifth of the patients. `jax.vmap` over Poisson
weights fits it to bootstrap samples. None of these programs copies a patient, and each reads the
data as often as one fit does.

    python examples/resampling.py --replicates=200 --runner=DirectRunner

Other flags go to beamjax (--shard_size=64) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import beamjax as bj

MEASUREMENTS = ["mean radius", "mean texture", "mean smoothness", "mean symmetry"]
FOLDS, PENALTY, STEPS = 5, 0.01, 6


@bj.program(placements={"patients": None})
def fit(x: jax.Array, y: jax.Array) -> jax.Array:
    """The coefficients (5,) of measurements (n, 5), of which the last is 1, for diagnoses (n,)."""
    beta = jnp.zeros(x.shape[1])
    for _ in range(STEPS):

        def slopes(row: jax.Array, label: jax.Array, at: jax.Array = beta) -> tuple[jax.Array, ...]:
            chance = jax.nn.sigmoid(row @ at)
            return (label - chance) * row, chance * (1 - chance) * jnp.outer(row, row)

        gradient, curvature = bj.reduce_mean(bj.map_fn(slopes, (x, y)))
        ridge = PENALTY * jnp.eye(len(beta))
        beta = beta + jnp.linalg.solve(curvature + ridge, gradient - PENALTY * beta)
    return beta


@bj.program(placements={"patients": None})
def accuracy(beta: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return bj.reduce_mean(bj.map_fn(lambda row, label: (row @ beta > 0) == (label > 0), (x, y)))


def in_fold(fold: jax.Array, index: jax.Array) -> jax.Array:
    return index % FOLDS == fold


def validated(fold: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The accuracy on a fifth of the patients, of a fit to the others."""
    beta = bj.reweight(fit)(lambda index: ~in_fold(fold, index), x, y)
    return bj.reweight(accuracy)(lambda index: in_fold(fold, index), beta, x, y)


def main(argv: Sequence[str] | None = None) -> dict[str, np.ndarray]:
    """Returns the errors of the coefficients by two methods, and the accuracy of each fold."""
    parser = argparse.ArgumentParser(description="Resampling.", allow_abbrev=False)
    parser.add_argument("--replicates", type=int, default=200, help="bootstrap samples")
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    data = load_breast_cancer()
    x = data.data[:, [list(data.feature_names).index(name) for name in MEASUREMENTS]]
    x = np.append((x - x.mean(axis=0)) / x.std(axis=0), np.ones((len(x), 1)), axis=1)
    x, y = x.astype(np.float32), data.target.astype(np.float32)

    def run(fn: Callable[..., Any], *args: Any) -> Any:
        return bj.run(fn, *args, runner=flags.runner, options=others)

    beta, error = run(bj.standard_error(fit), x, y)
    samples = bj.bootstrap_weights(jax.random.key(0), flags.replicates)
    betas = run(jax.vmap(bj.reweight(fit), in_axes=(0, None, None)), samples, x, y)
    spread = np.std(betas, axis=0)
    folds = jnp.arange(FOLDS, dtype=jnp.int32)
    found = run(jax.vmap(validated, in_axes=(0, None, None)), folds, x, y)

    print(f"{'coefficient of':17} {'value':>7} {'error':>7} {'bootstrap':>9}")
    for row in zip([*MEASUREMENTS, "intercept"], beta, error, spread, strict=True):
        print("{:17} {:7.3f} {:7.3f} {:9.3f}".format(*row))
    print("accuracy of each fold:", " ".join(f"{each:.3f}" for each in found))
    return {"jackknife": np.asarray(error), "bootstrap": spread, "folds": np.asarray(found)}


if __name__ == "__main__":
    main()
