"""Every program on every runner: tree, shapes, dtypes and values of `jit`, and the same bits."""

import concurrent.futures
import functools
import gc
import os
import tempfile
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import CASES, KEY, M, N, W, X, Y

import beamjax as bj
from beamjax.pipelines import files, store, tasks
from beamjax.pipelines.launch import Launcher
from beamjax.plan import Plan
from beamjax.sources.live_sources import _LIVE

PLANNED = list(CASES)


@functools.cache
def built(name):
    return CASES[name].build(bj)


@functools.cache
def by_jit(name):
    fn, args = built(name)
    return jax.jit(fn)(*args)


@functools.cache
def by_local(name):
    fn, args = built(name)
    return bj.run(fn, *args, runner="local")


def leaves(tree):
    return [
        jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(tree)
    ]


def assert_same_types(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(left, jax.Array) == isinstance(right, jax.Array)
        assert (left.shape, left.dtype) == (right.shape, right.dtype)


def assert_close(found, expected):
    assert_same_types(found, expected)
    for left, right in zip(leaves(found), leaves(expected), strict=True):
        tolerance = 0.02 if left.dtype == jnp.bfloat16 else 5e-5
        left, right = (np.asarray(x.astype("float32") if x.dtype == jnp.bfloat16 else x)
                       for x in (left, right))  # fmt: skip
        np.testing.assert_allclose(left, right, rtol=tolerance, atol=tolerance)


def assert_same_bits(found, expected):
    assert_same_types(found, expected)
    for left, right in zip(leaves(found), leaves(expected), strict=True):
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


# --- programs x runners


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_in_this_process_gives_what_jit_gives(name):
    assert_close(by_local(name), by_jit(name))


@pytest.mark.parametrize("name", PLANNED)
def test_beam_gives_the_bits_of_the_plan_in_this_process(name):
    fn, args = built(name)
    assert_same_bits(bj.run(fn, *args), by_local(name))


# --- more programs: several passes, gathers, many lanes


@bj.program(clients=N)
def joined(x):
    first = bj.map_fn(jnp.sin, x)
    mean = bj.reduce_mean(first)
    second = bj.map_fn(lambda v: v * mean, x)
    largest = bj.reduce_max(second)
    third = bj.map_fn(lambda a, b: a * b * largest, (first, second))
    return bj.reduce_sum(third), third


@bj.program(clients=N)
def outputs_only(x):
    first = bj.map_fn(jnp.sin, x)
    mean = bj.reduce_mean(first)
    shown = bj.map_fn(lambda a: a - mean, first)
    spread = bj.reduce_mean(bj.map_fn(jnp.square, shown))
    return shown, bj.map_fn(lambda a: a / jnp.sqrt(spread), first)


@bj.program(clients=N)
def every_lane(x):
    i = (x[:, 0, 0] * 10).astype("int32")
    return (
        bj.reduce_sum(x), bj.reduce_mean(i), bj.reduce_max(x), bj.reduce_min(i),
        bj.reduce_prod(x), bj.reduce_any(x > 2), bj.reduce_all(x > -9), bj.reduce_sum(i),
    )  # fmt: skip


@bj.program(clients=N)
def gathers(x):
    y = bj.map_fn(lambda v: v[0] * 2, x)
    return y @ y.T, x[2], jnp.sort(y, axis=0), bj.reduce_sum(bj.map_fn(lambda v: v @ y.T, y))


@bj.program(clients=N)
def returns_anything(x):
    keys = bj.map_fn(lambda i: jax.random.fold_in(KEY, i), jnp.arange(N))
    values = {"same": x, "three": 3.0, "none": None, "constant": np.arange(3)}
    placed = {"keys": keys, "iota": jnp.arange(N), "wide": bj.broadcast(W)}
    return values | placed | {"flipped": bj.map_fn(jnp.sin, x).T}


@bj.program(clients=N)
def zero_sized(x):
    y = bj.map_fn(lambda v: v[:0], x)
    return y, bj.reduce_sum(y), bj.reduce_mean(bj.map_fn(lambda v: (v, v[:0]), x))


@bj.program(a=N, b=M)
def several_placements(x):
    y = bj.map_fn(lambda v: v[0], x, placement="a")
    total = bj.reduce_sum(y, placement="a")
    z = bj.map_fn(lambda i: total * i.astype("float32"), jnp.arange(M), placement="b")
    return bj.reduce_max(z, placement="b"), y, z


@bj.program({"the clients/é": N})
def unusual_name(x):
    y = bj.map_fn(jnp.sin, x)
    return y, bj.reduce_mean(y), bj.reduce_max(bj.map_fn(lambda v: v - bj.reduce_mean(y), y))


@bj.program(clients=N)
def on_the_server(x):
    mean = bj.reduce_mean(x)
    largest = bj.reduce_max(bj.map_fn(lambda v: v @ (mean.T / 2), x))
    return jnp.linalg.norm(mean) + jnp.sum(largest), mean * 2, jnp.sum(mean) * jnp.sum(largest)


MORE = [joined, outputs_only, every_lane, gathers, returns_anything, zero_sized,
        several_placements, unusual_name, on_the_server]  # fmt: skip


@pytest.mark.parametrize("program", MORE, ids=lambda program: program.__name__)
def test_more_programs(program):
    local = bj.run(program, X, runner="local")
    assert_close(local, jax.jit(program)(X))
    assert_same_bits(bj.run(program, X), local)


# --- any split, any number of workers, any bundles: the same bits


@bj.program(clients=100)
def stages(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda v, u: jnp.sum((v - mean) ** 3) * u, (y, x))
    return mean, z, bj.reduce_max(z), bj.reduce_sum(z)


ARGS = W, np.random.default_rng(0).normal(size=(100, 5, 3)).astype("float32")


THREADS = "--direct_running_mode=multi_threading"


def run_stages(*flags, **more):
    return bj.run(stages, *ARGS, options=["--shard_size=8", *flags], **more)


@pytest.mark.parametrize(
    "flags",
    [
        [THREADS, "--direct_num_workers=2"],
        ["--direct_running_mode=multi_processing", "--direct_num_workers=2"],
        ["--direct_runner_bundle_repeat=1"],
    ],
    ids=lambda flags: flags[0].removeprefix("--").replace("direct_", ""),
)
def test_any_workers_and_retries_give_the_same_bits(flags):
    assert_same_bits(run_stages(*flags), run_stages(runner="local"))


def test_runs_in_several_threads_at_once():
    expected = run_stages(runner="local")
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(run_stages) for _ in range(8)]
        for future in futures:
            assert_same_bits(future.result(), expected)


