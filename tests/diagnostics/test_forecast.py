"""How long a plan is predicted to take."""

import json
import math
import os
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of

import beamjax as bj
from beamjax.bodies import transfer_time
from beamjax.bodies.counts import counts
from beamjax.bodies.transfer_time import from_device, to_device, transferring
from beamjax.commands.measure import calibrated, measure
from beamjax.diagnostics import calibration, forecast
from beamjax.diagnostics.calibration import Calibration, remember
from beamjax.diagnostics.fact_types import StepSeconds
from beamjax.diagnostics.forecast import Gain, in_bundles, prediction, speed_up
from beamjax.options import Options, parse_options
from beamjax.options.choices import Vectorization
from beamjax.pipelines.values import store
from beamjax.plan.cost import ELSEWHERE, RUNNERS, Cost, Rates, runner_overhead
from beamjax.telemetry.meters import Meter

N = 1000
X = np.random.default_rng(0).normal(size=(N, 8)).astype(np.float32)
W = np.zeros(8, np.float32)
KNOWN = Calibration(Rates(1e9, 1e9, 1e-6, 1e-4, 5e9), read=1e9, merge=1e8, measured=True)


@bj.program(clients=None)
def mean(x):
    return bj.reduce_mean(bj.map_fn(lambda v: jnp.tanh(v @ v) * v, x))


def rounds(w, x):
    return jax.lax.scan(lambda w, _: (w + mean(x), None), w, length=6)[0]


def predicted(plan, runner="local", known=KNOWN, **options):
    return forecast.forecast(plan, parse_options(options), runner, known)


def work(found):
    return sum(step.seconds for step in found.steps)


@pytest.fixture
def cores(monkeypatch):
    return lambda count: monkeypatch.setattr(os, "cpu_count", lambda: count)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BEAMJAX_PLANNER_CACHE", str(tmp_path))
    return tmp_path


# --- the seconds of a plan

FAST = 1e30


@pytest.mark.parametrize(("loop", "starts"), [("vmap", 125), ("batches", None), ("loop", 1000)])
def test_each_rate_is_charged_for_what_it_is_about(loop, starts):
    batches = {"shard_size": 16, "member_batch": 8} if loop == "batches" else {"shard_size": 8}
    plan = plan_of(mean, X, member_loop=loop, **batches)
    cost = plan.costs["map_clients_0"]
    shards = len(plan.shards("clients"))

    def seconds(read=FAST, merge=FAST, **slow):
        rates = {"flops": FAST, "nbytes": FAST, "extra": FAST, "call": 0.0, "shard": 0.0} | slow
        return work(
            predicted(plan, known=Calibration(Rates(**rates), read, merge), local_threads=1)
        )

    padded = batches["shard_size"] * shards
    assert seconds(read=2.0) == pytest.approx(X.nbytes / 2)
    assert seconds(merge=2.0) == pytest.approx(shards * 8 * 8 / 2)
    assert seconds(shard=2.0) == pytest.approx(shards * 2)
    assert seconds(flops=2.0) == pytest.approx(padded * cost.flops / 2)
    assert seconds(extra=2.0) == pytest.approx(padded * cost.extra / 2)
    assert seconds(nbytes=2.0) == pytest.approx(padded * cost.nbytes / 2)
    starts = starts or padded / 8
    assert seconds(call=2.0) == pytest.approx(starts * cost.calls * 2)


def test_rounds_branches_and_gathers_are_counted():
    once, many = predicted(plan_of(mean, X)), predicted(plan_of(rounds, W, X))
    assert 0.05 < once.compile < 1.0
    step = {step.step: step for step in many.steps}["map_clients_0"]
    assert (step.rounds, many.guessed) == (6, False)
    assert step.read == pytest.approx(6 * once.steps[0].read)
    assert step.compute == pytest.approx(6 * once.steps[0].compute, rel=0.3)

    def until(w, x):
        return jax.lax.while_loop(lambda w: jnp.sum(w) < 9, lambda w: w + mean(x) + 1, w)

    guessed = predicted(plan_of(until, W, X), "DirectRunner")
    assert guessed.guessed
    assert {step.rounds for step in guessed.steps if step.compute} == {forecast.GUESSED_ROUNDS}
    assert guessed.pipelines == 1

    def branch(p, x):
        return jax.lax.cond(p, lambda x: mean(x), lambda x: jnp.zeros(8), x)

    found = predicted(plan_of(branch, np.bool_(True), X))
    assert [step.step for step in found.steps if step.read] == ["map_clients_0"]

    @bj.program(clients=None)
    def median(x):
        return jnp.sort(bj.map_fn(jnp.sin, x), axis=0)[3]

    steps = {step.step: step for step in predicted(plan_of(median, X)).steps}
    assert steps["gather_0"].read == pytest.approx(X.nbytes / 1e9)
    assert steps["server_0"].compute > 0


