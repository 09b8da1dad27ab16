"""Who was dropped, handed on through the steps of a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import beamjax as bj
from beamjax.interpreters import stage
from beamjax.options import parse_options
from beamjax.plan import Branch, Loop, Map, walk
from beamjax.planning import plan_for

N = 12
X = np.ones((N, 2), np.float32)


def planned(fn, *args, **options):
    arguments, key, restore = stage.flatten_arguments(args)
    fn = bj.program(placements={"clients": N})(fn)
    return plan_for(fn, arguments, key, restore, parse_options(options)).plan


def passes(plan):
    return [step for step in walk(plan.steps) if isinstance(step, Map)]


def is_told(plan, name):
    value = plan.values[name]
    return (value.shape, value.dtype, value.placement) == ((), "bool", "clients")


def one_pass(x):
    return bj.reduce_sum(bj.map_fn(jnp.sin, x))


def two_passes(x):
    mean = bj.reduce_mean(x)
    return bj.reduce_sum(bj.map_fn(lambda v, m: v - m, (x, bj.broadcast(mean))))


def looped(x):
    return jax.lax.fori_loop(0, 3, lambda i, w: w + one_pass(x) * i, jnp.zeros(2))


def branched(x):
    mean = bj.reduce_mean(x)
    return jax.lax.cond(mean[0] > 0, one_pass, lambda x: mean, x)


@pytest.mark.parametrize("fn", [one_pass, two_passes, looped, branched])
def test_plans_of_runs_that_drop_nobody_are_as_ever(fn):
    plan = planned(fn, X)
    assert all(step.guard is None for step in passes(plan))
    assert not any(name.startswith("kept") for name in plan.values)
    strict = planned(fn, X, on_nonfinite="raise")
    assert {(s.guard.reads, s.guard.tells) for s in passes(strict)} == {(False, False)}


def test_nobody_is_told_where_nobody_asks():
    (step,) = passes(planned(one_pass, X, on_error="drop"))
    assert (step.guard.reads, step.guard.tells, step.results) == (False, False, ())


def test_one_pass_tells_the_next():
    plan = planned(two_passes, X, on_error="drop")
    first, second = passes(plan)
    assert (first.guard.reads, first.guard.tells) == (False, True)
    assert (second.guard.reads, second.guard.tells) == (True, False)
    assert first.results[-1] == second.operands[-1]
    assert is_told(plan, first.results[-1])


def test_a_loop_carries_it():
    plan = planned(looped, X, on_error="drop")
    before, inside = passes(plan)
    (loop,) = [step for step in plan.steps if isinstance(step, Loop)]
    carried = loop.carried[-1]
    assert before.results == (carried.init,)
    assert inside.operands[-1] == carried.param
    assert inside.results[-1] == loop.block.outputs[len(loop.carried) - 1]
    assert is_told(plan, carried.param)
    assert is_told(plan, carried.result)


def test_blocks_of_a_branch_return_it():
    plan = planned(branched, X, on_error="drop")
    (branch,) = [step for step in plan.steps if isinstance(step, Branch)]
    first = passes(plan)[0]
    told = {block.outputs[-1] for block in branch.blocks}
    assert first.results[-1] in told
    assert len(told) == 2
    assert is_told(plan, branch.results[-1])
