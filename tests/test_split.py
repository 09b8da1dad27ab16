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
from helpers import assert_close, plan_of
from streams import stream

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
    pieces = re.split(r"\n(?=\S)", text)
    letters = {"map": "M", "server": "S", "gather": "G", "scatter": "C", "loop": "L", "branch": "B"}
    return "".join(letters[re.match(r"\w+", piece)[0]] for piece in pieces), pieces


def shape(fn, *args):
    return graph(fn, *args)[0]


def passes(fn, *args, **options):
    """The passes of the plan."""
    facts = bj.explain(fn, *args, options={**OPTIONS, **options}).facts
    found = [step for step in facts.steps if step.kind == "Map"]
    assert facts.passes == len(found)
    return found


def sizes(fn, *args):
    """Of each pass, how many placed values it reads, and how many it makes."""
    return [(len(step.placed), len(step.results)) for step in passes(fn, *args)]


def check(fn, *args):
    found = bj.run(fn, *args, runner="local", options=OPTIONS)
    assert_close(found, jax.jit(fn)(*args), rtol=2e-4, atol=2e-5)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


# --- what is one pass


def test_all_reductions_of_one_depth_are_one_pass():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        mean, low = bj.reduce_mean(y), bj.reduce_min(x)
        return mean, low, bj.reduce_max(y), jnp.sum(y, 0), y[:, 0].T @ y, bj.reduce_any(y > 1)

    (step,) = passes(prog, W, X)
    assert (len(step.reductions), step.results) == (6, ())
    check(prog, W, X)


def test_neighbouring_maps_are_fused():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        y = jnp.tanh(y * 2) + bj.map_fn(jnp.sin, y)
        return bj.reduce_sum(bj.map_fn(lambda a: a * 2, y))

    letters, (text,) = graph(prog, W, X)
    assert (letters, text.count("bj_map")) == ("M", 3)
    check(prog, W, X)


def test_values_that_nobody_reads_are_not_computed():
    @program
    def prog(w, x):
        dead = bj.reduce_sum(bj.map_fn(lambda v: jnp.exp(v), x))
        bj.map_fn(lambda v: v + dead[0, 0], x)
        return bj.reduce_sum(bj.map_fn(lambda v: v @ w, x))

    letters, (text,) = graph(prog, W, X)
    assert (letters, text.count("bj_")) == ("M", 2)
    check(prog, W, X)


def test_two_placements_have_a_pass_each():
    @bj.program(a=N, b=N)
    def prog(x, y):
        of_a = bj.reduce_sum(bj.map_fn(jnp.sin, x, placement="a"), placement="a")
        of_b = bj.reduce_sum(bj.map_fn(jnp.cos, y, placement="b"), placement="b")
        return of_a + of_b

    assert sorted(step.placement for step in passes(prog, X, X)) == ["a", "b"]
    assert shape(prog, X, X) == "MMS"
    check(prog, X, X)


# --- what goes from pass to pass


def test_cheap_values_are_computed_again():
    @program
    def prog(w, x):
        y = x * 2 + 1
        mean = bj.reduce_mean(y)
        return bj.reduce_mean((y - mean[None]) ** 2)

    first, second = passes(prog, W, X)
    assert (first.results, [value.name for value in second.placed]) == ((), ["arg1@clients"])
    check(prog, W, X)


def test_maps_are_computed_once():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: jnp.tanh(v @ w), x)
        mean = bj.reduce_mean(y)
        return bj.reduce_mean(bj.map_fn(lambda v: (v - mean) ** 2, y))

    first, second = passes(prog, W, X)
    assert len(first.results) == 1
    assert second.placed == first.results
    check(prog, W, X)


def test_values_are_made_in_the_pass_that_reads_them():
    @program
    def prog(w, x):
        early = bj.map_fn(lambda v: jnp.exp(v), x)  # Could be made in the first pass.
        mean = bj.reduce_mean(bj.map_fn(lambda v: v @ w, x))
        return bj.reduce_sum(bj.map_fn(lambda v: v @ W + mean, early))

    _, texts = graph(prog, W, X)
    assert [text.count("bj_map") for text in texts] == [1, 2]
    assert sizes(prog, W, X) == [(1, 0), (1, 0)]
    check(prog, W, X)


