"""What the planner remembers, in files that may be gone, damaged or of something else."""

import os

import pytest

from beamjax import plan_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_is_stored_is_found(cache):
    assert plan_cache.load("x") is None
    plan_cache.store("x", {"a": [1, 2.5, "b"]})
    assert plan_cache.load("x") == {"a": [1, 2.5, "b"]}
    assert [file.name for file in cache.iterdir()] == ["x.json"]


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", "\x00\xff", "[" * 100_000])
def test_files_of_something_else_are_told_and_ignored(cache, text):
    plan_cache.store("x", {})
    (cache / "x.json").write_text(text)
    with pytest.warns(RuntimeWarning, match="is not used, and will be written anew"):
        assert plan_cache.load("x") is None
    plan_cache.store("x", {"a": 1})
    assert plan_cache.load("x") == {"a": 1}


def test_a_file_that_is_too_large(cache):
    plan_cache.store("x", {"a": "b" * plan_cache.MAX_BYTES})
    with pytest.warns(RuntimeWarning, match="too large"):
        assert plan_cache.load("x") is None


def test_nothing_is_remembered_where_the_variable_is_empty(monkeypatch):
    monkeypatch.setenv(plan_cache.VARIABLE, "")
    plan_cache.store("x", {"a": 1})
    assert plan_cache.folder() is None
    assert plan_cache.load("x") is None


def test_a_folder_that_can_not_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(plan_cache.VARIABLE, str(tmp_path / "file" / "cache"))
    plan_cache.store("x", {"a": 1})
    assert plan_cache.load("x") is None


def test_the_usual_folder_is_below_that_of_beamjax(tmp_path, monkeypatch):
    monkeypatch.delenv(plan_cache.VARIABLE)
    monkeypatch.setenv("BEAMJAX_CACHE", str(tmp_path))
    assert plan_cache.folder() == tmp_path / "planner"
    assert os.stat(tmp_path / "planner").st_mode & 0o077 == 0


def test_digests_are_the_same_in_each_process():
    assert plan_cache.digest({"b": 1, "a": (2, None)}) == plan_cache.digest(
        {"a": [2, None], "b": 1}
    )
    assert plan_cache.digest(1) != plan_cache.digest("1")


def test_the_machine_is_told_by_what_makes_it_fast():
    found = plan_cache.machine()
    assert found["cores"] == os.cpu_count()
    assert found["device"].startswith("cpu")
    assert found["processor"]
