"""A call finds its plan by the types of its arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import tree_util

import beamjax as bj
from beamjax.errors import StructureError
from beamjax.interpreters.planning import plan_for
from beamjax.interpreters.staging.arguments import flatten_call
from beamjax.options import Options


@bj.program(placements={"m": 8})
def scaled_sum(w, x):
    return bj.reduce_sum(jax.tree.leaves(w)[0] * x)


ONES = np.ones(8, np.float32)
SAME = [
    (np.float32(2), jnp.ones(8)),
    (np.array(2.0), np.ones(8)),  # float64, which JAX takes as float32
    (jnp.float32(2), ONES[::1]),
]
OTHER = [
    (2.0, ONES),
    (jnp.asarray(2.0) * 1, ONES),  # of weak type, as 2.0 is
    (np.float32([2]), ONES),
    ([np.float32(2)], ONES),
    ({"w": np.float32(2)}, ONES),
    (np.float32(2), bj.from_arrays(ONES)),
    (np.float32(2), jax.ShapeDtypeStruct((8,), np.float32)),
]


def planned(*args):
    return plan_for(flatten_call(scaled_sum, args), Options())


def test_plans_are_found_by_types():
    first = planned(np.asarray(2, np.float32), ONES)
    assert [planned(*args) is first for args in SAME] == [True] * len(SAME)
    others = [planned(*args) for args in OTHER]
    assert len({id(plan) for plan in [first, *others]}) == len(OTHER)  # 2.0 is of weak type too
    assert others[0] is others[1]
    with jax.enable_x64(True):
        assert len({id(planned(*args)) for args in [*SAME, (np.asarray(2.0), np.ones(8))]}) == 2


def test_arguments_are_described_only_for_a_new_plan(monkeypatch):
    """The description is that of the arguments as they were when the function was called."""
    weights = {"b": ONES * 2, "a": ONES * 3}
    call = flatten_call(scaled_sum, (weights, ONES))
    weights["c"] = ONES
    assert [(a.path, a.aval.shape) for a in call.arguments] == [
        ("w['a']", (8,)), ("w['b']", (8,)), ("x", (8,)),
    ]  # fmt: skip
    assert list(map(id, call.values)) == list(map(id, [weights["a"], weights["b"], ONES]))
    first = plan_for(call, Options())
    monkeypatch.setattr(tree_util, "tree_flatten_with_path", None)
    again = flatten_call(scaled_sum, ({"b": ONES, "a": jnp.ones(8)}, ONES))
    assert plan_for(again, Options()) is first
    assert (again.has_values, again.has_sources, len(again.arguments)) == (True, False, 3)


def several(x, *rest, scale=1):
    return x


def of_defaults(w, x=ONES):
    return w


NAMED = [
    (scaled_sum, ({"w": [ONES, ONES]}, ONES)),
    (several, (ONES, ONES, {"a": ONES})),
    (of_defaults, (ONES,)),
    (functools.partial(scaled_sum, ONES), ({"a": ONES},)),
    (functools.partial(several, scale=2), (ONES,)),
    (jax.jit(scaled_sum), (ONES, ONES)),
    (jax.grad(scaled_sum), (jnp.ones(8), ONES)),
    (max, (ONES, {"a": ONES})),
]


@pytest.mark.parametrize(("fn", "args"), NAMED)
def test_arguments_have_the_names_that_jax_gives_them(fn, args):
    """Also those of sources."""
    expected = jax.make_jaxpr(several_first(fn))(*args).jaxpr.debug_info.arg_names
    assert [a.path for a in flatten_call(fn, args).arguments] == list(expected)
    sources = jax.tree.map(bj.from_arrays, args)
    assert [a.path for a in flatten_call(fn, sources).arguments] == list(expected)


def several_first(fn):
    """A function with the signature of `fn` that JAX traces."""
    first = lambda *args: jax.tree.leaves(args)[0]
    return functools.wraps(fn)(first) if fn is not max else first


def test_names_that_other_values_have_are_no_names_of_arguments():
    fn = bj.program(m=8)(lambda result, x: bj.reduce_sum(result * x))
    assert [a.path for a in flatten_call(fn, (ONES, ONES)).arguments] == ["args[0]", "args[1]"]


@pytest.mark.parametrize("wrong", [np.array(["a"]), np.array([None]), np.ones(8, ">f4")])
def test_dtypes_that_jax_does_not_have(wrong):
    with pytest.raises(StructureError, match="w: found an array of"):
        flatten_call(scaled_sum, (wrong, ONES))
