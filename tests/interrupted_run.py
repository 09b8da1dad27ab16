"""A run in a process of its own that says when it reaches a moment, for tests that interrupt it.

`python interrupted_run.py moment call runner options folder` prints "now" at the moment, and the
time of the KeyboardInterrupt.
"""

import json
import sys
import threading
import time

now = lambda *_: print("now", flush=True)
MOMENTS = ("tracing", "compiling", "shard", "rounds", "fetching")


def say_in(owner, name, seconds=0.0):
    """Says "now" when a function is called, which then takes as many seconds more."""
    function = getattr(owner, name)

    def saying(*args, **kwargs):
        now()
        time.sleep(seconds)
        return function(*args, **kwargs)

    setattr(owner, name, saying)


def say_after(owner, name, seconds):
    """Says "now" some seconds after a function was called."""
    function = getattr(owner, name)

    def saying(*args, **kwargs):
        timer = threading.Timer(seconds, now)
        timer.daemon = True
        timer.start()
        return function(*args, **kwargs)

    setattr(owner, name, saying)


def main():
    moment, call, runner, options, folder = sys.argv[1:]
    import jax
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj
    from beamjax import execution
    from beamjax.jobs.job import JobRun
    from beamjax.telemetry.monitor import Monitor

    def body(v, w):
        if moment == "tracing":
            now()
            time.sleep(60)
        if moment == "compiling":  # for some seconds
            for _ in range(1500):
                v = jnp.tanh(jnp.cumsum(v @ v, 0))
        # One shard takes a minute in native code where this is the moment, or else 0.05 s.
        count = 2_000_000 if moment == "shard" else 2_000
        return jax.lax.fori_loop(0, count, lambda _, a: jnp.tanh(a @ a), v).sum() * w

    @bj.program(placements={"rows": None})
    def total(w, x):
        return bj.reduce_mean(bj.map_fn(body, (x, bj.broadcast(w))))

    def rounds(w, x):
        return jax.lax.scan(lambda w, _: (w + total(w, x), None), w, length=500)[0]

    match moment:
        case "compiling":
            say_after(JobRun, "_begin", 0.3)
        case "shard" if runner == "local":
            say_after(JobRun, "_begin", 1.5)
        case "shard":
            from beamjax.pipelines import launch

            say_after(launch, "_watch", 1.5)
        case "rounds":
            say_in(Monitor, "round_ended")
        case "fetching":
            say_in(execution, "collect", 60.0)
    fn = rounds if moment == "rounds" else total
    arguments = np.float32(1), np.full((16, 16, 16), 0.1, np.float32)
    options = {"job_folder": folder, "shard_size": 8} | json.loads(options)
    try:
        if call == "run":
            bj.run(fn, *arguments, runner=runner, options=options)
        elif call == "launch":
            bj.launch(fn, *arguments, runner=runner, options=options).result()
        else:
            own = {"job_folder": options.pop("job_folder")}
            with bj.session(runner, options) as session:
                session.run(fn, *arguments, options=options | own)
    except KeyboardInterrupt:
        print("interrupted", time.monotonic(), flush=True)
        raise


if __name__ == "__main__":
    main()
