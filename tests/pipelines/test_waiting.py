"""How the wait for a pipeline of another process ends."""

import threading

import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from beamjax._beam_compat import PipelineResult
from beamjax.errors import WorkerError
from beamjax.pipelines import launch as waiting


class Running(PipelineResult):
    """A pipeline, and its result, that runs until it is cancelled unless it has an end."""

    def __init__(self, end=None):
        self.end, self.cancelled, self.runner = end, threading.Event(), None

    def run(self):
        return self

    def wait_until_finish(self, duration=None):
        if self.end is None:
            self.cancelled.wait(20)
        elif self.end:
            raise self.end

    def cancel(self):
        self.cancelled.set()


def test_a_job_server_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(waiting, "_SECONDS_TO_LISTEN", 0.1)
    pipeline = Running(())
    pipeline.options = PipelineOptions(["--job_endpoint=127.0.0.1:1"])
    with pytest.raises(WorkerError, match=r"no job server takes connections at 127\.0\.0\.1:1"):
        waiting.run_pipeline(pipeline)
    pipeline.options = PipelineOptions(["--job_endpoint=embed"])
    waiting.run_pipeline(pipeline)


LOST = WorkerError("a worker is gone")


@pytest.mark.parametrize(
    ("end", "flags", "look", "raised"),
    [
        ((), [], lambda: None, None),
        ((), [], None, None),
        (ValueError("the runner says why"), [], lambda: LOST, (RuntimeError, "runner says why")),
        (None, [], lambda: LOST, (WorkerError, "a worker is gone")),
        (None, ["--pipeline_timeout=0.1"], lambda: None, (WorkerError, "took longer than 0.1 s")),
        (None, ["--pipeline_timeout=0.1"], None, (WorkerError, "took longer than 0.1 s")),
        (None, ["--flink_cluster=here"], None, (WorkerError, "here has ended")),
    ],
)
def test_a_pipeline_ends_fails_or_is_cancelled(end, flags, look, raised, monkeypatch):
    monkeypatch.setattr(waiting, "_LONGEST_PAUSE", 0.05)
    monkeypatch.setattr("beamjax.pipelines.clusters.flink_cluster.read", lambda folder: None)
    pipeline = Running(end)
    pipeline.options = PipelineOptions(flags)
    looks = [] if look is None else [look]
    if raised is None:
        waiting.run_pipeline(pipeline, looks)
    else:
        with pytest.raises(raised[0], match=raised[1]):
            waiting.run_pipeline(pipeline, looks)
    assert pipeline.cancelled.is_set() == (raised is not None)
