"""Kills on Flink and Prism: the same bits as in this process, or an error that says why.

One kill of each kind, at a moment that is the same each time; `benchmarks/faults.py` draws them.
Run by `pytest -n0 --clusters tests/end_to_end/test_cluster_faults.py`; see `cluster_runners`.
"""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.pipelines.clusters import processes
from beamjax.pipelines.clusters.flink_cluster import incomplete
from tests.end_to_end.test_killed_runs import SAVED, finish, start

# Threads of Beam that talk to a job server end so, where a pipeline fails.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

N, ROUNDS = 24, 2
SECONDS = 150
"""A run that takes longer hangs."""


@pytest.fixture
def cluster(started):
    """The Flink runner of this session; complete again after the test."""
    runner = started("flink")
    yield runner
    assert processes.wait_until(lambda: not incomplete(runner.supervisor.cluster), 60)


class Gate:
    """Member 5 of the second round waits on a worker until a test lets it pass."""

    def __init__(self, folder):
        self.reached, self.opened = folder / "reached", folder / "opened"

    def passing(self):
        """What a body calls with its value, the member and the round."""
        reached, opened = self.reached, self.opened

        def wait(value, member, number):
            end = time.monotonic() + 100
            if member == 5 and number == 1:
                reached.with_suffix(".tmp").write_text(str(os.getpid()))
                reached.with_suffix(".tmp").rename(reached)
                while not opened.exists() and time.monotonic() < end:
                    time.sleep(0.05)
            return value

        return wait

    def worker(self):
        """The process that waits."""
        assert processes.wait_until(self.reached.exists, SECONDS)
        return int(self.reached.read_text())


def training(host):
    """Rounds over server and placed state, whose bodies call the host."""

    @bj.program(clients=N)
    def one_round(w, number, z, x, member):
        def body(z, v, member):
            kind = jax.ShapeDtypeStruct((), jnp.float32)
            v = jax.pure_callback(host, kind, v, member, number, vmap_method="sequential")
            return z * 0.9 + jnp.tanh(v * w)

        z = bj.map_fn(body, (z, x, member))
        return w + bj.reduce_mean(z), z

    def rounds(w, z, x, member):
        def step(state, number):
            w, z = one_round(state[0], number, state[1], x, member)
            return (w, z), w

        return jax.lax.scan(step, (w, z), jnp.arange(ROUNDS, dtype=jnp.int32))

    return rounds


X = np.random.default_rng(0).normal(size=N).astype(np.float32)
ARGUMENTS = (jnp.float32(0.5), jnp.zeros(N, jnp.float32), X, np.arange(N, dtype=np.int32))


@contextlib.contextmanager
def stopped_at_gate(runner, folder):
    """A run that has come to its gate, as a future; and the gate."""
    gate = Gate(folder)
    options = runner.flags(shard_size=8, pipeline_timeout=SECONDS)
    call = (training(gate.passing()), *ARGUMENTS)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            yield pool.submit(bj.run, *call, runner=runner.name, options=options), gate
        finally:
            gate.opened.touch()


@pytest.fixture(scope="module")
def expected():
    rounds = training(lambda value, member, number: value)
    return bj.run(rounds, *ARGUMENTS, runner="local", options={"shard_size": 8})


# --- processes of a Flink cluster


def kill(supervisor, name):
    """Kills a server of a cluster, and waits until another one has replaced it."""
    server = supervisor.servers[name]
    before = server.process
    os.killpg(before.pid, signal.SIGKILL)  # with its guard
    assert processes.wait_until(lambda: server.process is not before, 20)


@pytest.mark.flink
@pytest.mark.parametrize("kind", ["workers", "taskmanager"])
def test_a_kill_inside_a_round_costs_no_bits(kind, cluster, expected, tmp_path):
    servers = cluster.supervisor.servers
    with stopped_at_gate(cluster, tmp_path) as (run, gate):
        pids = [servers[f"workers-{number}"].process.pid for number in range(2)]
        number = pids.index(gate.worker())
        gate.reached.unlink()
        kill(cluster.supervisor, f"{kind}-{number}")
        gate.opened.touch()
        assert_same_bits(run.result(SECONDS), expected)
    # What was under way was run again, unless its worker has outlived its task manager and replied.
    assert gate.reached.exists() or kind == "taskmanager"


# --- the launcher


def jobs(runner):
    """States of the jobs that Flink knows, by their numbers."""
    port = runner.supervisor.cluster.rest_port
    with urllib.request.urlopen(f"http://localhost:{port}/jobs/overview", timeout=10) as answer:
        return {one["jid"]: one["state"] for one in json.load(answer)["jobs"]}


def wait_for_job(runner, before):
    """Waits until a job runs that was not there before; its number."""

    def running():
        return [job for job, state in jobs(runner).items() if state == "RUNNING"]

    assert processes.wait_until(lambda: set(running()) - set(before), SECONDS)
    return (set(running()) - set(before)).pop()


@pytest.mark.flink
def test_a_launcher_killed_between_rounds_and_inside_one_goes_on(cluster, tmp_path):
    finish(start("-", "local", tmp_path / "expected.json"))
    runner = f"FlinkRunner={cluster.options['flink_cluster']}"
    out, folder = tmp_path / "out.json", tmp_path / "checkpoint"
    told = finish(start(folder, runner, out, "sync:3"), killed=True)  # before all is on the disk
    before = jobs(cluster)
    process = start(folder, runner, out)
    try:
        wait_for_job(cluster, before)
    finally:
        process.kill()
    told += process.communicate()[0].splitlines()
    told += finish(start(folder, runner, out))
    assert json.loads(out.read_text()) == json.loads((tmp_path / "expected.json").read_text())
    # The one who was killed while it saved may have done so without telling.
    assert len(told) in (SAVED - 1, SAVED)


SLOW = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj

def wait(v):
    time.sleep(60)
    return v

kind = jax.ShapeDtypeStruct((), jnp.float32)
slow = lambda v: jax.pure_callback(wait, kind, v, vmap_method="sequential")
program = bj.program(clients=4)(lambda x: bj.reduce_sum(bj.map_fn(slow, x)))
options = {"flink_cluster": sys.argv[1]}
bj.run(program, np.arange(4, dtype=np.float32), runner="FlinkRunner", options=options)
"""


@pytest.mark.flink
def test_pipelines_of_a_launcher_that_is_killed_are_cancelled(cluster):
    before = jobs(cluster)
    launcher = subprocess.Popen([sys.executable, "-c", SLOW, cluster.options["flink_cluster"]])
    try:
        job = wait_for_job(cluster, before)
    finally:
        launcher.kill()
        launcher.wait()
    assert processes.wait_until(lambda: jobs(cluster)[job] == "CANCELED", 50)


# --- Prism


@pytest.mark.prism
def test_prism_ends_with_a_launcher_that_is_killed(started):
    started("prism")
    code = (
        "import os, signal\n"
        "from apache_beam.options.pipeline_options import PipelineOptions\n"
        "from beamjax.pipelines.clusters import job_servers\n"
        "from beamjax.pipelines.clusters import prism_server\n"
        "prism_server.connected(PipelineOptions([]))\n"
        "(server,) = job_servers._servers.values()\n"
        "print(server.endpoint, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout, done.stderr
    port = int(done.stdout.split(":")[1])
    assert processes.wait_until(lambda: not processes.listens("localhost", port), 10)
