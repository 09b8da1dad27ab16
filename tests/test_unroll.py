"""Unrolled rounds compute what the loop says, in the plan in this process as well."""

import dataclasses

import numpy as np
import pytest
import test_driver
from plans import inputs_of

from beamjax.interpreters.evaluate import evaluate
from beamjax.options import Options
from beamjax.pipelines import unroll
from beamjax.plan import Gather, Map, Output, Scatter, walk

PLANS = [
    getattr(test_driver, name)() for name in ("descent", "history", "halving", "nested", "choice")
]


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
    w = test_driver.W
    (found,) = evaluate(straight, inputs_of(straight, w=w, x=test_driver.X), Options()).values()
    np.testing.assert_array_equal(
        found, test_driver.descent_by_numpy(w, test_driver.X, len(numbers))
    )
    assert [step.name for step in rounds.steps[:2]] == [
        f"loop_0[{numbers[0]}]/map_clients_0", f"loop_0[{numbers[0]}]/server_0",
    ]  # fmt: skip
    assert len({name for step in rounds.steps for name in unroll.made(step)}) == len(rounds.origin)


@pytest.mark.parametrize("reverse", [False, True])
def test_slices_and_stacks_of_rounds(reverse):
    (loop, _) = test_driver.history(4, reverse).steps
    rounds = unroll.unrolled(loop, range(1, 3), "outer/")
    first, second = (2, 1) if reverse else (1, 2)
    assert rounds.slices == {
        "outer/loop_0[1]/x": ("xs", first), "outer/loop_0[1]/c": ("cs", first),
        "outer/loop_0[2]/x": ("xs", second), "outer/loop_0[2]/c": ("cs", second),
    }  # fmt: skip
    assert rounds.carried == ("outer/loop_0[2]/z1", "outer/loop_0[2]/s1")
    assert rounds.stacked == (
        ("outer/loop_0[1]/d", "outer/loop_0[2]/d"), ("outer/loop_0[1]/t", "outer/loop_0[2]/t"),
    )  # fmt: skip
    assert rounds.steps[2].operands == ("outer/loop_0[1]/z1", "outer/loop_0[2]/x")


def test_unchanged_values_and_swaps_keep_their_names():
    (loop,) = test_driver.swap().steps
    assert unroll.unrolled(loop, range(3)).carried == ("q", "p", "v", "u")
    assert unroll.unrolled(loop, range(2)).carried == ("p", "q", "u", "v")


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_what_is_read_is_made_before(plan):
    known = {spec.server or spec.placed for spec in plan.inputs}
    made = known.union(*(unroll.made(step) for step in walk(plan.steps)))
    params = {
        value.param
        for step in walk(plan.steps)
        for value in (*getattr(step, "carried", ()), *getattr(step, "sliced", ()))
    }
    assert set().union(*(unroll.read(step) for step in plan.steps)) <= made | params
    assert made | params == set(plan.values)


@pytest.mark.parametrize(
    "step",
    [
        Gather("gather_0", "a", "b", 1, "reason", "line"),
        Scatter("scatter_0", "a", "b", 1, "reason", "line"),
        *(step for step in walk(test_driver.history().steps) if isinstance(step, Map)),
    ],
    ids=lambda step: type(step).__name__,
)
def test_renaming_and_back(step):
    old = {*unroll.read(step), *unroll.made(step)}
    there = unroll.renamed(step, "round/", {name: name.upper() for name in old})
    assert there.name == f"round/{step.name}"
    assert unroll.read(there) == {name.upper() for name in unroll.read(step)}
    assert unroll.made(there) == tuple(name.upper() for name in unroll.made(step))
    back = dataclasses.replace(
        unroll.renamed(there, "", {name.upper(): name for name in old}), name=step.name
    )
    assert back == step
