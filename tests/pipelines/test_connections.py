"""Runners by name, Beam's options, and which processes run a plan."""

import os
import sys
import types

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.transforms import environments
from explained import facts_of

import beamjax as bj
from beamjax.diagnostics.topology import Workers
from beamjax.errors import OptionsError
from beamjax.options import parse_options
from beamjax.pipelines.clusters import flink_cluster
from beamjax.pipelines.runners import connect as connections
from beamjax.pipelines.runners.connect import (
    connect,
    connection_of,
    make_runner,
)
from beamjax.pipelines.runners.runner_table import RUNNERS, spec_of
from beamjax.runtime.ordered_pool import usual_threads
from beamjax.storage import locks

X = np.arange(60, dtype=np.float32).reshape(20, 3)
THREADS = ["--direct_running_mode=multi_threading"]
PROCESSES = ["--direct_running_mode=multi_processing"]
CORES = os.cpu_count() or 1
APART = Workers(shared=False)


@bj.program(clients=20)
def total(x):
    return bj.reduce_sum(x)


class MyRunner(FnApiRunner):
    """A runner of a user."""


def test_runners_by_name():
    for name in ("DirectRunner", "FnApiRunner", "directrunner", "Direct", "fnapi"):
        assert isinstance(make_runner(name), FnApiRunner), name
    assert isinstance(make_runner("BundleBasedDirectRunner"), BundleBasedDirectRunner)
    mine = MyRunner()
    assert make_runner(mine) is mine
    for runner in (mine, "BundleBasedDirectRunner"):
        np.testing.assert_array_equal(bj.run(total, X, runner=runner), X.sum(0))
    for runner in ("NoSuch", "apache_beam", 3, None, FnApiRunner):
        with pytest.raises(OptionsError, match=r"runner: found .*, expected 'local'"):
            make_runner(runner)


def test_a_runner_that_is_not_known_has_cautious_defaults():
    class OwnRunner(beam.runners.PipelineRunner):
        """Of a user."""

    spec = spec_of(OwnRunner())
    assert spec is spec_of("some.module.OwnRunner") is spec_of(PortableRunner())
    found = connect(OwnRunner(), parse_options(None))
    assert (found.shared, found.spread, found.is_one_process, found.threads) == (
        False,
        True,
        False,
        1,
    )
    for runner in RUNNERS:
        assert spec_of(runner.name) is spec_of(runner.name.lower().removesuffix("runner")) is runner
    assert {spec_of(kind()).name for kind in (FnApiRunner, MyRunner)} == {"DirectRunner"}


@pytest.mark.parametrize("name", ["dask.dask_runner.DaskRunner", "ray.ray_runner.NoSuchRunner"])
def test_an_error_of_another_runner_is_shown_as_it_is(name):
    with pytest.raises(Exception) as of_beam:  # Dask may be missing
        beam.runners.create_runner(f"apache_beam.runners.{name}").run_pipeline(None, None)
    with pytest.raises(OptionsError) as caught:
        bj.run(total, X, runner=f"apache_beam.runners.{name}")
    assert str(of_beam.value) in str(caught.value)


# --- options


def test_options_of_beam(monkeypatch):
    flags = connect(FnApiRunner(), parse_options(["--direct_num_workers=3"])).flags
    assert flags.view_as(DirectOptions).direct_num_workers == 3
    given = PipelineOptions(["--whatever=1"])
    assert connect(FnApiRunner(), parse_options(given)).flags is given
    # Flags of this process are not read, and those of other runners are theirs to check.
    monkeypatch.setattr("sys.argv", ["pytest", "--direct_num_workers=7"])
    flags = connect(FnApiRunner(), parse_options(None)).flags
    assert flags.view_as(DirectOptions).direct_num_workers == 1
    connect(BundleBasedDirectRunner(), parse_options(["--flag_of_a_job_server=1"]))


