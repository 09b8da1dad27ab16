"""Bodies that hang, crash or are killed on clusters: the named cause, or the same bits.

Run by `pytest -n0 --clusters tests/end_to_end/test_cluster_failures.py`; see `cluster_runners`.
"""

import os
import signal
import subprocess
import sys
import time

import faults
import jax
import numpy as np
import pytest
from cluster_runners import params
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import WorkerError
from beamjax.pipelines.clusters import flink_cluster, job_servers, processes

# Threads of Beam that talk to a runner end so, where it closes the connection before they do.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

ALL = params("prism", "flink", "flink-embedded", "spark")
IN_PROCESS = params("prism", "flink-embedded", "spark")
WHERE = r"step 'map_clients_0' .*shard 1 of placement 'clients', members 8 to 15: "


@pytest.fixture
def runner(request, started):
    return started(request.param)


def attempt(runner, fault, folder, **options):
    """Runs a program with a fault in its body."""
    program, x = faults.in_body(fault, folder)
    flags = runner.flags(shard_size=8, work_folder=str(folder), **options)
    try:
        return bj.run(program, x, runner=runner.name, options=flags)
    finally:
        (folder / "over").touch()


def healthy(runner):
    """Whether the runner has all its workers, soon."""
    return runner.supervisor is None or processes.wait_until(
        lambda: flink_cluster.incomplete(runner.supervisor.cluster) is None, 60
    )


@pytest.mark.parametrize("runner", ALL, indirect=True)
def test_a_body_that_hangs(runner, tmp_path):
    with pytest.raises(WorkerError, match=f"(?s)^{WHERE}computing took longer than 3 s") as caught:
        attempt(runner, "hangs", tmp_path, shard_timeout=3)
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == faults.WHERE
    assert "in go_wrong" in found.traceback
    assert {path.name for path in tmp_path.iterdir()} == {"been here", "over"}
    assert processes.wait_until(lambda: not at_faults(), 20)
    assert healthy(runner)
    (tmp_path / "next").mkdir()
    np.testing.assert_array_equal(attempt(runner, "none", tmp_path / "next"), faults.TOTAL)


def at_faults():
    """The threads of this process that are still in a body with a fault."""
    stacks = sys._current_frames().values()
    return [frame for frame in stacks if "faults" in frame.f_code.co_filename]


@pytest.mark.parametrize("runner", ALL, indirect=True)
def test_members_that_fail_are_dropped(runner, tmp_path):
    """In two passes: the second one is told of those whom the first one drops."""

    def refuse(v):
        if v[0] in (9, 12):
            raise ValueError("no such member")
        return v

    out = jax.ShapeDtypeStruct((3,), "float32")
    call = lambda v: jax.pure_callback(refuse, out, v, vmap_method="sequential")

    @bj.program(clients=faults.N)
    def program(x):
        mean = bj.reduce_mean(bj.map_fn(call, x))
        return mean, bj.reduce_sum(bj.map_fn(lambda v, m: v / (v - m), (x, bj.broadcast(mean))))

    options = {"on_error": "drop", "on_nonfinite": "drop", "drop_limit": 0.5, "shard_size": 8}
    expected = bj.run(program, faults.X, runner="local", options=options)
    letters = tmp_path / "dead.jsonl"
    job = bj.launch(
        program, faults.X, runner=runner.name,
        options=runner.flags(**options, dead_letters=str(letters)),
    )  # fmt: skip
    assert_same_bits(job.result(), expected)
    rest = np.delete(faults.X, [9, 12], axis=0)
    np.testing.assert_allclose(expected[0], rest.mean(0), rtol=1e-6)
    assert [(each.member, each.reason) for each in job.dropped] == [(9, "error"), (12, "error")]
    assert len(letters.read_text().splitlines()) == 2


@pytest.mark.flink
@pytest.mark.parametrize("fault", ["hangs once", "segfaults once", "killed once"])
def test_a_fault_that_passes_is_healed(fault, started, tmp_path):
    runner = started("flink")
    found = attempt(runner, fault, tmp_path, shard_timeout=10)
    np.testing.assert_array_equal(found, faults.TOTAL)
    assert (tmp_path / "been here").exists()
    assert healthy(runner)


@pytest.mark.flink
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("segfaults", "while computing, the worker .* crashed.*Segmentation fault"),
        ("killed", "while computing, the worker .* died without a trace"),
    ],
)
def test_a_worker_that_always_dies(fault, told, started, tmp_path):
    runner = started("flink")
    with pytest.raises(WorkerError, match=f"(?s)^{WHERE}{told}") as caught:
        attempt(runner, fault, tmp_path)
    found = caught.value.failure
    assert (found.step, found.shard, found.members) == faults.WHERE
    pids = (tmp_path / "been here").read_text().split()
    assert len(pids) > 1
    assert any(pid in found.worker for pid in pids)
    assert healthy(runner)


@pytest.fixture
def pool(tmp_path):
    """Options with which workers are in a process of their own, which is started again."""
    (port,) = processes.free_ports(1)
    command = [sys.executable, "-m", "beamjax.pipelines.clusters.worker_pool", f"--port={port}"]
    with open(tmp_path / "pool.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        assert processes.wait_until(lambda: processes.listens("localhost", port), 60)
        yield {"environment_type": "EXTERNAL", "environment_config": f"localhost:{port}"}
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize("runner", IN_PROCESS, indirect=True)
def test_a_worker_process_that_is_killed(runner, pool, tmp_path):
    """Nobody waits for it for ever, and the runner is well after that."""
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"while computing, the worker .* died without a trace"):
        attempt(runner, "killed", tmp_path, **pool)
    assert time.monotonic() - start < 100
    log = tmp_path / "pool.log"
    assert processes.wait_until(lambda: log.read_text().count("workers at") == 2, 60)
    (tmp_path / "next").mkdir()
    np.testing.assert_array_equal(attempt(runner, "none", tmp_path / "next", **pool), faults.TOTAL)


@pytest.mark.spark
def test_spark_tells_of_workers_that_it_does_not_reach(started, tmp_path):
    """It would wait for ever if Java kept it from telling why a task failed."""
    (port,) = processes.free_ports(1)
    nobody = {"environment_type": "EXTERNAL", "environment_config": f"localhost:{port}"}
    with pytest.raises(WorkerError, match="Job aborted due to stage failure"):
        attempt(started("spark"), "none", tmp_path, **nobody)


@pytest.mark.prism
def test_prism_that_is_killed_in_a_run(started, tmp_path):
    runner = started("prism")

    def end_prism(v):
        if v[0] == 9:
            for server in job_servers._servers.values():
                children = f"/proc/{server.process.pid}/task/{server.process.pid}/children"
                with open(children) as file:
                    os.kill(int(file.read().split()[0]), signal.SIGKILL)
            time.sleep(1)
        return v

    out = jax.ShapeDtypeStruct((3,), "float32")
    body = lambda v: jax.pure_callback(end_prism, out, v, vmap_method="sequential")
    program = bj.program(clients=faults.N)(lambda x: bj.reduce_sum(bj.map_fn(body, x)))
    start = time.monotonic()
    with pytest.raises(WorkerError, match="PrismRunner failed in the pipeline of map_clients_0"):
        bj.run(program, faults.X, runner=runner.name, options=runner.flags(shard_size=8))
    assert time.monotonic() - start < 100
    (tmp_path / "next").mkdir()
    np.testing.assert_array_equal(attempt(runner, "none", tmp_path / "next"), faults.TOTAL)
