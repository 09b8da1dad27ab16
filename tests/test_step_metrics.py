"""Metrics of Beam, as a runner gives them."""

import collections
import time

import apache_beam as beam
import jax.numpy as jnp
import numpy as np
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import beamjax as bj
from beamjax.exact_sum import ExactSum
from beamjax.job_folder import JobFolder
from beamjax.meters import COUNTED, Reports, recorder_for
from beamjax.pipelines import combiners, workers
from beamjax.progress import SECONDS, Tally, tally
from beamjax.reducers import make_accumulator

N = 20
X = np.ones((N, 3), np.float32)


@bj.program(clients=N)
def two_passes(x):
    mean = bj.reduce_mean(x)
    return bj.reduce_sum(bj.map_fn(lambda v: v * mean, x))


@bj.program(clients=N)
def served(x):
    return jnp.sqrt(bj.reduce_sum(x)) + bj.reduce(lambda a, b: a * b, x)


def metrics(program):
    """What Beam counted in a pipeline of its own, and its times, each as a list of results."""
    pipeline = beam.Pipeline(FnApiRunner(), beam.options.pipeline_options.PipelineOptions([]))
    pipeline | bj.transform(program, X, options={"shard_size": 8})
    result = pipeline.run()
    found = result.metrics().query(MetricsFilter().with_namespace("beamjax"))
    counters = {each.key.metric.name: each.committed for each in found["counters"]}
    times = collections.defaultdict(list)
    for each in found["distributions"]:
        times[each.key.metric.name].append(each.committed)
    return counters, times


def test_a_pipeline_has_metrics_by_the_names_of_its_steps():
    counters, times = metrics(two_passes)
    steps = ("map_clients_0", "map_clients_1")
    expected = {"members": N, "shards": 3, "bytes_read": X.nbytes, "bytes_padding": 0}
    expected |= {"bytes_reduced": 3 * 12, "bytes_saved": 0}
    own = {name for step in steps for name in (f"{step}/{kind}" for kind in COUNTED[1:])}
    made = {name: counters.pop(name) for name in list(counters) if name in own}
    assert set(made) == own
    assert counters == {f"{step}/{n}": expected[n] for step in steps for n in expected}
    assert set(times) == {f"{step}/{name}_ms" for step in steps for name in SECONDS}
    assert all(t.count == 1 and t.sum >= 0 for found in times.values() for t in found)
    # Of the shards; and of the merged partials, where these are finished.
    assert [len(times[f"{step}/read_ms"]) for step in steps] == [1, 1]
    assert [len(times[f"{step}/merge_ms"]) for step in steps] == [2, 2]


def test_steps_without_shards_have_times_too(monkeypatch):
    def slowly(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: [time.sleep(0.1), real(*args)][1])

    slowly(workers, "run_server")
    slowly(combiners, "finish_lane")
    slowly(combiners, "finish_tree")
    _, times = metrics(served)
    (server,) = [name for name in times if name.startswith("server_") and "compute" in name]
    assert sum(t.sum for t in times[server]) >= 100
    assert sum(t.sum for t in times["map_clients_0/merge_ms"]) >= 200


def test_merges_are_timed_where_they_happen(tmp_path, monkeypatch):
    folder = JobFolder(str(tmp_path))
    folder.begin({"name": "f", "runner": "r"})
    parts = []
    for shard in (0, 1, 2):
        accumulator = make_accumulator("sum", np.dtype("float32"), 4)
        accumulator.add(np.ones(4, np.float32), shard)
        parts.append(accumulator.encode())
    real = ExactSum.merge
    monkeypatch.setattr(ExactSum, "merge", lambda *args: [time.sleep(0.05), real(*args)][1])
    reports = Reports(folder.path, "p")
    combine = combiners.MergeAccumulators("map_clients_0", reports)
    merged = combine.merge_accumulators([combine.add_input(None, part) for part in parts])
    assert combine.times.spent.merge >= 0.1
    combine.extract_output(merged)
    assert combine.times.spent == Tally()
    recorder_for(reports).flush()
    (record,) = folder.workers("p")
    assert 0.1 <= record.counts["map_clients_0"].spent.merge < 1
    assert tally([record]).members == tally([record]).shards == 0
