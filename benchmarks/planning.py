"""Time, size and memory of plans of large programs, compared with what `jax.jit` takes for them.

    python benchmarks/planning.py
    python benchmarks/planning.py --cases leaves reductions --repeats=5
    python benchmarks/planning.py --cpu             # on a machine that others use: processor time

Each case has a process of its own, in which it is planned and then compiled, at two sizes, so `jit`
profits from what JAX caches. Times are the least of all repeats. Prints, for each case:

- `plan`: seconds from the call to a plan, with its executables as StableHLO, but not compiled;
- `trace`, `compile`: seconds of `jax.jit(f).trace(...)`, and of `.lower().compile()`;
- `ratio`: plan / (trace + compile);
- `growth`: how many times longer planning takes at the larger size, of how many times larger;
- steps and equations, and the bytes of the executables and constants of the plan;
- MiB of anonymous memory that planning took at most;
- `find`: microseconds in which a second call finds its plan, once its arguments are flattened;
- `again`: the same with flattening them;
- `jit`: microseconds of a second call of a jitted function that takes the same arguments and
  returns 0.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

from large_values import Watch, measured
from memory import anonymous

clock = time.perf_counter
Case = Callable[[int], tuple[Callable[..., Any], tuple[Any, ...]]]
"""Makes a new function of this size, and its arguments."""


def transformer(layers: int, scanned: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a small language model by its weights, over 16 sequences."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj

    width, heads, length, words, members = 64, 4, 32, 256, 16
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return rng.normal(0, 0.05, shape).astype(np.float32)

    def of_layer(*front: int) -> dict[str, Any]:
        return {
            "qkv": normal(*front, width, 3 * width), "out": normal(*front, width, width),
            "up": normal(*front, width, 4 * width), "down": normal(*front, 4 * width, width),
            "scale": normal(*front, 2, width), "shift": normal(*front, 2, width),
        }  # fmt: skip

    blocks = of_layer(layers) if scanned else [of_layer() for _ in range(layers)]
    weights = {"embed": normal(words, width), "blocks": blocks}
    tokens = rng.integers(0, words, (members, length + 1)).astype(np.int32)
    mask = np.tril(np.ones((length, length), bool))

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1 + scale) + shift

    def block(x: Any, w: Any) -> Any:
        y = norm(x, w["scale"][0], w["shift"][0]) @ w["qkv"]
        q, k, v = jnp.moveaxis(y.reshape(length, 3, heads, width // heads), 1, 0)
        scores = jnp.einsum("ihd,jhd->hij", q, k) / np.sqrt(width // heads)
        shares = jax.nn.softmax(jnp.where(mask, scores, -1e9), -1)
        x = x + jnp.einsum("hij,jhd->ihd", shares, v).reshape(length, width) @ w["out"]
        y = norm(x, w["scale"][1], w["shift"][1])
        return x + jax.nn.gelu(y @ w["up"]) @ w["down"]

    def loss(w: Any, row: Any) -> Any:
        x = w["embed"][row[:-1]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, w["blocks"])
        else:
            for own in w["blocks"]:
                x = block(x, own)
        logits = jax.nn.log_softmax(x @ w["embed"].T)
        return -jnp.take_along_axis(logits, row[1:, None], 1).mean()

    @bj.program(placements={"rows": members})
    def mean_loss(w: Any, rows: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda row: loss(w, row), rows))

    return jax.grad(mean_loss), (weights, tokens)


def equations(count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """So many equations of members and of the server, with a reduction each thousand of them."""
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": 64})
    def chain(c: Any, x: Any) -> Any:
        for number in range(count // 10):
            c = jnp.tanh(c) * 0.5 + 1
            y = jnp.sin(x) * c
            x = jnp.where(y > 0, x + y, x - 0.25 * y)
            if number % 100 == 99:
                c = c + bj.reduce_sum(x) / 1024
        return c + bj.reduce_sum(x)

    return chain, (np.float32(1), np.linspace(0, 1, 64, dtype=np.float32))


def leaves(count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient by so many weights of a loss that reads all of them."""
    import jax
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": 64})
    def loss(w: Any, x: Any) -> Any:
        return bj.reduce_mean(bj.map_fn(lambda x: sum((x * a).sum() for a in w.values()), x))

    weights = {f"w{number:05}": np.full(8, number, np.float32) for number in range(count)}
    return jax.grad(loss), (weights, np.ones((64, 8), np.float32))


