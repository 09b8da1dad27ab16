"""`jax.experimental.checkify` around programs: as with `vmap` for `map_fn`."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close
from jax.experimental import checkify
from jax.experimental.checkify import all_checks, check, float_checks, index_checks, user_checks
from programs import N, reference, step_kinds

import beamjax as bj

X = jnp.arange(2.0 * N).reshape(N, 2)


def total(body):
    return lambda ops, x: ops.reduce_sum(ops.map_fn(body, x))


def checked(limit, text="too large: {v}"):
    def body(v):
        check(v[0] < limit, text, v=v[0])
        return v * 2

    return body


def two_checks(v):
    check(v[0] != 16, "sixteen")
    check(v[0] != 4, "four")
    return v


def other_kinds(v):
    check(v[0] != 16, "sixteen {v}", v=v)
    y = jnp.log(v - 3)
    check(v[0] != 20, "twenty {v}", v=v[0])
    return y


def in_loops(v):
    def step(c, i):
        check(c[0] < 1000.0, "grew past at {i}", i=i)
        return c * 2, None

    c, _ = jax.lax.scan(step, v, jnp.arange(9))
    return jax.lax.cond(c[1] > 9000, lambda c: jnp.sqrt(-c), lambda c: c, c)


def on_the_server(ops, x):
    mean = ops.reduce_mean(x)
    check(mean[0] < 5, "mean {m}", m=mean[0])
    y = ops.map_fn(checked(15.0), ops.broadcast(mean) - x)
    check(ops.reduce_max(y)[0] < 0, "never reached")
    return y


def in_rounds(ops, x):
    def step(c, _):
        body = lambda v: checked(500.0, "round of {v}")(v * c)
        return c + ops.reduce_mean(ops.map_fn(body, x)), None

    return jax.lax.scan(step, jnp.ones(2), None, length=4)[0]


def closing_over(ops, x):
    w = ops.reduce_sum(x) * 0
    return ops.reduce_sum(ops.map_fn(lambda v: v / w, x))


def gradient(ops, x):
    roots = lambda w: ops.reduce_sum(ops.map_fn(lambda v: jnp.sqrt(w * v), x))
    return jax.grad(lambda w: jnp.sum(roots(w)))(0.0 * x[0, 0])


def both_infinite(ops, x):
    return ops.reduce_sum(ops.map_fn(lambda v: jnp.where(v > 10, jnp.inf, -jnp.inf), x))


def no_logarithm(ops, x):
    return ops.reduce(lambda a, b: jnp.log(-jnp.abs(a) - 1) + b, x)


def several_leaves(ops, x):
    body = lambda v: {"a": checked(9.0)(v), "b": jnp.asarray(1, jnp.int32), "c": jnp.log(v)}
    return ops.map_fn(body, x)


CASES = {
    "nan": (total(lambda v: jnp.log(v - 3)), float_checks),
    "division": (total(lambda v: v / (v - 4)), float_checks),
    "no error": (total(lambda v: jnp.log(v + 3)), all_checks),
    "other category": (total(lambda v: jnp.log(v - 3)), user_checks),
    "user": (total(checked(5.0)), user_checks),
    "user, none": (total(checked(500.0)), user_checks),
    "user, switched off": (total(checked(5.0)), float_checks),
    "the earlier check": (total(two_checks), user_checks),
    "kinds": (total(other_kinds), all_checks - index_checks),
    "loops": (total(in_loops), float_checks | user_checks),
    "server": (on_the_server, user_checks),
    "rounds": (in_rounds, user_checks | float_checks),
    "closure": (closing_over, float_checks),
    "gradient": (gradient, float_checks),
    "reduction": (both_infinite, float_checks),
    "reduction by a function": (no_logarithm, float_checks),
    "leaves": (several_leaves, user_checks | float_checks),
}
WITHOUT_ERROR = ("no error", "other category", "user, none", "user, switched off")


def ways(program):
    """All ways to run a transformed program."""
    options = {"shard_size": 8}
    yield jax.jit(program)
    for runner in ("local", "DirectRunner"):
        yield functools.partial(bj.run, program, runner=runner, options=options)


def first_line(error):
    """The message, without the places in the user's code."""
    message = error.get()
    return None if message is None else message.splitlines()[0]


@pytest.mark.versions
@pytest.mark.parametrize("name", CASES)
def test_the_error_that_vmap_gives(name):
    fn, errors = CASES[name]
    plain = checkify.checkify(functools.partial(fn, reference), errors=errors)
    error, expected = jax.jit(plain)(X)
    assert (first_line(error) is None) == (name in WITHOUT_ERROR)
    program = bj.program(clients=N)(functools.partial(fn, bj))
    for run in ways(checkify.checkify(program, errors=errors)):
        raised, found = run(X)
        assert first_line(raised) == first_line(error)
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert "Gather" not in step_kinds(checkify.checkify(program, errors=errors), X)


def test_indices_of_a_member():
    program = bj.program(clients=N)(lambda x, i: bj.map_fn(lambda v, j: v[j], (x, i)))
    fn = jax.jit(checkify.checkify(program, errors=index_checks))
    error, _ = fn(X, jnp.full(N, 1).at[4].set(7))
    assert "out-of-bounds indexing for array of shape (2,): index 7 is out of bounds" in error.get()
    assert fn(X, jnp.full(N, 1))[0].get() is None


def test_without_checkify_a_check_is_an_error_as_with_vmap():
    program = bj.program(clients=N)(lambda x: bj.map_fn(checked(5.0), x))
    with pytest.raises(ValueError, match="not functionalized"):
        jax.jit(program)(X)
