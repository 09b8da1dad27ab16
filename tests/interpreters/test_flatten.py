"""Programs as flat lists of operations: calls, loops, references, and the user's lines."""

import collections
import functools
import os
import re
import subprocess
import sys
import textwrap

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from helpers import assert_close, planned
from jax import lax
from jax.custom_batching import custom_vmap

import beamjax as bj

N = 5
X = jnp.arange(10.0).reshape(N, 2)
W = jnp.asarray([0.5, -1.0])
HERE = os.path.abspath(__file__)
CALLS = {"jit", "pjit", "remat2", "checkpoint", "closed_call", "composite", "custom_jvp_call",
         "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_vmap_call"}  # fmt: skip


def flat(fn, *args):
    """The lines of the flat program."""
    return str(bj.explain(fn, *args, stage="flat")).splitlines()


def operations(fn, *args, indent=r" +"):
    """Pairs of the name of a primitive and the user's line, in order."""
    found = [re.match(rf"{indent}\S.* = (\w+)\b(.*)", line) for line in flat(fn, *args)]
    return [(m[1], m[2].partition("    # ")[2]) for m in found if m]


def counts(fn, *args):
    return collections.Counter(name for name, _ in operations(fn, *args))


def check(fn, *args):
    found = bj.run(fn, *args, runner="local", options={"shard_size": 8})
    assert_close(found, jax.jit(fn)(*args), rtol=1e-5)


@bj.program(clients=N)
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, x))


# --- calls


@jax.custom_vjp
def with_vjp(w, x):
    return total(w, x)


with_vjp.defvjp(
    lambda w, x: (total(w, x), x), lambda x, ct: (ct * jnp.sum(x, axis=0), jnp.zeros_like(x))
)


@jax.custom_jvp
def with_jvp(w, x):
    return total(w, x)


with_jvp.defjvp(lambda p, t: (with_jvp(*p), total(t[0], p[1])))

with_vmap = custom_vmap(total)
with_vmap.def_vmap(lambda size, batched, w, x: (jax.vmap(total, (0, None))(w, x), True))

everything = jax.checkpoint_policies.everything_saveable
WRAPPED = {
    "jit": jax.jit(total),
    "remat": jax.checkpoint(total),
    "remat policy": functools.partial(jax.checkpoint, policy=everything)(total),
    "custom_vjp": with_vjp,
    "custom_jvp": with_jvp,
    "custom_vmap": with_vmap,
    "composite": jax.lax.composite(total, "test.total"),
    "nested": jax.jit(jax.checkpoint(jax.jit(lambda w, x: with_vjp(w, x) + with_jvp(w, x)))),
}
WITHOUT_GRADIENT = ("custom_vmap", "composite")


@pytest.mark.parametrize("name", WRAPPED)
def test_calls_are_inlined(name):
    fn = WRAPPED[name]
    found = counts(fn, W, X)
    assert not CALLS & set(found)
    assert found["bj_map"] == found["bj_reduce_sum"] == (2 if name == "nested" else 1)
    check(fn, W, X)
    if name not in WITHOUT_GRADIENT:
        gradient = jax.grad(lambda w, x: jnp.sum(fn(w, x) ** 2))
        assert not CALLS & set(counts(gradient, W, X))
        check(gradient, W, X)


def test_constants_of_calls_become_inputs_once():
    table = jnp.arange(6.0).reshape(3, 2)
    inner = jax.jit(lambda w: w + table[0])
    fn = lambda w, x: total(inner(w), x) + inner(w) * table[1]
    assert flat(fn, W, X)[0].endswith("arg0:float32[2] arg1:float32[5,2] const0:float32[3,2]")
    check(fn, W, X)


def test_values_that_pass_through_leave_no_operation():
    def fn(x):
        x = jax.lax.optimization_barrier(jax.lax.stop_gradient(x))
        return jax.device_put(jnp.copy(x))

    assert flat(fn, X) == ["inputs arg0:float32[5,2]", "outputs arg0"]


