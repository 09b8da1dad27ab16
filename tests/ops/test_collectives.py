"""Collectives in the body of a map, by the name of the placement; the truth is `jax.vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits, assert_same_types
from jax import lax
from streams import stream

import beamjax as bj

N = 19
X = jax.random.normal(jax.random.key(0), (N, 4, 3))
W = jnp.asarray([0.5, -1.0, 2.0])


def reductions(v):
    small, one = (v > 0).astype("int8"), jnp.ones((), "bfloat16")
    return lax.psum((v, small, v > 0, one), "c"), one, lax.pmax(v, "c"), lax.pmin(small, "c")


def centered(v):
    return v - lax.pmean(v, "c"), lax.psum(1, "c"), lax.axis_size("c")


def standardized(v):
    v = jax.jit(lambda u: u - lax.pmean(u, "c"))(v)
    return v / jnp.sqrt(jax.checkpoint(lambda u: lax.pmean(u * u, ("c",)))(v))


def numbered(v):
    shared = jax.random.fold_in(jax.random.key(1), np.uint32(2**32 - 1))
    key = jax.random.fold_in(shared, lax.axis_index("c"))
    return lax.axis_index("c"), jax.random.normal(key, v.shape) + v


def compared_to_all(v):
    rows = lax.all_gather(v[0], "c", axis=1), lax.all_gather(v[1], "c", tiled=True)
    return [jnp.sum(x * x) - v[0, 0] for x in rows]


def slope_of_a_shared_loss(v):
    return jax.grad(lambda w: lax.psum(jnp.sum((v @ w) ** 2), "c"))(W)


def trained(v):
    """Rounds in the body: w is the same for all members, the momentum is not."""

    def step(carry, rate):
        w, moment = carry
        slope = jax.grad(lambda w: jnp.mean((v @ w - 1) ** 2))(w)
        moment = 0.5 * moment + slope
        return (w - rate * lax.pmean(moment, "c"), moment), jnp.sum(moment)

    return lax.scan(step, (W, jnp.zeros(3)), jnp.asarray([0.1, 0.05, 0.01]))


def scanned_by_row(v):
    return lax.scan(lambda c, row: (c + lax.psum(row, "c"), c * row), jnp.zeros(3), v)


BODIES = [
    reductions, centered, standardized, numbered, compared_to_all, slope_of_a_shared_loss, trained,
    scanned_by_row,
]  # fmt: skip


def mapped(body):
    return bj.program(c=N)(lambda x: bj.map_fn(body, x))


def batched(body):
    return jax.vmap(body, axis_name="c")


@pytest.mark.versions
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_bodies_with_collectives_compute_what_vmap_does(body):
    want = batched(body)(X)
    results = [jax.jit(mapped(body))(X)]
    for runner in ("local", "DirectRunner"):
        results.append(bj.run(mapped(body), X, runner=runner, options={"shard_size": 8}))
    for found in results:
        assert_same_types(found, want)
        assert_close(found, want)
    assert_same_bits(*results[1:])


@pytest.mark.parametrize("body", [standardized, trained, scanned_by_row], ids=lambda b: b.__name__)
def test_their_gradients(body):
    def loss(function):
        return lambda x: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(function(x)))

    want = jax.grad(loss(batched(body)))(X)
    assert_close(jax.grad(loss(mapped(body)))(X), want)
    assert_close(bj.run(jax.grad(loss(mapped(body))), X), want)


def test_reductions_are_passes():
    for body in (centered, standardized, numbered, trained):
        assert bj.explain(mapped(body), X).facts.gathered_bytes == 0


def test_axes_around_a_program_keep_their_names():
    def both(axes):
        return lambda v: lax.psum(v, axes) * (lax.axis_index("b") + 1).astype("float32")

    def of(outer):
        return jax.vmap(outer, axis_name="b")

    xs = X.reshape(2, -1)[:, : 2 * N].reshape(2, N, 2)
    for axes in ("b", ("b", "c")):
        assert_close(of(mapped(both(axes)))(xs), of(batched(both(axes)))(xs))


def test_members_of_unknown_number():
    def weighed(v):
        return (v - lax.pmean(v, "c")) * lax.axis_index("c").astype("float32")

    rows = np.asarray(X[:, 0])
    prog = bj.program(c=None)(lambda x: bj.reduce_sum(bj.map_fn(weighed, x)))
    assert_close(bj.run(prog, stream(rows)), batched(weighed)(rows).sum(0))


def test_what_is_no_reduction_is_refused():
    nested = bj.program(d=None)(lambda v: bj.map_fn(lambda u: u + lax.psum(u, "c"), v))
    bodies = {
        "ppermute": lambda v: lax.ppermute(v, "c", [(0, 1)]),
        "psum with axis_index_groups": lambda v: lax.psum(
            v, "c", axis_index_groups=[[0], list(range(1, N))]
        ),
        "while": lambda v: lax.while_loop(lambda u: u < 9, lambda u: lax.psum(u, "c"), v[0, 0]),
        "a nested map_fn": lambda v: nested(v),
    }
    for found, body in bodies.items():
        with pytest.raises(bj.StructureError, match=f"found {found}, expected lax"):
            mapped(body)(X)


def test_weights_are_refused():
    with pytest.raises(bj.StructureError, match="divides by the number of members"):
        bj.reweight(mapped(centered))(jnp.ones(N), X)
