"""The calls that `interrupts.py` interrupts, each in a process of its own."""

import json
import sys
import time

print("begins", flush=True)


def calls(runner, options, folder):
    """Functions that run a program for some seconds, by name."""
    # First, as JAX's callback in the garbage collector swallows interrupts without beamjax.
    import beamjax as bj  # isort: skip
    import jax
    import jax.numpy as jnp
    import numpy as np

    [getattr(bj, name) for name in dir(bj)]  # imports the public names
    print("imported", flush=True)

    def body(v, w):
        return jax.lax.fori_loop(0, 150, lambda _, a: jnp.tanh(a @ a), v).sum() * w

    @bj.program(placements={"rows": None})
    def total(w, x):
        return bj.reduce_mean(bj.map_fn(body, (x, bj.broadcast(w))))

    def rounds(w, x):
        return jax.lax.scan(lambda w, _: (w + total(w, x), None), w, length=4)[0]

    options = {"shard_size": 16, **options}
    recorded = options | {"job_folder": folder}
    w, x = np.float32(1), np.full((256, 64, 64), 0.1, np.float32)

    def session():
        with bj.session(runner, options) as s:
            for _ in range(4):
                s.run(total, w, x, options=recorded | {"overwrite": True})

    return {
        "run": lambda: bj.run(total, w, np.tile(x, (4, 1, 1)), runner=runner, options=recorded),
        "rounds": lambda: bj.run(rounds, w, x, runner=runner, options=recorded),
        "launch": lambda: bj.launch(rounds, w, x, runner=runner, options=recorded).result(),
        "session": session,
    }


def main():
    kind, runner, options, folder = sys.argv[1:]
    try:
        calls(runner, json.loads(options), folder)[kind]()
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
        raise
    print("done", time.monotonic(), flush=True)


def slow(x):
    """What `beamjax run` runs: a program of `calls`."""
    import jax
    import jax.numpy as jnp

    import beamjax as bj

    def body(v):
        return jax.lax.fori_loop(0, 600, lambda _, a: jnp.tanh(a @ a), v).sum()

    return bj.program(placements={"rows": None})(lambda x: bj.reduce_mean(bj.map_fn(body, x)))(x)


if __name__ == "__main__":
    main()
