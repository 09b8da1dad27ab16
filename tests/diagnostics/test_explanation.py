"""What `explain` says of programs: bytes, passes, edges, and what is gathered where."""

import inspect
import re

import html_checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import check_explanation, check_mermaid, facts_of
from programs import PROGRAMS, W, rnd

import beamjax
from beamjax._text import add_bytes, human_bytes
from beamjax.diagnostics.text import _escaped
from beamjax.errors import OptionsError, StagingError
from beamjax.explanation import STAGES, explain
from beamjax.numerics.reducers import accumulator_kind
from beamjax.sources.array_source import ArraySource

N = 7
X, Y = rnd(N, 5, 3, seed=1), rnd(N, 5, seed=2)


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


# --- numbers


def test_bytes_of_a_plain_sum():
    explanation = explain(total, W, X, options={"platforms": ["cpu", "cuda"]})
    facts = facts_of(explanation)
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
    assert (reduction.reducer, reduction.buffer, reduction.nbytes) == ("sum", "sum float32", 20)
    assert [(e.source, e.target, e.nbytes) for e in facts.edges] == [
        ("w", step.name, 12), ("x", step.name, 420), (step.name, "result", 20),
    ]  # fmt: skip
    totals = section(explanation, "totals")
    for row in (r"read by all passes +420 B", r"broadcast +12 B", r"gathered +0 B"):
        assert re.search(row, totals)
    device = section(explanation, "peak memory of a device (estimate), cuda")
    assert re.search(r"during all steps +12 B +broadcasts 12 B\n", device)
    assert re.search(r"shard, twice 960 B, .* results of the previous shard 20 B\n", device)


def test_human_bytes():
    expected = {
        0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 2**20 - 1: "1.0 MiB",
        3 * 2**20: "3.0 MiB", 5 * 2**30: "5.0 GiB", 2**50: "1024.0 TiB",
    }  # fmt: skip
    assert {count: human_bytes(count) for count in expected} == expected
    unknown = add_bytes([{"each": 4, "fixed": 0}, 8, {"each": 2044, "fixed": 2}])
    assert human_bytes(unknown) == "n x 2.0 KiB + 10 B"


def test_exactness():
    for reduction, name, mode, start in (
        ("sum", "float32", "exact", "exact over shards: rounded once"),
        ("sum", "float32", "fast", "fast: in float64"),
        ("sum", "int32", "fast", "exact"),
        ("max", "bfloat16", "fast", "exact"),
        ("prod", "float64", "exact", "in the order of the shards"),
        ("any", "bool", "exact", "exact"),
    ):
        dtype = np.dtype(name)
        found = accumulator_kind(reduction, dtype, mode).exactness(dtype)
        assert found.startswith(start), (reduction, name, mode)


# --- inputs and outputs


def test_inputs_and_how_they_are_read():
    source = beamjax.from_arrays({"x": np.asarray(X), "y": np.asarray(Y)})
    constant = jnp.arange(3.0)

    @beamjax.program(clients=N)
    def prog(w, data, unused, same):
        sums = beamjax.reduce_sum(beamjax.map_fn(lambda x: x @ (w * constant), data["x"]))
        return sums, same

    explanation = explain(prog, W, source, jnp.ones((2, 2), jnp.int32), jnp.float32(1))
    inputs = facts_of(explanation).inputs
    found = {fact.path: (fact.type, fact.nbytes, fact.read) for fact in inputs}
    assert found["w"] == ("float32[3]", 12, "whole, in memory")
    kind, nbytes, read = found["data['x']"]
    assert (kind, nbytes) == ("float32[5,3]@clients", 420)
    assert read.startswith("by shards, 7 members of ")
    assert found["data['y']"][2].startswith("not read, 7 members")
    assert found["unused"] == ("int32[2,2]", 16, "not read, in memory")
    assert found["same"] == ("float32[]", 4, "returned as it is, in memory")
    assert found["constant 0"] == ("float32[3]", 12, "whole, closed over")


