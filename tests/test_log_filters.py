"""What is on stderr of a run: no noise of Beam, and all that counts."""

import subprocess
import sys

RUN = """
import threading
import jax, numpy as np
import beamjax as bj

X = np.ones(24, np.float32)
started, cancelled = threading.Event(), threading.Event()

def slow(v):
    started.set()
    assert cancelled.wait(60)
    return v

def slowly(v):
    return jax.pure_callback(slow, jax.ShapeDtypeStruct((), "float32"), v, vmap_method="sequential")

total = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v + 1, x)))
assert bj.run(total, X) == 48
program = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(slowly, x)))
job = bj.launch(program, X, options={"shard_size": 8})
assert started.wait(60)
job.cancel()
threading.Timer(1.5, cancelled.set).start()  # longer than a worker goes without looking
try:
    job.result()
except bj.JobCancelledError:
    print("cancelled")
"""


def test_a_run_and_a_cancelled_job_write_nothing_to_stderr():
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "cancelled\n", "")


def test_other_errors_of_workers_are_logged(caplog):
    import logging

    import beamjax.pipelines  # noqa: F401
    from beamjax.errors import JobCancelledError, WorkerError

    for error in (JobCancelledError("the job was cancelled"), WorkerError("it failed")):
        for name in ("apache_beam.runners.common", "apache_beam.runners.worker.sdk_worker"):
            try:
                raise error
            except Exception as caught:
                logging.getLogger(name).exception(caught)
    logging.warning("apitools not found, and more")
    logging.warning("something else")
    told = [record.getMessage() for record in caplog.records]
    assert told == ["it failed", "it failed", "something else"]
