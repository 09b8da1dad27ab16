"""Steps of a plan hand on which members were dropped, but only to steps that read it."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import plan_of

import beamjax as bj
from beamjax.plan.steps import Map, walk

N = 12
X = np.ones((N, 2), np.float32)


def guards(fn, **options):
    """The plan of a function, and whether each pass reads what was dropped, and hands it on."""
    plan = plan_of(bj.program(placements={"clients": N})(fn), X, **options)
    passes = [step for step in walk(plan.steps) if isinstance(step, Map)]
    return plan, [step.guard and (step.guard.reads, step.guard.emits_mask) for step in passes]


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


def test_plans_hand_on_what_a_later_pass_reads_and_nothing_else():
    for fn in (one_pass, two_passes, looped, branched):
        plan, found = guards(fn)
        assert set(found) == {None}
        assert not any(name.startswith("kept") for name in plan.values)
        assert set(guards(fn, on_nonfinite="raise")[1]) == {(False, False)}
    dropping = {fn: guards(fn, on_error="drop")[1] for fn in (one_pass, two_passes, looped)}
    assert dropping[one_pass] == [(False, False)]
    assert dropping[two_passes] == [(False, True), (True, False)]
    assert dropping[looped] == [(False, True), (True, True)]
    plan, _ = guards(two_passes, on_error="drop")
    kept = [value for name, value in plan.values.items() if name.startswith("kept")]
    assert {(v.shape, v.dtype, v.placement) for v in kept} == {((), "bool", "clients")}
