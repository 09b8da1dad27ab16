"""Files of sources: found by name and pattern, here and at URLs, and errors that name them."""

import bz2
import gzip
import lzma
import os
from pathlib import Path

import pytest
import url_files  # noqa: F401 - makes bjtest:// known to Beam

from beamjax.errors import SourceError, StructureError
from beamjax.sources.data_files import (
    DataFile,
    find_files,
    look,
    open_file,
    open_stream,
    packing,
    readable,
)

NAMES = ["b.bin", "a.bin", "a[1].bin", "c.txt"]


@pytest.fixture(params=["local", "url"])
def folder(request, tmp_path):
    for name in NAMES:
        (tmp_path / name).write_bytes(name.encode())
    return str(tmp_path) if request.param == "local" else f"bjtest:/{tmp_path}"


def test_what_patterns_find_is_in_the_order_of_names(folder):
    assert find_files(f"{folder}/?.bin", "from_x") == [f"{folder}/a.bin", f"{folder}/b.bin"]
    listed = [f"{folder}/c.txt", f"{folder}/a.b*"]
    assert find_files(listed, "from_x") == [f"{folder}/c.txt", f"{folder}/a.bin"]


def test_folders_give_their_files_in_the_order_of_names(folder):
    local = Path(folder.removeprefix("bjtest:/"))
    for name in ("_part.bin", ".b.bin", "_SUCCESS"):
        (local / name).write_bytes(b"")
    (local / "below").mkdir()
    (local / "below" / "d.bin").write_bytes(b"")
    names = [f"{folder}/{name}" for name in ("a.bin", "a[1].bin", "b.bin")]
    assert find_files(f"{folder}/", "from_x", [".bin"]) == names
    assert find_files([f"{folder}/"], "from_x", [".bin", ".txt"]) == [*names, f"{folder}/c.txt"]
    with pytest.raises(
        SourceError, match=r"from_x: found no file that ends in \.x or \.y in the f"
    ):
        find_files(f"{folder}/", "from_x", [".x", ".y"])


def test_names_with_brackets_and_paths(tmp_path, monkeypatch):
    for name in NAMES:
        (tmp_path / name).write_bytes(b"")
    (path,) = find_files(tmp_path / "a[1].bin", "from_x")
    assert path == str(tmp_path / "a[1].bin")
    monkeypatch.chdir(tmp_path)
    assert find_files("c.*", "from_x") == [str(tmp_path / "c.txt")]


def test_nothing_is_found(folder):
    with pytest.raises(SourceError, match=r"from_x: found no file '.*/z\*'.*expected one that"):
        find_files(f"{folder}/z*", "from_x")
    with pytest.raises(SourceError, match="empty list"):
        find_files([], "from_x")
    with pytest.raises(StructureError, match="from_x: found 3, expected a path, a pattern"):
        find_files(3, "from_x")


def test_a_file_that_changes_is_noticed(folder):
    path = f"{folder}/a.bin"
    file = look(path)
    assert file.nbytes == 5
    assert DataFile.from_json(file.to_json()) == file
    file.check()
    local = path.removeprefix("bjtest:/")
    Path(local).write_bytes(b"longer than before")
    with pytest.raises(SourceError, match=r"a.bin: found 18 bytes .* expected 5 .* was changed"):
        file.check()
    Path(local).write_bytes(b"a.bin")
    os.utime(local, (1, 1))
    with pytest.raises(SourceError, match="was changed"):
        file.check()
    os.unlink(local)
    with pytest.raises(SourceError, match=r"a\.bin"):
        file.check()


@pytest.mark.parametrize("record", [[], ["x", 1], ["x", "1", ""], ["x", -1, ""], [1, 1, ""], None])
def test_other_records_are_no_files(record):
    with pytest.raises((TypeError, ValueError)):
        DataFile.from_json(record)


def test_files_are_read_in_any_order(folder):
    with open_file(f"{folder}/a.bin") as file:
        file.seek(2)
        assert file.read() == b"bin"
        file.seek(0)
        assert file.read(1) == b"a"


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_packed_files_are_unpacked(folder, suffix):
    path = f"{folder}/x.bin{suffix}"
    Path(path.removeprefix("bjtest:/")).write_bytes(PACKERS[suffix](b"abc" * 10_000))
    assert packing(path) == suffix
    with open_stream(path) as file:
        assert file.read(4) == b"abca"
        assert len(file.read()) == 29_996
    with open_stream(f"{folder}/a.bin") as file:
        assert file.read() == b"a.bin"


@pytest.mark.parametrize("suffix", PACKERS)
def test_bad_packing_names_the_file(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    data = PACKERS[suffix](os.urandom(10_000))
    for bad in (b"not packed at all", data[: len(data) // 2]):
        path.write_bytes(bad)
        with (
            pytest.raises(SourceError, match=rf"x\{suffix}: cannot read .* expected rows"),
            readable(str(path), "rows"),
            open_stream(str(path)) as file,
        ):
            file.read()


def test_what_is_missing_forbidden_or_a_folder_says_so(tmp_path, monkeypatch):
    with pytest.raises(SourceError, match="x: is not there; expected a file that the launcher"):
        open_file(str(tmp_path / "x"))
    with pytest.raises(SourceError, match="found a folder"):
        look(str(tmp_path))

    def forbidden(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", forbidden)  # the user of the tests may be root
    with pytest.raises(SourceError, match=r"y: may not be read by user \d+ \(Permission denied\)"):
        look("y")
