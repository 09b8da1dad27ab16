"""What a worker must be: settings before JAX starts, its platform, versions and devices."""

import logging
import os
import pickle
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest

import beamjax as bj
from beamjax import _compat
from beamjax.bodies import load as bodies
from beamjax.bodies.xla_threads import cpu_devices
from beamjax.errors import WorkerError
from beamjax.options import parse_options
from beamjax.runtime import worker_environment as machine
from beamjax.runtime.worker_environment import Machine, Versions, check_versions
from beamjax.storage import shared_cache

N = 100
X = np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32)
HERE = Versions.here()
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]


@bj.program(clients=N)
def centred(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v) * w, x)
    mean = bj.reduce_mean(y)
    first = bj.reduce(lambda a, b: jnp.where(a[0] > 0, a, b), y)
    return bj.reduce_max(bj.map_fn(lambda u, v: u * v - mean, (y, x))), mean, first, y


# --- versions


def test_versions_that_fit_and_versions_that_do_not():
    exported = jax.export.export(jax.jit(jnp.sin))(1.0)
    assert Versions(
        bj.__version__, jax.__version__, jaxlib.version.__version__,
        exported.calling_convention_version,
    ) == HERE  # fmt: skip
    assert check_versions(HERE, HERE, "cpu") is None
    there = Versions("0.1.0", "0.10.2", "0.10.2", 10)
    command = "`pip install 'beamjax==0.1.0' 'jax[cuda12]==0.10.2' jaxlib==0.10.2`"
    for change in (
        {"jax": "0.10.1"},
        {"jaxlib": "0.10.1"},
        {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"},
    ):
        here = replace(there, **change)
        warning = check_versions(there, here, "cuda")
        for part in (str(here), str(there), "the last bits of the results may differ", command):
            assert part in warning, change
    low, high = _compat.CALLING_CONVENTIONS
    command = "`pip install 'beamjax==0.1.0' 'jax==0.10.2' jaxlib==0.10.2`"
    for change, message in (
        ({"beamjax": "0.2.0"}, "both must have the same version of beamjax"),
        ({"jax": "0.9.2"}, "and the worker's jax is older"),
        ({"jax": "0.9.2", "jaxlib": "0.9.2"}, "the worker's jax and jaxlib is older"),
    ):
        here = replace(there, **change)
        with pytest.raises(WorkerError) as error:
            check_versions(there, here, "cpu")
        for part in (message, str(here), str(there), command):
            assert part in str(error.value), change
    for convention in (low, high):
        check_versions(replace(HERE, convention=convention), HERE, "cpu")
    for convention in (low - 1, high + 1):
        with pytest.raises(WorkerError, match=f"convention {low} to {high}, found {convention}"):
            check_versions(replace(HERE, convention=convention), HERE, "cpu")


def launched_with(monkeypatch, **change):
    """Has programs exported by a launcher of other versions."""
    of = Machine.of
    versions = replace(HERE, **change)
    monkeypatch.setattr(Machine, "of", lambda options: replace(of(options), versions=versions))


def test_runs_with_workers_of_other_versions(monkeypatch, caplog):
    @bj.program(clients=N)
    def pivoted(x):
        return bj.map_fn(lambda v: jax.scipy.linalg.qr(v[None], pivoting=True), x)

    with monkeypatch.context() as patch:
        launched_with(patch, jax="99.0.0")
        with pytest.raises(WorkerError, match=r"exported with beamjax .*, jax 99\.0\.0"):
            bj.run(centred, jnp.ones(3), X)
    minor = ".".join([*HERE.jax.split(".")[:2], "98"])  # A process warns once of a version.
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "beamjax"):
        launched_with(patch, jax=minor)
        # JAX may change some custom calls in any version.
        with pytest.raises(WorkerError, match=r"lapack_sgeqp3_ffi.*same jax and jaxlib") as error:
            bj.run(pivoted, X)
        assert f"jax {HERE.jax}," in str(error.value)
        assert f"jax {minor}," in str(error.value)
        assert "the last bits" not in caplog.text
        bj.run(centred, jnp.ones(3), X)
        assert "the last bits of the results may differ" in caplog.text


# --- platforms


