"""Rounds, branches and solvers over members, results of all kinds, and tangents of integers.

Each row is a program as users write it, of the operators of beamjax.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.sparse.linalg import cg

import beamjax as bj
from programs.table import case

N = 20
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(N, 3)).astype(np.float32))
Y = jnp.asarray(RNG.normal(size=N).astype(np.float32))
W = jnp.asarray([0.5, -1.0, 2.0])
K = jnp.arange(N)
BOTH = np.stack([X, 4 * np.asarray(X)])
KEY = jax.random.key(0)
program = bj.program(clients=N)


def over_members(*args, **facts):
    """Adds a program over N clients, with its arguments."""
    return lambda fn: case(*args, **facts)(program(fn))


@program
def loss(w, x, y):
    return bj.reduce_mean(bj.map_fn(lambda v, t: (v @ w - t) ** 2, (x, y)))


@program
def curvature(p, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * (v @ p), x)) + 0.1 * p


# --- solvers


@case(W, X, Y, plan="maps 2, loops 1")
def conjugate_gradients(w, x, y):
    return cg(lambda p: curvature(p, x), w, maxiter=5)[0]


@case(W, X, Y, plan="maps 3, loops 2")
def own_solver(w, x, y):
    def solve(product, b):
        return lax.fori_loop(0, 9, lambda _, p: p - 0.03 * (product(p) - b), b)

    solution = lambda x: lax.custom_linear_solve(
        lambda p: curvature(p, x), w, solve, symmetric=True
    )
    return jax.value_and_grad(lambda x: solution(x).sum())(x)


@over_members(KEY, X, plan="maps 1, scatters 1")
def masks_that_cancel(key, x):
    numbers = bj.map_fn(lambda v: (v * 1000).astype("int32"), x)
    masks = bj.map_fn(lambda k: jax.random.bits(k, (3,)), jax.random.split(key, N))
    masked = bj.map_fn(lambda q, m: q.astype("uint32") + m, (numbers, masks))
    inside = jax.random.permutation(key, N) < 9
    kept = jnp.where(inside[:, None], masked - masks, 0)
    return bj.reduce_sum(masked) - bj.reduce_sum(masks), bj.reduce_sum(kept)


# --- carries of all sorts


@over_members(X, plan="maps 2, loops 1")
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


@over_members(W, X, plan="maps 2, loops 1")
def buffers_that_one_member_writes(w, x):
    def one(s, i):
        w, buffers = s
        buffers = buffers.at[i].set(jnp.tanh(x[i] * w))
        return (w - 0.1 * bj.reduce_mean(buffers), buffers), buffers[i]

    return lax.scan(one, (w, jnp.zeros((N, 3))), jnp.asarray([3, 7, 3]))


@case(jnp.arange(3), W, X, plan="maps 1, loops 1")
def vmap_of_rounds_of_their_own_number(counts, w, x):
    one = lambda w: w * 0.5 + bj.reduce_mean(bj.map_fn(lambda v: v * w, x))
    return jax.vmap(program(lambda n, w: lax.fori_loop(0, n, lambda _, w: one(w), w)), (0, None))(
        counts, w
    )


@case(W, X, plan="maps 3, loops 3")
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


@over_members(W, X, plan="maps 2, loops 1")
def references_around_rounds(w, x):
    sums, last = jax.new_ref(jnp.zeros(3)), jax.new_ref(x * 0)

    def one(i, c):
        last[...] = bj.map_fn(lambda a, v: a * 0.5 + v * c, (last[...], x))
        sums[...] += bj.reduce_mean(last[...])
        return c * 0.5

    return lax.fori_loop(0, 2, one, w), sums[...], last[...]


def mean_of_maps(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v * w), x))


# --- rounds


@case(W, X, plan="maps 1, loops 1")
def scan_over_rounds(w, x):
    one = program(mean_of_maps)
    return lax.scan(lambda c, _: (c - 0.1 * one(c, x), c.sum()), w, None, length=5)


@over_members(W, X, plan="maps 2, loops 1")
def scan_with_placed_state(w, x):
    def one(carry, i):
        w, m = carry
        m = bj.map_fn(lambda m, v: 0.9 * m + v * w, (m, x))
        return (w - 0.1 * bj.reduce_mean(m), m), (bj.reduce_max(m), m[:, 0])

    return lax.scan(one, (w, jnp.zeros_like(x)), jnp.arange(4))


@over_members(X, plan="maps 2, scatters 1, loops 1")
def jacobian_of_scan(x):
    # vmap moves the members to axis 1, by NumPy integers in the equations.
    def last(x):
        one = lambda c, _: (jnp.tanh(c + bj.broadcast(W)), None)
        return lax.scan(one, x, None, length=2)[0]

    return jax.jacfwd(last)(x)


@over_members(X, plan="maps 1")
def scan_over_the_members(x):
    # One member after the other can't be distributed.
    last, running = lax.scan(lambda c, v: (jnp.tanh(c + v), c), jnp.zeros(3), x)
    return last, running, bj.reduce_sum(x)


@over_members(W, X, plan="maps 2, loops 1")
def fori_that_swaps(w, x):
    body = lambda i, c: (c[1], c[0], c[2] + i * bj.reduce_sum(c[0]))
    return lax.fori_loop(0, 3, body, (x, x * 2, w))


@over_members(W, X, plan="maps 2, loops 1")
def scans_of_no_round_and_of_one(w, x):
    one = lambda c, i: (c + bj.reduce_mean(x), (c, x, i))
    return [lax.scan(one, w, jnp.ones((rounds, 2))) for rounds in (0, 1)]


@over_members(W, X, plan="maps 1, loops 1")
def constants_as_first_values(w, x):
    one = lambda c, _: ((c[0] + 1, bj.reduce_mean(x) + c[1]), c[0] * 2)
    return lax.scan(one, (0, w), None, length=3, reverse=True)


@over_members(jax.random.key(3), X, plan="maps 2, loops 1")
def keys_as_state(key, x):
    keys = jax.random.split(key, N)

    def one(carry, _):
        key, keys = carry
        key, now = jax.random.split(key)
        keys = bj.map_fn(lambda k: jax.random.fold_in(k, 7), keys)
        noisy = bj.map_fn(lambda k, v: v + jax.random.normal(k, (3,)), (keys, x))
        return (key, keys), bj.reduce_sum(noisy) + jax.random.uniform(now)

    return lax.scan(one, (key, keys), None, length=3)


@over_members(W, X, plan="maps 1, loops 1")
def sorting_in_rounds(w, x):
    # The sort takes all members, and what follows stays on the server, round after round.
    one = lambda c, _: (jnp.sort(c, 0) * 0.5 + bj.reduce_mean(bj.map_fn(jnp.sin, x))[None], c[0])
    return lax.scan(one, x, None, length=3)


@over_members(W, X, plan="maps 2, loops 2")
def scan_in_scan(w, x):
    def outer(c, _):
        inner = lambda d, _: (d - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: v * d, c[1])), None)
        d, _ = lax.scan(inner, c[0], None, length=3)
        return (d, bj.map_fn(lambda v: v * 0.5 + d, c[1])), d

    return lax.scan(outer, (w, x), None, length=2)


# --- until a condition holds


@over_members(W, X, plan="maps 1, loops 1")
def while_on_a_reduced_value(w, x):
    def one(s):
        w, _, rounds = s
        mean = bj.reduce_mean(bj.map_fn(lambda v: v * w, x))
        return w * 0.5, jnp.abs(mean).max(), rounds + 1

    return lax.while_loop(lambda s: s[1] > 0.05, one, (w, jnp.float32(1.0), 0))


@over_members(X, plan="maps 2, loops 1")
def while_that_reduces_in_its_condition(x):
    largest = lambda x: bj.reduce_max(bj.map_fn(lambda v: jnp.abs(v).sum(), x))
    one = lambda s: (bj.map_fn(lambda v: v * 0.5, s[0]), s[1] + 1)
    return lax.while_loop(lambda s: largest(s[0]) > 0.3, one, (x, 0))


@over_members(X, plan="maps 1, loops 1")
def while_that_never_holds(x):
    return lax.while_loop(lambda s: s[1] > 0, lambda s: (bj.map_fn(jnp.sin, s[0]), s[1]), (x, 0))


@case(jnp.asarray(abs(np.asarray(X) @ np.asarray(X).T)), plan="maps 1, scatters 1, loops 1")
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


@case(W, X, True, False, plan="maps 4, branches 2")
def cond_either_way(w, x, *flags):
    return [cond_of_server_and_placed(w, x, flag) for flag in flags]


@over_members(W, X, False, plan="maps 2, branches 1")
def cond_with_constants(w, x, flag):
    other = lambda: (jnp.zeros_like(x), 1.0, x)
    taken = lambda: (bj.map_fn(lambda v: v + w, x), 2.0, x * 2)
    return lax.cond(flag, taken, other)


@over_members(W, X, plan="maps 2, loops 1, branches 1")
def switch_in_rounds(w, x):
    def one(c, i):
        branches = [
            lambda c: c + bj.reduce_mean(x),
            lambda c: c * 0.5,
            lambda c: c + bj.reduce_max(bj.map_fn(lambda v: v * c, x)),
        ]
        return lax.switch(i - 1, branches, c), i  # -1 and 3 are clamped

    return lax.scan(one, w, jnp.arange(5))


@over_members(W, X, True, plan="maps 2, loops 1, branches 1")
def rounds_in_a_branch(w, x, flag):
    def rounds():
        one = lambda c, _: (c - 0.1 * bj.reduce_mean(bj.map_fn(lambda v: v * c, x)), x * c[None])
        return lax.scan(one, w, None, length=2)

    return lax.cond(flag, rounds, lambda: (w, jnp.stack([x, x])))


@over_members(X, jnp.asarray([2, 0, 3]), plan="maps 6, loops 1, branches 4")
def branches_in_a_branch(x, rounds):
    """Of rounds that send a part of the members' state, as a trainer that streams fragments."""

    def sends(part, state):
        m, w = state
        return m, w.at[part].add(jnp.mean(bj.reduce_mean(m[:, part])))

    def receives(part, state):
        m, w = state
        return bj.map_fn(
            lambda v, w: v.at[part].set(0.5 * v[part] + w[part]), (m, bj.broadcast(w))
        ), w

    def one(state, number):
        for step in (sends, receives):
            parts = [functools.partial(step, part) for part in range(3)]
            chosen = lambda s, parts=parts: lax.switch(number % 3, parts, s)
            state = lax.cond(number > 0, chosen, lambda s: s, state)
        return state, state[1]

    return lax.scan(one, (x, W), rounds)