def test_maps_read_server_values_that_were_broadcast_for_them():
    @bj.program(clients=N)
    def mixed(w, x, b):
        served = [bj.broadcast(b), bj.broadcast(w)]
        fn = lambda b, v, w, k: (b + v * w * k, w)
        return bj.map_fn(fn, (served[0], x, served[1], jnp.arange(float(N))))

    args = W, X, jnp.float32(3)
    assert counts(mixed, *args)["bj_broadcast"] == 1
    (mapped,) = [line for line in flat(mixed, *args) if "bj_map" in line]
    (broadcast,) = [line for line in flat(mixed, *args) if "bj_broadcast" in line]
    name = broadcast.strip().partition(":")[0]
    # What the body returns unchanged is the broadcast itself.
    assert re.search(rf"bj_map arg2 arg1 {name} ", mapped)
    assert flat(mixed, *args)[-1].endswith(f" {name}")
    check(mixed, *args)


# --- control flow


def scan(w, x):
    return lax.scan(lambda w, _: (w - 0.1 * total(w, x), None), w, None, length=3)[0]


def while_loop(w, x):
    return lax.while_loop(lambda w: jnp.sum(w) > 1, lambda w: w - total(w, x), w)


def predicate(w, x):
    return lax.while_loop(lambda w: jnp.sum(total(w, x)) > 1, lambda w: w - 1, w)


def cond(w, x):
    return lax.cond(w[0] > 0, lambda: total(w, x), lambda: w)


def switch(w, x):
    return lax.switch(w.astype(int)[0], [lambda: w, lambda: total(w, x), lambda: -w])


def fori(w, x):
    return lax.fori_loop(0, 3, lambda i, w: w - total(w, x), w)


def scan_in_jit(w, x):
    return jax.jit(jax.checkpoint(scan))(w, x)


LOOPS = {scan: "scan", while_loop: "while", predicate: "while", cond: "cond", switch: "cond",
         fori: "scan", scan_in_jit: "scan"}  # fmt: skip


@pytest.mark.parametrize("fn", LOOPS, ids=lambda fn: fn.__name__)
def test_loops_around_placed_operators_hold_blocks(fn):
    first = (scan if fn is scan_in_jit else fn).__code__.co_firstlineno + 1
    names = ("scan", "while", "cond")
    ((kind, line),) = [found for found in operations(fn, W, X, indent="  ") if found[0] in names]
    assert kind == LOOPS[fn]
    assert f"{HERE}:{first}" in line
    inner = [name for name, _ in operations(fn, W, X, indent=" {6}")]
    assert {"bj_map", "bj_reduce_sum"} <= set(inner)
    check(fn, W, X)


def test_loops_are_written_out_in_a_pipeline():
    """Nothing drives a transform: rounds are copied, and of branches one is chosen."""

    def fn(w, i, x):
        one = lambda w, k: (w - k * total(w, x), w * k)
        forth, back = (
            lax.scan(one, w, jnp.arange(1.0, 4.0), reverse=reverse) for reverse in (False, True)
        )
        none = lax.scan(lambda w, k: (w - total(w, x), w), w, jnp.zeros(0))
        branches = [lambda w, x: w, total, lambda w, x: -w * total(w, x)]
        return forth, back, none, lax.switch(i, branches, w, x)

    spec = jax.ShapeDtypeStruct(X.shape, X.dtype)
    members = [(k, np.asarray(v)) for k, v in enumerate(X)]
    for i in (-1, 0, 1, 2, 5):
        index = jnp.int32(i)
        transform = bj.transform(fn, W, index, spec)
        kinds = {type(step).__name__ for step in transform.plan.steps}
        assert kinds <= {"Map", "Server", "Gather", "Scatter"}
        if i not in (1, 5):
            continue  # The plan is the same.
        with beam.Pipeline(runner="FnApiRunner") as p:
            results = p | beam.Create(members) | transform
            expected = jax.jit(fn)(W, index, X)
            for k, (result, want) in enumerate(
                zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
            ):
                close = lambda found, want=want: assert_close(found[0], np.asarray(want))
                assert_that(result, close, label=f"{k}")


# --- references


