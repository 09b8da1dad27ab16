"""What workers count: sums that hold each shard once, whatever was computed again or at once."""

import itertools
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import beamjax as bj
from beamjax import records
from beamjax.errors import ArrayFormatError, JobCancelledError
from beamjax.interpreters import evaluate, passes
from beamjax.job_folder import JobFolder
from beamjax.meters import Meter, Recorder, Reports, recorder_for
from beamjax.monitor import Monitor
from beamjax.options import Options
from beamjax.pipelines import combiners, workers
from beamjax.planning import _stage, plan_for
from beamjax.progress import Progress, StepCount, Tally, WorkerRecord, expected, merged, tally
from beamjax.shards import shards

N = 20
X = np.ones((N, 3), np.float32)
RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(1, 3)).map(
        lambda r: (r[0], r[0] + r[1], r[2])
    ),
    max_size=12,
)


def plan_of(fn, *args, **options):
    arguments, key, restore = _stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, Options(shard_size=8, **options)).plan


# --- sums


@given(RANGES)
def test_merged_ranges_hold_the_same_members(ranges):
    def counted(ranges):
        counts = np.zeros(64, int)
        for start, stop, times in ranges:
            counts[start:stop] += times
        return counts

    found = merged(ranges)
    np.testing.assert_array_equal(counted(found), counted(ranges))
    assert all(start < stop for start, stop, _ in found)
    for left, right in itertools.pairwise(found):
        assert left[1] < right[0] or (left[1] == right[0] and left[2] != right[2])


@settings(deadline=None)
@given(
    n=st.integers(1, 300),
    size=st.sampled_from([1, 8, 16, 64]),
    workers=st.integers(1, 4),
    seed=st.integers(0, 9),
    again=st.integers(0, 5),
)
def test_members_count_once_whoever_computes_them(n, size, workers, seed, again):
    rng = np.random.default_rng(seed)
    whole = list(shards(n, size))
    done = [whole[i] for i in rng.permutation(len(whole))]
    done += [whole[i] for i in rng.integers(0, len(whole), again)]
    recorders = [Recorder(Reports("/no such folder", "p")) for _ in range(workers)]
    for shard in done:
        recorder = recorders[rng.integers(workers)]
        recorder.add("step", size, shard.start, shard.count, Tally(bytes_read=shard.count * 4))
    found = tally(recorder.record() for recorder in recorders)
    assert (found.members, found.shards, found.retries) == (n, len(whole), again)
    assert found.bytes_read == sum(shard.count for shard in done) * 4


def test_steps_are_counted_by_themselves():
    counts = {
        "a": StepCount(8, ((0, 20, 1),), Tally(compute=1.0)),
        "b": StepCount(4, ((0, 8, 2),), Tally(compute=0.5, members=99)),
    }
    found = tally([WorkerRecord("w", 0.0, "b", counts)])
    assert found == Tally(members=28, shards=5, retries=2, compute=1.5)


def test_shares_and_speed():
    progress = Progress(done=Tally(members=30, read=1.0, compile=1.0, compute=6.0), seconds=10.0)
    told = {"read": 0.125, "transfer": 0.0, "compile": 0.125, "compute": 0.75, "merge": 0.0}
    assert progress.shares == told
    assert progress.members_per_second == 3.0
    assert progress.fraction is None
    assert set(Progress().shares.values()) == {0.0}
    assert Progress(done=Tally(members=3), members=4).fraction == 0.75


# --- what there is to do


@bj.program(clients=N)
def two_passes(x):
    mean = bj.reduce_mean(x)
    return bj.reduce_sum(bj.map_fn(lambda v: v * mean, x))


def rounds(x):
    import jax

    step = lambda carry, _: (carry + two_passes(x), None)
    return jax.lax.scan(step, np.zeros(3, np.float32), None, length=3)[0]


def until(x):
    import jax

    return jax.lax.while_loop(lambda c: c[0] < 100, lambda c: c + two_passes(x), two_passes(x))


@pytest.mark.parametrize(
    ("fn", "members", "number", "total"),
    [(two_passes, 2 * N, 6, 0), (rounds, 6 * N, 18, 3), (until, None, None, None)],
    ids=["passes", "scan", "while"],
)
def test_what_there_is_to_do(fn, members, number, total):
    found = expected(plan_of(fn, X))
    assert (found.members, found.shards, found.rounds_total) == (members, number, total)
    assert found.done == Tally()


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize(
    ("fn", "members", "done"),
    [(two_passes, 2 * N, 0), (rounds, 6 * N, 3), (until, 2 * N * 3, 2)],
    ids=["passes", "scan", "while"],
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


@bj.program(clients=N)
def served(x):
    return jnp.sqrt(bj.reduce_sum(x)) + bj.reduce(lambda a, b: a * b, x)


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("run_server", "compute"), ("finish_lane", "merge"), ("finish_tree", "merge")],
)
def test_steps_on_the_server_and_merges_are_timed(name, kind, runner, monkeypatch):
    for module in (evaluate, passes, workers, combiners):
        if hasattr(module, name):
            real = getattr(module, name)
            slow = lambda *args, real=real: [time.sleep(0.5), real(*args)][1]
            monkeypatch.setattr(module, name, slow)
    with bj.launch(served, X, runner=runner, options={"shard_size": 8}) as job:
        job.result()
        done = job.progress().done
        assert 0.5 <= getattr(done, kind) < 0.5 + done.compile + 5
        assert (done.members, done.shards) == (N, 3)
        assert bj.open_job(job.folder).progress().done == done


def test_who_only_merges_says_nothing_of_the_size_of_shards():
    apart = StepCount(1, (), Tally(merge=2.0))
    shards = StepCount(8, ((0, 16, 1),), Tally(merge=1.0))
    for counts in ((apart, shards), (shards, apart)):
        found = tally([WorkerRecord(str(i), 1.0, "", {"a": c}) for i, c in enumerate(counts)])
        assert found == Tally(members=16, shards=2, merge=3.0)


