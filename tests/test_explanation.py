"""What `explain` tells of programs: bytes, passes, edges, and what is gathered where."""

import dataclasses
import inspect
import json
import re

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_driver
from programs import CASES, N, W, X, Y

import beamjax
from beamjax import sources
from beamjax.errors import OptionsError, StagingError
from beamjax.explanation import STAGES, explain, human_bytes, plan_text
from beamjax.fact_types import InputFact, walk_facts
from beamjax.facts import exactness, plan_facts
from beamjax.mermaid import _escaped, plan_mermaid

N_MEMBERS = test_driver.N

PLANNED = [
    name
    for name in CASES
    if not re.search("(scan|while)_of_rounds|cond_around|scan_over_placed", name)
]


def line_of(marker):
    """The number of the line of this file with `# marker` at its end."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))
    return f"test_explanation.py:{number} "


def section(explanation, title):
    return str(explanation).split(f"\n\n{title}\n")[1].split("\n\n")[0]


@beamjax.program(clients=N)
def total(w, x):
    return beamjax.reduce_sum(beamjax.map_fn(lambda v: v @ w, x))


@beamjax.program(clients=N)
def mixed(w, x):
    y = beamjax.map_fn(lambda v: v @ w, x)
    gram = y @ y.T  # mixes
    third = jnp.sort(x, axis=0)[3]  # sorts
    return {"gram": gram, "third": third, "placed": y, "same": w, "three": jnp.float32(3)}


@beamjax.program(clients=N)
def closes_over_placed(w, x):
    y = beamjax.map_fn(lambda v: v @ w, x)
    return beamjax.reduce_sum(beamjax.map_fn(lambda v: jnp.sum(y * v[0, 0]) + v, x))  # closes


# --- all programs


@pytest.mark.parametrize("name", PLANNED)
def test_every_program_is_explained_consistently(name):
    fn, args = CASES[name].build(beamjax)
    explanation = explain(fn, *args)
    facts = explanation.facts
    assert [step.name for step in facts.steps] == list(dict.fromkeys(s.name for s in facts.steps))
    assert facts.passes == sum(step.kind == "Map" for step in facts.steps)
    known = {fact.path for fact in facts.inputs}
    for step in facts.steps:  # each step reads inputs and earlier steps only
        assert {edge.source for edge in facts.edges if edge.target == step.name} <= known
        known.add(step.name)
    assert len(facts.outputs) == len(jax.tree.leaves(jax.eval_shape(fn, *args)))
    check_mermaid(explanation.to_mermaid())
    for step in facts.steps:
        assert f"\n  {step.name}: " in str(explanation)
    json.dumps(explanation.to_json())


@pytest.mark.parametrize(
    ("name", "passes"),
    [("plain", 1), ("grad_server", 1), ("hessian", 1), ("maml", 3), ("grad_of_max", 3)],
)
def test_passes_over_the_members(name, passes):
    fn, args = CASES[name].build(beamjax)
    explanation = explain(fn, *args)
    assert explanation.facts.passes == passes
    assert f"  {passes} pass" in str(explanation).splitlines()[2]


# --- numbers


def test_bytes_of_a_plain_sum():
    facts = explain(total, W, X, options={"platforms": ["cpu", "cuda"]}).facts
    (step,) = facts.steps
    assert (step.read_bytes, step.broadcast_bytes, step.partial_bytes) == (7 * 60, 12, 20)
    (value,) = step.placed
    assert (value.type, value.nbytes, value.member_bytes, value.shard_bytes) == (
        "float32[5,3]@clients", 420, 60, 480,
    )  # fmt: skip
    (placement,) = facts.placements
    assert (placement.members, placement.shard_size, placement.shards) == (7, 8, 1)
    assert (facts.read_bytes, facts.broadcast_bytes, facts.partial_bytes) == (420, 12, 20)
    assert set(step.executables) == set(facts.executable_bytes) == {"cpu", "cuda"}
    assert min(step.executables.values()) > 100
    (reduction,) = step.reductions
    assert (reduction.reducer, reduction.lane, reduction.nbytes) == ("sum", "sum float32", 20)
    assert [(e.source, e.target, e.nbytes) for e in facts.edges] == [
        ("args[0]", step.name, 12), ("args[1]", step.name, 420), (step.name, "result", 20),
    ]  # fmt: skip


def test_shards_follow_the_options():
    x = jax.ShapeDtypeStruct((1000, 5, 3), jnp.float32)
    prog = beamjax.program(clients=1000)(lambda x: beamjax.reduce_sum(x))
    (placement,) = explain(prog, x, options={"shard_size": 16}).facts.placements
    assert (placement.shard_size, placement.shards) == (16, 63)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"), (3 * 2**20, "3.0 MiB"), (5 * 2**30, "5.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)  # fmt: skip
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("kind", "dtype", "mode", "start"),
    [
        ("sum", "float32", "exact", "exact over shards: rounded once"),
        ("sum", "complex64", "exact", "exact over shards: rounded once"),
        ("sum", "float32", "fast", "fast: in float64"),
        ("sum", "int32", "fast", "exact"),
        ("max", "bfloat16", "fast", "exact"),
        ("prod", "float64", "exact", "in the order of the shards"),
        ("any", "bool", "exact", "exact"),
    ],
)
def test_exactness(kind, dtype, mode, start):
    assert exactness(kind, dtype, mode).startswith(start)


def test_the_fast_mode_is_told():
    assert "fast: in float64" in str(explain(total, W, X, options={"reduction": "fast"}))


# --- inputs and outputs


def test_inputs_say_how_they_are_read():
    source = sources.from_arrays({"x": np.asarray(X), "y": np.asarray(Y)})
    constant = jnp.arange(3.0)

    @beamjax.program(clients=N)
    def prog(w, data, unused):
        return beamjax.reduce_sum(beamjax.map_fn(lambda x: x @ (w * constant), data["x"]))

    explanation = explain(prog, W, source, jnp.ones((2, 2), jnp.int32))
    found = {fact.path: (fact.type, fact.nbytes, fact.read) for fact in explanation.facts.inputs}
    assert found["args[0]"] == ("float32[3]", 12, "whole, in memory")
    kind, nbytes, read = found["args[1]['x']"]
    assert (kind, nbytes) == ("float32[5,3]@clients", 420)
    assert read.startswith("by shards, 7 members of ")
    assert found["args[1]['y']"][2].startswith("not read, 7 members")
    assert found["args[2]"] == ("int32[2,2]", 16, "not read, in memory")
    assert found["constant 0"] == ("float32[3]", 12, "whole, closed over")


def test_inputs_that_are_only_returned():
    (fact,) = explain(lambda w: w, W).facts.inputs
    assert fact.read == "returned as it is, in memory"


def test_abstract_arguments_are_placed_as_arrays_are():
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    explanation = explain(total, *abstract)
    assert [fact.read for fact in explanation.facts.inputs] == [
        "whole, abstract", "by shards, abstract",
    ]  # fmt: skip
    assert explanation.facts.steps == explain(total, W, X).facts.steps


def test_typed_keys_are_shown_as_keys():
    fn, args = CASES["keys_as_results"].build(beamjax)
    assert "key<" in section(explain(fn, *args), "inputs")


def test_nothing_is_read_or_computed():
    class Unreadable(sources.ArraySource):
        def read(self, start, stop):
            raise AssertionError

    arrays = sources.from_arrays(np.asarray(X))
    source = Unreadable([np.asarray(X)], arrays.leaves, arrays.treedef)
    with jax.transfer_guard("disallow"):
        str(explain(total, jax.ShapeDtypeStruct((3,), jnp.float32), source))


def test_outputs_say_where_they_come_from():
    found = {o.path: (o.type, o.source) for o in explain(mixed, W, X).facts.outputs}
    assert found == {
        "result['gram']": ("float32[7,7]", "server_0"),
        "result['placed']": ("float32[5]@clients", "map_clients_0"),
        "result['same']": ("float32[3]", "args[0]"),
        "result['third']": ("float32[5,3]", "server_0"),
        "result['three']": ("float32[]", "constant"),
    }


def test_float0_outputs():
    grad = jax.grad(lambda w, k: jnp.sum(total(w * k.astype(w.dtype), X)), (0, 1), allow_int=True)
    first, second = explain(grad, W, jnp.arange(3)).facts.outputs
    assert (first.type, second.type) == ("float32[3]", "float0[3]")
    assert (second.path, second.source, second.nbytes) == ("result[1]", "constant", 0)


# --- gathers and scatters


def test_gathers_name_the_line_the_bytes_and_the_reason():
    explanation = explain(mixed, W, X)
    assert explanation.facts.gathered_bytes == 420 + 140
    text = section(explanation, "gathered and scattered")
    assert f"{line_of('mixes')}(mixed)" in text
    assert f"{line_of('sorts')}(mixed)" in text
    assert "arg1@clients of args[1], 420 B, along axis 0, because sort mixes members" in text
    assert "of map_clients_0, 140 B, along axis 0, because dot_general mixes members" in text


def test_a_placed_value_closed_over_is_gathered():
    explanation = explain(closes_over_placed, W, X)
    text = section(explanation, "gathered and scattered")
    assert line_of("closes") in text
    assert "closes over a placed value" in text
    assert explanation.facts.passes == 2


def test_nothing_gathered_is_said():
    text = section(explain(total, W, X), "gathered and scattered")
    assert text == "  nothing is gathered"


def test_scatters_are_told():
    @beamjax.program(clients=N)
    def prog(w, x):
        y = jnp.cumsum(beamjax.reduce_sum(x)[0, 0] * jnp.arange(7.0))
        return beamjax.reduce_sum(beamjax.map_fn(lambda v, s: s * (v @ w), (x, y)))  # cuts

    text = section(explain(prog, W, X), "gathered and scattered")
    assert text.startswith("  nothing is gathered\n  scatter_0: ")
    assert line_of("cuts") in text
    assert "28 B, along axis 0" in text


# --- formats

LABEL = r'"(?:[^"<>\[\](){}|`]|<br/>)*"'
NODE = re.compile(rf" +(n\d+)(?:\[{LABEL}\]|\(\[{LABEL}\]\)|{{{{{LABEL}}}}}|{{{LABEL}}})")
EDGE = re.compile(rf"  (n\d+) -->\|{LABEL}\| (n\d+)")


def check_mermaid(text):
    """The part of Mermaid's grammar that is used; every node is declared once before its edges."""
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    nodes, depth = [], 0
    for line in lines:
        if opened := re.fullmatch(rf" +subgraph (n\d+_\w+)\[{LABEL}\]", line):
            nodes.append(opened[1])
            depth += 1
        elif line.strip() == "end":
            depth -= 1
            assert depth >= 0
        elif edge := EDGE.fullmatch(line):
            assert set(edge.groups()) <= set(nodes)
        elif styled := re.fullmatch(r"  class ((?:n\d+,?)+) moved", line):
            assert set(styled[1].split(",")) <= set(nodes)
        elif not line.startswith("  classDef moved fill:"):
            node = NODE.fullmatch(line)
            assert node, line
            nodes.append(node[1])
    assert len(nodes) == len(set(nodes))
    assert depth == 0


