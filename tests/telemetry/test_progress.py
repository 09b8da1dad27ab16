"""Progress: each shard counts once, however often it is computed, and time is measured."""

import collections
import dataclasses
import itertools
import json
import math
import os
import sys
import threading
import time

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from helpers import plan_of
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax import execution
from beamjax.errors import ArrayFormatError, JobCancelledError
from beamjax.jobs.job import JobRun
from beamjax.options import parse_options
from beamjax.pipelines.worker import map_shards as workers
from beamjax.pipelines.worker import merge as combiners
from beamjax.plan.shard import Shard, Shards
from beamjax.runtime import local as evaluate
from beamjax.runtime import passes
from beamjax.spans import (
    KINDS,
    Span,
    Spans,
    Work,
    count,
    merged,
    timed,
    transferring,
)
from beamjax.storage import records
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry import worker_records
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.progress import Progress, Totals, expected, folded
from beamjax.telemetry.worker_records import Reports, collecting, report

N = 20
X = np.ones((N, 3), np.float32)
RUNNERS = ("local", "DirectRunner")


@bj.program(clients=N)
def two_passes(x):
    mean = bj.reduce_mean(x)
    return bj.reduce_sum(bj.map_fn(lambda v: v * mean, x))


@bj.program(clients=N)
def served(x):
    return jnp.sqrt(bj.reduce_sum(x)) + bj.reduce(lambda a, b: a * b, x)


def rounds(x):
    step = lambda carry, _: (carry + two_passes(x), None)
    return jax.lax.scan(step, np.zeros(3, np.float32), None, length=3)[0]


def until(x):
    return jax.lax.while_loop(lambda c: c[0] < 100, lambda c: c + two_passes(x), two_passes(x))


def branches(other):
    def program(x):
        return jax.lax.cond(bj.reduce_max(x)[0] > 0, two_passes, other, x)

    return bj.program(clients=N)(program)


def slow(monkeypatch, name, seconds, *modules):
    """Makes a function of these modules take longer."""
    for module in modules:
        if hasattr(module, name):
            real = getattr(module, name)
            wait = lambda *args, real=real: [time.sleep(seconds), real(*args)][1]
            monkeypatch.setattr(module, name, wait)


# --- sums


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(1, 3)), max_size=12))
def test_merged_ranges_hold_the_same_members(given):
    def counted(ranges):
        counts = np.zeros(64, int)
        for start, stop, times in ranges:
            counts[start:stop] += times
        return counts

    ranges = [(start, start + size, times) for start, size, times in given]
    found = merged(ranges)
    np.testing.assert_array_equal(counted(found), counted(ranges))
    assert all(start < stop for start, stop, _ in found)
    for left, right in itertools.pairwise(found):
        assert left[1] < right[0] or (left[1] == right[0] and left[2] != right[2])


PLAN = plan_of(two_passes, X, shard_size=8)


def plan_of_members(n, size, starts=()):
    clients = {"sizes": n, "shard_sizes": size, "file_starts": starts}
    return dataclasses.replace(PLAN, **{name: {"clients": x} for name, x in clients.items()})


def compute(spans, step, shard, nbytes=4):
    """The spans of a shard."""
    with timed(spans, step, "read", shard) as span:
        span.nbytes = nbytes
    for kind in ("compute", "merge"):
        with timed(spans, step, kind, shard):
            pass


@given(
    n=st.integers(1, 300),
    size=st.sampled_from([1, 8, 16, 64]),
    number=st.integers(1, 4),
    rng=st.randoms(use_true_random=False),
    again=st.integers(0, 5),
)
def test_members_count_once_wherever_they_are_computed(n, size, number, rng, again):
    whole = list(Shards(n, size))
    done = rng.sample(whole, len(whole)) + rng.choices(whole, k=again)
    workers = [Spans(ranges=True) for _ in range(number)]
    for shard in done:
        compute(rng.choice(workers), "map_clients_0", shard, shard.count * 4)
    found = Totals.of(folded([w.work() for w in workers], plan_of_members(n, size)).values())
    assert (found.members, found.shards, found.retries) == (n, len(whole), again)
    assert found.bytes_read == sum(shard.count for shard in done) * 4


