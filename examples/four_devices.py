"""Leave-one-out validation on the four devices of each worker, in two ways.

Each of the 569 patients of scikit-learn's breast cancer data is a member: Newton's method fits a
logistic regression to all other patients, which predicts the diagnosis of the one that was left out
(M. Stone, "Cross-Validatory Choice and Assessment of Statistical Predictions", JRSS B 36, 1974).
First, the body does not mention devices. With `local_devices=4`, each worker distributes its shards
over four devices, one shard at a time on each, and the bits do not depend on the number of devices.
Second, the body itself uses a mesh of four devices, with a quarter of the rows on each, as a model
would that is too large for one device. On a machine with GPUs, these are the devices. Here, XLA
makes four devices of the CPU: the variable XLA_FLAGS is set before JAX starts, and workers inherit
it.

    python examples/four_devices.py --runner=DirectRunner

Other flags go to beamjax (--shard_size=16) or to Beam (--direct_num_workers=2
--direct_running_mode=multi_processing).
"""

import argparse
import functools
import os
import time
from collections.abc import Callable, Sequence

FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=4".strip()

import jax  # noqa: E402  (the devices are made when JAX starts)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from sklearn.datasets import load_breast_cancer  # noqa: E402

import beamjax as bj  # noqa: E402

NEWTON_STEPS, PENALTY, DEVICES = 12, 1.0, 4

Product = Callable[[jax.Array, jax.Array], jax.Array]


def product(rows: jax.Array, others: jax.Array) -> jax.Array:
    """rows.T @ others, for (patients, a) and (patients, b)."""
    return rows.T @ others


def on_mesh(rows: jax.Array, others: jax.Array) -> jax.Array:
    """The same product, from a quarter of the patients on each of four devices."""
    mesh = jax.make_mesh((DEVICES,), ("patients",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, others = (jnp.pad(x, ((0, -len(x) % DEVICES), (0, 0))) for x in (rows, others))
    add = lambda rows, others: jax.lax.psum(product(rows, others), "patients")
    parts, whole = jax.sharding.PartitionSpec("patients"), jax.sharding.PartitionSpec()
    return jax.shard_map(add, mesh=mesh, in_specs=(parts, parts), out_specs=whole)(rows, others)


@bj.program(placements={"patients": None})
def left_out(
    patient: jax.Array, rows: jax.Array, labels: jax.Array, product: Product = product
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean log loss and share of errors over the left-out patients, and each one's probability.

    patient (n,) has their indices in rows (patients, measurements) and labels (patients,).
    """

    def without(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        kept = (jnp.arange(len(labels)) != i).astype(rows.dtype)

        def newton(_: int, w: jax.Array) -> jax.Array:
            p = jax.nn.sigmoid(rows @ w)
            slope = rows.T @ (kept * (p - labels)) + PENALTY * w
            weighted = rows * (kept * p * (1 - p))[:, None]
            return w - jnp.linalg.solve(product(rows, weighted) + PENALTY * jnp.eye(len(w)), slope)

        w = jax.lax.fori_loop(0, NEWTON_STEPS, newton, jnp.zeros(rows.shape[1]))
        score = jnp.where(labels[i] == 1, 1.0, -1.0) * jnp.dot(rows[i], w)
        return jax.nn.softplus(-score), score < 0, jax.nn.sigmoid(jnp.dot(rows[i], w))

    losses, wrong, probability = bj.map_fn(without, patient)
    return bj.reduce_mean(losses), bj.reduce_mean(wrong), probability


def main(argv: Sequence[str] | None = None) -> tuple[float, float, bool, float]:
    """Returns the loss, share of errors, whether one device gives the same, and the mesh's loss."""
    parser = argparse.ArgumentParser(description="Leave-one-out.", allow_abbrev=False)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner")
    flags, others = parser.parse_known_args(argv)
    data = load_breast_cancer()
    scaled = (data.data - data.data.mean(axis=0)) / data.data.std(axis=0)
    rows = np.concatenate([scaled, np.ones((len(scaled), 1))], axis=1).astype(np.float32)
    labels = data.target.astype(np.float32)
    print(f"this process has {len(jax.local_devices())} devices")
    found = {}
    for name, fn, devices in (
        ("shards on one device", left_out, 1),
        ("shards over four devices", left_out, DEVICES),
        ("each body on all four", functools.partial(left_out, product=on_mesh), 1),
    ):
        began = time.perf_counter()
        found[name] = bj.run(
            fn, bj.from_range(len(labels)), rows, labels, runner=flags.runner,
            options=["--shard_size=16", *others, f"--local_devices={devices}"],
        )  # fmt: skip
        loss, wrong, _ = found[name]
        seconds = time.perf_counter() - began
        print(f"{name}: log loss {loss:.4f}, {wrong:.2%} wrong, {seconds:.1f} s")
    one, four, mesh = found.values()
    same = jax.tree.all(jax.tree.map(np.array_equal, one, four))
    print("the first two have the same bits:", same)
    return float(four[0]), float(four[1]), same, float(mesh[0])


if __name__ == "__main__":
    main()
