"""What plans may take, against what processes took; and those that are refused before a start."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import OptionsError, StagingError
from beamjax.execution import plan_of
from beamjax.fan_out import accumulator_bytes
from beamjax.memory import block_budget, estimate
from beamjax.options import Options, parse_options
from beamjax.plan import Lane
from beamjax.worker_processes import Workers
from beamjax.working_memory import working_bytes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
LOCAL = Workers(beam=False)
MIB = 2**20


@bj.program(clients=None)
def total(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v @ w, v @ w), x))


@bj.program(clients=None)
def two_passes(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    return bj.reduce_mean(
        bj.map_fn(lambda v, m: (v - m) ** 2, (y, bj.broadcast(bj.reduce_mean(y))))
    )


class Unread(bj.Source, kind="tests-unread"):
    """Members that nobody may read."""

    def __init__(self, n, width=16, blocks=0):
        self.n, self.width, self.blocks = n, width, blocks

    leaves = property(lambda self: (bj.sources.LeafSpec((self.width,), np.dtype(np.float32)),))
    treedef = property(lambda self: jax.tree_util.tree_structure(0))
    block_bytes = property(lambda self: self.blocks)

    def __len__(self):
        return self.n

    def read(self, start, stop):
        raise AssertionError("read")

    def to_spec(self):
        return {**self.spec_head(), "n": self.n}

    @classmethod
    def from_spec(cls, spec):
        return cls(spec["n"])


def estimated(fn, *args, workers=LOCAL, **options):
    options = parse_options(options)
    plan, inputs = plan_of(fn, args, options)
    sources = {i: v[0] for i, v in enumerate(inputs.values) if isinstance(v, tuple)}
    return estimate(plan, sources, options, workers)


# --- the bound

MEASURED = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import memory
watch = memory.Watch()
import jax, jax.numpy as jnp, numpy as np
import beamjax as bj
from beamjax import execution, memory_limit
from beamjax.memory import estimate
found = []
def noted(*args):
    found.append(estimate(*args))
execution.check_memory = noted
case, runner, options = sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
def draw(k, *shape):
    return jax.random.normal(jax.random.fold_in(jax.random.key(0), k), shape)
body = {
    "sums": lambda k: draw(k, 4_000_000),
    "attention": lambda k: jnp.sum(jax.nn.softmax(draw(k, 900, 64) @ draw(k, 64, 900))),
    "placed": lambda k: draw(k, 25_000),
}[case]
@bj.program(i=None)
def program(i):
    y = bj.map_fn(body, i)
    return y if case == "placed" else bj.reduce_mean(y)
n = 1000 if case == "placed" else 64
jax.block_until_ready(bj.run(program, bj.from_range(n), runner=runner, options=options))
own, workers = watch.end()
(e,) = found
print(json.dumps([own, e.launcher_bytes / 2**20, workers, e.worker_bytes / 2**20]))
"""


def measured(case, runner, **options):
    command = [sys.executable, "-c", MEASURED, str(BENCHMARKS), case, runner, json_text(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout.splitlines()[-1])


def json_text(options):
    import json

    return json.dumps(options)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
@pytest.mark.parametrize(
    ("case", "runner"),
    [("sums", "local"), ("attention", "local"), ("placed", "local"), ("sums", "DirectRunner")],
)
def test_processes_take_no_more(case, runner):
    own, bound, *_ = measured(case, runner, shard_size=8)
    assert own <= bound <= 3 * max(own, 120)


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_workers_take_no_more():
    options = {"direct_running_mode": "multi_processing", "direct_num_workers": 2, "shard_size": 8}
    own, bound, worker, worker_bound = measured("sums", "DirectRunner", **options)
    assert own <= bound
    assert worker <= worker_bound <= 3 * worker


@hypothesis.given(
    st.integers(1, 300), st.integers(1, 300), st.integers(3, 10**6), st.integers(1, 8)
)
@hypothesis.settings(max_examples=15, deadline=None)
def test_the_bound_grows_with_sizes_and_threads_and_not_with_the_members(width, out, n, threads):
    def found(width, out, n, threads=1, **options):
        workers = Workers(threads=threads, shared=False)
        w = jax.ShapeDtypeStruct((width, out), np.float32)
        return estimated(
            total, np.zeros(w.shape, w.dtype), Unread(n, width, 4096), workers=workers,
            shard_size=64, **options,
        ).worker_bytes  # fmt: skip

    here = found(width, out, 64 * n)
    assert here == found(width, out, 640 * n)
    assert here <= found(2 * width, out, 64 * n)
    assert here <= found(width, 2 * out, 64 * n)
    assert here <= found(width, out, 64 * n, threads)
    assert found(width, out, 64 * n, reduction="fast") <= here


def test_what_depends_on_the_members_is_counted():
    @bj.program(clients=None)
    def placed(x):
        return bj.map_fn(lambda v: v * 2, x)

    @bj.program(clients=None)
    def gathered(x):
        y = bj.map_fn(lambda v: v * 2, x)
        return jnp.sum(y @ y.T)

    for fn in (placed, gathered):
        small, large = (estimated(fn, Unread(n, 256)).worker_bytes for n in (1000, 101_000))
        assert large - small >= 100_000 * 1024
    kept = [estimated(placed, Unread(n, 256), keep="placed").worker_bytes for n in (100_000, 10**7)]
    assert kept[0] == kept[1]


def test_blocks_of_sources_count_for_each_thread():
    w = np.zeros((16, 4), np.float32)
    plain, blocks = (
        estimated(total, w, Unread(1000, blocks=x), workers=Workers(4)) for x in (0, 50 * MIB)
    )
    assert blocks.worker_bytes - plain.worker_bytes > 4 * 50 * MIB


def test_blocks_of_files(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"x": np.zeros(1000, np.float32)}), tmp_path / "x", row_group_size=300)
    source = bj.from_parquet(tmp_path / "x")
    assert source.block_bytes == 300 * 4
    assert bj.take(source, np.arange(5)).block_bytes == 300 * 4


