"""The bounds of setup.cfg, the records of tests and the table of docs/support.md agree."""

import configparser
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import beamjax as bj

ROOT = Path(__file__).parents[1]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def support():
    path = str(ROOT / ".ci" / "support_table")
    loader = importlib.machinery.SourceFileLoader("support_table", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


SUPPORT = support()
RECORDS = {path.stem: json.loads(path.read_text()) for path in SUPPORT.RECORDS.glob("*.json")}


def numbers(version):
    return [int(x) for x in re.findall(r"\d+", version)]


def test_the_page_has_the_table_of_the_records():
    assert SUPPORT.PAGE.read_text("utf-8") == SUPPORT.table()
    assert len(SUPPORT.rows()) == 1 + len(RECORDS)


@pytest.mark.skipif("lowest" not in RECORDS, reason="no record of the lowest versions: .ci/run")
def test_the_lowest_versions_that_may_be_installed_were_tested():
    record, bounds = RECORDS["lowest"], SUPPORT.lower_bounds()
    for package in SUPPORT.PACKAGES:
        bound = numbers(bounds[package])
        found = numbers(record[package])
        assert found[: len(bound)] == bound, package
        assert not any(found[len(bound) :]), package
    oldest = numbers(CONFIG["options"]["python_requires"])
    assert numbers(record["python"])[:2] == oldest


@pytest.mark.skipif("newest" not in RECORDS, reason="no record of the newest versions: .ci/run")
def test_the_newest_python_that_is_named_was_tested():
    named = re.findall(r":: Python :: (3\.\d+)", CONFIG["metadata"]["classifiers"])
    newest = max(named, key=numbers)
    tested = {".".join(record["python"].split(".")[:2]) for record in RECORDS.values()}
    assert newest in tested
    assert tested <= set(named)


def test_pins_are_of_all_that_has_a_bound():
    pins = SUPPORT.constraints().splitlines()
    assert "jax==0.10.2" in pins
    assert {"pytest", "zarr", "shtab"} <= {re.split("[=<]", pin)[0] for pin in pins}
    missing = [x for x in SUPPORT.requirements() if ">=" not in x]
    assert missing == []


def test_the_version_stands_in_one_place():
    assert CONFIG["metadata"]["version"] == "attr: beamjax._version.__version__"
    others = [
        path
        for folder in ("beamjax", "interpreters", "pipelines")
        for path in (ROOT / folder).rglob("*.py")
        if f'"{bj.__version__}"' in path.read_text("utf-8") and path.name != "_version.py"
    ]
    assert others == []


def test_a_command_that_fails_leaves_no_record(tmp_path, monkeypatch):
    monkeypatch.setattr(SUPPORT, "RECORDS", tmp_path)
    assert SUPPORT.record("bad", [sys.executable, "-c", "raise SystemExit(3)"]) == 3
    assert list(tmp_path.iterdir()) == []
    assert SUPPORT.record("good", [sys.executable, "-c", "print('7 passed in 1 s')"]) == 0
    record = json.loads((tmp_path / "good.json").read_text())
    assert record["passed"] == 7
    assert set(SUPPORT.PACKAGES) < set(record)


@pytest.mark.parametrize("argv", [[], ["tables"], ["record", "name"]])
def test_wrong_arguments_are_told(argv):
    done = subprocess.run(
        [sys.executable, ROOT / ".ci" / "support_table", *argv], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "support_table record NAME COMMAND" in done.stderr


def test_the_extras_that_pages_name_exist():
    extras = set(CONFIG["options.extras_require"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = set(re.findall(r"beamjax\[([\w,-]+)\]", "".join(p.read_text("utf-8") for p in pages)))
    assert {extra for names in named for extra in names.split(",")} <= extras
    assert {"flink", "dataflow", "parquet", "zarr", "docs"} <= extras
