"""Where values live: inputs that shards read, values that members make, and what is moved."""

import os
import re

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close, assert_same_bits, planned

import beamjax as bj
from beamjax.interpreters.rules import creations
from beamjax.interpreters.rules.sharding_rules import TracedShard

N, B = 20, 3
OPTIONS = {"shard_size": 8}
HERE = os.path.abspath(__file__)


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), shape)


W, X, Y = normal(4), normal(N, 4, seed=1), normal(N, 4, seed=2)
ROWS, T = normal(N * B, 4, seed=3), jnp.arange(N * B, dtype="float32") % 7
TOKENS = jnp.arange(N * B * 6, dtype="int32").reshape(-1, 6) % 11
KEY = jax.random.key(3)
KEYS = jax.random.split(KEY, N * B)
CLOSED = ROWS + 1
TABLE = np.asarray(Y)
PRNG = jax.random.PRNGKey(3)


def cut(x, *shape):
    """Rows as members: a few of them each."""
    return x.reshape(N, *shape) if shape else x.reshape(N, -1, *x.shape[1:])


def meet(x, y):
    of_a = bj.map_fn(jnp.sin, x, placement="a")
    of_b = bj.map_fn(jnp.cos, y, placement="b")
    return of_a @ of_b.T, bj.reduce_sum(of_a, placement="a")


def of_one_size(x, y):
    of_a = bj.map_fn(jnp.sin, x, placement="a")
    of_b = bj.map_fn(lambda v, u: v * u, (y, of_a), placement="b")
    return bj.reduce_sum(of_b, placement="b"), bj.reduce_sum(of_a, placement="a")


def copies(w, x):
    copies = (jnp.tile(w, (N, 1)), jnp.stack([w] * N), jnp.repeat(w[None], N, axis=0),
              jnp.broadcast_to(w, (N, 4)))  # fmt: skip
    return total(lambda v, *ws: sum(ws) * v, x, *copies)


def made(x):
    keys = jax.random.split(jax.random.key(1), N)
    fn = lambda v, i, k: v * i.astype(v.dtype) + jax.random.normal(k)
    return total(fn, x, jnp.arange(N), keys)


def two_groups(x):
    first = bj.map_fn(jnp.sum, cut(x, B, 4), placement="clients")
    second = bj.map_fn(jnp.max, x.reshape(-1, 2, 4), placement="pairs")
    return bj.reduce_max(first, placement="clients"), bj.reduce_sum(second, placement="pairs")


def in_a_loop(x, w):
    y = x * 2

    def step(w, rate):
        grads = bj.map_fn(lambda v, u: v.T @ jnp.tanh(u @ w), (cut(y), cut(x)))
        return w - rate * bj.reduce_mean(grads), jnp.sum(w)

    return jax.lax.scan(step, w, jnp.asarray([0.1, 0.2]))


def slope(x, w):
    fn = lambda w: total(lambda v, u: jnp.sum((v @ w - u) ** 2), cut(x * 2), cut(x[:, 0]))
    return jax.grad(fn)(w)


def in_a_branch(x, w):
    return jax.lax.cond(w[1] > 0, lambda w: mean(w, x), lambda w: jnp.zeros(B), w)


def mean(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, cut(x, B, 4)))


def total(fn, *xs):
    return bj.reduce_sum(bj.map_fn(fn, xs))


def mapped(w, x):
    return total(lambda v: v * w, x)


def one_hot(t):
    return bj.map_fn(lambda v: v.mean(0), cut(jax.nn.one_hot(jnp.roll(t, 1, axis=1), 11)))


def also_whole(x, w):
    members = cut(x, B, 4)
    return total(lambda v: v @ w, members), jnp.sort(members, axis=None)


def computed_also_whole(x):
    y = cut(x * 2)
    return total(lambda v: v[0], y), jnp.sort(y, axis=None)


def keys_of(key, shape):
    keys = jax.random.split(key, 2 * N).reshape(N, 2, *shape)
    return bj.map_fn(lambda k: jax.random.bits(k[1], (2,)), keys)


