"""Which patients a model depends on: influence scores of the members of a data set.

Newton's method fits a logistic regression to scikit-learn's breast cancer data. If one patient were
left out, the loss on held-out patients would change by about g_i' H^-1 g / n, where g_i is the
gradient of that patient, g the gradient of the held-out patients, and H the Hessian (P. W. Koh and
P. Liang, "Understanding black-box predictions via influence functions", ICML 2017, section 2). The
program never computes H. Conjugate gradients need only its products with vectors, each of which is
a pass over the members by `jax.jvp` of `jax.grad`, in a loop that is part of the program. The
scores are placed values.

    python examples/influence.py --top=5 --runner=DirectRunner

Other flags go to beamjax (--shard_size=64) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.sparse.linalg import cg
from sklearn.datasets import load_breast_cancer

import beamjax as bj

PENALTY, NEWTON_STEPS, SOLVER_STEPS = 0.05, 8, 40

Rows = tuple[jax.Array, jax.Array]  # measurements (n, 31), the last one 1, and diagnoses (n,)


def loss_at(weights: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """The cross entropy of a patient, with the penalty that makes the Hessian definite."""
    score = x @ weights
    return jnp.logaddexp(0, score) - y * score + PENALTY / 2 * jnp.sum(weights**2)


@bj.program(placements={"patients": None})
def mean_loss(weights: jax.Array, rows: Rows) -> jax.Array:
    return bj.reduce_mean(bj.map_fn(lambda x, y: loss_at(weights, x, y), rows))


@bj.program(placements={"patients": None})
def scores(weights: jax.Array, direction: jax.Array, rows: Rows) -> jax.Array:
    """The gradient of each patient along a direction."""
    return bj.map_fn(lambda x, y: jnp.dot(jax.grad(loss_at)(weights, x, y), direction), rows)


def solve(weights: jax.Array, rows: Rows, right: jax.Array) -> jax.Array:
    """H^-1 times a vector."""
    slope = lambda w: jax.grad(mean_loss)(w, rows)
    product: Callable[[jax.Array], jax.Array] = lambda v: jax.jvp(slope, (weights,), (v,))[1]
    return cg(product, right, tol=1e-6, maxiter=SOLVER_STEPS)[0]


def newton_step(weights: jax.Array, rows: Rows) -> jax.Array:
    return weights - solve(weights, rows, jax.grad(mean_loss)(weights, rows))


def influences(weights: jax.Array, rows: Rows, held_out: Rows) -> jax.Array:
    """The change of the loss on held-out patients if each patient were left out."""
    direction = solve(weights, rows, jax.grad(mean_loss)(weights, held_out))
    return scores(weights, direction, rows) / len(rows[1])


def main(argv: Sequence[str] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns the highest scores, and the changes of the loss in fits without each of these."""
    parser = argparse.ArgumentParser(description="Influence scores.", allow_abbrev=False)
    parser.add_argument("--top", type=int, default=5)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    x, y = load_breast_cancer(return_X_y=True)
    x = np.append((x - x.mean(axis=0)) / x.std(axis=0), np.ones((len(x), 1)), axis=1)
    x, y = x.astype(np.float32), y.astype(np.float32)
    order = np.random.default_rng(0).permutation(len(y))
    rows, held_out = ((x[part], y[part]) for part in (order[:400], order[400:]))

    def fit(rows: Rows, runner: str) -> jax.Array:
        weights = jnp.zeros(x.shape[1])
        for _ in range(NEWTON_STEPS):
            weights = bj.run(newton_step, weights, rows, runner=runner, options=others)
        return weights

    weights = fit(rows, flags.runner)
    before = float(mean_loss(weights, held_out))
    print(f"fitted on {flags.runner}; loss of held-out patients {before:.4f}")
    found = bj.run(influences, weights, rows, held_out, runner=flags.runner, options=others)
    top = np.argsort(-np.abs(found))[: flags.top]
    truth = []
    for i in top:
        without = tuple(np.delete(part, i, axis=0) for part in rows)
        truth.append(float(mean_loss(fit(without, "local"), held_out)) - before)
        print(f"patient {order[i]:3}: score {found[i]:+.6f}, fitted without {truth[-1]:+.6f}")
    return np.asarray(found)[top], np.array(truth)


if __name__ == "__main__":
    main()
