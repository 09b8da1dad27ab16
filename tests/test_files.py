"""Small files: whole or not at all."""

import itertools

import numpy as np
import pytest
from apache_beam.io.filesystem import BeamIOError
from memory_files import FILES, InMemory

from beamjax.pipelines import files, remote_files


def test_write_replaces_unless_asked_to_keep(tmp_path):
    path = str(tmp_path / "new" / "file")
    files.write(path, b"one")
    files.write(path, b"two", keep=True)
    assert files.read(path) == b"one"
    files.write(path, b"longer", keep=True)
    assert files.read(path) == b"longer"
    files.write(path, b"two")
    assert files.read(path) == b"two"


def test_write_into_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files.write("file", b"data")
    assert files.read("file") == b"data"


@pytest.mark.parametrize("size", [0, 1, 9 * 2**20])
def test_read_is_readonly_and_whole(size, tmp_path):
    data = bytes(size)
    files.write(str(tmp_path / "file"), data)
    read = files.read(str(tmp_path / "file"))
    assert read == data
    assert read.readonly
    assert not np.frombuffer(read, np.uint8).flags.writeable


@pytest.mark.parametrize(
    ("path", "url"), [("/a/b", False), ("a", False), ("gs://b/c", True), ("C:\\x", False)]
)
def test_is_url(path, url):
    assert files.is_url(path) is url


def test_remove_of_nothing(tmp_path):
    files.remove(str(tmp_path / "none"), ".arrays")


def test_names_and_removal_of_files(tmp_path):
    assert files.names(str(tmp_path / "none")) == []
    for name in ("a.x", "b.x", "c.y"):
        files.write(str(tmp_path / "f" / name), b"data")
    (tmp_path / "f" / "folder.x").mkdir()
    folder = str(tmp_path / "f")
    assert sorted(files.names(folder)) == ["a.x", "b.x", "c.y"]
    files.remove_files(folder, ["a.x", "none.x"])
    files.remove_files(folder, [])
    assert sorted(files.names(folder)) == ["b.x", "c.y"]
    (tmp_path / "f" / "folder.x").rmdir()
    files.remove(folder, (".x", ".y"))
    assert not (tmp_path / "f").exists()


class Flaky(InMemory):
    """`flaky://`: fails as it is told, and notes what readers of a file could see."""

    replaces, failing, calls, seen = True, (), 0, set()

    @classmethod
    def scheme(cls):
        return "flaky"

    def _look(self):
        Flaky.seen.add(FILES.get(PATH))

    def rename(self, sources, destinations):
        self._look()
        if destinations == [PATH] and PATH in FILES and not self.replaces:
            raise BeamIOError("the name is taken")
        Flaky.calls += 1
        if Flaky.calls in self.failing:
            raise BeamIOError("no connection")
        super().rename(sources, destinations)
        self._look()

    def delete(self, paths):
        super().delete(paths)
        self._look()

    def copy(self, sources, destinations):
        for source, destination in zip(sources, destinations, strict=True):
            FILES[destination] = FILES[source][:1]  # a reader could see half of it
            self._look()
            FILES[destination] = FILES[source]


PATH = "flaky://folder/file"


def test_a_file_at_a_url_is_replaced_without_a_moment_without_it(monkeypatch):
    monkeypatch.setattr(remote_files.time, "sleep", lambda seconds: None)
    wrong = []
    failing = [(), (1,), (2,), (1, 2), range(1, 99)]
    for replaces, failures, copies in itertools.product((True, False), failing, (True, False)):
        FILES.clear()
        FILES[PATH], FILES["flaky://folder/other"] = b"old", b"new"
        Flaky.replaces, Flaky.failing, Flaky.calls, Flaky.seen = replaces, failures, 0, set()
        try:
            if copies:
                files.link("flaky://folder/other", PATH)
            else:
                files.write(PATH, b"new")
            raised = False
        except BeamIOError:
            raised = True
        found = FILES.pop(PATH, None), raised
        # A file is set aside, between two renames, only where replacing it failed twice.
        aside = not replaces or failures == (1, 2)
        visible = {b"old", b"new", None} if aside else {b"old", b"new"}
        expected = (b"old", True) if len(failures) > 2 else (b"new", False)
        if found != expected or not Flaky.seen <= visible or len(FILES) != 1:
            wrong.append((replaces, failures, copies, found, Flaky.seen, list(FILES)))
    FILES.clear()
    assert not wrong, wrong
