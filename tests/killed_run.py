"""A run in a process of its own, for tests that kill it: `python killed_run.py folder runner out`.

With `-` as the folder nothing is saved. `FlinkRunner=folder` is the runner on the cluster there. It
prints every round that is saved. A fourth argument, `name:count`, has the process kill
itself in that function of `pipelines.files`, before it does its work for the count-th time.
"""

import json
import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np

import beamjax as bj
from beamjax.pipelines.checkpoints.folder import CheckpointFolder
from beamjax.storage import files

N = 21


@bj.program(placements={"clients": N})
def one_round(w, key, z, flags, x):
    drawn = jax.random.normal(key, (3,), jnp.float32)
    z = bj.map_fn(lambda z, v: z * 0.5j + jnp.tanh(v @ w.astype("float32") + drawn[0]), (z, x))
    flags = bj.map_fn(lambda z, flag: flag ^ (z.real > z.imag), (z, flags))
    step = bj.reduce_mean(bj.map_fn(lambda z, v: z.real * v, (z, x)))
    return (w.astype("float32") - step + drawn * 0.01).astype(w.dtype), z, flags


def rounds(w, keys, z, flags, x):
    def body(state, key):
        w, z, flags, none = state
        w, z, flags = one_round(w, key, z, flags, x)
        return (w, z, flags, none), (w, key, flags)

    none = jnp.zeros((0, 2), jnp.int8)
    (w, z, flags, none), kept = jax.lax.scan(body, (w, z, flags, none), keys)
    again = lambda state: (*one_round(state[0], keys[0], state[1], state[2], x), state[3] + 1)
    return jax.lax.while_loop(lambda s: s[3] < 3, again, (w, z, flags, 0)), none, kept


def arguments():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 3)).astype(np.float32)
    keys = jax.random.split(jax.random.key(3), 4)
    return (
        jnp.ones(3, jnp.bfloat16), keys, jnp.zeros(N, jnp.complex64), jnp.zeros(N, bool), x,
    )  # fmt: skip


def bits(tree):
    """Dtype, shape and bytes of each leaf."""
    found = []
    for leaf in jax.tree.leaves(tree):
        kind = str(leaf.dtype)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        found.append([kind, list(leaf.shape), np.asarray(leaf).tobytes().hex()])
    return found


def die_in(name, count):
    function = getattr(files, name)
    left = [count]

    def dying(path, *args, **kwargs):
        if "work" not in str(path).split(os.sep) or name == "link":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return function(path, *args, **kwargs)

    setattr(files, name, dying)


def main():
    folder, runner, out, *fault = sys.argv[1:]
    if fault:
        name, _, number = fault[0].partition(":")
        die_in(name, int(number))
    save = CheckpointFolder.save

    def reported(self, checkpoint):
        save(self, checkpoint)
        print(checkpoint.position, flush=True)

    CheckpointFolder.save = reported
    runner, _, cluster = runner.partition("=")
    options = {} if folder == "-" else {"checkpoint": folder}
    options |= {"flink_cluster": cluster} if cluster else {}
    found = bits(bj.run(rounds, *arguments(), runner=runner, options=options))
    with open(out, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
