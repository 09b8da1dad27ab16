"""What is live at a round is what the rest of a run reads, and nothing else."""

import pytest
import test_driver

from beamjax.liveness import live_at, live_before, loops_at, made, used
from beamjax.plan import Block


def whole(plan):
    return Block(plan.steps, tuple(out.value for out in plan.outputs))


NESTED = whole(test_driver.nested())


@pytest.mark.parametrize(
    ("plan", "position", "live"),
    [
        (test_driver.descent(), (("loop_0", 2),), "p x"),
        (test_driver.history(), (("loop_0", 1),), "zp sp xs cs"),
        (test_driver.counting(), (("loop_0", 1),), "p k x limit"),
        (test_driver.choice(), (("branch_0", 1), ("loop_0", 1)), "p"),
        (test_driver.nested(), (("loop_0", 1),), "p v js"),
        # In the branch: what its loop carries, and what the rest of the round and later ones read.
        (test_driver.nested(), (("loop_0", 1), ("branch_0", 1), ("loop_1", 1)), "a v js"),
    ],
)
def test_live_values(plan, position, live):
    assert live_at(whole(plan), position) == set(live.split())


def test_what_steps_use_comes_from_before_them():
    (loop,) = NESTED.steps
    assert used(loop) == {"x", "w", "js"}
    assert made(loop) == ("out", "last", "qs", "hists", "vs")
    assert live_before(NESTED.steps, ("out", "kept")) == {"x", "w", "js", "kept"}


def test_loops_under_way():
    found = loops_at(NESTED, (("loop_0", 1), ("branch_0", 1), ("loop_1", 2)))
    assert [(loop.name, done) for loop, done in found] == [("loop_0", 1), ("loop_1", 2)]


@pytest.mark.parametrize(
    "position",
    [
        (("loop_9", 1),),
        (("loop_0", 1), ("server_0", 0)),
        (("loop_0", 1), ("branch_0", 7), ("loop_1", 0)),
        (("loop_0", 1), ("branch_0", 0), ("loop_1", 0)),
        (("loop_0", 1), ("branch_0", 1)),
    ],
)
def test_places_that_are_not_there(position):
    with pytest.raises(KeyError):
        live_at(NESTED, position)