def test_pipelines_steps_and_shards_of_beam_are_charged():
    plan = plan_of(rounds, W, X)
    assert predicted(plan).pipelines == 0
    served = predicted(plan, "DirectRunner")
    fixed = runner_overhead("DirectRunner")
    once = predicted(plan_of(mean, X), "DirectRunner")
    assert (served.pipelines, once.pipelines) == (1, 1)
    assert served.overhead < 2 * once.overhead
    few, many = (predicted(plan_of(mean, X, shard_size=s), "DirectRunner") for s in (504, 8))
    more = 123 * (fixed.shard + 8 * 4 / forecast.HANDED_RATE)
    assert many.overhead - few.overhead == pytest.approx(more)
    assert predicted(plan_of(mean, X, shard_size=8)).overhead == runner_overhead("local").step
    names = once.by_name()
    assert set(names) == {"map_clients_0", "(runner)", "(total)"}
    assert names["(total)"] == once.seconds == pytest.approx(work(once) + names["(runner)"])


def test_runners_take_something_for_themselves():
    pipeline = {name: runner_overhead(name).pipeline for name in RUNNERS}
    local, direct, prism, flink, spark, dataflow = pipeline.values()
    assert local == 0 < direct < 0.1 < prism < 1 < flink < spark < 10 < 60 < dataflow < 600
    assert runner_overhead("FnApiRunner") == runner_overhead("DirectRunner")
    assert runner_overhead("SomeRunner") == ELSEWHERE


@bj.program(clients=None)
def wide(w, x):
    return bj.reduce_mean(bj.map_fn(lambda w, v: w + v[0], (bj.broadcast(w), x)))


def test_large_values_are_handed_over_as_they_are_within_a_process():
    sizes = 1 << 18, 1 << 19  # Floats: partials of 1 MiB are elements of Beam, larger ones are not.
    plans = [plan_of(wide, np.zeros(n, np.float32), X[:16], shard_size=8) for n in sizes]
    rows = [
        ("DirectRunner", {}, False),
        ("DirectRunner", {"direct_num_workers": 2}, False),
        ("DirectRunner", {"keep_folder": "always"}, True),
        ("DirectRunner", {"checkpoint": "somewhere"}, True),
        ("DirectRunner", {"direct_running_mode": "multi_processing"}, True),
        ("PrismRunner", {}, True),
    ]
    for runner, options, handed in rows:
        small, large = (predicted(plan, runner, **options).overhead for plan in plans)
        moved = 4 * 3 * (sizes[1] - sizes[0]) if handed else -4 * 2 * sizes[0]
        assert large - small == pytest.approx(moved / forecast.HANDED_RATE), (runner, options)


def test_workers_and_threads_share_the_work(cores):
    cores(8)
    plan = plan_of(mean, X, shard_size=8)
    (one,), (four,) = (predicted(plan, local_threads=k).steps for k in (1, 4))
    assert one.seconds == one.busy == four.busy
    at_once = 125 / 32  # The last threads have nothing to do at the end.
    assert four.gain == pytest.approx(1 + 0.8 * (at_once - 1))
    assert four.seconds == pytest.approx(one.read + one.compute / four.gain + one.merge)
    assert predicted(plan, "DirectRunner").steps[0].seconds == one.seconds
    assert predicted(plan_of(mean, X, shard_size=1000), local_threads=4).steps[0].gain == 1
    options = {"direct_num_workers": 2, "direct_running_mode": "multi_processing"}
    shared = predicted(plan, "DirectRunner", **options)
    assert work(shared) == pytest.approx(work(predicted(plan, "DirectRunner")) / 2)
    cores(1)
    assert work(predicted(plan, "DirectRunner", **options)) == work(predicted(plan, "DirectRunner"))


