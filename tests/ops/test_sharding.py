"""Programs on a mesh, in Auto, Explicit and mixed mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import beamjax as bj
from beamjax.ops.primitives import map_p

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


def shards_of(x):
    return x.sharding.shard_shape(x.shape)


@pytest.mark.versions
@both_types
@both_ways
def test_members_lie_along_the_placement_and_keep_their_own_layout(kind, wrap):
    mesh = make_mesh([kind] * 2)
    zeros = bj.program(clients=N)(lambda x: bj.map_fn(jnp.zeros_like, x))
    ones = bj.program(clients=N)(lambda: bj.map_fn(lambda: jnp.ones(SIZE), ()))
    inner = jax.shard_map(jnp.add, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    sharded = bj.program(clients=N)(lambda x, y: bj.map_fn(inner, (x, y)))
    normal = lambda k: jax.random.normal(k, (3,))
    keys = bj.program(clients=N)(lambda key: bj.map_fn(normal, bj.broadcast(key)))
    w, x = jnp.arange(float(SIZE)), jnp.ones((N, SIZE))
    with jax.set_mesh(mesh):
        laid_w, laid_x = on(mesh, w, "data"), on(mesh, x, None, "data")
        assert shards_of(laid_x) == (N, SIZE // 2)
        plain = {"broadcast": wrap(broadcast)(w), "map": wrap(add)(x, x)}
        plain |= {"no dependence": wrap(zeros)(x), "no operands": wrap(ones)()}
        laid = {"broadcast": wrap(broadcast)(laid_w), "map": wrap(add)(laid_x, laid_x)}
        laid["shard_map"] = wrap(sharded)(laid_x, laid_x)
        of_keys = wrap(keys)(jax.random.key(0))
    assert {k: shards_of(v) for k, v in plain.items()} == dict.fromkeys(plain, (N // 2, SIZE))
    assert {k: shards_of(v) for k, v in laid.items()} == dict.fromkeys(laid, (N // 2, SIZE // 2))
    assert {v.sharding.spec for v in laid.values()} == {P("clients", "data")}
    assert shards_of(of_keys) == (N // 2, 3)
    np.testing.assert_array_equal(plain["broadcast"], np.tile(np.asarray(w), (N, 1)))
    for found in plain["map"], laid["map"], laid["shard_map"]:
        np.testing.assert_array_equal(found, np.full((N, SIZE), 2, "float32"))


@both_types
@both_ways
def test_mesh_of_one_device_replicates(kind, wrap):
    with jax.set_mesh(make_mesh([kind] * 2, shape=(1, 1))):
        out = wrap(broadcast)(jnp.zeros(SIZE))
    assert out.sharding.is_fully_replicated


@both_ways
def test_an_auto_mesh_without_the_placement_leaves_members_unconstrained(wrap):
    mesh = make_mesh([AUTO], (2,), ("data",))
    with jax.set_mesh(mesh):
        out = wrap(broadcast)(on(mesh, jnp.zeros(SIZE), "data"))
    assert out.sharding.spec == P(None, "data")
    assert shards_of(out) == (N, SIZE // 2)


@both_ways
def test_an_explicit_mesh_without_the_placement_is_the_users_own_business(wrap):
    mesh = make_mesh([EXPLICIT], (2,), ("data",))
    x = jnp.arange(float(N * SIZE)).reshape(N, SIZE) / 99
    slope = jax.grad(loss)
    expected = slope(jnp.ones(SIZE), x)
    with jax.set_mesh(mesh):
        w = on(mesh, jnp.ones(SIZE), "data")
        assert_close(wrap(slope)(jnp.ones(SIZE), x), expected)
        assert wrap(broadcast)(w).sharding.spec == P(None, "data")
        laid = wrap(slope)(w, on(mesh, x, None, "data"))
    assert laid.sharding.spec == P("data")
    assert_close(laid, expected)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_under_a_mesh_without_the_placement(runner):
    x = jnp.arange(float(N * SIZE)).reshape(N, SIZE) / 99
    expected = jax.grad(loss)(jnp.ones(SIZE), x)
    with jax.set_mesh(make_mesh([EXPLICIT], (2,), ("data",))):
        assert_close(bj.run(jax.grad(loss), jnp.ones(SIZE), x, runner=runner), expected)


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


def reduced(reduce, body):
    prog = lambda w, x: jnp.sum(reduce(bj.map_fn(lambda v: body(v * w), x)))
    return jax.grad(bj.program(clients=N)(prog), argnums=(0, 1))


TRANSFORMED = {
    "value": (loss, 0),
    "grad_both": (jax.grad(loss, argnums=(0, 1)), 0),
    "jvp": (lambda w, x: jax.jvp(loss, (w, x), (w, x)), 0),
    "hessian": (jax.hessian(loss), 0),
    "vmap": (jax.vmap(loss, (0, None)), 1),
    "vmap_grad": (jax.vmap(jax.grad(loss), (0, None)), 1),
    "checkpoint": (jax.grad(jax.checkpoint(loss)), 0),
    "max": (reduced(bj.reduce_max, lambda v: v), 0),
    "prod": (reduced(bj.reduce_prod, jnp.cos), 0),
}


@both_types
@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_on_a_mesh(kind, name):
    fn, batch = TRANSFORMED[name]
    keys = jax.random.split(jax.random.key(0))
    w = jax.random.normal(keys[0], (3, SIZE) if batch else (SIZE,))
    x = jax.random.normal(keys[1], (N, SIZE))
    expected = jax.jit(fn)(w, x)
    mesh = make_mesh([kind] * 2)
    # Eager derivatives take long; the layouts of operands matter to compiled ones.
    specs = [(eager, ("clients", "data"))] * (name in ("value", "grad_both", "vmap"))
    specs += [(jax.jit, spec) for spec in [(None, None), ("clients", "data"), (None, "data")]]
    for wrap, spec in specs:
        with jax.set_mesh(mesh):
            found = wrap(fn)(on(mesh, w, *[None] * batch, spec[1]), on(mesh, x, *spec))
        assert_close(found, expected, rtol=2e-5, atol=1e-6)


@both_types
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_over_an_axis_that_lies_on_the_mesh(kind, axis):
    w, x = jnp.ones((4, SIZE)), jax.random.normal(jax.random.key(0), (4, N, SIZE))
    fn = jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=(0, axis)))
    x = jnp.moveaxis(x, 0, axis)
    expected = fn(w, x)
    mesh = make_mesh([kind] * 2)
    spec = ("clients", "data") if axis else ("data", "clients")
    with jax.set_mesh(mesh):
        found = fn(on(mesh, w, "data"), on(mesh, x, *spec))
    assert shards_of(found[1]) == (2, N // 2, SIZE)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


@both_ways
@pytest.mark.parametrize("kinds", [(EXPLICIT, AUTO), (AUTO, EXPLICIT)])
def test_mixed_meshes_follow_the_axis_of_the_placement(wrap, kinds):
    mesh = make_mesh(kinds)
    x = jnp.ones((N, SIZE))
    with jax.set_mesh(mesh):
        out = wrap(add)(x, x)
    assert shards_of(out) == (N // 2, SIZE)


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
    assert shards_of(out) == (2,)


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
    assert shards_of(placed) == (N // 2, SIZE)
