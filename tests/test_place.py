"""Where values live: which arguments are read by shards, and which by the server."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import PlacementError, StagingError
from beamjax.interpreters import flatten, place, stage
from beamjax.interpreters.places import Along

N = 11
OPTIONS = {"shard_size": 8}


def normal(*shape, seed=0):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), seed), shape)


X, Y, W = normal(N, 3), normal(N, 3, seed=1), normal(3, seed=2)


def places(fn, *args):
    """The places of the arguments and constants, in order, and the program."""
    arguments, _, restore = stage.flatten_arguments(args)
    staged = stage.stage(fn, arguments, restore)
    flat = flatten.flatten(staged.closed)
    known = {v: a.path for v, a in zip(flat.arguments, arguments, strict=True) if a.is_source}
    placed = place.place(flat, known, staged.placements)
    return [placed.place(v) for v in flat.inputs], placed


def check(fn, *args):
    want, got = jax.jit(fn)(*args), bj.run(fn, *args, runner="local", options=OPTIONS)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def program(fn):
    return bj.program(clients=N)(fn)


FIRST, SECOND = Along("clients", 0), Along("clients", 1)


@program
def direct(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, x))


@program
def through_operations(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, jnp.tanh(x.T).T + 1.0))


@program
def reduced_by_jnp(w, x):
    return jnp.mean(x, 0) + w


@program
def whole_too(w, x):
    return bj.reduce_sum(bj.map_fn(lambda v: v * w, x)) + x[3]


@program
def closed_over(w, x):
    return bj.map_fn(lambda v: x @ v * w[0], x)


@program
def never_placed(w, x):
    return x[3] * w


@program
def returned(w, x):
    return x, w


@program
def unused(w, x):
    return bj.reduce_sum(bj.map_fn(lambda i: w * i, jnp.arange(float(N))))


CASES = [
    (direct, FIRST), (through_operations, FIRST), (reduced_by_jnp, FIRST), (whole_too, FIRST),
    (closed_over, FIRST), (never_placed, None), (returned, None), (unused, FIRST),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "along"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_arguments(fn, along):
    found, _ = places(fn, W, X)
    assert found == [None, along]
    check(fn, W, X)


def test_members_along_another_axis():
    fn = jax.vmap(direct, in_axes=(None, 1))
    x = normal(N, 4, 3)
    assert places(fn, W, x)[0] == [None, FIRST]
    check(fn, W, x)
    fn = jax.vmap(direct, in_axes=(None, 0))
    x = normal(4, N, 3)
    assert places(fn, W, x)[0] == [None, SECOND]
    check(fn, W, x)


def test_a_dimension_as_long_as_the_placement():
    square = normal(N, N)

    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: w @ v, x)
        return bj.reduce_mean(y), w @ jnp.mean(x, 1)

    assert places(prog, square, square)[0] == [None, FIRST]
    check(prog, square, square)


def test_two_placements_of_one_size():
    @bj.program(a=N, b=N)
    def prog(x, y):
        of_a = bj.map_fn(jnp.sin, x, placement="a")
        of_b = bj.map_fn(lambda v, u: v * u, (y, of_a), placement="b")
        return bj.reduce_sum(of_b, placement="b"), bj.reduce_sum(of_a, placement="a")

    assert places(prog, X, Y)[0] == [Along("a", 0), Along("b", 0)]
    check(prog, X, Y)


def test_two_placements_that_meet_in_a_product():
    @bj.program(a=N, b=7)
    def prog(x, y):
        of_a = bj.map_fn(jnp.sin, x, placement="a")
        of_b = bj.map_fn(jnp.cos, y, placement="b")
        return of_a @ of_b.T, bj.reduce_sum(of_a, placement="a")

    y = normal(7, 3)
    assert places(prog, X, y)[0] == [Along("a", 0), Along("b", 0)]
    check(prog, X, y)


def test_one_name_with_two_sizes():
    @bj.program(clients=7)
    def small(y):
        return bj.reduce_sum(bj.map_fn(jnp.sin, y))

    y = normal(7, 3)
    fn = lambda x, y: direct(small(y), x)
    found, placed = places(fn, X, y)
    assert found == [Along("clients[11]", 0), Along("clients[7]", 0)]
    assert placed.sizes == {"clients[7]": 7, "clients[11]": 11}
    check(fn, X, y)


def test_a_constant_that_is_mapped_over():
    table = np.asarray(Y)

    @program
    def prog(w, x):
        return bj.reduce_sum(bj.map_fn(lambda v, c: v * c * w, (x, jnp.asarray(table))))

    found, placed = places(prog, W, X)
    assert found[:2] == [None, FIRST]
    assert FIRST in found[2:] or FIRST in placed.places.values()
    check(prog, W, X)


def test_sources_are_placed_whatever_reads_them():
    source = bj.from_arrays(np.asarray(X))

    @program
    def prog(w, x):
        return x[2] * w + bj.reduce_sum(bj.map_fn(lambda i: w * i, jnp.arange(float(N))))

    assert places(prog, W, source)[0] == [None, FIRST]
    got = bj.run(prog, W, source, runner="local", options=OPTIONS)
    np.testing.assert_allclose(got, jax.jit(prog)(W, X), rtol=1e-5)


def test_a_source_of_another_size():
    source = bj.from_arrays(np.ones((N + 1, 3), "float32"))
    prog = program(lambda x: jnp.mean(x, 0) + bj.reduce_sum(bj.broadcast(1.0)))
    message = r"args\[0\]: it has 12 members, but the program's placements have "
    with pytest.raises(PlacementError, match=message):
        bj.run(prog, source, runner="local")


def test_a_source_that_fits_two_placements():
    source = bj.from_arrays(np.asarray(X))

    @bj.program(a=N, b=N)
    def prog(x):
        return jnp.cumsum(x, 0)

    with pytest.raises(StagingError, match=r"args\[0\]: .* fits more than one placement \(a, b\)"):
        bj.run(prog, source, runner="local")


def test_an_abstract_scalar():
    _, tree = jax.tree.flatten(0)
    del tree
    prog = program(lambda s, x: bj.reduce_sum(bj.map_fn(lambda v: v * s, x)))
    spec = jax.ShapeDtypeStruct((), jnp.dtype("float32"))
    rows = jax.ShapeDtypeStruct((N, 3), jnp.dtype("float32"))
    with pytest.raises(
        PlacementError, match=r"args\[0\]: found a scalar of type float32, expected"
    ):
        bj.transform(prog, spec, rows)


def test_values_next_to_members_are_made_by_shards():
    @program
    def prog(x):
        ids = jnp.arange(N)
        keys = jax.random.split(jax.random.key(1), N)
        return bj.reduce_sum(
            bj.map_fn(lambda v, i, k: v * i.astype(v.dtype) + jax.random.normal(k), (x, ids, keys))
        )

    _, placed = places(prog, X)
    made = {eqn.primitive.name for eqn, _ in placed.creations.values()}
    assert {"iota", "random_split"} <= made
    check(prog, X)


@pytest.mark.parametrize(
    "copies",
    [
        lambda w: jnp.tile(w, (N, 1)),
        lambda w: jnp.stack([w] * N),
        lambda w: jnp.repeat(w[None], N, axis=0),
        lambda w: jnp.broadcast_to(w, (N, 3)),
    ],
    ids=["tile", "stack", "repeat", "broadcast_to"],
)
def test_copies_of_a_server_value_are_made_by_shards(copies):
    @program
    def prog(w, x):
        return bj.reduce_sum(bj.map_fn(lambda w, v: w * v, (copies(w), x)))

    assert {step.kind for step in bj.explain(prog, W, X).facts.steps} <= {"Map", "Server"}
    check(prog, W, X)


def test_a_program_reads_as_text():
    text = str(places(direct, W, X)[1])
    assert "arg0:float32[3]: server" in text
    assert "arg1:float32[11,3]: clients along axis 0" in text
    assert text.splitlines()[-1].endswith("-> server")
    assert text.splitlines()[-2].endswith("-> clients along axis 0")


def test_inputs_of_gathered_values_stay_on_the_server():
    @program
    def prog(w, x, y):
        return jnp.sort(x * 2, 0)[0] + direct(w, y)

    assert places(prog, W, X, Y)[0] == [None, None, FIRST]
    check(prog, W, X, Y)


def test_more_members_than_an_index_can_count():
    prog = bj.program(clients=2**31)(lambda: bj.reduce_sum(bj.broadcast(1.0)))
    message = r"placement 'clients' has 2147483648 members, expected at most 2147483647"
    with pytest.raises(PlacementError, match=message):
        bj.explain(prog)
