"""Small files: whole or not at all."""

import numpy as np
import pytest

from beamjax.pipelines import files


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
