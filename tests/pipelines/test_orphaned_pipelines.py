"""Workers of a single pipeline, whose launcher is gone."""

import time

import pytest
import url_files  # noqa: F401 - makes bjtest:// known

import beamjax as bj
from beamjax.pipelines.clusters import processes
from beamjax.pipelines.values.store import Store
from beamjax.pipelines.worker import orphans
from beamjax.pipelines.worker.tasks import StepFn
from beamjax.telemetry import signs_of_life


class Doubles(StepFn):
    yields = int

    def __init__(self, store):
        self.store = store

    def process(self, element):
        yield 2 * element


class Notes(StepFn):
    yields = int

    def __init__(self, store):
        self.store, self.seen = store, []

    def process(self, element):
        self.seen.append(element)


@pytest.fixture(params=["path", "url"])
def store(request, tmp_path, monkeypatch):
    """A store, whose launcher seems to be on another host."""
    monkeypatch.setattr(signs_of_life, "is_alive", lambda process: None)
    for name in ("BEAT_SECONDS", "REMOTE_BEAT_SECONDS"):
        monkeypatch.setattr(signs_of_life, name, 0.02)
    monkeypatch.setattr(orphans, "LOST_SECONDS", 3.0)
    return Store(str(tmp_path) if request.param == "path" else f"bjtest:/{tmp_path}")


@pytest.fixture
def dies(monkeypatch):
    """Ends the heartbeats."""
    found = []
    beat = signs_of_life.Heart._beat
    monkeypatch.setattr(signs_of_life.Heart, "_beat", lambda heart: None if found else beat(heart))
    return lambda: found.append(1)


def emits(fn):
    return list(fn.process(3) or ()) == [6]


def test_workers_compute_while_they_hear_from_the_launcher(store, tmp_path):
    with orphans.heard(store) as its:
        fn = Doubles(its)
        end = time.monotonic() + 3.5  # longer than a dead one is waited for
        while time.monotonic() < end:
            assert emits(fn)
            time.sleep(0.05)
        orphans.check_heard(its)
    # The run has ended by an error, or was cancelled, and the runner goes on.
    assert processes.wait_until(lambda: not emits(fn), 10)
    assert list(tmp_path.iterdir()) == []


def test_workers_of_a_dead_launcher_emit_nothing_and_say_so(store, dies):
    with orphans.heard(store) as its:
        doubles, notes = Doubles(its), Notes(its)
        assert emits(doubles)
        notes.process(1)
        dies()
        assert processes.wait_until(lambda: not emits(doubles), 10)
        notes.process(2)
        assert notes.seen == [1]
        assert not emits(Doubles(its))  # in a retry
        assert orphans.is_orphaned(its.launcher)
        with pytest.raises(bj.WorkerError, match="heartbeat"):
            orphans.check_heard(its)
