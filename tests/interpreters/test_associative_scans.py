"""`lax.associative_scan` over the members: two passes, with the values of `jit`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from programs import step_kinds

import beamjax as bj


def add(left, right):
    return left + right


def recur(left, right):
    return {"a": left["a"] * right["a"], "b": left["b"] * right["a"] + right["b"]}


def multiply(left, right):  # JAX traces this to other equations for one row.
    return right @ left


def shift_bits(left, right):
    return (left & right) | (left ^ right)


def weigh(weights, left, right):
    """Reads a server value, and makes one with as many rows as there are members."""
    return left + right - 0 * jnp.ones(left.shape) * weights.sum()


def numbers(n, *shape):
    return np.random.default_rng(n).uniform(-1.0, 1.0, (n, *shape)).astype(np.float32)


def integers(n):
    return np.random.default_rng(n).integers(0, 99, (n, 2)).astype(np.int32)


CASES = {
    "add": (add, lambda n: numbers(n, 3)),
    "wrapping integers": (add, lambda n: integers(n) * 10**8),
    "minimum": (jnp.minimum, lambda n: numbers(n)),
    "bits": (shift_bits, integers),
    "bools": (jnp.logical_or, lambda n: numbers(n) > 0.9),
    "recurrence": (recur, lambda n: {"a": numbers(n, 2), "b": numbers(n, 2) + 1}),
    "matrices": (multiply, lambda n: numbers(n, 2, 2)),
    "with server values": (weigh, lambda n: numbers(n, 2)),
}


def scan_of(case, n, reverse):
    """A program that scans, and its arguments."""
    combine, make = CASES[case]

    @bj.program(placements={"clients": n})
    def fn(weights, x):
        x = bj.map_fn(lambda v: jax.tree.map(jnp.asarray, v), x)
        function = functools.partial(combine, weights) if combine is weigh else combine
        return lax.associative_scan(function, x, reverse=reverse)

    return fn, (numbers(2), make(n))


SIZES = [(4, 8), (17, 16), (100, None)]
"""Numbers of members, and the shard size: one shard, two, and as beamjax has it."""
DRAWN = [
    (case, *SIZES[(number + reverse) % 3], reverse)
    for number, case in enumerate(CASES)
    for reverse in (False, True)
]


def check(case, n, shard_size, reverse):
    fn, args = scan_of(case, n, reverse)
    options = {} if shard_size is None else {"shard_size": shard_size}
    assert step_kinds(fn, *args, **options)["Gather"] == 0
    found = bj.run(fn, *args, runner="local", options=options)
    assert_close(found, jax.jit(fn)(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.versions
@pytest.mark.parametrize(("case", "n", "shard_size", "reverse"), DRAWN)
def test_values_are_those_of_jit_and_nothing_is_gathered(case, n, shard_size, reverse):
    check(case, n, shard_size, reverse)


@pytest.mark.table
@given(
    st.sampled_from(list(CASES)), st.integers(4, 200), st.sampled_from([8, 16, 24]), st.booleans()
)
@settings(max_examples=50)
def test_any_number_of_members(case, n, shard_size, reverse):
    check(case, n, shard_size, reverse)


def scan_of_a_scan(x):
    once = lax.associative_scan(add, x)
    return lax.associative_scan(jnp.maximum, once), once


def reads_its_neighbours(left, right):
    return left + jnp.flip(right, 0)


@pytest.mark.parametrize(
    ("scan", "gathers"),
    [
        (lambda x: lax.associative_scan(add, x.T, axis=1), False),
        (scan_of_a_scan, False),
        (lambda x: lax.associative_scan(reads_its_neighbours, x), True),
    ],
    ids=["along another axis", "of a scan", "mixes members in another way"],
)
def test_other_scans(scan, gathers):
    fn, x = bj.program(clients=40)(lambda x: scan(bj.map_fn(jnp.sin, x))), numbers(40, 3)
    assert (step_kinds(fn, x)["Gather"] > 0) == gathers
    local = bj.run(fn, x, runner="local")
    assert_close(local, jax.jit(fn)(x), rtol=1e-5, atol=1e-5)
    assert_same_bits(bj.run(fn, x), local)
