"""Federated averaging over a flat Parquet table: each row is an example of one client.

The program makes the table. Each client has a text key, few or many rows in any of the files, and
labels that depend on the client too. The table is sorted by client once, into another file in which
clients of similar size are neighbours. In each round, a sample of the clients trains the model on
their own rows, which are padded to one of a few lengths, with a mask.

    python examples/federated_table.py --rows=100_000 --clients=5_000 --runner=DirectRunner

Other flags go to beamjax (--shard_size=64) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import beamjax as bj

WIDTH, FILES, STEPS, RATE = 16, 4, 5, 1.0

Rows = dict[str, jax.Array]  # x (rows, WIDTH), label (rows,), mask (rows,)


@bj.program(placements={"clients": None})
def federated_round(weights: jax.Array, clients: Rows) -> tuple[jax.Array, jax.Array]:
    """The weights after a round, and the loss before it, both averaged over the rows."""

    def client(rows: Rows) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        def step(w: jax.Array, _: None) -> tuple[jax.Array, None]:
            return w - RATE * jax.grad(loss)(w, rows), None

        trained, _ = jax.lax.scan(step, weights, length=STEPS)
        return (trained, loss(weights, rows)), jnp.sum(rows["mask"], dtype=jnp.float32)

    results, counts = bj.map_fn(client, clients)
    return bj.reduce_weighted_mean(results, counts)


def loss(weights: jax.Array, rows: Rows) -> jax.Array:
    """The cross entropy of a logistic regression."""
    scores = rows["x"] @ weights
    losses = jnp.logaddexp(0, scores) - rows["label"] * scores
    return jnp.mean(losses, where=rows["mask"])


def write_table(folder: Path, rows: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Writes the rows of all clients, shuffled; returns the weights that made the labels."""
    share = rng.pareto(1.5, clients) + 0.1
    owner = rng.choice(clients, size=rows, p=share / share.sum())
    weights = rng.normal(size=WIDTH)
    tastes = (weights + 0.5 * rng.normal(size=(clients, WIDTH))).astype(np.float32)
    for number, part in enumerate(np.array_split(owner, FILES)):
        x = rng.standard_normal((len(part), WIDTH), np.float32)
        noise = rng.logistic(size=len(part))
        columns = {
            "client": pa.array(np.char.add("client-", part.astype(str))),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), WIDTH),
            "label": pa.array((np.sum(x * tastes[part], axis=1) + noise > 0).astype(np.float32)),
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=1 << 16)
    return weights


def sort_table(folder: Path, sorted_file: Path) -> bj.Source:
    """The clients of a table as members; docs/howto/ragged.md sorts larger tables."""
    table = pq.read_table(folder)
    member = table["client"].combine_chunks().dictionary_encode().indices.to_numpy()
    counts = np.bincount(member)
    rows = table.drop("client").take(np.lexsort((member, counts[member])))
    pq.write_table(rows, sorted_file, row_group_size=1 << 16)
    return bj.from_ragged(bj.from_parquet(sorted_file), np.sort(counts))


def main(argv: Sequence[str] | None = None) -> float:
    """Prints the loss of each round; returns the cosine of the learnt and the true weights."""
    parser = argparse.ArgumentParser(description="Federated averaging.", allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=5_000)
    parser.add_argument("--cohort", type=int, default=1_000, help="clients in a round; 0 is all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    beam = {"runner": flags.runner, "options": others}

    with tempfile.TemporaryDirectory() as name:
        folder, key, weights = Path(name) / "table", jax.random.key(0), jnp.zeros(WIDTH)
        folder.mkdir()
        behind = write_table(folder, flags.rows, flags.clients, np.random.default_rng(0))
        began = time.perf_counter()
        clients = sort_table(folder, Path(name) / "sorted.parquet")
        seconds = time.perf_counter() - began
        print(f"{flags.rows:,} rows of {len(clients):,} clients sorted in {seconds:.1f} s")
        for number in range(flags.rounds):
            began = time.perf_counter()
            size = min(flags.cohort or len(clients), len(clients))
            cohort = bj.sample(clients, size, jax.random.fold_in(key, number))
            weights, value = bj.run(federated_round, weights, cohort, **beam)
            seconds = time.perf_counter() - began
            print(f"round {number + 1}  {size:,} clients  loss {value:.4f}  {seconds:.1f} s")
    cosine = weights @ behind / np.linalg.norm(weights) / np.linalg.norm(behind)
    print(f"cosine of the learnt and the true weights: {cosine:.3f}")
    return float(cosine)


if __name__ == "__main__":
    main()
