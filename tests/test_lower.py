"""From pieces to the plan: names, types, lanes, outputs, reasons, and what is refused."""

import itertools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import stage
from beamjax.options import Options
from beamjax.plan import Gather, Map, Scatter, Server, ValueType
from beamjax.planning import plan_for

N = 11
HERE = os.path.abspath(__file__)
W = jnp.asarray([0.5, 1.0, -1.0])
X = jnp.arange(33.0).reshape(N, 3)


def plan_of(fn, *args, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, Options(shard_size=8, **options)).plan


def program(fn):
    return bj.program(clients=N)(fn)


def kinds(plan):
    return [type(step).__name__ for step in plan.steps]


@program
def many(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return {
        "sum": bj.reduce_sum(y),
        "mean": bj.reduce_mean(y),
        "max": bj.reduce_max(y),
        "count": bj.reduce_sum(y > 0),
        "any": bj.reduce_any(y > 0),
        "gram": y.T @ y,
        "half": bj.reduce_sum(y.astype("bfloat16")),
        "placed": y,
    }


def test_one_pass_and_its_lanes():
    plan = plan_of(many, W, X)
    assert kinds(plan) == ["Map"]
    (step,) = plan.steps
    assert (step.name, step.placement) == ("map_clients_0", "clients")
    assert (plan.passes(), plan.shards("clients")) == (1, 2)
    lanes = {(lane.kind, lane.dtype): lane for lane in step.lanes}
    assert set(lanes) == {("sum", "float32"), ("max", "float32"), ("sum", "int32"), ("any", "bool")}
    # Sums and means of float32, a product, and bfloat16 with wide partials share an accumulator.
    floats = lanes["sum", "float32"]
    assert sorted((r.reducer, r.dtype, r.size) for r in floats.reductions) == [
        ("mean", "float32", 3), ("sum", "bfloat16", 3),
        ("sum", "float32", 3), ("sum", "float32", 9),
    ]  # fmt: skip
    for lane in step.lanes:
        offsets = [(r.offset, r.size) for r in lane.reductions]
        assert offsets[0][0] == 0
        assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(offsets))
        assert sum(offsets[-1]) == lane.size


def test_types_of_values():
    plan = plan_of(many, W, X)
    outs = jax.tree.unflatten(jax.tree.structure(jax.eval_shape(many, W, X)), plan.outputs)
    assert plan.values[outs["placed"].value] == ValueType((3,), "float32", None, "clients")
    assert plan.values[outs["gram"].value] == ValueType((3, 3), "float32")
    assert plan.values[outs["half"].value].dtype == "bfloat16"
    assert plan.values[outs["count"].value].dtype == "int32"


def test_inputs_by_shards_whole_both_and_not_at_all():
    @program
    def prog(a, b, c, unused):
        return bj.reduce_sum(bj.map_fn(lambda v, u: v * a + u, (b, c))) + c[3]

    first, second, third, last = plan_of(prog, W, X, X, X).inputs
    assert (first.server is not None, first.placed) == (True, None)
    assert (second.server, second.placed is not None) == (None, True)
    assert third.placed is not None
    assert (last.server, last.placed) == (None, None)
    assert [i.path for i in (first, last)] == ["args[0]", "args[3]"]


def test_outputs_of_all_kinds():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v * w, x)
        return w, 3.0, np.arange(2), jnp.swapaxes(y, 0, 1), bj.reduce_sum(y)

    plan = plan_of(prog, W, X)
    passed, literal, constant, moved, total = plan.outputs
    assert passed.input == 0
    assert literal.constant == np.float32(3.0)
    assert constant.input == 2 or constant.constant is not None or constant.value is not None
    assert (moved.axis, plan.values[moved.value].placement) == (1, "clients")
    assert plan.values[total.value].placement is None
    for a, b in zip(jax.jit(prog)(W, X), bj.run(prog, W, X, runner="local"), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(b, a, rtol=1e-5)


def test_float0_results():
    prog = program(lambda i: jnp.sum(bj.reduce_sum(i.astype("float32"))))
    fn = jax.grad(prog, allow_int=True)
    found = bj.run(fn, jnp.arange(N), runner="local")
    assert (found.dtype, found.shape) == (jax.dtypes.float0, (N,))


def test_reasons_and_lines():
    @program
    def prog(x):
        y = bj.map_fn(jnp.sin, x)
        ordered = jnp.sort(y, 0)
        far = bj.map_fn(lambda v: y @ v, x)
        return ordered, bj.reduce_sum(far), bj.map_fn(jnp.cos, jnp.cumsum(y, 0))

    steps = plan_of(prog, X).steps
    first = prog.__wrapped__.__code__.co_firstlineno
    (gathered,) = [step for step in steps if isinstance(step, Gather)]
    assert re.fullmatch("(sort|cumsum) mixes members|the body .* closes over a placed value",
                        gathered.reason)  # fmt: skip
    assert gathered.line.startswith(tuple(f"{HERE}:{first + k} (" for k in (3, 4, 5)))
    (scattered,) = [step for step in steps if isinstance(step, Scatter)]
    assert scattered.reason == "bj_map reads it along the members"
    assert scattered.line.startswith(f"{HERE}:{first + 5} (")


def test_steps_know_their_functions_and_lines():
    def weigh(v):
        return v * 2

    prog = program(lambda x: bj.reduce_sum(bj.map_fn(weigh, x)))
    plan = plan_of(prog, X)
    (step,) = plan.steps
    assert step.functions == ("weigh",)
    assert all(line.startswith(f"{HERE}:") for line in plan.bodies[step.body].lines)


def test_equal_rounds_share_a_body():
    @program
    def prog(w, x):
        for _ in range(6):
            w = w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v, w=w: jnp.tanh(v * w), x))
        return w

    plan = plan_of(prog, W, X)
    assert plan.passes() == 6
    assert len({step.body for step in plan.steps if isinstance(step, Map)}) == 1
    assert len({step.body for step in plan.steps if isinstance(step, Server)}) == 1
    names = [step.name for step in plan.steps]
    assert len(set(names)) == len(names)


