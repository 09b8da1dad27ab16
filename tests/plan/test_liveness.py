"""What the rest of a run reads from a position in the loops of a plan on."""

import pytest

from beamjax.plan.liveness import defined, live_at, live_before, loops_at, used
from beamjax.plan.steps import Block, Branch, Carried, Loop, Map, Server, Sliced


def server(name, types):
    """A step from the names `inputs -> outputs`."""
    inputs, outputs = (tuple(names.split()) for names in types.split("->"))
    return Server(name, "body", inputs, outputs)


def a_pass(name, types):
    """A pass from the names `broadcasts | operands -> results`."""
    inputs, results = types.split("->")
    broadcasts, operands = (tuple(names.split()) for names in inputs.split("|"))
    return Map(name, "clients", "body", broadcasts, operands, tuple(results.split()), ())


def loop(name, block, carried, sliced="", stacked="", condition=None):
    """A loop from names: carried as `init:param:result`, sliced as `operand:param`."""
    return Loop(
        name, None if condition else 3, condition, block,
        tuple(Carried(*text.split(":")) for text in carried.split()),
        tuple(Sliced(*text.split(":")) for text in sliced.split()),
        tuple(stacked.split()), False, "program.py:7 (fn)",
    )  # fmt: skip


def counting():
    """While i < limit, a pass over members."""
    condition = Block((server("server_0", "k limit -> go"),), ("go",))
    block = Block((a_pass("map_0", "p | x -> t"), server("server_1", "t k -> q k1")), ("q", "k1"))
    return Block(
        (loop("loop_0", block, "w:p:out i:k:count", condition=condition),), ("out", "count")
    )


def choice():
    """One of a pass over x and a loop of passes; both results are used."""
    first = Block((a_pass("map_0", "w | x -> y0 t0"),), ("y0", "t0"))
    inner = Block((a_pass("map_1", "| p -> p1"),), ("p1",))
    second = Block((loop("loop_0", inner, "x:p:y1"), a_pass("map_2", "| y1 -> t1")), ("y1", "t1"))
    branch = Branch("branch_0", "i", (first, second), ("y", "t"), "p.py:1")
    return Block((branch, a_pass("map_3", "t | y -> total")), ("y", "t", "total"))


def nested():
    """A branch in each round of a loop; one of its blocks is a loop."""
    inner = Block((a_pass("map_0", "v | a -> a1"),), ("a1", "a"))
    taken = Block((loop("loop_1", inner, "p:a:added", "", "as_"),), ("added", "as_"))
    other = Block((a_pass("map_2", "| p -> flat"),), ("p", "flat"))
    block = Block(
        (
            server("server_0", "j -> odd"),
            Branch("branch_0", "odd", (other, taken), ("q", "hist"), "p.py:2"),
            a_pass("map_1", "| q -> t"),
            server("server_1", "t v -> v1"),
        ),
        ("q", "v1", "q", "hist", "v"),
    )
    rounds = loop("loop_0", block, "x:p:out w:v:last", "js:j", "qs hists vs")
    return Block((rounds,), ("out", "last", "qs", "hists", "vs"))


NESTED = nested()


def test_live_values():
    cases = [
        (counting, (("loop_0", 1),), "p k x limit"),
        (choice, (("branch_0", 1), ("loop_0", 1)), "p"),
        (nested, (("loop_0", 1),), "p v js"),
        # In the branch: what its loop carries, and what the rest of the round and later ones read.
        (nested, (("loop_0", 1), ("branch_0", 1), ("loop_1", 1)), "a v js"),
    ]
    for plan, position, live in cases:
        assert live_at(plan(), position) == set(live.split()), (plan, position)
    (rounds,) = NESTED.steps
    assert used(rounds) == {"x", "w", "js"}
    assert defined(rounds) == ("out", "last", "qs", "hists", "vs")
    assert live_before(NESTED.steps, ("out", "kept")) == {"x", "w", "js", "kept"}


def test_loops_under_way():
    found = loops_at(NESTED, (("loop_0", 1), ("branch_0", 1), ("loop_1", 2)))
    assert [(each.name, done) for each, done in found] == [("loop_0", 1), ("loop_1", 2)]
    outer = ("loop_0", 1)
    for position in (
        (("loop_9", 1),),
        (outer, ("server_0", 0)),
        (outer, ("branch_0", 7), ("loop_1", 0)),
        (outer, ("branch_0", 0), ("loop_1", 0)),
        (outer, ("branch_0", 1)),
    ):
        with pytest.raises(KeyError):
            live_at(NESTED, position)
