"""That each rewrite of a program fires.

Without a rewrite, the values are the same, but members are gathered or sent, or a loop runs as many
passes. So each program is explained twice: as it is, and without the rewrite. A rewrite that does
not recognize the equations of another version of JAX fails here. `rule_rows` and `programs` have
programs of each rewrite, whose values are compared with those of `jit`.
"""

import jax
import jax.numpy as jnp
import pytest
from explained import all_steps, facts_of
from helpers import planned
from programs import run_everywhere

import beamjax as bj
from beamjax.interpreters.placement import propagate
from beamjax.interpreters.placement.rewrites import expanded
from beamjax.interpreters.placement.row_groups import by_rows
from beamjax.interpreters.staging import flatten

N = 12
MEMBERS = jnp.ones((N, 4))
ROWS = jnp.ones((2 * N, 4))
AVOIDED = ("Gather", "Scatter", "Loop")


def nothing(*_, **__):
    return None


def largest_of_all(x):
    return jnp.max(jnp.abs(x.ravel()))


def place_of_the_largest(x):
    return jnp.argmax(x)


def product_of_all(x):
    return jnp.vdot(x, x)


def centered(x):
    return bj.map_fn(lambda v: v - jnp.mean(x, 0), x)


def loops_over_members(x):
    return jax.vmap(lambda row: jax.lax.fori_loop(0, 3, lambda _, v: jnp.sin(v), row))(x)


def made_of_rows(x):
    return bj.map_fn(jnp.sum, x.reshape(N, 2, 4))


def made_of_computed_rows(x):
    return bj.map_fn(jnp.sum, (x[:, 1:] * 2).reshape(N, 2, 3))


def one_entry(x):
    return x.ravel()[7]


def soft_totals(x):
    return jax.lax.cumlogsumexp(x, axis=0)


def maps_and_adds(x):
    return jax.grad(lambda w: jnp.sum(jax.lax.map(lambda row: jnp.sin(row @ w), x)))(jnp.ones(4))


def running_sums(x):
    return jnp.cumsum(x, axis=0)


def decomposed(x):
    return jnp.linalg.qr(x), jnp.linalg.svd(x, compute_uv=False)


def changes(x):
    return bj.map_fn(lambda v: v[1] - v[0], bj.neighbours(x, before=1))


NO_EXPANSIONS = propagate, "PATTERNS", (by_rows,)
NO_ROWS = propagate, "PATTERNS", (expanded,)
REWRITES = [
    (decomposed, *NO_EXPANSIONS),
    (changes, *NO_EXPANSIONS),
    (soft_totals, *NO_EXPANSIONS),
    (running_sums, *NO_EXPANSIONS),
    (maps_and_adds, *NO_EXPANSIONS),
    (one_entry, *NO_ROWS),
    (largest_of_all, *NO_ROWS),
    (place_of_the_largest, *NO_ROWS),
    (product_of_all, *NO_ROWS),
    (centered, flatten, "hoist", nothing),
    (loops_over_members, propagate, "as_member_equation", nothing),
    (made_of_rows, *NO_ROWS),
    (made_of_computed_rows, *NO_ROWS),
]


def avoided_steps(function):
    """The steps of a program that its rewrite should avoid."""
    if function in (made_of_rows, made_of_computed_rows):
        prog, x = bj.program(clients=N)(lambda x: function(x)), ROWS
    else:
        prog, x = bj.program(clients=N)(lambda x: function(bj.map_fn(jnp.cos, x))), MEMBERS
    steps = all_steps(facts_of(bj.explain(prog, x)).steps)
    return [f"{step.kind} at {step.lines}" for step in steps if step.kind in AVOIDED]


@pytest.mark.versions
@pytest.mark.parametrize(
    ("function", "where", "name", "off"), REWRITES, ids=[each[0].__name__ for each in REWRITES]
)
def test_rewrites_fire(monkeypatch, function, where, name, off):
    assert avoided_steps(function) == []
    monkeypatch.setattr(where, name, off)
    assert avoided_steps(function) != []


@pytest.mark.versions
def test_what_a_loop_carries_along_the_members_is_created_by_shards(monkeypatch):
    @bj.program(clients=N)
    def prog(x):
        one = lambda i, c: c + bj.map_fn(jnp.cos, x)
        return jax.lax.fori_loop(0, 3, one, jnp.zeros((N, 4)))

    def kinds():
        fresh = bj.program(clients=N)(lambda x: prog(x))
        return {step.kind for step in all_steps(facts_of(bj.explain(fresh, MEMBERS)).steps)}

    assert "Loop" in kinds()
    assert "Scatter" not in kinds()
    monkeypatch.setattr(propagate, "create_at_borders", nothing)
    assert "Scatter" in kinds()


@pytest.mark.versions
def test_what_several_loops_and_branches_carry_is_created_once():
    @bj.program(clients=N)
    def prog(x):
        def two(carry, _):
            a, b = carry
            return (a + bj.map_fn(jnp.cos, x), bj.map_fn(jnp.sin, x) - b), None

        zeros, ones = jnp.zeros((N, 4)), jnp.ones((4, N))
        twice = jax.lax.scan(two, (zeros, zeros), length=2)[0]
        third = jax.lax.fori_loop(0, 2, lambda _, c: c + bj.map_fn(jnp.tanh, x), zeros)
        turned = jax.lax.fori_loop(0, 2, lambda _, c: c * bj.map_fn(jnp.exp, x).T, ones)
        maybe = jax.lax.cond(
            bj.reduce_sum(x).sum() > 0, lambda: (zeros, ones), lambda: (jnp.cos(x), jnp.sin(x).T)
        )
        return twice, third, turned, maybe, bj.map_fn(lambda v: jnp.pad(v, 1), x)

    run_everywhere(prog, MEMBERS, shard_size=8)


@pytest.mark.parametrize("function", [each[0] for each in REWRITES[:-2]], ids=lambda f: f.__name__)
def test_passes_leave_the_program_that_they_are_given(function):
    prog = bj.program(clients=N)(lambda x: function(bj.map_fn(jnp.cos, x)))
    plans = planned(prog, MEMBERS)
    assert str(plans.flat) == str(flatten.flatten(plans.staged.closed))