def test_mermaid_of_awkward_names_and_red_gathers():
    @beamjax.program(clients=N)
    def prog(tree):
        x = tree['x"]--> {#;}']
        return {'"]|`<': beamjax.reduce_sum(x) + jnp.sort(x, 0)[2]}

    text = explain(prog, {'x"]--> {#;}': X}).to_mermaid()
    check_mermaid(text)
    (gather,) = re.findall(r'(n\d+)\["gather_0<br/>', text)
    assert f"  class {gather} moved" in text
    assert "#34;#93;#124;#96;#60;" in text
    assert "classDef" not in explain(total, W, X).to_mermaid()


def test_labels_lose_nothing_but_line_breaks():
    text = 'a"b]#;<é>\nλ'
    back = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), _escaped(text))
    assert back == text.replace("\n", " ")


@pytest.mark.parametrize("stage", STAGES)
def test_html_is_escaped(stage):
    found = explain(total, W, X, stage=stage)
    for html in (found.to_html(), found._repr_html_()):
        assert html_checks.parsed(html).text.count("map") >= 1
        assert "<lambda>" not in html
    if stage == "plan":
        assert "<lambda>" in html_checks.parsed(html).text


def test_json_is_plain_data():
    record = explain(mixed, W, X).to_json()
    assert record == json.loads(json.dumps(record))
    assert record["program"] == "mixed"
    assert [step["kind"] for step in record["steps"]].count("Gather") >= 2
    assert record["edges"][0].keys() == {"source", "target", "value", "nbytes"}


