"""What beamjax asks of Flink's REST API, answered by a server of the test as Flink 1.16 does."""

import http.server
import json
import threading
import time
from types import SimpleNamespace

import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.flink_runner import FlinkRunner

from beamjax.errors import OptionsError, WorkerError
from beamjax.options import parse_options
from beamjax.pipelines import launch
from beamjax.pipelines.clusters import flink_server, processes
from beamjax.pipelines.clusters.flink_rest import FlinkRest
from beamjax.pipelines.clusters.flink_server import check
from beamjax.pipelines.runners import flink_job
from beamjax.pipelines.runners.connect import connect
from beamjax.pipelines.runners.flink_job import FlinkJob, reason_of
from beamjax.pipelines.worker.worker_errors import PipelineError

REFUSED = """io.grpc.StatusRuntimeException: UNAVAILABLE: io exception
Caused by: io.netty.channel.AbstractChannel$AnnotatedConnectException: finishConnect(..) failed: \
Connection refused: localhost/127.0.0.1:50001
"""


@pytest.fixture
def cluster():
    """A job manager, whose answers the test may change."""
    found = SimpleNamespace(
        answers={
            "/config": {"flink-version": "1.16.0"},
            "/overview": {"slots-total": 2, "slots-available": 2, "taskmanagers": 2},
            "/jobmanager/config": [
                {"key": "classloader.resolve-order", "value": "parent-first"},
                {"key": "restart-strategy", "value": "fixed-delay"},
            ],
            "/jobs/overview": {"jobs": []},
        },
        cancelled=[],
        ends=True,
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(found.answers.get(self.path))

        def do_PATCH(self):
            job = self.path.split("/")[2].partition("?")[0]
            found.cancelled.append(job)
            for one in found.answers["/jobs/overview"]["jobs"]:
                if one["jid"] == job:
                    one["state"] = "CANCELED" if found.ends else "CANCELLING"
            self.answer({})

        def answer(self, value):
            data = json.dumps(value).encode()
            self.send_response(404 if value is None else 200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found.master = f"127.0.0.1:{server.server_port}"
        found.rest = FlinkRest(f"http://{found.master}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def job(number, name="mine", state="RUNNING"):
    return {"jid": f"job-{number}", "name": name, "state": state}


def test_a_cluster_that_fits(cluster):
    assert check(cluster.rest, "1.16", 2, owns_strategy=False) == []


@pytest.mark.parametrize(
    ("path", "answer", "message"),
    [
        ("/config", {"flink-version": "1.20.3"}, r"is Flink 1\.20\.3, .* flink_version='1\.20'"),
        ("/config", None, "does not answer as Flink .*404"),
        ("/jobmanager/config", [], "has classloader.resolve-order child-first, expected parent-f"),
        ("/overview", {"slots-total": 0, "slots-available": 0, "taskmanagers": 0},
         "has 0 slots on 0 task managers, expected at least 2"),
    ],
)  # fmt: skip
def test_a_cluster_that_does_not_fit(path, answer, message, cluster):
    cluster.answers[path] = answer
    with pytest.raises(OptionsError, match=message):
        check(cluster.rest, "1.16", 2, owns_strategy=True)


def test_no_cluster():
    with pytest.raises(OptionsError, match=r"flink_master: http://127.0.0.1:1 does not answer as"):
        check(FlinkRest("http://127.0.0.1:1"), None, None, owns_strategy=True)


def test_what_may_be_a_mistake(cluster):
    cluster.answers["/jobmanager/config"].pop()
    cluster.answers["/overview"]["slots-available"] = 1
    cluster.answers["/jobs/overview"]["jobs"] = [job(1, "other"), job(2, "gone", "FINISHED")]
    slots, strategy = check(cluster.rest, None, 2, owns_strategy=False)
    assert "has 1 free slots of 2, and this run needs 2: it waits for other (job-1)" in slots
    assert "no restart-strategy" in strategy


def test_defaults_for_a_cluster(cluster, monkeypatch, caplog):
    monkeypatch.setattr(flink_server.guard, "watched", lambda address, pid: "a-name")
    options = PipelineOptions([f"--flink_master={cluster.master}", "--job_endpoint=host:1"])
    found = flink_server.connected(options).get_all_options(drop_default=True)
    assert found == {
        "flink_master": cluster.master, "job_endpoint": "host:1", "job_name": "a-name",
        "parallelism": 2, "execution_mode_for_batch": "BATCH_FORCED",
        "environment_type": "EXTERNAL", "environment_config": "localhost:50001",
    }  # fmt: skip
    assert not caplog.records
    given = ["--environment_type=EXTERNAL", "--environment_config=127.0.0.2:1", "--parallelism=1"]
    options = PipelineOptions([*given, f"--flink_master={cluster.master}", "--job_endpoint=host:1"])
    assert flink_server.connected(options).get_all_options()["parallelism"] == 1
    (record,) = caplog.records
    assert "no pool of workers answers at 127.0.0.2:1" in record.getMessage()


def test_the_jobs_of_a_pipeline_are_cancelled(cluster, monkeypatch, caplog):
    monkeypatch.setattr(flink_job, "_SECONDS_BETWEEN_LOOKS", 0.01)
    jobs = [job(1), job(2, "other"), job(3), job(4, state="FAILED")]
    cluster.answers["/jobs/overview"]["jobs"] = jobs
    options = PipelineOptions(["--job_name=mine", f"--flink_master={cluster.master}"])
    FlinkJob(options).cancel()
    assert cluster.cancelled == ["job-1", "job-3"]
    assert not caplog.records
    cluster.ends = False
    monkeypatch.setattr(flink_job, "_SECONDS_TO_GO", 0.0)
    jobs.append(job(5))
    FlinkJob(options).cancel()
    assert [record.getMessage() for record in caplog.records] == [
        f"the job job-5 at http://{cluster.master} still runs; cancel it in Flink's dashboard"
    ]


def test_an_end_that_can_not_be_checked_is_a_warning(monkeypatch, caplog):
    options = PipelineOptions(["--job_name=mine", "--job_endpoint=host:8099"])
    FlinkJob(options).cancel()
    monkeypatch.setattr(flink_job.job_servers, "is_own", lambda endpoint: endpoint == "host:8099")
    FlinkJob(options).cancel()  # it ends with this process
    (record,) = caplog.records
    assert "the job mine was cancelled at host:8099, whose Flink may go on" in record.getMessage()


def test_a_job_that_arrives_after_its_cancellation_is_cancelled(cluster, monkeypatch):
    """A job server goes on to submit a pipeline after its launcher was interrupted."""
    monkeypatch.setattr(flink_job, "_SECONDS_BETWEEN_LOOKS", 0.01)
    cluster.answers["/jobs/overview"]["jobs"] = jobs = [job(2, "other")]
    late = threading.Timer(0.2, lambda: jobs.append(job(1)))
    late.start()
    options = PipelineOptions(["--job_name=mine", f"--flink_master={cluster.master}"])
    FlinkJob(options).cancel()
    late.join()
    assert cluster.cancelled == ["job-1"]


def test_each_pipeline_has_a_name_of_its_own(cluster):
    """So that the job that replaces another one is not cancelled with it."""
    flags = [f"--flink_master={cluster.master}"]
    names = []
    for given in ("beamjax-7-abc", "beamjax-7-abc", "of the user"):
        options = PipelineOptions([*flags, f"--job_name={given}"])
        flink_job.rename(options)
        names.append(options.get_all_options()["job_name"])
    assert names[0].startswith("beamjax-7-abc-")
    assert names[0] != names[1]
    assert names[2] == "of the user"


def test_a_job_goes_on_without_its_job_server(cluster, monkeypatch):
    """Also if Flink has older jobs of the same name."""
    asked = []

    def sleep(seconds):
        asked.append(seconds)
        if len(asked) == 3:
            jobs[1]["state"] = ends_as

    class Gone:
        def wait_until_finish(self):
            raise RuntimeError("StatusCode.UNAVAILABLE")

        def cancel(self):
            pass

    # Not of all threads: other tests may have left some that wait.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(flink_job, "time", clock)
    flags = ["--job_name=mine", f"--flink_master={cluster.master}"]
    options = PipelineOptions(flags)
    pipeline = SimpleNamespace(runner=FlinkRunner(), options=options, run=Gone)
    for ends_as in ("FINISHED", "FAILED"):
        asked.clear()
        jobs = [job(1, state="FAILED"), job(2)]
        for number, one in enumerate(jobs):
            one["start-time"] = number
        cluster.answers["/jobs/overview"]["jobs"] = jobs
        cluster.answers["/jobs/job-2/exceptions"] = {"root-exception": "out of memory"}
        if ends_as == "FINISHED":
            launch.run_pipeline(pipeline)
        else:
            with pytest.raises(PipelineError, match="mine of Flink ended as FAILED: out of memo"):
                launch.run_pipeline(pipeline)
        assert len(asked) == 3
    jobs[1]["state"] = "FAILED"
    with pytest.raises(PipelineError, match="UNAVAILABLE"):
        launch.run_pipeline(pipeline)


def test_why_a_job_does_not_get_on(cluster, monkeypatch):
    assert reason_of([], "localhost:50001", 1) is None
    assert reason_of([(1, "java.lang.RuntimeException: x")], "localhost:50001", 1) is None
    assert reason_of([(1, REFUSED)], "localhost:7", 1) is None
    assert reason_of([(1, REFUSED)], "localhost:50001", 2) is None  # it was just restarted
    no_slots = [(1, "x.NoResourceAvailableException: y")]
    assert "Flink has no slots" in reason_of(no_slots, "localhost:1", 2)
    found = reason_of([(1, REFUSED), (2, REFUSED)], "localhost:50001", 2)
    assert found.startswith("a task manager can't reach its pool of workers at localhost:50001 (Co")
    now = time.monotonic()
    monkeypatch.setattr(flink_job.time, "monotonic", lambda: now)
    flags = ["--job_name=mine", f"--flink_master={cluster.master}"]
    options = PipelineOptions([*flags, "--environment_config=localhost:50001"])
    look = FlinkJob(options).look(2)
    cluster.answers["/jobs/overview"]["jobs"] = [job(1)]
    entries = [{"timestamp": 1, "stacktrace": REFUSED}]
    cluster.answers["/jobs/job-1/exceptions"] = {"exceptionHistory": {"entries": entries}}
    seen = []
    for _ in range(10):
        now += 2
        seen.append(look() is not None)
        if len(seen) == 6:
            entries.append({"timestamp": 2, "stacktrace": REFUSED})
    assert seen == [False] * 7 + [True, False, True]  # Flink is asked every 4 s


def test_a_job_manager_that_is_gone_is_named(monkeypatch):
    master = f"127.0.0.1:{processes.free_ports(1)[0]}"
    flags = PipelineOptions(["--job_name=mine", f"--flink_master={master}"])
    names = (
        rf"flink_master: the job manager at http://{master} does not answer any more \(.*refused"
    )

    class Failing:
        def wait_until_finish(self):
            raise RuntimeError("RestClientException")

        def cancel(self):
            pass

    with pytest.raises(WorkerError, match=names):  # when the job server gives up
        launch.run_pipeline(SimpleNamespace(runner=FlinkRunner(), options=flags, run=Failing))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(flink_job, "time", SimpleNamespace(monotonic=lambda: clock.now))
    look = FlinkJob(flags).look()
    for clock.now in range(20):  # it may be restarted
        assert look() is None
    clock.now = 24.0
    with pytest.raises(WorkerError, match=names):
        raise look()


def test_versions_of_job_servers_are_those_of_beam(cluster):
    for flags in (["--flink_version=1.20"], ["--flink_version=2.2"], ["--flink_job_server_jar=x"]):
        options = PipelineOptions(flags)
        assert flink_server.connected(options) is options


def test_a_job_server_on_another_host_needs_a_folder():
    for flag in ("--job_endpoint=192.0.2.1:8099", "--flink_master=192.0.2.1:8081"):
        with pytest.raises(OptionsError, match=r"work_folder: found none, but \w+='192.0.2.1:"):
            connect("FlinkRunner", parse_options([flag]))
