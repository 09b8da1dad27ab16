"""Federated averaging with all rounds in one program: each round reads its cohort by index.

The clients are in a file. A round draws some of them without replacement, and only these are read.
They train the server's model on their own rows; each has a shift of its own. The server adds the
mean change with momentum.

    python examples/cohorts_by_index.py --rounds=30 --runner=DirectRunner

Other flags go to beamjax (--shard_size=32) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj

CLIENTS, COHORT, ROWS, FEATURES = 5_000, 50, 16, 8
STEPS, CLIENT_RATE, MOMENTUM = 5, 0.5, 0.5

Rows = dict[str, jax.Array]  # x (rows, features), y (rows,)
State = tuple[jax.Array, jax.Array]  # weights, momentum


@bj.program(placements={"clients": CLIENTS, "cohort": COHORT})
def train(clients: Rows, key: jax.Array, *, rounds: int) -> tuple[jax.Array, Rows]:
    """Returns the weights after all rounds, and the loss and the cohort of each round."""

    def one_round(state: State, key: jax.Array) -> tuple[State, Rows]:
        weights, momentum = state
        index = jax.random.choice(key, CLIENTS, (COHORT,), replace=False)
        cohort = jax.tree.map(lambda leaf: leaf[index], clients)
        results = bj.map_fn(functools.partial(local_steps, weights), cohort, placement="cohort")
        change, mean_loss = bj.reduce_mean(results, placement="cohort")
        momentum = MOMENTUM * momentum + change
        return (weights + momentum, momentum), {"loss": mean_loss, "cohort": index}

    start = jnp.zeros(FEATURES), jnp.zeros(FEATURES)
    (weights, _), history = jax.lax.scan(one_round, start, jax.random.split(key, rounds))
    return weights, history


def local_steps(weights: jax.Array, client: Rows) -> tuple[jax.Array, jax.Array]:
    """The change of the weights by a client, and its loss before."""

    def step(weights: jax.Array, _: None) -> tuple[jax.Array, None]:
        return weights - CLIENT_RATE * jax.grad(loss)(weights, client), None

    return jax.lax.scan(step, weights, length=STEPS)[0] - weights, loss(weights, client)


def loss(weights: jax.Array, client: Rows) -> jax.Array:
    """The mean logistic loss."""
    margins = (client["x"] @ weights) * client["y"]
    return jnp.mean(jax.nn.softplus(-margins))


def write_clients(path: Path) -> np.ndarray:
    """Writes the rows of all clients; returns the weights that give the labels."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=FEATURES).astype(np.float32)
    x = rng.normal(size=(CLIENTS, ROWS, FEATURES)) + rng.normal(size=(CLIENTS, 1, FEATURES))
    np.savez(path, x=x.astype(np.float32), y=np.sign(x @ truth).astype(np.float32))
    return truth


def main(argv: Sequence[str] | None = None) -> float:
    """Returns the cosine of the angle between the trained weights and the true ones."""
    parser = argparse.ArgumentParser(description="Federated averaging.", allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clients.npz"
        truth = write_clients(path)
        weights, history = bj.run(
            functools.partial(train, rounds=flags.rounds),
            bj.from_npz(path),
            jax.random.key(1),
            runner=flags.runner,
            options=others,
        )
    for number in range(0, flags.rounds, max(1, flags.rounds // 5)):
        print(f"round {number:3}   loss {history['loss'][number]:.3f}")
    read = history["cohort"].size
    distinct = len(np.unique(history["cohort"]))
    print(f"{read:,} clients were read, {distinct:,} different ones of {CLIENTS:,}")
    weights = np.asarray(weights)
    cosine = float(weights @ truth / np.linalg.norm(weights) / np.linalg.norm(truth))
    print(f"cosine to the true weights: {cosine:.3f}")
    return cosine


if __name__ == "__main__":
    main()
