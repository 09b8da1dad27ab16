"""What programs are made of after transformations of JAX."""

import collections
import contextlib

import jax
import pytest
from jax.extend import core as jex
from programs import CASES, M, N

import beamjax as bj
from beamjax.ops.combining import reduce_p
from beamjax.ops.primitives import REDUCE_PRIMITIVES, broadcast_p, map_p, size_p

OURS = {map_p, broadcast_p, size_p, reduce_p, *REDUCE_PRIMITIVES.values()}

TRACED = [name for name, case in CASES.items() if case.eqns is not None]


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


@pytest.mark.versions
@pytest.mark.parametrize("name", TRACED)
def test_programs_are_made_of_maps_of_one_member(name):
    """JAX checks the types of all equations, and that no tracer is left."""
    case = CASES[name]
    fn, args = case.build(bj)
    strict = not name.startswith("flax")
    with jax.enable_checks(strict), jax.checking_leaks() if strict else contextlib.nullcontext():
        jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    counts, strays = collections.Counter(), set()
    walk(jaxpr, counts, strays)
    assert counts == case.eqns
    assert strays <= case.strays
