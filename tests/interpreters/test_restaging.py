"""Bodies that run as Python: in this process from memory, in others from the pickled function."""

import dataclasses
import functools
import gc
import json
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import planned

import beamjax as bj
from beamjax.bodies import jax_settings
from beamjax.bodies import python_bodies as restaging
from beamjax.errors import StagingError, WorkerError
from beamjax.execution import bind_inputs
from beamjax.interpreters import planning
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.options import Options
from beamjax.plan.steps import Body
from beamjax.runtime import local as evaluate

N = 11
X = jnp.arange(2.0 * N).reshape(N, 2)
KEYS = jax.random.split(jax.random.key(7), N)
Pair = namedtuple("Pair", "left right")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    at: jax.Array
    unit: str = dataclasses.field(metadata={"static": True}, default="m")


def host_sin(v):
    return jax.pure_callback(np.sin, v, v, vmap_method="sequential")


def plan_and_inputs(fn, args):
    found, options = planned(fn, *args, shard_size=8), Options(shard_size=8)
    call = flatten_call(fn, args)
    chosen = found.plan.shard_sizes, found.plan.vectorizations
    recipe = restaging.Recipe(planning.make_plan, call, options, *chosen)
    plan = dataclasses.replace(found.plan, recipe=recipe)
    return plan, bind_inputs(plan, call)


def elsewhere(plan, program=None):
    """The plan as a process sees it that did not make it."""
    program = plan.recipe.pickled() if program is None else program

    def sent(body):
        if body.python is None:
            return body
        python = dataclasses.replace(body.python, function=None, program=program)
        return dataclasses.replace(body, python=python)

    def renamed(step):
        names = {name: getattr(step, name, None) for name in ("body", "short_body")}
        return dataclasses.replace(step, **{k: f"far {v}" for k, v in names.items() if v})

    steps = map(renamed, plan.steps)
    bodies = {f"far {key}": sent(body) for key, body in plan.bodies.items()}
    return dataclasses.replace(plan, steps=tuple(steps), bodies=bodies)


def program(fn):
    return bj.program(clients=N)(fn)


@program
def two_passes(x):
    mean = bj.reduce_mean(bj.map_fn(host_sin, x))
    jax.debug.callback(lambda mean: None, mean)
    return bj.map_fn(lambda v: host_sin(v - mean), x), mean


@program
def draws(scale, keys):
    return bj.map_fn(lambda key: host_sin(jax.random.normal(key, (2,)) * scale), keys)


@program
def of_trees(point, pair):
    mapped = bj.map_fn(lambda p, q: Pair(host_sin(p.at), q), (point, pair.left))
    return mapped, pair.right, None


def total(w, x):
    @jax.custom_jvp
    def measured(v):
        return jnp.sum(host_sin(v))

    measured.defjvp(lambda p, t: (measured(*p), jnp.sum(t[0])))
    return bj.reduce_sum(bj.map_fn(lambda v: measured(v * w), x))


CASES = {
    "two passes": (two_passes, X),
    "keys and weak types": (draws, 2.0, KEYS),
    "trees": (of_trees, Point(X), Pair(X[:, 0], (None, X[0]))),
    "jit and gradient": (jax.jit(jax.value_and_grad(program(total))), 2.0, X),
    "partial": (functools.partial(draws, 3), KEYS),
    "source": (two_passes, bj.from_arrays(np.asarray(X))),
    "closure over arrays": (program(lambda x: bj.map_fn(lambda v: host_sin(v + X[2]), x)), X),
}


def results(plan, inputs):
    return {k: value.tobytes() for k, value in evaluate.evaluate(plan, inputs, Options()).items()}


def test_another_process_computes_the_same():
    for name, (fn, *args) in CASES.items():
        plan, inputs = plan_and_inputs(fn, args)
        assert results(plan, inputs) == results(elsewhere(plan), inputs), name


@pytest.mark.parametrize("setting", ["enable_x64", "threefry_partitionable"])
def test_settings_travel(setting):
    value = not jax_settings.settings()[setting]
    with getattr(jax, setting)(value):
        plan, inputs = plan_and_inputs(draws, (np.float64(0.5), KEYS))
        (near,) = evaluate.evaluate(plan, inputs, Options()).values()
        expected = jax.jit(draws)(np.float64(0.5), KEYS)
        far_plan = elsewhere(plan)
    (far,) = evaluate.evaluate(far_plan, inputs, Options()).values()
    assert (near.dtype, near.tobytes()) == (far.dtype, far.tobytes())
    assert near.dtype == expected.dtype
    np.testing.assert_allclose(near, expected, rtol=1e-6)