def test_abstract_arguments_are_placed_as_arrays_are():
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, X)]
    facts = facts_of(explain(total, *abstract))
    assert [fact.read for fact in facts.inputs] == ["whole, abstract", "by shards, abstract"]
    assert facts.steps == facts_of(explain(total, W, X)).steps
    fn, args = PROGRAMS["keys_as_results"].build(beamjax)
    assert "key<" in section(explain(fn, *args), "inputs")


def test_nothing_is_read_or_computed():
    class Unreadable(ArraySource):
        def read(self, start, stop):
            raise AssertionError

    arrays = beamjax.from_arrays(np.asarray(X))
    source = Unreadable([np.asarray(X)], arrays.leaves, arrays.treedef)
    with jax.transfer_guard("disallow"):
        str(explain(total, jax.ShapeDtypeStruct((3,), jnp.float32), source))


def test_outputs_say_where_they_come_from():
    found = {o.path: (o.type, o.source) for o in facts_of(explain(mixed, W, X)).outputs}
    assert found == {
        "result['gram']": ("float32[7,7]", "server_0"),
        "result['placed']": ("float32[5]@clients", "map_clients_0"),
        "result['same']": ("float32[3]", "w"),
        "result['third']": ("float32[5,3]", "server_0"),
        "result['three']": ("float32[]", "constant"),
    }
    grad = jax.grad(lambda w, k: jnp.sum(total(w * k.astype(w.dtype), X)), (0, 1), allow_int=True)
    first, second = facts_of(explain(grad, W, jnp.arange(3))).outputs
    assert (first.type, second.type) == ("float32[3]", "float0[3]")
    assert (second.path, second.source, second.nbytes) == ("result[1]", "constant", 0)


# --- gathers and scatters


def test_gathers_name_the_line_the_bytes_and_the_reason():
    explanation = explain(mixed, W, beamjax.from_arrays(np.asarray(X)))
    assert facts_of(explanation).gathered_bytes == 420 + 140
    text = section(explanation, "gathered and scattered")
    assert f"{line_of('mixes')}(mixed)" in text
    assert f"{line_of('sorts')}(mixed)" in text
    assert "arg1@clients of x, 420 B, along axis 0, because sort mixes members" in text
    assert "of map_clients_0, 140 B, along axis 0, because dot_general mixes members" in text
    explanation = explain(closes_over_placed, W, X)
    text = section(explanation, "gathered and scattered")
    assert line_of("closes") in text
    assert "closes over a placed value" in text
    assert facts_of(explanation).passes == 2
    in_memory = facts_of(explain(mixed, W, X))
    assert in_memory.gathered_bytes == 140
    assert in_memory.inputs[1].read == "whole and by shards, in memory"
    nothing = section(explain(total, W, X), "gathered and scattered")
    assert nothing == "  nothing is gathered"


def test_sorts_of_arrays_in_memory_along_their_members_name_the_operator():
    def rules(axis):
        sort = lambda w, x: beamjax.reduce_sum(x) + jnp.sort(x, axis=axis)[0]
        steps = facts_of(explain(beamjax.program(clients=N)(sort), W, X)).steps
        return [step.rule for step in steps if "sort" in step.rule]

    (along,) = rules(0)
    assert along.endswith("(beamjax.quantile finds medians and quantiles by passes)")
    assert "quantile" not in str(rules(1))


def test_scatters_name_the_line_and_the_bytes():
    @beamjax.program(clients=N)
    def prog(w, x):
        y = jnp.cumsum(beamjax.reduce_sum(x)[0, 0] * jnp.arange(7.0))
        return beamjax.reduce_sum(beamjax.map_fn(lambda v, s: s * (v @ w), (x, y)))  # cuts

    text = section(explain(prog, W, X), "gathered and scattered")
    assert text.startswith("  nothing is gathered\n  scatter_0: ")
    assert line_of("cuts") in text
    assert "28 B, along axis 0" in text


