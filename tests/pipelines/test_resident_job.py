"""The job of resident workers: when it is started again."""

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from beamjax.errors import WorkerError
from beamjax.pipelines.resident import job, mailbox


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    found = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: found.now, sleep=lambda _: None)
    monkeypatch.setattr(job, "time", times)
    return found


def test_a_job_whose_workers_stay_away_is_started_again(clock, monkeypatch, tmp_path):
    started = []

    def run(self, attempt):
        started.append(attempt)
        while attempt.abort is None and not self._mailbox.stopped.is_set():
            self._mailbox.stopped.wait(0.01)

    monkeypatch.setattr(job.ResidentJob, "_run", run)
    connection = SimpleNamespace(runner=object(), shared=True)
    with job.resident_job(connection, str(tmp_path)) as found:
        found.start()

        def starts_after(seconds):
            clock.now += seconds
            found.check(True)
            return found._starts

        found.check(False)
        assert starts_after(0) == 1
        assert starts_after(job.ALONE_SECONDS - 1) == 1
        found.check(False)  # a worker has joined
        assert starts_after(job.ALONE_SECONDS - 1) == 1
        assert starts_after(job.ALONE_SECONDS + 1) == 2
        assert "all its workers died" in str(started[0].abort)
        assert starts_after(0) == 2
        assert starts_after(2 * job.ALONE_SECONDS - 1) == 2
        assert starts_after(2) == 3
        found.check(False)
        found._starts = 1  # a pass is done
        for starts in range(2, job.MAX_STARTS + 1):
            starts_after(0)
            assert starts_after(1000) == starts
        starts_after(0)
        with pytest.raises(WorkerError, match="ended 4 times"):
            starts_after(1000)


def test_runners_that_keep_dead_workers_are_not_waited_for(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(job, "KEEP_WORKERS", (object,))
    monkeypatch.setattr(job.ResidentJob, "_run", lambda self, attempt: self._mailbox.stopped.wait())
    with job.resident_job(SimpleNamespace(runner=object(), shared=True), str(tmp_path)) as found:
        found.start()
        found.check(False)
        found.check(True)
        assert found._starts == 2
        found.check(True)  # the workers of this start take a while
        assert found._starts == 2


LAUNCHER = """
import sys, time
from beamjax.pipelines.resident.mailbox import FileMailbox
mailbox = FileMailbox(sys.argv[1], b"secret")
print("ready", flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(mailbox, "LAUNCHER_SECONDS", 0.1)
    command = [sys.executable, "-c", LAUNCHER, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert launcher.stdout.readline() == b"ready\n"
        end = mailbox.FileWorker(str(tmp_path), b"secret")
        worker = threading.Thread(target=lambda: list(end.tasks()), daemon=True)
        worker.start()
        time.sleep(1)
        assert worker.is_alive()
    finally:
        launcher.kill()
        launcher.communicate()
    worker.join(60)
    assert not worker.is_alive()
