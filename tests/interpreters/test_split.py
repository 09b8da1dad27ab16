"""Passes over the members: how many there are, and what each reads, computes and returns."""

import itertools
import os
import re

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from apache_beam.testing.util import assert_that
from explained import facts_of
from helpers import assert_close, plan_of

import beamjax as bj

N = 11
HERE = os.path.abspath(__file__)
OPTIONS = {"shard_size": 8}
W = jnp.asarray([0.3, -0.2, 0.9])
X = jax.random.normal(jax.random.key(0), (N, 5, 3))
V = X[:, 0]
program = bj.program(clients=N)


def graph(fn, *args):
    """One letter for each piece of the plan, and the text of each."""
    text = str(bj.explain(fn, *args, stage="graph"))
    stages = re.split(r"\n(?=\S)", text)
    letters = {"map": "M", "server": "S", "gather": "G", "scatter": "C", "loop": "L", "branch": "B"}
    return "".join(letters[re.match(r"\w+", piece)[0]] for piece in stages), stages


def passes(fn, *args, **options):
    """The passes of the plan."""
    facts = facts_of(bj.explain(fn, *args, options={**OPTIONS, **options}))
    found = [step for step in facts.steps if step.kind == "Map"]
    assert facts.passes == len(found)
    return found


def check(fn, *args):
    found = bj.run(fn, *args, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(fn)(*args), rtol=2e-4, atol=2e-5)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


# --- programs: the letters of their stages, how many maps each piece holds, and of each pass how
# many values it reads along the members and makes

PROGRAMS = {}


def case(letters, maps, *sizes, args=(W, X)):
    def decorate(fn):
        PROGRAMS[fn.__name__] = program(fn), letters, maps, list(sizes), args
        return fn

    return decorate


@case("M", [1], (1, 0))
def all_reductions_of_one_depth(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    mean, low = bj.reduce_mean(y), bj.reduce_min(x)
    return mean, low, bj.reduce_max(y), jnp.sum(y, 0), y[:, 0].T @ y, bj.reduce_any(y > 1)


@case("M", [3], (1, 0))
def neighbouring_maps_are_fused(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    y = jnp.tanh(y * 2) + bj.map_fn(jnp.sin, y)
    return bj.reduce_sum(bj.map_fn(lambda a: a * 2, y))


@case("M", [1], (1, 0))
def values_that_nobody_reads(w, x):
    dead = bj.reduce_sum(bj.map_fn(lambda v: jnp.exp(v), x))
    bj.map_fn(lambda v: v + dead[0, 0], x)
    return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))


@case("MSM", [0, 0, 0], (1, 0), (1, 0))
def cheap_values_are_computed_again(w, x):
    y = x * 2 + 1
    mean = bj.reduce_mean(y)
    return bj.reduce_mean((y - mean[None]) ** 2)


@case("MM", [1, 1], (1, 1), (1, 0))
def maps_are_computed_once(w, x):
    y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
    mean = bj.reduce_mean(y)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))


@case("MM", [1, 2], (1, 0), (1, 0))
def values_are_made_in_the_pass_that_reads_them(w, x):
    early = bj.map_fn(lambda v: jnp.exp(v), x)  # Could be made in the first pass.
    mean = bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))
    return bj.reduce_sum(bj.map_fn(lambda v: v @ W + mean, early))


@case("MMMM", [1, 1, 1, 1], (1, 1), (1, 1), (1, 1), (1, 1))
def state_of_members_from_round_to_round(w, x):
    state = bj.map_fn(lambda v: v @ w, x)
    for _ in range(3):
        mean = bj.reduce_mean(state)
        state = bj.map_fn(lambda s, m=mean: jnp.sin(s - m), state)
    return state, bj.reduce_mean(state)


@case("MGS", [1, 0, 0], (1, 1))
def gathered_once(w, x):
    y = bj.map_fn(lambda v: v @ w, x)
    return y[3], jnp.sort(y, 0), y[:2]


@case("MGSCM", [0, 0, 0, 0, 1], (1, 1), (1, 1))
def scattered_once(w, x):
    order = jnp.sort(jnp.sum(x, (1, 2)))
    return bj.map_fn(lambda a: a + 1, order), bj.reduce_sum(order)


STATE = {"w": V, "m": jnp.arange(N)}


