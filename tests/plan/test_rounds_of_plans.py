"""Loops of a plan: rounds as a straight list of steps, what they read later, and how many a graph
holds."""

import dataclasses

import numpy as np
import pytest
from plans import inputs_of

from beamjax.options import Options
from beamjax.plan import graph_sizes, unroll
from beamjax.plan.liveness import live_at, live_before, loops_at, made, used
from beamjax.plan.steps import Block, Output
from beamjax.runtime.local import evaluate
from tests.pipelines import test_driver

NAMES = ("descent", "history", "halving", "nested", "choice")
PLANS = {name: getattr(test_driver, name)() for name in NAMES}

# --- unrolled rounds


@pytest.mark.parametrize("numbers", [range(5), range(2, 4)])
def test_unrolled_rounds_are_a_straight_plan(numbers):
    plan = test_driver.descent(5)
    (loop,) = plan.steps
    rounds = unroll.unrolled(loop, numbers)
    types = {new: plan.values[old] for new, old in rounds.origin.items()}
    straight = dataclasses.replace(
        plan,
        values={**plan.values, **types, "p": plan.values["w"]},
        inputs=(dataclasses.replace(plan.inputs[0], server="p"), plan.inputs[1]),
        steps=rounds.steps,
        outputs=(Output(rounds.carried[0]),),
    )
    w, x = test_driver.W, test_driver.X
    (found,) = evaluate(straight, inputs_of(straight, w=w, x=x), Options()).values()
    np.testing.assert_array_equal(found, test_driver.descent_by_numpy(w, x, len(numbers)))
    first = f"loop_0[{numbers[0]}]"
    assert [s.name for s in rounds.steps[:2]] == [f"{first}/map_clients_0", f"{first}/server_0"]
    assert len({name for step in rounds.steps for name in unroll.made(step)}) == len(rounds.origin)


# --- what the rest of a run reads


def whole(plan):
    return Block(plan.steps, tuple(out.value for out in plan.outputs))


NESTED = whole(PLANS["nested"])


def test_live_values():
    cases = [
        ("descent", (("loop_0", 2),), "p x"),
        ("history", (("loop_0", 1),), "zp sp xs cs"),
        ("choice", (("branch_0", 1), ("loop_0", 1)), "p"),
        ("nested", (("loop_0", 1),), "p v js"),
        # In the branch: what its loop carries, and what the rest of the round and later ones read.
        ("nested", (("loop_0", 1), ("branch_0", 1), ("loop_1", 1)), "a v js"),
    ]
    for name, position, live in cases:
        assert live_at(whole(PLANS[name]), position) == set(live.split()), (name, position)
    counting = whole(test_driver.counting())
    assert live_at(counting, (("loop_0", 1),)) == {"p", "k", "x", "limit"}
    (loop,) = NESTED.steps
    assert used(loop) == {"x", "w", "js"}
    assert made(loop) == ("out", "last", "qs", "hists", "vs")
    assert live_before(NESTED.steps, ("out", "kept")) == {"x", "w", "js", "kept"}


def test_loops_under_way():
    found = loops_at(NESTED, (("loop_0", 1), ("branch_0", 1), ("loop_1", 2)))
    assert [(loop.name, done) for loop, done in found] == [("loop_0", 1), ("loop_1", 2)]
    loop = ("loop_0", 1)
    for position in (
        (("loop_9", 1),),
        (loop, ("server_0", 0)),
        (loop, ("branch_0", 7), ("loop_1", 0)),
        (loop, ("branch_0", 0), ("loop_1", 0)),
        (loop, ("branch_0", 1)),
    ):
        with pytest.raises(KeyError):
            live_at(NESTED, position)


# --- how many rounds make a graph


def long_loop(rounds=1000, copies=1):
    """A plan of a loop with as many steps in a round as are asked for."""
    plan = test_driver.descent(rounds)
    (loop,) = plan.steps
    block = dataclasses.replace(loop.block, steps=loop.block.steps * copies)
    return plan, dataclasses.replace(loop, block=block)


def sized(plan, loop, shared=True, **options):
    return graph_sizes.graph_size(plan, loop, Options(**options), shared)


@pytest.mark.parametrize(
    ("given", "shared", "expected"), [(None, True, 8), (None, False, 32), (5, True, 5)]
)
def test_rounds_of_a_graph(given, shared, expected, monkeypatch):
    plan = PLANS["descent"]
    rounds = lambda given: graph_sizes.rounds_per_graph(
        plan, plan.steps[0], Options(rounds_per_graph=given), shared
    )
    assert rounds(given) == expected
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", 24 * 3)
    assert rounds(given) == (given or 3)  # two server values of 12 bytes a round
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", 1)
    assert rounds(None) == 1


def test_graphs_of_one_round(monkeypatch):
    plan = test_driver.exchange(4)
    found = sized(plan, plan.steps[0], rounds_per_graph=4)
    assert (found.chosen.rounds, found.others) == (1, ())
    assert found.why == "a round scatters what the next one reads"
    free = dataclasses.replace(graph_sizes.HERE, pipeline=0.0)
    monkeypatch.setattr(graph_sizes, "HERE", free)
    assert sized(*long_loop()).chosen.rounds == 1


@pytest.mark.parametrize("shared", [True, False])
def test_hardly_anything_is_gained_past_what_is_chosen(shared):
    plan, loop = long_loop()
    found = sized(plan, loop, shared)
    seconds = {
        n: sized(plan, loop, shared, rounds_per_graph=n).chosen.seconds
        for n in (*range(1, 100), 1000)
    }
    chosen = found.chosen
    assert chosen.seconds == seconds[chosen.rounds] <= 1.02 * min(seconds.values())
    assert chosen.seconds < min(seconds[1], seconds[1000])
    assert [(other.rounds, other.seconds) for other in found.others] == [
        (n, seconds[n]) for n in (1, 2 * chosen.rounds)
    ]
    assert found.why == "more are hardly faster"


def test_steps_and_bytes_keep_graphs_small(monkeypatch):
    widths = [sized(*long_loop(copies=copies)).chosen.rounds for copies in (1, 2, 4, 8, 40)]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1] == 1
    free = sized(*long_loop()).chosen
    monkeypatch.setattr(graph_sizes, "MAX_BYTES", free.nbytes // 2)
    found = sized(*long_loop())
    assert found.chosen.rounds == free.rounds // 2
    assert found.chosen.nbytes <= graph_sizes.MAX_BYTES
    assert found.why == "more hold too many bytes"
