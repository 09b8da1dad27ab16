"""The job of resident workers: when it is started again."""

import errno
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import url_files  # noqa: F401 - makes bjtest:// known

from beamjax.errors import ArrayFormatError, JobCancelledError, SourceError, WorkerError
from beamjax.pipelines.resident import mailbox, pool, resident_job, task_messages
from beamjax.pipelines.runners import runner_table
from beamjax.pipelines.runners.flink import Flink
from beamjax.pipelines.runners.prism import Prism
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import orphans
from beamjax.telemetry import signs_of_life


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    found = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: found.now, sleep=lambda _: None)
    for module in (resident_job, pool):
        monkeypatch.setattr(module, "time", times)
    return found


@pytest.mark.parametrize("spec", [runner_table.OTHER, Flink()], ids=["usual", "Flink"])
def test_a_job_whose_workers_stay_away_is_started_again(clock, monkeypatch, tmp_path, spec):
    first = spec.seconds_alone
    started = []

    def run(self, attempt):
        started.append(attempt)
        while attempt.abort is None and not self._mailbox.stopped.is_set():
            self._mailbox.stopped.wait(0.01)

    monkeypatch.setattr(resident_job.ResidentJob, "_run", run)
    connection = SimpleNamespace(runner=object(), spec=spec, shared=True)
    with resident_job.resident_job(connection, Store(str(tmp_path))) as found:
        found.start()

        def starts_after(seconds):
            clock.now += seconds
            found.check(True)
            return found._starts

        found.check(False)
        assert starts_after(0) == 1
        assert starts_after(first - 1) == 1
        found.check(False)  # a worker has joined
        assert starts_after(first - 1) == 1
        assert starts_after(first + 1) == 2
        assert "all its workers died" in str(started[0].abort)
        assert starts_after(0) == 2
        assert starts_after(2 * resident_job.ALONE_SECONDS - 1) == 2
        assert starts_after(2) == 3
        found.check(False)
        found._starts = 1  # a pass is done
        for starts in range(2, resident_job.MAX_STARTS + 1):
            starts_after(0)
            assert starts_after(1000) == starts
        starts_after(0)
        with pytest.raises(WorkerError, match="ended 4 times"):
            starts_after(1000)


