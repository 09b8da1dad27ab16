"""The plan as data: its steps, their names and bytes, and that it holds plain values only."""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import plan_of
from hypothesis import given
from hypothesis import strategies as st

import beamjax as bj
from beamjax.errors import ArrayFormatError
from beamjax.plan.shard import SizeReason
from beamjax.plan.steps import Plan, ValueType
from beamjax.storage.schema import from_plain, to_plain

N = 20


@bj.program(clients=N)
def centred(w, x):
    scores = bj.map_fn(lambda v: v @ w, x)
    mean = bj.reduce_mean(scores)
    return mean, bj.map_fn(lambda s: s - mean, scores)


def centred_plan():
    return plan_of(centred, jnp.ones(3), jnp.ones((N, 3)), shard_size=8)


def test_value_types_print_as_jax_prints_them_and_know_their_bytes():
    assert str(ValueType((2, 3), "float32")) == "float32[2,3]"
    assert str(ValueType((3,), "bfloat16", None, "clients")) == "bfloat16[3]@clients"
    assert str(ValueType((2,), "uint32", "threefry2x32")) == "key<threefry2x32>[2]"
    nbytes = {"float32": 24, "bfloat16": 12, "bool": 6, "complex128": 96}
    assert {dtype: ValueType((2, 3), dtype).nbytes for dtype in nbytes} == nbytes


@given(n=st.integers(1, 10_000), size=st.integers(1, 64).map(lambda k: 8 * k))
def test_shards_cover_all_members(n, size):
    plan = Plan("p", {"clients": n}, {"clients": size}, {}, (), (), (), {}, False, "0")
    shards = len(plan.shards("clients"))
    assert (shards - 1) * size < n <= shards * size


def test_a_plan_holds_plain_values_only():
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

    check(centred_plan())


def test_reasons_for_shard_sizes_reach_workers():
    kind = Mapping[str, tuple[SizeReason, ...]]
    plan = centred_plan()
    sent = json.loads(json.dumps(to_plain(plan.size_reasons)))
    assert sent == {"clients": ["option"]}
    assert (
        from_plain(kind, sent, "a plan") == plan.size_reasons == {"clients": (SizeReason.OPTION,)}
    )
    with pytest.raises(ArrayFormatError, match=r"a plan: found 'luck' as .*\['clients'\]\[0\]"):
        from_plain(kind, {"clients": ["luck"]}, "a plan")
    # A plan of an earlier version has none.
    assert replace(plan, size_reasons={}) == plan


def described():
    """Steps and values; bodies are named by what they hold, which is also where they are called."""
    plan = centred_plan()
    return re.sub(r"body='\w+'", "body", str((plan.steps, plan.values)))


@pytest.mark.versions
def test_names_are_the_same_in_every_process(other_process):
    assert other_process(described) == described()