def test_the_header():
    lines = str(explain(total, W, X)).splitlines()
    assert lines[:4] == [
        "plan of total",
        f"  jax {jax.__version__}, 64-bit types off",
        "  1 pass over members, 1 step",
        "  clients: 7 members in 1 shard of 8",
    ]


def test_a_plan_without_placements():
    explanation = explain(lambda x: jnp.sum(x), W)
    assert explanation.facts.passes == 0
    assert "nothing is gathered" in str(explanation)
    nothing = explain(dict)
    assert section(nothing, "inputs") == section(nothing, "outputs") == "  none"
    check_mermaid(nothing.to_mermaid())


# --- loops and branches


def facts_by_hand(plan):
    inputs = tuple(
        InputFact(spec.path, str(plan.values[spec.path]), plan.nbytes(spec.path), "", (spec.path,))
        for spec in plan.inputs
    )
    return plan_facts(plan, inputs, [out.value for out in plan.outputs])


def test_a_loop_tells_its_rounds_and_what_they_hand_on():
    facts = facts_by_hand(test_driver.nested())
    (loop,) = facts.steps
    assert (loop.kind, loop.rounds, loop.reverse) == ("Loop", 3, True)
    assert [(h.how, h.outside, h.inside.name, h.afterwards, h.inside.nbytes)
            for h in loop.handed] == [
        ("carries", "x", "p", "out", N_MEMBERS * 12), ("carries", "w", "v", "last", 12),
        ("slices", "js", "j", None, 4), ("stacks", None, "q", "qs", N_MEMBERS * 12),
        ("stacks", None, "hist", "hists", N_MEMBERS * 24), ("stacks", None, "v", "vs", 12),
    ]  # fmt: skip
    text = plan_text(facts)
    assert "\n  loop_0: Loop, 3 rounds, the last entry first\n" in text
    assert (
        "    carries    x -> p -> out   float32[3]@clients    12 B a member, 252 B in all" in text
    )
    assert "\n    line       program.py:7 (fn)\n    each round, gives q, v1, q, hist, v\n" in text
    assert "\n      branch_0: Branch, one of 2 blocks\n" in text
    assert "\n        block 1, gives added, as_\n          loop_1: Loop, 2 rounds\n" in text
    assert "each round of a loop is counted once" in text


