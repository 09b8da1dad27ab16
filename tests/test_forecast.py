"""How long a plan is told to take, and what runs teach of it."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax import calibration, forecast, gains, plan_cache
from beamjax.calibration import Calibration
from beamjax.costs import Rates
from beamjax.forecast import StepTime, learn, small_work
from beamjax.interpreters import stage
from beamjax.options import Options, parse_options
from beamjax.planning import plan_for
from beamjax.progress import Progress, Tally

N = 1000
X = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32)
KNOWN = Calibration(Rates(1e9, 1e9, 1e-6, 1e-4, 5e9), read=1e9, merge=1e8, measured=True)


@bj.program(clients=None)
def mean(x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ v) * v, x))


def rounds(k, w, x):
    return jax.lax.scan(lambda w, _: (w + mean(x), None), w, length=k)[0]


def plan_of(fn, *args, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    return plan_for(fn, arguments, key, restore, parse_options(options)).plan


def told(plan, runner="local", known=KNOWN, **options):
    return forecast.forecast(plan, parse_options(options), runner, known)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path))
    monkeypatch.setattr(calibration, "_known", {})
    return tmp_path


def test_the_seconds_of_a_pass_are_those_of_its_parts():
    plan = plan_of(mean, X, shard_size=8)
    (step,) = told(plan, local_threads=1).steps
    cost = plan.costs["map_clients_0"]
    shards = 125
    assert step.read == pytest.approx(X.nbytes / 1e9)
    assert step.merge == pytest.approx(shards * 8 * 8 / 1e8)
    assert step.compute == pytest.approx(
        N * max(cost.flops / 1e9 + cost.extra / 5e9, cost.nbytes / 1e9)
        + shards * (cost.calls * 1e-6 + 1e-4)
    )
    assert step.source == "counted"


def test_a_faster_machine_takes_less():
    plan = plan_of(mean, X)
    fast = Calibration(Rates(1e12, 1e12, 1e-9, 1e-7), 1e12, 1e12)
    assert told(plan, known=fast).seconds < told(plan).seconds


def test_larger_shards_are_started_less_often():
    small, large = (told(plan_of(mean, X, shard_size=n)).work for n in (8, 512))
    assert large < small


def test_members_one_by_one_start_more_operations():
    plans = [plan_of(mean, X, shard_size=64, member_loop=w) for w in ("vmap", "batches", "loop")]
    seconds = [told(plan).work for plan in plans]
    assert seconds == sorted(seconds)


def test_rounds_are_counted():
    def loop(w, x):
        return rounds(6, w, x)

    plan = plan_of(loop, np.zeros(8, np.float32), X)
    steps = {step.step: step for step in told(plan).steps}
    assert steps["map_clients_0"].rounds == 6
    once = told(plan_of(mean, X)).steps[0]
    assert steps["map_clients_0"].seconds == pytest.approx(6 * once.seconds, rel=0.3)
    assert not told(plan).guessed


def test_pipelines_of_a_loop_are_counted():
    def loop(w, x):
        return rounds(6, w, x)

    plan = plan_of(loop, np.zeros(8, np.float32), X)
    assert told(plan, "local").pipelines == 0
    assert told(plan, "DirectRunner", rounds_per_graph=2).pipelines == 3
    assert told(plan, "DirectRunner", rounds_per_graph=1).pipelines == 6
    few, many = (told(plan, "DirectRunner", rounds_per_graph=n).overhead for n in (6, 1))
    assert few < many


def test_rounds_while_a_condition_holds_are_guessed():
    def until(w, x):
        return jax.lax.while_loop(lambda w: jnp.sum(w) < 9, lambda w: w + mean(x) + 1, w)

    found = told(plan_of(until, np.zeros(8, np.float32), X), "DirectRunner")
    assert found.guessed
    assert {step.rounds for step in found.steps if step.compute} == {forecast.GUESSED_ROUNDS}
    assert found.pipelines >= forecast.GUESSED_ROUNDS


def test_the_dearer_branch_counts():
    def branch(p, x):
        return jax.lax.cond(p, lambda x: mean(x), lambda x: jnp.zeros(8), x)

    found = told(plan_of(branch, np.bool_(True), X))
    assert [step.step for step in found.steps if step.read] == ["map_clients_0"]


def test_gathers_are_counted():
    @bj.program(clients=None)
    def median(x):
        return jnp.sort(bj.map_fn(jnp.sin, x), axis=0)[3]

    steps = {step.step: step for step in told(plan_of(median, X)).steps}
    assert steps["gather_0"].read == pytest.approx(X.nbytes / 1e9)
    assert steps["server_0"].compute > 0


def test_workers_share_the_work():
    plan = plan_of(mean, X)
    options = {"direct_num_workers": 2, "direct_running_mode": "multi_processing"}
    alone = told(plan, "DirectRunner")
    shared = told(plan, "DirectRunner", **options)
    assert shared.work == pytest.approx(alone.work / min(2, os.cpu_count()))


def test_threads_of_this_process_share_what_is_computed(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    plan = plan_of(mean, X, shard_size=8)
    alone, four = (told(plan, local_threads=k) for k in (1, 4))
    (one,), (shared,) = alone.steps, four.steps
    assert shared.busy == one.busy == one.seconds
    at_once = 125 / 32  # the last threads have nothing to do at the end
    gain = 1 + (at_once - 1) * gains.THREAD_GAIN
    assert shared.seconds == pytest.approx(one.read + one.compute / gain + one.merge)
    assert four.by_name()["map_clients_0"] == alone.by_name()["map_clients_0"]
    assert told(plan, "DirectRunner").steps[0].seconds == one.seconds
    assert told(plan_of(mean, X, shard_size=1000), local_threads=4).steps[0].gain == 1


@pytest.mark.parametrize(("loop", "expected"), [("vmap", 1.0), ("batches", 1.8), ("loop", 1.8)])
def test_threads_gain_nothing_where_xla_has_all_cores(monkeypatch, loop, expected):
    @bj.program(clients=None)
    def large(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.sin(v), x))

    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    x = jax.ShapeDtypeStruct((1 << 16, 64), np.float32)
    plan = plan_of(large, x, shard_size=1 << 12, member_loop=loop)
    assert told(plan, local_threads=2).steps[0].gain == pytest.approx(expected)


def test_beam_hands_on_shards_and_bytes():
    few, many = (told(plan_of(mean, X, shard_size=s), "DirectRunner") for s in (504, 8))
    shards, nbytes = 125 - 2, (125 - 2) * 8 * 4
    found = many.overhead - few.overhead
    assert found == pytest.approx(
        shards * KNOWN.fixed("DirectRunner").shard + nbytes / forecast.HANDED_RATE
    )
    assert told(plan_of(mean, X, shard_size=8)).overhead == KNOWN.fixed("local").step


@bj.program(clients=None)
def wide(w, x):
    return bj.reduce_mean(bj.map_fn(lambda w, v: w + v[0], (bj.broadcast(w), x)))


@pytest.mark.parametrize(
    ("runner", "options", "handed"),
    [
        ("DirectRunner", {}, False),
        ("DirectRunner", {"direct_num_workers": 2}, False),
        ("DirectRunner", {"keep_folder": "always"}, True),
        ("DirectRunner", {"checkpoint": "somewhere"}, True),
        ("DirectRunner", {"direct_running_mode": "multi_processing"}, True),
        ("PrismRunner", {}, True),
    ],
    ids=str,
)
def test_large_values_are_handed_over_as_they_are_within_a_process(runner, options, handed):
    small, large = (
        plan_of(wide, np.zeros(size, np.float32), X[:16], shard_size=8)
        for size in (1 << 18, 1 << 19)
    )
    overheads = [told(plan, runner, **options).overhead for plan in (small, large)]
    if handed:
        more = 4 * (3 * ((1 << 19) - (1 << 18))) / forecast.HANDED_RATE
        assert overheads[1] - overheads[0] == pytest.approx(more)
    else:  # those of 1 MiB are elements
        fixed = KNOWN.fixed(runner)
        assert overheads[1] == pytest.approx(fixed.pipeline + fixed.step + 2 * fixed.shard)
        assert overheads[0] - overheads[1] == pytest.approx(2 * (4 << 18) / forecast.HANDED_RATE)


def test_bundles_have_one_thread_where_xla_has_the_cores():
    step = StepTime("a", 1, compute=8.0, gain=1.2, shards=4, cores=1.5)
    assert step.in_bundles(2).gain == 1.0
    assert step.in_bundles(4).gain == 1.2
    assert StepTime("a", 1, compute=8.0, gain=1.8, shards=4).in_bundles(2).gain == 1.8
    assert StepTime("a", 1, compute=8e-3, gain=1.8, shards=8).in_bundles(2).gain == 1.0


def test_names_of_what_is_told():
    found = told(plan_of(mean, X), "DirectRunner")
    names = found.by_name()
    assert set(names) == {"map_clients_0", "(runner)", "(total)"}
    assert names["(total)"] == found.seconds == pytest.approx(found.work + found.overhead)
    assert found.compile > 0


# --- what runs teach


def progress_of(seconds, **busy):
    tally = Tally(members=N, shards=2, **busy)
    return Progress(done=tally, seconds=seconds, steps={"map_clients_0": tally})


def test_a_run_is_remembered_for_its_program(cache):
    plan = plan_of(mean, X)
    learn(plan, Options(), lambda: told(plan), progress_of(10.0, read=1.0, compute=8.0, merge=0.5))
    (step,) = told(plan).steps
    assert (step.read, step.compute, step.merge) == (1.0, 8.0, 0.5)
    assert step.source == "earlier runs"
    twice = plan_of(mean, np.concatenate([X, X]), shard_size=plan.shard_sizes["clients"])
    assert told(twice).steps[0].compute == pytest.approx(16.0)


def test_a_run_mends_what_is_told_of_others(cache):
    many = jax.ShapeDtypeStruct((10**7, 8), np.float32)
    plan = plan_of(mean, many, probe=False)
    for _ in range(20):
        before = forecast.forecast(plan, Options(), "DirectRunner")
        assert before.steps[0].source == "counted"
        learn(
            plan,
            Options(),
            lambda before=before: before,
            progress_of(12.0, read=0.1, compute=8.0, merge=0.1),
        )
        for file in cache.glob("measured-*"):
            file.unlink()

    @bj.program(clients=None)
    def like(x):
        return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ v) * v * 2, x))

    found = forecast.forecast(plan_of(like, many, probe=False), Options(), "DirectRunner")
    assert found.steps[0].source == "counted"
    assert 7.0 < found.steps[0].compute < 12.0
    assert found.overhead == pytest.approx(12.0 - 8.2, rel=0.1)


@pytest.mark.parametrize(
    ("members", "seconds", "compute", "learns"),
    [(10**7, 3.0, 2.0, False), (10**7, 5.0, 2.0, True), (N, 1.5, 0.1, True)],
)
def test_runs_teach_what_a_runner_takes_where_that_is_clear(
    cache, members, seconds, compute, learns
):
    types = jax.ShapeDtypeStruct((members, 8), np.float32)
    plan = plan_of(mean, types, probe=False)
    before = forecast.forecast(plan, Options(), "DirectRunner")
    learn(plan, Options(), lambda: before, progress_of(seconds, compute=compute))
    assert ("DirectRunner" in calibration.calibration().factors) == learns


def test_short_runs_teach_nothing(cache):
    plan = plan_of(mean, X)
    learn(plan, Options(), lambda: told(plan), progress_of(0.2, compute=0.1))
    assert list(cache.iterdir()) == []


def test_nothing_is_learnt_where_nothing_is_remembered():
    plan = plan_of(mean, X)
    before = calibration.calibration()
    learn(plan, Options(), lambda: told(plan), progress_of(10.0, compute=8.0))
    assert calibration.calibration() == before


@pytest.mark.parametrize("record", [{}, {"steps": 3}, {"steps": {"a": {"members": "x"}}}])
def test_records_of_something_else_are_told(cache, record):
    plan = plan_of(mean, X)
    plan_cache.store(forecast._key(plan, Options()), record)
    with pytest.warns(RuntimeWarning, match="will be written anew"):
        assert told(plan).steps[0].source == "counted"


def test_what_is_told_is_beside_what_was_measured():
    found = bj.launch(mean, X, runner="local")
    found.result()
    progress = found.progress()
    assert set(progress.predicted) == {"map_clients_0", "(runner)", "(total)"}
    assert set(progress.factors) == set(progress.predicted)
    assert progress.measured["(total)"] == pytest.approx(progress.seconds - progress.done.compile)
    assert progress.steps["map_clients_0"].members == N
    again = Progress.from_json(progress.to_json(), "here")
    assert again == progress
    for name, factor in progress.factors.items():
        assert factor == progress.measured[name] / progress.predicted[name]


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_rounds_and_workers_are_told_by_the_steps_of_the_plan(runner):
    def loop(w, x):
        return rounds(3, w, x)

    job = bj.launch(loop, np.zeros(8, np.float32), X, runner=runner)
    job.result()
    progress = job.progress()
    assert progress.steps["map_clients_0"].members == 3 * N
    assert sum(tally.members for tally in progress.steps.values()) == progress.done.members
    assert sum(tally.compute for tally in progress.steps.values()) == pytest.approx(
        progress.done.compute
    )


# --- small work


def test_small_work_is_told_of():
    plan = plan_of(mean, X)
    direct, flink = (told(plan, runner) for runner in ("DirectRunner", "FlinkRunner"))
    assert small_work(plan, Options(), direct).is_small
    assert small_work(plan, Options(), direct).advice == ""  # it is not worth a line
    assert "FlinkRunner takes about 3.2 s for a pipeline besides the work" in (
        small_work(plan, Options(), flink).advice
    )
    assert not small_work(plan, Options(), told(plan)).is_small


def test_large_work_is_not_small():
    x = jax.ShapeDtypeStruct((10**8, 8), np.float32)
    plan = plan_of(mean, x, probe=False)
    assert not small_work(plan, Options(), told(plan, "DirectRunner")).is_small


def test_small_work_stays_here_if_it_may():
    for options, runner in (({"small_work": "here"}, "local"), ({}, "DirectRunner")):
        job = bj.launch(mean, X, options=options)
        job.result()
        assert job.runner == runner


def test_steps_without_parts_take_no_time():
    assert StepTime("a", 1).seconds == 0
