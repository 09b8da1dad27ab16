"""Steps of a plan hand on which members were dropped."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import plan_of

import beamjax as bj
from beamjax.plan import Branch, Loop, Map, walk

N = 12
X = np.ones((N, 2), np.float32)


def passes(plan):
    return [step for step in walk(plan.steps) if isinstance(step, Map)]


def guards(fn, **options):
    """The plan of a function, and whether each pass reads what was dropped, and hands it on."""
    plan = plan_of(bj.program(placements={"clients": N})(fn), X, **options)
    found = [step.guard for step in passes(plan)]
    return plan, [guard and (guard.reads, guard.tells) for guard in found]


def is_kept(plan, *names):
    """Whether these values say of each member whether it is kept."""
    found = [plan.values[name] for name in names]
    return all((v.shape, v.dtype, v.placement) == ((), "bool", "clients") for v in found)


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


def test_plans_hand_on_nothing_that_nothing_reads():
    for fn in (one_pass, two_passes, looped, branched):
        plan, found = guards(fn)
        assert set(found) == {None}
        assert not any(name.startswith("kept") for name in plan.values)
        assert set(guards(fn, on_nonfinite="raise")[1]) == {(False, False)}
    plan, found = guards(one_pass, on_error="drop")
    assert found == [(False, False)]
    assert passes(plan)[0].results == ()


def test_one_pass_hands_on_to_the_next():
    plan, found = guards(two_passes, on_error="drop")
    assert found == [(False, True), (True, False)]
    first, second = passes(plan)
    assert first.results[-1] == second.operands[-1]
    assert is_kept(plan, first.results[-1])


def test_a_loop_carries_it():
    plan, _ = guards(looped, on_error="drop")
    before, inside = passes(plan)
    (loop,) = [step for step in plan.steps if isinstance(step, Loop)]
    carried = loop.carried[-1]
    assert before.results == (carried.init,)
    assert inside.operands[-1] == carried.param
    assert inside.results[-1] == loop.block.outputs[len(loop.carried) - 1]
    assert is_kept(plan, carried.param, carried.result)


def test_both_blocks_of_a_branch_return_it():
    plan, _ = guards(branched, on_error="drop")
    (branch,) = [step for step in plan.steps if isinstance(step, Branch)]
    results = {block.outputs[-1] for block in branch.blocks}
    assert passes(plan)[0].results[-1] in results
    assert len(results) == 2
    assert is_kept(plan, branch.results[-1])