# --- transformed


@case(W, X, plan="maps 5, loops 2")
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


@case(W, X, plan="maps 2, branches 2")
def grad_of_a_branch(w, x):
    rounds = lambda w: lax.cond(w[0] > 0, lambda w: loss(w, x, Y), jnp.sum, w)
    return jax.grad(rounds)(w), jax.grad(rounds)(-w)


@over_members(W, jnp.asarray(BOTH), plan="maps 1, loops 1")
def scan_over_placed(w, xs):
    return lax.scan(lambda w, x: (w - 0.1 * jax.grad(loss)(w, x, Y), None), w, xs)[0]


@case(W, X, plan="maps 1, loops 1")
def jvp_of_a_while(w, x):
    return jax.jvp(lambda w: while_on_a_reduced_value(w, x)[0], (w,), (w,))


@case(jnp.asarray([[0.5, -1.0, 2.0], [1.0, -2.0, 4.0]]), X, plan="maps 3, loops 1")
def vmap_of_rounds(ws, x):
    return jax.vmap(scan_with_placed_state, (0, None))(ws, x)


@case(jnp.asarray([[0.5, -1.0, 2.0], [4.0, -8.0, 16.0]]), X, plan="maps 1, loops 1")
def vmap_of_a_while(ws, x):
    return jax.vmap(while_on_a_reduced_value, (0, None))(ws, x)


