"""Runners by name, Beam's options, and what workers of a runner see."""

import gc

import numpy as np
import pytest
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.transforms import environments

import beamjax as bj
from beamjax import source_base
from beamjax.errors import OptionsError
from beamjax.inputs import Inputs
from beamjax.options import parse_options
from beamjax.pipelines.runners import (
    beam_options,
    make_runner,
    shares_memory,
    source_specs,
    sources_for,
    spreads,
    temporary_store,
)
from beamjax.pipelines.store import Store
from beamjax.plan import Input, Plan, ValueType
from beamjax.sources import NpySource

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
    assert type(make_runner(name)) is FnApiRunner


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


def plan_and_inputs(value):
    plan = Plan(
        name="prog", sizes={"clients": 20}, shard_sizes={"clients": 8},
        values={"x": ValueType((3,), "float32", None, "clients")},
        inputs=(Input("args[0]", None, "x"),), steps=(), outputs=(), bodies={}, x64=False,
        jax_version="0",
    )  # fmt: skip
    return Inputs(plan, [value])


def test_sources_of_threads_are_live_and_released(tmp_path):
    gc.collect()  # earlier pipelines
    before = set(source_base._LIVE)
    store = Store(str(tmp_path / "store"))
    with sources_for(plan_and_inputs(X), store, shared=True) as sources:
        assert sources.specs[0]["kind"] == "live"
        np.testing.assert_array_equal(sources.open().read(["x"], 3, 5)["x"], X[3:5])
    assert set(source_base._LIVE) == before
    assert not (tmp_path / "store").exists()


def test_arrays_of_other_processes_are_written(tmp_path):
    store = Store(str(tmp_path / "store"))
    sources, tokens = source_specs(plan_and_inputs(X), store, shared=False)
    assert not tokens
    (spec,) = sources.specs
    assert spec["files"][0].startswith(store.root)
    np.testing.assert_array_equal(sources.open().read(["x"], 3, 5)["x"], X[3:5])


def test_files_are_read_where_they_are(tmp_path):
    np.save(tmp_path / "x.npy", X)
    source = bj.from_npy(tmp_path / "x.npy")
    assert isinstance(source, NpySource)
    store = Store(str(tmp_path / "store"))
    sources, _ = source_specs(plan_and_inputs((source, 0)), store, shared=False)
    assert sources.specs[0]["files"] == [str(tmp_path / "x.npy")]
    assert not (tmp_path / "store").exists()


def test_the_store_is_removed_with_all_that_is_in_it(tmp_path):
    with temporary_store(parse_options({"work_folder": str(tmp_path)})) as store:
        store.put([np.zeros(1 << 20)])
        source_specs(plan_and_inputs(X), store, shared=False)
        assert len(list(tmp_path.rglob("*"))) == 4
    assert list(tmp_path.iterdir()) == []
