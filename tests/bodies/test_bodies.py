"""Bodies as bytes: types at their border, export, and loading."""

import concurrent.futures
import contextlib
import itertools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import threadpoolctl
from helpers import assert_close, plan_of

import beamjax as bj
from beamjax.bodies import xla_threads
from beamjax.bodies.export import export_body, key_impl, value_type
from beamjax.bodies.load import load_body, unwrap, with_x64, wrap
from beamjax.errors import StagingError, WorkerError
from beamjax.plan.steps import Body
from beamjax.storage import shared_cache

VECTOR = jax.ShapeDtypeStruct((3,), jnp.dtype("float32"))


def double(x):
    return [x * 2]


@pytest.mark.versions
def test_types_of_members_and_keys():
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        keys = jax.random.split(jax.random.key(0, impl=impl), 4)
        raw, found = unwrap(keys), value_type(jax.typeof(keys))
        assert (found.shape, found.dtype) == (raw.shape, str(raw.dtype))
        assert found.key_impl == key_impl(keys.dtype)
        again = wrap(np.asarray(raw), found.key_impl)
        assert again.dtype == keys.dtype
        assert (again == keys).all()
    aval = jax.ShapeDtypeStruct((5, 7, 3), jnp.dtype("bfloat16"))
    found = value_type(aval, "clients", 1)
    assert (found.shape, found.dtype, found.placement) == ((5, 3), "bfloat16", "clients")
    assert found.nbytes == 30
    keys = jax.eval_shape(lambda k: jax.random.split(k, 6), jax.random.key(0))
    assert value_type(keys, "clients", 0).shape == (2,)


DTYPES = "float32 bfloat16 int8 uint32 bool complex64 float8_e4m3fn int4 int2 uint2".split()


@pytest.mark.versions
def test_a_body_survives_its_bytes():
    specs = [jax.ShapeDtypeStruct((2, 3), jnp.dtype(dtype)) for dtype in DTYPES]
    xs = [jnp.asarray(np.arange(6).reshape(2, 3) % 2, dtype) for dtype in DTYPES]
    key, body = export_body("test", lambda *xs: [*xs, *(x[0] for x in xs)], specs, ["cpu"])
    found = load_body(key, body)(*map(np.asarray, xs))
    for whole, row, x in zip(found, found[len(xs) :], xs, strict=False):
        assert (whole.dtype, row.shape) == (x.dtype, (3,))
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(x))


@pytest.mark.versions
def test_the_key_is_the_content_and_each_platform_has_an_artefact():
    key, body = export_body("a", double, [VECTOR], ["cpu"], ["x.py:1"])
    same, other_name = export_body("b", double, [VECTOR], ["cpu"])
    assert key == same
    assert (body.name, body.lines, other_name.name) == ("a", ("x.py:1",), "b")
    assert key != export_body("a", lambda x: [x * 3], [VECTOR], ["cpu"])[0]
    other, both = export_body("a", double, [VECTOR], ["cpu", "tpu"])
    assert key != other
    assert set(both.artefacts) == {"cpu", "tpu"}


@pytest.mark.versions
def test_bodies_that_can_not_be_exported_or_loaded_are_refused():
    key, body = export_body("step", double, [VECTOR], ["tpu"])
    with pytest.raises(WorkerError, match=r"step: this process computes on 'cpu', .* for tpu; add"):
        load_body(key, body)
    with pytest.raises(WorkerError, match=r"step: jax .* can't read the exported body"):
        load_body("no such key", Body("step", {"cpu": b"no flatbuffer at all, only text"}))
    calls_back = lambda x: [jax.pure_callback(np.sin, VECTOR, x)]
    with pytest.raises(StagingError, match=r"(?s)map_0: JAX can't export .*the lines x.py:1"):
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


