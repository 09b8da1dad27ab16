"""Loops and branches around placed operators: what `jit` gives, and the same bits everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from jax import lax
from programs import run_everywhere, step_kinds

import beamjax as bj
from beamjax.diagnostics.fact_types import walk_facts

N = 20
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
OPTIONS = {"shard_size": 8}
program = bj.program(clients=N)
CASES = {}


def case(*args, gathers=0, scatters=0):
    def register(fn):
        CASES[fn.__name__] = fn, args, gathers, scatters
        return fn

    return register


def mean_of_maps(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v * w), x))


# --- rounds


@case(W, X)
def scan_over_rounds(w, x):
    one = program(mean_of_maps)
    return lax.scan(lambda c, _: (c - 0.1 * one(c, x), c.sum()), w, None, length=5)


@case(W, X)
@program
def scan_with_placed_state(w, x):
    def one(carry, i):
        w, m = carry
        m = bj.map_fn(lambda m, v: 0.9 * m + v * w, (m, x))
        return (w - 0.1 * bj.reduce_mean(m), m), (bj.reduce_max(m), m[:, 0])

    return lax.scan(one, (w, jnp.zeros_like(x)), jnp.arange(4))


@case(X, scatters=1)
@program
def jacobian_of_scan(x):
    # vmap moves the members to axis 1, by NumPy integers in the equations.
    def last(x):
        one = lambda c, _: (jnp.tanh(c + bj.broadcast(W)), None)
        return lax.scan(one, x, None, length=2)[0]

    return jax.jacfwd(last)(x)


@case(X, gathers=1)
@program
def scan_over_the_members(x):
    # One member after the other can't be distributed.
    last, running = lax.scan(lambda c, v: (jnp.tanh(c + v), c), jnp.zeros(3), x)
    return last, running, bj.reduce_sum(x)


@case(W, X)
@program
def fori_that_swaps(w, x):
    body = lambda i, c: (c[1], c[0], c[2] + i * bj.reduce_sum(c[0]))
    return lax.fori_loop(0, 3, body, (x, x * 2, w))


@case(W, X)
@program
def scans_of_no_round_and_of_one(w, x):
    one = lambda c, i: (c + bj.reduce_mean(x), (c, x, i))
    return [lax.scan(one, w, jnp.ones((rounds, 2))) for rounds in (0, 1)]


@case(W, X)
@program
def constants_as_first_values(w, x):
    one = lambda c, _: ((c[0] + 1, bj.reduce_mean(x) + c[1]), c[0] * 2)
    return lax.scan(one, (0, w), None, length=3, reverse=True)


@case(jax.random.key(3), X)
@program
def keys_as_state(key, x):
    keys = jax.random.split(key, N)

    def one(carry, _):
        key, keys = carry
        key, now = jax.random.split(key)
        keys = bj.map_fn(lambda k: jax.random.fold_in(k, 7), keys)
        noisy = bj.map_fn(lambda k, v: v + jax.random.normal(k, (3,)), (keys, x))
        return (key, keys), bj.reduce_sum(noisy) + jax.random.uniform(now)

    return lax.scan(one, (key, keys), None, length=3)


@case(W, X, gathers=1)
@program
def sorting_in_rounds(w, x):
    # The sort takes all members, and what follows stays on the server, round after round.
    one = lambda c, _: (jnp.sort(c, 0) * 0.5 + bj.reduce_mean(bj.map_fn(jnp.sin, x))[None], c[0])
    return lax.scan(one, x, None, length=3)


@case(W, X)
@program
def scan_in_scan(w, x):
    def outer(c, _):
        inner = lambda d, _: (d - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: v * d, c[1])), None)
        d, _ = lax.scan(inner, c[0], None, length=3)
        return (d, bj.map_fn(lambda v: v * 0.5 + d, c[1])), d

    return lax.scan(outer, (w, x), None, length=2)


# --- until a condition holds


@case(W, X)
@program
def while_on_a_reduced_value(w, x):
    def one(s):
        w, _, rounds = s
        mean = bj.reduce_mean(bj.map_fn(lambda v: v * w, x))
        return w * 0.5, jnp.abs(mean).max(), rounds + 1

    return lax.while_loop(lambda s: s[1] > 0.05, one, (w, jnp.float32(1.0), 0))


@case(X)
@program
def while_that_reduces_in_its_condition(x):
    largest = lambda x: bj.reduce_max(bj.map_fn(lambda v: jnp.abs(v).sum(), x))
    one = lambda s: (bj.map_fn(lambda v: v * 0.5, s[0]), s[1] + 1)
    return lax.while_loop(lambda s: largest(s[0]) > 0.3, one, (x, 0))


@case(X)
@program
def while_that_never_holds(x):
    return lax.while_loop(lambda s: s[1] > 0, lambda s: (bj.map_fn(jnp.sin, s[0]), s[1]), (x, 0))


@case(jnp.abs(X @ X.T), scatters=1)
@program
def page_rank(links):
    # What a round gives is a server value, though the next one cuts it into members.
    def one(s):
        rank, _ = s
        new = 0.01 + 0.8 * bj.reduce_sum(bj.map_fn(lambda r, row: r * row, (rank, links)))
        return new / jnp.sum(new), jnp.sum(jnp.abs(new / jnp.sum(new) - rank))

    return lax.while_loop(lambda s: s[1] > 1e-3, one, (jnp.ones(N) / N, 1.0))


# --- branches


@program
def cond_of_server_and_placed(w, x, flag):
    both = lambda: (bj.reduce_sum(x), bj.map_fn(lambda v: v + w, x))
    return lax.cond(flag, both, lambda: (w * 2, bj.broadcast(w)))


@case(W, X, True, False)
def cond_either_way(w, x, *flags):
    return [cond_of_server_and_placed(w, x, flag) for flag in flags]


@case(W, X, False)
@program
def cond_with_constants(w, x, flag):
    other = lambda: (jnp.zeros_like(x), 1.0, x)
    taken = lambda: (bj.map_fn(lambda v: v + w, x), 2.0, x * 2)
    return lax.cond(flag, taken, other)


@case(W, X)
@program
def switch_in_rounds(w, x):
    def one(c, i):
        branches = [
            lambda c: c + bj.reduce_mean(x),
            lambda c: c * 0.5,
            lambda c: c + bj.reduce_max(bj.map_fn(lambda v: v * c, x)),
        ]
        return lax.switch(i - 1, branches, c), i  # -1 and 3 are clamped

    return lax.scan(one, w, jnp.arange(5))


@case(W, X, True)
@program
def rounds_in_a_branch(w, x, flag):
    def rounds():
        one = lambda c, _: (c - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: v * c, x)), x * c[None])
        return lax.scan(one, w, None, length=2)

    return lax.cond(flag, rounds, lambda: (w, jnp.stack([x, x])))


# --- transformed


@case(W, X)
def grad_of_rounds(w, x):
    @program
    def loss(w, x):
        one = lambda c, _: (c - 0.1 * mean_of_maps(c, x), jnp.sum(c**2))
        c, losses = lax.scan(one, w, None, length=3)
        return losses.sum() + c.sum()

    return jax.value_and_grad(loss, (0, 1))(w, x)


@case(W, X)
def grad_of_placed_state(w, x):
    @program
    def loss(w, x):
        def one(c, _):
            w, m = c
            m = bj.map_fn(lambda m, v: jnp.tanh(m + v * w), (m, x))
            return (w - 0.1 * bj.reduce_mean(m), m), None

        (w, m), _ = lax.scan(one, (w, x * 0), None, length=3)
        return bj.reduce_sum(m).sum() + w.sum()

    return jax.grad(loss, (0, 1))(w, x)


@case(W, X)
def jvp_of_a_while(w, x):
    return jax.jvp(lambda w: while_on_a_reduced_value(w, x)[0], (w,), (w,))


@case(jnp.stack([W, W * 2]), X)
def vmap_of_rounds(ws, x):
    return jax.vmap(scan_with_placed_state, (0, None))(ws, x)


@case(jnp.stack([W, W * 8]), X)
def vmap_of_a_while(ws, x):
    return jax.vmap(while_on_a_reduced_value, (0, None))(ws, x)


@case(W, jnp.stack([X, X * 4]))
def vmap_of_a_while_over_placed_values(w, xs):
    return jax.vmap(while_that_reduces_in_its_condition)(xs)


@case(W, X, jnp.asarray([True, False]))
def vmap_of_a_branch(w, x, flags):
    return jax.vmap(cond_of_server_and_placed, (None, None, 0))(w, x, flags)


@pytest.mark.parametrize("name", CASES)
def test_as_under_jit_with_the_same_bits_on_beam(name):
    jax.config.update("jax_disable_most_optimizations", True)  # Compiles in half of the time.
    fn, args, gathers, scatters = CASES[name]
    run_everywhere(fn, *args, rtol=2e-5, atol=2e-6, **OPTIONS)
    kinds = step_kinds(fn, *args, **OPTIONS)
    assert (kinds["Gather"], kinds["Scatter"]) == (gathers, scatters)


def facts_of(fn, *args):
    return bj.explain(fn, *args, options=OPTIONS).facts


def kinds_in(block):
    return [step.kind for step in walk_facts(block.steps)]


def test_what_a_round_reads_from_around_the_loop_is_gathered_once():
    @program
    def fn(w, x):
        y = bj.map_fn(jnp.sin, x)
        one = lambda c, i: (c + jnp.sort(y, 0)[i] + bj.reduce_sum(bj.map_fn(jnp.cos, y)), None)
        return lax.scan(one, w, jnp.arange(4))[0]

    steps = [step.kind for step in facts_of(fn, W, X).steps]  # Without those in the loop.
    assert steps.count("Gather") == step_kinds(fn, W, X, **OPTIONS)["Gather"] == 1


def test_a_loop_that_nothing_reads_is_not_run():
    @program
    def fn(w, x):
        lax.scan(lambda c, _: (c + bj.reduce_sum(x), None), w, None, length=3)
        return w + bj.reduce_mean(x)

    assert "Loop" not in step_kinds(fn, W, X, **OPTIONS)


def test_a_loop_makes_one_pass_a_round_and_has_its_line():
    steps = facts_of(CASES["scan_over_rounds"][0], W, X).steps
    (loop,) = [step for step in steps if step.kind == "Loop"]
    assert loop.rounds == 5
    (block,) = loop.blocks
    assert kinds_in(block).count("Map") == 1
    assert "test_control_flow.py:" in loop.lines[0]
    assert "(scan_over_rounds)" in loop.lines[0]


def test_only_the_branch_that_is_taken_is_computed():
    @program
    def fn(w, x, flag):
        bad = lambda: bj.reduce_sum(bj.map_fn(lambda v: v[0] + w.sum(), x))
        return lax.cond(flag, bad, lambda: w.sum())

    (branch,) = [step for step in facts_of(fn, W, X, True).steps if step.kind == "Branch"]
    assert sorted(kinds_in(block).count("Map") for block in branch.blocks) == [0, 1]


# --- other ways to run


THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("scan_with_placed_state", PROCESSES),
        ("scan_with_placed_state", THREADS),
        ("switch_in_rounds", THREADS),
        ("keys_as_state", THREADS),
    ],
)
def test_several_workers_give_the_same_bits(name, workers):
    fn, args, *_ = CASES[name]
    found = bj.run(fn, *args, options=[*workers, "--shard_size=8"])
    assert_same_bits(found, bj.run(fn, *args, runner="local", options=OPTIONS))


def test_rounds_a_graph_do_not_change_the_bits():
    fn, args, *_ = CASES["scan_with_placed_state"]
    local = bj.run(fn, *args, runner="local", options=OPTIONS)
    for rounds in (1, 3):
        found = bj.run(fn, *args, options={**OPTIONS, "rounds_per_graph": rounds})
        assert_same_bits(found, local)
