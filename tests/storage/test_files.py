"""Files of data, found by name and pattern, here and at URLs; small files, whole or not at all."""

import bz2
import errno
import gzip
import itertools
import lzma
import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
import url_files  # noqa: F401 - makes bjtest:// known
from memory_files import FILES, InMemory
from source_files import refused

from beamjax.errors import SourceError, StructureError
from beamjax.sources.arrays.data_files import (
    DataFile,
    compression,
    find_files,
    look,
    open_file,
    open_stream,
    readable,
)
from beamjax.storage import files, remote_files
from beamjax.storage.schema import from_plain, to_plain

# --- files of data


@pytest.fixture(params=["local", "url"])
def folder(request, tmp_path):
    for name in ("b.bin", "a.bin", "a[1].bin", "c.txt"):
        (tmp_path / name).write_bytes(name.encode())
    return str(tmp_path) if request.param == "local" else f"bjtest:/{tmp_path}"


def local(path):
    return Path(path.removeprefix("bjtest:/"))


def test_what_is_found_is_in_the_order_of_names(folder):
    assert find_files(f"{folder}/?.bin", "from_x") == [f"{folder}/a.bin", f"{folder}/b.bin"]
    listed = [f"{folder}/c.txt", f"{folder}/a.b*"]
    assert find_files(listed, "from_x") == [f"{folder}/c.txt", f"{folder}/a.bin"]
    for name in ("_part.bin", ".b.bin", "_SUCCESS"):
        (local(folder) / name).write_bytes(b"")
    (local(folder) / "below").mkdir()
    (local(folder) / "below" / "d.bin").write_bytes(b"")
    names = [f"{folder}/{name}" for name in ("a.bin", "a[1].bin", "b.bin")]
    assert find_files(f"{folder}/", "from_x", [".bin"]) == names
    assert find_files([f"{folder}/"], "from_x", [".bin", ".txt"]) == [*names, f"{folder}/c.txt"]
    for error, message, *args in [
        (SourceError, r"no file that ends in \.x or \.y in the f", f"{folder}/", [".x", ".y"]),
        (SourceError, r"no file '.*/z\*'.*expected one that", f"{folder}/z*"),
        (SourceError, "empty list", []),
        (StructureError, "found 3, expected a path, a pattern", 3),
    ]:
        refused(error, f"from_x: .*{message}", find_files, args[0], "from_x", *args[1:])


