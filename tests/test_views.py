"""Inputs that programs cut into members: read by shards, a few rows for each member."""

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import stage
from beamjax.options import parse_options
from beamjax.plan import Gather, Scatter, walk
from beamjax.planning import plan_for

N, B = 20, 3
OPTIONS = {"shard_size": 8}
X = jnp.asarray(np.random.default_rng(0).normal(size=(N * B, 4)), "float32")
T = jnp.arange(N * B, dtype="float32") % 7
W = jnp.arange(4.0)
KEYS = jax.random.split(jax.random.key(1), N * B)
CLOSED = X + 1

programs = {}


def program(*args, moves=(0, 0), **sizes):
    """A program, its arguments, and how many values of it are gathered and scattered."""

    def decorate(fn):
        programs[fn.__name__] = bj.program(**(sizes or {"clients": N}))(fn), args, moves
        return fn

    return decorate


def cut(x, *shape):
    return x.reshape(N, *shape)


@program(X, W)
def a_batch(x, w):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, cut(x, B, 4)))


@program({"x": X, "t": T}, W)
def a_tree_of_batches(batch, w):
    batch = jax.tree.map(lambda leaf: leaf.reshape(N, B, *leaf.shape[1:]), batch)
    return bj.map_fn(lambda b: b["x"] @ w + b["t"], batch)


@program(X)
def other_shapes(x):
    flat, halves = cut(x, -1), cut(x, 2, 6)
    return bj.reduce_sum(bj.map_fn(lambda a, b: jnp.sort(a).reshape(2, 6) + b, (flat, halves)))


@program(X.reshape(-1))
def flat_rows(x):
    return bj.reduce_max(bj.map_fn(lambda v: v[::-1], cut(x, B, 4)))


@program(X, W)
def also_whole(x, w):
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, cut(x, B, 4))), jnp.sort(x, axis=None)


@program(X, W, moves=(0, 1))
def members_also_whole(x, w):
    members = cut(x, B, 4)
    return bj.reduce_mean(bj.map_fn(lambda v: v @ w, members)), jnp.sort(members, axis=None)


@program(X, W, moves=(1, 0))
def results_of_members_whole(x, w):
    ys = bj.map_fn(lambda v: v @ w, cut(x, B, 4))
    return jnp.sort(ys, axis=0)


@program(X, T)
def member_wise_before_the_map(x, t):
    rest = cut(x, B, 4)[:, 1:] * 2
    return bj.reduce_sum(bj.map_fn(lambda v, k: v.sum() * k.max(), (rest, cut(t, B))))


@program(KEYS)
def typed_keys(keys):
    return bj.reduce_sum(bj.map_fn(lambda ks: jax.vmap(jax.random.normal)(ks), cut(keys, B)))


@program(X.astype("bfloat16"), X > 0)
def other_dtypes(x, p):
    return bj.reduce_sum(bj.map_fn(lambda a, b: (a * 2, b.any()), (cut(x, B, 4), cut(p, B, 4))))


@program(X, clients=N, pairs=N * B // 2)
def two_placements(x):
    first = bj.map_fn(jnp.sum, cut(x, B, 4), placement="clients")
    second = bj.map_fn(jnp.max, x.reshape(-1, 2, 4), placement="pairs")
    return bj.reduce_max(first, placement="clients"), bj.reduce_sum(second, placement="pairs")


@program(W)
def a_constant(w):
    return bj.reduce_sum(bj.map_fn(lambda v: v @ w, cut(CLOSED, B, 4)))


@program(X, W)
def in_a_loop(x, w):
    def step(w, rate):
        grads = bj.map_fn(lambda v: v.T @ jnp.tanh(v @ w), cut(x, B, 4))
        return w - rate * bj.reduce_mean(grads), jnp.sum(w)

    return jax.lax.scan(step, w, jnp.asarray([0.1, 0.2]))


@program(X, W)
def in_a_branch(x, w):
    def mean(w):
        return bj.reduce_mean(bj.map_fn(lambda v: v @ w, cut(x, B, 4)))

    return jax.lax.cond(w[1] > 0, mean, lambda w: jnp.zeros(B), w)


@program(X, W)
def a_gradient(x, w):
    def loss(w):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.sum((v @ w) ** 2), cut(x, B, 4)))

    return jax.grad(loss)(w)


def plan_of(fn, *args):
    arguments, key, restore = stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, parse_options(OPTIONS)).plan


def moves_of(plan):
    steps = list(walk(plan.steps))
    return tuple(sum(isinstance(step, kind) for step in steps) for kind in (Gather, Scatter))


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        rtol = 1e-2 if x.dtype == "bfloat16" else 1e-5
        x, y = (np.asarray(v, "float64") for v in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("name", programs)
def test_programs_that_cut_inputs(name):
    fn, args, moves = programs[name]
    assert moves_of(plan_of(fn, *args)) == moves
    assert_same(bj.run(fn, *args, runner="local", options=OPTIONS), jax.jit(fn)(*args))


@pytest.mark.parametrize("name", ["a_tree_of_batches", "also_whole", "typed_keys", "in_a_loop"])
def test_cut_inputs_on_beam(name):
    fn, args, _ = programs[name]
    assert_same(bj.run(fn, *args, options=OPTIONS), jax.jit(fn)(*args))


def test_a_view_is_told():
    fn, args, _ = programs["also_whole"]
    (spec, _) = plan_of(fn, *args).inputs
    assert (spec.server, spec.placed) == ("arg0", None)
    assert [(view.placed, view.rows) for view in spec.views] == [("arg0.rows20@clients", B)]
    text = str(bj.explain(fn, *args, options=OPTIONS))
    assert "whole and by shards of 3 rows a member, in memory" in text


def test_one_view_for_all_shapes():
    fn, args, _ = programs["other_shapes"]
    (spec,) = plan_of(fn, *args).inputs
    assert len(spec.views) == 1
    fn, args, _ = programs["two_placements"]
    (spec,) = plan_of(fn, *args).inputs
    assert [view.rows for view in spec.views] == [B, 2]


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize("kind", ["arrays", "npy"])
def test_sources_with_rows(kind, runner, tmp_path):
    fn, (batch, w), _ = programs["a_tree_of_batches"]
    if kind == "arrays":
        source = bj.from_arrays(batch)
    else:
        for name, leaf in batch.items():
            np.save(tmp_path / f"{name}.npy", leaf)
        source = bj.from_npy({name: tmp_path / f"{name}.npy" for name in batch})
    found = bj.run(fn, source, w, runner=runner, options=OPTIONS)
    assert_same(found, jax.jit(fn)(batch, w))


def test_rows_that_do_not_fit():
    fn, (x, w), _ = programs["a_batch"]
    with pytest.raises(TypeError, match="cannot reshape"):
        bj.run(fn, x[:-1], w, runner="local")


def test_sources_read_whole_are_refused_as_before():
    fn, (x, w), _ = programs["also_whole"]
    with pytest.raises(bj.PlacementError, match=r"it has 60 members, but .*'clients': 20"):
        bj.run(fn, bj.from_arrays(x), w, runner="local")


def test_elements_of_a_collection_are_not_grouped():
    fn, (x, w), _ = programs["a_batch"]
    abstract = jax.ShapeDtypeStruct(x.shape, x.dtype)
    pipeline = beam.Pipeline(runner="DirectRunner")
    members = pipeline | beam.Create([])
    with pytest.raises(bj.StagingError, match=r"args\[0\]: the program cuts it into groups of 3"):
        members | bj.transform(fn, abstract, w)
