"""The bounds of setup.cfg, the records of nightly runs and the table of docs/support.md agree."""

import configparser
import importlib.machinery
import importlib.util
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = configparser.ConfigParser()
CONFIG.read(ROOT / "setup.cfg")


def load():
    path = str(ROOT / ".ci" / "support_table")
    loader = importlib.machinery.SourceFileLoader("support_table", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


SUPPORT = load()
RECORDS = {path.stem: json.loads(path.read_text()) for path in SUPPORT.RECORDS.glob("*.json")}


def numbers(version):
    return [int(x) for x in re.findall(r"\d+", version)]


def test_the_page_has_the_table_of_the_records():
    page = SUPPORT.PAGE.read_text("utf-8")
    assert page == SUPPORT.page()
    assert len(re.findall(r"^\| \w+ \| 3\.\d+\.\d+ \|", page, re.M)) == len(RECORDS)
    steps = re.search('^STEPS="(.*)"$', (ROOT / ".ci" / "nightly").read_text("utf-8"), re.M)
    assert set(RECORDS) <= set(steps[1].split())


def test_the_lowest_and_newest_versions_were_tested():
    record, bounds = RECORDS["lowest"], SUPPORT.lower_bounds()
    for package in SUPPORT.PACKAGES:
        bound, found = numbers(bounds[package]), numbers(record[package])
        assert found[: len(bound)] == bound, package
        assert not any(found[len(bound) :]), package
    assert numbers(record["python"])[:2] == numbers(CONFIG["options"]["python_requires"])
    named = re.findall(r":: Python :: (3\.\d+)", CONFIG["metadata"]["classifiers"])
    tested = {".".join(record["python"].split(".")[:2]) for record in RECORDS.values()}
    assert max(named, key=numbers) in tested
    assert tested <= set(named)


def test_the_version_is_that_of_the_package_and_extras_of_pages_exist():
    assert CONFIG["metadata"]["version"] == "attr: beamjax._version.__version__"
    extras = set(CONFIG["options.extras_require"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = re.findall(r"beamjax\[([\w,-]+)\]", "".join(p.read_text("utf-8") for p in pages))
    assert {extra for names in named for extra in names.split(",")} <= extras
    assert {"dataflow", "zarr", "docs"} <= extras
