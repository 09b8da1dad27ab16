"""Programs as users of JAX write them: what `jit` gives, the same bits on Beam, and what it costs.

Each case says how many placed values are gathered, and may only gather what mixes members.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types, plan_of
from jax import lax
from jax.scipy.sparse.linalg import cg

import beamjax as bj
from beamjax.plan.steps import Gather, Loop, Map, Scatter, walk

N = 20
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)).astype(np.float32))
Y = jnp.asarray(RNG.normal(size=N).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
ROWS = jnp.asarray([3, 0, 3, 19, -1, 25])
GROUPS = jnp.arange(N) % 4
KEY = jax.random.key(0)
OPTIONS = {"shard_size": 8}
program = bj.program(clients=N)
CASES = {}


def case(*args, gathers=0, scatters=0, beam=False):
    """Registers a function; `beam` says that it runs on Beam too, for the same bits."""

    def register(fn):
        CASES[fn.__name__] = fn, args, gathers, scatters, beam
        return fn

    return register


def placed(*args, **kwargs):
    """The same for a function of one placed value that a map made, and further arguments."""

    def register(fn):
        @functools.wraps(fn)
        def prog(x, *rest):
            return fn(bj.map_fn(jnp.tanh, x), *rest)

        return case(*args, **kwargs)(program(prog))

    return register


@program
def loss(w, x, y):
    return bj.reduce_mean(bj.map_fn(lambda v, t: (v @ w - t) ** 2, (x, y)))


@program
def curvature(p, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * (v @ p), x)) + 0.1 * p


# --- solvers


@case(W, X, Y, beam=True)
def conjugate_gradients(w, x, y):
    return cg(lambda p: curvature(p, x), w, maxiter=5)[0]


@case(W, X, Y)
def own_solver(w, x, y):
    def solve(product, b):
        return lax.fori_loop(0, 9, lambda _, p: p - 0.03 * (product(p) - b), b)

    solution = lambda x: lax.custom_linear_solve(
        lambda p: curvature(p, x), w, solve, symmetric=True
    )
    return jax.value_and_grad(lambda x: solution(x).sum())(x)


@case(KEY, X, scatters=1)
@program
def masks_that_cancel(key, x):
    numbers = bj.map_fn(lambda v: (v * 1000).astype("int32"), x)
    masks = bj.map_fn(lambda k: jax.random.bits(k, (3,)), jax.random.split(key, N))
    masked = bj.map_fn(lambda q, m: q.astype("uint32") + m, (numbers, masks))
    inside = jax.random.permutation(key, N) < 9
    kept = jnp.where(inside[:, None], masked - masks, 0)
    return bj.reduce_sum(masked) - bj.reduce_sum(masks), bj.reduce_sum(kept)


# --- carries of all sorts


@case(X, beam=True)
@program
def carries_of_all_types(x):
    def one(s, _):
        narrow, small, flags, z, none, empty = s
        narrow = bj.map_fn(lambda v: v * jnp.bfloat16(0.5), narrow)
        small = bj.map_fn(lambda v: v + jnp.int8(1), small)
        flags = bj.map_fn(jnp.logical_not, flags)
        z = bj.map_fn(lambda v: v * 1j, z)
        sums = bj.reduce_sum(narrow), bj.reduce_max(small), bj.reduce_any(flags), bj.reduce_sum(z)
        return (narrow, small, flags, z, none, bj.map_fn(lambda v: v + 1, empty)), sums

    types = x.astype("bfloat16"), (4 * x).astype("int8"), x > 0, x.astype("complex64")
    return lax.scan(one, (*types, None, jnp.zeros((N, 0, 3))), None, length=2)


@case(W, X, beam=True)
@program
def buffers_that_one_member_writes(w, x):
    def one(s, i):
        w, buffers = s
        buffers = buffers.at[i].set(jnp.tanh(x[i] * w))
        return (w - 0.1 * bj.reduce_mean(buffers), buffers), buffers[i]

    return lax.scan(one, (w, jnp.zeros((N, 3))), jnp.asarray([3, 7, 3]))


@case(jnp.arange(3), W, X)
def vmap_of_rounds_of_their_own_number(counts, w, x):
    one = lambda w: w * 0.5 + bj.reduce_mean(bj.map_fn(lambda v: v * w, x))
    return jax.vmap(program(lambda n, w: lax.fori_loop(0, n, lambda _, w: one(w), w)), (0, None))(
        counts, w
    )


@case(W, X)
def linearized_rounds(w, x):
    step = lambda c, _: (c - 0.1 * loss(c, x, Y), c)
    value, slope = jax.linearize(lambda w: lax.scan(step, w, None, length=2), w)
    return value, slope(w), jax.linear_transpose(slope, w)((w, jnp.ones((2, 3))))


@case(W, X)
def clients_of_silos(w, x):
    inner = bj.program(clients=5)(lambda w, s: bj.reduce_mean(bj.map_fn(lambda v: v * w, s)))

    def at_one_silo(w, s):
        step = lambda w, _: (w - 0.1 * jax.grad(lambda w: inner(w, s).sum())(w), inner(w, s))
        return lax.scan(step, w, None, length=2)

    silos = x.reshape(4, 5, 3)
    mean = lambda w, s: bj.reduce_mean(bj.map_fn(lambda s: at_one_silo(w, s), s))
    return bj.program(silos=4)(mean)(w, silos)


@case(W, X, beam=True)
@program
def references_around_rounds(w, x):
    sums, last = jax.new_ref(jnp.zeros(3)), jax.new_ref(x * 0)

    def one(i, c):
        last[...] = bj.map_fn(lambda a, v: a * 0.5 + v * c, (last[...], x))
        sums[...] += bj.reduce_mean(last[...])
        return c * 0.5

    return lax.fori_loop(0, 2, one, w), sums[...], last[...]


# --- what a body closes over


@case(X, beam=True)
@program
def bodies_that_close_over_a_mean(x):
    return bj.reduce_sum(bj.map_fn(lambda v: (v - x.mean(0)) ** 2, x))


@placed(X, W)
def bodies_that_close_over_few_members(x, w):
    near = bj.map_fn(lambda v: ((v[None] - x[:4]) ** 2).sum(-1), x)
    return near, bj.map_fn(lambda v: v * jnp.max(x @ w) + x[0] + jnp.ones(3), x)


@case(X, gathers=1)
@program
def bodies_that_close_over_all_members(x):
    return bj.map_fn(lambda v: ((v[None] - x) ** 2).sum(-1).min() + x[0].sum(), x)


# --- single members


@placed(X)
def derivatives_of_rows(x):
    total = lambda x: (x[3] ** 2).sum() + (x[2:5] ** 3).sum() + (x[ROWS] ** 2).sum()
    return jax.grad(lambda x: total(x) + (x**2).sum())(x)


# --- NumPy along the members


@placed(X, beam=True)
def histograms(x):
    return jnp.histogram(x[:, 0], bins=5, range=(-1, 1)), jnp.digitize(x, jnp.linspace(-1, 1, 5))


@placed(X, Y)
def statistics(x, y):
    moments = jnp.cov(x, rowvar=False), jnp.corrcoef(x.T), jnp.std(x, 0, ddof=1)
    return *moments, jnp.average(x, 0, weights=y), jnp.linalg.solve(x.T @ x, x.T @ y)


@placed(X)
def matrices_of_members(x):
    squares = jax.vmap(jnp.outer)(x, x)
    system = squares + jnp.eye(3)[None]
    return jnp.linalg.solve(system, x[..., None]), jnp.linalg.inv(system), jnp.linalg.det(system)


@placed(X)
def the_highest_members(x):
    return x.at[lax.top_k(x[:, 0], 3)[1]].set(0.0)


@placed(X, gathers=1)
def what_mixes_members(x):
    return x.at[jnp.argsort(x[:, 0])[:3]].set(0.0)


# --- the tests


def kinds(fn, args):
    return [type(step) for step in walk(plan_of(fn, *args, **OPTIONS).steps)]


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_jit_and_only_what_mixes_members_is_gathered(name):
    fn, args, gathers, scatters, beam = CASES[name]
    local = bj.run(fn, *args, runner="local", options=OPTIONS)
    expected = jax.jit(fn)(*args)
    assert_same_types(local, expected)
    assert_close(local, expected, rtol=2e-4, atol=2e-4)
    if beam:
        assert_same_bits(bj.run(fn, *args, runner="DirectRunner", options=OPTIONS), local)
    found = kinds(fn, args)
    assert (found.count(Gather), found.count(Scatter)) == (gathers, scatters)


def test_the_products_of_a_solver_are_passes():
    fn, args, *_ = CASES["conjugate_gradients"]
    (loop,) = (s for s in walk(plan_of(fn, *args, **OPTIONS).steps) if isinstance(s, Loop))
    assert sum(isinstance(step, Map) for step in walk(loop.block.steps)) == 1


def test_what_a_body_computes_of_few_numbers_stays_in_it():
    @program
    def fn(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v: v * jnp.outer(w, w).sum(), x))

    assert kinds(fn, (W, X)) == [Map]