def test_state_of_members_from_round_to_round():
    @program
    def prog(w, x):
        state = bj.map_fn(lambda v: v @ w, x)
        for _ in range(3):
            mean = bj.reduce_mean(state)
            state = bj.map_fn(lambda s, m=mean: jnp.sin(s - m), state)
        return state, bj.reduce_mean(state)

    assert [results for _, results in sizes(prog, W, X)] == [1, 1, 1, 1]
    check(prog, W, X)


def test_values_are_gathered_and_scattered_once():
    @program
    def gathered(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        return y[3], jnp.sort(y, 0), y[:2]

    @program
    def scattered(w, x):
        order = jnp.sort(jnp.sum(x, (1, 2)))
        return bj.map_fn(lambda a: a + 1, order), bj.reduce_sum(order)

    assert shape(gathered, W, X) == "MGS"
    assert shape(scattered, W, X).count("C") == 1
    check(gathered, W, X)
    check(scattered, W, X)


def test_what_a_step_reads_is_made_before():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v @ w, x)
        total = bj.reduce_sum(y)
        z = bj.map_fn(lambda v: v * total, y)
        return jnp.cumsum(z, 0), bj.map_fn(jnp.sin, jnp.sort(z, 0)), total

    facts = bj.explain(prog, W, X).facts
    known = {value for fact in facts.inputs for value in fact.values}
    for step in facts.steps:
        assert {value.name for value in (*step.served, *step.placed)} <= known
        known |= {value.name for value in step.results}
        known |= {reduction.result.name for reduction in step.reductions}
    assert {output.value for output in facts.outputs} <= known
    check(prog, W, X)


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
    assert shape(fn, W, X, RATE).count("M") == count + 1
    # Forward each round but the last, whose value nobody reads, then back through each.
    assert shape(jax.grad(fn), W, X, RATE).count("M") == 2 * count + 1
    check(jax.value_and_grad(fn), W, X, RATE)


def test_derivatives_share_passes():
    assert shape(jax.value_and_grad(one_round), W, X).count("M") == 1
    assert shape(jax.hessian(one_round), W, X).count("M") == 1
    # Three forward, the last one with its gradient, and back through all rounds but the first.
    fn = jax.value_and_grad(rounds(3), argnums=2)
    assert shape(fn, W, X, RATE).count("M") == 6
    check(fn, W, X, RATE)


@pytest.mark.timeout(60)  # Minutes, if cubic.
def test_many_rounds():
    assert shape(jax.grad(rounds(100), argnums=2), W, X, RATE).count("M") == 200


def test_equal_rounds_share_a_body():
    plan = plan_of(rounds(6), W, X, RATE, **OPTIONS)
    assert plan.passes() == 7
    assert len({step.name for step in plan.steps}) == len(plan.steps)
    # Six rounds, the last pass, and one update of the weights.
    assert len({step.body for step in plan.steps}) == 3
    assert len(plan.bodies) == 3


# --- what steps tell


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
    lanes = {(lane.kind, lane.dtype): lane for lane in step.lanes}
    assert set(lanes) == {("sum", "float32"), ("max", "float32"), ("sum", "int32"), ("any", "bool")}
    floats = lanes["sum", "float32"]
    assert sorted((r.reducer, r.dtype, r.size) for r in floats.reductions) == [
        ("mean", "float32", 3), ("sum", "bfloat16", 3),
        ("sum", "float32", 3), ("sum", "float32", 9),
    ]  # fmt: skip
    for lane in step.lanes:
        offsets = [(r.offset, r.size) for r in lane.reductions]
        assert offsets[0][0] == 0
        assert all(a + b == c for (a, b), (c, _) in itertools.pairwise(offsets))
        assert sum(offsets[-1]) == lane.size
    check(many, W, V)


