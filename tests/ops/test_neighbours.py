"""`bj.neighbours` against NumPy: values, derivatives, batches, and what it refuses."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from explained import facts_of
from helpers import assert_close, assert_same_types, examples
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import beamjax as bj

RNG = np.random.default_rng(0)
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "int8", "int4", "uint16",
          "bool", "complex64"]  # fmt: skip


def around(x, before=0, after=0, fill=0, wrap=False):
    """The neighbours of the rows of an array of NumPy, one by one."""
    x = np.asarray(x)
    n, out = len(x), np.full((len(x), before + 1 + after, *x.shape[1:]), fill, x.dtype)
    for i in range(n):
        for j in range(before + 1 + after):
            member = i - before + j
            if wrap or 0 <= member < n:
                out[i, j] = x[member % n]
    return out


def program(before=0, after=0, fill=0, wrap=False):
    return bj.program(days="x")(lambda x: bj.neighbours(x, before, after, fill, wrap))


calls = st.tuples(
    st.integers(0, 20), st.integers(0, 4), st.integers(0, 4), st.integers(0, 5), st.booleans()
)


@hypothesis.given(calls, st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 0)]))
@examples(8)
def test_values(call, dtype, shape):
    n, before, after, fill, wrap = call
    fill = 0 if wrap else fill % 2 if dtype == "bool" else fill
    x = jnp.asarray(RNG.integers(0, 5, (n, *shape))).astype(dtype)
    found = program(before, after, fill, wrap)(x)
    expected = jnp.asarray(around(x, before, after, fill, wrap))
    assert_same_types(found, expected)
    np.testing.assert_array_equal(found, expected)


@hypothesis.given(calls, st.sampled_from([8, 16, None]), st.sampled_from(DTYPES))
@examples(3)
def test_runs_in_shards(call, shard_size, dtype):
    n, before, after, fill, wrap = call
    fill = 0 if wrap else fill % 2 if dtype == "bool" else fill
    x = jnp.asarray(RNG.integers(0, 5, (n, 2))).astype(dtype)
    fn = program(before, after, fill, wrap)
    options = {} if shard_size is None else {"shard_size": shard_size}
    found = bj.run(fn, x, runner="local", options=options)
    assert_same_types(found, fn(x))
    np.testing.assert_array_equal(found, around(x, before, after, fill, wrap))
    assert n == 0 or facts_of(bj.explain(fn, x, options=options)).gathered_bytes == 0


@pytest.mark.parametrize("width", [2, 20])
@pytest.mark.parametrize("wrap", [False, True])
def test_derivatives_and_batches(width, wrap):
    before, after = width // 2, (width - 1) // 2
    x = RNG.normal(size=(21, 3)).astype("float32")
    weights = RNG.normal(size=(width, 3)).astype("float32")

    @bj.program(days="x")
    def loss(x):
        rows = bj.neighbours(x, before, after, wrap=wrap)
        return bj.reduce_sum(
            bj.map_fn(lambda v: jnp.sum(jnp.sin(v) * weights.astype(v.dtype)), rows)
        )

    def expected(x):
        index = jnp.arange(21)[:, None] + jnp.arange(-before, after + 1)[None]
        inside = wrap | ((index >= 0) & (index < 21))[..., None]
        return jnp.sum(jnp.sin(jnp.where(inside, x[index % 21], 0)) * weights[None])

    with jax.enable_x64(True):
        check_grads(loss, (x.astype("float64"),), 2, rtol=1e-4)
    for fn, want in [(loss, expected), (jax.grad(loss), jax.grad(expected))]:
        assert_close(fn(x), want(x))
        assert_close(bj.run(fn, x, runner="local", options={"shard_size": 16}), want(x))
    batch = jnp.stack([x, 2 * x], axis=1)
    assert_close(jax.vmap(jax.grad(loss), 1)(batch), jax.vmap(jax.grad(expected), 1)(batch))


def test_a_tree_and_a_fill_that_is_differentiated():
    x = {"a": RNG.normal(size=(5, 2)).astype("float32"), "b": np.arange(5)}
    fn = bj.program(days="x")(lambda x, fill: bj.neighbours(x, before=2, fill=fill))
    found = fn(x, 7)
    np.testing.assert_array_equal(found["a"], around(x["a"], 2, fill=7))
    np.testing.assert_array_equal(found["b"], around(x["b"], 2, fill=7))
    slope = jax.grad(lambda fill: jnp.sum(fn(x["a"], fill)))(jnp.float32(1))
    assert slope == 6  # three values beyond the end, of two numbers each
    rows = jax.vmap(lambda fill: fn(x["a"], fill))(jnp.arange(3.0))
    np.testing.assert_array_equal(rows[2], around(x["a"], 2, fill=2))


def test_typed_keys():
    keys = jax.random.split(jax.random.key(0), 5)
    end = jax.random.key(9)
    filled = bj.program(days="x")(lambda x: bj.neighbours(x, after=1, fill=end))(keys)
    wrapped = bj.run(program(after=1, wrap=True), keys, runner="local", options={"shard_size": 8})
    data = jax.random.key_data
    np.testing.assert_array_equal(data(filled[:4, 1]), data(keys[1:]))
    np.testing.assert_array_equal(data(filled[4, 1]), data(end))
    np.testing.assert_array_equal(data(wrapped[:, 1]), np.roll(data(keys), -1, 0))
    with pytest.raises(bj.StructureError, match="or wrap=True"):
        program(after=1)(keys)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_on_a_mesh(kind):
    types = (getattr(jax.sharding.AxisType, kind),)
    mesh = jax.make_mesh((2,), ("days",), axis_types=types)
    x = RNG.normal(size=(6, 3)).astype("float32")
    fn = jax.jit(lambda x: program(1, 1)(x))
    slope = jax.grad(lambda x: jnp.sum(fn(x) ** 3))
    expected = slope(x)
    with jax.set_mesh(mesh):
        assert fn(x).sharding.spec[0] == P("days")[0]
        np.testing.assert_array_equal(fn(x), around(x, 1, 1))
        assert_close(slope(x), expected)


# --- one line on top of it


def test_differences_lags_averages_and_convolutions():
    x = RNG.normal(size=30).astype("float32")
    kernel = np.asarray([1.0, 2.0, -1.0], "float32")

    @bj.program(days="x")
    def of_neighbours(x):
        around = lambda fn, **where: bj.map_fn(fn, bj.neighbours(x, **where))
        return {
            "diff": around(lambda v: v[1] - v[0], before=1, fill=np.nan)[1:],
            "roll": around(lambda v: v[0], before=3, wrap=True),
            "mean": around(jnp.mean, before=4, fill=jnp.nan)[4:],
            "convolve": around(lambda v: jnp.sum(v * kernel[::-1]), before=1, after=1),
            "median": around(jnp.median, before=2, after=2, wrap=True),
        }

    sliding = np.lib.stride_tricks.sliding_window_view
    expected = {
        "diff": np.diff(x),
        "roll": np.roll(x, 3),
        "mean": sliding(x, 5).mean(1),
        "convolve": np.convolve(x, kernel, "same"),
        "median": np.median(sliding(np.pad(x, 2, "wrap"), 5), 1),
    }
    assert_close(of_neighbours(x), expected)
    assert_close(bj.run(of_neighbours, x, options={"shard_size": 8}), expected)


# --- refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"before": -1}, "found before=-1, expected an int >= 0"),
        ({"after": 1.5}, "found after=1.5, expected an int >= 0"),
        ({"before": True}, "found before=True"),
        ({"before": 1, "fill": np.nan}, "found fill=nan of dtype float64"),
        ({"before": 1, "fill": 2**31}, "found fill=2147483648"),
        ({"before": 1, "fill": jax.random.key(0)}, "found fill=.*key"),
        ({"before": 1, "fill": np.zeros(3, "int32")}, r"found fill=.* and shape \(3,\)"),
        ({"before": 1, "fill": 2, "wrap": True}, "found both wrap=True and fill=2"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(bj.StructureError, match=f"neighbours: {message}"):
        bj.program(days="x")(lambda x: bj.neighbours(x, **arguments))(np.arange(5, dtype="int32"))


def test_more_than_a_shard_of_neighbours_is_an_error():
    x = np.arange(40.0, dtype="float32")
    message = "found before=9, after=0 and shards of 8 members.*Raise the option shard_size"
    with pytest.raises(bj.StagingError, match=message):
        bj.run(program(before=9), x, runner="local", options={"shard_size": 8})
    np.testing.assert_array_equal(program(before=9)(x), around(x, 9))
    np.testing.assert_array_equal(bj.run(program(before=50), x, runner="local"), around(x, 50))


def test_explain_names_the_operator():
    x = np.arange(40.0, dtype="float32")
    options = {"shard_size": 8}
    for of_size in options, None:
        facts = facts_of(bj.explain(program(1, 1), x, options=of_size))
        names = [step.functions for step in facts.steps if step.kind == "Map"]
        assert names == [["neighbours"]] * 2
    shifted = bj.program(days="x")(lambda x: bj.map_fn(jnp.subtract, (x, jnp.roll(2 * x, 1))))
    text = str(bj.explain(shifted, x, options=options))
    assert "beamjax.neighbours gives each member those beside it by passes" in text


def test_weights_are_refused():
    mean = bj.program(days="x")(lambda x: bj.reduce_mean(bj.neighbours(x, before=1)))
    with pytest.raises(bj.StructureError, match="not which members are beside it"):
        bj.reweight(mean)(jnp.ones(5), jnp.arange(5.0))


def test_members_that_may_be_dropped_are_gathered():
    x = np.arange(1.0, 21, dtype="float32")
    x[5] = -1
    changes = bj.program(days="x")(
        lambda x: bj.map_fn(lambda v: v[1] - v[0], bj.neighbours(bj.map_fn(jnp.log, x), before=1))
    )
    options = {"shard_size": 8, "on_nonfinite": "drop", "drop_limit": 0.5}
    assert facts_of(bj.explain(changes, x, options=options)).gathered_bytes > 0
    found = bj.run(changes, x, runner="local", options=options)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [5, 6])