def test_keys_of_a_store_belong_in_the_environment():
    for name, variable in (("endpoint_url", "ENDPOINT_URL"), ("access_key_id", "ACCESS_KEY_ID")):
        options = parse_options([f"--s3_{name}=x"])
        with pytest.raises(OptionsError, match=f"s3_{name}: found .* set AWS_{variable} in the"):
            connect("DirectRunner", options)


@pytest.mark.parametrize("how", [PipelineOptions, list])
def test_the_runner_may_be_named_twice(how):
    for name in ("DirectRunner", "FnApiRunner", "fnapirunner"):
        connect("DirectRunner", parse_options(how([f"--runner={name}"])))
    options = parse_options(how(["--runner=BundleBasedDirectRunner"]))
    with pytest.raises(OptionsError, match="give the runner as run"):
        connect("DirectRunner", options)


# --- a connection


def test_who_shares_memory_and_who_has_several_workers():
    apart = FnApiRunner(environments.SubprocessSDKEnvironment(""))
    for runner, flags, shared, several in (
        (FnApiRunner(), [], True, False),
        (FnApiRunner(), [*THREADS, "--direct_num_workers=2"], True, True),
        (FnApiRunner(), PROCESSES, False, False),
        (FnApiRunner(), [*PROCESSES, "--direct_num_workers=0"], False, True),
        (apart, [], False, False),
        (BundleBasedDirectRunner(), [], False, True),
    ):
        options, spec = PipelineOptions(flags), spec_of(runner)
        found = (spec.shares_memory(runner, options), spec.has_several_workers(options))
        assert found == (shared, several)


def test_connections():
    options = parse_options([*THREADS, "--direct_num_workers=2"])
    found = connect("DirectRunner", options)
    assert isinstance(found.runner, FnApiRunner)
    assert found.options is options
    assert found.flags.view_as(DirectOptions).direct_num_workers == 2
    assert (found.shared, found.spread) == (True, True)
    # A loopback is shared as long as this process waits.
    flags = PipelineOptions(["--environment_type=LOOPBACK", "--job_endpoint=localhost:1"])
    runner = PortableRunner()
    assert connect(runner, parse_options(flags)).shared
    pipeline = beam.Pipeline(runner, options=flags)
    assert not connection_of(pipeline, parse_options(None)).shared

    class DataflowRunner(FnApiRunner):
        """By its name."""

    pipeline = beam.Pipeline(FnApiRunner(), options=PipelineOptions(["--temp_location=gs://b/t"]))
    pipeline.runner = DataflowRunner()
    assert connection_of(pipeline, parse_options(None)).options.work_folder == "gs://b/t/beamjax"


def test_what_beam_lacks_in_a_notebook_is_told(monkeypatch):
    monkeypatch.setattr(connections, "is_in_ipython", lambda: True)
    module = "apache_beam.runners.interactive.interactive_environment"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionsError, match=r"pip install 'apache-beam\[interactive\]'"):
        bj.run(total, X)
    np.testing.assert_array_equal(bj.run(total, X, runner="local"), X.sum(0))
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert connect("DirectRunner", parse_options(None)).shared


# --- workers


@pytest.fixture
def no_cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))


