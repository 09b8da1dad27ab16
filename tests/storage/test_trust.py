"""Folders that another user can change are refused; links, FIFOs and devices are not read."""

import os
import stat
import subprocess
import sys

import pytest

from beamjax.errors import ArrayFormatError, OptionsError
from beamjax.storage import locks, trust

NOBODY = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


def refused(folder, reason):
    with pytest.raises(OptionsError, match=f"(?s)cache: found {folder}, but .*{reason}"):
        trust.check_folder(folder, "cache")


def test_folders_of_this_user(tmp_path):
    folder = tmp_path / "a" / "b"
    trust.check_folder(folder, "cache")  # not there yet
    folder.mkdir(parents=True)
    for mode in (0o700, 0o755, 0o500):
        folder.chmod(mode)
        trust.check_folder(folder, "cache")
    link = tmp_path / "link"
    link.symlink_to("a/../a/b")
    trust.check_folder(link, "cache")
    trust.check_folder(str(link / ".."), "cache")
    trust.check_folder("gs://bucket/folder", "cache")
    trust.check_folder("/", "cache")


@pytest.mark.parametrize("mode", [0o777, 0o702, 0o1777])
def test_folders_that_others_can_write(mode, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    folder.chmod(mode)
    refused(folder, rf"others can write to {folder} \(mode {mode:04o}\)")
    (tmp_path / "link").symlink_to(folder)
    refused(tmp_path / "link", f"others can write to {folder} ")
    inside = folder / "inside"
    if mode & stat.S_ISVTX:  # nobody else can rename what is in it
        inside.mkdir()
        trust.check_folder(inside, "cache")
    else:
        refused(inside, f"others can write to {folder} ")
        (tmp_path / "other").symlink_to(inside)
        refused(tmp_path / "other" / ".." / "..", f"others can write to {folder} ")


def test_a_group_of_this_user_alone_may_write(tmp_path, monkeypatch):
    tmp_path.chmod(0o770)
    gid = tmp_path.stat().st_gid
    own = {gid: True}
    monkeypatch.setattr(trust, "_is_own_group", own.__getitem__)
    trust.check_folder(tmp_path, "cache")
    own[gid] = False
    refused(tmp_path, "mode 0770")
    own[gid] = True
    tmp_path.chmod(0o777)
    refused(tmp_path, "mode 0777")


@AS_ROOT
def test_folders_and_links_of_another_user(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    theirs = shared / "theirs"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    refused(theirs, f"{theirs} belongs to user {NOBODY}")
    mine = theirs / "mine"
    mine.mkdir()
    refused(mine, f"{theirs} belongs to user {NOBODY}")
    (tmp_path / "private").mkdir(mode=0o700)
    link = shared / "link"
    link.symlink_to(tmp_path / "private")
    trust.check_folder(link, "cache")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    refused(link, f"{link} belongs to user {NOBODY}")


def test_links_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(tmp_path / "a", "Too many levels of symbolic links")


@pytest.mark.parametrize("name", ["", ".", "..", "../victim", "a/b", "a\\b", "/etc/passwd", "a\0"])
def test_names_that_leave_a_folder(name):
    with pytest.raises(
        ArrayFormatError, match=r"(?s)^placed\.json: found .*expected the name of a fil"
    ):
        trust.checked_name(name, "placed.json")
    with pytest.raises(ArrayFormatError):
        trust.checked_name(7, "placed.json")


def test_names_in_a_folder():
    for name in ("a", "a-0-64.npy", "..a", "ä b"):
        assert trust.checked_name(name, "") == name


def test_only_regular_files_are_opened(tmp_path):
    fifo, link, zero, file = (tmp_path / name for name in ("fifo", "link", "zero", "file"))
    os.mkfifo(fifo)
    file.write_bytes(b"here")
    link.symlink_to(file)
    zero.symlink_to("/dev/zero")
    for path in (fifo, link, zero, "/dev/zero", tmp_path):
        with pytest.raises(OSError):
            trust.open_regular(path)
    handle = trust.open_regular(file)
    assert os.read(handle, 10) == b"here"
    os.close(handle)
    handle = trust.open_regular(tmp_path / "new", os.O_RDWR | os.O_CREAT)
    assert os.fstat(handle).st_mode & 0o777 == 0o600
    os.close(handle)


# --- locks

HOLD = """
import sys
from beamjax.storage import locks
assert locks.try_lock(sys.argv[1]) is not None
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path):
    path = tmp_path / "lock"
    assert not locks.is_locked(path)
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        assert locks.is_locked(path)
        assert locks.try_lock(path) is None
        assert locks.try_lock(path, 0.05) is None
        holder.kill()
        holder.wait()
        assert not locks.is_locked(path)
        handle = locks.try_lock(path)
        assert handle is not None
        assert locks.try_lock(path) is None
        os.close(handle)
    with locks.locked(tmp_path):
        assert locks.is_locked(path)
    assert not locks.is_locked(path)


def test_a_link_or_a_fifo_is_not_locked(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(OSError):
        locks.try_lock(tmp_path / "lock")
    assert not locks.is_locked(tmp_path / "lock")
    assert precious.read_text() == "precious"
    os.mkfifo(tmp_path / "fifo")
    assert not locks.is_locked(tmp_path / "fifo")
