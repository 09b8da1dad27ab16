"""Patients withdraw from a study: the cache computes only what changed.

scikit-learn's breast cancer data is in one Parquet file for each of 19 clinics. Newton's method
needs the mean gradient and Hessian of a logistic regression over all patients; the program returns
both. Then three patients withdraw, so their rows are removed from the files. The second run takes
the partial sums of the other shards from the cache, and has the bits of a run that never saw the
three patients. `bj.replay` calls the body for one patient, as a debugger would.

    python examples/forgotten_patients.py --runner=DirectRunner

Other flags go to beamjax (--job_name=clinics) or to Beam (--direct_running_mode=multi_threading).
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_breast_cancer

import beamjax as bj

CLINICS, WITHDRAWN = 19, (40, 41, 500)
Rows = dict[str, jax.Array]  # "x" (n, 31), the last one 1, and "y" (n,), 0 or 1


def loss(w: jax.Array, row: Rows) -> jax.Array:
    """The cross entropy of a patient, with a penalty on the weights."""
    logit = row["x"] @ w
    return jax.nn.softplus(logit) - row["y"] * logit + 0.005 * w @ w


@bj.program(placements={"patients": None})
def slopes(w: jax.Array, rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The mean gradient and the mean Hessian of the loss over all patients."""
    both = lambda row: (jax.grad(loss)(w, row), jax.hessian(loss)(w, row))
    return bj.reduce_mean(bj.map_fn(both, rows))


def write(folder: Path, x: np.ndarray, y: np.ndarray, left: np.ndarray) -> None:
    """Writes the patients that are left to a file for each clinic, if it has changed."""
    for clinic, numbers in enumerate(np.array_split(np.arange(len(x)), CLINICS)):
        rows = numbers[left[numbers]]
        column = pa.FixedSizeListArray.from_arrays(x[rows].ravel(), x.shape[1])
        path = folder / f"clinic-{clinic:02}.parquet"
        if not path.exists() or pq.read_metadata(path).num_rows != len(rows):
            pq.write_table(pa.table({"x": column, "y": y[rows]}), path)


def main(argv: Sequence[str] | None = None) -> tuple[int, int, bool]:
    """Returns the shards computed in both runs, and whether the bits are right."""
    parser = argparse.ArgumentParser(description="Forgotten patients.", allow_abbrev=False)
    parser.add_argument("--runner", default="DirectRunner", help="a Beam runner, or 'local'")
    flags, others = parser.parse_known_args(argv)
    x, y = load_breast_cancer(return_X_y=True)
    x = np.c_[(x - x.mean(0)) / x.std(0), np.ones(len(x))].astype(np.float32)
    y, w = y.astype(np.float32), np.zeros(x.shape[1], np.float32)
    left = ~np.isin(np.arange(len(x)), WITHDRAWN)
    with tempfile.TemporaryDirectory() as name:
        folder, jobs = Path(name, "clinics"), [str(Path(name, job)) for job in ("all", "left")]
        folder.mkdir()

        def run(job: str | None = None) -> tuple[Any, int]:
            options: dict[str, Any] = {"shard_size": 8}
            if job is not None:
                options |= {"job_folder": job, "cache": str(Path(name, "cache"))}
            flat = [f"--{key}={value}" for key, value in options.items()]
            rows = bj.from_parquet(str(folder))
            with bj.launch(slopes, w, rows, runner=flags.runner, options=[*flat, *others]) as run:
                result, done = run.result(), run.progress().done
            return result, done.shards - done.shards_cached

        write(folder, x, y, np.ones(len(x), bool))
        _, first = run(jobs[0])
        write(folder, x, y, left)
        found, second = run(jobs[1])
        never, _ = run()
        same = all(np.array_equal(a, b) for a, b in zip(found, never, strict=True))
        (gradient, _) = bj.replay(jobs[1], slopes, w, bj.from_parquet(str(folder)), member=40)
    print(f"{first} shards computed, then {second} after {len(WITHDRAWN)} patients withdrew")
    print("the bits of a run without a cache:", same)
    error = np.abs(np.asarray(gradient).ravel() - (0.5 - y[left][40]) * x[left][40]).max()
    print(f"the gradient of one patient by replay, {error:.0e} from the formula")
    return first, second, same


if __name__ == "__main__":
    main()
