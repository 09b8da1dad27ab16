"""Programs over members, as users write them: rounds, branches, solvers, tangents of integers.

A row is a program with its arguments, and what its plan gathers and scatters. `test_programs` runs
each as `jax.jit` does, in this process and on Beam.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.sparse.linalg import cg

import beamjax as bj

N = 20
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)).astype(np.float32))
Y = jnp.asarray(RNG.normal(size=N).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
K = jnp.arange(N)
ROWS = jnp.asarray([3, 0, 3, 19, -1, 25])
KEY = jax.random.key(0)
GUARDED = {"on_error": "drop", "on_nonfinite": "drop"}
program = bj.program(clients=N)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and its arguments, and what its plan has to have.

    Attributes:
      fn: the function.
      args: its arguments.
      gathers, scatters: how many steps bring members together, or cut a server value.
      guarded: whether it is run with members that may be dropped, too.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    gathers: int = 0
    scatters: int = 0
    guarded: bool = False


PROGRAMS: dict[str, Program] = {}


def case(*args, **facts):
    """Adds a function to the table, with its arguments."""

    def add(fn):
        assert fn.__name__ not in PROGRAMS
        PROGRAMS[fn.__name__] = Program(fn, args, **facts)
        return fn

    return add


def placed(*args, **facts):
    """The same for a function of one placed value that a map made, and further arguments."""

    def add(fn):
        @functools.wraps(fn)
        def prog(x, *rest):
            return fn(bj.map_fn(jnp.tanh, x), *rest)

        return case(*args, **facts)(program(prog))

    return add


@program
def loss(w, x, y):
    return bj.reduce_mean(bj.map_fn(lambda v, t: (v @ w - t) ** 2, (x, y)))


@program
def curvature(p, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * (v @ p), x)) + 0.1 * p


# --- solvers


@case(W, X, Y)
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


@case(X)
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


@case(W, X)
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


@case(W, X)
@program
def references_around_rounds(w, x):
    sums, last = jax.new_ref(jnp.zeros(3)), jax.new_ref(x * 0)

    def one(i, c):
        last[...] = bj.map_fn(lambda a, v: a * 0.5 + v * c, (last[...], x))
        sums[...] += bj.reduce_mean(last[...])
        return c * 0.5

    return lax.fori_loop(0, 2, one, w), sums[...], last[...]


# --- what a body closes over


@case(X)
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


@case(W, X, scatters=1)
@program
def padded_server_values(w, x):
    """One that has all rows is cut into members; of one without rows there is nothing to read."""
    wide = jnp.pad(jnp.outer(jnp.arange(float(N)), w), ((0, 0), (1, 2)))
    empty = jnp.pad(jnp.zeros((0, 3)), ((0, N), (0, 0)), constant_values=2)
    return bj.map_fn(lambda v, p, e: v * p[1:4] + e, (x, wide, empty))


# --- NumPy along the members


@placed(X)
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


# --- rounds and branches


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


# --- lanes, results and names of all kinds


@case(X)
@program
def every_lane(x):
    i = (x[:, 0] * 10).astype("int32")
    return (
        bj.reduce_sum(x), bj.reduce_mean(i), bj.reduce_max(x), bj.reduce_min(i),
        bj.reduce_prod(x), bj.reduce_any(x > 2), bj.reduce_all(x > -9), bj.reduce_sum(i),
    )  # fmt: skip


@case(X, gathers=1)
@program
def gathers_of_members(x):
    y = bj.map_fn(lambda v: v * 2, x)
    return y @ y.T, x[2], jnp.sort(y, axis=0), bj.reduce_sum(bj.map_fn(lambda v: y @ v, y))


@case(X)
@program
def returns_anything(x):
    keys = bj.map_fn(lambda i: jax.random.fold_in(KEY, i), jnp.arange(N))
    values = {"same": x, "three": 3.0, "none": None, "constant": np.arange(3)}
    placed = {"keys": keys, "iota": jnp.arange(N), "wide": bj.broadcast(W)}
    return values | placed | {"flipped": bj.map_fn(jnp.sin, x).T}


@case(X)
@bj.program({"the clients/é": N})
def unusual_name(x):
    y = bj.map_fn(jnp.sin, x)
    return y, bj.reduce_mean(y), bj.reduce_max(bj.map_fn(lambda v: v - bj.reduce_mean(y), y))


# --- tangents of integers, of dtype float0


def zeros(*shape):
    return np.zeros(shape, jax.dtypes.float0)


def squares(x, k):
    return bj.reduce_sum(bj.map_fn(lambda v, i: jnp.sum(v**2) * i.astype(v.dtype), (x, k)))


@case(X, K, guarded=True)
def float0_gradient(x, k):
    return jax.grad(program(squares), argnums=(0, 1), allow_int=True)(x, k)


@case(X, K, guarded=True)
def float0_gradient_in_a_body(x, k):
    loss = lambda v, i: jnp.sum(v * i.astype(v.dtype))
    gradient = jax.grad(loss, argnums=(0, 1), allow_int=True)
    return program(lambda x, k: bj.map_fn(gradient, (x, k)))(x, k)


@case(X, K, guarded=True)
def float0_tangents(x, k):
    fn = lambda x, k: (bj.map_fn(lambda v, i: (-v, i + 1), (x, k)), bj.reduce_sum(k))
    return jax.jvp(program(fn), (x, k), (x, zeros(N)))


@case(X, K, guarded=True)
def float0_custom_jvp(x, k):
    @jax.custom_jvp
    def f(v, i):
        return v * i.astype(v.dtype)

    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    body = lambda v, i: (f(v, i), i)
    return jax.jvp(program(lambda x, k: bj.map_fn(body, (x, k))), (x, k), (x, zeros(N)))


@case(X, guarded=True)
def float0_made_in_programs(x):
    t = zeros(2)
    return program(
        lambda x: (
            bj.broadcast(zeros(3)),
            bj.reduce_sum(x),
            bj.map_fn(lambda v: (v * 2, t), x),
            bj.map_fn(lambda v: (v * 2, zeros(2)), x),
        )
    )(x)


@case(X, guarded=True)
def float0_batched(x):
    fn = program(lambda x: bj.map_fn(lambda v: (v, zeros(2)), x))
    return jax.vmap(fn, axis_size=3, in_axes=None)(x)


@case(X, guarded=True)
def float0_carried_on_the_server(x):
    @program
    def fn(x):
        def step(carry, _):
            t, total = carry
            return (t, total + bj.reduce_sum(bj.map_fn(lambda v: v * total, x))), t

        return jax.lax.scan(step, (zeros(3), jnp.ones(3)), None, length=2)

    return fn(x)


@case(X, guarded=True)
def float0_carried_by_members(x):
    @program
    def fn(x):
        def step(carry):
            i, t, y = carry
            y, t = bj.map_fn(lambda v, u: (v * 2, u), (y, t))
            return i + 1, t, y

        return jax.lax.while_loop(lambda c: c[0] < 2, step, (0, bj.broadcast(zeros()), x))

    return fn(x)


@case(X, guarded=True)
def float0_chosen(x):
    @program
    def fn(x):
        t = bj.broadcast(zeros())
        first = lambda: bj.map_fn(lambda v, u: (v * 2, u), (x, t))
        return jax.lax.cond(bj.reduce_sum(x)[0] > 0, first, lambda: (x, t))

    return fn(x)


@case(X, zeros(N), zeros(3), guarded=True)
def float0_inputs(x, placed, served):
    body = lambda v, u: (v * 2, u, served)
    return program(lambda x, t, s: (bj.map_fn(body, (x, t)), t, s, bj.broadcast(s)))(
        x, placed, served
    )


@case(X, zeros(N, 2), gathers=1, guarded=True)
def float0_outside_of_bodies(x, t):
    @program
    def fn(x, t):
        both = jax.lax.concatenate([t, t], 0)
        return bj.reduce_sum(x), t[2], t.reshape(2 * N), both, jnp.sort(x, axis=0)

    return fn(x, t)


# --- placements without members

EMPTY = W * 2, jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32)


def no_operators(w, x, k):
    y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
    members = {"map": y, "broadcast": bj.broadcast(w), "input": x, "outside": x * 2}
    reduced = {
        "sum": bj.reduce_sum(y), "mean": bj.reduce_mean(y), "prod": bj.reduce_prod(y),
        "any": bj.reduce_any(y), "all": bj.reduce_all(y),
        "weighted": bj.reduce_weighted_mean(y, y[:, 0]), "by_key": bj.reduce_by_key(y, k, 4),
        "by": bj.reduce(jnp.add, y, w), "jnp": (x.sum(0), x.mean(0), jnp.sort(x, 0)),
    }  # fmt: skip
    return members, reduced


def no_rounds(w, x, k):
    step = lambda c, _: (c + bj.reduce_sum(bj.map_fn(lambda v: v * c, x)), None)
    return jax.lax.scan(step, w, None, length=2)[0]


def no_gradient(w, x, k):
    return jax.grad(lambda w: jnp.sum(no_rounds(w, x, k)))(w)


def one_placement_of_two(w, x, k):
    double = lambda v, name: bj.map_fn(lambda v: v * 2, v, placement=name)
    y = jnp.arange(6.0).reshape(2, 3)
    return [
        bj.reduce_sum(double(v, name), placement=name)
        for v, name in ((x, "clients"), (y, "others"))
    ]


without_members = bj.program(clients=0)
for name, fn in {
    "no_members": without_members(no_operators),
    "no_members_in_the_arguments": bj.program(clients=None)(no_operators),
    "rounds_without_members": bj.program(clients=None)(no_rounds),
    "gradient_without_members": without_members(no_gradient),
    "batched_without_members": jax.vmap(without_members(no_rounds), (None,) * 3, axis_size=2),
    "one_placement_of_two": bj.program(clients=0, others=2)(one_placement_of_two),
}.items():
    PROGRAMS[name] = Program(fn, EMPTY, guarded=True)
