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
from beamjax import _compat, bodies, machine
from beamjax.errors import OptionsError, WorkerError
from beamjax.machine import Machine, Versions, check_versions
from beamjax.options import Options, parse_options
from beamjax.xla_threads import cpu_devices

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


def python(code, data=b"", **environment):
    """What a new process prints that JAX was not set up for."""
    names = ("JAX_", "XLA_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(names)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        input=data, capture_output=True, check=False, env=clean | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


# --- versions


def test_versions_are_those_that_are_installed():
    assert HERE.beamjax == bj.__version__
    assert (HERE.jax, HERE.jaxlib) == (jax.__version__, jaxlib.version.__version__)
    exported = jax.export.export(jax.jit(jnp.sin))(1.0)
    assert HERE.convention == exported.calling_convention_version


def changed(**values):
    return replace(Versions("0.1.0", "0.10.2", "0.10.2", 10), **values)


def test_equal_versions_are_fine():
    assert check_versions(HERE, HERE, "cpu") is None


@pytest.mark.parametrize(
    "here",
    [changed(jax="0.10.1"), changed(jaxlib="0.10.1"), changed(jax="0.12.0.1", jaxlib="0.12.0.1")],
    ids=str,
)
def test_versions_that_jax_promises_to_fit_are_a_warning(here):
    warning = check_versions(changed(), here, "cuda")
    assert warning.startswith(f"this worker has {here}, but the program was exported with beamjax")
    assert "the last bits of the results may differ" in warning
    command = "pip install 'beamjax==0.1.0' 'jax[cuda12]==0.10.2' jaxlib==0.10.2"
    assert f"Use an image for the workers that is made with `{command}`" in warning


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (changed(beamjax="0.2.0"), "both must have the same version of beamjax"),
        (changed(jax="0.9.2"), "three weeks older, no more, and the worker's jax is older"),
        (changed(jaxlib="0.9.2", jax="0.9.2"), "the worker's jax and jaxlib is older"),
    ],
    ids=str,
)
def test_other_versions_are_errors(here, message):
    with pytest.raises(WorkerError, match=message) as error:
        check_versions(changed(), here, "cpu")
    assert str(here) in str(error.value)
    assert str(changed()) in str(error.value)
    assert "`pip install 'beamjax==0.1.0' 'jax==0.10.2' jaxlib==0.10.2`" in str(error.value)


@pytest.mark.parametrize("convention", [_compat.CALLING_CONVENTIONS[0] - 1, 1000])
def test_artefacts_that_this_jax_cannot_call(convention):
    low, high = _compat.CALLING_CONVENTIONS
    message = f"reads artefacts of calling convention {low} to {high}, found {convention}"
    with pytest.raises(WorkerError, match=message):
        check_versions(replace(HERE, convention=convention), HERE, "cpu")


def test_a_worker_warns_and_goes_on(caplog):
    minor = ".".join([*HERE.jax.split(".")[:2], "99"])
    with caplog.at_level(logging.WARNING, "beamjax"):
        Machine(versions=replace(HERE, jax=minor)).check()
    assert "the last bits of the results may differ" in caplog.text


def test_what_was_exported_elsewhere_is_refused_before_it_is_read(monkeypatch):
    old = classmethod(lambda cls: replace(HERE, jax="99.0.0"))
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "here", old)
        wanted = Machine.of(Options())
    monkeypatch.setattr(Machine, "of", lambda options: wanted)
    with pytest.raises(WorkerError, match=r"exported with beamjax .*, jax 99\.0\.0"):
        bj.run(centred, jnp.ones(3), X)


def test_custom_calls_that_jax_may_change_take_equal_versions(monkeypatch, caplog):
    minor = ".".join([*HERE.jax.split(".")[:2], "98"])  # a process warns once of a version
    launcher = replace(HERE, jax=minor)
    of = Machine.of
    monkeypatch.setattr(Machine, "of", lambda options: replace(of(options), versions=launcher))

    @bj.program(clients=N)
    def pivoted(x):
        return bj.map_fn(lambda v: jax.scipy.linalg.qr(v[None], pivoting=True), x)

    with pytest.raises(WorkerError, match=r"lapack_sgeqp3_ffi.*same jax and jaxlib") as error:
        bj.run(pivoted, X)
    assert f"jax {HERE.jax}," in str(error.value)
    assert f"jax {minor}," in str(error.value)
    assert "the last bits" not in caplog.text
    bj.run(centred, jnp.ones(3), X)
    assert "the last bits of the results may differ" in caplog.text


# --- platforms


def test_a_platform_that_is_there():
    assert Machine("cpu").check() == cpu_devices(1)[:1]
    bj.run(centred, jnp.ones(3), X, options={"require_platform": "cpu"})


