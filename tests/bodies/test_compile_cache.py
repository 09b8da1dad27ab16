"""A process compiles, loads and puts on devices each thing once; later ones compile nothing."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.commands import cli

N = 20
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)

IN_A_PROCESS = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj

events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event.rpartition("/")[2]))

@bj.program(clients=20)
def two(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    m = bj.reduce_mean(y)
    return m, bj.reduce_sum(bj.map_fn(lambda v, c: (v - c) ** 2, (y, bj.broadcast(m))))

x = np.arange(60, dtype=np.float32).reshape(20, 3) / 60
options = {"shard_size": 8, "job_folder": sys.argv[2]}
if sys.argv[1] == "workers":
    options |= {"direct_running_mode": "multi_processing", "direct_num_workers": 1}
runner = "local" if sys.argv[1] == "local" else "DirectRunner"
with bj.launch(two, np.ones(3, np.float32), x, runner=runner, options=options) as job:
    result = job.result()
    done = job.progress().to_json()["done"]
asked, hits = events.count("compile_requests_use_cache"), events.count("cache_hits")
bits = np.asarray(result[0]).tobytes().hex()
print(json.dumps(done | {"asked": asked, "hits": hits, "bits": bits}))
"""


def in_a_process(way, folder, job):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder)}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", IN_A_PROCESS]
    found = subprocess.run(
        [*command, way, str(job)],
        capture_output=True, text=True, check=False, env=os.environ | cache,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "way",
    [
        "local",
        pytest.param("DirectRunner", marks=pytest.mark.long),
        pytest.param("workers", marks=pytest.mark.long),
    ],
)
def test_a_second_process_compiles_nothing(way, tmp_path, capsys):
    first, second = (in_a_process(way, tmp_path / "cache", tmp_path / name) for name in "ab")
    assert first["cache_misses"] == first["executables"] >= 2
    assert first["cache_hits"] == 0
    assert (second["cache_misses"], second["cache_hits"]) == (0, first["executables"])
    assert second["asked"] == second["hits"]  # whatever JAX compiled besides
    assert second["bits"] == first["bits"]
    assert cli.main(["jobs", "show", str(tmp_path / "b")]) == 0
    shown = capsys.readouterr().out
    assert f"0 executables compiled, {second['cache_hits']:,} found on disk" in shown


@bj.program(clients=N)
def rounds(w, table, x):
    def step(w, _):
        y = bj.map_fn(lambda v: jnp.tanh(v @ w) * table.sum(), x)
        return w + 0.1 * bj.reduce_mean(bj.map_fn(lambda v: v * table[0], y)), None

    return jax.lax.scan(step, w, None, length=4)[0]


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_bodies_and_broadcasts_are_there_once(runner):
    arguments = np.ones(3, np.float32), np.ones((7, 3), np.float32), X
    options = {"shard_size": 8}
    found = []
    for _ in range(2):
        with bj.launch(rounds, *arguments, runner=runner, options=options) as job:
            job.result()
            found.append(job.progress().done)
    first, again = found
    assert again.executables == again.bodies_loaded == 0
    assert again.bodies_reused == first.bodies_loaded + first.bodies_reused > 0
    # The weights of each of four rounds; the table once, though all rounds read it.
    assert first.broadcasts == 4 + 1
    assert again.broadcasts <= 4 + 1  # or fewer, where some are still there
