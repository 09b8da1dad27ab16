"""NumPyro's NUTS over rows in files: what a gradient costs on a runner, above `runner="local"`.

    python benchmarks/nuts.py --runner=FlinkRunner --options='{"flink_cluster": "FOLDER"}'

Needs `pip install '.[libraries]'`. All draws have to have the same bits on both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS, init_to_value

import beamjax as bj

ROWS, TRUTH = 200_000, np.float32([0.5, -1.0, 2.0, 0.0])


@bj.program(placements={"rows": None})
def log_likelihood(w: Any, rows: Any) -> Any:
    def of_row(row: Any) -> Any:
        logit = row["x"] @ w
        return row["y"] * logit - jax.nn.softplus(logit)

    return bj.reduce_sum(bj.map_fn(of_row, rows))


def model(rows: Any) -> None:
    w = numpyro.sample("w", dist.Normal(jnp.zeros(4), 2.0))
    numpyro.factor("likelihood", log_likelihood(w, rows))


def sampler(draws: int) -> Any:
    """A function of a key and rows: a tenth of the draws are for warm-up."""
    start = init_to_value(values={"w": jnp.zeros(4)})

    def sample(key: Any, rows: Any) -> Any:
        warmup = draws // 10
        kernel = NUTS(model, init_strategy=start)
        mcmc = MCMC(kernel, num_warmup=warmup, num_samples=draws - warmup, progress_bar=False)
        mcmc.warmup(key, rows, collect_warmup=True, extra_fields=("num_steps",))
        first = mcmc.get_extra_fields()["num_steps"]
        mcmc.run(key, rows, extra_fields=("num_steps",))
        steps = jnp.concatenate([first, mcmc.get_extra_fields()["num_steps"]])
        return mcmc.get_samples()["w"], steps

    return sample


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runner", default="DirectRunner")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON")
    parser.add_argument("--draws", type=int, default=2000)
    flags = parser.parse_args()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype(np.float32)
    y = (rng.random(ROWS) < 1 / (1 + np.exp(-x @ TRUTH))).astype(np.float32)
    sample = sampler(flags.draws)
    each: dict[str, float] = {}
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: str(Path(folder, f"{name}.npy")) for name in ("x", "y")}
        for name, array in (("x", x), ("y", y)):
            np.save(paths[name], array)
        for runner in ("local", flags.runner):
            options = {} if runner == "local" else flags.options
            begun = time.perf_counter()
            rows = bj.from_npy(paths)
            draws, steps = bj.run(sample, jax.random.key(0), rows, runner=runner, options=options)
            seconds = time.perf_counter() - begun
            found[runner] = np.asarray(draws)
            each[runner] = 1000 * seconds / int(steps.sum())
            print(
                f"{runner:14} {int(steps.sum())} gradients over {ROWS:,} rows, {seconds:.1f} s, "
                f"{each[runner]:.2f} ms each",
                flush=True,
            )
    same = found["local"].tobytes() == found[flags.runner].tobytes()
    print(f"{each[flags.runner] - each['local']:.2f} ms above local; bits equal: {same}")
    print("posterior mean", found["local"].mean(0).round(3), "truth", TRUTH)


if __name__ == "__main__":
    main()
