"""The page of a plan: what it says, where it says it, and that users' texts stay texts."""

import re

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of

import beamjax as bj
from beamjax.diagnostics.pages.page import document, fragment
from beamjax.diagnostics.pages.plan_page import plan_page, text_page
from beamjax.diagnostics.text import human_seconds
from beamjax.errors import OptionsError, SourceError
from beamjax.jobs.report import Report
from beamjax.telemetry.progress import Progress, Totals
from tests.diagnostics.test_explanation import N, W, X, rounds

EVIL = '<script>alert("it\'s")</script> & </title> <!-- ]]> \u2028 λ'


@bj.program(clients=N)
def trimmed(x):
    scores = bj.map_fn(lambda v: jnp.sum(v**2), x)
    return jnp.mean(jnp.sort(scores)[1:-1])  # <sorts & "gathers">


def text_of(plan):
    return html_checks.parsed(document(plan_page(plan))).text


def graph_of(plan):
    return html_checks.parsed(document(plan_page(plan))).data["graph"]


def words_of(node):
    return [text for text, _ in node["words"]]


def test_a_gather_is_red_and_says_where():
    found = html_checks.parsed(bj.explain(trimmed, X).to_html())
    (box,) = [node for node in found.data["graph"]["nodes"] if node["kind"] == "gather"]
    assert ["GATHERS 28 B to the server", "loud"] in box["words"]
    assert box["names"] == ["gather_0"]
    for text in ("because sort mixes members", "jnp.mean(jnp.sort(scores)[1:-1])"):
        assert any(text in words for words in words_of(box)), text
    assert any(words.startswith("at test_plan_page.py:") for words in words_of(box))
    assert len(found.all("tr", class_="loud")) == 1
    table = bj.explain(trimmed, X).to_html().split("<h2>Inputs</h2>")[1]
    assert re.findall("<code>(.*?)</code>", table.split("</table>")[0]) == [
        "x", "arg0@clients", "float32[5,3]@clients",
    ]  # fmt: skip
    (step,) = found.all("details", class_="gather")
    assert step["data-step"] == "gather_0"
    assert "is gathered" not in found.text
    assert 'jnp.mean(jnp.sort(scores)[1:-1])  # <sorts & "gathers">' in found.text


def test_loops_and_branches_are_boxes_in_boxes():
    facts = facts_of(bj.explain(rounds, W, X))
    boxes = {node["key"]: node for node in graph_of(facts)["nodes"]}
    (round_,) = boxes["loop_0"]["blocks"]
    assert round_["title"] == "each round"
    (loop,) = [step for step in facts.steps if step.name == "loop_0"]
    rate = loop.handed[2].inside.name
    assert words_of(round_["nodes"][0]) == [
        "each round", "carried: 2 values, 432 B", f"one entry of: {rate}, 4 B",
    ]  # fmt: skip
    assert words_of(round_["nodes"][-1]) == ["carries 2 values, 432 B", "stacks 2 values, 32 B"]
    (branch,) = [node for node in round_["nodes"] if node["kind"] == "branch"]
    assert [inner["title"] for inner in branch["blocks"]] == ["block 0", "block 1"]
    condition, each = boxes["loop_1"]["blocks"]
    assert (condition["title"], each["title"]) == ("condition", "each round")
    assert words_of(condition["nodes"][-1]) == ["another round?"]
    ends = {(edge["source"], edge["target"]) for edge in round_["edges"]}
    assert ("in", branch["key"]) in ends
    assert (branch["key"], "out") in ends
    assert ("x", "loop_0") in {(e["source"], e["target"]) for e in graph_of(facts)["edges"]}
    text = text_of(facts)
    for part in ("Loop, 4 rounds", "Loop, rounds while a condition holds", "nothing"):
        assert part in text


def test_lines_have_bytes_and_those_of_a_member():
    edges = graph_of(facts_of(bj.explain(trimmed, X)))["edges"]
    words = [["420 B", "60 B a member"], ["28 B", "4 B a member"], ["28 B"], ["4 B"]]
    assert [edge["words"][1:] for edge in edges] == words
    assert [edge["kind"] for edge in edges] == ["placed", "gathered", "served", "served"]
    assert [edge["nbytes"] for edge in edges] == [420, 28, 28, 4]
    assert edges[0]["title"] == "arg0@clients: float32[5,3]@clients, 420 B, 60 B a member"
    (n,) = jax.export.symbolic_shape("n")
    total = bj.program(clients=None)(lambda x: bj.reduce_sum(bj.map_fn(lambda v: v * 2, x)))
    unknown = facts_of(bj.explain(total, jax.ShapeDtypeStruct((n, 3), "float32")))
    assert graph_of(unknown)["edges"][0]["words"][1:] == ["n x 12 B"]
    assert "n x 12 B" in text_of(unknown)