@pytest.mark.parametrize("platform", ["gpu", "cuda", "rocm", "tpu"])
def test_a_platform_that_is_missing(platform):
    message = (
        rf"require_platform='{platform}': JAX computes on 'cpu' here \(JAX_PLATFORMS is 'cpu'\)\. "
        r"Give the worker such a device.*pip install 'beamjax=="
    )
    with pytest.raises(WorkerError, match=message):
        Machine(platform).check()


@pytest.mark.parametrize("flags", [[], ["--direct_running_mode=multi_processing"]], ids=len)
def test_a_run_fails_where_a_worker_starts_instead_of_computing_on_the_cpu(flags):
    with pytest.raises(WorkerError, match="require_platform='gpu': JAX computes on 'cpu' here"):
        bj.run(centred, jnp.ones(3), X, options=["--require_platform=gpu", *flags])


def test_bodies_are_exported_for_the_platform_that_is_required():
    assert parse_options({"require_platform": "gpu"}).platforms == ("cuda",)
    assert parse_options({"require_platform": "rocm"}).platforms == ("rocm",)
    given = {"require_platform": "gpu", "platforms": ["cpu", "rocm"]}
    assert parse_options(given).platforms == ("cpu", "rocm")
    with pytest.raises(OptionsError, match="has nothing for it; leave out platforms"):
        parse_options({"require_platform": "gpu", "platforms": ["cpu"]})