def test_references():
    @jax.jit
    def doubled(w):
        ref = jax.new_ref(w)
        ref[...] = ref[...] * 2
        return ref[...]

    def across_steps(w, x):
        ref = jax.new_ref(w)
        ref[...] = total(ref[...], x)
        return ref[...]

    def in_a_loop(w, x):
        ref = jax.new_ref(w)

        def one(c, _):
            ref[...] += total(c, x)
            return c * 0.5, ref[...]

        return lax.scan(one, w, length=2), ref[...]

    check(lambda w, x: total(doubled(w), x), W, X)
    assert counts(across_steps, W, X).keys() == {"bj_map", "bj_reduce_sum"}
    check(across_steps, W, X)
    check(in_a_loop, W, X)


def test_references_from_outside_are_refused():
    ref = jax.new_ref(W)

    def fn(w, x):
        return total(ref[...], x)

    with pytest.raises(bj.StagingError, match="has a side effect") as error:
        bj.run(fn, W, X, runner="local")
    assert f"{HERE}:{fn.__code__.co_firstlineno + 1} " in str(error.value)


# --- lines


def test_lines_are_those_of_the_call():
    @bj.program(clients=N)
    def prog(w, x):
        y = bj.map_fn(lambda v: v * w, x)
        b = bj.broadcast(w)
        z = y - b
        return (
            bj.reduce_mean(z),
            bj.reduce_weighted_mean(z, jnp.ones(N)),
        )

    first = prog.__wrapped__.__code__.co_firstlineno
    found = dict(reversed(operations(prog, W, X)))
    names = ["bj_map", "bj_broadcast", "sub", None, "bj_reduce_mean", "bj_reduce_sum"]
    for k, name in enumerate(names, start=first + 2):
        assert name is None or found[name].startswith(f"{HERE}:{k} (")


@pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.vmap, jax.hessian])
def test_lines_survive_transformations(transform):
    fn = lambda w, x: jnp.sum(total(w, x) ** 2) + np.sum(x) + np.mean(x)
    args = (W[None], X[None]) if transform is jax.vmap else (W, X)
    found = {line for _, line in operations(transform(fn), *args) if line}
    assert found
    assert all(line.startswith(f"{HERE}:") for line in found)


def test_lines_of_scripts(tmp_path):
    script = textwrap.dedent(
        """
        import jax.numpy as jnp, beamjax as bj
        @bj.program(clients=3)
        def prog(x):
            return bj.reduce_sum(bj.map_fn(jnp.sin, x))
        print(bj.explain(prog, jnp.ones(3), stage="flat"))
        """
    )
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-c", f"import runpy; runpy.run_path('script.py')\n{script}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    lines = [line.rpartition("/")[2] for line in done.stdout.splitlines() if "#" in line]
    assert [line.rpartition("# ")[2] for line in lines] == 2 * ["script.py:5 (prog)"] + 2 * [
        "<string>:6 (prog)"
    ]


# --- arguments


def test_plans_are_remembered_by_the_structure_of_arguments():
    prog = bj.program(clients=5)(lambda x: bj.reduce_sum(jax.tree.leaves(x)[0]))
    first = planned(prog, [X])
    assert planned(prog, [np.asarray(X) + 1]).plan is first.plan
    assert planned(prog, (X,)).plan is not first.plan
    assert planned(prog, [bj.from_arrays(np.asarray(X))]).plan is not first.plan
    assert planned(prog, [X]).plan is first.plan  # Other small plans do not displace it.


def test_leaves_that_are_no_data():
    for leaf, message in [
        ("text", "found a .* functools.partial"),
        (object(), "found a .* functools.partial"),
        (np.asarray(["a"]), r"found an array of dtype <U1.* np\.char\.encode"),
    ]:
        with pytest.raises(bj.StructureError, match=rf"w\['name'\]: {message}"):
            bj.run(total, {"name": leaf}, X)


def test_results_without_a_tangent_space():
    prog = bj.program(clients=N)(lambda i: jnp.sum(bj.reduce_sum(i.astype("float32"))))
    found = bj.run(jax.grad(prog, allow_int=True), jnp.arange(N), runner="local")
    assert (found.dtype, found.shape) == (jax.dtypes.float0, (N,))