def reductions(count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """So many reductions of different values, by three operators."""
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": 64})
    def many(x: Any) -> Any:
        reduce = bj.reduce_sum, bj.reduce_max, bj.reduce_mean
        return [reduce[k % 3](x * np.float32(k + 1)) for k in range(count)]

    return many, (np.linspace(0, 1, 64, dtype=np.float32),)


def loops(rounds: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Scans nested three deep around passes, with so many passes in the innermost round."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import beamjax as bj

    @bj.program(placements={"members": 64})
    def nested(w: Any, x: Any) -> Any:
        def scanned(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
            return lambda w: jax.lax.scan(lambda w, _: (f(w), None), w, length=3)[0]

        def innermost(w: Any) -> Any:
            for number in range(rounds):
                step = bj.map_fn(lambda x, w=w, k=number: jnp.tanh(x @ w + k), x)
                w = w - 0.1 * bj.reduce_mean(step)
            return w

        return scanned(lambda w: scanned(lambda w: scanned(innermost)(w) * 0.9)(w) + 1)(w)

    return nested, (np.ones(8, np.float32), np.ones((64, 8), np.float32))


CASES: dict[str, tuple[Case, int, int]] = {
    "transformer, scan": (lambda n: transformer(n, True), 12, 48),
    "transformer, unrolled": (lambda n: transformer(n, False), 12, 48),
    "equations": (equations, 1_000, 10_000),
    "leaves": (leaves, 100, 1_000),
    "reductions": (reductions, 100, 1_000),
    "loops, three deep": (loops, 2, 8),
}
"""Each case with its two sizes."""


def plan(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    from beamjax.interpreters.planning import make_plan
    from beamjax.interpreters.staging.arguments import flatten_call
    from beamjax.options import Options
    from beamjax.plan.steps import walk

    began = clock()
    planned = make_plan(flatten_call(fn, args), Options())
    seconds = clock() - began
    code = sum(len(x) for body in planned.plan.bodies.values() for x in body.artefacts.values())
    code += sum(np_bytes(x) for x in planned.plan.constants)
    steps, eqns = len(list(walk(planned.plan.steps))), len(list(planned.flat.walk()))
    return {"plan": seconds, "bytes": code, "steps": steps, "eqns": eqns}


def np_bytes(value: Any) -> int:
    return int(getattr(value, "nbytes", 0))


def jit(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    import jax

    began = clock()
    traced = jax.jit(fn).trace(*args)
    middle = clock()
    traced.lower().compile()
    return {"trace": middle - began, "compile": clock() - middle}


def second(fn: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """The least microseconds of what a second call does before it computes."""
    import jax

    from beamjax.interpreters.planning import plan_for
    from beamjax.interpreters.staging.arguments import flatten_call
    from beamjax.options import Options

    call, options, zero = flatten_call(fn, args), Options(), jax.jit(lambda *args: 0)
    ways: dict[str, Callable[[], Any]] = {
        "find": lambda: plan_for(call, options),
        "again": lambda: plan_for(flatten_call(fn, args), options),
        "jit": lambda: zero(*args),
    }
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(50):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            least[name] = min(least[name], 1e6 * (time.perf_counter() - began))
    return least


def one(name: str, repeats: int) -> dict[str, float]:
    """Measures a case in this process."""
    make, small, large = CASES[name]
    found: dict[str, float] = {}
    for way in (plan, jit):  # imports, and what JAX does but once
        way(*make(max(small // 4, 1)))
    for n, size in (("small", small), ("large", large)):
        for _ in range(repeats):
            fn, args = make(size)
            before, watch = anonymous(os.getpid()), Watch(list)
            seconds = plan(fn, args)
            seconds["MiB"] = watch.end()["launcher"] - before
            for key, value in {**seconds, **jit(*make(size))}.items():
                found[f"{n} {key}"] = min(value, found.get(f"{n} {key}", value))
    return {**found, **second(*make(large))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.one:
        global clock
        clock = time.process_time if flags.cpu else time.perf_counter
        print(json.dumps(one(flags.one, flags.repeats)))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'case':22} {'size':>6} {'plan, s':>8} {'trace':>7} {'compile':>8} {'ratio':>6}  "
          f"{'growth':>12} {'steps':>6} {'eqns':>6} {'kB':>6} {'MiB':>5} "
          f"{'find, us':>9} {'again, us':>10} {'jit, us':>8}")  # fmt: skip
    total = {"plan": 0.0, "jit": 0.0}
    for name in flags.cases:
        how = [f"--repeats={flags.repeats}", *(["--cpu"] if flags.cpu else [])]
        found = measured(__file__, "--one", name, *how)
        if not found:
            print(f"{name:22} failed", flush=True)
            continue
        show(name, found, total)
    print(f"all: {total['plan']:.2f} s to plan, {total['jit']:.2f} s for jit to trace and compile, "
          f"ratio {total['plan'] / total['jit']:.2f}")  # fmt: skip


def show(name: str, found: dict[str, float], total: dict[str, float]) -> None:
    _, small, large = CASES[name]
    planned, traced = found["large plan"], found["large trace"] + found["large compile"]
    total["plan"] += planned
    total["jit"] += traced
    growth = f"{planned / found['small plan']:.1f} of {large / small:.0f}"
    print(f"{name:22} {large:6} {planned:8.2f} {found['large trace']:7.2f} "
          f"{found['large compile']:8.2f} {planned / traced:6.2f}  {growth:>12} "
          f"{found['large steps']:6.0f} {found['large eqns']:6.0f} "
          f"{found['large bytes'] / 1e3:6.0f} {found['large MiB']:5.0f} {found['find']:9.0f} "
          f"{found['again']:10.0f} {found['jit']:8.0f}",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
