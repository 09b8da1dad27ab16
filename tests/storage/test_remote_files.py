"""Files at s3:// and gs://, on servers of the test: by name, and as folders of runs.

The servers and their clients are not among those of other tests:
`uv pip install -e '.[test]' --group object-stores`.
"""

import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits

import beamjax as bj
from beamjax.errors import JobError
from beamjax.storage import files

PROCESSES = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
N = 21

# The warnings are of Flask, Google and others.
pytestmark = [pytest.mark.object_stores, pytest.mark.filterwarnings("ignore")]


def start_s3(monkeypatch):
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    # boto3 and the processes of workers read them.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    boto3.client("s3").create_bucket(Bucket="bucket")
    return server.stop


def start_gs(monkeypatch):
    from gcp_storage_emulator.server import create_server

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    host, port = server._api._httpd.server_address
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://{host}:{port}")
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # nobody asks for credentials
    return server.stop


@pytest.fixture(scope="module", params=["s3", "gs"])
def bucket(request):
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop = {"s3": start_s3, "gs": start_gs}[request.param](monkeypatch)
        try:
            yield f"{request.param}://bucket"
        finally:
            stop()


@pytest.fixture
def folder(bucket):
    return f"{bucket}/{uuid.uuid4().hex}"


# --- files


def test_files(folder, tmp_path):
    path = files.join(folder, "x.bin")
    assert files.names(folder) == []
    files.write(path, b"first")
    files.write(path, b"first", keep=True)
    assert bytes(files.read(path)) == b"first"
    several_parts = np.random.default_rng(0).bytes(12 << 20)
    files.write(path, several_parts)
    assert bytes(files.read(path)) == several_parts
    files.write(path, bytes(12 << 20), keep=True)  # there is a file of this size
    assert bytes(files.read(path)) == several_parts
    assert files.size(path) == 12 << 20
    assert files.names(folder) == ["x.bin"]
    with pytest.raises(FileNotFoundError, match="nothing"):
        files.read(files.join(folder, "nothing"))
    files.remove(folder, ".txt")
    assert files.names(folder) == ["x.bin"]
    files.remove(folder, (".txt", ".bin"))
    assert files.names(folder) == []
    here, there = str(tmp_path / "x"), files.join(folder, "x")
    files.write(here, b"content")
    files.link(here, there)
    files.link(there, files.join(folder, "y"))
    files.link(files.join(folder, "y"), str(tmp_path / "z"))
    assert (tmp_path / "z").read_bytes() == b"content"
    assert sorted(files.names(folder)) == ["x", "y"]
    files.remove_files(folder, ["x", "nothing"])
    assert files.names(folder) == ["y"]


# --- folders of runs


@bj.program(placements={"clients": N})
def one_round(w, z, x):
    z = bj.map_fn(lambda z, v, w: z * 0.5 + jnp.tanh(v @ w), (z, x, bj.broadcast(w)))
    return w + bj.reduce_mean(bj.map_fn(lambda z, v: z * v, (z, x))), z


@bj.program(placements={"clients": N})
def descend(w, x):
    return w - bj.reduce_mean(bj.map_fn(lambda v, w: v * jnp.tanh(v @ w), (x, bj.broadcast(w))))


def rounds(w, z, x):
    return jax.lax.scan(lambda state, _: (one_round(*state, x), state[0]), (w, z), length=3)


X = np.random.default_rng(0).normal(size=(N, 300)).astype(np.float32)
ARGUMENTS = (jnp.ones(300), jnp.zeros(N), X)


@pytest.fixture(scope="module")
def expected():
    return bj.run(rounds, *ARGUMENTS, runner="local", options={"shard_size": 8})


@pytest.mark.parametrize("flags", [{}, PROCESSES], ids=["threads", "processes"])
def test_values_travel_through_a_folder(folder, expected, flags):
    options = {"shard_size": 8, "work_folder": folder, **flags}
    assert_same_bits(bj.run(rounds, *ARGUMENTS, options=options), expected)
    root, _, name = folder.rpartition("/")
    assert not [path for path in files.names(root) if path.startswith(name)]


def test_a_round_costs_a_few_requests(folder, caplog):
    """Besides polls, whose number depends on the time alone."""
    if folder.startswith("gs"):
        pytest.skip("its server does not log requests")
    caplog.set_level("INFO", "werkzeug")
    counts = []
    for rounds in (2, 12):
        caplog.clear()

        def program(w, x, rounds=rounds):
            return jax.lax.fori_loop(0, rounds, lambda _, w: descend(w, x), w)

        options = {"work_folder": folder, **PROCESSES}
        found = bj.run(program, jnp.ones(300), X, options=options)
        assert_same_bits(found, bj.run(program, jnp.ones(300), X, runner="local"))
        lines = [record.getMessage() for record in caplog.records]
        polls = ("list-type", " 404 ", "/launcher ", "/worker-")
        counts.append(sum(not any(poll in line for poll in polls) for line in lines))
    # For each of two workers: a task and a reply are written and read. Both are removed at once.
    assert counts[1] - counts[0] <= 10 * (2 * 4 + 1) + 8


def test_a_job_and_its_result(folder, expected):
    options = {"shard_size": 8, "job_folder": folder}
    job = bj.launch(rounds, *ARGUMENTS, options=options)
    assert_same_bits(job.result(), expected)
    other = bj.open_job(folder)
    assert other.state.value == "done"
    assert other.progress().done.members > 0
    assert_same_bits(other.result(), expected)
    with pytest.raises(JobError, match="found no job"):
        bj.open_job(f"{folder}-other")


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_goes_on_from_its_checkpoint(folder, expected, runner, monkeypatch):
    options = {"shard_size": 8, "checkpoint": folder}
    write, written = files.write, []

    def stop(path, data, **more):
        written.append(path)
        if sum(path.endswith(".checkpoint") for path in written) == 2:
            raise KeyboardInterrupt
        write(path, data, **more)

    monkeypatch.setattr(files, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        bj.run(rounds, *ARGUMENTS, runner=runner, options=options)
    monkeypatch.undo()
    assert_same_bits(bj.run(rounds, *ARGUMENTS, runner=runner, options=options), expected)
    assert_same_bits(bj.run(rounds, *ARGUMENTS, runner=runner, options=options), expected)


def test_dead_letters(folder):
    path = f"{folder}/dead.jsonl"
    x = X.copy()
    x[3, 0] = np.nan
    options = {"shard_size": 8, "on_nonfinite": "drop", "dead_letters": path}
    total = bj.program(clients=N)(bj.reduce_sum)
    found = bj.run(total, x, options=options)
    np.testing.assert_allclose(found, np.delete(x, 3, 0).astype(np.float64).sum(0), atol=1e-5)
    assert b'"member": 3' in bytes(files.read(path))