def mapped_once(fn):
    return lambda x: fn(bj.map_fn(jnp.sin, x))


def product_in_rounds(x):
    one = lambda c, _: (c + total(jnp.sum, x), x @ x.T)
    return jax.lax.scan(one, 0.0, None, length=2)


def overlapping_columns(x):
    return jnp.sort(x[:, :2], 0), jnp.sort(x[:, 1:], 0), jnp.sort(x[:, 2:], 0)


def product_in_a_body(x):
    return bj.map_fn(lambda v: x @ v + (x.T @ x) @ v @ jnp.ones((4, N)), x)


# Views of one value, which the server gathers once.
SHARED = {
    "gram": lambda x: x @ x.T,
    "distances": lambda x: jnp.sum((x[:, None] - x[None]) ** 2, -1),
    "repeated view": lambda x: x @ x.T + jnp.flip(x @ x.T, 0),
    "view of a view": lambda x: x @ jnp.reshape(x.T, (1, 4, N))[0],
    "with a part": lambda x: (jnp.sort(x, 0), jnp.sort(x.T, 1)),
    "overlapping columns": overlapping_columns,
    "product in rounds": product_in_rounds,
    "product in a body": product_in_a_body,
}
SQUARE, GROUPS = normal(N, N), {"clients": N, "pairs": N * B // 2}
# A program; its arguments; how these and constants are read: whole by the server ("."), by members
# ("m") or by groups of rows ("r"); how many values are gathered and scattered; placements.
PROGRAMS = {
    "mapped": (mapped, (W, X), ".m", (0, 0)),
    "through operations": (lambda w, x: mapped(w, jnp.tanh(x.T).T + 1.0), (W, X), ".m", (0, 0)),
    "reduced by jnp": (lambda w, x: jnp.mean(x, 0) + w, (W, X), ".m", (0, 0)),
    "columns by their numbers": (
        lambda w, x: jnp.sum(jnp.tanh(x)[:, jnp.asarray([2, 0])], 0) * w[0], (W, X), ".m.", (0, 0)),
    "whole too": (lambda w, x: mapped(w, x) + x[3], (W, X), ".m", (0, 0)),
    "closed over": (lambda w, x: bj.map_fn(lambda v: x @ v * w[0], x), (W, X), ".m", (0, 0)),
    "never placed": (lambda w, x: x[3] * w, (W, X), "..", (0, 0)),
    "returned": (lambda w, x: (x, w, jnp.float32(2)), (W, X), "..", (0, 0)),
    "gathered and placed": (
        lambda w, x, y: jnp.sort(x * 2, 0)[0] + mapped(w, y), (W, X, Y), ".mm", (1, 0)),
    "a dimension as long as the placement": (
        lambda w, x: (total(lambda v: w @ v, x), w @ jnp.mean(x, 1)), (SQUARE,) * 2, ".m", (0, 1)),
    "unused": (lambda w, x: total(lambda i: w * i, jnp.arange(float(N))), (W, X), "..", (0, 0)),
    "two placements of one size": (of_one_size, (X, Y), "mm", (1, 1), {"a": N, "b": N}),
    "two placements that meet": (meet, (X, normal(7, 4)), "mm", (2, 0), {"a": N, "b": 7}),
    "a constant": (
        lambda w, x: total(lambda v, c: v * c * w, x, jnp.asarray(TABLE)), (W, X), ".mm", (0, 0)),
    "values that members make": (made, (X,), "m", (0, 0)),
    "copies of a server value": (copies, (W, X), ".m", (0, 0)),
    # Rows.
    "batches": (
        lambda b, w: bj.map_fn(lambda b: b["x"] @ w + b["t"], jax.tree.map(cut, b)),
        ({"x": ROWS, "t": T}, W), "rr.", (0, 0)),
    "other shapes": (
        lambda x: total(lambda a, b: jnp.sort(a).reshape(2, 6) + b, cut(x, -1), cut(x, 2, 6)),
        (ROWS,), "r", (0, 0)),
    "flat rows": (
        lambda x: total(lambda v: v[::-1], cut(x, B, 4)), (ROWS.reshape(-1),), "r", (0, 0)),
    "rows also whole": (lambda x, w: (mean(w, x), jnp.sort(x, axis=None)), (ROWS, W), "r.", (0, 0)),
    "members also whole": (also_whole, (ROWS, W), "r.", (1, 0)),
    "results of members whole": (
        lambda x, w: jnp.sort(bj.map_fn(lambda v: v @ w, cut(x)), axis=0), (ROWS, W), "r.", (1, 0)),
    "computed once cut": (
        lambda x, t: total(lambda v, k: v.sum() * k.max(), cut(x, B, 4)[:, 1:] * 2, cut(t, B)),
        (ROWS, T), "rr", (0, 0)),
    "keys": (lambda k: total(jax.vmap(jax.random.normal), cut(k, B)), (KEYS,), "r", (0, 0)),
    "other dtypes": (
        lambda x, p: total(lambda a, b: (a * 2, b.any()), cut(x, B, 4), cut(p, B, 4)),
        (ROWS.astype("bfloat16"), ROWS > 0), "rr", (0, 0)),
    "rows of two placements": (two_groups, (ROWS,), "r", (0, 0), GROUPS),
    "rows of a constant": (
        lambda w: total(lambda v: v @ w, cut(CLOSED, B, 4)), (W,), ".r", (0, 0)),
    "in a loop": (in_a_loop, (ROWS, W), "r..", (0, 0)),
    "in a branch": (in_a_branch, (ROWS, W), "r.", (0, 0)),
    "a gradient": (slope, (ROWS, W), "r.", (0, 0)),
    # Rows that are computed before they are cut.
    "shifted tokens": (
        lambda t: total(lambda a, b: jnp.sum(a * b), cut(t[:, :-1]), cut(t[:, 1:])),
        (TOKENS,), "r", (0, 0)),
    "with server values": (
        lambda x, w: bj.map_fn(lambda v: v.sum(0), cut((x - w[None]) / jnp.max(w))),
        (ROWS, W), "r.", (0, 0)),
    "one hot and rolled": (one_hot, (TOKENS,), "r", (0, 0)),
    "two inputs": (
        lambda x, t: total(lambda v: v[::-1], cut(x * t[:, :4].astype("float32"))),
        (ROWS, TOKENS), "rr", (0, 0)),
    "numbers of rows": (
        lambda x: bj.map_fn(lambda v: v.max(0), cut(x + jnp.arange(float(N * B))[:, None])),
        (ROWS,), "r", (0, 0)),
    "two keys for each": (lambda key: keys_of(key, ()), (KEY,), ".", (0, 0)),
    "two raw keys for each": (lambda key: keys_of(key, (2,)), (PRNG,), ".", (0, 0)),
    "rows that mix": (
        lambda x: total(lambda v: v[0] - v[1], cut(jnp.cumsum(x, axis=0))), (ROWS,), ".", (0, 1)),
    "computed rows also whole": (computed_also_whole, (ROWS,), "r", (1, 0)),
}  # fmt: skip


def named(name):
    """A program of the table, and its arguments."""
    fn, args, _, _, *sizes = PROGRAMS[name]
    return bj.program(**(sizes[0] if sizes else {"clients": N}))(fn), args


def moves_of(fn, *args):
    plan = planned(fn, *args, **OPTIONS).plan
    kinds = [type(step).__name__ for step in _walk(plan.steps)]
    return kinds.count("Gather"), kinds.count("Scatter")


def _walk(steps):
    for step in steps:
        yield step
        for block in (*getattr(step, "blocks", ()), getattr(step, "block", None)):
            yield from _walk(block.steps if block else ())


def reads_of(fn, *args):
    """How each argument is read."""
    text = []
    for fact in facts_of(bj.explain(fn, *args, options=OPTIONS)).inputs:
        rows = any(".rows" in value for value in fact.names)
        placed = any("@" in value for value in fact.names)
        text.append("r" if rows else "m" if placed else ".")
    return "".join(text)


def places(fn, *args):
    """The places of the inputs, by the text of the program: `clients 0` is along axis 0."""
    lines = str(bj.explain(fn, *args, stage="placed")).splitlines()
    found = [re.match(r"(?:arg|const)\d+:\S+: (.*)", line) for line in lines]
    return [m[1].replace(" along axis", "") for m in found if m]


def check(fn, *args):
    assert_close(bj.run(fn, *args, runner="local", options=OPTIONS), jax.jit(fn)(*args), 2e-5)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_live_where_they_are_read(name):
    (fn, args), (reads, moves) = named(name), PROGRAMS[name][2:4]
    with jax.numpy_rank_promotion("allow"):
        assert moves_of(fn, *args) == moves
        assert reads_of(fn, *args) == reads
        check(fn, *args)


def test_views_are_gathered_once():
    keys = lambda x: jnp.unique(bj.map_fn(lambda v: v[0].astype("int32") % 4, x), size=5)
    column = mapped_once(lambda x: jnp.sort(x[:, 0]))
    sizes = dict.fromkeys(map(mapped_once, SHARED.values()), X.nbytes) | {
        keys: 4 * N,
        column: 4 * N,
    }
    for fn, nbytes in sizes.items():
        prog = bj.program(clients=N)(fn)
        assert facts_of(bj.explain(prog, X)).gathered_bytes == nbytes
        found = bj.run(prog, X, runner="local", options=OPTIONS)
        assert_close(found, jax.jit(prog)(X), 2e-5, 2e-5)


# --- axes, names and sizes


def unpacked(name):
    fn, args = named(name)
    return fn, *args


def test_members_along_another_axis():
    fn, _ = named("mapped")
    for axis, x, place in ((1, normal(N, 5, 4), "clients 0"), (0, normal(5, N, 4), "clients 1")):
        batched = jax.vmap(fn, in_axes=(None, axis))
        assert places(batched, W, x) == ["server", place]
        check(batched, W, x)


def test_one_name_with_two_sizes():
    small = bj.program(clients=7)(lambda y: total(jnp.sin, y))
    fn = lambda x, y: named("mapped")[0](small(y), x)
    assert places(fn, X, normal(7, 4)) == ["clients[20] 0", "clients[7] 0"]
    check(fn, X, normal(7, 4))


def test_one_view_for_all_shapes():
    fn, args = named("rows also whole")
    (spec, _) = planned(fn, *args, **OPTIONS).plan.inputs
    assert (spec.server, spec.placed) == ("arg0", None)
    assert [(view.placed, view.rows) for view in spec.views] == [("arg0.rows20@clients", B)]
    text = str(bj.explain(fn, *args, options=OPTIONS))
    assert "whole and by shards of 3 rows a member, in memory" in text
    for name, rows in {"other shapes": [B], "rows of two placements": [B, 2]}.items():
        (spec,) = planned(*unpacked(name), **OPTIONS).plan.inputs
        assert [view.rows for view in spec.views] == rows


def test_more_members_than_an_index_can_count():
    for n, fits in ((2**31 - 1, True), (2**31, False)):
        prog = bj.program(clients=n)(lambda: bj.reduce_sum(bj.broadcast(1.0)))
        if fits:
            bj.explain(prog)
            continue
        message = r"placement 'clients' has 2147483648 members, expected at most 2147483647"
        with pytest.raises(bj.PlacementError, match=message):
            bj.explain(prog)


# --- sources and collections


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_sources_with_rows(runner, tmp_path):
    fn, (batch, w) = named("batches")
    for name, leaf in batch.items():
        np.save(tmp_path / f"{name}.npy", leaf)
    files = bj.from_npy({name: tmp_path / f"{name}.npy" for name in batch})
    for source in (files, bj.from_arrays(batch)):
        found = bj.run(fn, source, w, runner=runner, options=OPTIONS)
        assert_close(found, jax.jit(fn)(batch, w))
    np.save(tmp_path / "tokens.npy", TOKENS)
    fn, _ = named("shifted tokens")
    found = bj.run(fn, bj.from_npy(tmp_path / "tokens.npy"), runner=runner, options=OPTIONS)
    np.testing.assert_array_equal(found, jax.jit(fn)(TOKENS))


def test_sources_are_placed_whatever_reads_them():
    source = bj.from_arrays(np.asarray(X))
    fn = bj.program(clients=N)(lambda w, x: x[2] * w + bj.reduce_sum(bj.broadcast(w)))
    assert places(fn, W, source) == ["server", "clients 0"]
    found = bj.run(fn, W, source, runner="local", options=OPTIONS)
    np.testing.assert_allclose(found, jax.jit(fn)(W, X), rtol=1e-5)


def test_arguments_that_do_not_fit():
    program = bj.program(clients=N)
    longer = bj.from_arrays(np.ones((N + 1, 3), "float32"))
    other = program(lambda x: jnp.mean(x, 0) + bj.reduce_sum(bj.broadcast(1.0)))
    sums = bj.program(a=N, b=N)(lambda x: jnp.cumsum(x, 0))
    (whole, _), rows = named("rows also whole"), bj.from_arrays(ROWS)
    cases = [
        (bj.PlacementError, "x: it has 21 members, but", other, longer),
        (bj.PlacementError, r"it has 60 members, but .*'clients': 20", whole, rows, W),
        (bj.StagingError, r"fits more than one placement \(a, b\)", sums, bj.from_arrays(X)),
        (TypeError, "cannot reshape", whole, ROWS[:-1], W),
    ]
    for kind, message, fn, *args in cases:
        with pytest.raises(kind, match=message):
            bj.run(fn, *args, runner="local")
    scalar, spec = jax.ShapeDtypeStruct((), "float32"), jax.ShapeDtypeStruct((N, 3), "float32")
    scaled = program(mapped)
    with pytest.raises(bj.PlacementError, match="w: found a scalar of type float32"):
        bj.transform(scaled, scalar, spec)
    members = beam.Pipeline(runner="DirectRunner") | beam.Create([])
    batches = program(lambda x, w: mean(w, x))
    with pytest.raises(bj.StagingError, match="x: the program cuts it into groups of 3"):
        members | bj.transform(batches, jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype), W)


