"""The sources and the folder of a run."""

import gc

import numpy as np

import beamjax as bj
from beamjax.inputs import Inputs
from beamjax.options import parse_options
from beamjax.pipelines.runners import source_specs, sources_for, temporary_store
from beamjax.pipelines.store import Store
from beamjax.plan import Input, Plan, ValueType
from beamjax.sources import NpySource, live_sources

X = np.arange(60, dtype=np.float32).reshape(20, 3)


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
    before = set(live_sources._LIVE)
    store = Store(str(tmp_path / "store"))
    with sources_for(plan_and_inputs(X), store, shared=True) as sources:
        assert sources.specs[0]["kind"] == "live"
        np.testing.assert_array_equal(sources.open().read(["x"], 3, 5)["x"], X[3:5])
    assert set(live_sources._LIVE) == before
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
