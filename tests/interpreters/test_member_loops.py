"""Loops and branches on placed values, outside of `map_fn`, that stay in a pass."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close
from jax import lax

import beamjax as bj

N = 20
X = jnp.asarray(np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
OPTIONS = {"shard_size": 8}


def check(fn, *args, gathered=None):
    """Values of a run in shards; and the bytes that are gathered."""
    if gathered is not None:
        assert facts_of(bj.explain(fn, *args)).gathered_bytes == gathered
    found = bj.run(fn, *args, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(fn)(*args), rtol=2e-5, atol=2e-5)
    return found


def halved(v):
    """Halves a member until it is small, and counts."""
    one = lambda s: (s[0] * 0.5, s[1] + 1)
    return lax.while_loop(lambda s: jnp.abs(s[0]).sum() > 0.5, one, (v, 0))


def training(w, v):
    return lax.scan(lambda c, i: (jnp.tanh(c * w + v * i), c.sum()), v, jnp.arange(3.0))


def trained(w, x):
    return jax.vmap(training, (None, 0))(w, x)


def branch_of_scans(w, x):
    scan = lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0]
    return lax.switch(w.astype(int)[2], [lambda x: x, scan, scan], x)


def rounds_with_member_indices(w, x):
    one = lambda c, i: (c + jnp.where(jnp.arange(N) == i, 1.0, 0.0)[:, None], None)
    return lax.scan(one, x, jnp.arange(3))[0]


def rounds_with_made_values(w, x):
    y = jnp.ones((N, 3)) * 0.5
    return lax.scan(lambda c, _: (c * y, None), x, None, length=2)[0]


def rounds_with_a_made_tangent(w, x):
    # The tangent of ones is a value of the server, and in the product with x one of the members.
    last = lambda x, v: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(v * 0.5), x)
    return jax.jvp(last, (x, x), (jnp.ones_like(x), jnp.ones_like(x)))[0]


def scan_in_a_vmapped_while(w, x):
    one = lambda s: lax.scan(lambda c, _: (c * 0.9, None), s, None, length=2)[0]
    return jax.vmap(lambda v: lax.while_loop(lambda s: jnp.abs(s).sum() > 0.5, one, v))(x)


def rounds_with_rounds_that_count(w, x):
    def outer(s):
        one = lambda i, s: (s[0] * 0.9, s[1] + i)
        y, counts = lax.fori_loop(0, 3, one, (x, jnp.ones(2, jnp.int32)))
        return s[0] + 1, s[1] + y * jnp.sum(counts).astype(y.dtype)

    return lax.while_loop(lambda s: (s[0] < 3) & (jnp.sum(x) != 0), outer, (0, x))[1]


# Functions of a server value and a placed one that take one pass; and how many steps others take.
ONE_PASS = {
    "vmapped scan": trained,
    "along another axis": lambda w, x: jax.vmap(training, (None, 1), 1)(w, x.T)[0],
    "reduced afterwards": lambda w, x: jnp.mean(trained(w, x)[0], 0),
    "vmapped while": lambda w, x: jax.vmap(halved)(x),
    "vmapped cond": lambda w, x: jax.vmap(
        lambda v: lax.cond(v[0] > 0, lambda v: v * w, lambda v: v - w, v)
    )(x),
    "branch of the server": lambda w, x: lax.cond(w[0] > 0, lambda x: x * 2, jnp.zeros_like, x),
    "branch of scans": branch_of_scans,
    "elementwise": lambda w, x: lax.fori_loop(0, 4, lambda i, c: jnp.sin(c) + i, x),
    "stacks": lambda w, x: lax.scan(
        lambda c, i: (c * 0.5 + i, c[:, 0]), x, jnp.arange(3.0), reverse=True
    ),
    "over a stack": lambda w, x: lax.scan(lambda c, v: (c + v, None), x, jnp.stack([x, x * 2]))[0],
    "member indices": rounds_with_member_indices,
    "made values": rounds_with_made_values,
    "a made tangent": rounds_with_a_made_tangent,
    "scan in while": scan_in_a_vmapped_while,
}
OTHERS = {
    "rounds that reduce": (
        lambda w, x: lax.fori_loop(0, 4, lambda i, w: w - 0.1 * jnp.mean(x * w[None], 0), w),
        {"Map": 2, "Loop": 1},
    ),
    # What a round computes for the server, the server needs.
    "rounds that count": (
        lambda w, x: lax.while_loop(lambda s: s[1] < 3, lambda s: (s[0] * 2, s[1] + 1), (x, 0)),
        {"Map": 2, "Loop": 1},
    ),
    "rounds in rounds": (rounds_with_rounds_that_count, {"Map": 4, "Loop": 2}),
    "rounds that mix members": (
        lambda w, x: lax.fori_loop(0, 2, lambda i, c: jnp.sort(c, 0) * 2, x),
        {"Map": 1, "Gather": 1},
    ),
    "scan over members": (
        lambda w, x: lax.scan(lambda c, v: (c + v, jnp.sum(c)), w, x),
        {"Map": 1, "Gather": 1},
    ),
}
CASES = {**{name: (fn, {"Map": 1}) for name, fn in ONE_PASS.items()}, **OTHERS}


def program_of(fn):
    return bj.program(clients=N)(lambda w, x: fn(w, bj.map_fn(jnp.sin, x)))


def kinds(steps):
    """How many steps there are of each kind, those of blocks included."""
    found = collections.Counter(step.kind for step in steps)
    return sum((kinds(block.steps) for step in steps for block in step.blocks), found)


@pytest.mark.parametrize("name", CASES)
def test_loops_on_placed_values(name):
    fn, expected = program_of(CASES[name][0]), CASES[name][1]
    found = kinds(facts_of(bj.explain(fn, W, X, options=OPTIONS)).steps)
    assert {kind: found[kind] for kind in ("Map", "Loop", "Gather") if found[kind]} == expected
    check(fn, W, X)


def rounds_with_an_empty_carry(w, x):
    """The placed value that a loop carries has no elements, and the round before ignores it."""
    empty = x[:, :0]

    def outer(carry, row):
        inner = lax.scan(lambda c, _: (c, None), empty, None, length=5)[0]
        return jnp.zeros_like(empty), (row, inner[0])

    last, rows = lax.scan(outer, empty, x, reverse=True)
    return rows, bj.reduce_sum(last)


def branch_with_unused_results(w, x):
    def unused_product(x):
        jnp.kron(x, w[:, None])
        return x * 2

    def unused_branch(x):
        lax.cond(w[0] > 0, lambda c: c, lambda c: c, w > 0)
        return jnp.clip(x, -1, 1)

    return jnp.sort(lax.switch(w.astype(int)[2], [jnp.sin, unused_product, unused_branch], x), 0)


def rounds_that_only_print(w, x):
    def one(i, c):
        lax.cond(i > 9, lambda: jax.debug.print("{}", jnp.sort(x, 0)), lambda: None)
        return jnp.sort(c, 0)

    return lax.fori_loop(0, 2, one, x)


@pytest.mark.parametrize(
    "fn", [rounds_with_an_empty_carry, branch_with_unused_results, rounds_that_only_print]
)
def test_loops_without_results_that_are_read(fn):
    check(program_of(fn), W, X)


def test_a_loop_with_a_sort_that_nothing_reads_runs_inside_the_pass():
    def rounds(w, x):
        def one(i, c):
            jnp.sort(c, 0)
            return c * 0.5

        return lax.fori_loop(0, 3, one, x)

    found = kinds(facts_of(bj.explain(program_of(rounds), W, X, options=OPTIONS)).steps)
    assert (found["Map"], found["Loop"]) == (1, 0)


def test_rounds_that_reduce_reshaped_members():
    @bj.program(clients=N)
    def descend(w, x):
        def step(w, _):
            error = jnp.mean(jnp.tanh(x @ w), 0)
            largest = jnp.max(jnp.abs(x.ravel()))
            return w - error[None] * largest, jnp.argmax(x @ w)

        return lax.scan(step, w, None, length=3)

    w = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32))
    check(descend, w, X, gathered=0)