@case(W, jnp.asarray(BOTH), plan="maps 3, loops 1")
def vmap_of_a_while_over_placed_values(w, xs):
    return jax.vmap(while_that_reduces_in_its_condition)(xs)


@case(W, X, jnp.asarray([True, False]))
def vmap_of_a_branch(w, x, flags):
    return jax.vmap(cond_of_server_and_placed, (None, None, 0))(w, x, flags)


# --- lanes, results and names of all kinds


@over_members(W, X, plan="maps 1, scatters 1")
def padded_server_values(w, x):
    """One that has all rows is cut into members; of one without rows there is nothing to read."""
    wide = jnp.pad(jnp.outer(jnp.arange(float(N)), w), ((0, 0), (1, 2)))
    empty = jnp.pad(jnp.zeros((0, 3)), ((0, N), (0, 0)), constant_values=2)
    return bj.map_fn(lambda v, p, e: v * p[1:4] + e, (x, wide, empty))


@over_members(X, plan="maps 2, gathers 1")
def gathers_of_members(x):
    y = bj.map_fn(lambda v: v * 2, x)
    return y @ y.T, x[2], jnp.sort(y, axis=0), bj.reduce_sum(bj.map_fn(lambda v: y @ v, y))


@over_members(X)
def returns_anything(x):
    keys = bj.map_fn(lambda i: jax.random.fold_in(KEY, i), jnp.arange(N))
    values = {"same": x, "three": 3.0, "none": None, "constant": np.arange(3)}
    placed = {"keys": keys, "iota": jnp.arange(N), "wide": bj.broadcast(W)}
    return values | placed | {"flipped": bj.map_fn(jnp.sin, x).T}


