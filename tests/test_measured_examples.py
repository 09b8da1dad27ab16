"""The script that measures the examples, and the page that it made."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROUNDS = "round 1: loss 2.3, accuracy 20.2%, 9.00 s\n" + "".join(
    f"round {i}: loss 2.2, accuracy 34.0%, {i}.50 s\n" for i in range(2, 7)
)


@pytest.fixture(scope="module")
def script():
    path = ROOT / "benchmarks" / "examples.py"
    spec = importlib.util.spec_from_file_location("measured_examples", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def test_the_page_has_every_example_and_none_failed(script):
    text = (ROOT / "docs" / "measured-examples.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| \[(\w+)\.py\]\(#\w+\) \| (.*) \|$", text, re.M))
    assert sorted(rows) == script.EXAMPLES
    for name, row in rows.items():
        *cells, same = row.split(" | ")
        assert len(cells) == len(script.RUNNERS)
        for runner, cell in zip(script.RUNNERS, cells, strict=True):
            without = (script.NOT_ON.get((name, runner)), "not run")
            assert cell in without or re.fullmatch(r"\d+\.\d s", cell), (name, runner)
        assert same == "yes", name


def test_seconds_and_names_of_runners_are_no_difference(script):
    runs = {
        "local": script.Run(1.0, 0, "on local:  1.2 s\nloss 3\n", "", "here"),
        "PrismRunner": script.Run(2.0, 0, "on PrismRunner: 35 s\nloss 3\n", "", "here"),
        "FlinkRunner": script.Run(2.0, 0, "on FlinkRunner: 35 s\nloss 4\n", "", "there"),
    }
    text = script.page({"monte_carlo": runs}, {})
    row = next(line for line in text.splitlines() if line.startswith("| [monte_carlo"))
    assert row == "| [monte_carlo.py](#monte_carlopy) | 1.0 s | 2.0 s | 2.0 s | 2 kinds |"
    assert "Measured here.\n\nMeasured there: monte_carlo.py (FlinkRunner).\n" in text
    assert text.count("```text") == 2


def test_the_table_of_rounds(script):
    good = script.Run(20.0, 0, ROUNDS, "", "here")
    rounds = {f"{on} {n}": good for on, n in script.WORKERS}
    rounds["FlinkRunner 2"] = script.Run(20.0, 1, "", "no", "here")
    del rounds["DirectRunner 2"]
    text = script.page({"cnn_clients": {"local": good}}, rounds)
    rows = [line for line in text.splitlines() if re.match(r"\| [\w, ]+ \| .*first", line)]
    assert [row.split(" | ")[2:] for row in rows] == [
        ["4.50 s (first 9.00 s)", "4.50 s (first 9.00 s) |"],
        ["4.50 s (first 9.00 s)", "not run |"],
        ["4.50 s (first 9.00 s)", "4.50 s (first 9.00 s) |"],
        ["4.50 s (first 9.00 s)", "one only |"],
        ["4.50 s (first 9.00 s)", "FAILED (1) |"],
    ]
    assert "were of 2 kinds" in text
    del rounds["FlinkRunner 2"]
    assert "were the same" in script.page({"cnn_clients": {"local": good}}, rounds)