# --- draws for all members

DRAWS = {
    "bernoulli": lambda k: jax.random.bernoulli(k, 0.3, (N, 2, 2)),
    "bits": lambda k: jax.random.bits(k, (N, 3)),
    "bits of 8": lambda k: jax.random.bits(k, (N, 3), "uint8"),
    "categorical": lambda k: jax.random.categorical(k, jnp.arange(4.0), shape=(N,)),
    "exponential": lambda k: jax.random.exponential(k, (N,)),
    "gumbel": lambda k: jax.random.gumbel(k, (N, 5)),
    "normal": lambda k: jax.random.normal(k, (N, 3)),
    "normal of bfloat16": lambda k: jax.random.normal(k, (N, 3), "bfloat16"),
    "randint": lambda k: jax.random.randint(k, (N,), 0, 7),
    "raw keys": lambda k: jax.random.normal(jax.random.key_data(k), (N, 2)),
    "split": lambda k: jax.random.key_data(jax.random.split(k, (N, 3))),
    "uniform": lambda k: jax.random.uniform(k, (N,), minval=-1.0),
}
AT_ONCE = {
    "rbg": lambda k: jax.random.normal(
        jax.random.wrap_key_data(jnp.tile(jax.random.key_data(k), 2), impl="rbg"), (N,)
    ),
    "not along the first axis": lambda k: jax.random.normal(k, (3, N)).T,
    "permutation": lambda k: jax.random.permutation(k, N),
}