def test_steps_and_workers_are_added_up():
    plan = PLAN
    a, b = "map_clients_0", "map_clients_1"
    work = Work(
        {a: {"compute": 1.0}, b: {"compute": 0.5, "members": 99}},
        {a: ((0, 3, 1),), b: ((0, 1, 2),)},
    )
    found = folded([work], plan)
    assert Totals.of(found.values()) == Totals(members=28, shards=4, retries=1, compute=1.5)
    assert Totals.of([found[b]]) == Totals(members=8, shards=1, retries=1, compute=0.5)
    # A worker that only merges has no shards.
    apart, computed = Work({a: {"merge": 2.0}}), Work({a: {"merge": 1.0}}, {a: ((0, 2, 1),)})
    for works in ((apart, computed), (computed, apart)):
        found = Totals.of(folded(works, plan).values())
        assert found == Totals(members=16, shards=2, merge=3.0)
    # Files may end in the middle of a placement.
    cut = plan_of_members(N, 8, (3,))
    for shards, members in (((0, 1), 3), ((0, 2), 11), ((1, 4), 17), ((0, 4), N)):
        (found,) = folded([Work(shards={a: ((*shards, 1),)})], cut).values()
        assert found["members"] == members


def test_what_progress_says_of_time():
    done = Totals(members=30, shards=3, read=1.0, compile=1.0, compute=5.0, transfer=0.5, merge=0.5)
    steps = {"a": Totals(read=1.0, compute=2.0, merge=0.5, transfer=0.5, compile=1.0)}
    found = Progress(done, steps=steps, members=40, shards=4, seconds=10.0)
    shares = {"read": 0.125, "transfer": 0.0625, "compile": 0.125, "compute": 0.625}
    assert found.shares == shares | {"merge": 0.0625}
    assert found.members_per_second == 3.0
    assert found.fraction == 0.75
    assert from_plain(Progress, json.loads(json.dumps(found.to_json())), "here") == found
    nothing = Progress()
    assert set(nothing.shares.values()) == {0.0}
    assert (nothing.fraction, nothing.members_per_second) == (None, 0.0)
    assert Progress(done=Totals(shards=3), shards=2).fraction == 1.0


# --- what there is to do, and what was done


def test_what_there_is_to_do():
    for fn, members, number, total in (
        (two_passes, N, 6, 0),
        (rounds, N, 18, 3),
        (until, N, None, None),
        (branches(lambda x: -two_passes(2 * x)), N, 9, 0),
        (branches(bj.reduce_sum), N, None, 0),
    ):
        plan = plan_of(fn, X, shard_size=8)
        found = expected(plan, plan.steps)
        assert found.done == Totals()
        assert (found.members, found.shards, found.rounds_total) == (members, number, total)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    ("fn", "members", "done"), [(two_passes, 2 * N, 0), (rounds, 6 * N, 3), (until, 2 * N * 3, 2)]
)
def test_what_was_done_in_the_end(fn, members, done, runner):
    with bj.launch(fn, X * 1.5, runner=runner, options={"shard_size": 8}) as job:
        job.result()
        found = job.progress()
        assert (found.done.members, found.done.retries, found.rounds) == (members, 0, done)
        assert found.done.bytes_read == members * 3 * 4
        assert found.done.compute > 0
        assert found.seconds > 0
        assert found.step.rpartition("/")[2].startswith("map_clients")
        read = bj.open_job(job.folder).progress()
        assert (read.done, read.rounds, read.step) == (found.done, found.rounds, found.step)


@pytest.mark.parametrize("runner", RUNNERS)
def test_steps_on_the_server_and_merges_are_timed(runner, monkeypatch):
    bj.run(served, X, runner=runner, options={"shard_size": 8})  # first calls are compilation
    slow(monkeypatch, "run_server", 0.3, evaluate, passes, workers, combiners)
    for name in ("finish_buffer", "finish_tree"):
        slow(monkeypatch, name, 0.3, evaluate, passes, workers, combiners)
    with bj.launch(served, X, runner=runner, options={"shard_size": 8}) as job:
        job.result()
        found = job.progress()
        (server,) = [name for name in found.steps if name.startswith("server")]
        assert found.steps[server].compute >= 0.3
        assert 0.6 <= found.steps["map_clients_0"].merge <= found.done.merge
        assert (found.done.members, found.done.shards) == (N, 3)
        assert bj.open_job(job.folder).progress().done == found.done