def test_types_of_outputs():
    facts = bj.explain(many, W, V, options=OPTIONS).facts
    assert {fact.path: fact.type for fact in facts.outputs} == {
        "result['any']": "bool[3]", "result['count']": "int32[3]", "result['gram']": "float32[3,3]",
        "result['half']": "bfloat16[3]", "result['max']": "float32[3]",
        "result['mean']": "float32[3]", "result['placed']": "float32[3]@clients",
        "result['sum']": "float32[3]",
    }  # fmt: skip
    (placement,) = facts.placements
    assert (placement.members, placement.shard_size, placement.shards) == (N, 8, 2)


def test_inputs_are_read_by_shards_whole_or_not():
    @program
    def prog(a, b, c, unused):
        return bj.reduce_sum(bj.map_fn(lambda v, u: v * a + u, (b, c))) + c[3]

    first, second, third, last = bj.explain(prog, W, V, V, V).facts.inputs
    assert [first.values, second.values, last.values] == [("arg0",), ("arg1@clients",), ()]
    assert "arg2@clients" in third.values
    check(prog, W, V, V, V)


def test_outputs_of_all_kinds():
    @program
    def prog(w, x):
        y = bj.map_fn(lambda v: v * w, x)
        return w, 3.0, np.arange(2), jnp.swapaxes(y, 0, 1), bj.reduce_sum(y)

    plan = plan_of(prog, W, V, **OPTIONS)
    passed, literal, _, moved, total = plan.outputs
    assert (passed.input, literal.constant) == (0, np.float32(3.0))
    assert (moved.axis, plan.values[moved.value].placement) == (1, "clients")
    assert plan.values[total.value].placement is None
    check(prog, W, V)


def test_reasons_functions_and_lines():
    def weigh(v):
        return jnp.sin(v)

    @program
    def prog(x):
        y = bj.map_fn(weigh, x)
        ordered = jnp.sort(y, 0)
        far = bj.map_fn(lambda v: y @ v, x)
        return ordered, bj.reduce_sum(far), bj.map_fn(jnp.cos, jnp.cumsum(y, 0))

    steps = bj.explain(prog, V, options=OPTIONS).facts.steps
    first = prog.__wrapped__.__code__.co_firstlineno
    lines = [f"{HERE}:{first + k} (" for k in range(6)]
    (gathered,) = [step for step in steps if step.kind == "Gather"]
    reasons = "(sort|cumsum) mixes members|the body .* closes over a placed value"
    assert re.fullmatch(reasons, gathered.reason)
    assert gathered.lines[0].startswith(tuple(lines[3:]))
    (scattered,) = [step for step in steps if step.kind == "Scatter"]
    assert scattered.reason == "bj_map reads it along the members"
    assert scattered.lines[0].startswith(lines[5])
    assert steps[0].functions == ("weigh",)
    assert steps[0].lines[0].startswith(lines[2])


def test_a_body_for_each_platform():
    (step,) = passes(many, W, V, platforms=("cpu", "cuda"))
    assert set(step.executables) == {"cpu", "cuda"}


def test_keys_travel_as_data():
    prog = program(lambda k: bj.map_fn(lambda k: jax.random.split(k, 2), k))
    keys = jax.random.split(jax.random.key(0), N)
    plan = plan_of(prog, keys, **OPTIONS)
    value = plan.values[plan.outputs[0].value]
    assert (value.shape, value.dtype, value.key) == ((2, 2), "uint32", "threefry2x32")
    check(prog, keys)


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
    assert str(error.value).startswith(f"{HERE}:{line} (sorted_members): sort mixes members, so ")
    for part in (f"{nbytes} bytes of float32[3]@clients ({N} members)", f"allows {nbytes - 1}"):
        assert part in str(error.value)


# --- what maps read and return unchanged


