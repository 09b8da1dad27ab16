"""Retries of file operations that fail for a moment."""

import errno
from types import SimpleNamespace

import pytest

from beamjax.storage import files


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on while `files` waits."""
    found = SimpleNamespace(now=1000.0)

    def sleep(seconds):
        found.now += seconds

    times = SimpleNamespace(monotonic=lambda: found.now, sleep=sleep)
    monkeypatch.setattr(files, "time", times)
    monkeypatch.setattr(files, "_failed", float("-inf"))
    return found


def broken(monkeypatch, clock, number, seconds):
    """Makes the disk fail for so many seconds."""
    write, until = files._write_local, clock.now + seconds

    def failing(path, *args):
        if clock.now < until:
            raise OSError(number, "out of order", path)
        write(path, *args)

    monkeypatch.setattr(files, "_write_local", failing)


@pytest.mark.parametrize("number", files.MOMENTARY)
def test_a_moment_is_waited_for(number, clock, monkeypatch, tmp_path):
    broken(monkeypatch, clock, number, 20)
    path = str(tmp_path / "x")
    with pytest.raises(OSError, match="out of order"):
        files.write(path, b"1")  # no run needs the folder
    assert clock.now == 1000
    with files.patient():
        files.write(path, b"1")
    assert 1020 <= clock.now < 1021
    assert files.read(path) == b"1"


def test_more_than_a_moment_is_an_error(clock, monkeypatch, tmp_path):
    broken(monkeypatch, clock, errno.EROFS, 1e6)
    path = str(tmp_path / "x")
    with files.patient():
        with pytest.raises(OSError, match=r"out of order, also after 30 s of attempts.*x"):
            files.write(path, b"1")
        assert 1030 <= clock.now < 1031
        with pytest.raises(OSError, match="out of order"):
            files.write(path, b"1")  # what is done at the end of the run does not wait again
        assert clock.now < 1031


def test_other_errors_are_raised_at_once(clock, tmp_path):
    with files.patient():
        with pytest.raises(FileNotFoundError):
            files.read(str(tmp_path / "none"))
        assert files.names(str(tmp_path / "none")) == []
    assert clock.now == 1000
