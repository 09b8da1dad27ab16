"""Inputs of a plan: whole on the server, by ranges along the members."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import beamjax as bj
from beamjax.errors import SourceError
from beamjax.plan.steps import Input, Plan, ValueType
from beamjax.runtime.inputs import Inputs
from beamjax.runtime.values import Reader
from beamjax.sources.array_source import ArraySource

X = np.arange(60, dtype=np.float32).reshape(20, 3)


def inputs(specs, values, **types):
    plan = Plan(
        name="prog", sizes={"clients": 20}, shard_sizes={"clients": 8}, values=types,
        inputs=tuple(specs), steps=(), outputs=(), bodies={}, x64=False, jax_version="0",
    )  # fmt: skip
    return Inputs(plan, values)


def test_server_values_have_the_dtype_of_the_plan():
    for value, dtype, expected in [
        (2.0, "float32", np.float32(2)),
        (3, "int32", np.int32(3)),
        (True, "bool", np.True_),
        (np.float64(2), "float32", np.float32(2)),
        (np.int64(7), "int32", np.int32(7)),
        (jnp.ones(3, "bfloat16"), "bfloat16", np.ones(3, ml_dtypes.bfloat16)),
    ]:
        given = inputs([Input("a", "a", None)], [value], a=ValueType((), dtype))
        (found,) = given.server().values()
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_source_is_read_once_for_all_its_leaves():
    class Counting(ArraySource):
        def read(self, start, stop):
            reads.append((start, stop))
            return super().read(start, stop)

    reads = []
    plain = bj.from_arrays((X, X[:, 0]))
    source = Counting(plain._arrays, plain.leaves, plain.treedef)
    specs = [Input("a", None, "a@c"), Input("b", "b", "b@c")]
    found = inputs(specs, [(source, 0), (source, 1)], b=ValueType((20,), "float32"))
    reader = found.reader()
    assert len(reader.sources) == 1
    values = reader.read(["a@c", "b@c"], 3, 6)
    np.testing.assert_array_equal(values["a@c"], X[3:6])
    np.testing.assert_array_equal(values["b@c"], X[3:6, 0])
    assert reads == [(3, 6)]
    np.testing.assert_array_equal(found.server()["b"], X[:, 0])


def test_a_source_that_gives_too_few_members():
    class Short(ArraySource):
        def read(self, start, stop):
            return super().read(start, stop - 1)

    plain = bj.from_arrays(X)
    reader = Reader((Short(plain._arrays, plain.leaves, plain.treedef),), {"x": (0, 0)}, False)
    with pytest.raises(SourceError, match="asked for members 8 to 15, found 7 of them"):
        reader.read(["x"], 8, 16)
