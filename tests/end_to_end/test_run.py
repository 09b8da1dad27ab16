"""Any split, workers and bundles give the same bits, and a run leaves nothing behind."""

import concurrent.futures
import dataclasses
import gc
import os
import tempfile
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import PROCESSES, THREADS
from helpers import assert_close, assert_same_bits, assert_same_types, plan_of
from programs import N, W, X, Y

import beamjax as bj
from beamjax.interpreters import planning
from beamjax.pipelines.values import store
from beamjax.pipelines.worker import tasks
from beamjax.plan.steps import Plan
from beamjax.sources.source_base import _LIVE
from beamjax.storage import files

# --- any way to run: the same bits


def everything(n):
    """Reductions of all kinds in two passes. A new program, as plans are kept by program."""

    @bj.program(clients=n)
    def program(w, x, keys):
        y = bj.map_fn(lambda v: jnp.tanh(v * w), x)
        mean = bj.reduce_mean(y)
        affine = bj.map_fn(lambda v: (jnp.cos(v), jnp.sin(v)), y)
        joined = bj.reduce(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1] * w), affine)
        again = bj.map_fn(lambda v, u: jnp.sum((v - mean) ** 3) * u - joined[1], (y, x))
        return {
            "sum": bj.reduce_sum(y), "mean": bj.reduce_mean(x), "max": bj.reduce_max(y),
            "min": bj.reduce_min(keys), "prod": bj.reduce_prod(1 + 1e-3 * y),
            "any": bj.reduce_any(y > 0.99), "all": bj.reduce_all(y > -2),
            "ints": bj.reduce_sum(keys), "narrow": bj.reduce_sum(y.astype("bfloat16")),
            "weighted": bj.reduce_weighted_mean(y, jnp.abs(y[:, 0])), "place": bj.reduce_argmax(x),
            "keyed": [bj.reduce_by_key(y, keys, 5, op=op) for op in ("sum", "mean", "max")],
            "joined": joined, "placed": y, "again": (again, bj.reduce_max(again), again.T @ y),
            "empty": bj.reduce_sum(bj.map_fn(lambda v: v[:0], x)), "ordered": jnp.sort(y[:, 0]),
        }  # fmt: skip

    return program


