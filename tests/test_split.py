"""Passes over the members: how many, and what each one holds."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import flatten, place, split, stage
from beamjax.interpreters.pieces import GatherPiece, MapPiece, ScatterPiece, ServerPiece

N = 11
OPTIONS = {"shard_size": 8}
W = jnp.asarray([0.3, -0.2, 0.9])
X = jax.random.normal(jax.random.key(0), (N, 5, 3))


def cut(fn, *args):
    arguments, _, restore = stage.flatten_arguments(args)
    staged = stage.stage(fn, arguments, restore)
    placed = place.place(flatten.flatten(staged.closed), {}, staged.placements)
    return split.split(placed)


def passes(fn, *args):
    return [piece for piece in cut(fn, *args) if isinstance(piece, MapPiece)]


def shape(fn, *args):
    letters = {MapPiece: "M", ServerPiece: "S", GatherPiece: "G", ScatterPiece: "C"}
    return "".join(letters[type(piece)] for piece in cut(fn, *args))


def check(fn, *args):
    want, got = jax.jit(fn)(*args), bj.run(fn, *args, runner="local", options=OPTIONS)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)


def program(fn):
    return bj.program(clients=N)(fn)


def names(piece):
    return [emission.eqn.primitive.name for emission in piece.emissions]


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@program
def one_round(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: loss(w, v), x))


def rounds(count):
    def fn(w, x, rate):
        for _ in range(count):
            w = w - rate * jax.grad(one_round)(w, x)
        return one_round(w, x)

    return fn


def test_all_reductions_of_one_depth_are_one_pass():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        mean, low = bj.reduce_mean(y), bj.reduce_min(x)
        return mean, low, bj.reduce_max(y), jnp.sum(y, 0), y[:, 0].T @ y, bj.reduce_any(y > 1)

    (piece,) = passes(prog, W, X)
    assert len(piece.folds) == 6
    assert piece.results == []
    check(prog, W, X)


def test_neighbouring_maps_are_fused():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        y = jnp.tanh(y * 2) + bj.map_fn(jnp.sin, y)
        return bj.reduce_sum(bj.map_fn(lambda a: a * 2, y))

    (piece,) = passes(prog, W, X)
    assert names(piece).count("bj_map") == 3
    assert shape(prog, W, X) == "M"
    check(prog, W, X)


def test_dead_values_are_dropped():
    @program
    def prog(w, x):
        dead = bj.reduce_sum(bj.map_fn(lambda v: jnp.exp(v), x))
        bj.map_fn(lambda v: v + dead[0, 0], x)
        return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))

    (piece,) = passes(prog, W, X)
    assert names(piece) == ["bj_map", "bj_reduce_sum"]
    check(prog, W, X)


def test_cheap_values_are_computed_again_and_not_carried():
    @program
    def prog(w, x):
        y = x * 2 + 1
        mean = bj.reduce_mean(y)
        return bj.reduce_mean((y - mean[None]) ** 2)

    first, second = passes(prog, W, X)
    assert first.results == []
    assert [var.name for var, _ in second.operands] == ["arg1"]
    check(prog, W, X)


def test_maps_are_computed_once_and_carried():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
        mean = bj.reduce_mean(y)
        return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))

    first, second = passes(prog, W, X)
    assert len(first.results) == 1
    assert [var for var, _ in second.operands] == first.results
    check(prog, W, X)


def test_values_are_made_in_the_pass_that_reads_them():
    @program
    def prog(w, x):
        early = bj.map_fn(lambda v: jnp.exp(v), x)  # Could be made in the first pass.
        mean = bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))
        return bj.reduce_sum(bj.map_fn(lambda v: v @ W + mean, early))

    first, second = passes(prog, W, X)
    assert names(first).count("bj_map") == 1
    assert names(second).count("bj_map") == 2
    assert first.results == []
    check(prog, W, X)


def test_two_placements_have_a_pass_each():
    @bj.program(a=N, b=N)
    def prog(x, y):
        of_a = bj.reduce_sum(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        of_b = bj.reduce_sum(bj.map_fn(jnp.cos, y, placement="b"), placement="b")
        return of_a + of_b

    assert sorted(piece.placement for piece in passes(prog, X, X)) == ["a", "b"]
    assert shape(prog, X, X) == "MMS"
    check(prog, X, X)


def test_a_value_is_gathered_once():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        return y[3], jnp.sort(y, 0), y[:2]

    assert shape(prog, W, X) == "MGS"
    check(prog, W, X)


def test_a_server_value_is_scattered_once():
    @program
    def prog(w, x):
        order = jnp.sort(jnp.sum(x, (1, 2)))
        return bj.map_fn(lambda a: a + 1, order), bj.reduce_sum(order)

    assert shape(prog, W, X).count("C") == 1
    check(prog, W, X)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_rounds_and_their_gradients(count):
    fn = rounds(count)
    rate = jnp.float32(0.1)
    assert len(passes(fn, W, X, rate)) == count + 1
    # Forward each round but the last, whose value nobody asks for, then back through each.
    assert len(passes(jax.grad(fn), W, X, rate)) == 2 * count + 1
    check(fn, W, X, rate)
    check(jax.grad(fn), W, X, rate)


def test_hypergradients():
    fn = jax.value_and_grad(rounds(3), argnums=2)
    # Three forward, the last one with its gradient, and back through all rounds but the first.
    assert len(passes(fn, W, X, jnp.float32(0.1))) == 6
    check(fn, W, X, jnp.float32(0.1))


def test_a_value_and_its_gradient_share_a_pass():
    assert len(passes(jax.value_and_grad(one_round), W, X)) == 1
    assert len(passes(jax.hessian(one_round), W, X)) == 1


def test_placed_state_from_round_to_round():
    @program
    def prog(w, x):
        state = bj.map_fn(lambda v: v @ w, x)
        for _ in range(3):
            mean = bj.reduce_mean(state)
            state = bj.map_fn(lambda s, m=mean: jnp.sin(s - m), state)
        return state, bj.reduce_mean(state)

    found = passes(prog, W, X)
    assert len(found) == 4
    assert [len(piece.results) for piece in found] == [1, 1, 1, 1]
    check(prog, W, X)


def test_operands_of_other_passes_are_made_before():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        total = bj.reduce_sum(y)
        z = bj.map_fn(lambda v: v * total, y)
        return jnp.cumsum(z, 0), z, total

    seen = set()
    for piece in cut(prog, W, X):
        if isinstance(piece, MapPiece):
            assert all(v.name.startswith("arg") or v in seen for v, _ in piece.operands)
            assert all(v.name.startswith("arg") or v in seen for v in piece.broadcasts)
            seen.update(piece.results, (eqn.outputs[0] for eqn in piece.folds))
        elif isinstance(piece, ServerPiece):
            assert all(v.name.startswith("arg") or v in seen for v in piece.inputs)
            seen.update(piece.outputs)
        else:
            assert piece.var in seen
            seen.add(piece.var)
    check(prog, W, X)


def test_many_rounds_are_cut_in_linear_time():
    fn = jax.grad(rounds(100), argnums=2)
    arguments, _, restore = stage.flatten_arguments((W, X, jnp.float32(0.1)))
    staged = stage.stage(fn, arguments, restore)
    start = time.process_time()
    placed = place.place(flatten.flatten(staged.closed), {}, staged.placements)
    pieces = split.split(placed)
    assert time.process_time() - start < 5  # A tenth of a second in fact; minutes if cubic.
    assert sum(isinstance(piece, MapPiece) for piece in pieces) == 200
