"""The bytes that computations hold at once, against those that XLA reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import beamjax as bj
from beamjax.bodies.held_bytes import SHARED, Operations, Value, held_bytes

ROWS = 64
SQUARE = jax.ShapeDtypeStruct((ROWS, ROWS), np.float32)
WIDE = jax.ShapeDtypeStruct((1 << 18,), np.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)


def chain(x):
    for _ in range(10):
        x = jnp.tanh(x * 2) + x
    return jnp.sum(x)


BODIES = {
    "product": (lambda x: x @ x, SQUARE),
    "products": (lambda x: (x @ x.T) @ (x.T @ x), SQUARE),
    "slope": (jax.grad(loss), SQUARE, SQUARE),
    "scan": (
        lambda x: lax.scan(lambda c, _: (jnp.tanh(c @ x), None), x, None, length=5)[0],
        SQUARE,
    ),
    "stacked": (lambda x: lax.scan(lambda c, _: (c @ x, c), x, None, length=5)[1], SQUARE),
    "while": (lambda x: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ x + c, x), SQUARE),
    "branch": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x @ x.T @ x, x), SQUARE),
    "softmax": (lambda x: jax.nn.softmax(x @ x) @ x, SQUARE),
    "sum of a chain": (chain, WIDE),
    "elementwise": (lambda x: jnp.sin(x) * jnp.cos(x) + x, WIDE),
}


@pytest.mark.versions
@pytest.mark.parametrize("name", BODIES)
def test_the_peak_is_near_that_of_xla(name):
    fn, *args = BODIES[name]
    report = jax.jit(fn).lower(*args).compile().memory_analysis()
    expected = report.temp_size_in_bytes + report.output_size_in_bytes
    found = held_bytes(jax.make_jaxpr(fn)(*args)).peak
    assert expected / 2 - 5000 <= found <= 2 * expected + 5000, (found, expected)


def held(fn, own, *args):
    """What `fn` holds for a member, if the arguments at these positions differ between members."""
    closed = jax.make_jaxpr(fn)(*args)
    operations = Operations()
    given = [Value(4.0 * ROWS * ROWS) if i in own else SHARED for i in range(len(args))]
    return operations.held(operations.call(closed, given))


def test_what_members_share_does_not_count():
    one = 4 * ROWS * ROWS
    product = lambda w, x: (w @ w) @ x
    assert held(product, {1}, SQUARE, SQUARE).peak == one
    assert held(product, {0, 1}, SQUARE, SQUARE).peak == 2 * one
    assert held(product, set(), SQUARE, SQUARE).peak == 0


def test_a_round_holds_what_it_reads_but_not_what_later_rounds_read():
    one = 4 * ROWS * ROWS
    rounds = lambda x, w: lax.fori_loop(0, 9, lambda _, c: c @ w, x)
    counters = 100
    assert 0 <= held(rounds, {0}, SQUARE, SQUARE).looped - 2 * one <= counters
    assert 0 <= held(rounds, {0, 1}, SQUARE, SQUARE).looped - 3 * one <= counters
    assert held(lambda x: x @ x, {0}, SQUARE).looped == 0
    read = lambda xs: lax.scan(lambda c, x: (c + x @ x, None), jnp.zeros((8, 8)), xs)[0]
    stack = jax.ShapeDtypeStruct((100, 8, 8), np.float32)
    assert held(read, {0}, stack).looped <= 5 * 4 * 8 * 8


def test_a_map_holds_the_values_of_all_members():
    fn = bj.program(clients=100)(lambda x: bj.map_fn(lambda v: jnp.outer(v, v) @ v, x))
    x = jax.ShapeDtypeStruct((100, 32), np.float32)
    assert held_bytes(jax.make_jaxpr(fn)(x)).peak >= 100 * 4 * 32 * 32


def test_draws_are_loops():
    draw = lambda key: jax.random.normal(key, (64,))
    found = held(draw, {0}, jax.eval_shape(lambda: jax.random.key(0)))
    assert 3 * 4 * 64 <= found.looped <= 12 * 4 * 64 + 4 * 4 * ROWS * ROWS
