"""What bodies cost, against what XLA counts."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import beamjax as bj
from beamjax.costs import Cost, Rates
from beamjax.interpreters import cost, stage
from beamjax.interpreters.cost import GUESSED_ROUNDS, body_cost, waits_for_data
from beamjax.options import Options
from beamjax.planning import plan_for


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME")


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w) - y) ** 2)


COUNTED_BY_XLA = {
    "dot": (jnp.dot, array(30, 40), array(40, 50)),
    "batched dot": (lambda a, b: jnp.einsum("nij,njk->nik", a, b), array(4, 8, 9), array(4, 9, 7)),
    "convolution": (convolve, array(1, 3, 28, 28), array(8, 3, 3, 3)),
    "elementwise": (lambda x: x * 2.0 + 1.0, array(1000)),
    "sum": (jnp.sum, array(50, 40)),
    "gradient": (jax.grad(loss), array(40, 10), array(30, 40), array(30, 10)),
    "in jit": (jax.jit(lambda a, b: a @ b), array(30, 40), array(40, 50)),
    "in remat": (jax.checkpoint(lambda a, b: a @ b), array(30, 40), array(40, 50)),
}


@pytest.mark.parametrize("name", COUNTED_BY_XLA)
def test_operations_are_those_that_xla_counts(name):
    fn, *args = COUNTED_BY_XLA[name]
    found = body_cost(jax.make_jaxpr(fn)(*args)).flops
    told = jax.jit(fn).lower(*args).compile().cost_analysis()
    expected = (told[0] if isinstance(told, list) else told)["flops"]
    assert expected / 2.1 <= found <= 2 * expected + 400 * (name == "gradient")


def test_rounds_of_a_scan_are_counted():
    def rounds(length):
        fn = lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=length)[0]
        return body_cost(jax.make_jaxpr(fn)(array(8, 8)))

    assert rounds(10) == rounds(1).times(10)
    assert rounds(1).flops == 2 * 8**3


def test_a_branch_costs_what_its_dearest_block_does():
    fn = lambda p, x: lax.cond(p, lambda x: x @ x, lambda x: x, x)
    assert body_cost(jax.make_jaxpr(fn)(True, array(8, 8))).flops >= 2 * 8**3


def test_loops_that_wait_for_data_are_guessed():
    fn = lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ c, x)
    jaxpr = jax.make_jaxpr(fn)(array(8, 8))
    found = body_cost(jaxpr)
    assert found.guessed
    assert found.flops >= GUESSED_ROUNDS * 2 * 8**3
    assert waits_for_data(jaxpr)
    assert waits_for_data(jax.make_jaxpr(jax.jit(fn))(array(8, 8)))
    assert not waits_for_data(
        jax.make_jaxpr(lambda x: lax.fori_loop(0, 3, lambda _, c: c @ c, x))(array(8, 8))
    )


@pytest.mark.parametrize(
    "fn",
    [
        jnp.linalg.cholesky, jnp.linalg.eigh, jnp.linalg.svd, jnp.linalg.inv, jnp.sort, jnp.cumsum,
        jnp.fft.fft, jnp.argmax, lambda x: x.at[jnp.arange(8)].add(1.0), lambda x: x[::2],
        lambda x: jax.random.normal(jax.random.key(0), x.shape) + x,
        lambda x: jax.random.gamma(jax.random.key(0), jnp.abs(x)),
        lambda x: jnp.linalg.solve(x, x), lambda x: jax.scipy.sparse.linalg.cg(x, x[0])[0],
    ],
)  # fmt: skip
def test_anything_costs_something(fn):
    found = body_cost(jax.make_jaxpr(fn)(array(8, 8)))
    assert found.flops > 0
    assert found.nbytes > 0


costs = st.builds(Cost, *[st.integers(0, 10**9).map(float)] * 3, st.booleans())


@given(costs, costs, costs)
def test_costs_are_added(a, b, c):
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + Cost() == a
    assert a.times(2) == a + a


@given(costs, costs)
def test_more_takes_longer(a, b):
    assert Rates().seconds(a + b) >= Rates().seconds(a)


def test_steps_of_a_plan_have_costs():
    @bj.program(clients=100)
    def prog(w, x):
        mean = bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))
        return mean @ mean

    arguments, key, restore = stage.flatten_arguments((jnp.ones((7, 5)), jnp.ones((100, 7))))
    plan = plan_for(prog, arguments, key, restore, Options()).plan
    assert set(plan.costs) == {"map_clients_0", "server_0"}
    assert plan.costs["map_clients_0"].flops == pytest.approx(2 * 7 * 5 + 5, rel=0.2)
    assert plan.costs["server_0"].flops >= 2 * 5


def test_a_member_costs_the_same_in_any_number():
    def member(n):
        @bj.program(clients=n)
        def prog(x):
            return bj.reduce_sum(bj.map_fn(lambda v: jnp.tanh(v) @ v, x) * 2.0)

        arguments, key, restore = stage.flatten_arguments((jnp.ones((n, 16)),))
        return plan_for(prog, arguments, key, restore, Options()).plan.costs["map_clients_0"]

    assert member(1000).flops == pytest.approx(member(10).flops, rel=0.1)


def test_unknown_axes_count_as_one():
    (n,) = jax.export.symbolic_shape("n")
    assert cost._dim(n) == 1


def test_what_members_share_is_read_and_computed_once():
    fn = lambda w, x: x @ jnp.tanh(w)
    jaxpr = jax.make_jaxpr(fn)(array(64, 64), array(64))
    own, shared = body_cost(jaxpr), body_cost(jaxpr, [False, True])
    assert shared.flops == 2 * 64 * 64
    assert own.flops > shared.flops
    assert shared.nbytes == 2 * 4 * 64
    assert own.nbytes > 4 * 64 * 64
    scanned = lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, length=3)[0]
    inside = body_cost(jax.make_jaxpr(scanned)(array(64, 64), array(64)), [False, True])
    assert inside.nbytes == 3 * shared.nbytes


def test_loops_over_placed_values_cost_their_rounds():
    """Also those that are written outside of maps, and so are part of the program itself."""

    @bj.program(clients=16)
    def program(x):
        doubled = lambda c, _: (jnp.sin(c) @ jnp.ones((8, 8)), None)
        y, _ = jax.lax.scan(doubled, x, None, length=5)
        z = jax.lax.while_loop(lambda v: jnp.all(v[0] < 2), lambda v: (v[0] + 1, v[1] * 2), (0, y))
        return bj.reduce_sum(jax.lax.cond(x.sum() > 0, jnp.cos, jnp.sin, z[1]))

    told = bj.explain(program, jnp.ones((16, 8)))
    cost = told.facts.predicted
    assert cost.guessed
    assert cost.seconds > 0


def convolution(channels, filters):
    fn = lambda x, k: lax.conv_general_dilated(
        x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    args = array(4, 8, 8, channels), array(3, 5, channels, filters)
    return body_cost(jax.make_jaxpr(fn)(*args))


def test_places_of_a_kernel_are_gathered_whatever_the_channels():
    found = convolution(1, 2)
    assert found.extra == cost.GATHERED * (4 * 8 * 8) * (3 * 5)
    assert convolution(64, 32).extra == found.extra
    assert convolution(64, 32).flops == 64 * 16 * found.flops


def test_libraries_divide_large_products_and_convolutions():
    assert convolution(1, 2).shared == 0
    large = convolution(64, 32)
    assert large.shared == large.weight
    dot = lambda n: body_cost(jax.make_jaxpr(jnp.dot)(array(n, n), array(n, n)))
    assert (dot(100).shared, dot(200).shared) == (0, 2 * 200**3)
    loops = lambda x: lax.fori_loop(0, 3, lambda _, c: jnp.sin(c @ c), x)
    looped = body_cost(jax.make_jaxpr(loops)(array(200, 200)))
    assert looped.shared == 3 * dot(200).shared < looped.weight
