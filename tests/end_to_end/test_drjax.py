"""Programs written for DrJAX: run by beamjax as they are, and with beamjax imported as drjax."""

import concurrent.futures
import functools
import inspect
import sys
import threading
import types

import drjax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close, assert_same_bits
from jax.extend import core as jex
from programs import PROGRAMS, Program, steps_of

import beamjax as bj
from beamjax.interpreters.staging.drjax import OPERATORS

# DrJAX itself reads the mesh in a way that JAX has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:jax.interpreters.pxla:DeprecationWarning")

N, M = 6, 4
SHARED = """
    plain grad_placed hessian vmap_server maml jit_around nested_programs broadcast_then_map trees
    keys_placed_and_closed_over keys_broadcast_and_batched grad_of_weighted_mean private_sum
    linen_and_momentum
""".split()
"""Programs of the table that use no more than DrJAX has."""


def rnd(*shape, seed=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), shape)


X = rnd(N, 5, 3, seed=1)


def keywords(ops):
    @ops.program(placements={"clients": N}, use_abstract_mesh=False)
    def total(w, v):
        mapped = ops.map_fn(fn=lambda w, v: w * v, arg=(ops.broadcast(x=w), v), mesh=None)
        mean = ops.reduce_weighted_mean(x=mapped, w=v)
        return ops.reduce_sum(x=mapped), ops.reduce_mean(x=mapped), mean

    return total, (jnp.float32(2.0), jnp.arange(1.0, N + 1))


def two_programs_in_turn(ops):
    def norm(n):
        @ops.program(placements={"clients": n})
        def of(x):
            return ops.reduce_sum(ops.map_fn(lambda v: jnp.sum(v * v), x))

        return of

    return lambda a, b: norm(N)(a) + norm(M)(b), (X, rnd(M, 2))


def on_a_mesh(ops):
    mesh = jax.make_mesh((1,), ("clients",), axis_types=(jax.sharding.AxisType.Auto,))

    @ops.program(placements={"clients": N})
    def total(w, x):
        scaled = ops.map_fn(lambda w, x: x @ w, (ops.broadcast(w, mesh=mesh), x), mesh=mesh)
        return ops.reduce_sum(scaled)

    return total, (rnd(3), X)