def test_pieces_of_lanes_give_the_same_bits(monkeypatch):
    whole = run_stages(runner="local")
    monkeypatch.setattr("beamjax.lane_pieces.PIECE_VALUES", 2)
    assert_same_bits(run_stages(), whole)


def test_values_that_are_files_give_the_same_bits(monkeypatch):
    whole = run_stages(runner="local")
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    monkeypatch.setattr("beamjax.pipelines.results.FILE_BYTES", 64)
    assert_same_bits(run_stages(), whole)


def test_shards_of_another_size_give_results_within_rounding():
    assert_close(bj.run(stages, *ARGS, options={"shard_size": 32}), run_stages())


@pytest.mark.parametrize("flags", [[], ["--direct_num_workers=2", THREADS]], ids=["one", "two"])
def test_sources_that_are_gathered_are_read_on_the_workers(flags):
    wide = bj.from_arrays(np.asarray(ARGS[1], np.float64))
    program = bj.program(clients=100)(lambda x: (x @ W, x[3], bj.reduce_sum(x), jnp.sort(x, 0)))
    results = [
        bj.run(program, wide, runner=runner, options=["--shard_size=8", *rest])
        for runner, rest in (("local", []), ("DirectRunner", flags))
    ]
    assert_same_bits(*results)
    np.testing.assert_array_equal(results[0][3], np.sort(ARGS[1], axis=0))


