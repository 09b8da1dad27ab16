"""The bounds of setup.cfg, the records of nightly runs and the table of docs/support.md agree."""

import configparser
import importlib.machinery
import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_pins_are_of_all_that_has_a_bound():
    pins = SUPPORT.constraints().splitlines()
    assert "jax==0.10.2" in pins
    assert {"pytest", "zarr", "shtab"} <= {re.split("[=<]", pin)[0] for pin in pins}
    assert [line for line in SUPPORT.requirements() if ">=" not in line] == []


def test_a_record_of_a_step(tmp_path, monkeypatch):
    page, log, environment = (tmp_path / name for name in ("support.md", "log", "venv"))
    installed = environment / "lib" / "python3.12" / "site-packages" / "jax-9.8.7.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: jax\nVersion: 9.8.7\n")
    (environment / "pyvenv.cfg").write_text("home = /usr\nversion_info = 3.12.1\n")
    page.write_text("# Versions\n\n| step | old |\n| --- | --- |\n| gone | 1 |\n\nThe end.\n")
    monkeypatch.setattr(SUPPORT, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(SUPPORT, "PAGE", page)
    log.write_text("3 passed in 1 s\n=== 7 passed, 1 skipped in 90 s ===\nbye\n")
    SUPPORT.record("newest", 90.0, log, environment)
    record = json.loads((tmp_path / "records" / "newest.json").read_text())
    assert (record["result"], record["minutes"]) == ("7 passed", 1.5)
    assert set(SUPPORT.PACKAGES) < set(record)
    assert (record["python"], record["jax"], record["numpy"]) == ("3.12.1", "9.8.7", "none")
    text = page.read_text()
    assert "\n| newest | 3.12.1 | 9.8.7 | none | " in text
    assert "gone" not in text
    assert text.startswith("# Versions\n\n| step | python | jax | ")
    assert text.endswith("|\n\nThe end.\n")


@pytest.mark.parametrize("argv", [[], ["tables"], ["record", "name"]])
def test_wrong_arguments(argv, capsys):
    assert SUPPORT.main(argv) == 2
    assert "support_table record STEP SECONDS" in capsys.readouterr().err


def test_the_version_is_that_of_the_package_and_extras_of_pages_exist():
    assert CONFIG["metadata"]["version"] == "attr: beamjax._version.__version__"
    extras = set(CONFIG["options.extras_require"])
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = re.findall(r"beamjax\[([\w,-]+)\]", "".join(p.read_text("utf-8") for p in pages))
    assert {extra for names in named for extra in names.split(",")} <= extras
    assert {"flink", "dataflow", "parquet", "zarr", "docs"} <= extras