def test_a_condition_is_told():
    facts = facts_by_hand(test_driver.halving())
    (loop,) = facts.steps
    assert [(block.title, [step.kind for step in block.steps]) for block in loop.blocks] == [
        ("condition", ["Map", "Server"]), ("each round", ["Server"]),
    ]  # fmt: skip
    assert "Loop, rounds while a condition holds\n" in plan_text(facts)


def test_totals_count_what_is_in_blocks():
    facts = facts_by_hand(test_driver.nested())
    assert facts.passes == 3
    assert "3 passes over members, 8 steps" in plan_text(facts)
    maps = [step for step in walk_facts(facts.steps) if step.kind == "Map"]
    assert facts.read_bytes == sum(step.read_bytes for step in maps) == 3 * N_MEMBERS * 12
    gathered = facts_by_hand(test_driver.exchange(2))
    assert gathered.gathered_bytes == 36
    assert "  gather_0: p of loop_0, 36 B, along axis 0" in plan_text(gathered)


@pytest.mark.parametrize("plan", ["nested", "halving", "counting", "choice"])
def test_edges_and_flowcharts_of_blocks(plan):
    facts = facts_by_hand(getattr(test_driver, plan)())
    text = plan_mermaid(facts)
    check_mermaid(text)
    steps = list(walk_facts(facts.steps))
    blocks = sum(bool(block.steps) for step in steps for block in step.blocks)
    assert text.count("subgraph ") == blocks + sum(bool(step.blocks) for step in steps)
    names = {step.name for step in steps} | {fact.path for fact in facts.inputs}
    assert {edge.source for edge in facts.edges} <= names
    json.dumps(dataclasses.asdict(facts))


def test_what_rounds_hand_on_comes_back_to_the_loop():
    edges = {(e.source, e.target, e.value) for e in facts_by_hand(test_driver.counting()).edges}
    assert {
        ("w", "loop_0", "w"), ("loop_0", "map_clients_0", "p"), ("server_1", "loop_0", "q"),
        ("server_0", "loop_0", "go"), ("limit", "server_0", "limit"), ("loop_0", "out", "out"),
    } <= edges  # fmt: skip
    assert not [e for e in edges if e[0] == e[1]]


# --- stages


@pytest.mark.parametrize(
    ("stage", "pattern"),
    [
        ("staged", r"bj_map\[\n"),
        ("flat", r"^inputs arg0:float32\[3\] arg1:float32\[7,5,3\]"),
        ("placed", r"bj_map .*-> clients along axis 0"),
        ("graph", r"gather: arg1:float32\[7,5,3\] \(clients along axis 0\) for"),
        ("plan", r"^plan of mixed"),
    ],
)
def test_stages(stage, pattern):
    explanation = explain(mixed, W, X, stage=stage)
    assert re.search(pattern, str(explanation))
    assert repr(explanation) == str(explanation)
    if stage != "plan":
        with pytest.raises(OptionsError, match=f"found an explanation of stage '{stage}'"):
            explanation.to_mermaid()
        with pytest.raises(OptionsError, match="to_json"):
            explanation.to_json()


def test_an_early_stage_is_shown_where_a_later_one_fails():
    options = {"gather_limit": 0}
    assert "sort[" in str(explain(mixed, W, X, stage="staged", options=options))
    with pytest.raises(StagingError, match="gather_limit allows 0"):
        explain(mixed, W, X, options=options)


def test_unknown_stage():
    with pytest.raises(OptionsError, match="found 'graphs', expected one of staged, flat, placed"):
        explain(total, W, X, stage="graphs")
    assert STAGES[-1] == "plan"