@pytest.mark.parametrize(
    ("flags", "retries", "most_workers"),
    [
        ({"direct_runner_bundle_repeat": 1}, 6, 1),
        ({"direct_running_mode": "multi_threading", "direct_num_workers": 2}, 0, 1),
        pytest.param(
            {"direct_running_mode": "multi_processing", "direct_num_workers": 2}, 0, 2,
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_bundles_that_run_again_or_side_by_side(flags, retries, most_workers):
    with bj.launch(two_passes, X, options={"shard_size": 8, **flags}) as job:
        job.result()
        found = job.progress()
        done = found.done
        assert (done.members, done.shards, done.retries) == (2 * N, 6, retries)
        assert 1 <= found.workers <= most_workers


# --- spans


def test_a_span_leaves_out_compilations_and_transfers():
    spans, shard = Spans(traces=True), Shard(2, 16, 8)
    began = time.perf_counter()
    with timed(spans, "step", "read", shard, 100):
        time.sleep(0.01)
    with timed(spans, "step", "compute", shard), transferring(), transferring():
        time.sleep(0.01)
    x = jnp.arange(7.0)
    with timed(spans, "step", "merge", shard, 5):
        jax.block_until_ready(jax.jit(lambda x: jnp.sort(jnp.sin(x) @ jnp.cos(x) * x))(x))
        count("broadcasts")
    passed = time.perf_counter() - began
    found = Totals.of(spans.work().sums.values())
    assert (found.members, found.shards, found.bytes_read, found.bytes_reduced) == (8, 1, 100, 5)
    assert (found.broadcasts, found.retries) == (1, 0)
    assert found.read >= 0.01
    assert found.transfer >= 0.01
    assert found.compute < 0.01  # nested transfers count once, and not as computing
    assert found.executables >= 1
    assert found.compile > 0
    assert sum(getattr(found, kind) for kind in KINDS) <= passed
    traced = spans.work().spans
    assert [span.kind for span in traced] == ["read", "compute", "merge", "compile"]
    assert all(span.step == "step" and span.shard == 2 for span in traced)
    by_kind = {span.kind: span.seconds for span in traced}
    for kind, seconds in (
        ("read", found.read), ("compute", found.compute + found.transfer),
        ("compile", found.compile), ("merge", found.merge + found.compile),
    ):  # fmt: skip
        assert by_kind[kind] == pytest.approx(seconds, abs=2e-6)
    assert abs(traced[0].start - time.time()) < 60
    count("broadcasts")  # no span is open
    assert Totals.of(spans.take().sums.values()) == found
    assert Totals.of(spans.take().sums.values()) == Totals()


def test_a_shard_that_fails_is_not_done():
    spans = Spans(ranges=True)
    with pytest.raises(KeyError), timed(spans, "step", "merge", Shard(0, 0, 8)):
        raise KeyError("x")
    assert Totals.of(spans.work().sums.values()).shards == 0
    assert spans.work().shards == {}
    spans.cancelled = True
    with pytest.raises(JobCancelledError), timed(spans, "step", "read"):
        pytest.fail("the run has ended")


def test_a_first_call_is_compilation():
    spans, slow_import = Spans(), 0.05
    function = jax.jit(lambda x: x * 3.5)
    for _ in range(2):
        with timed(spans, "step", "compute"):
            function(np.float32(1))
            if not spans.work().sums:
                time.sleep(slow_import)
    found = Totals.of(spans.work().sums.values())
    assert found.compile >= slow_import > found.compute


def test_spans_of_threads_are_added_up():
    spans = Spans(traces=True)

    def work(number):
        for i in range(200):
            compute(spans, f"step_{i % 3}", Shard(i, 8 * i, 8))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Totals.of(spans.work().sums.values())
    assert (found.shards, found.members, found.bytes_read) == (800, 6400, 3200)
    assert 400 <= len(spans.work().spans) <= 1000


def test_a_warm_local_call_spends_few_calls_on_spans():
    def run():  # as `bj.run`, but without a thread
        call = execution.prepare(two_passes, (X,), "local", parse_options({"shard_size": 32}))
        return execution.finish(call, JobRun(call))

    run()
    root, calls = os.path.dirname(bj.__file__), collections.Counter()

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(root):
            where = os.path.relpath(frame.f_code.co_filename, root)
            calls["spans" if where.startswith(("spans", "telemetry", "jobs")) else "rest"] += 1

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert calls["rest"] > 100
    assert calls["spans"] <= 0.1 * calls.total(), calls  # for two passes of one shard each


# --- records in the folder


@pytest.fixture
def folder(tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin("f", "r")
    return folder


def members(folder, pipeline="p"):
    plan = plan_of_members(N, 8)
    return Totals.of(folded(folder.workers(pipeline).values(), plan).values()).members


def test_a_worker_writes_what_it_has_done(folder, tmp_path, monkeypatch):
    reports = Reports(folder.path, "p")
    spans = Spans(traces=True, ranges=True)
    for i in range(2):
        compute(spans, "map_clients_0", Shard(i, 8 * i, 8))
        report(spans.take(), reports)
        assert members(folder) == 8 * (i + 1)
    (work,) = folder.workers("p").values()
    assert [span.shard for span in work.spans if span.kind == "merge"] == [0, 1]
    assert folder.workers("another") == {}
    with collecting() as collected:
        compute(spans, "map_clients_0", Shard(2, 16, 4))
        report(spans.take(), reports)
    assert members(folder) == 16
    assert Totals.of(collected.take().sums.values()).members == 4
    # About once a second, it looks whether another process has cancelled the job.
    folder.request_cancel()
    report(Work(), reports)
    monkeypatch.setattr(worker_records, "EVERY_SECONDS", 0.0)
    with pytest.raises(JobCancelledError):
        report(Work(), reports)
    # A damaged record does not count.
    path = next((tmp_path / "records").iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    assert folder.workers("p") == {}


def test_a_folder_that_is_gone_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_records, "EVERY_SECONDS", 0.0)
    report(Work({"a": {"read": 1.0}}), Reports(str(tmp_path / "gone"), "p"))
    assert list(tmp_path.iterdir()) == []


def test_other_records_are_refused():
    span = Span("a", 0, "read", 1.0, 0.5, 8)
    work = Work({"a": {"read": 1.0, "members": 8}}, {"a": ((0, 1, 1),)}, (span,), "a", 1.0)
    plain = records.decode(records.encode(to_plain(work)), "p")
    assert from_plain(Work, plain, "p") == work
    wrong_ranges = ([3, 3, 1], [-1, 8, 1], [0, 8, 0], [0, 8, True], [0, 8], "x")
    hostile = [{"shards": {"a": [each]}} for each in wrong_ranges]
    hostile += [{"sums": each} for each in (3, {"a": None}, {"a": {"read": "1"}})]
    hostile += [{"began": "now"}, {"began": math.inf}, {"step": 3}]
    hostile += [{"spans": [each]} for each in ([], 3, [*span, 1], [*span[:5], "x"])]
    for change in hostile:
        with pytest.raises(ArrayFormatError, match=r"^p: found .*"):
            from_plain(Work, plain | change, "p")


def test_a_cancelled_job_starts_no_pipeline():
    monitor = Monitor(plan_of(two_passes, X))
    with monitor.pipeline("p") as reports:
        assert reports is None  # Nothing looks on.
    assert monitor.progress().members == N
    monitor.cancel()
    with pytest.raises(JobCancelledError), monitor.pipeline("p"):
        pass


# --- metrics of Beam


def metrics(program):
    """The counters of a pipeline of Beam, and its times, each as a list of results."""
    pipeline = beam.Pipeline(FnApiRunner(), beam.options.pipeline_options.PipelineOptions([]))
    pipeline | bj.transform(program, X, options={"shard_size": 8})
    result = pipeline.run()
    found = result.metrics().query(MetricsFilter().with_namespace("beamjax"))
    counters = {each.key.metric.name: each.committed for each in found["counters"]}
    times = collections.defaultdict(list)
    for each in found["distributions"]:
        times[each.key.metric.name].append(each.committed)
    return counters, times


def test_a_pipeline_has_metrics_by_the_names_of_its_steps(monkeypatch):
    counters, times = metrics(two_passes)
    steps = ("map_clients_0", "map_clients_1")
    expected = {"members": N, "shards": 3, "bytes_read": X.nbytes}
    assert counters == {f"{step}/{name}": expected[name] for step in steps for name in expected}
    assert set(times) == {f"{step}/{name}_ms" for step in steps for name in KINDS}
    assert all(t.count >= 1 and t.sum >= 0 for found in times.values() for t in found)
    # Of the shards; and of the merged partials, where these are finished.
    assert [len(times[f"{step}/read_ms"]) for step in steps] == [1, 1]
    assert [len(times[f"{step}/merge_ms"]) for step in steps] == [2, 2]

    metrics(served)  # first calls are compilation
    slow(monkeypatch, "run_server", 0.1, workers)
    for name in ("finish_buffer", "finish_tree"):
        slow(monkeypatch, name, 0.1, combiners)
    _, times = metrics(served)
    (server,) = [name for name in times if name.startswith("server_") and "compute" in name]
    assert sum(t.sum for t in times[server]) >= 100
    assert sum(t.sum for t in times["map_clients_0/merge_ms"]) >= 200
