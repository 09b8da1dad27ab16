"""Progress: each shard counts once, however often it is computed, and time is measured."""

import collections
import itertools
import json
import math
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
from beamjax.errors import ArrayFormatError, JobCancelledError
from beamjax.pipelines.worker import map_shards as workers
from beamjax.pipelines.worker import merge as combiners
from beamjax.plan.shard import Shard, Shards
from beamjax.runtime import local as evaluate
from beamjax.runtime import passes
from beamjax.storage import records
from beamjax.storage.schema import from_plain, to_plain
from beamjax.telemetry.job_folder import JobFolder
from beamjax.telemetry.meters import COUNTED, Meter, Recorder, Reports, recorder_for
from beamjax.telemetry.monitor import Monitor
from beamjax.telemetry.progress import (
    SECONDS,
    Progress,
    ShardEvent,
    StepCount,
    Tally,
    WorkerRecord,
    expected,
    merged,
    tally,
)

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


@given(
    n=st.integers(1, 300),
    size=st.sampled_from([1, 8, 16, 64]),
    count=st.integers(1, 4),
    rng=st.randoms(use_true_random=False),
    again=st.integers(0, 5),
)
def test_members_count_once_wherever_they_are_computed(n, size, count, rng, again):
    whole = list(Shards(n, size))
    done = rng.sample(whole, len(whole)) + rng.choices(whole, k=again)
    recorders = [Recorder(Reports("/no such folder", "p")) for _ in range(count)]
    for shard in done:
        spent = Tally(bytes_read=shard.count * 4)
        rng.choice(recorders).add("step", shard, spent)
    found = tally(recorder.record() for recorder in recorders)
    assert (found.members, found.shards, found.retries) == (n, len(whole), again)
    assert found.bytes_read == sum(shard.count for shard in done) * 4


def test_steps_and_workers_are_added_up():
    counts = {
        "a": StepCount(((0, 20, 1),), ((0, 3, 1),), Tally(compute=1.0)),
        "b": StepCount(((0, 8, 2),), ((0, 2, 2),), Tally(compute=0.5, members=99)),
    }
    found = tally([WorkerRecord("w", 0.0, "b", counts)])
    assert found == Tally(members=28, shards=5, retries=2, compute=1.5)
    # A worker that only merges has no shards.
    apart = StepCount((), (), Tally(merge=2.0))
    computed = StepCount(((0, 16, 1),), ((0, 2, 1),), Tally(merge=1.0))
    for counts in ((apart, computed), (computed, apart)):
        found = tally([WorkerRecord(str(i), 1.0, "", {"a": c}) for i, c in enumerate(counts)])
        assert found == Tally(members=16, shards=2, merge=3.0)


def test_what_progress_says_of_time():
    done = Tally(members=30, shards=3, read=1.0, compile=1.0, compute=5.0, transfer=0.5, merge=0.5)
    steps = {"a": Tally(read=1.0, compute=2.0, merge=0.5, transfer=0.5, compile=1.0)}
    found = Progress(done, steps=steps, members=40, shards=4, seconds=10.0)
    shares = {"read": 0.125, "transfer": 0.0625, "compile": 0.125, "compute": 0.625}
    assert found.shares == shares | {"merge": 0.0625}
    assert found.members_per_second == 3.0
    assert found.fraction == 0.75
    assert from_plain(Progress, json.loads(json.dumps(found.to_json())), "here") == found
    nothing = Progress()
    assert set(nothing.shares.values()) == {0.0}
    assert (nothing.fraction, nothing.members_per_second) == (None, 0.0)
    assert Progress(done=Tally(shards=3), shards=2).fraction == 1.0


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
        assert found.done == Tally()
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


# --- meters


