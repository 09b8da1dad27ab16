"""`jax.experimental.checkify` around programs: the error that it finds with `vmap` for `map_fn`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify
from jax.experimental.checkify import all_checks, check, float_checks, index_checks, user_checks

import beamjax as bj

N = 11  # the last shard holds three members
X = jnp.arange(2.0 * N).reshape(N, 2)


class Operators:
    """What a program is without beamjax."""

    map_fn = staticmethod(lambda fn, x: jax.vmap(fn)(x))
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
    return jax.grad(lambda w: jnp.sum(ops.reduce_sum(ops.map_fn(lambda v: jnp.sqrt(w * v), x))))(
        0.0 * x[0, 0]
    )


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


def told(error):
    """The message, without the places in the user's code."""
    return None if error is None else error.splitlines()[0]


def runs(program):
    """The error and the result, in all ways to run a checked program."""
    return {
        "jit": jax.jit(program),
        "local": lambda x: bj.run(program, x, runner="local", options={"shard_size": 8}),
        "DirectRunner": lambda x: bj.run(program, x, options={"shard_size": 8}),
    }


@pytest.mark.parametrize("way", ["jit", "local", "DirectRunner"])
def test_the_error_that_vmap_gives(way):
    faults, seen = [], set()
    for name, (fn, errors) in CASES.items():
        plain = checkify.checkify(functools.partial(fn, Operators), errors=errors)
        expected, values = jax.jit(plain)(X)
        program = bj.program(clients=N)(functools.partial(fn, bj))
        try:
            error, found = runs(checkify.checkify(program, errors=errors))[way](X)
        except Exception as failure:  # of any kind: all cases are reported
            faults.append(f"{name}: {failure!r:.300}")
            continue
        seen.add(told(expected.get()))
        if told(error.get()) != told(expected.get()):
            faults.append(f"{name}: {told(error.get())}, expected {told(expected.get())}")
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(values), strict=True):
            if a.dtype != b.dtype or not np.allclose(a, b, rtol=1e-4, equal_nan=True):
                faults.append(f"{name}: {a} != {b}")
    assert faults == []
    assert len(seen) > 9, seen


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
    """A program of sums stays one pass over its shards."""
    program = bj.program(clients=N)(functools.partial(total(two_checks), bj))
    plan = bj.explain(checkify.checkify(program, errors=user_checks), X)
    assert "Gather" not in str(plan)