@case("MM", [1, 1], (2, 1), (0, 1), args=(STATE,))
def a_part_of_a_state_that_is_returned_unchanged(state):
    # The second pass makes `w` of a server value; `m` is what the first has made.
    state = bj.map_fn(lambda s: {"w": 2 * s["w"], "m": s["m"] + 1}, state)
    mean = bj.reduce_mean(state["w"])
    return mean, bj.map_fn(lambda s: {**s, "w": mean}, state)


@case("M", [1], (1, 0), args=(V, jnp.arange(N)))
def an_operand_that_nobody_needs(x, y):
    return bj.reduce_sum(bj.map_fn(lambda x, y: x + 1, (x, y)))


@case("M", [1], (1, 1), args=(V, jnp.arange(N)))
def a_result_that_nobody_needs(x, y):
    doubled, _ = bj.map_fn(lambda x, y: (2 * x, y + 1), (x, y))
    bj.map_fn(lambda v: v + 1, doubled)
    return doubled


@case("M", [2], (1, 2), args=(V,))
def a_value_that_is_returned_twice(x):
    doubled = bj.map_fn(lambda v: 2 * v, x)
    again, number = bj.map_fn(lambda v: (v, 1.0), doubled)
    return doubled, again, bj.map_fn(lambda v: v, again), number, bj.reduce_sum(again)


@pytest.mark.parametrize("name", PROGRAMS)
def test_pieces_of_programs(name):
    fn, letters, maps, sizes, args = PROGRAMS[name]
    found, texts = graph(fn, *args)
    steps = passes(fn, *args)
    assert (found, [text.count("bj_map") for text in texts]) == (letters, maps)
    assert [(len(step.placed), len(step.results)) for step in steps] == sizes
    check(fn, *args)
    if name == "all_reductions_of_one_depth":
        assert len(steps[0].reductions) == 6
    elif name == "maps_are_computed_once":
        assert steps[1].placed == steps[0].results
    elif name == "cheap_values_are_computed_again":
        assert [value.name for value in steps[1].placed] == ["arg1@clients"]


# --- rounds and gradients


@program
def one_round(w, x):
    return bj.reduce_mean(bj.map_fn(lambda v: loss(w, v), x))


def rounds(count):
    def fn(w, x, rate):
        for _ in range(count):
            w = w - rate * jax.grad(one_round)(w, x)
        return one_round(w, x)

    return fn


RATE = jnp.float32(0.1)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_rounds_and_their_gradients(count):
    fn = rounds(count)
    assert graph(fn, W, X, RATE)[0].count("M") == count + 1
    # Forward each round but the last, whose value nobody reads, then back through each.
    assert graph(jax.grad(fn), W, X, RATE)[0].count("M") == 2 * count + 1
    check(jax.value_and_grad(fn), W, X, RATE)


def test_derivatives_share_passes():
    assert graph(jax.value_and_grad(one_round), W, X)[0].count("M") == 1
    assert graph(jax.hessian(one_round), W, X)[0].count("M") == 1
    # Three forward, the last one with its gradient, and back through all rounds but the first.
    fn = jax.value_and_grad(rounds(3), argnums=2)
    assert graph(fn, W, X, RATE)[0].count("M") == 6
    check(fn, W, X, RATE)


@pytest.mark.timeout(60)  # Minutes, if cubic.
def test_many_rounds():
    assert graph(jax.grad(rounds(100), argnums=2), W, X, RATE)[0].count("M") == 200


def test_equal_rounds_share_a_body():
    @program
    def prog(w, x):
        for _ in range(6):
            w = w - 0.1 * bj.reduce_mean(bj.map_fn(lambda v, w=w: jnp.tanh(v @ w) * w, x[:, 0]))
        return w

    plan = plan_of(prog, W, X, **OPTIONS)
    assert (plan.passes(), len(plan.bodies)) == (6, 2)
    assert len({step.name for step in plan.steps}) == len(plan.steps) == 12
    check(prog, W, X)


# --- what steps report


@program
def many(w, x):
    y = bj.map_fn(lambda v: v * w, x)
    return {
        "sum": bj.reduce_sum(y),
        "mean": bj.reduce_mean(y),
        "max": bj.reduce_max(y),
        "count": bj.reduce_sum(y > 0),
        "any": bj.reduce_any(y > 0),
        "gram": y.T @ y,
        "half": bj.reduce_sum(y.astype("bfloat16")),
        "placed": y,
    }


