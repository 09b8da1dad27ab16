"""`checkify` and `jet` of `jax.experimental` around programs: as with `vmap` for `map_fn`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.checkify import all_checks, check, float_checks, index_checks, user_checks
from jax.experimental.jet import jet
from programs import step_kinds

import beamjax as bj

N = 11  # One full shard of 8 and a short one.
X = jnp.arange(2.0 * N).reshape(N, 2)


class Operators:
    """What a program is without beamjax."""

    map_fn = staticmethod(lambda fn, x: jax.vmap(fn)(*(x if isinstance(x, tuple) else (x,))))
    reduce_sum = staticmethod(lambda x: jnp.sum(x, axis=0))
    reduce_mean = staticmethod(lambda x: jnp.mean(x, axis=0))
    reduce_max = staticmethod(lambda x: jnp.max(x, axis=0))
    broadcast = staticmethod(lambda x: jnp.broadcast_to(x, (N, *jnp.shape(x))))
    reduce = staticmethod(lambda fn, x: functools.reduce(fn, [x[i] for i in range(N)]))


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


def ways(program):
    """All ways to run a transformed program."""
    options = {"shard_size": 8}
    return {
        "jit": jax.jit(program),
        "local": lambda *args: bj.run(program, *args, runner="local", options=options),
        "DirectRunner": lambda *args: bj.run(program, *args, options=options),
    }


def differences(found, expected, **tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    close = functools.partial(np.allclose, **tolerance, equal_nan=True)
    return [f"{a} != {b}" for a, b in pairs if a.dtype != b.dtype or not close(a, b)]


def first_line(error):
    """The message, without the places in the user's code."""
    return None if error is None else error.splitlines()[0]


@pytest.mark.versions
def test_the_error_that_vmap_gives():
    faults, messages = [], set()
    for name, (fn, errors) in CASES.items():
        plain = checkify.checkify(functools.partial(fn, Operators), errors=errors)
        error, expected = jax.jit(plain)(X)
        message = first_line(error.get())
        messages.add(message)
        program = bj.program(clients=N)(functools.partial(fn, bj))
        for way, run in ways(checkify.checkify(program, errors=errors)).items():
            try:
                error, found = run(X)
            except Exception as failure:  # Of any kind: all cases are reported.
                faults.append(f"{name} by {way}: {failure!r:.300}")
                continue
            if first_line(error.get()) != message:
                faults.append(f"{name} by {way}: {error.get()}, expected {message}")
            wrong = differences(found, expected, rtol=1e-4)
            faults += [f"{name} by {way}: {difference}" for difference in wrong]
    assert faults == []
    assert len(messages) > 9, messages


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


def test_no_member_is_gathered():
    program = bj.program(clients=N)(functools.partial(total(two_checks), bj))
    assert "Gather" not in step_kinds(checkify.checkify(program, errors=user_checks), X)


# --- jet: Taylor series

U = jnp.linspace(0.1, 0.9, 2 * N).reshape(N, 2)
K = jnp.arange(N)
W = jnp.asarray([0.3, 0.7])
SERIES = [[jnp.cos(x * (k + 1)) for k in range(3)] for x in (W, U)]


def mapped(ops, w, x):
    return ops.map_fn(lambda v: jnp.sin(v * w) + jnp.exp(v), x)


def summed(ops, w, x):
    y = ops.map_fn(lambda v: jnp.tanh(v) @ w, x)
    return {"sum": ops.reduce_sum(y), "mean": ops.reduce_mean(y), "max": ops.reduce_max(y)}


def with_ints(ops, w, x):
    body = lambda v, k: (jnp.where(k % 2 == 0, v * w, v**2), k + 1)
    y, k = ops.map_fn(body, (x * 2, K))
    return ops.reduce_sum(y), ops.reduce_sum(k)


def broadcast(ops, w, x):
    mean = ops.reduce_mean(x)
    return ops.reduce_sum(ops.map_fn(lambda v, u: v / u, (x, ops.broadcast(mean * w))))


def constant_members(ops, w, x):
    del x
    return ops.reduce_sum(ops.map_fn(lambda k: k.astype(w.dtype) * jnp.log(w), K))


def through_jit(ops, w, x):
    return jax.jit(lambda w, x: mapped(ops, w, x))(w, x)


@pytest.mark.versions
def test_the_series_that_vmap_gives():
    faults = []
    with jax.numpy_dtype_promotion("standard"):  # `jet` multiplies terms of integers by floats.
        for fn in (mapped, summed, with_ints, broadcast, constant_members, through_jit):
            plain = lambda w, x, fn=fn: jet(functools.partial(fn, Operators), (w, x), SERIES)
            program = bj.program(clients=N)(functools.partial(fn, bj))
            series = lambda w, x, program=program: jet(program, (w, x), SERIES)
            expected = jax.jit(plain)(W, U)
            for way, run in {"eager": series, **ways(series)}.items():
                wrong = differences(run(W, U), expected, rtol=1e-4, atol=1e-5)
                faults += [f"{fn.__name__} by {way}: {difference}" for difference in wrong]
        total = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
        assert "Gather" not in step_kinds(lambda x: jet(total, (x,), (SERIES[1],)), U)
    assert faults == []
