"""Programs on a mesh, in Auto, Explicit and mixed mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import beamjax as bj
from beamjax.primitives import map_p

N, SIZE = 100, 10
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(types=(AUTO, AUTO), shape=(2, 2), names=("clients", "data")):
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=tuple(types))


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@bj.program(clients=N)
def broadcast(x):
    return bj.broadcast(x)


@bj.program(clients=N)
def add(x, y):
    return bj.map_fn(jnp.add, (x, y))


@bj.program(clients=N)
def loss(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jnp.tanh(v * w)), x))


eager = lambda fn: fn
both_types = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
both_ways = pytest.mark.parametrize("wrap", [eager, jax.jit], ids=["eager", "jit"])


@both_types
@both_ways
def test_broadcast_lies_along_the_placement(kind, wrap):
    with jax.set_mesh(make_mesh([kind] * 2)):
        out = wrap(broadcast)(jnp.arange(float(SIZE)))
    assert not out.sharding.is_fully_replicated
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE)
    np.testing.assert_array_equal(out, np.tile(np.arange(SIZE, dtype="float32"), (N, 1)))


@both_types
@both_ways
def test_broadcast_keeps_the_layout_of_its_operand(kind, wrap):
    mesh = make_mesh([kind] * 2)
    with jax.set_mesh(mesh):
        out = wrap(broadcast)(on(mesh, jnp.arange(float(SIZE)), "data"))
    assert out.sharding.spec == P("clients", "data")
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE // 2)


@both_types
@both_ways
def test_mesh_of_one_device_replicates(kind, wrap):
    with jax.set_mesh(make_mesh([kind] * 2, shape=(1, 1))):
        out = wrap(broadcast)(jnp.zeros(SIZE))
    assert out.sharding.is_fully_replicated


@both_ways
def test_broadcast_on_an_auto_mesh_without_the_placement_is_unconstrained(wrap):
    mesh = make_mesh([AUTO], (2,), ("data",))
    with jax.set_mesh(mesh):
        out = wrap(broadcast)(on(mesh, jnp.zeros(SIZE), "data"))
    assert out.sharding.spec == P(None, "data")
    assert out.sharding.shard_shape(out.shape) == (N, SIZE // 2)


@both_ways
@pytest.mark.parametrize("op", ["broadcast", "map_fn"])
def test_explicit_mesh_without_the_placement_is_an_error(wrap, op):
    mesh = make_mesh([EXPLICIT], (2,), ("data",))
    run = {
        "broadcast": lambda x: broadcast(x)[0],
        "map_fn": lambda x: add(x, x),
    }[op]
    message = rf"{op}: placement 'clients' not found in mesh with explicit axes \('data',\)"
    with jax.set_mesh(mesh), pytest.raises(bj.PlacementError, match=message):
        wrap(run)(jnp.zeros((N, SIZE)))


@both_types
@both_ways
def test_map_lays_out_replicated_operands(kind, wrap):
    mesh = make_mesh([kind] * 2)
    x, y = jnp.zeros((N, SIZE)), jnp.ones((N, SIZE))
    with jax.set_mesh(mesh):
        out = wrap(add)(x, y)
    assert not out.sharding.is_fully_replicated
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE)
    np.testing.assert_array_equal(out, np.ones((N, SIZE), "float32"))


@both_types
@both_ways
def test_map_lays_out_results_that_do_not_depend_on_members(kind, wrap):
    zeros = bj.program(clients=N)(lambda x: bj.map_fn(jnp.zeros_like, x))
    with jax.set_mesh(make_mesh([kind] * 2)):
        out = wrap(zeros)(jnp.ones((N, SIZE)))
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE)


@both_types
@both_ways
def test_map_without_operands_is_laid_out(kind, wrap):
    ones = bj.program(clients=N)(lambda: bj.map_fn(lambda: jnp.ones(SIZE), ()))
    with jax.set_mesh(make_mesh([kind] * 2)):
        out = wrap(ones)()
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE)


@both_types
@both_ways
def test_map_keeps_the_layout_inside_members(kind, wrap):
    mesh = make_mesh([kind] * 2)
    x, y = (on(mesh, v, None, "data") for v in (jnp.zeros((N, SIZE)), jnp.ones((N, SIZE))))
    with jax.set_mesh(mesh):
        out = wrap(add)(x, y)
    assert x.sharding.shard_shape(x.shape) == (N, SIZE // 2)
    assert out.sharding.spec == P("clients", "data")
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE // 2)


@both_types
@both_ways
def test_map_of_shard_map(kind, wrap):
    mesh = make_mesh([kind] * 2)
    body = jax.shard_map(jnp.add, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    run = bj.program(clients=N)(lambda x, y: bj.map_fn(body, (x, y)))
    x, y = (on(mesh, v, None, "data") for v in (jnp.zeros((N, SIZE)), jnp.ones((N, SIZE))))
    with jax.set_mesh(mesh):
        out = wrap(run)(x, y)
    assert out.sharding.spec == P("clients", "data")
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE // 2)
    np.testing.assert_array_equal(out, np.ones((N, SIZE), "float32"))


@both_ways
def test_mesh_as_an_argument(wrap):
    mesh = make_mesh()
    run = bj.program(clients=N)(lambda w: bj.map_fn(jnp.sin, bj.broadcast(w, mesh=mesh), mesh=mesh))
    out = wrap(run)(on(mesh, jnp.zeros(SIZE), "data"))
    assert out.sharding.spec == P("clients", "data")


@both_types
def test_layouts_are_in_the_types(kind):
    mesh = make_mesh([kind] * 2)
    run = bj.program(clients=N)(
        lambda w: bj.reduce_sum(bj.map_fn(lambda v: jnp.sin(v) * 2.0, bj.broadcast(w)))
    )
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(run)(on(mesh, jnp.zeros(SIZE), "data"))
    specs = [eqn.outvars[0].aval.sharding.spec for eqn in jaxpr.eqns]
    if kind == EXPLICIT:
        assert specs == [P("clients", "data"), P("clients", "data"), P("data")]
    else:
        assert specs == [P(None, None), P(None, None), P(None)]
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is map_p)
    assert eqn.params["mesh"] == mesh.abstract_mesh
    assert eqn.params["spmd_axis_name"] == ("clients" if kind == AUTO else None)


def test_no_mesh_leaves_no_trace():
    jaxpr = jax.make_jaxpr(loss)(jnp.ones(SIZE), jnp.ones((N, SIZE)))
    (eqn,) = (eqn for eqn in jaxpr.eqns if eqn.primitive is map_p)
    assert eqn.params["mesh"] is None
    assert eqn.params["spmd_axis_name"] is None


def test_explicit_results_type_check_downstream():
    mesh = make_mesh([EXPLICIT] * 2)
    run = lambda w: broadcast(w) + add(broadcast(w), broadcast(w))
    with jax.set_mesh(mesh):
        out = jax.jit(run)(on(mesh, jnp.ones(SIZE), "data"))
    assert out.sharding.spec == P("clients", "data")
    np.testing.assert_array_equal(out, np.full((N, SIZE), 3, "float32"))


TRANSFORMED = {
    "value": (loss, 0),
    "grad_server": (jax.grad(loss), 0),
    "grad_placed": (jax.grad(loss, argnums=1), 0),
    "grad_both": (jax.grad(loss, argnums=(0, 1)), 0),
    "jvp": (lambda w, x: jax.jvp(loss, (w, x), (w, x)), 0),
    "hessian": (jax.hessian(loss), 0),
    "vmap": (jax.vmap(loss, (0, None)), 1),
    "vmap_grad": (jax.vmap(jax.grad(loss), (0, None)), 1),
    "checkpoint": (jax.grad(jax.checkpoint(loss)), 0),
    "max": (
        jax.grad(
            bj.program(clients=N)(
                lambda w, x: jnp.sum(bj.reduce_max(bj.map_fn(lambda v: v * w, x)))
            ),
            argnums=(0, 1),
        ),
        0,
    ),
    "prod": (
        jax.grad(
            bj.program(clients=N)(
                lambda w, x: jnp.sum(bj.reduce_prod(bj.map_fn(lambda v: jnp.cos(v * w), x)))
            ),
            argnums=(0, 1),
        ),
        0,
    ),
}


@both_types
@both_ways
@pytest.mark.parametrize("placed_spec", [(None, None), ("clients", "data"), (None, "data")])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_on_a_mesh(kind, wrap, name, placed_spec):
    fn, batch = TRANSFORMED[name]
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (3, SIZE) if batch else (SIZE,))
    x = jax.random.normal(keys[1], (N, SIZE))
    want = fn(w, x)
    mesh = make_mesh([kind] * 2)
    with jax.set_mesh(mesh):
        got = wrap(fn)(on(mesh, w, *[None] * batch, placed_spec[1]), on(mesh, x, *placed_spec))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6)
    jax.tree.map(assert_close, got, want)


@both_types
@both_ways
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_an_axis_that_lies_on_the_mesh(kind, wrap, axis):
    w, x = jnp.ones((4, SIZE)), jax.random.normal(jax.random.key(0), (4, N, SIZE))
    fn = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, axis))
    x = jnp.moveaxis(x, 0, axis)
    want = fn(w, x)
    mesh = make_mesh([kind] * 2)
    spec = ("clients", "data") if axis else ("data", "clients")
    with jax.set_mesh(mesh):
        got = wrap(fn)(on(mesh, w, "data"), on(mesh, x, *spec))
    assert got[1].sharding.shard_shape(got[1].shape) == (2, N // 2, SIZE)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(assert_close, got, want)


@both_ways
@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_mixed_meshes_follow_the_axis_of_the_placement(wrap, kinds):
    mesh = make_mesh(kinds)
    x = jnp.ones((N, SIZE))
    with jax.set_mesh(mesh):
        out = wrap(add)(x, x)
    assert out.sharding.shard_shape(out.shape) == (N // 2, SIZE)


@both_types
@both_ways
def test_keys_on_a_mesh(kind, wrap):
    run = bj.program(clients=N)(
        lambda key: bj.map_fn(lambda k: jax.random.normal(k, (3,)), bj.broadcast(key))
    )
    with jax.set_mesh(make_mesh([kind] * 2)):
        out = wrap(run)(jax.random.key(0))
    assert out.sharding.shard_shape(out.shape) == (N // 2, 3)


@both_types
@both_ways
def test_two_placements_on_two_axes(kind, wrap):
    mesh = make_mesh([kind] * 2, names=("outer", "inner"))

    @bj.program(outer=4, inner=6)
    def run(x):
        inner = lambda v: bj.reduce_sum(
            bj.map_fn(jnp.sin, bj.broadcast(v, placement="inner"), placement="inner"),
            placement="inner",
        )
        return bj.map_fn(inner, x, placement="outer")

    x = jnp.arange(4.0)
    want = run(x)
    with jax.set_mesh(mesh):
        out = wrap(run)(x)
    np.testing.assert_allclose(out, want, rtol=1e-6)
    assert out.sharding.shard_shape(out.shape) == (2,)


def test_members_that_the_mesh_does_not_divide():
    run = bj.program(clients=7)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    x = jnp.arange(7.0)
    with jax.set_mesh(make_mesh()):
        np.testing.assert_allclose(jax.jit(run)(x), run(x), rtol=1e-6)


def test_program_inside_shard_map():
    mesh = make_mesh([AUTO], (2,), ("data",))
    run = bj.program(clients=4)(
        lambda w, x: bj.reduce_sum(bj.map_fn(lambda v: jnp.sum(jnp.sin(v * w)), x))
    )
    sharded = jax.shard_map(
        lambda w, x: jax.lax.psum(run(w, x), "data"),
        mesh=mesh,
        in_specs=(P("data"), P(None, "data")),
        out_specs=P(),
    )
    w, x = jnp.ones(6), jax.random.normal(jax.random.key(0), (4, 6))
    np.testing.assert_allclose(jax.jit(sharded)(w, x), run(w, x), rtol=1e-5)
    got = jax.grad(lambda w: sharded(w, x))(w)
    np.testing.assert_allclose(got, jax.grad(lambda w: run(w, x))(w), rtol=1e-5)


def test_explicit_axis_that_does_not_divide_the_members():
    run = bj.program(clients=7)(lambda x: bj.map_fn(jnp.sin, x))
    message = r"map_fn: placement 'clients' has 7 members, .* size 2 does not divide"
    with jax.set_mesh(make_mesh([EXPLICIT] * 2)), pytest.raises(bj.PlacementError, match=message):
        run(jnp.arange(7.0))


@both_ways
def test_closures_may_lie_along_an_auto_axis_of_the_placement(wrap):
    mesh = make_mesh()
    w, x = jnp.arange(float(SIZE)), jax.random.normal(jax.random.key(0), (N, SIZE))
    want = jax.value_and_grad(loss)(w, x)
    with jax.set_mesh(mesh):
        got = wrap(jax.value_and_grad(loss))(on(mesh, w, "clients"), x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)


@both_ways
def test_closures_must_not_lie_along_an_explicit_axis_of_the_placement(wrap):
    mesh = make_mesh([EXPLICIT] * 2)
    message = r"map_fn: the mapped function closes over .* lies along the mesh axis 'clients'"
    with jax.set_mesh(mesh):
        w = on(mesh, jnp.arange(float(SIZE)), "clients")
        with pytest.raises(bj.PlacementError, match=message):
            wrap(loss)(w, jnp.ones((N, SIZE)))
        placed = wrap(broadcast)(w)
    assert placed.sharding.shard_shape(placed.shape) == (N // 2, SIZE)