def arguments(n):
    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, 5)) * np.exp(9 * rng.normal(size=(n, 1)))
    return np.float32(0.3), x.astype(np.float32), rng.integers(-1, 6, n).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to run a program.

    Attributes:
      bits: options that may change the last bits; those of a local run with them are expected.
      options: the others.
      planned: what is replaced while both runs are planned, by its name.
      replaced: what is replaced in the run alone.
      runner: of the run.
      n: the number of members.
    """

    bits: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    planned: dict[str, Any] = dataclasses.field(default_factory=dict)
    replaced: dict[str, Any] = dataclasses.field(default_factory=dict)
    runner: str = "DirectRunner"
    n: int = 83


FILES = {
    "pipelines.values.store.INLINE_BYTES": 0,
    "pipelines.worker.placed_files.FILE_BYTES": 64,
}
PIECES = {"plan.steps.RANGE_VALUES": 2}
GROUPS = {"plan.merging.MERGE_BYTES": 1}
LARGE = {"interpreters.lowering.shard_size.MAX_SHARD_BYTES": 0}
APART = {"interpreters.lowering.lower.MASKED_VALUES": 0}
AT_ONCE = {f"runtime.ordered_pool.{name}_OPERATIONS": 0.0 for name in ("SHARD", "PASS")}
FAST, LOOP = {"reduction": "fast"}, {"member_loop": "loop"}
GUARDS = {"on_error": "drop", "on_nonfinite": "drop"}
WAYS = {
    "one worker": Way(),
    "threads": Way(options=THREADS),
    "processes": Way(options=PROCESSES),
    "bundles again": Way(options={"direct_runner_bundle_repeat": 1}),
    "pieces": Way(replaced=PIECES),
    "pieces, locally": Way(replaced=PIECES, runner="local"),
    "pieces, processes": Way(replaced=PIECES, options=PROCESSES),
    "pieces, fast": Way(FAST, replaced=PIECES),
    "files": Way(replaced=FILES),
    "groups": Way(replaced=GROUPS, options={**THREADS, "direct_num_workers": 4}),
    "fast": Way(FAST),
    "loop": Way(LOOP),
    "batches": Way({"member_loop": "batches"}),
    "batches of 16": Way({"member_loop": "batches", "shard_size": 32}),
    "large members": Way(planned=LARGE),
    "large members, no short shard": Way(planned=LARGE, n=80),
    "one large member": Way(planned=LARGE, n=1),
    "full shards apart": Way(planned=APART),
    "full shards apart, in a loop": Way(LOOP, planned=APART, n=21),
    "full shards apart, in batches": Way(
        {"member_loop": "batches", "shard_size": 16}, planned=APART
    ),
    "no short shard": Way(planned=APART, n=24),
    "one short shard": Way(planned=APART, n=7),
    "checked": Way({"on_nonfinite": "raise"}),
    "guarded": Way(GUARDS),
    "guarded, apart": Way({**GUARDS, **LOOP}, planned=APART),
    "four devices": Way(options={"local_devices": 4}),
    "four devices, threads": Way(options={"local_devices": 4, **THREADS}),
    "four devices, fast": Way(FAST, options={"local_devices": 4}),
    "local threads": Way(options={"local_threads": 2}, replaced=AT_ONCE, runner="local"),
    "more local threads": Way(options={"local_threads": 5}, replaced=AT_ONCE, runner="local"),
    "local threads, fast": Way(FAST, {"local_threads": 5}, replaced=AT_ONCE, runner="local"),
}
# Two settings at once, or a further number of members, of devices or of threads.
LONG = {
    "processes", "pieces, processes", "pieces, fast", "batches of 16",
    "large members, no short shard", "one large member", "full shards apart, in batches",
    "full shards apart, in a loop", "no short shard", "guarded, apart", "four devices, threads",
    "four devices, fast", "more local threads", "local threads, fast",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in WAYS]
)
def test_any_way_gives_the_same_bits(name, empty_tmp, monkeypatch):
    way, fn = WAYS[name], everything(WAYS[name].n)
    args = arguments(way.n)
    for target, value in way.planned.items():
        monkeypatch.setattr(f"beamjax.{target}", value)
    bits = {"shard_size": 8, **way.bits}
    expected = bj.run(fn, *args, runner="local", options={**bits, "local_threads": 1})
    compiled = jax.jit(fn)(*args)
    assert_same_types(expected, compiled)
    assert_close(expected, compiled, rtol=2e-4, atol=2e-4)
    for target, value in way.replaced.items():
        monkeypatch.setattr(f"beamjax.{target}", value)
    found = bj.run(fn, *args, runner=way.runner, options={**bits, **way.options})
    assert_same_bits(found, expected)
    assert list(empty_tmp.rglob("*")) == []


# --- other splits, threads and types


@bj.program(clients=100)
def stages(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    z = bj.map_fn(lambda v, u: jnp.sum((v - mean) ** 3) * u, (y, x))
    return mean, z, bj.reduce_max(z), bj.reduce_sum(z)


ARGS = W, np.random.default_rng(0).normal(size=(100, 5, 3)).astype("float32")


def run_stages(*flags, **more):
    return bj.run(stages, *ARGS, options=["--shard_size=8", *flags], **more)


@pytest.fixture
def empty_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_runs_in_several_threads_at_once():
    whole = run_stages(runner="local")
    assert_close(bj.run(stages, *ARGS, options={"shard_size": 32}), whole)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(run_stages) for _ in range(8)]:
            assert_same_bits(future.result(), whole)


def test_sources_that_are_gathered_are_read_on_the_workers():
    wide = bj.from_arrays(np.asarray(ARGS[1], np.float64))
    program = bj.program(clients=100)(lambda x: (x @ W, x[3], bj.reduce_sum(x), jnp.sort(x, 0)))
    local = bj.run(program, wide, runner="local", options=["--shard_size=8"])
    np.testing.assert_array_equal(local[3], np.sort(ARGS[1], axis=0))
    for options in ({}, THREADS):
        found = bj.run(program, wide, options={"shard_size": 8, **options})
        assert_same_bits(found, local)


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
    store._CACHE.clear()  # Of tests whose runs were killed.
    tasks._executors.clear()
    for flags in ([], [f"--work_folder={folder}"]):
        modes.clear()
        run_stages(*flags)
        assert not store._CACHE._values
        assert not tasks._executors._values
        assert set(modes) == {(0o700, bool(flags))}
        assert live_sources() == before
        assert list(empty_tmp.rglob("*")) == [folder]


@pytest.mark.parametrize(
    "broken",
    [
        "beamjax.sources.array_source.ArraySource.read",
        "beamjax.pipelines.graph.build.Outputs.write",
    ],
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


def test_results_are_returned_without_executables_of_their_own():
    total = bj.program(clients=N)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: jnp.outer(v, v), x)))
    x = np.ones((N, 7), np.float32)
    bodies = len(plan_of(total, x).bodies)
    events = []
    listen = lambda event, *_, **__: events.append(event.rpartition("/")[2])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert bj.run(total, x, runner="local").shape == (7, 7)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert 1 <= events.count("backend_compile_duration") <= bodies


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


@pytest.mark.parametrize(
    ("bound", "value", "sizes"),
    [
        ("MAX_PLANS", 4, {3, 4, 5, 6}),
        ("MAX_PLAN_BYTES", 4_500_000, {3, 4, 5, 6}),
        ("MAX_PLAN_BYTES", 500_000, {6}),  # too large, but in use
    ],
)
def test_plans_are_not_kept_for_ever(bound, value, sizes, monkeypatch):
    """Neither those of ever new sizes, nor those of a function that is gone."""
    monkeypatch.setattr(planning, bound, value)
    table = np.ones(250_000, np.float32)  # Each plan holds it: a million bytes.
    fn = bj.program(clients=None)(lambda x: (bj.reduce_sum(bj.map_fn(jnp.sin, x)), table + 1))
    before = {id(plan) for plan in plans()}
    for n in range(1, 7):
        bj.explain(fn, X[:1].repeat(n, 0))
    made = [plan for plan in plans() if id(plan) not in before]
    assert {plan.sizes["clients"] for plan in made} == sizes
    made = [weakref.ref(plan) for plan in made]
    del fn
    gc.collect()
    assert [plan for plan in made if plan() is not None] == []
