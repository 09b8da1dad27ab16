"""Programs on Prism, Flink and Spark: the same bits as in this process, and errors that say where.

Run by `pytest -n0 --clusters tests/end_to_end/test_clusters.py`; see `cluster_runners`. With
`-m smoke`, as in the gate, only the first test. Kills are in `test_cluster_faults`.
"""

import concurrent.futures
import functools
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from cluster_runners import params, smoke
from helpers import assert_close, assert_same_bits
from listeners import IS_TOLD, Watch, for_others
from other_user import NEEDS_ROOT, NOBODY, answer_to
from programs import PROGRAMS

import beamjax as bj
from beamjax.commands import cli
from beamjax.errors import OptionsError, WorkerError
from beamjax.pipelines.clusters import flink_cluster, job_servers, prism_server

# Threads of Beam that talk to a job server end so, where a pipeline fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

BUILT = [name for name, case in PROGRAMS.items() if case.eqns is not None]
EVERY = params("prism", "flink")
ALL = params("prism", "flink", "flink-embedded", "spark")
N = 12
MEMBERS = np.arange(N, dtype=np.float32)


@pytest.fixture
def runner(request, started):
    return started(request.param)


@functools.cache
def built(name):
    return PROGRAMS[name].build(bj)


def on(runner, fn, *args, **flags):
    return bj.run(fn, *args, runner=runner.name, options=runner.flags(**flags))


def calling(host, n=N):
    """A program whose body calls the host with each member, in shards of 8."""

    @bj.program(clients=n)
    def program(x):
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        body = lambda v: jax.pure_callback(host, kind, v, vmap_method="sequential")
        return bj.reduce_sum(bj.map_fn(body, x))

    return program


@bj.program(clients=100)
def stages(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda v, u: jnp.sum((v - mean) ** 3) * u, (y, x))
    buffers = bj.reduce_max(z), bj.reduce_sum(z), bj.reduce_any(z > 1), bj.reduce_prod(y)
    return mean, z, buffers, jnp.sort(z), y @ y.T, x[2]


W = np.random.default_rng(1).normal(size=3).astype(np.float32)
ROWS = np.random.default_rng(0).normal(size=(100, 5, 3)).astype(np.float32)


@functools.cache
def expected():
    return bj.run(stages, W, ROWS, runner="local", options={"shard_size": 8})


@pytest.mark.parametrize("runner", smoke("prism", "flink"), indirect=True)
def test_passes_gathers_and_lanes(runner):
    assert_same_bits(on(runner, stages, W, ROWS, shard_size=8), expected())


# --- who listens


@pytest.mark.skipif(not IS_TOLD, reason="looks into /proc")
@pytest.mark.parametrize("runner", ALL, indirect=True)
def test_nobody_else_reaches_the_servers(runner):
    """Prism, those of the cluster, and those that Beam opens while a pipeline runs, also here."""
    fn, args = built(next(iter(BUILT)))
    on(runner, fn, *args)
    if runner.supervisor is not None:
        pids = [server.process.pid for server in runner.supervisor.servers.values()]
    else:
        name = runner.name.removesuffix("Runner").lower()
        servers = job_servers._servers.items()
        pids = [server.process.pid for key, server in servers if key[0].lower() == name]
    children = [child for pid in pids for child in children_of(pid)]
    with Watch("self", every=0.01) as here, Watch(*pids, *children, every=0.05) as there:
        on(runner, fn, *args)
    assert there.found
    assert not for_others(there.found)
    assert here.found or runner.supervisor is not None, "workers were not in this process"
    assert not for_others(here.found)


@NEEDS_ROOT
@pytest.mark.parametrize("runner", ALL, indirect=True)
def test_job_servers_answer_their_own_user(runner):
    fn, args = built(next(iter(BUILT)))
    on(runner, fn, *args)
    if runner.supervisor is not None:
        address = f"127.0.0.1:{runner.supervisor.cluster.job_port}"
    else:
        name = runner.name.removesuffix("Runner").lower()
        servers = job_servers._servers.items()
        (address,) = (server.endpoint for key, server in servers if key[0].lower() == name)
    get_jobs = "/org.apache.beam.model.job_management.v1.JobService/GetJobs"
    assert answer_to(os.geteuid(), address, get_jobs) in ("answered", "UNIMPLEMENTED")
    assert answer_to(NOBODY, address, get_jobs) in ("PERMISSION_DENIED", "UNAVAILABLE")


