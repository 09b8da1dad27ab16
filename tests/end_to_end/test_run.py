"""Any split, workers and bundles give the same bits, and a run leaves nothing behind."""

import concurrent.futures
import gc
import os
import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_same_bits
from programs import N, W, X, Y

import beamjax as bj
from beamjax.interpreters import planning
from beamjax.pipelines.values import store
from beamjax.pipelines.worker import tasks
from beamjax.plan.steps import Plan
from beamjax.sources.live_sources import _LIVE
from beamjax.storage import files

# --- any split, any number of workers, any bundles: the same bits


@bj.program(clients=100)
def stages(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda v, u: jnp.sum((v - mean) ** 3) * u, (y, x))
    return mean, z, bj.reduce_max(z), bj.reduce_sum(z)


ARGS = W, np.random.default_rng(0).normal(size=(100, 5, 3)).astype("float32")
THREADS = ["--direct_running_mode=multi_threading", "--direct_num_workers=2"]
PROCESSES = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]


def run_stages(*flags, **more):
    return bj.run(stages, *ARGS, options=["--shard_size=8", *flags], **more)


@pytest.fixture(scope="module")
def whole():
    """What one worker finds, in this process."""
    return run_stages(runner="local")


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_any_workers_and_retries_give_the_same_bits(whole, empty_tmp):
    for flags in (THREADS, PROCESSES, ["--direct_runner_bundle_repeat=1"]):
        assert_same_bits(run_stages(*flags), whole)
    assert list(empty_tmp.rglob("*")) == []
    assert_close(bj.run(stages, *ARGS, options={"shard_size": 32}), whole)


def test_runs_in_several_threads_at_once(whole):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run_stages) for _ in range(8)]:
            assert_same_bits(future.result(), whole)


def test_pieces_of_lanes_give_the_same_bits(whole, monkeypatch):
    monkeypatch.setattr("beamjax.plan.buffer_ranges.RANGE_VALUES", 2)
    assert_same_bits(run_stages(), whole)


def test_values_that_are_files_give_the_same_bits(whole, monkeypatch):
    store._CACHE.clear()  # Of tests whose runs were killed.
    tasks._executors.clear()
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    monkeypatch.setattr("beamjax.pipelines.graph.results.FILE_BYTES", 64)
    assert_same_bits(run_stages(), whole)
    assert not store._CACHE._values
    assert not tasks._executors._values


def test_sources_that_are_gathered_are_read_on_the_workers():
    wide = bj.from_arrays(np.asarray(ARGS[1], np.float64))
    program = bj.program(clients=100)(lambda x: (x @ W, x[3], bj.reduce_sum(x), jnp.sort(x, 0)))
    local = bj.run(program, wide, runner="local", options=["--shard_size=8"])
    np.testing.assert_array_equal(local[3], np.sort(ARGS[1], axis=0))
    for flags in ([], THREADS):
        assert_same_bits(bj.run(program, wide, options=["--shard_size=8", *flags]), local)


def test_x64_programs_run_outside_of_x64():
    with jax.enable_x64(True):
        args = [np.asarray(arg, np.float64) for arg in ARGS]
        results = [bj.run(stages, *args, runner=runner) for runner in ("local", "DirectRunner")]
        assert results[0][0].dtype == np.float64
        assert_same_bits(*results)
        assert_close(results[0], jax.jit(stages)(*args))


# --- a run leaves nothing behind


def live_sources():
    gc.collect()  # Earlier pipelines.
    return set(_LIVE)


def test_a_run_leaves_nothing(empty_tmp, monkeypatch):
    modes = []
    folder = empty_tmp / "work"
    folder.mkdir()
    write = files.write

    def spy(path, *args, **kwargs):
        write(path, *args, **kwargs)
        modes.append((os.stat(os.path.dirname(path)).st_mode & 0o777, str(folder) in path))

    monkeypatch.setattr(files, "write", spy)
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    before = live_sources()
    for flags in ([], [f"--work_folder={folder}"]):
        modes.clear()
        run_stages(*flags)
        assert set(modes) == {(0o700, bool(flags))}
        assert live_sources() == before
        assert list(empty_tmp.rglob("*")) == [folder]


@pytest.mark.parametrize(
    "broken", ["beamjax.sources.ArraySource.read", "beamjax.pipelines.graph.outputs.Outputs.write"]
)
def test_a_run_that_fails_leaves_nothing(empty_tmp, broken, monkeypatch):
    monkeypatch.setattr(broken, None)
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    before = live_sources()
    with pytest.raises((bj.WorkerError, TypeError), match="NoneType"):
        run_stages()
    assert live_sources() == before
    assert list(empty_tmp.rglob("*")) == []


# --- plans are kept


def test_a_second_run_does_not_stage_again():
    traced = []

    @bj.program(clients=N)
    def counted(x):
        traced.append(1)
        return bj.reduce_sum(bj.map_fn(jnp.sin, x))

    for runner in ("DirectRunner", "local", "DirectRunner"):
        bj.run(counted, X, runner=runner)
    once = len(traced)
    bj.run(counted, Y[:, :1])
    assert (once, len(traced)) == (1, 2)


def plans():
    gc.collect()
    return [plan for plan in gc.get_objects() if isinstance(plan, Plan)]


@pytest.mark.parametrize("bound", [{"MAX_PLANS": 4}, {"MAX_PLAN_BYTES": 4_500_000}], ids=str)
def test_plans_are_not_kept_for_ever(bound, monkeypatch):
    """Neither those of ever new sizes, nor those of a function that is gone."""
    for name, value in bound.items():
        monkeypatch.setattr(planning, name, value)
    table = np.ones(250_000, np.float32)  # Each plan holds it: a million bytes.
    fn = bj.program(clients=None)(lambda x: (bj.reduce_sum(bj.map_fn(jnp.sin, x)), table + 1))
    before = {id(plan) for plan in plans()}
    for n in range(1, 7):
        bj.explain(fn, X[:1].repeat(n, 0))
    made = [plan for plan in plans() if id(plan) not in before]
    assert {plan.sizes["clients"] for plan in made} == {3, 4, 5, 6}
    made = [weakref.ref(plan) for plan in made]
    del fn
    gc.collect()
    assert [plan for plan in made if plan() is not None] == []