def test_x64_programs_run_outside_of_x64():
    with jax.enable_x64(True):
        args = [np.asarray(arg, np.float64) for arg in ARGS]
        results = [bj.run(stages, *args, runner=runner) for runner in ("local", "DirectRunner")]
        assert results[0][0].dtype == np.float64
        assert_same_bits(*results)
        assert_close(results[0], jax.jit(stages)(*args))


# --- what is left behind: nothing


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def live_sources():
    gc.collect()  # earlier pipelines
    return set(_LIVE)


@pytest.mark.parametrize("work_folder", [False, True])
def test_a_run_leaves_nothing(empty_tmp, work_folder, monkeypatch):
    modes = []
    folder = empty_tmp / "work"
    folder.mkdir()
    write = files.write

    def spy(path, *args, **kwargs):
        write(path, *args, **kwargs)
        modes.append(os.stat(os.path.dirname(path)).st_mode & 0o777)

    monkeypatch.setattr(files, "write", spy)
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    before = live_sources()
    run_stages(*([f"--work_folder={folder}"] if work_folder else []))
    assert set(modes) == {0o700}
    assert live_sources() == before
    assert list(empty_tmp.rglob("*")) == [folder]


@pytest.mark.parametrize("broken", ["source", "building"])
def test_a_run_that_fails_leaves_nothing(empty_tmp, broken, monkeypatch):
    if broken == "source":
        monkeypatch.setattr(bj.sources.ArraySource, "read", None)
    else:
        monkeypatch.setattr("beamjax.pipelines.outputs.Outputs.write", None)
    monkeypatch.setattr("beamjax.pipelines.store.INLINE_BYTES", 0)
    before = live_sources()
    with pytest.raises((bj.WorkerError, TypeError), match="NoneType"):
        run_stages()
    assert live_sources() == before
    assert list(empty_tmp.rglob("*")) == []


def test_a_run_on_processes_leaves_nothing(empty_tmp):
    run_stages("--direct_running_mode=multi_processing")
    assert list(empty_tmp.rglob("*")) == []


def test_a_run_keeps_no_values_of_it(monkeypatch):
    monkeypatch.setattr(store, "INLINE_BYTES", 0)
    run_stages()
    assert not store._CACHE._values
    assert not tasks._executors._values


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


def test_plans_of_ever_new_sizes_are_not_kept_for_ever():
    fn = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    rounds = 80
    gc.collect()
    before = {id(plan) for plan in gc.get_objects() if isinstance(plan, Plan)}
    for n in range(1, rounds + 1):
        bj.explain(fn, X[:1].repeat(n, 0))
    gc.collect()
    made = [plan for plan in gc.get_objects() if isinstance(plan, Plan) and id(plan) not in before]
    assert len({plan.sizes["clients"] for plan in made}) < rounds


def test_a_plan_goes_with_its_function():
    fn = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(jnp.sin, x)))
    bj.explain(fn, X)
    (plan,) = (p for p in gc.get_objects() if isinstance(p, Plan) and p.name == fn.__name__)
    plan = weakref.ref(plan)
    del fn
    gc.collect()
    assert plan() is None


def test_the_end_of_a_run_leaves_the_values_of_other_runs(monkeypatch):
    put, put_broadcast, run = [], tasks.put_broadcast, Launcher.run

    def spy(value, device):
        put.append(value.shape)
        return put_broadcast(value, device)

    def run_then_other(self, *args):
        found = run(self, *args)
        monkeypatch.setattr(Launcher, "run", run)
        bj.run(built("plain")[0], *built("plain")[1])
        return found

    @bj.program(clients=N)
    def rounds(w, x):
        mean = lambda c: bj.reduce_mean(bj.map_fn(lambda v: jnp.sum(jnp.sin(v * c) @ w), x))
        return jax.lax.fori_loop(0, 3, lambda _, c: c + mean(c), jnp.ones(()))

    monkeypatch.setattr(tasks, "put_broadcast", spy)
    monkeypatch.setattr(Launcher, "run", run_then_other)
    w = np.ones((3, 4), np.float32)
    bj.run(rounds, w, X, options={"rounds_per_graph": 1})
    assert put.count(w.shape) == 1, put