@pytest.mark.flink
def test_pages_of_other_sites_read_nothing_from_flink(started):
    port = started("flink").supervisor.cluster.rest_port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/overview", timeout=10) as answer:
        assert answer.headers["Access-Control-Allow-Origin"] == "https://beamjax.invalid"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/jars/upload", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(request, timeout=10)


def children_of(pid):
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        yield from path.read_text().split()


# --- programs x runners


def assert_runs(runner, name):
    fn, args = built(name)
    found = on(runner, fn, *args)
    assert_same_bits(found, bj.run(fn, *args, runner="local"))
    assert_close(found, jax.jit(fn)(*args))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("runner", params("prism", "flink", "spark"), indirect=True)
def test_a_program_gives_the_bits_of_the_plan_and_what_jit_gives(runner, name):
    assert_runs(runner, name)


FEW = "plain grad_server scan_over_rounds while_on_a_reduced_value two_placements keys_as_results \
body_host affine_maps_in_order".split()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("runner", params("flink-embedded"), indirect=True)
def test_a_few_programs_on_a_runner_that_is_slow_to_start(runner, name):
    assert_runs(runner, name)


@pytest.mark.parametrize("runner", EVERY, indirect=True)
def test_many_shards_in_files_and_pieces_give_the_same_bits(runner, monkeypatch, tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    monkeypatch.setattr("beamjax.pipelines.values.store.INLINE_BYTES", 0)
    rows = bj.from_npy(str(tmp_path / "rows.npy"))
    found = on(runner, stages, W, rows, shard_size=8, work_folder=str(tmp_path))
    assert_same_bits(found, expected())
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


@pytest.mark.parametrize("runner", EVERY, indirect=True)
def test_runs_at_the_same_time(runner):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(on, runner, stages, W, ROWS, shard_size=8) for _ in range(3)]
        for run in runs:
            assert_same_bits(run.result(), expected())


def means(folder, name, flags):
    """The mean over a PCollection of nobody knows how many members, by a user's own pipeline."""
    (n,) = jax.export.symbolic_shape("n")
    program = bj.program(clients=None)(lambda x: bj.reduce_mean(bj.map_fn(jnp.sin, x)))
    folder.mkdir()
    with bj.pipeline(name, flags) as pipeline:
        members = pipeline | beam.Create(list(enumerate(MEMBERS)))
        found = members | bj.transform(
            program, jax.ShapeDtypeStruct((n,), "float32"), options={"work_folder": str(folder)}
        )
        found | beam.Map(lambda v: v.tobytes().hex()) | beam.io.WriteToText(str(folder / "out"))
    (file,) = folder.glob("out*")
    return file.read_text()


@pytest.mark.parametrize("runner", EVERY, indirect=True)
def test_a_transform_counts_the_members_of_a_pipeline(runner, tmp_path):
    expected = means(tmp_path / "here", "FnApiRunner", {})
    assert means(tmp_path / "there", runner.name, runner.flags()) == expected


@pytest.mark.flink
def test_each_task_manager_has_workers_of_its_own(started, tmp_path):
    def note(v):
        (tmp_path / str(os.getpid())).touch()
        time.sleep(0.02)
        return np.float32(v)

    runner = started("flink")
    members = np.arange(128, dtype=np.float32)
    assert on(runner, calling(note, 128), members, shard_size=8, parallelism=4) == members.sum()
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert len(pids) == 2
    assert os.getpid() not in pids


