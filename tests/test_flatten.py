"""Inlining of calls, the user's lines, and what a plan can't hold."""

import collections
import functools
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_batching import custom_vmap

import beamjax as bj
from beamjax.errors import StagingError
from beamjax.interpreters import rules
from beamjax.interpreters.flat_program import Var
from beamjax.interpreters.flatten import CALLS, contains_placed_operators, flatten

N = 5
X = jnp.arange(10.0).reshape(N, 2)
W = jnp.asarray([0.5, -1.0])
HERE = os.path.abspath(__file__)


def flat(fn, *args):
    return flatten(jax.make_jaxpr(fn)(*args))


def counts(fn, *args):
    return collections.Counter(eqn.primitive.name for eqn in flat(fn, *args).eqns)


def run(fn, *args):
    return bj.run(fn, *args, runner="local", options={"shard_size": 8})


@bj.program(clients=N)
def total(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, x))


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


def both(w, x):
    return with_vjp(w, x) + with_jvp(w, x)


WRAPPERS = {
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "remat_policy": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable
    ),
    "custom_vjp": lambda fn: with_vjp,
    "custom_jvp": lambda fn: with_jvp,
    "custom_vmap": lambda fn: with_vmap,
    "composite": lambda fn: jax.lax.composite(fn, "test.total"),
    "nested": lambda fn: jax.jit(jax.checkpoint(jax.jit(both))),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_calls_are_inlined(name):
    fn = WRAPPERS[name](total)
    found = counts(fn, W, X)
    assert not CALLS & set(found)
    assert found["bj_map"] == found["bj_reduce_sum"] == (2 if name == "nested" else 1)
    np.testing.assert_allclose(run(fn, W, X), jax.jit(fn)(W, X), rtol=1e-6)


@pytest.mark.parametrize("name", ["jit", "remat", "custom_vjp", "custom_jvp", "nested"])
def test_gradients_through_calls(name):
    fn = jax.grad(lambda w, x: jnp.sum(WRAPPERS[name](total)(w, x) ** 2))
    assert not CALLS & set(counts(fn, W, X))
    np.testing.assert_allclose(run(fn, W, X), jax.jit(fn)(W, X), rtol=1e-5)


def test_constants_of_calls_become_inputs_once():
    table = jnp.arange(6.0).reshape(3, 2)
    inner = jax.jit(lambda w: w + table[0])

    def fn(w, x):
        return total(inner(w), x) + inner(w) * table[1]

    found = flat(fn, W, X)
    assert len(found.arguments) == 2
    assert [v.name for v in found.inputs] == ["arg0", "arg1", "const0"]
    assert found.constants[0].shape == (3, 2)
    np.testing.assert_allclose(run(fn, W, X), jax.jit(fn)(W, X), rtol=1e-6)


def test_values_that_pass_through_leave_no_equation():
    def fn(x):
        x = jax.lax.optimization_barrier(jax.lax.stop_gradient(x))
        return jax.device_put(jnp.copy(x))

    found = flat(fn, X)
    assert found.eqns == []
    assert found.outputs == found.inputs