# --- formats


def test_mermaid_of_awkward_names_and_red_gathers():
    @beamjax.program(clients=N)
    def prog(tree):
        x = tree['x"]--> {#;}']
        return {'"]|`<': beamjax.reduce_sum(x) + jnp.sort(2 * x, 0)[2]}

    text = explain(prog, {'x"]--> {#;}': X}).to_mermaid()
    check_mermaid(text)
    (gather,) = re.findall(r'(n\d+)\["gather_0<br/>', text)
    assert f"  class {gather} moved" in text
    assert "#34;#93;#124;#96;#60;" in text
    assert "classDef" not in explain(total, W, X).to_mermaid()
    label = 'a"b]#;<é>\nλ'
    back = re.sub(r"#(\d+);", lambda m: chr(int(m[1])), _escaped(label))
    assert back == label.replace("\n", " ")


def test_a_plan_without_placements():
    explanation = explain(lambda x: jnp.sum(x), W)
    assert facts_of(explanation).passes == 0
    assert "nothing is gathered" in str(explanation)
    nothing = explain(dict)
    assert section(nothing, "inputs") == section(nothing, "outputs") == "  none"
    check_mermaid(nothing.to_mermaid())


# --- loops and branches


@beamjax.program(clients=N)
def rounds(w, x):
    """A loop with a branch in each round, and then a loop of unknown length."""

    def one(carry, rate):
        x, w = carry
        x = beamjax.map_fn(lambda v: v * rate, x)
        norm = beamjax.reduce_mean(beamjax.map_fn(lambda v: jnp.sum(v @ w), x))
        step = lambda w: w - rate * beamjax.reduce_sum(beamjax.map_fn(lambda v: v[0], x))
        w = jax.lax.cond(norm > 0, step, lambda w: w, w)
        return (x, w), (norm, beamjax.map_fn(lambda v: v[0, 0], x))

    (x, w), (norms, seen) = jax.lax.scan(one, (x, w), jnp.ones(4), reverse=True)
    more = lambda s: s / 2 + 0 * beamjax.reduce_sum(x[:, 0, 0])
    last = jax.lax.while_loop(lambda s: s > 1, more, w[0])
    return {"x": x, "w": w, "norms": norms, "seen": seen, "last": last}


def test_loops_and_branches():
    explanation = explain(rounds, W, X)
    check_explanation(explanation)
    facts, text = facts_of(explanation), str(explanation)
    assert "3 passes over members, 12 steps" in text
    assert (facts.passes, facts.read_bytes, facts.broadcast_bytes) == (3, 3 * 420, 16)
    first, last = [step for step in facts.steps if step.kind == "Loop"]
    assert (first.rounds, first.reverse, last.rounds, last.reverse) == (4, True, None, False)
    assert "\n  loop_0: Loop, 4 rounds, the last entry first\n" in text
    assert [(h.how, h.outside is None, h.afterwards is None, h.inside.type, h.inside.nbytes)
            for h in first.handed] == [
        ("carries", False, False, "float32[5,3]@clients", 420),
        ("carries", False, False, "float32[3]", 12), ("slices", False, True, "float32[]", 4),
        ("stacks", True, False, "float32[]", 4), ("stacks", True, False, "float32[]@clients", 28),
    ]  # fmt: skip
    one, three = first.handed[0], first.handed[1]
    arrow = f"    carries    {one.outside} -> {one.inside.name} -> {one.afterwards}"
    assert re.search(re.escape(arrow) + " .* 60 B a member, 420 B in total", text)
    branch = first.blocks[0].steps[-1]
    assert [len(block.steps) for block in branch.blocks] == [0, 2]
    assert "\n      branch_0: Branch, one of 2 blocks\n" in text
    assert f"\n        block 0, returns {three.inside.name}\n        block 1, returns " in text
    assert [(block.title, [step.kind for step in block.steps]) for block in last.blocks] == [
        ("condition", ["Server"]), ("each round", ["Map", "Server"]),
    ]  # fmt: skip

    edges = {(edge.source, edge.target, edge.nbytes) for edge in facts.edges}
    assert {
        ("x", "loop_0", 420), ("loop_0", "map_clients_0", 420), ("branch_0", "loop_0", 12),
        ("server_1", "branch_0", 4), ("server_2", "branch_0", 12), ("server_4", "loop_1", 1),
        ("loop_1", "server_4", 4), ("loop_0", "result['seen']", 112),
    } <= edges  # fmt: skip


