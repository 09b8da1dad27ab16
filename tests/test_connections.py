"""Runners by name, Beam's options, and what workers of a runner see."""

import sys
import types

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.transforms import environments

import beamjax as bj
from beamjax.errors import OptionsError
from beamjax.options import parse_options
from beamjax.pipelines import connections
from beamjax.pipelines.connections import (
    beam_options,
    connect,
    connection_of,
    make_runner,
    shares_memory,
    spreads,
)

X = np.arange(60, dtype=np.float32).reshape(20, 3)
THREADS = ["--direct_running_mode=multi_threading"]
PROCESSES = ["--direct_running_mode=multi_processing"]


@bj.program(clients=20)
def total(x):
    return bj.reduce_sum(x)


class MyRunner(FnApiRunner):
    """A runner of a user."""


@pytest.mark.parametrize("name", ["DirectRunner", "FnApiRunner", "directrunner", "Direct", "fnapi"])
def test_the_direct_runner_is_beams_in_memory_runner(name):
    assert isinstance(make_runner(name), FnApiRunner)


def test_runners_that_beam_knows():
    assert isinstance(make_runner("BundleBasedDirectRunner"), BundleBasedDirectRunner)
    mine = MyRunner()
    assert make_runner(mine) is mine


@pytest.mark.parametrize("runner", [MyRunner(), "BundleBasedDirectRunner"], ids=["mine", "name"])
def test_any_runner_gives_the_same(runner):
    np.testing.assert_array_equal(bj.run(total, X, runner=runner), X.sum(0))


@pytest.mark.parametrize("runner", ["NoSuch", "apache_beam", 3, None, FnApiRunner], ids=str)
def test_other_runners_are_errors(runner):
    with pytest.raises(OptionsError, match=r"runner: found .*, expected 'local'"):
        make_runner(runner)


# --- options


def test_beams_options_come_from_flags_or_as_they_are():
    flags = beam_options(parse_options(["--direct_num_workers=3"]), FnApiRunner())
    assert flags.view_as(DirectOptions).direct_num_workers == 3
    given = PipelineOptions(["--whatever=1"])
    assert beam_options(parse_options(given), FnApiRunner()) is given


def test_flags_of_this_process_are_not_read(monkeypatch):
    monkeypatch.setattr("sys.argv", ["pytest", "--direct_num_workers=7"])
    flags = beam_options(parse_options(None), FnApiRunner())
    assert flags.view_as(DirectOptions).direct_num_workers == 1


@pytest.mark.parametrize("named", ["DirectRunner", "FnApiRunner", "fnapirunner"])
@pytest.mark.parametrize("how", [PipelineOptions, list])
def test_the_runner_may_be_named_twice(named, how):
    options = parse_options(how([f"--runner={named}"]))
    beam_options(options, make_runner("DirectRunner"))


@pytest.mark.parametrize("how", [PipelineOptions, list])
def test_two_different_runners_are_an_error(how):
    options = parse_options(how(["--runner=BundleBasedDirectRunner"]))
    with pytest.raises(OptionsError, match="give the runner as run"):
        beam_options(options, make_runner("DirectRunner"))


def test_flags_of_other_runners_are_theirs_to_check():
    beam_options(parse_options(["--flag_of_a_job_server=1"]), BundleBasedDirectRunner())


# --- what workers see


@pytest.mark.parametrize(
    ("runner", "flags", "shared", "several"),
    [
        (FnApiRunner(), [], True, False),
        (FnApiRunner(), [*THREADS, "--direct_num_workers=2"], True, True),
        (FnApiRunner(), PROCESSES, False, False),
        (FnApiRunner(), [*PROCESSES, "--direct_num_workers=0"], False, True),
        (FnApiRunner(environments.SubprocessSDKEnvironment("")), [], False, False),
        (BundleBasedDirectRunner(), [], False, True),
    ],
)
def test_who_shares_memory_and_who_has_several_workers(runner, flags, shared, several):
    options = PipelineOptions(flags)
    assert shares_memory(runner, options) == shared
    assert spreads(runner, options) == several


# --- a connection


def test_what_beam_lacks_in_a_notebook_is_told(monkeypatch):
    monkeypatch.setattr(connections, "is_in_ipython", lambda: True)
    module = "apache_beam.runners.interactive.interactive_environment"
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(OptionsError, match=r"pip install 'apache-beam\[interactive\]'"):
        bj.run(total, X)
    np.testing.assert_array_equal(bj.run(total, X, runner="local"), X.sum(0))
    monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert connect("DirectRunner", parse_options(None)).shared


def test_a_run_on_threads():
    options = parse_options([*THREADS, "--direct_num_workers=2"])
    found = connect("DirectRunner", options)
    assert isinstance(found.runner, FnApiRunner)
    assert found.options is options
    assert found.flags.view_as(DirectOptions).direct_num_workers == 2
    assert found.shared
    assert found.spread


def test_a_loopback_is_shared_as_long_as_this_process_waits():
    flags = PipelineOptions(["--environment_type=LOOPBACK", "--job_endpoint=localhost:1"])
    runner = PortableRunner()
    assert connect(runner, parse_options(flags)).shared
    pipeline = beam.Pipeline(runner, options=flags)
    assert not connection_of(pipeline, parse_options(None)).shared


def test_a_transform_gives_dataflow_a_folder_that_it_reaches():
    class DataflowRunner(FnApiRunner):
        """By its name."""

    pipeline = beam.Pipeline(FnApiRunner(), options=PipelineOptions(["--temp_location=gs://b/t"]))
    pipeline.runner = DataflowRunner()
    assert connection_of(pipeline, parse_options(None)).options.work_folder == "gs://b/t/beamjax"