def test_bundles_that_run_twice_are_retries():
    options = {"shard_size": 8, "direct_runner_bundle_repeat": 1}
    with bj.launch(two_passes, X, options=options) as job:
        job.result()
        done = job.progress().done
        assert (done.members, done.shards, done.retries) == (2 * N, 6, 6)


@pytest.mark.parametrize("mode", ["multi_threading", "multi_processing"])
def test_several_workers(mode):
    options = {"shard_size": 8, "direct_running_mode": mode, "direct_num_workers": 2}
    with bj.launch(two_passes, X, options=options) as job:
        job.result()
        found = job.progress()
        assert (found.done.members, found.done.shards, found.done.retries) == (2 * N, 6, 0)
        assert found.workers in ((1,) if mode == "multi_threading" else (1, 2))


# --- meters


def test_a_meter_times_what_it_is_told():
    meter = Meter("step", 8)
    for start in (0, 8):
        meter.start()
        sum(range(10_000))
        meter.lap("read", 100)
        sum(range(10_000))
        meter.lap("compute")
        meter.shard(start, 8)
    total = meter.total
    assert (total.members, total.shards, total.bytes_read) == (16, 2, 200)
    assert min(total.read, total.compute) > 0
    assert total.merge == 0


def test_compiling_is_no_computing():
    import jax
    import jax.numpy as jnp

    x = jnp.arange(7.0)
    begun = time.perf_counter()
    meter = Meter("step", 8)
    jax.block_until_ready(jax.jit(lambda x: jnp.sort(jnp.sin(x) @ jnp.cos(x) * x))(x))
    meter.lap("compute")
    meter.shard(0, 8)
    assert meter.total.executables == 1
    assert meter.total.compile > 0
    assert meter.total.compile + meter.total.compute <= time.perf_counter() - begun


# --- records in the folder


def folder_of(tmp_path):
    folder = JobFolder(str(tmp_path))
    folder.begin({"name": "f", "runner": "r"})
    return folder


def test_a_worker_tells_once_a_second_and_when_it_is_told_to(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    recorder = recorder_for(Reports(folder.path, "p"))
    assert recorder_for(Reports(folder.path, "p")) is recorder
    assert recorder_for(None) is None
    recorder.add("step", 8, 0, 8, Tally())
    recorder.tick()
    assert folder.workers("p") == []
    recorder._written -= 1.0
    recorder.tick()
    recorder.add("step", 8, 8, 8, Tally())
    recorder.tick()
    assert tally(folder.workers("p")).members == 8
    recorder.flush()
    assert tally(folder.workers("p")).members == 16
    assert folder.workers("another") == []


def test_a_worker_learns_that_its_work_is_in_vain(tmp_path):
    folder = folder_of(tmp_path)
    recorder = Recorder(Reports(folder.path, "p"))
    folder.request_cancel()
    recorder.tick()
    recorder._written -= 1.0
    with pytest.raises(JobCancelledError):
        recorder.tick()


def test_a_folder_that_is_gone_stops_nobody(tmp_path):
    recorder = Recorder(Reports(str(tmp_path / "gone"), "p"))
    recorder._written -= 1.0
    recorder.add("step", 8, 0, 8, Tally())
    recorder.tick()
    recorder.flush()
    assert list(tmp_path.iterdir()) == []


def test_records_of_workers_that_are_damaged_are_left_out(tmp_path):
    folder = folder_of(tmp_path)
    for _ in range(2):
        recorder = Recorder(Reports(folder.path, "p"))
        recorder.add("step", 8, 0, 8, Tally())
        recorder.flush()
    first = sorted((tmp_path / "records").iterdir())[0]
    first.write_bytes(first.read_bytes()[:-3])
    assert len(folder.workers("p")) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"counts": 3},
        {"counts": {"a": None}},
        {"counts": {"a": {"size": 0, "ranges": [], "spent": vars(Tally())}}},
        {"counts": {"a": {"size": 8, "ranges": [[3, 3, 1]], "spent": vars(Tally())}}},
        {"counts": {"a": {"size": 8, "ranges": [[0, 8, True]], "spent": vars(Tally())}}},
        {"counts": {"a": {"size": 8, "ranges": [], "spent": {"members": "1"}}}},
        {"time": "now"},
    ],
    ids=str,
)
def test_hostile_records_are_refused(change):
    record = WorkerRecord("w", 1.0, "a", {"a": StepCount(8, ((0, 8, 1),), Tally())})
    plain = records.decode(records.encode(record.to_json()), "p")
    assert WorkerRecord.from_json(plain, "p") == record
    with pytest.raises(ArrayFormatError, match=r"^p: found .*expected"):
        WorkerRecord.from_json(plain | change, "p")


def test_a_monitor_alone_asks_nobody_to_report():
    monitor = Monitor(plan_of(two_passes, X))
    with monitor.pipeline("p") as reports:
        assert reports is None
    assert monitor.progress().members == 2 * N
    monitor.cancel()
    with pytest.raises(JobCancelledError), monitor.pipeline("p"):
        pass


def test_a_pipeline_elsewhere_is_cancelled_with_its_job():
    class Result:
        cancelled = 0

        def cancel(self):
            self.cancelled += 1

    result, monitor = Result(), Monitor(plan_of(two_passes, X))
    with monitor.running(result):
        monitor.cancel()
    assert result.cancelled == 1
    with pytest.raises(KeyboardInterrupt), monitor.running(result):
        raise KeyboardInterrupt
    assert result.cancelled == 2
    monitor.cancel()
    assert result.cancelled == 2
