"""Which processes run a plan, as runners and options say it; and what explain makes of that."""

import dataclasses
import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

import beamjax as bj
from beamjax.options import parse_options
from beamjax.ordered_pool import usual_threads
from beamjax.worker_processes import Workers

CORES = os.cpu_count() or 1
APART = Workers(shared=False)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("runner", "flags", "expected"),
    [
        ("local", [], Workers(beam=False, computing=usual_threads())),
        ("local", ["--local_threads=1"], Workers(beam=False)),
        ("local", ["--local_threads=3"], Workers(beam=False, computing=3)),
        ("DirectRunner", [], Workers(computing=usual_threads())),
        ("FnApiRunner", ["--local_threads=1"], Workers()),
        ("FnApiRunner", ["--local_threads=3"], Workers(computing=3)),
        ("direct", ["--direct_num_workers=3"], Workers(3)),
        ("direct", ["--direct_num_workers", "3"], Workers(3)),
        ("direct", ["--direct_num_workers", "0"], Workers(CORES)),
        (
            "DirectRunner",
            ["--direct_running_mode", "multi_processing", "--direct_num_workers", "2"],
            Workers(shared=False, handing=2),
        ),
        ("PrismRunner", [], Workers(computing=usual_threads())),
        ("PrismRunner", ["--environment_type=EXTERNAL", "--environment_config=x:1"], APART),
        ("PrismRunner", ["--experiments=use_loopback_process_worker"], APART),
        ("FlinkRunner", [], Workers(CORES)),
        ("FlinkRunner", ["--parallelism=3"], Workers(3)),
        ("FlinkRunner", ["--flink_master=[local]", "--parallelism", "3"], Workers(3)),
        ("FlinkRunner", ["--flink_master=flink:8081"], APART),
        ("FlinkRunner", ["--flink_cluster=/nowhere"], APART),
        ("FlinkRunner", ["--job_endpoint=flink:8099"], APART),
        ("FlinkRunner", ["--job_endpoint=here:8099", "--environment_type=LOOPBACK"], Workers()),
        ("SparkRunner", [], Workers(4)),
        ("SparkRunner", ["--spark_master_url=local"], Workers(1)),
        ("SparkRunner", ["--spark_master_url=local[*]"], Workers(CORES)),
        ("SparkRunner", ["--spark_master_url=spark://host:7077"], APART),
        ("DataflowRunner", [], Workers(12, shared=False)),
        ("DataflowRunner", ["--number_of_worker_harness_threads", "2"], Workers(2, shared=False)),
        ("", [], APART),
        ("SomebodysRunner", [], APART),
    ],
    ids=str,
)
def test_workers_of_a_runner(runner, flags, expected):
    assert Workers.of(runner, parse_options(flags)) == expected
    assert Workers.of(runner, parse_options(PipelineOptions(flags))) == expected


def test_a_task_manager_has_a_thread_for_each_slot(tmp_path):
    from beamjax.pipelines import flink_cluster
    from beamjax.pipelines.flink_cluster import Cluster, Settings

    folder = flink_cluster.default_folder()
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(Settings(taskmanagers=2, slots=3), 1, 2, 3, ("127.0.0.2", "127.0.0.3"))
    (folder / "cluster.json").write_text(json.dumps(dataclasses.asdict(cluster)))
    named = parse_options({"flink_cluster": str(folder)})
    assert Workers.of("FlinkRunner", named) == Workers(3, shared=False)
    # The one in the default folder is only used while it runs.
    assert Workers.of("FlinkRunner", parse_options({})) == Workers(CORES)


def test_connections_agree():
    """What runs in the end, as far as it is had here without servers."""
    from beamjax.pipelines.connections import connect

    for flags in ([], ["--direct_running_mode", "multi_processing"]):
        options = parse_options(flags)
        shared = connect("DirectRunner", options).shared
        assert Workers.of("DirectRunner", options).shared == shared


@bj.program(clients=None)
def total(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v @ w, v @ w), x))


def test_explain_tells_of_the_runner_that_is_asked_for():
    args = np.zeros((16, 4), np.float32), np.zeros((100, 16), np.float32)

    def told(runner, **options):
        found = bj.explain(total, *args, runner=runner, options=options)
        where = str(found).split("\nmemory at most, ")[1].split("\n")[0]
        return found.facts.memory, where

    local, where = told("local", local_threads=1)
    assert where == "local, 1 thread of the launching process"
    direct, _ = told("DirectRunner", local_threads=1)
    assert local.worker_bytes < direct.worker_bytes == direct.launcher_bytes
    assert "Python and JAX" in local.kept
    assert "Python, JAX and Beam" in direct.kept
    threads, where = told("DirectRunner", direct_num_workers=3)
    assert where == "DirectRunner, 3 threads of the launching process"
    assert threads.worker_bytes > direct.worker_bytes
    dataflow, where = told("DataflowRunner")
    assert where == "DataflowRunner, processes of 12 threads"
    assert dataflow.worker_bytes > threads.worker_bytes
    assert not dataflow.shared
    assert "inputs in memory" in dataflow.launcher
    assert told("PrismRunner", local_threads=1)[0].worker_bytes == direct.worker_bytes
    assert bj.explain(total, *args, options={"local_threads": 1}).facts.memory == direct


def test_a_runner_that_is_an_instance():
    from beamjax.pipelines.connections import make_runner

    args = np.zeros((16, 4), np.float32), np.zeros((100, 16), np.float32)
    runner, options = make_runner("DirectRunner"), {"local_threads": 3}
    found = bj.explain(total, *args, runner=runner, options=options).facts.memory
    assert found.where == "FnApiRunner, 3 threads of the launching process"