def test_runners_that_keep_dead_workers_are_not_waited_for(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(
        resident_job.ResidentJob, "_run", lambda self, attempt: self._mailbox.stopped.wait()
    )
    connection = SimpleNamespace(runner=object(), spec=Prism(), shared=True)
    with resident_job.resident_job(connection, Store(str(tmp_path))) as found:
        found.start()
        found.check(False)
        found.check(True)
        assert found._starts == 2
        found.check(True)  # the workers of this start take a while
        assert found._starts == 2


@pytest.mark.parametrize("others", [False, True])
def test_why_workers_can_not_join_is_an_error_or_with_others_one_warning(others, tmp_path, caplog):
    reason = WorkerError("can't reach its pool of workers at b:50000")
    job = SimpleNamespace(look=lambda attempts: lambda: reason)
    spec = SimpleNamespace(job=lambda flags: job, in_this_process=False)
    found = resident_job.ResidentJob(
        SimpleNamespace(runner=object(), spec=spec, shared=False), Store(str(tmp_path))
    )
    look = found._reason(SimpleNamespace(options=None))
    assert look() is None
    found._pool = SimpleNamespace(has_had_workers=others)
    assert [look(), look()] == ([None, None] if others else [reason, reason])
    assert [record.message for record in caplog.records] == others * [
        "can't reach its pool of workers at b:50000; the other workers compute its share"
    ]


PASS = task_messages.Pass("p")


class Workers:
    """A mailbox of workers, of which those named in `silent` do not reply in a pass."""

    def __init__(self, clock, silent):
        self.clock, self.silent, self.sent, self.flights = clock, silent, [], {}
        self.peers = self.new = [SimpleNamespace(name=name, is_dead=False) for name in "ab"]

    def joined(self):
        new, self.new = self.new, []
        return new

    def publish(self, program):
        pass

    def send(self, peer, task):
        assert len(self.sent) < 20
        self.sent.append((peer.name, task.current.number, task.number))
        self.flights[peer.name] = task

    def reply(self, peer):
        task = self.flights[peer.name]
        if (peer.name, task.current.number) not in self.silent:
            return mailbox.Reply(task.current.number, task.number, task.elements, 0.1)

    def wait(self, since):
        self.clock.now += 0.3


def test_a_task_of_a_dead_worker_goes_to_another_one_at_once(clock):
    """But not the task of an earlier pass that it has, which another worker has computed."""
    workers = Workers(clock, {("a", 0), ("b", 1)})
    found = pool.Pool(workers, lambda died: None)
    monitor = SimpleNamespace(reported=lambda *_: None)

    def look():
        assert clock.now < pool.UNKNOWN_SECONDS
        if workers.sent[-1][:2] == ("b", 1):
            for peer in workers.peers:
                peer.is_dead = True
            workers.new = [SimpleNamespace(name="c", is_dead=False)]

    for _ in range(2):
        results = found.run(SimpleNamespace(name="p"), PASS, range(8), look, monitor)
        assert [element for result in results for element in result] == list(range(8))
    assert [sent for sent in workers.sent if sent[0] == "c"] == [("c", 1, 0), ("c", 1, 1)]


def test_a_pass_can_be_cancelled_while_replies_arrive(clock):
    class Busy(Workers):
        def reply(self, peer):
            self.clock.now += 0.3
            return super().reply(peer)

        def wait(self, since):
            raise AssertionError("there is always a reply")

    def cancel():
        raise JobCancelledError("now")

    found = pool.Pool(Busy(clock, set()), lambda died: None)
    monitor = SimpleNamespace(reported=lambda *_: None)
    with pytest.raises(JobCancelledError):
        found.run(SimpleNamespace(name="p"), PASS, range(8), cancel, monitor)


def test_heartbeats_go_on_after_one_that_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(signs_of_life, "BEAT_SECONDS", 0.02)
    (tmp_path / "rounds").mkdir()
    launcher = mailbox.FileMailbox(str(tmp_path / "rounds"), b"secret")
    try:
        (tmp_path / "rounds").rename(tmp_path / "unreachable")
        time.sleep(0.2)
        (tmp_path / "unreachable").rename(tmp_path / "rounds")
        seen = (tmp_path / "rounds" / "launcher").read_bytes()
        deadline = time.monotonic() + 60
        while (tmp_path / "rounds" / "launcher").read_bytes() == seen:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        launcher.stop()


LAUNCHER = """
import sys, time
from beamjax.pipelines.resident.mailbox import FileMailbox
mailbox = FileMailbox(sys.argv[1], b"secret")
print("ready", flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_launcher(monkeypatch, tmp_path):
    monkeypatch.setattr(signs_of_life, "BEAT_SECONDS", 0.1)
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
    assert (tmp_path / "stop").read_bytes() == orphans.ORPHANED  # ends all others at once
    assert mailbox.join(str(tmp_path), b"secret") is None


# --- other hosts


@pytest.fixture
def elsewhere(monkeypatch):
    """Heartbeats of other hosts, at a time that the test sets."""
    found = SimpleNamespace(now=0.0)

    def sleep(seconds):
        found.now += seconds

    times = SimpleNamespace(monotonic=lambda: found.now, sleep=sleep)
    monkeypatch.setattr(signs_of_life, "time", times)
    monkeypatch.setattr(mailbox, "time", times)
    monkeypatch.setattr(orphans, "time", times)
    monkeypatch.setattr(signs_of_life.Heart, "_keep_beating", lambda self: None)
    monkeypatch.setattr(signs_of_life, "is_alive", lambda process: None)
    return found


def heartbeat(folder, elsewhere):
    """Makes a launcher and its only worker; returns a function that lets time go by."""
    launcher = mailbox.open_mailbox(folder, b"secret", False)
    worker = mailbox.FileWorker(folder, b"secret")
    peers = []

    def after(seconds, beats):
        for _ in range(round(seconds / 2)):
            elsewhere.now += 2.0001
            for heart in beats:
                heart._beat()
            peers.extend(launcher.joined())
            launcher.wait(elsewhere.now)
        return peers

    return launcher, worker, after


@pytest.mark.parametrize("where", ["path", "url"])
def test_a_worker_on_another_host_is_dead_while_it_is_silent(where, elsewhere, tmp_path):
    folder = str(tmp_path) if where == "path" else f"bjtest:/{tmp_path}"
    _, worker, after = heartbeat(folder, elsewhere)
    (peer,) = after(60, [worker._heart])
    assert not peer.is_dead
    assert after(8, []) == [peer]
    assert not peer.is_dead
    after(6, [])
    assert peer.is_dead
    after(2, [worker._heart])  # its network was down
    assert not peer.is_dead
    elsewhere.now += 1000  # the launcher was stopped itself
    after(2, [])
    assert not peer.is_dead


def test_workers_miss_their_launcher(elsewhere, tmp_path):
    launcher, worker, after = heartbeat(str(tmp_path), elsewhere)
    other = mailbox.FileWorker(str(tmp_path), b"secret")

    def orphaned(seconds, beats):
        found = False
        for _ in range(round(seconds)):
            after(2, beats)
            found = found or worker._launcher.is_orphaned()
        return found

    assert not orphaned(60, [launcher._heart])
    assert not orphaned(14, [])
    assert not orphaned(1, [launcher._heart])
    assert orphaned(17, [])
    assert list(other.tasks()) == []
    assert mailbox.join(str(tmp_path), b"secret") is None
    launcher.open()  # it was stopped, and starts the job again
    assert mailbox.join(str(tmp_path), b"secret") is not None


@pytest.mark.parametrize("where", ["path", "url"])
def test_the_store_of_a_dead_launcher_is_removed(where, elsewhere, tmp_path):
    parent = str(tmp_path) if where == "path" else f"bjtest:/{tmp_path}"
    names = ["beamjax-" + digit * 32 for digit in "abcd"] + ["data", "beamjax-mine"]
    stops = [None, b"stop", orphans.ORPHANED, None, orphans.ORPHANED, orphans.ORPHANED]
    for name, stop in zip(names, stops, strict=True):
        folder = tmp_path / name / "rounds-1"
        folder.mkdir(parents=True)
        mailbox.FileMailbox(str(folder), b"secret").joined()
        (tmp_path / name / "x.arrays").write_bytes(b"x")
        if stop is not None:
            (folder / "stop").write_bytes(stop)
    resident_job.remove_orphans(parent)
    del names[2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert all((tmp_path / name / "x.arrays").exists() for name in names)


def test_a_folder_out_of_reach_is_no_reason_to_end_at_once(elsewhere, tmp_path, monkeypatch):
    _, worker, _ = heartbeat(str(tmp_path), elsewhere)
    assert not worker._launcher.is_orphaned()

    def unreachable(*args):
        raise OSError(errno.ESTALE, "stale handle")

    with monkeypatch.context() as patch:
        patch.setattr(orphans, "read", unreachable)
        elsewhere.now += 29
        assert not worker._launcher.is_orphaned()
        elsewhere.now += 2
        with pytest.raises(OSError, match="stale"):
            worker._launcher.is_orphaned()
    assert not worker._launcher.is_orphaned()


def test_a_folder_that_fails_is_the_reason(monkeypatch, tmp_path):
    """And not a dead worker. The job is cancelled where it can't be asked to end."""
    aborted = []

    def run(self, attempt):
        while attempt.abort is None:
            time.sleep(0.01)
        aborted.append(str(attempt.abort))

    def read_only(*args, **kwargs):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(resident_job.ResidentJob, "_run", run)
    connection = SimpleNamespace(runner=object(), spec=runner_table.OTHER, shared=False)
    found = resident_job.ResidentJob(connection, Store(str(tmp_path)))
    found.start()
    monkeypatch.setattr(found._mailbox, "stop", read_only)
    with monkeypatch.context() as patch:
        patch.setattr(mailbox, "write", read_only)
        with pytest.raises(SourceError, match=r"cannot exchange messages .*Read-only file"):
            found.run(task_messages.Program("p", "map", None), PASS, range(8), None, None)
    found.close()
    assert aborted[0].startswith("its workers can't be ended")


def test_a_late_task_gets_further_copies(clock):
    """Workers whose task never ends, as those that hang."""
    workers = Workers(clock, {("a", 0), ("b", 0), ("c", 0)})
    workers.peers = workers.new = [SimpleNamespace(name=name, is_dead=False) for name in "abcd"]
    found = pool.Pool(workers, lambda died: None)
    monitor = SimpleNamespace(reported=lambda *_: None)
    results = found.run(SimpleNamespace(name="p"), PASS, range(1), lambda: None, monitor)
    assert results == [(0,)]
    assert [name for name, _, _ in workers.sent] == list("abcd")
    waits = [1 * pool.UNKNOWN_SECONDS * (1 + 4 + 16), 2 + pool.UNKNOWN_SECONDS * (1 + 4 + 16)]
    assert waits[0] < clock.now < waits[1]


@pytest.mark.parametrize("forge", ["task", "replay", "reply"])
def test_messages_of_others_are_refused_before_they_are_decoded(forge, tmp_path, monkeypatch):
    """A task names modules that a worker imports; the folder may be shared with others."""
    launcher = mailbox.FileMailbox(str(tmp_path), b"secret")
    worker = mailbox.FileWorker(str(tmp_path), b"secret")
    (peer,) = launcher.joined()
    task = task_messages.WorkerTask(PASS, 0, ((2, 3),))
    launcher.send(peer, task)
    file = tmp_path / f"task-{worker.name}-0"
    own = file.read_bytes()
    other = task_messages.signed(b"other", file.name, task_messages.encode(task))
    file.write_bytes(other if forge == "task" else own)
    if forge == "replay":  # of another message of the same job
        file.rename(tmp_path / f"task-{worker.name}-1")
        worker._next = 1
        peer.sent = 2
    tasks = worker.tasks()
    if forge == "reply":
        assert next(tasks).elements == ((2, 3),)
        reply = task_messages.encode(task_messages.Reply(0, 0))
        name = f"reply-{worker.name}-0"
        (tmp_path / name).write_bytes(task_messages.signed(b"other", name, reply))
        with pytest.raises(ArrayFormatError, match=rf"{name}, .* wrong signature"):
            launcher.reply(peer)
    else:
        decoded = []
        monkeypatch.setattr(mailbox, "decode", lambda *args: decoded.append(args))
        launcher.stop()
        assert list(tasks) == []
        assert decoded == []
        monkeypatch.undo()
        assert "found a wrong signature" in launcher.reply(peer).error
    launcher.stop()
