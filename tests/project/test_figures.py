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
    measured = json.loads(figures.MEASURED.read_text("utf-8"))
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

    measured = json.loads(figures.MEASURED.read_text("utf-8"))
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


def test_numbers_have_two_digits(figures):
    texts = [figures.number(value) for value in (0.84, 7.06, 10.2, 58.2, 770.4, 3204.9)]
    assert texts == ["0.8", "7.1", "10", "58", "770", "3,200"]