@pytest.mark.parametrize(
    ("lane", "mode", "bytes_each"),
    [
        (Lane("sum", "float32", 100, ()), "exact", 25),
        (Lane("sum", "float32", 100, ()), "fast", 8),
        (Lane("sum", "complex64", 100, ()), "fast", 16),
        (Lane("sum", "int32", 100, ()), "exact", 4),
        (Lane("sum", "float64", 100, ()), "exact", 49),
        (Lane("prod", "float32", 100, ()), "exact", 160),
        (Lane("prod", "complex128", 100, ()), "fast", 16),
        (Lane("max", "float32", 100, ()), "exact", 4),
        (Lane("max", "bfloat16", 100, ()), "exact", 4),
    ],
)
def test_accumulators(lane, mode, bytes_each):
    from beamjax.reducers import make_accumulator

    found = accumulator_bytes(lane, mode, most=True)
    assert found == 100 * bytes_each
    accumulator = make_accumulator(lane.kind, np.dtype(lane.dtype), lane.size, mode=mode)
    rng = np.random.default_rng(0)
    for shard in range(300):  # more than wait to be added together
        values = rng.normal(size=100) * 100
        accumulator.add(values.astype(lane.dtype), shard)
    assert accumulator.nbytes <= found + 2**18


def test_bodies_are_counted_as_they_are_compiled():
    def held(fn, *shapes):
        specs = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
        return working_bytes(jax.jit(fn).trace(*specs).jaxpr)

    big = (256, 1024)
    assert held(lambda x: jnp.sum(jnp.sin(x * 2 + 1)), big) < 1000  # is fused
    assert held(lambda x: x @ x, (256, 256)) == 4 * 256 * 256
    assert held(lambda x: (x @ x.T) @ x, big) >= 4 * 256 * (256 + 1024)
    assert held(lambda x: jnp.sort(x, axis=0), big) >= 2 * 4 * 256 * 1024
    once = held(lambda x: jnp.sum(x @ x.T), big)
    rounds = lambda x: jax.lax.fori_loop(0, 9, lambda i, t: t + jnp.sum(x @ (x.T + t)), 0.0)
    assert once <= held(rounds, big) <= once + 3 * 4 * 256 * 1024


# --- the option


@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (2**30, 2**30), ("2GiB", 2**31), ("500MB", 500_000_000), ("1.5 GiB", 3 * 2**29),
        ("1024", 1024), ("64kB", 64_000), ("64KiB", 65536), ("7B", 7), (None, None),
    ],
)  # fmt: skip
def test_memory_is_a_number_or_a_text(given, nbytes):
    assert parse_options({"memory": given}).memory == nbytes
    if given is not None:
        assert parse_options([f"--memory={given}"]).memory == nbytes
    assert parse_options(Options(memory=given)).memory == nbytes


@pytest.mark.parametrize(
    "given",
    [0, -5, 1.5, True, "", "GiB", "2 gib", "2GiBs", "-2GiB", "1e9", "nan", "two", "2 PB", [], "0"],
)
def test_other_texts_are_refused(given):
    with pytest.raises(
        OptionsError, match=r"memory: found .*expected a number of bytes, or a text"
    ):
        parse_options({"memory": given})


