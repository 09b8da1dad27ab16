"""Files in which worker processes say what they are at: whole, bounded, and of this machine."""

import json
import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax.telemetry import signs_of_life, working_files
from beamjax.telemetry.working_files import (
    DOING,
    PREFIX,
    SLOTS,
    WorkEntry,
    WorkingFile,
    invite,
    read_file,
)


@pytest.fixture
def folder(tmp_path):
    invite(str(tmp_path))
    return tmp_path


def read(folder):
    (path,) = folder.glob(f"{PREFIX}*")
    return read_file(str(path))


def entry(shard=3, members=(24, 31), step="map_clients_0", doing="computing", since=5.0):
    return WorkEntry(doing, threading.get_ident(), since, step, shard, members)


def test_an_entry_is_there_until_it_ends(folder):
    file = WorkingFile(str(folder))
    for doing in DOING:
        for given_entry in (
            entry(doing=doing),
            entry(None, None, doing=doing),
            entry(0, (0, 0), doing=doing),
            entry(2**40, (2**60, 2**61), step="lüp[3]/a", doing=doing),
        ):
            assert read(folder).entries == ()
            slot = file.begin(given_entry)
            assert read(folder).entries == (given_entry,)
            file.end(slot)
    found = read(folder)
    assert (found.entries, found.left) == ((), False)
    assert found.process == signs_of_life.this_process()
    file.leave()
    assert read(folder).left


def test_entries_of_many_threads(folder):
    file = WorkingFile(str(folder))
    slots = [file.begin(entry(since=since)) for since in (3.0, 1.0, 2.0)]
    assert [found.since for found in read(folder).entries] == [1.0, 2.0, 3.0]
    slots += [file.begin(entry()) for _ in range(SLOTS)]
    assert slots[SLOTS:] == [None] * 3  # There is no room for more.
    assert len(read(folder).entries) == SLOTS
    for slot in slots:
        file.end(slot)
    assert read(folder).entries == ()

    def work(number):
        for shard in range(300):
            file.end(file.begin(entry(shard, (number, number))))
        file.begin(entry(number, (number, number)))

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found.shard for found in read(folder).entries) == list(range(8))


def test_a_long_name_of_a_step_is_cut(folder):
    WorkingFile(str(folder)).begin(entry(step="é" * 1000))
    (found,) = read(folder).entries
    assert found.step == "é" * 200


def test_files_that_nobody_here_wants(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    for missing, message in (("plain", "workers-wanted"), ("gone", "No such file")):
        with pytest.raises(OSError, match=message):
            WorkingFile(str(tmp_path / missing))
    assert list((tmp_path / "plain").iterdir()) == []
    for mark in ("", "{", '{"host": "elsewhere", "boot": "b"}', "x" * 9999):
        (folder / working_files._MARK).write_text(mark)
        with pytest.raises(OSError, match="another machine"):
            WorkingFile(str(folder))
    assert list(folder.glob(f"{PREFIX}*")) == []


# --- bytes of others


def whole(process=None, slots=b""):
    process = signs_of_life.this_process() if process is None else process
    head = json.dumps(process).encode().ljust(working_files._HEADER_BYTES, b"\0")
    return (head + slots).ljust(working_files._FILE_BYTES, b"\0")


def test_bytes_that_are_no_such_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(whole())
    assert read_file(str(path)) is not None
    for data in (
        b"", b"{}", whole()[:-1], whole() + b"\0", whole([]), whole({}), whole("[" * 1000),
        whole({**signs_of_life.this_process(), "pid": "1"}),
        whole({**signs_of_life.this_process(), "pid": True}),
        whole({**signs_of_life.this_process(), "started": None}),
        *(byte * working_files._FILE_BYTES for byte in (b"[", b"\xff", b"\0")),
    ):  # fmt: skip
        path.write_bytes(data)
        assert read_file(str(path)) is None, data[:100]
    assert read_file(str(tmp_path / "none")) is None
    os.mkdir(tmp_path / "folder")
    assert read_file(str(tmp_path / "folder")) is None


VALUES = st.one_of(
    st.none(), st.text(max_size=9), st.floats(), st.integers(), st.sampled_from(DOING),
    st.lists(st.integers(-1, 9), max_size=3),
)  # fmt: skip


@given(st.one_of(st.binary(max_size=99), st.lists(VALUES, max_size=7).map(json.dumps)))
def test_whatever_is_in_a_slot_gives_plain_entries(tmp_path_factory, slot):
    path = tmp_path_factory.getbasetemp() / "hostile"
    path.write_bytes(whole(slots=slot if isinstance(slot, bytes) else slot.encode()))
    for found in read_file(str(path)).entries:
        assert found.doing in DOING
        assert found.step.isprintable()
        assert len(found.step) < 600
        assert 0 < found.since < 1e11
        assert (found.shard is None) == (found.members is None)
        assert found.members is None or 0 <= found.members[0] <= found.members[1]