@pytest.mark.parametrize(
    ("version", "platform"),
    [("PJRT C API\ncuda 12090", "cuda"), ("PJRT C API\nrocm 60304", "rocm")],
)
def test_gpus_of_two_makers_are_told_apart(version, platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    backend = type("Backend", (), {"platform_version": version})
    monkeypatch.setattr(bodies, "get_backend", lambda: backend)
    assert bodies.default_platform() == platform


# --- settings, in processes of their own

OPEN = """
import pickle, sys
machine = pickle.loads(sys.stdin.buffer.read())
import jax, os
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options as options
"""


def test_settings_are_made_before_jax_starts():
    wanted = pickle.dumps(Machine("cpu", device_memory_fraction=0.4, preallocate=False))
    code = OPEN + "print({k: options()[k] for k in ('memory_fraction', 'preallocate')}); "
    code += "print(jax.config.jax_platforms, machine.check())"
    found = python(code, wanted, XLA_PYTHON_CLIENT_MEM_FRACTION="0.9")
    assert found.split("\n") == [
        "{'memory_fraction': 0.4, 'preallocate': False}",
        "cpu (CpuDevice(id=0),)",
    ]


def test_what_is_not_asked_for_stays_as_it_is():
    wanted = pickle.dumps(Machine(require_platform="gpu"))
    code = OPEN + "print(options().get('memory_fraction'), 'preallocate' in options(), "
    code += "jax.config.jax_platforms)"
    assert python(code, wanted, XLA_PYTHON_CLIENT_MEM_FRACTION="0.9") == "0.9 False None"
    assert python(code, wanted, JAX_PLATFORMS="cpu") == "None False cpu"


def test_a_worker_of_another_platform_does_not_open_what_it_may_not_use():
    wanted = pickle.dumps(Machine("cuda"))
    code = OPEN + "print(jax.config.jax_platforms)"
    assert python(code, wanted) == "cuda,cpu"
    code = OPEN + "\ntry: machine.check()\nexcept Exception as error: print(error)"
    assert "require_platform='cuda'" in python(code, wanted)


def test_the_launching_process_keeps_its_settings():
    before = dict(os.environ)
    again = pickle.loads(pickle.dumps(Machine("gpu", 0.5, True)))
    assert again == Machine("gpu", 0.5, True)
    assert dict(os.environ) == before


def test_jax_that_started_with_other_settings_is_an_error_on_accelerators(monkeypatch):
    jax.devices()
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    wanted = Machine(device_memory_fraction=0.5, preallocate=False)
    wanted.check()  # a CPU has no such memory
    monkeypatch.setattr(machine, "default_platform", lambda: "cuda")
    machine._check.cache_clear()
    message = (
        r"JAX had started in this process before beamjax could set XLA_CLIENT_MEM_FRACTION=0\.5, "
        "XLA_PYTHON_CLIENT_PREALLOCATE=false"
    )
    with pytest.raises(WorkerError, match=message):
        wanted.check()
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    wanted.check()
    machine._check.cache_clear()


FORKED = """
import os, warnings
import jax
from beamjax.machine import Machine
if {started}:
    jax.devices()
warnings.simplefilter("ignore")
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
    assert "Start workers anew: multiprocessing" in python(FORKED.format(started=True))
    assert python(FORKED.format(started=False)) == "ok 1"


# --- devices


def test_a_cpu_computes_on_one_device_unless_asked():
    devices = cpu_devices(1)
    assert len(devices) == 8
    assert Machine().check() == devices[:1]
    assert Machine(local_devices=4).check() == devices[:4]
    with pytest.raises(WorkerError, match=r"local_devices=9: this worker has 8 of platform 'cpu'"):
        Machine(local_devices=9).check()


def test_all_devices_of_an_accelerator_compute(monkeypatch):
    monkeypatch.setattr(machine, "default_platform", lambda: "cuda")
    machine._check.cache_clear()
    assert len(Machine().check()) == 8
    machine._check.cache_clear()


def bits(tree):
    return [(x.dtype, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@pytest.fixture
def shards_by_device(monkeypatch):
    """How many shards each device computes."""
    counts = {}
    on = bj.execution._evaluate.ShardExecutor.__call__

    def counted(self, shard, operands, lost):
        with bodies.on_device(self.device):
            (device,) = jax.numpy.zeros(()).devices()
        counts[device.id] = counts.get(device.id, 0) + 1
        return on(self, shard, operands, lost)

    monkeypatch.setattr(bj.execution._evaluate.ShardExecutor, "__call__", counted)
    return counts


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("flags", [[], THREADS], ids=["embedded", "threads"])
def test_four_devices_give_the_bits_of_one(reduction, flags, shards_by_device):
    own = ["--shard_size=8", f"--reduction={reduction}"]
    w = jnp.arange(3.0)
    expected = bits(bj.run(centred, w, X, options=own))
    assert set(shards_by_device) == {0}
    total = shards_by_device.pop(0)
    found = bits(bj.run(centred, w, X, options=["--local_devices=4", *own, *flags]))
    assert found == expected or (flags and reduction == "fast")  # which promises no order
    assert set(shards_by_device) == {0, 1, 2, 3}
    assert sum(shards_by_device.values()) == total


def test_four_devices_without_broadcasts_and_with_calls_to_the_host():
    calls = []

    @bj.program(clients=N)
    def told(x):
        y = bj.map_fn(lambda v: jnp.sort(v) * 2, x)
        z = bj.map_fn(lambda v: jax.debug.callback(lambda s: calls.append(float(s)), v[0]), x)
        del z
        return y, bj.reduce_min(y)

    found = bj.run(told, X, options={"local_devices": 4, "shard_size": 8})
    np.testing.assert_array_equal(found[0], np.sort(X, axis=1) * 2)
    assert len(calls) == N


def test_members_of_a_pipeline_on_four_devices():
    import apache_beam as beam
    from apache_beam.testing.util import assert_that, equal_to

    @bj.program(clients=N)
    def doubled(x):
        return bj.map_fn(lambda v: v * 2, x)

    options = {"local_devices": 4, "shard_size": 8}
    abstract = jax.ShapeDtypeStruct((N, 3), jnp.float32)
    with beam.Pipeline("FnApiRunner") as pipeline:
        members = pipeline | beam.Create(list(enumerate(X)))
        placed = members | bj.transform(doubled, abstract, options=options)
        plain = placed | beam.MapTuple(lambda index, member: (index, member.tolist()))
        assert_that(plain, equal_to([(i, (x * 2).tolist()) for i, x in enumerate(X)]))


def test_an_error_on_a_device_names_the_shard(monkeypatch):
    def fail(self, x):
        raise ValueError(f"lost {self.device.id}")

    monkeypatch.setattr(bj.shards.ShardExecutor, "_pad", fail)
    message = r"step '.*shard \d+ of placement 'clients', members .*: ValueError: lost \d"
    with pytest.raises(WorkerError, match=message):
        bj.run(centred, jnp.ones(3), X, options={"local_devices": 4, "shard_size": 8})


# --- options


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--device_memory_fraction=0.5"], Options(device_memory_fraction=0.5)),
        ({"device_memory_fraction": 1}, Options(device_memory_fraction=1)),
        (["--preallocate=false"], Options(preallocate=False)),
        ({"preallocate": True}, Options(preallocate=True)),
        (["--local_devices=4"], Options(local_devices=4)),
    ],
    ids=str,
)
def test_options_are_read(given, expected):
    assert parse_options(given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"require_platform": "npu"}, "require_platform: found 'npu', expected one of gpu, cpu"),
        ({"device_memory_fraction": 0}, "device_memory_fraction: found 0, expected a number"),
        ({"device_memory_fraction": 2.0}, "device_memory_fraction: found 2.0"),
        (["--device_memory_fraction=half"], "device_memory_fraction: found 'half'"),
        (["--preallocate=maybe"], "preallocate: found 'maybe', expected one of True, False"),
        ({"local_devices": 0}, "local_devices: found 0, expected a number from 1"),
        (["--local_devices=all"], "local_devices: found 'all', expected a number"),
    ],
    ids=str,
)
def test_impossible_options(given, message):
    with pytest.raises(OptionsError, match=message):
        parse_options(given)