def test_maps_read_server_values_that_were_broadcast_for_them():
    @bj.program(clients=N)
    def mixed(w, x, b):
        served = [bj.broadcast(b), bj.broadcast(w)]
        fn = lambda b, v, w, k: (b + v * w * k, w)
        return bj.map_fn(fn, (served[0], x, served[1], jnp.arange(float(N))))

    args = W, X, jnp.float32(3)
    found = flat(mixed, *args)
    maps = [eqn for eqn in found.eqns if eqn.primitive.name == "bj_map"]
    (served,) = (eqn.params["num_broadcast"] for eqn in maps)
    names = [atom.name for atom in maps[0].inputs]
    assert served == 1
    assert names[0] == "arg2"
    # What a body hands on is the broadcast itself.
    assert names[2] == found.outputs[1].name
    assert counts(mixed, *args)["bj_broadcast"] == 1
    for got, expected in zip(run(mixed, *args), jax.jit(mixed)(*args), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_maps_of_nothing_but_broadcasts_stay():
    @bj.program(clients=N)
    def same(w):
        return bj.reduce_sum(bj.map_fn(lambda w: w * 2, bj.broadcast(w)))

    found = counts(same, W)
    assert found["bj_broadcast"] == found["bj_map"] == 1
    np.testing.assert_allclose(run(same, W), 2 * N * W)


def test_a_flat_program_reads_as_text():
    text = str(flat(total, W, X))
    assert text.startswith("inputs arg0:float32[2] arg1:float32[5,2]")
    assert "bj_map arg0 arg1" in text
    assert f"{HERE}:" in text
    assert text.splitlines()[-1].startswith("outputs v")


# --- control flow


def scan(w, x):
    return jax.lax.scan(lambda w, _: (w - 0.1 * total(w, x), None), w, None, length=3)[0]


def while_loop(w, x):
    return jax.lax.while_loop(lambda w: jnp.sum(w) > 1, lambda w: w - total(w, x), w)


def predicate(w, x):
    return jax.lax.while_loop(lambda w: jnp.sum(total(w, x)) > 1, lambda w: w - 1, w)


def cond(w, x):
    return jax.lax.cond(w[0] > 0, lambda: total(w, x), lambda: w)


def switch(w, x):
    return jax.lax.switch(1, [lambda: w, lambda: total(w, x), lambda: -w])


def fori(w, x):
    return jax.lax.fori_loop(0, 3, lambda i, w: w - total(w, x), w)


def scan_in_jit(w, x):
    return jax.jit(scan)(w, x)


LOOPS = [(scan, "scan"), (while_loop, "while"), (predicate, "while"), (cond, "cond"),
         (switch, "cond"), (fori, "scan"), (scan_in_jit, "scan")]  # fmt: skip


@pytest.mark.parametrize(("fn", "kind"), LOOPS, ids=[fn.__name__ for fn, _ in LOOPS])
def test_loops_around_placed_operators_hold_blocks(fn, kind):
    line = (scan if fn is scan_in_jit else fn).__code__.co_firstlineno + 1
    if fn is switch:  # A switch with a constant index is no switch.
        fn = lambda w, x, _fn=fn: jax.lax.switch(
            w.astype(int)[0], [lambda: w, lambda: total(w, x), lambda: -w]
        )
        line = fn.__code__.co_firstlineno
    (eqn,) = [eqn for eqn in flat(fn, W, X).eqns if eqn.blocks]
    assert eqn.primitive.name == kind
    assert f"{HERE}:{line}" in eqn.line
    inner = [e.primitive.name for block in eqn.blocks for e in block.walk()]
    assert "bj_map" in inner
    assert "bj_reduce_sum" in inner
    np.testing.assert_allclose(run(fn, W, X), jax.jit(fn)(W, X), rtol=1e-6)


def unrolled(fn, *args):
    return flatten(jax.make_jaxpr(fn)(*args), unroll=True)


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_are_written_out_for_graphs_that_nobody_drives(reverse):
    def fn(w, x):
        one = lambda w, i: (w - i * total(w, x), w * i)
        return jax.lax.scan(one, w, jnp.arange(1.0, 4.0), reverse=reverse)

    program = unrolled(fn, W, X)
    assert not any(eqn.blocks for eqn in program.eqns)
    assert sum(eqn.primitive.name == "bj_map" for eqn in program.eqns) == 3
    values = dict(zip(program.inputs, [W, X, *program.constants], strict=True))
    for eqn in program.eqns:
        args = [values[a] if isinstance(a, Var) else a.val for a in eqn.inputs]
        values.update(zip(eqn.outputs, rules.bind(eqn, args), strict=True))
    for found, expected in zip(program.outputs, jax.tree.leaves(jax.jit(fn)(W, X)), strict=True):
        np.testing.assert_allclose(values[found], expected, rtol=1e-6)


def test_all_branches_are_written_out_and_one_is_chosen():
    branches = [lambda w, x: w, total, lambda w, x: -w * total(w, x)]
    fn = lambda w, x, i: jax.lax.switch(i, branches, w, x)
    program = unrolled(fn, W, X, 0)
    assert not any(eqn.blocks for eqn in program.eqns)
    for i in (-1, 0, 1, 2, 5):
        values = dict(zip(program.inputs, [W, X, jnp.int32(i), *program.constants], strict=True))
        for eqn in program.eqns:
            args = [values[a] if isinstance(a, Var) else a.val for a in eqn.inputs]
            values.update(zip(eqn.outputs, rules.bind(eqn, args), strict=True))
        expected = jax.jit(fn)(W, X, i)
        np.testing.assert_allclose(values[program.outputs[0]], expected, rtol=1e-6)


def test_a_scan_without_rounds_is_written_out_too():
    fn = lambda w, x: jax.lax.scan(lambda w, i: (w - total(w, x), w), w, jnp.zeros(0))
    program = unrolled(fn, W, X)
    assert program.outputs[0] is program.inputs[0]
    assert program.outputs[1].aval.shape == (0, 2)


def test_loops_without_placed_operators_are_kept_whole():
    def fn(w, x):
        w = jax.lax.fori_loop(0, 3, lambda i, w: jnp.sin(w), w)
        w = jax.lax.cond(w[0] > 0, jnp.sin, jnp.cos, w)
        return total(w, x)

    assert counts(fn, W, X)["cond"] == 1
    np.testing.assert_allclose(run(fn, W, X), jax.jit(fn)(W, X), rtol=1e-6)


def test_placed_operators_are_found_at_any_depth():
    (eqn,) = jax.make_jaxpr(jax.jit(jax.checkpoint(scan)))(W, X).eqns
    assert contains_placed_operators(eqn)
    (eqn,) = jax.make_jaxpr(jax.jit(jnp.sin))(W).eqns
    assert not contains_placed_operators(eqn)


# --- mutable references


def test_references_inside_a_jit_stay_inside():
    @jax.jit
    def doubled(w):
        ref = jax.new_ref(w)
        ref[...] = ref[...] * 2
        return ref[...]

    fn = lambda w, x: total(doubled(w), x)
    np.testing.assert_allclose(run(fn, W, X), total(W * 2, X), rtol=1e-6)


def test_references_across_steps():
    def fn(w, x):
        ref = jax.new_ref(w)
        ref[...] = total(ref[...], x)
        return ref[...]

    np.testing.assert_allclose(run(fn, W, X), total(W, X), rtol=1e-6)
    assert counts(fn, W, X).keys() == {"bj_map", "bj_reduce_sum"}


def test_references_of_a_loop_are_carried():
    def fn(w, x):
        ref = jax.new_ref(w)

        def one(c, _):
            ref[...] += total(c, x)
            return c * 0.5, ref[...]

        return lax.scan(one, w, None, length=2), ref[...]

    (_, sums), last = run(fn, W, X)
    np.testing.assert_allclose(sums, jnp.stack([W + total(W, X), W + 1.5 * total(W, X)]), rtol=1e-6)
    np.testing.assert_allclose(last, sums[-1])


def test_references_of_others_are_refused():
    ref = jax.new_ref(W)

    def fn(w, x):
        return total(ref[...], x)

    with pytest.raises(StagingError, match="has a side effect") as error:
        run(fn, W, X)
    assert f"{HERE}:{fn.__code__.co_firstlineno + 1} " in str(error.value)


# --- lines


def lines(fn, *args):
    return {eqn.primitive.name: eqn.line for eqn in reversed(flat(fn, *args).eqns)}


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
    found = lines(prog, W, X)
    assert found["bj_map"].startswith(f"{HERE}:{first + 2} (")
    assert found["bj_broadcast"].startswith(f"{HERE}:{first + 3} (")
    assert found["sub"].startswith(f"{HERE}:{first + 4} (")
    assert found["bj_reduce_mean"].startswith(f"{HERE}:{first + 6} (")
    assert found["bj_reduce_sum"].startswith(f"{HERE}:{first + 7} (")


@pytest.mark.parametrize("transform", [jax.grad, jax.jit, jax.vmap, jax.hessian])
def test_lines_survive_transformations(transform):
    fn = lambda w, x: jnp.sum(total(w, x) ** 2)
    args = (W[None], X[None]) if transform is jax.vmap else (W, X)
    found = {line for line in lines(transform(fn), *args).values() if line}
    assert found
    assert all(line.startswith(f"{HERE}:") for line in found)


def test_helpers_of_numpy_are_no_lines_of_the_user():
    found = lines(lambda x: np.sum(x) + np.mean(x), X)
    assert all(line.startswith(f"{HERE}:") for line in found.values() if line)


@pytest.mark.parametrize("form", ["file", "command"])
def test_lines_of_scripts(form, tmp_path):
    script = textwrap.dedent(
        """
        import jax, jax.numpy as jnp, beamjax as bj
        from beamjax.interpreters.flatten import flatten
        @bj.program(clients=3)
        def prog(x):
            return bj.reduce_sum(bj.map_fn(jnp.sin, x))
        for eqn in flatten(jax.make_jaxpr(prog)(jnp.ones(3))).eqns:
            print(eqn.line)
        """
    )
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, *(["script.py"] if form == "file" else ["-c", script])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    found = done.stdout.splitlines()
    assert len(found) == 2
    assert all(line.endswith(("script.py:6 (prog)", "<string>:6 (prog)")) for line in found)
