"""JAX transformations of programs: the values, and what the programs are made of afterwards."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from programs import CASES, M, N, reference

import beamjax as bj
from beamjax.combining import reduce_p
from beamjax.primitives import REDUCE_PRIMITIVES, broadcast_p, map_p, size_p

OURS = {map_p, broadcast_p, size_p, reduce_p, *REDUCE_PRIMITIVES.values()}

TRACED = [name for name, case in CASES.items() if case.eqns is not None]
QUICK = [name for name in TRACED if not name.startswith("flax")]


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert g.dtype == w.dtype
        rtol = 2e-2 if g.dtype == jnp.bfloat16 else 3e-4
        g, w = (np.asarray(v, np.promote_types(v.dtype, "float32")) for v in (g, w))
        np.testing.assert_allclose(g, w, rtol=rtol, atol=1e-5)


@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_eager_values(name):
    fn, args = CASES[name].build(bj)
    expected, _ = CASES[name].build(reference)
    assert_same(fn(*args), expected(*args))


@pytest.mark.table
@pytest.mark.parametrize("name", TRACED)
def test_compiled_values(name):
    fn, args = CASES[name].build(bj)
    expected, _ = CASES[name].build(reference)
    assert_same(jax.jit(fn)(*args), expected(*args))


def walk(jaxpr, counts, strays):
    """Counts our equations, and collects others that touch a placed value."""
    for eqn in jaxpr.eqns:
        inner = list(jex.jaxprs_in_params(eqn.params))
        if eqn.primitive in OURS:
            counts[eqn.primitive.name] += 1
        elif inner:
            for sub in inner:
                walk(sub, counts, strays)
        elif any({N, M} & set(v.aval.shape) for v in [*eqn.invars, *eqn.outvars]):
            strays.add(eqn.primitive.name)
        if eqn.primitive is map_p:
            check_body(eqn.params["jaxpr"].jaxpr, eqn.params["n"])


def check_body(jaxpr, n):
    """Checks that a body has no axis of all members, nor constants."""
    assert not jaxpr.constvars
    for eqn in jaxpr.eqns:
        for v in [*eqn.invars, *eqn.outvars]:
            assert n not in getattr(v.aval, "shape", ())
        for sub in jex.jaxprs_in_params(eqn.params):
            check_body(sub, n)


@pytest.mark.parametrize("name", TRACED)
def test_structure(name):
    case = CASES[name]
    fn, args = case.build(bj)
    counts, strays = collections.Counter(), set()
    walk(jax.make_jaxpr(fn)(*args).jaxpr, counts, strays)
    assert counts == case.eqns
    assert strays <= case.strays


@pytest.mark.parametrize("name", QUICK)
def test_internal_checks_of_jax(name):
    fn, args = CASES[name].build(bj)
    with jax.enable_checks(True), jax.checking_leaks():
        jax.make_jaxpr(fn)(*args)