def test_gains():
    loop, vmap = Vectorization("loop"), Vectorization("vmap")
    small = Cost(flops=1e4, calls=10.0)
    large = Cost(flops=5e8, calls=10.0, extra=5e8, shared=5e8)
    over_members = Cost(flops=2e3, calls=1.0, shared=2e3)
    rows = [  # cost, loop, members and number of shards, threads, cores: alone, threads, busy
        (None, loop, 8, 4, 2, 2, (1, 1, 1)),
        (small, loop, 8, 4, 1, 2, (1, 1, 1)),
        (small, loop, 8, 4, 2, 2, (1, 1.8, 1)),
        (small, loop, 8, 3, 2, 2, (1, 1.4, 1)),  # 3 shards in 2 turns
        (small, loop, 8, 5, 4, 4, (1, 2.2, 1)),
        (small, loop, 8, 0, 2, 2, (1, 1, 1)),
        (small, vmap, 4096, 100, 2, 2, (1, 1, 2)),  # XLA divides large operations
        (small, vmap, 4096, 100, 16, 16, (1 / 6.5, 1, 16)),
        (small, vmap, 8, 100, 2, 2, (1, 1.8, 1)),
        (large, loop, 8, 4, 1, 1, (1, 1, 1)),
        (large, loop, 8, 4, 1, 2, (0.5 + 0.5 / 1.8, 1, 1 / (0.5 + 0.5 / 1.8))),
        (large, loop, 8, 4, 2, 2, (0.5 + 0.5 / 1.8, 1.4, 1 / (0.5 + 0.5 / 1.8))),
        (over_members, vmap, 4096, 100, 1, 2, (1 / 1.8, 1, 1.8)),
        (over_members, Vectorization("batches", 8), 4096, 100, 1, 2, (1, 1, 1)),
    ]
    faults = []
    for *args, expected in rows:
        found = speed_up(*args)
        if tuple(vars(found).values()) != pytest.approx(expected):
            faults.append((args, found, expected))
    assert faults == []
    assert speed_up(None, loop, 8, 4, 2, 2) == Gain()


def test_bundles_have_one_thread_where_xla_has_the_cores():
    gain = lambda threads, *args, **kwargs: in_bundles(StepSeconds(*args, **kwargs), threads).gain
    several = {"compute": 8.0, "gain": 1.2, "shards": 4, "cores": 1.5}
    assert (gain(2, "a", 1, **several), gain(4, "a", 1, **several)) == (1.0, 1.2)
    assert gain(2, "a", 1, compute=8.0, gain=1.8, shards=4) == 1.8
    for compute, expected in ((0.015, 1.0), (0.016, 1.8)):  # 2 ms a shard are worth a thread
        assert gain(2, "a", 2, compute=2 * compute, gain=1.8, shards=8) == expected
    assert StepSeconds("a", 1).seconds == 0


def test_explain_gives_the_seconds_of_a_runner():
    found, here = bj.explain(rounds, W, X), bj.explain(rounds, W, X, runner="local")
    predicted = found.facts.predicted
    assert predicted.runner == "DirectRunner"
    assert found.predicted_seconds > here.predicted_seconds > 0
    assert predicted.local == pytest.approx(here.predicted_seconds)
    assert json.loads(json.dumps(found.to_json()))["predicted"]["seconds"] == predicted.seconds
    for text in ("total on DirectRunner", "total on local", "rates of this machine"):
        assert text in str(found)
    assert "total on local" in str(here)
    unknown = bj.explain(mean, bj.from_chunks(lambda: [X]))
    assert unknown.predicted_seconds is None
    assert unknown.facts.placements[0].members is None
    assert "the number of members is unknown" in str(unknown)
    with pytest.raises(bj.OptionsError, match="predicted_seconds: found an explanation of stage"):
        _ = bj.explain(mean, X, stage="flat").predicted_seconds


def test_small_work_stays_here_if_it_may():
    plan = plan_of(mean, X)
    direct, flink = (
        prediction(plan, Options(), runner) for runner in ("DirectRunner", "FlinkRunner")
    )
    assert (direct.is_small, direct.advice) == (True, "")  # It is not worth a line.
    assert "FlinkRunner takes about 3.2 s" in flink.advice
    assert not prediction(plan, Options(), "local").is_small
    large = plan_of(mean, jax.ShapeDtypeStruct((10**8, 8), np.float32), probe=False)
    assert not prediction(large, Options(), "DirectRunner").is_small
    for options, runner in (({"small_work": "here"}, "local"), ({}, "DirectRunner")):
        job = bj.launch(mean, X, options=options)
        job.result()
        assert job.runner == runner