def test_a_platform_is_there_or_the_worker_fails():
    assert Machine(("cpu",)).check() == cpu_devices(1)[:1]
    bj.run(centred, jnp.ones(3), X, options={"platforms": ["cpu"]})
    for platforms in (("cuda",), ("rocm",), ("tpu",), ("cuda", "rocm")):
        message = rf"platforms=\['{platforms[0]}'.*: JAX computes on 'cpu' .*JAX_PLATFORMS is 'cpu'"
        with pytest.raises(WorkerError, match=message):
            Machine(platforms).check()


@pytest.mark.parametrize(
    "flags",
    [[], pytest.param(["--direct_running_mode=multi_processing"], marks=pytest.mark.long)],
    ids=len,
)
def test_a_run_fails_instead_of_computing_on_the_cpu(flags):
    with pytest.raises(WorkerError, match=r"platforms=\['cuda'\]: JAX computes on 'cpu' here"):
        bj.run(centred, jnp.ones(3), X, options=["--platforms=cuda", *flags])


def test_the_platform_of_this_process(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for platform in ("cuda", "rocm"):
        backend = type("Backend", (), {"platform_version": f"PJRT C API\n{platform} 12090"})
        monkeypatch.setattr("jax.extend.backend.get_backend", lambda backend=backend: backend)
        assert bodies.default_platform() == platform


# --- settings, in processes of their own

OPEN = """
import pickle, sys
machine = pickle.loads(sys.stdin.buffer.read())
import jax, os
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options
def show():
    print(options().get("memory_fraction"), options().get("preallocate"), jax.config.jax_platforms)
"""


def in_a_new_process(code, data=b"", **environment):
    """The lines that a process without the settings of these tests prints."""
    names = ("JAX_", "XLA_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=data, capture_output=True, check=False, env=clean | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


MEMORY = {"XLA_CLIENT_MEM_FRACTION": "0.4", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
CACHE = {
    "JAX_COMPILATION_CACHE_DIR": "/there",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.25",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "7",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}


def test_a_worker_gets_the_variables_of_the_launching_process(monkeypatch):
    for name, value in {**MEMORY, **CACHE, "JAX_ENABLE_X64": "1"}.items():
        monkeypatch.setenv(name, value)
    sent = Machine.of(parse_options({"platforms": ["cpu"]}))
    assert sent.environment == MEMORY | CACHE
    code = OPEN + "show(); print(machine.check())\n"
    code += f"print(*[getattr(jax.config, name.lower()) for name in {list(CACHE)}])"
    found = in_a_new_process(code, pickle.dumps(sent))
    assert found == ["0.4 False cpu", "(CpuDevice(id=0),)", "/there 0.25 7 False"]
    # Those that a worker has take precedence, under both names of a variable.
    mine = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9", "JAX_COMPILATION_CACHE_DIR": "/here"}
    found = in_a_new_process(code, pickle.dumps(sent), **mine)
    assert found == ["0.9 False cpu", "(CpuDevice(id=0),)", "/here 0.25 7 False"]


def test_a_worker_whose_jax_runs_already_gets_those_on_the_cache():
    """As in a pool of workers, which serves several jobs."""
    sent = [Machine(environment={**MEMORY, **CACHE, "JAX_COMPILATION_CACHE_DIR": x}) for x in "ab"]
    code = "import os, pickle, sys, jax\njax.devices()\n"
    code += "for machine in pickle.loads(sys.stdin.buffer.read()):\n    pickle.loads(machine)\n"
    code += (
        "    print(jax.config.jax_compilation_cache_dir, os.environ.get('XLA_CLIENT_MEM_FRACTION'))"
    )
    found = in_a_new_process(code, pickle.dumps([pickle.dumps(each) for each in sent]))
    assert found == ["a None", "b None"]


def variables(x):
    """A body that reads the environment where it runs."""
    names = [*MEMORY, *CACHE]
    read = lambda _: np.int32(sum(os.environ.get(name) == (MEMORY | CACHE)[name] for name in names))
    return jax.pure_callback(read, jax.ShapeDtypeStruct((), np.int32), x, vmap_method="sequential")


@pytest.mark.long
def test_the_workers_of_a_runner_get_the_variables(monkeypatch, tmp_path):
    for name, value in (MEMORY | CACHE).items():
        monkeypatch.setenv(name, value)
    fn = bj.program(clients=N)(lambda x: bj.map_fn(variables, x))
    flags = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
    found = bj.run(fn, X[:, 0], options=["--shard_size=8", *flags])
    np.testing.assert_array_equal(found, len(MEMORY | CACHE))


@pytest.mark.long
def test_a_worker_opens_no_other_platform_and_changes_no_other_setting():
    code = OPEN + "show()\ntry: machine.check()\nexcept Exception as error: print(error)"
    found = in_a_new_process(code, pickle.dumps(Machine(("cuda",))))
    assert found[0] == "None None cuda,cpu"
    assert "platforms=['cuda']" in found[-1]
    wanted = pickle.dumps(Machine(("cuda", "rocm")))
    code = OPEN + "show()"
    found = in_a_new_process(code, wanted, XLA_PYTHON_CLIENT_MEM_FRACTION="0.9")
    assert found == ["0.9 None None"]
    assert in_a_new_process(code, wanted, JAX_PLATFORMS="cpu") == ["None None cpu"]


def test_the_launching_process_keeps_its_settings():
    before = dict(os.environ)
    sent = Machine(("cuda",), MEMORY)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert dict(os.environ) == before


def test_jax_that_started_with_other_settings_is_an_error_on_accelerators(monkeypatch):
    jax.devices()
    for name in MEMORY:
        monkeypatch.delenv(name, raising=False)
    wanted = Machine(environment=MEMORY | CACHE)
    wanted.check()  # A CPU has no such memory.
    monkeypatch.setattr(machine, "default_platform", lambda: "cuda")
    shared_cache.reset()
    try:
        assert len(Machine().check()) == 8  # All devices of an accelerator compute.
        message = (
            r"JAX had started in this process before beamjax could set "
            r"XLA_CLIENT_MEM_FRACTION=0\.4, XLA_PYTHON_CLIENT_PREALLOCATE=false"
        )
        with pytest.raises(WorkerError, match=message):
            wanted.check()
        for name, value in MEMORY.items():
            monkeypatch.setenv(name, value)
        wanted.check()
    finally:
        shared_cache.reset()


FORKED = """
import os, warnings
import jax
from beamjax.runtime.worker_environment import Machine
warnings.simplefilter("ignore")
for start in (False, True):
    if start:
        jax.devices()
    pid = os.fork()
    if pid == 0:
        try:
            print("ok", len(Machine().check()), flush=True)
        except Exception as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_a_fork_of_a_process_in_which_jax_runs_is_refused():
    before, after = in_a_new_process(FORKED)
    assert before == "ok 1"
    assert "Spawn the processes of workers: multiprocessing" in after


# --- devices


def test_a_cpu_computes_on_one_device_unless_asked():
    devices = cpu_devices(1)
    assert len(devices) == 8
    assert Machine().check() == devices[:1]
    assert Machine(local_devices=4).check() == devices[:4]
    assert Machine(local_devices=8).check() == devices
    with pytest.raises(WorkerError, match=r"local_devices=9: this worker has 8 of platform 'cpu'"):
        Machine(local_devices=9).check()


@pytest.fixture
def shards_by_device(monkeypatch):
    """How many shards each device computes."""
    counts = {}
    on = bj.runtime.local.ShardExecutor.__call__

    def counted(self, shard, operands, lost):
        with bodies.on_device(self.loaded.device):
            (device,) = jax.numpy.zeros(()).devices()
        counts[device.id] = counts.get(device.id, 0) + 1
        return on(self, shard, operands, lost)

    monkeypatch.setattr(bj.runtime.local.ShardExecutor, "__call__", counted)
    return counts


def test_four_devices_share_the_shards(shards_by_device):
    bj.run(centred, jnp.arange(3.0), X, options=["--shard_size=8"])
    assert set(shards_by_device) == {0}
    total = shards_by_device.pop(0)
    for flags in ([], THREADS):
        bj.run(centred, jnp.arange(3.0), X, options=["--local_devices=4", "--shard_size=8", *flags])
        assert set(shards_by_device) == {0, 1, 2, 3}
        assert sum(shards_by_device.values()) == total
        shards_by_device.clear()


def test_four_devices_without_broadcasts_and_with_calls_to_the_host():
    calls = []

    @bj.program(clients=N)
    def noted(x):
        y = bj.map_fn(lambda v: jnp.sort(v) * 2, x)
        bj.map_fn(lambda v: jax.debug.callback(lambda s: calls.append(float(s)), v[0]), x)
        return y, bj.reduce_min(y)

    found = bj.run(noted, X, options={"local_devices": 4, "shard_size": 8})
    np.testing.assert_array_equal(found[0], np.sort(X, axis=1) * 2)
    assert len(calls) == N
