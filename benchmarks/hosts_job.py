"""What the launcher of `hosts.py` runs, in a process of its own on its host."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import beamjax as bj

SHARDS, MEMBERS = 64, 512


def slow(seconds: float, x: jax.Array) -> jax.Array:
    """The value of x, after a while."""

    def nap(v: Any) -> np.ndarray:
        time.sleep(seconds)
        return np.asarray(v)

    return jax.pure_callback(
        nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential"
    )


def loss_of(seconds: float) -> Any:
    """One pass of 64 shards, each member of which takes a while."""

    @bj.program(placements={"rows": MEMBERS})
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return bj.reduce_mean(bj.map_fn(lambda v: slow(seconds, jnp.tanh(v @ w)), x))

    return loss


@bj.program(placements={"rows": MEMBERS})
def step(w: jax.Array, x: jax.Array) -> jax.Array:
    one = jax.grad(lambda w, v: jnp.tanh(v @ w) ** 2)
    return w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: one(w, v), x))


def rounds(count: int) -> Any:
    """Rounds of gradient descent."""
    return lambda w, x: jax.lax.fori_loop(0, count, lambda _, w: step(w, x), w)


def data() -> tuple[jax.Array, np.ndarray]:
    """The arguments of all programs."""
    x = np.random.default_rng(0).normal(size=(MEMBERS, 16)).astype(np.float32)
    return jnp.full(16, 0.1, jnp.float32), x


def stored(kind: str, folder: Path) -> bj.Source:
    """The same members in files of a folder, which are written if they are not there."""
    x = data()[1]
    folder.mkdir(exist_ok=True)
    path = folder / f"x.{kind}"
    if kind == "npy":
        np.save(path, x)
        return bj.from_npy(path)
    rows = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), x.shape[1])
    pq.write_table(pa.table({"x": rows}), path, row_group_size=MEMBERS // SHARDS)
    return bj.from_parquet(path, columns="x")


def run(kind: str, count: int, runner: str, options: dict[str, Any], folder: Path) -> np.ndarray:
    """Runs one of the programs, with files of members in a folder."""
    # "pass" takes `count` milliseconds for each member; "npy" and "parquet" are the same pass over
    # members in files; "rounds" has `count` rounds; "session" has as many calls.
    w, x = data()
    if kind in ("pass", "npy", "parquet"):
        x = x if kind == "pass" else stored(kind, folder)
        options = {"shard_size": MEMBERS // SHARDS, **options}
        seconds = count / 1000 if runner != "local" else 0.0
        return np.asarray(bj.run(loss_of(seconds), w, x, runner=runner, options=options))
    if kind == "rounds":
        return np.asarray(bj.run(rounds(count), w, x, runner=runner, options=options))
    with bj.session(runner, options) as session:
        for _ in range(count):
            w = session.run(step, w, x)
    return np.asarray(w)


def cancelled(count: int, options: dict[str, Any], seconds: float) -> str:
    """Launches a pass and cancels it; returns its state."""
    options = {"shard_size": MEMBERS // SHARDS, **options}
    job = bj.launch(loss_of(count / 1000), *data(), runner="FlinkRunner", options=options)
    time.sleep(seconds)
    job.cancel()
    return str(job.wait().value)


def main() -> None:
    """Runs what the arguments say, and prints how it ended as a line of JSON."""
    kind, runner, options = sys.argv[1], sys.argv[3], sys.argv[4]
    count, folder = int(sys.argv[2]), Path(sys.argv[5])
    print("ready", flush=True)
    begun = time.monotonic()
    told: dict[str, Any] = {}
    try:
        if kind == "cancel":
            told["state"] = cancelled(count, json.loads(options), 8.0)
        else:
            told["bits"] = run(kind, count, runner, json.loads(options), folder).tobytes().hex()
    except Exception as error:
        told["error"] = f"{type(error).__name__}: {error}"
        told["named"] = isinstance(error, bj.BeamjaxError)
    print(json.dumps({**told, "seconds": time.monotonic() - begun}), flush=True)


if __name__ == "__main__":
    main()