def test_a_meter_times_laps_and_leaves_out_compiling():
    began = time.perf_counter()
    meter = Meter("step", sends=5)
    for start in (0, 8):
        time.sleep(0.02)
        meter.start()
        time.sleep(0.01)
        meter.lap("read", 100)
        time.sleep(0.01)
        meter.resume()
        meter.lap("compute")
        assert 0.01 <= meter.seconds < 0.02 + meter.compiling
        meter.shard(Shard(start // 8, start, 8))
    total = meter.total
    assert (total.members, total.shards, total.bytes_read) == (16, 2, 200)
    assert total.bytes_reduced == 10
    assert total.read >= 0.02
    assert total.compute > 0
    slept = 2 * 0.03  # before `start` and `resume`, which is in no lap
    assert total.read + total.compute <= time.perf_counter() - began - slept
    assert total.merge == total.executables == 0
    meter.start()
    x = jnp.arange(7.0)
    jax.block_until_ready(jax.jit(lambda x: jnp.sort(jnp.sin(x) @ jnp.cos(x) * x))(x))
    meter.lap("compute")
    meter.shard(Shard(2, 16, 8))
    assert meter.total.executables >= 1
    assert meter.total.compile > 0
    assert meter.total.compile + meter.total.compute <= time.perf_counter() - began


# --- records in the folder


@pytest.fixture
def folder(tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin("f", "r")
    return folder


def test_a_worker_writes_once_a_second_and_at_the_end(folder, tmp_path):
    recorder = recorder_for(Reports(folder.path, "p"))
    assert recorder_for(Reports(folder.path, "p")) is recorder
    assert recorder_for(None) is None
    recorder.add("step", Shard(0, 0, 8), Tally())
    recorder.tick()
    assert folder.workers("p") == []
    recorder._written -= 1.0
    recorder.tick()
    recorder.add("step", Shard(1, 8, 8), Tally())
    recorder.tick()
    assert tally(folder.workers("p")).members == 8
    recorder.flush()
    assert tally(folder.workers("p")).members == 16
    assert folder.workers("another") == []
    folder.request_cancel()
    recorder.tick()
    recorder._written -= 1.0
    with pytest.raises(JobCancelledError):
        recorder.tick()
    # A damaged record does not count.
    Recorder(Reports(folder.path, "p")).flush()
    path = sorted((tmp_path / "records").iterdir())[0]
    path.write_bytes(path.read_bytes()[:-3])
    assert len(folder.workers("p")) == 1


def test_a_folder_that_is_gone_stops_nothing(tmp_path):
    recorder = Recorder(Reports(str(tmp_path / "gone"), "p"))
    recorder._written -= 1.0
    recorder.add("step", Shard(0, 0, 8), Tally())
    recorder.tick()
    recorder.flush()
    assert list(tmp_path.iterdir()) == []


def test_other_records_are_refused():
    event = ShardEvent("w", "a", 0, 8, 1.0, 0.5)
    record = WorkerRecord(
        "w", 1.0, "a", {"a": StepCount(((0, 8, 1),), ((0, 1, 1),), Tally())}, (event,)
    )
    plain = records.decode(records.encode(to_plain(record)), "p")
    assert from_plain(WorkerRecord, plain, "p") == record
    count = {"members": [[0, 8, 1]], "shards": [[0, 1, 1]], "spent": vars(Tally())}
    changes = [{"spent": {"members": "1"}}]
    wrong_ranges = ([3, 3, 1], [-1, 8, 1], [0, 8, 0], [0, 8, True], [0, 8], "x")
    changes += [{what: [each]} for each in wrong_ranges for what in ("members", "shards")]
    hostile = [{"counts": 3}, {"counts": {"a": None}}, {"time": "now"}, {"time": math.inf}]
    hostile += [{"events": [each]} for each in ([], 3, [*event, 1], [*event[:5], "x"])]
    for change in hostile + [{"counts": {"a": count | change}} for change in changes]:
        with pytest.raises(ArrayFormatError, match=r"^p: found .*"):
            from_plain(WorkerRecord, plain | change, "p")


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
    expected = {"members": N, "shards": 3, "bytes_read": X.nbytes, "bytes_padding": 0}
    expected |= {"bytes_reduced": 3 * 12}
    own = {f"{step}/{kind}" for step in steps for kind in COUNTED[1:]}
    assert own <= counters.keys()
    rest = {name: count for name, count in counters.items() if name not in own}
    assert rest == {f"{step}/{name}": expected[name] for step in steps for name in expected}
    assert set(times) == {f"{step}/{name}_ms" for step in steps for name in SECONDS}
    assert all(t.count == 1 and t.sum >= 0 for found in times.values() for t in found)
    # Of the shards; and of the merged partials, where these are finished.
    assert [len(times[f"{step}/read_ms"]) for step in steps] == [1, 1]
    assert [len(times[f"{step}/merge_ms"]) for step in steps] == [2, 2]

    slow(monkeypatch, "run_server", 0.1, workers)
    for name in ("finish_buffer", "finish_tree"):
        slow(monkeypatch, name, 0.1, combiners)
    _, times = metrics(served)
    (server,) = [name for name in times if name.startswith("server_") and "compute" in name]
    assert sum(t.sum for t in times[server]) >= 100
    assert sum(t.sum for t in times["map_clients_0/merge_ms"]) >= 200