def test_each_argument_is_one_box():
    tree = {f"w{i}": np.ones(5, np.float32) for i in range(9)}

    @bj.program(clients=N)
    def fit(tree, x, ends):
        low = bj.reduce_sum(bj.map_fn(lambda v: sum(map(jnp.sum, tree.values())) * v[0], x))
        high = bj.reduce_max(bj.map_fn(lambda v: v @ ends["right"] + low[0], x))
        return low @ ends["left"], high

    ends = {"left": np.ones(3, np.float32), "right": np.ones(3, np.float32)}
    graph = graph_of(facts_of(bj.explain(fit, tree, X, ends)))
    inputs = [node for node in graph["nodes"] if node["kind"] == "input"]
    assert [words_of(node) for node in inputs] == [
        ["tree", "9 arrays, 180 B"],
        ["x", "float32[5,3]@clients", "420 B"],
        ["ends", "2 arrays, 24 B", "['left'] float32[3]", "['right'] float32[3]"],
    ]
    assert [len(node["names"]) for node in inputs] == [9, 1, 2]
    read = {edge["values"][0] for edge in graph["edges"] if edge["source"] == "ends"}
    assert len(read) == 2  # two steps read a leaf each


# --- measured


def test_measured_seconds():
    plan = bj.explain(trimmed, X).to_json()
    steps = {"map_clients_0": Totals(read=0.5, compute=1.0), "server_0": Totals(compute=0.5)}
    run = Report("f", "local", "done", 0.0, Progress(steps=steps, seconds=2.5)).to_json()
    found = html_checks.parsed(document(plan_page(plan, run)))
    boxes = {node["key"]: node for node in found.data["graph"]["nodes"]}
    assert "measured 1.5 s, 75%" in words_of(boxes["map_clients_0"])
    assert "measured 500 ms, 25%" in words_of(boxes["server_0"])
    assert "1.5 s, the sum over all workers" in found.text
    assert "read 33%, compute 67%" in found.text
    assert [a["style"] for a in found.all("span") if "style" in a][:2] == [
        "width:33.33%",
        "width:66.67%",
    ]
    assert "2.5 s" in found.text
    choices = [{"what": "shard size", "chosen": "64", "why": "a reason", "option": "shard_size"}]
    assert "a reason" in text_of({**plan, "choices": choices})


@pytest.mark.parametrize("runner", ["local", "DirectRunner"])
def test_a_run_measures_the_steps_of_a_plan(runner):
    with bj.launch(trimmed, X, runner=runner) as job:
        job.result()
        for run in (job, job.report()):
            found = html_checks.parsed(bj.explain(trimmed, X).to_html(run=run))
            words = [words_of(node) for node in found.data["graph"]["nodes"]]
            assert any(text.startswith("measured ") for each in words for text in each)
            assert found.text.count("over all workers") >= 2


# --- texts of users


def test_texts_of_users_stay_texts():
    @bj.program(placements={"clients": N})
    def evil(x):
        return bj.reduce_sum(bj.map_fn(lambda v: v, x[EVIL])), jnp.sort(x[EVIL], axis=0)

    line = f"{EVIL}:3 ({EVIL})"
    plan = bj.explain(evil, {EVIL: X}).to_json()
    plan |= {"program": EVIL, "notes": [EVIL], "source_lines": {line: EVIL}}
    for step in plan["steps"]:
        step |= {"functions": [EVIL], "reason": EVIL, "lines": [line]}
    page = plan_page(plan)
    for html in (document(page), fragment(page)):
        assert "<script>alert" not in html
        found = html_checks.parsed(html)
        assert found.text.count('alert("it\'s")') >= 8
        assert found.data["plan"]["program"] == EVIL
        assert found.data["plan"]["source_lines"] == {line: EVIL}
        assert len(found.all("script")) == 2


def test_words():
    expected = {
        0: "0 s", 2e-6: "2 us", 0.0123: "12.3 ms", 0.9999: "1 s", 12.345: "12.3 s",
        99.96: "1 min 40 s", 310: "5 min 10 s", 7500: "2 h 5 min",
    }  # fmt: skip
    assert {seconds: human_seconds(seconds) for seconds in expected} == expected


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
    with pytest.raises(OptionsError, match=r"plan\.pdf', expected .* ends in \.html, \.htm"):
        explanation.save(tmp_path / "plan.pdf")
    assert not (tmp_path / "plan.pdf").exists()


def test_parts_of_a_notebook_have_ids_and_styles_of_their_own():
    explanation = bj.explain(trimmed, X)
    for html, count in ((explanation.to_html(), 7), (explanation._repr_html_(), 1)):
        sections = html_checks.parsed(html).all("details", class_="section")
        assert (len(sections), sum("open" in each for each in sections)) == (7, count)
    both = explanation._repr_html_() + explanation._repr_html_()
    found = html_checks.parsed(both)  # Which finds ids that are there twice.
    assert not [name for name, _ in found.tags if name in ("html", "head", "body", "main")]
    style = both.split("<style>")[1].split("</style>")[0]
    plain = re.sub(r"/\*.*?\*/|@media[^{]*\{", "", style, flags=re.S)
    selectors = re.findall(r"([^{}]+)\{", plain)
    assert len(selectors) > 20
    assert [each for given in selectors for each in given.split(",") if ".bjx" not in each] == []


def test_characters_that_html_forbids_are_replaced():
    page = document(text_page("a \x00", "b \ud800 \ufffe <&\x1f\t\n"))
    assert html_checks.parsed(page).text.count("\ufffd") == 5
    page.encode()