def test_a_part_of_a_state_that_is_returned_unchanged_is_not_read_again():
    @program
    def replaced(state):
        state = bj.map_fn(lambda s: {"w": 2 * s["w"], "m": s["m"] + 1}, state)
        mean = bj.reduce_mean(state["w"])
        return mean, bj.map_fn(lambda s: {**s, "w": mean}, state)

    state = {"w": V, "m": jnp.arange(N)}
    # The second pass makes `w` of a server value; `m` is what the first has made.
    assert sizes(replaced, state) == [(2, 1), (0, 1)]
    check(replaced, state)


def test_operands_and_results_that_nobody_needs():
    @program
    def operand(x, y):
        return bj.reduce_sum(bj.map_fn(lambda x, y: x + 1, (x, y)))

    @program
    def result(x, y):
        doubled, _ = bj.map_fn(lambda x, y: (2 * x, y + 1), (x, y))
        bj.map_fn(lambda v: v + 1, doubled)
        return doubled

    @program
    def twice(x, y):
        doubled = bj.map_fn(lambda v: 2 * v, x)
        again, number = bj.map_fn(lambda v: (v, 1.0), doubled)
        return doubled, again, bj.map_fn(lambda v: v, again), number, bj.reduce_sum(again)

    for prog, expected in {operand: [(1, 0)], result: [(1, 1)], twice: [(1, 2)]}.items():
        assert sizes(prog, V, jnp.arange(N)) == expected
        check(prog, V, jnp.arange(N))


def test_only_what_the_body_does_not_touch_is_left_out():
    @program
    def swapped(w, x, y):
        a = bj.map_fn(lambda v: v + 1, x)
        both = bj.map_fn(
            lambda a, b: (b, a, a[0], jax.lax.cond(b > 2, lambda: a, lambda: -a)), (a, y)
        )
        return both, bj.map_fn(lambda v: v, x + 1), bj.map_fn(lambda v: v, bj.broadcast(w[0]))

    @program
    def value(w, x):
        same, scaled = bj.map_fn(lambda v: (v, v @ w), x)
        return bj.reduce_mean(bj.map_fn(lambda k, s: jnp.sum(jnp.tanh(k * s)), (same, scaled)))

    check(swapped, W, V, jnp.arange(N))
    check(jax.grad(value, argnums=(0, 1)), W, V)


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


# --- streams of unknown length, in one pass or after they are counted

opened = bj.program(placements={"clients": None})


def sums(x):
    return bj.reduce_mean(x) * x.shape[0]


def variance(x):
    center = bj.reduce_mean(x)
    return bj.reduce_mean(bj.map_fn(lambda v: (v - center) ** 2, x))


def descent(x):
    step = lambda w, r: (w - r * bj.reduce_sum(bj.map_fn(lambda v: v * w, x)), None)
    return jax.lax.scan(step, jnp.ones(3), jnp.ones(2))[0]


def scaled(x):
    n = x.shape[0]
    return bj.reduce_sum(bj.map_fn(lambda v: jnp.sin(v / n), x))


def as_it_is(x):
    return bj.reduce_sum(x), x


NOTES = {
    sums: "in the one pass of the plan",
    variance: "2 passes read them: map_clients_0, map_clients_1",
    descent: "rounds around placed operators",
    scaled: "map_clients_0 reads their number",
    as_it_is: "as it is",
}


@pytest.mark.parametrize("fn", NOTES, ids=lambda fn: fn.__name__)
def test_streams_are_read_once_where_one_pass_is_enough(fn):
    x = np.arange(60, dtype=np.float32).reshape(20, 3)
    prog = opened(fn)
    assert NOTES[fn] in "".join(bj.explain(prog, stream(x)).facts.notes)
    assert_close(bj.run(prog, stream(x), runner="local", options=OPTIONS), jax.jit(prog)(x), 1e-4)


def test_streams_of_two_placements_are_counted():
    @bj.program(placements={"a": None, "b": None})
    def prog(x, y):
        return bj.reduce_sum(x, placement="a") + bj.reduce_sum(y, placement="b")

    notes = bj.explain(prog, stream(np.asarray(V)), stream(np.asarray(V))).facts.notes
    assert "several placements" in "".join(notes)
