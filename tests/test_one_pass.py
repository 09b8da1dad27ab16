"""Which plans run while members of unknown number are read for the first time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from streams import stream

import beamjax as bj
from beamjax import planning
from beamjax.interpreters import stage
from beamjax.one_pass import obstacle, open_placements, split
from beamjax.options import Options

X = np.arange(60, dtype=np.float32).reshape(20, 3)
opened = bj.program(placements={"clients": None})


def plan_of(fn, *args):
    arguments, key, restore = stage.flatten_arguments(args)
    plan = planning.plan_for(fn, arguments, key, restore, Options()).plan
    return plan, [i for i, argument in enumerate(arguments) if argument.is_stream]


@opened
def mean(x):
    return bj.reduce_mean(x) * x.shape[0]


@opened
def variance(x):
    center = bj.reduce_mean(x)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - center) ** 2, x))


@opened
def rounds(x):
    def round_(w, rate):
        return w - rate * bj.reduce_sum(bj.map_fn(lambda v: v * w, x)), None

    return jax.lax.scan(round_, jnp.ones(3), jnp.ones(2))[0]


@opened
def scaled(x):
    n = x.shape[0]
    return bj.reduce_sum(bj.map_fn(lambda v: jnp.sin(v / n), x))


@opened
def as_it_is(x):
    return bj.reduce_sum(x), x


def test_one_pass():
    plan, streamed = plan_of(mean, stream(X))
    assert open_placements(plan) == ["clients"]
    assert obstacle(plan, streamed) == ""
    before, after = split(plan)
    assert [step.name for step in before] == ["map_clients_0"]
    assert len(before) + len(after) == len(plan.steps)


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (variance, "2 passes read them: map_clients_0, map_clients_1"),
        (rounds, "rounds around placed operators"),
        (scaled, "map_clients_0 reads their number"),
        (as_it_is, "as it is"),
    ],
    ids=["variance", "rounds", "scaled", "as_it_is"],
)
def test_obstacles(fn, reason):
    assert reason in obstacle(*plan_of(fn, stream(X)))


def test_two_placements():
    @bj.program(placements={"a": None, "b": None})
    def prog(x, y):
        return bj.reduce_sum(x, placement="a") + bj.reduce_sum(y, placement="b")

    assert "several placements" in obstacle(*plan_of(prog, stream(X), stream(X)))
