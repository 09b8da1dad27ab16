"""Pipelines of users on runners of beamjax. On Prism and Flink: `test_clusters`."""

import os
import subprocess
import sys

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from faults import PROCESSES
from listeners import IS_TOLD, Watch, for_others

import beamjax as bj

N = 12
MEMBERS = np.arange(N, dtype=np.float32)


@pytest.mark.parametrize("options", [None, PROCESSES], ids=["one", "processes"])
def test_a_program_in_a_pipeline_gives_the_bits_of_run(options, tmp_path):
    program = bj.program(clients=N)(lambda x: bj.reduce_mean(bj.map_fn(jnp.sin, x)))
    with Watch() as watch, bj.pipeline(options=options) as pipeline:
        members = pipeline | beam.Create(list(enumerate(MEMBERS)))
        found = members | bj.transform(
            program, jax.ShapeDtypeStruct((N,), "float32"), options={"work_folder": str(tmp_path)}
        )
        found | beam.Map(lambda v: v.tobytes().hex()) | beam.io.WriteToText(str(tmp_path / "out"))
    (file,) = tmp_path.glob("out*")
    assert bytes.fromhex(file.read_text()) == np.asarray(bj.run(program, MEMBERS)).tobytes()
    if IS_TOLD:
        assert not for_others(watch.found)


SUBMITTED = """
import os, sys, tempfile, numpy as np, apache_beam as beam, beamjax as bj
from apache_beam.runners.portability.local_job_service import LocalJobServicer
port = LocalJobServicer(sys.argv[1]).start_grpc_server(0)
options = {"job_endpoint": f"localhost:{port}", "environment_type": "LOOPBACK"}
total = bj.program(clients=4)(bj.reduce_sum)
assert bj.run(total, np.ones(4, np.float32), runner="PortableRunner", options=options) == 4
with bj.pipeline("PortableRunner", options) as pipeline:
    pipeline | beam.Create([1])
os.makedirs(f"{tempfile.gettempdir()}/beam-requirements-cache", exist_ok=True)  # Beam's, for good
left = os.listdir(tempfile.gettempdir())
assert left == ["beam-requirements-cache"], left
os._exit(0)
"""


def test_a_job_server_leaves_no_temporary_folders(tmp_path):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", SUBMITTED, str(tmp_path)]
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_runner_and_flags_are_those_that_are_given():
    for given in (["--direct_num_workers=3"], PipelineOptions(["--direct_num_workers=3"])):
        made = bj.pipeline("DirectRunner", given)
        assert isinstance(made.runner, FnApiRunner)
        assert made.options.view_as(DirectOptions).direct_num_workers == 3
    options = bj.Options()
    bj.explain(bj.program(clients=2)(bj.reduce_sum), np.arange(2), options=options)
    bj.pipeline("DirectRunner", options)  # also after a plan by the same options
    for runner, options, message in [
        ("local", None, "found 'local', which is without Beam"),
        ("Nobody", None, "found 'Nobody', expected"),
        ("DirectRunner", {"shard_size": 8}, "shard_size: found in the options of a pipeline"),
        ("DirectRunner", {"direct_num_wokers": 2}, "did you mean 'direct_num_workers'"),
    ]:
        with pytest.raises(bj.OptionsError, match=message):
            bj.pipeline(runner, options)
