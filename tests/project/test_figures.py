"""README and the documentation state what was measured."""

import copy
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def figures(monkeypatch):
    """The module is that of the repository, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import figures

    yield figures
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]


def test_pages_state_what_was_measured(figures):
    measured = figures.load()
    assert figures.missing(measured) == []
    slower = copy.deepcopy(measured)
    for row in slower["suite"]["cases"]["M"]["rows"]:
        row["seconds"] = (
            row.get("seconds", 1) * 1.5 if row["way"] == "local" else row.get("seconds")
        )
    assert [text.partition(":")[0] for text in figures.missing(slower)] == [
        "README.md", "docs/index.md",
    ]  # fmt: skip


def test_the_chart_shows_what_was_measured(figures):
    from benchmarks import bars

    measured = figures.load()
    assert bars.PATH.read_text("utf-8") == bars.chart(measured), "python -m benchmarks.bars"
    cases = measured["suite"]["cases"]
    assert bars.CASES.keys() == cases.keys()
    shown = {
        (case, row["way"])
        for case, found in cases.items()
        for row in found["rows"]
        if row["way"] in bars.TOOLS and row.get("seconds") is not None
    }
    drawn = bars.chart(measured).count('height="8"/>')
    assert drawn == len(shown)


def test_the_tables_of_growth_show_what_was_measured(figures):
    from benchmarks import curves

    rows = figures.load()["growth"]
    text = curves.PAGE.read_text("utf-8")
    assert text == curves.page(text, rows), "python -m benchmarks.curves"
    slower = [row | {"seconds": row["seconds"] + 1} for row in rows]
    assert text != curves.page(text, slower)
    assert text == curves.page(curves.page(text, slower), rows)
    with pytest.raises(ValueError, match="found 0 tables"):
        curves.page("no table", rows)


def test_growth_records_rows_in_place_of_those_of_the_same_count(figures, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    import growth

    path = tmp_path / "growth.json"
    path.write_text(figures.GROWTH.read_text("utf-8"), "utf-8")
    rows = figures.load()["growth"]
    assert growth.merged(rows[::-1], []) == rows
    anew = {"job": "shards", "runner": "DirectRunner", "count": 10_000, "seconds": 3.0}
    more = {"job": "shards", "runner": "DirectRunner", "count": 20_000, "seconds": 5.0}
    growth.record([anew, more], path)
    recorded = json.loads(path.read_text("utf-8"))
    at = next(i for i, row in enumerate(rows) if row | anew == row | {"seconds": 3.0})
    assert recorded == [*rows[:at], anew, more, *rows[at + 1 :]]
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_numbers_have_two_digits(figures):
    texts = [figures.number(value) for value in (0.84, 7.06, 10.2, 58.2, 770.4, 3204.9)]
    assert texts == ["0.8", "7.1", "10", "58", "770", "3,200"]
