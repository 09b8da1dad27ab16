"""Convolutions in loops are laid out as XLA's libraries for CPUs take them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.extend import core as jex
from test_run import assert_close, assert_same_bits

import beamjax as bj
from beamjax.interpreters import stage
from beamjax.interpreters.convolutions import with_channels_last
from beamjax.interpreters.flat_program import Eqn
from beamjax.options import parse_options
from beamjax.planning import plan_for

RNG = np.random.default_rng(0)
LAST = "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]"


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def in_rounds(convolve):
    """Two steps down the slope of a convolution, in a scan."""

    def steps(kernel, image):
        loss = lambda kernel: jnp.mean(jnp.tanh(convolve(image, kernel)) ** 2)
        step = lambda kernel, _: (kernel - 0.1 * jax.grad(loss)(kernel), None)
        return lax.scan(step, kernel, None, length=2)[0]

    return steps


def convolution(dimensions=None, strides=(1, 1), padding="SAME", **params):
    return lambda x, k: lax.conv_general_dilated(
        x, k, strides, padding, dimension_numbers=dimensions, **params
    )


CASES = {
    "channels first": (convolution(), (6, 3, 5, 5), (2, 3, 9, 8)),
    "channels last": (convolution(("NHWC", "HWIO", "NHWC")), (5, 5, 3, 6), (2, 9, 8, 3)),
    "mixed": (convolution(("CHWN", "OIHW", "NWHC")), (6, 3, 5, 5), (3, 9, 8, 2)),
    "strides": (convolution(strides=(2, 3), padding="VALID"), (6, 3, 2, 5), (2, 3, 9, 11)),
    "padding": (convolution(padding=[(0, 3), (1, 2)]), (6, 3, 4, 3), (2, 3, 9, 8)),
    "dilated": (
        convolution(padding=[(1, 1)] * 2, lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
        (6, 3, 3, 3),
        (2, 3, 9, 8),
    ),
    "groups": (convolution(feature_group_count=3), (6, 1, 3, 3), (2, 3, 9, 8)),
    "one axis": (convolution(strides=(1,)), (6, 3, 5), (2, 3, 9)),
    "three axes": (convolution(strides=(1, 1, 1)), (2, 3, 3, 3, 3), (2, 3, 5, 4, 6)),
}


def convolutions(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "conv_general_dilated":
            yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from convolutions(getattr(inner, "jaxpr", inner))


def rewritten(function, *arguments):
    closed = jax.make_jaxpr(function)(*arguments)
    eqns = [Eqn(e.primitive, e.params, [], [], "") for e in closed.jaxpr.eqns]
    flat = jex.jaxpr_as_fun(closed)
    return flat, with_channels_last(flat, [v.aval for v in closed.jaxpr.invars], eqns)


@pytest.mark.parametrize("name", CASES)
def test_values_stay_and_channels_come_last(name):
    convolve, *shapes = CASES[name]
    arguments = [normal(*shape) for shape in shapes]
    before, after = rewritten(in_rounds(convolve), *arguments)
    np.testing.assert_allclose(
        jax.jit(after)(*arguments)[0], jax.jit(before)(*arguments)[0], rtol=1e-5, atol=1e-6
    )
    found = list(convolutions(jax.make_jaxpr(after)(*arguments).jaxpr))
    assert len(found) == 2
    rank = len(shapes[1])
    last = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    for eqn in found:
        single = eqn.params["feature_group_count"] == eqn.params["batch_group_count"] == 1
        if name != "groups":
            assert single
        if single:
            assert tuple(eqn.params["dimension_numbers"]) == (last, kernel, last)


@pytest.mark.parametrize("around", ["cond", "jit", "remat", "while"])
def test_convolutions_are_found_in_whatever_holds_them(around):
    def function(flag, kernel, image):
        convolve = lambda k: k + jnp.mean(convolution()(image, k))
        match around:
            case "cond":
                return lax.cond(flag, convolve, lambda k: k * 2, kernel)
            case "jit":
                return jax.jit(convolve)(kernel)
            case "remat":
                return jax.checkpoint(convolve)(kernel)
        return lax.while_loop(lambda k: jnp.max(k) < 3, lambda k: convolve(k) + 1, kernel)

    arguments = jnp.array(True), normal(6, 3, 5, 5), normal(2, 3, 9, 8)
    before, after = rewritten(function, *arguments)
    (eqn,) = convolutions(jax.make_jaxpr(after)(*arguments).jaxpr)
    assert tuple(eqn.params["dimension_numbers"].lhs_spec) == (0, 3, 1, 2)
    np.testing.assert_allclose(after(*arguments)[0], before(*arguments)[0], atol=1e-5)


def test_what_libraries_do_not_compute_and_what_has_none_stays():
    ints = np.ones((6, 3, 5, 5), np.int32), np.ones((2, 3, 9, 8), np.int32)
    _, after = rewritten(lambda k, x: convolution()(x, k), *ints)
    (eqn,) = convolutions(jax.make_jaxpr(after)(*ints).jaxpr)
    assert tuple(eqn.params["dimension_numbers"].lhs_spec) == (0, 1, 2, 3)
    before, after = rewritten(lambda x: jnp.tanh(x) @ x, normal(3, 3))
    assert after is before


@bj.program(clients=None)
def training(kernel, images):
    steps = in_rounds(convolution(("NHWC", "HWIO", "NHWC")))
    return bj.reduce_mean(bj.map_fn(steps, (bj.broadcast(kernel), images)))


ARGUMENTS = normal(5, 5, 3, 6), normal(21, 2, 9, 8, 3)


def layouts(platform):
    arguments, key, restore = stage.flatten_arguments(ARGUMENTS)
    options = parse_options({"platforms": platform})
    plan = plan_for(training, arguments, key, restore, options).plan
    bodies = (body.artefacts[platform] for body in plan.bodies.values())
    texts = [str(export.deserialize(bytearray(body)).mlir_module()) for body in bodies]
    return {found for text in texts for found in re.findall(r"dim_numbers = (\S.*?), window", text)}


def test_plans_for_cpus_alone_have_them_so():
    assert layouts("cpu") == {LAST}
    assert len(layouts("cuda")) > 1


@pytest.mark.parametrize("loop", ["loop", "vmap"])
def test_the_bits_are_those_of_beam(loop):
    options = {"member_loop": loop}
    local = bj.run(training, *ARGUMENTS, runner="local", options=options)
    assert_close(local, jax.jit(training)(*ARGUMENTS))
    assert_same_bits(bj.run(training, *ARGUMENTS, options=options), local)