# --- predicted and measured


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_what_is_predicted_is_beside_what_was_measured(runner):
    job = bj.launch(rounds, W, X, runner=runner)
    job.result()
    progress = job.progress()
    assert {"map_clients_0", "(runner)", "(total)"} <= set(progress.predicted)
    assert set(progress.factors) <= set(progress.predicted)
    for name, factor in progress.factors.items():
        assert factor == progress.measured[name] / progress.predicted[name]
    assert progress.measured["(total)"] == pytest.approx(progress.seconds - progress.done.compile)


# --- the machine


def test_a_machine_is_measured_once(cache, monkeypatch):
    times = []
    fake = lambda: times.append(1) or KNOWN
    monkeypatch.setattr("beamjax.commands.measure.measure", fake)
    assert not calibration.calibration().measured
    found = calibrated()
    assert calibrated() == calibration.calibration() == found == KNOWN
    assert len(times) == 1
    monkeypatch.setenv("BEAMJAX_PLANNER_CACHE", "")
    assert calibrated() == found
    assert not calibration.calibration().measured  # It is in no file.
    found = measure()
    for rate in (*vars(found.rates).values(), found.read, found.merge):
        assert 0 < rate < math.inf
    assert found.rates.flops > 1e7


def test_files_of_something_else_or_of_another_format_are_ignored(cache):
    remember(Calibration(read=7.0))
    (path,) = cache.iterdir()
    good = json.loads(path.read_text())
    assert calibration.calibration() == Calibration(read=7.0)
    changes = [{"rates": None}, {"rates": {"flops": 0.0}}, {"read": -1.0}]
    changes += [{"read": 0}, {"read": True}, {"merge": "x"}, {"merge": math.inf}]
    for change in changes:
        path.write_text(json.dumps(good | change))
        with pytest.warns(RuntimeWarning, match="will write it anew"):
            assert calibration.calibration() == Calibration(), change


# --- what is counted apart


def test_transfers_within_transfers_and_within_laps():
    before, start = counts().transfer, time.perf_counter()
    with transferring():
        with transferring():
            time.sleep(0.02)
        assert counts().transfer == before
    with pytest.raises(KeyError), transferring():
        raise KeyError
    assert 0.02 <= counts().transfer - before <= time.perf_counter() - start
    meter = Meter("step")
    with transferring():
        time.sleep(0.05)
    meter.lap("compute")
    meter.apart()
    assert meter.total.transfer >= 0.05 > meter.total.compute


def test_a_cpu_gets_the_arrays_and_an_accelerator_copies(monkeypatch):
    cpu, gpu = jax.devices("cpu")[0], SimpleNamespace(platform="gpu")
    copied = [transfer_time.is_copied(device) for device in (None, cpu, gpu)]
    assert copied == [False, False, True]
    asked = []
    put = lambda values, device: asked.append(device) or list(map(jnp.asarray, values))
    monkeypatch.setattr(transfer_time.jax, "device_put", put)
    found = from_device(to_device([X, np.int32(3)], gpu))
    assert asked == [gpu]
    assert [(type(x), x.dtype) for x in found] == [(np.ndarray, "float32"), (np.ndarray, "int32")]


@pytest.mark.parametrize(("where", "name"), [(store, "_plain"), (store.Store, "_load")])
def test_values_in_the_store_are_transfers(where, name, monkeypatch):
    @bj.program(clients=20)
    def total(w, x):
        y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
        return bj.reduce_sum(y) + bj.reduce(lambda a, b: a * b, y)

    w, x = np.ones((3, 20_000), np.float32), np.ones((20, 3), np.float32)  # Too big for elements.
    bj.run(total, w, x, options={"shard_size": 8})
    real = getattr(where, name)
    monkeypatch.setattr(where, name, lambda *args: [time.sleep(0.3), real(*args)][1])
    with bj.launch(total, w * 2, x, options={"shard_size": 8}) as job:
        job.result()
        progress = job.progress()
        assert progress.done.transfer >= 0.3
        assert progress.shares["transfer"] > 0.1
        assert bj.open_job(job.folder).progress().done == progress.done