def test_the_plan_is_made_once_a_process(monkeypatch):
    plan, inputs = plan_and_inputs(two_passes, (X,))
    calls = []
    make = restaging._make_plan
    monkeypatch.setattr(restaging, "_make_plan", lambda *args: calls.append(1) or make(*args))
    restaging._plans.clear()
    assert sum(body.python is not None for body in plan.bodies.values()) == 3
    far = elsewhere(plan)
    evaluate.evaluate(far, inputs, Options())
    evaluate.evaluate(far, inputs, Options())
    assert len(calls) == 1


# --- what can't be done


def far_error(plan, inputs, program):
    with pytest.raises(WorkerError) as error:
        evaluate.evaluate(elsewhere(plan, program), inputs, Options())
    return str(error.value)


def test_programs_that_another_process_refuses():
    def fails(x):
        if missing:
            raise ImportError("no module")
        return bj.map_fn(host_sin, x)

    missing = []
    plan, inputs = plan_and_inputs(two_passes, (X,))
    header, _, rest = plan.recipe.pickled().partition(b"\n")
    older = json.dumps(json.loads(header) | {"jax": "0.1"}).encode() + b"\n" + rest
    message = far_error(plan, inputs, older)
    assert "map_clients_0: it runs as Python, which takes the same versions" in message
    assert "'jax': '0.1'" in message
    other, _ = plan_and_inputs(program(lambda x: bj.map_fn(lambda v: host_sin(v) + 1, x)), (X,))
    message = far_error(plan, inputs, other.recipe.pickled())
    assert "stages the function to another program" in message
    assert "pure_callback calls back to the host at" in message
    failing, inputs = plan_and_inputs(program(fails), (X,))
    missing.append("a module")
    message = far_error(failing, inputs, None)
    assert "the function can't be staged in this process: ImportError: no module" in message
    python = restaging.PythonBody("x calls back", "0")
    with pytest.raises(WorkerError, match="step_0: it runs as Python, but its function is neither"):
        restaging.python_function("unheard of", Body("step_0", {}, (), python))


def test_what_can_not_be_pickled_runs_here_and_is_named_elsewhere():
    lock = threading.Lock()

    def locked(u):
        with lock:
            return np.sin(u)

    @program
    def prog(x):
        return bj.map_fn(lambda v: jax.pure_callback(locked, v, v, vmap_method="sequential"), x)

    for runner in ("local", "DirectRunner"):
        np.testing.assert_allclose(bj.run(prog, X, runner=runner), np.sin(X), rtol=1e-6)
    options = {"direct_running_mode": "multi_processing"}
    with pytest.raises(StagingError, match=r"can't be pickled") as error:
        bj.run(prog, X, options=options)
    assert "'lock' (lock), which locked uses," in str(error.value)
    assert f"{__file__}:{prog.__wrapped__.__code__.co_firstlineno} " in str(error.value)


# --- lifetime, and processes of Beam


def test_nothing_holds_on_to_the_function():
    prog = program(lambda x: bj.map_fn(host_sin, x))
    bj.run(prog, X, runner="local")
    known = set(restaging._known)
    dead = weakref.ref(prog.__wrapped__)
    del prog
    gc.collect()
    assert dead() is None
    assert set(restaging._known) < known


SCRIPT = """
    import collections, dataclasses, sys
    import jax, jax.numpy as jnp, numpy as np
    import beamjax as bj

    Pair = collections.namedtuple("Pair", "left right")

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Point:
        at: jax.Array
        unit: str = dataclasses.field(metadata={"static": True}, default="m")

    @jax.tree_util.register_pytree_with_keys_class
    class Node(list):
        def tree_flatten_with_keys(self):
            return [(jax.tree_util.SequenceKey(i), x) for i, x in enumerate(self)], None
        def tree_flatten(self):
            return list(self), None
        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(children)

    def body(v):
        v = v.at[0]
        jax.debug.print("member {}", v[0])
        return Pair(jax.pure_callback(np.sin, v, v, vmap_method="expand_dims"), v)

    @bj.program(clients=11)
    def prog(x):
        return bj.map_fn(body, x), bj.reduce_sum(x.at[0])

    if __name__ == "__main__":
        x = jnp.arange(22.0).reshape(11, 2)
        options = {"shard_size": 8, "direct_running_mode": "multi_processing",
                   "direct_num_workers": 2}
        found = bj.run(prog, Point(Node([x])), options=options)
        expected = bj.run(prog, Point(Node([x])), runner="local", options={"shard_size": 8})
        same = jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), found, expected)
        print(same)
"""


def test_in_processes_of_beam(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "(Pair(left=True, right=True), True)" in done.stdout
    lines = Counter(line for line in done.stdout.splitlines() if line.startswith("member"))
    assert lines == {f"member {2.0 * i}": 2 for i in range(11)}