@case(X, plan="maps 2")
@bj.program({"the clients/é": N})
def unusual_name(x):
    y = bj.map_fn(jnp.sin, x)
    return y, bj.reduce_mean(y), bj.reduce_max(bj.map_fn(lambda v: v - bj.reduce_mean(y), y))


# --- tangents of integers, of dtype float0


def zeros(*shape):
    return np.zeros(shape, jax.dtypes.float0)


def float0_of_derivatives(x, k):
    def squares(x, k):
        return bj.reduce_sum(bj.map_fn(lambda v, i: jnp.sum(v**2) * i.astype(v.dtype), (x, k)))

    @jax.custom_jvp
    def f(v, i):
        return v * i.astype(v.dtype)

    f.defjvp(lambda primals, tangents: (f(*primals), 2 * tangents[0]))
    moved = lambda x, k: (bj.map_fn(lambda v, i: (-v, i + 1), (x, k)), bj.reduce_sum(k))
    custom = lambda x, k: bj.map_fn(lambda v, i: (f(v, i), i), (x, k))
    in_body = jax.grad(lambda v, i: jnp.sum(f(v, i)), argnums=(0, 1), allow_int=True)
    return (
        jax.grad(program(squares), argnums=(0, 1), allow_int=True)(x, k),
        program(lambda x, k: bj.map_fn(in_body, (x, k)))(x, k),
        [jax.jvp(program(fn), (x, k), (x, zeros(N))) for fn in (moved, custom)],
    )


def float0_made_in_programs(x, k):
    made = lambda x: (bj.broadcast(zeros(3)), bj.map_fn(lambda v: (v * 2, zeros(2)), x))
    return program(made)(x), jax.vmap(program(made), axis_size=3, in_axes=None)(x)


def float0_carried(x, k):
    """On the server, by members, and out of a branch."""

    def on_the_server(carry, _):
        t, total = carry
        return (t, total + bj.reduce_sum(bj.map_fn(lambda v: v * total, x))), t

    def by_members(carry):
        i, t, y = carry
        y, t = bj.map_fn(lambda v, u: (v * 2, u), (y, t))
        return i + 1, t, y

    def fn(x):
        t = bj.broadcast(zeros())
        first = lambda: bj.map_fn(lambda v, u: (v * 2, u), (x, t))
        return (
            lax.scan(on_the_server, (zeros(3), jnp.ones(3)), None, length=2),
            lax.while_loop(lambda c: c[0] < 2, by_members, (0, t, x)),
            lax.cond(bj.reduce_sum(x)[0] > 0, first, lambda: (x, t)),
        )

    return program(fn)(x)


case(X, K, guarded=True)(float0_of_derivatives)
case(X, K, guarded=True)(float0_made_in_programs)
case(X, K, guarded=True, plan="maps 4, loops 2, branches 1")(float0_carried)


@over_members(X, zeros(N, 2), zeros(3), guarded=True, plan="maps 1")
def float0_inputs(x, placed, served):
    both = lax.concatenate([placed, placed], 0)
    outside = placed[2], placed.reshape(2 * N), both, jnp.sort(x, axis=0)
    return bj.map_fn(lambda v, u: (v * 2, u, served), (x, placed)), bj.broadcast(served), outside


# --- placements without members

EMPTY = jnp.asarray([1.0, -2.0, 4.0]), np.zeros((0, 3), np.float32), np.zeros(0, np.int32)


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
for name, (plan, fn) in {
    "no_members": ("", without_members(no_operators)),
    "no_members_in_the_arguments": ("", bj.program(clients=None)(no_operators)),
    "rounds_without_members": ("loops 1", bj.program(clients=None)(no_rounds)),
    "gradient_without_members": ("loops 1", without_members(no_gradient)),
    "batched_without_members": (
        "loops 1", jax.vmap(without_members(no_rounds), (None,) * 3, axis_size=2)
    ),
    "one_placement_of_two": ("maps 1", bj.program(clients=0, others=2)(one_placement_of_two)),
}.items():  # fmt: skip
    case(*EMPTY, called=name, guarded=True, plan=plan)(fn)