WORKERS = [
    ("local", "", Workers(beam=False, computing=usual_threads())),
    ("local", "--local_threads=1", Workers(beam=False)),
    ("local", "--local_threads=3", Workers(beam=False, computing=3)),
    ("DirectRunner", "", Workers(computing=usual_threads())),
    ("FnApiRunner", "--local_threads=1", Workers()),
    ("FnApiRunner", "--local_threads=3", Workers(computing=3)),
    ("direct", "--direct_num_workers=3", Workers(3)),
    ("direct", "--direct_num_workers 3", Workers(3)),
    ("direct", "--direct_num_workers 0", Workers(CORES)),
    ("DirectRunner", "--direct_running_mode multi_processing --direct_num_workers 2",
     Workers(shared=False, handing=2)),
    ("PrismRunner", "", Workers(computing=usual_threads())),
    ("PrismRunner", "--environment_type=EXTERNAL --environment_config=x:1", APART),
    ("PrismRunner", "--experiments=use_loopback_process_worker", APART),
    ("FlinkRunner", "", Workers(CORES)),
    ("FlinkRunner", "--parallelism=3", Workers(3)),
    ("FlinkRunner", "--flink_master=[local] --parallelism 3", Workers(3)),
    ("FlinkRunner", "--flink_master=flink:8081", APART),
    ("FlinkRunner", "--flink_cluster=/nowhere", APART),
    ("FlinkRunner", "--job_endpoint=flink:8099", APART),
    ("FlinkRunner", "--job_endpoint=here:8099 --environment_type=LOOPBACK", Workers()),
    ("SparkRunner", "", Workers(4)),
    ("SparkRunner", "--spark_master_url=local", Workers(1)),
    ("SparkRunner", "--spark_master_url=local[*]", Workers(CORES)),
    ("SparkRunner", "--spark_master_url=spark://host:7077", APART),
    ("DataflowRunner", "", Workers(12, shared=False)),
    ("DataflowRunner", "--number_of_worker_harness_threads 2", Workers(2, shared=False)),
    ("", "", APART),
    ("SomebodysRunner", "", APART),
]  # fmt: skip


@pytest.mark.usefixtures("no_cluster")
def test_workers_of_a_runner():
    for runner, text, expected in WORKERS:
        for flags in (text.split(), PipelineOptions(text.split())):
            assert Workers.of(runner, parse_options(flags)) == expected, (runner, text)
    for flags in ([], PROCESSES):  # As connections have it.
        options = parse_options(flags)
        shared = connect("DirectRunner", options).shared
        assert Workers.of("DirectRunner", options).shared == shared


@pytest.mark.usefixtures("no_cluster")
def test_a_task_manager_has_a_thread_for_each_slot():
    folder = flink_cluster.default_folder()
    settings = flink_cluster.Settings(taskmanagers=2, slots=3)
    cluster = flink_cluster.Cluster(settings, 1, 2, 3, ("127.0.0.2", "127.0.0.3"))
    named, default = parse_options({"flink_cluster": str(folder)}), parse_options({})
    with locks.locked(folder), flink_cluster.announced(folder, cluster):
        for options in (named, default):
            assert Workers.of("FlinkRunner", options) == Workers(3, shared=False)
    assert Workers.of("FlinkRunner", default) == Workers(CORES)  # it does not run any more


@bj.program(clients=None)
def outer(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v @ w, v @ w), x))


@pytest.mark.usefixtures("no_cluster")
def test_explain_tells_of_the_runner_that_is_asked_for():
    args = np.zeros((16, 4), np.float32), np.zeros((100, 16), np.float32)

    def told(runner, **options):
        found = bj.explain(outer, *args, runner=runner, options=options)
        where = str(found).split("\npeak memory (upper bound), ")[1].split("\n")[0]
        return facts_of(found).memory, where

    local, where = told("local", local_threads=1)
    assert where == "local, 1 thread of the launching process"
    direct, _ = told("DirectRunner", local_threads=1)
    assert local.worker_bytes < direct.worker_bytes
    threads, where = told("DirectRunner", direct_num_workers=3)
    assert where == "DirectRunner, 3 threads of the launching process"
    assert threads.worker_bytes > direct.worker_bytes
    dataflow, where = told("DataflowRunner")
    assert where == "DataflowRunner, processes of 12 threads"
    assert dataflow.worker_bytes > threads.worker_bytes
    assert told("PrismRunner", local_threads=1)[0].worker_bytes == direct.worker_bytes
    assert facts_of(bj.explain(outer, *args, options={"local_threads": 1})).memory == direct
    own, _ = told(make_runner("DirectRunner"), local_threads=3)
    assert own.where == "FnApiRunner, 3 threads of the launching process"
