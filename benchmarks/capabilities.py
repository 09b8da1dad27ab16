"""What a user would write without beamjax, beside it: errors, failures, changed data, order.

    python -m benchmarks.capabilities
    python -m benchmarks.capabilities standard_errors failed_member

Each line is a ratio of two ways that were timed one after the other in this process, with compiled
functions. All ways of a part give the same numbers, as far as printed.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import beamjax as bj

REFITS = 300
FILES = 1000


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    """The time of a call, after one that compiles, and its result."""
    jax.block_until_ready(call())
    begun = time.perf_counter()
    found = jax.block_until_ready(call())
    return time.perf_counter() - begun, found


def row(name: str, taken: float, base: float, note: str = "") -> None:
    print(f"  {name:44} {taken:9.3f} s {taken / base:8.2f} x  {note}".rstrip(), flush=True)


# --- standard errors of a model that is trained in rounds


def standard_errors() -> None:
    """The error of a slope: by one gradient, by refits, and by replicates in one pass."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4000, 50, 3)).astype(np.float32)
    noise = rng.normal(size=(4000, 1)) + rng.normal(size=(4000, 50))
    y = (x @ np.float32([1.0, -2.0, 0.5]) + noise).astype(np.float32)

    @bj.program(placements={"clients": None})
    def fit(x: Any, y: Any) -> Any:
        def one_round(w: Any, _: Any) -> Any:
            slopes = bj.map_fn(lambda x, y: x.T @ (x @ w - y) / len(y), (x, y))
            return w - 0.5 * bj.reduce_mean(slopes), None

        return jax.lax.scan(one_round, jnp.zeros(3), length=12)[0]

    with_error = bj.standard_error(fit)
    taken, (_, error) = seconds(lambda: bj.run(with_error, x, y, runner="local"))
    once, _ = seconds(lambda: bj.run(fit, x, y, runner="local"))
    print(
        f"Standard error of a slope after 12 rounds over 4,000 clients; one fit takes {once:.3f} s"
    )
    row("bj.standard_error", taken, taken, f"error {error[0]:.4f}")

    draws = [rng.integers(0, 4000, 4000) for _ in range(REFITS)]
    jitted = jax.jit(fit)
    took, fits = seconds(lambda: np.stack([jitted(x[draw], y[draw]) for draw in draws]))
    row(
        f"{REFITS} refits of resampled clients, jax.jit", took, taken, f"error {fits.std(0)[0]:.4f}"
    )

    weights = bj.bootstrap_weights(jax.random.key(0), REFITS)
    replicates = jax.vmap(bj.reweight(fit), in_axes=(0, None, None))
    took, fits = seconds(lambda: bj.run(replicates, weights, x, y, runner="local"))
    error = np.asarray(fits).std(0)
    row(f"{REFITS} replicates, bj.bootstrap_weights", took, taken, f"error {error[0]:.4f}")

    print("The slope without each of the 4,000 clients")
    influence = bj.influence(fit, output=lambda w: w[0])
    taken, moved = seconds(lambda: bj.run(influence, x, y, runner="local"))
    without = [np.delete(np.arange(4000), i) for i in range(REFITS)]
    took, fits = seconds(lambda: np.stack([jitted(x[rest], y[rest]) for rest in without]))
    exact = np.asarray(jitted(x, y))[0] - fits[:, 0]
    note = f"correlation {np.corrcoef(exact, moved[:REFITS])[0, 1]:.3f}"
    row("bj.influence", taken, taken, note)
    row("4,000 refits without a client, jax.jit", took * 4000 / REFITS, taken, f"from {REFITS}")


# --- a member that fails in a job


def failed_member() -> None:
    """Finds the one of 100,000 rows whose body raises an error, and calls the body for it."""
    rows = np.random.default_rng(0).normal(size=(100_000, 16)).astype(np.float32)
    rows[70_000, 3] = np.inf

    def check(value: Any) -> Any:
        if not np.isfinite(value):
            raise ValueError(f"found {value}")
        return value

    def score(row: Any) -> Any:
        value = jnp.sum(jnp.tanh(row) * row)
        return jax.pure_callback(check, value, value, vmap_method="sequential")

    @bj.program(placements={"rows": None})
    def scores(rows: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(score, rows))

    def raised(call: Callable[[], Any]) -> tuple[float, Any]:
        begun = time.perf_counter()
        try:
            call()
        except (ValueError, bj.WorkerError) as error:
            return time.perf_counter() - begun, error
        raise AssertionError("no member failed")

    _, error = raised(lambda: bj.run(scores, rows, runner="local"))
    taken, _ = raised(lambda: bj.replay(error))
    took, _ = raised(lambda: [score(row) for row in rows])
    print("The error of one row of 100,000, in a debugger")
    row("bj.replay of the failed shard", taken, taken)
    row("the body for each row from the first", took, taken)