def test_reductions_of_a_pass_share_accumulators():
    (step,) = plan_of(many, W, V, **OPTIONS).steps
    assert (step.name, step.placement) == ("map_clients_0", "clients")
    buffers = {(buffer.kind, buffer.dtype): buffer for buffer in step.buffers}
    assert set(buffers) == {
        ("sum", "float32"),
        ("max", "float32"),
        ("sum", "int32"),
        ("any", "bool"),
    }
    floats = buffers["sum", "float32"]
    assert sorted((r.reducer, r.dtype, r.size) for r in floats.reductions) == [
        ("mean", "float32", 3), ("sum", "bfloat16", 3),
        ("sum", "float32", 3), ("sum", "float32", 9),
    ]  # fmt: skip
    for buffer in step.buffers:
        offsets = [(r.offset, r.size) for r in buffer.reductions]
        assert offsets[0][0] == 0
        assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(offsets))
        assert sum(offsets[-1]) == buffer.size
    check(many, W, V)


def test_reasons_functions_and_lines():
    def weigh(v):
        return jnp.sin(v)

    @program
    def prog(x):
        y = bj.map_fn(weigh, x)
        ordered = jnp.sort(y, 0)
        far = bj.map_fn(lambda v: y @ v, x)
        return ordered, bj.reduce_sum(far), bj.map_fn(jnp.cos, jnp.sort(y, 0))

    steps = facts_of(bj.explain(prog, V, options=OPTIONS)).steps
    first = prog.__wrapped__.__code__.co_firstlineno
    lines = [f"{HERE}:{first + k} (" for k in range(6)]
    (gathered,) = [step for step in steps if step.kind == "Gather"]
    reasons = r"(sort|cumsum) mixes members( \(.*\))?|the body .* closes over a placed value"
    assert re.fullmatch(reasons, gathered.reason)
    assert gathered.lines[0].startswith(tuple(lines[3:]))
    (scattered,) = [step for step in steps if step.kind == "Scatter"]
    assert scattered.reason == "map_fn reads it along the members"
    assert scattered.lines[0].startswith(lines[5])
    assert steps[0].functions == ["weigh"]
    assert steps[0].lines[0].startswith(lines[2])


# --- the limit of gathers


def sorted_members(x):
    return jnp.sort(bj.map_fn(jnp.sin, x), axis=0)


def test_gathers_are_refused_past_the_limit():
    prog, nbytes = program(sorted_members), N * 3 * 4
    found = bj.run(prog, V, runner="local", options={"gather_limit": nbytes})
    np.testing.assert_allclose(found, jax.jit(prog)(V), rtol=1e-6)
    with pytest.raises(bj.StagingError) as error:
        bj.run(prog, V, runner="local", options={"gather_limit": nbytes - 1})
    line = sorted_members.__code__.co_firstlineno + 1
    assert str(error.value).startswith(f"{HERE}:{line} (sorted_members): sort mixes members (")
    for part in (f"{nbytes} bytes of float32[3]@clients ({N} members)", f"allows {nbytes - 1}"):
        assert part in str(error.value)


# --- what maps return unchanged


@pytest.mark.parametrize("given", ["memory", "pipeline"])
def test_inputs_that_are_returned_unchanged_are_placed_results(given):
    """In a pipeline, a result is placed or not by what the program says, whatever is pruned."""
    both = program(lambda x, y: bj.map_fn(lambda x, y: (x, y + 1), (x, y)))
    x, y = np.asarray(V), np.arange(N, dtype=np.int32)

    def check_first(elements):
        assert sorted(index for index, _ in elements) == list(range(N))
        for index, member in elements:
            np.testing.assert_array_equal(member, x[index])

    spec = jax.ShapeDtypeStruct(x.shape, x.dtype)
    members = [(i, y[i] if given == "memory" else (x[i], y[i])) for i in range(N)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        transform = bj.transform(
            both, x if given == "memory" else spec, jax.ShapeDtypeStruct(y.shape, y.dtype)
        )
        first, _ = pipeline | beam.Create(members) | transform
        assert_that(first, check_first)