def test_lapack_has_its_threads_back_when_nothing_holds_the_limit():
    import scipy.linalg.cython_lapack  # noqa: F401 - as JAX does

    found = lambda: {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    calls, other = (Body("", {"cpu": text}) for text in (b"calls lapack_sgesdd_ffi", b"another"))
    with threadpoolctl.threadpool_limits(3, user_api="blas"):
        xla_threads.use_lapack(calls)
        assert (xla_threads.lapack_threads(), found()) == (None, {3})
        with xla_threads.lapack_limit:
            with xla_threads.lapack_limit:
                xla_threads.use_lapack(other)
                assert found() == {3}
                xla_threads.use_lapack(calls)
            assert (xla_threads.lapack_threads(), found()) == (xla_threads.LAPACK_THREADS, {1})
        assert (xla_threads.lapack_threads(), found()) == (None, {3})


def test_any_thread_limits_lapack_and_any_other_ends_the_limit():
    import scipy.linalg.cython_lapack  # noqa: F401 - as JAX does

    numbers = lambda: {pool["num_threads"] for pool in threadpoolctl.threadpool_info()}
    body, limit = Body("", {"cpu": b"calls lapack_sgesdd_ffi"}), xla_threads.lapack_limit
    with threadpoolctl.threadpool_limits(3, user_api="blas"), contextlib.ExitStack() as stack:
        threads = [stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)) for _ in range(3)]
        for first, last in itertools.permutations(threads, 2):
            limit.__enter__()
            first.submit(xla_threads.use_lapack, body).result()
            assert numbers() == {xla_threads.LAPACK_THREADS}
            last.submit(limit.__exit__).result()
            assert numbers() == {3}
        with threadpoolctl.threadpool_limits(2, user_api="blas"):
            assert numbers() == {2}
        assert numbers() == {3}


IN_A_NEW_PROCESS = """
import sys
import jax.numpy as jnp, numpy as np
import beamjax as bj

x = np.arange(24, dtype=np.float32).reshape(6, 2, 2) + 9 * np.eye(2, dtype=np.float32)
program = bj.program(placements={"members": 6})
square = program(lambda x: bj.reduce_sum(bj.map_fn(lambda m: m * m, x)))
invert = program(lambda x: bj.reduce_sum(bj.map_fn(jnp.linalg.inv, x)))
np.testing.assert_array_equal(bj.run(square, x, runner="local"), (x * x).sum(0))
assert "scipy" not in sys.modules
np.testing.assert_allclose(
    bj.run(invert, x, runner="local"), np.linalg.inv(x.astype("float64")).sum(0), 1e-5
)
assert "scipy.linalg.cython_lapack" in sys.modules
"""


@pytest.mark.versions
def test_only_bodies_that_call_lapack_import_scipy():
    command = [sys.executable, "-c", IN_A_NEW_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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


@pytest.mark.parametrize(
    ("runner", "options"),
    [("local", {"local_threads": 3}), ("DirectRunner", {"local_devices": 4})],
)
def test_bodies_that_hold_a_mesh_compute_on_all_of_it(runner, options):
    rng = np.random.default_rng(0)
    w = rng.normal(size=(8, 3)).astype(np.float32)
    x = rng.normal(size=(24, 5, 8)).astype(np.float32)
    fn = lambda w, x: (mean_on_mesh(w, x), jax.jacobian(mean_on_mesh)(w, x))
    found = bj.run(fn, w, x, runner=runner, options={"shard_size": 8, **options})
    assert_close(found, jax.jit(fn)(w, x), 1e-5, 1e-6)


def test_a_worker_with_too_few_devices_says_so(monkeypatch):
    w, x = np.ones((8, 2), np.float32), np.ones((24, 5, 8), np.float32)
    here = jax.local_devices()[:3]
    ((key, body),) = [
        (key, body)
        for key, body in plan_of(mean_on_mesh, w, x, shard_size=8).bodies.items()
        if body.devices == 4
    ]
    shared_cache.reset()
    monkeypatch.setattr("beamjax.bodies.load.jax.local_devices", lambda: here)
    client = type("Client", (), {"local_devices": lambda self: here})()
    for one in (None, SimpleNamespace(client=client)):
        with pytest.raises(WorkerError, match=r"a mesh of 4 devices, but this worker has 3.*t=4"):
            load_body(key, body, device=one)
