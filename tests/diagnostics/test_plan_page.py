"""The page of a plan: what it says, where it says it, and that users' texts stay texts."""

import dataclasses
import json
import re

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import lines_of
from hypothesis import given
from hypothesis import strategies as st
from programs import N, X

import beamjax as bj
from beamjax.diagnostics.fact_types import ChoiceFact
from beamjax.diagnostics.pages import drawing, graph, markup
from beamjax.diagnostics.pages.plan_page import plan_page, seconds_of
from beamjax.diagnostics.pages.shell import document, fragment
from beamjax.diagnostics.text import human_seconds
from beamjax.errors import SourceError
from beamjax.telemetry.progress import Tally
from tests.diagnostics.test_explanation import W, rounds

EVIL = '<script>alert("it\'s")</script> & </title> <!-- ]]> \u2028 λ'


@bj.program(clients=N)
def trimmed(x):
    scores = bj.map_fn(lambda v: jnp.sum(v**2), x)
    return jnp.mean(jnp.sort(scores)[1:-1])  # <sorts & "gathers">


def text_of(facts):
    return html_checks.parsed(document(plan_page(facts, {}))).text


def test_a_gather_is_red_and_says_where():
    found = html_checks.parsed(bj.explain(trimmed, X).to_html())
    (box,) = found.all("a", class_="box gather")
    assert "GATHERS 28 B to the server" in found.text
    assert "because sort mixes members" in found.text
    assert "jnp.mean(jnp.sort(scores)[1:-1])" in found.text
    assert "test_plan_page.py:" in found.text
    assert found.all("path", class_="sign")
    assert found.all("tr", class_="loud")
    (step,) = found.all("details", class_="gather")
    assert box["href"] == f"#{step['id']}"


def test_loops_and_branches_are_boxes_in_boxes():
    facts = bj.explain(rounds, W, X).facts
    kinds = {item.key: item for item in graph.plan_area(facts).items}
    (round_,) = kinds["loop_0"].areas
    assert round_.title == "each round"
    (branch,) = [item for item in round_.items if item.kind == "branch"]
    assert [inner.title for inner in branch.areas] == ["block 0", "block 1"]
    assert [inner.title for inner in kinds["loop_1"].areas] == ["condition", "each round"]
    ends = {(line.source, line.target) for line in round_.lines}
    assert ("in", branch.key) in ends
    assert any(target == "out" for _, target in ends)
    text = text_of(facts)
    for part in ("Loop, 4 rounds", "Loop, rounds while a condition holds", "goes on?"):
        assert part in text


def test_lines_have_bytes_and_those_of_a_member():
    lines = list(lines_of(graph.plan_area(bj.explain(trimmed, X).facts)))
    words_of = [[word.rpartition(", ")[2] for word in line.words] for line in lines]
    assert words_of == [["420 B", "60 B a member"], ["28 B", "4 B a member"], ["28 B"], ["4 B"]]
    assert [line.kind for line in lines] == ["placed", "gathered", "served", "served"]
    found = [drawing.thickness(n) for n in (0, 1000, 10**6, 10**12)]
    assert found == sorted(found)
    assert found[0] == 1 <= found[-1] < 8
    (n,) = jax.export.symbolic_shape("n")
    total = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v * 2, x)))
    unknown = bj.explain(total, jax.ShapeDtypeStruct((n, 3), "float32"))
    assert "n x 12 B" in html_checks.parsed(unknown.to_html()).text


def test_many_inputs_are_one_box():
    tree = {f"w{i}": np.ones(5, np.float32) for i in range(9)}
    fit = bj.program(clients=N)(
        lambda tree, x: bj.reduce_sum(bj.map_fn(lambda v: sum(map(jnp.sum, tree.values())) * v, x))
    )
    facts = bj.explain(fit, tree, X).facts
    inputs = [item for item in graph.plan_area(facts).items if item.kind == "input"]
    assert [len(item.names) for item in inputs] == [9, 1]
    assert inputs[0].words[1].text == "9 arrays, 180 B"


# --- predicted and measured


