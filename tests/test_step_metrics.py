"""Metrics of Beam, as a runner gives them."""

import apache_beam as beam
import numpy as np
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.portability.fn_api_runner import FnApiRunner

import beamjax as bj
from beamjax.progress import SECONDS

N = 20
X = np.ones((N, 3), np.float32)


@bj.program(clients=N)
def two_passes(x):
    mean = bj.reduce_mean(x)
    return bj.reduce_sum(bj.map_fn(lambda v: v * mean, x))


def test_a_pipeline_has_metrics_by_the_names_of_its_steps():
    pipeline = beam.Pipeline(FnApiRunner(), beam.options.pipeline_options.PipelineOptions([]))
    pipeline | bj.transform(two_passes, X, options={"shard_size": 8})
    result = pipeline.run()
    found = result.metrics().query(MetricsFilter().with_namespace("beamjax"))
    counters = {each.key.metric.name: each.committed for each in found["counters"]}
    steps = ("map_clients_0", "map_clients_1")
    expected = {"members": N, "shards": 3, "bytes_read": X.nbytes}
    assert counters == {f"{step}/{n}": expected[n] for step in steps for n in expected}
    times = {each.key.metric.name: each.committed for each in found["distributions"]}
    assert set(times) == {f"{step}/{name}_ms" for step in steps for name in SECONDS}
    assert all(time.count == 1 and time.sum >= 0 for time in times.values())
