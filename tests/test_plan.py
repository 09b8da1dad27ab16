"""The plan as data: sizes, names, and that it holds nothing but plain values."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.interpreters.stage import flatten_arguments
from beamjax.options import Options
from beamjax.plan import Gather, Map, Plan, Server, ValueType
from beamjax.planning import make_plan

N = 20


def plan_of(fn, *args, **options):
    arguments, _, restore = flatten_arguments(args)
    return make_plan(fn, arguments, restore, Options(**options)).plan


@bj.program(clients=N)
def centred(w, x):
    scores = bj.map_fn(lambda v: v @ w, x)
    mean = bj.reduce_mean(scores)
    return mean, bj.map_fn(lambda s: s - mean, scores)


@pytest.fixture(name="plan")
def make_centred_plan():
    return plan_of(centred, jnp.ones(3), jnp.ones((N, 3)), shard_size=8)


def test_value_types_print_as_jax_prints_them():
    assert str(ValueType((2, 3), "float32")) == "float32[2,3]"
    assert str(ValueType((3,), "bfloat16", None, "clients")) == "bfloat16[3]@clients"
    assert str(ValueType((2,), "uint32", "threefry2x32")) == "key<threefry2x32>[2]"


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("float32", 24), ("bfloat16", 12), ("bool", 6), ("complex128", 96)]
)
def test_bytes_of_a_value(dtype, nbytes):
    assert ValueType((2, 3), dtype).nbytes == nbytes


def test_steps_passes_and_bytes(plan):
    assert [type(step) for step in plan.steps] == [Map, Map]
    assert plan.passes() == 2
    assert plan.sizes == {"clients": N}
    (first, second) = plan.steps
    assert plan.nbytes(first.operands[0]) == N * 3 * 4
    assert [r.reducer for lane in first.lanes for r in lane.reductions] == ["mean"]
    assert second.operands == first.results


@given(n=st.integers(1, 10_000), size=st.integers(1, 64))
def test_shards_cover_all_members(n, size):
    plan = Plan(
        "p", {"clients": n}, {"clients": 8 * size}, {}, (), (), (), {}, False, "0"
    )  # fmt: skip
    shards = plan.shards("clients")
    assert (shards - 1) * 8 * size < n <= shards * 8 * size


def test_a_plan_holds_plain_values_only(plan):
    plain = (str, int, float, bool, bytes, type(None), np.ndarray)

    def check(value):
        if dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                check(getattr(value, field.name))
        elif isinstance(value, dict | tuple):
            for item in value.items() if isinstance(value, dict) else value:
                check(item)
        else:
            assert isinstance(value, plain), value

    check(plan)


def test_names_are_the_same_in_every_process():
    code = (
        f"import jax.numpy as jnp, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_plan import plan_of, centred\n"
        "plan = plan_of(centred, jnp.ones(3), jnp.ones((20, 3)), shard_size=8)\n"
        "print(plan.steps, plan.values)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    assert len(outputs) == 1


def test_kinds_of_steps():
    @bj.program(clients=N)
    def fn(x):
        y = bj.map_fn(jnp.sin, x)
        return jnp.sort(y, axis=0) + 1.0

    plan = plan_of(fn, jnp.ones((N, 3)))
    assert [type(step) for step in plan.steps] == [Map, Gather, Server]