@pytest.mark.parametrize("runner", params("prism", "flink"), indirect=True)
def test_workers_get_the_variables_of_jax(runner, monkeypatch, tmp_path):
    """Those of the cluster were started without them, and serve several jobs."""
    for folder in (str(tmp_path / "a"), str(tmp_path / "b")):
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", folder)
        read = lambda v, folder=folder: np.float32(
            os.environ["JAX_COMPILATION_CACHE_DIR"] == folder
        )
        assert on(runner, calling(read), MEMBERS, shard_size=8) == N


# --- failures


@pytest.mark.parametrize("runner", ALL, indirect=True)
def test_errors_of_a_body_come_back_with_step_and_shard(runner):
    # In here, since workers do not have the modules of tests.
    def refuse_five(v):
        if v == 5:
            raise ValueError("five is not taken")
        return np.float32(v)

    where = r"step 'map_clients_0' .*shard 0 of placement 'clients', members 0 to 7"
    with pytest.raises(WorkerError, match=rf"(?s){where}.*five is not taken"):
        on(runner, calling(refuse_five), MEMBERS, shard_size=8)


@pytest.mark.parametrize("runner", EVERY, indirect=True)
def test_a_pipeline_that_takes_too_long_is_cancelled(runner, tmp_path):
    given_up = tmp_path / "given up"

    def wait_at_five(v):
        end = time.monotonic() + 120
        while v == 5 and time.monotonic() < end and not given_up.exists():
            time.sleep(0.1)
        return np.float32(v)

    start = time.monotonic()
    try:
        with pytest.raises(WorkerError, match=r"longer than 2.0 s \(option pipeline_timeout\)"):
            on(runner, calling(wait_at_five), MEMBERS, shard_size=8, pipeline_timeout=2)
    finally:
        given_up.touch()
    assert time.monotonic() - start < 100


# --- the cluster


@pytest.mark.flink
def test_a_second_cluster_in_a_folder_is_an_error(started, capsys):
    folder = started("flink").options["flink_cluster"]
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert flink_cluster.read(folder) == started("flink").supervisor.cluster
    assert cli.main(["flink", "up", "--folder", folder]) == 1
    assert "found a running cluster; end it with Ctrl-C" in capsys.readouterr().err


READY = "ready; Ctrl-C stops it"


@pytest.mark.flink
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_command_runs_a_cluster_until_a_signal(started, end, tmp_path):
    started("flink")  # so that the jars are there
    command = [sys.executable, "-m", "beamjax", "flink", "up", f"--folder={tmp_path}"]
    command += ["--taskmanagers=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            assert READY in up.stdout.readline()
            servers = psutil.Process(up.pid).children(recursive=True)
            assert len(servers) == 7  # a pool; three in Java, each with its guard
            assert flink_cluster.read(tmp_path).settings.taskmanagers == 1
            up.send_signal(end)
            rest = up.communicate(timeout=60)[0]
        finally:
            up.kill()
    assert up.returncode == (-end if end == signal.SIGKILL else 0)
    assert f"{tmp_path}: stopped" in rest or end == signal.SIGKILL
    assert not psutil.wait_procs(servers, timeout=15)[1]
    assert flink_cluster.read(tmp_path) is None


def test_a_cluster_that_does_not_run_is_an_error(tmp_path):
    with pytest.raises(OptionsError, match="expected a running cluster; start one with"):
        bj.run(stages, W, ROWS, runner="FlinkRunner", options={"flink_cluster": str(tmp_path)})


# --- Prism


@pytest.mark.prism
def test_prism_in_a_thread_that_is_not_the_main_one_and_one_that_is_given(started, tmp_path):
    runner = started("prism")
    job_servers.stop_all()
    given = {"prism_location": prism_server.locate(), "shard_size": 8}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(on, runner, stages, W, ROWS, shard_size=8)
        assert_same_bits(run.result(), expected())
    found = bj.run(stages, W, ROWS, runner="PrismRunner", options=given)
    assert_same_bits(found, expected())
    missing = str(tmp_path / "none")
    with pytest.raises(OptionsError, match=r"prism_location: found .*none"):
        bj.run(stages, W, ROWS, runner="PrismRunner", options={"prism_location": missing})