# --- data of which a little has changed


def write(path: Path, seed: int) -> None:
    """A file of 100 to 300 rows."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(rng.integers(100, 300), 256)).astype(np.float32)
    column = pa.FixedSizeListArray.from_arrays(values.ravel(), 256)
    pq.write_table(pa.table({"x": column}), path)


def changed_data() -> None:
    """A statistic of 1,000 files, again after 3 changed, 2 were added and 1 was removed."""

    @bj.program(placements={"rows": None})
    def statistic(rows: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.lax.fori_loop(0, 60, lambda _, v: jnp.tanh(v @ jnp.outer(v, v)), x)

        return bj.reduce_mean(bj.map_fn(one, rows))

    with tempfile.TemporaryDirectory() as name:
        folder, cache = Path(name, "data"), str(Path(name, "cache"))
        folder.mkdir()
        for number in range(FILES):
            write(folder / f"{10 * number:05}.parquet", number)
        time.sleep(2.1)  # files that were just written are read again

        def run(options: dict[str, Any]) -> tuple[float, Any, int, int]:
            begun = time.perf_counter()
            source = bj.from_parquet(str(folder), columns="x")
            with bj.launch(statistic, source, runner="local", options=options) as job:
                result = job.result()
                done = job.progress().done
            taken = time.perf_counter() - begun
            return taken, np.asarray(result).tobytes(), done.shards, done.shards_cached

        run({})
        first = run({"cache": cache})
        for number in (30, 2500, 9000):
            write(folder / f"{number:05}.parquet", 10_000 + number)
        for number in (15, 5005):
            write(folder / f"{number:05}.parquet", 20_000 + number)
        (folder / "00500.parquet").unlink()
        time.sleep(2.1)
        again = run({"cache": cache})
        whole = run({})
    assert again[1] == whole[1], "the bits differ"
    print(f"A statistic of {FILES} Parquet files after 3 changed, 2 were added and 1 was removed")
    row(
        "with the cache", again[0], again[0], f"{again[2] - again[3]} of {again[2]} shards computed"
    )
    row("without a cache, the same bits", whole[0], again[0])
    row("the first run, which fills the cache", first[0], again[0])


# --- members in order


def order() -> None:
    """Running sums and a median of rows in a file, and the same of an array in memory."""
    with tempfile.TemporaryDirectory() as name:
        path = str(Path(name, "x.npy"))
        np.save(path, np.random.default_rng(0).normal(size=(4_000_000, 4)).astype(np.float32))

        @bj.program(placements={"rows": None})
        def highest(x: Any) -> Any:
            return bj.reduce_max(jnp.cumsum(x, axis=0))

        @bj.program(placements={"rows": None})
        def median(x: Any) -> Any:
            return bj.quantile(x, 0.5)

        print("4,000,000 rows of 4 floats in a .npy file")
        for label, fn, reference in [
            ("highest running sum", highest, lambda x: np.cumsum(x, axis=0).max(axis=0)),
            ("median", median, lambda x: np.median(x, axis=0)),
        ]:
            run = functools.partial(bj.run, fn, runner="local")
            taken, found = seconds(lambda: run(bj.from_npy(path)))  # noqa: B023
            took, expected = seconds(lambda: reference(np.load(path)))  # noqa: B023
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
            row(f"{label}, beamjax in shards", taken, taken)
            row(f"{label}, NumPy with all in memory", took, taken)


def main() -> None:
    print(f"jax {jax.__version__}")
    parts = (standard_errors, failed_member, changed_data, order)
    for part in parts:
        if part.__name__ in (sys.argv[1:] or [each.__name__ for each in parts]):
            part()


if __name__ == "__main__":
    main()