CASES = {name: PROGRAMS[name] for name in SHARED} | {
    "keywords": Program(keywords),
    "two_programs_in_turn": Program(two_programs_in_turn, plan="maps 2"),
    "on_a_mesh": Program(on_a_mesh),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_programs_give_what_drjax_gives_as_they_are_and_by_another_import(name):
    case = CASES[name]
    with case.settings():
        fn, args = case.build(drjax)
        expected = jax.jit(fn)(*args)
        by_import, _ = case.build(bj)
        assert_close(jax.jit(by_import)(*args), expected)
        local = bj.run(fn, *args, runner="local")
        assert_close(local, expected)
        assert_same_bits(bj.run(fn, *args, runner="DirectRunner"), local)
        assert steps_of(facts_of(bj.explain(fn, *args))) == case.plan
        staged = str(bj.explain(fn, *args, stage="staged"))
    assert "bj_" in staged
    assert not [p for p in ("clients", "inner", "outer") if f"_{p}" in staged]


def test_lines_are_those_of_the_user_and_verify_agrees():
    fn, args = keywords(drjax)
    lines = [line for step in facts_of(bj.explain(fn, *args)).steps for line in step.lines]
    assert lines
    assert all(line.startswith(__file__) for line in lines)
    assert bj.verify(fn, *args, runner="local").ok


# --- the interface


def functions(module):
    return {n: f for n, f in vars(module).items() if n[0] != "_" and callable(f)}


def test_the_operators_are_all_that_drjax_has():
    assert set(functions(drjax)) == {*OPERATORS, "program"}


@pytest.mark.versions
def test_operators_take_the_arguments_of_drjax():
    @drjax.program(clients=N)
    def call(name, x):
        return getattr(drjax, name)(x, x, x)

    for name in OPERATORS:
        theirs = inspect.signature(getattr(drjax, name)).parameters
        ours = dict(inspect.signature(getattr(bj, name)).parameters)
        assert ours.pop("placement").kind == inspect.Parameter.KEYWORD_ONLY
        facts = lambda p: (p.name, p.kind, p.default)
        assert list(map(facts, theirs.values())) == list(map(facts, ours.values())), name
        with pytest.raises(TypeError, match=rf"{name}\(\) takes \d positional arguments? but"):
            bj.explain(functools.partial(call, name), X)


WEIGHTED = {
    "wider weights": (rnd(N).astype("bfloat16"), jnp.arange(1.0, N + 1)),
    "wider values": (rnd(N, 2), jnp.arange(1.0, N + 1).astype("bfloat16")[:, None]),
    "two kinds of 16 bits": (rnd(N).astype("bfloat16"), jnp.arange(1.0, N + 1).astype("float16")),
    "int weights": (rnd(N).astype("float16"), jnp.arange(1, N + 1)),
    "ints": (jnp.arange(N), jnp.arange(1, N + 1)),
    "weights of more axes": (rnd(N), jnp.arange(1.0, 2 * N + 1).reshape(N, 2)),
    "axes of both": (rnd(N, 3, 1), jnp.arange(1.0, 2 * N + 1).reshape(N, 1, 2)),
}


@pytest.mark.parametrize("case", WEIGHTED)
def test_values_and_weights_promote_as_in_drjax(case):
    def mean(ops):
        return ops.program(placements={"clients": N})(lambda x, w: ops.reduce_weighted_mean(x, w))

    args = WEIGHTED[case]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        expected = jax.jit(mean(drjax))(*args)
        rtol = 1e-2 if any(x.dtype.itemsize == 2 for x in args) else 1e-6
        for ops in (drjax, bj):
            assert_close(bj.run(mean(ops), *args, runner="local"), expected, rtol=rtol)


# --- what is left behind


def test_operators_are_undefined_outside_of_programs_while_staging():
    def outside(x):
        return drjax.reduce_sum(x)

    with pytest.raises(Exception, match="only defined in the context of a DrJAX program"):
        bj.explain(outside, X)


def test_drjax_is_left_as_it_was():
    fn, args = keywords(drjax)  # a new function; its `program` adds to DrJAX's own table
    before = {**vars(drjax)}, {**vars(sys.modules["drjax._src.api"])}
    bj.explain(fn, *args)
    with pytest.raises(KeyError):
        bj.explain(drjax.program(clients=N)(lambda x: drjax.map_fn(lambda v: {}[0], x)), X)
    assert ({**vars(drjax)}, {**vars(sys.modules["drjax._src.api"])}) == before
    assert type(drjax) is types.ModuleType


@pytest.mark.parametrize("first", ["jit", "run"])
def test_neither_is_served_what_the_other_traced(first):
    @jax.jit
    @drjax.program(clients=N)
    def total(x):
        return drjax.reduce_sum(drjax.map_fn(lambda v: jnp.sum(v * v), x))

    expected = np.sum(np.square(np.asarray(X, "float64")))
    if first == "jit":
        np.testing.assert_allclose(total(X), expected, rtol=1e-5)
    for _ in range(2):
        # A new function each time, so that it is staged each time.
        whole = lambda x: total(x) + 0.0
        assert facts_of(bj.explain(whole, X)).passes == 1
        assert "bj_map" not in str(jax.make_jaxpr(lambda x: total(x) * 1.0)(X))
        np.testing.assert_allclose(total(X), expected, rtol=1e-5)


def test_other_threads_keep_the_operators_of_drjax():
    """Another thread traces with DrJAX while this one stages, both in the midst of a program."""
    turn = threading.Barrier(2, timeout=60)

    def body_of(scale, n):
        @drjax.program(clients=n)
        def total(x):
            turn.wait()  # both have entered a program
            mapped = drjax.map_fn(lambda v: jnp.sum(v) * scale, x)
            turn.wait()
            result = drjax.reduce_sum(mapped)
            turn.wait()  # none has left it
            return result

        return total

    ours, theirs = body_of(2.0, N), body_of(3.0, M)
    other = rnd(M, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        traced = pool.submit(jax.make_jaxpr(theirs), other)
        staged = bj.explain(ours, X, stage="staged")
        jaxpr = traced.result()
    assert "bj_map" in str(staged)
    assert "sum_from_clients" in str(jaxpr)
    assert "bj_" not in str(jaxpr)
    assert f"n={N}" in str(staged)
    np.testing.assert_allclose(
        jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, other)[0], 3 * jnp.sum(other), rtol=1e-5
    )
    with pytest.raises(Exception, match="only defined in the context"):
        drjax.reduce_sum(X)


def test_what_was_traced_before_runs_on_the_server():
    fn, args = keywords(drjax)
    closed = jax.make_jaxpr(fn)(*args)
    evaluate = jex.jaxpr_as_fun(closed)
    found = bj.run(lambda *leaves: evaluate(*leaves), *jax.tree.leaves(args), runner="local")
    assert_close(found, jax.tree.leaves(jax.jit(fn)(*args)))


def test_runs_do_not_need_drjax(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "drjax"]:
        monkeypatch.setitem(sys.modules, name, None)  # An import of it fails.
    total = bj.program(clients=N)(lambda x: bj.reduce_sum(x))
    assert bj.run(total, np.ones(N, "float32"), runner="local") == N


def test_a_drjax_that_is_built_otherwise_is_left_alone(monkeypatch):
    monkeypatch.delattr(sys.modules["drjax._src.api"], "_replace_api")
    total = bj.program(clients=N)(lambda x: bj.reduce_sum(x))
    assert bj.run(total, np.ones(N, "float32"), runner="local") == N