def test_predicted_and_measured_seconds():
    facts = bj.explain(trimmed, X).facts
    spent = {"map_clients_0": Tally(read=0.5, compute=1.0), "server_0": Tally(compute=0.5)}
    found = html_checks.parsed(document(plan_page(facts, {}, spent, 2.5)))
    assert "measured 1.5 s, 75%" in found.text
    assert "2.5 s" in found.text
    seconds = found.data["seconds"]["server_0"]
    assert (seconds["measured"], seconds["share"]) == (0.5, 0.25)
    sums = {step.step: step.read + step.compute + step.merge for step in facts.predicted.steps}
    assert seconds["predicted"] == pytest.approx(sums["server_0"])
    assert seconds_of(dataclasses.replace(facts, predicted=None), None) == {}

    choices = (ChoiceFact("shard size", "64", "a reason", "shard_size=64"),)
    predicted = dataclasses.replace(facts.predicted, seconds=9.0)
    text = text_of(dataclasses.replace(facts, choices=choices, predicted=predicted))
    assert "9 s" in text
    assert "a reason" in text


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_measures_the_steps_of_a_plan(runner):
    with bj.launch(trimmed, X, runner=runner) as job:
        job.result()
        for run in (job, job.report()):
            found = html_checks.parsed(bj.explain(trimmed, X).to_html(run=run))
            assert found.data["seconds"]["map_clients_0"]["measured"] > 0
            assert found.text.count("measured ") >= 2


# --- texts of users


def test_texts_of_users_stay_texts():
    @bj.program(placements={"clients": N})
    def evil(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v, x[EVIL])), jnp.sort(x[EVIL], axis=0)

    facts = bj.explain(evil, {EVIL: X}).facts
    facts = dataclasses.replace(facts, program=EVIL, notes=(EVIL,))
    steps = tuple(
        dataclasses.replace(s, functions=(EVIL,), reason=EVIL, lines=(f"{EVIL}:3 ({EVIL})",))
        for s in facts.steps
    )
    facts = dataclasses.replace(facts, steps=steps)
    lines = {f"{EVIL}:3 ({EVIL})": EVIL}
    page = plan_page(facts, lines)
    for html in (document(page), fragment(page)):
        assert "<script>alert" not in html
        found = html_checks.parsed(html)
        assert found.text.count('alert("it\'s")') >= 8
        assert found.data["plan"]["program"] == EVIL
        assert found.data["source_lines"] == lines
        assert len(found.all("script")) == 2


@given(st.text())
def test_any_text_is_escaped(text):
    found = html_checks.parsed(markup.tag("p", text, title=text))
    plain = markup._UNPRINTABLE.sub("\ufffd", text)
    as_read = plain.replace("\r\n", "\n").replace("\r", "\n")
    assert found.text.replace("\r\n", "\n").replace("\r", "\n") == as_read
    json.loads(markup.script_json({"t": text, "n": [float("nan"), 1.5]}))
    assert "<" not in markup.script_json({"t": text})


def test_elements():
    made = markup.tag("a", 1, markup.tag("br"), None, False, class_="x", hidden=True, href=None)
    assert made == '<a class="x" hidden>1<br></a>'
    assert markup.tag("p", title=False) == "<p></p>"
    assert markup.tag("rect", x=1.0, y=2.3456, width=3) == '<rect x="1" y="2.35" width="3"></rect>'
    assert markup.number(float("nan")) == "0"
    assert "1,234" in markup.table([[1234, "x" * 50]])


def test_words():
    expected = {
        0: "0 s", 2e-6: "2 us", 0.0123: "12.3 ms", 0.9999: "1 s", 12.345: "12.3 s",
        99.96: "1 min 40 s", 310: "5 min 10 s", 7500: "2 h 5 min",
    }  # fmt: skip
    assert {seconds: human_seconds(seconds) for seconds in expected} == expected
    assert graph.shortened("a  b\nc") == "a b c"
    assert graph.shortened("x" * 11, 10) == "x" * 9 + "…"
    assert graph.letters(graph.shortened("漢" * 60, 10)) <= 10
    assert graph.letters("é" + "e\u0301") == 2


# --- files and notebooks


def test_a_page_is_one_file_with_its_data(tmp_path):
    explanation = bj.explain(trimmed, X)
    explanation.save(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert text == explanation.to_html()
    assert html_checks.parsed(text).data["plan"] == explanation.to_json()
    assert text.startswith("<!DOCTYPE html>\n<html")
    with pytest.raises(SourceError, match=r"there/plan\.html: cannot write it"):
        explanation.save(str(tmp_path / "there" / "plan.html"))


def test_parts_of_a_notebook_have_ids_and_styles_of_their_own():
    explanation = bj.explain(trimmed, X)
    both = explanation._repr_html_() + explanation._repr_html_()
    found = html_checks.parsed(both)  # Which finds ids that are there twice.
    assert not [name for name, _ in found.tags if name in ("html", "head", "body", "main")]
    style = both.split("<style>")[1].split("</style>")[0]
    plain = re.sub(r"/\*.*?\*/|@media[^{]*\{", "", style, flags=re.S)
    selectors = re.findall(r"([^{}]+)\{", plain)
    assert len(selectors) > 20
    assert [each for given in selectors for each in given.split(",") if ".bjx" not in each] == []