def test_names_with_brackets_and_paths(tmp_path, monkeypatch):
    for name in ("a[1].bin", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert find_files(tmp_path / "a[1].bin", "from_x") == [str(tmp_path / "a[1].bin")]
    monkeypatch.chdir(tmp_path)
    assert find_files("c.*", "from_x") == [str(tmp_path / "c.txt")]


def test_a_file_that_changes_is_noticed(folder, monkeypatch):
    path = f"{folder}/a.bin"
    file = look(path)
    assert file.mark() is None  # It may change within the same tick of the clock.
    monkeypatch.setattr("beamjax.sources.arrays.data_files.SETTLED_NS", -(10**12))
    assert (file.mark() is None) == folder.startswith("bjtest:")
    assert file.nbytes == 5
    assert from_plain(DataFile, to_plain(file), "here") == file
    file.check()
    local(path).write_bytes(b"longer than before")
    refused(SourceError, r"a.bin: found 18 bytes .* expected 5 .* was changed", file.check)
    local(path).write_bytes(b"a.bin")
    os.utime(local(path), (1, 1))
    refused(SourceError, "was changed", file.check)
    assert file.mark() is None
    os.unlink(local(path))
    assert file.mark() is None
    refused(SourceError, r"a\.bin", file.check)


PACKERS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def test_files_are_read_in_any_order_and_unpacked(folder):
    with open_file(f"{folder}/a.bin") as file:
        file.seek(2)
        assert file.read() == b"bin"
        file.seek(0)
        assert file.read(1) == b"a"
    with open_stream(f"{folder}/a.bin", "") as file:
        assert file.read() == b"a.bin"
    for suffix, pack in PACKERS.items():
        path = f"{folder}/x.bin{suffix}"
        local(path).write_bytes(pack(b"abc" * 10_000))
        assert compression(path) == suffix
        with open_stream(path, compression(path)) as file:
            assert file.read(4) == b"abca"
            assert len(file.read()) == 29_996


def test_errors_name_the_file(tmp_path, monkeypatch):
    def read(path):
        with readable(path, "rows"), open_stream(path, compression(path)) as file:
            file.read()

    for suffix, pack in PACKERS.items():
        path = tmp_path / f"x{suffix}"
        data = pack(os.urandom(10_000))
        for bad in (b"not packed at all", data[: len(data) // 2]):
            path.write_bytes(bad)
            refused(SourceError, rf"x\{suffix}: cannot read .* expected rows", read, str(path))
    refused(SourceError, "x: is not there; expected a file", open_file, str(tmp_path / "x"))
    refused(SourceError, "found a folder", look, str(tmp_path))

    def forbidden(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", forbidden)  # The user of the tests may be root.
    refused(SourceError, r"y: may not be read by user \d+ \(Permission denied\)", look, "y")


# --- small files


def test_write_replaces_unless_asked_to_keep(tmp_path, monkeypatch):
    path = str(tmp_path / "new" / "file")
    for data, keep, expected in [
        (b"one", False, b"one"),
        (b"two", True, b"one"),
        (b"longer", True, b"longer"),
        (b"two", False, b"two"),
    ]:
        files.write(path, data, keep=keep)
        assert files.read(path) == expected
    monkeypatch.chdir(tmp_path)
    files.write("file", b"data")
    assert files.read("file") == b"data"
    for size in (0, 1, 9 * 2**20):
        files.write(path, bytes(size))
        read = files.read(path)
        assert read == bytes(size)
        assert read.readonly
        assert not np.frombuffer(read, np.uint8).flags.writeable


def test_names_and_removal_of_files(tmp_path):
    for path, url in [("/a/b", False), ("a", False), ("gs://b/c", True), ("C:\\x", False)]:
        assert files.is_url(path) is url
    none = str(tmp_path / "none")
    files.remove(none, ".arrays")
    assert files.names(none) == []
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


def test_errors_of_a_store_say_what_it_may_lack(monkeypatch):
    class EndpointConnectionError(Exception):
        """As botocore has it."""

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    for error, number in [
        (EndpointConnectionError("no connection"), errno.EIO),  # which a run tries again
        (TimeoutError("no connection"), errno.EIO),
        (PermissionError("no connection"), None),
        (RuntimeError("no connection"), None),
    ]:

        def fail(path, error=error):
            raise error

        monkeypatch.setattr(remote_files, "_system", fail)
        found = refused(
            OSError,
            r"s3://bucket: \w+: no connection; on host .*AWS_ACCESS_KEY_ID.* is not set: .* pools",
            files.read, "s3://bucket/x",
        )  # fmt: skip
        assert found.errno == number


class Flaky(InMemory):
    """`flaky://`: fails where it is asked to, and notes what readers of a file could see."""

    replaces, failing, calls, seen = True, (), 0, set()

    protocol = "flaky"

    def _look(self):
        Flaky.seen.add(FILES.get(PATH))

    def mv(self, old, new, **kwargs):
        self._look()
        if new == PATH and PATH in FILES and not self.replaces:
            raise OSError("the name is taken")
        Flaky.calls += 1
        if Flaky.calls in self.failing:
            raise OSError("no connection")
        super().mv(old, new)
        self._look()

    def rm_file(self, path):
        super().rm_file(path)
        self._look()

    def cp_file(self, old, new, **kwargs):
        FILES[new] = FILES[old][:1]  # a reader could see half of it
        self._look()
        FILES[new] = FILES[old]


fsspec.register_implementation("flaky", Flaky, clobber=True)


PATH, OTHER = "flaky://folder/file", "flaky://folder/other"


def test_a_file_at_a_url_is_replaced_without_a_moment_without_it(monkeypatch):
    monkeypatch.setattr(remote_files.time, "sleep", lambda seconds: None)
    wrong = []
    failing = [(), (1,), (2,), (1, 2), range(1, 99)]
    for replaces, failures, copies in itertools.product((True, False), failing, (True, False)):
        FILES.clear()
        FILES[PATH], FILES[OTHER] = b"old", b"new"
        Flaky.replaces, Flaky.failing, Flaky.calls, Flaky.seen = replaces, failures, 0, set()
        raised = False
        try:
            files.link(OTHER, PATH) if copies else files.write(PATH, b"new")
        except OSError:
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