def test_platforms():
    prog = program(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    plan = plan_of(prog, X, platforms=("cpu", "cuda"))
    (body,) = plan.bodies.values()
    assert set(body.artefacts) == {"cpu", "cuda"}


def test_keys_travel_as_data():
    prog = program(lambda k: bj.map_fn(lambda k: jax.random.split(k, 2), k))
    keys = jax.random.split(jax.random.key(0), N)
    plan = plan_of(prog, keys)
    (out,) = plan.outputs
    assert plan.values[out.value] == ValueType((2, 2), "uint32", "threefry2x32", "clients")
    found = bj.run(prog, keys, runner="local")
    assert (found == jax.jit(prog)(keys)).all()


# --- random draws that depend on the batch


def of(impl):
    return jax.random.split(jax.random.key(0, impl=impl), N)


def draws(key):
    return jax.random.normal(key, (2,))


def draws_in_a_loop(key):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.random.uniform(key), 0.0)


def makes_a_key(seed):
    return jax.random.normal(jax.random.key(seed, impl="rbg"), (2,))


def splits(key):
    return jax.random.key_data(jax.random.split(key, 2))


WHOLE = [(draws, of("rbg")), (draws, of("unsafe_rbg")), (draws_in_a_loop, of("rbg")),
         (makes_a_key, jnp.arange(N)), (splits, of("unsafe_rbg"))]  # fmt: skip


@pytest.mark.parametrize(("body", "x"), WHOLE)
def test_draws_that_depend_on_the_batch_are_made_at_once(body, x):
    prog = program(lambda x: (bj.map_fn(body, x), bj.reduce_sum(bj.map_fn(body, x))))
    found = bj.run(prog, x, runner="local", options={"shard_size": 8})
    for left, right in zip(found, jax.jit(prog)(x), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)
    assert (np.asarray(found[0]) == np.asarray(jax.jit(prog)(x)[0])).all()
    line = body.__code__.co_firstlineno + 1
    told = f"the body {body.__name__} draws from rbg keys ("
    (text, *_) = [t for t in str(bj.explain(prog, x)).splitlines() if told in t]
    assert f" at {HERE}:{line} ({body.__name__}" in text
    assert text.endswith("), and such draws depend on all members")


@pytest.mark.parametrize(("body", "impl"), [(splits, "rbg"), (jax.random.key_data, "unsafe_rbg")])
def test_what_rbg_keys_may_do(body, impl):
    prog = program(lambda x: bj.map_fn(body, x))
    found = bj.run(prog, of(impl), runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(found, jax.jit(prog)(of(impl)))
    assert not re.search("gathers|rbg keys", str(bj.explain(prog, of(impl))))


# --- gathers


def sorted_members(x):
    return jnp.sort(bj.map_fn(jnp.sin, x), axis=0)


def test_gathers_are_refused_past_the_limit():
    x = jnp.ones((N, 3))
    nbytes = N * 3 * 4
    expected = jax.jit(program(sorted_members))(x)
    found = bj.run(program(sorted_members), x, runner="local", options={"gather_limit": nbytes})
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with pytest.raises(bj.StagingError) as error:
        bj.run(program(sorted_members), x, runner="local", options={"gather_limit": nbytes - 1})
    line = sorted_members.__code__.co_firstlineno + 1
    assert str(error.value).startswith(f"{HERE}:{line} (sorted_members): sort mixes members, so ")
    told = f"{nbytes} bytes of float32[3]@clients ({N} members) would be gathered"
    assert told in str(error.value)
    assert f"gather_limit allows {nbytes - 1}" in str(error.value)