# --- stages

PATTERNS = {
    "staged": r"bj_map\[\n",
    "flat": r"^inputs arg0:float32\[3\] arg1:float32\[7,5,3\]",
    "placed": r"bj_map .*-> clients along axis 0",
    "graph": r"gather: arg1:float32\[7,5,3\] \(clients along axis 0\) for",
    "plan": r"^plan of mixed",
}


@pytest.mark.parametrize("stage", STAGES)
def test_stages(stage):
    explanation = explain(mixed, W, beamjax.from_arrays(np.asarray(X)), stage=stage)
    assert re.search(PATTERNS[stage], str(explanation))
    assert repr(explanation) == str(explanation)
    for html in (explanation.to_html(), explanation._repr_html_()):
        assert "map" in html_checks.parsed(html).text
        assert "<lambda>" not in html
    if stage != "plan":
        for method in (explanation.to_mermaid, explanation.to_json):
            with pytest.raises(OptionsError, match=f"{method.__name__}.*of stage '{stage}'"):
                method()


def test_an_early_stage_is_shown_where_a_later_one_fails():
    options = {"gather_limit": 0}
    assert "sort[" in str(explain(mixed, W, X, stage="staged", options=options))
    with pytest.raises(StagingError, match="gather_limit allows 0"):
        explain(mixed, W, X, options=options)
    with pytest.raises(OptionsError, match="found 'graphs', expected one of staged, flat, placed"):
        explain(total, W, X, stage="graphs")


# --- words and bytes that stand nowhere else


def test_steps_say_their_shards_and_how_members_are_computed():
    x = np.zeros((100, 5, 3), np.float32)
    options = {"shard_size": 8}
    assert ": Map, a pass over clients, 13 shards\n" in str(explain(free, W, x, options=options))
    stream = beamjax.from_chunks(lambda: [np.asarray(x)])
    unknown = str(explain(free, W, stream, options=options))
    assert ": Map, a pass over clients, 105 shards\n" in unknown
    assert "the number of members is unknown" in unknown
    for more, words in (
        ({"member_loop": "loop"}, "members sequentially: "),
        (
            {"member_loop": "batches", "shard_size": 16},
            "members in batches of 8: ",
        ),
    ):
        (step,) = facts_of(explain(free, W, x, options=options | more)).steps
        assert step.reason.startswith(words), step.reason


@beamjax.program(clients=None)
def free(w, x):
    return beamjax.reduce_sum(beamjax.map_fn(lambda v: v @ w, x))


def test_inputs_without_values_take_no_bytes():
    nothing = np.zeros((3,), jax.dtypes.float0)
    facts = facts_of(explain(lambda x, y: jnp.sum(x), W, nothing))
    assert [(fact.type, fact.nbytes) for fact in facts.inputs] == [
        ("float32[3]", 12), ("float0[3]", 0),
    ]  # fmt: skip


def test_merging_takes_memory_of_each_bundle_and_of_the_pieces():
    def merged(threads):
        beam = {"direct_running_mode": "multi_threading", "direct_num_workers": threads}
        found = facts_of(explain(total, W, X, options={"shard_size": 8, **beam})).memory
        return found.steps["map_clients_0"]["accumulators being merged"]

    one, two = merged(1), merged(2)
    assert two > one > 9 / 10 * 4 * 2 * (two - one)  # half a sum a bundle, and four whole ones
