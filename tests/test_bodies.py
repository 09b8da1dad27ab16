"""Bodies as bytes: types at their border, export, and loading."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import bodies
from beamjax.bodies import export_body, key_impl, load_body, unwrap, value_type, with_x64, wrap
from beamjax.errors import StagingError, WorkerError
from beamjax.plan import Body

IMPLS = ["threefry2x32", "rbg", "unsafe_rbg"]
VECTOR = jax.ShapeDtypeStruct((3,), jnp.dtype("float32"))


def double(x):
    return [x * 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_keys_cross_as_their_data(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 4)
    raw = unwrap(keys)
    found = value_type(jax.typeof(keys))
    assert (found.shape, found.dtype) == (raw.shape, str(raw.dtype))
    assert found.key_impl == key_impl(keys.dtype)
    again = wrap(np.asarray(raw), found.key_impl)
    assert again.dtype == keys.dtype
    assert (again == keys).all()


def test_types_of_members():
    aval = jax.ShapeDtypeStruct((5, 7, 3), jnp.dtype("bfloat16"))
    found = value_type(aval, "clients", 1)
    assert (found.shape, found.dtype, found.placement) == ((5, 3), "bfloat16", "clients")
    assert found.nbytes == 30
    keys = jax.eval_shape(lambda k: jax.random.split(k, 6), jax.random.key(0))
    assert value_type(keys, "clients", 0).shape == (2,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "bool", "complex64",
                                   "float8_e4m3fn", "int4", "int2", "uint2"])  # fmt: skip
def test_a_body_survives_its_bytes(dtype):
    spec = jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype))
    key, body = export_body("test", lambda x: [x, x[0]], [spec], ["cpu"])
    x = jnp.asarray(np.arange(6).reshape(2, 3) % 2, dtype)
    whole, row = load_body(key, body)(np.asarray(x))
    assert (whole.dtype, row.shape) == (x.dtype, (3,))
    np.testing.assert_array_equal(np.asarray(whole), np.asarray(x))


def test_the_key_is_the_content():
    key, body = export_body("a", double, [VECTOR], ["cpu"], ["x.py:1"])
    same, other_name = export_body("b", double, [VECTOR], ["cpu"])
    assert key == same
    assert (body.name, body.lines, other_name.name) == ("a", ("x.py:1",), "b")
    assert key != export_body("a", lambda x: [x * 3], [VECTOR], ["cpu"])[0]
    assert key != export_body("a", double, [VECTOR], ["cpu", "tpu"])[0]


def test_an_artefact_a_platform():
    _, body = export_body("a", double, [VECTOR], ["cpu", "cuda", "tpu"])
    assert set(body.artefacts) == {"cpu", "cuda", "tpu"}


def test_a_body_for_another_platform():
    key, body = export_body("step", double, [VECTOR], ["tpu"])
    with pytest.raises(WorkerError, match=r"step: this process computes on 'cpu', .* for tpu; add"):
        load_body(key, body)


def test_bytes_that_are_no_body():
    with pytest.raises(WorkerError, match=r"step: jax .* can't read the exported body"):
        load_body("no such key", Body("step", {"cpu": b"no flatbuffer at all, only text"}))


def test_functions_that_can_not_be_exported():
    def calls_back(x):
        return [jax.pure_callback(np.sin, VECTOR, x)]

    with pytest.raises(
        StagingError, match=r"(?s)map_0: JAX can't export .* holds the lines x.py:1"
    ):
        export_body("map_0", calls_back, [VECTOR], ["cpu"], ["x.py:1"])


def test_loading_from_many_threads():
    key, body = export_body("a", lambda x: [x + 17], [VECTOR], ["cpu"])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: load_body(key, body), range(16)))
    assert len(set(map(id, loaded))) == 1
    np.testing.assert_array_equal(loaded[0](np.ones(3, "float32"))[0], np.full(3, 18.0))


def test_64_bits_for_a_while():
    assert not jax.config.jax_enable_x64
    with with_x64(True):
        assert jnp.arange(3).dtype == "int64"
        with with_x64(True):
            assert jnp.arange(3).dtype == "int64"
    assert jnp.arange(3).dtype == "int32"


# --- bodies that hold a mesh


def on_mesh(w, x):
    """A product whose inner axis lies on four devices."""
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = jax.sharding.PartitionSpec("i", None), jax.sharding.PartitionSpec(None, "i")
    multiply = lambda w, x: jax.lax.psum(x @ w, "i")
    out = jax.sharding.PartitionSpec()
    return jax.shard_map(multiply, mesh=mesh, in_specs=specs, out_specs=out)(w, x)


@bj.program(clients=24)
def mean_on_mesh(w, x):
    return bj.reduce_mean(bj.map_fn(lambda x: jnp.tanh(on_mesh(w, x)), x))


@pytest.mark.parametrize("derive", [lambda f: f, jax.jacobian], ids=["value", "jacobian"])
@pytest.mark.parametrize(
    ("runner", "options"),
    [("local", {}), ("local", {"local_threads": 3}), ("DirectRunner", {"local_devices": 4})],
    ids=["local", "threads", "DirectRunner"],
)
def test_bodies_that_hold_a_mesh_compute_on_all_of_it(derive, runner, options):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 3)).astype(np.float32)
    x = rng.normal(size=(24, 5, 8)).astype(np.float32)
    fn = derive(mean_on_mesh)
    found = bj.run(fn, w, x, runner=runner, options={"shard_size": 8, **options})
    expected = jax.jit(fn)(w, x)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_worker_with_too_few_devices_says_so(monkeypatch):
    w, x = np.ones((8, 2), np.float32), np.ones((24, 5, 8), np.float32)
    here = jax.local_devices()[:3]
    monkeypatch.setattr(bodies, "_loaded", {})
    monkeypatch.setattr("beamjax.bodies.jax.local_devices", lambda: here)
    with pytest.raises(
        bj.WorkerError, match=r"a mesh of 4 devices, but this worker has 3.*count=4"
    ):
        bj.run(mean_on_mesh, w, x, runner="local")
