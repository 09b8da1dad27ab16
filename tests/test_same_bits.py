"""The same bits on machines with other numbers of cores, and what is said of machines that differ."""

import json
import os
import subprocess
import sys

import pytest

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []

PROGRAMS = """
import json, os, sys
os.sched_setaffinity(0, json.loads(sys.argv[1]))
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj

rng = np.random.default_rng(0)
normal = lambda *shape: rng.normal(size=shape).astype("float32")
program = bj.program(placements={"c": None})


@program
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda x: jnp.mean(jnp.tanh(x @ w) ** 2), x))


@program
def matrices(x):
    def one(x):
        linalg = jnp.linalg
        return linalg.svd(x, compute_uv=False), linalg.qr(x)[1], linalg.eigvalsh(x + x.T)

    return jax.tree.map(bj.reduce_sum, bj.map_fn(one, x))


@program
def vectors(x):
    found = bj.map_fn(lambda x: (jnp.sort(x), jnp.cumsum(x), jnp.sum(x), jnp.exp(x)), x)
    return jax.tree.map(bj.reduce_mean, found)


@program
def images(kernel, x):
    def one(x):
        made = jax.lax.conv_general_dilated(x[None], kernel, (1, 1), "SAME")
        return jnp.mean(jnp.tanh(made) ** 2)

    return bj.reduce_mean(bj.map_fn(one, x))


@program
def on_the_server(x):
    x = bj.reduce_sum(x)
    return x.T @ x, jnp.linalg.svd(x[:200, :150], compute_uv=False)


@program
def rounds(w, x):
    def step(w, _):
        w = w - 0.1 * jax.grad(loss)(w, x)
        return w, jnp.linalg.norm(w.T @ w)

    return jax.lax.scan(step, w, None, length=2)


w = normal(64, 48) / 20
cases = {
    "grad": (jax.grad(loss), w, normal(12, 2048, 64)),
    "linalg": (matrices, normal(4, 200, 200)),
    "vectors": (vectors, normal(10, 20_000)),
    "conv": (jax.grad(images), normal(8, 3, 5, 5), normal(4, 3, 64, 64)),
    "server": (on_the_server, normal(9, 4096, 160)),
    "rounds": (rounds, w, normal(4, 2048, 64)),
}
found = {}
for name, (fn, *args) in cases.items():
    for runner in ("local", "DirectRunner"):
        for loop in ("vmap", "loop"):
            options = {"shard_size": 8, "member_loop": loop}
            options |= json.loads(sys.argv[2])
            leaves = jax.tree.leaves(bj.run(fn, *args, runner=runner, options=options))
            found[f"{name}, {runner}, {loop}"] = [np.asarray(x).tobytes().hex() for x in leaves]
print(json.dumps(found))
"""


def start(code, *args):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-c", code, *map(json.dumps, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def outputs(*processes):
    found = [process.communicate(timeout=500) for process in processes]
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(text.splitlines()[-1]) for text, _ in found]


@pytest.mark.skipif(len(CORES) < 2, reason="there is one core")
@pytest.mark.parametrize("options", [{}, {"xla_threads": 3}])
def test_the_number_of_cores_does_not_show_in_the_bits(options):
    one, all_of_them = outputs(
        start(PROGRAMS, CORES[:1], options), start(PROGRAMS, CORES, options)
    )
    assert [case for case in one if one[case] != all_of_them[case]] == []
    beam = [case for case in one if "DirectRunner" in case]
    local = [case.replace("DirectRunner", "local") for case in beam]
    assert [b for a, b in zip(local, beam, strict=True) if one[a] != one[b]] == []