@hypothesis.given(st.integers(1, 10**6), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_units_agree_with_powers(number, unit):
    power = 1024 ** ("KMGT".index(unit[0]) + 1)
    assert parse_options({"memory": f"{number}{unit}"}).memory == number * power


# --- refusals


def refusal(fn, *args, runner="local", **options):
    with pytest.raises(StagingError) as error:
        bj.run(fn, *args, runner=runner, options=options)
    return str(error.value)


@pytest.mark.parametrize("runner", ["local", "DirectRunner", "FlinkRunner"])
def test_a_plan_that_does_not_fit_is_refused_before_it_starts(runner):
    text = refusal(two_passes, np.zeros((16, 4), np.float32), Unread(100), runner=runner, memory=10)
    assert "a worker process may take" in text
    assert "memory=10 B: Python" in text
    assert 'give a worker process more, memory="' in text


def test_the_refusal_names_step_line_parts_and_the_shard_size_that_fits():
    @bj.program(clients=None)
    def program(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.outer(v, v) @ jnp.outer(v, v), x))

    source = Unread(10_000, 256)
    text = refusal(program, source, memory="300MiB", shard_size=1024)
    assert "step 'map_clients_0' (" in text
    assert f"{os.path.basename(__file__)}:" in text
    told = text.split(": ")[2].split(". To change")[0]
    assert told.index("computing") < told.index("Python and JAX") < told.index("sums")
    size = int(text.split("set shard_size=")[1].split(" ")[0])
    assert size % 8 == 0
    fits = estimated(program, source, shard_size=size, memory="300MiB")
    over = estimated(program, source, shard_size=2 * size, memory="300MiB")
    assert fits.worker_bytes <= 300 * MIB < over.worker_bytes


def test_the_advised_limit_is_enough():
    w = np.zeros((64, 700), np.float32)
    text = refusal(total, w, Unread(100, 64, 30 * MIB), memory="1MiB", shard_size=8)
    assert 'set reduction="fast" in the options, which is not enough' not in text
    more = text.split('more, memory="')[1].split('"')[0]
    options = parse_options({"memory": more, "shard_size": 8})
    found = estimated(total, w, Unread(100, 64, 30 * MIB), **dataclasses.asdict(options))
    assert found.worker_bytes <= options.memory


@pytest.mark.parametrize(
    ("runner", "flags"),
    [
        ("DirectRunner", {"direct_num_workers": 8, "direct_running_mode": "multi_threading"}),
        ("DirectRunner", {"local_threads": 8}),
        ("local", {"local_threads": 8}),
    ],
    ids=str,
)
def test_fewer_threads_are_advised(runner, flags):
    w, source = np.zeros((16, 1000), np.float32), Unread(100, blocks=40 * MIB)
    text = refusal(total, w, source, runner=runner, memory="1300MiB", shard_size=8, **flags)
    assert "of 8 threads in a worker process" in text


def test_what_fits_runs_with_smaller_caches():
    from beamjax.sources.block_source import BLOCKS

    x = np.ones((20, 3), np.float32)
    found = bj.run(
        total, np.eye(3, dtype=np.float32), x, runner="local", options={"memory": "1GiB"}
    )
    np.testing.assert_array_equal(found, np.ones((3, 3)))
    assert BLOCKS.lasting.limit == block_budget(2**30) // 2 == 2**27
    bj.run(total, np.eye(3, dtype=np.float32), x, runner="local")
    assert BLOCKS.lasting.limit == 2**29


# --- explain


def test_explain_tells_memory():
    args = np.zeros((16, 4), np.float32), Unread(1000)
    explanation = bj.explain(two_passes, *args, options={"local_threads": 3})
    text = str(explanation).split("\nmemory at most, DirectRunner, 3 threads of the launching ")[1]
    for word in ("in any case", "for map_clients_0", "a worker process", "the same process"):
        assert word in text
    memory = explanation.to_json()["memory"]
    assert memory["worker_bytes"] == sum(memory["kept"].values()) + max(
        sum(parts.values()) for parts in memory["steps"].values()
    )
    assert memory["launcher_bytes"] == memory["worker_bytes"]
    flags = {"direct_running_mode": "multi_processing", "direct_num_workers": 2}
    apart = bj.explain(two_passes, *args, options=flags)
    assert not apart.facts.memory.shared
    assert "Python, JAX and Beam" in apart.facts.memory.launcher
    assert "memory up to" in explanation.to_mermaid()


# --- what passes hand on


@pytest.mark.parametrize("limit", [0, 10**9])
def test_the_way_of_placed_values_between_passes_does_not_show(limit, monkeypatch):
    from beamjax.interpreters import evaluate
    from beamjax.pipelines import driver
    from beamjax.pipelines.launch import Launcher

    pipelines, original = [], Launcher.run
    monkeypatch.setattr(
        Launcher, "run", lambda self, *args: pipelines.append(1) or original(self, *args)
    )
    for module in (evaluate, driver):
        monkeypatch.setattr(module, "HANDED_BYTES", limit)
    x = np.random.default_rng(0).normal(size=(100, 16)).astype(np.float32)
    w = np.eye(16, 4, dtype=np.float32)
    here, on_beam = (
        bj.run(two_passes, w, x, runner=runner) for runner in ("local", "DirectRunner")
    )
    np.testing.assert_array_equal(here, on_beam)
    np.testing.assert_allclose(here, x[:, :4].var(axis=0), rtol=1e-5)
    assert len(pipelines) == (2 if limit == 0 else 1)
