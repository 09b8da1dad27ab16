"""What the rest of a run reads from a position in the loops of a plan on."""

import pytest

from beamjax.plan.liveness import live_at, live_before, loops_at, made, used
from beamjax.plan.steps import Block
from tests.pipelines import test_driver

NAMES = ("descent", "history", "halving", "nested", "choice")
PLANS = {name: getattr(test_driver, name)() for name in NAMES}

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