def check_draws(draws, scattered):
    """Members make the bits of their own part, unless the values are scattered."""
    body = lambda z, v: (z, v + z.astype(v.dtype).sum())
    fn = lambda key, x: {name: bj.map_fn(body, (draw(key), x)) for name, draw in draws.items()}
    prog, args = bj.program(clients=N)(fn), (jax.random.key(5), np.arange(float(N)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert moves_of(prog, *args) == (0, scattered)
        found = bj.run(prog, *args, runner="local", options=OPTIONS)
        # Functions of floats round otherwise for other lengths, and sums in another order.
        expected = jax.jit(prog)(*args)
        draws_of = lambda tree: {name: draw for name, (draw, _) in tree.items()}
        assert_close(draws_of(found), draws_of(expected), rtol=1e-6, atol=0)
        assert_close(found, expected, rtol=1e-5)


def test_members_draw_for_themselves():
    check_draws(DRAWS, scattered=0)
    check_draws(AT_ONCE, scattered=len(AT_ONCE))
    with jax.enable_x64(True):
        check_draws({"bits of 64": lambda k: jax.random.bits(k, (N, 3), "uint64")}, scattered=0)
    with jax.threefry_partitionable(False):
        check_draws({"normal": DRAWS["normal"]}, scattered=1)


@pytest.mark.parametrize("inner", [1, 3, 2**16 - 1, 2**16, 70_001])
@pytest.mark.parametrize("start", [0, 61_356, 2**31 - 4])
def test_numbers_of_elements_have_64_bits(start, inner):
    shard = TracedShard(jnp.int32(start), 3, jnp.ones(3, bool))
    high, low = (np.asarray(x, "uint64") for x in creations._element_numbers(shard, inner))
    rows = np.arange(start, start + 3, dtype="uint64")[:, None]
    want = rows * np.uint64(inner) + np.arange(inner, dtype="uint64")
    np.testing.assert_array_equal((high << np.uint64(32)) | low, want)


# --- draws of members that depend on the batch


def of(impl):
    return jax.random.split(jax.random.key(0, impl=impl), N)


def draws(key):
    return jax.random.normal(key, (2,))


def draws_in_a_loop(key):
    return jax.lax.fori_loop(0, 3, lambda i, x: x + jax.random.uniform(key), 0.0)


def makes_a_key(seed):
    return jax.random.normal(jax.random.key(seed, impl="rbg"), (2,))


def splits(key):
    return jax.random.key_data(jax.random.split(key, 2))


DEPENDING = [
    (draws, of("rbg"), "random_bits"), (draws, of("unsafe_rbg"), "random_bits"),
    (draws_in_a_loop, of("rbg"), "random_bits"), (makes_a_key, jnp.arange(N), "random_bits"),
    (splits, of("unsafe_rbg"), "random_split"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "x", "draw"), DEPENDING)
def test_draws_that_depend_on_the_batch_are_made_at_once(body, x, draw):
    prog = bj.program(clients=N)(lambda x: (bj.map_fn(body, x), bj.reduce_sum(bj.map_fn(body, x))))
    found, expected = bj.run(prog, x, runner="local", options=OPTIONS), jax.jit(prog)(x)
    assert_same_bits(found[0], np.asarray(expected[0]))
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    start = f"the body {body.__name__} draws from rbg keys ("
    (text, *_) = [line for line in str(bj.explain(prog, x)).splitlines() if start in line]
    line = body.__code__.co_firstlineno + 1
    assert f"rbg keys ({draw} at {HERE}:{line} ({body.__name__}" in text


def test_what_rbg_keys_may_do():
    for body, impl in ((splits, "rbg"), (jax.random.key_data, "unsafe_rbg")):
        prog = bj.program(clients=N)(lambda x, body=body: bj.map_fn(body, x))
        found = bj.run(prog, of(impl), runner="local", options=OPTIONS)
        np.testing.assert_array_equal(found, jax.jit(prog)(of(impl)))
        assert not re.search("gathers|rbg keys", str(bj.explain(prog, of(impl))))
